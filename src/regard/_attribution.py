"""``AttributionRequest``: asks the backward pass of one attention call for its contributions."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(eq=False)
class AttributionRequest:
    """What to collect in the backward pass of one attention call, and the results.

    The contribution of a weight is ``c_ij = A_ij (g_i·v_j)``, where g is the gradient of a loss by the output.

    - ``map``: the size g of the map, 0 for none.
    - ``sizes``: B, H, n and m of the call, set in the forward pass.
    - ``keys [B, H, m]``, ``rows [B, H, n]``, ``map_sums [B, H, g, g]``: set in the backward pass. They stay None if
      the loss does not depend on the call.
    - ``leaf``: a tensor for whose sake gradients flow through a call that depends on no other tensor with a gradient.
    """

    map: int = 0
    sizes: tuple[int, int, int, int] = (0, 0, 0, 0)
    keys: Tensor | None = field(default=None, repr=False)
    rows: Tensor | None = field(default=None, repr=False)
    map_sums: Tensor | None = field(default=None, repr=False)
    leaf: Tensor | None = field(default=None, repr=False)

    def store(self, keys: Tensor, rows: Tensor, map_sums: Tensor | None) -> None:
        """Keep the results of a backward pass; those of several passes are added."""
        if self.keys is None or self.rows is None:
            self.keys = keys
            self.rows = rows
            self.map_sums = map_sums
            return
        self.keys = self.keys + keys
        self.rows = self.rows + rows
        if self.map_sums is not None and map_sums is not None:
            self.map_sums = self.map_sums + map_sums

    def require_gradient(self, x: Tensor) -> Tensor:
        """A copy of the graph's leaf ``x`` that requires a gradient: the backward pass then reaches the call."""
        self.leaf = x.detach().requires_grad_()
        return self.leaf


class AttributedOutput(torch.autograd.Function):
    """The output of attention that a model computed from its own weights; its backward pass fills a request.

    ``apply(request, out [B, H, n, e], weights [B, H, n, m], v [B, H or G, m, e])`` returns ``out``.
    """

    @staticmethod
    def forward(ctx, request: AttributionRequest, out: Tensor, weights: Tensor, v: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.request = request
        ctx.save_for_backward(weights, v)
        request.sizes = (*weights.shape,)
        return out.view_as(out)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        weights, v = ctx.saved_tensors
        _contributions_of_weights(ctx.request, grad, weights, v)
        return None, grad, None, None


# Elements of one block of rows: the model has n × m weights already, and the products g·v need not be as many.
_BLOCK_ELEMENTS = 2**22


def _contributions_of_weights(request: AttributionRequest, grad: Tensor, weights: Tensor, v: Tensor) -> None:
    B, H, n, m = weights.shape
    dtype = torch.promote_types(grad.dtype, torch.float32)
    # Heads that share values have them once.
    v = v.repeat_interleave(H // v.shape[1], 1).to(dtype).transpose(-1, -2)
    g = request.map
    keys = grad.new_zeros(B, H, m, dtype=dtype)
    rows = grad.new_zeros(B, H, n, dtype=dtype)
    cells = grad.new_zeros(B, H, g, g, dtype=dtype)
    key_bins = torch.arange(m, device=grad.device) * g // max(1, m)
    step = max(1, _BLOCK_ELEMENTS // max(1, B * H * m))
    for start in range(0, n, step):
        some = slice(start, min(start + step, n))
        contributions = weights[:, :, some].to(dtype) * (grad[:, :, some].to(dtype) @ v)
        keys += contributions.sum(2)
        rows[:, :, some] = contributions.sum(3)
        if g:
            row_bins = torch.arange(some.start, some.stop, device=grad.device) * g // n
            by_key = contributions.new_zeros(*contributions.shape[:3], g).index_add_(3, key_bins, contributions)
            cells.index_add_(2, row_bins, by_key)
    request.store(keys, rows, cells if g else None)
