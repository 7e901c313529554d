"""What hard attention with residuals brings to one place: (k+1)ⁿ paths, but not always as many positions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from regard.attention import attention
from regard.claims.claim import HOLDS_IF, Claim, Evidence
from regard.positions import hard_selection

Join = Callable[[Tensor, Tensor], Tensor]


def add(x: Tensor, moved: Tensor) -> Tensor:
    """The residual connection."""
    return x + moved


def looks(n: int, shifts: list[int], x: Tensor, attend: Callable[..., Any]) -> Tensor:
    """``Σ_h A_h x``: head h copies from the position ``shifts[h]`` further, or from the last there is."""
    at = torch.arange(n, dtype=torch.float64).unsqueeze(-1)
    q, k = hard_selection(at, at, torch.tensor([[s] for s in shifts], dtype=torch.float64))
    heads: Tensor = attend(q, k.expand(len(shifts), -1, -1), x.expand(len(shifts), -1, -1), scale=math.inf)
    return heads.sum(0)


def paths(n: int, layers: list[list[int]], attend: Callable[..., Any], join: Join) -> list[Tensor]:
    """After each layer, ``[n]``: by how many paths each position reaches the last one. Values start as e_j."""
    x, found = torch.eye(n, dtype=torch.float64), []
    for shifts in layers:
        x = join(x, looks(n, shifts, x, attend))
        found.append(x[-1])
    return found


def by_chance(n: int, heads: int, layers: int, draw: torch.Generator, attend: Callable[..., Any]) -> list[Tensor]:
    """The same where each head's argmax is that of random content."""
    x, found = torch.eye(n, dtype=torch.float64), []
    for _ in range(layers):
        q, k = torch.randn(2, heads, n, 8, generator=draw, dtype=torch.float64).unbind()
        x = x + attend(q, k, x.expand(heads, -1, -1), scale=math.inf).sum(0)
        found.append(x[-1])
    return found


def winners(n: int, draw: torch.Generator, attend: Callable[..., Any]) -> int:
    """One layer of one head: how many positions can change the last output by what they hold."""
    x = torch.randn(n, 4, generator=draw, dtype=torch.float64)
    y, count = attend(x[None], x[None], x[None], scale=math.inf)[0, -1] + x[-1], 0
    for j in range(n):
        other = x.clone()
        other[j] = 100 * x[-1]  # now the best match of the last query
        count += bool((attend(other[None], other[None], other[None], scale=math.inf)[0, -1] + other[-1] != y).any())
    return count


def spread(heads: int, layers: int) -> list[list[int]]:
    """Offsets that never meet: h·(k+1)^l back in layer l."""
    return [[-h * (heads + 1) ** layer for h in range(1, heads + 1)] for layer in range(layers)]


def sizes(rows: list[Tensor]) -> list[int]:
    return [int((row > 0).sum()) for row in rows]


def check(
    *,
    layers: int = 6,
    most: int = 3,
    samples: int = 20,
    seed: int = 0,
    attend: Callable[..., Any] = attention,
    join: Join = add,
) -> Evidence:
    """Paths from every position to the last, for heads that look back one, far and farther, and by chance."""
    found = Evidence()
    draw = torch.Generator().manual_seed(seed)
    near: dict[int, list[Tensor]] = {}
    lines: dict[str, Sequence[Sequence[float]]] = {}
    for heads in range(1, most + 1):
        deep = max(2, layers - 2 * (heads - 1))
        wanted = [(heads + 1) ** (layer + 1) for layer in range(deep)]
        n = wanted[-1] + 1
        far = paths(n, spread(heads, deep), attend, join)
        near[heads] = paths(n, [list(range(-1, -heads - 1, -1))] * deep, attend, join)
        of = f"{heads} head{'s' * (heads > 1)}, {deep} layers"
        found.written(
            f"{of}, looking 1 … k back: {heads + 1}^n positions",
            sizes(near[heads]) == wanted,
            f"{of}: looking 1{' … k' * (heads > 1)} back reaches {sizes(near[heads])[-1]} positions, not {wanted[-1]}",
        )
        said = f"with offsets h·{heads + 1}^l it reaches {sizes(far)[-1]}"
        found.condition(f"{of}, offsets that never meet: {heads + 1}^n positions", sizes(far) == wanted, said)
        total = [float(row.sum()) for row in near[heads]]
        found.condition(f"{of}: there are always {heads + 1}^n paths", total == wanted, f"{total[-1]:g} paths")
        who, back = f"{heads} head{'s' * (heads > 1)}", f"1{f' … {heads}' * (heads > 1)} back"
        lines |= {f"{who}, offsets that never meet": (range(1, deep + 1), sizes(far))}
        lines |= {f"{who}, looking {back}": (range(1, deep + 1), sizes(near[heads]))}
        found.numbers |= {f"{of}, near": sizes(near[heads])[-1], f"{of}, far": sizes(far)[-1]}
    ask_rest(found, layers, samples, draw, attend, join)
    found.draw("positions that reach the last one", lines, x="layers", y="positions", log="y")
    return found


def ask_rest(
    found: Evidence, layers: int, samples: int, draw: torch.Generator, attend: Callable[..., Any], join: Join
) -> None:
    """The sequence as a cap, random content, the choice itself, and no residual."""
    short, most = 2 ** (layers - 2), 2**layers
    capped = sizes(paths(short, spread(1, layers), attend, join))[-1]
    found.written(f"{short} positions, {layers} layers: {most} are reached", capped == most, f"{capped} at most")
    count = winners(short, draw, attend)
    found.written("one layer, one head: 2 positions can change an output", count <= 2, f"all {count} can, by winning")
    many = [sizes(by_chance(most, 1, layers, draw, attend)) for _ in range(samples)]
    bound = all(size <= 2 ** (i + 1) for row in many for i, size in enumerate(row))
    mean = sum(row[-1] for row in many) / samples
    found.condition("random content: never more than 2^n", bound, f"{mean:.3g} of {most} on average")
    alone = sizes(paths(most, spread(1, layers), attend, lambda x, moved: moved))[-1]
    found.control("without the residual: 2^n positions", alone == most, f"{alone} position")
    found.numbers |= {"random content, mean": mean, "can win": count, "without residual": alone}


CLAIM = Claim(
    id="receptive-field",
    sources=("003",),
    statement="With argmax attention and a residual connection a position's receptive field after n layers is 2ⁿ "
    "with one head, 3ⁿ with two and (k+1)ⁿ with k.",
    formula=r"\left|R_n\right| = (k + 1)^n",
    refuted="Heads whose values reach a position from fewer or more positions than that.",
    control="The same without the residual connection, asked whether 2ⁿ positions are reached.",
    verdict=HOLDS_IF,
    correction="There are always (k+1)ⁿ paths by which values arrive, and as many positions only if no two paths end "
    "at the same one and the sequence is long enough: offsets h·(k+1)^l in layer l do it, looking 1 … k back in every "
    "layer reaches kn + 1. So it is an upper bound on where values come from; which key wins depends on all positions.",
    check=check,
)
