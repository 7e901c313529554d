"""Models from fields: ``d=512 heads=8 layers=6`` to a model in numbers, or to the same one in letters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from regard.budget import spec
from regard.budget.model import Model, as_model
from regard.budget.spec import KINDS, POSITIONS
from regard.budget.symbols import LETTERS
from regard.budget.units import parse_whole

__all__ = ["FIELDS", "WHOLE", "build", "in_letters", "read_fields"]

# Sizes; what is not given is as regard.nn has it: hidden = 4·d, d_key = d_value = d/heads, kv_heads = heads.
WHOLE = (
    *("d", "heads", "layers", "decoder_layers", "hidden", "vocab", "kv_heads"),
    *("d_key", "d_value", "d_out", "d_context", "window", "reach", "channels", "classes"),
)
_FLAGS = ("bias", "qkv_bias", "gated", "tied", "causal", "sinks", "qk_norm", "dropout")
_NAMES = {"norm": ("layer", "rms"), "order": ("pre", "post"), "position": POSITIONS, "head": ("linear", "hidden")}
_PAIRS = ("image", "patch")
_BLOCK = ("kv_heads", "d_key", "qkv_bias", "bias", "norm", "order", "gated", "sinks", "qk_norm", "dropout", "hidden")
_STACK = ("d", "heads", "layers", *_BLOCK)

# What each kind takes; the first ones it needs.
FIELDS: dict[str, tuple[str, ...]] = {
    "attention": (
        *("d", "heads", "d_key", "d_value", "d_out", "d_context", "kv_heads", "bias", "qkv_bias", "causal", "window"),
        *("sinks", "qk_norm", "position", "reach"),
    ),
    "block": ("d", "heads", *_BLOCK, "d_context", "causal", "window"),
    "encoder": (*_STACK, "vocab", "position", "reach"),
    "decoder": (*_STACK, "vocab", "tied", "position", "reach", "window"),
    "encoder-decoder": (*_STACK, "decoder_layers", "vocab", "tied", "position", "reach"),
    "vit": ("image", "patch", *_STACK, "classes", "channels", "head"),
}
ALIASES = {"d_model": "d", "n_heads": "heads", "n_layers": "layers", "rope": "rotary"}
REACHING = ("learned", "t5", "table", "shaw")
NEEDED = {
    "attention": ("d", "heads"),
    "block": ("d", "heads"),
    "vit": ("image", "patch", "d", "heads", "layers"),
} | dict.fromkeys(("encoder", "decoder", "encoder-decoder"), ("d", "heads", "layers"))
_AS_LETTERS = {
    "heads": "N_h",
    "kv_heads": "N_kv",
    "hidden": "D_ff",
    "layers": "L",
    "decoder_layers": "L_dec",
    "vocab": "V",
    "d_context": "D_c",
}


def read_fields(kind: str, given: Iterable[str]) -> dict[str, Any]:
    """``["d=512", "bias=no"]`` as ``{"d": 512, "bias": False}``; what a kind does not take is refused.

    >>> read_fields("attention", ["d=512", "heads=8", "bias=no"])
    {'d': 512, 'heads': 8, 'bias': False}
    """
    _check_kind(kind)
    found: dict[str, Any] = {}
    for one in given:
        name, equals, value = one.partition("=")
        name = ALIASES.get(name, name)
        if not equals or not value:
            raise ValueError(f"{one!r} is no field; fields are written name=value, e.g. d=512")
        if name not in FIELDS[kind]:
            close = get_close_matches(name, FIELDS[kind], n=1)
            hint = f"did you mean {close[0]}?" if close else f"it takes {', '.join(FIELDS[kind])}"
            raise ValueError(f"{kind} has no field {name!r}; {hint}")
        if name in found:
            raise ValueError(f"{name} is given twice, as {found[name]} and as {value}")
        found[name] = _value(name, value)
    return found


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is no kind of model; there are {', '.join(KINDS)}, or a config.json")


def _value(name: str, value: str) -> Any:
    if name in WHOLE:
        return parse_whole(name, value)
    if name in _FLAGS:
        if value.lower() not in ("yes", "no", "true", "false"):
            raise ValueError(f"{name} is {value!r}; it is yes or no")
        return value.lower() in ("yes", "true")
    if name in _PAIRS:
        sides = value.lower().split("x")
        if len(sides) > 2:
            raise ValueError(f"{name} is {value!r}; it is one number, or two as in 224x160")
        numbers = [parse_whole(name, side) for side in sides]
        return (numbers[0], numbers[-1])
    value = ALIASES.get(value, value)
    if value not in _NAMES[name]:
        raise ValueError(f"{name} is {value!r}; known are {', '.join(_NAMES[name])}")
    return value


def build(kind: str, fields: Mapping[str, Any]) -> Model:
    """The model that these fields describe, of a kind: attention, block, encoder, decoder, encoder-decoder, vit.

    >>> build("attention", {"d": 512, "heads": 8, "bias": False}).parameters
    1048576
    """
    _check_kind(kind)
    missing = [name for name in NEEDED[kind] if name not in fields]
    if missing:
        example = {"image": "224", "patch": "16", "d": "512", "heads": "8", "layers": "6"}
        raise ValueError(f"{kind} needs {' and '.join(missing)}: {' '.join(f'{x}={example[x]}' for x in missing)}, say")
    given = dict(fields)
    position = given.get("position", "none")
    if "reach" in given and position not in REACHING:
        raise ValueError(f"reach is for position={', '.join(REACHING)}; here it is {position}")
    if kind == "attention":
        if "bias" in given:
            given["out_bias"] = given.pop("bias")
        return as_model(spec.attention(given.pop("d"), given.pop("heads"), **given))
    if kind == "block":
        return as_model(spec.block(given.pop("d"), given.pop("heads"), given.pop("hidden", None), **given))
    if kind == "vit":
        classes = given.pop("classes", 1000)
        image, patch, *sizes = (given.pop(name) for name in NEEDED["vit"])
        image, patch = ((x, x) if isinstance(x, int) else x for x in (image, patch))
        return spec.vision_transformer(image, patch, classes, *sizes, **given)
    make = {"encoder": spec.encoder, "decoder": spec.decoder, "encoder-decoder": spec.encoder_decoder}[kind]
    sizes = [given.pop(name) for name in ("d", "heads", "layers")]
    return make(*sizes, **given)


def in_letters(kind: str, fields: Mapping[str, Any]) -> Model:
    """The same model with letters for sizes: all of attention's five dimensions, otherwise those that were given.

    Flags and names stay, and so does an image's size; ``hidden`` is always a letter.

    >>> model = in_letters("attention", {"heads": 8, "bias": False})
    >>> regard.budget.text(regard.budget.formulas(model)["parameters"])
    '2·N_h·D_in·D_hid + N_h·D_in·D_o + N_h·D_o·D_out'
    """
    letters = {str(letter): letter for letter in LETTERS}
    given = {name: letters[_AS_LETTERS[name]] if name in _AS_LETTERS else value for name, value in fields.items()}
    if kind == "attention":
        given |= {"d": letters["D_in"], "d_key": letters["D_hid"], "d_value": letters["D_o"], "d_out": letters["D_out"]}
    else:
        given |= {"d": letters["D"], "hidden": letters["D_ff"]}
        if "d_key" in fields:
            given["d_key"] = letters["D_hid"]
    return build(kind, given)
