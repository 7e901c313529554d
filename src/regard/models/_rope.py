"""Rotary positions from a ``config.json``: the base, and the schemes that extend rotary positions to longer texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard._config_json import Config
from regard._errors import RegardError
from regard._register_pytree import register_pytree
from regard.positions import LinearScaling, Rotary

DEFAULT_BASE = 10000.0
OLD_NAMES = {"su": "longrope"}
SCHEMES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


def rotary_from_config(
    config: Config, d_key: int, *, base: float = DEFAULT_BASE, partial: float | None = None
) -> Rotary:
    """The ``Rotary`` of a config: ``rope_parameters``, or ``rope_theta`` and ``rope_scaling`` in older files.

    - ``base``: the base if the config has none.
    - ``partial``: the part of a head's features that is rotated, if the config does not say it. None: all are rotated,
      and a config that says otherwise is refused.
    """
    entries = Config(config.section("rope_scaling") or config.section("rope_parameters"))
    if any(isinstance(x, dict) for x in entries.values()):
        raise config.error("rope_parameters", "they differ between layers; only one set for all layers is read")
    base = entries.number("rope_theta", config.number("rope_theta", base))
    width = d_key
    if partial is None:
        entries.require("partial_rotary_factor", 1)
        config.require("partial_rotary_factor", 1)
    else:
        partial = entries.number("partial_rotary_factor", config.number("partial_rotary_factor", partial))
        width = int(d_key * partial)
    # Everything below depends on the rotated features only.
    rotary = _rotary(config, entries, width, base)
    if width == d_key:
        return rotary
    return replace(rotary, d=d_key, rotate=width)


def _rotary(config: Config, entries: Config, d_key: int, base: float) -> Rotary:
    """The ``Rotary`` of a head of which all ``d_key`` features are rotated."""
    scheme = entries.string("rope_type", entries.string("type", "default"))
    scheme = OLD_NAMES.get(scheme, scheme)
    if scheme not in SCHEMES:
        raise RegardError(f"config.json: rope_type is {scheme!r}; known are {', '.join(SCHEMES)}")

    # The length of the texts that the model was first trained on; "dynamic" counts from the full length.
    trained = config.integer("max_position_embeddings", 2048)
    if scheme != "dynamic":
        trained = entries.integer("original_max_position_embeddings", trained)
        trained = config.integer("original_max_position_embeddings", trained)
    # The default of the factor is the ratio of the two lengths.
    factor = config.integer("max_position_embeddings", trained) / trained
    if scheme == "default":
        return Rotary(d_key, base)
    if scheme == "linear":
        return Rotary(d_key, base, scaling=LinearScaling(entries.number("factor")))
    if scheme == "dynamic":
        return DynamicRotary(d_key, base, factor=entries.number("factor"), trained_length=trained)
    if scheme == "llama3":
        return _llama3(entries, d_key, base, trained)
    if scheme == "yarn":
        return _yarn(entries, d_key, base, trained, entries.number("factor", factor))
    return _longrope(entries, d_key, base, trained, entries.number("factor", factor))


def _llama3(entries: Config, d: int, base: float, trained: int) -> Rotary:
    """Slow feature pairs rotate ``factor`` times slower, fast ones as before, with a linear blend between them."""
    factor = entries.number("factor")
    low = entries.number("low_freq_factor")
    high = entries.number("high_freq_factor")
    if not low < high:
        raise RegardError(f"config.json: low_freq_factor is {low:g}; it must be less than high_freq_factor, {high:g}")
    theta = _inverse_frequencies(d, base)
    rotations = trained * theta / (2 * math.pi)  # [d/2], full rotations over the trained length
    blend = ((rotations - low) / (high - low)).clamp(0, 1)  # 0: slow, 1: fast
    return Rotary(d, base, frequencies=theta * (blend + (1 - blend) / factor))


def _yarn(entries: Config, d: int, base: float, trained: int, factor: float) -> Rotary:
    """As ``_llama3``, but the blend is linear in the pair's index, and ``attention_factor`` sharpens attention."""

    # The index of the feature pair that makes this number of rotations over the trained length.
    def pair_index(rotations: float) -> float:
        return d * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(base))

    first = pair_index(entries.number("beta_fast", 32.0))
    last = pair_index(entries.number("beta_slow", 1.0))
    if entries.boolean("truncate", True):
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, d - 1)
    if first == last:
        last += 0.001  # transformers' value: the ramp must have a width
    ramp = ((torch.arange(d // 2, dtype=torch.float64, device="cpu") - first) / (last - first)).clamp(0, 1)

    def sharpening(scale: float) -> float:
        return 0.1 * scale * math.log(max(factor, 1.0)) + 1  # 1 if texts do not get longer

    mscale = entries.number("mscale", 0.0)
    mscale_all_dim = entries.number("mscale_all_dim", 0.0)
    default = sharpening(1.0)
    if mscale and mscale_all_dim:
        default = sharpening(mscale) / sharpening(mscale_all_dim)
    return Rotary(
        d,
        base,
        frequencies=_inverse_frequencies(d, base) * (1 - ramp + ramp / factor),
        attention_factor=entries.number("attention_factor", default),
    )


def _longrope(entries: Config, d: int, base: float, trained: int, factor: float) -> Rotary:
    default = 1.0
    if factor > 1:
        default = math.sqrt(1 + math.log(factor) / math.log(trained))
    attention_factor = entries.number("attention_factor", default)
    short = _factors(entries, "short_factor", d // 2)
    long = _factors(entries, "long_factor", d // 2)
    # With one set of factors the frequencies do not depend on the length: Llama 3.1 in a GGUF file.
    if short == long:
        divisors = torch.tensor(short, dtype=torch.float64, device="cpu")
        return Rotary(d, base, frequencies=_inverse_frequencies(d, base) / divisors, attention_factor=attention_factor)
    return LongRotary(d, base, attention_factor=attention_factor, short=short, long=long, trained_length=trained)


@register_pytree
@dataclass(frozen=True, eq=False)
class DynamicRotary(Rotary):
    """``base → base · (factor · length / trained − (factor − 1))^{d/(d−2)}`` for texts longer than the trained length.

    The length is the number of tokens read when a key is rotated; keys in a cache keep their rotation.
    """

    factor: float = 1.0
    trained_length: int = 1

    def for_length(self, length: int, device: torch.device) -> Tensor:
        stretch = self.factor * max(length, self.trained_length) / self.trained_length - (self.factor - 1)
        return _inverse_frequencies(self.width, self.base * stretch ** (self.width / (self.width - 2))).to(device)


@register_pytree
@dataclass(frozen=True, eq=False)
class LongRotary(Rotary):
    """``θ_i / short_i`` for texts up to the trained length, ``θ_i / long_i`` for longer ones."""

    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()
    trained_length: int = 1

    def for_length(self, length: int, device: torch.device) -> Tensor:
        factors = self.short
        if length > self.trained_length:
            factors = self.long
        divisors = torch.tensor(factors, dtype=torch.float64, device="cpu")
        return (_inverse_frequencies(self.width, self.base) / divisors).to(device)


def _inverse_frequencies(d: int, base: float) -> Tensor:
    """``θ_i = base^{−2i/d}`` in float64, ``[d/2]``."""
    return float(base) ** (-torch.arange(0, d, 2, dtype=torch.float64, device="cpu") / d)


def _factors(entries: Config, name: str, pairs: int) -> tuple[float, ...]:
    factors = entries.get(name)
    if not isinstance(factors, Sequence) or len(factors) != pairs or not all(_is_positive(x) for x in factors):
        raise entries.error(name, f"it must be {pairs} numbers above 0, one per pair of features")
    return tuple(float(x) for x in factors)


def _is_positive(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and 0 < x < float("inf")
