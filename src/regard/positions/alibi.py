"""ALiBi: a penalty on scores that grows with distance, one slope a head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.positions.common import check_heads, check_offset, finite_tensor, table_dtype
from regard.scores import Bias, RelativeTerm, positions_1d
from regard.shapes import integer, offset_of, tracing
from regard.values import value


def published_slopes(heads: int) -> list[float]:
    """``slope_h = 2^{−8(h+1)/H}``, h = 0 … H − 1, where H is a power of two.

    Otherwise, with P the largest power of two below H: the P slopes for P heads, then every other slope of those for 2P
    heads (the first, the third, …) until there are H.

    >>> published_slopes(3)
    [0.0625, 0.00390625, 0.25]
    """
    power = 1 << (heads.bit_length() - 1)
    extra = [2.0 ** (-8 * (2 * h + 1) / (2 * power)) for h in range(heads - power)]
    return [2.0 ** (-8 * (h + 1) / power) for h in range(power)] + extra


@value
@dataclass(frozen=True, eq=False, repr=False)
class ALiBi(Bias):
    """``bias[h, i, j] = −slope_h · |j − (i + offset)|``.

    - ``slopes [H]``: a tensor (gradients reach it) or a sequence of numbers, all finite; a negative slope favours what
      is far. None is the published sequence for as many heads as the queries have.
    - ``heads``: H, where it should be fixed beforehand; another number of query heads is then refused.
    - ``offset=None`` is m − n: the last query stands at the last key.

    The table holds one column a distance that occurs, ``[1, H, 1, n + m + 1]``: never n × m.

    >>> ALiBi(slopes=[0.5]).dense(torch.zeros(1, 1, 2, 8), 3)[0, 0]
    tensor([[-0.5000,  0.0000, -0.5000],
            [-1.0000, -0.5000,  0.0000]])
    """

    slopes: Tensor | Sequence[float] | None = None
    heads: int | None = None
    offset: int | None = None

    def __post_init__(self) -> None:
        check_offset(self.offset)
        if self.heads is not None:
            integer("heads", self.heads, least=1)
        if self.slopes is None:
            return
        slopes = finite_tensor("slopes", self.slopes)
        if slopes.ndim != 1 or slopes.shape[0] == 0:
            raise ValueError(f"slopes has shape {list(slopes.shape)}; it must be [H], one slope a head")
        if self.heads is not None and slopes.shape[0] != self.heads:
            raise ValueError(
                f"slopes has {slopes.shape[0]} entries, but heads={self.heads}; there must be one slope a head"
            )
        object.__setattr__(self, "slopes", slopes)

    def terms(self, q: Tensor, m: int) -> tuple[RelativeTerm, ...]:
        heads, n = q.shape[1], q.shape[2]
        dtype = table_dtype(q)
        if isinstance(self.slopes, Tensor):
            check_heads(self, self.slopes.shape[0], q)
            slopes = self.slopes.to(device=q.device, dtype=dtype)
        else:
            check_heads(self, heads if self.heads is None else self.heads, q)
            slopes = torch.tensor(published_slopes(heads), device=q.device, dtype=dtype)
        # Distances are −(n − 1) − offset … m − 1 − offset; one more on each side, so that n = 0 and m = 0 are no cases.
        first = -n - offset_of(n, m, self.offset)
        distance = (torch.arange(n + m + 1, device=q.device) + first).abs().to(dtype)
        table = -slopes.unsqueeze(-1) * distance
        return (RelativeTerm(table[None, :, None], *positions_1d(n, m, self.offset, q.device), first),)

    def __repr__(self) -> str:
        said = []
        if isinstance(self.slopes, Tensor):
            values = "…" if tracing() else ", ".join(f"{slope:.4g}" for slope in self.slopes.detach().tolist())
            said.append(f"slopes=[{values}]")
        said += [f"{name}={x}" for name, x in (("heads", self.heads), ("offset", self.offset)) if x is not None]
        return f"ALiBi({', '.join(said)})"
