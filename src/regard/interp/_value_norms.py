"""Measure ‖v_j W_O‖: how much a head can take from a key. A weight of 1 on a value of 0 has no effect.

    norm[b, h, j] = ‖v_j W_h‖₂ = √(v_j G_h v_jᵀ),   G_h = W_h W_hᵀ [E, E],   W_h = the rows of W_O that head h feeds

W_O is ``out_proj`` in the layers of ``regard.nn`` and in ``nn.MultiheadAttention``. Elsewhere it has many names, and is
recognized when it runs: it is the outermost linear layer that is called on the output of the heads, which is followed
through changes of layout and casts. Outermost, because a layer that was wrapped (by LoRA, for example) calls the
original one. If no such layer runs, or if it is not linear, there are no norms.
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from regard._hooks import Observer
from regard._running_modules import ContextHook
from regard.interp._followed_tensors import change_count, may_share_memory
from regard.interp._head_outputs import head_outputs
from regard.interp._output_projection import OutputProjections, input_width
from regard.interp._recording import Recording
from regard.nn import MultiHeadAttention

MOST_PENDING = 8  # outputs that wait for a linear layer; if none ever reads them, they must not pile up
_SUM_TOLERANCE = 1e-9  # of sums in float64 that differ only in their order


@dataclass(eq=False)
class _Pending:
    """The output of one call, which a linear layer may read.

    - ``index``: the number of the call among the recorded calls of the path.
    - ``out [*B, H, n, E]``, ``v``: the output and the values; None as soon as the norms are known, or will not be.
    - ``versions``: how often both had changed in place; None where torch does not count it.
    - ``address``: where the output begins in memory.
    - ``reader``: what the linear layer read, if one did.
    """

    norms: ValueNorms
    path: str
    index: int
    out: Tensor | None
    v: Tensor | None
    versions: tuple[int | None, int | None]
    address: int
    was_changed: bool = False
    was_read: bool = False
    reader: weakref.ref[Tensor] | None = None

    def moved(self, tensor: Tensor, heads: Tensor | None) -> None:
        """The model goes on with ``tensor``, which holds the same numbers."""
        if heads is not None and self.out is not None:
            self.out = heads
            self.versions = (change_count(heads), self.versions[1])
        self.norms.move(self, tensor.data_ptr())

    def note_change(self, target: Tensor) -> None:
        """Something writes into a tensor whose changes torch does not count."""
        own = (self.out, self.v)
        self.was_changed |= any(x is not None and may_share_memory(x, target) for x in own)

    def is_unchanged(self) -> bool:
        """Whether output and values still hold the numbers of the call."""
        if self.out is None or self.v is None or self.was_changed:
            return False
        return self.versions == (change_count(self.out), change_count(self.v))

    def forget_tensors(self) -> None:
        self.out = None
        self.v = None


class ValueNorms:
    """Adds ``value_norm`` to the recorded calls. A context manager: inside it, all linear layers have hooks."""

    def __init__(self, observer: Observer, recording: Recording) -> None:
        self.model = observer.model
        self.recording = recording
        self.projections: dict[str, nn.Module] = {}
        for module, path in observer.paths.items():
            if isinstance(module, MultiHeadAttention | nn.MultiheadAttention):
                self.projections[path] = module.out_proj
        # By the address of the output: in other threads the functions of a model are not followed.
        self._pending: dict[int, _Pending] = {}
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
        for call in self._pending.values():
            call.forget_tensors()
        self._pending.clear()
        self._reading.clear()
        self._hooks.close()

    def paths_without_norms(self) -> list[str]:
        """The paths of recorded calls whose norms are not known."""
        paths = []
        for path, calls in self.recording.calls.items():
            if any(call.value_norm is None for call in calls):
                paths.append(path)
        return paths

    def measure(self, path: str, out: Tensor, v: Tensor) -> Tensor:
        """Add norms to the last call of a path, now or when a linear layer reads ``out``. Returns the same output."""
        index = len(self.recording.calls[path]) - 1
        v = v.expand(*out.shape[:-3], *v.shape[-3:])
        versions = (change_count(out), change_count(v))
        call = _Pending(self, path, index, out, v, versions, out.data_ptr())
        if path in self.projections:
            # These layers read [B, n, H, E]. In this layout they read the memory of `out` itself, without a copy.
            joined = out.transpose(-3, -2).contiguous()
            self._add_norms(call, self.projections[path], joined.flatten(-2))
            return joined.transpose(-3, -2)
        head_outputs.add(out, call)
        self.move(call, call.address)
        while len(self._pending) > MOST_PENDING:
            self._pending.pop(next(iter(self._pending))).forget_tensors()
        return out

    def move(self, call: _Pending, address: int) -> None:
        """Note where in memory the output of a call begins now."""
        if self._pending.get(call.address) is call:
            del self._pending[call.address]
        call.address = address
        self._pending[address] = call

    def _before_linear(self, linear: nn.Module, args: Any) -> None:
        if not args or not isinstance(args[0], Tensor):
            return
        x = args[0]
        for call in self._calls_of(x):
            # A wrapper passes the output on to the layer that it wraps.
            if call in self._reading.values():
                continue
            if call.was_read:
                # If two layers read the output, there is no single W_O.
                self._set_norms(call, None)
                continue
            call.was_read = True
            call.reader = weakref.ref(x)
            if call.is_unchanged() and _reads_heads(x, call.out):
                self._reading[linear] = call
            else:
                call.forget_tensors()

    def _calls_of(self, x: Tensor) -> list[_Pending]:
        """The calls whose output a tensor holds, or holds a part of."""
        followed = [call for call in head_outputs.of(x) if call.norms is self]
        if followed:
            return followed
        call = self._pending.get(x.data_ptr())
        if call is None or (call.was_read and (call.reader is None or call.reader() is None)):
            return []
        return [call]

    def _after_linear(self, linear: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        call = self._reading.pop(linear, None)
        if call is None:
            return
        # Other arguments, which hooks may have added, may choose another matrix for each batch entry.
        if len(args) == 1 and not kwargs:
            self._add_norms(call, linear, args[0])
        call.forget_tensors()

    def _add_norms(self, call: _Pending, linear: nn.Module, x: Tensor) -> None:
        """Add the norms of a call, whose heads wrote ``x [*, H·E]``, which ``linear`` reads."""
        assert call.out is not None and call.v is not None
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


def _reads_heads(x: Tensor, out: Tensor | None) -> bool:
    """Whether the rows of ``x [*, H·E]`` are those of ``out [*B, H, n, E]``, in any order of the rows."""
    assert out is not None
    heads, _, width = out.shape[-3:]
    if x.numel() != out.numel() or x.shape[-1] != heads * width:
        return False
    with torch.no_grad():
        # The numbers show the order of the features, which a model may change like that of the rows.
        rows = x.detach().reshape(-1, heads * width)
        expected = out.detach().transpose(-3, -2).flatten(-2).reshape(-1, heads * width).to(x.dtype)
        if bool(((rows == expected) | (rows.isnan() & expected.isnan())).all()):
            return True
        sums, expected_sums = rows.double().sum(0), expected.double().sum(0)
        return bool(((sums - expected_sums).abs() <= _SUM_TOLERANCE * rows.double().abs().sum(0)).all())


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
