"""Text encoders such as BERT: embeddings of tokens, positions and token types, an encoder, and a head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard._checks import check_integer_tensor
from regard._config_json import Config
from regard._errors import RegardError
from regard._observables import Observe
from regard.models._checkpoint_keys import KeyTable
from regard.models._model import Model, prefix_observations
from regard.nn import Encoder
from regard.nn._feed_forward import ACTIVATIONS
from regard.nn._stack import Observations, PaddingLike, TokenEmbedding, as_padding
from regard.positions import Learned


class Pooler(nn.Module):
    """``φ(x W + b)``, applied to the first token's vector before a classifier."""

    def __init__(self, d: int, activation: str) -> None:
        super().__init__()
        self.dense = nn.Linear(d, d)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        x = self.dense(x)
        if self.activation == "tanh":
            return x.tanh()
        return ACTIVATIONS[self.activation](x)


class MaskedHead(nn.Module):
    """``logits = norm(φ(y W + b)) Eᵀ + c``, the logits of masked tokens; E is the tied embedding."""

    def __init__(self, vocab: int, d: int, activation: str, norm: nn.Module) -> None:
        super().__init__()
        self.dense = nn.Linear(d, d)
        self.norm = norm
        self.activation = activation
        self.bias = nn.Parameter(torch.zeros(vocab))

    def forward(self, y: Tensor, embedding: Tensor) -> Tensor:
        y = self.norm(ACTIVATIONS[self.activation](self.dense(y)))
        return nn.functional.linear(y, embedding, self.bias)


class TextEncoder(Model):
    """``x = norm(E[id] + P[i] + S[type])``, ``y = Encoder(x)``, then a head if there is one

        ids [B, n] → y [B, n, D], or logits: [B, n, V] (masked tokens), [B, n, C] (one class per token),
        [B, C] (one class per text, from the first token's vector through the pooler)

    ``next_sentence`` (from BERT's pre-training) is a classifier besides the head; calls do not use it.

    >>> sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 24}
    >>> names = {"model_type": "bert", "architectures": ["BertModel"], "vocab_size": 256, "max_position_embeddings": 16}
    >>> model = regard.models.create({**names, **sizes}).eval()
    >>> ids = torch.tensor([model.tokenizer.encode("two cats")])
    >>> model(ids).shape, model.sentence_embedding(ids).shape
    (torch.Size([1, 8, 12]), torch.Size([1, 12]))
    """

    def __init__(
        self,
        config: Config,
        keys: KeyTable,
        *,
        tokens: TokenEmbedding,
        position: Learned,
        token_types: nn.Embedding | None,
        norm: nn.Module,
        encoder: Encoder,
        pooler: Pooler | None = None,
        head: nn.Module | None = None,
        pooled_head: bool = False,
        next_sentence: nn.Module | None = None,
        position_padding_id: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(config, keys)
        self.tokens = tokens
        self.position = position
        self.token_types = token_types
        self.norm = norm
        self.encoder = encoder
        self.pooler = pooler
        self.head = head
        self.pooled_head = pooled_head  # the head reads the first token through the pooler, not all tokens
        self.next_sentence = next_sentence  # kept so that saving loses nothing
        self.position_padding_id = position_padding_id  # RoBERTa counts positions from the padding id on
        self.dropout = nn.Dropout(dropout)

    @property
    def max_positions(self) -> int:
        """Largest number of tokens that have a learned position."""
        if self.position_padding_id is None:
            return self.position.length
        return self.position.length - self.position_padding_id - 1

    def embed(self, ids: Tensor, token_types: Tensor | None = None) -> Tensor:
        """``ids, token_types [B, n] → x [B, n, D]``; all types are 0 by default."""
        x = self.tokens(ids)
        n = ids.shape[-1]
        if n > self.max_positions:
            raise RegardError(f"the text has {n} tokens; this model has learned positions for {self.max_positions}")
        x = x + self._embed_types(ids, token_types)
        position_ids = None
        if self.position_padding_id is not None:
            # RoBERTa: real tokens count from the padding id + 1 on, padding has the padding id itself.
            real = ids != self.position_padding_id
            position_ids = real.cumsum(-1) * real + self.position_padding_id
        return self.dropout(self.norm(self.position(x, position_ids=position_ids)))

    def _embed_types(self, ids: Tensor, token_types: Tensor | None) -> Tensor | float:
        """The embedding of token types; 0 in a model without them."""
        if self.token_types is None:
            if token_types is not None:
                raise RegardError("token_types were given, but this model has none; leave them out")
            return 0.0
        if token_types is None:
            return self.token_types.weight[0]
        # Checked here: nn.Embedding would raise an IndexError without a name.
        check_integer_tensor("token_types", token_types)
        if token_types.shape != ids.shape:
            raise RegardError(f"token_types has shape {list(token_types.shape)}, but ids {list(ids.shape)}")
        most = self.token_types.num_embeddings - 1
        if token_types.numel() and not 0 <= int(token_types.min()) <= int(token_types.max()) <= most:
            raise RegardError(
                f"token_types go from {int(token_types.min())} to {int(token_types.max())}; this model has 0 … {most}"
            )
        return self.token_types(token_types)

    def hidden_states(
        self,
        ids: Tensor,
        *,
        token_types: Tensor | None = None,
        padding: PaddingLike | None = None,
        observe: Observe | None = None,
    ) -> Tensor | tuple[Tensor, Observations]:
        """y ``[B, n, D]``, the last block's vectors; arguments as in ``forward``."""
        result = self.encoder(self.embed(ids, token_types), padding=padding, observe=observe)
        return prefix_observations("encoder", result)

    def forward(
        self,
        ids: Tensor,
        *,
        token_types: Tensor | None = None,
        padding: PaddingLike | None = None,
        observe: Observe | None = None,
    ) -> Tensor | tuple[Tensor, Observations]:
        """Logits if the model has a head, else y

        - ``token_types``: ``[B, n]``, 0 for the first text and 1 for the second (default: all 0).
        - ``padding``: as in ``Encoder``: lengths, or bool with True = real.
        - ``observe``: what to measure. The result is then ``(logits, observations by module name)``.
        """
        result = self.hidden_states(ids, token_types=token_types, padding=padding, observe=observe)
        if isinstance(result, Tensor):
            return self._apply_head(result)
        y, observations = result
        return self._apply_head(y), observations

    def _apply_head(self, y: Tensor) -> Tensor:
        if self.head is None:
            return y
        if isinstance(self.head, MaskedHead):  # its matrix is the embedding
            return self.head(y, self.tokens.embedding.weight)
        if self.pooled_head:
            y = self.pooled(y)
        return self.head(y)

    def pooled(self, y: Tensor) -> Tensor:
        """``y [B, n, D] → [B, D]``: the first token's vector, through the pooler if there is one."""
        first = y[..., 0, :]  # [B, D]
        if self.pooler is None:
            return first
        return self.pooler(first)

    def sentence_embedding(
        self, ids: Tensor, *, token_types: Tensor | None = None, padding: PaddingLike | None = None
    ) -> Tensor:
        """``[B, D]``: the mean of y over the real tokens, scaled to length 1, as sentence models use it."""
        y = self.hidden_states(ids, token_types=token_types, padding=padding)
        assert isinstance(y, Tensor)
        real = None
        mask = as_padding(padding, y)
        if mask is not None:
            real = mask.real_queries(y.shape[-2], y.shape[-2])
        if real is None:
            real = torch.ones(y.shape[:-1])
        weights = real.to(y).unsqueeze(-1)  # [B, n, 1]
        return nn.functional.normalize((y * weights).sum(-2) / weights.sum(-2).clamp(min=1), dim=-1)
