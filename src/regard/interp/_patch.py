"""Patch a run of a model: put values of another run into parts of its heads, and measure what changes.

The new output of a patched head is computed from its queries, keys and values by attention itself, so patterns are
never stored: "pattern" is softmax over the source's q, k and options, applied to the values of this run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from regard._checks import check_instance
from regard._errors import RegardError
from regard._hooks import AttentionCall, Observer, own_computation
from regard._observables import Observation, Observe
from regard._shapes import flatten_batch
from regard.interp._patch_capture import CallCounter, Inputs, keep_request, run_model
from regard.interp._patch_heads import HeadInputs, check_known, head_inputs, head_values
from regard.interp._patch_metrics import (
    Metric,
    check_metric,
    evaluating,
    metric_number,
    normalised_effect,
    source_number,
)
from regard.interp._patch_sites import NEEDS_QUERIES_AND_KEYS, SiteLike, SiteSelection, as_sites, heads_of
from regard.interp._patch_sources import Source, SourceLike, Target, resolve_source
from regard.interp._register_observers import NO_VISIBLE_ATTENTION, count_forwards, observing

MOST_NAMED = 8  # sites that the text of a patch names


@dataclass(frozen=True)
class PatchChange:
    """A metric of the base run (``before``), of the patched run (``after``), and of the source, None if unknown.

    >>> print(PatchChange(before=1.0, after=2.5, source=3.0))
    1.0000 → 2.5000 (+1.5000, 0.750 of the way to the source, 3.0000)
    """

    before: float
    after: float
    source: float | None = None

    @property
    def change(self) -> float:
        """``after − before``."""
        return self.after - self.before

    @property
    def effect(self) -> float | None:
        """``(after − before) / (source − before)``; None if the source's number is not known, or equals ``before``."""
        return normalised_effect(self.before, self.after, self.source)

    def __str__(self) -> str:
        text = f"{self.before:.4f} → {self.after:.4f} ({self.change:+.4f}"
        if self.effect is not None:
            text += f", {self.effect:.3f} of the way to the source, {self.source:.4f}"
        return text + ")"


def patch(model: nn.Module, sites: Iterable[SiteLike], source: SourceLike) -> Patch:
    """Put values of another run into parts of heads: ``with patch(model, sites, source): model(ids)``.

    - ``model``: any model that ``regard.watch`` takes.
    - ``sites``: ``Site``s, or tuples with their arguments such as ``(layer, head)``. Without sites nothing changes.
    - ``source``: where the new values come from:

        - token ids, or a function without arguments that runs the model: this run is captured first;
        - what ``capture`` returned, to use one run several times;
        - a function of a tensor, which gets the value of one head ``[B, n, width]`` and returns a new one:
          ``torch.zeros_like``, ``lambda z: z.mean(1, keepdim=True)``;
        - weights ``[n, m]`` or ``[B, n, m]`` in floats, for sites of part "pattern"; with positions, one row for each.

    Returns a ``Patch``. Positions are chosen in the source as in this run, so that texts of two lengths can be compared
    at positions that are named. Raises ``RegardError`` where values do not fit, or a layer of ``sites`` was not called.

    >>> model = regard.models.load(regard.models.bundled())
    >>> def ids(text):
    ...     return torch.tensor([model.tokenizer.encode(text)])
    >>> base = ids("def f(count, value): return coun")
    >>> with patch(model, [(1, 0)], torch.zeros_like):  # without the previous-token head
    ...     without = model(base)
    >>> torch.equal(without, model(base))
    False
    """
    return Patch(model, sites, source)


class Patch:
    """Sites of a model that are patched within the context; it can be entered several times. ``patch`` makes it.

    >>> model = regard.nn.Decoder(6, heads=3, layers=2, vocab=11).eval()
    >>> Patch(model, [(0, 1), (1, None, "v", [-1])], torch.zeros_like)
    Patch of 2 sites of Decoder: (0, 1, 'output', all), (1, all, 'v', (-1,))
    """

    def __init__(self, model: nn.Module, sites: Iterable[SiteLike], source: SourceLike) -> None:
        check_instance("model", model, nn.Module)
        self.model = model
        self.sites = SiteSelection(as_sites(sites))
        self.source = source
        self._contexts: list[ExitStack] = []

    def __repr__(self) -> str:
        names = []
        for site in self.sites.sites[:MOST_NAMED]:
            head = "all" if site.head is None else site.head
            positions = "all" if site.indices is None else site.indices
            names.append(f"({site.layer!r}, {head}, {site.part!r}, {positions})")
        count = len(self.sites.sites)
        if count > MOST_NAMED:
            names.append("…")
        return f"Patch of {count} site{'s' * (count != 1)} of {type(self.model).__name__}: {', '.join(names)}"

    def __enter__(self) -> Patch:
        context = ExitStack()
        if self.sites.sites:
            source, _ = resolve_source(self.model, self.source, self.sites)
            context.enter_context(patched(self.model, self.sites, source))
        self._contexts.append(context)
        return self

    def __exit__(self, *error: Any) -> None:
        self._contexts.pop().__exit__(*error)

    @torch.no_grad()
    def change(self, inputs: Inputs, metric: Metric = "loss") -> PatchChange:
        """A metric without and with the patch, in eval mode.

        - ``inputs``: token ids ``[B, n]``, or a function that runs the model and returns its output.
        - ``metric``: ``"loss"`` (next-token cross-entropy; a function of inputs must return the loss itself), a
          ``LogitDifference``, a ``Logit``, or a function of the model's output that returns one number.

        >>> model = regard.models.load(regard.models.bundled())
        >>> ids = torch.tensor([model.tokenizer.encode("Return the number of items in a list. " * 2)])
        >>> change = patch(model, [(1, 0)], torch.zeros_like).change(ids)
        >>> round(change.before, 1), round(change.after, 1)
        (1.5, 2.4)
        """
        check_metric(metric)
        with evaluating(self.model):
            # Both runs use regard's kernels, so that only the patched values differ.
            with observing(Observer(self.model)):
                before = metric_number(metric, run_model(self.model, inputs), inputs)
            if not self.sites.sites:
                return PatchChange(before, before)
            source, outputs = resolve_source(self.model, self.source, self.sites)
            source_value = None
            if outputs:
                source_value = source_number(metric, outputs.pop(), inputs)
            with patched(self.model, self.sites, source) as patcher:
                after = metric_number(metric, run_model(self.model, inputs), inputs)
        if not patcher.reached:
            raise RegardError(f"{type(self.model).__name__} {NO_VISIBLE_ATTENTION}")
        return PatchChange(before, after, source_value)


@contextmanager
def patched(model: nn.Module, sites: SiteSelection, source: Source) -> Iterator[Patcher]:
    """Patch the sites within the context, and check at its end that they were reached."""
    patcher = Patcher(model, sites, source)
    with observing(patcher), count_forwards(model) as forwards:
        yield patcher
    patcher.check(bool(forwards[0]))


class Patcher(Observer):
    """Replaces parts of heads. ``sites`` may be changed between two runs."""

    def __init__(self, model: nn.Module, sites: SiteSelection, source: Source) -> None:
        super().__init__(model)
        self.sites = sites
        self.source = source
        self._calls = CallCounter()

    def check(self, was_run: bool) -> None:
        """Raise if the model ran, and a site was not reached or only partly seen."""
        if was_run and not self.reached:
            raise RegardError(f"{type(self.model).__name__} {NO_VISIBLE_ATTENTION}; nothing was patched")
        for path in self.unseen:
            if path in self.reached and self.sites.at(path, self.reached[path]):
                raise RegardError(
                    f"{path!r} also computes attention that regard does not recognise, so its heads were "
                    "patched only partly"
                )
        self.sites.check(self.reached)

    def replaces(self, path: str, number: int) -> bool:
        return bool(self.sites.at(path, number))

    def before(self, call: AttentionCall) -> Observe | None:
        sites = self.sites.at(call.path, call.number)
        for site in sites:
            if site.part in NEEDS_QUERIES_AND_KEYS:
                check_known(call, site.part)
        # The options of the call are needed wherever an output is computed again.
        return keep_request(call, sites, ("q", "k", "v"))

    def after(self, call: AttentionCall, out: Tensor, observation: Observation | None) -> Tensor:
        sites = self.sites.at(call.path, call.number)
        if not sites:
            return out
        number = self._calls.next(call.path)
        targets = []
        for site in sites:
            for head in heads_of(site, call.path, out.shape[-3]):
                targets.append(Target(site, call.path, head, number))
        with own_computation():
            return _patched_output(call, out, observation, targets, self.source)


def _patched_output(
    call: AttentionCall, out: Tensor, observation: Observation | None, targets: list[Target], source: Source
) -> Tensor:
    """The output of a call after all its replacements, in the order q, k and v, then pattern, then output."""
    out_BHNE = flatten_batch(out, out.shape[:-3])
    by_part: dict[str, list[Target]] = {}
    for target in targets:
        by_part.setdefault(target.site.part, []).append(target)

    # Values that are patched are those of the patched patterns, too.
    values: dict[int, Tensor] = {}
    for target in by_part.get("v", []):
        if target.head not in values:
            values[target.head] = head_values(call, out, [target.head])[:, 0]
        values[target.head] = source.replace(values[target.head], target)

    changed: dict[int, list[Target]] = {}
    for part in ("q", "k", "v"):
        for target in by_part.get(part, []):
            changed.setdefault(target.head, []).append(target)
    for head, head_targets in changed.items():
        inputs = head_inputs(call, out, observation, [head])
        for target in head_targets:
            if target.site.part == "q":
                inputs = source.replace_query(inputs, target)
            elif target.site.part == "k":
                inputs = replace(inputs, k=source.replace(inputs.k[:, 0], target).unsqueeze(1))
        v = values.get(head)
        if v is None:
            v = head_values(call, out, [head])[:, 0]
        out_BHNE = _with_head(out_BHNE, head, _output_of(inputs, v))

    for target in by_part.get("pattern", []):
        v = values.get(target.head)
        if v is None:
            v = head_values(call, out, [target.head])[:, 0]
        out_BHNE = _with_head(out_BHNE, target.head, source.pattern_output(out_BHNE[:, target.head], v, target))
    for target in by_part.get("output", []):
        out_BHNE = _with_head(out_BHNE, target.head, source.replace(out_BHNE[:, target.head], target))
    return out_BHNE.reshape(out.shape)


def _output_of(inputs: HeadInputs, v: Tensor) -> Tensor:
    """``[B, n, e]``: the output of one head."""
    return inputs.output(v.unsqueeze(1))[:, 0]


def _with_head(out_BHNE: Tensor, head: int, new: Tensor) -> Tensor:
    """The output of all heads with another one in place of ``head``; not in place, so that gradients are recorded."""
    index = torch.tensor([head], device=out_BHNE.device)
    return out_BHNE.index_copy(1, index, new.to(out_BHNE.dtype).unsqueeze(1))
