"""Hugging Face ``transformers``: our attention as one of its implementations, and masks that stay two numbers a row.

``install()`` registers both under ``"regard"``; after it ``model.set_attn_implementation("regard")`` works as for any
other. ``use(model)`` does that and makes sure that the model really calls it and computes what it computed before.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention import attention
from regard.masks import Causal, Dense, Mask, Padding, Segments, Window
from regard.observables import Observation
from regard.scores import RowMask
from regard.watching.visitor import Visitor, attended, outside_graphs

__all__ = ["NAME", "install", "switched", "use"]

NAME = "regard"
VALUE = "regard_value"  # where a dense mask keeps the mask value it was made from
TOLERANCE = 1e-3  # of the largest output; a mask that is ignored changes outputs by far more

_watched: weakref.WeakKeyDictionary[nn.Module, list[Visitor]] = weakref.WeakKeyDictionary()
_reached: list[bool] = []  # whether `attend` ran since `use` began


def install() -> None:
    """Register our attention and mask functions with ``transformers`` under ``"regard"``; twice does no harm.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> sizes = {"vocab_size": 64, "n_embd": 12, "n_layer": 2, "n_head": 3, "bos_token_id": 0, "eos_token_id": 0}
    >>> install()
    >>> model = GPT2LMHeadModel(GPT2Config(**sizes, attn_implementation="regard"))
    >>> model(torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3, 64])
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)


def use(model: Any, *inputs: Any, **named: Any) -> Any:
    """Set ``model`` to our attention, for good; raises by name if it is never called or computes something else.

    The check runs the model twice on ``inputs`` (a few tokens or a small image of noise by default), with the
    implementation it had and with ours. Returns the model.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> sizes = {"vocab_size": 64, "n_embd": 12, "n_layer": 2, "n_head": 3, "bos_token_id": 0, "eos_token_id": 0}
    >>> use(GPT2LMHeadModel(GPT2Config(**sizes))).config._attn_implementation
    'regard'
    """
    if not isinstance(model, nn.Module) or not is_pretrained(model):
        raise TypeError(f"use takes a model of transformers, got {type(model).__name__}; others: regard.watch")
    kinds = _implementations(model)
    if not inputs and not named:
        inputs, named = (), _short_input(model)
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            before = _outputs(model(*inputs, **named))
            _switch(model)
            _reached.clear()
            after = _outputs(model(*inputs, **named))
        if not _reached:
            raise ValueError(
                f"{type(model).__name__} never calls transformers' attention interface, so ours was not reached; "
                "it keeps its own attention"
            )
        for a, b in zip(before, after, strict=True):
            if a.shape != b.shape or not bool((a - b).abs().max() <= TOLERANCE * (1 + a.abs().max())):
                raise ValueError(
                    f"{type(model).__name__} computes something else with our attention; it was left as it was"
                )
    except BaseException:
        _restore(kinds)
        raise
    finally:
        model.train(training)
    return model


@contextmanager
def switched(visitor: Visitor) -> Iterator[None]:
    """Within: every ``transformers`` model in there runs on our attention, and wanted modules are visited.

    ``regard.watch`` and ``ablate`` enter it:

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> sizes = {"vocab_size": 64, "n_embd": 12, "n_layer": 2, "n_head": 3, "bos_token_id": 0, "eos_token_id": 0}
    >>> model = GPT2LMHeadModel(GPT2Config(**sizes))
    >>> before = model.config._attn_implementation
    >>> with regard.watch(model):
    ...     print(model.config._attn_implementation)
    regard
    >>> model.config._attn_implementation == before
    True
    """
    model = visitor.model
    parts = [module for module in model.modules() if is_pretrained(module)]
    kinds = [kind for part in parts for kind in _implementations(part)]
    for part in parts:
        _switch(part)
    _door[0] = outside_graphs(_look)
    for module in visitor.paths:
        _watched.setdefault(module, []).append(visitor)
    try:
        yield
    finally:
        for module in visitor.paths:
            _watched[module].remove(visitor)
            if not _watched[module]:
                del _watched[module]
        _restore(kinds)


def is_pretrained(module: nn.Module) -> bool:
    """Whether a module is a model of ``transformers``, asked without importing it."""
    return any(
        f"{c.__module__}.{c.__name__}" == "transformers.modeling_utils.PreTrainedModel" for c in type(module).__mro__
    )


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, Any]:
    """``transformers``' attention function: ``[B, H, n, d]`` → (``[B, n, H, e]``, what was observed or None).

    Order of operations there and here: scaling, softcap, position bias, mask, softmax with sinks.
    """
    if not _reached:
        _reached.append(True)
    attention_mask = getattr(attention_mask, VALUE, attention_mask)
    if isinstance(attention_mask, Written):
        key, value = key[..., : attention_mask.written, :], value[..., : attention_mask.written, :]
    mask, bias = _lowered(module, query, key, attention_mask, options)
    call: dict[str, Any] = {
        "mask": mask,
        "bias": bias,
        "scale": scaling,
        "softcap": options.get("softcap"),
        "sinks": options.get("s_aux"),
        "dropout": dropout if module.training else 0.0,
    }
    if _watched:
        out, observation = _door[0](module, query, key, value, **call)
    else:
        out, observation = attention(query, key, value, **call), None
    return out.transpose(1, 2).contiguous(), observation


def _look(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **call: Any
) -> tuple[Tensor, Observation | None]:
    """Those who look on at a module."""
    return attended(
        [(visitor, visitor.paths[module]) for visitor in _watched.get(module, ())], query, key, value, **call
    )


_door: list[Callable[..., tuple[Tensor, Observation | None]]] = [_look]


def _lowered(
    module: nn.Module, query: Tensor, key: Tensor, given: Any, options: dict[str, Any]
) -> tuple[Mask | None, Tensor | None]:
    """A mask value and a bias from what the model hands over."""
    bias: Tensor | None = options.get("position_bias")
    n, m = query.shape[-2], key.shape[-2]
    bias = None if bias is None else bias[..., :m]
    if isinstance(given, Mask):
        return given, bias
    if isinstance(given, Tensor):
        given = given[..., :m]
        if given.dtype == torch.bool:
            return Dense(given), bias
        return None, given if bias is None else bias + given
    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    # What torch's own function does without a mask: a triangle from the top left, and a single query sees everything.
    return (Causal(offset=0) if causal and n > 1 else None), bias


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Any:
    """``transformers``' mask function: a mask value (two numbers a row) for known patterns, else a dense mask."""
    from transformers import masking_utils as theirs

    function = theirs.causal_mask_function if mask_function is None else mask_function
    dense = options | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    as_tensor = partial(
        theirs.sdpa_mask, batch_size, q_length, kv_length, q_offset, kv_offset, function, attention_mask, **dense
    )
    known = None
    if isinstance(q_offset, Tensor) and not torch.compiler.is_compiling():
        q_offset = int(q_offset)  # of a static cache
    if isinstance(q_offset, int) and not options.get("use_vmap"):
        known = _pattern(function, q_offset - kv_offset, q_length, kv_length)
    if known is None:
        return as_tensor()
    parts = list(known)
    written = kv_length
    if any(isinstance(part, Causal) for part in parts):
        written = min(kv_length, q_offset - kv_offset + q_length)
    if attention_mask is not None:
        real = theirs.prepare_padding_mask(attention_mask, kv_length, kv_offset)
        assert real is not None
        real = real[:, kv_offset : kv_offset + written].bool()
        if not bool(real.all()):
            parts.append(Padding(real))
    mask: Mask | None = None
    for part in parts:
        mask = part if mask is None else mask & part
    if mask is None or not (_for_generate() or written < kv_length):
        return mask
    value = Written(mask, written)
    if not _for_generate():
        return value
    tensor = as_tensor()
    assert tensor is not None  # skipping was not allowed
    tensor = tensor.contiguous()  # as `generate` will have it, or what is set here is lost
    setattr(tensor, VALUE, value)  # whoever looks at it as a tensor sees the same mask
    return tensor


def _for_generate() -> bool:
    """Whether ``generate`` prepares the masks of a static cache, which must be tensors; its call does not say so."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "create_masks_for_generate":
            return True
        frame = frame.f_back
    return False


class Written(Mask):
    """A mask value, and how many keys there are for it: a static cache has room for more, which nobody sees yet.

    Without that room a query stands where it stands in the text.
    """

    def __init__(self, mask: Mask, written: int) -> None:
        self.mask, self.written = mask, written

    def lower(self, n: int, m: int, device: torch.device | str = "cpu") -> RowMask:
        return self.mask.lower(n, m, device)

    def real_queries(self, n: int, m: int) -> Tensor | None:
        return self.mask.real_queries(n, m)

    def _name(self) -> str:
        return self.mask._name()


def _pattern(function: Callable[..., Any], offset: int, n: int, m: int) -> list[Mask] | None:
    """The mask values whose conjunction a mask function of ``transformers`` is; None if it is none that we know."""
    from transformers import masking_utils as theirs

    if function is theirs.causal_mask_function:
        return [Causal(offset=offset)]
    if function is theirs.bidirectional_mask_function:
        return []
    inside = dict(
        zip(function.__code__.co_freevars, [c.cell_contents for c in function.__closure__ or ()], strict=True)
    )
    kind = function.__qualname__.split(".")[0]
    if kind == "and_masks":
        parts = [_pattern(part, offset, n, m) for part in inside["mask_functions"]]
        return None if any(part is None for part in parts) else [mask for part in parts if part for mask in part]
    if kind == "sliding_window_overlay":
        return [Window(int(inside["sliding_window"]) - 1, n + m, offset=offset)]
    if kind == "packed_sequence_mask_function" and n == m and offset == 0:
        return [Segments(inside["packed_sequence_mask"])]
    return None


def _implementations(model: Any) -> list[tuple[Any, Any]]:
    """Every config inside a model and the implementation it names."""
    found: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation_internal"):
            found[id(config)] = config
    return [(config, config._attn_implementation_internal) for config in found.values()]


def _switch(model: Any) -> None:
    install()
    if any(name != NAME for _, name in _implementations(model)):
        model.set_attn_implementation(NAME)


def _restore(kinds: list[tuple[Any, Any]]) -> None:
    for config, name in kinds:
        config._attn_implementation_internal = name


def _short_input(model: Any) -> dict[str, Any]:
    """A few tokens, or a small image of noise, for a model that was given nothing to check with."""
    g = torch.Generator().manual_seed(0)
    dtype, device = next(model.parameters()).dtype, next(model.parameters()).device
    config, kind = model.config, model.main_input_name
    if kind == "pixel_values":
        size = config.image_size if isinstance(config.image_size, list | tuple) else [config.image_size] * 2
        return {kind: torch.randn(1, config.num_channels, *size, generator=g).to(device, dtype)}
    if kind != "input_ids":
        raise ValueError(f"{type(model).__name__} takes {kind}; give use(model, …) an input to check with")
    ids = torch.randint(config.get_text_config().vocab_size, (2, 7), generator=g).to(device)
    real = torch.tensor([[1] * 7, [1] * 5 + [0] * 2], device=device)
    given = {"input_ids": ids, "attention_mask": real}
    return given | ({"decoder_input_ids": ids[:, :5]} if config.is_encoder_decoder else {})


def _outputs(result: Any) -> list[Tensor]:
    """The first result, at rows that mean something: the first of the batch, which is never padded."""
    return [result[0][:1]]
