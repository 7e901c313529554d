"""The framework of the claims: verdicts, intervals, selection, the command, the HTML page and the docs."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import command

from regard.claims import Claim, Evidence, get_claim, list_claims, run_claims
from regard.claims._claim import FALSE_AS_STATED, HOLDS, HOLDS_CONDITIONALLY, UNDECIDED, Finding
from regard.claims._documents import DOCUMENTS, PAPERS
from regard.claims._html_report import html_report, tick_label
from regard.claims._markdown import theory_page
from regard.claims._parameters import check_parameters, parameters, rules
from regard.claims._registry import IDS
from regard.claims._statistics import mean_interval, slope_interval, t_quantile
from regard.claims._typeset import split_formula, typeset_formula, typeset_text

QUICK = ("mask-times-infinity", "hard-limit")
DOCS = Path(__file__).parents[1] / "docs" / "claims.md"
THEORY = DOCS.with_name("theory.md")
Patch, Captured = pytest.MonkeyPatch, pytest.CaptureFixture[str]


def evidence_with(**answers: list[bool]) -> Evidence:
    """Evidence with the given answers, by role."""
    evidence = Evidence(numbers={"n": 1})
    for role, role_answers in answers.items():
        evidence.findings += [Finding(role, "question", holds, "description") for holds in role_answers]
    return evidence


def test_each_method_adds_a_finding_of_its_role() -> None:
    evidence = Evidence()
    evidence.add_statement("a", True, "b")
    evidence.add_condition("a", True, "b")
    evidence.add_correction("a", True, "b")
    evidence.add_control("a", False)
    assert [finding.role for finding in evidence.findings] == ["stated", "condition", "corrected", "control"]
    assert evidence.findings[0].to_dict() == {"role": "stated", "asked": "a", "holds": True, "said": "b"}
    assert not evidence.findings[-1].holds and evidence.findings[-1].description == ""


@pytest.mark.parametrize(
    ("answers", "verdict"),
    [
        ({"stated": [True, True], "control": [False]}, HOLDS),
        ({"stated": [True, False], "control": [False]}, UNDECIDED),
        ({"stated": [True]}, UNDECIDED),  # no control
        ({"stated": [True], "control": [False, True]}, UNDECIDED),
        ({"control": [False]}, UNDECIDED),
        ({"stated": [False], "condition": [True], "control": [False]}, HOLDS_CONDITIONALLY),
        ({"stated": [False], "condition": [True, False], "control": [False]}, UNDECIDED),
        ({"stated": [False], "corrected": [True], "control": [False]}, FALSE_AS_STATED),
        ({"stated": [False], "corrected": [True], "condition": [True], "control": [False]}, UNDECIDED),
        ({"stated": [True], "corrected": [False], "control": [False]}, UNDECIDED),
    ],
)
def test_the_verdict_follows_from_the_findings(answers: dict[str, list[bool]], verdict: str) -> None:
    assert evidence_with(**answers).verdict == verdict


def test_a_claim_checks_its_fields() -> None:
    def check(*, n: int = 3, beta: float = 1.5, keep: bool = True, seed: int = 0) -> Evidence:
        return evidence_with(stated=[n == 3], control=[False])

    fields: dict[str, Any] = {"id": "x", "title": "T", "statement": "s", "formula": "f", "check": check}
    fields |= {"refuted_by": "r", "control": "c", "citations": (("homework-3", "1.1 (a)"),)}
    claim = Claim(**fields, verdict=HOLDS)
    assert claim.parameters == {"n": 3, "beta": 1.5, "seed": 0}
    assert claim.run().as_recorded and not claim.run(n=4).as_recorded
    with pytest.raises(ValueError, match=r"'m'.*n, beta, keep, seed"):
        claim.run(m=1)
    with pytest.raises(ValueError, match="x: correction"):
        Claim(**fields, verdict=FALSE_AS_STATED, what_holds="w")
    with pytest.raises(ValueError, match="x: what_holds"):
        Claim(**fields, verdict=FALSE_AS_STATED, correction="c")
    with pytest.raises(ValueError, match="x: what_holds"):
        Claim(**fields, verdict=HOLDS, what_holds="w")
    for name, value in (
        ("citations", ()),
        ("document", (("homework-9", "1"),)),
        ("section", (("homework-3", "9.9"),)),
    ):
        with pytest.raises(ValueError, match=f"x: .*{name}"):
            Claim(**{**fields, "citations": value}, verdict=HOLDS)
    with pytest.raises(ValueError, match="x: papers"):
        Claim(**fields, verdict=HOLDS, papers=("nobody-1999",))
    with pytest.raises(ValueError, match=r"x: verdict .*'true'"):
        Claim(**fields, verdict="true")


def test_intervals_have_their_confidence() -> None:
    generator = torch.Generator().manual_seed(0)
    samples = torch.rand(2000, 12, generator=generator, dtype=torch.float64)
    missed = sum(not mean_interval(row).contains(0.5) for row in samples) / 2000
    assert 0.003 < missed < 0.02  # 1%
    assert mean_interval(samples[0], comparisons=50).high > mean_interval(samples[0]).high

    # Student's quantiles, from tables.
    for freedom, expected in ((1, 63.657), (2, 9.925), (5, 4.032), (30, 2.750), (10**6, 2.5758)):
        assert t_quantile(freedom) == pytest.approx(expected, abs=6e-4)

    x = [math.log(n) for n in (2, 4, 8, 16)]
    exact = slope_interval(x, [math.log(3 * n**1.5) for n in (2, 4, 8, 16)])
    assert exact.value == pytest.approx(1.5) and exact.high - exact.low < 1e-6
    rough = slope_interval([0, 1, 2, 3], [0.0, 1.3, 1.7, 3.1])
    assert rough.contains(1) and not rough.contains(3) and rough.low < rough.value < rough.high
    with pytest.raises(ValueError, match="at least 3"):
        slope_interval([1, 2], [1, 2])


def test_claims_are_selected_by_id_and_source() -> None:
    assert [claim.id for claim in list_claims()] == list(IDS) and len(set(IDS)) == len(IDS)
    assert [claim.id for claim in list_claims(QUICK)] == sorted(QUICK, key=IDS.index)
    worked = {claim.id for claim in list_claims() if "worked-answers" in claim.sources}
    assert {claim.id for claim in list_claims(source="worked-answers")} == worked and worked
    with pytest.raises(ValueError, match=r"'hard-lmit'.*hard-limit"):
        list_claims(["hard-lmit"])
    with pytest.raises(ValueError, match=r"source .*homework-3.*'002'"):
        list_claims(source="002")
    with pytest.raises(ValueError, match=r"source .*'worked-answers'.*hard-limit \(assignment-6, homework-3\)"):
        list_claims(["hard-limit"], source="worked-answers")


@pytest.mark.parametrize("name", IDS)
def test_a_title_and_its_verdict_do_not_mislead(name: str) -> None:
    """A claim that does not hold is quoted, and the true statement is beside it, in one line that stands alone."""
    claim = get_claim(name)
    assert 10 < len(claim.title) <= 90 and not claim.title.endswith(".") and claim.title[0] not in "“'"
    assert bool(claim.what_holds) == (claim.verdict != HOLDS)
    if claim.verdict == HOLDS:
        assert claim.heading == claim.title
    else:
        assert claim.heading == f"“{claim.title}”"
        assert claim.what_holds.endswith(".") and len(claim.what_holds) <= 130
        assert not re.match(r"(It|This|They|True|Yes|No)\b", claim.what_holds)  # it needs no other sentence
    for text in (claim.title, claim.what_holds, claim.statement, claim.correction, claim.control):
        assert "_" not in typeset_text(text) and not re.search(r"\b00[0-4]\b", text), text


def test_every_section_of_a_document_is_cited() -> None:
    cited = {citation for claim in list_claims() for citation in claim.citations}
    listed = {(key, section) for key, document in DOCUMENTS.items() for section in document.sections}
    assert cited == listed
    papers = {paper for claim in list_claims() for paper in claim.papers}
    assert papers == set(PAPERS)
    for paper in PAPERS.values():
        assert re.fullmatch(r"\d{4}\.\d{5}", paper.arxiv) and paper.text.endswith(f"arXiv:{paper.arxiv}.")
    assert PAPERS["ioffe-2015"].short == "Ioffe and Szegedy 2015"
    assert PAPERS["shaw-2018"].short == "Shaw et al. 2018"


def test_the_page_of_the_theory_is_up_to_date() -> None:
    """``python -m regard.claims._markdown docs/theory.md`` writes it."""
    assert THEORY.read_text(encoding="utf-8") == theory_page()


def test_every_parameter_has_a_label_and_a_range() -> None:
    for claim in list_claims():
        described = parameters(claim)
        assert {parameter.name: parameter.value for parameter in described} == claim.parameters
        labels = [parameter.label for parameter in described]
        assert len(set(labels)) == len(labels), claim.id
        for parameter in described:
            values = parameter.values
            assert parameter.value in values and 2 <= len(values) <= 100, (claim.id, parameter)
            assert list(values) == sorted(set(values))
            assert all(type(value) is type(parameter.value) for value in values)
            assert parameter.low <= values[0] and values[-1] <= parameter.high
            for value in values:  # every step of a slider is accepted
                assert check_parameters(claim, {parameter.name: value})[parameter.name] == value
        names = {parameter.name for parameter in described}
        for rule in rules(claim):
            assert {*rule.left, rule.right} <= names and rule.relation in ("divides", "at most", "below")


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("column-convention-equals-row-convention", "heads"),
        ("concat-is-sum-of-heads", "kv_heads"),
        ("information-flows-to-the-query", "heads"),
        ("hard-limit", "n"),
        ("average-of-two", "n"),
        ("subspace-selector", "p"),
        ("cost-multi-head", "heads"),
        ("padding-mask", "length"),
        ("diagonal-attention-is-1x1-convolution", "n"),
        ("band-of-thirds-is-convolution-3", "n"),
        ("convolution-needs-value-width", "low"),
    ],
)
def test_checks_run_at_both_ends_of_a_slider(name: str, parameter: str) -> None:
    """These checks need a least size, or sizes that fit together."""
    claim = get_claim(name)
    (described,) = (one for one in parameters(claim) if one.name == parameter)
    for value in (described.values[0], described.values[-1]):
        assert claim.run(**{parameter: value}).evidence.findings


@pytest.mark.parametrize(
    ("name", "changes", "mention"),
    [
        ("hard-limit", {"gap": 100.0}, r"gap: .* between .* got 100"),
        ("hard-limit", {"gap": math.nan}, r"gap: .* got nan"),
        ("hard-limit", {"n": 7.5}, r"n: .* integer, got 7.5"),
        ("hard-limit", {"m": 3}, r"no parameter m; .*n, gap, seed"),
        ("concat-is-sum-of-heads", {"kv_heads": 3}, r"key and value heads must divide heads, got 3 and 4"),
        ("average-of-two", {"n": 12, "d": 10}, r"keys \(n\) must be at most .* got 12 and 10"),
        ("bottleneck-regimes", {"heads": 16}, r"4 × heads must divide .* got 64 and 32"),
        ("padding-mask", {"length": 12}, r"real tokens must be below positions \(n\), got 12 and 12"),
        ("subspace-selector", {"m": 7, "p": 8}, r"at most width .* got 15 and 12"),
    ],
)
def test_refused_parameters_name_what_is_accepted(name: str, changes: dict[str, Any], mention: str) -> None:
    with pytest.raises(ValueError, match=mention):
        check_parameters(get_claim(name), changes)


@pytest.mark.parametrize("name", IDS)
def test_every_formula_can_be_typeset(name: str) -> None:
    claim = get_claim(name)
    assert "\\" not in typeset_formula(claim.formula), claim.formula
    texts = [claim.statement, claim.refuted_by, claim.control]
    if claim.correction:
        texts.append(claim.correction)
    for text in texts:
        assert text.endswith(".") and re.match(r"[^a-z]|[a-z] ", text), text  # it may begin with a symbol


def test_text_is_set_with_subscripts_and_powers() -> None:
    assert typeset_text("tμ_a + W_{−Δ} < c_(p+k)") == "tμ<sub>a</sub> + W<sub>−Δ</sub> &lt; c<sub>p+k</sub>"
    assert typeset_text("d^−½ as N^3.00.") == "d<sup>−½</sup> as N<sup>3.00</sup>."
    assert typeset_text("softmax_β(k_iᵀq), e^(d/2)") == "softmax<sub>β</sub>(k<sub>i</sub>ᵀq), e<sup>d/2</sup>"
    assert typeset_text("to_convolution") == "to_convolution"


def test_formulas_break_at_wide_spaces() -> None:
    assert split_formula(r"a \quad b \qquad \{c\}") == [("a", False), ("b", False), (r"\{c\}", False)]
    assert split_formula(r"\frac{a \quad b}{c} \allowbreak = d") == [(r"\frac{a \quad b}{c}", False), ("= d", True)]
    assert split_formula(r"a \quad \Rightarrow \quad b") == [("a", False), (r"\Rightarrow \quad b", False)]
    assert typeset_formula(r"a \allowbreak = b").count("<math ") == 2


@pytest.mark.parametrize(
    ("x", "label"), [(0.02, "0.02"), (500, "500"), (1000, "1,000"), (1e-6, "10⁻⁶"), (3e5, "3·10⁵"), (1, "1")]
)
def test_ticks_of_logarithmic_axes_are_text(x: float, label: str) -> None:
    assert tick_label(x) == label


def test_the_command_prints_and_writes(monkeypatch: Patch, capsys: Captured, tmp_path: Path) -> None:
    options = ["--only", QUICK[0], "--only", QUICK[1]]
    files = ("--report", tmp_path / "r.html", "--markdown", tmp_path / "c.md")
    code, out, err = command(monkeypatch, capsys, "claims", *options, *files)
    assert code == 0 and not err
    lines = out.splitlines()
    assert lines[0] == "Scale and temperature" and "Masks" in lines
    (line,) = (line for line in lines if "mask-times-infinity" in line)
    assert line.startswith("✗ mask-times-infinity  ") and "false as stated" in line
    assert "holds 0, holds conditionally 1, false as stated 1" in " ".join(out.split())
    assert max(map(len, lines)) <= 80
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    claim = get_claim("hard-limit")
    row = f"| [hard-limit](#hard-limit): “{claim.title}” | holds conditionally | {claim.what_holds} |"
    assert row in (tmp_path / "c.md").read_text()
    printed = " ".join(out.split())
    for name in QUICK:
        assert f"“{get_claim(name).title}” What holds: {get_claim(name).what_holds}" in printed

    code, out, _ = command(monkeypatch, capsys, "claims", "--only", ",".join(QUICK), "--json")
    results = json.loads(out)
    assert code == 0 and [result["id"] for result in results] == ["hard-limit", "mask-times-infinity"]
    assert results[0]["parameters"] == {"n": 8, "gap": 0.5, "seed": 0}
    assert results[0]["title"] == claim.title and results[0]["what_holds"] == claim.what_holds
    assert results[0]["sources"] == ["assignment-6", "homework-3"]
    assert results[0]["citations"][0]["section"] == "4.1"

    code, out, err = command(monkeypatch, capsys, "claims", "--only", "nothing")
    assert code == 2 and "'nothing'" in err[0]


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            (result,) = run_claims(list_claims(["distance-cannot-see-direction"]))
            results.append(result.to_dict() | {"seconds": 0})
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert results[0] == results[1]


def test_another_verdict_exits_with_1(monkeypatch: Patch, capsys: Captured) -> None:
    import regard.claims.theorems.hard_limit as theorem

    def check(**_: Any) -> Evidence:
        return evidence_with(stated=[True], control=[False])

    monkeypatch.setattr(theorem, "CLAIM", Claim(**{**vars(theorem.CLAIM), "check": check}))
    code, out, _ = command(monkeypatch, capsys, "claims", "--only", "hard-limit")
    assert code == 1 and "recorded: holds conditionally" in out


def test_without_a_package_the_other_claims_run(monkeypatch: Patch, capsys: Captured, tmp_path: Path) -> None:
    """The digits need scikit-learn and the figures need matplotlib; both are optional."""
    monkeypatch.setattr("regard.training.tasks.image_data.find_spec", lambda name: None)
    names = "attention-learns-convolution,hard-limit"
    code, out, err = command(monkeypatch, capsys, "claims", "--only", names)
    printed = " ".join(out.split())
    assert (code, err) == (1, []) and "hard-limit holds conditionally" in printed
    assert "scikit-learn" in printed and "pip install 'regard[train]'" in printed and "undecided" in printed
    (result,) = run_claims(list_claims(["attention-learns-convolution"]))
    assert "pip install 'regard[train]'" in result.missing and result.to_dict()["missing"] == result.summary
    html_report([result])

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = command(monkeypatch, capsys, "claims", "--only", "hard-limit", "--report", tmp_path / "page.html")
    assert (code, out, len(err)) == (2, "", 1) and "pip install 'regard[plot]'" in err[0]


def test_the_page_needs_nothing_else() -> None:
    page = html_report(run_claims(list_claims(QUICK)))
    assert not re.search(r"<script|<link|https?://(?!www\.w3\.org)|src=", page)
    assert page.count("<math ") == 2 and page.count("<section ") == 2 and page.count("<figure>") == 2
    targets = set(re.findall(r'id="([^"]+)"', page))
    assert set(re.findall(r'href="#([^"]+)"', page)) - {"documents"} <= targets
    for name in QUICK:  # in the contents and in the section
        assert page.count(typeset_text(get_claim(name).what_holds)) == 2
    assert "def as_written(scores: Tensor, mask: Tensor)" in page  # the code that ran
    with pytest.raises(ValueError, match="results"):
        html_report([])


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_opens_in_a_browser(width: int, show_page: Any) -> None:
    page = show_page(html_report(run_claims(list_claims(QUICK))), width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("math").first.bounding_box()["height"] > 10
    page.get_by_text("The code that ran").first.click()
    assert page.locator("pre").first.is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_docs_have_every_claim_and_its_verdict() -> None:
    text = DOCS.read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[([a-z0-9-]+)\]\(#\1\): .* \| ([a-z ]+) \| .* \| .* \|$", text, re.MULTILINE)
    assert rows == [(claim.id, claim.verdict) for claim in list_claims()]
    for claim in list_claims():
        for part in (claim.heading, claim.what_holds, claim.statement, claim.correction, claim.refuted_by):
            assert typeset_text(part) in text
