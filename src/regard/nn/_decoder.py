"""The decoder: no token attends to a later one; with a cache it reads token by token."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor, nn

from regard._checks import check_instance, describe_value
from regard._errors import RegardError, RegardTypeError
from regard._observables import Observe
from regard.masks import Mask
from regard.nn._block import BlockOptions
from regard.nn._cache import DecoderCache, rollback_on_error
from regard.nn._multi_head_attention import Position
from regard.nn._stack import Observations, PaddingLike, Stack, TokenEmbedding, head_kind, stack_arguments
from regard.positions import AddedToInput


class Decoder(Stack):
    """``x^{l+1} = Block_l(x^l, context)``, ``y = norm(x^L)``, ``logits = y Eᵀ``;  self-attention with the causal mask

        x [*B, n, D] → y [*B, n, D];  with ``vocab`` ids [*B, n] → logits [*B, n, V]

    ``Causal()`` is added to the mask of every call: output i depends on inputs 0 … i only, and right padding needs no
    mask. (For a prefix language model use ``Encoder`` with ``mask=Causal() | Prefix(lengths)``.)

    Arguments, besides those of ``Encoder``:

    - ``tied``: the logits use the embedding matrix (default True); False adds a separate head.
    - ``d_context``: width of a context; every block gets cross-attention over it (default None).

    >>> import torch
    >>> decoder = Decoder(6, heads=3, layers=2, vocab=11).eval()
    >>> ids, cache = torch.tensor([[3, 1, 4, 1, 5]]), decoder.new_cache()
    >>> with torch.no_grad():
    ...     steps = [decoder(ids[:, i : i + 1], cache=cache) for i in range(5)]
    >>> torch.testing.assert_close(torch.cat(steps, dim=1), decoder(ids).detach())
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
        tied: bool = True,
        d_context: int | None = None,
        position: Position | AddedToInput | None = None,
        dropout: float = 0.0,
        **options: Unpack[BlockOptions],
    ) -> None:
        tokens = None
        if vocab is not None:
            tokens = TokenEmbedding(vocab, d, head=head_kind(tied), scale=token_scale)
        super().__init__(**stack_arguments(d, heads, layers, hidden, tokens, position, dropout, options, d_context))

    @classmethod
    def from_torch(cls, decoder: nn.TransformerDecoder) -> Decoder:
        """The same function, with copies of the weights of ``nn.TransformerDecoder``, for a causal ``tgt_mask``."""
        check_instance("decoder", decoder, nn.TransformerDecoder)
        return cls._copy_torch_stack(decoder)

    def new_cache(self, capacity: int = 0) -> DecoderCache:
        """An empty cache for this decoder, with memory for ``capacity`` tokens.

        >>> Decoder(6, heads=3, layers=2).new_cache(100).length
        0
        """
        return DecoderCache(len(self.blocks), capacity)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        padding: PaddingLike | None = None,
        mask: Mask | Tensor | None = None,
        context_mask: Mask | Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: DecoderCache | None = None,
        observe: Observe | None = None,
    ) -> Tensor | tuple[Tensor, Observations]:
        """``x [*B, n, D]`` → ``[*B, n, D]``, or ids ``[*B, n]`` → logits ``[*B, n, V]``

        - ``context``: ``[*B, c, d_context]``, for cross-attention.
        - ``padding``, ``mask``: over the m keys of self-attention, including the cached ones. ``padding`` is real
          lengths ``[B]`` or bool ``[B, m]`` with True = real (needed for left padding); ``mask`` hides further keys.
        - ``context_mask``: over the keys of the context.
        - ``position_ids``: positions of the tokens in x, integers ``[n]`` or ``[*B, n]``. Needed if they are
          not consecutive: left padding, packed documents. With a cache give them at every step.
        - ``cache``: x follows the tokens in the cache. If a call raises, the cache is unchanged.
        - ``observe``: what to measure. The result is then ``(y, observations by layer name)``.
        """
        result = self.hidden_states(
            x,
            context,
            padding=padding,
            mask=mask,
            context_mask=context_mask,
            position_ids=position_ids,
            cache=cache,
            observe=observe,
        )
        if self.tokens is None:
            return result
        if isinstance(result, Tensor):
            return self.tokens.logits(result)
        y, observations = result
        return self.tokens.logits(y), observations

    def hidden_states(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        padding: PaddingLike | None = None,
        mask: Mask | Tensor | None = None,
        context_mask: Mask | Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: DecoderCache | None = None,
        observe: Observe | None = None,
    ) -> Tensor | tuple[Tensor, Observations]:
        """y ``[*B, n, D]``, the vectors after the last norm; arguments as in ``forward``."""
        self._check_cache(cache)
        start = 0
        if cache is not None and position_ids is None:  # x follows the tokens in the cache
            start = cache.length
        with rollback_on_error(cache):
            x = self.embed(x, start=start, position_ids=position_ids)
            y, observations = self.run_blocks(
                x,
                context,
                # A single query is the last one and sees every key: without a mask it can take the fast decode step.
                causal=x.shape[-2] != 1,
                padding=padding,
                mask=mask,
                context_mask=context_mask,
                position_ids=position_ids,
                cache=cache,
                observe=observe,
            )
        if observe is None:
            return y
        return y, observations

    def _check_cache(self, cache: DecoderCache | None) -> None:
        if cache is None:
            return
        if not isinstance(cache, DecoderCache):
            raise RegardTypeError(f"cache must be a DecoderCache, which new_cache() makes, got {describe_value(cache)}")
        if len(cache.layers) != len(self.blocks):
            raise RegardError(
                f"cache is for {len(cache.layers)} blocks, but this decoder has {len(self.blocks)}; use new_cache()"
            )
