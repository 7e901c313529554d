"""What a recorder wrote, as a table over steps and heads: kinds, arrivals, files that are not what they seem."""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from recorder_worker import model, probes
from rich.console import Console
from safetensors.torch import save_file

from regard import Observe, watch
from regard.nn import EncoderDecoder
from regard.training import records
from regard.training.evolution import Evolution, evolution
from regard.training.recorder import Recorder
from regard.watching.kinds import KINDS, kinds, labels
from regard.watching.table import COLUMNS

pytestmark = pytest.mark.usefixtures("full_tiles")
PATH = "blocks.1.attention"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four records of a model whose weights grow."""
    folder, made = tmp_path_factory.mktemp("run"), model()
    mine = Recorder(made, folder / "evolution", probes=probes(), map=6, profile=4, share=None)
    for step in (0, 1, 2, 4):
        mine.step(step)
        for parameter in made.parameters():
            parameter.data *= 1.3
    return folder


def made_of(*steps: dict[tuple[int, str], float], first: int = 0) -> Evolution:
    """Two heads of one layer, whose scores are 0 but for ``{(head, "natural clean previous"): 0.9}`` at each step."""
    names = {
        "natural raw": ("sinks", "sinks chance"),
        "natural clean": ("previous", "previous chance", "positional", "convolution", "fit", "spread", "rest"),
    }
    found = []
    for s, changes in enumerate(steps):
        tensors = {"means": torch.full((2, 7), float(s)), "map": torch.zeros(2, 3, 3), "profile": torch.zeros(2, 3)}
        for table, columns in names.items():
            tensors[table] = torch.zeros(2, len(columns))
            for at, name in enumerate(columns):
                if name in ("rest", "fit"):
                    tensors[table][:, at] = 1.0
                for (head, what), value in changes.items():
                    if what == f"{table} {name}":
                        tensors[table][head, at] = value
        place = records.Place(PATH, (0, 1), 5, 5, False)
        seconds = {"cost": 1.0, "spent": 1.0 + s, "elapsed": 100.0}
        found.append(records.Record(first + 10 * s, "Toy", (place,), tensors, names, seconds))
    return Evolution(found)


def text(table: Any) -> str:
    with (console := Console(width=80)).capture() as said:
        console.print(table)
    return said.get()


def test_the_table(run: Path) -> None:
    found = evolution(run)
    assert found.steps == [0, 1, 2, 4] and found.paths == ["blocks.0.attention", PATH]
    assert found.heads == [(path, head) for path in found.paths for head in range(3)]
    assert repr(found) == "Evolution of 6 heads of Decoder, steps 0 … 4 (4 records)"
    rows = found.rows()
    assert [(row["step"], row["layer"], row["head"]) for row in rows[5:7]] == [(0, 1, 2), (1, 0, 0)]
    assert len(rows) == 24 and 0 < found.share <= 1
    for name in COLUMNS:
        value = found.value(name)
        assert value.shape == (4, 6)
        assert [row[name] for row in rows] == pytest.approx(value.flatten().tolist())
    assert bool((found.value("entropy")[-1] < found.value("entropy")[0]).all())
    assert evolution(run / "evolution").steps == found.steps
    made = model().eval()
    with torch.no_grad(), watch(made, Observe(map=6, profile=4)) as seen:
        made(probes()[0].ids)
    torch.testing.assert_close(found.map(0, PATH, 2), seen[PATH].map[2], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found.profile(0, PATH, 2), seen[PATH].profile[2], atol=1e-6, rtol=1e-5)


def test_kinds_are_held_against_the_first_step(run: Path) -> None:
    found = evolution(run)
    for s, record in enumerate(found.records):
        for at in range(6):
            assert found.kinds()[s][at] == kinds(record.scores(at), found.records[0].scores(at))
            assert found.labels[s][at] == labels(found.kinds()[s][at])
    assert all(x["sink"]["confidence"] == 0 for x in found.kinds()[0])
    later = Evolution(found.records[1:])  # no step 0: no untrained control
    assert later.kinds()[0][0] == kinds(found.records[1].scores(0), None)
    for kind in KINDS:
        values = found.value(f"{kind} confidence")
        assert values[3].tolist() == pytest.approx([x[kind]["confidence"] for x in found.kinds()[3]])
    raw = found.value("repeated raw induction")
    assert raw[2, 4] == pytest.approx(found.records[2].scores(4)["repeated"]["raw"]["induction"])
    with pytest.raises(ValueError, match=r"there is no 'colour'; near it are .*, and names\(\) lists all"):
        found.value("colour")


def test_when_heads_took_their_types() -> None:
    before, sink = (0, "natural clean previous"), (1, "natural raw sinks")
    found = made_of(
        {},
        {before: 0.9, sink: 0.9},
        {before: 0.1, sink: 0.8},  # the one is lost again, the other stays
        {before: 0.9, sink: 0.7},
        {before: 0.8, sink: 0.7, (1, "natural clean previous"): 0.9},  # one record is too few to tell
    )
    rows = found.arrivals()
    assert [(row["kind"], row["step"], row["layer"], row["head"]) for row in rows] == [
        ("sink", 10, 0, 1),
        ("previous", 30, 0, 0),
    ]
    assert rows[0]["confidence"] == pytest.approx(0.7) and rows[0]["path"] == PATH
    lines = {line.split()[0]: line.split() for line in text(found.table()).splitlines() if line.strip()}
    assert lines["previous"] == ["previous", "2", "30", "0.0", "0.1", "0.90"]
    assert lines["sink"] == ["sink", "1", "10", "0.1", "0.1", "0.70"]
    assert lines["averaging"][1:] == ["0", "–", "–", "–"]
    by_head = text(found.table(heads=True))
    assert "previous 30 (0.80)" in by_head and "previous 40 (0.90), sink 10" in " ".join(by_head.split())
    assert "0.00 → 4.00" in by_head
    assert made_of({}).arrivals() == [] and "Toy" in text(made_of({}).table(heads=True))
    for said in (by_head, text(found.table())):
        assert max(map(len, said.splitlines())) <= 80


def test_as_csv_and_json(run: Path, tmp_path: Path) -> None:
    found = evolution(run)
    rows = list(csv.DictReader(io.StringIO(found.to_csv(tmp_path / "heads.csv"))))
    assert (tmp_path / "heads.csv").read_text() == found.to_csv()
    assert len(rows) == 24 and {"step", "layer", "path", "head", *COLUMNS, "induction score", "labels"} <= set(rows[0])
    assert float(rows[7]["entropy"]) == pytest.approx(float(found.value("entropy")[1, 1]))
    data = json.loads(found.to_json(tmp_path / "heads.json"))
    assert data["rows"] == json.loads(json.dumps(found.rows())) and data["steps"] == found.steps
    assert data["arrivals"] == found.arrivals()


def test_short_texts_have_small_maps(tmp_path: Path) -> None:
    Recorder(
        model(), tmp_path, probes=[replace(probes()[0], ids=probes()[0].ids[:, :5], special=torch.zeros(5) > 0)]
    ).step(0)
    found = evolution(tmp_path)
    cells = found.map(0, PATH, 1)
    assert cells.shape == (5, 5)
    torch.testing.assert_close(cells.sum(1), torch.ones(5))


def test_between_two_sequences(tmp_path: Path) -> None:
    """Cross-attention has no offsets: kinds that need them are left out there, as in the atlas."""
    torch.manual_seed(0)
    made = EncoderDecoder(12, heads=3, layers=1, vocab=40)
    Recorder(made, tmp_path, probes=probes(), share=None).step(0)
    found = evolution(tmp_path)
    assert [place.cross for place in found.records[0].places] == [False, False, True]
    assert set(found.kinds()[0][-1]) == {"sink", "averaging"}
    assert math.isnan(float(found.value("previous score")[0, -1])) and found.rows()[-1]["previous score"] is None
    json.loads(found.to_json())


def test_other_files_and_folders_that_are_written(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(run / "evolution", folder)
    for name in (".step-00000009.safetensors.x1", "step-9.safetensors", "notes.txt", "step-00000009.json"):
        (folder / name).write_text("something else")
    assert evolution(folder).steps == [0, 1, 2, 4]
    gone = {**records.files(folder), 3: folder / "step-00000003.safetensors"}  # listed, and removed meanwhile
    monkeypatch.setattr(records, "files", lambda path: dict(sorted(gone.items())))
    assert evolution(folder).steps == [0, 1, 2, 4]


def refused(file: Path, **changes: Any) -> None:
    """Write a record that says something else of itself."""
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        told = json.loads(opened.metadata()["regard"])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    tensors |= changes.pop("tensors", {})
    save_file(tensors, file, metadata={"regard": json.dumps(told | changes)})


SPOILT: list[tuple[str, Callable[[Path], Any]]] = [
    ("is no whole record of heads", lambda f: f.write_bytes(f.read_bytes()[:-100])),
    ("is no whole record of heads", lambda f: f.write_bytes(b"")),
    ("'regard' is missing", lambda f: save_file({"x": torch.zeros(1)}, f)),
    ("of format 9", lambda f: refused(f, format=9)),
    ("its step is 7", lambda f: refused(f, step=7)),
    ("its means are", lambda f: refused(f, means=["entropy"])),
    (r"means has shape \[2, 7\], not \[6, 7\]", lambda f: refused(f, tensors={"means": torch.zeros(2, 7)})),
    (r"map has shape \[6, 3\]", lambda f: refused(f, tensors={"map": torch.zeros(6, 3)})),
    ("not float32", lambda f: refused(f, tensors={"map": torch.zeros(6, 6, 6).double()})),
    ("a place is", lambda f: refused(f, places=[{"path": 3, "heads": [0], "n": 5, "m": 5, "cross": False}])),
    ("is no whole record", lambda f: refused(f, places=[{"way": 3}])),
    ("is no whole record", lambda f: refused(f, seconds={"cost": "long"})),
]


@pytest.mark.parametrize("at", range(len(SPOILT)))
def test_files_that_are_no_records(at: int, run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(run / "evolution", folder)
    message, spoil = SPOILT[at]
    spoil(folder / "step-00000002.safetensors")
    with pytest.raises(ValueError, match=message) as caught:
        evolution(folder)
    assert "step-00000002.safetensors" in str(caught.value) and "\n" not in str(caught.value)


def test_records_of_other_models_do_not_mix(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(run / "evolution", folder)
    Recorder(model(), tmp_path / "other", probes=probes(), map=5, profile=4).finish(6)
    shutil.copy(tmp_path / "other" / "step-00000006.safetensors", folder)
    with pytest.raises(ValueError, match=r"map is \[6, 6, 6\] at step 0 and \[6, 5, 5\] at step 6"):
        evolution(folder)
    Recorder(model(), tmp_path / "third", probes=probes()[:1], map=6, profile=4).finish(6)
    shutil.copy(tmp_path / "third" / "step-00000006.safetensors", folder)
    with pytest.raises(ValueError, match="steps 0 and 6 are of other heads or other scores"):
        evolution(folder)


def test_what_is_not_there(run: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is no folder"):
        evolution(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="has no records of heads"):
        evolution(tmp_path)
    found = evolution(run)
    with pytest.raises(ValueError, match="step 3 was not recorded; there are 0, 1, 2, 4"):
        found.map(3, PATH, 0)
    with pytest.raises(ValueError, match="there is no head 7 at"):
        found.profile(0, PATH, 7)
