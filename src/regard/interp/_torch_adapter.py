"""Observe torch's attention functions in any PyTorch model, and attention that a model writes by hand."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from regard._hooks import Observer, run_attention
from regard._operator import torch_options
from regard.interp._followed_tensors import graph_is_checkpointed
from regard.interp._handwritten_attention import HandwrittenAttention

# Only one thread at a time may replace torch's function, or the last one would restore the replacement of the other.
_patch_lock = threading.RLock()
_torch_attention = F.scaled_dot_product_attention
_MULTI_HEAD_SIGNATURE = inspect.signature(F.multi_head_attention_forward)


@contextmanager
def torch_attention_intercepted(observer: Observer) -> Iterator[None]:
    """Call the observer at the attention of its model that torch computes, or that the model writes by hand.

    Each call has the path of the module that makes it.
    """
    with ExitStack() as stack:
        stack.enter_context(observer.running.followed(observer.paths))
        for module in observer.paths:
            if isinstance(module, nn.TransformerEncoder):
                stack.callback(module.register_forward_hook(_zero_padded_rows, with_kwargs=True).remove)
        mode = _AttentionMode(observer)
        stack.enter_context(mode)
        observer.running.at_end = _end_forward
        stack.callback(setattr, observer.running, "at_end", None)
        yield
        observer.unseen += mode.handwritten.unseen()


class _ActiveModes(threading.local):
    """The modes of this thread, in the order in which they began. The last one acts for all of them."""

    def __init__(self) -> None:
        self.modes: list[_AttentionMode] = []


_active = _ActiveModes()


def _observers_here() -> list[tuple[Observer, str]]:
    """The observers of the module that runs now, with its path; empty if none of them selects it."""
    observers = []
    any_selected = False
    for mode in _active.modes:
        # A call outside of the observer's model is ignored.
        running = mode.observer.running.innermost
        if running is not None:
            mode.observer.reach(running.path)
            observers.append((mode.observer, running.path))
            any_selected |= mode.observer.select(running.path)
    # If no observer selects the module, torch's own function runs.
    if not any_selected:
        return []
    return observers


def _end_forward(out: Any) -> Any:
    """The result of a model, with the numbers of everything in it that was deferred."""
    # The last mode acts for all, also at modules of other models.
    for mode in _active.modes:
        out = mode.handwritten.compute_deferred(out)
    return out


def _is_observed_here() -> bool:
    """Whether an observer selects the module that runs now."""
    for mode in _active.modes:
        running = mode.observer.running.innermost
        if running is not None and mode.observer.select(running.path):
            return True
    return False


class _AttentionMode(TorchFunctionMode):
    """Intercepts torch's functions for one observer."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self.observer = observer
        self.handwritten = HandwrittenAttention(observer.running, _observers_here, _is_observed_here)

    def __enter__(self) -> Any:
        _active.modes.append(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _active.modes.remove(self)
        super().__exit__(*error)
        self.handwritten.compute_deferred()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self is _active.modes[-1]:
            if func is F.multi_head_attention_forward and _observers_here():
                return _run_multi_head(func, args, kwargs)
            if func is F.scaled_dot_product_attention and _observers_here():
                return _run_scaled_dot_product({}, *args, **kwargs)
            return self.handwritten.call(func, args, kwargs)
        return func(*args, **kwargs)


def _run_multi_head(func: Any, args: Any, kwargs: Any) -> Any:
    """Torch's own ``multi_head_attention_forward``, in which the inner attention call is observed.

    Torch calls the fused attention function only if no weights are requested. If they are, torch computes them again:
    they are the weights of all heads, whatever an observer did to the output.
    """
    bound = _MULTI_HEAD_SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    with _patch_lock, _inner_call_observed(_query_options(bound.arguments)):
        result = func(**{**bound.arguments, "need_weights": False})
    if bound.arguments["need_weights"]:
        return result[0], func(*args, **kwargs)[1]
    return result


@contextmanager
def _inner_call_observed(query_options: dict[str, Any]) -> Iterator[None]:
    """Replace ``F.scaled_dot_product_attention`` for this thread, because a mode is off while it handles a call."""
    original = F.scaled_dot_product_attention
    thread = threading.get_ident()

    def attend(*args: Any, **kwargs: Any) -> Tensor:
        if threading.get_ident() != thread or not _observers_here():
            return original(*args, **kwargs)
        return _run_scaled_dot_product(query_options, *args, **kwargs)

    F.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original


def _query_options(arguments: dict[str, Any]) -> dict[str, Any]:
    """The options of ``run_attention`` that ``nn.MultiheadAttention`` knows, and its inner attention call does not."""
    cross = arguments["query"] is not arguments["key"]
    padding = arguments["key_padding_mask"]
    real = None
    if not cross and padding is not None:
        real = ~_is_hidden(padding)
    return {"cross": cross, "queries": real}


def _is_hidden(padding: Tensor) -> Tensor:
    """A padding mask of torch as bool: True or −inf means padding."""
    if padding.dtype == torch.bool:
        return padding
    return padding == float("-inf")


def _run_scaled_dot_product(
    query_options: dict[str, Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``F.scaled_dot_product_attention`` with its observers."""
    own_output = None
    if graph_is_checkpointed():
        own_output = _torch_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    # Torch also takes [B, n, d], which is one head.
    has_heads = query.ndim > 3
    if not has_heads:
        if own_output is not None:
            own_output = own_output.unsqueeze(-3)
        query = query.unsqueeze(-3)
        key = key.unsqueeze(-3)
        value = value.unsqueeze(-3)
        if attn_mask is not None and attn_mask.ndim >= 3:
            attn_mask = attn_mask.unsqueeze(-3)
    query, options = torch_options(query, attn_mask, is_causal, scale)
    out, _ = run_attention(
        *(_observers_here(), query, key, value),
        **(options | query_options),
        dropout=dropout_p,
        own_output=own_output,
        copies=True,
    )
    if not has_heads:
        out = out.squeeze(-3)
    return out


def _zero_padded_rows(encoder: nn.TransformerEncoder, args: Any, kwargs: Any, out: Tensor) -> Tensor:
    """Write zeros at padded rows, as the fused path of ``nn.TransformerEncoder`` does; observers disable that path."""
    arguments = dict(zip(("src", "mask", "src_key_padding_mask"), args, strict=False)) | kwargs
    padding = arguments.get("src_key_padding_mask")
    if padding is None or not _takes_fused_path(encoder, arguments["src"]):
        return out
    return out.masked_fill(_is_hidden(padding).unsqueeze(-1), 0)


def _takes_fused_path(encoder: nn.TransformerEncoder, source: Tensor) -> bool:
    """Whether torch would have taken its fused path for nested tensors without an observer."""
    layer = encoder.layers[0]
    if not isinstance(layer, nn.TransformerEncoderLayer) or not encoder.use_nested_tensor or encoder.training:
        return False
    if torch.is_grad_enabled() and any(p.requires_grad for p in encoder.parameters()):
        return False
    self_attention = layer.self_attn
    return bool(
        not layer.norm_first
        and self_attention.batch_first
        and self_attention._qkv_same_embed_dim
        and self_attention.in_proj_bias is not None
        and layer.activation_relu_or_gelu
        and layer.norm1.eps == layer.norm2.eps
        and self_attention.num_heads % 2 == 0
        and source.ndim == 3
    )
