"""``capture``: what single heads compute in a run of a model, to be put into other runs by ``patch``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from regard._checks import check_instance, describe_value
from regard._errors import RegardError, RegardTypeError
from regard._hooks import AttentionCall, Observer, own_computation
from regard._observables import Observation, Observe
from regard._saved_call import SavedCall
from regard._shapes import flatten_batch
from regard.interp._patch_heads import check_known, has_query_tables, head_inputs, head_values, key_heads
from regard.interp._patch_sites import PARTS, Site, SiteLike, SiteSelection, as_sites, heads_of
from regard.interp._register_observers import NO_VISIBLE_ATTENTION, observing

Inputs = Tensor | Callable[[], Any]
Key = tuple[str, int, str]  # path, head, part


@dataclass(frozen=True, eq=False)
class CapturedQuery:
    """The queries of a head ``[B, n, d]``, and the tables of the relative terms that were computed from them."""

    q: Tensor
    tables: list[Tensor | None]


Value = Tensor | CapturedQuery | SavedCall


class Captured:
    """What heads computed in one run: a source for ``patch``, which can be used several times. ``capture`` makes it.

    ``captured[layer, head, part]`` is a tensor ``[B, n, width]`` (k and v: ``[B, m, width]``); a layer is a path or a
    number. For ``"pattern"`` it is a saved call of this head, and ``captured[0, 1, "pattern"].weights(batch, 0, rows,
    keys)`` are exact weights.

    >>> model = regard.nn.Decoder(6, heads=3, layers=2, vocab=11).eval()
    >>> captured = capture(model, torch.tensor([[3, 1, 4, 1, 5]]), [(0, 1), (1, 2, "k")])
    >>> captured
    Captured(2 values at 2 layers)
    >>> captured[0, 1, "output"].shape, captured["blocks.1.attention", 2, "k"].shape
    (torch.Size([1, 5, 2]), torch.Size([1, 5, 2]))
    """

    def __init__(self) -> None:
        # One value per call: a module may be called several times in a run.
        self.values: dict[Key, list[Value]] = {}
        # The numbers of all layers that the run reached.
        self.reached: dict[str, int] = {}

    def __repr__(self) -> str:
        layers = {path for path, _, _ in self.values}
        return f"Captured({len(self.values)} values at {len(layers)} layers)"

    def __getitem__(self, key: tuple[int | str, int, str]) -> Tensor | SavedCall:
        layer, head, part = key
        path = layer
        for reached, number in self.reached.items():
            if layer == number:
                path = reached
        calls = self.calls(str(path), head, part)
        if len(calls) > 1:
            raise RegardError(f"{path!r} was called {len(calls)} times in the captured run; calls(…) has all values")
        if isinstance(calls[0], CapturedQuery):
            return calls[0].q
        return calls[0]

    def calls(self, path: str, head: int, part: str) -> list[Value]:
        """The values of a head, one per call of its module.

        >>> model = regard.nn.Decoder(6, heads=3, layers=2, vocab=11).eval()
        >>> len(capture(model, torch.tensor([[3, 1, 4]]), [(0, 1)]).calls("blocks.0.attention", 1, "output"))
        1
        """
        if (path, head, part) not in self.values:
            raise RegardError(f"the source holds no {part!r} of head {head} of {path!r}; capture this site too")
        return self.values[path, head, part]


def capture(model: nn.Module, inputs: Inputs, sites: Iterable[SiteLike]) -> Captured:
    """Run a model once, without gradients, and keep what heads compute at ``sites``, for ``patch``.

    Nothing of size n × m is stored: a pattern is kept as q, k and the options of the head.

    - ``model``: any model that ``regard.watch`` takes.
    - ``inputs``: token ids, or a function that runs the model.
    - ``sites``: ``Site``s or tuples such as ``(layer, head)`` and ``(layer, head, part)``. Their positions do not
      matter here: a whole head is kept.

    >>> model = regard.models.load(regard.models.bundled())
    >>> ids = torch.tensor([model.tokenizer.encode("a b c a b c")])
    >>> captured = capture(model, ids, [(1, 0, "pattern")])
    >>> captured[1, 0, "pattern"].weights(0, 0, [4], None).argmax().item()  # token 4 attends to the previous token
    3
    """
    check_instance("model", model, nn.Module)
    captured, _ = capture_run(model, inputs, SiteSelection(as_sites(sites)))
    return captured


@torch.no_grad()
def capture_run(model: nn.Module, inputs: Inputs, selection: SiteSelection) -> tuple[Captured, Any]:
    """Run a model; return what was captured at the selected sites, and the output of the run."""
    capturer = _Capturer(model, selection)
    with observing(capturer):
        output = run_model(model, inputs)
    if not capturer.reached:
        raise RegardError(f"{type(model).__name__} {NO_VISIBLE_ATTENTION}; nothing was captured")
    selection.check(capturer.reached)
    capturer.captured.reached = dict(capturer.reached)
    return capturer.captured, output


def run_model(model: nn.Module, inputs: Inputs) -> Any:
    """The output of a run: of the model on token ids, or of the function."""
    if isinstance(inputs, Tensor):
        parameter = next(model.parameters(), None)
        if parameter is not None:
            # Ids are often made on the CPU, while the model may be on another device.
            inputs = inputs.to(parameter.device)
        return model(inputs)
    if not callable(inputs):
        raise RegardTypeError(
            f"inputs must be token ids or a function that runs the model, got {describe_value(inputs)}"
        )
    return inputs()


class CallCounter:
    """Counts the calls of each module, because a module may be called several times in a run."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def next(self, path: str) -> int:
        """The number of this call, from 0."""
        number = self._counts.get(path, 0)
        self._counts[path] = number + 1
        return number


def keep_request(call: AttentionCall, sites: list[Site], parts: tuple[str, ...]) -> Observe | None:
    """A request for q, k and the options of a call, if one of its sites has one of these parts; else None."""
    if not any(site.part in parts for site in sites):
        return None
    return Observe(keep=True, queries=call.queries)


class _Capturer(Observer):
    """Keeps what the selected heads compute."""

    def __init__(self, model: nn.Module, selection: SiteSelection) -> None:
        super().__init__(model)
        self.selection = selection
        self.captured = Captured()

    def before(self, call: AttentionCall) -> Observe | None:
        sites = self.selection.at(call.path, call.number)
        for site in sites:
            check_known(call, site.part)
        return keep_request(call, sites, ("pattern", "q"))

    def after(self, call: AttentionCall, out: Tensor, observation: Observation | None) -> Tensor:
        with own_computation():
            add_values(self.captured, self.selection.at(call.path, call.number), call, out, observation)
        return out


def add_values(
    captured: Captured, sites: list[Site], call: AttentionCall, out: Tensor, observation: Observation | None
) -> None:
    """Add the values of the sites in one call."""
    H = out.shape[-3]
    heads_by_part: dict[str, list[int]] = {}
    for site in sites:
        heads = heads_by_part.setdefault(site.part, [])
        heads += [head for head in heads_of(site, call.path, H) if head not in heads]
    for part in PARTS:
        heads = heads_by_part.get(part, [])
        if not heads:
            continue
        values = _values_of_part(part, heads, call, out, observation)
        for head, value in zip(heads, values, strict=True):
            captured.values.setdefault((call.path, head, part), []).append(value)


def _values_of_part(
    part: str, heads: list[int], call: AttentionCall, out: Tensor, observation: Observation | None
) -> list[Value]:
    """What each of these heads has in one call. The tensors are copies: the model may change its own in place."""
    if part == "pattern":
        inputs = head_inputs(call, out, observation, heads)
        calls: list[Value] = []
        for index in range(len(heads)):
            scores = inputs.scores.select_heads([index])
            calls.append(SavedCall(inputs.q[:, [index]].detach(), inputs.k[:, [index]].detach(), scores))
        return calls
    if part == "q":
        inputs = head_inputs(call, out, observation, heads)
        queries: list[Value] = []
        for index in range(len(heads)):
            one = replace(inputs, q=inputs.q[:, [index]], scores=inputs.scores.select_heads([index]))
            tables = one.query_tables() if has_query_tables(one) else []
            queries.append(CapturedQuery(one.q[:, 0].detach(), tables))
        return queries
    if part == "output":
        chosen = flatten_batch(out, out.shape[:-3])[:, heads]
    elif part == "v":
        chosen = head_values(call, out, heads)
    else:
        assert call.k is not None
        k = flatten_batch(call.k, out.shape[:-3])
        chosen = k[:, key_heads(heads, out.shape[-3], k.shape[1])]
    return list(chosen.detach().unbind(1))
