"""Every claim of the ledger: the recorded verdict, the same twice, and another one where something is broken."""

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

from regard.claims import claim, theorems
from regard.claims.ledger import IDS
from regard.claims.markdown import row, section

DOCS = (Path(__file__).parents[1] / "docs" / "claims.md").read_text(encoding="utf-8")
NUMBER = re.compile(r"[-−]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")

# The checks ask the product, with tiles of its own size: with the suite's small ones they take ten times as long.
pytestmark = pytest.mark.usefixtures("full_tiles")

FLIPS: dict[str, list[dict[str, Any]]] = {
    name: flips
    for module in iter_modules(claim_flips.__path__)
    for name, flips in import_module(f"claim_flips.{module.name}").FLIPS.items()
}


def test_every_claim_has_a_file_and_flips() -> None:
    assert sorted(module.name.replace("_", "-") for module in iter_modules(theorems.__path__)) == sorted(IDS)
    assert sorted(FLIPS) == sorted(IDS) and all(FLIPS.values())


def numbers(text: str) -> list[float]:
    return [float(found.replace(",", "").replace("−", "-")) for found in NUMBER.findall(text)]


@pytest.mark.parametrize("name", IDS)
def test_a_claim_comes_out_as_recorded_and_the_same_twice(name: str) -> None:
    one = claim(name)
    assert one.id == name
    result = one.run()
    first, again = result.to_dict(), one.run().to_dict()
    assert first["verdict"] == one.verdict, [x for x in first["findings"] if x["holds"] == (x["role"] == "control")]
    first.pop("seconds"), again.pop("seconds")
    assert json.dumps(first, allow_nan=False) == json.dumps(again, allow_nan=False)
    assert first["numbers"] and result.line
    # The docs are of a run of today; small numbers are rounding, which differs between machines, as training does.
    (line,) = (text for text in DOCS.splitlines() if text.startswith(f"| [{name}]("))
    assert section(result) in DOCS and NUMBER.sub("#", row(result)) == NUMBER.sub("#", line)
    for now, then in zip(numbers(row(result)), numbers(line), strict=True):
        assert math.isclose(now, then, rel_tol=0.05, abs_tol=1e-6), (line, row(result))


@pytest.mark.parametrize(("name", "at"), [(name, at) for name in FLIPS for at in range(len(FLIPS[name]))])
def test_a_claim_that_is_broken_is_seen(name: str, at: int) -> None:
    assert claim(name).run(**FLIPS[name][at]).verdict != claim(name).verdict


@pytest.mark.parametrize("name", ["heads-differ-in-a-trained-model", "heads-evolve", "attention-learns-convolution"])
def test_trainings_of_the_long_version_are_watched_whatever_the_machine_does_beside(name: str) -> None:
    asked: list[dict[str, Any]] = []

    def learn(task: str, folder: str, recipe: dict[str, Any]) -> None:
        asked.append(recipe)
        raise InterruptedError  # what is asked for is enough

    with pytest.raises(InterruptedError):
        claim(name).run(full=True, learn=learn)
    assert asked[0]["record"] == 1 and asked[0]["seed"] == 0
