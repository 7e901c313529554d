"""The mask function that ``transformers`` calls. It returns a mask value, or a dense mask.

``transformers`` describes a mask by a function of single indices. The known functions become mask values of
``regard.masks``; all others become dense bool tensors, made by ``transformers`` itself.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from regard.masks import Causal, Dense, Mask, Padding, RowMask, Segments, Window

MASK_VALUE = "regard_mask_value"  # the attribute of a dense mask that holds the mask value it was made from

# True while `generate` prepares the inputs of a step. `generate` makes the masks of a static cache in advance, and they
# must be tensors; the arguments of the mask function do not show this.
_generate_prepares: ContextVar[bool] = ContextVar("_generate_prepares", default=False)


def wrap_generate() -> None:
    """Let ``make_mask`` know when ``generate`` prepares the inputs of a step; a second call has no effect."""
    from transformers import GenerationMixin

    original = GenerationMixin.prepare_inputs_for_generation
    if hasattr(original, "_notes_preparation"):
        return

    @functools.wraps(original)
    def prepare_inputs_for_generation(*args: Any, **kwargs: Any) -> Any:
        token = _generate_prepares.set(True)
        try:
            return original(*args, **kwargs)
        finally:
            _generate_prepares.reset(token)

    prepare_inputs_for_generation._notes_preparation = True  # type: ignore[attr-defined]
    GenerationMixin.prepare_inputs_for_generation = prepare_inputs_for_generation  # type: ignore[method-assign]


class CacheMask(Mask):
    """A mask value for the first ``key_count`` keys: a static cache has memory for more keys, which are still empty.

    The mask counts positions as if the empty keys did not exist.
    """

    def __init__(self, mask: Mask, key_count: int) -> None:
        self.mask = mask
        self.key_count = key_count

    def lower(self, n: int, m: int, device: torch.device | str = "cpu") -> RowMask:
        return self.mask.lower(n, m, device)

    def real_queries(self, n: int, m: int) -> Tensor | None:
        return self.mask.real_queries(n, m)

    def _name(self) -> str:
        return self.mask._name()


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
    """The mask function that is registered with ``transformers``; the arguments are those of its ``sdpa_mask``."""
    from transformers import masking_utils

    function = mask_function if mask_function is not None else masking_utils.causal_mask_function
    make_dense = functools.partial(
        masking_utils.sdpa_mask,
        *(batch_size, q_length, kv_length, q_offset, kv_offset, function, attention_mask),
        **(options | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}),
    )

    # A static cache gives its offset as a tensor, which must not be read while a graph is traced.
    if isinstance(q_offset, Tensor) and not torch.compiler.is_compiling():
        q_offset = int(q_offset)
    if not isinstance(q_offset, int) or options.get("use_vmap"):
        return make_dense()
    parts = _known_pattern(function, q_offset - kv_offset, q_length, kv_length)
    if parts is None:
        return make_dense()

    # Keys after the last query are the empty part of a static cache.
    key_count = kv_length
    if any(isinstance(part, Causal) for part in parts):
        key_count = min(kv_length, q_offset - kv_offset + q_length)
    if attention_mask is not None:
        real = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
        assert real is not None
        real = real[:, kv_offset : kv_offset + key_count].bool()
        if not bool(real.all()):
            parts.append(Padding(real))
    if not parts:
        return None
    mask = functools.reduce(operator.and_, parts)

    prepares = not torch.compiler.is_compiling() and _generate_prepares.get()
    if not prepares and key_count == kv_length:
        return mask
    if not prepares:
        return CacheMask(mask, key_count)
    # `generate` copies a tensor that is not contiguous, and the copy would lose the attribute.
    dense = make_dense()
    assert dense is not None  # the options above do not let it be skipped
    tensor = dense.contiguous()
    setattr(tensor, MASK_VALUE, CacheMask(mask, key_count))
    return tensor


def _known_pattern(function: Callable[..., Any], offset: int, n: int, m: int) -> list[Mask] | None:
    """The mask values that together are a mask function of ``transformers``; None if the function is not known.

    ``offset`` is the position of the first query among the keys.
    """
    from transformers import masking_utils

    if function is masking_utils.causal_mask_function:
        return [Causal(offset=offset)]
    if function is masking_utils.bidirectional_mask_function:
        return []

    # The other functions are closures: their maker's name says what they are, their variables hold the arguments.
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    variables = dict(zip(function.__code__.co_freevars, cells, strict=True))
    maker = function.__qualname__.split(".")[0]
    if maker == "and_masks":
        masks: list[Mask] = []
        for part in variables["mask_functions"]:
            known = _known_pattern(part, offset, n, m)
            if known is None:
                return None
            masks += known
        return masks
    if maker == "sliding_window_overlay":
        return [Window(int(variables["sliding_window"]) - 1, n + m, offset=offset)]
    if maker == "packed_sequence_mask_function" and n == m and offset == 0:
        return [Segments(variables["packed_sequence_mask"])]
    return None


def mask_and_bias(
    module: nn.Module, n: int, m: int, attention_mask: Any, options: dict[str, Any]
) -> tuple[Mask | None, Tensor | None]:
    """A mask value and a bias from the mask and the options of a call of ``transformers``' attention function."""
    bias: Tensor | None = options.get("position_bias")
    if bias is not None:
        bias = bias[..., :m]
    if isinstance(attention_mask, Mask):
        return attention_mask, bias
    if isinstance(attention_mask, Tensor):
        attention_mask = attention_mask[..., :m]
        if attention_mask.dtype == torch.bool:
            return Dense(attention_mask), bias
        # A floating-point mask is added to the scores.
        if bias is not None:
            attention_mask = bias + attention_mask
        return None, attention_mask

    # Without a mask, as in torch: causal, aligned at the top left, if there is more than one query.
    causal = options.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    if causal and n > 1:
        return Causal(offset=0), bias
    return None, bias
