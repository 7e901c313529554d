"""``Quadratic``: a bias −α‖δ − Δ‖² per head, with which attention can be a convolution."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from regard._checks import as_finite_tensor, check_number
from regard._errors import RegardError
from regard.positions._grid_bias import GridBias
from regard.positions._position_tables import summing_dtype

CENTER_VARIANCE = 2.0  # of each coordinate of the initial centers


class Quadratic(GridBias):
    """``bias[h, i, j] = −α_h ‖δ − Δ_h‖²``, δ = key − query = (δ₁ rows down, δ₂ columns right).

    On a ``height × width`` grid in row-major order; learned ``centers [H, 2]``, whose row h is Δ_h, and ``alpha [H]``.
    The larger α_h, the more of head h's weight is on the key nearest to its query + Δ_h: for α → ∞ a head is one tap of
    a convolution. Expanded, the bias is a dot product of vectors of width 3, minus a constant per head. The constant
    changes the weights only if there are sinks:

        v_h · r_δ − α_h ‖Δ_h‖²,   v_h = −α_h (1, −2Δ₁, −2Δ₂) (``vectors``),   r_δ = (‖δ‖², δ₁, δ₂) (``features``)

    - ``height``, ``width``, ``heads``: as in ``Grid``. A pair with a token outside the grid gets 0, the largest value
      for α ≥ 0.
    - ``centers``: initial values ``[H, 2]``, copied; None draws each coordinate from N(0, 2).
    - ``alpha``: initial value, one number for all heads or ``[H]``, copied. It is the parameter itself, without a
      transformation. Any finite number; below 0 a head avoids Δ.
    - ``offset``: None means m − n, which aligns the last query with the last key.

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
            alpha = [check_number("alpha", alpha)] * heads
        self.alpha = _parameter("alpha", alpha, heads)

    def table(self, q: Tensor, axis: int) -> Tensor:
        """``−α_h (δ − Δ_h)²`` on one axis, δ = 1 − size … size − 1: ``[1, H, 1, 2·size − 1]``."""
        size = (self.height, self.width)[axis]
        dtype = summing_dtype(q)
        alpha = self.alpha.to(dtype).to(q.device)
        center = self.centers[:, axis].to(dtype).to(q.device)
        delta = torch.arange(1 - size, size, device=q.device, dtype=dtype)
        return (-alpha.unsqueeze(-1) * (delta - center.unsqueeze(-1)) ** 2)[None, :, None]

    def vectors(self) -> Tensor:
        """``v_h = −α_h (1, −2Δ₁, −2Δ₂)``: ``[H, 3]``."""
        one = torch.ones_like(self.centers[:, :1])
        return -self.alpha.unsqueeze(-1) * torch.cat([one, -2 * self.centers], dim=-1)

    @staticmethod
    def features(delta: Tensor) -> Tensor:
        """``r_δ = (‖δ‖², δ₁, δ₂)`` for δ ``[*, 2]``: ``[*, 3]``."""
        if delta.shape[-1:] != (2,):
            raise RegardError(f"delta has shape {list(delta.shape)}; it must be [*, 2]: rows down and columns right")
        return torch.cat([(delta * delta).sum(-1, keepdim=True), delta], dim=-1)


def _parameter(name: str, initial: Tensor | Sequence[float] | Sequence[Sequence[float]], *sizes: int) -> nn.Parameter:
    """A parameter with these initial values. A floating-point tensor keeps its dtype; others get the default."""
    values = as_finite_tensor(name, initial)
    if tuple(values.shape) != sizes:
        raise RegardError(f"{name} has shape {list(values.shape)}; it must be {list(sizes)}")
    # A sequence was converted on the CPU; the parameter belongs on the default device.
    if not isinstance(initial, Tensor):
        values = values.to(torch.get_default_device(), torch.get_default_dtype())
    elif not initial.is_floating_point():
        values = values.to(torch.get_default_dtype())
    return nn.Parameter(values.detach().clone())
