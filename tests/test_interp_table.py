"""Heads as rows of numbers: the means of what was seen, in a table, as CSV and as JSON."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console

from regard import Observe, watch
from regard.interp import Recording
from regard.interp._head_table import HEAD_COLUMNS
from regard.nn import Decoder


@pytest.fixture
def seen() -> Recording:
    torch.manual_seed(0)
    model = Decoder(12, heads=3, layers=2, vocab=37).eval()
    with torch.no_grad(), watch(model, Observe(sink=1, local=1)) as found:
        model(torch.randint(37, (2, 7)), padding=[7, 4])
    return found


def test_rows_are_means(seen: Recording) -> None:
    rows = seen.heads()
    assert [(row["path"], row["head"]) for row in rows] == [(path, head) for path in seen for head in range(3)]
    for row in rows:
        observation = seen[row["path"]]
        assert row["rows"] == 11
        for name in HEAD_COLUMNS:
            if name != "spread":
                assert row[name] == pytest.approx(float(observation.mean(name)[row["head"]]))
        share, counted = [], observation.counted[:, row["head"]]
        for h, visible in zip(
            observation.entropy[:, row["head"]][counted], observation.visible[:, row["head"]][counted], strict=True
        ):
            share.append(float(h) / math.log(visible) if visible > 1 else 0.0)
        assert row["spread"] == pytest.approx(sum(share) / len(share), rel=1e-5) and 0 <= row["spread"] <= 1


def test_csv_and_json(seen: Recording, tmp_path: Path) -> None:
    text = seen.to_csv(tmp_path / "heads.csv")
    assert (tmp_path / "heads.csv").read_text() == text
    read = list(csv.DictReader(io.StringIO(text)))
    assert len(read) == 6 and float(read[4]["entropy"]) == pytest.approx(seen.heads()[4]["entropy"])
    found = json.loads(seen.to_json(tmp_path / "heads.json"))
    assert found["heads"] == seen.heads() and found["columns"] == HEAD_COLUMNS
    assert json.loads((tmp_path / "heads.json").read_text()) == found


def test_the_table_is_sorted_and_cut(seen: Recording) -> None:
    def printed(*args) -> list[str]:
        console = Console(width=80, file=io.StringIO())
        console.print(seen.table(*args))
        return console.file.getvalue().splitlines()

    lines = printed("distance", 3)
    assert lines[0].strip() == "6 heads of blocks.*.attention, by distance"
    values = [float(line.split()[5]) for line in lines if line.strip()[:1].isdigit() and "heads" not in line]
    assert values == sorted(values, reverse=True) and len(values) == 3
    assert len([line for line in printed() if line.strip()[:1].isdigit() and "heads" not in line]) == 6
    assert max(map(len, (line.rstrip() for line in lines))) <= 80
    with pytest.raises(ValueError, match="sort must be one of entropy, spread"):
        seen.table("x")


def test_what_is_not_there_is_none(seen: Recording) -> None:
    path = next(iter(seen))
    first = seen.calls[path][0]
    with torch.no_grad(), watch(Decoder(12, heads=3, layers=1, vocab=37).eval(), Observe(sink=1, local=1)) as other:
        pass
    assert other.heads() == []
    merged = first.merge(Recording({"a": [first]})["a"])
    assert Recording({"a": [merged]}).heads()[0]["rows"] == 22
    shorter = torch.no_grad()
    with shorter, watch(model := Decoder(12, heads=3, layers=1, vocab=37).eval(), Observe(sink=1, local=1)) as mixed:
        model(torch.randint(37, (2, 5)))
        model(torch.randint(37, (2, 4)))
    row = mixed.heads()[0]
    assert row["entropy"] is None and row["rows"] == 18
    assert ",,," in mixed.to_csv()


def test_pandas_is_asked_for_by_name(seen: Recording, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(ImportError, match="to_pandas needs pandas"):
        seen.to_pandas()
