"""``attribution_patch``: estimate the effect of patching every head at every position from one backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from regard._checks import check_instance
from regard._devices import widest
from regard._errors import RegardError
from regard._hooks import AttentionCall, Observer
from regard._observables import Observation
from regard._shapes import flatten_batch
from regard.interp._patch_capture import Inputs, run_model
from regard.interp._patch_metrics import Metric, check_metric, describe_metric, evaluating, metric_tensor, source_number
from regard.interp._patch_sites import Site, SiteSelection
from regard.interp._patch_sources import SourceLike, Target, WeightsSource, resolve_source
from regard.interp._patch_table import PatchSweep, sweep_row
from regard.interp._register_observers import NO_VISIBLE_ATTENTION, in_backward, observing


def attribution_patch(model: nn.Module, inputs: Inputs, source: SourceLike, metric: Metric = "loss") -> PatchSweep:
    """Estimate what patching the output of each head at each position changes, from gradients.

        estimate = (z_source − z_base) · ∂metric/∂z,    z: the output of a head at a position, before W_O

    It takes one forward and backward pass on the base and one forward pass on the source, whatever the number of
    sites; ``patch_sweep`` takes one pass per site. The estimate is the first term of a Taylor series: it is exact if
    the metric is linear in z, and wrong where it is not. A softmax that is saturated has a gradient near 0, so that a
    head that would move it to another key is estimated to have no effect. Compare with
    ``patch_sweep(…).compare(estimates)`` before you trust small numbers.

    - ``model``, ``inputs``, ``source``, ``metric``: as in ``patch_sweep``; the metric must be a tensor with gradients.

    Parameters get no gradients. Attention that a model writes by hand stores its own n × n weights here, because
    gradients are recorded. Returns a ``PatchSweep`` of estimates, one row per head and position.

    >>> model = regard.models.load(regard.models.bundled()).float()
    >>> base = torch.randperm(1024, generator=torch.Generator().manual_seed(0))[:24].repeat(1, 2)[:, :30]
    >>> source = base.clone()
    >>> source[0, 6] = 200  # another token where the base has the one that comes next
    >>> metric = regard.interp.LogitDifference(-1, right=int(base[0, 6]), wrong=200)
    >>> estimates = attribution_patch(model, base, source, metric)
    >>> measured = regard.interp.patch_sweep(model, base, source, metric)
    >>> measured.compare(estimates).rank_correlation > 0.8
    True
    """
    check_instance("model", model, nn.Module)
    check_metric(metric)
    with evaluating(model), _without_parameter_gradients(model):
        recorder = _OutputLeaves(model)
        with observing(recorder), torch.enable_grad():
            value = metric_tensor(metric, run_model(model, inputs), inputs)
        if not recorder.outputs:
            raise RegardError(f"{type(model).__name__} {NO_VISIBLE_ATTENTION}; there is nothing to patch")
        gradients = recorder.gradients(value)
        selection = SiteSelection([Site(path, None) for path in recorder.outputs])
        resolved, outputs = resolve_source(model, source, selection)
        if isinstance(resolved, WeightsSource):
            raise RegardError("weights replace a pattern, but attribution_patch estimates outputs; use patch_sweep")
        source_value = None
        if outputs:
            with torch.no_grad():
                source_value = source_number(metric, outputs.pop(), inputs)

        before = float(value.detach())
        name = type(model).__name__
        result = PatchSweep(name, describe_metric(metric), before, source_value, is_estimate=True)
        for path, z_BHNE in recorder.outputs.items():
            for head in range(z_BHNE.shape[1]):
                z = z_BHNE[:, head]
                with torch.no_grad():
                    target = Target(Site(path, head), path, head, 0)
                    difference = widest(resolved.replace(z, target)) - widest(z)
                    estimates = (difference * widest(gradients[path][:, head])).sum((0, 2))
                for position, estimate in enumerate(estimates.tolist()):
                    row = sweep_row(path, recorder.reached[path], head, "output", position)
                    result.add(row, before + estimate)
    return result


class _OutputLeaves(Observer):
    """Adds a leaf of zeros to the output of all heads, whose gradient is that of the metric with respect to them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.outputs: dict[str, Tensor] = {}  # [B, H, n, e] by path
        self._leaves: dict[str, Tensor] = {}

    def after(self, call: AttentionCall, out: Tensor, observation: Observation | None) -> Tensor:
        if in_backward():  # gradient checkpointing computes a layer again
            return out + self._leaves[call.path]
        if call.path in self.outputs:
            raise RegardError(f"{call.path!r} is called more than once in a run, which attribution_patch cannot follow")
        leaf = torch.zeros_like(out, requires_grad=True)
        self.outputs[call.path] = flatten_batch(out.detach().clone(), out.shape[:-3])
        self._leaves[call.path] = leaf
        return out + leaf

    def gradients(self, value: Tensor) -> dict[str, Tensor]:
        """``∂value/∂z [B, H, n, e]`` by path."""
        if not value.requires_grad:
            raise RegardError(
                "the metric has no gradient: it must be a tensor that is computed from the model's output, "
                "and the model must not run under torch.no_grad()"
            )
        found = torch.autograd.grad(value, list(self._leaves.values()), allow_unused=True)
        gradients = {}
        for (path, leaf), gradient in zip(self._leaves.items(), found, strict=True):
            # The metric does not depend on every layer.
            gradient = torch.zeros_like(leaf) if gradient is None else gradient
            gradients[path] = flatten_batch(gradient, gradient.shape[:-3])
        return gradients


@contextmanager
def _without_parameter_gradients(model: nn.Module) -> Iterator[None]:
    """Record no gradients of parameters within the context: only those of the heads' outputs are needed."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
