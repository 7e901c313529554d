"""Races: what is compared before it is timed, what is kept, what is refused. Times decide nothing here."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.commands import command

from regard import bench
from regard.bench import _instruction_set_cases as instruction_sets
from regard.bench import _model_cases as models
from regard.bench import _observation_cases as watching
from regard.bench import _operator_cases as operator
from regard.bench import _peers as peers
from regard.bench._race import Call, assert_same, random_qkv
from regard.bench._results import Results, read_results, results_page
from regard.cli.bench import WIDTH, _figures
from regard.kernels import native

DOCS = Path(__file__).resolve().parent.parent / "docs"
QUICK, MORE = "causal 1×8×512×64", "dense 1×8×1024×64"
pytestmark = pytest.mark.usefixtures("full_tiles")


def toy(wrong: float = 0.0, group: str = "operator", name: str = "a toy") -> bench.Case:
    """A case that takes no time; ``wrong`` makes the peer give something else."""

    def make() -> Mapping[str, Call]:
        x = torch.ones(3)
        assert_same(x, x + wrong)
        return {"regard": lambda: x + wrong, "SDPA": lambda: x, "transformers": lambda: x}

    return bench.Case(group, name, make, memory=True)


def test_names_are_told_apart_and_fit_their_column():
    names = [case.name for case in bench.cases()]
    assert len(set(names)) == len(names) > 25
    assert max(map(len, names)) < WIDTH
    assert {case.group for case in bench.cases()} == {"operator", "instructions", "watching", "groups", "models"}


def test_words_choose_cases_by_group_and_by_name():
    assert {case.group for case in bench.cases(["models"])} == {"models"}
    assert [case.name for case in bench.cases("alibi")] == ["ALiBi, 1×8×4096×64"]
    assert all("causal" in case.name or "window" in case.name for case in bench.cases(["causal", "window"]))
    with pytest.raises(ValueError, match="no case is called 'dance'"):
        bench.cases(["causal", "dance"])
    with pytest.raises(ValueError, match="no case is called ''"):
        bench.cases([""])


def test_a_case_gives_times_ratios_and_bytes():
    done = bench.run(toy(), seconds=0)
    assert done.rounds == 3 and set(done.best) == {"regard", "SDPA", "transformers"}
    assert all(0 < done.best[name] <= done.median[name] for name in done.best)
    assert done.ratios["SDPA"] == done.best["SDPA"] / done.best["regard"]
    assert done.bytes["regard"] >= 12 and done.bytes["SDPA"] == 0


def test_a_unit_divides_the_time():
    whole = bench.run(toy(), 0)
    part = bench.run(bench.Case("models", "tokens", toy().make, units_per_call=1000), 0)
    assert part.best["regard"] < whole.best["regard"]


def test_what_differs_is_not_timed():
    with pytest.raises(RuntimeError, match="a toy: results differ, nothing was timed: Tensor-likes are not close"):
        bench.run(toy(wrong=1.0))


@pytest.mark.parametrize("make", [watching._model, models._long_prompt], ids=["watching", "models"])
def test_what_needs_transformers_says_so(make, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else real(name))
    with pytest.raises(bench.MissingPeer, match="transformers is not installed"):
        make()


def test_peers_that_are_not_there_are_none(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("CXX", "no-such-compiler")
    q, k, v = random_qkv(1, 2, 3, 4)
    assert peers.openvino(q, k, v, False) is None
    assert peers.onnxruntime(q, k, v, False) is None
    assert peers.flex(q, k, v, True) is None
    assert peers.flex_window(q, k, v, 1) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: operator._with_gradients((1, 2, 7, 5), True, 1.0).make(),
        lambda: operator._forward((1, 2, 7, 5), False, torch.bfloat16, 1.0).make(),
        lambda: watching._layer(128),
        models._encoder,
    ],
    ids=["gradients", "bfloat16", "a layer watched", "an encoder"],
)
def test_what_is_raced_is_compared_and_runs(make):
    """Building the calls compares them."""
    for call in make().values():
        call()


def test_a_gpu_has_its_own_cases():
    device = torch.device("cuda")  # cases are built before anything runs
    cases = bench.cases((), device)
    names = [case.name for case in cases]
    assert len(set(names)) == len(names) > 25
    assert max(map(len, names)) < WIDTH
    assert all(case.device == device and case.target is None and not case.memory for case in cases)
    for word in ("bfloat16", "float16", "with gradients", "decoding", "window"):
        assert any(word in name for name in names)


def test_libraries_for_cpus_are_left_out_on_a_gpu(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    x = torch.empty(1, 2, 3, 4, device="meta")
    assert peers.openvino(x, x, x, False) is None
    assert peers.onnxruntime(x, x, x, False) is None
    assert not peers._can_compile(torch.device("mps"))
    assert peers._can_compile(torch.device("cuda"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not peers._can_compile(torch.device("cuda"))


@pytest.mark.parametrize("name", ["cuda:99", "mps:7", "xpu:99", "gpu", "meta", ""])
def test_a_device_that_is_not_there_is_named(name, monkeypatch, capsys):
    code, out, err = command(monkeypatch, capsys, "bench", "--device", name)
    assert code == 2 and out == "" and len(err) == 1
    assert "--device" in err[0] and repr(name) in err[0]


def test_a_report_is_markdown_alone(monkeypatch, capsys):
    monkeypatch.setattr("regard.cli.bench.cases", lambda words, device: [toy()])
    code, out, _ = command(monkeypatch, capsys, "bench", "--seconds", "0", "--device", "cpu", "--report")
    lines = out.splitlines()
    assert code == 0 and lines[0].startswith("### regard bench")
    assert any(line.startswith("| CPU |") for line in lines) and any(line.startswith("| a toy |") for line in lines)
    code, out, err = command(monkeypatch, capsys, "bench", "--report", "--json")
    assert code == 2 and "--report" in err[0]


def test_figures_of_a_gpu_are_no_figures_of_the_cpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("regard.cli.bench.cases", lambda words, device: [toy()])
    file = tmp_path / "gpu.json"
    Results(bench.conditions() | {"device name": "a GPU"}).save(file)
    code, _, err = command(monkeypatch, capsys, "bench", "--seconds", "0", "--out", file)
    assert code == 2 and "device name a GPU" in err[0]


@pytest.mark.full
def test_all_cases_run(monkeypatch):
    for case in bench.cases():
        if case.group == "instructions" and len(instruction_sets.compared_sets()) < 2:
            continue
        assert bench.run(case, seconds=0).ratios


# --- files ------------------------------------------------------------------------------------------------------------


def test_figures_come_back_from_their_file(tmp_path):
    results = Results()
    results.add(bench.run(toy(), 0))
    results.save(tmp_path / "a.json")
    again = read_results(tmp_path / "a.json")
    assert (again.conditions, again.date) == (results.conditions, results.date)
    again.save(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_text() == (tmp_path / "b.json").read_text()
    assert json.loads((tmp_path / "a.json").read_text())["cases"][0]["ratios"].keys() == {"SDPA", "transformers"}


NO_FIGURES = '{"group": "operator", "name": "a toy", "best": {}, "median": {}, "rounds": 3}'


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", '{"conditions": 3}', '{"conditions": {}, "date": "", "cases": [{}]}'),
        f'{{"conditions": {{}}, "date": "", "cases": [{NO_FIGURES}]}}',
    ],
)
def test_other_files_are_refused(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=r"a\.json is not a file that regard bench --out wrote"):
        read_results(tmp_path / "a.json")


def test_the_page_says_what_was_measured_and_what_was_not(tmp_path):
    results = Results({"CPU": "a CPU", "openvino": "not installed"}, "2026-01-31")
    results.add(bench.run(toy(group="watching"), 0))
    text = results_page(results)
    assert "## Watching" in text and "## Models" not in text
    assert "2026-01-31: CPU a CPU. Not installed, so not raced: openvino." in text
    assert "| case | ours, ms | SDPA | transformers | spread |" in text and "| a toy | 0 MB |" in text


def test_the_page_of_the_documents_is_the_one_that_its_figures_give():
    assert (DOCS / "benchmarks.md").read_text(encoding="utf-8") == results_page(read_results(DOCS / "benchmarks.json"))


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_races_keeps_and_goes_on(tmp_path, monkeypatch, capsys):
    file = tmp_path / "mine.json"
    code, out, err = command(monkeypatch, capsys, "bench", QUICK, "--seconds", "0", "--out", str(file))
    assert code == 0 and QUICK in out and "SDPA" in out and not err
    first = json.loads(file.read_text())["cases"]
    given = ("bench", QUICK, MORE, "--seconds", "0", "--out", str(file), "--page", str(tmp_path / "mine.md"))
    code, out, _ = command(monkeypatch, capsys, *given)
    second = json.loads(file.read_text())["cases"]
    assert code == 0 and "1 of 2 cases are in" in out
    assert second[0] == first[0] and len(second) == 2
    assert MORE in (tmp_path / "mine.md").read_text()


def test_the_command_tells_of_differences_and_of_what_is_missing(monkeypatch, capsys):
    def missing() -> Mapping[str, Call]:
        raise bench.MissingPeer("transformers is not installed")

    given = [bench.Case("operator", "not here", missing), toy(wrong=1.0), toy(name="another")]
    monkeypatch.setattr("regard.cli.bench.cases", lambda words, device: given)
    code, out, err = command(monkeypatch, capsys, "bench", "--seconds", "0")
    assert code == 1 and "left out: transformers is not installed" in " ".join(out.split())
    assert "another" in out and len(err) == 1 and err[0].startswith("regard: a toy: results differ")


def test_figures_of_other_conditions_do_not_mix(tmp_path, monkeypatch, capsys):
    file = tmp_path / "old.json"
    Results(bench.conditions() | {"threads": 99}).save(file)
    before = file.read_text()
    code, _, err = command(monkeypatch, capsys, "bench", QUICK, "--out", str(file))
    assert code == 2 and "old.json was measured with threads 99, here it is" in err[0] and file.read_text() == before


def test_what_fails_otherwise_is_said_with_its_case(monkeypatch, capsys):
    def no_room() -> Mapping[str, Call]:
        raise RuntimeError("can't\nallocate memory")

    monkeypatch.setattr(
        "regard.cli.bench.cases", lambda words, device: [bench.Case("operator", "large", no_room), toy(1.0)]
    )
    code, out, err = command(monkeypatch, capsys, "bench", "--seconds", "0")
    assert code == 1 and "differ" not in out
    assert err == ["regard: large: can't allocate memory (and 1 more)"]


@pytest.mark.parametrize("option", ["--out", "--page"])
def test_where_nothing_can_be_written_nothing_is_raced(option, tmp_path, monkeypatch, capsys):
    for file, said in ((tmp_path, "is a folder"), (tmp_path / "no" / "a", "cannot be written")):
        code, out, err = command(monkeypatch, capsys, "bench", QUICK, option, str(file))
        assert code == 2 and not out and len(err) == 1 and said in err[0]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["dance"], "no case is called 'dance'"),
        (["--seconds", "-1"], "--seconds"),
        (["--list", "--page", "x.md"], "--list runs no case"),
        (["--list", "--json"], "--list runs no case"),
        (["--seconds", "nan"], "--seconds"),
    ],
)
def test_wrong_requests_are_one_line(given, said, monkeypatch, capsys):
    code, _, err = command(monkeypatch, capsys, "bench", *given)
    assert code == 2 and len(err) == 1 and said in err[0]


def test_figures_are_printed_as_json(monkeypatch, capsys):
    monkeypatch.setattr("regard.cli.bench.cases", lambda words, device: [toy()])
    code, out, _ = command(monkeypatch, capsys, "bench", "--json", "--seconds", "0")
    found = json.loads(out)
    assert code == 0 and found["cases"][0]["name"] == "a toy" and len(found["conditions"]["code"]) == 8


def test_another_that_does_not_run_is_left_out(monkeypatch, capsys):
    def broken() -> torch.Tensor:
        raise RuntimeError("no compiler\nhere")

    x = torch.ones(3)
    make = lambda: operator._check_equal({"regard": lambda: x, "SDPA": lambda: x, "FlexAttention": broken})  # noqa: E731
    monkeypatch.setattr("regard.cli.bench.cases", lambda words, device: [bench.Case("operator", "a toy", make)])
    code, out, _ = command(monkeypatch, capsys, "bench", "--seconds", "0")
    assert code == 0 and "FlexAttention is left out: no compiler" in " ".join(out.split())
    with pytest.raises(RuntimeError, match="no compiler"):  # ours is never left out
        operator._check_equal({"regard": broken})


@pytest.mark.parametrize(("weaker", "fails"), [(1.0, True), (1.99, False), (3.0, False)])
def test_a_set_that_loses_to_a_weaker_one_is_an_error(weaker, fails, monkeypatch, capsys):
    """Losing by less than noise is no error; the figures are printed in any case."""
    times = {"regard": 2.0, "avx2": weaker}
    measured = bench.Measurement("instructions", "a toy", times, times, 9)
    monkeypatch.setattr("regard.cli.bench.run", lambda case, seconds: measured)
    monkeypatch.setattr("regard.cli.bench.cases", lambda words, device: [replace(toy(group="instructions"), least=1.0)])
    code, out, err = command(monkeypatch, capsys, "bench", "--seconds", "0")
    assert "avx2" in out and code == int(fails)
    assert err == (["regard: a toy: slower than avx2 by more than noise"] if fails else [])


def test_instruction_sets_are_compared_from_the_one_in_use_down(monkeypatch):
    if len(instruction_sets.compared_sets()) < 2:
        pytest.skip("this machine has one instruction set besides plain C++")
    case = instruction_sets._case("a toy", (1, 2, 3, 8), 5, 1, torch.float32)
    assert list(case.make()) == ["regard", *instruction_sets.compared_sets()[1:]]
    for call in case.make().values():
        call()
    weakest = instruction_sets.compared_sets()[-1]
    monkeypatch.setattr(native, "instruction_set", lambda: weakest)
    assert instruction_sets.compared_sets() == (weakest,)
    with pytest.raises(bench.MissingPeer, match="only one instruction set"):
        case.make()


@pytest.mark.parametrize(("median", "said"), [(2.1, False), (4.0, True)])
def test_noise_is_told(median, said):
    measured = bench.Measurement("operator", "a toy", {"regard": 2.0, "SDPA": 3.0}, {"regard": median, "SDPA": 3.0}, 9)
    assert ("noisy: median +100%" in _figures(toy(), measured, 80).plain) == said


def test_what_is_asked_of_the_kernel_is_told_where_it_can_be_met(monkeypatch, capsys):
    monkeypatch.setattr("regard.cli.bench.cases", lambda words, device: [replace(toy(), target=1.5)])
    for kernel in ("avx2", "avx512bf16"):
        monkeypatch.setattr("regard.bench._results.conditions", lambda kernel=kernel: {"kernel": kernel})
        _, out, _ = command(monkeypatch, capsys, "bench", "--seconds", "0")
        assert ("target: SDPA 1.5 ×" in out) == (kernel == "avx512bf16")


def test_names_can_be_listed(monkeypatch, capsys):
    code, out, _ = command(monkeypatch, capsys, "bench", "models", "--list")
    assert code == 0 and len(out.splitlines()) == len(bench.cases(["models"]))
