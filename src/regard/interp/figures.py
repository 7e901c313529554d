"""Figures of a recording: all heads at once, and one head as a map, as a profile, and as lines between tokens.

They show pooled or exact weights: where a head attends, not how large the values are that it reads there.
``logit_parts`` draws what each part of a model adds to a logit. ``regard.plots.save`` writes figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from regard import plots
from regard._checks import check_integer
from regard._devices import on_cpu_in_float64
from regard._errors import RegardError
from regard._observables import Index, Observation, index_tensor
from regard.interp._head_table import DIFFERENT_SEQUENCES, shorten_paths
from regard.interp._join_calls import reason_no_map
from regard.interp._logit_parts import LogitParts
from regard.interp._page_maps import keys_per_bin, without_empty_bins
from regard.interp._patch_figure import patching
from regard.interp._recording import Recording
from regard.interp._token_labels import check_token_labels, is_cross_attention, query_and_key_labels
from regard.plots._maps import WEIGHT_LABEL

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["head_lines", "head_map", "head_profile", "heads", "logit_parts", "patching"]

MAP_CELLS = 64  # per side of a map, by default
PER_KEY_LABEL = "mean weight per key"  # what a cell of a pooled map shows


@plots.styled
def heads(recording: Recording, *, style: plots.FigureStyle | None = None) -> Figure:
    """The pooled map of every head: one row per layer in the order of the calls, one column per head.

    Layers without a map, such as the steps of a generation, are left out; the title then says how many have one.

    - ``style``: width, font, palette and title; see ``regard.plots.FigureStyle``.

    >>> recording = regard.interp.look(regard.models.load(regard.models.bundled()), "a b c a b c")
    >>> heads(recording).texts[0].get_text()  # regard.plots.save(figure, "heads.svg") writes it
    '12 heads of decoder.blocks.*.attention'
    """
    observations = recording.observations()
    maps = {path: _map_cells(x) for path, x in observations.items() if x.map is not None}
    if not maps:
        if not observations:
            raise RegardError("the recording is empty; there is nothing to show")
        reasons = {_reason_no_map(recording, path, x) for path, x in observations.items()}
        raise RegardError(f"no head has a map: {'; '.join(sorted(reasons))}")
    value_label = "weight"
    if any(_is_pooled(observations[path], cells.shape[-1]) for path, cells in maps.items()):
        value_label = PER_KEY_LABEL
    pattern, names = shorten_paths(list(maps))
    columns: set[int] = set()
    for path in maps:
        columns |= set(observations[path].heads)

    # A head that was not observed in a layer leaves its cell empty.
    rows = []
    for path, cells in maps.items():
        by_head = dict(zip(observations[path].heads, cells, strict=True))
        empty = np.zeros_like(cells[0])
        rows.append(np.stack([by_head.get(head, empty) for head in sorted(columns)]))
    title = f"{sum(map(len, maps.values()))} heads"
    if pattern:
        title += f" of {pattern}"
    if len(maps) < len(observations):
        title += f" ({len(maps)} of {len(observations)} layers have maps)"
    # Names such as "encoder.0" already say what they are.
    y_label = None
    if all(name.isdecimal() for name in names.values()):
        y_label = "layer"
    return plots.grid(
        rows,
        row_labels=list(names.values()),
        column_labels=sorted(columns),
        x_label="head",
        y_label=y_label,
        title=title,
        value_label=value_label,
    )


@plots.styled
def head_map(
    recording: Recording,
    path: str | int,
    head: int,
    *,
    rows: Index = None,
    keys: Index = None,
    size: int | None = None,
    batch: int = 0,
    style: plots.FigureStyle | None = None,
) -> Figure:
    """The weights of one head as a map.

    If q and k were kept (``Observe(keep=True)``) it shows the chosen region: exact weights with token labels if the
    region has at most ``size`` queries and keys, else pooled weights. Without q and k it shows the pooled map of all
    rows. A pooled cell shows the mean weight of its queries on its keys, per key: cells hold different numbers of keys,
    and sums over them would look like stripes.

    - ``recording``: of ``regard.watch`` or ``regard.interp.look``.
    - ``path``: the layer, a module path or its number in the order of the calls.
    - ``head``: the number of the head.
    - ``rows``, ``keys``: the region; everything by default.
    - ``size``: the most cells per side; 64 by default.
    - ``batch``: the batch entry.
    - ``style``: as in ``heads``.

    >>> recording = regard.interp.look(regard.models.load(regard.models.bundled()), "a b c a b c")
    >>> figure = head_map(recording, 1, head=0)
    >>> figure.texts[0].get_text(), figure.axes[0].images[0].get_array().shape
    ('decoder.blocks.1.attention · head 0', (7, 7))
    """
    path, observation = _find_head(recording, path, head)
    row_labels = None
    key_labels = None
    if observation.saved_calls:
        weights = _array(observation.tile(head, rows, keys, size if size is not None else MAP_CELLS, batch=batch))
        row_indices = _indices(rows, observation.n, "rows")
        key_indices = _indices(keys, observation.m, "keys")
        weights = weights / _array(keys_per_bin(weights.shape[1], len(key_indices)))
        row_labels, key_labels = _labels(recording, path, observation, batch)
    else:
        if rows is not None or keys is not None or size is not None or batch != 0:
            raise RegardError("rows, keys, size and batch need q and k, which were not kept: Observe(keep=True)")
        if observation.map is None:
            reason = _reason_no_map(recording, path, observation)
            if not observation.observe.map:
                # One head can also be drawn from its q and k; the figure of all heads cannot.
                reason += " or Observe(keep=True)"
            raise RegardError(f"{path} has no map: {reason}")
        weights = _map_cells(observation)[observation.head_index(head)]
        row_indices = range(observation.n or weights.shape[0])
        key_indices = range(observation.m or weights.shape[1])
        # The map of several texts has no tokens of its own.
        if observation.counted is not None and observation.counted.shape[0] == 1:
            row_labels, key_labels = _labels(recording, path, observation, 0)
    row_ticks, row_span = _axis(row_indices, weights.shape[0], row_labels)
    key_ticks, key_span = _axis(key_indices, weights.shape[1], key_labels)
    title = f"{path} · head {head}"
    value_label = WEIGHT_LABEL
    if len(key_indices) > weights.shape[1]:
        value_label = PER_KEY_LABEL
    return plots.heatmap(
        _array(weights), row_ticks, key_ticks, rows=row_span, keys=key_span, title=title, value_label=value_label
    )


@plots.styled
def head_profile(recording: Recording, path: str | int, head: int, *, style: plots.FigureStyle | None = None) -> Figure:
    """The mean weight of one head at each relative offset; offsets that no row sees (a causal future) are left out.

    - ``recording``, ``path``, ``head``, ``style``: as in ``head_map``.

    >>> recording = regard.interp.look(regard.models.load(regard.models.bundled()), "a b c a b c")
    >>> figure = head_profile(recording, "decoder.blocks.1.attention", head=0)
    >>> highest = max(figure.axes[0].patches, key=lambda bar: bar.get_height())
    >>> round(highest.get_center()[0])  # it attends to the previous token
    -1
    """
    path, observation = _find_head(recording, path, head)
    if is_cross_attention(recording.metadata, path):
        raise RegardError(f"{path} has no profile: {DIFFERENT_SEQUENCES}, so there are no offsets")
    if observation.profile is None:
        raise RegardError(f"{path} has no profile; observe with Observe(profile=32)")
    index = observation.head_index(head)
    weights = _array(observation.profile[index])
    offsets = [np.arange(side) - side // 2 for side in weights.shape]
    # Cut the sides that no row can see.
    if observation.profile_rows is not None:
        counts = _array(observation.profile_rows[index])
        if counts.any():
            spans = [slice(int(x.min()), int(x.max()) + 1) for x in np.nonzero(counts)]
            weights = weights[tuple(spans)]
            offsets = [x[span] for x, span in zip(offsets, spans, strict=True)]
    title = f"{path} · head {head}"
    if len(offsets) == 1:
        return plots.profile(offsets[0], weights, title=title)
    return plots.profile(offsets, weights, title=title)


@plots.styled
def head_lines(
    recording: Recording,
    path: str | int,
    head: int,
    *,
    rows: Index = None,
    batch: int = 0,
    style: plots.FigureStyle | None = None,
) -> Figure:
    """One head as lines between tokens: all weights if q and k were kept, else the strongest keys of each row.

    With more than 80 keys only those with a line are shown.

    - ``recording``, ``path``, ``head``, ``batch``, ``style``: as in ``head_map``.
    - ``rows``: the queries; the counted rows by default.

    >>> recording = regard.interp.look(regard.models.load(regard.models.bundled()), "a b c a b c")
    >>> head_lines(recording, "decoder.blocks.1.attention", head=0).texts[0].get_text()
    'decoder.blocks.1.attention · head 0 · 8 strongest keys per query'
    """
    path, observation = _find_head(recording, path, head)
    index = observation.head_index(head)
    counted = observation.counted
    if counted is not None and not 0 <= check_integer("batch", batch) < counted.shape[0]:
        raise RegardError(f"batch is {batch}; this observation has entries 0 … {counted.shape[0] - 1}")
    queries = _indices(rows, observation.n, "rows")
    if rows is None and counted is not None:
        queries = [i for i in queries if bool(counted[batch, index, i])]
    if len(queries) > plots.MOST_LINES:
        raise RegardError(f"{path} has {len(queries)} queries; lines are for up to {plots.MOST_LINES}: choose rows")
    m = observation.m
    if m is None:
        raise RegardError(f"calls of unequal sizes were merged at {path}: lines need one call (recording.calls)")

    # The lines as (query, key, weight). Weights of 0 are hidden keys, and most others are too faint to see.
    title = f"{path} · head {head}"
    lines: list[tuple[int, int, float]] = []
    if observation.saved_calls:
        weights = _array(observation.weights(head, list(queries), batch=batch))
        for i, j in np.argwhere(weights >= plots.FAINTEST_LINE):
            lines.append((int(i), int(j), float(weights[i, j])))
    elif observation.top is not None and observation.top_at is not None:
        strongest = _array(observation.top[batch, index, list(queries)])
        strongest_keys = observation.top_at[batch, index, list(queries)]
        for i, k in np.argwhere(strongest >= plots.FAINTEST_LINE):
            lines.append((int(i), int(strongest_keys[i, k]), float(strongest[i, k])))
        title += f" · {strongest.shape[1]} strongest keys per query"
    else:
        raise RegardError(f"{path} has no weights for lines; observe with Observe(keep=True) or Observe(top=8)")

    # A long text has more keys than a figure can show.
    if m <= plots.MOST_LINES:
        keys = list(range(m))
    else:
        keys = sorted({j for _, j, _ in lines})
        title += f" · {len(keys)} of {m} keys"
    column = dict(zip(keys, range(len(keys)), strict=True))
    row_labels, key_labels = _labels(recording, path, observation, batch)
    lines = [(i, column[j], weight) for i, j, weight in lines]
    return plots.lines(_select_labels(queries, row_labels), _select_labels(keys, key_labels), lines, title=title)


@plots.styled
def logit_parts(parts: LogitParts, most: int = 20, *, style: plots.FigureStyle | None = None) -> Figure:
    """The largest parts of a logit as bars, the largest first, and the sum of all others in the last bar.

    - ``parts``: from ``regard.interp.logit_attribution``.
    - ``most``: how many parts have a bar of their own, at most 59.
    - ``style``: width, font, palette and title; see ``regard.plots.FigureStyle``.

    >>> model = regard.models.load(regard.models.bundled())
    >>> ids = torch.tensor(model.tokenizer.encode("import os; import o"))
    >>> parts = regard.interp.logit_attribution(model, ids, target=model.tokenizer.encode("s")[-1])
    >>> figure = logit_parts(parts, 5)
    >>> figure.axes[0].get_yticklabels()[-1].get_text(), len(figure.axes[0].patches)
    ('14 more', 6)
    """
    shown = parts.top(check_integer("most", most, least=1, most=plots.MOST_BARS - 1))
    pattern, names = shorten_paths([part.path for part in parts.of("head")])
    labels = []
    for part in shown:
        label = part.name
        # Long paths would leave no room for the bars.
        if part.head is not None and pattern:
            label = f"layer {names[part.path]} head {part.head}"
        labels.append(label)
    values = [part.value for part in shown]
    if len(shown) < len(parts.parts):
        labels.append(f"{len(parts.parts) - len(shown)} more")
        values.append(parts.sum() - sum(values))
    title = f"{parts.target_name}: {parts.sum():.3g}"
    if parts.softcap is not None:
        title += f", before the cap {parts.softcap:g}"
    return plots.bars(labels, values, title=title, value_label="part of the logit")


def _select_labels(indices: Sequence[int], labels: list[str] | None) -> list[str]:
    """The labels of some tokens; their indices if there are no labels."""
    if labels is None:
        return list(map(str, indices))
    return [labels[i] for i in indices]


def _find_head(recording: Recording, layer: str | int, head: int) -> tuple[str, Observation]:
    """The path and the observation of a layer; raises if the head was not observed."""
    observation = recording[layer]
    observation.head_index(head)
    return recording.path(layer), observation


def _labels(
    recording: Recording, path: str, observation: Observation, batch: int
) -> tuple[list[str] | None, list[str] | None]:
    """The token labels of the queries and keys. A recording names the tokens of the first batch entry only."""
    if batch != 0:
        return None, None
    check_token_labels(recording.metadata, recording.sizes())
    return query_and_key_labels(recording.metadata, path, observation.n, observation.m)


def _map_cells(observation: Observation) -> Any:
    """The map of every head ``[H, rows, columns]``, per key and without empty bins."""
    assert observation.map is not None
    cells = _array(without_empty_bins(observation.map, observation.n, observation.m))
    return cells / _array(keys_per_bin(cells.shape[-1], observation.m))


def _reason_no_map(recording: Recording, path: str, observation: Observation) -> str:
    # Calls that observed different heads are separate observations, which are not in ``calls`` under their names.
    return reason_no_map(recording.calls.get(path, [observation]), observation)


def _is_pooled(observation: Observation, columns: int) -> bool:
    """Whether a column of the map covers several keys."""
    return observation.m is None or observation.m > columns


def _axis(
    indices: Sequence[int], cells: int, labels: list[str] | None
) -> tuple[list[str] | None, tuple[float, float] | None]:
    """Tick labels and span of one side of a map: labels if each cell is one token, a span if cells pool many."""
    is_run = list(indices) == list(range(indices[0], indices[0] + len(indices)))
    span = None
    if is_run:
        span = (indices[0], indices[-1] + 1)
    if len(indices) == cells and (labels is not None or not is_run):
        return _select_labels(indices, labels), span
    if is_run:
        return None, span
    # The first token of each cell, as tiles are pooled: ⌈cell · tokens / cells⌉.
    return [f"{indices[-(-cell * len(indices) // cells)]} …" for cell in range(cells)], None


def _indices(index: Index, count: int | None, name: str) -> Sequence[int]:
    if count is None:
        raise RegardError(f"calls of unequal sizes were merged: choose {name} of one call (recording.calls)")
    indices: list[int] = index_tensor(index, count, name).tolist()
    if not indices:
        raise RegardError(f"{name}={index!r} choose none of {count}")
    return indices


def _array(x: Tensor | np.ndarray[Any, Any]) -> Any:
    if isinstance(x, np.ndarray):
        return x
    return on_cpu_in_float64(x).numpy()
