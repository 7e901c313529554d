"""Scores of single heads and of pairs of heads, from their small factors.

Row vectors: q = u W_Q + b_Q, k = u W_K + b_K, and a head that attends to a token adds u W_V W_O to the stream. Rotary
positions turn the query by R_p when it stands p tokens after the key. Means over p are over the window of offsets.
No matrix of size D × D is formed for a head: ‖A B‖_F² = tr((AᵀA)(B Bᵀ)), and the roots of the small Gram matrices are
multiplied into the factors, so that all pairs of heads of two layers cost one matrix product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from regard.interp._circuits_tokens import Moments, TokenVectors
from regard.interp._circuits_weights import LayerWeights, Projection

Kind = Literal["q", "k", "v"]


@dataclass(frozen=True, eq=False)
class LayerFactors:
    """One layer, with a matrix for every query head.

    - ``query``, ``key [H, D, d]``, ``value [H, D, E]``, ``out [H, E, D]``; ``query_bias``, ``key_bias [H, d]``.
    - ``offsets``: the distances p from key to query in the window, 0 … window − 1.
    """

    layer: LayerWeights
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    query_bias: Tensor
    key_bias: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, layer: LayerWeights, window: int) -> LayerFactors:
        index = torch.tensor([layer.key_head(head) for head in range(layer.heads)])
        return cls(
            layer=layer,
            query=layer.q.weight,
            key=layer.k.weight[index],
            value=layer.v.weight[index],
            out=layer.out,
            query_bias=layer.q.bias,
            key_bias=layer.k.bias[index],
            offsets=torch.arange(window),
        )


# --- single heads ----------------------------------------------------------------------------------------------------


def copying_scores(factors: LayerFactors, tokens: TokenVectors) -> Tensor | None:
    """``Σ Re λ / Σ |λ| [H]`` of the eigenvalues of the OV circuit u W_V W_O Uᵀ (V × V), from E × E matrices."""
    product_DD = tokens.logit_product(factors.layer.v.kind)
    if product_DD is None:
        return None
    eigenvalues = torch.linalg.eigvals((factors.out @ product_DD @ factors.value).double())
    return eigenvalues.real.sum(-1) / nonzero(eigenvalues.abs().sum(-1))


def ov_eigenvalues(factors: LayerFactors, tokens: TokenVectors, head: int) -> Tensor | None:
    """The nonzero eigenvalues of one head's OV circuit, divided by the number of tokens."""
    product_DD = tokens.logit_product(factors.layer.v.kind)
    if product_DD is None:
        return None
    return torch.linalg.eigvals((factors.out[head] @ product_DD @ factors.value[head]).double())


def read_moments(projection: Projection, *, by_position: bool) -> Moments:
    """The moments of what a layer read in the run, without the first position, where many models have a sink."""
    read = projection.read[:, 1:].to(projection.weight.dtype)
    mean = read.mean((0, 1))
    centred = (read - mean).flatten(0, 1)
    positions = mean.unsqueeze(0)
    if by_position:
        positions = projection.read.mean(0).to(mean)
    return Moments(mean, centred.T @ centred / len(centred), positions)


def previous_scores(factors: LayerFactors, query: Moments, key: Moments) -> Tensor:
    """How far the mean score of the previous token is above that of the other offsets, ``[H]``, in deviations.

    a(p) = mean over queries of the mean token and keys of the mean token, p tokens before
    score = (a(1) − mean of a over p ≠ 1) / √(variance over tokens + variance of a over p)
    """
    a_HP = mean_scores(factors, query, key)
    others = torch.arange(a_HP.shape[1]) != 1
    above = a_HP[:, 1] - a_HP[:, others].mean(1)
    variance = token_variance(factors, query, key, factors.offsets) + a_HP.var(1, correction=0)
    return _ratio(above, variance)


def mean_scores(factors: LayerFactors, query: Moments, key: Moments) -> Tensor:
    """a(p): the mean score over independent tokens at each distance p, ``[H, window]``."""
    layer = factors.layer
    window = len(factors.offsets)
    q_HND = (query.by_position @ factors.query + factors.query_bias.unsqueeze(1)).double()
    k_HND = (key.by_position @ factors.key + factors.key_bias.unsqueeze(1)).double()
    a = []
    for p in range(window):
        turned = q_HND @ layer.rotation.matrix(p).T
        # Without added positions one row stands for all of them.
        if turned.shape[1] > 1:
            turned = turned[:, p:]
        earlier = k_HND
        if k_HND.shape[1] > 1:
            earlier = k_HND[:, : k_HND.shape[1] - p]
        mean = layer.scale * (turned * earlier).sum(-1).mean(-1)
        if layer.bias is not None:
            mean = mean + layer.bias.diagonal(-p, 1, 2).nanmean(-1).to(mean)
        a.append(mean)
    return torch.stack(a, 1).to(factors.query.dtype)


def token_variance(factors: LayerFactors, query: Moments, key: Moments, offsets: Tensor) -> Tensor:
    """The variance of scores over independent pairs of tokens, averaged over offsets, ``[H]``.

    With q = q̄ + q̃: E (q·k)² − (q̄·k̄)² = tr(E[q qᵀ] Cov k) + k̄ᵀ Cov q k̄, a sum of squares without cancellation.
    """
    q_mean, q_covariance = _projected(query, factors.query, factors.query_bias)
    k_mean, k_covariance = _projected(key, factors.key, factors.key_bias)
    rotation = factors.layer.rotation
    q_moment = rotation.mean_turned(q_covariance + q_mean.unsqueeze(-1) * q_mean.unsqueeze(-2), offsets)
    q_covariance = rotation.mean_turned(q_covariance, offsets)
    with_keys = (q_moment * k_covariance).sum((-2, -1))
    with_mean = torch.einsum("hd,hde,he->h", k_mean, q_covariance, k_mean)
    return factors.layer.scale**2 * (with_keys + with_mean)


def duplicate_scores(factors: LayerFactors, tokens: TokenVectors) -> Tensor:
    """How far the score of the same token is above that of independent ones, ``[H]``, in deviations.

    Averaged over offsets: (mean_t s(t, t) − mean_{t, u} s(t, u)) / deviation of s(t, u).
    """
    offsets = factors.offsets[1:]
    query = tokens.moments(factors.layer.q.kind)
    key = tokens.moments(factors.layer.k.kind)
    mean_R = factors.layer.rotation.mean_matrix(offsets).to(factors.query.dtype)
    covariance_HKQ = factors.key.mT @ (query.covariance @ factors.query)
    same = factors.layer.scale * (mean_R * covariance_HKQ).sum((-2, -1))
    return _ratio(same, token_variance(factors, query, key, offsets))


def _projected(moments: Moments, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The mean ``[H, d]`` and the covariance ``[H, d, d]`` of u W + b."""
    return moments.mean @ weight + bias, weight.mT @ (moments.covariance @ weight)


def nonzero(x: Tensor) -> Tensor:
    """A divisor: sizes that are 0 become the smallest normal number.

    >>> bool(nonzero(torch.tensor(0.0)) > 0)
    True
    """
    return x.clamp(min=torch.finfo(x.dtype).tiny)


def _ratio(above: Tensor, variance: Tensor) -> Tensor:
    return torch.where(variance > 0, above / nonzero(variance).sqrt(), torch.zeros_like(above))


# --- pairs of heads --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Ends:
    """Both ends of the compositions of one layer.

    - ``writes [H, E, D]``: √(W_Vᵀ W_V) W_O, which has the Gram matrix of W_V W_O.
    - ``reads``: for "q", "k" and "v" ``[H, d, D]``: the same of the matrix that reads the stream, with what follows it.
    """

    writes: Tensor
    reads: dict[Kind, Tensor]

    @classmethod
    def of(cls, factors: LayerFactors) -> Ends:
        query_gram = factors.layer.rotation.mean_turned(factors.query.mT @ factors.query, factors.offsets)
        key_gram = factors.layer.rotation.mean_turned(factors.key.mT @ factors.key, factors.offsets, inverse=True)
        out_gram = factors.out @ factors.out.mT
        return cls(
            writes=_root(factors.value.mT @ factors.value) @ factors.out,
            reads={
                "q": _root(key_gram) @ factors.query.mT,
                "k": _root(query_gram) @ factors.key.mT,
                "v": _root(out_gram) @ factors.value.mT,
            },
        )


def composition_scores(earlier: Ends, later: Ends, kind: Kind) -> tuple[Tensor, Tensor]:
    """The composition of all pairs ``[H_earlier, H_later]``: its value, and its z-score against random rotations.

        c = ‖W_V W_O · W‖ / (‖W_V W_O‖ ‖W‖),   W = W_K R_p W_Qᵀ for "k", W_Q R_pᵀ W_Kᵀ for "q", W_V W_O for "v"

    If the output space of the earlier head were turned at random, c² would have the mean 1/D and the variance
    2 (tr A² − 1/D)(tr B² − 1/D) / ((D − 1)(D + 2)), where A and B are the Gram matrices divided by their traces.
    """
    writes = earlier.writes
    reads = later.reads[kind]
    D = writes.shape[-1]
    norms = block_norms(writes, reads)
    sizes = writes.square().sum((-2, -1)).unsqueeze(1) * reads.square().sum((-2, -1))
    squares = norms / nonzero(sizes)
    spread = _purity(writes).sub(1 / D).unsqueeze(1) * _purity(reads).sub(1 / D)
    deviation = (2 * spread.clamp(min=0) / max((D - 1) * (D + 2), 1)).sqrt()
    z = torch.where(deviation > 0, (squares - 1 / D) / nonzero(deviation), torch.zeros_like(squares))
    return squares.clamp(min=0).sqrt(), z


@dataclass(frozen=True, eq=False)
class MatchEnds:
    """Both ends of the matches of one layer.

    As the earlier layer:

    - ``out [H, E, D]``: W_O. ``values [H, E, D]``: W_Vᵀ.
    - ``spread [H, E, D]``: √(Cov u W_V) W_O. ``written [H, 1, D]``: the mean of u W_V, times W_O.

    As the later layer:

    - ``key [H, d, D]``: W_Kᵀ. ``asked [H, d, D]``: Cov(u) W_Q R̄ᵀ, transposed, where R̄ is the mean of R_p.
    - ``by_spread``, ``by_mean [H, d, D]``: √(mean of R_p E[q qᵀ] R_pᵀ) W_Kᵀ, and the same with Cov q.
    """

    out: Tensor
    values: Tensor
    spread: Tensor
    written: Tensor
    key: Tensor
    asked: Tensor
    by_spread: Tensor
    by_mean: Tensor

    @classmethod
    def of(cls, factors: LayerFactors, tokens: TokenVectors) -> MatchEnds:
        offsets = factors.offsets[1:]
        rotation = factors.layer.rotation
        moved = tokens.moments(factors.layer.v.kind)
        value_covariance = factors.value.mT @ (moved.covariance @ factors.value)
        value_mean = (moved.mean @ factors.value).unsqueeze(1)
        query = tokens.moments(factors.layer.q.kind)
        q_mean, q_covariance = _projected(query, factors.query, factors.query_bias)
        q_moment = rotation.mean_turned(q_covariance + q_mean.unsqueeze(-1) * q_mean.unsqueeze(-2), offsets)
        mean_R = rotation.mean_matrix(offsets).to(factors.query.dtype)
        return cls(
            out=factors.out,
            values=factors.value.mT,
            spread=_root(value_covariance) @ factors.out,
            written=value_mean @ factors.out,
            key=factors.key.mT,
            asked=(query.covariance @ factors.query @ mean_R.T).mT,
            by_spread=_root(q_moment) @ factors.key.mT,
            by_mean=_root(rotation.mean_turned(q_covariance, offsets)) @ factors.key.mT,
        )


def match_scores(earlier: MatchEnds, later: MatchEnds) -> Tensor:
    """How far the later head's score is above the others if the key got the query's token from the earlier head.

    As ``duplicate_scores``, with keys u W_V W_O W_K of the earlier head's W_V and W_O: ``[H_earlier, H_later]``.
    """
    # The mean over tokens and offsets of q·k for the same token, minus that of independent tokens.
    same = (_blocks(earlier.out, later.key) * _blocks(earlier.values, later.asked)).sum((1, 3))
    variance = block_norms(earlier.spread, later.by_spread) + block_norms(earlier.written, later.by_mean)
    return _ratio(same, variance)


def _blocks(a_HED: Tensor, b_GdD: Tensor) -> Tensor:
    """``[H, E, G, d]``: the products of all pairs of rows of both, as one matrix product."""
    product = a_HED.flatten(0, 1) @ b_GdD.flatten(0, 1).T
    return product.unflatten(0, a_HED.shape[:2]).unflatten(2, b_GdD.shape[:2])


def block_norms(a_HED: Tensor, b_GdD: Tensor) -> Tensor:
    """``‖A_h B_gᵀ‖² [H, G]``.

    >>> block_norms(torch.eye(2).unsqueeze(0), torch.ones(3, 1, 2)).tolist()
    [[2.0, 2.0, 2.0]]
    """
    return _blocks(a_HED, b_GdD).square().sum((1, 3))


def _root(gram: Tensor) -> Tensor:
    """A matrix L with Lᵀ L = gram, for symmetric positive matrices ``[*, d, d]``."""
    values, vectors = torch.linalg.eigh(gram.double())
    return (values.clamp(min=0).sqrt().unsqueeze(-1) * vectors.mT).to(gram.dtype)


def _purity(factor_HED: Tensor) -> Tensor:
    """``tr(G²) / tr(G)²`` of the Gram matrices: 1 over the number of directions that a head uses."""
    gram = factor_HED @ factor_HED.mT
    return gram.square().sum((-2, -1)) / nonzero(gram.diagonal(dim1=-2, dim2=-1).sum(-1).square())
