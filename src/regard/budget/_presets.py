"""Known models by name: gpt2, bert-base, llama-3-8b … The command line, the lab and Python use this one list.

Only models whose parameters the planner counts exactly are here. `Preset.parameters` is the published number, and a
test compares it with the planner's count. Three kinds of sources publish such numbers:

- The page of a model on Hugging Face shows the number of elements in its weight files. `Preset.hub` names the page.
- torchvision lists ``num_params`` of its own weights.
- A paper. "Attention is all you need" rounds to 65 million, so `transformer-base` has no exact number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from regard._config_json import Config
from regard._errors import RegardError, RegardTypeError
from regard.budget._hf_configs import model_from_config
from regard.budget._model import Model
from regard.budget._models_from_fields import build_model

HUGGING_FACE = "the model's page on Hugging Face"
TORCHVISION = "num_params in torchvision/models/vision_transformer.py"
THEORY = "4·D² for D = 512, without biases"


@dataclass(frozen=True)
class Preset:
    """A known model.

    - `name`, `title`: the name to type, and the name to print.
    - `kind`, `fields`: arguments of `build_model`. If they cannot describe the model, `config` has its config.json
      instead, and `kind` is None.
    - `tokens`: the length it was trained on; None for an image model, whose length follows from its sizes.
    - `parameters`: the published number of parameters; None if only a rounded number is published.
    - `source`: who publishes the number. `hub`: the page on Hugging Face, or "".

    >>> regard.budget.find_preset("gpt2").parameters
    124439808
    """

    name: str
    title: str
    kind: str | None
    fields: Mapping[str, Any] = field(hash=False)
    tokens: int | None
    parameters: int | None
    source: str
    hub: str = ""
    config: Mapping[str, Any] | None = field(default=None, hash=False)

    def build(self, changes: Mapping[str, Any] | None = None) -> Model:
        """Build the model; `changes` replaces fields, and is shown in the title."""
        if self.kind is None:
            if changes:
                raise RegardError(f"{self.name} takes no fields, got {', '.join(changes)}; it comes from a config.json")
            model = model_from_config(Config(self.config or {}))
        else:
            model = build_model(self.kind, {**self.fields, **(changes or {})})

        # A changed model may have fewer learned positions than the length of the preset.
        tokens = self.tokens
        if tokens is not None and model.max_tokens is not None:
            tokens = min(tokens, int(model.max_tokens))
        # A model that nobody published has a length to start with, but no length that it was made for.
        context_length = tokens if self.hub else None
        title = self.changed_title(changes or {})
        return replace(model, title=title, default_tokens=tokens, context_length=context_length)

    def changed_title(self, changes: Mapping[str, Any]) -> str:
        """The title of the model with these changes of its fields.

        >>> regard.budget.find_preset("gpt2").changed_title({"layers": 6})
        'GPT-2 with layers=6'
        """
        return title_with_fields(self.title, changes)


def title_with_fields(title: str, fields: Mapping[str, Any]) -> str:
    """A title, and the fields in which the model differs from others of this title."""
    if not fields:
        return title
    return f"{title} with " + ", ".join(f"{name}={_field_text(value)}" for name, value in fields.items())


def _field_text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _gpt2(name: str, title: str, sizes: tuple[int, int, int], parameters: int) -> Preset:
    d, heads, layers = sizes
    fields: dict[str, Any] = {"d": d, "heads": heads, "layers": layers, "vocab": 50257, "qkv_bias": True}
    fields |= {"position": "learned", "reach": 1024, "scaled": False, "dropout": True}
    return Preset(name, title, "decoder", fields, 1024, parameters, HUGGING_FACE, f"openai-community/{name}")


def _llama(name: str, title: str, tokens: int, parameters: int, hub: str, sizes: dict[str, Any]) -> Preset:
    """A decoder with rotary positions, RMSNorm, a gated feed-forward network and no biases."""
    fields = {**sizes, "bias": False, "gated": True, "norm": "rms", "position": "rotary", "scaled": False}
    return Preset(name, title, "decoder", {"tied": False, **fields}, tokens, parameters, HUGGING_FACE, hub)


def _t5(name: str, title: str, parameters: int, **sizes: Any) -> Preset:
    fields = {**sizes, "d_key": 64, "vocab": 32128, "bias": False, "norm": "rms", "position": "t5", "reach": 32}
    fields |= {"scaled": False, "dropout": True}
    hub = f"google-t5/{name}"
    return Preset(name, title, "encoder-decoder", fields, 512, parameters, HUGGING_FACE, hub)


def _bert(name: str, title: str, hub: str, tokens: int, parameters: int, config: dict[str, Any]) -> Preset:
    # Token types, the norm after the embedding and the pooler have no fields, so these models are configs.
    return Preset(name, title, None, {}, tokens, parameters, HUGGING_FACE, hub, config)


def _bert_config(d: int, heads: int, layers: int, hidden: int) -> dict[str, Any]:
    return {
        "model_type": "bert",
        "architectures": ["BertModel"],
        "hidden_size": d,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "intermediate_size": hidden,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "vocab_size": 30522,
    }


_ROBERTA = {
    "model_type": "roberta",
    "architectures": ["RobertaModel"],
    "hidden_size": 768,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
    "pad_token_id": 1,
    "vocab_size": 50265,
}
_DISTILBERT = {
    "model_type": "distilbert",
    "architectures": ["DistilBertModel"],
    "dim": 768,
    "n_heads": 12,
    "n_layers": 6,
    "hidden_dim": 3072,
    "max_position_embeddings": 512,
    "vocab_size": 30522,
}
_LLAMA_2 = {"vocab": 32000}
_LLAMA_3 = {"kv_heads": 8, "vocab": 128256}
_TRANSFORMER_BASE = {
    **{"d": 512, "heads": 8, "layers": 6, "vocab": 37000, "order": "post", "position": "sinusoidal"},
    **{"scaled": True, "dropout": True},
}

# In the order in which the lists show them.
_PRESETS = (
    Preset(
        "transformer-base-attention",
        "Transformer base: attention",
        "attention",
        {"d": 512, "heads": 8, "bias": False},
        512,
        1_048_576,
        THEORY,
    ),
    Preset(
        "transformer-base",
        "Transformer base",
        "encoder-decoder",
        _TRANSFORMER_BASE,
        512,
        None,
        "the paper rounds to 65 million, and its vocabulary to 37,000",
    ),
    _bert("bert-base", "BERT-base", "google-bert/bert-base-uncased", 512, 109_482_240, _bert_config(768, 12, 12, 3072)),
    _bert(
        "bert-large", "BERT-large", "google-bert/bert-large-uncased", 512, 335_141_888, _bert_config(1024, 16, 24, 4096)
    ),
    _bert("roberta-base", "RoBERTa-base", "FacebookAI/roberta-base", 512, 124_645_632, _ROBERTA),
    _bert("distilbert-base", "DistilBERT-base", "distilbert/distilbert-base-uncased", 512, 66_362_880, _DISTILBERT),
    _bert(
        "minilm-l6",
        "MiniLM-L6",
        "sentence-transformers/all-MiniLM-L6-v2",
        256,
        22_713_216,
        _bert_config(384, 12, 6, 1536),
    ),
    _gpt2("gpt2", "GPT-2", (768, 12, 12), 124_439_808),
    _gpt2("gpt2-medium", "GPT-2 medium", (1024, 16, 24), 354_823_168),
    _gpt2("gpt2-large", "GPT-2 large", (1280, 20, 36), 774_030_080),
    _gpt2("gpt2-xl", "GPT-2 XL", (1600, 25, 48), 1_557_611_200),
    _llama(
        "llama-2-7b",
        "Llama 2 7B",
        4096,
        6_738_415_616,
        "meta-llama/Llama-2-7b-hf",
        {"d": 4096, "heads": 32, "layers": 32, "hidden": 11008, **_LLAMA_2},
    ),
    _llama(
        "llama-2-13b",
        "Llama 2 13B",
        4096,
        13_015_864_320,
        "meta-llama/Llama-2-13b-hf",
        {"d": 5120, "heads": 40, "layers": 40, "hidden": 13824, **_LLAMA_2},
    ),
    _llama(
        "llama-2-70b",
        "Llama 2 70B",
        4096,
        68_976_648_192,
        "meta-llama/Llama-2-70b-hf",
        {"d": 8192, "heads": 64, "kv_heads": 8, "layers": 80, "hidden": 28672, **_LLAMA_2},
    ),
    _llama(
        "llama-3-8b",
        "Llama 3 8B",
        8192,
        8_030_261_248,
        "meta-llama/Meta-Llama-3-8B",
        {"d": 4096, "heads": 32, "layers": 32, "hidden": 14336, **_LLAMA_3},
    ),
    _llama(
        "llama-3-70b",
        "Llama 3 70B",
        8192,
        70_553_706_496,
        "meta-llama/Meta-Llama-3-70B",
        {"d": 8192, "heads": 64, "layers": 80, "hidden": 28672, **_LLAMA_3},
    ),
    _llama(
        "mistral-7b",
        "Mistral 7B",
        8192,
        7_241_732_096,
        "mistralai/Mistral-7B-v0.1",
        {"d": 4096, "heads": 32, "kv_heads": 8, "layers": 32, "hidden": 14336, "vocab": 32000, "window": 4096},
    ),
    _llama(
        "qwen2-7b",
        "Qwen2 7B",
        32768,
        7_615_616_512,
        "Qwen/Qwen2-7B",
        {"d": 3584, "heads": 28, "kv_heads": 4, "layers": 28, "hidden": 18944, "vocab": 152064, "qkv_bias": True},
    ),
    _llama(
        "smollm2-135m",
        "SmolLM2 135M",
        8192,
        134_515_008,
        "HuggingFaceTB/SmolLM2-135M",
        {"d": 576, "heads": 9, "kv_heads": 3, "layers": 30, "hidden": 1536, "vocab": 49152, "tied": True},
    ),
    _t5("t5-small", "T5 small", 60_506_624, d=512, heads=8, layers=6, hidden=2048),
    _t5("t5-base", "T5 base", 222_903_552, d=768, heads=12, layers=12, hidden=3072),
    Preset(
        "vit-b-16",
        "ViT-B/16",
        "vit",
        {"image": 224, "patch": 16, "d": 768, "heads": 12, "layers": 12, "classes": 1000},
        None,
        86_567_656,
        TORCHVISION,
    ),
    Preset(
        "vit-l-16",
        "ViT-L/16",
        "vit",
        {"image": 224, "patch": 16, "d": 1024, "heads": 16, "layers": 24, "classes": 1000},
        None,
        304_326_632,
        TORCHVISION,
    ),
)
PRESETS: dict[str, Preset] = {each.name: each for each in _PRESETS}


def presets() -> tuple[str, ...]:
    """The names that `preset` and `find_preset` know.

    >>> presets()[7:9]
    ('gpt2', 'gpt2-medium')
    """
    return tuple(PRESETS)


def preset(name: str) -> Model:
    """Build a known model by its name, for `plan` and `compare`.

    >>> preset("gpt2").parameters
    124439808
    >>> regard.budget.plan("Llama-3-8B", tokens=100).parameters  # case, spaces and dashes do not matter
    8030261248
    """
    return find_preset(name).build()


def find_preset(name: str) -> Preset:
    """Find a preset by its name, its title or its name on Hugging Face; case, spaces and dashes do not matter.

    >>> find_preset("openai-community/gpt2").tokens
    1024
    """
    if not isinstance(name, str):
        raise RegardTypeError(f"name must be the name of a preset, such as gpt2, got {type(name).__name__}")
    match = match_preset(name)
    if match is not None:
        return match
    if name and Path(name).exists():
        raise RegardError(f"unknown model {name!r}; for a file or a folder call regard.budget.from_config({name!r})")
    close = close_presets(name)
    if close:
        raise RegardError(f"unknown model {name!r}; did you mean {', '.join(close)}?")
    raise RegardError(f"unknown model {name!r}; known are {', '.join(PRESETS)}")


def match_preset(name: str) -> Preset | None:
    """Return the preset of this name, or None."""
    return _names().get(_letters(name))


def close_presets(name: str) -> list[str]:
    """Return up to four names of presets that begin like this one or are spelled similarly."""
    known = _names()
    typed = _letters(name)
    matches = [known[key].name for key in known if len(typed) > 1 and key.startswith(typed)]
    matches += [known[key].name for key in get_close_matches(typed, known, n=4, cutoff=0.6)]
    return list(dict.fromkeys(matches))[:4]


def _names() -> dict[str, Preset]:
    """All presets by their name, title, and name on Hugging Face with and without its owner."""
    names: dict[str, Preset] = {}
    for each in _PRESETS:
        for name in (each.name, each.title, each.hub, each.hub.rpartition("/")[2]):
            if name:
                names.setdefault(_letters(name), each)
    return names


def _letters(name: str) -> str:
    """Return the letters and digits of a name, in lower case."""
    return "".join(re.findall(r"[a-z0-9]+", name.lower()))
