"""Checks that in the sinusoidal encoding a step of k positions is one linear map, a rotation, at every position."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from regard._operator import attention
from regard.claims._check_helpers import AttentionFn, attention_weights, largest_difference
from regard.claims._claim import HOLDS, Claim, Evidence
from regard.positions import AddedToInput, Learned, Sinusoidal

TOLERANCE = 1e-9


def fit_map(encoding: AddedToInput, step: int, starts: Tensor) -> tuple[Tensor, float]:
    """The best M of ``c_{p+k} = M c_p`` for half of the start positions, and its largest error at the other half."""
    here = encoding.encoding_at(starts).detach().double()
    there = encoding.encoding_at(starts + step).detach().double()
    half = len(starts) // 2
    map_T = torch.linalg.lstsq(here[:half], there[:half], driver="gels").solution  # this driver is deterministic
    return map_T.mT, largest_difference(here[half:] @ map_T, there[half:])


def check(
    *,
    d: int = 16,
    reach: int = 100_000,
    samples: int = 600,
    n: int = 48,
    seed: int = 0,
    code: Callable[[int], AddedToInput] = Sinusoidal,
    attention_fn: AttentionFn = attention,
) -> Evidence:
    """Fit the map of a step at some positions and test it at others; then use it to attend to a fixed offset."""
    evidence = Evidence()
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    starts = torch.randint(0, reach, (samples,), generator=generator)
    encoding = code(d)
    steps = (1, 2, 5, 17, 100)
    maps = {step: fit_map(encoding, step, starts) for step in steps}
    worst = max(error for _, error in maps.values())
    evidence.add_statement(
        "One matrix per step, fitted at some positions, is correct at all others.",
        worst < TOLERANCE,
        f"steps {', '.join(map(str, steps))}: c_(p+k) = M_k c_p within {worst:.1e} at {samples // 2} other positions",
    )
    identity = torch.eye(maps[1][0].shape[0], dtype=torch.float64)
    not_orthogonal = max(largest_difference(M @ M.mT, identity) for M, _ in maps.values())
    evidence.add_statement(
        "The matrix is orthogonal: a rotation.",
        not_orthogonal < TOLERANCE,
        f"M Mᵀ equals I within {not_orthogonal:.1e}",
    )
    power_error = largest_difference(torch.linalg.matrix_power(maps[1][0], 5), maps[5][0])
    evidence.add_statement(
        "Five steps of 1 are one step of 5.", power_error < TOLERANCE, f"M_1^5 equals M_5 within {power_error:.1e}"
    )

    codes = encoding.encoding(n).detach().double()
    rotated = codes @ maps[5][0].mT
    targets = torch.arange(5, n)
    weights = attention_weights(attention_fn, rotated[None], codes[None], scale=math.inf)[0, : n - 5]
    attends = bool((weights.argmax(-1) == targets).all() and (weights.amax(-1) == 1).all())
    evidence.add_statement(
        "Queries M_5 c_i over keys c_j attend to position i + 5.", attends, f"{n - 5} of {n - 5} queries" * attends
    )

    # Controls: their statements must be false.
    # Without the rotation a query matches its own position; a random table and an odd width have no such matrix.
    unrotated = attention_weights(attention_fn, codes[None], codes[None], scale=math.inf)[0, : n - 5]
    evidence.add_control(
        "Queries c_i without the rotation attend to position i + 5.", bool((unrotated.argmax(-1) == targets).all())
    )
    table_error = fit_map(Learned(reach + max(steps), d), 5, starts)[1] / 0.02  # the table's standard deviation
    odd_error = fit_map(Sinusoidal(d - 1), 5, starts)[1]
    evidence.add_control(
        "A random table has such a matrix.", table_error < TOLERANCE, f"error {table_error:.2g} standard deviations"
    )
    evidence.add_control(
        "An encoding of odd width, whose last sine has no cosine, has such a matrix.",
        odd_error < TOLERANCE,
        f"error {odd_error:.2g}",
    )
    scores = rotated @ codes.mT
    curves = {f"query at {i}": scores[i].tolist() for i in (n // 8, n // 2 - 5, 3 * n // 4)}
    evidence.add_curves(
        "scores of queries M_5 c_i: the largest at i + 5", range(n), curves, x="key position", y="score"
    )
    evidence.numbers |= {"largest error": worst, "random table": table_error, "odd width": odd_error}
    return evidence


CLAIM = Claim(
    id="sinusoid-offsets-are-linear",
    title="A step of k positions is one linear map of the sinusoidal encoding",
    citations=(("exam-answers", "1 (d)"),),
    papers=("vaswani-2017",),
    statement="In the sinusoidal encoding, whose waves come in pairs of sine and cosine, a step of k positions is one "
    "linear map, the same at every position. So one weight matrix can make queries attend k positions further.",
    formula=r"c_{p+k} = M_k\, c_p \quad \forall p, \qquad M_k^\top M_k = I, \qquad M_j M_k = M_{j+k}",
    refuted_by="A step k for which the matrix that fits some positions fails at others.",
    control="A random table of positions, and an encoding of odd width, whose last sine has no cosine.",
    verdict=HOLDS,
    check=check,
)
