"""Measure ‖v_j W_O‖: how much a head can take from a key. A weight of 1 on a value of 0 has no effect.

    norm[b, h, j] = ‖v_j W_h‖₂ = √(v_j G_h v_jᵀ),   G_h = W_h W_hᵀ [E, E],   W_h = the rows of W_O that head h feeds

W_O is ``out_proj`` in the layers of ``regard.nn`` and in ``nn.MultiheadAttention``. Elsewhere it has many names, and is
recognized when it runs: it is the linear layer that is called on the memory that holds the output of the heads. If no
such layer runs, there are no norms.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from regard._hooks import Observer
from regard.interp._recording import Recording
from regard.nn import MultiHeadAttention

MOST_PENDING = 8  # outputs that wait for a linear layer; if none ever reads them, they must not pile up


@dataclass(frozen=True, eq=False)
class _Pending:
    """The output of one call, until a linear layer reads it."""

    path: str
    index: int  # of the call among the recorded calls of the path
    out: Tensor
    v: Tensor


class ValueNorms:
    """Adds ``value_norm`` to the recorded calls. A context manager: inside it, all linear layers have hooks."""

    def __init__(self, observer: Observer, recording: Recording) -> None:
        self.model = observer.model
        self.recording = recording
        self.projections: dict[str, nn.Module] = {}
        for module, path in observer.paths.items():
            if isinstance(module, MultiHeadAttention | nn.MultiheadAttention):
                self.projections[path] = module.out_proj
        self._pending: dict[int, _Pending] = {}  # by the address of the output
        self._hooks = ExitStack()

    def __enter__(self) -> ValueNorms:
        for module in self.model.modules():
            # Conv1D is transformers' linear layer, whose weight is the transpose.
            if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
                self._hooks.callback(module.register_forward_pre_hook(self._before_linear).remove)
        return self

    def __exit__(self, *_: Any) -> None:
        self._pending.clear()
        self._hooks.close()

    def measure(self, path: str, out: Tensor, v: Tensor) -> Tensor:
        """Add norms to the last call of a path, now or when a linear layer reads ``out``. Returns the same output."""
        index = len(self.recording.calls[path]) - 1
        v = v.expand(*out.shape[:-3], *v.shape[-3:])
        if path in self.projections:
            self._add_norms(path, index, v, self.projections[path], out.shape[-3])
            return out
        # A linear layer reads [B, n, H, E]. In this layout it reads the memory of `out` itself, without a copy.
        out = out.transpose(-3, -2).contiguous().transpose(-3, -2)
        self._pending[out.data_ptr()] = _Pending(path, index, out, v)
        while len(self._pending) > MOST_PENDING:
            del self._pending[next(iter(self._pending))]
        return out

    def _before_linear(self, linear: nn.Module, args: Any) -> None:
        if not args or not isinstance(args[0], Tensor):
            return
        x = args[0]
        pending = self._pending.pop(x.data_ptr(), None)
        if pending is None:
            return
        # If this layer reads only a part of the output, then several do, and there is no single W_O.
        heads, _, width = pending.out.shape[-3:]
        if x.numel() == pending.out.numel() and x.shape[-1] == heads * width:
            self._add_norms(pending.path, pending.index, pending.v, linear, heads)

    def _add_norms(self, path: str, index: int, v: Tensor, linear: nn.Module, heads: int) -> None:
        calls = self.recording.calls[path]
        observation = calls[index]
        norms_BHM = value_norms(v, linear, heads)
        calls[index] = replace(observation, value_norm=norms_BHM[:, list(observation.heads)])


def value_norms(v: Tensor, linear: nn.Module, heads: int) -> Tensor:
    """‖v_j W_h‖ ``[B, H, m]`` from the values ``[*B, G, m, E]`` and the layer that holds W_O."""
    with torch.no_grad():
        weight: Tensor = linear.weight  # type: ignore[assignment]
        if not isinstance(linear, nn.Linear):
            weight = weight.T
        W_OHE = weight.unflatten(1, (heads, -1)).float()
        v_BGME = v.detach().reshape(-1, *v.shape[-3:])
        # ‖v W‖² = v (W Wᵀ) vᵀ: the product with a small matrix is cheaper than the product with W.
        gram_HEE = torch.einsum("ohe,ohf->hef", W_OHE, W_OHE)
        norms_BHM = v.new_empty(v_BGME.shape[0], heads, v.shape[-2], dtype=torch.float32)
        for h in range(heads):
            # Several query heads may share a value head.
            x = v_BGME[:, h * v.shape[-3] // heads].float()
            norms_BHM[:, h] = ((x @ gram_HEE[h]) * x).sum(-1).clamp(min=0).sqrt()
        return norms_BHM
