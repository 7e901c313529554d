"""``watch``: one line that opens every head of a model, whatever the model is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from regard.nn import MultiHeadAttention
from regard.observables import Observe
from regard.positions.common import check_kind, described
from regard.watching import huggingface
from regard.watching.intercept import intercepted
from regard.watching.ours import asked
from regard.watching.recorder import Layers, Recorder
from regard.watching.seen import Seen

__all__ = ["watch"]


@contextmanager
def watch(model: nn.Module, observe: Observe | None = None, *, layers: Layers = None) -> Iterator[Seen]:
    """``with regard.watch(model) as seen: model(...)``: what every head did, by module path.

    Works on our models, on ``transformers`` models (their attention interface is switched to ours within, and back
    after), and on any PyTorch model that calls ``F.scaled_dot_product_attention`` or ``nn.MultiheadAttention``. Outputs
    are those of the model up to rounding, and nothing of size n × n is stored.

    - ``observe``: what to measure, ``Observe()`` (row values) unless given.
    - ``layers``: a pattern (``"*.layers.3.*"``), several, or a function of the path; the other layers are not observed.
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
    recorder = Recorder(model, Observe() if observe is None else observe, layers)
    modules = list(model.modules())
    ours = any(isinstance(module, MultiHeadAttention) for module in modules)
    theirs = any(huggingface.is_pretrained(module) for module in modules)
    torchs = any(isinstance(module, nn.MultiheadAttention) for module in modules)
    with ExitStack() as stack:
        if ours:
            stack.enter_context(asked(model, recorder))
        if theirs:
            stack.enter_context(huggingface.switched(model, recorder))
        if torchs or not (ours or theirs):
            stack.enter_context(intercepted(model, recorder))
        yield recorder.seen
    recorder.check()
