"""‖v_j W_O‖: how much of a key's value a head can move. A weight of 1 on a value of 0 moves nothing.

    norm[b, h, j] = ‖v_j W_h‖₂ = √(v_j G_h v_jᵀ),   G_h = W_h W_hᵀ [E, E],   W_h = the rows of W_O that head h feeds

W_O is ``out_proj`` in our layers and in ``nn.MultiheadAttention``. Elsewhere it has many names, so it is not looked up
but met: the linear layer that is called on the very memory that the heads' output was written to. Where none is, there
are no norms.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.nn import MultiHeadAttention
from regard.watching.seen import Seen

__all__ = ["Norms"]

WAITING = 8  # outputs that no linear layer has read yet; where none ever does they must not pile up


class Norms:
    """Takes the norms at each call; a context manager, for hooks stand on the linear layers meanwhile."""

    def __init__(self, model: nn.Module, paths: dict[nn.Module, str], seen: Seen) -> None:
        self.model, self.seen = model, seen
        self.known = {
            path: module.out_proj
            for module, path in paths.items()
            if isinstance(module, MultiHeadAttention | nn.MultiheadAttention)
        }
        self._waiting: dict[int, tuple[str, int, Tensor, Tensor]] = {}
        self._hooks = ExitStack()

    def __enter__(self) -> Norms:
        for module in self.model.modules():
            if _is_linear(module):
                self._hooks.callback(module.register_forward_pre_hook(self._read).remove)
        return self

    def __exit__(self, *_: Any) -> None:
        self._waiting.clear()
        self._hooks.close()

    def take(self, path: str, out: Tensor, v: Tensor) -> Tensor:
        """The same output; the last call of the place gets its norms now, or when a linear layer reads it."""
        at = len(self.seen.calls[path]) - 1
        v = v.expand(*out.shape[:-3], *v.shape[-3:])
        if path in self.known:
            self._fill(path, at, v, self.known[path], out.shape[-3])
            return out
        # Laid out as [B, n, H, E], which is how it will be read, so that it is read from where it stands.
        out = out.transpose(-3, -2).contiguous().transpose(-3, -2)
        self._waiting[out.data_ptr()] = (path, at, out, v)
        while len(self._waiting) > WAITING:
            del self._waiting[next(iter(self._waiting))]
        return out

    def _read(self, linear: nn.Module, args: Any) -> None:
        x = args[0] if args and isinstance(args[0], Tensor) else None
        found = None if x is None else self._waiting.pop(x.data_ptr(), None)
        if x is None or found is None:
            return
        path, at, out, v = found
        # A part of it: several layers read it, and there is no one W_O.
        if x.numel() == out.numel() and x.shape[-1] == out.shape[-3] * out.shape[-1]:
            self._fill(path, at, v, linear, out.shape[-3])

    def _fill(self, path: str, at: int, v: Tensor, linear: nn.Module, heads: int) -> None:
        calls = self.seen.calls[path]
        calls[at] = replace(calls[at], value_norm=value_norms(v, linear, heads)[:, list(calls[at].heads)])


def value_norms(v: Tensor, linear: nn.Module, heads: int) -> Tensor:
    """``[*B, G, m, E]`` and W_O → ‖v_j W_h‖ ``[B, H, m]``."""
    with torch.no_grad():
        weight: Tensor = linear.weight  # type: ignore[assignment]
        W_OHE = (weight if isinstance(linear, nn.Linear) else weight.T).unflatten(1, (heads, -1))
        v_BGME = v.detach().reshape(-1, *v.shape[-3:])
        gram_HEE = torch.einsum("ohe,ohf->hef", W_OHE.float(), W_OHE.float())
        norms = v.new_empty(v_BGME.shape[0], heads, v.shape[-2], dtype=torch.float32)
        for h in range(heads):
            x = v_BGME[:, h * v.shape[-3] // heads].float()
            norms[:, h] = ((x @ gram_HEE[h]) * x).sum(-1).clamp(min=0).sqrt()
        return norms


def _is_linear(module: nn.Module) -> bool:
    """``nn.Linear``, or ``transformers``' Conv1D, whose weight is the transpose."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
