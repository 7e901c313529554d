"""ALiBi: a penalty on scores that grows with distance, one slope a head."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from regard.positions.common import check_heads, check_offset, finite_tensor, table_dtype
from regard.scores import Bias, RelativeTerm, positions_1d
from regard.shapes import integer, offset_of, readable


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


class ALiBi(nn.Module, Bias):
    """``bias[h, i, j] = −slope_h · |j − (i + offset)|``.

    - ``slopes [H]``: a tensor (gradients reach it) or a sequence of numbers, all finite; a negative slope favours what
      is far. An ``nn.Parameter`` is learned with the layer that holds this value; any other tensor is a constant. None
      is the published sequence for as many heads as the queries have.
    - ``heads``: H, where it should be fixed beforehand; another number of query heads is then refused.
    - ``offset=None`` is m − n: the last query stands at the last key.

    The table holds one column a distance that occurs, ``[1, H, 1, n + m + 1]``: never n × m.

    >>> ALiBi(slopes=[0.5]).dense(torch.zeros(1, 1, 2, 8), 3)[0, 0]
    tensor([[-0.5000,  0.0000, -0.5000],
            [-1.0000, -0.5000,  0.0000]])
    """

    def __init__(
        self,
        slopes: Tensor | Sequence[float] | None = None,
        heads: int | None = None,
        offset: int | None = None,
    ) -> None:
        super().__init__()
        self.offset = check_offset(offset)
        self.heads = None if heads is None else integer("heads", heads, least=1)
        values = None if slopes is None else finite_tensor("slopes", slopes)
        if values is not None:
            if values.ndim != 1 or values.shape[0] == 0:
                raise ValueError(f"slopes has shape {list(values.shape)}; it must be [H], one slope a head")
            if heads is not None and values.shape[0] != heads:
                raise ValueError(
                    f"slopes has {values.shape[0]} entries, but heads={heads}; there must be one slope a head"
                )
            self.heads = values.shape[0]
        self.slopes = values

    def terms(self, q: Tensor, m: int) -> tuple[RelativeTerm, ...]:
        heads, n = q.shape[1], q.shape[2]
        dtype = table_dtype(q)
        check_heads(self, heads if self.heads is None else self.heads, q)
        if self.slopes is None:
            slopes = torch.tensor(published_slopes(heads), device=q.device, dtype=dtype)
        else:
            slopes = self.slopes.to(device=q.device, dtype=dtype)
        # Distances are −(n − 1) − offset … m − 1 − offset; one more on each side, so that n = 0 and m = 0 are no cases.
        first = -n - offset_of(n, m, self.offset)
        distance = (torch.arange(n + m + 1, device=q.device) + first).abs().to(dtype)
        table = -slopes.unsqueeze(-1) * distance
        return (RelativeTerm(table[None, :, None], *positions_1d(n, m, self.offset, q.device), first),)

    def __repr__(self) -> str:
        said = []
        if self.slopes is not None:
            known = isinstance(self.slopes, Tensor) and readable(self.slopes)
            values = ", ".join(f"{slope:.4g}" for slope in self.slopes.detach().tolist()) if known else "…"
            said.append(f"slopes=[{values}]")
        elif self.heads is not None:
            said.append(f"heads={self.heads}")
        return f"ALiBi({', '.join(said if self.offset is None else [*said, f'offset={self.offset}'])})"


def _flatten(bias: ALiBi) -> tuple[list[Tensor], tuple[int | None, int | None]]:
    return [] if bias.slopes is None else [bias.slopes], (bias.heads, bias.offset)


def _unflatten(leaves: Iterable[Tensor], context: tuple[int | None, int | None]) -> ALiBi:
    """Without checks: leaves may be placeholders, and were checked when first built."""
    bias = ALiBi()
    (bias.heads, bias.offset), bias.slopes = context, next(iter(leaves), None)
    return bias


def _flatten_with_keys(bias: ALiBi) -> tuple[list[tuple[pytree.KeyEntry, Tensor]], tuple[int | None, int | None]]:
    leaves, context = _flatten(bias)
    return [(pytree.GetAttrKey("slopes"), leaf) for leaf in leaves], context


# A module, so that learned slopes are parameters of what holds it; and a value, which ``torch.export`` may take in.
pytree.register_pytree_node(
    ALiBi,
    _flatten,
    _unflatten,
    serialized_type_name="regard.positions.alibi.ALiBi",
    flatten_with_keys_fn=_flatten_with_keys,
)
