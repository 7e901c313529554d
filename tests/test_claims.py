"""Every claim: its check gives the recorded verdict, twice the same, and another verdict when something is broken."""

from __future__ import annotations

import json
import math
import re
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import claim_flips
import pytest

from regard.claims import get_claim, theorems
from regard.claims._claim import FALSE_AS_STATED
from regard.claims._markdown import claim_section, table_row
from regard.claims._registry import IDS
from regard.claims._typeset import typeset_text
from regard.claims.theorems.heads_evolve import CONTENT, LOCAL
from regard.interp._atlas_store import stored_atlas
from regard.models import bundled
from regard.training import evolution

DOCS = (Path(__file__).parents[1] / "docs" / "claims.md").read_text(encoding="utf-8")
NUMBER = re.compile(r"[-−]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")

# The checks test the product, with tiles of its own size. With the suite's small tiles they take ten times as long.
pytestmark = pytest.mark.usefixtures("full_tiles")

FLIPS: dict[str, list[dict[str, Any]]] = {}
for module in iter_modules(claim_flips.__path__):
    FLIPS.update(import_module(f"claim_flips.{module.name}").FLIPS)
FLIP_CASES = [(name, index) for name, flips in FLIPS.items() for index in range(len(flips))]


def test_every_claim_has_a_file_and_flips() -> None:
    assert sorted(module.name.replace("_", "-") for module in iter_modules(theorems.__path__)) == sorted(IDS)
    assert sorted(FLIPS) == sorted(IDS) and all(FLIPS.values())


def numbers(text: str) -> list[float]:
    return [float(digits.replace(",", "").replace("−", "-")) for digits in NUMBER.findall(text)]


@pytest.mark.parametrize("name", IDS)
def test_a_claim_has_its_recorded_verdict_and_the_same_result_twice(name: str) -> None:
    claim = get_claim(name)
    assert claim.id == name
    result = claim.run()
    first = result.to_dict()
    second = claim.run().to_dict()
    unexpected = [finding for finding in first["findings"] if finding["holds"] == (finding["role"] == "control")]
    assert first["verdict"] == claim.verdict, unexpected
    del first["seconds"], second["seconds"]
    assert json.dumps(first, allow_nan=False) == json.dumps(second, allow_nan=False)
    assert first["numbers"] and result.summary

    # Everything that pages show has its subscripts set; only names of functions have an underscore.
    shown = [*first["numbers"]]
    for finding in result.evidence.findings:
        shown += [finding.question, finding.description]
    for series in result.evidence.series:
        shown += [series.title, series.x, series.y, *series.lines]
    assert not [text for text in shown if "_" in typeset_text(text) and "to_" not in text]

    # The docs are from such a run. Very small numbers are rounding errors, which differ between machines.
    (documented,) = (line for line in DOCS.splitlines() if line.startswith(f"| [{name}]("))
    assert claim_section(result) in DOCS
    assert NUMBER.sub("#", table_row(result)) == NUMBER.sub("#", documented)
    for now, then in zip(numbers(table_row(result)), numbers(documented), strict=True):
        assert math.isclose(now, then, rel_tol=0.05, abs_tol=1e-6), (documented, table_row(result))


@pytest.mark.parametrize(("name", "index"), FLIP_CASES)
def test_a_broken_part_changes_the_verdict(name: str, index: int) -> None:
    # The check itself, because ``run`` refuses numbers that break it.
    assert get_claim(name).check(**FLIPS[name][index]).verdict != get_claim(name).verdict


@pytest.mark.parametrize("name", ["heads-differ-in-a-trained-model", "heads-evolve", "attention-learns-convolution"])
def test_trainings_of_the_long_version_record_every_step(name: str) -> None:
    recipes: list[dict[str, Any]] = []

    def learn(task: str, folder: str, recipe: dict[str, Any]) -> None:
        recipes.append(recipe)
        raise InterruptedError  # the recipe is all that this test needs

    with pytest.raises(InterruptedError):
        get_claim(name).run(full=True, learn=learn)
    assert recipes[0]["record"] == 1 and recipes[0]["seed"] == 0


def test_heads_evolve_counts_the_heads_that_all_pages_show() -> None:
    records = evolution(bundled())
    atlas = stored_atlas(bundled())
    assert atlas is not None
    evidence = get_claim("heads-evolve").run().evidence
    assert evidence.numbers["the bundled model, records"] == len(records.steps)
    for head_type in (*LOCAL, *CONTENT):
        count = evidence.numbers.get(f"the bundled model, {head_type} heads at the end", 0)
        assert count == records.counts[head_type] == atlas.counts[head_type], head_type
    listed = " ".join(finding.description for finding in evidence.by_role("corrected"))
    for row in atlas.rows:
        if not {*LOCAL, *CONTENT}.isdisjoint(row["labels"]):
            assert f"{row['layer']}.{row['head']}" in listed


def test_heads_evolve_is_refuted_by_what_it_measures() -> None:
    """Content heads arise before local ones: this is what would refute the claim, and the verdict says so."""
    claim = get_claim("heads-evolve")
    numbers = claim.run().evidence.numbers
    first_content = numbers["the bundled model, first content head by step"]
    first_local = numbers["the bundled model, first local head by step"]
    assert isinstance(first_content, int) and isinstance(first_local, int) and first_content <= first_local
    assert "arise no later" in claim.refuted_by and claim.verdict == FALSE_AS_STATED
