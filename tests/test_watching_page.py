"""The page of a recording: its numbers are those that were seen, words stay words, and it does what it says."""

from __future__ import annotations

import base64
import json
import math
import re
from importlib import resources
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from regard import Observe, watch
from regard.nn import Decoder, Encoder, EncoderDecoder
from regard.watching import Seen, page
from regard.watching.page import html

HOSTILE = ["</script><img src=x onerror=alert(1)>", "<!--", "{{script}}", "\ud800", '"\\', "&lt;b&gt;", "</SCRIPT >"]


def data_of(text: str) -> dict[str, Any]:
    """What a page holds."""
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, flags=re.DOTALL)
    return json.loads(found)


def codes(packed: dict[str, Any]) -> numpy.ndarray:
    kind = f"<u{packed['bits'] // 8}"
    return numpy.frombuffer(base64.b64decode(packed["data"]), kind).reshape(packed["shape"])


def unpacked(packed: dict[str, Any]) -> Tensor:
    share = torch.tensor(codes(packed).astype("float64")) / (2 ** packed["bits"] - 1)
    scale = torch.tensor(packed["scale"], dtype=torch.float64)
    return share ** packed["power"] * scale.reshape(-1, *[1] * (share.ndim - 1))


def decoder(observe: Observe, n: int = 29, batch: int = 2, **given: Any) -> Seen:
    torch.manual_seed(0)
    model = Decoder(12, heads=3, layers=2, vocab=37).eval()
    with torch.no_grad():
        for block in model.blocks:
            block.attention.q_proj.weight.mul_(9)  # heads that choose; random ones hardly do
        with watch(model, observe) as seen:
            model(torch.randint(37, (batch, n)), **given)
    return seen


# --- without a browser ------------------------------------------------------------------------------------------------


def test_a_usual_page_is_small() -> None:
    model = Encoder(48, heads=12, layers=12).eval()
    with torch.no_grad(), watch(model, Observe(map=64, top=8, profile=32, key_mass=True)) as seen:
        model(torch.randn(1, 512, 48))
    seen.about["tokens"] = [" token"] * 512
    text = html(seen)
    assert len(text.encode()) < 5_000_000
    assert len(data_of(text)["places"]) == 12


def test_numbers_are_those_that_were_seen() -> None:
    n, batch = 29, 1
    seen = decoder(Observe(map=8, top=5, profile=4, sink=2), n, padding=[29, 23])
    places = data_of(html(seen, batch=batch))["places"]
    assert [place["path"] for place in places] == list(seen) and [place["name"] for place in places] == ["0", "1"]
    for place in places:
        observation = seen[place["path"]]
        share = unpacked(place["share"])
        map_ = unpacked(place["map"])
        assert map_.shape == (3, 8, 8) and share.shape == (3, 8, 1)
        largest = torch.tensor(place["map"]["scale"])[:, None, None]
        map_[..., :1] += share
        assert ((map_ - observation.map).abs() <= largest / 255 + 1e-5).all()
        assert (unpacked(place["top"]) - observation.top[batch]).abs().max() < 1e-5
        at = codes(place["at"]).astype("int64")
        assert (numpy.where(at == 65535, -1, at) == observation.top_at[batch].numpy()).all()
        assert (unpacked(place["sinks"]) - observation.sink[batch]).abs().max() < 1e-5
        assert (unpacked(place["line"]) - observation.entropy[batch])[:, :23].abs().max() < 1e-4
        assert (unpacked(place["profile"]) - observation.profile).abs().max() < 1e-4
        counted = numpy.unpackbits(codes(place["counted"]), axis=-1)[:, :n].astype(bool)
        assert counted.shape == (1, n) and (counted[0] == observation.counted[batch, 0].numpy()).all()
        heads = [row for row in seen.heads() if row["path"] == place["path"]]
        assert place["numbers"] == [[row[name] for name in page.table.COLUMNS] for row in heads]


def test_a_map_finer_than_the_text_has_no_empty_bins() -> None:
    seen = decoder(Observe(map=64, top=2), 7, 1)
    observation = seen["blocks.0.attention"]
    place = data_of(html(seen))["places"][0]
    map_ = unpacked(place["map"])
    map_[..., :1] += unpacked(place["share"])
    bins = torch.arange(7) * 64 // 7
    assert map_.shape == (3, 7, 7)
    assert (map_ - observation.map[:, bins][..., bins]).abs().max() < 1 / 255
    assert map_.sum(-1) == pytest.approx(numpy.ones((3, 7)), abs=0.02)


def test_hostile_words_stay_words() -> None:
    seen = decoder(Observe(map=4, top=2), 7, 1)
    seen.about |= {"tokens": HOSTILE, "model": HOSTILE[0], "image": "javascript:alert(1)", "grid": "all"}
    seen.calls = {f"{path}{HOSTILE[0]}": calls for path, calls in seen.calls.items()}
    text = html(seen)
    text.encode()  # half a character does not stop a file from being written
    plain = html(decoder(Observe(map=4, top=2), 7, 1))
    for tag in ("<img", "<script", "</script", "<!--"):
        assert text.lower().count(tag) == plain.lower().count(tag)
    found = data_of(text)
    assert found["texts"] == [HOSTILE] and found["model"] == HOSTILE[0]
    assert found["image"] is None and found["places"][0]["grid"] is None


def test_the_page_asks_nobody() -> None:
    text = html(decoder(Observe(), 5, 1))
    assert "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:" in text
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\b(innerHTML|outerHTML|insertAdjacentHTML|eval|fetch|XMLHttpRequest|import)\b", text)
    static = resources.files("regard.watching").joinpath("static")
    assert {"page.html", "page.css", *page.SCRIPTS} == {file.name for file in static.iterdir()}


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"^nothing was seen, so there is nothing to show$"):
        html(Seen())
    seen = decoder(Observe(), 5)
    with pytest.raises(ValueError, match=r"^batch is 2; what was seen has batch entries 0 … 1$"):
        html(seen, batch=2)
    with pytest.raises(ValueError, match="batch must be at least 0, got -1"):
        html(seen, batch=-1)


def test_what_was_not_observed_is_left_out() -> None:
    place = data_of(html(decoder(Observe(), 5)))["places"][0]
    assert [place[name] for name in ("map", "share", "profile", "top", "at")] == [None] * 5
    assert place["line"] is not None
    steps = Seen({"a": [decoder(Observe(map=4, top=2), 5)["blocks.0.attention"]]})
    unequal = Seen({"a": [*steps.calls["a"], decoder(Observe(map=4, top=2), 7)["blocks.0.attention"]]})
    place = data_of(html(unequal))["places"][0]
    assert place["map"] is not None and place["n"] is None and place["numbers"][0] == [None] * 7
    assert [place[name] for name in ("share", "line", "top", "queries")] == [None] * 4


def test_chosen_heads_keep_their_numbers() -> None:
    seen = decoder(Observe(map=4, heads=(2, 0)), 5)
    assert [place["heads"] for place in data_of(html(seen))["places"]] == [[2, 0], [2, 0]]


def test_a_generation_has_lists_and_no_map() -> None:
    torch.manual_seed(0)
    model = Decoder(12, heads=3, layers=2, vocab=37).eval()
    cache = model.new_cache()
    with torch.no_grad(), watch(model, Observe(map=4, top=2)) as seen:
        for n in (5, 1, 1):
            model(torch.randint(37, (1, n)), cache=cache)
    seen.about["tokens"] = [str(i) for i in range(8)]
    found = data_of(html(seen))
    place = found["places"][0]
    assert place["map"] is None and codes(place["at"]).shape == (3, 7, 2) and place["n"] == 7
    assert found["texts"] == [[str(i) for i in range(7)]]


def test_a_long_text_keeps_the_lists_of_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = decoder(Observe(top=2), 101, 1)
    monkeypatch.setattr(page, "LARGEST", 3000)
    place = data_of(html(seen))["places"][1]
    first = place["first"]
    assert 0 < first < 101
    assert (codes(place["at"]) == seen["blocks.1.attention"].top_at[0, :, first:].numpy() % 65536).all()
    lists = 2 * sum(codes(place[name]).nbytes for name in ("top", "at", "sinks"))
    lines = 2 * codes(place["line"]).nbytes
    assert lists + lines <= 3000 < (lists + 2 * 3 * 10) + lines  # one more row would not fit


def test_maps_that_are_too_large_are_pooled_further(monkeypatch: pytest.MonkeyPatch) -> None:
    fine, coarse = decoder(Observe(map=12), padding=[29, 23]), decoder(Observe(map=6), padding=[29, 23])
    monkeypatch.setattr(page, "MAPS", 300)
    for place, right in zip(data_of(html(fine))["places"], coarse.values(), strict=True):
        map_ = unpacked(place["map"])
        map_[..., :1] += unpacked(place["share"])
        assert map_.shape == (3, 6, 6) and (map_ - right.map).abs().max() < 1 / 255


# --- in a browser -----------------------------------------------------------------------------------------------------


@pytest.fixture
def show(show_page: Any) -> Any:
    """Opens what was seen."""

    def opened(seen: Seen, width: int = 1280, **given: Any) -> Any:
        return show_page(html(seen, **given), width)

    return opened


def shaded(tab: Any, block: int = 0) -> dict[int, float]:
    """Token → its shade, which is the root of its weight."""
    script = """block => Array.from(document.querySelectorAll(".block")[block].querySelectorAll(".token"))
        .map(x => [x.dataset.at, x.style.getPropertyValue("--weight")]).filter(x => x[1])"""
    return {int(at): float(weight) ** 2 for at, weight in tab.evaluate(script, block)}


def heaviest(observation: Any, head: int, row: int, batch: int = 0) -> dict[int, float]:
    at, top = observation.top_at[batch, head, row].tolist(), observation.top[batch, head, row].tolist()
    return {key: weight for key, weight in zip(at, top, strict=True) if key >= 0 and weight > 1e-5}


def test_heads_are_picked_by_click_and_by_keyboard(show: Any) -> None:
    tab = show(decoder(Observe(map=8, top=3, profile=4)))
    name = tab.locator("#name")
    assert name.inner_text() == "blocks.0.attention, head 0"
    assert tab.locator("#sizes").inner_text() == "2 places × 3 heads, 29 tokens"
    tab.locator(".head").nth(4).click()
    assert name.inner_text() == "blocks.1.attention, head 1"
    for key in ("ArrowRight", "ArrowUp", "Enter"):
        tab.keyboard.press(key)
    assert name.inner_text() == "blocks.0.attention, head 2"
    assert tab.locator(".head[aria-pressed=true]").count() == 1 == tab.locator(".head[tabindex='0']").count()
    assert "entropy" in tab.locator(".head").nth(2).get_attribute("aria-label")
    tab.locator("#find").fill("1.attention, head 2")
    assert tab.locator(".head").count() == 1


def test_heads_are_sorted(show: Any) -> None:
    seen = decoder(Observe(map=8))
    tab = show(seen)
    tab.locator("#sort").select_option("entropy")
    right = sorted(seen.heads(), key=lambda row: -row["entropy"])
    shown = [text.split("\n")[0] for text in tab.locator(".head").all_inner_texts()]
    assert shown == [f"{row['path'].split('.')[1]} · {row['head']}" for row in right]
    tab.locator("#order").click()
    assert [text.split("\n")[0] for text in tab.locator(".head").all_inner_texts()] == shown[::-1]
    tab.locator("#sort").select_option("")
    assert tab.locator(".row").count() == 3


def test_a_token_shades_the_keys_it_looks_at(show: Any) -> None:
    seen = decoder(Observe(map=8, top=4))
    seen.about["tokens"] = [f" w{i}" for i in range(28)] + [HOSTILE[0]]
    observation = seen["blocks.0.attention"]
    tab = show(seen, batch=1)
    tokens = tab.locator(".token")
    assert tokens.nth(3).inner_text() == "w3" and tokens.nth(28).inner_text() == HOSTILE[0]
    tokens.nth(17).hover()
    assert shaded(tab) == pytest.approx(heaviest(observation, 0, 17, 1), abs=1e-3)
    listed = tab.locator("#list li span").all_inner_texts()
    assert [float(x) for x in listed] == pytest.approx(observation.top[1, 0, 17].tolist(), abs=1e-3)
    tokens.nth(9).click()
    tab.mouse.move(1, 1)
    assert shaded(tab) == pytest.approx(heaviest(observation, 0, 9, 1), abs=1e-3)
    tokens.nth(20).hover()  # a token that was clicked is kept
    assert shaded(tab) == pytest.approx(heaviest(observation, 0, 9, 1), abs=1e-3)
    tab.locator(".head").nth(1).click()
    assert shaded(tab) == pytest.approx(heaviest(observation, 1, 9, 1), abs=1e-3)
    tab.keyboard.press("Escape")
    assert shaded(tab) == {} and tab.locator(".locked").count() == 0
    tab.locator("input[value=to]").check()
    tokens.nth(2).click()
    lookers = {row: heaviest(observation, 1, row, 1).get(2) for row in range(29)}
    assert shaded(tab) == pytest.approx({row: w for row, w in lookers.items() if w}, abs=1e-3)


def test_cross_attention_has_two_texts(show: Any) -> None:
    torch.manual_seed(0)
    model = EncoderDecoder(12, heads=3, layers=1, vocab=37).eval()
    with torch.no_grad(), watch(model, Observe(map=8, top=3)) as seen:
        model(torch.randint(37, (1, 11)), torch.randint(37, (1, 7)))
    seen.about |= {"source": [f"s{i}" for i in range(11)], "tokens": [f"t{i}" for i in range(7)]}
    path = next(path for path in seen if "cross" in path)
    tab = show(seen, 390)
    tab.locator(".head").nth(3 * list(seen).index(path)).click()
    assert tab.locator(".block h4").all_inner_texts() == ["queries", "keys"]
    tab.locator(".block").nth(0).locator(".token").nth(5).click()
    assert shaded(tab, 1) == pytest.approx(heaviest(seen[path], 0, 5), abs=1e-3) and shaded(tab, 0) == {}
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_tap_on_a_phone_is_where_the_finger_was(show: Any) -> None:
    """What the answer says must not move the text below it."""
    tab = show(decoder(Observe(map=8, top=8)), 390)
    token, top = tab.locator(".token").nth(20), "e => e.getBoundingClientRect().top + scrollY"
    before = token.evaluate(top)
    token.click()
    assert token.evaluate(top) == before and tab.locator("#strongest-of").inner_text() == "20 looks at"


def test_patches_stand_on_their_picture(show: Any) -> None:
    torch.manual_seed(0)
    model = Encoder(12, heads=3, layers=1).eval()
    with torch.no_grad(), watch(model, Observe(map=8, top=3, profile=2, grid=(3, 5))) as seen:
        model(torch.randn(1, 16, 12))
    pixel = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    seen.about |= {"grid": [3, 5], "image": f"data:image/png;base64,{pixel}"}
    tab = show(seen)
    assert tab.locator(".patches .token").count() == 15 and tab.locator(".text .token").count() == 1
    tab.locator(".patches .token").nth(7).hover()
    assert tab.locator("#strongest-of").inner_text() == "patch 1, 2 looks at"
    right = heaviest(seen["blocks.0.attention"], 0, 8)
    most = max(right.values())
    assert shaded(tab) == pytest.approx({at: weight / most for at, weight in right.items()}, abs=1e-2)


@pytest.mark.parametrize(("g", "sink"), [(8, 1), (8, 9), (64, 3)])
def test_hidden_sinks(show: Any, g: int, sink: int) -> None:
    """From the exact weights: the first keys are taken out, and what is left is shared anew."""
    n = 29
    seen = decoder(Observe(map=g, top=5, sink=sink, keep=True), n, 1)
    observation = seen["blocks.1.attention"]
    A = observation.weights(2).double()
    bins = min(g, n)
    rows, keys = torch.arange(n) * bins // n, torch.arange(n) * bins // n
    mean = torch.zeros(bins, n, dtype=torch.float64).index_add_(0, rows, A) / rows.bincount()[:, None]
    pooled = torch.zeros(bins, bins, dtype=torch.float64)
    full = pooled.clone().index_add_(1, keys, mean)
    taken = mean[:, :sink].sum(1)
    rest = pooled.clone().index_add_(1, keys[sink:], mean[:, sink:]) / (1 - taken)[:, None]
    rest[1 - taken < 1e-3] = math.nan

    tab = show(seen)
    last = int(keys[sink - 1])
    script = "([map, sinks, size, last]) => Array.from(withoutSinks(map, sinks, size, size, last))"
    exact = tab.evaluate(script, [full.flatten().tolist(), taken.tolist(), bins, last])
    shown = tab.evaluate("Array.from(headMap(data.places[1], 2, true).map)")
    for found, bound in ((exact, 1e-5), (shown, 2e-2)):
        got = torch.tensor(found, dtype=torch.float64).reshape(bins, bins)
        assert torch.equal(got.isnan(), rest.isnan())
        assert (got - rest).nan_to_num().abs().max() < bound

    tab.locator(".head").nth(5).click()
    before = tab.locator("#map").evaluate("x => x.toDataURL()")
    tab.locator("#hide").check()
    assert tab.locator("#map").evaluate("x => x.toDataURL()") != before
    tab.locator(".token").nth(20).hover()
    left = 1 - float(A[20, :sink].sum())
    right = {at: weight / left for at, weight in heaviest(observation, 2, 20).items() if at >= sink}
    assert shaded(tab) == pytest.approx(right, abs=1e-3)


def test_rows_that_do_not_count_are_grey_and_missing_lists_are_said(show: Any) -> None:
    tab = show(decoder(Observe(map=8, top=2), padding=[29, 23]), batch=1)
    assert tab.locator(".not-counted").count() == 6
    bare = show(decoder(Observe()))
    assert "Observe(top=8)" in bare.locator("#notes").inner_text() and bare.locator(".token").count() == 0
    assert bare.locator("#map-frame").is_hidden()


def until(tab: Any, script: str) -> None:
    """Playwright's own wait evaluates text within the page, which its policy forbids."""
    for _ in range(100):
        if tab.evaluate(script):
            return
        tab.wait_for_timeout(50)
    raise AssertionError(f"never came true: {script}")


def test_many_heads_are_drawn_as_they_come_into_view(show: Any) -> None:
    model = Encoder(42, heads=42, layers=10).eval()
    with torch.no_grad(), watch(model, Observe(map=4)) as seen:
        model(torch.randn(1, 5, 42))
    tab = show(seen, 390)
    until(tab, "heads[0].drawn")
    assert not tab.evaluate("heads.every(made => made.drawn)")
    tab.locator(".head").last.scroll_into_view_if_needed()
    until(tab, "heads.at(-1).drawn")
