"""The program that checks every architecture of `transformers`: limits, resuming, comparison and the page."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import command
from support.zoo_checks import misbehave, succeed

import regard
from regard import Causal, Observe
from regard.interp import huggingface
from regard.zoo import (
    OUTCOMES,
    Architecture,
    Limits,
    Result,
    _check_architecture,
    current_versions,
    list_architectures,
    read_results,
    results_page,
    run_checks,
)
from regard.zoo._check_architecture import build_runnable, check_architecture
from regard.zoo._comparison import heads_first, output_difference, unseen_places
from regard.zoo._plain_formulas import MAP_SIZE, plain_observables
from regard.zoo._reference import captured
from regard.zoo._results import append_result

pytest.importorskip("transformers")


VALID = json.dumps(dataclasses.asdict(Result("a", "AModel", "exact")))


def named(*names: str) -> list[Architecture]:
    return [Architecture(name, "Model") for name in names]


def test_each_result_is_a_line_of_the_file_at_once(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    for number, result in enumerate(run_checks(named("a", "b", "c"), file, check=succeed), 1):
        assert list(read_results(file)) == ["a", "b", "c"][:number]
        assert result.versions == current_versions()
    assert read_results(file)["b"].outcome == "exact"


def test_limits_end_one_architecture_and_not_the_others(tmp_path: Path) -> None:
    limits = Limits(seconds=2, mebibytes=8192)
    architectures = named("sleep", "memory", "die", "fine")
    found = {r.name: r for r in run_checks(architectures, tmp_path / "r", limits=limits, jobs=4, check=misbehave)}
    assert [found[name].outcome for name in ("sleep", "memory", "die", "fine")] == ["error", "error", "error", "exact"]
    assert "2 seconds" in found["sleep"].reason
    assert "code 1" in found["memory"].reason
    assert "code 7" in found["die"].reason


def test_a_caller_that_stops_ends_the_processes(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    checks = run_checks(named("fine", "sleep"), file, jobs=2, check=misbehave)
    assert next(checks).name == "fine"
    checks.close()
    # What was not finished has no result, and is checked by the next run.
    assert list(read_results(file)) == ["fine"]


def test_a_line_that_was_not_written_completely_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    append_result(file, Result("a", "AModel", "exact"))
    with file.open("a") as opened:
        opened.write('{"name": "b", "class_na')
    assert read_results(file) == {"a": Result("a", "AModel", "exact")}
    assert read_results(tmp_path / "nothing") == {}
    # The next run goes on after the last complete line.
    assert [result.name for result in run_checks(named("b"), file, check=succeed)] == ["b"]
    assert list(read_results(file)) == ["a", "b"]


@pytest.mark.parametrize(
    "line", ["x", "[1]", '{"name": "a"}', VALID.replace("exact", "fine"), VALID.replace('"a"', "1")]
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text(f"{line}\n")
    with pytest.raises(regard.RegardError, match="regard zoo"):
        read_results(file)


def test_the_command_resumes_and_writes_the_page(monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    file = tmp_path / ".zoo.jsonl"
    page = tmp_path / "page.md"
    versions = current_versions()
    append_result(file, Result("gpt2", "GPT2Model", "exact", how=["attention"], versions=versions))
    append_result(file, Result("bert", "BertModel", "no attention", versions=versions | {"torch": "1.0"}))
    # The file in the current folder is the default.
    monkeypatch.chdir(tmp_path)
    code, out, _ = command(monkeypatch, capsys, "zoo", "gpt2", "vit", "bert", "--write", page)
    assert code == 0
    # The result of another version of torch does not count.
    assert "1 of 3 architectures are in" in " ".join(out.split())
    found = read_results(file)
    assert [found[name].outcome for name in ("gpt2", "vit", "bert")] == ["exact"] * 3
    assert "**3 of 3**" in page.read_text()


def test_the_command_refuses_what_it_does_not_know(monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    code, _, err = command(monkeypatch, capsys, "zoo", "gpt-none", "--out", tmp_path / "r")
    assert code == 2
    assert "gpt-none" in err[0]
    code, _, err = command(monkeypatch, capsys, "zoo", "gpt2", "--jobs", "0", "--out", tmp_path / "r")
    assert code == 2
    assert "--jobs" in err[0]


def test_the_page_has_one_row_per_architecture() -> None:
    results = [
        Result("b", "BModel", "differs", reason="output a|b differs"),
        Result("a", "AModel", "exact", how=["attention", "weights"], batches=["plain", "padded"], layers=3),
        Result("c", "CModel", "no attention"),
        Result("d", "DModel", "not built", reason="ImportError: it needs timm"),
    ]
    page = results_page(results)
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == ["a", "b", "c", "d"]
    assert "**1 of 2** architectures that have attention" in page
    # A bar in a reason would begin another cell.
    assert all(row.count("|") == 8 for row in rows)


def test_the_written_page_counts_its_own_rows() -> None:
    page = (Path(__file__).parents[1] / "docs" / "models-supported.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    outcomes = Counter(row[2] for row in rows)
    assert set(outcomes) <= set(OUTCOMES)
    with_attention = len(rows) - outcomes["no attention"] - outcomes["not built"]
    assert f"**{outcomes['exact']} of {with_attention}**" in page
    # What `make zoo` must reach; a run that reaches less is not written to the repository.
    assert outcomes["exact"] >= 450
    assert not outcomes["differs"] and not outcomes["error"]


def test_plain_formulas_agree_with_the_operator() -> None:
    g = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, 3, 7, 5, generator=g, dtype=torch.float64) for _ in range(3))
    sinks = torch.randn(3, generator=g, dtype=torch.float64)
    request = Observe(map=MAP_SIZE, key_mass=True, queries=[7, 5])
    _, observation = regard.attention(q, k, v, mask=Causal(), sinks=sinks, observe=request)
    scores = (q @ k.mT / 5**0.5).masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -torch.inf)
    with_sink = torch.cat([scores, sinks.view(1, 3, 1, 1).expand(2, 3, 7, 1)], -1).softmax(-1)
    values = plain_observables(with_sink[..., :-1], observation.counted)
    assert set(values) == {"entropy", "peak", "distance", "sink", "key_mass", "map"}
    for name, expected in values.items():
        actual = getattr(observation, name).double()
        if expected.shape == observation.counted.shape:
            actual = torch.where(observation.counted, actual, 0.0)
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


def test_weights_are_arranged_with_the_heads_first() -> None:
    weights = torch.randn(2, 3, 5, 7)
    for moved in (weights, weights.transpose(1, 2), weights.reshape(6, 5, 7), weights.permute(2, 3, 0, 1)):
        assert any(torch.equal(arranged, weights) for arranged in heads_first(moved, (2, 3, 5, 7)))
    assert heads_first(weights, (2, 3, 7, 7)) == []


@pytest.mark.parametrize("name", ["bert", "gptj", "t5"])
def test_captured_weights_are_those_that_the_model_returns(name: str) -> None:
    model, _, inputs = build_runnable(list_architectures()[name])
    with torch.no_grad(), captured(model) as reference:
        result = model(**inputs, output_attentions=True)
    returned = result.attentions if "attentions" in result else result.decoder_attentions
    everything = [
        weights for calls in (*reference.attention.values(), *reference.softmaxes.values()) for weights in calls
    ]
    for weights in returned:
        assert any(weights.shape == other.shape and torch.equal(weights, other) for other in everything)


def test_a_mask_that_is_ignored_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "mask_and_bias", lambda *_: (None, None))
    result = check_architecture(list_architectures()["gpt2"])
    assert result.outcome == "differs"
    assert "output" in result.reason


def test_a_measurement_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = regard.interp.Recording.add

    def add(self: Any, path: str, observation: regard.Observation) -> None:
        original(self, path, dataclasses.replace(observation, key_mass=observation.key_mass * 1.01))

    monkeypatch.setattr(regard.interp.Recording, "add", add)
    result = check_architecture(list_architectures()["vit"])
    assert result.outcome == "differs"
    assert "key_mass" in result.reason


def test_a_layer_that_is_not_recorded_is_found() -> None:
    model, _, inputs = build_runnable(list_architectures()["bert"])
    with torch.no_grad(), captured(model) as reference:
        model(**inputs)
    with torch.no_grad(), regard.watch(model, layers="*.layer.0.*") as recording:
        model(**inputs)
    assert unseen_places(recording, reference) == ["encoder.layer.1.attention.self"]


def test_outputs_are_compared_at_real_tokens_only() -> None:
    x = torch.randn(2, 5, 3)
    y = x.clone()
    y[1, 4] += 1
    real = torch.ones(2, 5, dtype=torch.bool)
    assert output_difference({"a": x}, {"a": y}, real) is not None
    real[1, 4] = False
    assert output_difference({"a": x}, {"a": y}, real) is None
    # Caches and weights are not compared; a tensor of another shape or without a number is a difference.
    assert output_difference({"a": x, "attentions": (x,)}, {"a": x}, None) is None
    assert output_difference({"a": x}, {"a": x[:1]}, None) is not None
    assert output_difference({"a": x}, {"a": torch.full_like(x, torch.nan)}, None) is not None


def test_the_check_names_what_cannot_be_built() -> None:
    result = check_architecture(Architecture("gpt2", "NoSuchModel"))
    assert (result.outcome, "NoSuchModel" in result.reason) == ("not built", True)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ImportError("XModel requires the timm library but it was not found. Visit a page"), "it needs timm, which"),
        (MemoryError(), "memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "memory"),
        (ValueError("a\nb"), "ValueError: a b"),
        (regard.RegardError("mask is odd"), "mask is odd"),
    ],
)
def test_reasons_are_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str) -> None:
    def fail(_: Any) -> None:
        raise error

    monkeypatch.setattr(_check_architecture, "build_runnable", fail)
    result = check_architecture(Architecture("gpt2", "GPT2Model"))
    assert result.outcome == "not built"
    assert result.reason.startswith(reason) or reason == "memory" in result.reason


@pytest.mark.full
def test_ctrl_c_ends_all_processes_and_keeps_what_is_done(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    script = "import sys; from regard.cli import main; sys.argv[0] = 'regard'; main()"
    arguments = ["zoo", "gpt2", "bert", "llama", "vit", "t5", "opt", "bloom", "gemma", "--out", str(file)]
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    while not file.exists() or not read_results(file):
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.decode() == "regard: interrupted\n"
    assert 1 <= len(read_results(file)) < 8
    # No process of the group is left.
    with pytest.raises(ProcessLookupError):
        for _ in range(100):
            os.killpg(process.pid, 0)
            time.sleep(0.05)
