"""The quadratic encoding, with which attention can be a convolution: each head looks at one place beside its query."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from regard.positions.common import finite_tensor, summing_dtype
from regard.positions.grid import OnGrid
from regard.shapes import number

CENTER_VARIANCE = 2.0


class Quadratic(OnGrid):
    """``bias[h, i, j] = −α_h ‖δ − Δ_h‖²``, δ = key − query = (δ₁ rows down, δ₂ columns right).

    On a ``height × width`` grid read row by row; learned ``centers [H, 2]``, row h of which is Δ_h, and ``alpha [H]``.
    The larger α_h, the more of head h's weight lies on the key nearest Δ_h from its query: at α → ∞ a head is one tap
    of a convolution. Expanded, it is a product of width D_p = 3 and a constant a head, which only sinks can see:

        v_h · r_δ − α_h ‖Δ_h‖²,   v_h = −α_h (1, −2Δ₁, −2Δ₂) (``vectors``),   r_δ = (‖δ‖², δ₁, δ₂) (``features``)

    - ``centers``: first values ``[H, 2]``, copied; None draws each coordinate from N(0, 2).
    - ``alpha``: first value, a number for all heads or ``[H]``, copied. It is a parameter as it stands, with no
      transformation: what is given is what acts. Any finite number; below 0 a head looks away from Δ.
    - the grid is the last height·width keys; there must be that many. Keys before it (class tokens) stand nowhere, and
      so do queries that stand before or after the grid; a pair with one of them gets 0, which
      is the most that a pair of cells gets where α ≥ 0.
    - ``offset=None`` is m − n: the last query stands at the last key.

    Memory is that of two tables, ``[1, H, 1, 2·height − 1]`` and ``[1, H, 1, 2·width − 1]``.

    >>> right = Quadratic(1, 3, heads=1, centers=[[0, 1]], alpha=4.0)
    >>> right.dense(torch.zeros(1, 1, 3, 8), 3)[0, 0].tolist()
    [[-4.0, 0.0, -4.0], [-16.0, -4.0, 0.0], [-36.0, -16.0, -4.0]]
    """

    def __init__(
        self,
        height: int,
        width: int,
        heads: int,
        centers: Tensor | Sequence[Sequence[float]] | None = None,
        alpha: float | Tensor | Sequence[float] = 1.0,
        offset: int | None = None,
    ) -> None:
        super().__init__(height, width, heads, offset)
        if centers is None:
            self.centers = nn.Parameter(torch.randn(heads, 2) * CENTER_VARIANCE**0.5)
        else:
            self.centers = _parameter("centers", centers, heads, 2)
        if isinstance(alpha, int | float):
            alpha = [number("alpha", alpha)] * heads
        self.alpha = _parameter("alpha", alpha, heads)

    def table(self, q: Tensor, axis: int) -> Tensor:
        """``−α_h (δ − Δ_h)²`` on one axis, δ = 1 − size … size − 1: ``[1, H, 1, 2·size − 1]``."""
        size = (self.height, self.width)[axis]
        dtype = summing_dtype(q)
        alpha, center = (x.to(device=q.device, dtype=dtype) for x in (self.alpha, self.centers[:, axis]))
        delta = torch.arange(1 - size, size, device=q.device, dtype=alpha.dtype)
        return (-alpha.unsqueeze(-1) * (delta - center.unsqueeze(-1)) ** 2)[None, :, None]

    def vectors(self) -> Tensor:
        """``v_h = −α_h (1, −2Δ₁, −2Δ₂)``: ``[H, 3]``."""
        one = torch.ones_like(self.centers[:, :1])
        return -self.alpha.unsqueeze(-1) * torch.cat([one, -2 * self.centers], dim=-1)

    @staticmethod
    def features(delta: Tensor) -> Tensor:
        """``r_δ = (‖δ‖², δ₁, δ₂)`` for δ ``[*, 2]``: ``[*, 3]``."""
        if delta.shape[-1:] != (2,):
            raise ValueError(f"delta has shape {list(delta.shape)}; it must be [*, 2]: rows down and columns right")
        return torch.cat([(delta * delta).sum(-1, keepdim=True), delta], dim=-1)


def _parameter(name: str, given: Tensor | Sequence[float] | Sequence[Sequence[float]], *sizes: int) -> nn.Parameter:
    """A parameter with those first values; a floating tensor keeps its dtype, other numbers take the default one."""
    values = finite_tensor(name, given)
    if tuple(values.shape) != sizes:
        raise ValueError(f"{name} has shape {list(values.shape)}; it must be {list(sizes)}")
    if not isinstance(given, Tensor):
        values = values.to(torch.get_default_device())
    keep = isinstance(given, Tensor) and given.is_floating_point()
    return nn.Parameter(values.detach().clone().to(values.dtype if keep else torch.get_default_dtype()))
