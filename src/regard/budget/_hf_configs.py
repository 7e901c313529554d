"""Build models from a Hugging Face ``config.json``: BERT, GPT-2, Llama, T5, ViT and their relatives."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from regard._config_json import CLASS_PREFIXES, Config, MissingEntryError, UnknownHeadError, read_json
from regard._errors import RegardError
from regard.budget._attention_parts import Attention
from regard.budget._counted_model import CountedModel, build_counted, with_defaults
from regard.budget._decoder_configs import decoder_context_length, decoder_from_config
from regard.budget._decoder_entries import NoFormulaError
from regard.budget._decoder_families import DECODERS
from regard.budget._encoder_configs import electra_from_config, modernbert_from_config
from regard.budget._image_text_models import IMAGE_TEXT, image_text_from_config
from regard.budget._model import Axis, Model, PlacedPart, Stack
from regard.budget._models_from_sizes import Options, block, decoder, encoder, encoder_decoder, vision_transformer
from regard.budget._parts import Linear, Norm, Part, Table

# Entry of a BERT config → its name in a DistilBERT config.
DISTILBERT_NAMES = {
    "hidden_size": "dim",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
    "intermediate_size": "hidden_dim",
    "hidden_dropout_prob": "dropout",
}


# Families whose first position is their padding id + 1.
ROBERTAS = ("roberta", "xlm-roberta", "camembert")


def from_config(config: str | os.PathLike[str] | Mapping[str, Any]) -> Model | CountedModel:
    """Build the model that a Hugging Face config describes; weights are not read.

    Families with formulas give a `Model`. For any other family the model is built by transformers, without data and
    without code from the folder, and is a `CountedModel`: `plan` counts it by walking, and says so.

    - `config`: the path of a ``config.json`` or of its folder, or a dictionary with its entries. The title of the model
      is the name of the folder; for a dictionary it is the name of its class in transformers.

    >>> sizes = {"vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024}
    >>> from_config({"model_type": "gpt2", **sizes}).parameters
    124439808
    >>> from_config(regard.models.bundled()).parameters  # a folder
    735616
    """
    if isinstance(config, Mapping):
        return _model_or_counted(Config(config))
    file = Path(config)
    if file.is_dir():
        file = file / "config.json"
    if not file.exists():
        raise FileNotFoundError(f"{file} does not exist; give a config.json, or a folder that has one")
    entries = Config(read_json(file))
    entries.file = file.name
    return replace(_model_or_counted(entries), title=_file_title(file))


def _model_or_counted(config: Config) -> Model | CountedModel:
    """The model by formula if its family has one, otherwise built by transformers."""
    if not has_formula(config):
        return build_counted(config)
    try:
        return model_from_config(config)
    except UnknownHeadError as error:
        return build_counted(config, reason=str(error))
    except (NoFormulaError, MissingEntryError) as error:
        reason: RegardError = error
    # Published configs leave out the defaults of their class, or use other names that the class knows.
    complete = None
    if config.model_type not in FAMILIES:
        complete = with_defaults(config)
    if complete is not None:
        try:
            return model_from_config(complete)
        except NoFormulaError as error:
            reason = error  # not what was left out is the reason, but what the formulas do not have
        except MissingEntryError:
            pass
    if isinstance(reason, MissingEntryError):
        raise reason
    return build_counted(config, reason=str(reason))


def has_formula(config: Config) -> bool:
    """Whether the family of a config is counted by formulas."""
    return any(config.model_type in families for families in (FAMILIES, OTHERS, DECODERS, IMAGE_TEXT))


def _file_title(file: Path) -> str:
    """The name of a model that is read from a file: that of its folder, or that of the file if it tells more."""
    if file.name == "config.json":
        return file.resolve().parent.name or file.name
    return file.stem


def model_from_config(config: Config) -> Model:
    """Build the model that a config describes."""
    family = config.model_type
    if family in IMAGE_TEXT:
        return image_text_from_config(config, model_from_config, (*DECODERS, *TEXT_DECODERS))
    if family in DECODERS:
        model = decoder_from_config(config)
        return replace(model, context_length=decoder_context_length(config))
    if family in OTHERS:
        model = OTHERS[family](config)
        return replace(model, architecture=model.title)
    if family not in FAMILIES:
        known = ", ".join((*FAMILIES, *OTHERS, *DECODERS, *IMAGE_TEXT))
        raise RegardError(
            f"{config.file}: model_type must be one of {known} for formulas, got {family!r}; "
            "regard budget on the command line counts other families by walking"
        )
    model = FAMILIES[family](config)
    return replace(model, architecture=model.title, context_length=_context_length(config))


def _context_length(config: Config) -> int | None:
    """The length that the config names; None if it names none, or positions limit it, which `Model.max_tokens` says."""
    entries = {"t5": "n_positions", **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), "max_position_embeddings")}
    entry = entries.get(config.model_type)
    if entry is None or config.get(entry) is None:
        return None
    return config.integer(entry)


def _first_token(name: str, part: Part, keys: Axis = "n") -> PlacedPart:
    """A part that reads only the first token; `keys` is "one" if its input has no other tokens."""
    return PlacedPart(name, part, rows="one", keys=keys)


def _bert(config: Config) -> Model:
    family = config.model_type
    config.require("position_embedding_type", "absolute")
    for entry in ("is_decoder", "add_cross_attention"):
        config.refuse(entry, "these models are read as encoders")

    # DistilBERT has the same sizes under other names.
    names = {name: name for name in DISTILBERT_NAMES}
    if family == "distilbert":
        names = DISTILBERT_NAMES
    d = config.integer(names["hidden_size"])
    vocab = config.integer("vocab_size")
    positions = config.integer("max_position_embeddings")
    model = encoder(
        d,
        config.integer(names["num_attention_heads"]),
        config.layer_count(names["num_hidden_layers"]),
        hidden=config.integer(names["intermediate_size"]),
        vocab=vocab,
        scaled=False,
        position="learned",
        reach=positions,
        qkv_bias=True,
        order="post",
        dropout=config.number(names["hidden_dropout_prob"], 0.1) > 0,
    )
    (stack,) = model.stacks
    before = [*stack.before]
    if family != "distilbert":
        before.append(PlacedPart("types", Table("types", (config.integer("type_vocab_size", 2), d), d)))
    before.append(PlacedPart("embedding norm", Norm(d)))

    # RoBERTa's first position is its padding id + 1, so the table has rows that are not used.
    max_tokens = positions
    if family in ROBERTAS:
        max_tokens = positions - config.integer("pad_token_id", 1, least=0) - 1
    if max_tokens < 1:
        raise RegardError(f"{config.file}: max_position_embeddings must be above pad_token_id + 1, got {positions}")
    head, logits = _bert_head(config, d, vocab)
    stacks = (replace(stack, before=tuple(before), after=head),)
    return replace(model, title=_title(config, "Model"), stacks=stacks, vocab=logits, max_tokens=max_tokens)


def _bert_head(config: Config, d: int, vocab: int) -> tuple[tuple[PlacedPart, ...], int | None]:
    """The parts after the encoder, and the width of the logits."""
    # The parts after the encoder, by the end of the class name in transformers.
    pooler = _first_token("pooler", Linear(d, d))
    masked = (
        PlacedPart("head: linear", Linear(d, d)),
        PlacedPart("head: norm", Norm(d)),
        PlacedPart("logits", Linear(d, vocab, bias=True, tied=True)),
    )
    labels = config.class_count()
    heads: dict[str, tuple[tuple[PlacedPart, ...], int | None]] = {
        "ForMaskedLM": (masked, vocab),
        "ForPreTraining": ((pooler, _first_token("next sentence", Linear(d, 2), keys="one"), *masked), vocab),
        "ForNextSentencePrediction": ((pooler, _first_token("classifier", Linear(d, 2), keys="one")), 2),
        "ForSequenceClassification": ((pooler, _first_token("classifier", Linear(d, labels), keys="one")), labels),
        "ForTokenClassification": ((PlacedPart("classifier", Linear(d, labels)),), labels),
        "ForQuestionAnswering": ((PlacedPart("answer", Linear(d, 2)),), 2),
        "Model": ((pooler,), None),
    }
    if config.model_type == "distilbert":
        heads["Model"] = ((), None)
    if config.model_type != "bert":
        del heads["ForPreTraining"], heads["ForNextSentencePrediction"]
    head_name = config.head_name(*heads) or "Model"
    if head_name in ("ForMaskedLM", "ForPreTraining"):
        config.require("tie_word_embeddings", True)
    return heads[head_name]


def _gpt2(config: Config) -> Model:
    d = config.integer("n_embd")
    head_name = config.head_name("LMHeadModel", "Model")
    config.refuse("add_cross_attention", "this model is read as a decoder without a context")
    model = decoder(
        d,
        config.integer("n_head"),
        config.layer_count("n_layer"),
        hidden=config.integer("n_inner", 4 * d),
        vocab=config.integer("vocab_size"),
        scaled=False,
        tied=config.boolean("tie_word_embeddings", True),
        position="learned",
        reach=config.integer("n_positions"),
        qkv_bias=True,
        dropout=config.number("resid_pdrop", 0.1) > 0,
    )
    return _finish(model, config, head_name, "LMHeadModel")


def _llama(config: Config) -> Model:
    family = config.model_type
    head_name = config.head_name("ForCausalLM", "Model")
    d = config.integer("hidden_size")
    heads = config.integer("num_attention_heads")
    if d % heads and config.get("head_dim") is None and family != "qwen3":
        raise RegardError(
            f"{config.file}: num_attention_heads must divide hidden_size={d} without head_dim, got {heads}"
        )
    # Each family reads only some of these entries; the others have fixed values in transformers.
    biases = config.boolean("attention_bias", False) and family in ("llama", "qwen3")
    options: dict[str, Any] = {
        "d_key": config.integer("head_dim", {"qwen3": 128}.get(family, d // heads)),
        "kv_heads": config.integer("num_key_value_heads", {"mistral": 8}.get(family, heads)),
        "norm": "rms",
        "gated": True,
        "qkv_bias": biases or family == "qwen2",
        "bias": config.boolean("mlp_bias", False) and family == "llama",
        "out_bias": biases,
        "qk_norm": family == "qwen3",
    }
    hidden = config.integer("intermediate_size")
    windows = config.sliding_windows()
    model = decoder(
        d,
        heads,
        len(windows),
        hidden=hidden,
        vocab=config.integer("vocab_size"),
        scaled=False,
        tied=config.boolean("tie_word_embeddings", False),
        position="rotary",
        **options,
    )

    # Layers may differ in their window: one group of blocks for each.
    blocks: list[PlacedPart] = []
    for window, layers in Counter(windows).items():
        parts = block(d, heads, hidden, layers=layers, causal=True, position="rotary", window=window, **options)
        blocks += [_with_rolling_cache(placed) for placed in parts]
    (stack,) = model.stacks
    model = replace(model, stacks=(replace(stack, blocks=tuple(blocks)),))
    return _finish(model, config, head_name, "ForCausalLM")


def _with_rolling_cache(placed: PlacedPart) -> PlacedPart:
    """The same part; attention with a cache that drops the keys that its window hides, as in transformers."""
    if isinstance(placed.part, Attention):
        return replace(placed, part=replace(placed.part, rolling=True))
    return placed


def _t5(config: Config) -> Model:
    d = config.integer("d_model")
    heads = config.integer("num_heads")
    layers = config.layer_count("num_layers")
    # mT5 and UMT5 have the sizes of T5 1.1, and its gate as their default.
    activation = config.string("feed_forward_proj", "relu" if config.model_type == "t5" else "gated-gelu")
    blocks: Options = {
        "d_key": config.integer("d_kv"),
        "bias": False,
        "norm": "rms",
        "gated": config.boolean("is_gated_act", activation.startswith("gated-")),
        "dropout": config.number("dropout_rate", 0.1) > 0,
    }
    options: dict[str, Any] = {
        "hidden": config.integer("d_ff"),
        "vocab": config.integer("vocab_size"),
        "scaled": False,
        "position": "t5",
        "reach": config.integer("relative_attention_num_buckets", 32),
        **blocks,
    }
    head_name = config.head_name("ForConditionalGeneration", "EncoderModel", "Model")
    if head_name == "EncoderModel":
        model = encoder(d, heads, layers, **options)
    else:
        decoder_layers = config.layer_count("num_decoder_layers", layers)
        tied = config.boolean("tie_word_embeddings", True)
        model = encoder_decoder(d, heads, layers, decoder_layers=decoder_layers, tied=tied, **options)
    if config.model_type == "umt5":
        model = replace(model, stacks=tuple(map(_with_own_tables, model.stacks)))
    return _finish(model, config, head_name, "ForConditionalGeneration")


def _with_own_tables(stack: Stack) -> Stack:
    """The same stack with a table of relative positions in every layer, not one for all layers."""
    before = []
    for placed in stack.before:
        if placed.name == "positions on scores":
            placed = replace(placed, repeats=stack.layers)
        before.append(placed)
    return replace(stack, before=tuple(before))


def _vit(config: Config) -> Model:
    d = config.integer("hidden_size")
    config.require("pooler_output_size", d)
    classifies = config.head_name("ForImageClassification", "Model") == "ForImageClassification"
    model = vision_transformer(
        config.pair("image_size", 224),
        config.pair("patch_size", 16),
        config.class_count() if classifies else None,
        d,
        config.integer("num_attention_heads"),
        config.layer_count("num_hidden_layers"),
        hidden=config.integer("intermediate_size"),
        channels=config.integer("num_channels", 3),
        qkv_bias=config.boolean("qkv_bias", True),
        dropout=config.number("hidden_dropout_prob", 0.0) > 0,
    )
    if not classifies:
        (stack,) = model.stacks
        pooler = _first_token("pooler", Linear(d, d))
        model = replace(model, stacks=(replace(stack, after=(*stack.after, pooler)),))
    return replace(model, title=_title(config, "Model"))


def _finish(model: Model, config: Config, head_name: str, default_head: str) -> Model:
    """Return the model with its title. If the class is the bare ``…Model``, the logits are removed."""
    model = replace(model, title=_title(config, default_head))
    if head_name != "Model":
        return model
    *others, last = model.stacks
    after = tuple(placed for placed in last.after if placed.name != "logits")
    return replace(model, stacks=(*others, replace(last, after=after)), vocab=None)


def _title(config: Config, default_head: str) -> str:
    return config.architecture or CLASS_PREFIXES[config.model_type] + default_head


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

# The decoders among FAMILIES.
TEXT_DECODERS = ("gpt2", "llama", "mistral", "qwen2", "qwen3")

# Encoders and encoder–decoders that regard.models does not load.
OTHERS: dict[str, Callable[[Config], Model]] = {
    "xlm-roberta": _bert,
    "camembert": _bert,
    "electra": electra_from_config,
    "modernbert": modernbert_from_config,
    "mt5": _t5,
    "umt5": _t5,
}
