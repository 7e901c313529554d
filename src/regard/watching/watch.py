"""``watch``: one line that opens every head of a model, whatever the model is."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

from torch import nn

from regard.observables import Observe
from regard.positions.common import check_kind, described
from regard.watching.chosen import Head
from regard.watching.recorder import Layers, Recorder
from regard.watching.seen import Seen
from regard.watching.visitor import UNSEEN, ran
from regard.watching.visits import visited

__all__ = ["watch"]


@contextmanager
def watch(
    model: nn.Module,
    observe: Observe | None = None,
    *,
    layers: Layers = None,
    heads: Iterable[Head] | None = None,
    values: bool = False,
) -> Iterator[Seen]:
    """``with regard.watch(model) as seen: model(...)``: what every head did, by module path.

    Works on our models, on ``transformers`` models (their attention interface is switched to ours within, and back
    after), and on any PyTorch model that calls ``F.scaled_dot_product_attention`` or ``nn.MultiheadAttention``. Outputs
    are those of the model up to rounding, and nothing of size n × n is stored.

    - ``observe``: what to measure, ``Observe()`` (row values) unless given.
    - ``layers``: a pattern (``"*.layers.3.*"``), several, or a function of the path; the other layers are not observed.
    - ``heads``: pairs ``(layer, head)``, a layer being a path or its number in the order of the calls; others, and
      layers without a chosen head, are not observed.
    - ``values=True`` also takes ``value_norm``, ‖v_j W_O‖, where a linear layer reads the heads' output: a weight on a
      key whose value is near 0 moves nothing (``Observation.moved``).
    - calls in a backward pass (gradient checkpointing runs layers again) are not recorded.
    - several calls of one module: see ``Seen``.

    >>> from regard.nn import Encoder
    >>> model = Encoder(6, heads=3, layers=2)
    >>> with watch(model, layers="blocks.1.*") as seen:
    ...     y = model(torch.randn(2, 5, 6))
    >>> list(seen), seen["blocks.1.attention"].entropy.shape
    (['blocks.1.attention'], torch.Size([2, 3, 5]))
    """
    check_kind("model", model, nn.Module)
    if observe is not None and not isinstance(observe, Observe):
        raise TypeError(f"observe must be a regard.Observe, got {described(observe)}")
    recorder = Recorder(model, Observe() if observe is None else observe, layers, heads, values)
    with recorder.norms or nullcontext(), visited(recorder), ran(model) as calls:
        yield recorder.seen
    if calls and not recorder.reached:
        warnings.warn(f"nothing was seen: {type(model).__name__} {UNSEEN}", stacklevel=3)
    recorder.check()
