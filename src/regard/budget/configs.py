"""Models from a Hugging Face ``config.json``, the file alone: BERT, GPT-2, Llama, T5, ViT and their kin."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from regard.budget.model import Model, Placed
from regard.budget.parts import Linear, Norm, Part, Table
from regard.budget.spec import Options, block, decoder, encoder, encoder_decoder, vision_transformer
from regard.config import Config, read_json

__all__ = ["from_config", "read"]

# How the classes of each family begin.
NAMES = {"bert": "Bert", "roberta": "Roberta", "distilbert": "DistilBert", "gpt2": "GPT2", "t5": "T5", "vit": "ViT"} | {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
}


def from_config(given: str | os.PathLike[str] | Mapping[str, Any]) -> Model:
    """The model that a ``config.json``, the one in a folder, or its entries describe; weights are not looked at.

    >>> sizes = {"vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024}
    >>> from_config({"model_type": "gpt2", **sizes}).parameters
    124439808
    >>> from_config(regard.models.bundled()).parameters  # a folder
    735616
    """
    if isinstance(given, Mapping):
        return read(Config(given))
    file = Path(given)
    file = file / "config.json" if file.is_dir() else file
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist; give a config.json, or a folder that holds one")
    return read(Config(read_json(file)))


def read(config: Config) -> Model:
    """The model that these entries describe."""
    kind = config.kind
    if kind not in FAMILIES:
        raise ValueError(f"config.json: model_type is {kind!r}; known are {', '.join(FAMILIES)}")
    return FAMILIES[kind](config)


def _one(name: str, part: Part, after: bool = False) -> Placed:
    """A part that reads the first token alone, of all tokens or ``after`` another one that did."""
    return Placed(name, part, rows="one", keys="one" if after else "n")


def _classes(config: Config) -> int:
    return len(config.part("id2label")) or config.whole("num_labels", 2)


def _bert(config: Config) -> Model:
    kind = config.kind
    if config.name("position_embedding_type", "absolute") != "absolute":
        raise ValueError(f"config.json: position_embedding_type is {config['position_embedding_type']}; only absolute")
    for entry in ("is_decoder", "add_cross_attention"):
        config.refuse(entry, "these models are read as encoders")
    distil = kind == "distilbert"
    d = config.whole("dim" if distil else "hidden_size")
    vocab = config.whole("vocab_size")
    model = encoder(
        d,
        config.whole("n_heads" if distil else "num_attention_heads"),
        config.layers("n_layers" if distil else "num_hidden_layers"),
        hidden=config.whole("hidden_dim" if distil else "intermediate_size"),
        vocab=vocab,
        scaled=False,
        position="learned",
        reach=config.whole("max_position_embeddings"),
        qkv_bias=True,
        order="post",
        dropout=config.real("dropout" if distil else "hidden_dropout_prob", 0.1) > 0,
    )
    (stack,) = model.stacks
    types = () if distil else (Placed("types", Table("types", (config.whole("type_vocab_size", 2), d), d)),)
    before = (*stack.before, *types, Placed("embedding norm", Norm(d)))
    tops, width = _bert_top(config, d, vocab)
    # RoBERTa counts positions from the padding's id on.
    reach = config.whole("max_position_embeddings")
    longest = reach - config.whole("pad_token_id", 1, least=0) - 1 if kind == "roberta" else reach
    if longest < 1:
        raise ValueError(f"config.json: max_position_embeddings is {reach}; RoBERTa uses those after its pad_token_id")
    stacks = (replace(stack, before=before, after=tops),)
    return replace(model, title=_title(config, "Model"), stacks=stacks, vocab=width, longest=longest)


def _bert_top(config: Config, d: int, vocab: int) -> tuple[tuple[Placed, ...], int | None]:
    """What stands on top of the encoder, and the width of the logits."""
    distil = config.kind == "distilbert"
    pooler = _one("pooler", Linear(d, d))
    masked = (
        Placed("head: linear", Linear(d, d)),
        Placed("head: norm", Norm(d)),
        Placed("logits", Linear(d, vocab, bias=True, tied=True)),
    )
    labels = _classes(config)
    tops: dict[str, tuple[tuple[Placed, ...], int | None]] = {
        "ForMaskedLM": (masked, vocab),
        "ForPreTraining": ((pooler, _one("next sentence", Linear(d, 2), after=True), *masked), vocab),
        "ForNextSentencePrediction": ((pooler, _one("classifier", Linear(d, 2), after=True)), 2),
        "ForSequenceClassification": ((pooler, _one("classifier", Linear(d, labels), after=True)), labels),
        "ForTokenClassification": ((Placed("classifier", Linear(d, labels)),), labels),
        "ForQuestionAnswering": ((Placed("answer", Linear(d, 2)),), 2),
        "Model": (() if distil else (pooler,), None),
    }
    if config.kind != "bert":
        del tops["ForPreTraining"], tops["ForNextSentencePrediction"]
    ending = _ending(config, *tops) or "Model"
    if ending in ("ForMaskedLM", "ForPreTraining") and not config.flag("tie_word_embeddings", True):
        raise ValueError("config.json: tie_word_embeddings is false; the masked head here is always tied")
    return tops[ending]


def _gpt2(config: Config) -> Model:
    d, reach = config.whole("n_embd"), config.whole("n_positions")
    ending = _ending(config, "LMHeadModel", "Model")
    config.refuse("add_cross_attention", "this model is read as a decoder without a context")
    vocab = config.whole("vocab_size")
    model = decoder(
        d,
        config.whole("n_head"),
        config.layers("n_layer"),
        hidden=config.whole("n_inner", 4 * d),
        vocab=vocab,
        scaled=False,
        tied=config.flag("tie_word_embeddings", True),
        position="learned",
        reach=reach,
        qkv_bias=True,
        dropout=config.real("resid_pdrop", 0.1) > 0,
    )
    return replace(_headless(model) if ending == "Model" else model, title=_title(config, "LMHeadModel"))


def _llama(config: Config) -> Model:
    kind = config.kind
    ending = _ending(config, "ForCausalLM", "Model")
    d, heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    vocab = config.whole("vocab_size")
    if d % heads and config.get("head_dim") is None and kind != "qwen3":
        raise ValueError(f"config.json: num_attention_heads={heads} does not divide hidden_size={d}; give head_dim")
    biases = config.flag("attention_bias", False) and kind in ("llama", "qwen3")
    options: dict[str, Any] = {
        "d_key": config.whole("head_dim", 128 if kind == "qwen3" else d // heads),
        "kv_heads": config.whole("num_key_value_heads", 8 if kind == "mistral" else heads),
        "norm": "rms",
        "gated": True,
        "qkv_bias": biases or kind == "qwen2",
        "bias": config.flag("mlp_bias", False) and kind == "llama",
        "out_bias": biases,
        "qk_norm": kind == "qwen3",
    }
    hidden, windows = config.whole("intermediate_size"), _windows(config)
    model = decoder(
        d,
        heads,
        len(windows),
        hidden=hidden,
        vocab=vocab,
        scaled=False,
        tied=config.flag("tie_word_embeddings", False),
        position="rotary",
        **options,
    )
    (stack,) = model.stacks
    counts = Counter(windows)
    blocks = tuple(
        placed
        for window, layers in counts.items()
        for placed in block(d, heads, hidden, layers=layers, causal=True, position="rotary", window=window, **options)
    )
    model = replace(model, stacks=(replace(stack, blocks=blocks),))
    return replace(_headless(model) if ending == "Model" else model, title=_title(config, "ForCausalLM"))


def _windows(config: Config) -> list[int | None]:
    """How many keys each layer's queries see, themselves included; None is all."""
    layers = config.layers("num_hidden_layers")
    window = None if config.get("sliding_window") is None else config.whole("sliding_window")
    if config.kind == "mistral":
        return [4096 if "sliding_window" not in config else window] * layers
    if config.kind == "llama" or not config.flag("use_sliding_window", False):
        return [None] * layers
    window = window or 4096
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.whole("max_window_layers", 28, least=0)
        return [window if i >= first else None for i in range(layers)]
    known = {"full_attention": None, "sliding_attention": window}
    if not isinstance(kinds, list) or len(kinds) != layers or any(one not in known for one in kinds):
        raise ValueError(f"config.json: layer_types must name {layers} layers as {' or '.join(known)}, got {kinds!r}")
    return [known[one] for one in kinds]


def _t5(config: Config) -> Model:
    d, heads = config.whole("d_model"), config.whole("num_heads")
    form = config.name("feed_forward_proj", "relu")
    options: Options = {
        "d_key": config.whole("d_kv"),
        "bias": False,
        "norm": "rms",
        "gated": config.flag("is_gated_act", form.startswith("gated-")),
        "dropout": config.real("dropout_rate", 0.1) > 0,
    }
    layers, vocab = config.layers("num_layers"), config.whole("vocab_size")
    hidden, reach = config.whole("d_ff"), config.whole("relative_attention_num_buckets", 32)
    ending = _ending(config, "ForConditionalGeneration", "EncoderModel", "Model")
    title = _title(config, "ForConditionalGeneration")
    if ending == "EncoderModel":
        model = encoder(
            d, heads, layers, hidden=hidden, vocab=vocab, scaled=False, position="t5", reach=reach, **options
        )
        return replace(model, title=title)
    model = encoder_decoder(
        d,
        heads,
        layers,
        decoder_layers=config.layers("num_decoder_layers", layers),
        hidden=hidden,
        vocab=vocab,
        scaled=False,
        tied=config.flag("tie_word_embeddings", True),
        position="t5",
        reach=reach,
        **options,
    )
    return replace(_headless(model) if ending == "Model" else model, title=title)


def _vit(config: Config) -> Model:
    d = config.whole("hidden_size")
    if config.whole("pooler_output_size", d) != d:
        raise ValueError("config.json: pooler_output_size is read as hidden_size alone")
    classifies = _ending(config, "ForImageClassification", "Model") == "ForImageClassification"
    model = vision_transformer(
        config.pair("image_size", 224),
        config.pair("patch_size", 16),
        _classes(config) if classifies else None,
        d,
        config.whole("num_attention_heads"),
        config.layers("num_hidden_layers"),
        hidden=config.whole("intermediate_size"),
        channels=config.whole("num_channels", 3),
        qkv_bias=config.flag("qkv_bias", True),
        dropout=config.real("hidden_dropout_prob", 0.0) > 0,
    )
    if not classifies:
        (stack,) = model.stacks
        model = replace(model, stacks=(replace(stack, after=(*stack.after, _one("pooler", Linear(d, d)))),))
    return replace(model, title=_title(config, "Model"))


def _headless(model: Model) -> Model:
    """Without logits."""
    *others, last = model.stacks
    after = tuple(placed for placed in last.after if placed.name != "logits")
    return replace(model, stacks=(*others, replace(last, after=after)), vocab=None)


def _ending(config: Config, *endings: str) -> str:
    """What the class that wrote the checkpoint puts on top, "" where none is named; another class is refused."""
    known = {NAMES[config.kind] + ending: ending for ending in endings}
    if config.architecture and config.architecture not in known:
        names = ", ".join(known)
        raise ValueError(f"config.json: architectures is {config.architecture}; known for {config.kind} are {names}")
    return known.get(config.architecture, "")


def _title(config: Config, usual: str) -> str:
    return config.architecture or NAMES[config.kind] + usual


FAMILIES: dict[str, Callable[[Config], Model]] = {
    "bert": _bert,
    "roberta": _bert,
    "distilbert": _bert,
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "qwen3": _llama,
    "t5": _t5,
    "vit": _vit,
}
