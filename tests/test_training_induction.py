"""Passages that are said again, and a beginning from which heads learn to look them up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.own_text import opened, written

import regard
from regard.interp import watch
from regard.models import create
from regard.nn import MultiHeadAttention
from regard.training.tasks.common import llama_config
from regard.training.tasks.induction_aids import POSITION_SCORE, TOKEN_SCORE, repeat_passage, tie_initial_weights

PLAIN = {"data.opening": 0.0, "data.quoted": 0.0}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("own"))


@given(st.integers(2, 40), st.integers(1, 20), st.integers(0, 10**6))
def test_a_block_comes_twice(n: int, shortest: int, seed: int) -> None:
    shortest = min(shortest, n // 2)
    draw = torch.Generator().manual_seed(seed)
    different = torch.stack([torch.randperm(100, generator=draw)[:n] for _ in range(5)])
    ids, copied = repeat_passage(different, shortest, draw)
    assert ids.shape == copied.shape == (5, n)
    for row, known, before in zip(ids.tolist(), copied.tolist(), different.tolist(), strict=True):
        twice = [i for i, x in enumerate(row) if x in row[:i]]
        assert shortest <= len(twice) <= n // 2
        assert twice == list(range(twice[0], twice[0] + len(twice)))  # in one piece
        source = row.index(row[twice[0]])
        assert source + len(twice) <= twice[0]  # which begins after the block's end
        assert [row[source + i] for i in range(len(twice))] == [row[i] for i in twice]
        assert [i for i, x in enumerate(known) if x] == twice[1:]  # nothing announces the first
        assert all(row[i] == before[i] for i in range(n) if i not in twice)


def test_copies_stand_anywhere() -> None:
    draw = torch.Generator().manual_seed(0)
    ids, copied = repeat_passage(torch.arange(32).expand(100_000, 32), 4, draw)
    at = copied.float().argmax(-1)
    offset = at - ids.gather(1, at.unsqueeze(-1)).squeeze(-1)
    assert set(offset.tolist()) == set(range(4, 29))
    assert set(copied.sum(-1).tolist()) == set(range(3, 16))


@pytest.mark.parametrize("bias", [False, True])
def test_heads_begin_alike_and_near_uniform(bias: bool) -> None:
    torch.manual_seed(0)
    config = llama_config({"d": 128, "heads": 4, "layers": 3, "hidden": 64}, 500, 128)
    model = create({**config, "attention_bias": bias}, std=0.05)
    tie_initial_weights(model)
    for module in model.modules():
        if isinstance(module, MultiHeadAttention):
            assert torch.equal(module.q_proj.weight, module.k_proj.weight)
            assert torch.equal(module.out_proj.weight, module.v_proj.weight.T)
            assert module.q_proj.weight.data_ptr() != module.k_proj.weight.data_ptr()
            assert not bias or torch.equal(module.q_proj.bias, module.k_proj.bias)
    ids = torch.randperm(500)[:64].repeat(2).unsqueeze(0)
    with torch.no_grad(), watch(model, regard.Observe(keep=True)) as seen:
        model(ids)
    assert len(seen) == 3
    for layer, path in enumerate(seen):
        weights = torch.stack([seen[path].weights(head) for head in range(4)])
        rows = torch.arange(1, 128)
        entropy = -(weights.clamp(min=1e-30).log() * weights).sum(-1)[:, rows] / (rows + 1).log()
        assert entropy.mean() > 0.9
        later = torch.arange(64, 128)
        near, far, twin = (weights[:, later, later - offset].mean() for offset in (1, 30, 64))
        assert twin > 1.5 * far or layer  # like looks at like, as long as layers before have not mixed them
        assert near > 1.5 * far or not bias


def test_the_opening_says_a_passage_of_every_half_window_again(file: Path) -> None:
    settings = {"steps": 100, "warmup": 1, "data.opening": 0.1, "data.quoted": 0.5}
    task, plain = opened(file, **settings), opened(file, **{**settings, **PLAIN})
    for step in (0, 9):
        ids = task.batch(step)["ids"]
        assert ids.shape == (8, 33)
        assert task.count_predictions(task.batch(step)) == 4 * 64
        assert (ids[:, 0] == 0).all()
        text = torch.cat([x[:, 1:] for x in _halves(plain.batch(step)["ids"])])
        assert ((ids[:, 1:] != text).sum(-1) > 0).all()
        assert ((ids[:, 1:] != text).sum(-1) <= 16).all()


def _halves(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    n = (ids.shape[1] - 1) // 2
    return ids[:, : n + 1], ids[:, n:]


def test_later_a_share_of_the_windows_does(file: Path) -> None:
    settings = {"steps": 100, "warmup": 1, "data.opening": 0.1, "data.quoted": 0.5}
    task, plain = opened(file, **settings), opened(file, **{**settings, **PLAIN})
    changed = []
    for step in range(10, 100):
        ids, text = task.batch(step)["ids"], plain.batch(step)["ids"]
        assert ids.shape == text.shape == (4, 65)
        changed += (ids != text).any(-1).tolist()
    assert 0.4 < sum(changed) / len(changed) < 0.6


@pytest.mark.parametrize("name", ["data.opening", "data.quoted"])
@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan")])
def test_what_is_no_share_is_refused(file: Path, name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{name} is .*; it must be a share from 0 to 1"):
        opened(file, **{name: value})


def test_the_smallest_windows_can_be_halved(file: Path) -> None:
    task = opened(file, **{"data.window": 9, "steps": 4, "warmup": 1, "data.opening": 0.5, "data.quoted": 1.0})
    assert task.batch(0)["ids"].shape == (8, 5)
    assert task.batch(2)["ids"].shape == (4, 10)


@pytest.mark.parametrize("step", [3, 50])
def test_what_is_said_again_is_a_function_of_the_step(file: Path, step: int) -> None:
    settings = {"steps": 100, "warmup": 1, "data.opening": 0.1, "data.quoted": 1.0}
    task, other, plain = opened(file, **settings), opened(file, **settings), opened(file, **{**settings, **PLAIN})
    ids = task.batch(step)["ids"]
    task.batch(step + 1)
    assert torch.equal(ids, task.batch(step)["ids"])
    assert torch.equal(ids, other.batch(step)["ids"])
    if step == 50:  # other places at another step
        changed = [task.batch(s)["ids"] != plain.batch(s)["ids"] for s in (step, step + 1)]
        assert not torch.equal(*changed)


def test_passages_have_an_eighth_of_the_window_at_least(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(70_000, dtype=np.int32))  # no id comes twice
    settings = {"data.vocabulary": 70_000, "steps": 200, "warmup": 1, "data.opening": 0.5, "data.quoted": 1.0}
    task = opened(tmp_path / "ids.npy", **settings)
    for steps, n in ((range(100), 32), (range(100, 200), 64)):
        rows = torch.cat([task.batch(step)["ids"] for step in steps])[:, 1:]
        twice = [n - len(set(row)) for row in rows.tolist()]
        assert min(twice) == n // 8 and max(twice) == n // 2


def test_a_token_with_itself_and_a_place_with_itself() -> None:
    torch.manual_seed(0)
    layer = MultiHeadAttention(128, 4, qkv_bias=True)
    tie_initial_weights(layer)
    x = torch.randn(4000, 128)
    with torch.no_grad():
        q, k = (torch.nn.functional.linear(x, y.weight).unflatten(-1, (4, 32)) for y in (layer.q_proj, layer.k_proj))
    alike, other = (q * k).sum(-1) / 32**0.5, (q * k.roll(1, 0)).sum(-1) / 32**0.5
    assert abs(float(alike.mean()) - TOKEN_SCORE) < 0.1
    assert abs(float(other.mean())) < 0.05
    places = [float(begin_place(layer)) for layer in (MultiHeadAttention(128, 4, qkv_bias=True) for _ in range(50))]
    assert abs(sum(places) / 50 - POSITION_SCORE) < 0.2


def begin_place(layer: MultiHeadAttention) -> torch.Tensor:
    tie_initial_weights(layer)
    assert layer.q_proj.bias is not None and layer.k_proj.bias is not None
    return (layer.q_proj.bias * layer.k_proj.bias).detach().sum() / 4 / 32**0.5


@pytest.mark.parametrize("alike", [False, True])
def test_the_recipe_says_how_heads_begin(file: Path, alike: bool) -> None:
    torch.manual_seed(0)
    model = opened(file, **{"model.alike": alike}).model()
    for layer in (x for x in model.modules() if isinstance(x, MultiHeadAttention)):
        assert torch.equal(layer.q_proj.weight, layer.k_proj.weight) == alike
        assert torch.equal(layer.out_proj.weight, layer.v_proj.weight.T) == alike
        assert torch.equal(layer.q_proj.bias, layer.k_proj.bias) == alike
        assert layer.q_proj.bias.abs().min() > 0 and layer.k_proj.bias.abs().min() > 0
