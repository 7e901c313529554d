"""Figures of what was seen: all heads at once, and one head as a map, as a profile and as lines between words.

They show pooled or exact weights: where a head looks, not what it moves. ``regard.plots.save`` writes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from regard import plots
from regard.kept import places
from regard.observables import Observation, Where
from regard.shapes import integer
from regard.watching.seen import Seen
from regard.watching.table import shortened
from regard.watching.words import words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["head_lines", "head_map", "head_profile", "heads"]

SIZE = 64  # cells along a side of a map unless asked otherwise


def heads(seen: Seen) -> Figure:
    """The pooled map of every head: a row for each place, in the order of the calls, a column for each head.

    Places without a map (the steps of a generation) are left out, and the title then says how many there are.

    >>> seen = regard.watching.look(regard.models.load(regard.models.bundled()), "a b c a b c")
    >>> heads(seen).texts[0].get_text()  # regard.plots.save(figure, "heads.svg") writes it
    '12 heads of decoder.blocks.*.attention'
    """
    observations = seen.each()
    maps = {path: _cells(x) for path, x in observations.items() if x.map is not None}
    if not maps:
        raise ValueError("no head has a map here; observe with Observe(map=64)")
    pattern, own = shortened(list(maps))
    count = sum(map(len, maps.values()))
    columns = sorted({head for path in maps for head in observations[path].heads})
    rows = []
    for path, cells in maps.items():  # a head that was not chosen there leaves its cell empty
        own_maps = dict(zip(observations[path].heads, cells, strict=True))
        rows.append(np.stack([own_maps.get(head, np.zeros_like(cells[0])) for head in columns]))
    left_out = "" if len(maps) == len(observations) else f" ({len(maps)} of {len(observations)} places have maps)"
    numbered = all(name.isdecimal() for name in own.values())
    return plots.grid(
        rows,
        row_labels=list(own.values()),
        column_labels=columns,
        x_label="head",
        y_label="layer" if numbered else None,
        title=f"{count} heads" + (f" of {pattern}" if pattern else "") + left_out,
    )


def head_map(
    seen: Seen,
    path: str | int,
    head: int,
    *,
    rows: Where = None,
    keys: Where = None,
    size: int | None = None,
    batch: int = 0,
) -> Figure:
    """One head's weights: of the region asked for where q and k were kept, else the pooled map of all rows.

    A region of at most ``size`` (64) queries and keys shows exact weights, with words beside them if they are known; a
    larger one is pooled: rows by mean, keys by sum. Without ``keep`` there are no regions to choose. A place's number
    in the order of the calls does for its ``path``, here and below.

    >>> seen = regard.watching.look(regard.models.load(regard.models.bundled()), "a b c a b c")
    >>> figure = head_map(seen, 1, head=0)
    >>> figure.texts[0].get_text(), figure.axes[0].images[0].get_array().shape
    ('decoder.blocks.1.attention · head 0', (7, 7))
    """
    path, observation = _place(seen, path, head)
    title = f"{path} · head {head}"
    if observation.kept:
        weights = observation.tile(head, rows, keys, SIZE if size is None else size, batch=batch)
        at, keys_at = _at(rows, observation.n, "rows"), _at(keys, observation.m, "keys")
        row_words, key_words = _words(seen, path, observation, batch)
    else:
        if rows is not None or keys is not None or size is not None or batch != 0:
            raise ValueError("rows, keys, size and batch need q and k, which were not kept: Observe(keep=True)")
        if observation.map is None:
            raise ValueError(f"{path} has no map; observe with Observe(map=64) or Observe(keep=True)")
        weights = _cells(observation)[observation.at(head)]
        n, m = observation.n or weights.shape[0], observation.m or weights.shape[1]
        at, keys_at = range(n), range(m)
        one = observation.counted is not None and observation.counted.shape[0] == 1
        row_words, key_words = _words(seen, path, observation, 0) if one else (None, None)
    sides = (at, weights.shape[0], row_words), (keys_at, weights.shape[1], key_words)
    (row_labels, row_span), (key_labels, key_span) = (_side(*side) for side in sides)
    return plots.heat(_array(weights), row_labels, key_labels, rows=row_span, keys=key_span, title=title)


def head_profile(seen: Seen, path: str | int, head: int) -> Figure:
    """One head's mean weight at each relative offset; offsets where no row sees a key (a causal future) are cut off.

    >>> seen = regard.watching.look(regard.models.load(regard.models.bundled()), "a b c a b c")
    >>> figure = head_profile(seen, "decoder.blocks.1.attention", head=0)
    >>> highest = max(figure.axes[0].patches, key=lambda bar: bar.get_height())
    >>> round(highest.get_center()[0])  # it looks one token back
    -1
    """
    path, observation = _place(seen, path, head)
    if observation.profile is None:
        raise ValueError(f"{path} has no profile; observe with Observe(profile=32)")
    weights = _array(observation.profile[observation.at(head)])
    offsets = [np.arange(side) - side // 2 for side in weights.shape]
    counts = None if observation.profile_rows is None else _array(observation.profile_rows[observation.at(head)])
    if counts is not None and counts.any():
        there = np.nonzero(counts)
        spans = [slice(int(x.min()), int(x.max()) + 1) for x in there]
        weights, offsets = weights[tuple(spans)], [x[span] for x, span in zip(offsets, spans, strict=True)]
    return plots.profile(offsets[0] if len(offsets) == 1 else offsets, weights, title=f"{path} · head {head}")


def head_lines(seen: Seen, path: str | int, head: int, *, rows: Where = None, batch: int = 0) -> Figure:
    """One head as lines from words to words: all weights where q and k were kept, else the strongest of each row.

    ``rows`` are those that count unless given. Where there are more than 80 keys only those with a line are shown.

    >>> seen = regard.watching.look(regard.models.load(regard.models.bundled()), "a b c a b c")
    >>> head_lines(seen, "decoder.blocks.1.attention", head=0).texts[0].get_text()
    'decoder.blocks.1.attention · head 0 · 8 strongest keys a query'
    """
    path, observation = _place(seen, path, head)
    entry = _entry(observation, batch)
    place = observation.at(head)
    counted = None if observation.counted is None else observation.counted[entry, place]
    at = _at(rows, observation.n, "rows")
    if rows is None and counted is not None:
        at = [i for i in at if bool(counted[i])]
    if len(at) > plots.MOST_LINES:
        raise ValueError(f"{path} has {len(at)} queries; lines are for up to {plots.MOST_LINES}: choose rows")
    m, note = observation.m, ""
    if m is None:
        raise ValueError(f"calls of unequal sizes were merged at {path}: lines need one call (seen.calls)")
    if observation.kept:
        weights = _array(observation.weights(head, list(at), batch=batch))
        entries = [(int(i), int(j), float(weights[i, j])) for i, j in np.argwhere(weights >= plots.FAINT)]
    elif observation.top is not None and observation.top_at is not None:
        best, best_at = _array(observation.top[entry, place, list(at)]), observation.top_at[entry, place, list(at)]
        found = ((i, int(best_at[i, k]), float(best[i, k])) for i, k in np.ndindex(best.shape))
        entries = [x for x in found if x[2] >= plots.FAINT]  # places beyond the visible keys have weight 0
        note = f" · {best.shape[1]} strongest keys a query"
    else:
        raise ValueError(f"{path} has no weights for lines; observe with Observe(keep=True) or Observe(top=8)")
    shown: list[int] = list(range(m))
    if m > plots.MOST_LINES:
        shown = sorted({j for _, j, _ in entries})
        note += f" · {len(shown)} of {m} keys"
    column = {j: x for x, j in enumerate(shown)}
    row_words, key_words = _words(seen, path, observation, batch)
    return plots.lines(
        [i if row_words is None else row_words[i] for i in at],
        [j if key_words is None else key_words[j] for j in shown],
        [(i, column[j], w) for i, j, w in entries],
        title=f"{path} · head {head}{note}",
    )


def _place(seen: Seen, place: str | int, head: int) -> tuple[str, Observation]:
    """A place's path, and what was seen there."""
    observation = seen[place]
    observation.at(head)  # refuses a head that is not there
    return seen.path(place), observation


def _entry(observation: Observation, batch: int) -> int:
    if observation.counted is None:
        return batch
    if not 0 <= integer("batch", batch) < observation.counted.shape[0]:
        raise ValueError(f"batch is {batch}; this observation has entries 0 … {observation.counted.shape[0] - 1}")
    return batch


def _words(seen: Seen, path: str, observation: Observation, batch: int) -> tuple[list[str] | None, list[str] | None]:
    """The words of the one text that a recording names; other texts of a batch have none."""
    return words(seen.about, path, observation.n, observation.m) if batch == 0 else (None, None)


def _cells(observation: Observation) -> Any:
    """Every head's map ``[H, g, g]`` less the bins that no token falls into: those of a text shorter than the map."""
    assert observation.map is not None
    maps, g = _array(observation.map), observation.map.shape[-1]
    for axis, count in ((1, observation.n), (2, observation.m)):
        if count is not None and 0 < count < g:
            maps = maps.take(np.arange(count) * g // count, axis=axis)
    return maps


def _side(at: Any, cells: int, named: list[str] | None) -> tuple[list[str] | None, tuple[float, float] | None]:
    """Labels and span of one side of a map: words where a cell is one token, numbers where cells pool many."""
    run = [int(i) for i in at]
    together = run == list(range(run[0], run[0] + len(run)))
    span = (run[0], run[-1] + 1) if together else None
    if len(run) == cells and (named is not None or not together):
        return [str(i) if named is None else named[i] for i in run], span
    if together:
        return None, span
    first = (-(-cell * len(run) // cells) for cell in range(cells))  # a cell's first token, as tiles are pooled
    return [f"{run[i]} …" for i in first], None


def _at(where: Where, count: int | None, name: str) -> Any:
    if count is None:
        raise ValueError(f"calls of unequal sizes were merged: choose {name} of one call (seen.calls)")
    found = [int(i) for i in places(where, count, name)]
    if not found:
        raise ValueError(f"{name} {where!r} choose none of {count}")
    return found


def _array(x: Tensor) -> Any:
    return x if isinstance(x, np.ndarray) else x.detach().to("cpu", torch.float64).numpy()
