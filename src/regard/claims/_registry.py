"""Lists all claims by topic, and selects and runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from itertools import chain

import torch

from regard._errors import RegardError
from regard.claims._claim import Claim, Evidence, Result
from regard.claims._documents import DOCUMENTS

TOPICS = {
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
    "Circuits of heads": (
        "heads-have-low-rank",
        "ov-eigenvalues-from-a-small-matrix",
        "composition-has-a-baseline",
        "k-composition-marks-induction-heads",
    ),
}
IDS = tuple(chain.from_iterable(TOPICS.values()))


def get_claim(name: str) -> Claim:
    """One claim by its id, such as "hard-limit".

    Raises ``RegardError`` if there is no such claim.

    >>> get_claim("mask-times-infinity").verdict
    'false as stated'
    """
    if name not in IDS:
        similar = [known for known in IDS if name.split("-")[0] in known]
        hint = "`regard claims` lists all claims"
        if similar:
            hint = f"similar ids: {', '.join(similar[:3])}"
        raise RegardError(f"there is no claim {name!r}; {hint}")
    claim: Claim = import_module(f"regard.claims.theorems.{name.replace('-', '_')}").CLAIM
    return claim


def list_claims(only: Iterable[str] = (), source: str | None = None) -> list[Claim]:
    """All claims, or a selection of them, in the order of ``TOPICS``.

    - ``only``: ids of claims; empty for all claims.
    - ``source``: one document of the theory, for example "homework-3"; None for all documents.

    Raises ``RegardError`` for an id or a document that does not exist.

    >>> from collections import Counter
    >>> sorted(Counter(claim.verdict for claim in list_claims()).items())
    [('false as stated', 15), ('holds', 28), ('holds conditionally', 20)]
    >>> [claim.id for claim in list_claims(["hard-limit", "soft-limit"])]
    ['hard-limit', 'soft-limit']
    """
    names = set(only)
    for name in names - set(IDS):
        get_claim(name)  # raises the error that suggests similar ids
    selected = [get_claim(name) for name in IDS if not names or name in names]
    if source is None:
        return selected
    if source not in DOCUMENTS:
        raise RegardError(f"source must be one of {', '.join(DOCUMENTS)}, got {source!r}")
    cited = [claim for claim in selected if source in claim.sources]
    if not cited:
        with_sources = ", ".join(f"{claim.id} ({', '.join(claim.sources)})" for claim in selected)
        raise RegardError(f"source must be a document of the chosen claims, got {source!r}; they are {with_sources}")
    return cited


def run_claims(
    claims: Sequence[Claim], *, full: bool = False, on_result: Callable[[Result], None] = lambda result: None
) -> list[Result]:
    """Run claims one after the other.

    All checks run on one thread: with more threads, sums are added in another order and differ in their last bits.
    Each check sets its own seeds. The random state and the number of threads are restored afterwards.
    A check that needs a package which is not installed is undecided, and its result names the package.

    - ``claims``: the claims to run.
    - ``full``: run the long version of the checks that have one.
    - ``on_result``: called with each result as soon as it is known.

    >>> results = run_claims(list_claims(["hard-limit", "soft-limit"]))
    >>> [(result.claim.id, result.verdict) for result in results]
    [('hard-limit', 'holds conditionally'), ('soft-limit', 'holds')]
    """
    results = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for claim in claims:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)  # for random numbers outside of the check's own generator
                try:
                    result = claim.run(full=full)
                # One missing optional package must not stop the other claims.
                except ImportError as error:
                    result = Result(claim, Evidence(), 0.0, missing=str(error))
            results.append(result)
            on_result(result)
    finally:
        torch.set_num_threads(threads)
    return results
