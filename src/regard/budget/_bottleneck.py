"""The bottleneck of a plan in words: where the time goes, why, and at which length that changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from regard.budget._roofline import PartTime

# The three possible bottlenecks (sides): the groups of operators in each, and why it can be the largest.
LINEAR = ("projections", "feed-forward", "embedding", "norms")
SIDES = {"attention": ("attention",), "linear layers": LINEAR, "logits": ("logits",)}
REASONS = {
    "attention": "n is large for this width",
    "linear layers": "d is large for this length",
    "logits": "the vocabulary is large for this width",
}
LABELS = {"projections": "q, k, v, out"}
SMALL_SHARE = 0.05  # groups with a smaller share are not listed


def describe_bottleneck(
    shares: Mapping[str, float], part_times: Iterable[PartTime], ridge: float | None, crossover: int | None, n: int
) -> str:
    """Describe the bottleneck in one line.

    - `shares`: the share of each group in the cost.
    - `part_times`: times on a machine; empty without a machine.
    - `ridge`: the machine's peak FLOPs per byte; None without a machine.
    - `crossover`: the length from which attention has at least half of the cost, or None; `n`: the current length.
    """
    if not shares:
        return "nothing to compute"
    sides = dict.fromkeys(SIDES, 0.0)
    for side, groups in SIDES.items():
        for group in groups:
            sides[side] += shares.get(group, 0.0)
    worst = max(sides, key=lambda side: sides[side])
    line = f"{worst}, {sides[worst]:.0%}"

    # The linear layers are several groups: list the large ones.
    linear = [(shares[group], group) for group in LINEAR if group in shares]
    if worst == "linear layers" and len(linear) > 1:
        details = []
        for share, group in sorted(linear, reverse=True):
            if share >= SMALL_SHARE:
                details.append(f"{LABELS.get(group, group)} {share:.0%}")
        line += f" ({', '.join(details)})"
    return f"{line}: {_reason(worst, part_times, ridge)}{_change(worst, crossover, n)}"


def _reason(worst: str, part_times: Iterable[PartTime], ridge: float | None) -> str:
    """Say why this side is the bottleneck."""
    if ridge is None:
        return REASONS[worst]
    seconds = 0.0
    compute_bound = 0.0
    for time in part_times:
        if time.group in SIDES[worst]:
            seconds += time.seconds
            compute_bound += time.compute_bound
    if compute_bound >= 0.5 * seconds:
        return REASONS[worst]

    # Arithmetic is not the limit, so a smaller width or length would not help much.
    if worst == "attention":
        return "calls and memory set the time, not arithmetic"
    return f"memory sets the time, each weight is read for too few rows (full speed needs {ridge:.0f} FLOPs per byte)"


def _change(worst: str, crossover: int | None, n: int) -> str:
    """Say at which length attention overtakes everything else; "" if there is nothing to say."""
    if crossover is None:
        return ""
    overtaken = crossover <= n
    if worst == "attention" and overtaken:
        return f"; it overtook the rest at n* = {crossover:,}"
    if worst == "attention":
        return f"; it overtakes all the rest at n* = {crossover:,}"
    # If the overhead of calls sets the time, another side can be the largest even after the crossover.
    if overtaken:
        return ""
    return f"; attention overtakes at n* = {crossover:,}"
