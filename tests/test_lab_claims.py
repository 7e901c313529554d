"""The lab's room Claims: the ledger as it is told, run and shown."""

from __future__ import annotations

import inspect
import json
import urllib.error
import urllib.request
from typing import Any

import pytest
from lab_pages import fits, until

from regard.claims import claim as claim_of
from regard.claims.ledger import IDS, PARTS
from regard.lab.claims import _bounds
from regard.lab.claims_jobs import claim as run_claim
from regard.lab.lab import Lab

QUICK = "hard-limit"
STATUS = "(document.querySelector('.claims .turn .status')?.textContent ?? '')"


def ask(address: str, path: str, body: Any = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{address}api/{path}", data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]


def ran(address: str, name: str, **parameters: float) -> dict[str, Any]:
    """Run a claim to its end; its job."""
    told = ask(address, "claims/run", {"claim": name, "parameters": parameters})[1]
    if told["result"] is not None:
        return {"state": "done", "result": told["result"]}
    job: dict[str, Any] = told["job"]
    while job["state"] in ("queued", "running"):
        job = ask(address, f"jobs/{job['id']}?after={job['seq']}&wait=10")[1]
    return job


def plain(x: Any) -> Any:
    """A result less how long it took, as JSON has it."""
    told = json.loads(json.dumps(x))
    told.pop("seconds")
    told.pop("given", None)
    for finding in told["findings"]:
        finding.pop("typeset", None)
    return told


def test_the_ledger_is_told_whole(address: str) -> None:
    status, told = ask(address, "claims/ledger")
    assert status == 200 and [one["id"] for one in told["claims"]] == list(IDS)
    assert told["parts"] == {part: list(names) for part, names in PARTS.items()}
    for one in told["claims"]:
        there = claim_of(one["id"])
        assert one["verdict"] == there.verdict and one["sources"] == list(there.sources)
        assert one["statement"] == there.statement and one["latex"] == there.formula
        assert "<math" in one["typeset"]["formula"] and bool(one["correction"]) == bool(one["typeset"]["correction"])
        assert {x["name"]: x["value"] for x in one["parameters"]} == there.parameters


def test_every_slider_stands_within_its_bounds(address: str) -> None:
    for one in ask(address, "claims/ledger")[1]["claims"]:
        for turned in one["parameters"]:
            low, high = _bounds(turned["name"], turned["value"])
            values = turned["values"]
            assert values == sorted(set(values)) and turned["value"] in values and 1 <= len(values) <= 100
            assert low <= values[0] and values[-1] <= high
            assert all(isinstance(x, type(turned["value"])) for x in values)


def test_a_run_gives_the_librarys_result_and_the_recorded_one_is_kept(address: str) -> None:
    job = ran(address, QUICK)
    assert job["state"] == "done" and plain(job["result"]) == plain(claim_of(QUICK).run().to_dict())
    again = ask(address, "claims/run", {"claim": QUICK})[1]
    assert again["job"] is None and again["result"] == job["result"]
    other = ran(address, QUICK, gap=0.25, n=7.0)
    assert plain(other["result"]) == plain(claim_of(QUICK).run(gap=0.25, n=7).to_dict())
    assert other["result"]["given"] == {"n": 7, "gap": 0.25, "seed": 0}
    assert plain(other["result"]) != plain(job["result"])


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"claim": "no-such"}, 404, "no claim 'no-such'"),
        ({"claim": "../ledger"}, 422, ""),
        ({"claim": QUICK, "parameters": {"gap": 100.0}}, 400, "gap is 100; it can be turned from 0.0625 to 2"),
        ({"claim": QUICK, "parameters": {"n": 2.5}}, 400, "n is 2.5; it must be a whole number"),
        ({"claim": QUICK, "parameters": {"n": 10**9}}, 400, "n is 1e+09"),
        ({"claim": QUICK, "parameters": {"full": 1}}, 400, "has no full"),
        ({"claim": QUICK, "parameters": {"n": "8"}}, 422, ""),
        ({"claim": QUICK, "parameters": {"n": True}}, 422, ""),
        ({"claim": QUICK, "parameters": {f"x{k}": 1 for k in range(30)}}, 422, ""),
        ({"claim": "weights-are-a-distribution", "parameters": {"dropout": 1.2}}, 400, "to 0.95"),
    ],
)
def test_what_is_refused(address: str, body: Any, status: int, said: str) -> None:
    got, why = ask(address, "claims/run", body)
    assert got == status and said in why and "\n" not in why


def test_what_a_check_refuses_is_one_line(address: str) -> None:
    job = ran(address, "concat-is-sum-of-heads", kv_heads=3)
    assert job["state"] == "failed" and "does not divide" in job["error"] and "\n" not in job["error"]


def test_code_is_the_checks(address: str) -> None:
    told = ask(address, f"claims/code?claim={QUICK}")[1]["code"]
    assert inspect.getsource(claim_of(QUICK).check).strip() in told and "CLAIM = Claim(" not in told
    assert ask(address, "claims/code?claim=nothing")[0] == 404


def test_a_check_that_takes_too_long_ends() -> None:
    args = {"id": "score-variance-is-d", "parameters": {"samples": 80_000}, "limit": 0.05}
    with pytest.raises(RuntimeError, match=r"longer than 0\.05 s"):
        run_claim(args, lambda *_: None)
    assert run_claim({"id": QUICK, "parameters": {}}, lambda *_: None)["as_recorded"]


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_claims_are_found(lab_page: Any, width: int, dark: bool) -> None:
    tab = lab_page("?room=claims", width=width, dark=dark)
    tab.wait_for_selector(".claims .parts li")
    rows = tab.locator(".claims .parts li:visible")
    assert rows.count() == len(IDS)
    tab.get_by_label("find claims by words").fill("softmax argmax")
    hits = [name for name in IDS if all(x in _words(name) for x in ("softmax", "argmax"))]
    assert rows.count() == len(hits) > 0
    tab.get_by_label("find claims by words").fill("")
    tab.get_by_label("source").select_option("004")
    assert rows.count() == sum("004" in claim_of(name).sources for name in IDS)
    tab.locator(".claims .chip", has_text="fails as written").click()
    both = [x for x in map(claim_of, IDS) if "004" in x.sources and x.verdict == "fails as written"]
    assert rows.count() == len(both) > 0 and "source=004" in tab.url and "verdict=fails" in tab.url
    assert fits(tab)
    tab.get_by_label("find claims by words").fill("nothing is like this")
    assert tab.get_by_text("No claim is like that.").is_visible()


def _words(name: str) -> str:
    one = claim_of(name)
    return f"{name} {one.statement} {one.correction} {one.formula}".lower()


@pytest.mark.parametrize(("width", "dark"), [(1280, True), (390, False)])
def test_a_claim_is_opened_turned_and_set_back(lab_page: Any, width: int, dark: bool) -> None:
    tab = lab_page("?room=claims", width=width, dark=dark)
    tab.locator(".claims .parts a", has_text="Hard limit").click()
    tab.wait_for_selector(".claims .findings li")
    tab.wait_for_selector(".claims .figures .scatterlayer .trace")
    assert f"claim={QUICK}" in tab.url
    assert tab.evaluate("document.querySelector('.claims .formula math').namespaceURI").endswith("MathML")
    there = claim_of(QUICK).run()
    assert tab.locator(".claims .findings li").count() == len(there.evidence.findings)
    assert tab.locator(".claims .now").inner_text().split() == ["◐", "holds", "if", "reproduced"]
    paths = "[...document.querySelectorAll('.claims .figures .trace path.js-line')]"
    drawn = f"JSON.stringify({paths}.map((x) => x.getAttribute('d')))"
    before = tab.evaluate(drawn)
    reset = tab.get_by_role("button", name="as recorded")
    assert reset.is_disabled()
    gap = tab.get_by_label("gap", exact=True)
    gap.focus()
    tab.keyboard.press("ArrowLeft")
    until(tab, f"{drawn} !== {json.dumps(before)} && {STATUS}.startsWith('in ')")
    assert "p.gap=0.4375" in tab.url
    lines = tab.evaluate("document.querySelector('.claims .figures .js-plotly-plot').data.map((x) => x.line.dash)")
    assert lines.count("dot") == len(there.evidence.series[0].lines)  # what is recorded, behind
    want = claim_of(QUICK).run(gap=0.4375).to_dict()["series"][0]["lines"]
    shown = tab.evaluate(
        "document.querySelector('.claims .figures .js-plotly-plot').data.filter((x) => x.name).map((x) => [...x.y])"
    )
    assert shown == [line[1] for line in want.values()]
    tab.reload()
    tab.wait_for_selector(".claims .findings li")
    assert tab.locator(".claims .slider", has_text="gap").locator("output").inner_text() == "0.4375"
    reset.click()
    until(tab, f"{STATUS}.startsWith('in ') && !location.search.includes('p.gap')")
    assert tab.locator(".claims .now").inner_text().endswith("reproduced")
    assert fits(tab)
    tab.get_by_text("The code that runs").click()
    until(tab, "document.querySelector('.claims pre code').textContent.includes('def check')")
    assert fits(tab)


def test_what_a_check_refuses_is_shown(lab_page: Any) -> None:
    tab = lab_page("?room=claims&claim=concat-is-sum-of-heads&p.kv_heads=3")
    until(tab, f"{STATUS}.includes('does not divide')")
    tab.get_by_role("button", name="as recorded").click()
    until(tab, f"{STATUS}.startsWith('in ')")
    assert tab.locator(".claims .now").inner_text().endswith("reproduced")


def test_another_verdict_is_told(lab_page: Any) -> None:
    tab = lab_page("?room=claims&claim=two-heads-are-steadier&p.t=5")
    until(tab, "document.querySelector('.claims .now')?.textContent.includes('another verdict than recorded')")
    assert claim_of("two-heads-are-steadier").run(t=5.0).verdict == "undecided"


def test_all_that_is_shown_is_run_and_can_be_cancelled(lab_page: Any, lab: Lab) -> None:
    tab = lab_page("?room=claims&q=one-hot")
    tab.wait_for_selector(".claims .parts li:visible")
    many = tab.locator(".claims .parts li:visible").count()
    tab.get_by_role("button", name="run all").click()
    tab.get_by_text(f"{many} of {many} reproduced").wait_for()
    assert tab.locator(".claims .ran.good:visible").count() == many
    tab.get_by_label("find claims by words").fill("")
    tab.get_by_role("button", name="run all").click()
    tab.get_by_role("button", name="cancel").click()
    tab.get_by_text("then cancelled").wait_for()
    assert tab.get_by_role("button", name="run all").is_visible()


def test_the_back_button_goes_back_to_the_list(lab_page: Any) -> None:
    tab = lab_page("?room=claims", width=390)
    tab.locator(".claims .parts a", has_text="Soft limit").click()
    tab.wait_for_selector(".claims .findings li")
    assert not tab.locator(".claims aside").is_visible()
    tab.go_back()
    tab.wait_for_selector(".claims aside")
    tab.locator(".claims .parts a", has_text="Hard limit").click()
    tab.get_by_role("button", name="all claims").click()
    assert tab.locator(".claims aside").is_visible() and "claim=" not in tab.url


def test_only_what_is_typeset_is_taken_over(lab_page: Any) -> None:
    tab = lab_page("?room=claims")
    tab.wait_for_selector(".claims .parts li")
    nasty = (
        '<span class="part" id="x"><math href="y"><mi class="z" mathvariant="bold">a</mi><mtext><b>c</b></mtext></math>'
        '</span><script>window.bad = 1</script><sub style="x">b</sub><iframe></iframe>'
    )
    told = tab.evaluate(
        """async (text) => { const { typeset } = await import("/static/claims/typeset.js");
        const box = document.createElement("div"); box.append(...typeset(text)); return box.innerHTML; }""",
        nasty,
    )
    assert told == '<span class="part"><math><mi mathvariant="bold">a</mi><mtext></mtext></math></span><sub>b</sub>'


def test_a_room_that_is_left_before_it_is_open_leaves_nothing(lab_page: Any) -> None:
    tab = lab_page("?room=budget")
    tab.evaluate(
        "for (const room of ['claims', 'evolve']) document.querySelector(`#rooms a[data-room=${room}]`).click()"
    )
    tab.wait_for_selector(".evolve .frame")
    assert tab.locator("main aside").count() == 0 and tab.locator("main").get_attribute("class") == "room evolve"
