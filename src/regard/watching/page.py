"""What was seen, as one HTML file that opens anywhere and asks the network for nothing.

Numbers travel as base64 of little-endian integers, head by head: ``value = scale[head] · (code / largest code)^power``.

    map      uint8   [H, rows, columns]  the pooled map less what the first S keys took; power 2, so that small weights
                                         keep their digits. Rows and columns are min(g, n) and min(g, m): where a text
                                         is shorter than the grid its empty bins are left out
    share    uint16  [H, rows, bins]     what the first S keys took of each of the first bins; map + share is the map.
                                         Apart, because a rest of 1 % beside a sink of 99 % would drown in rounding
    line     uint16  [H, ≤ 512]          entropy along the text, pooled by mean where the text is longer
    sinks    uint16  [H, R]              ``sink`` of the last R rows, those that have lists
    top, at  uint16  [H, R, k]           the strongest keys of a row and where they stand (uint32 beyond 65,535 keys)
    profile  uint16  [H, …]              as observed, at most 512 offsets either way
    counted  bits    [1 or H, n]         which rows count; left out where all do

Means of heads are JSON numbers, exact. A page stays under about 20 MB: R is n unless the lists pass that.
"""

from __future__ import annotations

import base64
import json
import re
from bisect import bisect_right
from collections.abc import Mapping
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor

from regard.observables import Observation
from regard.shapes import integer
from regard.watching import table
from regard.watching.words import check_words, words

if TYPE_CHECKING:
    from regard.watching.seen import Seen

__all__ = ["grid_of", "html", "packed_map", "pooled", "shared"]

SCRIPTS = ("numbers.js", "draw.js", "overview.js", "tokens.js", "page.js")
LARGEST = 15_000_000  # bytes of numbers: 20 MB once they are base64
MAPS = LARGEST // 2  # of which maps may take this much, or are pooled further
POINTS = 512  # of a line: more than a screen gives it
IMAGE = re.compile(r"data:image/(png|jpeg|webp);base64,[A-Za-z0-9+/]+=*")


def html(seen: Seen, *, batch: int = 0) -> str:
    """One HTML file of all heads that were seen: their maps side by side, and each head's weights on the text.

    Maps and means are of all batch entries together; what is shown along the text is of entry ``batch``. The words
    come from ``seen.about`` (``tokens``, ``source``, and ``grid`` and ``image`` of a picture). The file holds
    them: whoever can read it can read the text.

    >>> from regard.nn import Encoder
    >>> from regard.watching import watch
    >>> model = Encoder(6, heads=3, layers=2)
    >>> with watch(model) as seen:
    ...     y = model(torch.randn(2, 5, 6))
    >>> html(seen).startswith("<!doctype html>")
    True
    """
    if not seen:
        raise ValueError("nothing was seen, so there is nothing to show")
    places = seen.each()
    check_words(seen.about, [x.n for x in places.values()])
    entries = max(1 if x.entropy is None else x.entropy.shape[0] for x in places.values())
    if not 0 <= integer("batch", batch) < entries:
        raise ValueError(f"batch is {batch}; what was seen has batch entries 0 … {entries - 1}")
    # ASCII alone, for a token may be half a character; "<" as \u003c, so that no text ends the element it stands in.
    data = json.dumps(_data(places, seen.about, batch), allow_nan=False, separators=(",", ":"))
    parts = {"data": data.replace("<", "\\u003c"), "style": _source("page.css")}
    parts["script"] = "\n".join(map(_source, SCRIPTS)).replace("</script", "<\\/script")
    # One pass: a placeholder's name in the user's text stays text.
    return re.sub(r"\{\{(data|style|script)\}\}", lambda found: parts[found[1]], _source("page.html"))


def _source(name: str) -> str:
    return resources.files("regard.watching").joinpath("static", name).read_text(encoding="utf-8")


def _data(places: Mapping[str, Observation], about: Mapping[str, Any], batch: int) -> dict[str, Any]:
    """Everything the page shows, as plain data."""
    pattern, names = table.shortened(list(places))
    numbers: dict[str, list[list[float | None]]] = {path: [] for path in places}
    for row in table.rows(places):
        numbers[row["path"]].append([row[name] for name in table.COLUMNS])
    texts: list[list[str]] = []
    shrink = _shrink(places.values())
    shown = {path: _place(x, batch, shrink) for path, x in places.items()}
    fixed = sum(len(x["data"]) * 3 // 4 for place in shown.values() for x in place.values() if isinstance(x, dict))
    most = _rows_that_fit([x for x in places.values() if x.top is not None], LARGEST - fixed)
    for path, place in shown.items():
        observation = places[path]
        queries, keys = words(about, path, observation.n, observation.m)
        place |= {"path": path, "name": names[path], "numbers": numbers[path]}
        place |= {"queries": shared(texts, queries), "keys": shared(texts, keys)}
        place |= _lists(observation, batch, most) | {"grid": grid_of(observation, about)}
    image = about.get("image")
    return {
        "model": str(about.get("model") or ""),
        "columns": table.COLUMNS,
        "pattern": pattern,
        "texts": texts,
        "image": image if isinstance(image, str) and IMAGE.fullmatch(image) else None,
        "batch": batch,
        "places": list(shown.values()),
    }


def shared(texts: list[list[str]], found: list[str] | None) -> int | None:
    """The number of a text in ``texts``: places mostly read the same one, which is then there once."""
    if found is None:
        return None
    if found not in texts:
        texts.append(found)
    return texts.index(found)


def grid_of(observation: Observation, about: Mapping[str, Any]) -> list[int] | None:
    """Height and width of the patches that are the last keys, where queries are the same ones."""
    grid = about.get("grid") or observation.observe.grid
    if not isinstance(grid, list | tuple) or len(grid) != 2 or not all(isinstance(x, int) and x > 0 for x in grid):
        return None
    fits = observation.n is not None and observation.n == observation.m and grid[0] * grid[1] <= observation.n
    return list(grid) if fits else None


def _place(observation: Observation, batch: int, shrink: int) -> dict[str, Any]:
    """One place, without its words and lists."""
    place: dict[str, Any] = {"n": observation.n, "m": observation.m, "heads": list(observation.heads)}
    place |= {"sink": observation.observe.sink, "local": observation.observe.local, "counted": None, "line": None}
    place |= packed_map(observation, shrink) | {"profile": _profile(observation)}
    place["entry"] = observation.counted is not None and batch < observation.counted.shape[0]
    if place["entry"] and observation.counted is not None and observation.n is not None:
        counted = observation.counted[batch].cpu()
        if not counted.all():
            alike = bool((counted == counted[:1]).all())
            bits = numpy.packbits((counted[:1] if alike else counted).numpy(), axis=-1)
            place["counted"] = {"bits": 8, "shape": list(bits.shape), "data": _text(bits)}
        if observation.entropy is not None:
            line, some = pooled(observation.entropy[batch : batch + 1], counted[None], min(observation.n, POINTS))
            place["line"] = _packed(line.where(some, 0), 16)
    return place


def packed_map(observation: Observation, shrink: int) -> dict[str, Any]:
    values, n, m = _plain(observation.map), observation.n, observation.m
    if values is None or observation.map_rows is None:
        return {"map": None, "share": None}
    if shrink > 1:
        values = _coarser(values, observation.map_rows.cpu(), shrink)
    g = values.shape[-1]
    if n is not None and n < g:
        values = values[:, [i * g // n for i in range(n)]]
    if m is not None and m < g:
        values = values[:, :, [j * g // m for j in range(m)]]
    first = min(observation.observe.sink, m or 0)
    if not first or m is None or observation.sink is None or observation.counted is None:
        return {"map": _packed(values, 8, power=2), "share": None}
    left, _ = pooled(observation.sink, observation.counted, values.shape[1])
    share = torch.zeros(*values.shape[:2], (first - 1) * values.shape[2] // m + 1)
    for column in range(share.shape[2]):
        # Bins before the last hold first keys alone, so that each takes all it has; the last takes what is left.
        share[..., column] = torch.minimum(values[..., column], left)
        left = left - share[..., column]
    values = values.clone()
    values[..., : share.shape[2]] -= share
    return {"map": _packed(values, 8, power=2), "share": _packed(share, 16)}


def _shrink(places: Any) -> int:
    """By how much maps are pooled further so that all of them together stay small: 1, 2, 4 …, as far as g divides."""
    sizes = [(x.map.shape[0], x.map.shape[-1]) for x in places if x.map is not None]
    shrink = 1
    while sum(heads * (g // shrink) ** 2 for heads, g in sizes) > MAPS:
        if any(g % (2 * shrink) for _, g in sizes):
            break
        shrink *= 2
    return shrink


def _coarser(values: Tensor, rows: Tensor, by: int) -> Tensor:
    """A map of fewer bins: ⌊⌊i·g/n⌋ / by⌋ = ⌊i·(g/by)/n⌋ where ``by`` divides g, so that it is the smaller map."""
    H, g = values.shape[:2]
    sums = (values * rows[..., None]).reshape(H, g // by, by, g // by, by).sum((2, 4))
    return sums / rows.reshape(H, g // by, by).sum(-1).clamp(min=1)[..., None]


def _profile(observation: Observation) -> dict[str, Any] | None:
    values = _plain(observation.profile)
    if values is None:
        return None
    if values.ndim == 2 and values.shape[1] > 2 * POINTS + 1:
        middle = values.shape[1] // 2
        values = values[:, middle - POINTS : middle + POINTS + 1]
    return _packed(values, 16)


def _lists(observation: Observation, batch: int, most: int) -> dict[str, Any]:
    """The strongest keys of the last rows: where not all fit, the end of a text is what has seen the most."""
    nothing = {"first": None, "sinks": None, "top": None, "at": None}
    top, at, n = observation.top, observation.top_at, observation.n
    if top is None or at is None or n is None or batch >= top.shape[0] or top.shape[-1] == 0:
        return nothing
    first = max(0, n - most)
    sinks = None if observation.sink is None else _plain(observation.sink[batch, :, first:])
    places = at[batch, :, first:].cpu().numpy()
    return {
        "first": first,
        "sinks": None if sinks is None else _packed(sinks, 16),
        "top": _packed(_plain(top[batch, :, first:]), 16),
        # No key is −1, which becomes the largest code.
        "at": {
            "bits": 8 * _key_bytes(observation),
            "shape": list(places.shape),
            "data": _text(places.astype(f"<u{_key_bytes(observation)}")),
        },
    }


def _key_bytes(observation: Observation) -> int:
    return 2 if observation.m is not None and observation.m <= 65535 else 4


def _rows_that_fit(places: list[Observation], left: int) -> int:
    """The most rows whose lists take no more than ``left`` bytes."""

    def size(rows: int) -> int:
        return sum(
            x.rows.shape[0] * min(rows, x.n or 0) * (2 + x.top.shape[-1] * (2 + _key_bytes(x)))
            for x in places
            if x.top is not None
        )

    longest = max((x.n or 0 for x in places), default=0)
    return bisect_right(range(1, longest + 1), left, key=size)


def pooled(values: Tensor, counted: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """Means ``[H, bins]`` of row values ``[B, H, n]`` over rows that count, in a map's bins; which bins have any."""
    n = values.shape[-1]
    at = torch.arange(n) * bins // n
    counted = counted.cpu()
    rows = torch.where(counted, values.detach().cpu().double(), 0.0).sum(0)
    shape = (values.shape[1], bins)
    sums = torch.zeros(shape, dtype=torch.float64).index_add_(1, at, rows)
    counts = torch.zeros(shape, dtype=torch.float64).index_add_(1, at, counted.sum(0).double())
    return (sums / counts.clamp(min=1)).float(), counts > 0


def _plain(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.detach().to("cpu", torch.float32)


def _packed(values: Tensor | None, bits: int, *, power: int = 1) -> dict[str, Any]:
    """Numbers ≥ 0 as integers, each head between 0 and its own largest."""
    assert values is not None
    x = torch.nan_to_num(values.double(), nan=0.0, posinf=0.0, neginf=0.0).clamp(min=0)
    scale = x.flatten(1).amax(1)
    largest = 2**bits - 1
    share = x / scale.where(scale > 0, 1).reshape(-1, *[1] * (x.ndim - 1))
    codes = (share ** (1 / power) * largest).round().numpy().astype(f"<u{bits // 8}")
    return {"bits": bits, "power": power, "scale": scale.tolist(), "shape": list(x.shape), "data": _text(codes)}


def _text(codes: Any) -> str:
    return base64.b64encode(codes.tobytes()).decode("ascii")
