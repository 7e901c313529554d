"""``Rotary``: q and k are rotated by their positions, so that q·k depends on their distance alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard._checks import (
    as_finite_tensor,
    check_float_tensor,
    check_integer,
    check_number,
    check_position_ids,
    check_positive,
    is_tracing,
)
from regard._devices import float64_device
from regard._errors import RegardError, RegardTypeError
from regard._register_pytree import register_pytree
from regard.positions._position_tables import table_dtype

LAYOUTS = ("halves", "pairs")


class Scaling:
    """Base class of scalings, which change the frequencies of ``Rotary`` for longer inputs: ``[r/2] → [r/2]``.

    >>> class Slower(Scaling):  # all pairs except the fastest
    ...     def __call__(self, frequencies):
    ...         return torch.cat([frequencies[:1], frequencies[1:] / 10])
    >>> Rotary(4, scaling=Slower()).inverse_frequencies()
    tensor([1.0000, 0.0010], dtype=torch.float64)
    """

    def __call__(self, frequencies: Tensor) -> Tensor:
        raise RegardTypeError(f"{type(self).__name__} must implement __call__(frequencies)")


@register_pytree
@dataclass(frozen=True)
class LinearScaling(Scaling):
    """``θ_i → θ_i / factor``: the same as dividing every position by ``factor`` (position interpolation).

    >>> LinearScaling(4.0)(torch.tensor([1.0, 0.01]))
    tensor([0.2500, 0.0025])
    """

    factor: float

    def __post_init__(self) -> None:
        check_positive("factor", self.factor)

    def __call__(self, frequencies: Tensor) -> Tensor:
        return frequencies / self.factor


@register_pytree
@dataclass(frozen=True)
class NTKScaling(Scaling):
    """``base → base · factor^{r/(r−2)}``, that is ``θ_i → θ_i · factor^{−2i/(r−2)}``.

    The fastest pair is unchanged and the slowest rotates ``factor`` times slower. r must be at least 4: one pair
    alone would be the fastest and the slowest at once.

    >>> NTKScaling(4.0)(torch.tensor([1.0, 0.01]))
    tensor([1.0000, 0.0025])
    """

    factor: float

    def __post_init__(self) -> None:
        check_positive("factor", self.factor)

    def __call__(self, frequencies: Tensor) -> Tensor:
        pairs = frequencies.shape[-1]
        if pairs < 2:
            raise RegardError("NTKScaling needs at least 4 rotated features, got 2: factor^{2/0} is undefined")
        i = torch.arange(pairs, dtype=frequencies.dtype, device=frequencies.device)
        return frequencies * float(self.factor) ** (-i / (pairs - 1))


@register_pytree
@dataclass(frozen=True, eq=False)
class Rotary:
    """``(x_a, x_b) → c · (x_a cos pθ_i − x_b sin pθ_i, x_a sin pθ_i + x_b cos pθ_i)``,  ``θ_i = base^{−2i/r}``.

    Each pair i of the first r features of x ``[*, H, n, d]`` is rotated by its position p times its frequency θ_i, so
    that ⟨R_i q, R_j k⟩ depends on j − i alone. Features r … d − 1 are unchanged. Apply it to q and to k.

    - ``d``: the width of q and k.
    - ``base``: the base of the frequencies.
    - ``layout``: ``"halves"`` pairs feature i with i + r/2 (Llama, GPT-NeoX), ``"pairs"`` 2i with 2i + 1 (GPT-J, the
      original). They differ by a permutation of features; weights need the layout they were trained with.
    - ``rotate``: r, even, from 2 to d; None means d.
    - ``scaling``: a ``LinearScaling``, an ``NTKScaling``, or a tuple of them, applied to θ in order.
    - ``frequencies [r/2]``: θ itself instead of ``base^{−2i/r}``.
    - ``attention_factor``: c, which multiplies the rotated features (YaRN); 1 keeps their lengths.

    A call takes x and its positions: start … start + n − 1, or ``position_ids``, integers ``[n]`` or ``[*, n]``, one
    row per batch entry (left padding), the same for all heads. Negative positions rotate backwards. Angles, sines and
    cosines are computed in float64, products in at least float32; the result has x's dtype.

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
        check_integer("d", self.d, least=1)
        check_positive("base", self.base)
        if self.layout not in LAYOUTS:
            raise RegardError(f'layout must be "halves" or "pairs", got {self.layout!r}')
        if self.rotate is None and self.d % 2:
            raise RegardError(f"d must be even, because features rotate in pairs, got {self.d}; or give rotate=")
        if self.rotate is not None:
            check_integer("rotate", self.rotate)
            if self.rotate % 2 or not 2 <= self.rotate <= self.d:
                raise RegardError(f"rotate must be an even number from 2 to d={self.d}, got {self.rotate}")
        for scaling in self._scalings():
            if not isinstance(scaling, Scaling):
                raise RegardTypeError(
                    f"scaling must be LinearScaling(…), NTKScaling(…) or a tuple of them, got {scaling!r}"
                )
        if self.frequencies is not None:
            theta = as_finite_tensor("frequencies", self.frequencies)
            pairs = self.width // 2
            if tuple(theta.shape) != (pairs,):
                raise RegardError(f"frequencies has shape {list(theta.shape)}; it must be [{pairs}], one per pair")
            object.__setattr__(self, "frequencies", theta.detach().clone())
        if not abs(check_number("attention_factor", self.attention_factor)) < float("inf"):
            raise RegardError(f"attention_factor must be a finite number, got {self.attention_factor}")
        # A scaling that does not fit is refused now and not at the first call. On the CPU, because models are built
        # under torch.device("meta"), where one arange makes torch import its compiler, which takes seconds.
        self.inverse_frequencies("cpu" if self.frequencies is None else None)

    @property
    def width(self) -> int:
        """r, the number of rotated features."""
        return self.d if self.rotate is None else self.rotate

    def _scalings(self) -> tuple[Scaling, ...]:
        if self.scaling is None:
            return ()
        if isinstance(self.scaling, tuple):
            return self.scaling
        return (self.scaling,)

    def inverse_frequencies(self, device: torch.device | str | None = None) -> Tensor:
        """θ ``[r/2]`` in float64, scaled, in radians per position. A subclass may override it."""
        if self.frequencies is None:
            exponent = -torch.arange(0, self.width, 2, dtype=torch.float64, device=device) / self.width
            theta = float(self.base) ** exponent
        else:
            theta = self.frequencies.to(device).to(torch.float64)
        for scaling in self._scalings():
            theta = scaling(theta)
        return theta

    def __call__(self, x: Tensor, position_ids: Tensor | None = None, start: int = 0) -> Tensor:
        """Rotate ``x [*, H, n, d]``: row j by position start + j, or by ``position_ids``."""
        cos, sin = self.cos_sin(x, position_ids, start)
        features = x
        if self.width != self.d:
            features = x[..., : self.width]
        features = features.to(cos.dtype)
        if self.layout == "halves":
            partner = features.roll(self.width // 2, dims=-1)
        else:
            partner = features.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        rotated = torch.addcmul(features * cos, partner, sin).to(x.dtype)
        if self.width == self.d:
            return rotated
        return torch.cat([rotated, x[..., self.width :]], dim=-1)

    def for_length(self, length: int, device: torch.device) -> Tensor:
        """Return θ for an input of ``length`` tokens. Here θ does not depend on it; a subclass may override this."""
        return self.inverse_frequencies(device)

    def cos_sin(self, x: Tensor, position_ids: Tensor | None, start: int) -> tuple[Tensor, Tensor]:
        """c · cos and ± c · sin of each feature's angle, ``[*, n, r]``.

        The sine has the sign with which the partner of a feature is multiplied: − for x_a, + for x_b. The last result
        is cached, because the layers of a model share it.
        """
        # Nothing is cached while tracing. The key says whether inference mode is on, because autograd cannot save
        # tensors that were made in it.
        cacheable = type(x) is Tensor and not is_tracing() and not x.is_meta and _no_transforms()
        if cacheable:
            key = (x.shape[-1], start, x.shape[-2], x.shape[:-3], x.device, x.dtype, torch.is_inference_mode_enabled())
            cached = self.__dict__.get("_cached")
            if cached is not None and cached[0] == key and _same_positions(cached[1], position_ids):
                return cached[2]
        check_float_tensor("x", x)
        if x.ndim < 3 or x.shape[-1] != self.d:
            raise RegardError(f"x has shape {list(x.shape)}; for this Rotary it must be [*, heads, n, {self.d}]")
        device = float64_device(x)
        positions = self._positions(x, position_ids, start, device)
        angle = positions.unsqueeze(-1) * self._frequencies_of(positions, device)
        cos = angle.cos() * self.attention_factor
        sin = angle.sin() * self.attention_factor
        if self.layout == "halves":
            cos = torch.cat([cos, cos], dim=-1)
            sin = torch.cat([-sin, sin], dim=-1)
        else:
            cos = torch.stack([cos, cos], dim=-1).flatten(-2)
            sin = torch.stack([-sin, sin], dim=-1).flatten(-2)
        dtype = table_dtype(x)
        cos = cos.to(x.device, dtype)
        sin = sin.to(x.device, dtype)
        if cacheable:
            copied = None if position_ids is None else position_ids.clone()
            object.__setattr__(self, "_cached", (key, copied, (cos, sin)))
        return cos, sin

    def _frequencies_of(self, positions: Tensor, device: torch.device) -> Tensor:
        if type(self).for_length is Rotary.for_length or not positions.numel():
            return self.inverse_frequencies(device)
        return self.for_length(int(positions.max()) + 1, device)

    def _positions(self, x: Tensor, position_ids: Tensor | None, start: int, device: torch.device) -> Tensor:
        """Positions as float64, broadcastable to ``[*, H, n]``."""
        n = x.shape[-2]
        batch = x.shape[:-3]
        check_integer("start", start, least=None)
        if position_ids is None:
            return torch.arange(n, dtype=torch.float64, device=device) + start
        check_position_ids(position_ids, n, batch, x)
        if start != 0:
            raise RegardError(f"start must be 0 where position_ids are given, got {start}")
        positions = position_ids.to(device).to(torch.float64)
        return positions if positions.ndim == 1 else positions.unsqueeze(-2)


def _no_transforms() -> bool:
    """Whether no vmap, grad or jit trace is active, in which a tensor is more than its values."""
    return torch._C._functorch.peek_interpreter_stack() is None and torch._C._get_tracing_state() is None


def _same_positions(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two calls have the same position ids, by value."""
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
