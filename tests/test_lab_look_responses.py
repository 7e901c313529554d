"""Responses of the Look page: each number equals the operator's own."""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
import time
import urllib.error
import urllib.request
from typing import Any

import numpy
import pytest
import torch
from support.lab_pages import lab_request

from regard import Causal, Observe, attention, interp, models
from regard.cli.look_model import observe_model
from regard.interp import Recording
from regard.interp import look as watched
from regard.interp._head_table import HEAD_COLUMNS
from regard.interp._page_types import types_metadata
from regard.lab.jobs import FINISHED
from regard.lab.look import changed_scores
from regard.lab.look.endpoints import ExportRequest, _short_title, export
from regard.lab.look.jobs import ablate, saved_bytes
from regard.lab.look.responses import head_response, recording_response
from regard.lab.look.text_scores import token_numbers
from regard.models import create

HEAD = "place=1&head=2"


@pytest.fixture
def ask(workspace, address):
    """``ask("why", "row=5&key=3")`` requests from the sample's recording; numbers come as a tensor, others as data."""
    name = workspace.items("recording")[0].id

    def fetch(what: str, more: str = "", head: str = HEAD) -> Any:
        request = lab_request(f"{address}api/look/{what}?recording={name}&{head}&{more}")
        with urllib.request.urlopen(request, timeout=60) as http_response:
            if http_response.headers["content-type"] != "application/octet-stream":
                return json.load(http_response)
            shape = [int(x) for x in http_response.headers["x-shape"].split(",")]
            return torch.from_numpy(numpy.frombuffer(http_response.read(), "<f4").copy()).view(shape)

    return fetch


@pytest.fixture
def observation(workspace):
    return workspace.recording(workspace.items("recording")[0].id)[1]


def post(address: str, path: str, **body: Any) -> dict[str, Any]:
    request = lab_request(address + path, json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as http_response:
        response: dict[str, Any] = json.load(http_response)
    return response


def test_tiles_rows_and_columns_are_the_weights(ask, observation):
    weights = observation.weights(2)
    torch.testing.assert_close(ask("tile", "level=0&x=0&y=0"), weights, rtol=0, atol=2e-6)
    torch.testing.assert_close(ask("row", "row=77"), weights[77], rtol=0, atol=2e-6)
    torch.testing.assert_close(ask("row", "row=30&direction=to"), weights[:, 30], rtol=0, atol=2e-6)


def test_the_steps_of_a_weight(ask, observation):
    response = ask("why", "row=77&key=40")
    call = observation.saved_calls[0]
    q, k = call.q[0, 2, 77].double(), call.k[0, 2 * call.k.shape[1] // call.q.shape[1], 40].double()
    assert response["product"] == pytest.approx(float(q @ k)) == pytest.approx(sum(response["contributions"]))
    assert (
        response["scaled"] == pytest.approx(response["product"] * response["scale"]) == pytest.approx(response["logit"])
    )
    weight = float(observation.weights(2, 77, 40)[0, 0])
    assert response["weight"] == pytest.approx(weight, rel=1e-5)
    assert numpy.exp(response["logit"] - response["lse"]) == pytest.approx(response["weight"], rel=1e-12)
    assert not response["hidden"] and response["lse"] == pytest.approx(float(observation.lse[0, 2, 77]), abs=1e-4)
    later = ask("why", "row=40&key=77")
    assert later["hidden"] and later["weight"] == 0 and later["hidden_as_trained"]
    without_mask = ask("why", "row=40&key=77&mask=false")
    assert not without_mask["hidden"] and without_mask["weight"] > 0 and without_mask["hidden_as_trained"]
    assert not response["hidden_as_trained"] and not ask("why", "row=77&key=40&mask=false")["hidden_as_trained"]


def test_variants_of_a_head(ask, observation):
    n = observation.n
    uniform = ask("row", "row=9&beta=0")
    torch.testing.assert_close(uniform, torch.cat([torch.full((10,), 0.1), torch.zeros(n - 10)]), rtol=0, atol=1e-6)
    torch.testing.assert_close(ask("row", "row=9&beta=0&mask=false"), torch.full((n,), 1 / n), rtol=0, atol=1e-6)
    hard = ask("row", "row=60&hard=true")
    assert hard.max() == 1 and int(hard.argmax()) == int(observation.peak_at[0, 2, 60])
    assert not torch.allclose(ask("row", "row=60&position=false"), observation.weights(2, 60)[0], atol=1e-3)
    response = ask("why", "row=60&key=3&hard=true")
    assert response["scale"] == "inf" and response["scaled"] is None and response["weight"] in (0, 1)


def test_a_heads_numbers_equal_the_tables(ask, observation):
    response = ask("head")
    for name in HEAD_COLUMNS:
        if name != "spread":
            assert response["numbers"][name] == pytest.approx(float(observation.mean(name)[2]))
    assert len(response["line"]) == response["positions"] == observation.n
    assert response["line"][50] == pytest.approx(float(observation.entropy[0, 2, 50]), abs=1e-5)
    radius = response["profile"]["radius"]
    assert response["profile"]["values"][radius - 1] == pytest.approx(
        float(observation.profile[2, radius - 1]), abs=1e-6
    )
    assert response["rows"] == observation.n and response["one_key"] == 1  # the first token sees only itself


@pytest.mark.parametrize("query", ["", "beta=0"])
def test_the_weight_beyond_the_profile(ask, observation, query):
    profile = ask("head", query)["profile"]
    n = observation.n
    weights = ask("tile", f"level=0&x=0&y=0&{query}").double()
    distances = (torch.arange(n)[:, None] - torch.arange(n)).abs()
    beyond = float(weights[distances > profile["radius"]].sum()) / n
    assert beyond > 0.01
    assert profile["total"] - sum(profile["shares"]) == pytest.approx(beyond, abs=1e-4)


def test_a_learned_sink_is_not_beyond_the_profile():
    torch.manual_seed(0)
    q = torch.randn(1, 1, 30, 4)
    sinks = torch.tensor([1.0])
    for observe in (Observe(profile=29, map=7), Observe(profile=29, key_mass=True)):
        _, observation = attention(q, q, q, mask=Causal(), sinks=sinks, observe=observe)
        profile = head_response(observation, 0, 0, as_trained="", on_text={})["profile"]
        assert sum(profile["shares"]) < 0.9
        assert profile["total"] == pytest.approx(sum(profile["shares"]), abs=1e-5)
    _, observation = attention(q, q, q, sinks=sinks, observe=Observe(profile=3))
    assert head_response(observation, 0, 0, as_trained="", on_text={})["profile"]["total"] is None


def test_types_are_those_that_reach_both_minimums(ask):
    response = ask("recording", head="")
    least = response["kind_least"]
    for head in response["kinds"]:
        labels = [
            name
            for name, score in head["score"].items()
            if score >= least["score"][name] and head["confidence"][name] >= least["confidence"]
        ]
        assert sorted(labels) == sorted(head["labels"])


VARIANTS = ["", "beta=0", "beta=2.5", "mask=false", "beta=0&mask=false", "hard=true", "position=false"]


def variant_observation(call: Any, query: str) -> Any:
    """The observation of head 2 of the layer under a switch, by the operator itself, from the recorded q and k."""
    options = dict(part.split("=") for part in query.split("&") if part)
    q, k = call.q[:, 2:3], call.k[:, 2 * call.k.shape[1] // call.q.shape[1]][:, None]
    if "position" in options:
        rotary = models.load(models.bundled()).get_submodule("decoder.blocks.1.attention").position
        q, k = (rotary(x.double(), position_ids=-torch.arange(x.shape[2])).to(x.dtype) for x in (q, k))
        # Recordings are stored in bfloat16, which has three digits.
        torch.testing.assert_close(rotary(q.float()), call.q[:, 2:3].float(), rtol=2e-2, atol=2e-2)
    scale = math.inf if "hard" in options else call.scores.scale * float(options.get("beta", 1))
    mask = None if "mask" in options else Causal()
    return attention(q, k, k, mask=mask, scale=scale, observe=Observe(profile=32))[1]


@pytest.mark.parametrize("query", VARIANTS)
def test_numbers_profile_and_entropy_follow_the_switches(ask, observation, query):
    response = ask("head", query)
    expected = variant_observation(observation.saved_calls[0], query)
    assert response["as_trained"] is None
    for name in ("entropy", "peak", "distance", "offset", "sink", "local"):
        assert response["numbers"][name] == pytest.approx(float(expected.mean(name)), rel=1e-3, abs=1e-4), name
    torch.testing.assert_close(torch.tensor(response["line"]), expected.entropy[0, 0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(torch.tensor(response["profile"]["values"]), expected.profile[0], rtol=1e-3, atol=1e-4)


def test_at_beta_0_the_entropy_is_the_logarithm_of_the_visible_keys(ask, observation):
    visible = torch.arange(1, observation.n + 1)
    torch.testing.assert_close(torch.tensor(ask("head", "beta=0")["line"]), visible.log(), rtol=1e-5, atol=1e-5)
    line = torch.tensor(ask("head", "beta=0&mask=false")["line"])
    torch.testing.assert_close(line, torch.full((observation.n,), math.log(observation.n)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("query", ["", "beta=0", "mask=false"])
def test_what_a_head_does_on_this_text(ask, workspace, query):
    """Against loops over the exact weights."""
    ids = workspace.recording(workspace.items("recording")[0].id).metadata["ids"]
    weights = ask("tile", f"level=0&x=0&y=0&{query}").double()
    masses: dict[str, list[float]] = {"previous": [], "induction": [], "duplicate": []}
    for i in range(len(ids)):
        copies = [j for j in range(i) if ids[j] == ids[i]]
        if i:
            masses["previous"].append(float(weights[i, i - 1]))
        if copies:
            masses["duplicate"].append(sum(float(weights[i, j]) for j in copies))
            masses["induction"].append(sum(float(weights[i, j + 1]) for j in copies))
    on_text = ask("head", query)["on_text"]
    for name, values in masses.items():
        assert on_text[name]["rows"] == len(values) > 0
        assert on_text[name]["value"] == pytest.approx(sum(values) / len(values), rel=1e-4, abs=1e-6)


def test_what_cannot_be_measured_is_said(workspace, address, tmp_path, monkeypatch, ask):
    torch.manual_seed(0)
    q = torch.randn(1, 1, 30, 4)
    _, seen = attention(q, q, q, mask=Causal(), observe=Observe(profile=4))
    Recording({"layer": [seen]}, tokens=list("abcdefghij" * 3)).save(tmp_path / "slight")
    item = workspace.open(tmp_path / "slight")
    try:
        request = lab_request(f"{address}api/look/head?recording={item.id}&place=0&head=0&beta=0")
        with urllib.request.urlopen(request) as answer:
            response = json.load(answer)
    finally:
        workspace.close_recording(item.id)
    assert "no q and k" in response["as_trained"] and "no q and k" in response["on_text"]["reason"]
    assert response["numbers"]["entropy"] == pytest.approx(float(seen.mean("entropy")))

    monkeypatch.setattr(changed_scores, "MAX_NATIVE_WEIGHTS", 100)
    monkeypatch.setattr(changed_scores, "MAX_REFERENCE_WEIGHTS", 100)
    assert "too long" in ask("head", "beta=0.25")["as_trained"]
    assert ask("head")["as_trained"] is None  # nothing was changed


def test_scores_of_one_text_only():
    """Cross-attention has no previous token; an encoder's tokens are those of the source."""
    metadata = {"tokens": ["a", "b", "a"], "ids": [7, 8, 9], "source": ["x", "y", "x"]}
    assert token_numbers(metadata, "decoder.blocks.0.cross", 3, 3) is None
    assert token_numbers(metadata, "decoder.blocks.0.attention", 3, 2) is None
    assert token_numbers(metadata, "encoder.blocks.0.attention", 3, 3).tolist() == [0, 1, 0]  # by its labels
    assert token_numbers(metadata, "decoder.blocks.0.attention", 3, 3).tolist() == [0, 1, 2]  # by its ids
    assert token_numbers({}, "decoder.blocks.0.attention", 3, 3) is None


@pytest.mark.parametrize("by", ["zero", "mean"])
def test_ablation_is_the_models_own_loss_and_probabilities(by):
    model = models.load(models.bundled())
    ids = torch.tensor([model.tokenizer.encode("The iterator returns the items of the iterator, one item at a time.")])
    heads = [("decoder.blocks.1.attention", 0), ("decoder.blocks.2.attention", 2)]
    position = ids.shape[1] // 2
    args = {"model": str(models.bundled()), "ids": ids[0].tolist(), "heads": heads, "by": by, "position": position}
    result = ablate(args, lambda *progress: None)

    with torch.no_grad():
        logits = {"before": model(ids).float()}
        with interp.ablate(model, heads, by=by, over=ids if by == "mean" else None):
            logits["after"] = model(ids).float()
    first = result["next"]["first"]
    assert first <= position < first + len(result["next"]["positions"])
    for name, expected in logits.items():
        losses = torch.nn.functional.cross_entropy(expected[0, :-1], ids[0, 1:], reduction="none")
        torch.testing.assert_close(torch.tensor(result["loss"][name]["tokens"]), losses, rtol=1e-4, atol=1e-5)
        assert result["loss"][name]["total"] == pytest.approx(float(losses.sum()), rel=1e-4)
        for at in (position, ids.shape[1] - 1):
            probabilities = expected[0, at].softmax(-1)
            rows = result["next"]["positions"][at - first]
            assert max(row[name] for row in rows) == pytest.approx(float(probabilities.max()), rel=1e-4)
            for row in rows:
                assert row[name] == pytest.approx(float(probabilities[row["id"]]), rel=1e-3, abs=1e-7)
                assert row["token"] == interp.label_tokens(model.tokenizer, ids=[row["id"]]).labels[0]


@pytest.mark.parametrize(
    ("what", "more", "head", "status"),
    [
        ("tile", "level=0&x=1&y=0", HEAD, 400),
        ("tile", "level=3&x=0&y=0", HEAD, 400),
        ("row", "row=143", HEAD, 400),
        ("why", "row=0&key=500", HEAD, 400),
        ("head", "", "place=9&head=0", 400),
        ("head", "", "place=0&head=9", 400),
        ("levels", "batch=7", HEAD, 404),
        ("head", "batch=7", HEAD, 404),
        ("head", "hard=maybe", HEAD, 422),
        ("row", "row=1.5", HEAD, 422),
        ("row", "row=1&direction=sideways", HEAD, 422),
        ("row", "row=1&row=2", HEAD, 422),
        ("tile", "level=0&x=0&y=0&beta=nan", HEAD, 422),
        ("tile", "level=0&x=0&y=0&beta=-1", HEAD, 422),
    ],
)
def test_indices_out_of_range_are_refused(ask, what, more, head, status):
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(what, more, head)
    assert refused.value.code == status and json.loads(refused.value.read())["error"]


def test_a_model_is_scored_once_at_a_time(workspace, address, tmp_path):
    # A copy without records: the types of the bundled model are known at once.
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        shutil.copy(models.bundled() / name, tmp_path / name)
    model = workspace.open(tmp_path)
    first, second = (post(address, "api/look/kinds", model=model.id) for _ in range(2))
    assert first["id"] == second["id"]
    workspace.jobs.cancel(first["id"])
    until = time.monotonic() + 60
    while workspace.jobs.get(first["id"]).state not in FINISHED:
        assert time.monotonic() < until
        time.sleep(0.01)
    third = post(address, "api/look/kinds", model=model.id)
    assert third["id"] != first["id"]
    workspace.jobs.cancel(third["id"])


@pytest.mark.parametrize(
    "body",
    [
        {"model": "bundled-model", "text": "  "},
        {"model": "nothing", "text": "a"},
        {"model": "bundled-model", "text": "a", "image": "data:text/html;base64,AAAA"},
        {"model": "bundled-model", "text": "a", "tokens": 0},
        {"model": "bundled-model", "text": "a" * 2_000_001},
    ],
)
def test_invalid_texts_are_refused(address, body):
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(address, "api/look", **body)
    assert refused.value.code in (400, 404, 422)


@pytest.mark.parametrize("layers", ["", "decoder.*"])
def test_saved_bytes_are_predicted(layers):
    """q and k of an encoder–decoder: self-attention of source and target, and cross-attention."""
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 300}
    more = {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, "relative_attention_num_buckets": 8}
    model = create({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], **sizes, **more}).eval()
    recording = watched(model, "eleven words", answer="seven", observe=Observe(keep=True), layers=layers or None)
    actual = [
        4 * (kept.q.numel() + kept.k.numel()) for calls in recording.calls.values() for kept in calls[0].saved_calls
    ]
    n, written = (len(model.tokenizer.encode(text)) for text in ("eleven words", "seven"))
    heads, size = saved_bytes(model, n, 1 + written, layers)  # an answer begins with a token of its own
    assert (heads, size) == (2 * len(actual), sum(actual))


def test_a_title_that_is_cut_says_so():
    assert _short_title(" one\ntwo  ") == "one two"
    assert _short_title("x" * 60) == "x" * 60
    assert _short_title("word " * 30) == "word " * 11 + "word…"


def test_a_recording_of_the_command_finds_its_model(workspace, tmp_path):
    options = {"tokens": None, "generate": None, "layers": None, "keep": True, "no_text": False}
    recording = observe_model(models.bundled(), "a b c a b c", None, **options)
    recording.save(tmp_path / "named")
    model = workspace.open(models.bundled())
    item = workspace.open(tmp_path / "named")
    response = recording_response(workspace, item, recording)
    assert response["model"] == model.id and response["no_model"] == "" and "model_files" not in response
    atlas = interp.atlas(models.load(models.bundled()))
    assert [head["labels"] for head in response["kinds"]] == [row["labels"] for row in atlas.rows]

    # The exported files have the same types, and the page starts with the selected head.
    page = export(workspace, ExportRequest(recording=item.id, place=2, head=1)).data.decode()
    assert '"selected":{"path":"decoder.blocks.2.attention","head":1}' in page and f"{model.title}: named" in page
    table = export(workspace, ExportRequest(recording=item.id, format="csv")).data.decode()
    rows = list(csv.DictReader(io.StringIO(table)))
    assert [row["labels"].split() for row in rows] == [row["labels"] for row in atlas.rows]
    workspace.close_recording(item.id)

    # A recording of a model in memory has no types and no model, and the page says why.
    del recording.metadata["model_files"]
    recording.save(tmp_path / "unnamed")
    item = workspace.open(tmp_path / "unnamed")
    response = recording_response(workspace, item, recording)
    assert response["model"] is None and response["kinds"] is None and "regard look" in response["no_model"]
    # Types that the recording itself has are shown.
    recording.metadata["kinds"] = types_metadata(atlas)
    response = recording_response(workspace, item, recording)
    assert [head["labels"] for head in response["kinds"]] == [row["labels"] for row in atlas.rows]
    assert response["kind_source"] == atlas.source and response["kind_counts"] == atlas.counts
    workspace.close_recording(item.id)


def test_labels_of_another_text_are_not_shown(workspace, tmp_path):
    recording = interp.look(models.load(models.bundled()), "a b c a b c")
    recording.save(tmp_path / "labels")
    item = workspace.open(tmp_path / "labels")
    recording.metadata["tokens"] = list("abcdefghijk")
    response = recording_response(workspace, item, recording)
    assert "11 labels" in response["label_problem"] and response["texts"] == []
    workspace.close_recording(item.id)
