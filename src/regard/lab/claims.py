"""The room «Claims»: the ledger, and its checks run again with other numbers."""

from __future__ import annotations

import inspect
import math
from functools import lru_cache
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from regard.claims.claim import Claim
from regard.claims.ledger import IDS, PARTS, ledger
from regard.claims.ledger import claim as claim_of
from regard.claims.typeset import formula, text, title
from regard.lab.endpoints import Asked, Endpoints, Gone
from regard.lab.lab import Lab

__all__ = ["ENDPOINTS"]

ENDPOINTS = Endpoints()

Name = Annotated[str, Meta(pattern=r"^[a-z0-9-]+$", max_length=80)]
Parameter = Annotated[str, Meta(pattern=r"^[a-z_0-9]+$", max_length=40)]
Number = Annotated[int, Meta(ge=-(2**53), le=2**53)] | float

LOW, HIGH = 8, 4  # numbers can be turned from an eighth of what they are to four times that
SEEDS = 100
# Parts of a whole, which do not go beyond it.
SHARES = ("dropout", "least", "eps")
TIMES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4)
ALL = 24  # up to which every whole number is offered


class Code(Asked, frozen=True):
    claim: Name


class Run(Asked, frozen=True):
    """``parameters`` that are left out are as recorded."""

    claim: Name
    parameters: Annotated[dict[Parameter, Number], Meta(max_length=20)] = msgspec.field(default_factory=dict)


@ENDPOINTS.get("/api/claims/ledger")
def read_ledger(lab: Lab, asked: Any) -> dict[str, Any]:
    """Every claim of the theory: statement and formula (HTML, MathML), sources, verdict, and what can be turned."""
    return {"claims": _ledger(), "parts": {part: list(names) for part, names in PARTS.items()}}


@ENDPOINTS.get("/api/claims/code", Code)
def code(lab: Lab, asked: Code) -> dict[str, Any]:
    """The code of a claim's check."""
    one = _claim(asked.claim)
    module = inspect.getmodule(one.check)
    source = inspect.getsource(module if module is not None else one.check)
    return {"code": source.split("\nCLAIM = Claim(")[0].rstrip() + "\n"}  # what follows is the text of the page


@ENDPOINTS.post("/api/claims/run", Run)
def run(lab: Lab, asked: Run) -> dict[str, Any]:
    """Runs a claim's check: the job's result is findings, numbers and series. One with recorded numbers is kept."""
    one = _claim(asked.claim)
    given = _given(one, asked.parameters)
    changed = {name: x for name, x in given.items() if x != one.parameters[name]}
    kept = _kept(lab)
    if not changed and one.id in kept:
        return {"result": kept[one.id], "job": None}

    def keep(result: dict[str, Any]) -> None:
        if not changed:
            kept[one.id] = result

    job = lab.jobs.start("claim", {"id": one.id, "parameters": changed}, then=keep)
    return {"result": None, "job": job.to_dict()}


def _claim(name: str) -> Claim:
    if name not in IDS:
        raise Gone(f"there is no claim {name!r}")
    return claim_of(name)


def _kept(lab: Lab) -> dict[str, dict[str, Any]]:
    """Results with recorded numbers; a claim gives the same ones each time."""
    return lab.cached(("claims",), lambda _: 1, dict)


def _given(one: Claim, asked: dict[str, Any]) -> dict[str, float | int]:
    """The numbers to run with, each within its bounds and of its kind."""
    given: dict[str, float | int] = dict(one.parameters)
    for name, value in asked.items():
        if name not in given:
            raise ValueError(f"{one.id} has no {name}; it has {', '.join(given)}")
        default = one.parameters[name]
        low, high = _bounds(name, default)
        if not math.isfinite(value) or not low <= value <= high:
            raise ValueError(f"{name} is {value:g}; it can be turned from {low:g} to {high:g}")
        if isinstance(default, int) and value != int(value):
            raise ValueError(f"{name} is {value:g}; it must be a whole number")
        given[name] = int(value) if isinstance(default, int) else float(value)
    return given


def _bounds(name: str, default: float | int) -> tuple[float | int, float | int]:
    if name == "seed":
        return 0, SEEDS - 1
    if isinstance(default, int):
        return max(2 if default > 4 else 1, -(-default // LOW)), HIGH * default  # one of something is rarely enough
    return default / LOW, min(HIGH * default, 0.95) if name in SHARES else HIGH * default


def _values(name: str, default: float | int) -> list[float | int]:
    """The places that a slider has: simple multiples of what is recorded, and small whole numbers all."""
    low, high = _bounds(name, default)
    if name == "seed":
        return list(range(SEEDS))
    found: set[float | int] = {default, *(x * default for x in TIMES)}
    if isinstance(default, int):
        small = range(int(low), min(int(high), ALL) + 1) if default <= ALL else ()
        found = {*small, *(int(x) for x in found if x == int(x))}
    return sorted(x for x in found if low <= x <= high)


@lru_cache(maxsize=1)
def _ledger() -> list[dict[str, Any]]:
    part_of = {name: part for part, names in PARTS.items() for name in names}
    return [
        {
            **{"id": one.id, "part": part_of[one.id], "sources": list(one.sources), "statement": one.statement},
            **{"latex": one.formula, "verdict": one.verdict, "correction": one.correction, "title": title(one.id)},
            "typeset": {
                **{name: text(getattr(one, name)) for name in ("statement", "correction", "refuted", "control")},
                "formula": formula(one.formula),
            },
            "parameters": [
                {"name": name, "value": value, "values": _values(name, value)} for name, value in one.parameters.items()
            ],
        }
        for one in ledger()
    ]
