"""In the sinusoidal code a step of k positions is one linear map, a rotation, wherever it starts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.attention import attention
from regard.claims.claim import HOLDS, Claim, Evidence
from regard.positions import AddedToInput, Learned, Sinusoidal

TIGHT = 1e-9


def fitted(code: AddedToInput, step: int, starts: Tensor) -> tuple[Tensor, float]:
    """The best M of ``c_{p+k} = M c_p`` by half of the starts, and its largest error at the other half."""
    here, there = (code.code_at(at).detach().double() for at in (starts, starts + step))
    half = len(starts) // 2
    map_T = torch.linalg.lstsq(here[:half], there[:half], driver="gels").solution  # the same bits every time
    return map_T.mT, float((here[half:] @ map_T - there[half:]).abs().max())


def look(codes: Tensor, turned: Tensor, attend: Callable[..., Any]) -> Tensor:
    """The weights of queries ``M c_i`` over keys ``c_j`` in hard attention."""
    n = len(codes)
    q, k, v = (x.unsqueeze(0) for x in (turned, codes, torch.eye(n, dtype=codes.dtype)))
    weights: Tensor = attend(q, k, v, scale=math.inf)
    return weights[0]


def check(
    *,
    d: int = 16,
    reach: int = 100_000,
    samples: int = 600,
    n: int = 48,
    seed: int = 0,
    code: Callable[[int], AddedToInput] = Sinusoidal,
    attend: Callable[..., Any] = attention,
) -> Evidence:
    """Fit the map of a step by some positions and try it at others; then find a fixed offset by attention with it."""
    found = Evidence()
    draw = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    starts = torch.randint(0, reach, (samples,), generator=draw)
    waves = code(d)
    steps = (1, 2, 5, 17, 100)
    maps = {step: fitted(waves, step, starts) for step in steps}
    worst = max(error for _, error in maps.values())
    found.written(
        "one matrix a step, fitted at some positions, serves at all others",
        worst < TIGHT,
        f"steps {', '.join(map(str, steps))}: c_(p+k) = M_k c_p within {worst:.1e} at {samples // 2} unseen positions",
    )
    eye = torch.eye(maps[1][0].shape[0], dtype=torch.float64)
    bent = max(float((M @ M.mT - eye).abs().max()) for M, _ in maps.values())
    found.written("the matrix is orthogonal, a rotation", bent < TIGHT, f"M Mᵀ is within {bent:.1e} of I")
    powers = float((torch.linalg.matrix_power(maps[1][0], 5) - maps[5][0]).abs().max())
    found.written("five single steps are one step of five", powers < TIGHT, f"M_1^5 is within {powers:.1e} of M_5")
    codes = waves.code(n).detach().double()
    weights = look(codes, codes @ maps[5][0].mT, attend)
    hit = bool((weights[: n - 5].argmax(-1) == torch.arange(5, n)).all() and (weights[: n - 5].amax(-1) == 1).all())
    found.written("queries M_5 c_i over keys c_j attend to position i + 5", hit, f"{n - 5} of {n - 5} queries" * hit)
    missed = bool((look(codes, codes, attend)[: n - 5].argmax(-1) == torch.arange(5, n)).all())
    found.control("queries c_i, not turned, attend to position i + 5", missed)
    table = Learned(reach + max(steps), d)
    by_chance, odd = fitted(table, 5, starts)[1] / 0.02, fitted(Sinusoidal(d - 1), 5, starts)[1]
    found.control("a random table has such a matrix", by_chance < TIGHT, f"error {by_chance:.2g} standard deviations")
    found.control("the code of odd width has one; its last sine stands without a cosine", odd < TIGHT, f"{odd:.2g}")
    scores = (codes @ maps[5][0].mT) @ codes.mT
    lines = {f"query at {i}": (range(n), scores[i].tolist()) for i in (n // 8, n // 2 - 5, 3 * n // 4)}
    found.draw("scores of queries M_5 c_i: the largest at i + 5", lines, x="key position", y="score")
    found.numbers |= {"largest error": worst, "random table": by_chance, "odd width": odd}
    return found


CLAIM = Claim(
    id="sinusoid-offsets-are-linear",
    sources=("001",),
    statement="In the sinusoidal code, whose waves come as pairs of sine and cosine, moving on by k positions is one "
    "linear map, the same wherever it starts: so one weight matrix can make queries look k positions further.",
    formula=r"c_{p+k} = M_k\, c_p \quad \forall p, \qquad M_k^\top M_k = I, \qquad M_j M_k = M_{j+k}",
    refuted="A step k for which the matrix that fits some positions fails at others.",
    control="A random table of positions, and a code of odd width, whose last sine has no cosine beside it.",
    verdict=HOLDS,
    check=check,
)
