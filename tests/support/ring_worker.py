"""One rank of a ring: compares every case with the operator on the whole sequence, and writes the errors to a file.

python ring_worker.py MODE RANK RANKS STORE RESULT
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import regard
from regard import Causal, Observe, Padding, Window
from regard.masks import Mask
from regard.parallel import _attention as distributed

MASKS: dict[str, Mask | None] = {
    "dense": None,
    "causal": Causal(),
    "window": Window(3, 2),
    "causal window": Causal() & Window(4),
    "top left": Causal(offset=0),
    "nothing": Window(1, offset=1000),
}
SEES = Observe(map=5, profile=3, key_mass=True, sink=3, local=2)
PER_HEAD = ("key_mass", "map", "map_rows", "profile", "profile_rows", "rows")
ROWS = (*regard._observables.ROW_VALUES, "counted")


@dataclass(frozen=True)
class Case:
    """One call on sequences of n queries and m keys."""

    mask: str = "dense"
    layout: str = "zigzag"
    dtype: torch.dtype = torch.float32
    n: int = 37
    m: int = 37
    heads: tuple[int, int] = (6, 3)
    backend: str = "auto"
    softcap: float | None = None
    sinks: bool = False
    observe: Observe = SEES
    spoil: str = ""

    @property
    def name(self) -> str:
        extra = (
            f"{self.backend} softcap={self.softcap} sinks={self.sinks} {self.spoil} {self.heads} {self.observe.queries}"
        )
        return f"{self.mask} {self.layout} {str(self.dtype)[6:]} {self.n}x{self.m} {extra}"


def cases() -> list[Case]:
    both = ("blocks", "zigzag")
    dtypes = (torch.float32, torch.float64)
    result = [Case(mask, layout, dtype) for mask in MASKS for layout in both for dtype in dtypes]
    result += [Case(mask, layout, n=n, m=m) for mask in MASKS for layout in both for n, m in ((7, 17), (17, 5), (2, 2))]
    result += [Case("causal", layout, dtype, n=131, m=131) for layout in both for dtype in dtypes]
    for dtype in dtypes:
        result += [Case("causal", dtype=dtype, softcap=2.0, sinks=True), Case("window", dtype=dtype, sinks=True)]
        result += [Case("nothing", dtype=dtype, sinks=True, n=11, m=13)]
    result += [Case(mask, backend="reference", n=13, m=13) for mask in ("dense", "causal window")]
    result += [Case("causal", spoil=spoil, n=13, m=13) for spoil in ("nan", "huge", "equal", "nan grad", "huge grad")]
    result += [Case("causal window", dtype=torch.float64, spoil="sharp")]
    result += [Case("causal", heads=(5, 5), n=13, m=13, observe=replace(SEES, heads=(3, 0), offset=1))]
    result += [Case("causal", n=13, m=13, observe=replace(SEES, queries=[13, 5]))]
    return result


def inputs(case: Case) -> tuple[list[Tensor], Tensor, Tensor | None]:
    """q, k and v, the gradient of out, and sinks; the same on all ranks."""
    torch.manual_seed(7)
    H, G = case.heads
    sizes = ((H, case.n, 5), (G, case.m, 5), (G, case.m, 3), (H, case.n, 3))
    q, k, v, g = (torch.randn(2, *size, dtype=case.dtype) for size in sizes)
    if case.spoil == "nan":
        k[:, :, -1], v[:, :, -1] = torch.nan, torch.nan  # causal: only the last query attends to it
    if case.spoil == "huge":
        q[:, :, 3:5] *= 1e30
        k[:, :, :2] *= 1e30
    if case.spoil == "sharp":
        q *= 30
    if case.spoil == "nan grad":
        g[:, :, 5] = torch.nan
    if case.spoil == "huge grad":
        g[:, :, 5] *= 1e37
    if case.spoil == "equal":
        k = torch.zeros_like(k)
    return [q, k, v], g, torch.linspace(-1, 1, H, dtype=case.dtype) if case.sinks else None


def call(attend: Callable[..., Any], x: list[Tensor], g: Tensor, sinks: Tensor | None, **options: Any) -> Any:
    """The output, the gradients, and the observation of one call."""
    leaves = [t.clone().requires_grad_() for t in (*x, *([] if sinks is None else [sinks]))]
    out, observation = attend(*leaves[:3], sinks=None if sinks is None else leaves[3], **options)
    (out * g).sum().backward()
    return out.detach(), [t.grad for t in leaves], observation


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative where b is larger than 1. Two NaN, or two equal infinities, do not differ."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    a, b = a.double(), b.double()
    same = (a == b) | (a.isnan() & b.isnan())
    away = torch.where(same, 0.0, (a - b).abs() / b.abs().clamp(min=1))
    return float(away.nan_to_num(nan=torch.inf).max()) if away.numel() else 0.0


def run(case: Case) -> dict[str, float]:
    x, g, sinks = inputs(case)
    options: dict[str, Any] = {"mask": MASKS[case.mask], "softcap": case.softcap, "backend": case.backend}
    out, grads, observation = call(regard.attention, x, g, sinks, observe=case.observe, **options)
    if case.spoil == "huge grad":  # the ring computes this case in float64, and the operator may not
        grads = [
            t.float()
            for t in call(regard.attention, [t.double() for t in x], g.double(), sinks, observe=SEES, **options)[1]
        ]

    def mine(t: Tensor, dim: int = 2) -> Tensor:
        return distributed.shard(t, dim, layout=case.layout)

    # Per-head values of a rank are those of its own rows, so the operator must count only these.
    real = torch.zeros(2, case.n, dtype=torch.bool)
    real[:, mine(torch.arange(case.n), 0)] = True
    real_queries = case.observe.real_queries(case.n)
    real = real if real_queries is None else real & real_queries
    whole = call(regard.attention, x, g, sinks, observe=replace(case.observe, queries=real), **options)[2]
    ring_out, ring_grads, ring_observation = call(
        distributed.attention,
        [mine(t) for t in x],
        mine(g),
        sinks,
        observe=case.observe,
        layout=case.layout,
        **options,
    )
    gathered = distributed.gather(ring_out, layout=case.layout)
    errors = {"out": distance(ring_out, mine(out)), "gathered": distance(gathered, out)}
    if sinks is not None:
        dist.all_reduce(ring_grads[3])
        errors["d_sinks"] = distance(ring_grads[3], grads[3])
    errors |= {f"d_{name}": distance(a, mine(b)) for name, a, b in zip("qkv", ring_grads, grads, strict=False)}
    errors |= {name: distance(getattr(ring_observation, name), mine(getattr(observation, name))) for name in ROWS}
    if case.spoil == "nan":
        del errors["peak_at"]  # undefined if all weights of a row are NaN
    errors |= {name: distance(getattr(ring_observation, name), getattr(whole, name)) for name in PER_HEAD}
    return errors


def error_of(attempt: Callable[[], Any]) -> str:
    """The message of the error that a call raises."""
    try:
        attempt()
    except (ValueError, TypeError) as error:
        return str(error)
    return "nothing was refused"


def refusals(rank: int) -> dict[str, str]:
    x = torch.randn(1, 2, 6, 4)

    def attend(rows: int = 6, **options: Any) -> str:
        return error_of(lambda: distributed.attention(*[x[:, :, :rows]] * 3, **options))

    return {
        "Padding": attend(mask=Causal() & Padding([3])),
        "Prefix": attend(mask=Causal() | regard.Prefix([2])),
        "Segments": attend(mask=regard.Segments([0] * 6)),
        "Tensor": attend(mask=torch.ones(6, 6, dtype=torch.bool)),
        "scale is inf": attend(scale=float("inf")),
        "top": attend(observe=Observe(top=2)),
        "grid": attend(observe=Observe(grid=(2, 3))),
        "keep": attend(observe=Observe(keep=True)),
        "groups": attend(observe=Observe(groups=regard.Groups([0]))),
        "head 2": attend(observe=Observe(heads=(2,))),
        "layout": attend(layout="stripes"),
        "shard()": attend(rows=1 + 2 * rank),
        "different calls": attend(mask=Causal() if rank else None),
        "float64": error_of(lambda: distributed.attention(*[x.double()] * 3, backend="native")),
    }


def extras(rank: int, ranks: int) -> dict[str, Any]:
    """Blocks of any lengths, half precision, the gradient of gather, and a group of some ranks."""
    torch.manual_seed(3)
    lengths = [(3, 0, 8)[r % 3] for r in range(ranks)]
    at = slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))
    x = torch.randn(3, 2, 2, sum(lengths), 4)
    whole = regard.attention(x, x, x[0], mask=Causal())
    part = distributed.attention(*(t[..., at, :] for t in (x, x, x[0])), mask=Causal(), layout="blocks")
    half = x.bfloat16()
    near = distributed.attention(*[half[..., at, :]] * 3, layout="blocks")
    true = regard.attention(*[half.double()] * 3)[..., at, :]
    y = torch.randn(5, 7, dtype=torch.float64)
    local = distributed.shard(y, 1).requires_grad_()
    (distributed.gather(local, 1) * y * (rank + 1)).sum().backward()
    pair = dist.new_group([0, 1])
    if rank < 2:
        z = x[0, 0]
        out = distributed.attention(*[distributed.shard(z, group=pair)] * 3, group=pair)
        paired = str(distance(distributed.gather(out, group=pair), regard.attention(z, z, z)))
    else:
        paired = error_of(lambda: distributed.shard(y, group=pair))
    return {
        "any lengths": distance(part, whole[..., at, :]),
        "half": distance(near.double(), true),
        "gather's gradient": distance(local.grad, distributed.shard(y, 1) * ranks * (ranks + 1) / 2),
        "pair": paired,
    }


def main() -> None:
    mode, rank, ranks, store, result = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
    torch.set_num_threads(1)
    seconds = 120 if mode == "cases" else 5
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=seconds)
    )
    if mode == "leave":
        if rank == 1:
            os._exit(0)  # like a killed process, without closing the group
        x = torch.randn(1, 2, 6, 4)
        distributed.attention(x, x, x)
        return
    results = {
        "cases": {case.name: run(case) for case in cases()},
        "refusals": refusals(rank),
        "extras": extras(rank, ranks),
    }
    with open(result, "w") as file:
        json.dump(results, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
