"""What encoder and decoder share: tokens in, positions added, blocks in turn, a last norm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from regard.kernels.layers import linear
from regard.masks import Dense, Mask, Padding
from regard.nn.block import Block, BlockOptions, make_block
from regard.nn.cache import DecoderCache
from regard.nn.linear import Linear
from regard.nn.multihead import Position
from regard.nn.norm import LayerNorm, make_norm
from regard.observables import Observation, Observe
from regard.positions import AddedToInput, Rotary
from regard.positions.common import check_kind, check_mask, described, probability
from regard.shapes import as_tensor, check_tensor, integer, number, readable

__all__ = ["Observations", "Stack", "Tokens"]

Observations = dict[str, Observation]
PaddingLike = Padding | Tensor | Sequence[int]


class Tokens(nn.Module):
    """``x_i = s · E[id_i]`` on the way in, ``logits = t · x Eᵀ`` (tied) or ``t · x W`` (own) on the way out

        E [V, D] = embedding      W [D, V] = head      s = scale, √D by default      t = logit_scale, 1 by default

    E and W start as N(0, 1/(16·D)), so that vectors and logits start with a standard deviation of 1/4: the first loss
    is near ln V. (With 1 instead, tied logits start by predicting the token just read, the surer the larger D is.)
    Checkpoints that do not scale have ``scale=1``.

    >>> tokens = Tokens(11, 3)
    >>> tokens.logits(tokens(torch.tensor([[1, 2]]))).shape
    torch.Size([1, 2, 11])
    """

    def __init__(
        self,
        vocab: int,
        d: int,
        *,
        head: Literal["tied", "own"] | None = "tied",
        scale: float | None = None,
        logit_scale: float = 1.0,
    ) -> None:
        super().__init__()
        if head not in ("tied", "own", None):
            raise ValueError(f'head must be "tied", "own" or None, got {head!r}')
        self.vocab, self.d, self.tied = integer("vocab", vocab, least=1), integer("d", d, least=1), head == "tied"
        self.scale = d**0.5 if scale is None else number("scale", scale)
        self.logit_scale = number("logit_scale", logit_scale)
        self.embedding = nn.Embedding(vocab, d)
        self.head = Linear(d, vocab, bias=False) if head == "own" else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """N(0, 1/(16·D)) for E and W."""
        for table in (self.embedding, self.head):
            if table is not None:
                nn.init.normal_(table.weight, std=0.25 * self.d**-0.5)

    def forward(self, ids: Tensor) -> Tensor:
        """``ids [*B, n] → [*B, n, D]``"""
        check_tensor("token ids", ids)
        if ids.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"token ids must be whole numbers (int64 or int32), got {ids.dtype}")
        if ids.numel() and readable(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab:
            raise ValueError(
                f"token ids go from {int(ids.min())} to {int(ids.max())}; this vocabulary has 0 … {self.vocab - 1}"
            )
        x = self.embedding(ids)
        return x if self.scale == 1 else self.scale * x

    def logits(self, x: Tensor) -> Tensor:
        """``x [*B, n, D] → [*B, n, V]``; without a head x as it is."""
        if self.head is None and not self.tied:
            return x
        x = x if self.logit_scale == 1 else self.logit_scale * x
        return linear(x, self.embedding.weight) if self.head is None else self.head(x)

    def extra_repr(self) -> str:
        return (
            f"vocab={self.vocab}, d={self.d}, head={'tied' if self.tied else 'own' if self.head is not None else None}"
        )


class Stack(nn.Module):
    """``x = code + s·E[ids]`` (or the vectors given), then the blocks in turn, then a last norm if there is one.

    ``position`` is what is added to the input (``Sinusoidal``, ``Learned``); ``dropout`` falls on that sum.

    ``Encoder`` and ``Decoder`` are stacks. ``of`` takes blocks that differ:

    >>> from regard.nn import Encoder, LayerNorm, make_block
    >>> blocks = [make_block(6, heads=heads, hidden=12) for heads in (1, 2, 3)]
    >>> encoder = Encoder.of(blocks, norm=LayerNorm(6))
    >>> [block.attention.heads for block in encoder.blocks], encoder(torch.zeros(2, 5, 6)).shape
    ([1, 2, 3], torch.Size([2, 5, 6]))
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
        for i, block in enumerate(blocks):
            check_kind(f"blocks.{i}", block, Block)
        if norm is not None and not isinstance(norm, nn.Module):
            raise TypeError(f"the last norm must be a module, e.g. LayerNorm(d), got {described(norm)}")
        self.d = blocks[0].d
        widths = [(f"blocks.{i}", block.d) for i, block in enumerate(blocks)]
        widths += [(name, part.d) for name, part in (("tokens", tokens), ("position", position)) if part is not None]
        for name, d in widths:
            if d != self.d:
                raise ValueError(f"{name} has width {d}, but blocks.0 has {self.d}; a stack has one width")
        self.blocks = nn.ModuleList(blocks)
        self.tokens, self.position, self.norm = tokens, position, norm
        self.dropout = nn.Dropout(probability("dropout", dropout))

    @classmethod
    def of(
        cls,
        blocks: Iterable[Block],
        *,
        norm: nn.Module | None = None,
        tokens: Tokens | None = None,
        position: AddedToInput | None = None,
        dropout: float = 0.0,
    ) -> Self:
        """A stack of blocks already made.

        >>> from regard.nn import Decoder, make_block
        >>> Decoder.of([make_block(6, heads=3, hidden=12)], tokens=Tokens(11, 6))(torch.tensor([[1, 2]])).shape
        torch.Size([1, 2, 11])
        """
        self = cls.__new__(cls)
        Stack.__init__(self, blocks, norm=norm, tokens=tokens, position=position, dropout=dropout)
        return self

    def embed(self, x: Tensor, start: int = 0, at: Tensor | None = None) -> Tensor:
        """Token ids ``[*B, n]``, or vectors ``[*B, n, D]`` without a vocabulary → vectors with positions added.

        The rows' positions are start, start + 1, …, or ``at``.

        >>> encoder = regard.nn.Encoder(6, heads=3, layers=1, position=regard.Sinusoidal(6)).eval()
        >>> x = torch.zeros(1, 4, 6)
        >>> torch.equal(encoder.embed(x, start=2)[:, :2], encoder.embed(x)[:, 2:])
        True
        """
        if self.tokens is not None:
            x = self.tokens(x)
            return self._placed(x, start, at)
        check_tensor("x", x)
        if not x.is_floating_point() or x.ndim < 2 or x.shape[-1] != self.d:
            raise ValueError(
                f"x is {x.dtype} {list(x.shape)}; without a vocabulary this stack takes vectors, [*batch, n, {self.d}]"
            )
        return self._placed(x, start, at)

    def _placed(self, x: Tensor, start: int, at: Tensor | None) -> Tensor:
        if self.position is not None:
            x = self.position(x, start=start) if at is None else self.position(x, at=at)
        return self.dropout(x) if self.training else x

    def run(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Mask | None = None,
        context_mask: Mask | None = None,
        at: Tensor | None = None,
        cache: DecoderCache | None = None,
        observe: Observe | None = None,
    ) -> tuple[Tensor, Observations]:
        """Embedded vectors through all blocks and the last norm; observations by name: ``blocks.0.attention`` …"""
        seen: Observations = {}
        caches = [None] * len(self.blocks) if cache is None else cache.layers
        places = [None] * len(self.blocks) if at is None else self._places(at)
        for i, (block, layer, where) in enumerate(zip(self.blocks, caches, places, strict=True)):
            result = block(x, context, mask=mask, context_mask=context_mask, at=where, cache=layer, observe=observe)
            if observe is None:
                x = result
            else:
                x, parts = result
                seen |= {f"blocks.{i}.{name}": part for name, part in parts.items()}
        return (x if self.norm is None else self.norm(x)), seen

    def _places(self, at: Tensor) -> list[Tensor | None]:
        """``at`` for each block whose attention turns q and k; positions that nothing would look at are refused."""
        turning = [isinstance(block.get_submodule("attention").position, Rotary) for block in self.blocks]
        if self.position is None and not any(turning):
            raise ValueError(
                "at gives positions, but nothing in this stack looks at them: no Sinusoidal, Learned or Rotary "
                "(biases on scores go by distances between rows); leave it out"
            )
        return [at if turns else None for turns in turning]


def split_position(position: Position | AddedToInput | None) -> tuple[AddedToInput | None, Position | None]:
    """A scheme by where it acts: (added to the input, inside attention)."""
    return (position, None) if isinstance(position, AddedToInput) else (None, position)


def sized(
    d: int,
    heads: int,
    layers: int,
    hidden: int | None,
    tokens: Tokens | None,
    position: Position | AddedToInput | None,
    dropout: float,
    options: BlockOptions,
    d_context: int | None = None,
) -> dict[str, Any]:
    """The arguments of a ``Stack`` of ``layers`` equal blocks.

    The last norm is there in pre-norm stacks alone; post-norm ones end with a norm already.
    """
    added, inside = split_position(position)
    hidden = 4 * d if hidden is None else hidden
    pre = options.get("order", "pre") == "pre"
    return {
        "blocks": [
            make_block(d, heads, hidden, d_context=d_context, position=inside, dropout=dropout, **options)
            for _ in range(integer("layers", layers, least=1))
        ],
        "norm": make_norm(options.get("norm", LayerNorm), d) if pre else None,
        "tokens": tokens,
        "position": added,
        "dropout": dropout,
    }


def as_mask(name: str, mask: Mask | Tensor | None) -> Mask | None:
    """A bool tensor as a mask value, so that it can be combined with others."""
    check_mask(name, mask)
    return Dense(mask) if isinstance(mask, Tensor) else mask


def as_padding(padding: PaddingLike | None, x: Tensor) -> Padding | None:
    """Lengths ``[B]`` or bool ``[B, m]`` (True = real) as a ``Padding``, for vectors ``x [*B, m, D]``."""
    if padding is None or isinstance(padding, Padding):
        return padding
    try:
        real = as_tensor("padding", padding)
    except TypeError:
        raise TypeError(
            "padding must be lengths [B], a bool tensor [B, m] with True = real, or a Padding; "
            f"got {described(padding)}"
        ) from None
    if real.dtype != torch.bool and not real.is_floating_point() and real.ndim > max(1, x.ndim - 2):
        raise ValueError(
            f"padding is {real.dtype} {list(real.shape)}, but lengths are one number a batch entry; "
            "a mask of 0 and 1 must be bool: padding=attention_mask.bool()"
        )
    return Padding(real)


def both(a: Mask | None, b: Mask | None) -> Mask | None:
    """``a & b``, where None hides nothing."""
    return b if a is None else a if b is None else a & b
