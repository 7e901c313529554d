"""Text encoders as BERT made them: tokens, positions and sentence types under one norm, blocks, a head or two."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from regard.config import Config
from regard.models.keys import Table
from regard.models.model import Model, named
from regard.nn import Encoder
from regard.nn.feedforward import ACTIVATIONS
from regard.nn.stack import Observations, PaddingLike, Tokens, as_padding
from regard.observables import Observe
from regard.positions import Learned
from regard.positions.common import check_whole

__all__ = ["Dense", "MaskedHead", "TextEncoder"]

Read = Literal["tokens", "first"]


class Dense(nn.Module):
    """``φ(x W + b)``: what stands between the first token's vector and a classifier ("pooler")."""

    def __init__(self, d: int, activation: str) -> None:
        super().__init__()
        self.dense, self.activation = nn.Linear(d, d), activation

    def forward(self, x: Tensor) -> Tensor:
        x = self.dense(x)
        return x.tanh() if self.activation == "tanh" else ACTIVATIONS[self.activation](x)


class MaskedHead(nn.Module):
    """``logits = norm(φ(y W + b)) Eᵀ + c``: which token stood where one was masked; E is the embedding, tied."""

    def __init__(self, vocab: int, d: int, activation: str, norm: nn.Module) -> None:
        super().__init__()
        self.dense, self.norm, self.activation = nn.Linear(d, d), norm, activation
        self.bias = nn.Parameter(torch.zeros(vocab))

    def forward(self, y: Tensor, embedding: Tensor) -> Tensor:
        y = self.norm(ACTIVATIONS[self.activation](self.dense(y)))
        return nn.functional.linear(y, embedding, self.bias)


class TextEncoder(Model):
    """``x = norm(E[id] + P[i] + S[type])``, ``y = Encoder(x)``;  then a head, if there is one

        ids [B, n] → y [B, n, D], or logits: [B, n, V] (masked tokens), [B, n, C] (a class a token),
        [B, C] (a class a text, from the first token's vector through the pooler)

    ``next_sentence`` (BERT's own pre-training) is a classifier beside the head; it is not part of a call.

    >>> sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 24}
    >>> names = {"model_type": "bert", "architectures": ["BertModel"], "vocab_size": 256, "max_position_embeddings": 16}
    >>> model = regard.models.create({**names, **sizes}).eval()
    >>> ids = torch.tensor([model.text.encode("two cats")])
    >>> model(ids).shape, model.sentence(ids).shape
    (torch.Size([1, 8, 12]), torch.Size([1, 12]))
    """

    def __init__(
        self,
        config: Config,
        table: Table,
        *,
        tokens: Tokens,
        position: Learned,
        types: nn.Embedding | None,
        norm: nn.Module,
        encoder: Encoder,
        pooler: Dense | None = None,
        head: nn.Module | None = None,
        reads: Read = "tokens",
        next_sentence: nn.Module | None = None,
        counts_from_pad: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(config, table)
        self.tokens, self.position, self.types, self.norm = tokens, position, types, norm
        self.encoder, self.pooler, self.head, self.reads = encoder, pooler, head, reads
        self.next_sentence, self.counts_from_pad = next_sentence, counts_from_pad
        self.dropout = nn.Dropout(dropout)

    @property
    def longest(self) -> int:
        """How many tokens the learned positions reach."""
        return self.position.length - (0 if self.counts_from_pad is None else self.counts_from_pad + 1)

    def embed(self, ids: Tensor, types: Tensor | None = None) -> Tensor:
        """``ids, types [B, n] → x [B, n, D]``; all of type 0 unless given."""
        x = self.tokens(ids)
        if ids.shape[-1] > self.longest:
            raise ValueError(
                f"the text has {ids.shape[-1]} tokens; this model has learned positions for {self.longest}"
            )
        if self.types is not None:
            x = x + (self.types.weight[0] if types is None else self.types(self._checked(types, ids)))
        elif types is not None:
            raise ValueError("types were given, but this model has no sentence types; leave them out")
        if self.counts_from_pad is None:
            x = self.position(x)
        else:
            real = ids != self.counts_from_pad
            x = self.position(x, at=real.cumsum(-1) * real + self.counts_from_pad)
        return self.dropout(self.norm(x))

    def _checked(self, types: Tensor, ids: Tensor) -> Tensor:
        check_whole("types", types)
        assert self.types is not None
        if types.shape != ids.shape:
            raise ValueError(f"types has shape {list(types.shape)}, but ids {list(ids.shape)}; they must be equal")
        if types.numel() and not 0 <= int(types.min()) <= int(types.max()) < self.types.num_embeddings:
            most = self.types.num_embeddings - 1
            raise ValueError(f"types go from {int(types.min())} to {int(types.max())}; this model has 0 … {most}")
        return types

    def hidden(
        self,
        ids: Tensor,
        *,
        types: Tensor | None = None,
        padding: PaddingLike | None = None,
        observe: Observe | None = None,
    ) -> Tensor | tuple[Tensor, Observations]:
        """y ``[B, n, D]``, the last block's vectors; ``padding`` as in ``Encoder``: lengths, or True = real."""
        return named("encoder", self.encoder(self.embed(ids, types), padding=padding, observe=observe))

    def forward(
        self,
        ids: Tensor,
        *,
        types: Tensor | None = None,
        padding: PaddingLike | None = None,
        observe: Observe | None = None,
    ) -> Tensor | tuple[Tensor, Observations]:
        """Logits if the model has a head, else y; with ``observe`` also observations by module name."""
        result = self.hidden(ids, types=types, padding=padding, observe=observe)
        y, seen = (result, None) if isinstance(result, Tensor) else result
        if isinstance(self.head, MaskedHead):
            y = self.head(y, self.tokens.embedding.weight)
        elif self.head is not None:
            y = self.head(self.pooled(y) if self.reads == "first" else y)
        return y if seen is None else (y, seen)

    def pooled(self, y: Tensor) -> Tensor:
        """``y [B, n, D] → [B, D]``: the first token's vector, through the pooler if there is one."""
        return y[..., 0, :] if self.pooler is None else self.pooler(y[..., 0, :])

    def sentence(self, ids: Tensor, *, types: Tensor | None = None, padding: PaddingLike | None = None) -> Tensor:
        """``[B, D]``: the mean of y over a text's real tokens, scaled to length 1, as sentence models use it."""
        y = self.hidden(ids, types=types, padding=padding)
        assert isinstance(y, Tensor)
        mask = as_padding(padding, y)
        named_real = None if mask is None else mask.real_queries(y.shape[-2], y.shape[-2])
        real = (torch.ones(y.shape[:-1]) if named_real is None else named_real).to(y).unsqueeze(-1)
        return nn.functional.normalize((y * real).sum(-2) / real.sum(-2).clamp(min=1), dim=-1)
