"""Shared parts of encoders and decoders: token embeddings, the stack of blocks, and helpers for masks and positions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from regard._checks import (
    as_tensor,
    can_read_values,
    check_instance,
    check_integer,
    check_number,
    check_probability,
    check_tensor,
    describe_value,
)
from regard._errors import RegardError, RegardTypeError
from regard._observables import Observation, Observe
from regard.kernels.linear_norm_rope import linear
from regard.masks import Causal, Dense, Mask, Padding
from regard.masks._mask import check_mask
from regard.nn._block import Block, BlockOptions, make_block
from regard.nn._cache import DecoderCache
from regard.nn._linear import Linear
from regard.nn._multi_head_attention import Position
from regard.nn._norm import LayerNorm, make_norm, norm_from_torch
from regard.positions import AddedToInput, Rotary

Observations = dict[str, Observation]  # by the name of the attention layer
PaddingLike = Padding | Tensor | Sequence[int]


class TokenEmbedding(nn.Module):
    """``x_i = s · E[id_i]`` for the input, ``logits = t · x Eᵀ`` (tied) or ``t · x W`` (untied) for the output

        E [V, D] = embedding      W [D, V] = head      s = scale      t = logit_scale

    E and W start as N(0, 1/(16·D)): vectors and logits then have a standard deviation of 1/4, and the first loss is
    near ln V. (With a standard deviation of 1, tied logits would predict the token just read.)

    - ``vocab``, ``d``: V and D.
    - ``head``: ``"tied"`` (default) uses E for the logits, ``"untied"`` adds W, None has no logits.
    - ``scale``: s (default √D). Checkpoints that do not scale have ``scale=1``.
    - ``logit_scale``: t (default 1).

    >>> tokens = TokenEmbedding(11, 3)
    >>> tokens.logits(tokens(torch.tensor([[1, 2]]))).shape
    torch.Size([1, 2, 11])
    """

    def __init__(
        self,
        vocab: int,
        d: int,
        *,
        head: Literal["tied", "untied"] | None = "tied",
        scale: float | None = None,
        logit_scale: float = 1.0,
    ) -> None:
        super().__init__()
        if head not in ("tied", "untied", None):
            raise RegardError(f'head must be "tied", "untied" or None, got {head!r}')
        self.vocab = check_integer("vocab", vocab, least=1)
        self.d = check_integer("d", d, least=1)
        self.tied = head == "tied"
        self.scale = check_number("scale", scale) if scale is not None else d**0.5  # s
        self.logit_scale = check_number("logit_scale", logit_scale)  # t
        self.embedding = nn.Embedding(vocab, d)  # E
        self.head = Linear(d, vocab, bias=False) if head == "untied" else None
        self.reset_parameters()

    @property
    def has_head(self) -> bool:
        """Whether ``logits`` returns logits; without a head it returns its input."""
        return self.tied or self.head is not None

    def reset_parameters(self) -> None:
        """N(0, 1/(16·D)) for E and W."""
        for table in (self.embedding, self.head):
            if table is not None:
                nn.init.normal_(table.weight, std=0.25 * self.d**-0.5)

    def forward(self, ids: Tensor) -> Tensor:
        """``ids [*B, n] → [*B, n, D]``"""
        check_tensor("token ids", ids)
        if ids.dtype not in (torch.int64, torch.int32):
            raise RegardTypeError(f"token ids must be integers (int64 or int32), got {ids.dtype}")
        if ids.numel() and can_read_values(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab:
            raise RegardError(
                f"token ids go from {int(ids.min())} to {int(ids.max())}; this vocabulary has 0 … {self.vocab - 1}"
            )
        x = self.embedding(ids)
        if self.scale != 1:  # a product with 1 would still copy x
            x = self.scale * x
        return x

    def logits(self, x: Tensor) -> Tensor:
        """``x [*B, n, D] → [*B, n, V]``; without a head it returns x."""
        if not self.has_head:  # a model without a head gives vectors
            return x
        if self.logit_scale != 1:
            x = self.logit_scale * x
        if self.head is not None:
            return self.head(x)  # W
        weight = self.embedding.weight
        # Offloading libraries load a weight for the calls of its own layer only. torch's product with the empty tensor
        # that they leave in its place has arbitrary numbers, without an error.
        if weight.is_meta and not x.is_meta:
            raise RegardError(
                "the token embedding is offloaded (on the meta device), and tied logits read it outside of its layer; "
                "keep it in memory, or use a model with untied logits"
            )
        return linear(x, weight)

    def extra_repr(self) -> str:
        head = head_kind(self.tied) if self.has_head else None
        return f"vocab={self.vocab}, d={self.d}, head={head}"


class Stack(nn.Module):
    """``x = code + s·E[ids]`` (or the input vectors), then all blocks in order, then a last norm if there is one.

    ``Encoder`` and ``Decoder`` are stacks. Arguments of ``from_blocks``:

    - ``blocks``: the blocks, which may differ but have one width.
    - ``norm``: the last norm, a module (default None).
    - ``tokens``: a ``TokenEmbedding``; None (default) takes vectors as input.
    - ``position``: a scheme that is added to the input (``Sinusoidal``, ``Learned``; default None).
    - ``dropout``: probability, applied to the sum of embedding and code in training only (default 0).

    >>> from regard.nn import Encoder, LayerNorm, make_block
    >>> blocks = [make_block(6, heads=heads, hidden=12) for heads in (1, 2, 3)]
    >>> encoder = Encoder.from_blocks(blocks, norm=LayerNorm(6))
    >>> [block.attention.heads for block in encoder.blocks], encoder(torch.zeros(2, 5, 6)).shape
    ([1, 2, 3], torch.Size([2, 5, 6]))
    """

    def __init__(
        self,
        blocks: Iterable[Block],
        *,
        norm: nn.Module | None = None,
        tokens: TokenEmbedding | None = None,
        position: AddedToInput | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        blocks = list(blocks)
        if not blocks:
            raise RegardError("blocks is empty; a stack needs at least one block")
        for i, block in enumerate(blocks):
            check_instance(f"blocks.{i}", block, Block)
        if norm is not None and not isinstance(norm, nn.Module):
            raise RegardTypeError(f"norm must be a module, e.g. LayerNorm(d), got {describe_value(norm)}")

        # One width for everything that is added to x.
        self.d = blocks[0].d
        widths = {f"blocks.{i}": block.d for i, block in enumerate(blocks)}
        if tokens is not None:
            widths["tokens"] = tokens.d
        if position is not None:
            widths["position"] = position.d
        for name, d in widths.items():
            if d != self.d:
                raise RegardError(f"{name} has width {d}, but blocks.0 has {self.d}; a stack has one width")

        self.blocks = nn.ModuleList(blocks)
        self.tokens = tokens
        self.position = position
        self.norm = norm
        self.dropout = nn.Dropout(check_probability("dropout", dropout))

    @classmethod
    def from_blocks(
        cls,
        blocks: Iterable[Block],
        *,
        norm: nn.Module | None = None,
        tokens: TokenEmbedding | None = None,
        position: AddedToInput | None = None,
        dropout: float = 0.0,
    ) -> Self:
        """A stack of blocks that you made yourself.

        >>> from regard.nn import Decoder, make_block
        >>> decoder = Decoder.from_blocks([make_block(6, heads=3, hidden=12)], tokens=TokenEmbedding(11, 6))
        >>> decoder(torch.tensor([[1, 2]])).shape
        torch.Size([1, 2, 11])
        """
        self = cls.__new__(cls)  # a subclass's own __init__ takes sizes
        Stack.__init__(self, blocks, norm=norm, tokens=tokens, position=position, dropout=dropout)
        return self

    @classmethod
    def _copy_torch_stack(cls, stack: nn.TransformerEncoder | nn.TransformerDecoder) -> Self:
        """A stack with copies of the weights of torch's encoder or decoder."""
        norm = norm_from_torch("norm", stack.norm) if stack.norm is not None else None
        return cls.from_blocks([Block.from_torch(layer) for layer in stack.layers], norm=norm).train(stack.training)

    def embed(self, x: Tensor, start: int = 0, position_ids: Tensor | None = None) -> Tensor:
        """Token ids ``[*B, n]``, or vectors ``[*B, n, D]`` without a vocabulary → vectors with positions added.

        - ``start``: the position of the first row (default 0).
        - ``position_ids``: the positions of all rows, in place of start, start + 1, … (default None).

        >>> encoder = regard.nn.Encoder(6, heads=3, layers=1, position=regard.Sinusoidal(6)).eval()
        >>> x = torch.zeros(1, 4, 6)
        >>> torch.equal(encoder.embed(x, start=2)[:, :2], encoder.embed(x)[:, 2:])
        True
        """
        if self.tokens is not None:
            x = self.tokens(x)
        else:
            check_tensor("x", x)
            if not x.is_floating_point() or x.ndim < 2 or x.shape[-1] != self.d:
                shape = list(x.shape)
                raise RegardError(
                    f"x is {x.dtype} {shape}; without a vocabulary this stack takes vectors [*batch, n, {self.d}]"
                )
        if self.position is not None:
            x = self.position(x, start=start, position_ids=position_ids)
        if self.training:
            x = self.dropout(x)
        return x

    def run_blocks(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        causal: bool = False,
        padding: PaddingLike | None = None,
        mask: Mask | Tensor | None = None,
        context_mask: Mask | Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: DecoderCache | None = None,
        observe: Observe | None = None,
    ) -> tuple[Tensor, Observations]:
        """Run all blocks and the last norm; return the vectors and observations by name: ``blocks.0.attention`` …"""
        # All masks of self-attention are combined; a part that is None hides nothing.
        all_masks: Mask | None = Causal() if causal else None
        for part in (as_padding(padding, x), as_mask("mask", mask)):
            if part is not None:
                all_masks = all_masks & part if all_masks is not None else part
        context_mask = as_mask("context_mask", context_mask)
        if position_ids is not None:
            self._check_positions_are_used()
        observations: Observations = {}
        for i, block in enumerate(self.blocks):
            # Other modules may stand in the place of attention, for example one with convolved heads.
            position = getattr(block.get_submodule("attention"), "position", None)
            result = block(
                x,
                context,
                mask=all_masks,
                context_mask=context_mask,
                position_ids=position_ids if isinstance(position, Rotary) else None,
                cache=cache.layers[i] if cache is not None else None,
                observe=observe,
            )
            if observe is None:
                x = result
                continue
            # Names become paths in the stack: blocks.0.attention, blocks.0.cross …
            x, block_observations = result
            for name, observation in block_observations.items():
                observations[f"blocks.{i}.{name}"] = observation
        if self.norm is not None:
            x = self.norm(x)
        return x, observations

    def _check_positions_are_used(self) -> None:
        """Refuse ``position_ids`` in a stack where they would have no effect."""
        rotary = any(isinstance(block.get_submodule("attention").position, Rotary) for block in self.blocks)
        if self.position is None and not rotary:
            raise RegardError("position_ids were given, but this stack has no Sinusoidal, Learned or Rotary; omit them")


def head_kind(tied: bool) -> Literal["tied", "untied"]:
    """The ``head`` of a ``TokenEmbedding`` that predicts tokens."""
    return "tied" if tied else "untied"


def split_position(position: Position | AddedToInput | None) -> tuple[AddedToInput | None, Position | None]:
    """Return (scheme added to the input, scheme inside attention); at least one of them is None."""
    if isinstance(position, AddedToInput):
        return position, None
    return None, position


def stack_arguments(
    d: int,
    heads: int,
    layers: int,
    hidden: int | None,
    tokens: TokenEmbedding | None,
    position: Position | AddedToInput | None,
    dropout: float,
    options: BlockOptions,
    d_context: int | None = None,
) -> dict[str, Any]:
    """The arguments of a ``Stack`` of ``layers`` equal blocks.

    A pre-norm stack gets a last norm. A post-norm stack needs none: its last block ends with one.
    """
    added_to_input, in_attention = split_position(position)
    hidden = hidden if hidden is not None else 4 * d
    # Every block is new, but a learned table of positions is shared by all.
    blocks = []
    for _ in range(check_integer("layers", layers, least=1)):
        block = make_block(d, heads, hidden, d_context=d_context, position=in_attention, dropout=dropout, **options)
        blocks.append(block)
    norm = None
    if options.get("order", "pre") == "pre":  # the residual sum was never normalised
        norm = make_norm(options.get("norm", LayerNorm), d)
    return {"blocks": blocks, "norm": norm, "tokens": tokens, "position": added_to_input, "dropout": dropout}


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
    except TypeError:  # as_tensor does not know the three forms of padding
        raise RegardTypeError(
            "padding must be lengths [B], a bool tensor [B, m] with True = real, or a Padding; "
            f"got {describe_value(padding)}"
        ) from None
    # An attention mask of 0 and 1 from another library must not be read as lengths.
    if real.dtype != torch.bool and not real.is_floating_point() and real.ndim > max(1, x.ndim - 2):
        raise RegardError(
            f"padding is {real.dtype} {list(real.shape)}, but lengths are one number per batch entry; "
            "a mask of 0 and 1 must be bool: padding=attention_mask.bool()"
        )
    return Padding(real)
