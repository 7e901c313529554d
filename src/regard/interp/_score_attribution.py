"""Score attribution: the score of one query and one key as a sum over pairs of parts of the model."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from regard._checks import check_instance, check_integer
from regard._devices import on_cpu_in_float64
from regard._errors import RegardError
from regard._hooks import AttentionCall, Observer
from regard._observables import Observation, Observe
from regard._saved_call import SavedCall
from regard.interp._linear_paths import LinearPaths
from regard.interp._logit_attribution import (
    TOLERANCE,
    Inputs,
    checked_ids,
    plain_run,
    reasons_unseen,
    run_linear,
)
from regard.interp._logit_parts import KINDS
from regard.interp._model_blocks import HEAD, exact_and_frozen
from regard.interp._path_sources import Source
from regard.interp._register_observers import list_paths
from regard.interp._score_pairs import Component, ScoreParts
from regard.kernels.score_tiles import Problem, bias_tile, visible_tile

Progress = Callable[[int, int], None]


def score_attribution(model: nn.Module, inputs: Inputs, layer: int | str, head: int, row: int, key: int) -> ScoreParts:
    """Split the score s_ij of one query and one key over pairs of parts of the model, with every norm's scale frozen.

        s_ij = scale · q_i·k_j + bias_ij = scale · Σ_ab ⟨q_a, k_b⟩ + bias_ij

    q_a is what part a (an embedding, a head or a feed-forward network of an earlier layer, a bias) adds to the query,
    and k_b what part b adds to the key, after their norms and rotations.

    - ``model``: a model of regard or of ``transformers``, or another PyTorch model with a residual stream.
    - ``inputs``: token ids ``[n]`` or ``[1, n]``, or a function that runs the model.
    - ``layer``: the path of an attention layer, or its number in the order of the calls; ``head``: its head.
    - ``row``, ``key``: the query i and the key j; negative ones count from the end.

    Returns ``ScoreParts``. Their sum is compared with the score that the layer computes: it must agree to 10⁻⁴,
    relative to the score or to the largest pair. With a softcap, the score before the cap is split.

    Raises ``RegardError`` if the key is hidden from the query, if the pairs do not sum to the score, or if the model
    computes its scores itself, without a call of attention.

    >>> model = regard.models.load(regard.models.bundled())
    >>> ids = torch.tensor(model.tokenizer.encode("import os; import o"))
    >>> parts = score_attribution(model, ids, layer=1, head=0, row=-1, key=-2)
    >>> bool(abs(parts.sum() - parts.score) <= 1e-4 * abs(parts.values).max())
    True
    >>> len(parts.queries), parts.values.shape[1] == len(parts.keys)
    (8, True)
    """
    return split_score(model, inputs, layer, head, row, key)


def split_score(
    model: nn.Module,
    inputs: Inputs,
    layer: int | str,
    head: int,
    row: int,
    key: int,
    progress: Progress | None = None,
) -> ScoreParts:
    """``score_attribution``, which also reports its progress: steps done, and steps in all."""
    check_instance("model", model, nn.Module)
    ids = checked_ids(inputs)
    with torch.inference_mode(False), exact_and_frozen(model):
        plain = plain_run(model, inputs, ids, needs_logits=False)
        path = _path_of(plain.attention, layer)
        observer = _StopAtLayer(model, path, check_integer("head", head))
        paths = LinearPaths(model, observer.paths, list(plain.attention), ids=plain.ids, opened=path)
        observer.linear = paths
        try:
            run_linear(model, inputs, plain.ids, paths, observer)
        except _Stopped as stopped:
            call = stopped
        else:
            raise RegardError(f"{path} was not reached a second time; inputs must run the model in the same way")
        n, m = call.sizes
        row = check_integer("row", row, least=-n, most=n - 1) % n
        key = check_integer("key", key, least=-m, most=m - 1) % m
        problem = call.saved.select_head(0, call.index)
        scale, bias = _scale_and_bias(problem, path, row, key)

        widths = call.q.shape[-1]
        steps = [0, 2 * widths]
        sides = []
        with torch.enable_grad():
            for name, vector in (("query", call.q[row]), ("key", call.k[key])):
                sides.append(_components(paths, vector, f"the {name} of {path}", steps, progress))
    query_parts, q_CD = sides[0]
    key_parts, k_CD = sides[1]
    result = ScoreParts(
        score=scale * float(on_cpu_in_float64(call.q[row]) @ on_cpu_in_float64(call.k[key])) + bias,
        layer=path,
        head=head,
        row=row,
        key=key,
        queries=tuple(query_parts),
        keys=tuple(key_parts),
        values=scale * (q_CD @ k_CD.T),
        bias=bias,
        softcap=problem.scores.softcap or None,
    )
    _check_sum(result, problem, scale, model)
    return result


class _Stopped(BaseException):
    """Raised at the attention call whose score is split: the model need not run on.

    - ``q [n, D]``, ``k [m, D]``: queries and keys of the head, with their linear paths.
    - ``saved``: the saved call, and ``index``, the place of the head in it.
    """

    def __init__(self, q: Tensor, k: Tensor, saved: SavedCall, index: int) -> None:
        super().__init__()
        self.q = q
        self.k = k
        self.saved = saved
        self.index = index

    @property
    def sizes(self) -> tuple[int, int]:
        return self.q.shape[0], self.k.shape[0]


class _StopAtLayer(Observer):
    """Makes the outputs of heads sources, up to the layer whose score is split."""

    linear: LinearPaths

    def __init__(self, model: nn.Module, path: str, head: int) -> None:
        super().__init__(model)
        self.path = path
        self.head = head

    def before(self, call: AttentionCall) -> Observe | None:
        if call.path != self.path:
            return None
        if call.q is not None:
            check_integer(f"head of {self.path}", self.head, most=call.q.shape[-3] - 1)
        return Observe(keep=True)

    def after(self, call: AttentionCall, out: Tensor, observation: Observation | None) -> Tensor:
        if call.path != self.path:
            return self.linear.begin_at_heads(call.path, out)[0]
        if call.q is None or call.k is None or observation is None or not observation.saved_calls:
            raise RegardError(
                f"{self.path} computes its weights itself (attention written by hand), so its queries and keys are not "
                "known; a score can be split in models that call an attention function"
            )
        saved = observation.saved_calls[0]
        assert isinstance(saved, SavedCall)
        H = call.q.shape[-3]
        # Several query heads may share a key head.
        q_HND = call.q.reshape(-1, *call.q.shape[-3:])[0]
        k_GMD = call.k.reshape(-1, *call.k.shape[-3:])[0]
        group = self.head * len(k_GMD) // H
        raise _Stopped(q_HND[self.head], k_GMD[group], saved, self.head)


def _path_of(attention: dict[str, int], layer: int | str) -> str:
    for path, number in attention.items():
        if layer in (path, number):
            return path
    raise RegardError(f"layer must be one of {list_paths(attention)} or its number, got {layer!r}")


def _scale_and_bias(problem: Problem, path: str, row: int, key: int) -> tuple[float, float]:
    """The scale of q·k, and what positions add to the score."""
    at_row = torch.tensor([row], device=problem.q.device)
    at_key = torch.tensor([key], device=problem.q.device)
    tile = bias_tile(problem, at_row, at_key)
    visible = visible_tile(problem, at_row, at_key, tile)
    if visible is not None and not bool(visible.all()):
        raise RegardError(f"key {key} is hidden from row {row} in {path}, so there is no score")
    scale = problem.scores.scale
    if not math.isfinite(scale):
        raise RegardError(f"{path} is hard attention (scale=inf), whose scores are not finite")
    bias = 0.0
    if tile is not None:
        bias = float(tile.reshape(-1)[0])
    return scale, bias


def _components(
    paths: LinearPaths, vector_D: Tensor, name: str, steps: list[int], progress: Progress | None
) -> tuple[list[Component], Tensor]:
    """The parts of a query or of a key, and what each of them adds to it: ``[C, D]`` in float64."""
    columns: list[dict[Component, float]] = []
    for d in range(len(vector_D)):
        if progress is not None:
            progress(*steps)
        contributions = paths.sources.contributions(vector_D[d], again=True)
        reasons = reasons_unseen(paths, contributions, vector_D)
        if reasons:
            raise RegardError(f"{name} is not the sum of parts that can be seen: {'; '.join(reasons)}")
        columns.append(_values(contributions))
        steps[0] += 1

    # A part may be missing in a column if nothing leads from it to this entry of the vector.
    found = dict.fromkeys(part for column in columns for part in column)
    parts = sorted(found, key=lambda part: KINDS.index(part.kind))
    x_CD = torch.zeros(len(parts), len(columns), dtype=torch.float64)
    for c, part in enumerate(parts):
        for d, column in enumerate(columns):
            x_CD[c, d] = column.get(part, 0.0)
    error = (x_CD.sum(0) - on_cpu_in_float64(vector_D)).abs().max()
    if not bool(error <= TOLERANCE * x_CD.abs().max()):
        raise RegardError(f"{name} is not the sum of parts that can be seen: {float(error):.3g} is missing")
    # Rows of other tokens and parts behind a mask add nothing.
    used = (x_CD != 0).any(1).tolist()
    return [part for part, is_used in zip(parts, used, strict=True) if is_used], x_CD[used]


def _values(contributions: dict[Source, Tensor]) -> dict[Component, float]:
    """What each part adds to one number."""
    values: dict[Component, float] = {}
    for source, value in contributions.items():
        numbers: list[tuple[int | None, float]] = [(None, float(value.sum()))]
        if source.kind == HEAD:
            numbers = list(enumerate(value.tolist()))
        for head, number in numbers:
            part = Component(source.kind, source.path, head)
            values[part] = values.get(part, 0.0) + number
    return values


def _check_sum(result: ScoreParts, problem: Problem, scale: float, model: nn.Module) -> None:
    """Raise if the pairs do not sum to the score that the layer computed."""
    q_D = on_cpu_in_float64(problem.q[0, 0, result.row])
    k_D = on_cpu_in_float64(problem.k[0, 0, result.key])
    score = scale * float(q_D @ k_D) + result.bias
    largest = max([abs(score), abs(result.bias), *result.values.abs().reshape(-1).tolist()])
    if not abs(result.sum() - score) <= TOLERANCE * largest:
        raise RegardError(
            f"a score of {type(model).__name__} ({score:.6g}) is not the sum of pairs that can be seen "
            f"({result.sum():.6g})"
        )
