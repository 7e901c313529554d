"""Recordings and records of steps that are damaged or hostile: refused in one line, never a crash, a hang or more."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import regard
from regard import Causal, Groups, Observe, RegardError
from regard._lowered_scores import RelativeTerm, Scores
from regard._saved_call import SavedCall
from regard.interp import Recording, _records, load_recording

B, H, G, N, M, D = 2, 4, 2, 5, 7, 3
HANG = 120  # seconds
KEPT = "0.0.kept.0"  # the prefix of the saved call's tensors
GROUPS = Groups({"a": [0, 1], "b": torch.tensor([[False] * 5 + [True], [False] * 6])})
ALL_OBSERVABLES = Observe(map=3, profile=2, key_mass=True, top=2, keep=True, groups=GROUPS)

Tensors = dict[str, Tensor]
Entries = dict[str, Any]


def recording(folder: Path) -> Path:
    """Save a recording of one call with every observable, and with every tensor that a saved call can have."""
    torch.manual_seed(0)
    q = torch.randn(B, H, N, D)
    k = torch.randn(B, G, M, D)
    v = torch.randn(B, G, M, D)
    _, observation = regard.attention(
        q, k, v, mask=Causal(), bias=regard.ALiBi(), sinks=torch.randn(H), observe=ALL_OBSERVABLES
    )
    call = observation.saved_calls[0]
    assert isinstance(call, SavedCall)
    # No mask of ours has all three, and none comes with a bias and terms; these change nothing.
    scores = replace(
        call.scores,
        lo=torch.zeros(1, N, dtype=torch.int64),
        mask=torch.ones(1, 1, N, M, dtype=torch.bool),
        bias=torch.zeros(1, 1, N, M),
    )
    observation = replace(observation, saved_calls=(SavedCall(call.q, call.k, scores),))
    Recording({"blocks.0": [observation]}, model="toy", tokens=list("abcde")).save(folder)
    return folder


def damage(folder: Path, change: Callable[[Tensors, Entries], object]) -> Path:
    """Change the tensors and the entries of a recording."""
    file = folder / "recording.json"
    entries = json.loads(file.read_text())
    values = folder / entries["values"]
    tensors = dict(load_file(values))
    change(tensors, entries)
    save_file({name: x.contiguous() for name, x in tensors.items()}, values)
    file.write_text(json.dumps(entries))
    return folder


def tensor(name: str, value: Callable[[Tensor], Tensor] | Tensor) -> Callable[[Tensors, Entries], object]:
    """A change of one tensor: another tensor, or a function of the one that is there."""

    def change(tensors: Tensors, entries: Entries) -> None:
        assert name in tensors, name
        tensors[name] = value if isinstance(value, Tensor) else value(tensors[name])

    return change


def entry(*path: str | int, value: object) -> Callable[[Tensors, Entries], object]:
    """A change of one entry of the first call of recording.json, or of any entry if the path begins with "/"."""

    def change(tensors: Tensors, entries: Entries) -> None:
        inner: Any = entries if path[0] == "/" else entries["places"][0]["calls"][0]
        steps = [step for step in path if step != "/"]
        for step in steps[:-1]:
            inner = inner[step]
        inner[steps[-1]] = value

    return change


# What is wrong with a saved call, and the argument that the error names.
SAVED_CALLS = {
    "k without a batch": (tensor(f"{KEPT}.k", lambda k: k[0]), "q and k"),
    "k of another batch": (tensor(f"{KEPT}.k", lambda k: k[:1]), "q and k"),
    "k narrower than q": (tensor(f"{KEPT}.k", lambda k: k[..., :1]), "q and k"),
    "k of heads that do not divide": (tensor(f"{KEPT}.k", torch.zeros(B, 3, M, D)), "heads of k"),
    "k without heads": (tensor(f"{KEPT}.k", torch.zeros(B, 0, M, D)), "heads"),
    "k of more keys": (tensor(f"{KEPT}.k", torch.zeros(B, G, M + 1, D)), "lo|mask|bias|key_positions"),
    "int8 k": (tensor(f"{KEPT}.k", lambda k: k.to(torch.int8)), "k must be"),
    "bfloat16 k": (tensor(f"{KEPT}.k", lambda k: k.bfloat16()), "q, k"),
    "8-bit q and k": (tensor(f"{KEPT}.q", lambda q: q.to(torch.float8_e4m3fn)), "q must be"),
    "int32 hi": (tensor(f"{KEPT}.hi", lambda hi: hi.int()), "hi"),
    "short hi": (tensor(f"{KEPT}.hi", lambda hi: hi[:, 1:]), "hi"),
    "hi beyond the keys": (tensor(f"{KEPT}.hi", torch.full((1, N), 2**62)), "hi"),
    "negative lo": (tensor(f"{KEPT}.lo", torch.full((1, N), -1)), "lo"),
    "lo of one row": (tensor(f"{KEPT}.lo", torch.zeros(1, 1, dtype=torch.int64)), "lo"),
    "mask of numbers": (tensor(f"{KEPT}.mask", torch.ones(1, 1, N, M)), "mask"),
    "narrow mask": (tensor(f"{KEPT}.mask", torch.ones(1, 1, N, M - 1, dtype=torch.bool)), "mask"),
    "mask of rank 2": (tensor(f"{KEPT}.mask", torch.ones(N, M, dtype=torch.bool)), "mask"),
    "bias of integers": (tensor(f"{KEPT}.bias", torch.zeros(1, 1, N, M, dtype=torch.int64)), "bias"),
    "short bias": (tensor(f"{KEPT}.bias", torch.zeros(1, 1, N - 1, M)), "bias"),
    "few sinks": (tensor(f"{KEPT}.sinks", torch.zeros(1)), "sinks"),
    "term without columns": (tensor(f"{KEPT}.term.0.table", torch.zeros(1, H, 1, 0)), "table"),
    "term of rank 0": (tensor(f"{KEPT}.term.0.table", torch.tensor(1.0)), "table"),
    "term of other heads": (tensor(f"{KEPT}.term.0.table", torch.zeros(1, H - 1, 1, 3)), "table"),
    "short query_at": (tensor(f"{KEPT}.term.0.query_at", lambda x: x[1:]), "query_positions"),
    "query_at of one row": (tensor(f"{KEPT}.term.0.query_at", lambda x: x[:1]), "query_positions"),
    "key_at of rank 2": (tensor(f"{KEPT}.term.0.key_at", lambda x: x[None]), "key_positions"),
    "int32 key_at": (tensor(f"{KEPT}.term.0.key_at", lambda x: x.int()), "key_positions"),
    "first offset beyond 64 bits": (entry("kept", 0, "firsts", value=[2**70]), "first_offset"),
    "first offset of text": (entry("kept", 0, "firsts", value=["0"]), "first_offset"),
    "scale of NaN": (entry("kept", 0, "scale", value="nan"), "scale"),
    "negative scale": (entry("kept", 0, "scale", value="-1"), "scale"),
    "infinite scale with sinks": (entry("kept", 0, "scale", value="inf"), "scale"),
    "infinite softcap": (entry("kept", 0, "softcap", value=math.inf), "softcap"),
}

OBSERVABLES = {
    "counted of numbers": (tensor("0.0.counted", lambda x: x.float()), "counted"),
    "rows of floats": (tensor("0.0.rows", lambda x: x.float()), "rows"),
    "negative rows": (tensor("0.0.rows", torch.full((H,), -1)), "rows"),
    "rows without heads": (tensor("0.0.rows", torch.zeros(0, dtype=torch.int64)), "rows"),
    "rows of rank 0": (tensor("0.0.rows", torch.tensor(4)), "rows"),
    "entropy of fewer rows": (tensor("0.0.entropy", lambda x: x[..., 1:]), "entropy"),
    "complex entropy": (tensor("0.0.entropy", lambda x: x.to(torch.complex64)), "entropy"),
    "int32 peak_at": (tensor("0.0.peak_at", lambda x: x.int()), "peak_at"),
    "peak_at beyond the keys": (tensor("0.0.peak_at", torch.full((B, H, N), M)), "peak_at"),
    "top_at beyond the keys": (tensor("0.0.top_at", torch.full((B, H, N, 2), 2**62)), "top_at"),
    "top_at below −1": (tensor("0.0.top_at", torch.full((B, H, N, 2), -2)), "top_at"),
    "top_at of another k": (tensor("0.0.top_at", lambda x: x[..., :1]), "top_at"),
    "key mass of more keys": (tensor("0.0.key_mass", torch.zeros(H, M + 1)), "key_mass"),
    "map that is not square": (tensor("0.0.map", torch.zeros(H, 3, 2)), "map"),
    "map of another size": (tensor("0.0.map", torch.zeros(H, 4, 4)), "map"),
    "map without its rows": (lambda tensors, entries: tensors.pop("0.0.map_rows"), "map_rows"),
    "profile of another radius": (tensor("0.0.profile", torch.zeros(H, 3)), "profile"),
    "profile without its rows": (lambda tensors, entries: tensors.pop("0.0.profile_rows"), "profile_rows"),
    "n without rows": (lambda tensors, entries: tensors.pop("0.0.counted"), "counted"),
    "n beyond 64 bits": (entry("n", value=10**400), "n and m"),
    "n of NaN": (entry("n", value=math.nan), "n and m"),
    "m of another call": (entry("m", value=M + 1), "key_mass"),
    "n that is not known": (entry("n", value=None), "lse"),
    "grid of more cells": (entry("observe", "grid", value=[3, 3]), "grid"),
    "grid beyond 64 bits": (entry("observe", "grid", value=[2**62, 2**62]), "grid"),
    "text instead of a bool": (entry("observe", "keep", value="yes"), "keep"),
    "queries": (entry("observe", "queries", value=[1, 2]), "queries"),
    "unknown option": (entry("observe", "depth", value=1), "depth"),
    "options that are a list": (entry("observe", value=[1]), "observe"),
    "saved call of other heads": (tensor(f"{KEPT}.q", torch.zeros(B, 2, N, D)), "sinks|heads"),
}

KEY_GROUPS = {
    "groups of fewer names": (entry("/", "key_groups", value=[["a"]]), "labels"),
    "groups without names": (entry("/", "key_groups", value=[[]]), "groups"),
    "one name twice": (entry("/", "key_groups", value=[["a", "a"]]), "'a' twice"),
    "names that are numbers": (entry("/", "key_groups", value=[[1, 2]]), "names"),
    "names of half a character": (entry("/", "key_groups", value=[["a", "\ud800"]]), "names"),
    "more than 256 names": (entry("/", "key_groups", value=[[str(number) for number in range(257)]]), "256"),
    "another number of names": (entry("/", "key_groups", value=[["a", "b", "c"]]), "groups"),
    "key_groups that are text": (entry("/", "key_groups", value="ab"), "key_groups"),
    "no key_groups": (lambda tensors, entries: entries.pop("key_groups"), "key_groups"),
    "groups of a number that does not exist": (entry("observe", "groups", value=1), "groups"),
    "groups of a negative number": (entry("observe", "groups", value=-1), "groups"),
    "groups that are true": (entry("observe", "groups", value=True), "groups"),
    "groups that are a list": (entry("observe", "groups", value=[0]), "groups"),
    "no labels": (lambda tensors, entries: tensors.pop("key_groups.0"), "key_groups.0"),
    "labels of floats": (tensor("key_groups.0", lambda x: x.float()), "key_groups.0"),
    "int32 labels": (tensor("key_groups.0", lambda x: x.int()), "key_groups.0"),
    "labels below −1": (tensor("key_groups.0", torch.full((1, M), -2)), "−1"),
    "labels of rank 0": (tensor("key_groups.0", torch.tensor(0)), "labels"),
    "labels of no entry": (tensor("key_groups.0", torch.zeros(0, M, dtype=torch.int64)), "labels"),
    "labels of another batch": (tensor("key_groups.0", torch.zeros(3, M, dtype=torch.int64)), "batch"),
    "weights on groups that nobody named": (entry("observe", "groups", value=None), "groups"),
    "weights on another number of groups": (tensor("0.0.groups", torch.zeros(B, H, N, 3)), "groups"),
    "int64 weights on groups": (tensor("0.0.groups", lambda x: x.long()), "groups"),
    "float largest logits of fewer rows": (tensor("0.0.logit_max", lambda x: x[..., 1:]), "logit_max"),
}

DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]

DESCRIPTIONS = {
    "path that is a number": (entry("/", "places", 0, "path", value=3), "path"),
    "path of half a character": (entry("/", "places", 0, "path", value="\ud800"), "path"),
    "one path twice": (lambda tensors, entries: entries["places"].append(entries["places"][0]), "two layers"),
    "no calls": (entry("/", "places", 0, "calls", value=[]), "calls"),
    "calls that are text": (entry("/", "places", 0, "calls", value="ab"), "calls"),
    "places that are a number": (entry("/", "places", value=3), "places"),
    "deep entries": (entry("/", "note", value=DEEP), "nested"),
    "values in another folder": (entry("/", "values", value="../x.safetensors"), "values"),
    "values at an absolute path": (entry("/", "values", value="/dev/zero"), "values"),
    "values that are the folder above": (entry("/", "values", value=".."), "regular file"),
    "values of a long name": (entry("/", "values", value="x" * 5000), "values"),
    "values that are a number": (entry("/", "values", value=1), "values"),
    "no saved call entry": (lambda tensors, entries: entries["places"][0]["calls"][0].pop("kept"), "kept"),
    "another kind": (entry("/", "kind", value=DEEP[0][0]), "kind|nested"),
}

DAMAGES = SAVED_CALLS | OBSERVABLES | KEY_GROUPS | DESCRIPTIONS

# Loads every recording and does with it what pages, tables and the lab do.
READER = """
    import sys
    from pathlib import Path
    import torch
    from regard import RegardError
    from regard.interp import load_recording

    torch.set_num_threads(1)
    for folder in sorted(Path(sys.argv[1]).iterdir()):
        try:
            recording = load_recording(folder)
            recording.to_html()
            recording.to_csv()
            observation = recording[0]
            recording.table(groups=True)
            observation.group_map()
            observation.weights(0)
            observation.tile(1, size=2, batch=1)
            result = "loaded"
        except RegardError as error:
            result = f"refused {error}"
        print(folder.name, result.replace("\\n", " (newline) "), sep="\\t", flush=True)
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a process says about each damaged recording. It is another process, because one of them might crash it."""
    folder = tmp_path_factory.mktemp("hostile")
    recording(folder / "sound")
    for name, (change, _) in DAMAGES.items():
        damage(recording(folder / name), change)
    command = [sys.executable, "-c", textwrap.dedent(READER), str(folder)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False)
    lines = dict(line.split("\t", 1) for line in finished.stdout.splitlines())
    assert finished.returncode == 0, (list(lines)[-1:], finished.returncode, finished.stderr[-2000:])
    return lines


def test_the_recording_that_is_not_damaged_is_read(results: dict[str, str]) -> None:
    assert results["sound"] == "loaded"


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_recording_is_refused_in_one_line(name: str, results: dict[str, str]) -> None:
    refused, _, message = results[name].partition(" ")
    assert refused == "refused" and "is not a complete recording" in message
    assert "(newline)" not in message and len(message) < 1500
    reason = message.split("is not a complete recording: ")[1]
    assert any(part in reason for part in DAMAGES[name][1].split("|")), reason


def test_numbers_that_are_not_finite_are_shown(tmp_path: Path) -> None:
    """NaN and infinity are numbers that a model can have: they are shown as unknown."""

    def change(tensors: Tensors, entries: Entries) -> None:
        for name, x in tensors.items():
            if x.is_floating_point() and "kept" not in name:
                tensors[name] = torch.full_like(x, math.inf)
        tensors["0.0.entropy"] = torch.full((B, H, N), math.nan)

    loaded = load_recording(damage(recording(tmp_path / "a"), change))
    assert loaded.to_html() and loaded.to_csv() and json.loads(loaded.to_json())
    assert loaded.heads()[0]["entropy"] is None


def test_metadata_may_be_anything(tmp_path: Path) -> None:
    junk = {"tokens": 3, "model": {"a": [1]}, "kinds": [None], "cross": 1, "source": {}, "grid": [10**400, -1]}
    junk |= {"image": 7, "big": 10**400}
    loaded = load_recording(damage(recording(tmp_path / "a"), lambda tensors, entries: entries.update(junk)))
    assert loaded.to_html() and loaded.to_csv() and loaded.to_json()


def test_files_that_are_not_regular_are_refused_at_once(tmp_path: Path) -> None:
    folder = recording(tmp_path / "a")
    values = next(folder.glob("values-*"))
    outside = tmp_path / "outside.safetensors"
    values.rename(outside)
    values.symlink_to(outside)
    with pytest.raises(RegardError, match="leads out of its folder"):
        load_recording(folder)
    values.unlink()
    os.mkfifo(values)
    with pytest.raises(RegardError, match="regular file"):
        load_recording(folder)
    values.unlink()
    (folder / "recording.json").unlink()
    os.mkfifo(folder / "recording.json")
    with pytest.raises(FileNotFoundError, match="is not a recording"):
        load_recording(folder)


WRONG_CALLS = {
    "dropout": Scores(1.0, dropout=0.5),
    "seed": Scores(1.0, seed=torch.zeros(2, dtype=torch.int64)),
    "mask": Scores(1.0, mask=torch.ones(1, 1, N, M, dtype=torch.bool, device="meta")),
    "table": Scores(1.0, terms=(RelativeTerm([1.0], torch.arange(N), torch.arange(M), 0),)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("argument", WRONG_CALLS)
def test_the_constructor_of_a_saved_call_checks_it(argument: str) -> None:
    with pytest.raises(RegardError, match=argument):
        SavedCall(torch.zeros(B, H, N, D), torch.zeros(B, G, M, D), WRONG_CALLS[argument])


# --- records of steps ------------------------------------------------------------------------------------------------


def record_file(folder: Path) -> Path:
    layer = _records.AttentionLayer("blocks.0", (0, 1), 5, 5, False)
    tensors = {"means": torch.zeros(2, 7), "map": torch.zeros(2, 3, 3), "profile": torch.zeros(2, 5)}
    names = {}
    for weights in ("raw", "clean"):
        tensors[f"natural {weights}"] = torch.zeros(2, 2)
        names[f"natural {weights}"] = ("sinks", "previous")
    seconds = {"cost": 0.5, "spent": 1.0, "elapsed": 2.0}
    return _records.write_record(folder, _records.Record(1, "Toy", (layer,), tensors, names, seconds))


LAYER = {"path": "blocks.0", "heads": [0, 1], "n": 5, "m": 5, "cross": False}
WRONG_RECORDS: dict[str, tuple[Entries, Tensors, str]] = {
    "path that is a number": ({"places": [LAYER | {"path": 3}]}, {}, "layer"),
    "path of half a character": ({"places": [LAYER | {"path": "\ud800"}]}, {}, "layer"),
    "one layer twice": ({"places": [LAYER | {"heads": [0]}] * 2}, {}, "same path"),
    "one head twice": ({"places": [LAYER | {"heads": [1, 1]}]}, {}, "heads"),
    "no layers": ({"places": []}, {}, "places"),
    "more heads than numbers": ({"places": [LAYER | {"heads": list(range(3))}]}, {}, "means"),
    "model that is a list": ({"model": [1]}, {}, "model"),
    "raw scores alone": ({"names": {"natural raw": ["sinks", "previous"]}}, {}, "natural raw"),
    "scores without a probe": ({"names": {"raw": [], "clean": []}}, {}, "table 'raw'"),
    "names that are text": ({"names": {"natural raw": "ab", "natural clean": "ab"}}, {}, "names"),
    "one name twice": ({"names": {"natural raw": ["a", "a"], "natural clean": ["a", "b"]}}, {}, "same name"),
    "step beyond 64 bits": ({"step": 10**400}, {}, "step"),
    "deep entries": ({"note": DEEP}, {}, "nested"),
    "infinite scores": ({}, {"natural raw": torch.full((2, 2), -math.inf)}, "natural raw"),
    "float64 map": ({}, {"map": torch.zeros(2, 3, 3, dtype=torch.float64)}, "map"),
    "map that is not square": ({}, {"map": torch.zeros(2, 3, 4)}, "map"),
    "even profile": ({}, {"profile": torch.zeros(2, 4)}, "profile"),
    "no means": ({}, {"means": torch.zeros(0)}, "means"),
}


@pytest.mark.parametrize("name", WRONG_RECORDS)
def test_a_damaged_record_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    changes, other_tensors, argument = WRONG_RECORDS[name]
    file = record_file(tmp_path)
    assert _records.read_record(file).step == 1
    tensors = dict(load_file(file)) | other_tensors
    with _records.safe_open(file, framework="pt") as opened:
        header = json.loads(opened.metadata()["regard"])
    save_file(tensors, file, metadata={"regard": json.dumps(header | changes)})
    with pytest.raises(RegardError, match="is not a complete record") as error:
        _records.read_record(file)
    assert argument in str(error.value) and "\n" not in str(error.value)


def test_a_record_that_is_a_pipe_or_leads_out_of_its_folder_is_refused(tmp_path: Path) -> None:
    file = record_file(tmp_path / "a")
    outside = tmp_path / file.name
    file.rename(outside)
    file.symlink_to(outside)
    with pytest.raises(RegardError, match="leads out of its folder"):
        _records.read_record(file)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(RegardError, match="regular file"):
        _records.read_record(file)
