"""Measure ‖v_j W_O‖: how much a head can take from a key. A weight of 1 on a value of 0 has no effect.

    norm[b, h, j] = ‖v_j W_h‖₂ = √(v_j G_h v_jᵀ),   G_h = W_h W_hᵀ [E, E],   W_h = the rows of W_O that head h feeds

W_O is ``out_proj`` in the layers of ``regard.nn`` and in ``nn.MultiheadAttention``. Elsewhere it has many names, and is
recognized when it runs: it is the outermost linear layer that is called on the memory that holds the output of the
heads. Outermost, because a layer that was wrapped (by LoRA, for example) calls the original one. If no such layer runs,
or if it is not linear, there are no norms.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from regard._hooks import Observer
from regard._running_modules import ContextHook
from regard.interp._followed_tensors import change_count
from regard.interp._output_projection import OutputProjections, input_width
from regard.interp._recording import Recording
from regard.nn import MultiHeadAttention

MOST_PENDING = 8  # outputs that wait for a linear layer; if none ever reads them, they must not pile up


@dataclass(eq=False)
class _Pending:
    """The output of one call, which a linear layer may read.

    - ``index``: the number of the call among the recorded calls of the path.
    - ``version``: how often the output had changed in place; None if torch does not count it.
    - ``was_read``: whether a linear layer has read it.
    """

    path: str
    index: int
    out: Tensor
    v: Tensor
    version: int | None
    was_read: bool = False


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
        self._reading: dict[nn.Module, _Pending] = {}  # layers that run now, with the output that they read
        self._projections = OutputProjections()
        self._hooks = ExitStack()

    def __enter__(self) -> ValueNorms:
        for module in self.model.modules():
            if input_width(module) is not None:
                self._hooks.callback(module.register_forward_pre_hook(ContextHook(self._before_linear)).remove)
                after = ContextHook(self._after_linear)
                self._hooks.callback(module.register_forward_hook(after, with_kwargs=True).remove)
        return self

    def __exit__(self, *_: Any) -> None:
        self._pending.clear()
        self._reading.clear()
        self._hooks.close()

    def measure(self, path: str, out: Tensor, v: Tensor) -> Tensor:
        """Add norms to the last call of a path, now or when a linear layer reads ``out``. Returns the same output."""
        index = len(self.recording.calls[path]) - 1
        v = v.expand(*out.shape[:-3], *v.shape[-3:])
        # A linear layer reads [B, n, H, E]. In this layout it reads the memory of `out` itself, without a copy.
        joined = out.transpose(-3, -2).contiguous()
        out = joined.transpose(-3, -2)
        call = _Pending(path, index, out, v, change_count(out))
        if path in self.projections:
            self._add_norms(call, self.projections[path], joined.flatten(-2))
            return out
        self._pending[out.data_ptr()] = call
        while len(self._pending) > MOST_PENDING:
            del self._pending[next(iter(self._pending))]
        return out

    def _before_linear(self, linear: nn.Module, args: Any) -> None:
        if not args or not isinstance(args[0], Tensor):
            return
        x = args[0]
        call = self._pending.get(x.data_ptr())
        # A wrapper passes the output on to the layer that it wraps.
        if call is None or call in self._reading.values():
            return
        if call.was_read or change_count(x) != call.version:
            # If two layers read the output, or if it changed before, there is no single W_O.
            self._set_norms(call, None)
            return
        call.was_read = True
        # If this layer reads only a part of the output, then several do, and there is no single W_O.
        heads, _, width = call.out.shape[-3:]
        if x.numel() == call.out.numel() and x.shape[-1] == heads * width:
            self._reading[linear] = call

    def _after_linear(self, linear: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        call = self._reading.pop(linear, None)
        # Other arguments, which hooks may have added, may choose another matrix for each batch entry.
        if call is not None and len(args) == 1 and not kwargs:
            self._add_norms(call, linear, args[0])

    def _add_norms(self, call: _Pending, linear: nn.Module, x: Tensor) -> None:
        """Add the norms of a call, whose heads wrote ``x [*, H·E]``, which ``linear`` reads."""
        heads = call.out.shape[-3]
        grams_HEE = self._projections.grams(linear, x, heads)
        if grams_HEE is None:
            return
        self._set_norms(call, value_norms(call.v, grams_HEE))

    def _set_norms(self, call: _Pending, norms_BHM: Tensor | None) -> None:
        calls = self.recording.calls[call.path]
        observation = calls[call.index]
        if norms_BHM is not None:
            norms_BHM = norms_BHM[:, list(observation.heads)]
        calls[call.index] = replace(observation, value_norm=norms_BHM)


def value_norms(v: Tensor, grams_HEE: Tensor) -> Tensor:
    """‖v_j W_h‖ ``[B, H, m]`` from the values ``[*B, G, m, E]`` and from G_h, in float32.

    ‖v W‖² = v (W Wᵀ) vᵀ: the product with a small matrix is cheaper than the product with W.
    """
    with torch.no_grad():
        heads = len(grams_HEE)
        v_BGME = v.detach().reshape(-1, *v.shape[-3:])
        norms_BHM = v.new_empty(v_BGME.shape[0], heads, v.shape[-2], dtype=torch.float32)
        for h in range(heads):
            # Several query heads may share a value head.
            x = v_BGME[:, h * v.shape[-3] // heads].float()
            norms_BHM[:, h] = ((x @ grams_HEE[h]) * x).sum(-1).clamp(min=0).sqrt()
        return norms_BHM
