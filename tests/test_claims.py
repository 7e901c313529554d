"""Every claim of the ledger: the recorded verdict, the same twice, and another one where something is broken."""

from __future__ import annotations

import json
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import claim_flips
import pytest

from regard.claims import claim, theorems
from regard.claims.ledger import IDS

FLIPS: dict[str, list[dict[str, Any]]] = {
    name: flips
    for module in iter_modules(claim_flips.__path__)
    for name, flips in import_module(f"claim_flips.{module.name}").FLIPS.items()
}


def test_every_claim_has_a_file_and_flips() -> None:
    assert sorted(module.name.replace("_", "-") for module in iter_modules(theorems.__path__)) == sorted(IDS)
    assert sorted(FLIPS) == sorted(IDS) and all(FLIPS.values())


@pytest.mark.parametrize("name", IDS)
def test_a_claim_comes_out_as_recorded_and_the_same_twice(name: str) -> None:
    one = claim(name)
    assert one.id == name
    first, again = one.run().to_dict(), one.run().to_dict()
    assert first["verdict"] == one.verdict, [x for x in first["findings"] if x["holds"] == (x["role"] == "control")]
    first.pop("seconds"), again.pop("seconds")
    assert json.dumps(first, allow_nan=False) == json.dumps(again, allow_nan=False)
    assert first["numbers"]


@pytest.mark.parametrize(("name", "at"), [(name, at) for name in FLIPS for at in range(len(FLIPS[name]))])
def test_a_claim_that_is_broken_is_seen(name: str, at: int) -> None:
    assert claim(name).run(**FLIPS[name][at]).verdict != claim(name).verdict
