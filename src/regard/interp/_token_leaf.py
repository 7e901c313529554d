"""The token embedding of a model as a leaf of the graph, scaled along a path from zero."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from regard._errors import RegardError
from regard._running_modules import ContextHook
from regard.nn._stack import TokenEmbedding


class TokenLeaf:
    """Cuts the graph at the first call of the token embedding.

    The candidates are, in this order: what ``model.get_input_embeddings()`` returns, ``TokenEmbedding`` of regard, and
    every ``nn.Embedding``. The first kind of which a module is called counts.

    - ``embedding``: the output of the embedding, without a graph; None before the first call.
    - ``leaf``: ``scale`` times the embedding, which requires a gradient.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._candidates = _find_candidates(model)
        self._scale = 1.0
        self.embedding: Tensor | None = None
        self.leaf: Tensor | None = None

    @contextmanager
    def attached(self, scale: float) -> Iterator[None]:
        """Replace the embedding by the leaf in the runs of the model within the context."""
        self._scale = scale
        self.embedding = None
        self.leaf = None
        with ExitStack() as stack:
            for module in self._candidates[0]:
                stack.callback(module.register_forward_hook(ContextHook(self._replace)).remove)
            yield

    def next_candidates(self) -> None:
        """Take the next kind of candidates, because no module of this kind was called."""
        self._candidates = self._candidates[1:]
        if not self._candidates:
            raise _no_embedding(self.model)

    def _replace(self, module: nn.Module, args: Any, out: Any) -> Any:
        # Of an encoder and a decoder that share their embedding, the first call counts.
        if self.leaf is not None or not isinstance(out, Tensor):
            return out
        self.embedding = out.detach()
        self.leaf = (self.embedding * self._scale).requires_grad_()
        return self.leaf


def _find_candidates(model: nn.Module) -> list[list[nn.Module]]:
    modules = list(model.modules())
    own = []
    if callable(getattr(model, "get_input_embeddings", None)):
        try:
            embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
        except NotImplementedError:
            embedding = None
        if any(module is embedding for module in modules):
            own.append(embedding)
    tokens: list[nn.Module] = [module for module in modules if isinstance(module, TokenEmbedding)]
    tables: list[nn.Module] = [module for module in modules if isinstance(module, nn.Embedding)]
    candidates = [kind for kind in (own, tokens, tables) if kind]
    if not candidates:
        raise _no_embedding(model)
    return candidates


def _no_embedding(model: nn.Module) -> RegardError:
    return RegardError(
        f"{type(model).__name__} called no token embedding; attribute needs get_input_embeddings(), a TokenEmbedding "
        "or an nn.Embedding, whose output is the start of the path"
    )
