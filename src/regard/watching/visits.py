"""A visitor at every attention of a model, whatever the model is made of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from regard.nn import MultiHeadAttention
from regard.watching import huggingface
from regard.watching.intercept import intercepted
from regard.watching.ours import asked
from regard.watching.visitor import Visitor

__all__ = ["visited"]


@contextmanager
def visited(visitor: Visitor) -> Iterator[None]:
    """Within: the visitor is called at the attention of our layers, of ``transformers`` and of torch itself."""
    modules = list(visitor.model.modules())
    ours = any(isinstance(module, MultiHeadAttention) for module in modules)
    theirs = any(huggingface.is_pretrained(module) for module in modules)
    torchs = any(isinstance(module, nn.MultiheadAttention) for module in modules)
    with ExitStack() as stack:
        if ours:
            stack.enter_context(asked(visitor))
        if theirs:
            stack.enter_context(huggingface.switched(visitor))
        if torchs or theirs or not ours:  # models of transformers may call torch themselves
            stack.enter_context(intercepted(visitor))
        yield
