"""A recording as one HTML file that opens anywhere and needs no network.

Arrays are integers of a stated error in one compressed block (``_page_arrays``), head by head:

    map      8 bits      [H, rows, columns]  the pooled map minus the weight on the first S keys, divided by the number
                                             of other keys in the bin: bins of 3 and of 4 keys would look like stripes.
                                             Square roots, so that small weights keep their digits. Rows and columns
                                             are min(g, n) and min(g, m): a text shorter than the map leaves bins empty
    share    16 bits     [H, rows, bins]     the weight on the first S keys in each of the first bins; map · keys +
                                             share is the whole map. It is separate: rounding would hide a rest of 1 %
                                             beside a sink of 99 %
    line     10 bits     [H, ≤ 512]          entropy along the text, pooled by mean if the text is longer
    rest     8–10 bits   [H, R]              1 − ``sink`` of the last R rows, those with lists; square roots
    keys     16 or 32    [H, k, R]           the strongest keys of a row, as distances
    top      7–10 bits   [H, k, R]           their weights; square roots
    profile  16 bits     [H, …]              as observed, at most 512 offsets in each direction
    counted  8 rows each [1 or H, n / 8]     which rows count; left out if all do

Means of heads are exact JSON numbers, and weights on groups of keys have four decimals. A page has at most 8 MB: first
the weights in lists get fewer bits, then R is the number of rows that fit. The page says which.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy

from regard._checks import check_integer
from regard._errors import RegardError
from regard._observables import Observation
from regard.interp import _head_means, _head_table
from regard.interp._group_table import page_group_map, page_groups, page_number
from regard.interp._join_calls import reason_no_map
from regard.interp._page_arrays import (
    ArrayBlock,
    base91,
    encode_keys,
    encode_numbers,
    encode_weights,
    list_bits_that_fit,
)
from regard.interp._page_maps import map_codes, mean_by_bin
from regard.interp._page_types import TypesByHead, page_types
from regard.interp._token_labels import check_token_labels, is_cross_attention, query_and_key_labels

if TYPE_CHECKING:
    from regard.interp._atlas_table import Atlas
    from regard.interp._recording import Recording

SCRIPTS = (
    *("shared.js", "packed.js", "page_data.js", "draw.js", "groups.js", "overview.js", "tokens.js"),
    "selected_head.js",
)
MOST_BYTES = 8_000_000  # of a page
MOST_MAP_BYTES = 5_000_000  # of the maps before compression; larger maps are pooled further
MOST_POINTS = 512  # of a line: more than a screen shows
MOST_LINE_NUMBERS = 600_000  # of all lines; with more heads a line has fewer points
LEAST_POINTS = 64
LINE_BITS = 10
CHARACTERS_PER_BYTE = 16 / 13  # of the compressed block
IMAGE_URL = re.compile(r"data:image/(png|jpeg|webp);base64,[A-Za-z0-9+/]+=*")


def html_page(
    recording: Recording,
    *,
    batch: int = 0,
    atlas: Atlas | None = None,
    title: str | None = None,
    head: tuple[str | int, int] | None = None,
) -> str:
    """One HTML file of all heads: their maps side by side, and the weights of each head on the text.

    Maps and means cover all batch entries; values along the text are of batch entry ``batch``. The text comes from
    ``recording.metadata`` (``tokens``, ``source``, and ``grid`` and ``image`` of an image model). Whoever can read the
    file can read the text. Head types come from ``atlas``, or from ``recording.metadata["kinds"]``. The other arguments
    are those of ``Recording.to_html``.

    >>> from regard.nn import Encoder
    >>> from regard.interp import watch
    >>> model = Encoder(6, heads=3, layers=2)
    >>> with watch(model) as recording:
    ...     y = model(torch.randn(2, 5, 6))
    >>> html_page(recording).startswith("<!doctype html>")
    True
    """
    if not recording:
        raise RegardError("the recording is empty; there is nothing to show")
    observations = recording.observations()
    check_token_labels(recording.metadata, recording.sizes())
    entries = max([1, *(x.entropy.shape[0] for x in observations.values() if x.entropy is not None)])
    if not 0 <= check_integer("batch", batch) < entries:
        raise RegardError(f"batch is {batch}; the recording has batch entries 0 … {entries - 1}")

    # The page runs all scripts as one classic script, in which ``export`` is an error.
    script = re.sub(r"^export ", "", "\n".join(map(_static_text, SCRIPTS)), flags=re.MULTILINE)
    parts = {"style": _static_text("page.css"), "script": script.replace("</script", "<\\/script")}
    page = _static_text("page.html")
    types = page_types(atlas, recording.metadata)
    data, block = _page_data(observations, recording.calls, recording.metadata, batch, types)
    if title is not None:
        data["model"] = title
    data["selected"] = None
    if head is not None:
        path, observation = _find_head(recording, observations, *head)
        data["selected"] = {"path": path, "head": observation.heads[observation.head_index(head[1])]}

    # The lists of the strongest keys get the bytes that everything else leaves. Their size is an estimate, so a page
    # that is too large is made again with less.
    other_bytes = len(page) + sum(map(len, parts.values())) + len(_json_text(data))
    room = (MOST_BYTES - other_bytes) / CHARACTERS_PER_BYTE
    list_bytes = room - len(block.compress())
    while True:
        packed = _add_lists(data, block, observations, batch, list_bytes).compress()
        if len(packed) <= room or list_bytes <= 0:
            break
        list_bytes -= len(packed) - room + room / 100
    data["bytes"] = len(packed)
    parts |= {"data": _json_text(data), "arrays": base91(packed)}
    # All placeholders are replaced in one pass, so that a placeholder's name in the user's text stays text.
    return re.sub(r"\{\{(data|arrays|style|script)\}\}", lambda match: parts[match[1]], page)


def _find_head(
    recording: Recording, observations: Mapping[str, Observation], layer: str | int, head: int
) -> tuple[str, Observation]:
    """The path and the observation of the head that is shown first; raises if it was not observed."""
    # Calls that observed different heads have numbered paths, which the recording itself does not know.
    path = str(layer)
    if path not in observations:
        path = recording.path(layer)
    observation = observations[path]
    observation.head_index(head)
    return path, observation


def _json_text(data: dict[str, Any]) -> str:
    """ASCII only, because a token may be half a character. "<" becomes \\u003c, so that no text can end its element."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _static_text(name: str) -> str:
    return resources.files("regard.interp").joinpath("static", name).read_text(encoding="utf-8")


def _page_data(
    observations: Mapping[str, Observation],
    calls: Mapping[str, Sequence[Observation]],
    metadata: Mapping[str, Any],
    batch: int,
    types: tuple[str, TypesByHead] | None,
) -> tuple[dict[str, Any], ArrayBlock]:
    """Everything that the page shows except the lists, as plain data, and its arrays."""
    pattern, names = _head_table.shorten_paths(list(observations))
    rows = _head_means.head_rows(observations, metadata)
    groups = page_groups(observations, rows)
    numbers: dict[str, list[list[float | None]]] = {path: [] for path in observations}
    on_groups: dict[str, list[list[float | None]]] = {path: [] for path in observations}
    for row in rows:
        numbers[row["path"]].append([row[name] for name in _head_table.HEAD_COLUMNS])
        on_groups[row["path"]].append([page_number(row.get(group["name"])) for group in groups or []])

    block = ArrayBlock()
    shrink = _map_shrink(observations.values())
    head_count = sum(len(x.heads) for x in observations.values())
    most_points = max(LEAST_POINTS, min(MOST_POINTS, MOST_LINE_NUMBERS // head_count))
    texts: list[list[str]] = []
    layers = []
    for path, observation in observations.items():
        query_labels, key_labels = query_and_key_labels(metadata, path, observation.n, observation.m)
        is_cross = is_cross_attention(metadata, path)
        layer = _layer_data(observation, batch, shrink, most_points, is_cross, block)
        layer["path"] = path
        layer["name"] = names[path]
        layer["numbers"] = numbers[path]
        if groups is not None:
            layer["groups"] = on_groups[path]
            layer["group_map"] = None if is_cross else page_group_map(observation, groups)
        layer["queries"] = text_index(texts, query_labels)
        layer["keys"] = text_index(texts, key_labels)
        layer["grid"] = patch_grid(observation, metadata)
        layer["cross"] = is_cross
        on_image = layer["grid"] is not None
        layer["meanings"] = _head_table.column_meanings(on_image=on_image, is_cross=is_cross)
        layer["no_map"] = reason_no_map(calls.get(path, [observation]), observation)
        if types is not None:
            of_layer = types[1].get(path, {})
            layer["types"] = [of_layer.get(head) for head in observation.heads]
        layers.append(layer)
    # A recording may come from anyone, so its image must be a data URL and nothing else.
    image = metadata.get("image")
    if not isinstance(image, str) or not IMAGE_URL.fullmatch(image):
        image = None
    data = {
        "model": str(metadata.get("model") or ""),
        "columns": _head_table.HEAD_COLUMNS,
        "groups": groups,
        "pattern": pattern,
        "texts": texts,
        "image": image,
        "batch": batch,
        "types": types and types[0],
        "bytes": 0,
        "places": layers,
    }
    return data, block


def text_index(texts: list[list[str]], labels: list[str] | None) -> int | None:
    """The index of a text in ``texts``, added if it is new: most layers read the same text, which is stored once."""
    if labels is None:
        return None
    if labels not in texts:
        texts.append(labels)
    return texts.index(labels)


def patch_grid(observation: Observation, metadata: Mapping[str, Any]) -> list[int] | None:
    """Height and width of the patches if the last queries and keys are patches; else None."""
    grid = metadata.get("grid") or observation.observe.grid
    if not isinstance(grid, list | tuple) or len(grid) != 2 or not all(isinstance(x, int) and x > 0 for x in grid):
        return None
    if observation.n is None or observation.n != observation.m or grid[0] * grid[1] > observation.n:
        return None
    return list(grid)


def _layer_data(
    observation: Observation, batch: int, shrink: int, most_points: int, is_cross: bool, block: ArrayBlock
) -> dict[str, Any]:
    """One layer without its text and lists; its arrays go into ``block``. Cross-attention has no profile."""
    counted = observation.counted
    has_entry = counted is not None and batch < counted.shape[0]
    layer: dict[str, Any] = {
        "n": observation.n,
        "m": observation.m,
        "heads": list(observation.heads),
        "sink": observation.observe.sink,
        "local": observation.observe.local,
        "counted": None,
        "line": None,
        "profile": block.add("profile", None if is_cross else _encode_profile(observation)),
        "entry": has_entry,
    }
    for name, encoded in map_codes(observation, shrink).items():
        layer[name] = block.add(name, encoded)
    if has_entry and counted is not None and observation.n is not None:
        counted_HN = counted[batch].cpu()
        if not counted_HN.all():
            # Padding is the same for all heads, and then one row is enough.
            rows = counted_HN
            if bool((counted_HN == counted_HN[:1]).all()):
                rows = counted_HN[:1]
            bits = numpy.packbits(rows.numpy(), axis=-1)
            layer["counted"] = block.add("counted", {"bits": 8, "shape": list(bits.shape), "codes": bits})
        if observation.entropy is not None:
            points = min(observation.n, most_points)
            line, not_empty = mean_by_bin(observation.entropy[batch : batch + 1], counted_HN[None], points)
            layer["line"] = block.add("line", encode_numbers(line.where(not_empty, 0), LINE_BITS))
    return layer


def _map_shrink(observations: Iterable[Observation]) -> int:
    """The factor 1, 2, 4 … by which all maps are pooled to fit into ``MOST_MAP_BYTES``, as long as it divides g."""
    sizes = [(x.map.shape[0], x.map.shape[-1]) for x in observations if x.map is not None]
    shrink = 1
    while sum(heads * (g // shrink) ** 2 for heads, g in sizes) > MOST_MAP_BYTES:
        if any(g % (2 * shrink) for _, g in sizes):
            break
        shrink *= 2
    return shrink


def _encode_profile(observation: Observation) -> dict[str, Any] | None:
    profile = observation.profile
    if profile is None:
        return None
    # The middle of a long profile: distant offsets would make the page large and the curve flat.
    if profile.ndim == 2 and profile.shape[1] > 2 * MOST_POINTS + 1:
        middle = profile.shape[1] // 2
        profile = profile[:, middle - MOST_POINTS : middle + MOST_POINTS + 1]
    return encode_numbers(profile, 16)


def _add_lists(
    data: dict[str, Any], block: ArrayBlock, observations: Mapping[str, Observation], batch: int, most_bytes: float
) -> ArrayBlock:
    """Add the strongest keys of each row to the layers; they take about ``most_bytes``. Returns the block with them.

    If not all rows fit, the last ones are kept: they see the most keys.
    """
    longest = max((x.n or 0 for x in observations.values()), default=0)
    lists = [_list_codes(x, batch, longest) for x in observations.values()]
    rest_bytes = 0.75 * sum(x["rest"].numel() for x in lists if x is not None and x["rest"] is not None)
    all_keys = [x["keys"] for x in lists if x is not None]
    bits, share = list_bits_that_fit(all_keys, max(0, int(most_bytes - rest_bytes)))
    if share < 1:
        lists = [_list_codes(x, batch, int(longest * share)) for x in observations.values()]

    # The block is copied, because a page that is too large gets other lists.
    block = block.copy()
    for layer, of_layer in zip(data["places"], lists, strict=True):
        layer |= {"first": None, "rest": None, "list_keys": None, "top": None}
        if of_layer is None:
            continue
        layer["first"] = of_layer["first"]
        layer["list_keys"] = block.add("keys", of_layer["keys"])
        layer["top"] = block.add("top", encode_weights(of_layer["keys"]["weights"], bits))
        if of_layer["rest"] is not None:
            layer["rest"] = block.add("rest", encode_numbers(of_layer["rest"], max(8, bits), power=2))
    return block


def _list_codes(observation: Observation, batch: int, most_rows: int) -> dict[str, Any] | None:
    """The keys of the last rows, and the weight that a row does not give to its first keys; None without lists."""
    top = observation.top
    top_at = observation.top_at
    n = observation.n
    m = observation.m
    if top is None or top_at is None or n is None or m is None or batch >= top.shape[0] or top.shape[-1] == 0:
        return None
    first = max(0, n - max(1, most_rows))
    rest = None
    if observation.sink is not None:
        rest = 1 - observation.sink[batch, :, first:]
    keys = encode_keys(
        top[batch, :, first:],
        top_at[batch, :, first:],
        first_query=first,
        largest_index=max(n, m),
        first_key_is_known=rest is not None and observation.observe.sink == 1,
    )
    return {"first": first, "rest": rest, "keys": keys}
