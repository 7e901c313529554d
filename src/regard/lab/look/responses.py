"""Responses of the Look page: a recording, one head, and the computation of one weight, as plain data."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from regard._errors import RegardError
from regard._lowered_scores import term_tile
from regard._observables import Observation
from regard._saved_call import SavedCall
from regard.interp import Recording
from regard.interp._head_means import head_rows
from regard.interp._head_table import HEAD_COLUMNS, POSITION_COLUMNS, column_meanings, shorten_paths
from regard.interp._html_page import IMAGE_URL, patch_grid, text_index
from regard.interp._join_calls import reason_no_map
from regard.interp._page_maps import encode_map, mean_by_bin
from regard.interp._token_labels import is_cross_attention, label_problem, query_and_key_labels
from regard.kernels.score_tiles import (
    Problem,
    bias_tile,
    largest_products,
    row_max_and_sum,
    tile_shape,
    visible_tile,
)
from regard.lab.look.changed_scores import rotary_of
from regard.lab.look.head_type_fields import stored_head_types
from regard.lab.open_item import OpenItem
from regard.lab.workspace import Workspace

MAX_POINTS = 512  # points of the curve of entropy along the text


def recording_response(workspace: Workspace, item: OpenItem, recording: Recording) -> dict[str, Any]:
    """Return everything that the grid of heads shows."""
    observations = recording.observations()
    pattern, short_names = shorten_paths(list(observations))
    numbers: dict[str, list[list[float | None]]] = {path: [] for path in observations}
    for row in head_rows(observations, recording.metadata):
        numbers[row["path"]].append([row[name] for name in HEAD_COLUMNS])
    model = workspace.model_of(item)
    model_folder = None if model is None else model.folder

    # Most layers read the same tokens: each list of labels is sent once, and layers name it by its index.
    texts: list[list[str]] = []
    places = []
    for index, (path, observation) in enumerate(observations.items()):
        queries, keys = query_and_key_labels(recording.metadata, path, observation.n, observation.m)
        saved_call = observation.saved_calls[0] if observation.saved_calls else None
        place = {
            "place": index,
            "path": path,
            "name": short_names[path],
            "n": observation.n,
            "m": observation.m,
            "heads": list(observation.heads),
            "kept": saved_call is not None,
            "numbers": numbers[path],
            "batches": 0 if observation.counted is None else observation.counted.shape[0],
            "queries": text_index(texts, queries),
            "keys": text_index(texts, keys),
            "grid": patch_grid(observation, recording.metadata),
            "sink": observation.observe.sink,
            "cross": is_cross_attention(recording.metadata, path),
            "no_map": reason_no_map(recording.calls.get(path, [observation]), observation),
            "has": _possible_variants(saved_call, model_folder, path),
        }
        on_image = place["grid"] is not None
        place["meanings"] = column_meanings(on_image=on_image, is_cross=bool(place["cross"]))
        places.append(place | encode_map(observation, 1))

    # The image comes from a file, so it is sent only if it is a data URL of an image.
    image = recording.metadata.get("image")
    if not isinstance(image, str) or not IMAGE_URL.fullmatch(image):
        image = None
    return {
        **item.to_dict(),
        "model": None if model is None else model.id,
        "pattern": pattern,
        "columns": HEAD_COLUMNS,
        "no_model": "" if model is not None else _reason_no_model(recording),
        **stored_head_types(model_folder, recording.metadata),
        "texts": texts,
        "label_problem": label_problem(recording.metadata, recording.sizes()),
        "image": image,
        "unknown_tokens": str(recording.metadata.get("unknown_tokens") or ""),
        "places": places,
    }


def _reason_no_model(recording: Recording) -> str:
    """Return why a recording has no open model, and what to do."""
    if recording.metadata.get("model_files"):
        return "The recording's model is not open, or its files have changed: start the lab with its folder too."
    return (
        "The recording does not name the files of its model (regard.watch observes a model in memory). Run the input "
        "on the model in this lab, or record it with regard look MODEL --out."
    )


def _possible_variants(saved_call: object, model_folder: Path | None, path: str) -> dict[str, Any]:
    """Return which options of a layer's heads can be changed (see ``changed_scores``)."""
    if not isinstance(saved_call, SavedCall):
        return {"mask": False, "position": None, "scale": None, "hard": False}
    scores = saved_call.scores
    position = None
    if scores.terms:
        position = "bias"
    elif rotary_of(model_folder, path) is not None:
        position = "rotary"
    return {
        "mask": scores.lo is not None or scores.hi is not None or scores.mask is not None,
        "position": position,
        "scale": scores.scale if math.isfinite(scores.scale) else None,
        "hard": not scores.softcap and scores.sinks is None,
    }


def head_response(
    observation: Observation,
    head_index: int,
    batch: int,
    *,
    as_trained: str,
    on_text: dict[str, Any],
    is_cross: bool = False,
) -> dict[str, Any]:
    """Return the entropy along the text, the profile and the numbers of one head of a layer's observation.

    ``rows`` is the number of counted rows, and ``one_key`` how many of them see only one key: their spread is 0.

    - ``observation``: the recorded one, or that of a variant of the head.
    - ``as_trained``: why the recorded one is returned although a variant was requested; else an empty text.
    - ``on_text``: see ``text_scores``.
    - ``is_cross``: whether the layer is cross-attention, which has no offsets and distances.
    """
    line: list[float | None] | None = None
    if observation.entropy is not None and observation.counted is not None and observation.n:
        if batch >= observation.entropy.shape[0]:
            raise RegardError(f"batch must be below {observation.entropy.shape[0]}, got {batch}")
        entry = (batch, slice(head_index, head_index + 1))
        bins = min(observation.n, MAX_POINTS)
        values, has_rows = mean_by_bin(observation.entropy[entry][None], observation.counted[entry][None], bins)
        line = values[0].tolist()
        for index in (~has_rows[0]).nonzero().flatten().tolist():
            line[index] = None
    row = head_rows({"": observation}, {})[head_index]
    if is_cross:
        row |= dict.fromkeys(POSITION_COLUMNS)
    one_key = None
    if observation.visible is not None and observation.counted is not None:
        one_key = int(((observation.visible == 1) & observation.counted)[:, head_index].sum())
    return {
        "line": line,
        "positions": observation.n,
        "profile": None if is_cross else _profile(observation, head_index),
        "numbers": {name: row[name] for name in HEAD_COLUMNS},
        "rows": row["rows"],
        "one_key": one_key,
        "as_trained": as_trained or None,
        "on_text": on_text,
    }


def _profile(observation: Observation, head_index: int) -> dict[str, Any] | None:
    """Return the profile of a head; None if it was not observed.

    ``values`` are means over the rows that see a key at the offset. ``shares`` are means over all counted rows, so
    that ``total``, the mean weight on all keys, minus their sum is the weight beyond the radius.
    """
    if observation.profile is None:
        return None
    values = observation.profile[head_index].double()
    rows = int(observation.rows[head_index])
    shares = None
    if observation.profile_rows is not None and rows:
        shares = (values * observation.profile_rows[head_index] / rows).tolist()
    profile = {"values": values.tolist(), "shares": shares, "total": _weight_on_keys(observation, head_index)}
    radii = [side // 2 for side in values.shape]
    if len(radii) == 1:
        return profile | {"radius": radii[0]}
    return profile | {"radii": radii}


def _weight_on_keys(observation: Observation, head_index: int) -> float | None:
    """Return the mean weight of a head's rows on all keys: 1, or less with a learned sink. None if it is not known."""
    if observation.key_mass is not None:
        return float(observation.key_mass[head_index].double().sum())
    if observation.map is not None and observation.map_rows is not None:
        map_rows = observation.map_rows[head_index].double()
        weights = observation.map[head_index].double().sum(1)
        return float((weights * map_rows).sum() / map_rows.sum())
    return None


def weight_response(call: SavedCall, batch: int, head: int, row: int, key: int) -> dict[str, Any]:
    """Return the computation of one weight, step by step in float64, in the order of ``regard.attention``.

    scale · q·k → softcap → + biases → mask → softmax: weight = exp(logit − lse), where lse = high + log(total).
    """
    problem = call.select_head(batch, head)
    scores = problem.scores
    q = problem.q[0, 0, row].double()
    k = problem.k[0, 0, key].double()

    # With an infinite scale (hard attention) the score is not finite, so the steps after it are left out.
    product = float(q @ k)
    scaled = product * scores.scale if math.isfinite(scores.scale) else None
    capped = None
    if scores.softcap and scaled is not None:
        capped = scores.softcap * math.tanh(scaled / scores.softcap)
    biases = _biases(problem, row, key)
    logit = scaled if capped is None else capped
    if logit is not None:
        logit += sum(value for _, value in biases)

    hidden = _is_hidden(problem, row, key)

    # The row's largest logit, and the sum of exp(logit − largest logit), in float64 like everything above. The weight
    # follows from them, so that the steps reproduce it to the last digit.
    row_max, row_sum = _row_max_and_sum(problem, row)
    lse = None
    if row_sum:
        lse = row_max + math.log(row_sum)
    weight = float(call.weights(batch, head, row, key)[0, 0])
    if logit is not None and lse is not None and math.isfinite(logit) and math.isfinite(lse) and not hidden:
        weight = math.exp(logit - lse)
    return {
        "product": product,
        "scale": _json_number(scores.scale),
        "scaled": _json_number(scaled),
        "softcap": scores.softcap or None,
        "capped": capped,
        "biases": [{"name": name, "value": _json_number(value)} for name, value in biases],
        "logit": _json_number(logit),
        "hidden": hidden,
        "high": _json_number(row_max),
        "total": _json_number(row_sum),
        "lse": _json_number(lse),
        "weight": weight,
        "q": q.tolist(),
        "k": k.tolist(),
        "contributions": (q * k).tolist(),
    }


def is_hidden(call: SavedCall, batch: int, head: int, row: int, key: int) -> bool:
    """Return whether a call hides a key from a query."""
    return _is_hidden(call.select_head(batch, head), row, key)


def _is_hidden(problem: Problem, row: int, key: int) -> bool:
    at_row = torch.tensor([row])
    at_key = torch.tensor([key])
    visible = visible_tile(problem, at_row, at_key, bias_tile(problem, at_row, at_key))
    return visible is not None and not bool(visible.reshape(-1)[0])


def _row_max_and_sum(problem: Problem, row: int) -> tuple[float, float]:
    """Return the largest logit of a row, and the sum of exp(logit − largest logit), by the reference kernel."""
    m = problem.k.shape[2]
    at_row = torch.tensor([row])
    step = tile_shape(problem)[1]
    spans = [slice(start, min(start + step, m)) for start in range(0, m, step)]
    row_max, row_sum = row_max_and_sum(problem, at_row, spans, largest_products(problem, at_row, spans))
    return float(row_max.reshape(-1)[0]), float(row_sum.reshape(-1)[0])


def _biases(problem: Problem, row: int, key: int) -> list[tuple[str, float]]:
    """Return the name and the value of everything that is added to the score."""
    biases = []
    bias = problem.scores.bias
    if bias is not None:
        # A bias tensor may have size 1 where it is the same for all rows or all keys.
        value = bias[0, 0, min(row, bias.shape[2] - 1), min(key, bias.shape[3] - 1)]
        biases.append(("bias", float(value)))
    terms = problem.scores.terms
    names = ["position"]
    if len(terms) > 1:  # positions on a grid: one term per axis
        names = ["position y", "position x"] + ["position"] * len(terms)
    for name, term in zip(names, terms, strict=False):
        value = term_tile(term, torch.tensor([row]), torch.tensor([key])).reshape(-1)[0]
        biases.append((name, float(value)))
    return biases


def _json_number(x: float | None) -> float | str | None:
    """Return ``x`` in a form that JSON can hold: infinity and NaN become the strings "inf", "-inf" and "nan"."""
    if x is None or math.isfinite(x):
        return x
    return str(float(x))
