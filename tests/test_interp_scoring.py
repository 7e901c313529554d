"""The scores of heads against loops over rows and keys, and heads built so that their scores are known."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import dense_attention
from torch import Tensor

import regard
from regard import Causal, Dense, Observation, Observe, Padding, Window
from regard.interp import _head_scores as scoring
from regard.interp._head_scores import head_scores
from regard.interp._probes import Probe

BLOCK, START = 3, 2  # two special tokens, four blocks of three, one at the end: 15


def repeated(name: str = "repeated", block: int = BLOCK, before: int = START, times: int = 4, after: int = 1) -> Probe:
    """Two texts of a block said again and again, or of tokens that are all different."""
    g = torch.Generator().manual_seed(3)
    rows = []
    for _ in range(2):
        tokens = (10 + torch.randperm(40, generator=g)[: block * times]).tolist()
        inside = tokens[:block] * times if name == "repeated" else tokens
        rows.append([1, 2][:before] + inside + [3] * after)
    special = torch.tensor([i == 0 or x < 10 for i, x in enumerate(rows[0])])
    return Probe(name, torch.tensor(rows), special, block, before)


def made(n: int, m: int, heads: int = 3, seed: int = 0, **options: Any) -> tuple[Observation, Tensor, Tensor]:
    """An observation, its weights and who sees whom by the plain formulas."""
    g = torch.Generator().manual_seed(seed)
    q, k = (2 * torch.randn(2, heads, length, 5, generator=g, dtype=torch.float64) for length in (n, m))
    _, observation = regard.attention(q, k, k, **options, observe=Observe(keep=True))
    _, A, _, s = dense_attention.attention(q, k, k, **options)
    return observation, A, s > -math.inf


def offset(i: int, j: int, n: int, m: int, grid: tuple[int, int] | None) -> tuple[int, ...] | None:
    """Where key j stands as query i sees it; None where one of the two stands nowhere."""
    at = i + m - n
    if grid is None:
        return (j - at,)
    first, width = m - grid[0] * grid[1], grid[1]
    if at < first or j < first:
        return None
    y, x = divmod(at - first, width)
    down, across = divmod(j - first, width)
    return down - y, across - x


def brute(
    A: Tensor, see: Tensor, real: Tensor, probe: Probe, head: int, clean: bool, grid: tuple[int, int] | None = None
) -> dict[str, float]:
    """One head's scores, pair by pair."""
    B, _, n, m = A.shape
    special = probe.special if grid is None else torch.arange(m) < m - grid[0] * grid[1]
    special = special if len(special) == m else torch.zeros(m, dtype=torch.bool)
    text = grid is None and n == m == probe.ids.shape[1]
    sums: dict[str, float] = defaultdict(float)
    peaks: Counter[Any] = Counter()
    pairs: dict[str, list[tuple[Any, float]]] = {"A": [], "U": []}
    rows = rest = 0.0
    for b in range(B):
        ids = probe.ids[min(b, len(probe.ids) - 1)].tolist() if grid is None else []
        for i in range(n):
            visible = [j for j in range(m) if see[b, head, i, j]]
            if not visible or not real[b, i] or (grid is not None and offset(i, m - 1, n, m, grid) is None):
                continue
            a = A[b, head, i].tolist()
            kept = sum(a[j] for j in range(m) if not special[j])
            rest += kept
            sums["all rows"] += 1
            sums["sinks chance"] += sum(bool(special[j]) for j in visible) / len(visible)
            if clean:
                if kept < 1e-3:
                    continue
                a = [0.0 if special[j] else a[j] / kept for j in range(m)]
                visible = [j for j in visible if not special[j]]
            rows += 1
            at, u = i + m - n, 1 / len(visible)
            sums["sink"] += a[0]
            sums["sink4"] += sum(a[:4])
            if at >= 1 and grid is None and not (clean and special[at - 1]):
                sums["previous rows"] += 1
                sums["previous"] += a[at - 1]
                sums["previous chance"] += u if at - 1 in visible else 0.0
            if text:
                sums["duplicate"] += sum(a[j] for j in range(i) if ids[j] == ids[i])
            last = probe.start + probe.block * ((m - probe.start) // max(probe.block, 1))
            if text and probe.block and probe.start + probe.block <= i < last and (not special[i]):
                sums["later rows"] += 1
                for j in range(probe.start, i + 1):
                    copied = j < i and ids[j] == ids[i]
                    follows = j > probe.start and ids[j - 1] == ids[i]
                    for name, yes in (("copied", copied), ("induction", follows)):
                        sums[name] += a[j] * yes
                        sums[f"{name} chance"] += u * (yes and j in visible)
            entropy = -sum(x * math.log(x) for x in a if x > 0)
            sums["spread"] += entropy / math.log(len(visible)) if len(visible) > 1 else 0.0
            where = [offset(i, j, n, m, grid) for j in range(m)]
            here = [(0,) * (1 if grid is None else 2) if d is None else d for d in where]
            sums["distance"] += sum(x * math.hypot(*d) for x, d in zip(a, here, strict=True))
            for axis in range(len(here[0])):
                mean = sum(x * d[axis] for x, d in zip(a, here, strict=True))
                sums[f"centre {axis}"] += mean
                sums["variance"] += sum(x * d[axis] ** 2 for x, d in zip(a, here, strict=True)) - mean**2
            top = max(range(m), key=lambda j: a[j])
            if where[top] is not None:
                peaks[where[top]] += 1
            for j in visible:
                if where[j] is not None:
                    pairs["A"].append((where[j], a[j]))
                    pairs["U"].append((where[j], u))
    fits = {}
    for name, found in pairs.items():
        total, count = defaultdict(float), Counter[Any]()
        for d, x in found:
            total[d] += x
            count[d] += 1
        left = sum((x - total[d] / count[d]) ** 2 for d, x in found)
        fits[name] = 1 - left / sum(x * x for _, x in found)
    ratio = {name: sums[name] / rows for name in ("sink", "sink4", "duplicate", "spread", "distance")}
    ratio |= {name: x / rows for name, x in sums.items() if name.startswith("centre")}
    for name, count in (("previous", "previous rows"), ("copied", "later rows"), ("induction", "later rows")):
        for each in (name, f"{name} chance"):
            ratio[each] = sums[each] / sums[count] if sums[count] else math.nan
    ratio |= {"positional": max(peaks.values()) / rows, "width": math.sqrt(sums["variance"] / rows)}
    ratio |= {"fit": fits["A"], "convolution": fits["A"] - fits["U"]}
    if clean:
        return ratio | {"rest": rest / sums["all rows"]}
    return ratio | {"sinks": 1 - rest / sums["all rows"], "sinks chance": sums["sinks chance"] / sums["all rows"]}


LENGTHS = torch.tensor([15, 8])
ALL = torch.ones(2, 15, dtype=torch.bool)
SOME = torch.rand(3, 15, 15, generator=torch.Generator().manual_seed(2)) < 0.6
SOME[0, 5:8] = False  # rows that are empty in the first head alone
CASES: dict[str, tuple[int, int, dict[str, Any], Tensor, tuple[int, int] | None]] = {
    "bidirectional": (15, 15, {}, ALL, None),
    "causal": (15, 15, {"mask": Causal()}, ALL, None),
    "window": (15, 15, {"mask": Window(3, 1)}, ALL, None),
    "padded": (15, 15, {"mask": Causal() & Padding(LENGTHS)}, torch.arange(15) < LENGTHS[:, None], None),
    "padded both ways": (15, 15, {"mask": Padding(LENGTHS)}, torch.arange(15) < LENGTHS[:, None], None),
    "heads of their own": (15, 15, {"mask": Dense(SOME)}, ALL, None),
    "learned sinks": (15, 15, {"mask": Causal(), "sinks": torch.tensor([1.0, 3.0, -2.0]).double()}, ALL, None),
    "fewer queries": (7, 15, {"mask": Causal()}, ALL[:, :7], None),
    "more keys": (11, 17, {}, ALL[:, :11], None),
    "grid": (7, 7, {}, ALL[:, :7], (2, 3)),
    "grid without a class": (15, 15, {}, ALL, (3, 5)),
    "grid, few queries": (4, 8, {"sinks": torch.zeros(3).double()}, ALL[:, :4], (2, 3)),
}


@pytest.mark.parametrize("cells", [2**22, 1, 100])
@pytest.mark.parametrize("name", CASES)
def test_scores_are_their_formulas(name: str, cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    n, m, options, real, grid = CASES[name]
    monkeypatch.setattr(scoring, "CELLS", cells)  # strips of rows
    observation, A, see = made(n, m, **options)
    probe = repeated() if grid is None else Probe("natural", torch.zeros(2, 3, 4, 4), torch.zeros(0, dtype=torch.bool))
    norms = torch.rand(2, 3, m, generator=torch.Generator().manual_seed(1))
    found = head_scores(replace(observation, value_norm=norms), probe, grid)
    for head in range(3):
        for weights in ("raw", "clean"):
            expected = brute(A, see, real, probe, head, weights == "clean", grid)
            got = {key: float(x[head]) for key, x in found[weights].items() if key != "value_weighted"}
            if grid is not None:
                for each in ("previous", "previous chance"):
                    assert math.isnan(got[each])
            assert got == pytest.approx(expected, rel=1e-6, abs=1e-9, nan_ok=True), (head, weights)
        special = probe.special if grid is None else torch.arange(m) < m - grid[0] * grid[1]
        special = special if len(special) == m else torch.zeros(m, dtype=torch.bool)
        counted = real.clone()
        if grid is not None:
            counted &= torch.arange(n) + m - n >= m - grid[0] * grid[1]
        value_weighted = (A[:, head] * counted.unsqueeze(-1)).sum(1) * norms[:, head]
        assert float(found["raw"]["value_weighted"][head]) == pytest.approx(
            float(value_weighted[:, special].sum() / value_weighted.sum()), 1e-5
        )


def test_names_are_what_is_scored() -> None:
    observation, _, _ = made(15, 15, mask=Causal())
    raw = head_scores(observation, repeated())["raw"]
    assert set(scoring.SCORE_NAMES) <= set(raw) and "value_weighted" not in raw
    chosen = regard.attention(*[torch.randn(2, 5, 15, 3)] * 3, observe=Observe(keep=True, heads=(4, 1)))[1]
    assert head_scores(chosen, repeated())["raw"]["sink"].shape == (2,)
    for lost in (replace(observation, saved_calls=()), replace(observation, n=None)):
        with pytest.raises(ValueError, match=r"observe with Observe\(keep=True\)"):
            head_scores(lost, repeated())


def hard(q: Tensor, k: Tensor, mask: Any = None) -> Observation:
    """A head that looks at the key with the largest product, ``q, k [B, n, d]``."""
    q, k = (x.unsqueeze(1).double() for x in (q, k))
    return regard.attention(
        q, k, k, mask=Causal() if mask is None else mask, scale=math.inf, observe=Observe(keep=True)
    )[1]


def one_hot(x: Tensor, size: int = 60) -> Tensor:
    return torch.nn.functional.one_hot(x, size).double()


def numbers(observation: Observation, probe: Probe, weights: str, grid: Any = None) -> dict[str, float]:
    return {name: float(x[0]) for name, x in head_scores(observation, probe, grid)[weights].items()}


def test_a_previous_token_head() -> None:
    at, probe = torch.arange(15).expand(2, -1), repeated(before=0, times=5, after=0)
    head = hard(one_hot((at - 1).clamp(min=0)), one_hot(at))
    clean, raw = numbers(head, probe, "clean"), numbers(head, probe, "raw")
    assert raw["previous"] == clean["previous"] == clean["positional"] == 1
    assert clean["fit"] == pytest.approx(1) and clean["width"] == 0 and clean["centre 0"] == -1
    assert raw["positional"] == pytest.approx(14 / 15)  # the first row sees itself alone
    assert raw["sinks"] == pytest.approx(2 / 15) and clean["rest"] == pytest.approx(13 / 15)
    assert raw["distance"] == pytest.approx(14 / 15) and raw["spread"] == 0


def test_a_head_that_looks_across_a_grid() -> None:
    """Right neighbours on a 3 × 5 grid behind a class token; the last column looks at itself."""
    at = torch.arange(16)
    right = torch.where((at > 0) & (at % 5 != 0), at + 1, at)
    head = hard(one_hot(right).unsqueeze(0), one_hot(at).unsqueeze(0), mask=Dense(torch.ones(16, 16).bool()))
    for weights in ("raw", "clean"):
        found = numbers(head, Probe("natural", torch.zeros(1, 3, 2, 2), torch.zeros(0).bool()), weights, (3, 5))
        assert found["distance"] == pytest.approx(12 / 15) and found["positional"] == pytest.approx(12 / 15)
        assert (found["centre 0"], found["centre 1"]) == (0, pytest.approx(12 / 15))
        # p(0, 1) = 1 on the 12 rows that see it, p(0, 0) = 3/15: 15 − (12 + 15/25) of 15 is left.
        assert found["fit"] == pytest.approx((12 + 9 / 15) / 15)


def test_a_uniform_head() -> None:
    x = torch.randn(2, 1, 15, 5).double()
    for mask in (Causal(), Window(2, 1), None):
        head = regard.attention(x, x, x, mask=mask, scale=0.0, observe=Observe(keep=True))[1]
        for weights in ("raw", "clean"):
            found = numbers(head, repeated(), weights)
            assert found["convolution"] == pytest.approx(0, abs=1e-12)
            for name in ("previous", "copied", "induction"):
                assert found[name] == pytest.approx(found[f"{name} chance"])
        seen = [int(head.visible[0, 0, i]) for i in range(15)]
        assert numbers(head, repeated(), "raw")["spread"] == pytest.approx(sum(c > 1 for c in seen) / 15)


def test_a_sink_head_is_nothing_else() -> None:
    for probe in (repeated(), repeated("random"), repeated(before=0, times=5, after=0)):
        head = hard(torch.ones(2, 15, 1), (torch.arange(15) == 0).double().reshape(1, 15, 1).expand(2, -1, -1))
        raw, clean = numbers(head, probe, "raw"), numbers(head, probe, "clean")
        assert raw["sink"] == raw["sink4"] == raw["sinks"] == 1 and clean["rest"] == 0
        assert raw["induction"] == 0  # the first token of all followed nothing
        assert all(math.isnan(x) for name, x in clean.items() if name != "rest")


def by_token(probe: Probe, shift: int, mask: Any = None) -> Observation:
    """Looks at keys whose token ``shift`` places before is the query's; else at the first key."""
    keys = one_hot(probe.ids.roll(shift, 1))
    keys[:, :shift] = 0
    keys[:, 0] += 0.5
    return hard(one_hot(probe.ids), keys, mask)


def test_an_induction_head() -> None:
    for before, times, after in ((2, 4, 1), (0, 5, 0)):
        said, random = (repeated(name, before=before, times=times, after=after) for name in ("repeated", "random"))
        for weights in ("raw", "clean"):
            assert numbers(by_token(said, 1), said, weights)["induction"] == 1
        assert numbers(by_token(said, 1), said, "raw")["copied"] == 0
        assert numbers(by_token(random, 1), random, "raw")["induction"] == 0


def test_a_head_for_duplicates() -> None:
    said, random = repeated(), repeated("random")
    before = Dense(torch.ones(15, 15).tril(-1).bool())
    found = numbers(by_token(said, 0, before), said, "raw")
    assert found["copied"] == 1 and found["induction"] == 0
    assert found["duplicate"] == pytest.approx(9 / 14)  # 14 rows see anything, 9 of them a copy
    assert numbers(by_token(random, 0, before), random, "raw")["copied"] == 0
