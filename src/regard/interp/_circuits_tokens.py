"""The token vectors that a layer reads on the direct path from the embedding, and what a head's output does to logits.

    u_t = normalise(s·E_t + P)         the vector of token t, as the norm of a layer makes it, before γ
    U   = (W_U − mean over tokens)·γ   logits = u_out Uᵀ, up to a constant that softmax does not see

Everything that heads need of V tokens are means and second moments: D and D × D numbers for the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from regard.interp._circuits_norms import HALF_TOLERANCE, TOLERANCE, NormKind, fold_norm, normalise
from regard.interp._circuits_probe import NormCall, ProbedRun
from regard.interp._circuits_weights import Projection

TOKENS_PER_STEP = 4096
POSITION_TOKENS = 1024  # tokens for the mean vector at each position, if positions are added to tokens
# A softcap bends small logits a little. Logits of other matrices are off by about 1.
LOGITS_TOLERANCE = 0.1


@dataclass(frozen=True, eq=False)
class Moments:
    """The mean ``[D]`` and the covariance ``[D, D]`` of vectors; ``by_position [n, D]``: the means at positions."""

    mean: Tensor
    covariance: Tensor
    by_position: Tensor


@dataclass(eq=False)
class TokenVectors:
    """The tokens of a model.

    - ``table [T, D]``: s·E of the tokens that are used, which are ``ids [T]``.
    - ``positions [n, D]``: what is added at the first n positions; zeros if nothing is.
    - ``unembedding [T, D]``: U of the same tokens; None if the model has no linear head.
    """

    ids: Tensor
    table: Tensor
    positions: Tensor
    unembedding: Tensor | None
    _moments: dict[NormKind, Moments] = field(default_factory=dict)
    _products: dict[NormKind, Tensor] = field(default_factory=dict)

    @property
    def has_positions(self) -> bool:
        return bool(self.positions.any())

    def vectors(self, kind: NormKind) -> Iterator[tuple[slice, Tensor]]:
        """u_t at the mean position, a part of the tokens at a time."""
        middle = self.positions.mean(0)
        for start in range(0, len(self.table), TOKENS_PER_STEP):
            part = slice(start, start + TOKENS_PER_STEP)
            yield part, normalise(self.table[part] + middle, kind)

    def moments(self, kind: NormKind) -> Moments:
        """Mean and covariance of u_t over all tokens."""
        if kind not in self._moments:
            total = torch.zeros_like(self.table[0])
            for _, u in self.vectors(kind):
                total += u.sum(0)
            mean = total / len(self.table)
            covariance = self.table.new_zeros(len(mean), len(mean))
            for _, u in self.vectors(kind):
                centred = u - mean
                covariance += centred.T @ centred
            by_position = mean.unsqueeze(0)
            if self.has_positions:
                step = -(-len(self.table) // POSITION_TOKENS)
                some = self.table[::step]
                by_position = torch.stack([normalise(some + position, kind).mean(0) for position in self.positions])
            self._moments[kind] = Moments(mean, covariance / len(self.table), by_position)
        return self._moments[kind]

    def logit_product(self, kind: NormKind) -> Tensor | None:
        """``Uᵀ u / T [D, D]``, the mean over tokens of the product of what a token writes and what it is."""
        if self.unembedding is None:
            return None
        if kind not in self._products:
            product = self.table.new_zeros(self.table.shape[1], self.table.shape[1])
            for part, u in self.vectors(kind):
                product += self.unembedding[part].T @ u
            self._products[kind] = product / len(self.table)
        return self._products[kind]


def find_tokens(model: nn.Module, run: ProbedRun, first: Projection, most: int) -> TokenVectors | None:
    """The token vectors of a model; None if what the first layer reads is no sum of a token and a position.

    - ``first``: the query projection of the first layer.
    - ``most``: how many tokens are used; of a larger vocabulary evenly spaced ones.
    """
    tolerance = 10 * TOLERANCE.get(run.calls[0].q.dtype, HALF_TOLERANCE)
    for embedding, ids in run.embeddings:
        for stream, norm in _first_vectors(run, first):
            weight = embedding.weight.detach().cpu()
            fitted = _fit_stream(weight, ids, stream, tolerance)
            if fitted is None:
                continue
            scale, positions = fitted
            # Behind a norm of the embedding, positions would not simply be added.
            if norm is not None and bool(positions.any()):
                continue
            unembedding = _find_unembedding(model, run, weight)
            count = len(weight)
            if unembedding is not None:
                count = min(count, len(unembedding))
            chosen = torch.arange(0, count, -(-count // most))
            dtype = first.weight.dtype
            table = scale * weight[chosen]
            if norm is not None:
                own: Any = next(norm.layer.parameters(), table)
                table = norm.layer(table.to(own)).cpu()
            return TokenVectors(
                ids=chosen,
                table=table.to(dtype),
                positions=positions.to(dtype),
                unembedding=unembedding[chosen].to(dtype) if unembedding is not None else None,
            )
    return None


def _first_vectors(run: ProbedRun, first: Projection) -> Iterator[tuple[Tensor, NormCall | None]]:
    """What may be the sum of tokens and positions: the first residual stream, or what a norm made it from."""
    yield first.stream, None
    for norm in run.calls[0].norms:
        if norm.y.shape == first.stream.shape and torch.equal(norm.y.double(), first.stream):
            yield norm.x.double(), norm


def _fit_stream(weight: Tensor, ids: Tensor, stream: Tensor, tolerance: float) -> tuple[float, Tensor] | None:
    """s and P ``[n, D]`` of a stream that is s·E + P; None if it is not."""
    if weight.shape[1] != stream.shape[-1] or ids.shape != stream.shape[:2]:
        return None
    vectors = weight[ids].double()
    # Texts differ only by their tokens, so the differences between texts have no positions in them.
    differences = vectors - vectors.mean(0)
    changes = stream - stream.mean(0)
    size = differences.square().sum()
    if not bool(size > 0):
        return None
    scale = float((differences * changes).sum() / size)
    if not bool((changes - scale * differences).norm() <= tolerance * changes.norm()):
        return None
    positions = (stream - scale * vectors).mean(0)
    if not bool(positions.norm() > tolerance * stream.norm()):
        positions = torch.zeros_like(positions)
    return scale, positions


def _find_unembedding(model: nn.Module, run: ProbedRun, embedding: Tensor) -> Tensor | None:
    """U of all tokens, verified with the logits of the run; None if the logits are not linear in the last vectors."""
    if run.logits is None or not run.block_outputs:
        return None
    logits = run.logits.double()
    for vectors, norm in _last_vectors(run):
        for weight, bias in _heads(model, embedding):
            if weight.shape != (logits.shape[-1], vectors.shape[-1]) or vectors.shape[:2] != logits.shape[:2]:
                continue
            U = weight.detach().cpu().double()
            expected = vectors.double() @ U.T
            target = logits
            if bias is not None:
                target = logits - bias.detach().cpu().double()
            factor = (expected * target).sum() / expected.square().sum().clamp(min=1e-300)
            if not bool((factor * expected - target).norm() <= LOGITS_TOLERANCE * target.norm()) or factor <= 0:
                continue
            U = U - U.mean(0)
            if norm is not None:
                folded = fold_norm(norm)
                if folded is None:
                    continue
                kind, gamma, _ = folded
                U = U * gamma
                if kind == "layer":
                    U = U - U.mean(1, keepdim=True)
            return U
    return None


def _last_vectors(run: ProbedRun) -> Iterator[tuple[Tensor, NormCall | None]]:
    """What may be multiplied with the unembedding: the output of the last norm, and that of the last block."""
    last = run.block_outputs[-1]
    norm = run.last_norm
    if norm is not None:
        # A norm within a prediction head reads something else than the residual stream.
        reads_stream = norm.x.shape == last.shape and torch.equal(norm.x, last)
        writes_stream = norm.y.shape == last.shape and torch.equal(norm.y, last)
        if reads_stream or writes_stream:
            yield norm.y, norm
    yield last, None


def _heads(model: nn.Module, embedding: Tensor) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Matrices ``[V, D]`` that may make logits, with their biases."""
    get: Any = getattr(model, "get_output_embeddings", None)
    head: Any = None
    if callable(get):
        head = get()
    if isinstance(getattr(head, "weight", None), Tensor):
        yield head.weight, getattr(head, "bias", None)
    for module in model.modules():
        tokens: Any = getattr(module, "tokens", None)
        untied: Any = getattr(tokens, "head", None)
        if isinstance(getattr(untied, "weight", None), Tensor):
            yield untied.weight, getattr(untied, "bias", None)
    yield embedding, None
