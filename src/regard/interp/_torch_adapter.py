"""Observe torch's attention functions in any PyTorch model, and attention that a model writes by hand."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.overrides
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.nn import functional as F
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode

from regard._errors import RegardError
from regard._hooks import Observer, run_attention
from regard._operator import torch_options
from regard.interp._active_observers import ActiveObservers, graph_is_checkpointed
from regard.interp._handwritten_attention import HandwrittenAttention
from regard.interp._head_outputs import head_outputs
from regard.interp._matrix_products import in_memory_order

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
        stack.enter_context(_AttentionMode(observer))
        observer.running.at_end = _end_forward
        stack.callback(setattr, observer.running, "at_end", None)
        yield


class _Intercepting(ActiveObservers):
    """The observers of this thread, and the modes that intercept torch's functions for them.

    Modes are alike: the one that torch calls first acts for all observers. So contexts may end in any order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.modes: list[_AttentionMode] = []
        self.handwritten = HandwrittenAttention(self)

    def begin(self, mode: _AttentionMode) -> None:
        self.observers.append(mode.observer)
        self.modes.append(mode)

    def end(self, mode: _AttentionMode) -> None:
        # Torch ends the mode that began last, which may be the one of another observer.
        self.observers.remove(mode.observer)
        self.modes.pop()
        if not self.observers or self.running() is None:
            self.handwritten.compute_deferred()
        else:
            self.handwritten.leave(mode.observer)
        if not self.observers:
            # Nothing of a model stays alive.
            self.handwritten = HandwrittenAttention(self)


_active = _Intercepting()


def _end_forward(out: Any) -> Any:
    """The result of a model, with the numbers of everything in it that was deferred."""
    # The model may be a part of another one, whose forward pass goes on.
    if _active.running() is not None:
        return None
    return _active.handwritten.compute_deferred(out)


def capture_interception() -> Callable[[], AbstractContextManager[None]]:
    """Remember which observers and modules are active; return a function that makes a context in which they are again.

    Gradient checkpointing runs modules a second time in backward, where torch turns modes off.
    """
    observers = list(_active.observers)
    modes = list(_active.modes)
    stacks = [(observer.running, list(observer.running.stack)) for observer in observers]

    @contextmanager
    def resume() -> Iterator[None]:
        # Backward may run in another thread than the model did; there nothing is active.
        previous_observers = _active.observers
        previous_modes = _active.modes
        previous_stacks = [list(running.stack) for running, _ in stacks]
        _active.observers = list(observers)
        _active.modes = list(modes)
        for running, stack in stacks:
            running.stack = list(stack)
        acting = bool(modes) and modes[-1] not in torch.overrides._get_current_function_mode_stack()
        try:
            # The last mode acts for all.
            if acting:
                TorchFunctionMode.__enter__(modes[-1])
            yield
        finally:
            if acting:
                TorchFunctionMode.__exit__(modes[-1], None, None, None)
            _active.observers = previous_observers
            _active.modes = previous_modes
            for (running, _), stack in zip(stacks, previous_stacks, strict=True):
                running.stack = stack

    return resume


class _AttentionMode(TorchFunctionMode):
    """Intercepts torch's functions for one observer."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self.observer = observer

    def __enter__(self) -> Any:
        _active.begin(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _active.end(self)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self is not _active.modes[-1]:
            return func(*args, **kwargs)
        if _stand_for_others():
            if func in (F.multi_head_attention_forward, F.scaled_dot_product_attention):
                _active.note_unseen()
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward and _active.reached():
            return _run_multi_head(func, args, kwargs)
        if func is F.scaled_dot_product_attention and _active.reached():
            return _run_scaled_dot_product({}, *args, **kwargs)
        if isinstance(func, HigherOrderOperator) and func.name().startswith("flex_attention"):
            _active.note_unseen()
        out = _active.handwritten.call(func, args, kwargs)
        if not head_outputs.is_empty():
            head_outputs.follow(func, args, out)
        return out


def _stand_for_others() -> bool:
    """Whether tensors stand for others: within vmap, jvp and their like, ``torch.jit.trace`` and ``torch.export``."""
    is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
    return is_transformed or torch._C._is_tracing() or torch.compiler.is_exporting()


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
        if threading.get_ident() != thread or not _active.reached():
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


def _run_scaled_dot_product(query_options: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
    try:
        return _observe_scaled_dot_product(query_options, *args, **kwargs)
    except RegardError:
        # What torch refuses, too, has torch's error.
        with torch.no_grad():
            _torch_attention(*args, **kwargs)
        raise


def _observe_scaled_dot_product(
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
    observers = _active.reached()
    if graph_is_checkpointed() and not any(observer.replays for observer, _ in observers):
        own_output = _torch_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    memory_order = _memory_order(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
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
    try:
        query, options = torch_options(query, attn_mask, is_causal, scale)
    except RegardError:
        # Some of torch's kernels take options that regard refuses.
        out = _torch_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        _active.note_unseen()
        return out if has_heads else out.squeeze(-3)
    out, _ = run_attention(
        *(observers, query, key, value),
        **(options | query_options),
        dropout=dropout_p,
        own_output=own_output,
        copies=True,
    )
    result = out
    if own_output is None and memory_order is not None:
        result = in_memory_order(out, memory_order)
    if not has_heads:
        result = result.squeeze(-3)
    head_outputs.pass_on(out, result)
    return result


def _memory_order(query: Tensor, *arguments: Any) -> list[int] | None:
    """The order in which torch's own output ``[B, H, n, e]`` has its axes in memory, the longest steps first.

    Models make views of it. None: the usual order.
    """
    if query.ndim != 4 or query.device.type == "meta":
        return None
    key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa = arguments
    backend = torch._fused_sdp_choice(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    if backend == SDPBackend.MATH.value:
        return None
    if query.device.type != "cpu":
        return [0, 2, 1, 3]
    # The kernel for CPUs writes its output as the queries are.
    strides = torch.empty_like(query, device="meta").stride()
    return sorted(range(4), key=lambda axis: -strides[axis])


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
