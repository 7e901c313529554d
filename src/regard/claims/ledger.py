"""The ledger: all claims, by what they are about, and how they are run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module

import torch

from regard.claims.claim import Claim, Evidence, Result

__all__ = ["IDS", "PARTS", "claim", "ledger", "run"]

PARTS = {
    "What attention computes": (
        "weights-are-a-distribution",
        "softmax-keeps-order",
        "matrix-form-equals-per-query-form",
        "column-convention-equals-row-convention",
        "concat-is-sum-of-heads",
        "information-flows-to-the-query",
        "weights-explain-output",
    ),
    "Scale and temperature": (
        "score-variance-is-d",
        "unscaled-softmax-saturates",
        "jacobian-norm-bound",
        "hard-limit",
        "soft-limit",
    ),
    "Copies, averages and noise": (
        "copying",
        "average-of-two",
        "subspace-selector",
        "average-under-isotropic-noise",
        "noisy-key-breaks-one-head",
        "two-heads-are-steadier",
        "zero-mean-key-noise",
        "key-scaling-first-order",
    ),
    "Parameters, operations, memory": (
        "parameter-count",
        "design-8x512",
        "heads-cost-nothing-extra",
        "cost-absolute",
        "cost-relative",
        "relative-is-cheaper",
        "cost-multi-head",
        "bottleneck-regimes",
        "attention-vs-rnn",
        "attention-less-work-than-rnn",
        "sequential-heads-save-memory",
    ),
    "Order and positions": (
        "order-blind",
        "position-breaks-symmetry",
        "distance-cannot-see-direction",
        "sinusoid-offsets-are-linear",
    ),
    "Masks": (
        "causal-mask",
        "padding-mask",
        "mask-times-infinity",
        "causal-makes-right-padding-free",
        "mask-placement",
    ),
    "Attention as convolution": (
        "orthogonal-keys-are-identity",
        "diagonal-attention-is-1x1-convolution",
        "band-of-thirds-is-convolution-3",
        "attention-is-convolution",
        "convolution-needs-value-width",
        "offset-sign-is-convention",
        "head-is-kernel-or-tap",
        "dilated",
        "strided",
        "quadratic-encoding-realises-offsets",
        "vit-patches-are-a-convolution",
    ),
    "The block around it": (
        "receptive-field",
        "layer-norm-depends-on",
        "layer-norm-radius",
        "feed-forward-is-pointwise",
    ),
    "What training makes of heads": (
        "same-initialisation-same-head",
        "heads-differ-in-a-trained-model",
        "heads-evolve",
        "attention-learns-convolution",
    ),
}
IDS = tuple(name for names in PARTS.values() for name in names)


def claim(name: str) -> Claim:
    """One claim by its id.

    >>> claim("mask-times-infinity").verdict
    'fails as written'
    """
    if name not in IDS:
        near = [known for known in IDS if name.split("-")[0] in known]
        raise ValueError(
            f"there is no claim {name!r}; " + (f"perhaps {', '.join(near[:3])}" if near else "see `regard claims`")
        )
    found: Claim = import_module(f"regard.claims.theorems.{name.replace('-', '_')}").CLAIM
    return found


def ledger(only: Iterable[str] = (), source: str | None = None) -> list[Claim]:
    """All claims, or those of some ids, or of one document: "000" … "004".

    >>> from collections import Counter
    >>> sorted(Counter(one.verdict for one in ledger()).items())
    [('fails as written', 14), ('holds', 24), ('holds if', 21)]
    >>> [one.id for one in ledger(["hard-limit", "soft-limit"])]
    ['hard-limit', 'soft-limit']
    """
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
    """Each claim in turn, on one thread: with more, sums are taken in another order and differ in their last bits.

    Random states and threads are as before afterwards; every check seeds its own. One that needs a package which is not
    installed is undecided, and says which; the others go on.

    >>> [(result.claim.id, result.verdict) for result in run(ledger(["hard-limit", "soft-limit"]))]
    [('hard-limit', 'holds if'), ('soft-limit', 'holds')]
    """
    results, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for one in claims:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                try:
                    results.append(one.run(full=full))
                except ImportError as error:
                    results.append(Result(one, Evidence(), 0.0, missing=str(error)))
            told(results[-1])
    finally:
        torch.set_num_threads(threads)
    return results
