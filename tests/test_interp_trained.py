"""In trained models the atlas finds what is known to be there; in their untrained twins none of it."""

from __future__ import annotations

import runpy
from collections import Counter
from pathlib import Path

import pytest
from support.trained import ROOT

from regard.interp._head_atlas import Atlas, atlas, untrained_copy
from regard.models import TextEncoder, load

LEARNED = {"sink", "previous", "positional", "induction", "duplicate", "content"}
pytestmark = pytest.mark.usefixtures("full_tiles", "own_cache")


def kinds(found: Atlas) -> Counter[str]:
    return Counter(label for row in found.rows for label in row["labels"])


def test_minilm(minilm: TextEncoder) -> None:
    found = atlas(minilm)
    assert len(found.rows) == 72
    assert kinds(found)["previous"] >= 2 and kinds(found)["sink"] >= 5  # on [CLS] and [SEP]
    path, head = found.top("previous", 1)[0]
    row = next(row for row in found.rows if (row["path"], row["head"]) == (path, head))
    assert row["previous"] > 0.6 and row["kinds"]["previous"]["control"] < 0.05 and row["labels"][0] == "previous"
    # Sinks take weight and move little: weights alone mislead.
    sinks = [row for row in found.rows if "sink" in row["labels"]]
    assert all(row["value_weighted"] < row["sinks"] / 2 for row in sinks)
    twin = atlas(untrained_copy(minilm), minilm.tokenizer, control=False)
    assert not LEARNED & set(kinds(twin)) and kinds(twin)["averaging"] == 72


@pytest.mark.full
def test_smollm2(smollm2: Path) -> None:
    model = load(smollm2)
    found = atlas(model)
    named = kinds(found)
    assert named["sink"] > 135 and named["previous"] >= 5 and named["induction"] >= 4  # of 270 heads
    for row in found.rows:  # its sinks are the first token
        assert row["scores"]["natural"]["raw"]["sink"] == pytest.approx(row["sinks"], abs=1e-6)  # 1 less all others
    for path, head in found.top("induction", 4):
        row = next(row for row in found.rows if (row["path"], row["head"]) == (path, head))
        assert row["induction"] > 0.5 and row["kinds"]["induction"]["control"] < 0.1
    twin = atlas(untrained_copy(model), model.tokenizer, control=False)
    assert not LEARNED & set(kinds(twin))
    matters = runpy.run_path(str(ROOT / "scripts" / "measure" / "head_atlas.py"))["induction_matters"]
    assert matters(model, found, "mean", 24)["top 4 / mean"] >= 5
