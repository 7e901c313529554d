"""``PatchSweep``: what patching each site changes, as rows, a table, CSV, and compared with another sweep."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from rich.table import Table

from regard._checks import check_integer, describe_value
from regard._errors import RegardError, RegardTypeError
from regard._files import write_text
from regard._terminal import frameless_table, literal_text
from regard.interp._head_table import csv_text, format_number, shorten_paths
from regard.interp._patch_metrics import normalised_effect
from regard.interp._patch_sites import Site

# Column → what it is.
PATCH_COLUMNS = {
    "before": "the metric of the base run",
    "after": "the metric of the patched run, or its estimate",
    "change": "after − before",
    "effect": "(after − before) / (source − before)",
}

SiteKey = tuple[str, int, str, int | None]


@dataclass(frozen=True)
class SweepComparison:
    """How well two sweeps agree on the sites that both have.

    - ``rank_correlation``: Spearman's ρ of their changes; ties have their mean rank.
    - ``correlation``: Pearson's r of their changes.
    - ``sites``: how many sites were compared.

    >>> print(SweepComparison(rank_correlation=0.9, correlation=0.8, sites=12))
    rank correlation 0.900, correlation 0.800 over 12 sites
    """

    rank_correlation: float
    correlation: float
    sites: int

    def __str__(self) -> str:
        return (
            f"rank correlation {self.rank_correlation:.3f}, correlation {self.correlation:.3f} over {self.sites} sites"
        )


@dataclass(frozen=True, repr=False)
class PatchSweep:
    """What patching each site alone changes. ``patch_sweep`` and ``attribution_patch`` make it.

    - ``model``, ``metric``: the model and the metric in words.
    - ``before``, ``source``: the metric of the base run, and of the source, None if it is not known.
    - ``rows``: one dictionary per site: ``path``, ``layer`` (its number), ``head``, ``part``, ``position`` (None is all
      positions together), ``before``, ``after``, ``change`` and ``effect`` (None if the source's number is not known).
    - ``is_estimate``: True if ``after`` was not measured but estimated from gradients.

    >>> model = regard.nn.Decoder(6, heads=3, layers=2, vocab=11).eval()
    >>> base, source = torch.tensor([[3, 1, 4]]), torch.tensor([[3, 5, 4]])
    >>> sweep = regard.interp.patch_sweep(model, base, source, regard.interp.Logit(-1, 7), positions=[1])
    >>> len(sweep.rows), sweep.rows[5]["path"], sweep.rows[5]["head"], sweep.rows[5]["position"]
    (6, 'blocks.1.attention', 2, 1)
    """

    model: str
    metric: str
    before: float
    source: float | None
    rows: list[dict[str, Any]] = field(default_factory=list)
    is_estimate: bool = False

    def __repr__(self) -> str:
        kind = "Estimated PatchSweep" if self.is_estimate else "PatchSweep"
        return f"{kind} of {len(self.rows)} sites of {self.model}: {self.metric}"

    def add(self, row: dict[str, Any], after: float) -> None:
        """Add a row with the numbers that follow from ``after``."""
        row["before"] = self.before
        row["after"] = after
        row["change"] = after - self.before
        row["effect"] = normalised_effect(self.before, after, self.source)
        self.rows.append(row)

    def top(self, limit: int = 10) -> list[Site]:
        """The sites with the largest changes of either sign, the largest first, as ``patch`` takes them.

        >>> model = regard.nn.Decoder(6, heads=3, layers=2, vocab=11).eval()
        >>> sweep = regard.interp.patch_sweep(model, torch.tensor([[3, 1, 4]]), torch.zeros_like, heads=[(1, 2)])
        >>> sweep.top(1)
        [Site(layer='blocks.1.attention', head=2, part='output', positions=None)]
        """
        check_integer("limit", limit, least=1)
        return [Site(row["path"], row["head"], row["part"], row["position"]) for row in self._sorted()[:limit]]

    def table(self, limit: int | None = None, *, sort: bool = True) -> Table:
        """The sites as a table for the terminal.

        - ``limit``: how many; all by default.
        - ``sort``: the largest changes first; False keeps the order of the layers.
        """
        rows = self._sorted() if sort else self.rows
        pattern, names = shorten_paths([row["path"] for row in self.rows])
        title = f"{self.metric}: {self.before:.4f}"
        if self.source is not None:
            title += f", of the source {self.source:.4f}"
        if self.is_estimate:
            title += "; estimates from gradients"
        if pattern:
            title += f"\n{pattern}"
        table = frameless_table()
        table.title = literal_text(title.split("\n")[0])
        if pattern:
            table.caption = literal_text(f"layers: {pattern}")
            table.caption_justify = "left"
        table.add_column("layer", overflow="fold")
        table.add_column("head", justify="right")
        table.add_column("part")
        for name in ("position", "after", "change", "effect"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in rows[:limit]:
            position = "all" if row["position"] is None else str(row["position"])
            numbers = [format_number(row[name], 4) for name in ("after", "change")]
            effect = format_number(row["effect"], 3)
            table.add_row(literal_text(names[row["path"]]), str(row["head"]), row["part"], position, *numbers, effect)
        return table

    def to_csv(self, file: str | os.PathLike[str] | None = None) -> str:
        """One line per site, as text; also written to ``file`` if one is given."""
        columns = ["path", "layer", "head", "part", "position", *PATCH_COLUMNS]
        return write_text(csv_text(columns, self.rows), file)

    def over_positions(self) -> PatchSweep:
        """Estimates at each position, added up: what patching all of them together is estimated to change.

        Measured effects of single positions do not add up to that of all positions, so they are refused.

        >>> model = regard.nn.Decoder(6, heads=3, layers=2, vocab=11).eval()
        >>> base, source = torch.tensor([[3, 1, 4]]), torch.tensor([[3, 5, 4]])
        >>> estimates = regard.interp.attribution_patch(model, base, source, regard.interp.Logit(-1, 7))
        >>> len(estimates.rows), len(estimates.over_positions().rows)
        (18, 6)
        """
        if not self.is_estimate:
            raise RegardError(
                "only estimates add up over positions; sweep with positions='all' to measure them together"
            )
        totals: dict[SiteKey, float] = {}
        first: dict[SiteKey, dict[str, Any]] = {}
        for row in self.rows:
            key: SiteKey = (row["path"], row["head"], row["part"], None)
            totals[key] = totals.get(key, 0.0) + row["change"]
            first.setdefault(key, row)
        result = replace(self, rows=[])
        for key, total in totals.items():
            path, head, part, _ = key
            result.add(sweep_row(path, first[key]["layer"], head, part, None), self.before + total)
        return result

    def compare(self, other: PatchSweep) -> SweepComparison:
        """Compare the changes of two sweeps, for example measured ones with those of ``attribution_patch``.

        Sites that only one of them has are left out. If one has all positions together and the other has estimates at
        each position, the estimates are added up.

        >>> model = regard.models.load(regard.models.bundled())
        >>> ids = torch.tensor([model.tokenizer.encode("a b c a b c")])
        >>> sweep = regard.interp.patch_sweep(model, ids, torch.zeros_like)
        >>> sweep.compare(sweep).rank_correlation
        1.0
        """
        if not isinstance(other, PatchSweep):
            raise RegardTypeError(f"other must be a PatchSweep, got {describe_value(other)}")
        first = self._changes()
        second = other._changes()
        if not first.keys() & second.keys():
            if other.is_estimate:
                second = other.over_positions()._changes()
            elif self.is_estimate:
                first = self.over_positions()._changes()
        common = [key for key in first if key in second]
        if len(common) < 2:
            raise RegardError(f"the sweeps must have at least 2 sites in common, got {len(common)}")
        a = np.array([first[key] for key in common])
        b = np.array([second[key] for key in common])
        return SweepComparison(_correlation(_ranks(a), _ranks(b)), _correlation(a, b), len(common))

    def _changes(self) -> dict[SiteKey, float]:
        return {(row["path"], row["head"], row["part"], row["position"]): row["change"] for row in self.rows}

    def _sorted(self) -> list[dict[str, Any]]:
        """The rows, the largest change of either sign first, and those without a number last."""

        def size(row: dict[str, Any]) -> float:
            return -1.0 if math.isnan(row["change"]) else abs(row["change"])

        return sorted(self.rows, key=size, reverse=True)


def sweep_row(path: str, layer: int, head: int, part: str, position: int | None) -> dict[str, Any]:
    """The row of a site, without its numbers."""
    return {"path": path, "layer": layer, "head": head, "part": part, "position": position}


def _ranks(values: Any) -> Any:
    """The rank of each value; equal values have the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]


def _correlation(a: Any, b: Any) -> float:
    """Pearson's r; NaN if one of them is constant."""
    a = a - a.mean()
    b = b - b.mean()
    size = math.sqrt(float((a * a).sum()) * float((b * b).sum()))
    if size == 0 or not math.isfinite(size):
        return math.nan
    return float((a * b).sum()) / size
