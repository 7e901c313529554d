"""What the room Look answers: each number against the operator's own."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from typing import Any

import numpy
import pytest
import torch

from regard import Observe
from regard.lab.jobs import ENDED
from regard.lab.look_jobs import kept_bytes
from regard.models import create
from regard.watching import look as watched
from regard.watching.table import COLUMNS

HEAD = "place=1&head=2"


@pytest.fixture
def ask(lab, address):
    """``ask("why", "row=5&key=3")`` of the sample's recording; numbers as a tensor, the rest as data."""
    name = lab.all("recording")[0].id

    def asked(what: str, more: str = "", head: str = HEAD) -> Any:
        with urllib.request.urlopen(f"{address}api/look/{what}?recording={name}&{head}&{more}", timeout=60) as answer:
            if answer.headers["content-type"] != "application/octet-stream":
                return json.load(answer)
            shape = [int(x) for x in answer.headers["x-shape"].split(",")]
            return torch.from_numpy(numpy.frombuffer(answer.read(), "<f4").copy()).view(shape)

    return asked


@pytest.fixture
def seen(lab):
    return lab.seen(lab.all("recording")[0].id)[1]


def posted(address: str, path: str, **body: Any) -> dict[str, Any]:
    request = urllib.request.Request(address + path, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        told: dict[str, Any] = json.load(answer)
    return told


def test_tiles_rows_and_columns_are_the_weights(ask, seen):
    weights = seen.weights(2)
    torch.testing.assert_close(ask("tile", "level=0&x=0&y=0"), weights, rtol=0, atol=2e-6)
    torch.testing.assert_close(ask("row", "row=77"), weights[77], rtol=0, atol=2e-6)
    torch.testing.assert_close(ask("row", "row=30&direction=to"), weights[:, 30], rtol=0, atol=2e-6)


def test_why_is_the_operators_chain(ask, seen):
    found = ask("why", "row=77&key=40")
    call = seen.kept[0]
    q, k = call.q[0, 2, 77].double(), call.k[0, 2 * call.k.shape[1] // call.q.shape[1], 40].double()
    assert found["product"] == pytest.approx(float(q @ k)) == pytest.approx(sum(found["contributions"]))
    assert found["scaled"] == pytest.approx(found["product"] * found["scale"]) == pytest.approx(found["logit"])
    weight = float(seen.weights(2, 77, 40)[0, 0])
    assert found["weight"] == pytest.approx(weight, abs=1e-9)
    assert numpy.exp(found["logit"] - found["lse"]) == pytest.approx(weight, rel=1e-4)
    assert not found["hidden"] and found["lse"] == pytest.approx(float(seen.lse[0, 2, 77]), abs=1e-4)
    later = ask("why", "row=40&key=77")
    assert later["hidden"] and later["weight"] == 0


def test_changes_are_what_they_say(ask, seen):
    n = seen.n
    uniform = ask("row", "row=9&beta=0")
    torch.testing.assert_close(uniform, torch.cat([torch.full((10,), 0.1), torch.zeros(n - 10)]), rtol=0, atol=1e-6)
    torch.testing.assert_close(ask("row", "row=9&beta=0&mask=false"), torch.full((n,), 1 / n), rtol=0, atol=1e-6)
    hard = ask("row", "row=60&hard=true")
    assert hard.max() == 1 and int(hard.argmax()) == int(seen.peak_at[0, 2, 60])
    assert not torch.allclose(ask("row", "row=60&position=false"), seen.weights(2, 60)[0], atol=1e-3)
    told = ask("why", "row=60&key=3&hard=true")
    assert told["scale"] == "inf" and told["scaled"] is None and told["weight"] in (0, 1)


def test_a_heads_numbers_are_the_tables(ask, seen):
    found = ask("head")
    for name in COLUMNS:
        if name != "spread":
            assert found["numbers"][name] == pytest.approx(float(seen.mean(name)[2]))
    assert len(found["line"]) == found["positions"] == seen.n
    assert found["line"][50] == pytest.approx(float(seen.entropy[0, 2, 50]), abs=1e-5)
    radius = found["profile"]["radius"]
    assert found["profile"]["values"][radius - 1] == pytest.approx(float(seen.profile[2, radius - 1]), abs=1e-6)


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
        ("head", "batch=7", HEAD, 400),
        ("row", "row=1.5", HEAD, 422),
        ("row", "row=1&direction=sideways", HEAD, 422),
        ("row", "row=1&row=2", HEAD, 422),
        ("tile", "level=0&x=0&y=0&beta=nan", HEAD, 422),
        ("tile", "level=0&x=0&y=0&beta=-1", HEAD, 422),
    ],
)
def test_what_is_not_there_is_refused(ask, what, more, head, status):
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(what, more, head)
    assert refused.value.code == status and json.loads(refused.value.read())["error"]


def test_one_scoring_of_a_model_is_enough(lab, address):
    first, second = (posted(address, "api/look/kinds", model="bundled-model") for _ in range(2))
    assert first["id"] == second["id"]
    lab.jobs.cancel(first["id"])
    until = time.monotonic() + 60
    while lab.jobs.get(first["id"]).state not in ENDED:
        assert time.monotonic() < until
        time.sleep(0.01)
    third = posted(address, "api/look/kinds", model="bundled-model")
    assert third["id"] != first["id"]
    lab.jobs.cancel(third["id"])


@pytest.mark.parametrize(
    "asked",
    [
        {"model": "bundled-model", "text": "  "},
        {"model": "nothing", "text": "a"},
        {"model": "bundled-model", "text": "a", "image": "data:text/html;base64,AAAA"},
        {"model": "bundled-model", "text": "a", "tokens": 0},
        {"model": "bundled-model", "text": "a" * 2_000_001},
    ],
)
def test_texts_that_cannot_be_read_are_refused(address, asked):
    with pytest.raises(urllib.error.HTTPError) as refused:
        posted(address, "api/look", **asked)
    assert refused.value.code in (400, 404, 422)


@pytest.mark.parametrize("layers", ["", "decoder.*"])
def test_what_will_be_kept_is_known_before(layers):
    """q and k of an encoder–decoder: its text, its answer, and both across."""
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 300}
    more = {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, "relative_attention_num_buckets": 8}
    model = create({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], **sizes, **more}).eval()
    seen = watched(model, "eleven words", answer="seven", observe=Observe(keep=True), layers=layers or None)
    real = [4 * (kept.q.numel() + kept.k.numel()) for calls in seen.calls.values() for kept in calls[0].kept]
    n, written = (len(model.text.encode(text)) for text in ("eleven words", "seven"))
    heads, size = kept_bytes(model, n, 1 + written, layers)  # an answer begins with a token of its own
    assert (heads, size) == (2 * len(real), sum(real))
