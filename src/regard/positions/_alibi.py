"""``ALiBi``: a penalty on scores that grows with distance, one slope per head."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from regard._checks import as_finite_tensor, can_read_values, check_head_count, check_offset, check_optional_integer
from regard._errors import RegardError
from regard._lowered_scores import Bias, RelativeTerm, positions_1d
from regard._shapes import resolve_offset
from regard.positions._position_tables import table_dtype


def published_slopes(heads: int) -> list[float]:
    """``slope_h = 2^{−8(h+1)/H}``, h = 0 … H − 1, where H is a power of two.

    Otherwise, with P the largest power of two below H: the P slopes for P heads, then every other slope of those for 2P
    heads (the first, the third, …) until there are H.

    >>> published_slopes(3)
    [0.0625, 0.00390625, 0.25]
    """
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (h + 1) / power) for h in range(power)]
    return slopes + [2.0 ** (-8 * (2 * h + 1) / (2 * power)) for h in range(heads - power)]


class ALiBi(nn.Module, Bias):
    """``bias[h, i, j] = −slope_h · |j − (i + offset)|``.

    - ``slopes [H]``: a tensor (gradients reach it) or a sequence of finite numbers; a negative slope favours distant
      keys. An ``nn.Parameter`` is trained with the layer that holds this bias; other tensors are constants. None
      means the published slopes for the number of query heads.
    - ``heads``: the number of query heads H that is accepted; None accepts every number.
    - ``offset``: None means m − n, which aligns the last query with the last key.

    The table has one column per distance, ``[1, H, 1, n + m + 1]``: never n × m.

    >>> ALiBi(slopes=[0.5]).dense(torch.zeros(1, 1, 2, 8), 3)[0, 0]
    tensor([[-0.5000,  0.0000, -0.5000],
            [-1.0000, -0.5000,  0.0000]])
    """

    def __init__(
        self, slopes: Tensor | Sequence[float] | None = None, heads: int | None = None, offset: int | None = None
    ) -> None:
        super().__init__()
        self.offset = check_offset(offset)
        self.heads = check_optional_integer("heads", heads, least=1)
        values: Tensor | None = None
        if slopes is not None:
            values = as_finite_tensor("slopes", slopes)
            if values.ndim != 1 or values.shape[0] == 0:
                raise RegardError(f"slopes has shape {list(values.shape)}; it must be [H], one slope per head")
            if heads is not None and values.shape[0] != heads:
                raise RegardError(f"slopes must have one slope per head, heads={heads}; got {values.shape[0]}")
            self.heads = values.shape[0]
        self.slopes = values

    def terms(self, q: Tensor, m: int) -> tuple[RelativeTerm, ...]:
        heads = q.shape[1]
        n = q.shape[2]
        dtype = table_dtype(q)
        if self.heads is not None:
            check_head_count(self, self.heads, q)
        if self.slopes is None:
            slopes = torch.tensor(published_slopes(heads), device=q.device, dtype=dtype)
        else:
            slopes = self.slopes.to(dtype).to(q.device)
        # Distances are −(n − 1) − offset … m − 1 − offset. One more on each side lets n = 0 and m = 0 work too.
        first = -n - resolve_offset(n, m, self.offset)
        distance = (torch.arange(n + m + 1, device=q.device) + first).abs().to(dtype)
        table = -slopes.unsqueeze(-1) * distance
        query_positions, key_positions = positions_1d(n, m, self.offset, q.device)
        return (RelativeTerm(table[None, :, None], query_positions, key_positions, first),)

    def __repr__(self) -> str:
        options = []
        if self.slopes is not None:
            numbers = "…"
            # While tracing, slopes can be a placeholder that is not a tensor.
            if isinstance(self.slopes, Tensor) and can_read_values(self.slopes):
                numbers = ", ".join(f"{slope:.4g}" for slope in self.slopes.detach().tolist())
            options.append(f"slopes=[{numbers}]")
        elif self.heads is not None:
            options.append(f"heads={self.heads}")
        if self.offset is not None:
            options.append(f"offset={self.offset}")
        return f"ALiBi({', '.join(options)})"


def _flatten(bias: ALiBi) -> tuple[list[Tensor], tuple[int | None, int | None]]:
    return [] if bias.slopes is None else [bias.slopes], (bias.heads, bias.offset)


def _unflatten(leaves: Iterable[Tensor], context: tuple[int | None, int | None]) -> ALiBi:
    """Without checks: leaves may be placeholders, and they were checked when the bias was created."""
    bias = ALiBi()
    bias.heads = context[0]
    bias.offset = context[1]
    bias.slopes = next(iter(leaves), None)
    return bias


def _flatten_with_keys(bias: ALiBi) -> tuple[list[tuple[pytree.KeyEntry, Tensor]], tuple[int | None, int | None]]:
    leaves, context = _flatten(bias)
    return [(pytree.GetAttrKey("slopes"), leaf) for leaf in leaves], context


# ALiBi is a module, so that learned slopes are parameters of the layer. ``torch.export`` accepts it as a pytree.
pytree.register_pytree_node(
    ALiBi,
    _flatten,
    _unflatten,
    serialized_type_name="regard.positions._alibi.ALiBi",
    flatten_with_keys_fn=_flatten_with_keys,
)
