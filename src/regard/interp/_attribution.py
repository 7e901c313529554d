"""``attribute``: how much every head and every token contributes to one number, at the cost of one backward pass."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard._attribution import AttributionRequest
from regard._checks import check_instance, check_integer, describe_value
from regard._errors import RegardError, RegardTypeError
from regard._hooks import AttentionCall, Observer
from regard._observables import LARGEST
from regard.interp._ablation import Input
from regard.interp._attribution_result import Attribution, LayerAttribution
from regard.interp._attribution_target import Target, parse_target, run_to_target
from regard.interp._recomputed_blocks import recomputed_blocks
from regard.interp._register_observers import (
    NO_VISIBLE_ATTENTION,
    in_backward,
    list_paths,
    matches_layers,
    observing,
)
from regard.interp._token_leaf import TokenLeaf
from regard.interp._watch import Layers


def attribute(
    model: nn.Module,
    inputs: Input,
    target: Target,
    *,
    map: int = 0,
    steps: int = 1,
    layers: Layers = None,
    checkpoint: bool = True,
) -> Attribution:
    """Attribute one number of a model's output, the target L, to its heads, keys, rows and tokens.

        c_ij = A_ij (g_i·v_j),  g_i = ∂L/∂out_i        the contribution of the weight of key j in row i
        tokens_i = x_i·∂L/∂x_i                         the contribution of a token's embedding x_i

    One forward and one backward pass collect the sums of c over rows, over keys and over bins of both, in the tiles of
    the attention kernel: nothing of size n × n is stored. A contribution is the effect of a small change of a weight,
    to first order; it says nothing about what the model would do without the head. ``ablate`` measures that.

    - ``model``: any model that ``regard.watch`` can observe. It runs in eval mode; its parameters get no gradients.
    - ``inputs``: token ids ``[B, n]``, or a function without arguments that runs the model and returns its output.
    - ``target``: a token id (its logit at the last position), ``(position, id)``, ``(position, id, other id)`` for the
      difference of two logits, or a function of the model's output that returns one number as a tensor.
    - ``map``: g, for the map of g × g sums of each head; 0 disables it.
    - ``steps``: m > 1 averages all contributions over m parts of the straight path from zero embeddings to the
      embeddings (integrated gradients). Part k ends at ((k + 1)/m)³ of the path: models with norms change fastest near
      zero. 1 uses the embeddings alone.
    - ``layers``: only these module paths, as in ``regard.watch``; the tokens are always attributed.
    - ``checkpoint``: backward computes each block again instead of storing what it computed. This takes one more
      forward pass, and the memory of one block instead of that of all.

    Returns an ``Attribution``. Raises ``RegardError`` if the model calls no token embedding or no attention that can be
    observed, or if the target does not depend on the tokens.

    >>> model = regard.models.load(regard.models.bundled())
    >>> ids = torch.tensor([model.tokenizer.encode("import os.")])
    >>> attribution = attribute(model, ids, target=(-1, 5, 7), map=4)
    >>> attribution.tokens.shape, attribution["decoder.blocks.0.attention"].map.shape
    (torch.Size([1, 7]), torch.Size([1, 4, 4, 4]))
    """
    check_instance("model", model, nn.Module)
    check_integer("map", map, most=LARGEST)
    check_integer("steps", steps, least=1)
    if not callable(inputs) and (not isinstance(inputs, Tensor) or inputs.ndim != 2 or inputs.is_floating_point()):
        raise RegardTypeError(f"inputs must be token ids [B, n] or a function, got {describe_value(inputs)}")
    parsed = parse_target(target)
    leaf = TokenLeaf(model)
    total = _Totals()
    baseline = None
    with _frozen(model), torch.inference_mode(False):
        for scale, share in _parts_of_path(steps):
            total.add(_run(model, inputs, parsed, leaf, scale, map, layers, checkpoint), share)
        value = total.value
        if steps > 1:
            with torch.no_grad():
                value = _value_at(model, inputs, parsed, leaf, 1.0)
                baseline = _value_at(model, inputs, parsed, leaf, 0.0)
    return Attribution(type(model).__name__, value, total.tokens(), total.layers, baseline)


def _parts_of_path(steps: int) -> list[tuple[float, float]]:
    """The scale of the embeddings in each part of the path, and the part's share of the path."""
    if steps == 1:
        return [(1.0, 1.0)]
    parts = []
    for k in range(steps):
        share = ((k + 1) ** 3 - k**3) / steps**3
        parts.append((((k + 0.5) / steps) ** 3, share))
    return parts


class _Attributor(Observer):
    """Makes one request for each attention call, and remembers the requests by path."""

    def __init__(self, model: nn.Module, map_size: int, layers: Layers) -> None:
        super().__init__(model)
        self.map_size = map_size
        self.layers = layers
        self.requests: dict[str, list[AttributionRequest]] = {}

    def select(self, path: str) -> bool:
        return matches_layers(self.layers, path)

    def attribution(self, call: AttentionCall) -> AttributionRequest:
        request = AttributionRequest(self.map_size)
        # When a block is computed again, the graph of the first run keeps its own request.
        if not in_backward():
            self.requests.setdefault(call.path, []).append(request)
        return request

    def check(self) -> None:
        """Raise if there was no attention to attribute, or warn if some of it was not recognised."""
        name = type(self.model).__name__
        if not self.reached and self.layers is None:
            raise RegardError(f"{name} {NO_VISIBLE_ATTENTION}")
        if not self.requests:
            known = f"{len(self.reached)} attention layers: {list_paths(self.reached)}"
            raise RegardError(f"layers={self.layers!r} matches none of the {known}")
        for path, requests in self.requests.items():
            if any(request.sizes == (0, 0, 0, 0) for request in requests):
                raise RegardError(
                    f"{path or 'the model'} runs under gradient checkpointing of its own, where attention cannot be "
                    "attributed; switch that off: attribute(checkpoint=True) does the same"
                )
        unseen = [path for path in self.unseen if self.select(path)]
        if unseen:
            warnings.warn(
                f"{name} computes attention that regard does not recognise, and that is not attributed, at "
                f"{len(unseen)} module{'s' * (len(unseen) != 1)}: {list_paths(unseen)}",
                stacklevel=4,
            )

    def results(self) -> dict[str, LayerAttribution]:
        """The contributions of each layer; those of several calls of a layer are added."""
        layers = {}
        for path, requests in self.requests.items():
            sizes = {request.sizes for request in requests}
            if len(sizes) > 1:
                raise RegardError(
                    f"the calls of {path or 'the model'} have different sizes, {sorted(sizes)} (B, H, n, m); attribute "
                    "one run of the model, without a cache"
                )
            layers[path] = _sum_of_calls(requests)
        return layers


def _sum_of_calls(requests: list[AttributionRequest]) -> LayerAttribution:
    joined = AttributionRequest(requests[0].map)
    for request in requests:
        if request.keys is not None and request.rows is not None:
            joined.store(request.keys, request.rows, request.map_sums)
    if joined.keys is None or joined.rows is None:
        # The target does not depend on the layer.
        B, H, n, m = requests[0].sizes
        g = joined.map
        return LayerAttribution(torch.zeros(B, H, m), torch.zeros(B, H, n), torch.zeros(B, H, g, g) if g else None)
    return LayerAttribution(joined.keys, joined.rows, joined.map_sums)


@dataclass
class _Step:
    """The results of one backward pass."""

    value: float
    tokens: Tensor
    layers: dict[str, LayerAttribution]


class _Totals:
    """The sums over the parts of the path, each times its share."""

    def __init__(self) -> None:
        self.value = 0.0
        self.layers: dict[str, LayerAttribution] = {}
        self._tokens: Tensor | None = None

    def add(self, step: _Step, share: float) -> None:
        self.value = step.value
        tokens = step.tokens * share
        self._tokens = tokens if self._tokens is None else self._tokens + tokens
        for path, layer in step.layers.items():
            cells = layer.map * share if layer.map is not None else None
            part = LayerAttribution(layer.keys * share, layer.rows * share, cells)
            self.layers[path] = _add(self.layers[path], part) if path in self.layers else part

    def tokens(self) -> Tensor:
        assert self._tokens is not None
        return self._tokens


def _add(a: LayerAttribution, b: LayerAttribution) -> LayerAttribution:
    cells = a.map + b.map if a.map is not None and b.map is not None else None
    return LayerAttribution(a.keys + b.keys, a.rows + b.rows, cells)


def _run(
    model: nn.Module,
    inputs: Input,
    target: object,
    leaf: TokenLeaf,
    scale: float,
    map_size: int,
    layers: Layers,
    checkpoint: bool,
) -> _Step:
    """One forward and one backward pass, with the embeddings times ``scale``."""
    while True:
        attributor = _Attributor(model, map_size, layers)
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(observing(attributor))
            if checkpoint:
                stack.enter_context(recomputed_blocks(attributor))
            with leaf.attached(scale):
                value = run_to_target(model, inputs, target)  # type: ignore[arg-type]
            if leaf.leaf is None or leaf.embedding is None:
                leaf.next_candidates()
                continue
            tokens = _backward(value, leaf.leaf, leaf.embedding, attributor)
        attributor.check()
        return _Step(float(value.detach()), tokens, attributor.results())


def _backward(value: Tensor, leaf: Tensor, embedding: Tensor, attributor: _Attributor) -> Tensor:
    """Run the backward pass, which fills the requests, and return the contributions of the tokens."""
    if not value.requires_grad:
        raise RegardError("the target does not depend on the tokens: its number has no graph")
    # Calls without any input that needs a gradient have a leaf of their own.
    leaves = [leaf]
    for requests in attributor.requests.values():
        leaves += [request.leaf for request in requests if request.leaf is not None]
    gradient = torch.autograd.grad(value, leaves, allow_unused=True)[0]
    if gradient is None:
        raise RegardError("the target does not depend on the tokens: no gradient reaches their embedding")
    return (gradient.to(torch.promote_types(gradient.dtype, torch.float32)) * embedding).sum(-1)


def _value_at(model: nn.Module, inputs: Input, target: object, leaf: TokenLeaf, scale: float) -> float:
    """The target's number for the embeddings times ``scale``, without gradients."""
    with leaf.attached(scale):
        return float(run_to_target(model, inputs, target))  # type: ignore[arg-type]


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """The model in eval mode, with parameters that need no gradients; both are restored at the end."""
    modes = {module: module.training for module in model.modules()}
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.eval()
    for parameter in learned:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in learned:
            parameter.requires_grad_(True)
        for module, mode in modes.items():
            module.training = mode
