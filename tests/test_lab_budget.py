"""The Budget page of the lab: its responses are the planner's, and every size can be changed on the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.lab_pages import fits, page_address, send

from regard import budget
from regard.budget import _machine_benchmark as machine_benchmark
from regard.budget._machine import Machine
from regard.lab.budget import formulas as budget_formulas
from regard.lab.budget import responses as budget_responses
from regard.lab.budget.endpoints import PlanRequest
from regard.lab.budget.responses import measure_machine as measure_job

GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257}
MEASURED = Machine("a measured one", {"float32": 1e11}, 1e10, 2**34, measured="2026-01-02T03:04:05+00:00")


PRESETS = budget_responses.preset_requests()


def plan_request(**fields: Any) -> PlanRequest:
    fields.pop("title", None)  # of a preset
    return msgspec.convert(fields, PlanRequest)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves the figures of this machine in a folder of these tests."""
    folder: Path = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("more", [{}, {"machine": "A100 80GB", "dtype": "bfloat16", "training": True, "batch": 3}])
def test_plans_equal_those_of_the_planner(name: str, more: dict[str, Any]) -> None:
    preset = PRESETS[name]
    response = budget_responses.plan_response(plan_request(**preset, **more))
    expected = json.loads(json.dumps(budget.plan(name, **more).to_dict()))
    for key in ("machine", "model"):  # the lab has more about the machine; fields have no title
        expected.pop(key)
    response = json.loads(msgspec.json.encode(response))
    assert {key: response[key] for key in expected} == expected


def test_the_theorys_exercise() -> None:
    response = budget_responses.plan_response(plan_request(**PRESETS["transformer-base-attention"]))
    assert response["theory"] == {"a head": 98304, "all heads": 786432, "output": 262144, "in all": 1048576}


@pytest.mark.parametrize("name", PRESETS)
def test_formulas_equal_the_counts(name: str) -> None:
    request = plan_request(**PRESETS[name], batch=3)
    plan = budget_responses.build_plan(request)
    response = budget_formulas.formulas_response(request)
    values = {(entry["about"], entry["name"]): entry["value"] for entry in response["formulas"]}
    if request.config is None:  # the numbers of a config are no formulas of parameters
        assert values["parameters", "in all"] == f"{plan.parameters:,}"
    if plan.forward_flops < budget_formulas.MAX_DIGITS_VALUE:
        assert values["FLOPs, forward", "in all"] == f"{plan.forward_flops:,}"
    if plan.backward_flops < budget_formulas.MAX_DIGITS_VALUE:
        assert values["FLOPs, backward", "in all"] == f"{plan.backward_flops:,}"
    assert "nan" not in values.values()
    assert all("94000000" not in term for entry in response["formulas"] for term in entry["numbers"])
    parts = [int(entry["value"].replace(",", "")) for entry in response["formulas"] if entry["about"] == "parameters"]
    if parts and plan.model.kind != "attention":
        assert sum(parts[:-1]) == parts[-1]


def test_every_formula_of_the_planner_has_a_heading() -> None:
    """The headings name formulas of ``regard.budget`` by their keys; a renamed key must not drop a formula."""
    shown = set()
    for preset in PRESETS.values():
        for entry in budget_formulas.formulas_response(plan_request(**preset))["formulas"]:
            shown.add((entry["about"], entry["name"]))
    assert set(budget_formulas.HEADINGS.values()) <= shown


@pytest.mark.parametrize("kind", ["attention", "block", "encoder", "decoder", "encoder-decoder", "vit"])
@pytest.mark.parametrize("more", [{}, {"kv_heads": 2, "d_key": 24}])
def test_formulas_of_every_kind(kind: str, more: dict[str, int]) -> None:
    needed = {"d": 64, "heads": 4, "layers": 3, "image": 32, "patch": 8, "vocab": 101}
    fields = {name: x for name, x in needed.items() if name in budget_responses.start_response()["kinds"][kind]} | more
    request = plan_request(kind=kind, fields=fields)
    values = {
        (entry["about"], entry["name"]): entry["value"]
        for entry in budget_formulas.formulas_response(request)["formulas"]
    }
    plan = budget_responses.build_plan(request)
    assert values["parameters", "in all"] == f"{plan.parameters:,}"
    assert values["FLOPs, forward", "in all"] == f"{plan.forward_flops:,}"


def test_costs_are_equal_at_the_crossover() -> None:
    response = budget_responses.cost_response(
        plan_request(kind="attention", fields={"d": 512, "heads": 8, "bias": False}, tokens=1024)
    )
    at = response["n"].index(1024)
    assert response["crossover"] == 1024 and response["at"] == 1024
    assert response["lines"]["attention"][at] == pytest.approx(response["lines"]["all the rest"][at])
    assert budget_responses.cost_response(plan_request(**PRESETS["vit-b-16"]))["n"] == []


def test_configs_are_read_as_the_library_reads_them() -> None:
    labels: dict[str, Any] = {"id2label": {str(i): f"label {i}" for i in range(37)}}
    vit = {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification"],
        "hidden_size": 48,
        "num_hidden_layers": 2,
    }
    vit |= {"num_attention_heads": 4, "intermediate_size": 96, "image_size": 32, "patch_size": 8} | labels
    latent = {"model_type": "deepseek_v3", "hidden_size": 48, "num_hidden_layers": 5, "num_attention_heads": 4}
    latent |= {"intermediate_size": 96, "vocab_size": 101, "q_lora_rank": None}
    latent |= {"n_routed_experts": 5, "num_experts_per_tok": 2}
    falcon = {"model_type": "falcon", "hidden_size": 48, "num_hidden_layers": 5, "num_attention_heads": 4}
    falcon |= {"new_decoder_architecture": True, "num_kv_heads": 2, "vocab_size": 101}
    seeing = {"model_type": "gemma3", "text_config": latent | {"model_type": "gemma3_text", "sliding_window": 7}}
    seeing |= {"vision_config": {name: vit[name] for name in vit if name not in ("model_type", "id2label")}}
    for config in (GPT2, vit, latent, falcon, seeing):
        read = budget_responses.config_response(json.dumps(config | {"of_no_interest": "x" * 10_000}))
        assert len(read["config"]) < 700
        for text in (json.dumps(config), read["config"]):
            response = budget_responses.plan_response(plan_request(config=text))
            assert response["parameters"] == budget.plan(budget.from_config(config)).parameters
            assert budget_formulas.formulas_response(plan_request(config=text))["formulas"]


def test_large_numbers_stay_json() -> None:
    fields = {"d": 2**18, "heads": 1, "layers": 1024, "vocab": 2**24}
    response = budget_responses.plan_response(
        plan_request(kind="decoder", fields=fields, tokens=2**24, batch=2**20, machine="T4")
    )
    assert msgspec.json.decode(msgspec.json.encode(response))["forward_flops"] > 1e20


REFUSED = [
    ("plan", {"fields": {"d": 512, "heads": 7}}, 400, "got heads=7 and d=512"),
    ("plan", {"kind": "attention", "fields": {"d": 64, "heads": 4, "layers": 2}}, 400, "attention has no layers"),
    ("plan", {"kind": "decoder", "fields": {}}, 400, "decoder needs"),
    ("plan", {"fields": {"d": 0, "heads": 1}}, 422, "d"),
    ("plan", {"fields": {"d": 64, "heads": 4}, "path": "/etc/passwd"}, 422, "path"),
    ("plan", {"fields": {"d": 64, "heads": 4}, "machine": "abacus"}, 400, "unknown machine 'abacus'"),
    ("plan", {"fields": {"d": 64, "heads": 4}, "machine": "T4", "dtype": "bfloat16"}, 400, "on T4, got bfloat16"),
    ("plan", {"fields": {"d": 64, "heads": 4}, "machine": "this"}, 400, "machine"),
    ("plan", {"config": "{"}, 400, "JSON"),
    ("config", {"config": "[" * 100_000}, 400, "JSON"),
    ("config", {"config": "[1]"}, 400, "config must"),
    ("config", {"config": "{}"}, 400, "config.json has no model_type"),
    ("config", {"config": '{"model_type": "mamba"}'}, 400, "model_type must be one of bert"),
    ("config", {"config": json.dumps(GPT2 | {"n_embd": -1})}, 400, "n_embd is -1"),
    ("config", {"config": "x" * (2**20 + 1)}, 422, "length"),
    ("costs", {"fields": {"d": 512, "heads": 7}}, 400, "heads must divide d"),
    ("formulas", {"fields": {"d": 512, "heads": 7}}, 400, "heads must divide d"),
]


@pytest.mark.parametrize(("path", "body", "status", "mention"), REFUSED)
def test_what_is_refused(address: str, path: str, body: Any, status: int, mention: str) -> None:
    code, response = send(address, f"api/budget/{path}", body)
    assert (
        (code, "error" in response) == (status, True) and mention in response["error"] and "\n" not in response["error"]
    )


def test_this_machine_after_it_was_measured(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_benchmark, "measure_machine", lambda progress: (progress(1, 2), MEASURED)[1])
    mention: list[tuple[Any, ...]] = []
    assert measure_job({"again": False}, lambda *what: mention.append(what))["name"] == MEASURED.name
    assert mention == [(1, 2, "measuring")]
    assert budget_responses.start_response()["this"]["name"] == MEASURED.name
    response = budget_responses.plan_response(plan_request(fields={"d": 64, "heads": 4}, machine="this"))
    assert response["seconds"] == budget.plan(budget.attention(64, 4), machine=MEASURED).seconds


def test_two_models_are_compared_as_the_planner_does(address: str) -> None:
    first = {"kind": "decoder", "fields": PRESETS["llama-3-8b"]["fields"], "tokens": 8192, "dtype": "bfloat16"}
    bodies = {"gpt2": {"kind": "decoder", "fields": PRESETS["gpt2"]["fields"]}}
    bodies["bert-base"] = {"config": PRESETS["bert-base"]["config"]}
    for name, second in bodies.items():
        code, response = send(address, "api/budget/compare", {"first": first, "second": second})
        # The second model has fewer positions than the page's n: both are counted there.
        n = budget.preset(name).max_tokens
        expected = budget.compare("llama-3-8b", name, n, dtype="bfloat16").to_dict()["figures"]
        assert code == 200 and response["tokens"] == [n, n]
        assert response["figures"] == json.loads(json.dumps(expected))
    code, response = send(address, "api/budget/compare", {"first": first, "second": {"kind": "tower"}})
    assert code == 422 and "kind" in response["error"]


def test_a_memory_limit_gives_the_longest_n(address: str) -> None:
    body = {
        "kind": "decoder",
        "fields": PRESETS["llama-3-8b"]["fields"],
        "dtype": "bfloat16",
        "memory_limit": 24 * 2**30,
    }
    code, response = send(address, "api/budget/plan", body)
    plan = budget.plan("llama-3-8b", dtype="bfloat16", memory_limit="24GiB")
    assert code == 200 and response["max_tokens_decoding"] == plan.max_tokens_decoding
    assert response["max_tokens_forward"] == plan.max_tokens_forward and response["max_tokens_training"] == 0
    assert send(address, "api/budget/plan", body | {"memory_limit": 0})[0] == 422


def test_windows_in_all_layers_have_no_longest_n_of_decoding(address: str) -> None:
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 40}
    config = {"model_type": "mistral", "vocab_size": 61, "num_key_value_heads": 3, "sliding_window": 8, **sizes}
    body = {"config": json.dumps(config), "tokens": 16, "memory_limit": 2**20}
    code, response = send(address, "api/budget/plan", body)
    assert code == 200 and response["decodes_any_length"] and response["max_tokens_decoding"] is None
    second = {"config": json.dumps(config | {"sliding_window": None})}
    code, response = send(address, "api/budget/compare", {"first": body, "second": second})
    assert code == 200 and response["without_limit"]["longest n, decoding"] == [True, False]


# The page


def card(tab: Any, name: str) -> str:
    return str(tab.locator(f"[data-card={name}] strong").inner_text())


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_counts_as_sizes_change(lab_page: Any, width: int) -> None:
    tab = lab_page("?page=budget", width)
    tab.wait_for_selector(".budget[data-counted]")
    steps = tab.locator("[data-theory] strong").all_inner_texts()
    assert steps == ["98,304", "786,432", "262,144", "1,048,576"]
    assert card(tab, "crossover") == "1,024" and "n* = 1,024" in tab.locator(".words").inner_text()
    formula = tab.locator("[data-about=parameters] [data-formula='a head']")
    assert formula.locator("strong").inner_text() == "98,304" and formula.locator("math").count() >= 2
    tab.wait_for_selector(".js-plotly-plot .main-svg")
    assert fits(tab)
    # A slider, a number, and a size that is reset.
    tab.get_by_label("width d, slider").press("ArrowRight")
    tab.locator("[data-card=parameters] small", has_text="1,638,400").wait_for()
    assert "d=640" in tab.url
    tab.get_by_label("key width", exact=True).fill("16")
    tab.locator("[data-card=parameters] small", has_text="983,040").wait_for()
    tab.get_by_label("key width: reset").click()
    tab.locator("[data-card=parameters] small", has_text="1,638,400").wait_for()
    # The run.
    tab.get_by_label("tokens n", exact=True).fill("4096")
    tab.locator(".words", has_text="attention, 76%").wait_for()
    tab.get_by_label("training step").check()
    tab.locator(".parts thead", has_text="activations").wait_for()
    tab.get_by_label("machine").select_option("A100 80GB")
    tab.locator("[data-card=time] small", has_text="tokens/s").wait_for()
    tab.get_by_label("data type").select_option("bfloat16")
    tab.wait_for_selector(".budget[data-counted*=bfloat16][data-counted*=A100]")
    assert fits(tab)
    url = tab.url
    shown = tab.locator(".cards").inner_text()
    again = lab_page(url[url.index("?") :], width, dark=True)
    again.wait_for_selector(".budget[data-counted]")
    assert again.locator(".cards").inner_text() == shown and fits(again)


@pytest.mark.parametrize("width", [1280, 390])
def test_every_kind_and_preset_is_shown(lab_page: Any, width: int) -> None:
    tab = lab_page("?page=budget", width)
    # One preset of each kind, and one that is a config.
    for name in ("bert-base", "vit-b-16", "t5-small", "llama-3-8b", "transformer-base-attention"):
        tab.get_by_label("start from").select_option(name)
        parameters = budget_responses.plan_response(plan_request(**PRESETS[name]))["parameters"]
        tab.locator("[data-card=parameters] small", has_text=f"{parameters:,}").wait_for()
        assert fits(tab)
    for kind in ("Block", "Encoder–decoder", "Vision", "Decoder", "Attention"):
        button = tab.get_by_role("button", name=kind, exact=True)
        button.click()
        assert button.get_attribute("aria-pressed") == "true"
    tab.locator(".theory").wait_for()


@pytest.mark.parametrize("width", [1280, 390])
def test_models_are_pinned_and_compared(lab_page: Any, width: int) -> None:
    tab = lab_page("?page=budget", width)
    tab.get_by_label("start from").select_option("gpt2")
    tab.get_by_label("memory, GiB").fill("4")
    longest = budget.plan("gpt2", memory_limit="4GiB").max_tokens_forward
    tab.locator("[data-card=longest] strong", has_text=f"{longest:,}").wait_for()
    tab.get_by_label("compare with").select_option("gpt2-medium")
    row = tab.locator("[data-figure=parameters]")
    row.locator("td", has_text="354,823,168").wait_for()
    assert "GPT-2 medium, both at n = 1,024" in tab.locator(".comparison h2").inner_text() and fits(tab)
    # A pinned model stays when the sizes of the page change, and the address keeps it.
    tab.get_by_role("button", name="pin", exact=True).click()
    tab.get_by_label("layers", exact=True).fill("6")
    row.locator("td", has_text="81,912,576").wait_for()
    assert row.locator("td").nth(1).inner_text() == "124,439,808"
    again = lab_page(tab.url[tab.url.index("?") :], width, dark=True)
    again.locator("[data-figure=parameters] td", has_text="124,439,808").wait_for()
    assert again.locator(".comparison h2").inner_text() == tab.locator(".comparison h2").inner_text() and fits(again)
    # Two models of one name differ in a field, which tells them apart.
    tab.get_by_role("button", name="pin", exact=True).click()
    tab.get_by_label("layers", exact=True).fill("8")
    tab.locator(".comparison h2", has_text="Decoder with layers=8 and Decoder with layers=6").wait_for()


def test_the_back_button_undoes_one_choice_at_a_time(lab_page: Any) -> None:
    tab = lab_page("?page=budget")
    tab.wait_for_selector(".budget[data-counted]")
    names = ("start from", "data type", "machine", "compare with")

    def shown() -> dict[str, str]:
        return {name: tab.get_by_label(name, exact=True).input_value() for name in names}

    entries = tab.evaluate("history.length")
    views = [shown()]
    for name, value in zip(names, ("llama-3-8b", "bfloat16", "A100 80GB", "mistral-7b"), strict=True):
        tab.get_by_label(name, exact=True).select_option(value)
        views.append(shown())
    # The peak is that of the data type in use, and the longest n is not that of the model.
    tab.locator(".machine .about", has_text="312 TFLOP/s in bfloat16").wait_for()
    tab.locator("[data-card=longest] small", has_text="made for n ≤ 8,192").wait_for()
    tab.locator(".parts thead", has_text="% of time").wait_for()
    # A number is one step, however many keys are pressed; so is a slider until it is released.
    layers = tab.get_by_label("layers", exact=True)
    layers.fill("")
    layers.press_sequentially("16")
    tab.get_by_label("layers, slider", exact=True).evaluate(
        """slider => {
            for (const value of ["3", "5", "7"]) {
                slider.value = value;
                slider.dispatchEvent(new Event("input", { bubbles: true }));
            }
            slider.dispatchEvent(new Event("change", { bubbles: true }));
        }"""
    )
    assert tab.evaluate("history.length") == entries + 6
    tab.go_back()
    tab.wait_for_function("!location.search.includes('layers=10') && location.search.includes('layers=16')")
    assert layers.input_value() == "16"
    for view in reversed(views):
        tab.go_back()
        assert shown() == view
    for view in views[1:]:
        tab.go_forward()
        assert shown() == view
    tab.locator("[data-figure='context length'] td", has_text="8,192").first.wait_for()


def test_switches_positions_and_sizes_that_divide(lab_page: Any) -> None:
    tab = lab_page("?page=budget&kind=decoder&d=768&heads=12&layers=12&vocab=50257&qkv_bias=yes&n=1024")
    tab.get_by_text("options and positions").click()
    tab.get_by_label("positions", exact=True).select_option("learned")
    tab.locator("[data-card=parameters] small", has_text="124,439,808").wait_for()
    assert tab.get_by_label("positions reach", exact=True).input_value() == "1024"
    tab.get_by_label("gated feed-forward").check()
    tab.get_by_label("width d", exact=True).fill("64")
    tab.wait_for_selector(".budget[data-counted*='\"gated\":true'][data-counted*='\"d\":64,']")
    assert tab.get_by_label("heads", exact=True).input_value() == "8"  # 12 does not divide 64


def test_a_request_does_not_change_with_the_settings(lab_page: Any) -> None:
    """The costs are requested after the plan. A change between the two must not reach the costs of the old settings."""
    tab = lab_page("?page=budget")
    tab.wait_for_selector(".budget[data-counted]")
    fields = tab.evaluate(
        """async () => {
            const { requestBody } = await import("/static/budget/model_settings.js");
            const settings = { kind: "decoder", config: null, fields: { d: 768, heads: 12 } };
            const body = requestBody(settings);
            settings.fields.position = "learned";
            return body.fields;
        }"""
    )
    assert fields == {"d": 768, "heads": 12}


@pytest.mark.parametrize("width", [1280, 390])
def test_a_config_can_be_pasted_selected_and_removed(lab_page: Any, width: int, tmp_path: Path) -> None:
    tab = lab_page("?page=budget", width)
    tab.get_by_text("paste JSON").click()
    tab.get_by_label("text of a config.json").fill(json.dumps(GPT2))
    tab.get_by_role("button", name="load").click()
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
    tab.get_by_role("button", name="× custom sizes").click()
    tab.locator(".theory").wait_for()


def test_the_page_shows_errors(browser: Any, address: str) -> None:
    tab = browser.new_page()
    tab.goto(page_address(address, "?page=budget"))
    tab.wait_for_selector(".budget[data-counted]")
    tab.get_by_text("paste JSON").click()
    tab.get_by_label("text of a config.json").fill('{"model_type": "mamba"}')
    tab.get_by_role("button", name="load").click()
    tab.locator(".config .error", has_text="model_type must be one of bert").wait_for()
    tab.get_by_label("heads", exact=True).fill("7")
    tab.locator(".controls .error", has_text="got heads=7 and d=512").wait_for()
    assert "old" in str(tab.locator(".results").get_attribute("class"))
    tab.get_by_label("heads", exact=True).fill("16")
    tab.wait_for_selector(".results:not(.old)")
    tab.close()


def test_this_machine_is_measured_from_the_page(lab_page: Any, workspace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job takes five seconds of a quiet machine. Here it is cancelled, and a saved result takes its place."""
    tab = lab_page("?page=budget&machine=this")
    tab.wait_for_selector(".budget[data-counted]")
    assert card(tab, "time") == "–"
    tab.get_by_role("button", name="measure (5 s)").click()
    tab.get_by_role("button", name="cancel").click()
    tab.get_by_role("button", name="measure (5 s)").wait_for()
    assert [job.state for job in workspace.jobs.all()] == ["cancelled"]
    monkeypatch.setattr(machine_benchmark, "measure_machine", lambda progress: MEASURED)
    machine_benchmark.this_machine()
    tab.reload()
    tab.locator("[data-card=time] small", has_text="tokens/s").wait_for()
    assert "measured 2026-01-02" in tab.locator(".machine .about").inner_text()


def test_a_measurement_is_cancelled_before_the_lab_has_answered(lab_page: Any, workspace: Any) -> None:
    tab = lab_page("?page=budget&machine=this")
    tab.wait_for_selector(".budget[data-counted]")
    held = []
    tab.route("**/api/budget/measure", lambda route: held.append(route))
    tab.get_by_role("button", name="measure (5 s)").click()
    tab.get_by_role("button", name="cancel").click()
    held[0].continue_()
    tab.get_by_role("button", name="measure (5 s)").wait_for()
    assert workspace.jobs.all()[-1].state == "cancelled"


def test_a_chart_takes_the_width_of_its_box_when_the_box_is_shown(lab_page: Any) -> None:
    tab = lab_page("?page=budget", 390)
    tab.wait_for_selector(".budget[data-counted]")
    drawn, shown = tab.evaluate(
        """async () => {
            const { plot } = await import("/static/plot.js");
            const box = document.createElement("div");
            box.style.width = "300px";
            await plot(box, [{ x: [1, 2], y: [1, 2] }]);  // not on the page yet
            const width = () => Number(box.querySelector("svg").getAttribute("width"));
            const drawn = width();
            document.body.append(box);
            for (let i = 0; i < 500 && width() !== 300; i++) await new Promise((done) => setTimeout(done, 20));
            return [drawn, width()];
        }"""
    )
    assert drawn != 300
    assert shown == 300
