"""Rotary positions as configurations describe them: base, and the schemes that stretch their reach."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from regard.config import Config
from regard.positions import LinearScaling, Rotary
from regard.values import value

__all__ = ["DynamicRotary", "LongRotary", "rotary"]

BASE = 10000.0  # where a config names none


def rotary(config: Config, d_key: int) -> Rotary:
    """The ``Rotary`` of a config: ``rope_parameters``, or ``rope_theta`` and ``rope_scaling`` in older files."""
    entries = Config(config.part("rope_scaling") or config.part("rope_parameters"))
    if any(isinstance(x, dict) for x in entries.values()):
        raise ValueError("config.json: rope_parameters differ from layer to layer; only one for all layers is read")
    base = entries.real("rope_theta", config.real("rope_theta", BASE))
    part = entries.real("partial_rotary_factor", config.real("partial_rotary_factor", 1.0))
    if part != 1:
        raise ValueError(f"config.json: partial_rotary_factor is {part:g}; only 1 is read for {config.kind}")
    kind = entries.name("rope_type", entries.name("type", "default"))
    if kind not in SCHEMES:
        raise ValueError(f"config.json: rope_type is {kind!r}; known are {', '.join(SCHEMES)}")
    trained = config.whole("max_position_embeddings", 2048)
    if kind != "dynamic":
        trained = entries.whole("original_max_position_embeddings", trained)
        trained = config.whole("original_max_position_embeddings", trained)
    return SCHEMES[kind](config, entries, d_key, base, trained)


def _default(config: Config, entries: Config, d: int, base: float, trained: int) -> Rotary:
    return Rotary(d, base)


def _linear(config: Config, entries: Config, d: int, base: float, trained: int) -> Rotary:
    return Rotary(d, base, scaling=LinearScaling(entries.real("factor")))


def _llama3(config: Config, entries: Config, d: int, base: float, trained: int) -> Rotary:
    """Slow pairs turn ``factor`` times slower, fast ones as before, and those between are blended."""
    factor, low, high = (entries.real(x) for x in ("factor", "low_freq_factor", "high_freq_factor"))
    if not low < high:
        raise ValueError(
            f"config.json: low_freq_factor is {low:g} and high_freq_factor {high:g}; the first must be less"
        )
    theta = _theta(d, base)
    turns = trained * theta / (2 * math.pi)  # in the length the model was first trained on
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return Rotary(d, base, frequencies=theta * (blend + (1 - blend) / factor))


def _yarn(config: Config, entries: Config, d: int, base: float, trained: int) -> Rotary:
    """As Llama 3's blend, but along the pairs' numbers, and with attention sharpened by ``attention_factor``."""
    factor = entries.real("factor", config.whole("max_position_embeddings", trained) / trained)

    def pair(turns: float) -> float:
        return d * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = pair(entries.real("beta_fast", 32.0)), pair(entries.real("beta_slow", 1.0))
    if entries.flag("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, d - 1)
    last = last + 0.001 if first == last else last
    ramp = ((torch.arange(d // 2, dtype=torch.float64, device="cpu") - first) / (last - first)).clamp(0, 1)
    theta = _theta(d, base)

    def sharper(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

    both = entries.real("mscale", 0.0), entries.real("mscale_all_dim", 0.0)
    usual = sharper(both[0]) / sharper(both[1]) if all(both) else sharper(1.0)
    return Rotary(
        d,
        base,
        frequencies=theta * (1 - ramp + ramp / factor),
        attention_factor=entries.real("attention_factor", usual),
    )


def _dynamic(config: Config, entries: Config, d: int, base: float, trained: int) -> Rotary:
    return DynamicRotary(d, base, factor=entries.real("factor"), trained=trained)


def _long(config: Config, entries: Config, d: int, base: float, trained: int) -> Rotary:
    factor = entries.real("factor", config.whole("max_position_embeddings", trained) / trained)
    usual = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    short, long = (_factors(entries, name, d // 2) for name in ("short_factor", "long_factor"))
    sharper = entries.real("attention_factor", usual)
    return LongRotary(d, base, attention_factor=sharper, short=short, long=long, trained=trained)


SCHEMES = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _long,
    "llama3": _llama3,
}


@value
@dataclass(frozen=True, eq=False)
class DynamicRotary(Rotary):
    """``base → base · (factor · length / trained − (factor − 1))^{d/(d−2)}`` once a text is longer than ``trained``.

    The length is that of what has been read when keys are turned; keys in a cache stay as they were turned.
    """

    factor: float = 1.0
    trained: int = 1

    def for_length(self, length: int, device: torch.device) -> Tensor:
        stretch = self.factor * max(length, self.trained) / self.trained - (self.factor - 1)
        return _theta(self.d, self.base * stretch ** (self.d / (self.d - 2))).to(device)


@value
@dataclass(frozen=True, eq=False)
class LongRotary(Rotary):
    """``θ_i / short_i`` for texts up to ``trained`` tokens, ``θ_i / long_i`` for longer ones."""

    short: tuple[float, ...] = field(default=())
    long: tuple[float, ...] = field(default=())
    trained: int = 1

    def for_length(self, length: int, device: torch.device) -> Tensor:
        factors = self.long if length > self.trained else self.short
        return (_theta(self.d, self.base) / torch.tensor(factors, dtype=torch.float64, device="cpu")).to(device)


def _theta(d: int, base: float) -> Tensor:
    """``base^{−2i/d}`` in float64, ``[d/2]``."""
    return float(base) ** (-torch.arange(0, d, 2, dtype=torch.float64, device="cpu") / d)


def _factors(entries: Config, name: str, pairs: int) -> tuple[float, ...]:
    found = entries.get(name)
    if not isinstance(found, Sequence) or len(found) != pairs or not all(_above_0(x) for x in found):
        raise ValueError(f"config.json: {name} must be {pairs} numbers above 0, one a pair of features, got {found!r}")
    return tuple(float(x) for x in found)


def _above_0(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and 0 < x < float("inf")
