"""The Claims page of the lab: its responses, its checks, and the page in a browser."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
from support.lab_pages import fits, send, until

from regard.claims import Claim, Evidence, get_claim
from regard.claims._documents import DOCUMENTS
from regard.claims._registry import IDS, TOPICS
from regard.lab.claims.jobs import check_claim as run_claim
from regard.lab.workspace import Workspace

QUICK = "hard-limit"
HARD_LIMIT = f".claims .parts a[href*={QUICK}]"
STATUS = "(document.querySelector('.claims .turn .status')?.textContent ?? '')"


def ask(address: str, path: str, body: Any = None) -> tuple[int, Any]:
    status, data = send(address, f"api/{path}", body)
    return status, data if status == 200 else data["error"]


def run_to_end(address: str, name: str, **parameters: float) -> dict[str, Any]:
    """Run a claim to its end. Returns its job."""
    data = ask(address, "claims/run", {"claim": name, "parameters": parameters})[1]
    if data["result"] is not None:
        return {"state": "done", "result": data["result"]}
    job: dict[str, Any] = data["job"]
    while job["state"] in ("queued", "running"):
        job = ask(address, f"jobs/{job['id']}?after={job['seq']}&wait=10")[1]
    return job


def plain(x: Any) -> Any:
    """Return a result as JSON has it, without its time."""
    data = json.loads(json.dumps(x))
    data.pop("seconds")
    data.pop("given", None)
    data.pop("typeset", None)
    for finding in data["findings"]:
        finding.pop("typeset", None)
    return data


def test_the_ledger_lists_every_claim(address: str) -> None:
    status, data = ask(address, "claims/ledger")
    assert status == 200 and [entry["id"] for entry in data["claims"]] == list(IDS)
    assert data["parts"] == {part: list(names) for part, names in TOPICS.items()}
    for entry in data["claims"]:
        claim = get_claim(entry["id"])
        assert entry["verdict"] == claim.verdict and entry["sources"] == list(claim.sources)
        assert entry["title"] == claim.heading and entry["what_holds"] == claim.what_holds
        assert [(one["document"], one["section"]) for one in entry["citations"]] == list(claim.citations)
        assert entry["statement"] == claim.statement and entry["latex"] == claim.formula
        assert "<math" in entry["typeset"]["formula"] and bool(entry["correction"]) == bool(
            entry["typeset"]["correction"]
        )
        assert {x["name"]: x["value"] for x in entry["parameters"]} == claim.parameters
    assert [document["key"] for document in data["documents"]] == list(DOCUMENTS)


def test_a_run_gives_the_librarys_result_and_is_remembered(address: str) -> None:
    job = run_to_end(address, QUICK)
    assert job["state"] == "done" and plain(job["result"]) == plain(get_claim(QUICK).run().to_dict())
    again = ask(address, "claims/run", {"claim": QUICK})[1]
    assert again["job"] is None and again["result"] == job["result"]
    other = run_to_end(address, QUICK, gap=0.25, n=7.0)
    assert plain(other["result"]) == plain(get_claim(QUICK).run(gap=0.25, n=7).to_dict())
    assert other["result"]["given"] == {"n": 7, "gap": 0.25, "seed": 0}
    assert plain(other["result"]) != plain(job["result"])


@pytest.mark.parametrize(
    ("body", "status", "mention"),
    [
        ({"claim": "no-such"}, 404, "no claim 'no-such'"),
        ({"claim": "../ledger"}, 422, ""),
        ({"claim": QUICK, "parameters": {"gap": 100.0}}, 400, "must be between"),
        ({"claim": QUICK, "parameters": {"n": 7.5}}, 400, "must be an integer"),
        ({"claim": QUICK, "parameters": {"n": 10**9}}, 400, "must be between"),
        ({"claim": "concat-is-sum-of-heads", "parameters": {"kv_heads": 3}}, 400, "must divide heads"),
        ({"claim": QUICK, "parameters": {"full": 1}}, 400, "full"),
        ({"claim": QUICK, "parameters": {"n": "8"}}, 422, ""),
        ({"claim": QUICK, "parameters": {"n": True}}, 422, ""),
        ({"claim": QUICK, "parameters": {f"x{k}": 1 for k in range(30)}}, 422, ""),
        ({"claim": "weights-are-a-distribution", "parameters": {"dropout": 1.2}}, 400, "dropout"),
    ],
)
def test_what_is_refused(address: str, body: Any, status: int, mention: str) -> None:
    code, error = ask(address, "claims/run", body)
    assert code == status and mention in error and "\n" not in error


def test_errors_of_a_check_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import regard.claims.theorems.hard_limit as theorem

    def check(*, n: int = 8) -> Evidence:
        raise IndexError(f"{n} is too small\nfor this")

    monkeypatch.setattr(theorem, "CLAIM", Claim(**{**vars(theorem.CLAIM), "check": check}))
    with pytest.raises(ValueError, match=r"^the check does not run with these parameters \(.*\); reset one of them$"):
        run_claim({"id": QUICK, "parameters": {"n": 7}}, lambda *_: None)


def test_labels_are_typeset() -> None:
    labels = run_claim({"id": "convolution-needs-value-width", "parameters": {}}, lambda *_: None)["typeset"]
    assert labels["D_o"] == "D<sub>o</sub>" and not any("_" in label for label in labels.values())


def test_the_code_of_a_check(address: str) -> None:
    data = ask(address, f"claims/code?claim={QUICK}")[1]["code"]
    assert inspect.getsource(get_claim(QUICK).check).strip() in data and "CLAIM = Claim(" not in data
    assert ask(address, "claims/code?claim=nothing")[0] == 404


def test_a_slow_check_is_stopped() -> None:
    args = {"id": "score-variance-is-d", "parameters": {"samples": 40_000}, "limit": 0.05}
    with pytest.raises(RuntimeError, match="longer"):
        run_claim(args, lambda *_: None)
    assert run_claim({"id": QUICK, "parameters": {}}, lambda *_: None)["as_recorded"]


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_claims_are_found(lab_page: Any, width: int, dark: bool) -> None:
    tab = lab_page("?page=claims", width=width, dark=dark)
    tab.wait_for_selector(".claims .parts li")
    rows = tab.locator(".claims .parts li:visible")
    assert rows.count() == len(IDS)
    tab.get_by_label("find claims by words").fill("softmax argmax")
    hits = [name for name in IDS if all(x in _words(name) for x in ("softmax", "argmax"))]
    assert rows.count() == len(hits) > 0
    tab.get_by_label("find claims by words").fill("")
    tab.get_by_label("source").select_option("Worked answers")
    source = "worked-answers"
    assert rows.count() == sum(source in get_claim(name).sources for name in IDS)
    assert tab.get_by_role("button", name=f"run these {rows.count()}").is_visible()
    tab.locator(".claims .chip", has_text="false as stated").click()
    both = [x for x in map(get_claim, IDS) if source in x.sources and x.verdict == "false as stated"]
    assert rows.count() == len(both) > 0 and f"source={source}" in tab.url and "verdict=false+as+stated" in tab.url
    texts = " ".join(rows.all_inner_texts())
    for entry in both:  # the claim is quoted, and what holds is beside it
        assert f"“{entry.title[:12]}" in texts and entry.what_holds[:12] in texts
    assert fits(tab)
    tab.get_by_label("find claims by words").fill("nothing is like this")
    assert tab.get_by_text("No claim matches.").is_visible()


def _words(name: str) -> str:
    entry = get_claim(name)
    return f"{name} {entry.title} {entry.statement} {entry.what_holds} {entry.correction} {entry.formula}".lower()


@pytest.mark.parametrize(("width", "dark"), [(1280, True), (390, False)])
def test_a_claim_is_opened_changed_and_reset(lab_page: Any, width: int, dark: bool) -> None:
    tab = lab_page("?page=claims", width=width, dark=dark)
    tab.locator(HARD_LIMIT).click()
    tab.wait_for_selector(".claims .findings li")
    tab.wait_for_selector(".claims .figures .scatterlayer .trace")
    assert f"claim={QUICK}" in tab.url
    assert tab.evaluate("document.querySelector('.claims .formula math').namespaceURI").endswith("MathML")
    claim = get_claim(QUICK).run()
    assert tab.locator(".claims .findings li").count() == len(claim.evidence.findings)
    assert tab.locator(".claims .now").inner_text().split() == ["◐", "holds", "conditionally", "as", "recorded"]
    paths = "[...document.querySelectorAll('.claims .figures .trace path.js-line')]"
    drawn = f"JSON.stringify({paths}.map((x) => x.getAttribute('d')))"
    before = tab.evaluate(drawn)
    reset = tab.get_by_role("button", name="reset")
    assert reset.is_disabled()
    gap = tab.get_by_label("lead of the largest score (gap)", exact=True)
    gap.focus()
    tab.keyboard.press("ArrowLeft")
    until(tab, f"{drawn} !== {json.dumps(before)} && {STATUS}.startsWith('in ')")
    assert "p.gap=0.4" in tab.url
    lines = tab.evaluate("document.querySelector('.claims .figures .js-plotly-plot').data.map((x) => x.line.dash)")
    assert lines.count("dot") == len(claim.evidence.series[0].lines)  # what is recorded, behind
    want = get_claim(QUICK).run(gap=0.4).to_dict()["series"][0]["lines"]
    shown = tab.evaluate(
        "document.querySelector('.claims .figures .js-plotly-plot').data.filter((x) => x.line.dash !== 'dot')"
        ".map((x) => [...x.y])"
    )
    assert shown == [line[1] for line in want.values()]
    legend = tab.locator(".claims .figures .legendtext").all_text_contents()
    assert [text for text in legend if "recorded" in text] == ["dotted: with the recorded parameters"]
    tab.reload()
    tab.wait_for_selector(".claims .findings li")
    assert tab.locator(".claims .slider", has_text="gap").locator("output").inner_text() == "0.4"
    reset.click()
    until(tab, f"{STATUS}.startsWith('in ') && !location.search.includes('p.gap')")
    assert tab.locator(".claims .now").inner_text().endswith("as recorded")
    assert fits(tab)
    tab.get_by_text("The code that runs").click()
    until(tab, "document.querySelector('.claims pre code').textContent.includes('def check')")
    assert fits(tab)


def test_values_that_are_not_accepted_are_refused_on_the_page(lab_page: Any) -> None:
    """They are not sent: the recorded values run instead, and the line says what is accepted."""
    tab = lab_page("?page=claims&claim=concat-is-sum-of-heads&p.kv_heads=3&p.d=1000")
    sent: list[str] = []
    tab.on("request", lambda request: sent.append(request.post_data or ""))
    until(tab, f"{STATUS}.startsWith('in ')")
    refusal = tab.locator(".claims .refusal")
    assert "key and value heads must divide heads, got 3 and 4" in refusal.inner_text()
    assert "must be between 2 and 40, got 1,000" in refusal.inner_text() and "p." not in tab.url
    assert tab.locator(".claims .now").inner_text().endswith("as recorded")

    # Two sliders that do not fit together.
    heads = tab.get_by_label("heads", exact=True)
    heads.focus()
    tab.keyboard.press("ArrowRight")  # 6 heads
    shared = tab.get_by_label("key and value heads")
    shared.focus()
    tab.keyboard.press("ArrowRight")  # 4 key and value heads
    assert refusal.inner_text() == "key and value heads must divide heads, got 4 and 6"
    assert not any("kv_heads" in body for body in sent) and tab.locator(".claims .stale").count() == 1
    tab.get_by_role("button", name="reset").click()
    until(tab, f"{STATUS}.startsWith('in ')")
    assert tab.locator(".claims .now").inner_text().endswith("as recorded") and refusal.inner_text() == ""


def test_a_claim_that_does_not_hold_says_what_does(lab_page: Any) -> None:
    tab = lab_page("?page=claims&claim=convolution-needs-value-width")
    claim = get_claim("convolution-needs-value-width")
    article = tab.locator(".claims article")
    assert article.locator("h2").inner_text() == f"“{claim.title}”"
    assert article.locator(".instead").inner_text().startswith("What holds: K² heads can express every")
    assert article.locator(".instead sub").count() == 2  # W_Δ and D_o
    assert "Natural Language Processing: Assignment 6, 3.2" in article.locator(".origins").inner_text()
    assert article.locator(".origins a").get_attribute("href") == "https://arxiv.org/abs/1911.03584"
    tab.wait_for_selector(".claims .numbers dt")
    visible = article.inner_text()
    assert "_" not in visible


def test_another_verdict_is_explained(lab_page: Any) -> None:
    """The page lists the findings that have another answer. No accepted parameter gives one, so the response does."""
    tab = lab_page(f"?page=claims&claim={QUICK}")
    until(tab, f"{STATUS}.startsWith('in ')")
    assert tab.locator(".claims .difference").inner_text() == ""
    result = run_claim({"id": QUICK, "parameters": {"gap": 0.4}}, lambda *report: None)
    changed = next(finding for finding in result["findings"] if finding["role"] == "condition")
    changed["holds"] = False
    result |= {"verdict": "undecided", "as_recorded": False}
    tab.route("**/api/claims/run", lambda route: route.fulfill(json={"result": result, "job": None}))
    tab.get_by_label("lead of the largest score (gap)", exact=True).focus()
    tab.keyboard.press("ArrowLeft")
    until(tab, "document.querySelector('.claims .now')?.textContent.includes('another verdict than recorded')")
    items = tab.locator(".claims .difference li").all_inner_texts()
    assert len(items) == 1 and items[0].endswith("no")
    assert "holds conditionally" in tab.locator(".claims .difference p").inner_text()
    tab.unroute("**/api/claims/run")
    tab.get_by_role("button", name="reset").click()
    until(tab, f"{STATUS}.startsWith('in ') && !document.querySelector('.claims .difference').textContent")


@pytest.mark.parametrize("width", [1280, 390])
def test_numbers_are_not_broken_between_digits(lab_page: Any, width: int) -> None:
    """Each number of the table is on one line, and lists of numbers break between them."""
    tab = lab_page("?page=claims&claim=heads-evolve", width=width)
    tab.wait_for_selector(".claims .numbers dd")
    lines = tab.evaluate(
        "[...document.querySelectorAll('.claims .numbers dd span')]"
        ".map((x) => [x.textContent, x.getClientRects().length])"
    )
    assert len(lines) > 20 and all(count == 1 for _, count in lines), lines
    assert fits(tab)


def test_all_listed_claims_run_and_can_be_cancelled(lab_page: Any, workspace: Workspace) -> None:
    tab = lab_page("?page=claims&q=one-hot")
    tab.wait_for_selector(".claims .parts li:visible")
    many = tab.locator(".claims .parts li:visible").count()
    tab.get_by_role("button", name=f"run these {many}").click()
    tab.get_by_text(f"{many} of {many} as recorded").wait_for()
    assert tab.locator(".claims .ran.good:visible").count() == many
    tab.get_by_label("find claims by words").fill("")
    tab.get_by_role("button", name="run all").click()
    tab.get_by_role("button", name="cancel").click()
    tab.get_by_text("then cancelled").wait_for()
    assert tab.get_by_role("button", name="run all").is_visible()


def test_the_back_button_goes_back_to_the_list(lab_page: Any) -> None:
    tab = lab_page("?page=claims", width=390)
    tab.locator(".claims .parts a[href*=soft-limit]").click()
    tab.wait_for_selector(".claims .findings li")
    assert not tab.locator(".claims aside").is_visible()
    tab.go_back()
    tab.wait_for_selector(".claims aside")
    tab.locator(HARD_LIMIT).click()
    tab.get_by_role("button", name="all claims").click()
    assert tab.locator(".claims aside").is_visible() and "claim=" not in tab.url


def test_typeset_html_is_sanitized(lab_page: Any) -> None:
    tab = lab_page("?page=claims")
    tab.wait_for_selector(".claims .parts li")
    nasty = (
        '<span class="part" id="x"><math href="y"><mi class="z" mathvariant="bold">a</mi><mtext><b>c</b></mtext></math>'
        '</span><script>window.bad = 1</script><sub style="x">b</sub><iframe></iframe>'
    )
    data = tab.evaluate(
        """async (text) => { const { typeset } = await import("/static/claims/safe_mathml.js");
        const box = document.createElement("div"); box.append(...typeset(text)); return box.innerHTML; }""",
        nasty,
    )
    assert data == '<span class="part"><math><mi mathvariant="bold">a</mi><mtext></mtext></math></span><sub>b</sub>'


def test_a_page_left_while_loading_leaves_nothing(lab_page: Any) -> None:
    tab = lab_page("?page=budget")
    tab.evaluate(
        "for (const name of ['claims', 'evolve']) document.querySelector(`#pages a[data-page=${name}]`).click()"
    )
    tab.wait_for_selector(".evolve .frame")
    assert tab.locator("main aside").count() == 0 and tab.locator("main").get_attribute("class") == "page evolve"
