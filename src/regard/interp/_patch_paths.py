"""``path_patch``: the effect of a head on one other head, or on the logits, along the direct path between them."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from regard._checks import check_instance, describe_value
from regard._errors import RegardError
from regard._hooks import AttentionCall, Observer, own_computation
from regard._observables import Observation, Observe
from regard.interp._patch import PatchChange, Patcher, patched
from regard.interp._patch_capture import CallCounter, Captured, Inputs, add_values, keep_request, run_model
from regard.interp._patch_heads import check_known
from regard.interp._patch_metrics import Metric, check_metric, evaluating, metric_number, source_number
from regard.interp._patch_sites import Site, SiteLike, SiteSelection, as_sites
from regard.interp._patch_sources import CapturedSource, Source, SourceLike, resolve_source
from regard.interp._register_observers import NO_VISIBLE_ATTENTION, list_paths, observing

Modules = str | Sequence[str] | Callable[[str], bool] | None


def path_patch(
    model: nn.Module,
    sender: SiteLike | Sequence[SiteLike],
    receiver: SiteLike | Sequence[SiteLike] | Literal["logits"],
    inputs: Inputs,
    source: SourceLike,
    metric: Metric = "loss",
    *,
    freeze: Modules = None,
) -> PatchChange:
    """Measure the effect of a head on one input of another head, not of what it does elsewhere (path patching).

    1. The base run gives the outputs of all heads, and the source that of the sender.
    2. A second run has the sender's output from the source, and the outputs of all *other* heads frozen to the base
       run. Residual stream, norms and feed-forwards are computed again. What the receiver's q, k or v becomes is kept.
    3. A third run, with nothing frozen, has this q, k or v at the receiver, and gives the metric.

    With ``receiver="logits"`` the second run gives the metric: the direct effect of the sender.

    - ``sender``: ``(layer, head)``, a ``Site`` of part "output", which may have positions, or a list of them.
    - ``receiver``: ``(layer, head, part)`` with part "q", "k" or "v", a ``Site``, a list of them, or ``"logits"``.
    - ``model``, ``inputs``, ``source``, ``metric``: as in ``patch`` and ``patch(…).change``.
    - ``freeze``: modules whose outputs are frozen to the base run, too: a pattern of module paths, several, or a
      function of the path. ``freeze="*.feedforward"`` (in ``transformers`` often ``"*.mlp"``) leaves only the paths
      that pass no feed-forward; by default, paths through feed-forwards count, as in the original method.

    The outputs of all heads of the base run are in memory, O(n) numbers per head. Returns a ``PatchChange``.

    >>> model = regard.models.load(regard.models.bundled()).float()
    >>> ids = torch.randperm(1024, generator=torch.Generator().manual_seed(0))[:24].repeat(1, 2)  # 24 tokens, twice
    >>> def loss_change(head):
    ...     return path_patch(model, (1, 0), (2, head, "k"), ids, torch.zeros_like).change
    >>> sorted(range(4), key=loss_change)[-2:]  # the induction heads read their keys from the previous-token head
    [3, 2]
    """
    check_instance("model", model, nn.Module)
    check_metric(metric)
    senders = SiteSelection(as_sites(sender))
    receivers = SiteSelection([] if receiver == "logits" else as_sites(receiver))
    _check_parts(senders, receivers, receiver)
    frozen_modules = _matching_modules(model, freeze)

    with evaluating(model), torch.no_grad():
        base = _OutputRecorder(model)
        with observing(base), _recorded_outputs(frozen_modules) as module_outputs:
            before = metric_number(metric, run_model(model, inputs), inputs)
        if not base.outputs:
            raise RegardError(f"{type(model).__name__} {NO_VISIBLE_ATTENTION}; there is nothing to patch")
        senders.check(base.reached)
        receivers.check(base.reached)
        _check_order(senders, receivers, base.reached)
        resolved, outputs = resolve_source(model, source, senders)
        source_value = None
        if outputs:
            source_value = source_number(metric, outputs.pop(), inputs)

        frozen = _FrozenRun(model, senders, receivers, resolved, base.outputs)
        with observing(frozen), _frozen_outputs(frozen_modules, module_outputs):
            output = run_model(model, inputs)
        if not receivers.sites:
            return PatchChange(before, metric_number(metric, output, inputs), source_value)
        with patched(model, receivers, CapturedSource(frozen.captured)):
            after = metric_number(metric, run_model(model, inputs), inputs)
    return PatchChange(before, after, source_value)


class _OutputRecorder(Observer):
    """Keeps the outputs of all heads, by path, one tensor per call."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.outputs: dict[str, list[Tensor]] = {}

    def after(self, call: AttentionCall, out: Tensor, observation: Observation | None) -> Tensor:
        # A copy: the model may change its own in place.
        self.outputs.setdefault(call.path, []).append(out.detach().clone())
        return out


class _FrozenRun(Patcher):
    """Replaces all outputs by those of the base run, except the senders', and captures what the receivers read."""

    def __init__(
        self,
        model: nn.Module,
        senders: SiteSelection,
        receivers: SiteSelection,
        source: Source,
        outputs: dict[str, list[Tensor]],
    ) -> None:
        super().__init__(model, senders, source)
        self.receivers = receivers
        self.outputs = outputs
        self.captured = Captured()
        self._base_calls = CallCounter()

    def before(self, call: AttentionCall) -> Observe | None:
        sites = self.receivers.at(call.path, call.number)
        for site in sites:
            check_known(call, site.part)
        return keep_request(call, sites, ("q",))

    def after(self, call: AttentionCall, out: Tensor, observation: Observation | None) -> Tensor:
        sites = self.receivers.at(call.path, call.number)
        with own_computation():
            add_values(self.captured, sites, call, out, observation)
        base = self.outputs.get(call.path, [])
        number = self._base_calls.next(call.path)
        if number >= len(base) or base[number].shape != out.shape:
            raise RegardError(f"{call.path!r} was called in another way than in the base run; inputs must be the same")
        return super().after(call, base[number], None)


def _check_parts(senders: SiteSelection, receivers: SiteSelection, receiver: Any) -> None:
    if not senders.sites:
        raise RegardError("sender is empty; give (layer, head)")
    if receiver != "logits" and not receivers.sites:
        raise RegardError("receiver is empty; give (layer, head, part) or 'logits'")
    for site in senders.sites:
        if site.part != "output":
            raise RegardError(f"sender must be the output of a head, got part {site.part!r}")
    for site in receivers.sites:
        if site.part not in ("q", "k", "v"):
            raise RegardError(f"receiver must be q, k or v of a head, or 'logits', got part {site.part!r}")


def _check_order(senders: SiteSelection, receivers: SiteSelection, reached: dict[str, int]) -> None:
    """Raise if a sender does not run before a receiver: there is no path between them."""
    for sender in senders.sites:
        for receiver in receivers.sites:
            first = _number(sender, reached)
            second = _number(receiver, reached)
            if first >= second:
                raise RegardError(
                    f"sender must be in a layer before the receiver, got layers {sender.layer!r} and "
                    f"{receiver.layer!r}, which run as number {first} and {second}"
                )


def _number(site: Site, reached: dict[str, int]) -> int:
    return reached[site.layer] if isinstance(site.layer, str) else site.layer


def _matching_modules(model: nn.Module, freeze: Modules) -> dict[str, nn.Module]:
    """The modules that ``freeze`` names, by path."""
    if freeze is None:
        return {}
    if not (isinstance(freeze, str | Sequence) or callable(freeze)):
        raise RegardError(f"freeze must be a pattern of module paths, a list or a function, got {freeze!r}")
    chosen = {}
    for path, module in model.named_modules():
        if callable(freeze):
            matches = bool(freeze(path))
        else:
            patterns = [freeze] if isinstance(freeze, str) else freeze
            matches = any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)
        if matches and path:
            chosen[path] = module
    if not chosen:
        names = [path for path, _ in model.named_modules() if path]
        raise RegardError(f"freeze={freeze!r} matches none of {len(names)} modules: {list_paths(names)}")
    return chosen


@contextmanager
def _recorded_outputs(modules: dict[str, nn.Module]) -> Iterator[dict[str, list[Tensor]]]:
    """Keep the outputs of modules within the context, one per call."""
    outputs: dict[str, list[Tensor]] = {path: [] for path in modules}

    def keep(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not isinstance(output, Tensor):
                raise RegardError(
                    f"freeze names {path!r}, whose output is {describe_value(output)}; it must be one tensor"
                )
            outputs[path].append(output.detach().clone())

        return hook

    with ExitStack() as stack:
        for path, module in modules.items():
            stack.callback(module.register_forward_hook(keep(path)).remove)
        yield outputs


@contextmanager
def _frozen_outputs(modules: dict[str, nn.Module], outputs: dict[str, list[Tensor]]) -> Iterator[None]:
    """Replace the outputs of modules within the context by those that were kept."""
    calls = CallCounter()

    def replace(path: str) -> Callable[..., Tensor]:
        def hook(module: nn.Module, args: Any, output: Any) -> Tensor:
            return outputs[path][calls.next(path) % len(outputs[path])]

        return hook

    with ExitStack() as stack:
        for path, module in modules.items():
            stack.callback(module.register_forward_hook(replace(path)).remove)
        yield
