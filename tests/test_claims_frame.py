"""The frame of the ledger: verdicts from findings, intervals and slopes, the command, the page and the docs."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import command

from regard.claims import Claim, Evidence, claim, ledger, run
from regard.claims.claim import FAILS, HOLDS, HOLDS_IF, UNDECIDED
from regard.claims.ledger import IDS
from regard.claims.report import power, report
from regard.claims.statistics import mean, quantile, slope
from regard.claims.typeset import formula, parts, text, title

QUICK = ("mask-times-infinity", "hard-limit")
DOCS = Path(__file__).parents[1] / "docs" / "claims.md"
Patch, Captured = pytest.MonkeyPatch, pytest.CaptureFixture[str]


def evidence(**answers: list[bool]) -> Evidence:
    found = Evidence(numbers={"n": 1})
    for role, given in answers.items():
        for holds in given:
            getattr(found, role)("asked", holds, "said")
    return found


@pytest.mark.parametrize(
    ("answers", "verdict"),
    [
        ({"written": [True, True], "control": [False]}, HOLDS),
        ({"written": [True, False], "control": [False]}, UNDECIDED),
        ({"written": [True]}, UNDECIDED),  # nothing that could have failed
        ({"written": [True], "control": [False, True]}, UNDECIDED),
        ({"control": [False]}, UNDECIDED),
        ({"written": [False], "condition": [True], "control": [False]}, HOLDS_IF),
        ({"written": [False], "condition": [True, False], "control": [False]}, UNDECIDED),
        ({"written": [False], "corrected": [True], "control": [False]}, FAILS),
        ({"written": [False], "corrected": [True], "condition": [True], "control": [False]}, UNDECIDED),
        ({"written": [True], "corrected": [False], "control": [False]}, UNDECIDED),
    ],
)
def test_a_verdict_follows_from_what_was_found(answers: dict[str, list[bool]], verdict: str) -> None:
    assert evidence(**answers).verdict == verdict


def test_a_claim_says_what_it_needs() -> None:
    given: dict[str, Any] = {
        **{"id": "x", "sources": ("000",), "statement": "s", "formula": "f", "refuted": "r", "control": "c"},
        "check": lambda *, n=3, beta=1.5, keep=True, seed=0: evidence(written=[n == 3], control=[False]),
    }
    one = Claim(**given, verdict=HOLDS)
    assert one.parameters == {"n": 3, "beta": 1.5, "seed": 0}
    assert one.run().as_recorded and not one.run(n=4).as_recorded
    with pytest.raises(ValueError, match="x has no m; it has n, beta, keep, seed"):
        one.run(m=1)
    with pytest.raises(ValueError, match="a correction goes with"):
        Claim(**given, verdict=FAILS)
    with pytest.raises(ValueError, match="the verdict is 'true'"):
        Claim(**given, verdict="true")


def test_intervals_hold_as_often_as_they_say() -> None:
    draw = torch.Generator().manual_seed(0)
    samples = torch.rand(2000, 12, generator=draw, dtype=torch.float64)
    missed = sum(not mean(row).holds(0.5) for row in samples) / 2000
    assert 0.003 < missed < 0.02  # 1%
    assert mean(samples[0], among=50).high > mean(samples[0]).high
    # Student's quantiles, from tables.
    for freedom, wanted in ((1, 63.657), (2, 9.925), (5, 4.032), (30, 2.750), (10**6, 2.5758)):
        assert quantile(freedom) == pytest.approx(wanted, abs=6e-4)
    x = [math.log(n) for n in (2, 4, 8, 16)]
    found = slope(x, [math.log(3 * n**1.5) for n in (2, 4, 8, 16)])
    assert found.value == pytest.approx(1.5) and found.high - found.low < 1e-6
    rough = slope([0, 1, 2, 3], [0.0, 1.3, 1.7, 3.1])
    assert rough.holds(1) and not rough.holds(3) and rough.low < rough.value < rough.high
    with pytest.raises(ValueError, match="three points or more"):
        slope([1, 2], [1, 2])


def test_the_ledger_is_chosen_from() -> None:
    assert [one.id for one in ledger()] == list(IDS) and len(set(IDS)) == len(IDS)
    assert [one.id for one in ledger(QUICK)] == sorted(QUICK, key=IDS.index)
    assert {one.id for one in ledger(source="004")} == {one.id for one in ledger() if "004" in one.sources}
    with pytest.raises(ValueError, match="there is no claim 'hard-lmit'; perhaps hard-limit"):
        ledger(["hard-lmit"])
    with pytest.raises(ValueError, match="there is no claim of '005'; there are of 000, 001, 002, 003, 004"):
        ledger(source="005")


@pytest.mark.parametrize("name", IDS)
def test_every_formula_can_be_typeset(name: str) -> None:
    one = claim(name)
    assert "\\" not in formula(one.formula), one.formula
    for words in (one.statement, one.refuted, one.control, *([one.correction] if one.correction else [])):
        assert words.endswith(".") and re.match(r"[^a-z]|[a-z] ", words), words  # it may begin with a symbol


def test_texts_are_set_with_indices_and_powers() -> None:
    assert text("tμ_a + W_{−Δ} < c_(p+k)") == "tμ<sub>a</sub> + W<sub>−Δ</sub> &lt; c<sub>p+k</sub>"
    assert text("d^−½ as N^3.00.") == "d<sup>−½</sup> as N<sup>3.00</sup>."
    assert text("softmax_β(k_iᵀq), e^(d/2)") == "softmax<sub>β</sub>(k<sub>i</sub>ᵀq), e<sup>d/2</sup>"
    assert text("to_convolution") == "to_convolution"
    assert title("attention-vs-rnn") == "Attention vs RNN" and title("hard-limit") == "Hard limit"


def test_formulas_break_where_they_may() -> None:
    assert parts(r"a \quad b \qquad \{c\}") == [("a", False), ("b", False), (r"\{c\}", False)]
    assert parts(r"\frac{a \quad b}{c} \allowbreak = d") == [(r"\frac{a \quad b}{c}", False), ("= d", True)]
    assert parts(r"a \quad \Rightarrow \quad b") == [("a", False), (r"\Rightarrow \quad b", False)]
    assert formula(r"a \allowbreak = b").count("<math ") == 2


@pytest.mark.parametrize(
    ("x", "shown"), [(0.02, "0.02"), (500, "500"), (1000, "1,000"), (1e-6, "10⁻⁶"), (3e5, "3·10⁵"), (1, "1")]
)
def test_ticks_of_logarithmic_axes_are_text(x: float, shown: str) -> None:
    assert power(x) == shown


def test_the_command_prints_and_writes(monkeypatch: Patch, capsys: Captured, tmp_path: Path) -> None:
    chosen = [x for name in QUICK for x in ("--only", name)]
    files = ("--report", tmp_path / "r.html", "--markdown", tmp_path / "c.md")
    code, out, err = command(monkeypatch, capsys, "claims", *chosen, *files)
    assert code == 0 and not err
    lines = out.splitlines()
    assert lines[0] == "Scale and temperature" and "Masks" in lines
    (line,) = (line for line in lines if "mask-times-infinity" in line)
    assert line.startswith("✗ mask-times-infinity  ") and "fails as written" in line
    assert "claims: 2; holds 0, holds if 1, fails as written 1; not as recorded 0" in lines[-1]
    assert max(map(len, lines)) <= 80
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    assert "| [hard-limit](#hard-limit) | 000, 002 | holds if |" in (tmp_path / "c.md").read_text()
    code, out, _ = command(monkeypatch, capsys, "claims", "--only", ",".join(QUICK), "--json")
    told = json.loads(out)
    assert code == 0 and [x["id"] for x in told] == ["hard-limit", "mask-times-infinity"]
    assert told[0]["parameters"] == {"n": 8, "gap": 0.5, "seed": 0}
    code, out, err = command(monkeypatch, capsys, "claims", "--only", "nothing")
    assert code == 2 and "there is no claim 'nothing'" in err[0]


def test_threads_change_no_bit_and_stay_as_they_were() -> None:
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(run(ledger(["distance-cannot-see-direction"]))[0].to_dict() | {"seconds": 0})
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1]


def test_another_verdict_ends_with_1(monkeypatch: Patch, capsys: Captured) -> None:
    import regard.claims.theorems.hard_limit as theorem

    def check(**_: Any) -> Evidence:
        return evidence(written=[True], control=[False])

    monkeypatch.setattr(theorem, "CLAIM", Claim(**{**vars(theorem.CLAIM), "check": check}))
    code, out, _ = command(monkeypatch, capsys, "claims", "--only", "hard-limit")
    assert code == 1 and "recorded: holds if" in out and "not as recorded 1" in out


def test_without_a_package_the_others_go_on(monkeypatch: Patch, capsys: Captured, tmp_path: Path) -> None:
    """Digits come with scikit-learn, figures need matplotlib; neither has to be there."""
    monkeypatch.setattr("regard.training.tasks.pictures.find_spec", lambda name: None)
    names = "attention-learns-convolution,hard-limit"
    code, out, err = command(monkeypatch, capsys, "claims", "--only", names)
    said = " ".join(out.split())
    assert (code, err) == (1, []) and "hard-limit holds if" in said
    assert (
        "the digits come with scikit-learn, which is not there: pip install 'regard[train]'" in said
        and "undecided" in said
    )
    (found,) = run(ledger(["attention-learns-convolution"]))
    assert found.missing.endswith("pip install 'regard[train]'") and found.to_dict()["missing"] == found.line
    report([found])

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = command(monkeypatch, capsys, "claims", "--only", "hard-limit", "--report", tmp_path / "page.html")
    assert (code, out, err) == (2, "", ["regard: figures need matplotlib; pip install 'regard[plot]'"])


def test_the_page_needs_nothing_else() -> None:
    page = report(run(ledger(QUICK)))
    assert not re.search(r"<script|<link|https?://(?!www\.w3\.org)|src=", page)
    assert page.count("<math ") == 2 and page.count("<section ") == 2 and page.count("<figure>") == 2
    assert "def as_written(scores: Tensor, mask: Tensor)" in page  # the code that ran
    with pytest.raises(ValueError, match="no claim was run"):
        report([])


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_opens_in_a_browser(width: int, show_page: Any) -> None:
    page = show_page(report(run(ledger(QUICK))), width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("math").first.bounding_box()["height"] > 10
    page.get_by_text("The code that ran").first.click()
    assert page.locator("pre").first.is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_docs_have_every_claim_and_its_verdict() -> None:
    text = DOCS.read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[([a-z0-9-]+)\]\(#\1\) \| ([0-9, ]+) \| ([a-z ]+) \|", text, re.MULTILINE)
    assert rows == [(one.id, ", ".join(one.sources), one.verdict) for one in ledger()]
    for one in ledger():
        assert one.statement in text and one.correction in text and one.refuted in text
