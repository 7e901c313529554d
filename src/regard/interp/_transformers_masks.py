"""The mask function that ``transformers`` calls. It returns a mask value in the form of a tensor.

``transformers`` describes a mask by a function of single indices. The known functions become mask values of
``regard.masks``; all others become dense bool tensors, made by ``transformers`` itself.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from regard.interp._mask_tensor import MaskTensor, attach_mask_value, mask_as_numbers, mask_value_of
from regard.masks import Causal, Dense, Mask, Padding, RowMask, Segments, Window

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


def make_eager_mask(*arguments: Any, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """The mask function for models that only know eager attention: their masks are 0 or the lowest number of ``dtype``.

    The arguments are those of transformers' ``eager_mask``.
    """
    options.pop("allow_is_causal_skip", None)
    mask = make_mask(*arguments, **options)
    if isinstance(mask, MaskTensor):
        return mask.with_numbers(dtype)
    if mask is None or isinstance(mask, Mask):
        return mask
    tensor = mask_as_numbers(mask, dtype)
    value = mask_value_of(mask)
    return tensor if value is None else attach_mask_value(tensor, value)


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
    """The mask function that is registered with ``transformers``; the arguments are those of its ``sdpa_mask``.

    Returns a ``MaskTensor``, or None if nothing is hidden and ``transformers`` may skip the mask. Returns an ordinary
    bool tensor while a graph is traced.
    """
    from transformers import masking_utils

    function = mask_function if mask_function is not None else masking_utils.causal_mask_function
    numbers = (batch_size, q_length, kv_length, q_offset, kv_offset, function)
    nothing_skipped = options | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}

    def make_dense(padding: Tensor | None) -> Tensor:
        dense = masking_utils.sdpa_mask(*numbers, padding, **nothing_skipped)
        assert dense is not None  # the options do not let it be skipped
        return dense

    is_traced = torch.compiler.is_compiling()

    # A static cache gives its offset as a tensor, which must not be read while a graph is traced.
    if isinstance(q_offset, Tensor) and not is_traced:
        q_offset = int(q_offset)
    parts = None
    if isinstance(q_offset, int) and not options.get("use_vmap"):
        parts = _known_pattern(function, (q_offset, q_length), (kv_offset, kv_length))
    if parts is None:
        if is_traced:
            return make_dense(attention_mask)
        # The padding stays a part of its own, because it also says which queries are real.
        parts = [Dense(make_dense(None))]

    # Keys after the last query are the empty part of a static cache. The mask value is for the other keys.
    key_count = kv_length
    if any(isinstance(part, Causal) for part in parts):
        key_count = min(kv_length, q_offset - kv_offset + q_length)
    if key_count != kv_length:
        parts = _known_pattern(function, (q_offset, q_length), (kv_offset, key_count))
        assert parts is not None
    if attention_mask is not None:
        real = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
        assert real is not None
        real = real[:, kv_offset : kv_offset + key_count].bool()
        if not bool(real.all()):
            parts.append(Padding(real))
    if not parts:
        if is_traced or options.get("allow_is_bidirectional_skip"):
            return None
        parts = [Window(q_length + kv_length)]  # as wide as everything
    mask = functools.reduce(operator.and_, parts)
    if key_count != kv_length:
        mask = CacheMask(mask, key_count)
    if is_traced:
        return mask

    if not _generate_prepares.get():
        shape = (batch_size, 1, q_length, kv_length)
        return MaskTensor(mask, lambda: make_dense(attention_mask), shape, options.get("device", "cpu"))
    # `generate` copies a tensor that is not contiguous, and the copy would lose the attribute.
    tensor = make_dense(attention_mask).contiguous()
    return attach_mask_value(tensor, CacheMask(mask, key_count))


def _known_pattern(function: Callable[..., Any], queries: tuple[int, int], keys: tuple[int, int]) -> list[Mask] | None:
    """The mask values that together are a mask function of ``transformers``; None if the function is not known.

    - ``queries``, ``keys``: the position of the first one, and how many there are.
    """
    from transformers import masking_utils

    first_query, n = queries
    first_key, m = keys
    offset = first_query - first_key
    if function is masking_utils.causal_mask_function:
        return [Causal(offset=offset)]
    if function is masking_utils.bidirectional_mask_function:
        return []

    # The other functions are closures: their maker's name says what they are, their variables hold the arguments.
    # Functions of a model's own may have the same name.
    code = getattr(function, "__code__", None)
    if code is None or function.__module__ != masking_utils.__name__:
        return None
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    variables = dict(zip(code.co_freevars, cells, strict=True))
    maker = function.__qualname__.split(".")[0]
    if maker in ("and_masks", "or_masks"):
        alternatives = []
        for part in variables["mask_functions"]:
            known = _known_pattern(part, queries, keys)
            if known is None:
                return None
            alternatives.append(known)
        if maker == "and_masks":
            return list(itertools.chain.from_iterable(alternatives))
        if not all(alternatives):
            return []  # one of them hides nothing
        joined = [functools.reduce(operator.and_, known) for known in alternatives]
        return [functools.reduce(operator.or_, joined)]
    if maker == "sliding_window_overlay":
        before = int(variables["sliding_window"]) - 1
        # A window of 0 tokens hides every key. It is not a ``Window``, which always contains the query itself.
        return [Window(before, n + m, offset=offset)] if before >= 0 else None
    if maker == "sliding_window_bidirectional_overlay":
        size = int(variables["sliding_window"])
        return [Window(size, size, offset=offset)] if size >= 0 else None

    query_positions = torch.arange(first_query, first_query + n)
    key_positions = torch.arange(first_key, first_key + m)
    if maker == "packed_sequence_mask_function":
        ids = variables["packed_sequence_mask"]
        return _segments(ids, ids, query_positions, key_positions)
    if maker == "chunked_overlay":
        start = variables["left_padding"].unsqueeze(-1)
        size = int(variables["chunk_size"])
        chunk_of_query = (query_positions.to(start.device) - start) // size
        chunk_of_key = (key_positions.to(start.device) - start) // size
        return [Segments(chunk_of_query, chunk_of_key)]
    if maker == "blockwise_overlay":
        # Tokens outside of all blocks have the number −1. There they neither see nor are seen, so queries and keys get
        # different numbers.
        ids = variables["block_sequence_ids"]
        query_ids = torch.where(ids < 0, -1, ids)
        key_ids = torch.where(ids < 0, -2, ids)
        return _segments(query_ids, key_ids, query_positions, key_positions)
    return None


def _segments(query_ids: Tensor, key_ids: Tensor, query_positions: Tensor, key_positions: Tensor) -> list[Mask] | None:
    """``Segments`` from the ids ``[B, tokens]`` at these positions; None if a position is beyond the last token."""
    tokens = query_ids.shape[-1]
    if any(bool((positions >= tokens).any()) for positions in (query_positions, key_positions)):
        return None
    device = query_ids.device
    return [Segments(query_ids[:, query_positions.to(device)], key_ids[:, key_positions.to(device)])]


def implied_mask(module: nn.Module, n: int, options: dict[str, Any]) -> Mask | None:
    """The mask of a call without one, as in torch: causal, aligned at the top left, if there is more than one query."""
    causal = options.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    if causal and n > 1:
        return Causal(offset=0)
    return None


def mask_and_bias(m: int, attention_mask: Any, options: dict[str, Any]) -> tuple[Mask | None, Tensor | None]:
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
    return None, bias
