"""The encoder: every position sees every other one; padding is hidden."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor, nn

from regard.masks import Mask
from regard.nn.block import Block, BlockOptions
from regard.nn.multihead import Position
from regard.nn.norm import norm_from_torch
from regard.nn.stack import Observations, PaddingLike, Stack, Tokens, as_mask, as_padding, both, sized
from regard.observables import Observe
from regard.positions import AddedToInput
from regard.positions.common import check_kind

__all__ = ["Encoder"]


class Encoder(Stack):
    """``x^{l+1} = Block_l(x^l)``, ``y = norm(x^L)``;  self-attention under the key padding mask alone

        x [*B, n, D] (ids [*B, n] with ``vocab``) → y [*B, n, D];      D = d, N_h = heads, L = layers, D_ff = hidden

    The last norm is there in pre-norm stacks, whose residual sum is otherwise never normed. ``hidden`` is 4·D unless
    given. ``position``: what is added to the input is added once; a ``Rotary`` or a bias on scores goes into the
    attention of every block, one value (and one learned table) shared by all. ``token_scale`` multiplies embeddings
    (√D unless given). Other options are ``make_block``'s.
    For anything else build the blocks yourself: ``Encoder.of(blocks, norm=…)``.

    >>> import torch
    >>> Encoder(6, heads=3, layers=2)(torch.zeros(2, 5, 6), padding=[5, 3]).shape
    torch.Size([2, 5, 6])
    """

    def __init__(
        self,
        d: int,
        heads: int,
        layers: int,
        *,
        hidden: int | None = None,
        vocab: int | None = None,
        token_scale: float | None = None,
        position: Position | AddedToInput | None = None,
        dropout: float = 0.0,
        **options: Unpack[BlockOptions],
    ) -> None:
        tokens = None if vocab is None else Tokens(vocab, d, head=None, scale=token_scale)
        super().__init__(**sized(d, heads, layers, hidden, tokens, position, dropout, options))

    @classmethod
    def from_torch(cls, encoder: nn.TransformerEncoder) -> Encoder:
        """The same function with the weights of ``nn.TransformerEncoder`` (copies); ours is always batch first.

        At padded positions torch's fused path returns zeros and ours what the formula gives.

        >>> theirs = nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 11, batch_first=True), 2).double().eval()
        >>> ours, x = Encoder.from_torch(theirs), torch.randn(2, 5, 6, dtype=torch.float64)
        >>> torch.allclose(ours(x), theirs(x))
        True
        """
        check_kind("encoder", encoder, nn.TransformerEncoder)
        norm = None if encoder.norm is None else norm_from_torch("norm", encoder.norm)
        return cls.of([Block.from_torch(layer) for layer in encoder.layers], norm=norm).train(encoder.training)

    def forward(
        self,
        x: Tensor,
        *,
        padding: PaddingLike | None = None,
        mask: Mask | Tensor | None = None,
        at: Tensor | None = None,
        observe: Observe | None = None,
    ) -> Tensor | tuple[Tensor, Observations]:
        """``x [*B, n, D]`` or ids ``[*B, n]`` → ``[*B, n, D]``; with ``observe`` also observations by layer name.

        ``padding``: real lengths ``[B]``, bool ``[B, n]`` with True = real, or a ``Padding``. ``mask`` hides more
        (True = may attend). Outputs at padded positions mean nothing but are finite. ``at``: the positions of the
        tokens, whole numbers ``[n]`` or ``[*B, n]``, where they do not count from 0: left padding, packed documents.
        """
        x = self.embed(x, at=at)
        mask = both(as_padding(padding, x), as_mask("mask", mask))
        y, seen = self.run(x, mask=mask, at=at, observe=observe)
        return y if observe is None else (y, seen)
