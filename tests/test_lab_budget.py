"""The lab's room «budget»: its answers are the planner's, and its page turns every size."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import pytest
from lab_pages import fits

from regard import budget
from regard.budget import this_machine
from regard.budget.machine import Machine
from regard.lab import budget_answers, budget_formulas
from regard.lab.budget import Ask
from regard.lab.budget_jobs import machine as measure_job

GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257}
MEASURED = Machine("a measured one", {"float32": 1e11}, 1e10, 2**34, measured="2026-01-02T03:04:05+00:00")


def ask(**given: Any) -> Ask:
    return msgspec.convert(given, Ask)


def post(address: str, path: str, body: Any) -> tuple[int, dict[str, Any]]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(address + path, data=data, headers={"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Figures of this machine are kept in a folder of these tests."""
    folder: Path = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.mark.parametrize("name", budget_answers.PRESETS)
@pytest.mark.parametrize("more", [{}, {"machine": "A100 80GB", "dtype": "bfloat16", "training": True, "batch": 3}])
def test_answers_are_the_planners(name: str, more: dict[str, Any]) -> None:
    preset = budget_answers.PRESETS[name]
    found = budget_answers.counted(ask(**preset, **more))
    plan = budget.plan(budget.build(preset["kind"], preset["fields"]), preset.get("tokens"), **more)
    right = json.loads(json.dumps(plan.to_dict()))
    right.pop("machine")
    found = json.loads(msgspec.json.encode(found))
    assert {key: found[key] for key in right} == right


def test_the_theorys_exercise() -> None:
    found = budget_answers.counted(ask(**budget_answers.PRESETS["Transformer base: attention"]))
    assert found["theory"] == {"a head": 98304, "all heads": 786432, "output": 262144, "in all": 1048576}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("GPT-2", 124_439_808), ("Llama 2 7B", 6_738_415_616), ("Llama 3 8B", 8_030_261_248), ("ViT-B/16", 86_567_656)],
)
def test_presets_are_the_models_of_that_name(name: str, parameters: int) -> None:
    assert budget_answers.counted(ask(**budget_answers.PRESETS[name]))["parameters"] == parameters


@pytest.mark.parametrize("name", budget_answers.PRESETS)
def test_formulas_come_to_what_is_counted(name: str) -> None:
    asked = ask(**budget_answers.PRESETS[name], batch=3)
    plan = budget_answers.plan_of(asked)
    told = budget_formulas.written(asked)
    values = {(one["about"], one["name"]): one["value"] for one in told["formulas"]}
    assert values["parameters", "in all"] == f"{plan.parameters:,}"
    if plan.forward < budget_formulas.LAST:
        assert values["FLOPs, forward", "in all"] == f"{plan.forward:,}"
    if plan.backward < budget_formulas.LAST:
        assert values["FLOPs, backward", "in all"] == f"{plan.backward:,}"
    assert "nan" not in values.values()
    assert all("94000000" not in term for one in told["formulas"] for term in one["numbers"])
    parts = [int(one["value"].replace(",", "")) for one in told["formulas"] if one["about"] == "parameters"]
    if plan.model.kind != "attention":
        assert sum(parts[:-1]) == parts[-1]


@pytest.mark.parametrize("kind", ["attention", "block", "encoder", "decoder", "encoder-decoder", "vit"])
@pytest.mark.parametrize("more", [{}, {"kv_heads": 2, "d_key": 24}])
def test_formulas_of_every_kind(kind: str, more: dict[str, int]) -> None:
    needed = {"d": 64, "heads": 4, "layers": 3, "image": 32, "patch": 8, "vocab": 101}
    fields = {name: x for name, x in needed.items() if name in budget_answers.start()["kinds"][kind]} | more
    asked = ask(kind=kind, fields=fields)
    values = {(one["about"], one["name"]): one["value"] for one in budget_formulas.written(asked)["formulas"]}
    plan = budget_answers.plan_of(asked)
    assert values["parameters", "in all"] == f"{plan.parameters:,}"
    assert values["FLOPs, forward", "in all"] == f"{plan.forward:,}"


def test_costs_meet_at_the_crossover() -> None:
    told = budget_answers.against_n(ask(kind="attention", fields={"d": 512, "heads": 8, "bias": False}, tokens=1024))
    at = told["n"].index(1024)
    assert told["crossover"] == 1024 and told["at"] == 1024
    assert told["lines"]["attention"][at] == pytest.approx(told["lines"]["all the rest"][at])
    assert budget_answers.against_n(ask(**budget_answers.PRESETS["ViT-B/16"]))["n"] == []


def test_configs_are_read_as_the_library_reads_them() -> None:
    labels: dict[str, Any] = {"id2label": {str(i): f"label {i}" for i in range(37)}}
    vit = {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification"],
        "hidden_size": 48,
        "num_hidden_layers": 2,
    }
    vit |= {"num_attention_heads": 4, "intermediate_size": 96, "image_size": 32, "patch_size": 8} | labels
    for config in (GPT2, vit):
        read = budget_answers.read_config(json.dumps(config | {"of_no_interest": "x" * 10_000}))
        assert len(read["config"]) < 500
        for text in (json.dumps(config), read["config"]):
            found = budget_answers.counted(ask(config=text))
            assert found["parameters"] == budget.plan(budget.from_config(config)).parameters
            assert budget_formulas.written(ask(config=text))["formulas"]


def test_large_numbers_stay_json() -> None:
    fields = {"d": 2**18, "heads": 1, "layers": 1024, "vocab": 2**24}
    found = budget_answers.counted(ask(kind="decoder", fields=fields, tokens=2**24, batch=2**20, machine="T4"))
    assert msgspec.json.decode(msgspec.json.encode(found))["flops"]["forward"] > 1e20


REFUSED = [
    ("plan", {"fields": {"d": 512, "heads": 7}}, 400, "heads=7 does not divide d=512"),
    ("plan", {"kind": "attention", "fields": {"d": 64, "heads": 4, "layers": 2}}, 400, "attention has no layers"),
    ("plan", {"kind": "decoder", "fields": {}}, 400, "decoder needs"),
    ("plan", {"fields": {"d": 0, "heads": 1}}, 422, "d"),
    ("plan", {"fields": {"d": 64, "heads": 4}, "path": "/etc/passwd"}, 422, "path"),
    ("plan", {"fields": {"d": 64, "heads": 4}, "machine": "abacus"}, 400, "no machine 'abacus' is known"),
    ("plan", {"fields": {"d": 64, "heads": 4}, "machine": "T4", "dtype": "bfloat16"}, 400, "T4 has no figure"),
    ("plan", {"fields": {"d": 64, "heads": 4}, "machine": "this"}, 400, "not measured yet"),
    ("plan", {"config": "{"}, 400, "no JSON"),
    ("config", {"config": "[" * 100_000}, 400, "no JSON"),
    ("config", {"config": "[1]"}, 400, "table of entries"),
    ("config", {"config": "{}"}, 400, "config.json has no model_type"),
    ("config", {"config": '{"model_type": "mamba"}'}, 400, "model_type is 'mamba'"),
    ("config", {"config": json.dumps(GPT2 | {"n_embd": -1})}, 400, "n_embd is -1"),
    ("config", {"config": "x" * (2**20 + 1)}, 422, "length"),
    ("costs", {"fields": {"d": 512, "heads": 7}}, 400, "does not divide"),
    ("formulas", {"fields": {"d": 512, "heads": 7}}, 400, "does not divide"),
]


@pytest.mark.parametrize(("path", "body", "status", "said"), REFUSED)
def test_what_is_refused(address: str, path: str, body: Any, status: int, said: str) -> None:
    code, found = post(address, f"api/budget/{path}", body)
    assert (code, "error" in found) == (status, True) and said in found["error"] and "\n" not in found["error"]


def test_this_machine_once_measured(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_machine, "measure", lambda progress: (progress(1, 2), MEASURED)[1])
    said: list[tuple[Any, ...]] = []
    assert measure_job({"again": False}, lambda *what: said.append(what))["name"] == MEASURED.name
    assert said == [(1, 2, "measuring")]
    assert budget_answers.start()["this"]["name"] == MEASURED.name
    found = budget_answers.counted(ask(fields={"d": 64, "heads": 4}, machine="this"))
    assert found["seconds"] == budget.plan(budget.attention(64, 4), machine=MEASURED).seconds


# The page


def card(tab: Any, name: str) -> str:
    return str(tab.locator(f"[data-card={name}] strong").inner_text())


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_counts_as_sizes_turn(lab_page: Any, width: int) -> None:
    tab = lab_page("?room=budget", width)
    tab.wait_for_selector(".budget[data-counted]")
    steps = tab.locator("[data-theory] strong").all_inner_texts()
    assert steps == ["98,304", "786,432", "262,144", "1,048,576"]
    assert card(tab, "crossover") == "1,024" and "n* = 1,024" in tab.locator(".words").inner_text()
    formula = tab.locator("[data-about=parameters] [data-formula='a head']")
    assert formula.locator("strong").inner_text() == "98,304" and formula.locator("math").count() >= 2
    tab.wait_for_selector(".js-plotly-plot .main-svg")
    assert fits(tab)
    # A slider, a number, and a size that is given back.
    tab.get_by_label("width d, slider").press("ArrowRight")
    tab.locator("[data-card=parameters] small", has_text="1,638,400").wait_for()
    assert "d=640" in tab.url
    tab.get_by_label("key width", exact=True).fill("16")
    tab.locator("[data-card=parameters] small", has_text="983,040").wait_for()
    tab.get_by_label("key width: back to what follows").click()
    tab.locator("[data-card=parameters] small", has_text="1,638,400").wait_for()
    # What it runs on.
    tab.get_by_label("tokens n", exact=True).fill("4096")
    tab.locator(".words", has_text="attention, 76%").wait_for()
    tab.get_by_label("training step").check()
    tab.locator(".parts thead", has_text="kept").wait_for()
    tab.get_by_label("machine").select_option("A100 80GB")
    tab.locator("[data-card=time] small", has_text="tokens/s").wait_for()
    tab.get_by_label("computed in").select_option("bfloat16")
    tab.wait_for_selector(".budget[data-counted*=bfloat16][data-counted*=A100]")
    assert fits(tab)
    url = tab.url
    shown = tab.locator(".cards").inner_text()
    again = lab_page(url[url.index("?") :], width, dark=True)
    again.wait_for_selector(".budget[data-counted]")
    assert again.locator(".cards").inner_text() == shown and fits(again)


@pytest.mark.parametrize("width", [1280, 390])
def test_every_kind_and_preset_is_shown(lab_page: Any, width: int) -> None:
    tab = lab_page("?room=budget", width)
    for name in budget_answers.PRESETS:
        tab.get_by_label("begin with").select_option(name)
        parameters = budget_answers.counted(ask(**budget_answers.PRESETS[name]))["parameters"]
        tab.locator("[data-card=parameters] small", has_text=f"{parameters:,}").wait_for()
        assert fits(tab)
    for kind in ("Block", "Encoder–decoder", "Vision", "Decoder", "Attention"):
        button = tab.get_by_role("button", name=kind, exact=True)
        button.click()
        assert button.get_attribute("aria-pressed") == "true"
    tab.locator(".theory").wait_for()


def test_switches_positions_and_sizes_that_divide(lab_page: Any) -> None:
    tab = lab_page("?room=budget&kind=decoder&d=768&heads=12&layers=12&vocab=50257&qkv_bias=yes&n=1024")
    tab.get_by_text("switches and positions").click()
    tab.get_by_label("positions", exact=True).select_option("learned")
    tab.locator("[data-card=parameters] small", has_text="124,439,808").wait_for()
    assert tab.get_by_label("positions reach", exact=True).input_value() == "1024"
    tab.get_by_label("gated feed-forward").check()
    tab.get_by_label("width d", exact=True).fill("64")
    tab.wait_for_selector(".budget[data-counted*='\"gated\":true'][data-counted*='\"d\":64,']")
    assert tab.get_by_label("heads", exact=True).input_value() == "8"  # 12 does not divide 64


@pytest.mark.parametrize("width", [1280, 390])
def test_a_config_is_pasted_chosen_and_left(lab_page: Any, width: int, tmp_path: Path) -> None:
    tab = lab_page("?room=budget", width)
    tab.get_by_text("paste one").click()
    tab.get_by_label("text of a config.json").fill(json.dumps(GPT2))
    tab.get_by_role("button", name="read it").click()
    tab.locator(".loaded", has_text="GPT2LMHeadModel").wait_for()
    tab.locator("[data-card=parameters] small", has_text="124,439,808").wait_for()
    tab.get_by_label("batch", exact=True).fill("4")
    tab.wait_for_selector(".budget[data-counted*='\"batch\":4']")
    assert fits(tab)
    again = lab_page(tab.url[tab.url.index("?") :], width)
    again.locator("[data-card=parameters] small", has_text="124,439,808").wait_for()
    file = tmp_path / "config.json"
    file.write_text(json.dumps(GPT2 | {"n_layer": 6}), encoding="utf-8")
    tab.get_by_label("config.json", exact=True).set_input_files(file)
    tab.locator("[data-card=parameters] small", has_text="81,912,576").wait_for()
    dropped = tab.evaluate_handle(
        "text => { const all = new DataTransfer(); all.items.add(new File([text], 'config.json')); return all; }",
        json.dumps(GPT2 | {"n_layer": 1}),
    )
    tab.dispatch_event("body", "drop", {"dataTransfer": dropped})
    tab.locator("[data-card=parameters] small", has_text="46,473,216").wait_for()
    tab.get_by_role("button", name="× sizes of your own").click()
    tab.locator(".theory").wait_for()


def test_what_is_refused_is_said(browser: Any, address: str) -> None:
    tab = browser.new_page()
    tab.goto(f"{address}?room=budget")
    tab.wait_for_selector(".budget[data-counted]")
    tab.get_by_text("paste one").click()
    tab.get_by_label("text of a config.json").fill('{"model_type": "mamba"}')
    tab.get_by_role("button", name="read it").click()
    tab.locator(".config .error", has_text="model_type is 'mamba'; known are bert").wait_for()
    tab.get_by_label("heads", exact=True).fill("7")
    tab.locator(".controls .error", has_text="heads=7 does not divide d=512").wait_for()
    assert "old" in str(tab.locator(".results").get_attribute("class"))
    tab.get_by_label("heads", exact=True).fill("16")
    tab.wait_for_selector(".results:not(.old)")
    tab.close()


def test_this_machine_is_measured_from_the_page(lab_page: Any, lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job itself takes five seconds of a quiet machine; here one is cancelled, and its figures are put there."""
    tab = lab_page("?room=budget&machine=this")
    tab.wait_for_selector(".budget[data-counted]")
    assert card(tab, "time") == "–"
    tab.get_by_role("button", name="measure it (5 s)").click()
    tab.get_by_role("button", name="cancel").click()
    tab.get_by_role("button", name="measure it (5 s)").wait_for()
    assert [job.state for job in lab.jobs.all()] == ["cancelled"]
    monkeypatch.setattr(this_machine, "measure", lambda progress: MEASURED)
    this_machine.this()
    tab.reload()
    tab.locator("[data-card=time] small", has_text="tokens/s").wait_for()
    assert "measured 2026-01-02" in tab.locator(".machine .about").inner_text()
