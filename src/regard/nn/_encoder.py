"""The encoder: every token attends to every other one; padding is hidden."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor, nn

from regard._checks import check_instance
from regard._observables import Observe
from regard.masks import Mask
from regard.nn._block import BlockOptions
from regard.nn._multi_head_attention import Position
from regard.nn._stack import Observations, PaddingLike, Stack, TokenEmbedding, stack_arguments
from regard.positions import AddedToInput


class Encoder(Stack):
    """``x^{l+1} = Block_l(x^l)``, ``y = norm(x^L)``;  self-attention with the key padding mask only

        x [*B, n, D] (ids [*B, n] with ``vocab``) → y [*B, n, D]

    Pre-norm stacks end with a norm, because their residual sum is otherwise never normalised. To combine other blocks,
    use ``Encoder.from_blocks(blocks, norm=…)``.

    - ``d``, ``heads``, ``layers``: D, N_h and L.
    - ``hidden``: D_ff (default 4·D).
    - ``vocab``: V; the input is then token ids (default None: vectors).
    - ``token_scale``: factor of the embeddings (default √D).
    - ``position``: a scheme added to the input, or a ``Rotary`` or a bias on scores, which goes into the attention of
      every block: one value (and one learned table) shared by all.
    - ``dropout``: probability (default 0).
    - further options are those of ``make_block``.

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
        tokens = None
        if vocab is not None:  # an encoder has no head: its output is vectors
            tokens = TokenEmbedding(vocab, d, head=None, scale=token_scale)
        super().__init__(**stack_arguments(d, heads, layers, hidden, tokens, position, dropout, options))

    @classmethod
    def from_torch(cls, encoder: nn.TransformerEncoder) -> Encoder:
        """The same function, with copies of the weights of ``nn.TransformerEncoder``; always batch first.

        At padded positions torch's fused path returns zeros; ours returns what the formula gives.

        >>> theirs = nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 11, batch_first=True), 2).double().eval()
        >>> ours, x = Encoder.from_torch(theirs), torch.randn(2, 5, 6, dtype=torch.float64)
        >>> torch.allclose(ours(x), theirs(x))
        True
        """
        check_instance("encoder", encoder, nn.TransformerEncoder)
        return cls._copy_torch_stack(encoder)

    def forward(
        self,
        x: Tensor,
        *,
        padding: PaddingLike | None = None,
        mask: Mask | Tensor | None = None,
        position_ids: Tensor | None = None,
        observe: Observe | None = None,
    ) -> Tensor | tuple[Tensor, Observations]:
        """``x [*B, n, D]`` or ids ``[*B, n]`` → ``[*B, n, D]``

        - ``padding``: real lengths ``[B]``, bool ``[B, n]`` with True = real, or a ``Padding``. Outputs at padded
          positions are finite but have no meaning.
        - ``mask``: hides further keys (True = may attend).
        - ``position_ids``: positions of the tokens, integers ``[n]`` or ``[*B, n]``. Needed if they do not count
          from 0: left padding, packed documents.
        - ``observe``: what to measure. The result is then ``(y, observations by layer name)``.
        """
        x = self.embed(x, position_ids=position_ids)  # [*B, n, D]
        y, observations = self.run_blocks(x, padding=padding, mask=mask, position_ids=position_ids, observe=observe)
        if observe is None:
            return y
        return y, observations
