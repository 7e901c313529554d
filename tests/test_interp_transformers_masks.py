"""The masks that regard gives to transformers: mask values for the kernels, ordinary tensors for everybody else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
from support.model_configs import real_rows
from transformers import masking_utils as theirs

from regard.interp import huggingface
from regard.interp._mask_tensor import MaskTensor
from regard.interp._transformers_masks import CacheMask

BLOCKS = torch.tensor([[-1, 0, 0, 0, -1, 1, 1], [2, 2, -1, -1, 3, 3, -1], [-1, -1, -1, -1, -1, -1, -1]])
PACKED = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [0, 0, 0, 0, 0, 0, 0], [0, 1, 2, 3, 4, 5, 6]])
LEFT = torch.tensor([0, 2, 5])
FUNCTIONS = {
    "causal": theirs.causal_mask_function,
    "bidirectional": theirs.bidirectional_mask_function,
    "window": theirs.sliding_window_causal_mask_function(3),
    "window of 1": theirs.sliding_window_causal_mask_function(1),
    "both sides": theirs.sliding_window_bidirectional_mask_function(2),
    "chunks": theirs.chunked_causal_mask_function(3, torch.zeros(3, dtype=torch.int64)),
    "chunks, padded": theirs.chunked_causal_mask_function(3, LEFT),
    "blocks": theirs.blockwise_overlay(BLOCKS),
    "causal or blocks": theirs.or_masks(theirs.causal_mask_function, theirs.blockwise_overlay(BLOCKS)),
    "window or blocks": theirs.or_masks(
        theirs.sliding_window_causal_mask_function(3), theirs.blockwise_overlay(BLOCKS)
    ),
    "packed": theirs.and_masks(theirs.causal_mask_function, theirs.packed_sequence_mask_function(PACKED)),
    "everything or blocks": theirs.or_masks(theirs.bidirectional_mask_function, theirs.blockwise_overlay(BLOCKS)),
}
SIZES = [(7, 7, 0, 0), (2, 7, 5, 0), (1, 7, 6, 0), (3, 4, 4, 3)]  # queries, keys, first query, first key


def masks(function: Any, size: tuple[int, int, int, int], padding: Any) -> tuple[Any, torch.Tensor]:
    n, m, first_query, first_key = size
    request = {"batch_size": 3, "q_length": n, "kv_length": m, "q_offset": first_query, "kv_offset": first_key}
    request |= {"mask_function": function, "attention_mask": padding}
    expected = theirs.sdpa_mask(**request, allow_is_causal_skip=False)
    return huggingface.make_mask(**request), expected.expand(3, 1, n, m)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("padded", [False, True], ids=["all real", "padded"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_known_masks_are_two_numbers_per_row_and_equal_to_the_dense_ones(name: str, padded: bool, size: Any) -> None:
    n, m, *_ = size
    found, expected = masks(FUNCTIONS[name], size, real_rows(7) if padded else None)
    assert isinstance(found, MaskTensor) and found.shape == expected.shape and found.dtype == torch.bool
    value = found.regard_mask_value
    assert torch.equal(value.dense(n, m).expand(3, 1, n, m), expected)
    assert torch.equal(found & True, expected)
    # A window of single keys and the block around the query leave a gap in one row.
    if name != "window or blocks":
        assert value.lower(n, m).dense is None
    if padded and n == m:
        assert torch.equal(value.real_queries(n, m), real_rows(7))


@pytest.mark.parametrize(
    "function",
    [
        lambda batch, head, query, key: (query + key) % 3 > 0,
        theirs.and_masks(theirs.causal_mask_function, lambda batch, head, query, key: key != 2),
        theirs.sliding_window_causal_mask_function(0),
        theirs.and_masks(theirs.causal_mask_function, theirs.packed_sequence_mask_function(PACKED[:, :5])),
    ],
    ids=["own function", "own part", "window of 0", "too few ids"],
)
def test_unknown_masks_are_dense_and_still_know_the_padding(function: Any) -> None:
    padding = real_rows(7)[:, :5]
    found, expected = masks(function, (5, 5, 0, 0), padding)
    value = found.regard_mask_value
    assert torch.equal(value.dense(5, 5).expand(3, 1, 5, 5), expected)
    assert torch.equal(value.real_queries(5, 5), padding)


def test_a_static_cache_has_empty_keys_at_its_end() -> None:
    found, expected = masks(FUNCTIONS["causal or blocks"], (2, 7, 3, 0), None)
    assert torch.equal(found.regard_mask_value.dense(2, 7).expand(3, 1, 2, 7), expected)
    found, expected = masks(FUNCTIONS["packed"], (2, 7, 3, 0), None)
    value = found.regard_mask_value
    assert isinstance(value, CacheMask) and value.key_count == 5
    assert torch.equal(value.dense(2, 5).expand(3, 1, 2, 5), expected[..., :5])
    assert not expected[..., 5:].any()


@pytest.fixture
def mask() -> Any:
    return masks(FUNCTIONS["window"], SIZES[0], real_rows(7))[0]


def test_questions_about_a_mask_do_not_make_its_numbers(mask: Any) -> None:
    made = []
    make = mask._make
    mask._make = lambda: made.append(1) or make()
    assert (mask.ndim, mask.dim(), list(mask.size()), mask.size(-1), len(mask)) == (4, 4, [3, 1, 7, 7], 7, 3)
    assert (mask.dtype, mask.device.type, mask.is_floating_point()) == (torch.bool, "cpu", False)
    for same in (
        mask.to("cpu"),
        mask.to(device=torch.device("cpu")),
        mask.to(torch.bool),
        mask.to("cpu", non_blocking=True),
        mask.bool(),
        mask.contiguous(),
        mask.detach(),
        mask[:, :, :, :7],
        mask[:, :, :, : mask.shape[-1]],
    ):
        assert same is mask
    assert repr(mask).startswith("MaskTensor(") and not made
    assert int(mask.sum()) > 0 and int(mask.sum()) > 0 and len(made) == 1


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x[:, :, -1:, :3],
        lambda x: x[0],
        lambda x: x[..., None],
        lambda x: x.repeat(1, 4, 1, 1),
        lambda x: x.expand(3, 2, 7, 7),
        lambda x: ~x,
        lambda x: x & torch.ones(7, 7).tril().bool(),
        lambda x: torch.ones(7, 7).tril().bool() & x,
        lambda x: torch.where(x, 1.0, -2.0),
        lambda x: torch.zeros(3, 4, 7, 7).masked_fill(x, 1.0),
        lambda x: torch.cat([x, x], -1),
        lambda x: x.to(torch.float32),
        lambda x: x.float() * 2 - 1,
        lambda x: x.clone(),
        lambda x: x.all(-1),
        lambda x: x == 1,
        lambda x: torch.nn.functional.pad(x, (0, 2), value=False),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: copy.deepcopy(x),
        lambda x: torch.nn.functional.scaled_dot_product_attention(*[torch.eye(7).expand(3, 1, 7, 7)] * 3, attn_mask=x),
    ],
)
def test_any_other_use_gives_what_the_ordinary_tensor_gives(mask: Any, use: Any) -> None:
    result = use(mask)
    expected = use(mask & True)
    assert type(result) is type(expected)
    if isinstance(result, torch.Tensor):
        assert result.dtype == expected.dtype and torch.equal(result, expected)
    else:
        assert str(result) == str(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_a_sum_the_mask_hides(mask: Any, dtype: torch.dtype) -> None:
    scores = torch.randn(3, 4, 7, 7, dtype=dtype)
    in_place = scores.clone()
    in_place += mask
    for masked in (scores + mask, mask + scores, torch.add(scores, mask), in_place):
        assert masked.dtype == dtype and type(masked) is torch.Tensor
        weights = masked.softmax(-1)
        seen = (mask & True).expand_as(weights)
        # A row that sees nothing has equal weights, as with the eager masks of transformers.
        assert bool((weights[~seen] == 0).all() | ~seen.all(-1).any())
        assert torch.equal(masked[seen], scores[seen])


def test_a_mask_is_changed_in_place_as_its_copy(mask: Any) -> None:
    with torch.no_grad():
        changed = mask.clone()
        changed[:, :, :, 0] = True
    assert bool(changed[..., 0].all()) and not bool((mask & True)[..., 0].all())


class Custom(torch.autograd.Function):
    """An operation of a model's own, which hands its arguments to C++ without asking them."""

    @staticmethod
    def forward(context: Any, scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return scores.masked_fill(~mask, -1.0)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        return gradients[0], None


def test_operations_that_begin_in_cpp_get_ordinary_tensors(mask: Any) -> None:
    scores = torch.randn(3, 1, 7, 7, requires_grad=True)
    assert torch.equal(Custom.apply(scores, mask), scores.masked_fill(~(mask & True), -1.0))
    assert torch.equal(torch.ops.aten.logical_not(mask), ~(mask & True))


def test_modules_hand_a_mask_on(mask: Any) -> None:
    module = nn.Identity()
    assert module(mask) is mask
    run = torch.utils.checkpoint.checkpoint
    checkpointed = run(lambda x, m: x + m.shape[-1], torch.ones(1), mask, use_reentrant=False)
    assert checkpointed == 8
