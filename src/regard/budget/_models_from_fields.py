"""Build models from fields such as ``d=512 heads=8 layers=6``, with numbers or with symbols for sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from regard._errors import RegardError
from regard.budget._attention_parts import POSITIONS, attention
from regard.budget._model import Model, as_model
from regard.budget._models_from_sizes import KINDS, block, decoder, encoder, encoder_decoder, vision_transformer
from regard.budget._symbols import SYMBOLS
from regard.budget._units import parse_integer

# Types of fields. Defaults are those of regard.nn: hidden = 4·d, d_key = d_value = d/heads, kv_heads = heads.
INTEGER_FIELDS = (
    *("d", "heads", "layers", "decoder_layers", "hidden", "vocab", "kv_heads"),
    *("d_key", "d_value", "d_out", "d_context", "window", "reach", "channels", "classes"),
)
_FLAGS = ("bias", "qkv_bias", "gated", "tied", "scaled", "causal", "sinks", "qk_norm", "dropout")
_CHOICES = {"norm": ("layer", "rms"), "order": ("pre", "post"), "position": POSITIONS, "head": ("linear", "hidden")}
_PAIRS = ("image", "patch")
_BLOCK = ("kv_heads", "d_key", "qkv_bias", "bias", "norm", "order", "gated", "sinks", "qk_norm", "dropout", "hidden")
_STACK = ("d", "heads", "layers", *_BLOCK)

# The fields that each kind of model accepts, and the fields that it requires.
FIELDS: dict[str, tuple[str, ...]] = {
    "attention": (
        *("d", "heads", "d_key", "d_value", "d_out", "d_context", "kv_heads", "bias", "qkv_bias", "causal", "window"),
        *("sinks", "qk_norm", "position", "reach"),
    ),
    "block": ("d", "heads", *_BLOCK, "d_context", "causal", "window"),
    "encoder": (*_STACK, "vocab", "scaled", "position", "reach"),
    "decoder": (*_STACK, "vocab", "tied", "scaled", "position", "reach", "window"),
    "encoder-decoder": (*_STACK, "decoder_layers", "vocab", "tied", "scaled", "position", "reach"),
    "vit": ("image", "patch", *_STACK, "classes", "channels", "head"),
}
REQUIRED = {
    "attention": ("d", "heads"),
    "block": ("d", "heads"),
    "encoder": ("d", "heads", "layers"),
    "decoder": ("d", "heads", "layers"),
    "encoder-decoder": ("d", "heads", "layers"),
    "vit": ("image", "patch", "d", "heads", "layers"),
}
EXAMPLES = {"image": "224", "patch": "16", "d": "512", "heads": "8", "layers": "6"}
ALIASES = {"d_model": "d", "n_heads": "heads", "n_layers": "layers", "rope": "rotary"}
POSITIONS_WITH_REACH = ("learned", "t5", "table", "shaw")
_SYMBOL_NAMES = {
    "heads": "N_h",
    "kv_heads": "N_kv",
    "hidden": "D_ff",
    "layers": "L",
    "decoder_layers": "L_dec",
    "vocab": "V",
    "d_context": "D_c",
    "d_key": "D_hid",
}


def parse_fields(kind: str, texts: Iterable[str]) -> dict[str, Any]:
    """Parse ``["d=512", "bias=no"]`` to ``{"d": 512, "bias": False}``.

    - `kind`: attention, block, encoder, decoder, encoder-decoder or vit.
    - `texts`: the fields, as ``name=value``.

    >>> parse_fields("attention", ["d=512", "heads=8", "bias=no"])
    {'d': 512, 'heads': 8, 'bias': False}
    """
    _check_kind(kind)
    fields: dict[str, Any] = {}
    for text in texts:
        name, _, value = text.partition("=")
        name = ALIASES.get(name, name)
        if not value:
            raise RegardError(f"a field must be name=value, for example d=512, got {text!r}")
        if name not in FIELDS[kind]:
            close = get_close_matches(name, FIELDS[kind], n=1)
            hint = f"it takes {', '.join(FIELDS[kind])}"
            if close:
                hint = f"did you mean {close[0]}?"
            raise RegardError(f"{kind} has no field {name!r}; {hint}")
        if name in fields:
            raise RegardError(f"{name} is given twice, as {fields[name]} and as {value}")
        fields[name] = _parse_value(name, value)
    return fields


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise RegardError(f"model must be one of {', '.join(KINDS)}, or a config.json, got {kind!r}")


def _parse_value(name: str, text: str) -> Any:
    if name in INTEGER_FIELDS:
        return parse_integer(name, text)
    if name in _FLAGS:
        if text.lower() not in ("yes", "no", "true", "false"):
            raise RegardError(f"{name} must be yes or no, got {text!r}")
        return text.lower() in ("yes", "true")
    if name in _PAIRS:
        sides = text.lower().split("x")
        if len(sides) > 2:
            raise RegardError(f"{name} must be one integer, or two such as 224x160, got {text!r}")
        numbers = [parse_integer(name, side) for side in sides]
        return (numbers[0], numbers[-1])  # one number is a square
    choice = ALIASES.get(text, text)
    if choice not in _CHOICES[name]:
        raise RegardError(f"{name} must be one of {', '.join(_CHOICES[name])}, got {choice!r}")
    return choice


def build_model(kind: str, fields: Mapping[str, Any]) -> Model:
    """Build the model that these fields describe.

    - `kind`: attention, block, encoder, decoder, encoder-decoder or vit.
    - `fields`: as `parse_fields` returns them.

    >>> build_model("attention", {"d": 512, "heads": 8, "bias": False}).parameters
    1048576
    """
    _check_kind(kind)
    # Checked here, so that the error names fields. A missing function argument would name the argument instead.
    missing = [name for name in REQUIRED[kind] if name not in fields]
    if missing:
        example = " ".join(f"{name}={EXAMPLES[name]}" for name in missing)
        raise RegardError(f"{kind} needs {' and '.join(missing)}, for example {example}")
    position = fields.get("position", "none")
    if "reach" in fields and position not in POSITIONS_WITH_REACH:
        raise RegardError(f"reach needs position={' or '.join(POSITIONS_WITH_REACH)}, got position={position}")

    options = dict(fields)
    if kind == "vit":
        image, patch, *sizes = (options.pop(name) for name in REQUIRED["vit"])
        classes = options.pop("classes", 1000)
        return vision_transformer(_pair(image), _pair(patch), classes, *sizes, **options)
    sizes = [options.pop(name) for name in REQUIRED[kind]]
    if kind == "attention":
        # An attention layer has two kinds of bias; the field bias is the output's bias.
        if "bias" in options:
            options["out_bias"] = options.pop("bias")
        return as_model(attention(*sizes, **options))
    if kind == "block":
        return as_model(block(sizes[0], sizes[1], options.pop("hidden", None), **options))
    make: Any = {"encoder": encoder, "decoder": decoder, "encoder-decoder": encoder_decoder}[kind]
    return make(*sizes, **options)


def _pair(size: Any) -> Any:
    """Return height and width; one number is used for both."""
    return (size, size) if isinstance(size, int) else size


def symbolic_model(kind: str, fields: Mapping[str, Any]) -> Model:
    """Build the model of `build_model` with symbols in place of sizes.

    An attention layer gets symbols for all five dimensions. Other models get symbols for ``hidden`` and for the sizes
    in `fields`. Flags, choices and the size of an image keep their values.

    >>> model = symbolic_model("attention", {"heads": 8, "bias": False})
    >>> regard.budget.to_text(regard.budget.formulas(model)["parameters"])
    '2·N_h·D_in·D_hid + N_h·D_in·D_o + N_h·D_o·D_out'
    """
    symbols = dict(fields)
    for name in fields.keys() & _SYMBOL_NAMES.keys():
        symbols[name] = SYMBOLS[_SYMBOL_NAMES[name]]
    names = {"d": "D", "hidden": "D_ff"}
    if kind == "attention":
        # The theory's five dimensions: heads, and these four widths.
        names = {"d": "D_in", "d_key": "D_hid", "d_value": "D_o", "d_out": "D_out"}
    for name, symbol in names.items():
        symbols[name] = SYMBOLS[symbol]
    return build_model(kind, symbols)
