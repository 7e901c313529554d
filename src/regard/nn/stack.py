"""What encoder and decoder share: tokens in, positions added, blocks in turn, a last norm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from regard.masks import Dense, Mask, Padding
from regard.nn.block import Block
from regard.nn.cache import DecoderCache
from regard.nn.multihead import Position
from regard.observables import Observation, Observe
from regard.positions import AddedToInput
from regard.shapes import integer, number, tracing

__all__ = ["Observations", "Stack", "Tokens"]

Observations = dict[str, Observation]
PaddingLike = Padding | Tensor | Sequence[int]


class Tokens(nn.Module):
    """``x_i = s · E[id_i]`` on the way in, ``logits = x Eᵀ`` (tied) or ``x W`` (own) on the way out

        E [V, D] = embedding      W [D, V] = head      s = scale, √D by default

    E starts as N(0, 1/D), so that vectors start with unit variance and tied logits too. Checkpoints that do not scale
    have ``scale=1``.

    >>> tokens = Tokens(11, 3)
    >>> tokens.logits(tokens(torch.tensor([[1, 2]]))).shape
    torch.Size([1, 2, 11])
    """

    def __init__(
        self, vocab: int, d: int, *, head: Literal["tied", "own"] | None = "tied", scale: float | None = None
    ) -> None:
        super().__init__()
        if head not in ("tied", "own", None):
            raise ValueError(f'head must be "tied", "own" or None, got {head!r}')
        self.vocab, self.d, self.tied = integer("vocab", vocab, least=1), integer("d", d, least=1), head == "tied"
        self.scale = d**0.5 if scale is None else number("scale", scale)
        self.embedding = nn.Embedding(vocab, d)
        nn.init.normal_(self.embedding.weight, std=d**-0.5)
        self.head = nn.Linear(d, vocab, bias=False) if head == "own" else None

    def forward(self, ids: Tensor) -> Tensor:
        """``ids [*B, n] → [*B, n, D]``"""
        if ids.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"token ids must be whole numbers (int64 or int32), got {ids.dtype}")
        if not tracing() and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab:
            raise ValueError(
                f"token ids go from {int(ids.min())} to {int(ids.max())}; this vocabulary has 0 … {self.vocab - 1}"
            )
        return self.scale * self.embedding(ids)

    def logits(self, x: Tensor) -> Tensor:
        """``x [*B, n, D] → [*B, n, V]``; without a head x as it is."""
        if self.head is not None:
            return self.head(x)
        return nn.functional.linear(x, self.embedding.weight) if self.tied else x

    def extra_repr(self) -> str:
        return (
            f"vocab={self.vocab}, d={self.d}, head={'tied' if self.tied else 'own' if self.head is not None else None}"
        )


class Stack(nn.Module):
    """``x = code + s·E[ids]`` (or the vectors given), then the blocks in turn, then a last norm if there is one.

    ``position`` is what is added to the input (``Sinusoidal``, ``Learned``); ``dropout`` falls on that sum.
    """

    def __init__(
        self,
        blocks: Iterable[Block],
        *,
        norm: nn.Module | None = None,
        tokens: Tokens | None = None,
        position: AddedToInput | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        blocks = list(blocks)
        if not blocks:
            raise ValueError("a stack needs at least one block")
        self.d = blocks[0].d
        widths = [(f"blocks.{i}", block.d) for i, block in enumerate(blocks)]
        widths += [(name, part.d) for name, part in (("tokens", tokens), ("position", position)) if part is not None]
        for name, d in widths:
            if d != self.d:
                raise ValueError(f"{name} has width {d}, but blocks.0 has {self.d}; a stack has one width")
        self.blocks = nn.ModuleList(blocks)
        self.tokens, self.position, self.norm = tokens, position, norm
        self.dropout = nn.Dropout(dropout)

    def embed(self, x: Tensor, start: int = 0) -> Tensor:
        """Token ids ``[*B, n]``, or vectors ``[*B, n, D]`` without a vocabulary → vectors with positions added."""
        if self.tokens is not None:
            x = self.tokens(x)
        elif not x.is_floating_point() or x.ndim < 2 or x.shape[-1] != self.d:
            raise ValueError(
                f"x is {x.dtype} {list(x.shape)}; without a vocabulary this stack takes vectors, [*batch, n, {self.d}]"
            )
        if self.position is not None:
            x = self.position(x, start=start)
        return self.dropout(x)

    def run(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Mask | None = None,
        context_mask: Mask | None = None,
        cache: DecoderCache | None = None,
        observe: Observe | None = None,
    ) -> tuple[Tensor, Observations]:
        """Embedded vectors through all blocks and the last norm; observations by name: ``blocks.0.attention`` …"""
        seen: Observations = {}
        caches = [None] * len(self.blocks) if cache is None else cache.layers
        for i, (block, layer) in enumerate(zip(self.blocks, caches, strict=True)):
            result = block(x, context, mask=mask, context_mask=context_mask, cache=layer, observe=observe)
            if observe is None:
                x = result
            else:
                x, parts = result
                seen |= {f"blocks.{i}.{name}": part for name, part in parts.items()}
        return (x if self.norm is None else self.norm(x)), seen


def split_position(position: Position | AddedToInput | None) -> tuple[AddedToInput | None, Position | None]:
    """A scheme by where it acts: (added to the input, inside attention)."""
    return (position, None) if isinstance(position, AddedToInput) else (None, position)


def as_mask(mask: Mask | Tensor | None) -> Mask | None:
    """A bool tensor as a mask value, so that it can be combined with others."""
    return Dense(mask) if isinstance(mask, Tensor) else mask


def as_padding(padding: PaddingLike | None) -> Padding | None:
    """Lengths ``[B]`` or bool ``[B, m]`` (True = real) as a ``Padding``."""
    return padding if padding is None or isinstance(padding, Padding) else Padding(padding)


def both(a: Mask | None, b: Mask | None) -> Mask | None:
    """``a & b``, where None hides nothing."""
    return b if a is None else a if b is None else a & b
