"""The loop on a tiny task: what it learns, what it writes, and how it stops."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_task import QUICK, Heard, Tiny, digest
from torch import Tensor, nn

from regard import models
from regard.interp._atlas_store import recorded_atlas
from regard.training import evolution
from regard.training._checkpoints import Checkpoints
from regard.training._metrics_file import read_metrics
from regard.training._optimizer import (
    create_optimizer,
    learning_rate,
    load_optimizer_state,
    load_weights,
    optimizer_state,
    weight_tensors,
)
from regard.training._recipe import Recipe
from regard.training._recorder import Recorder
from regard.training._task import Batch, seeded_generator
from regard.training._train import load_trained_model, train


def test_a_run_learns_and_leaves_everything_it_promises(tmp_path: Path) -> None:
    heard = Heard()
    result = train(Tiny, tmp_path / "run", {"steps": 150, "model.dropout": 0.0, "data.noise": 0.0}, listener=heard)
    assert result.ended == "steps" and result.steps == 150 and result.best is not None
    assert result.best["scores"]["accuracy"] > 0.8
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    learned = [line for line in lines if "held_out" not in line]
    assert [line["step"] for line in learned] == list(range(1, 151)) == heard.steps("learned")
    assert learned[-1]["loss"] < learned[0]["loss"] / 2
    assert [line["step"] for line in lines if "held_out" in line] == list(range(10, 151, 10)) == heard.steps("scored")
    assert learned[0]["rate"] == pytest.approx(1e-2 / 5) and learned[-1]["rate"] == pytest.approx(1e-3)
    # The best weights are a model folder, and those of the best checkpoint.
    saved = models.load(tmp_path / "run" / "model")
    best = load_trained_model(tmp_path / "run", task=Tiny)
    theirs = dict(saved.named_parameters())
    assert all(torch.equal(theirs[name], p) for name, p in best.named_parameters())
    assert json.loads((tmp_path / "run" / "result.json").read_text())["best"] == result.best
    assert heard.steps("recorded")[0] == 0
    assert (tmp_path / "run" / "evolution" / "step-00000150.safetensors").is_file()


def test_only_the_last_and_the_best_checkpoints_stay(tmp_path: Path) -> None:
    result = train(Tiny, tmp_path, {"steps": 40, "keep": 2})
    assert result.best is not None
    assert set(Checkpoints(tmp_path / "checkpoints").steps()) == {30, 40, result.best["step"]}
    assert not list((tmp_path / "checkpoints").glob(".writing*"))


def test_what_is_started_again_when_it_has_ended_changes_nothing(tmp_path: Path) -> None:
    first = train(Tiny, tmp_path, QUICK)
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "checkpoints").rglob("*")}
    again = train(Tiny, tmp_path, QUICK)
    assert (again.steps, again.best) == (first.steps, first.best)
    assert before == {file: file.stat().st_mtime_ns for file in (tmp_path / "checkpoints").rglob("*")}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_and_stops_and_the_same_call_goes_on_exactly(tmp_path: Path, number: int) -> None:
    train(Tiny, tmp_path / "whole", QUICK)
    heard = Heard(5, lambda: os.kill(os.getpid(), number))
    result = train(Tiny, tmp_path / "stopped", QUICK, listener=heard)
    # The wish is heard in the step after: 6.
    assert result.ended == "stopped" and result.steps == 6 and heard.steps("saved")[-1] == 6
    # The model of the best step so far can be inspected: its record is its atlas.
    stored = json.loads((tmp_path / "stopped" / "result.json").read_text())
    assert stored["ended"] == "stopped" and stored["model_step"] == result.model_step == 4
    assert evolution(tmp_path / "stopped").model_step == 4
    atlas = recorded_atlas(tmp_path / "stopped" / "model")
    assert atlas is not None and "step 4;" in atlas.source
    result = train(Tiny, tmp_path / "stopped", QUICK)
    assert result.ended == "steps"
    assert json.loads((tmp_path / "stopped" / "result.json").read_text())["ended"] == "steps"
    assert digest(tmp_path / "stopped") == digest(tmp_path / "whole")
    steps = [x["step"] for x in read_metrics(tmp_path / "stopped" / "metrics.jsonl") if "held_out" not in x]
    assert steps == list(range(1, 13))


def test_an_error_in_the_middle_loses_only_what_was_after_the_checkpoint(tmp_path: Path) -> None:
    train(Tiny, tmp_path / "whole", QUICK)

    def fail() -> None:
        raise ZeroDivisionError

    for at in (2, 5, 8, 11):
        with pytest.raises(ZeroDivisionError):
            train(Tiny, tmp_path / "failed", QUICK, listener=Heard(at, fail))
    train(Tiny, tmp_path / "failed", QUICK)
    assert digest(tmp_path / "failed") == digest(tmp_path / "whole")


def test_recording_and_saving_more_often_change_no_weight(tmp_path: Path) -> None:
    digests = set()
    for k, changes in enumerate(({}, {"record": 0.0}, {"record": 1.0, "save": 1, "keep": 3})):
        train(Tiny, tmp_path / str(k), QUICK | changes)
        digests.add(digest(tmp_path / str(k)))
    assert len(digests) == 1


def test_the_seed_decides_and_nothing_around_the_run_does(tmp_path: Path) -> None:
    torch.manual_seed(1)
    train(Tiny, tmp_path / "a", QUICK)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    train(Tiny, tmp_path / "b", QUICK)
    assert torch.equal(before, torch.get_rng_state())
    train(Tiny, tmp_path / "c", QUICK | {"seed": 1})
    assert digest(tmp_path / "a") == digest(tmp_path / "b") != digest(tmp_path / "c")


def test_pieces_of_a_batch_add_up_to_it(tmp_path: Path) -> None:
    found = []
    for pieces in (1, 2, 3, 12):
        folder = tmp_path / str(pieces)
        train(Tiny, folder, QUICK | {"accumulate": pieces, "model.dropout": 0.0, "record": 0.0})
        lines = read_metrics(folder / "metrics.jsonl")
        found.append([line[name] for line in lines for name in ("loss", "norm") if name in line])
    # Not the weights: where a gradient is 0 but for rounding (keys' biases) AdamW makes steps of its sign.
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-4)


def test_patience_ends_a_run_and_stays_at_its_end(tmp_path: Path) -> None:
    changes = {"steps": 200, "evaluate": 1, "patience": 3, "rate": 1e-9}
    result = train(Tiny, tmp_path, changes)
    assert result.ended == "patience" and result.steps < 200 and result.best is not None
    # With this rate the accuracies stay equal, and rounding decides whose loss is the lowest: patience counts from the
    # first step with the best accuracy, which need not be the best step.
    evaluations = [line for line in read_metrics(tmp_path / "metrics.jsonl") if "held_out" in line]
    accuracies = {line["step"]: line["accuracy"] for line in evaluations}
    first_best = min(step for step, accuracy in accuracies.items() if accuracy == max(accuracies.values()))
    assert result.steps - first_best == 3
    assert result.best["step"] in range(first_best, result.steps + 1)
    assert train(Tiny, tmp_path, changes).steps == result.steps


def test_bfloat16_learns_in_bfloat16_and_keeps_float32_weights(tmp_path: Path) -> None:
    train(Tiny, tmp_path / "a", QUICK | {"record": 0.0})
    result = train(Tiny, tmp_path / "b", QUICK | {"record": 0.0, "precision": "bfloat16"})
    assert result.best is not None and math.isfinite(result.best["scores"]["loss"])
    found = Checkpoints(tmp_path / "b" / "checkpoints").read_newest()
    assert found is not None and {x.dtype for x in found.weights.values()} == {torch.float32}
    assert digest(tmp_path / "a") != digest(tmp_path / "b")


class Exploding(Tiny):
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        summed = super().loss(model, batch)
        return summed * (math.nan if model.training and self.exploded() else 1)

    def exploded(self) -> bool:
        self.calls = getattr(self, "calls", 0) + 1
        return self.calls > 5


def test_a_loss_that_is_no_number_ends_the_run_and_the_checkpoint_before_it_stays(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"the loss is nan .* at step 5: .* rate"):
        train(Exploding, tmp_path, QUICK)
    assert Checkpoints(tmp_path / "checkpoints").steps() == [4]  # the best
    newest = Checkpoints(tmp_path / "checkpoints").read_newest()
    assert newest is not None and all(x.isfinite().all() for x in newest.weights.values())


def test_tensorboard_holds_the_same_numbers(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train(Tiny, tmp_path, QUICK)
    found = events.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    losses = [event.value for event in found.Scalars("training/loss")]
    lines = [x["loss"] for x in read_metrics(tmp_path / "metrics.jsonl") if "held_out" not in x]
    assert losses == pytest.approx(lines)
    assert [event.step for event in found.Scalars("held out/accuracy")] == [4, 8, 12]


def test_a_cut_line_of_the_metrics_is_left_out(tmp_path: Path) -> None:
    train(Tiny, tmp_path, QUICK, listener=None)
    file = tmp_path / "metrics.jsonl"
    lines = file.read_text()
    file.write_text(lines + '{"step": 13, "lo')
    assert len(read_metrics(file)) == len(lines.splitlines())


def test_the_optimizer_gives_back_what_it_was_given() -> None:
    recipe = Tiny.default_recipe
    model = Tiny(recipe).model()
    optimizer = create_optimizer(model, recipe)
    decayed = {id(p) for p in optimizer.param_groups[0]["params"]}
    assert all((p.ndim > 1) == (id(p) in decayed) for p in model.parameters())
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    other = Tiny(recipe).model()
    load_weights(other, weight_tensors(model))
    again = create_optimizer(other, recipe)
    load_optimizer_state(other, again, optimizer_state(model, optimizer))
    for x, y in zip(model.parameters(), other.parameters(), strict=True):
        x.grad = y.grad = torch.ones_like(x)
    optimizer.step()
    again.step()
    for x, y in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(x, y)
    wrong = Tiny(recipe.with_changes({"model.layers": 1})).model()
    with pytest.raises(ValueError, match=r"blocks.1.*unknown"):
        load_weights(wrong, weight_tensors(model))
    with pytest.raises(ValueError, match=r"blocks.1.*missing"):
        load_weights(model, weight_tensors(wrong))
    with pytest.raises(ValueError, match=r"decoder.norm.weight is \[2\]"):
        load_weights(model, weight_tensors(model) | {"decoder.norm.weight": torch.zeros(2)})
    with pytest.raises(ValueError, match="other is unknown"):
        load_optimizer_state(model, optimizer, {"other.exp_avg": torch.zeros(2)})


def test_who_dies_before_the_last_record_makes_it_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(self: Recorder, step: int) -> None:
        raise KeyboardInterrupt

    changes = {
        **QUICK,
        "steps": 13,
        "record": 1.0,
        "record_every": 5,
    }  # 13 is none of the steps that are recorded on the way
    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "finish", die)
        with pytest.raises(KeyboardInterrupt):
            train(Tiny, tmp_path / "run", changes)
    assert evolution(tmp_path / "run").steps[-1] < 13
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps()[-1] == 13
    assert train(Tiny, tmp_path / "run", changes).ended == "steps"
    assert evolution(tmp_path / "run").steps[-1] == 13
    assert (tmp_path / "run" / "model").is_dir()


def test_ctrl_c_in_the_last_record_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = Recorder.finish

    def interrupted(self: Recorder, step: int) -> None:
        signal.raise_signal(signal.SIGINT)
        finish(self, step)

    monkeypatch.setattr(Recorder, "finish", interrupted)
    train(Tiny, tmp_path / "run", {**QUICK, "steps": 13, "record": 1.0})
    assert evolution(tmp_path / "run").steps[-1] == 13


def test_a_stop_before_any_evaluation_saves_the_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Heard(5, lambda: os.kill(os.getpid(), signal.SIGINT))
    changes = {**QUICK, "evaluate": 100}
    result = train(Tiny, tmp_path, changes, listener=heard)
    assert result.best is None and result.model_step == result.steps == 6
    atlas = recorded_atlas(tmp_path / "model")
    assert atlas is not None and "step 6;" in atlas.source

    # If it dies at its end before it writes its result, that of the stop does not count as its end.
    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("regard.training._train._write_result", die)
        with pytest.raises(KeyboardInterrupt):
            train(Tiny, tmp_path, changes)
    assert json.loads((tmp_path / "result.json").read_text())["ended"] == "stopped"
    train(Tiny, tmp_path, changes)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["ended"] == "steps" and result["model_step"] == 12


class Equal(Tiny):
    """A task whose score is always the same; the loss falls until step 8 and rises after it."""

    def scores(self, sums: Mapping[str, float]) -> dict[str, float]:
        self.evaluations = getattr(self, "evaluations", 0) + 1
        return {"loss": abs(self.evaluations - 2.25), "accuracy": 0.5}


def test_of_equal_scores_the_lower_loss_is_better_but_patience_ends(tmp_path: Path) -> None:
    result = train(Equal, tmp_path / "run", {**QUICK, "steps": 40, "record": 0})
    assert result.best is not None and result.best["step"] == result.model_step == 8
    result = train(Equal, tmp_path / "impatient", {**QUICK, "steps": 40, "record": 0, "patience": 1})
    assert result.ended == "patience" and result.steps == 8


class Unused(Tiny):
    def model(self) -> nn.Module:
        model = super().model()
        model.register_parameter("extra", nn.Parameter(torch.ones(3)))
        return model

    def save(self, model: nn.Module, folder: Path) -> None:
        pass


def test_a_parameter_without_a_gradient_does_no_harm(tmp_path: Path) -> None:
    train(Unused, tmp_path, QUICK, listener=Heard(5, lambda: os.kill(os.getpid(), signal.SIGINT)))
    assert train(Unused, tmp_path, QUICK).ended == "steps"


class Nowhere(Tiny):
    def scores(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {"loss": math.nan, "accuracy": 0.0}


def test_a_held_out_score_that_is_no_number_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the held-out loss is nan at step 4"):
        train(Nowhere, tmp_path, QUICK)


def test_speed_is_of_the_step_alone(tmp_path: Path) -> None:
    """Evaluations, records and checkpoints come between; they are not what a step takes."""

    class Slow(Tiny):
        def checks(self) -> Any:
            return [*super().checks()] * 3

        def check(self, model: nn.Module, batch: Batch) -> dict[str, float]:
            time.sleep(0.1)
            return super().check(model, batch)

    train(Slow, tmp_path, QUICK | {"record": 0.0})
    lines = [x for x in read_metrics(tmp_path / "metrics.jsonl") if "held_out" not in x]
    after = [x["predictions"] for x in lines if x["step"] in (5, 9)]
    assert min(after) > 12 * 6 / 0.9  # an evaluation sleeps 0.9 s


def test_the_rate_rises_and_falls() -> None:
    recipe = Recipe("tiny", steps=101, batch=1, rate=2.0, warmup=10, floor=0.25)
    rates = [learning_rate(recipe, step) for step in range(101)]
    assert rates[0] == pytest.approx(0.2) and rates[9] == rates[10] == 2.0 and rates[-1] == pytest.approx(0.5)
    assert all(a >= b for a, b in pairwise(rates[10:]))
    assert learning_rate(Recipe("tiny", steps=1, batch=1, rate=2.0, warmup=0), 0) == 2.0
    assert learning_rate(Recipe("tiny", steps=3, batch=1, rate=2.0, warmup=2, floor=0.5), 2) == 2.0


def test_random_numbers_of_two_purposes_have_nothing_in_common() -> None:
    seeds = {
        seeded_generator(seed, what, step).initial_seed()
        for seed in range(3)
        for what in range(4)
        for step in range(200)
    }
    assert len(seeds) == 3 * 4 * 200
    assert (
        seeded_generator(1, 2, 3).initial_seed()
        == seeded_generator(1, 2, 3).initial_seed()
        != seeded_generator(1, 3, 2).initial_seed()
    )
