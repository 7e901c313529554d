"""What the room «Look» says of a recording, of a head, and of one weight; plain data."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from regard.kept import KeptCall
from regard.kernels.tiles import Problem, bias_tile, visible_tile
from regard.lab.kinds import known_kinds
from regard.lab.lab import Lab, Opened
from regard.lab.variant import rotary_of
from regard.observables import Observation
from regard.scores import term_tile
from regard.watching import Seen, atlas, table
from regard.watching.page import IMAGE, grid_of, packed_map, pooled, shared
from regard.watching.words import words

__all__ = ["head_answer", "recording_answer", "why_answer"]

POINTS = 512  # of a line


def recording_answer(lab: Lab, one: Opened, seen: Seen) -> dict[str, Any]:
    """Everything the grid shows."""
    places = seen.each()
    pattern, names = table.shortened(list(places))
    numbers: dict[str, list[list[float | None]]] = {path: [] for path in places}
    for row in table.rows(places):
        numbers[row["path"]].append([row[name] for name in table.COLUMNS])
    model = lab.model_of(one)
    texts: list[list[str]] = []
    told = []
    for number, (path, observation) in enumerate(places.items()):
        queries, keys = words(seen.about, path, observation.n, observation.m)
        kept = observation.kept[0] if observation.kept else None
        folder = model.folder if model else None
        told.append(
            {
                **{"place": number, "path": path, "name": names[path], "n": observation.n, "m": observation.m},
                **{"heads": list(observation.heads), "kept": kept is not None, "numbers": numbers[path]},
                **{"batches": 0 if observation.counted is None else observation.counted.shape[0]},
                **{"queries": shared(texts, queries), "keys": shared(texts, keys)},
                **{"grid": grid_of(observation, seen.about), "sink": observation.observe.sink},
                **packed_map(observation, 1),
                "has": _has(kept, folder, path),
            }
        )
    image = seen.about.get("image")
    return {
        **one.to_dict(),
        "model": model.id if model else None,
        "pattern": pattern,
        "columns": table.COLUMNS,
        "kind_columns": atlas.COLUMNS,
        "kinds": known_kinds(lab, model) if model else None,
        "texts": texts,
        "image": image if isinstance(image, str) and IMAGE.fullmatch(image) else None,
        "places": told,
    }


def _has(call: Any, folder: Any, path: str) -> dict[str, Any]:
    """What of a head can be changed."""
    if not isinstance(call, KeptCall):
        return {"mask": False, "position": None, "scale": None, "hard": False}
    scores = call.scores
    position = "bias" if scores.terms else "rotary" if rotary_of(folder, path) is not None else None
    return {
        "mask": any(x is not None for x in (scores.lo, scores.hi, scores.mask)),
        "position": position,
        "scale": scores.scale if math.isfinite(scores.scale) else None,
        "hard": not scores.softcap and scores.sinks is None,
    }


def head_answer(observation: Observation, at: int, batch: int) -> dict[str, Any]:
    """A head's line, profile and numbers."""
    line: list[float | None] | None = None
    if observation.entropy is not None and observation.counted is not None and observation.n:
        if batch >= observation.entropy.shape[0]:
            raise ValueError(f"there is no batch entry {batch}; there are {observation.entropy.shape[0]}")
        one = (batch, slice(at, at + 1))
        values, some = pooled(
            observation.entropy[one][None], observation.counted[one][None], min(observation.n, POINTS)
        )
        line = [x if there else None for x, there in zip(values[0].tolist(), some[0].tolist(), strict=True)]
    rows = table.rows({"": observation})
    return {
        "line": line,
        "positions": observation.n,
        "profile": _profile(observation, at),
        "numbers": {name: rows[at][name] for name in table.COLUMNS},
    }


def _profile(observation: Observation, at: int) -> dict[str, Any] | None:
    if observation.profile is None:
        return None
    values = observation.profile[at].float()
    radii = [side // 2 for side in values.shape]
    return (
        {"values": values.tolist(), "radius": radii[0]}
        if len(radii) == 1
        else {
            "values": values.tolist(),
            "radii": radii,
        }
    )


def why_answer(call: KeptCall, batch: int, head: int, row: int, key: int) -> dict[str, Any]:
    """One weight, step by step, in float64: the order is that of ``regard.attention``."""
    problem = call._head(batch, head)
    q, k = (x[0, 0].double() for x in (problem.q[:, :, row], problem.k[:, :, key]))
    scores = problem.scores
    product = float(q @ k)
    scaled = product * scores.scale if math.isfinite(scores.scale) else None
    capped = scores.softcap * math.tanh(scaled / scores.softcap) if scores.softcap and scaled is not None else None
    biases = _biases(problem, row, key)
    at, where = torch.tensor([row]), torch.tensor([key])
    see = visible_tile(problem, at, where, bias_tile(problem, at, where))
    hidden = see is not None and not bool(see.reshape(-1)[0])
    score = capped if capped is not None else scaled
    logit = None if score is None else score + sum(x["value"] for x in biases)
    sums = call.sums(batch, head, slice(row, row + 1))
    high, total = (float(x[0]) for x in sums) if sums is not None else (None, None)
    lse = None if high is None or not total else high + math.log(total)
    return {
        **{
            "product": product,
            "scale": _plain(scores.scale),
            "scaled": _plain(scaled),
            "softcap": scores.softcap or None,
        },
        **{"capped": capped, "biases": [x | {"value": _plain(x["value"])} for x in biases], "logit": _plain(logit)},
        **{"hidden": hidden, "high": _plain(high), "total": _plain(total), "lse": _plain(lse)},
        "weight": float(call.weights(batch, head, row, key)[0, 0]),
        **{"q": q.tolist(), "k": k.tolist(), "contributions": (q * k).tolist()},
    }


def _biases(problem: Problem, row: int, key: int) -> list[dict[str, Any]]:
    rows, keys = torch.tensor([row]), torch.tensor([key])
    found: list[tuple[str, Tensor]] = []
    bias = problem.scores.bias
    if bias is not None:
        found.append(("bias", bias[0, 0, min(row, bias.shape[2] - 1), min(key, bias.shape[3] - 1)]))
    for number, term in enumerate(problem.scores.terms):
        several = len(problem.scores.terms) > 1
        found.append(
            (f"position {'yx'[number] if several and number < 2 else ''}".strip(), term_tile(term, rows, keys))
        )
    return [{"name": name, "value": float(value.reshape(-1)[0])} for name, value in found]


def _plain(x: float | None) -> float | str | None:
    """JSON has no infinity: it is a word there."""
    if x is None or math.isfinite(x):
        return x
    return "nan" if math.isnan(x) else "inf" if x > 0 else "-inf"
