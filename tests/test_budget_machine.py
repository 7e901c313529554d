"""Machines of the planner: the catalogue, the measurement of this CPU, and its cache. Timings decide nothing here."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from regard.budget import _machine as machine
from regard.budget import _machine_benchmark as machine_benchmark
from regard.budget._machine import Machine, find_machine, machines
from regard.budget._machine_benchmark import measure_machine, this_machine

TINY = Machine("tiny", {"float32": 7.0, "bfloat16": 11.0}, bandwidth=2.0, memory=13)


# --- a machine --------------------------------------------------------------------------------------------------------


def test_rates_and_ridge():
    assert TINY.rate("bfloat16") == 11 and TINY.ridge("float32") == 3.5
    assert TINY.attention_rate("float32") == 7
    watched = replace(TINY, attention={"float32": 5.0})
    assert (watched.attention_rate("float32"), watched.attention_rate("bfloat16")) == (5, 11)


@pytest.mark.parametrize("ask", [Machine.rate, Machine.attention_rate, Machine.ridge])
def test_a_dtype_without_a_figure_is_refused(ask: Callable[[Machine, str], float]):
    with pytest.raises(ValueError, match=r"^dtype .*bfloat16, float32 on tiny, got float64$"):
        ask(TINY, "float64")


def test_a_machine_owns_its_figures():
    peak = {"float32": 7.0}
    kept = Machine("mine", peak, 2.0, 13)
    peak["float32"] = 17.0
    assert kept.rate("float32") == 7
    assert len({kept, replace(kept), TINY}) == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", ""),
        ("name", 3),
        ("peak", {}),
        ("peak", [7.0]),
        ("peak", {"float31": 7.0}),
        ("peak", {"float32": 0.0}),
        ("peak", {"float32": math.inf}),
        ("peak", {"float32": True}),
        ("peak", {"float32": 10**400}),
        ("attention", {"float32": -7.0}),
        ("attention", {"float32": math.nan}),
        ("bandwidth", 0),
        ("bandwidth", "fast"),
        ("memory", 2.5),
        ("memory", 0),
        ("activation", 0.0),
        ("activation", None),
        ("call", -1.0),
        ("call", math.inf),
        ("measured", "yesterday"),
        ("measured", 2026),
        ("load", -1.0),
        ("load", "high"),
    ],
)
def test_impossible_figures_are_refused_by_name(field: str, value: Any):
    with pytest.raises(ValueError, match=field) as refused:
        replace(TINY, **{field: value})
    assert "\n" not in str(refused.value)


# --- JSON -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        TINY,
        replace(TINY, measured="2026-11-13T17:19:23+01:00", attention={"float32": 5.0}, activation=3.5, call=1e-6),
        find_machine("H100 SXM"),
    ],
)
def test_json_round_trip(given: Machine):
    text = given.to_json()
    assert "Infinity" not in text
    assert Machine.from_json(text) == given


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "JSON"),
        ("[" * 100_000, "JSON"),
        ("[]", "JSON object, not list"),
        ("{}", "needs name, peak, bandwidth, memory"),
        ('{"name": "x", "colour": "red"}', "has no colour"),
        ('{"name": "x", "peak": {"float32": "7"}, "bandwidth": 2, "memory": 3}', "^peak of float32 .*'7'$"),
        ('{"name": "x", "peak": {"float32": 7}, "bandwidth": NaN, "memory": 3}', "^bandwidth .* nan$"),
    ],
)
def test_json_of_something_else_is_refused_in_one_line(text: str, complaint: str):
    with pytest.raises(ValueError, match=complaint) as refused:
        Machine.from_json(text)
    assert "\n" not in str(refused.value)


# --- the catalogue ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", machines())
def test_the_catalogue_is_plausible(name: str):
    found = find_machine(name)
    assert found.name == name and found.measured is None and found.attention == {} and found.call == 0
    assert 1e11 < found.bandwidth < 1e13 and 10**10 < found.memory < 10**12
    assert all(1e12 < rate < 1e16 for rate in found.peak.values())
    # Matrix units of every generation need some hundred FLOPs a byte, and halves are never slower than what they halve.
    half = max(found.peak.get("bfloat16", 0), found.peak.get("float16", 0))
    assert 50 < half / found.bandwidth < 700
    order = [found.peak.get(dtype) for dtype in ("float64", "float32", "tfloat32")] + [half, found.peak.get("int8")]
    rates = [rate for rate in order if rate is not None]
    assert rates == sorted(rates)
    if "bfloat16" in found.peak and "float16" in found.peak:
        assert found.rate("bfloat16") == found.rate("float16")


def test_figures_that_are_easily_confused():
    assert find_machine("A100 80GB").rate("bfloat16") == 312e12  # 624 with sparsity
    assert find_machine("H100 SXM").rate("bfloat16") == 989.5e12  # 1,979 with sparsity
    assert find_machine("RTX 4090").rate("float16") == 165.2e12  # 330.3 summed in float16
    assert find_machine("A100 40GB").rate("float32") == 19.5e12  # 156 as tfloat32
    assert find_machine("A100 40GB").bandwidth < find_machine("A100 80GB").bandwidth


@pytest.mark.parametrize("name", ["A100 80GB", "a100-80gb", "NVIDIA A100 80 GB", "a100_80GB", "A10080gb"])
def test_names_are_found_however_they_are_written(name: str):
    assert find_machine(name) == find_machine("A100 80GB")


def test_names_differ_when_written_plainly():
    assert len({machine._normalized(name) for name in machines()}) == len(machines()) >= 16


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("h100", "H100 SXM, H100 PCIe"),
        ("A100", "A100 40GB, A100 80GB"),
        ("rtx 4080", "RTX 4090"),
        ("v100", "V100 SXM2"),
    ],
)
def test_an_unknown_name_shows_close_ones(name: str, shown: str):
    with pytest.raises(ValueError, match=rf"^unknown machine '{name}'.*{shown}") as refused:
        find_machine(name)
    assert "\n" not in str(refused.value) and "TPU" not in str(refused.value)


@pytest.mark.parametrize("name", ["", "?", "abacus"])
def test_an_unknown_name_like_no_other_shows_all(name: str):
    with pytest.raises(ValueError, match=r"^unknown machine .*T4, .*TPU v5p"):
        find_machine(name)


# --- the measurement --------------------------------------------------------------------------------------------------


def test_a_quick_measurement(full_tiles: None):
    steps: list[tuple[int, int]] = []
    state = torch.get_rng_state()
    found = measure_machine(lambda done, of: steps.append((done, of)), seconds=0.05)
    assert steps == [(k, 13) for k in range(1, 14)]
    assert found.peak.keys() == found.attention.keys() == {"float64", "float32", "bfloat16", "float16"}
    assert found.measured is not None and 0 < found.activation < math.inf and found.call > 0
    assert found.memory > 2**28 and str(torch.get_num_threads()) in found.name
    assert Machine.from_json(found.to_json()) == found
    assert torch.equal(state, torch.get_rng_state())


def test_what_surrounds_a_measurement_does_not_change_what_is_measured():
    with torch.device("meta"), torch.autocast("cpu", torch.bfloat16), machine_benchmark._plain_torch():
        x = machine_benchmark._test_tensor("float32", 3, 5)
        assert x.device.type == "cpu" and (x @ x.T).dtype == torch.float32


@pytest.mark.parametrize("seconds", [0, -1.0, math.inf, math.nan, "5"])
def test_time_to_measure_is_positive(seconds: Any):
    with pytest.raises((ValueError, TypeError), match="seconds"):
        measure_machine(seconds=seconds)


@pytest.mark.parametrize(
    ("seconds", "sizes_used", "reached", "rate"),
    [(1, 2, 1, 10), (40, 2, 2, 10), (1000, 2, 3, 5), (1000, 1, 3, 4)],
)
def test_larger_sizes_while_the_time_lasts(
    monkeypatch: pytest.MonkeyPatch, seconds: float, sizes_used: int, reached: int, rate: float
):
    """The rate is that of the largest sizes that were run, not of small ones that look better; the clock is ours."""
    clock = 0.0
    ran: list[int] = []
    work = {2: 10.0, 3: 20.0, 5: 40.0}
    takes = {2: 1.0, 3: 4.0, 5: 10.0}  # 10, 5 and 4 a second

    def run(size: int) -> None:
        nonlocal clock
        clock += takes[size] * (2 if size not in ran else 1)  # a first call is slow
        ran.append(size)

    own = SimpleNamespace(perf_counter=lambda: clock, get_clock_info=time.get_clock_info)
    monkeypatch.setattr(machine_benchmark, "time", own)
    found = machine_benchmark._rate(lambda size: (work[size], lambda: run(size)), (2, 3, 5), 3.0, seconds, sizes_used)
    assert found == rate and list(dict.fromkeys(ran)) == [2, 3, 5][:reached]
    assert all(ran.count(size) >= 3 for size in ran)  # one to warm up, two to time
    assert clock <= seconds or ran == [2, 2, 2]


@pytest.mark.parametrize("failing", [AttributeError, ValueError, None])
def test_memory_of_a_system_that_does_not_tell(monkeypatch: pytest.MonkeyPatch, failing: type[Exception] | None):
    def sysconf(name: str) -> int:
        if failing is not None:
            raise failing(name)
        return -1

    monkeypatch.setattr(os, "sysconf", sysconf)
    assert machine_benchmark._memory_bytes() > 2**30


def test_a_container_limits_the_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    root = tmp_path / "cgroup"
    groups = tmp_path / "groups"

    def limits(lines: str, settings: dict[str, str]) -> set[int]:
        groups.write_text(lines, encoding="utf-8")
        for name, text in settings.items():
            file = root / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{text}\n", encoding="utf-8")
        return set(machine_benchmark._container_limits(str(groups), str(root)))

    assert limits("", {}) == set()
    # Version 2: the limits of all groups above hold too, and "max" is none.
    nested = {"memory.max": "max", "a/memory.max": "7000", "a/b/memory.max": "9000", "c/memory.max": "1"}
    assert limits("0::/a/b\n", nested) == {7000, 9000}
    # Version 1; the path is that of the host, so only the top folder is visible.
    assert limits("5:cpu:/x\n4:memory,hugetlb:/docker/x\n", {"memory/memory.limit_in_bytes": "5000"}) == {5000}
    # The smaller of both counts, also for a measurement from before.
    monkeypatch.setattr(machine_benchmark, "_container_limits", lambda: [2**20])
    assert machine_benchmark._memory_bytes() == 2**20
    assert machine_benchmark._with_present_memory(TINY) == replace(TINY, memory=2**20)
    monkeypatch.setattr(machine_benchmark, "_container_limits", lambda: [2**63])
    assert machine_benchmark._memory_bytes() < 2**63


def test_the_load_of_a_measurement_is_described():
    day = replace(TINY, measured="2026-01-02T03:04:05+00:00")
    assert TINY.measurement == "" and day.measurement.endswith("load unknown")
    quiet = replace(day, load=0.0).measurement
    busy = replace(day, load=3.0).measurement
    assert "2026-01-02" in quiet and "busy" not in quiet and "busy" in busy


def test_the_name_without_proc(monkeypatch: pytest.MonkeyPatch):
    def unreadable(self: Path, **options: Any) -> str:
        raise FileNotFoundError(self)

    monkeypatch.setattr(Path, "read_text", unreadable)
    assert machine_benchmark._machine_name().split(", ")[0]


# --- the cache --------------------------------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, full_tiles: None) -> list[Machine]:
    """What was really measured, in a hundredth of the time; the cache is in ``tmp_path``."""
    found: list[Machine] = []

    def quick(progress: Any = None) -> Machine:
        found.append(measure_machine(progress, seconds=0.02))
        return found[-1]

    monkeypatch.setattr(machine_benchmark, "measure_machine", quick)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return found


def test_measured_once(measured: list[Machine], tmp_path: Path):
    first = this_machine()
    assert (tmp_path / "regard" / "machine.json").is_file()
    assert this_machine() == first and measured == [first]
    assert [path.name for path in (tmp_path / "regard").iterdir()] == ["machine.json"]


def test_measured_again_when_asked(measured: list[Machine]):
    steps: list[int] = []
    this_machine()
    second = this_machine(refresh=True, progress=lambda done, of: steps.append(done))
    assert len(measured) == 2 and steps[-1] == 13
    assert this_machine() == second and len(measured) == 2


def test_measured_again_for_another_thread_count(measured: list[Machine], monkeypatch: pytest.MonkeyPatch):
    one = this_machine()
    threads = torch.get_num_threads()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: threads + 1)
        other = this_machine()
        assert len(measured) == 2 and other.name != one.name
        assert this_machine() == other
    assert this_machine() == one and len(measured) == 2


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"[1, 2]",
        b'{"machines": 7}',
        b'{"machines": {"KEY": {"name": "x"}}}',
        b'{"machines": {"KEY": {"name": "x", "peak": {"float32": 1}, "bandwidth": -1, "memory": 1}}}',
        b"[" * 100_000,
    ],
)
def test_a_broken_file_is_replaced(measured: list[Machine], tmp_path: Path, content: bytes):
    file = tmp_path / "regard" / "machine.json"
    file.parent.mkdir()
    file.write_bytes(content.replace(b"KEY", machine_benchmark._measurement_key().encode()))
    found = this_machine()
    assert measured == [found] and this_machine() == found
    assert list(json.loads(file.read_text(encoding="utf-8"))["machines"]) == [machine_benchmark._measurement_key()]


def test_a_folder_that_cannot_be_written_is_no_error(
    measured: list[Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match=r"^the measurement of this machine is not saved: .*$") as warned:
        found = this_machine()
    assert measured == [found] and "\n" not in str(warned[0].message) and warned[0].filename == __file__


def test_no_home_folder_is_no_error(measured: list[Machine], monkeypatch: pytest.MonkeyPatch):
    def homeless(path: str) -> str:
        return path

    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os.path, "expanduser", homeless)
    with pytest.warns(RuntimeWarning, match="no home folder"):
        assert this_machine() == measured[0]


def test_the_cache_is_in_the_home_folder_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert machine_benchmark.measurements_file() == tmp_path / ".cache" / "regard" / "machine.json"


def test_the_newest_sixteen_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(machine_benchmark, "measure_machine", lambda progress: TINY)
    for k in range(19):
        monkeypatch.setattr(machine_benchmark, "_measurement_key", lambda k=k: f"machine {k}")
        this_machine()
    monkeypatch.setattr(machine_benchmark, "_measurement_key", lambda: "machine 3")
    this_machine(refresh=True)  # the oldest becomes the newest
    assert list(machine_benchmark._read_measurements()) == [f"machine {k}" for k in (*range(4, 19), 3)]
