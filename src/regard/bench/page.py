"""Figures as a page of the documents: docs/benchmarks.md is written here, never by hand."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from regard.bench.race import OURS, Measured
from regard.bench.results import Results

__all__ = ["page"]

HEADS = {
    "operator": """## The operator

`regard.attention` on tensors `B×H×n×d` of float32 unless said otherwise. SDPA is torch's own
`scaled_dot_product_attention`, given a prebuilt mask or bias where it has no other way; building that is not
counted, nor is compiling FlexAttention.""",
    "watching": """## Watching

Every head's entropy, distance, peak and the other row values, and a 64 × 64 map; against storing the weights and taking
the entropy (and, for one layer, the map) from them, as is done with `output_attentions=True`. "Not watched" is the same
call without observing.""",
    "models": """## Models

Models of this library against `transformers` (with SDPA) on the same weights, drawn at random in the sizes of
MiniLM and SmolLM2-135M. Tokens that are written in bfloat16 are not compared: rounding decides between near ties.""",
}


def page(results: Results) -> str:
    """The page as Markdown.

    >>> print(page(Results({"CPU": "a CPU", "threads": 2}, "2026-01-31")).splitlines()[0])
    # Benchmarks
    """
    parts = [_head(results)]
    for group, head in HEADS.items():
        if rows := [one for one in results if one.group == group]:
            parts += [head, _table(rows)]
            if any(one.bytes for one in rows):
                parts += ["What the tensors of these calls take at most, above the inputs:", _sizes(rows)]
    return "\n\n".join(parts) + "\n"


def _head(results: Results) -> str:
    listed = ", ".join(f"{name} {value}" for name, value in results.conditions.items() if value != "not installed")
    absent = [name for name, value in results.conditions.items() if value == "not installed"]
    missing = f" Not installed, so not raced: {', '.join(absent)}." if absent else ""
    noise = "Machines differ and cores are shared: compare ratios of one run, never times of two."
    measured = "\n".join(textwrap.wrap(f"{results.date}: {listed}.{missing} {noise}", 120, break_on_hyphens=False))
    return f"""# Benchmarks

Times of this library beside those of what people use, as `regard bench --page` writes them; `make bench` does it
for these documents, where `docs/benchmarks.json` has every figure.
All calls of a line get the same inputs and are compared before they are timed, then run in turns; the best of at least
three rounds counts. **A ratio is the other's time over ours: above 1, ours is faster.** Your machine:
`regard bench`, or parts of it: `regard bench causal decoding`.

{measured}

[log.md](log.md) has older figures, longer runs and what was tried."""


def _table(rows: Iterable[Measured]) -> str:
    rows = list(rows)
    others = list(dict.fromkeys(name for one in rows for name in one.ratios))
    lines = [f"| case | ours, ms | {' | '.join(others)} | spread |", "|---|---:|" + "---:|" * (len(others) + 1)]
    for one in rows:
        ratios = [f"{one.ratios[name]:.2f} ×" if name in one.ratios else "" for name in others]
        lines.append(f"| {one.name} | {milliseconds(one.best[OURS])} | {' | '.join(ratios)} | {one.spread:.0%} |")
    return "\n".join([*lines, "", "Spread: how far the median of our rounds lies above their best."])


def _sizes(rows: Iterable[Measured]) -> str:
    rows = [one for one in rows if one.bytes]
    names = list(dict.fromkeys(name for one in rows for name in one.bytes))
    lines = [f"| case | {' | '.join(names)} |", "|---|" + "---:|" * len(names)]
    for one in rows:
        sizes = [f"{one.bytes[name] / 1e6:,.0f} MB" if name in one.bytes else "" for name in names]
        lines.append(f"| {one.name} | {' | '.join(sizes)} |")
    return "\n".join(lines)


def milliseconds(t: float) -> str:
    """Three digits, or whole milliseconds.

    >>> milliseconds(1234.5), milliseconds(98.76), milliseconds(0.01234)
    ('1,234', '98.8', '0.012')
    """
    return f"{t:,.0f}" if t >= 1000 else f"{t:.1f}" if t >= 10 else f"{t:.2f}" if t >= 1 else f"{t:.3f}"
