"""Keys that models of `transformers` select before attention, and the sink of texts whose first keys were dropped."""

import torch
from torch import nn

import regard
from regard import Causal, Dense, Observe
from regard.interp import Recording
from regard.interp.huggingface import attend

G = torch.Generator().manual_seed(3)
Q = torch.randn(2, 4, 5, 6, generator=G)
K, V = (torch.randn(2, 2, 7, 6, generator=G) for _ in range(2))


class Module(nn.Module):
    is_causal = False


def test_selected_keys_are_the_only_ones_that_count() -> None:
    indices = torch.stack([torch.randperm(7, generator=G)[:3] for _ in range(10)]).reshape(2, 5, 3)
    visible = torch.zeros(2, 1, 5, 7, dtype=torch.bool)
    for b in range(2):
        for i in range(5):
            visible[b, 0, i, indices[b, i]] = True
    out, _ = attend(Module(), Q, K, V, None, indices=indices.int())
    torch.testing.assert_close(out, regard.attention(Q, K, V, mask=Dense(visible)).transpose(1, 2))
    # With a mask, a key must be selected and visible.
    out, _ = attend(Module(), Q, K, V, Causal(), indices=indices)
    torch.testing.assert_close(out, regard.attention(Q, K, V, mask=Causal() & Dense(visible)).transpose(1, 2))


def test_selected_blocks_are_those_of_their_group_of_heads() -> None:
    module = Module()
    module.indexer = Module()
    module.indexer.block_size = 3
    # Two groups of two heads; 7 keys are two whole blocks and one key. −1 selects nothing.
    blocks = torch.tensor([[0, -1], [1, 2]]).view(1, 2, 1, 2).expand(2, 2, 5, 2)
    visible = torch.zeros(2, 4, 5, 7, dtype=torch.bool)
    visible[:, :2, :, :3] = True
    visible[:, 2:, :, 3:] = True
    out, _ = attend(module, Q, K, V, None, block_indices=blocks)
    torch.testing.assert_close(out, regard.attention(Q, K, V, mask=Dense(visible)).transpose(1, 2))


def test_no_selection_changes_nothing() -> None:
    out, _ = attend(Module(), Q, K, V, None, indices=None, block_indices=None)
    torch.testing.assert_close(out, regard.attention(Q, K, V).transpose(1, 2))


def joined_sink(sink: int, dropped: int) -> torch.Tensor | None:
    """The sink of a prompt of 4 tokens and of one step, whose cache has dropped so many keys."""
    calls = []
    for n, m in ((4, 4), (1, 5 - dropped)):
        k = K[:, :1, :m]
        _, observation = regard.attention(Q[:, :1, :n], k, k, mask=Causal(), observe=Observe(sink=sink))
        calls.append(observation)
    recording = Recording({"layer": calls})
    return recording["layer"].sink


def test_dropped_keys_have_no_weight_in_the_sink() -> None:
    whole = joined_sink(sink=1, dropped=0)
    assert whole is not None
    assert bool((whole[..., 4] > 0).all())
    # The first key that is left is not the first one of the text.
    cut = joined_sink(sink=1, dropped=2)
    assert cut is not None
    assert bool((cut[..., 4] == 0).all())
    torch.testing.assert_close(cut[..., :4], whole[..., :4])


def test_a_sink_that_was_dropped_in_part_is_not_known() -> None:
    assert joined_sink(sink=2, dropped=1) is None
    assert joined_sink(sink=2, dropped=2) is not None
