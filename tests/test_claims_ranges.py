"""Every claim keeps its verdict at the ends of the ranges that users may set, and ends within the lab's time limit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from regard.claims import Claim, get_claim
from regard.claims._parameters import Parameter, check_parameters, parameters, rules
from regard.claims._registry import IDS
from regard.lab.claims.jobs import check_claim

# The checks test the product, with tiles of its own size. With the suite's small tiles they take ten times as long.
pytestmark = pytest.mark.usefixtures("full_tiles")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Run on one thread, as ``regard.claims.run_claims`` does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def extreme(claim: Claim, described: tuple[Parameter, ...], end: int) -> dict[str, Any]:
    """All parameters as near to one end as the rules allow, set in the given order."""
    values: dict[str, Any] = dict(claim.parameters)
    for parameter in described:
        steps = parameter.values if end == 0 else parameter.values[::-1]
        for step in steps:
            changed = {**values, parameter.name: step}
            if all(rule.holds(changed) for rule in rules(claim)):
                values = changed
                break
    return values


def corner_cases(name: str) -> list[dict[str, Any]]:
    """All parameters at their least and at their greatest values, and each single one; the changed values only."""
    claim = get_claim(name)
    described = parameters(claim)
    cases = []
    for end in (0, -1):
        # Where a rule lets only one of two parameters reach its end, each comes first once.
        cases += [extreme(claim, described, end), extreme(claim, described[::-1], end)]
        cases += [{parameter.name: parameter.values[end]} for parameter in described]
    unique: list[dict[str, Any]] = []
    for case in cases:
        changes = {key: value for key, value in case.items() if value != claim.parameters[key]}
        if changes and changes not in unique:
            unique.append(changes)
    return unique


@pytest.mark.full
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", IDS)
def test_a_claim_keeps_its_verdict_at_the_ends_of_its_ranges(name: str) -> None:
    failures = []
    for changes in corner_cases(name):
        result = check_claim({"id": name, "parameters": changes}, lambda *report: None)
        if not result["as_recorded"]:
            answers = [(finding["role"], finding["asked"], finding["said"]) for finding in result["findings"]]
            failures.append((changes, result["verdict"], answers))
    assert not failures


# Values at which there is nothing to measure, or at which the control of the check cannot fail.
DEGENERATE = [
    ("average-of-two", {"n": 2}),
    ("information-flows-to-the-query", {"d": 2}),
    ("average-under-isotropic-noise", {"n": 2}),
    ("two-heads-are-steadier", {"t": 2.5}),
    ("key-scaling-first-order", {"beta": 1.0}),
    ("bottleneck-regimes", {"ratio": 2}),
    ("cost-multi-head", {"heads": 1}),
    ("weights-explain-output", {"keys": 8}),
]


@pytest.mark.parametrize(("name", "changes"), DEGENERATE)
def test_values_that_tell_nothing_are_refused(name: str, changes: dict[str, Any]) -> None:
    """On the page and in Python: the error names the parameter."""
    claim = get_claim(name)
    (parameter,) = changes
    label = next(one.label for one in parameters(claim) if one.name == parameter)
    for run in (lambda: check_parameters(claim, changes), lambda: claim.run(**changes)):
        with pytest.raises(ValueError) as refusal:
            run()
        assert label in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("unscaled-softmax-saturates", {"n": 2}),  # weights far below the rounding error of 1
        ("subspace-selector", {"m": 1, "p": 1}),
        ("jacobian-norm-bound", {"n": 32}),
        ("column-convention-equals-row-convention", {"d": 32, "beta": 2.0}),  # scores in the thousands
        ("feed-forward-is-pointwise", {"hidden": 4}),  # no unit is active at some positions
        ("average-under-isotropic-noise", {"alpha": 1e-6}),
    ],
)
def test_exact_cases_keep_their_verdict(name: str, changes: dict[str, Any]) -> None:
    assert get_claim(name).run(**changes).as_recorded
