"""The page of a recording: its numbers are those that were seen, words stay words, and it does what it says."""

from __future__ import annotations

import json
import math
import re
import zlib
from dataclasses import replace
from importlib import resources
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from regard import Observe, attention, watch
from regard._errors import RegardError
from regard.interp import Recording, figures
from regard.interp import _html_page as page
from regard.interp._html_page import html_page
from regard.interp._page_arrays import base91, encode_keys, encode_numbers, encode_weights
from regard.interp._page_types import types_metadata
from regard.nn import Decoder, Encoder, EncoderDecoder

HOSTILE = ["</script><img src=x onerror=alert(1)>", "<!--", "{{script}}", "\ud800", '"\\', "&lt;b&gt;", "</SCRIPT >"]


ALPHABET = "".join(chr(code) for code in range(32, 127) if chr(code) not in '<&"\\')


def from_base91(text: str, length: int) -> bytes:
    """The bytes of a page's block: two characters are 13 bits, the low bits first."""
    digits = numpy.array([ALPHABET.find(chr(code)) for code in range(128)])[numpy.frombuffer(text.encode(), "u1")]
    numbers = digits[::2] + 91 * digits[1::2]
    bits = (numbers[:, None] >> numpy.arange(13)) & 1
    return numpy.packbits(bits.astype("u1").ravel(), bitorder="little").tobytes()[:length]


def data_of_json(text: str) -> dict[str, Any]:
    """What a page holds, without its arrays."""
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, flags=re.DOTALL)
    return json.loads(found)


def data_of(text: str) -> dict[str, Any]:
    """What a page holds; every array has its codes."""
    (arrays,) = re.findall(r'<script type="text/plain" id="arrays">(.*?)</script>', text, flags=re.DOTALL)
    data = data_of_json(text)
    block = zlib.decompress(from_base91(arrays, data["bytes"]))
    for place in data["places"]:
        for packed in place.values():
            if not isinstance(packed, dict) or "bits" not in packed:
                continue
            size = 1 if packed["bits"] <= 8 else 2 if packed["bits"] <= 16 else 4
            count = math.prod(packed["shape"])
            planes = numpy.frombuffer(block, "u1", size * count, packed["start"]).reshape(size, count)
            packed["codes"] = planes.T.copy().view(f"<u{size}").reshape(packed["shape"])
    return data


def codes(packed: dict[str, Any]) -> numpy.ndarray:
    return packed["codes"]


def unpacked(packed: dict[str, Any]) -> Tensor:
    share = torch.tensor(codes(packed).astype("float64")) / (2 ** packed["bits"] - 1)
    scale = torch.tensor(packed["scale"], dtype=torch.float64)
    return share ** packed["power"] * scale.reshape(-1, *[1] * (share.ndim - 1))


def unpacked_lists(place: dict[str, Any]) -> list[list[dict[int, float]]]:
    """Head → row with a list → {key: weight}."""
    weights = unpacked(place["top"])
    heads, k, rows = weights.shape
    distances = codes(place["list_keys"]).astype("int64")
    lists: list[list[dict[int, float]]] = []
    rests = unpacked(place["rest"]).tolist()
    listed = weights.tolist()
    for head in range(heads):
        lists.append([])
        for row in range(rows):
            key, entries = place["first"] + row, {}
            for slot in range(k):
                key = (key - int(distances[head, slot, row])) % 2 ** place["list_keys"]["bits"]
                if listed[head][slot][row] > 0:
                    entries[key] = listed[head][slot][row]
            rest = rests[head][row]
            if place["sink"] == 1 and len(entries) < k and rest < 1:
                entries[0] = 1 - rest
            lists[-1].append(entries)
    return lists


def decoder(observe: Observe, n: int = 29, batch: int = 2, **given: Any) -> Recording:
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
    seen.metadata["tokens"] = [" token"] * 512
    text = html_page(seen)
    assert len(text.encode()) < 5_000_000
    assert len(data_of(text)["places"]) == 12


def test_numbers_are_those_that_were_seen() -> None:
    n, batch = 29, 1
    seen = decoder(Observe(map=8, top=5, profile=4, sink=2), n, padding=[29, 23])
    places = data_of(html_page(seen, batch=batch))["places"]
    assert [place["path"] for place in places] == list(seen) and [place["name"] for place in places] == ["0", "1"]
    for place in places:
        observation = seen[place["path"]]
        share = unpacked(place["share"])
        map_ = unpacked(place["map"])
        assert map_.shape == (3, 8, 8) and share.shape == (3, 8, 1)
        # Stored per key, without the first two keys.
        other_keys = (torch.arange(2, n) * 8 // n).bincount()
        largest = torch.tensor(place["map"]["scale"])[:, None, None]
        map_ *= other_keys
        map_[..., :1] += share
        assert ((map_ - observation.map).abs() <= other_keys * largest / 255 + 1e-5).all()
        check_lists(place, observation, batch)
        rest = unpacked(place["rest"])
        assert (((1 - rest) - observation.sink[batch]).abs() <= rest.sqrt() / 1023 + 1e-6).all()
        largest = torch.tensor(place["line"]["scale"])[:, None]
        assert ((unpacked(place["line"]) - observation.entropy[batch]).abs() <= largest / 1023)[:, :23].all()
        assert (unpacked(place["profile"]) - observation.profile).abs().max() < 1e-4
        counted = numpy.unpackbits(codes(place["counted"]), axis=-1)[:, :n].astype(bool)
        assert counted.shape == (1, n) and (counted[0] == observation.counted[batch, 0].numpy()).all()
        heads = [row for row in seen.heads() if row["path"] == place["path"]]
        assert place["numbers"] == [[row[name] for name in page._head_table.HEAD_COLUMNS] for row in heads]


def check_lists(place: dict[str, Any], observation: Any, batch: int) -> None:
    """The keys are exact, and the weights within the error that the page states."""
    bits = place["top"]["bits"]
    for head, rows in enumerate(unpacked_lists(place)):
        for row, entries in enumerate(rows):
            right = heaviest(observation, head, place["first"] + row, batch)
            # The weight of a single first key may be less than its error; then it is not listed.
            assert set(entries) | {0} == set(right) | {0}
            for key in set(right) | set(entries):
                weight = right.get(key, 0.0)
                error = max(weight, 1 - weight) ** 0.5 / (2**bits - 1) + 2 / 4**bits
                assert abs(entries.get(key, 0.0) - weight) <= error


@pytest.mark.parametrize("sink", [1, 2])
@pytest.mark.parametrize("is_small", [False, True])
def test_lists_are_within_the_stated_error(monkeypatch: pytest.MonkeyPatch, sink: int, is_small: bool) -> None:
    """With few bytes weights lose bits before rows lose their lists; keys never change."""
    seen = decoder(Observe(top=8, sink=sink), 307, 1)
    if is_small:
        monkeypatch.setattr(page, "MOST_BYTES", len(html_page(seen)) - 4000)
    places = data_of(html_page(seen))["places"]
    for place in places:
        check_lists(place, seen[place["path"]], 0)
    assert (places[0]["top"]["bits"] < 10) == is_small


def test_keys_on_both_sides_and_far_away() -> None:
    """Without a mask a query also attends to later keys; beyond 65,535 keys a key takes 32 bits."""
    torch.manual_seed(0)
    top_at = torch.stack([torch.randperm(99_991)[:5] for _ in range(6)]).reshape(2, 3, 5)
    top_at[0, 1, 3:] = -1
    top = torch.rand(2, 3, 5).where(top_at >= 0, 0)
    for shift, limit in ((0, 99_991), (2, 30_000)):
        keys = (top_at >> shift).where(top_at >= 0, -1)
        encoded = encode_keys(top, keys, first_query=17, largest_index=limit, first_key_is_known=False)
        assert encoded["bits"] == (16 if limit < 2**16 else 32)
        place = {"first": 17, "sink": 2, "list_keys": encoded, "top": encode_weights(encoded["weights"], 10)}
        place["rest"] = encode_numbers(torch.ones(2, 3), 10)
        for head, rows in enumerate(unpacked_lists(place)):
            for row, entries in enumerate(rows):
                assert set(entries) == {key for key in keys[head, row].tolist() if key >= 0}


def test_a_map_finer_than_the_text_has_no_empty_bins() -> None:
    seen = decoder(Observe(map=64, top=2), 7, 1)
    observation = seen["blocks.0.attention"]
    place = data_of(html_page(seen))["places"][0]
    map_ = unpacked(place["map"])
    map_[..., :1] += unpacked(place["share"])
    bins = torch.arange(7) * 64 // 7
    assert map_.shape == (3, 7, 7)
    assert (map_ - observation.map[:, bins][..., bins]).abs().max() < 1 / 255
    assert map_.sum(-1) == pytest.approx(numpy.ones((3, 7)), abs=0.02)


def test_text_of_bytes() -> None:
    for length in (0, 1, 12, 13, 14, 1000):
        data = torch.randint(256, (length,), generator=torch.Generator().manual_seed(length)).numpy().astype("u1")
        text = base91(data.tobytes())
        assert from_base91(text, length) == data.tobytes() and not set(text) & set('<&"\\')


def test_hostile_words_stay_words() -> None:
    seen = decoder(Observe(map=4, top=2), 7, 1)
    seen.metadata |= {"tokens": HOSTILE, "model": HOSTILE[0], "image": "javascript:alert(1)", "grid": "all"}
    seen.calls = {f"{path}{HOSTILE[0]}": calls for path, calls in seen.calls.items()}
    text = html_page(seen)
    text.encode()  # half a character does not stop a file from being written
    plain = html_page(decoder(Observe(map=4, top=2), 7, 1))
    for tag in ("<img", "<script", "</script", "<!--"):
        assert text.lower().count(tag) == plain.lower().count(tag)
    found = data_of(text)
    (words,) = found["texts"]
    assert words[:3] + words[4:] == HOSTILE[:3] + HOSTILE[4:] and found["model"] == HOSTILE[0]
    assert words[3].isprintable()  # half a character is shown by its number
    assert found["image"] is None and found["places"][0]["grid"] is None


def test_the_page_asks_nobody() -> None:
    text = html_page(decoder(Observe(), 5, 1))
    assert "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:" in text
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\b(innerHTML|outerHTML|insertAdjacentHTML|eval|fetch|XMLHttpRequest|import)\b", text)
    static = resources.files("regard.interp").joinpath("static")
    assert {"page.html", "page.css", *page.SCRIPTS} == {file.name for file in static.iterdir()}


def test_refusals() -> None:
    with pytest.raises(ValueError, match="recording is empty"):
        html_page(Recording())
    seen = decoder(Observe(), 5)
    with pytest.raises(ValueError, match=r"batch is 2.* 0 … 1$"):
        html_page(seen, batch=2)
    with pytest.raises(ValueError, match="batch must be at least 0, got -1"):
        html_page(seen, batch=-1)


def test_what_was_not_observed_is_left_out() -> None:
    place = data_of(html_page(decoder(Observe(), 5)))["places"][0]
    assert [place[name] for name in ("map", "share", "profile", "top", "list_keys")] == [None] * 5
    assert place["line"] is not None
    steps = Recording({"a": [decoder(Observe(map=4, top=2), 5)["blocks.0.attention"]]})
    unequal = Recording({"a": [*steps.calls["a"], decoder(Observe(map=4, top=2), 7)["blocks.0.attention"]]})
    place = data_of(html_page(unequal))["places"][0]
    assert place["map"] is not None and place["n"] is None and place["numbers"][0] == [None] * 7
    assert [place[name] for name in ("share", "line", "top", "queries")] == [None] * 4


def test_chosen_heads_keep_their_numbers() -> None:
    seen = decoder(Observe(map=4, heads=(2, 0)), 5)
    assert [place["heads"] for place in data_of(html_page(seen))["places"]] == [[2, 0], [2, 0]]


def test_a_generation_has_lists_and_no_map() -> None:
    torch.manual_seed(0)
    model = Decoder(12, heads=3, layers=2, vocab=37).eval()
    cache = model.new_cache()
    with torch.no_grad(), watch(model, Observe(map=4, top=2, key_mass=True)) as seen:
        for n in (5, 1, 1):
            model(torch.randint(37, (1, n)), cache=cache)
    seen.metadata["tokens"] = [str(i) for i in range(8)]
    found = data_of(html_page(seen))
    place = found["places"][0]
    assert place["map"] is None and codes(place["list_keys"]).shape == (3, 2, 7) and place["n"] == 7
    # The prompt of 5 tokens does not fit into 4 bins. The cause is named in the page and by the figures.
    for use in (lambda: figures.heads(seen), lambda: figures.head_map(seen, 0, 0)):
        with pytest.raises(RegardError, match=r"5 tokens .* 4 bins.*keep=True"):
            use()
    assert "5 tokens" in place["no_map"]
    assert found["texts"] == [[str(i) for i in range(7)]]


def test_a_long_text_keeps_the_lists_of_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = decoder(Observe(top=8), 1021, 1)
    most_bytes = len(html_page(decoder(Observe(), 1021, 1))) + 12_000
    monkeypatch.setattr(page, "MOST_BYTES", most_bytes)
    text = html_page(seen)
    place = data_of(text)["places"][1]
    assert 0 < place["first"] < 1021 and len(text) <= most_bytes
    check_lists(place, seen["blocks.1.attention"], 0)


def synthetic_recording(layers: int, heads: int, n: int) -> Recording:
    """A recording with lists as a trained model has them: mostly near keys, some far ones, weights that fall fast."""
    random = torch.Generator().manual_seed(0)
    model = Encoder(heads, heads=heads, layers=1).eval()
    with torch.no_grad(), watch(model, Observe(map=64, top=8, profile=32)) as seen:
        model(torch.randn(1, n, heads, generator=random))
    (observation,) = seen.observations().values()
    shape = (1, heads, n, 8)
    queries = torch.arange(n)[:, None]
    near = queries - torch.rand(shape, generator=random).pow(6).mul(200).long()
    far = torch.rand(shape, generator=random).mul(queries + 1).long()
    top_at = torch.where(torch.rand(shape, generator=random) < 0.9, near, far).clamp(min=0)
    weights = torch.rand(shape, generator=random).pow(3).sort(-1, descending=True).values
    top = (weights / weights.sum(-1, keepdim=True).clamp(min=1)).float()
    observation = replace(observation, top=top, top_at=top_at)
    return Recording({f"layers.{i}": [observation] for i in range(layers)})


def test_a_page_of_2000_tokens_and_270_heads_has_at_most_8_megabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of the heads, in a third of the bytes: the whole page would take three times as long."""
    seen = synthetic_recording(10, 9, 2000)
    seen.metadata["tokens"] = [" token"] * 2000
    monkeypatch.setattr(page, "MOST_BYTES", page.MOST_BYTES // 3)
    text = html_page(seen)
    assert len(text) <= page.MOST_BYTES <= 8_000_000 / 3
    places = data_of_json(text)["places"]
    assert len(places) == 10 and all(place["top"]["shape"][:2] == [9, 8] for place in places)
    assert places[0]["first"] < 500  # nearly all queries have their lists


def test_types_of_heads_are_in_the_page() -> None:
    seen = decoder(Observe(map=4, top=2), 7, 1)
    paths = list(seen)
    kinds = {"sink": {"confidence": 0.25}, "previous": {"confidence": 0.75}}
    rows = [{"path": paths[0], "head": 1, "labels": ["previous", "sink"], "kinds": kinds}]
    atlas = SimpleNamespace(rows=rows, source="two texts <b>")
    for text in (html_page(seen, atlas=atlas), html_page(with_kinds(seen, types_metadata(atlas)))):
        data = data_of(text)
        assert data["types"] == "two texts <b>"
        expected = {"labels": ["previous", "sink"], "confidences": {"sink": 0.25, "previous": 0.75}}
        assert data["places"][0]["types"] == [None, expected, None] and data["places"][1]["types"] == [None] * 3
    for damaged in ("all", {"heads": 3}, {"source": "x"}, []):
        assert data_of(html_page(with_kinds(seen, damaged)))["types"] is None
    hostile = {"path": paths[0], "head": 0, "labels": ["sink", "previous", 3], "confidences": {"sink": 2, "<b>": 0.5}}
    for rows in ([hostile], [{"path": 3}], [None], [{"path": paths[0], "head": True}]):
        data = data_of(html_page(with_kinds(seen, {"heads": rows})))
        types = data["places"][0]["types"][0]
        assert types is None or types == {"labels": [], "confidences": {}}


def with_kinds(seen: Recording, kinds: Any) -> Recording:
    recording = Recording(seen.calls)
    recording.metadata |= {"kinds": kinds}
    return recording


def test_maps_that_are_too_large_are_pooled_further(monkeypatch: pytest.MonkeyPatch) -> None:
    fine, coarse = decoder(Observe(map=12), padding=[29, 23]), decoder(Observe(map=6), padding=[29, 23])
    monkeypatch.setattr(page, "MOST_MAP_BYTES", 300)
    for place, right in zip(data_of(html_page(fine))["places"], coarse.values(), strict=True):
        map_ = unpacked(place["map"]) * (torch.arange(1, 29) * 6 // 29).bincount()
        map_[..., :1] += unpacked(place["share"])
        assert map_.shape == (3, 6, 6) and (map_ - right.map).abs().max() < 1 / 255


# --- in a browser -----------------------------------------------------------------------------------------------------


@pytest.fixture
def show(show_page: Any) -> Any:
    """Opens what was seen."""

    def opened(seen: Recording, width: int = 1280, **given: Any) -> Any:
        tab = show_page(html_page(seen, **given), width)
        tab.locator("html[data-ready]").wait_for(state="attached")  # the numbers are decompressed
        return tab

    return opened


def shaded(tab: Any, block: int = 0) -> dict[int, float]:
    """Token → its shade, which is the root of its weight."""
    script = """block => Array.from(document.querySelectorAll(".block")[block].querySelectorAll(".token"))
        .map(x => [x.dataset.at, x.style.getPropertyValue("--weight")]).filter(x => x[1])"""
    return {int(at): float(weight) ** 2 for at, weight in tab.evaluate(script, block)}


def heaviest(observation: Any, head: int, row: int, batch: int = 0) -> dict[int, float]:
    at, top = observation.top_at[batch, head, row].tolist(), observation.top[batch, head, row].tolist()
    return {key: weight for key, weight in zip(at, top, strict=True) if key >= 0 and weight >= 1e-5}


def test_heads_are_picked_by_click_and_by_keyboard(show: Any) -> None:
    tab = show(decoder(Observe(map=8, top=3, profile=4)))
    name = tab.locator("#name")
    assert name.inner_text() == "blocks.0.attention, head 0"
    assert tab.locator("#sizes").inner_text() == "2 layers × 3 heads, 29 tokens"
    tab.locator(".head").nth(4).click()
    assert name.inner_text() == "blocks.1.attention, head 1"
    for key in ("ArrowRight", "ArrowUp", "Enter"):
        tab.keyboard.press(key)
    assert name.inner_text() == "blocks.0.attention, head 2"
    assert tab.locator(".head[aria-pressed=true]").count() == 1 == tab.locator(".head[tabindex='0']").count()
    assert "entropy" in tab.locator(".head").nth(2).get_attribute("aria-label")
    tab.locator("#find").fill("1.attention, head 2")
    assert tab.locator(".head").count() == 1


def test_a_page_can_start_with_a_head_and_has_a_title(show_page: Any) -> None:
    seen = decoder(Observe(map=8))
    tab = show_page(html_page(seen, title="my model: my text", head=("blocks.1.attention", 2)))
    tab.locator("html[data-ready]").wait_for()
    assert tab.locator("h1").inner_text() == "my model: my text" and tab.title().startswith("my model")
    assert tab.locator("#name").inner_text() == "blocks.1.attention, head 2"
    with pytest.raises(ValueError, match="head"):
        html_page(seen, head=(0, 7))


def test_types_are_shown_with_their_source(show: Any) -> None:
    seen = decoder(Observe(map=8, top=3))
    head = {"path": "blocks.0.attention", "head": 0, "labels": ["previous"], "confidences": {"previous": 0.75}}
    tab = show(with_kinds(seen, {"source": "two texts", "heads": [head]}))
    shown = tab.locator("#types").inner_text()
    assert "previous 75 %" in shown and "Types from two texts, not from this text." in shown
    tab.locator(".head").first.hover()
    assert "types, from probes: previous 75 %" in tab.locator("#hint").inner_text()
    tab.locator(".head").nth(1).click()
    assert "types of this head are not known" in tab.locator("#types").inner_text()
    assert show(seen).locator("#types").is_hidden()


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
    seen.metadata["tokens"] = [f" w{i}" for i in range(28)] + [HOSTILE[0]]
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
    with torch.no_grad(), watch(model, Observe(map=8, top=3, profile=2)) as seen:
        model(torch.randint(37, (1, 11)), torch.randint(37, (1, 7)))
    seen.metadata |= {"source": [f"s{i}" for i in range(11)], "tokens": [f"t{i}" for i in range(7)]}
    path = next(path for path in seen if "cross" in path)
    tab = show(seen, 390)
    tab.locator(".head").nth(3 * list(seen).index(path)).click()
    assert tab.locator(".block h4").all_inner_texts() == ["queries", "keys"]
    # Queries and keys are of two sequences: no number compares their positions, in the page and everywhere else.
    row = next(row for row in seen.heads() if row["path"] == path)
    assert [row[name] for name in ("distance", "offset", "local")] == [None] * 3 and row["sink"] is not None
    numbers = tab.locator("#numbers").inner_text()
    assert numbers.count("different sequences") == 3
    assert "different sequences" in tab.locator("#profile").inner_text()
    assert "away" not in tab.locator("#summary").inner_text()
    with pytest.raises(RegardError, match="different sequences"):
        figures.head_profile(seen, path, 0)
    assert "different sequences" in str(seen.table().caption)
    tab.locator(".block").nth(0).locator(".token").nth(5).click()
    assert shaded(tab, 1) == pytest.approx(heaviest(seen[path], 0, 5), abs=1e-3) and shaded(tab, 0) == {}
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_tap_on_a_phone_is_where_the_finger_was(show: Any) -> None:
    """What the answer says must not move the text below it."""
    tab = show(decoder(Observe(map=8, top=8)), 390)
    token, top = tab.locator(".token").nth(20), "e => e.getBoundingClientRect().top + scrollY"
    before = token.evaluate(top)
    token.click()
    assert token.evaluate(top) == before and tab.locator("#strongest-of").inner_text() == "20 attends to"


def test_patches_stand_on_their_picture(show: Any) -> None:
    torch.manual_seed(0)
    model = Encoder(12, heads=3, layers=1).eval()
    with torch.no_grad(), watch(model, Observe(map=8, top=3, profile=2, grid=(3, 5))) as seen:
        model(torch.randn(1, 16, 12))
    pixel = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    seen.metadata |= {"grid": [3, 5], "image": f"data:image/png;base64,{pixel}"}
    tab = show(seen)
    assert tab.locator(".patches .token").count() == 15 and tab.locator(".text .token").count() == 1
    assert tab.locator(".text .token").inner_text() == "class token"
    words = tab.locator("#chosen").inner_text()
    assert "patches" in words and "on the image" in words and "along the image" in words
    assert "tokens" not in words and "text" not in words and "cells away" not in words
    tab.locator(".patches .token").nth(7).hover()
    assert tab.locator("#strongest-of").inner_text() == "patch 1, 2 attends to"
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


@pytest.mark.parametrize("sink", [0, 1])
def test_uniform_attention_has_one_colour(show: Any, sink: int) -> None:
    """64 bins hold 3 or 4 of 200 keys: sums over bins would be stripes."""
    q = torch.zeros(1, 2, 200, 4)
    _, observation = attention(q, q, q, observe=Observe(map=64, top=2, sink=sink))
    tab = show(Recording({"layer": [observation]}))
    count_colours = """canvas => {
        const { width, height } = canvas;
        const copy = new OffscreenCanvas(width, height).getContext("2d");
        copy.drawImage(canvas, 0, 0);
        return new Set(new Uint32Array(copy.getImageData(0, 0, width, height).data.buffer)).size;
    }"""
    canvases = [tab.locator("#map"), tab.locator(".head canvas").first]
    for hides in (False, True):
        if hides and sink == 0:
            break
        tab.locator("#hide").set_checked(hides)
        assert [canvas.evaluate(count_colours) for canvas in canvases] == [1, 1]
    tab.locator("#hide").set_checked(False)
    assert "per key" in tab.locator("#map-at").inner_text()
    tab.locator("#map").hover(position={"x": 3, "y": 3})
    readout = tab.locator("#map-at").inner_text()
    assert "per key" in readout and "sum over keys" in readout and "key 0–3" in readout


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
