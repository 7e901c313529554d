"""Checks that the eigenvalues of a head's map from tokens to logits are those of a matrix of its value width."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from regard.claims._check_helpers import random_normal
from regard.claims._claim import HOLDS, Claim, Evidence

Product = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def large_product(embedding: Tensor, value: Tensor, out: Tensor, unembedding: Tensor) -> Tensor:
    """``W_E W_V W_O W_U [V, V]``: what each token, if attended to, adds to the logits of all tokens."""
    return embedding @ value @ out @ unembedding


def small_product(embedding: Tensor, value: Tensor, out: Tensor, unembedding: Tensor) -> Tensor:
    """``W_O W_U W_E W_V [d_v, d_v]``: the same factors, with the first ones moved to the end."""
    return out @ (unembedding @ embedding) @ value


def copying_score(eigenvalues: Tensor) -> float:
    """``Σ Re λ / Σ |λ|``: 1 if every token raises its own logit, −1 if every token lowers it."""
    return float(eigenvalues.real.sum() / eigenvalues.abs().sum())


def largest_distance(small: Tensor, large: Tensor) -> float:
    """How far the eigenvalue that fits worst is from all of the others, relative to the largest."""
    return float((small.unsqueeze(1) - large).abs().amin(1).max() / large.abs().max())


def check(
    *,
    vocab: int = 60,
    d: int = 16,
    d_value: int = 5,
    seed: int = 0,
    small: Product = small_product,
    score: Callable[[Tensor], float] = copying_score,
) -> Evidence:
    """Compare the eigenvalues of the large and of the small product, for random heads and for heads that copy."""
    evidence = Evidence()
    generator = torch.Generator().manual_seed(seed)
    embedding = random_normal(generator, vocab, d)
    value = random_normal(generator, d, d_value)
    out = random_normal(generator, d_value, d)
    unembedding = random_normal(generator, d, vocab)
    factors = (embedding, value, out, unembedding)
    large = torch.linalg.eigvals(large_product(*factors))
    large = large[large.abs().argsort(descending=True)]
    found = torch.linalg.eigvals(small(*factors))
    # Rounded, because the last bits of a solver depend on where in memory it works.
    error = round(largest_distance(found, large), 9)
    rest = round(float(large[d_value:].abs().max() / large.abs().max()), 6)
    evidence.add_statement(
        "Every eigenvalue of the small product is one of the large product.",
        error < 1e-8,
        f"{d_value} eigenvalues of a {d_value} × {d_value} matrix are among those of a {vocab} × {vocab} matrix",
    )
    evidence.add_statement("The other eigenvalues of the large product are 0.", rest < 1e-5, f"{vocab - d_value} are 0")

    # Tied embeddings, and a head that passes a part of the vector on.
    passed = torch.linalg.qr(value)[0]
    copies = score(torch.linalg.eigvals(small(embedding, passed, passed.T, embedding.T)))
    opposite = score(torch.linalg.eigvals(small(embedding, passed, -passed.T, embedding.T)))
    evidence.add_statement(
        "A head that passes on a part of what it reads has the copying score 1.", copies > 0.999, f"{copies:.3f}"
    )
    # Controls: their statements must be false.
    evidence.add_control(
        "A head that passes on the opposite has the copying score 1.", opposite > 0.999, f"it has {opposite:.3f}"
    )
    other = torch.linalg.eigvals(out @ (embedding.T @ unembedding.T) @ value)
    other_error = largest_distance(other, large)
    evidence.add_control(
        "The same factors with the embeddings exchanged have the same eigenvalues.",
        other_error < 1e-8,
        f"they differ by {other_error:.2g} of the largest",
    )
    evidence.numbers |= {"largest difference": error, "copying score of a copying head": round(copies, 9)}
    sizes = (list(range(1, 2 * d_value + 1)), large[: 2 * d_value].abs().clamp(min=1e-12).tolist())
    evidence.add_series("eigenvalues of the large product, by size", {"|λ|": sizes}, x="rank", y="|λ|")
    return evidence


CLAIM = Claim(
    id="ov-eigenvalues-from-a-small-matrix",
    title="The eigenvalues of an OV circuit are those of a matrix as small as the head",
    citations=(("circuits-article", "OV and QK matrices"),),
    statement="The map of a head from the token it attends to, to the logits, W_E W_V W_O W_U, has V × V entries. "
    "Its nonzero eigenvalues, which show whether the head copies, are those of the matrix W_O W_U W_E W_V, which has "
    "as many rows as the head's values have dimensions.",
    formula=r"\lambda \left( W_E W_V W_O W_U \right) \setminus \{0\} \allowbreak = "
    r"\lambda \left( W_O W_U W_E W_V \right) \setminus \{0\}",
    refuted_by="An eigenvalue of one product, other than 0, that the other one does not have.",
    control="The product with the embedding and the unembedding exchanged, and a head that passes on the opposite.",
    verdict=HOLDS,
    check=check,
)
