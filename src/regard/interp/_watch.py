"""``watch``: record what every head of a model does, for models of regard, ``transformers`` and PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

from torch import Tensor, nn

from regard._checks import check_instance, describe_value
from regard._errors import RegardError, RegardTypeError
from regard._hooks import AttentionCall, Observer
from regard._observables import Observation, Observe
from regard.interp._recording import Recording
from regard.interp._register_observers import (
    NO_VISIBLE_ATTENTION,
    Head,
    HeadSelection,
    count_forwards,
    in_backward,
    list_paths,
    matches_layers,
    observing,
)
from regard.interp._value_norms import ValueNorms
from regard.nn import MultiHeadAttention

Layers = str | Sequence[str] | Callable[[str], bool] | None


@contextmanager
def watch(
    model: nn.Module,
    observe: Observe | None = None,
    *,
    layers: Layers = None,
    heads: Iterable[Head] | None = None,
    values: bool = False,
) -> Iterator[Recording]:
    """Record what every head does: ``with regard.watch(model) as recording: model(...)``.

    It works on models of ``regard.nn``, on models of ``transformers`` (which run on regard's attention within the
    context), and on any PyTorch model that calls ``F.scaled_dot_product_attention`` or ``nn.MultiheadAttention``, or
    that computes softmax(q kᵀ) v itself. The model's outputs change only by rounding. Nothing of size n × n is stored.

    - ``model``: any ``nn.Module``.
    - ``observe``: what to measure; ``Observe()``, the row values, by default.
    - ``layers``: observe only these module paths: a pattern (``"*.layers.3.*"``), several, or a function of the path.
    - ``heads``: observe only these heads: pairs ``(layer, head)``, where a layer is a module path or its number in the
      order of the calls.
    - ``values``: also measure ``value_norm``, ‖v_j W_O‖, if a linear layer reads the output of the heads; it may be
      wrapped, quantised or offloaded. Where the norm is near 0, a weight has no effect. A warning names layers without
      norms.

    A model that was compiled with ``torch.compile`` runs without its graphs within the context.

    Calls within a backward pass (gradient checkpointing runs layers again) are not recorded. ``Recording`` describes
    how several calls of one module are joined. Raises ``RegardError`` at the end of the context if ``layers`` or
    ``heads`` name something that was not called.

    >>> from regard.nn import Encoder
    >>> model = Encoder(6, heads=3, layers=2)
    >>> with watch(model, layers="blocks.1.*") as recording:
    ...     y = model(torch.randn(2, 5, 6))
    >>> list(recording), recording["blocks.1.attention"].entropy.shape
    (['blocks.1.attention'], torch.Size([2, 3, 5]))
    """
    check_instance("model", model, nn.Module)
    if observe is not None and not isinstance(observe, Observe):
        raise RegardTypeError(f"observe must be a regard.Observe, got {describe_value(observe)}")
    recorder = _Recorder(model, observe if observe is not None else Observe(), layers, heads, values)
    with recorder.value_norms or nullcontext(), observing(recorder), count_forwards(model) as forwards:
        yield recorder.recording
    paths = recorder.attention_paths()
    unseen = [path for path in recorder.unseen if recorder.select(path)]
    if unseen:
        warnings.warn(
            f"{type(model).__name__} computes attention that regard does not recognise, and that is not recorded, at "
            f"{len(unseen)} module{'s' * (len(unseen) != 1)}: {list_paths(unseen)}",
            stacklevel=3,
        )
    elif forwards[0] and not paths:
        warnings.warn(f"nothing was recorded: {type(model).__name__} {NO_VISIBLE_ATTENTION}", stacklevel=3)
    if recorder.value_norms is not None:
        without = recorder.value_norms.paths_without_norms()
        if without:
            warnings.warn(
                f"values=True found no norms of values at {len(without)} module{'s' * (len(without) != 1)}: their "
                f"heads are not read by exactly one linear layer: {list_paths(without)}",
                stacklevel=3,
            )
    recorder.check_selection(paths)


class _Recorder(Observer):
    """Adds the observations of the selected modules to ``recording``."""

    def __init__(
        self, model: nn.Module, observe: Observe, layers: Layers, heads: Iterable[Head] | None, values: bool
    ) -> None:
        super().__init__(model)
        if not (layers is None or isinstance(layers, str | Sequence) or callable(layers)):
            raise RegardTypeError(
                f"layers must be a pattern such as '*.layers.3.*', a list of patterns or a function, got {layers!r}"
            )
        if heads is not None and observe.heads is not None:
            raise RegardError("heads were given twice, in observe and as heads=; give them once")
        self.observe = observe
        self.recording = Recording(model=type(model).__name__)
        self.value_norms = None
        if values:
            self.value_norms = ValueNorms(self, self.recording)
        self._layers = layers
        self._heads = None
        if heads is not None:
            self._heads = HeadSelection(heads)
        self._last_keys: dict[str, Tensor] = {}

    def select(self, path: str) -> bool:
        # Layers are numbered in the order of their calls, so a selection by number must see all calls.
        return self._heads is not None or self._matches_layers(path)

    def before(self, call: AttentionCall) -> Observe | None:
        request = self._request(call)
        if request is None:
            return None
        if call.cross:
            self._note_cross_attention(call)
        if call.queries is not None and request.queries is None:
            request = replace(request, queries=call.queries)
        return request

    def after(self, call: AttentionCall, out: Tensor, observation: Observation | None) -> Tensor:
        request = self._request(call)
        if observation is not None and request is not None and not in_backward():
            # The real rows of one call are not part of the request: calls merge only if their requests are equal.
            self.recording.add(call.path, replace(observation, observe=replace(request, queries=None)))
            how = self.recording.metadata.setdefault("how", {})
            # Weights, if those of any call of the layer were measured.
            if how.get(call.path) != "weights":
                how[call.path] = call.how
        return out

    def finish(self, call: AttentionCall, out: Tensor) -> Tensor:
        if self.value_norms is None or in_backward() or self._request(call) is None:
            return out
        return self.value_norms.measure(call.path, out, call.v)

    def attention_paths(self) -> list[str]:
        """The paths of all attention calls, and of regard's layers that were not selected, which report no calls."""
        paths = list(self.reached)
        for module, path in self.paths.items():
            if isinstance(module, MultiHeadAttention) and not self.select(path):
                paths.append(path)
        return paths

    def check_selection(self, paths: list[str]) -> None:
        """Raise if ``layers`` matches none of the attention ``paths``, or ``heads`` names an unknown layer."""
        if self._layers is not None and paths and not self.recording.calls:
            raise RegardError(
                f"layers={self._layers!r} matches none of the {len(paths)} attention layers: {list_paths(paths)}"
            )
        if self._heads is not None:
            self._heads.check(self.reached)

    def _matches_layers(self, path: str) -> bool:
        return matches_layers(self._layers, path)

    def _request(self, call: AttentionCall) -> Observe | None:
        """What to measure in a call; None if neither the layer nor a head of it is selected."""
        if not self._matches_layers(call.path):
            return None
        if self._heads is None:
            return self.observe
        heads = self._heads.at(call.path, call.number)
        if not heads:
            return None
        return replace(self.observe, heads=heads)

    def _note_cross_attention(self, call: AttentionCall) -> None:
        """Set ``metadata["cross"][path]``: whether all calls of a layer read the same keys, as a decoder's steps do."""
        same_keys: dict[str, bool] = self.recording.metadata.setdefault("cross", {})
        last = self._last_keys.get(call.path)
        # Where the keys are not known, the values stand for them.
        keys = call.k if call.k is not None else call.v
        same = last is None or (last.data_ptr() == keys.data_ptr() and last.shape == keys.shape)
        same_keys[call.path] = same and same_keys.get(call.path, True)
        self._last_keys[call.path] = keys
