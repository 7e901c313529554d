"""The scores of circuits by their definitions: matrices of size D × D and V × V, and loops over tokens and offsets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import regard
from regard.interp._circuits import Circuits, HeadWeights
from regard.positions import Rotary


@dataclass
class PlainDecoder:
    """What the definitions need of a decoder of ``regard.nn`` in float64: token vectors, unembedding, positions."""

    model: Any
    tokens: Tensor  # [V, D]: normalised, at the mean position
    by_position: Tensor  # [n, V, D]
    unembedding: Tensor  # [V, D]: centred over tokens, with the last norm's γ
    rotary: Rotary | None
    scale: float

    def turned(self, x: Tensor, position: int) -> Tensor:
        """Vectors ``[*, d]`` rotated to a position."""
        if self.rotary is None:
            return x
        return self.rotary(x.reshape(-1, 1, 1, x.shape[-1]), start=position).reshape(x.shape)


def decoder(*, layernorm: bool, tied: bool, position: str, kv_heads: int = 2, seed: int = 0) -> Any:
    """A small decoder in float64 with random norms and biases."""
    torch.manual_seed(seed)
    positions = {"rotary": Rotary(6, rotate=4), "learned": regard.positions.Learned(8, 10), "none": None}
    model = regard.nn.Decoder(
        10,
        heads=4,
        layers=2,
        vocab=13,
        hidden=11,
        tied=tied,
        d_key=6,
        kv_heads=kv_heads,
        qkv_bias=True,
        position=positions[position],
        norm=regard.nn.LayerNorm if layernorm else regard.nn.RMSNorm,
    )
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            nn.init.normal_(parameter, 1.0 if name.endswith("norm.weight") else 0.0, 0.3)
    return model.double().eval()


def plain(model: Any, window: int) -> PlainDecoder:
    """Token vectors and unembedding from the model's own parts."""
    table = model.tokens.scale * model.tokens.embedding.weight
    centred = isinstance(model.norm, regard.nn.LayerNorm)

    def normalise(x: Tensor) -> Tensor:
        if centred:
            x = x - x.mean(-1, keepdim=True)
        return x / x.square().mean(-1, keepdim=True).sqrt()

    added = torch.zeros(window, model.d, dtype=torch.float64)
    if model.position is not None:
        added = model.position(added.unsqueeze(0))[0]
    head = model.tokens.head.weight if model.tokens.head is not None else model.tokens.embedding.weight
    unembedding = (head - head.mean(0)) * model.norm.weight
    if centred:
        unembedding = unembedding - unembedding.mean(1, keepdim=True)
    attention = model.blocks[0].attention
    position = attention.position
    return PlainDecoder(
        model=model,
        tokens=normalise(table + added.mean(0)),
        by_position=torch.stack([normalise(table + row) for row in added]),
        unembedding=unembedding,
        rotary=position if isinstance(position, Rotary) else None,
        scale=attention.d_key**-0.5,
    )


def scores(tokens: PlainDecoder, q: Tensor, k: Tensor, distance: int) -> Tensor:
    """The scores of all queries ``[V, d]`` for all keys ``[V, d]`` at a distance, ``[V, V]``."""
    return tokens.scale * tokens.turned(q, distance) @ tokens.turned(k, 0).T


def same_token_score(tokens: PlainDecoder, q: Tensor, k: Tensor, window: int) -> float:
    """(mean of the diagonal − mean) / deviation of the V × V matrix of scores, by offsets."""
    maps = [scores(tokens, q, k, distance) for distance in range(1, window)]
    above = torch.stack([x.diagonal().mean() - x.mean() for x in maps]).mean()
    variance = torch.stack([x.var(correction=0) for x in maps]).mean()
    return float(above / variance.sqrt())


def duplicate(tokens: PlainDecoder, head: HeadWeights, window: int) -> float:
    q = tokens.tokens @ head.query + head.query_bias
    k = tokens.tokens @ head.key + head.key_bias
    return same_token_score(tokens, q, k, window)


def match(tokens: PlainDecoder, earlier: HeadWeights, later: HeadWeights, window: int) -> float:
    q = tokens.tokens @ later.query + later.query_bias
    k = tokens.tokens @ earlier.value @ earlier.out @ later.key
    return same_token_score(tokens, q, k, window)


def previous(tokens: PlainDecoder, head: HeadWeights, window: int) -> float:
    """Every pair of positions in the window, every token at both."""
    means = []
    for distance in range(window):
        total = []
        for i in range(distance, window):
            q = tokens.by_position[i] @ head.query + head.query_bias
            k = tokens.by_position[i - distance] @ head.key + head.key_bias
            total.append(scores(tokens, q, k, distance).mean())
        means.append(torch.stack(total).mean())
    a = torch.stack(means)
    q = tokens.tokens @ head.query + head.query_bias
    k = tokens.tokens @ head.key + head.key_bias
    variance = torch.stack([scores(tokens, q, k, distance).var(correction=0) for distance in range(window)]).mean()
    others = torch.cat([a[:1], a[2:]])
    return float((a[1] - others.mean()) / (variance + a.var(correction=0)).sqrt())


def composition(tokens: PlainDecoder, earlier: HeadWeights, later: HeadWeights, kind: str, window: int) -> Tensor:
    """value² from D × D matrices; for rotary positions the mean over offsets of both norms."""
    written = earlier.value @ earlier.out
    if kind == "v":
        read = later.value @ later.out
        return (written @ read).square().sum() / (written.square().sum() * read.square().sum())
    product = torch.zeros((), dtype=torch.float64)
    size = torch.zeros((), dtype=torch.float64)
    for distance in range(window):
        matrix_DD = tokens.turned(later.query, distance) @ tokens.turned(later.key, 0).T  # rows are queries
        if kind == "k":
            matrix_DD = matrix_DD.T
        product += (written @ matrix_DD).square().sum()
        size += matrix_DD.square().sum()
    return product / (written.square().sum() * size)


def heads_of(found: Circuits, model: Any) -> list[tuple[int, int, HeadWeights]]:
    """All heads with their matrices."""
    heads = []
    for layer, block in enumerate(model.blocks):
        for head in range(block.attention.heads):
            heads.append((layer, head, found.weights(layer, head)))
    return heads
