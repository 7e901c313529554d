"""Any PyTorch model: calls of ``F.scaled_dot_product_attention`` and ``nn.MultiheadAttention`` are computed by ours."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from regard.masks import Causal, Dense, Mask
from regard.watching.visitor import Visitor, attended

__all__ = ["intercepted"]

_patching = threading.RLock()  # one thread at a time replaces torch's function, or the last puts back the other's
_modes = threading.local()  # those of this thread, in the order they began; the last acts for all
_MHA = inspect.signature(F.multi_head_attention_forward)


@contextmanager
def intercepted(visitor: Visitor) -> Iterator[None]:
    """Within: the visitor is called at every wanted attention call of torch in its model, by its module's path."""
    model = visitor.model
    with ExitStack() as stack:
        places = _Places(model, visitor.paths, stack)
        for module in model.modules():
            if isinstance(module, nn.TransformerEncoder):
                stack.callback(module.register_forward_hook(_zeros_stay_zeros, with_kwargs=True).remove)
        stack.enter_context(_Mode(visitor, places))
        yield


class _Places:
    """The path of the module that is running, innermost last."""

    def __init__(self, model: nn.Module, paths: dict[nn.Module, str], stack: ExitStack) -> None:
        self._threads = threading.local()
        for module in model.modules():
            path = paths[module]
            before = module.register_forward_pre_hook(lambda *_, path=path: self.stack.append(path))
            after = module.register_forward_hook(lambda *_: self._left(), always_call=True)
            stack.callback(before.remove)
            stack.callback(after.remove)

    def _left(self) -> None:
        if self.stack:
            self.stack.pop()

    @property
    def stack(self) -> list[str]:
        """Of this thread: others may run the same model."""
        if not hasattr(self._threads, "stack"):
            self._threads.stack = []
        found: list[str] = self._threads.stack
        return found

    @property
    def now(self) -> str | None:
        """None outside the model."""
        return self.stack[-1] if self.stack else None


class _Mode(TorchFunctionMode):
    def __init__(self, visitor: Visitor, places: _Places) -> None:
        super().__init__()
        self.visitor, self.places = visitor, places

    def __enter__(self) -> Any:
        _active().append(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _active().remove(self)
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self is _active()[-1]:
            if func is F.multi_head_attention_forward and _here():
                return self._multi_head(func, args, kwargs)
            if func is F.scaled_dot_product_attention and _here():
                return _attend(None, *args, **kwargs)
        return func(*args, **kwargs)

    def _multi_head(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Torch's own function; its attention is ours where it calls the fused one, which returns no weights.

        Where weights are asked for they are torch's own, of all heads as they are, whatever the output became.
        """
        given = _MHA.bind(*args, **kwargs)
        given.apply_defaults()
        with _patching, self._seeing_inside(_rows(given.arguments)):
            seen = func(**{**given.arguments, "need_weights": False})
        return (seen[0], func(*args, **kwargs)[1]) if given.arguments["need_weights"] else seen

    @contextmanager
    def _seeing_inside(self, rows: _Rows) -> Iterator[None]:
        """A mode is off while it handles a call: what that call looks up by name is replaced, for this thread."""
        real, here = F.scaled_dot_product_attention, threading.get_ident()

        def attend(*args: Any, **kwargs: Any) -> Tensor:
            if threading.get_ident() != here or not _here():
                return real(*args, **kwargs)
            return _attend(rows, *args, **kwargs)

        F.scaled_dot_product_attention = attend
        try:
            yield
        finally:
            F.scaled_dot_product_attention = real


def _active() -> list[_Mode]:
    if not hasattr(_modes, "all"):
        _modes.all = []
    found: list[_Mode] = _modes.all
    return found


def _here() -> list[tuple[Visitor, str]]:
    """Those who look on at the module that is running, with its path for each."""
    found = [(mode.visitor, mode.places.now) for mode in _active()]
    return [(visitor, path) for visitor, path in found if path is not None and visitor.wants(path)]


@dataclass(frozen=True)
class _Rows:
    """What ``nn.MultiheadAttention`` knows of its queries, and its inner call does not."""

    cross: bool
    real: Tensor | None


def _rows(given: dict[str, Any]) -> _Rows:
    cross, padding = given["query"] is not given["key"], given["key_padding_mask"]
    if cross or padding is None:
        return _Rows(cross, None)
    return _Rows(cross, ~padding if padding.dtype == torch.bool else padding != float("-inf"))


def _attend(
    rows: _Rows | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``F.scaled_dot_product_attention`` before all who look on here."""
    mask: Mask | None = Causal(offset=0) if is_causal else None
    bias = None
    if attn_mask is not None and is_causal:
        raise RuntimeError("attn_mask and is_causal=True were both given; torch takes one of them")
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        mask = Dense(attn_mask)
    elif attn_mask is not None:
        bias = attn_mask
    q, k, v = query, key, value
    if scale is not None and scale < 0:  # torch allows it: −scale·q·k is scale·(−q)·k
        q, scale = -q, -scale
    if q.ndim == 3:  # torch takes [B, n, d] too; a head of one
        q, k, v = (x.unsqueeze(-3) for x in (q, k, v))
        bias = bias if bias is None or bias.ndim < 3 else bias.unsqueeze(-3)
        mask = Dense(mask.see.unsqueeze(-3)) if isinstance(mask, Dense) and mask.see.ndim >= 3 else mask
    known = {} if rows is None else {"cross": rows.cross, "queries": rows.real}
    out, _ = attended(_here(), q, k, v, mask=mask, bias=bias, scale=scale, dropout=dropout_p, **known)
    return out.squeeze(-3) if query.ndim == 3 else out


def _zeros_stay_zeros(encoder: nn.TransformerEncoder, args: Any, kwargs: Any, out: Tensor) -> Tensor:
    """``nn.TransformerEncoder``'s fused path leaves zeros at padded rows; watched, it computes them: zeros again."""
    padding = kwargs.get("src_key_padding_mask", args[2] if len(args) > 2 else None)
    if padding is None or not _fused(encoder, args[0] if args else kwargs["src"]):
        return out
    hidden = padding if padding.dtype == torch.bool else padding == float("-inf")
    return out.masked_fill(hidden.unsqueeze(-1), 0)


def _fused(encoder: nn.TransformerEncoder, src: Tensor) -> bool:
    """Whether torch would have taken its nested fused path, had nobody watched."""
    layer = encoder.layers[0]
    if not isinstance(layer, nn.TransformerEncoderLayer) or not encoder.use_nested_tensor or encoder.training:
        return False
    if torch.is_grad_enabled() and any(p.requires_grad for p in encoder.parameters()):
        return False
    attention_ = layer.self_attn
    return bool(
        not layer.norm_first
        and attention_.batch_first
        and attention_._qkv_same_embed_dim
        and attention_.in_proj_bias is not None
        and layer.activation_relu_or_gelu
        and layer.norm1.eps == layer.norm2.eps
        and attention_.num_heads % 2 == 0
        and src.ndim == 3
    )
