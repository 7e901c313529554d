"""Rotary positions: queries and keys are turned by their place, so that their products see only the distance."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.positions.common import check_at, check_floating, finite_tensor
from regard.shapes import integer, number, tracing
from regard.values import value

LAYOUTS = ("halves", "pairs")


class Scaling:
    """A change of the frequencies that stretches the reach of ``Rotary``: ``frequencies [r/2] → [r/2]``.

    >>> class Slower(Scaling):  # all but the fastest pair
    ...     def __call__(self, frequencies):
    ...         return torch.cat([frequencies[:1], frequencies[1:] / 10])
    >>> Rotary(4, scaling=Slower()).inverse_frequencies()
    tensor([1.0000, 0.0010], dtype=torch.float64)
    """

    def __call__(self, frequencies: Tensor) -> Tensor:
        raise TypeError(f"{type(self).__name__} must say how it changes frequencies")


@value
@dataclass(frozen=True)
class LinearScaling(Scaling):
    """``θ_i → θ_i / factor``: the same as dividing every position by ``factor`` (position interpolation).

    >>> LinearScaling(4.0)(torch.tensor([1.0, 0.01]))
    tensor([0.2500, 0.0025])
    """

    factor: float

    def __post_init__(self) -> None:
        _check_factor(self.factor)

    def __call__(self, frequencies: Tensor) -> Tensor:
        return frequencies / self.factor


@value
@dataclass(frozen=True)
class NTKScaling(Scaling):
    """``base → base · factor^{r/(r−2)}``, that is ``θ_i → θ_i · factor^{−2i/(r−2)}``.

    The fastest pair stays as it is and the slowest turns ``factor`` times slower. r must be at least 4: a single pair
    is fastest and slowest at once.

    >>> NTKScaling(4.0)(torch.tensor([1.0, 0.01]))
    tensor([1.0000, 0.0025])
    """

    factor: float

    def __post_init__(self) -> None:
        _check_factor(self.factor)

    def __call__(self, frequencies: Tensor) -> Tensor:
        pairs = frequencies.shape[-1]
        if pairs < 2:
            raise ValueError("with 2 turned features NTKScaling is factor^{2/0}, which is undefined; rotate at least 4")
        i = torch.arange(pairs, dtype=frequencies.dtype, device=frequencies.device)
        return frequencies * float(self.factor) ** (-i / (pairs - 1))


def _check_factor(factor: float) -> None:
    if not 0 < number("factor", factor) < float("inf"):
        raise ValueError(f"factor must be a finite number > 0, got {factor}")


@value
@dataclass(frozen=True, eq=False)
class Rotary:
    """``(x_a, x_b) → c · (x_a cos pθ_i − x_b sin pθ_i, x_a sin pθ_i + x_b cos pθ_i)``,  ``θ_i = base^{−2i/r}``.

    Each pair i of the first r features of x ``[*, H, n, d]`` is turned by its position p times its frequency θ_i, so
    that ⟨R_i q, R_j k⟩ depends on j − i alone; features r … d − 1 are left as they are. Apply it to q and to k.

    - ``layout``: ``"halves"`` pairs feature i with i + r/2 (Llama, GPT-NeoX), ``"pairs"`` 2i with 2i + 1 (GPT-J, the
      original). One is the other after a permutation of features; weights trained with one need that one.
    - ``rotate``: r, even, from 2 to d; None is d.
    - ``scaling``: a ``LinearScaling``, an ``NTKScaling``, or a tuple of them; applied in turn to θ.
    - ``frequencies [r/2]``: θ itself instead of ``base^{−2i/r}``, for schemes with a law of their own.
    - ``attention_factor``: c, which multiplies what is turned (YaRN); 1 keeps lengths.
    - positions are start … start + n − 1, or ``at``: whole numbers ``[n]`` or ``[*, n]``, one row of them a batch entry
      (left padding), the same for all heads. Negative positions turn backwards.
    - angles, sines and cosines are computed in float64, products in at least float32; the result has x's dtype.

    >>> rotary = Rotary(4)
    >>> q, k = torch.randn(2, 1, 1, 4, dtype=torch.float64)
    >>> near, far = ((rotary(q, start=i) * rotary(k, start=i + 3)).sum() for i in (0, 1000))
    >>> torch.testing.assert_close(near, far)
    """

    d: int
    base: float = 10000.0
    layout: str = "halves"
    rotate: int | None = None
    scaling: Scaling | tuple[Scaling, ...] | None = None
    frequencies: Tensor | None = None
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        integer("d", self.d, least=1)
        if not 0 < number("base", self.base) < float("inf"):
            raise ValueError(f"base must be a finite number > 0, got {self.base}")
        if self.layout not in LAYOUTS:
            raise ValueError(f'layout must be "halves" or "pairs", got {self.layout!r}')
        if self.rotate is None and self.d % 2:
            raise ValueError(f"d is {self.d}; features turn in pairs: give an even d, or rotate={self.d - 1} of them")
        if self.rotate is not None and (integer("rotate", self.rotate) % 2 or not 2 <= self.rotate <= self.d):
            raise ValueError(f"rotate must be an even number from 2 to d={self.d}, got {self.rotate}")
        for part in self._scalings():
            if not isinstance(part, Scaling):
                raise TypeError(f"scaling must be LinearScaling(…), NTKScaling(…) or a tuple of them, got {part!r}")
        if self.frequencies is not None:
            theta = finite_tensor("frequencies", self.frequencies)
            if tuple(theta.shape) != (self.width // 2,):
                raise ValueError(
                    f"frequencies has shape {list(theta.shape)}; it must be [{self.width // 2}], one a pair"
                )
            object.__setattr__(self, "frequencies", theta.detach().clone())
        if not abs(number("attention_factor", self.attention_factor)) < float("inf"):
            raise ValueError(f"attention_factor must be a finite number, got {self.attention_factor}")
        # Refuses a scaling that does not fit now, not at the first call. On the CPU, for models are built under
        # torch.device("meta"), where an arange alone makes torch import its compiler: seconds.
        self.inverse_frequencies("cpu" if self.frequencies is None else None)

    @property
    def width(self) -> int:
        """r: how many features turn."""
        return self.d if self.rotate is None else self.rotate

    def _scalings(self) -> tuple[Scaling, ...]:
        return () if self.scaling is None else self.scaling if isinstance(self.scaling, tuple) else (self.scaling,)

    def inverse_frequencies(self, device: torch.device | str | None = None) -> Tensor:
        """θ ``[r/2]`` in float64, scaled; radians a position. A subclass may give its own."""
        if self.frequencies is None:
            exponent = -torch.arange(0, self.width, 2, dtype=torch.float64, device=device) / self.width
            theta = float(self.base) ** exponent
        else:
            theta = self.frequencies.to(device=device, dtype=torch.float64)
        for scaling in self._scalings():
            theta = scaling(theta)
        return theta

    def __call__(self, x: Tensor, at: Tensor | None = None, start: int = 0) -> Tensor:
        """Turn ``x [*, H, n, d]``: row j by position start + j, or by ``at``."""
        cos, sin = self.waves(x, at, start)
        turning = (x if self.width == self.d else x[..., : self.width]).to(cos.dtype)
        if self.layout == "halves":
            other = turning.roll(self.width // 2, dims=-1)
        else:
            other = turning.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        turned = torch.addcmul(turning * cos, other, sin).to(x.dtype)
        return turned if self.width == self.d else torch.cat([turned, x[..., self.width :]], dim=-1)

    def for_length(self, length: int, device: torch.device) -> Tensor:
        """θ for a text of so many tokens: always the same here; schemes that stretch as they read give their own."""
        return self.inverse_frequencies(device)

    def waves(self, x: Tensor, at: Tensor | None, start: int) -> tuple[Tensor, Tensor]:
        """c · cos and ± c · sin of each feature's angle ``[*, n, r]``; the last ones are kept, for layers share them.

        The sign is that of the other feature of a pair: − where x_b turns x_a. Nothing is kept
        while something traces, nor from inference mode into autograd, which cannot save such tensors.
        """
        keeps = type(x) is Tensor and not tracing() and not x.is_meta and _nothing_transforms()
        if keeps:
            now = (x.shape[-1], start, x.shape[-2], x.shape[:-3], x.device, x.dtype, torch.is_inference_mode_enabled())
            last = self.__dict__.get("_last")
            if last is not None and last[0] == now and _same(last[1], at):
                return last[2]
        check_floating("x", x)
        if x.ndim < 3 or x.shape[-1] != self.d:
            raise ValueError(f"x has shape {list(x.shape)}; this Rotary turns [*, heads, n, {self.d}]")
        work = torch.promote_types(x.dtype, torch.float32)
        home = torch.device("cpu") if x.device.type == "mps" else x.device  # mps has no float64
        positions = self._positions(x, at, start, home)
        angle = positions.unsqueeze(-1) * self._frequencies_of(positions, home)
        cos, sin = angle.cos() * self.attention_factor, angle.sin() * self.attention_factor
        if self.layout == "halves":
            cos, sin = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
        else:
            cos, sin = (torch.stack(pair, dim=-1).flatten(-2) for pair in ((cos, cos), (-sin, sin)))
        cos, sin = cos.to(x.device, work), sin.to(x.device, work)
        if keeps:
            kept = None if at is None else at.clone()
            object.__setattr__(self, "_last", (now, kept, (cos, sin)))
        return cos, sin

    def _frequencies_of(self, positions: Tensor, device: torch.device) -> Tensor:
        if type(self).for_length is Rotary.for_length or not positions.numel():
            return self.inverse_frequencies(device)
        return self.for_length(int(positions.max()) + 1, device)

    def _positions(self, x: Tensor, at: Tensor | None, start: int, device: torch.device) -> Tensor:
        """Positions as float64, broadcastable to ``[*, H, n]``."""
        n, batch = x.shape[-2], x.shape[:-3]
        integer("start", start, least=None)
        if at is None:
            return torch.arange(n, dtype=torch.float64, device=device) + start
        check_at(at, n, batch, x)
        if start != 0:
            raise ValueError(f"at says every position already, so start must be 0, got {start}")
        at = at.to(device=device, dtype=torch.float64)
        return at if at.ndim == 1 else at.unsqueeze(-2)


def _nothing_transforms() -> bool:
    """No vmap, grad or jit trace, in which a tensor means more than its values."""
    return torch._C._functorch.peek_interpreter_stack() is None and torch._C._get_tracing_state() is None


def _same(kept: Tensor | None, at: Tensor | None) -> bool:
    """Whether two calls are at the same positions, by value."""
    if kept is None or at is None:
        return kept is at
    return kept.shape == at.shape and kept.dtype == at.dtype and kept.device == at.device and torch.equal(kept, at)
