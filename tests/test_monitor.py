"""``AttentionMonitor``: what it measures at every step, and that it warns before the loss shows a collapse."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import regard
from regard import Observe
from regard.interp import watch
from regard.nn import Decoder
from regard.training import AttentionMonitor, AttentionWarning
from regard.training.huggingface import MonitorCallback


def small_decoder(seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(16, heads=2, layers=2, vocab=16, position=regard.Sinusoidal(16))


def noisy_sequences(generator: torch.Generator) -> Tensor:
    """Sequences that count in steps of 3, in which a fifth of the tokens is random: the loss never reaches 0."""
    start = torch.randint(16, (8, 1), generator=generator)
    ids = (start + 3 * torch.arange(16)) % 16
    noise = torch.randint(16, (8, 16), generator=generator)
    return torch.where(torch.rand(8, 16, generator=generator) < 0.2, noise, ids)


def next_token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def test_the_warning_comes_before_the_loss_shows_it() -> None:
    """The learning rate grows until the training diverges. The loss shows it when it is far above its first value."""
    model = small_decoder(4)
    optimizer = torch.optim.Adam(model.parameters())
    generator = torch.Generator().manual_seed(4)
    first_loss = None
    shown = None
    with AttentionMonitor(model) as monitor, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(400):
            for group in optimizer.param_groups:
                group["lr"] = 0.04 * 1.012**step
            loss = next_token_loss(model, noisy_sequences(generator))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(step)
            if first_loss is None:
                first_loss = loss.item()
            # Also true for NaN.
            if not loss.item() < 1.2 * first_loss:
                shown = step
                break
    assert shown is not None, "the training did not diverge, so the test shows nothing"
    kinds = {kind for _, kind, _ in monitor.warned}
    assert kinds == {"logit growth", "entropy collapse"}
    # With the developers' seeds it comes 40 to 110 steps earlier.
    assert monitor.warned[0][0] < shown - 5
    messages = [str(warning.message) for warning in caught if warning.category is AttentionWarning]
    assert len(messages) == len(monitor.warned)
    # Each layer once per kind.
    assert len({(kind, path) for _, kind, path in monitor.warned}) == len(monitor.warned)


def test_an_ordinary_training_does_not_warn() -> None:
    model = small_decoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    generator = torch.Generator().manual_seed(0)
    with AttentionMonitor(model) as monitor:
        for step in range(30):
            loss = next_token_loss(model, noisy_sequences(generator))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(step)
    assert monitor.warned == []
    assert [record.step for record in monitor.records] == list(range(30))


def test_records_are_those_of_the_observations(tmp_path: Path) -> None:
    model = small_decoder()
    ids = noisy_sequences(torch.Generator().manual_seed(0))
    with watch(model, Observe()) as recording, torch.no_grad():
        model(ids)
    file = tmp_path / "heads.jsonl"
    with AttentionMonitor(model, file) as monitor:
        # Two calls of one step count together.
        model(ids[:3])
        model(ids[3:])
        record = monitor.step(7)
    assert record is not None
    for path in recording:
        observation = recording[path]
        assert observation.logit_max is not None and observation.visible is not None
        torch.testing.assert_close(torch.tensor(record.entropy[path]), observation.mean("entropy").float())
        torch.testing.assert_close(torch.tensor(record.logit_max[path]), observation.logit_max.amax((0, 2)))
        possible = observation.visible.double().log().mean((0, 2))
        expected = observation.mean("entropy") / possible
        torch.testing.assert_close(torch.tensor(record.spread[path]), expected.float())
    line = json.loads(file.read_text())
    assert line["step"] == 7
    assert line["entropy"] == record.entropy


def test_measuring_changes_no_gradient() -> None:
    ids = noisy_sequences(torch.Generator().manual_seed(0))
    gradients = []
    for observed in (False, True):
        model = small_decoder()
        monitor = AttentionMonitor(model if observed else None)
        next_token_loss(model, ids).backward()
        monitor.close()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, monitored in zip(*gradients, strict=True):
        assert plain is not None and monitored is not None
        assert torch.equal(plain, monitored)


def test_runs_in_eval_mode_are_not_measured() -> None:
    model = small_decoder()
    ids = noisy_sequences(torch.Generator().manual_seed(0))
    with AttentionMonitor(model) as monitor:
        model.eval()
        model(ids)
        assert monitor.step(0) is None
        model.train()
        model(ids)
        assert monitor.step(1) is not None
    with pytest.raises(regard.RegardError, match="attach"):
        monitor.step(2)


def test_every_k_th_step() -> None:
    model = small_decoder()
    ids = noisy_sequences(torch.Generator().manual_seed(0))
    measured = []
    with AttentionMonitor(model, every=3, layers="blocks.1.*") as monitor:
        for step in range(7):
            model(ids)
            measured.append(monitor.step(step) is not None)
    assert measured == [True, False, False, True, False, False, True]
    assert list(monitor.records[-1].entropy) == ["blocks.1.attention"]


def test_any_pytorch_model_is_measured() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0), 2)
    x = torch.randn(2, 5, 8)
    with AttentionMonitor(model) as monitor:
        model(x).sum().backward()
        record = monitor.step(0)
    assert record is not None
    assert all(math.isfinite(value) for values in record.logit_max.values() for value in values)


def test_logits_that_are_large_from_the_start_must_grow() -> None:
    model = small_decoder()
    layer = model.get_submodule("blocks.0.attention")
    with torch.no_grad():
        layer.q_proj.weight.mul_(300)  # type: ignore[operator, union-attr]
    ids = noisy_sequences(torch.Generator().manual_seed(0))
    with AttentionMonitor(model, collapse=0.0) as monitor:
        model(ids)
        monitor.step(0)
        assert monitor.records[0].logit_max["blocks.0.attention"] > [100.0]
        assert monitor.warned == []
        with torch.no_grad():
            layer.k_proj.weight.mul_(5)  # type: ignore[operator, union-attr]
        model(ids)
        with pytest.warns(AttentionWarning, match="logit growth"):
            monitor.step(1)


def test_it_listens_to_a_run_of_the_trainer(tmp_path: Path) -> None:
    small = {"steps": 3, "warmup": 1, "batch": 4, "record": 0, "model.d": 8, "data.checks": 4}
    monitor = AttentionMonitor(file=tmp_path / "heads.jsonl")
    regard.training.train("repeats", tmp_path / "run", small, listener=monitor)
    assert [record.step for record in monitor.records] == [1, 2, 3]
    # The run has ended, and nothing is observed any more.
    with pytest.raises(regard.RegardError, match="attach"):
        monitor.step(4)


def test_it_is_a_callback_of_a_trainer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 16, "n_embd": 12, "n_layer": 2, "n_head": 3, "bos_token_id": 0, "eos_token_id": 0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    callback = MonitorCallback()
    state = transformers.TrainerState(global_step=0)
    callback.on_train_begin(None, state, None, model=model)
    model.train()
    ids = noisy_sequences(torch.Generator().manual_seed(0))
    model(ids, labels=ids).loss.backward()
    state.global_step = 1
    callback.on_step_end(None, state, None)
    callback.on_train_end(None, state, None)
    assert callback.monitor.records[0].step == 1
    assert len(callback.monitor.records[0].entropy) == 2
