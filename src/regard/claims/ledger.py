"""The ledger: all claims, in the order of the theory, and how they are run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module

import torch

from regard.claims.claim import Claim, Result

__all__ = ["IDS", "claim", "ledger", "run"]

IDS = (
    "weights-are-a-distribution",
    "matrix-form-equals-per-query-form",
    "column-convention-equals-row-convention",
    "score-variance-is-d",
    "unscaled-softmax-saturates",
    "jacobian-norm-bound",
    "parameter-count",
    "design-8x512",
    "heads-cost-nothing-extra",
    "cost-absolute",
    "cost-relative",
    "cost-multi-head",
    "bottleneck-regimes",
    "attention-vs-rnn",
    "order-blind",
    "position-breaks-symmetry",
    "sinusoid-offsets-are-linear",
    "causal-mask",
    "padding-mask",
    "mask-times-infinity",
    "causal-makes-right-padding-free",
    "mask-placement",
    "hard-limit",
    "soft-limit",
    "copying",
    "average-of-two",
    "subspace-selector",
    "noisy-key-breaks-one-head",
    "two-heads-are-steadier",
    "zero-mean-key-noise",
    "key-scaling-first-order",
    "orthogonal-keys-are-identity",
    "diagonal-attention-is-1x1-convolution",
    "band-of-thirds-is-convolution-3",
    "attention-is-convolution",
    "dilated",
    "strided",
    "quadratic-encoding-realises-offsets",
    "receptive-field",
    "layer-norm-depends-on",
    "layer-norm-radius",
    "heads-differ-in-a-trained-model",
    "heads-evolve",
    "attention-learns-convolution",
    "vit-patches-are-a-convolution",
    "concat-is-sum-of-heads",
    "convolution-needs-value-width",
    "offset-sign-is-convention",
    "distance-cannot-see-direction",
    "average-under-isotropic-noise",
    "relative-is-cheaper",
    "same-initialisation-same-head",
    "sequential-heads-save-memory",
    "information-flows-to-the-query",
    "head-is-kernel-or-tap",
    "attention-less-work-than-rnn",
    "weights-explain-output",
    "feed-forward-is-pointwise",
    "softmax-keeps-order",
)


def claim(name: str) -> Claim:
    """One claim by its id."""
    if name not in IDS:
        near = [known for known in IDS if name.split("-")[0] in known]
        raise ValueError(
            f"there is no claim {name!r}; " + (f"perhaps {', '.join(near[:3])}" if near else "see `regard claims`")
        )
    found: Claim = import_module(f"regard.claims.theorems.{name.replace('-', '_')}").CLAIM
    return found


def ledger(only: Iterable[str] = (), source: str | None = None) -> list[Claim]:
    """All claims, or those of some ids, or of one document: "000" … "004"."""
    wanted = set(only)
    chosen = [claim(name) for name in IDS if not wanted or name in wanted]
    for name in wanted - set(IDS):
        claim(name)  # which says what is near
    known = sorted({x for one in chosen for x in one.sources})
    if source is not None and source not in known:
        raise ValueError(f"there is no claim of {source!r}; there are of {', '.join(known)}")
    return [one for one in chosen if source is None or source in one.sources]


def run(
    claims: Sequence[Claim], *, full: bool = False, told: Callable[[Result], None] = lambda result: None
) -> list[Result]:
    """Each claim in turn; random states are as before afterwards, and every check seeds its own."""
    results = []
    for one in claims:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            results.append(one.run(full=full))
        told(results[-1])
    return results
