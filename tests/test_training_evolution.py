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
from rich.console import Console
from safetensors.torch import save_file
from support.recorder_worker import model, probes

from regard import Observe, models, watch
from regard.interp import _records as records
from regard.interp._head_table import HEAD_COLUMNS
from regard.interp._head_types import HEAD_TYPES, head_type_labels, head_type_scores
from regard.nn import EncoderDecoder
from regard.training._arrivals import describe_arrival, describe_none, sparse_gaps
from regard.training._evolution import Evolution, evolution
from regard.training._measures import IMAGE_GROUP, PROBE_GROUPS, ROW_VALUES, SCORES, TYPES, describe_measure
from regard.training._record_schedule import log_spaced_steps
from regard.training._recorder import Recorder

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
        place = records.AttentionLayer(PATH, (0, 1), 5, 5, False)
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
    for name in HEAD_COLUMNS:
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
            assert found.head_types()[s][at] == head_type_scores(record.scores(at), found.records[0].scores(at))
            assert found.labels[s][at] == head_type_labels(found.head_types()[s][at])
    assert all(x["sink"]["confidence"] == 0 for x in found.head_types()[0])
    later = Evolution(found.records[1:])  # no step 0: no untrained control
    assert later.head_types()[0][0] == head_type_scores(found.records[1].scores(0), None)
    for kind in HEAD_TYPES:
        values = found.value(f"{kind} confidence")
        assert values[3].tolist() == pytest.approx([x[kind]["confidence"] for x in found.head_types()[3]])
    raw = found.value("repeated raw induction")
    assert raw[2, 4] == pytest.approx(found.records[2].scores(4)["repeated"]["raw"]["induction"])
    with pytest.raises(ValueError, match=r"name is 'colour'.*names\(\)"):
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
    assert [(row["kind"], row["after"], row["step"], row["head"], row["confirmed"]) for row in rows] == [
        ("sink", 0, 10, 1, True),
        ("previous", 20, 30, 0, True),
        ("previous", 30, 40, 1, False),
    ]
    assert rows[0]["confidence"] == pytest.approx(0.7) and rows[0]["path"] == PATH and rows[0]["layer"] == 0
    lines = {line.split()[0]: line.split() for line in text(found.table()).splitlines() if line.strip()}
    assert lines["previous"] == ["previous", "2", "20–30", "0.0", "0.1", "0.90"]
    assert lines["sink"] == ["sink", "1", "0–10", "0.1", "0.1", "0.70"]
    assert lines["averaging"][1:] == ["0", "–", "–", "–"]
    by_head = text(found.table(heads=True))
    words = " ".join(by_head.split())
    assert "previous 20–30 (0.80)" in words and "previous 30–40? (0.90)" in words and "sink 0–10" in words
    assert "0.00 → 4.00" in by_head and "“?”" in words
    assert made_of({}).arrivals() == [] and "Toy" in text(made_of({}).table(heads=True))
    for said in (by_head, text(found.table())):
        assert max(map(len, said.splitlines())) <= 80


def test_what_sparse_records_do_not_show() -> None:
    """Two records far apart show that a head changed between them, and a wrong "none" is never said."""
    sink = (1, "natural raw sinks")
    found = made_of({}, {sink: 0.9})
    (row,) = found.arrivals()
    assert (row["after"], row["step"], row["confirmed"]) == (0, 10, False)
    assert describe_arrival(row) == "between step 0 and 10; only the last record shows it"
    assert found.describe_uncertainty() == "Unknown: only 2 records between steps 0 and 10."
    assert found.gaps == [(0, 10)] and "Unknown: only 2 records" in " ".join(text(found.table()).split())
    assert describe_none([0, 600]) == "Unknown: only 2 records between steps 0 and 600."
    assert describe_none([0]).startswith("Unknown: only 1 record") and describe_none([]).startswith("Unknown")
    assert "between steps 2 and 512" in describe_none([0, 1, 2, 512, 600])
    assert describe_none([0, 1, 2, 4, 8, 16]) == "No head took a new type between steps 0 and 16 (6 records)."
    many = describe_none([0, 100, 1000, 10000, 10**6, 10**7])
    assert many.startswith("Unknown") and len(many) < 200
    # The schedules that the recorder follows when it has little time count as close.
    for total in (11, 44, 600, 6000, 10**5):
        assert sparse_gaps(log_spaced_steps(total, 12)) == []
    assert sparse_gaps(range(0, 601, 50)) == []
    data = json.loads(Evolution(found.records, (3, 5)).to_json())
    assert data["left_out"] == [3, 5] and data["gaps"] == [[0, 10]]
    assert "2 left out" in Evolution(found.records, (3, 5)).describe_records()
    # One record has no share of the time; a model of another step than the last one has a column of its own.
    assert Evolution(found.records[:1]).describe_records() == f"1 record, of step {found.steps[0]}"
    columns = [str(column.header) for column in found.table().columns]
    assert columns[1] == f"heads at step {found.steps[-1]}" and len(columns) == 5
    other = Evolution(found.records, model_step=found.steps[0])
    assert str(other.table().columns[2].header) == f"in model/, step {found.steps[0]}"
    assert list(other.table().columns[2].cells) == [
        str(sum(kind in labels for labels in other.labels[0])) for kind in HEAD_TYPES
    ]
    assert json.loads(other.to_json())["model_step"] == found.steps[0]


def test_every_measure_has_a_group_a_plain_name_and_a_meaning(run: Path) -> None:
    for found in (evolution(run), evolution(models.bundled())):
        measures = found.measures()
        assert [measure.name for measure in measures] == found.names()
        assert len({(measure.group, measure.label) for measure in measures}) == len(measures)
        for measure in measures:
            assert measure.meaning and "\n" not in measure.meaning and len(measure.meaning) < 160, measure
            if measure.group in (*PROBE_GROUPS.values(), IMAGE_GROUP):
                score = measure.name.split(" ", 2)[2].removesuffix(" chance")
                assert score in SCORES, measure.name
            else:
                assert measure.group in (ROW_VALUES, TYPES), measure
    # Scores of one's own probes, and those of an image model.
    assert describe_measure("verses raw sink").group == "scores on verses"
    assert describe_measure("natural raw rhyme").label == "rhyme"
    image = describe_measure("natural clean centre 0", on_grid=True)
    assert image.group == IMAGE_GROUP and "down" in image.label
    chance = describe_measure("repeated clean induction chance")
    assert chance.label.endswith("by chance") and "sinks" in chance.label and chance.group == PROBE_GROUPS["repeated"]


def test_as_csv_and_json(run: Path, tmp_path: Path) -> None:
    found = evolution(run)
    rows = list(csv.DictReader(io.StringIO(found.to_csv(tmp_path / "heads.csv"))))
    assert (tmp_path / "heads.csv").read_text() == found.to_csv()
    assert len(rows) == 24 and {"step", "layer", "path", "head", *HEAD_COLUMNS, "induction score", "labels"} <= set(
        rows[0]
    )
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
    assert [place.cross for place in found.records[0].layers] == [False, False, True]
    assert set(found.head_types()[0][-1]) == {"sink", "averaging"}
    assert math.isnan(float(found.value("previous score")[0, -1])) and found.rows()[-1]["previous score"] is None
    json.loads(found.to_json())


def test_other_files_and_folders_that_are_written(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(run / "evolution", folder)
    for name in (".step-00000009.safetensors.x1", "step-9.safetensors", "notes.txt", "step-00000009.json"):
        (folder / name).write_text("something else")
    assert evolution(folder).steps == [0, 1, 2, 4]
    gone = {**records.list_records(folder), 3: folder / "step-00000003.safetensors"}  # listed, and removed meanwhile
    monkeypatch.setattr(records, "list_records", lambda path: dict(sorted(gone.items())))
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
    ("is not a complete record", lambda f: f.write_bytes(f.read_bytes()[:-100])),
    ("is not a complete record", lambda f: f.write_bytes(b"")),
    ("'regard' is missing", lambda f: save_file({"x": torch.zeros(1)}, f)),
    ("of format 9", lambda f: refused(f, format=9)),
    ("has step 7, not", lambda f: refused(f, step=7)),
    ("its means are", lambda f: refused(f, means=["entropy"])),
    (r"means has shape \[2, 7\], not \[6, 7\]", lambda f: refused(f, tensors={"means": torch.zeros(2, 7)})),
    (r"map has shape \[6, 3\]", lambda f: refused(f, tensors={"map": torch.zeros(6, 3)})),
    ("not float32", lambda f: refused(f, tensors={"map": torch.zeros(6, 6, 6).double()})),
    ("the layer 3", lambda f: refused(f, places=[{"path": 3, "heads": [0], "n": 5, "m": 5, "cross": False}])),
    ("is not a complete record", lambda f: refused(f, places=[{"way": 3}])),
    ("is not a complete record", lambda f: refused(f, seconds={"cost": "long"})),
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
    with pytest.raises(ValueError, match=r"steps 0 and 6.*map has shapes \[6, 6, 6\] and \[6, 5, 5\]"):
        evolution(folder)
    Recorder(model(), tmp_path / "third", probes=probes()[:1], map=6, profile=4).finish(6)
    shutil.copy(tmp_path / "third" / "step-00000006.safetensors", folder)
    with pytest.raises(ValueError, match="steps 0 and 6"):
        evolution(folder)


def test_what_is_not_there(run: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        evolution(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="has no records of heads"):
        evolution(tmp_path)
    found = evolution(run)
    with pytest.raises(ValueError, match=r"step is 3; .*0, 1, 2, 4"):
        found.map(3, PATH, 0)
    with pytest.raises(ValueError, match="there is no head 7 at"):
        found.profile(0, PATH, 7)
