"""The page docs/models-supported.md: one row per architecture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from regard.zoo._inputs import TOKENS
from regard.zoo._results import Result

# In the order of the table.
MEANINGS = {
    "exact": "all modules are recorded, and everything agrees with eager attention",
    "no attention": "the model computes no attention",
    "other attention": "no softmax over keys: linear, additive or hashed; `regard.watch` warns that it records nothing",
    "partly": "some places are not recorded; `regard.watch` warns and names them",
    "refused": "regard raises an error that says why",
    "differs": "an output or an observable differs from eager attention",
    "error": "the check ended with an error",
    "not built": "the model could not be built or run here, without regard",
}

TEXT = """# Supported models

`make zoo` wrote this page. It builds every architecture of `transformers` with a tiny random configuration, runs it
once on eager attention and once within `regard.watch`, and compares the outputs, and entropy, peak, distance, sink,
key mass and map of every head with plain float64 formulas on the eager weights. Models that take texts with a mask are
checked with a padded batch, too. Texts have {tokens} tokens: BigBird, Nyströmformer, LongT5 and others compute another
attention for long texts, which this page does not cover.

With {versions}: **{exact} of {with_attention}** architectures that have attention are exact.

| result | architectures | meaning |
|---|---|---|
{outcomes}

In the column *how*, `attention` means that regard computed the attention; `weights` that the model computed the
weights itself, and regard measured them. *Layers* is the number of modules that were recorded.

| architecture | class | result | how | layers | batches | why not, or note |
|---|---|---|---|---|---|---|
{rows}
"""


def results_page(results: Iterable[Result]) -> str:
    """All results as a page in Markdown.

    >>> page = results_page([Result("gpt2", "GPT2Model", "exact", versions={"torch": "2.13.0"})])
    >>> "**1 of 1**" in page, "`gpt2`" in page
    (True, True)
    """
    results = sorted(results, key=lambda result: result.name.lower())
    counts = Counter(result.outcome for result in results)
    outcomes = []
    for outcome, meaning in MEANINGS.items():
        if counts[outcome]:
            outcomes.append(f"| {outcome} | {counts[outcome]} | {meaning} |")
    versions: dict[str, str] = {}
    for result in results:
        versions |= result.versions
    return TEXT.format(
        tokens=TOKENS,
        versions=", ".join(f"{name} {version}" for name, version in versions.items()),
        exact=counts["exact"],
        with_attention=len(results) - counts["no attention"] - counts["not built"],
        outcomes="\n".join(outcomes),
        rows="\n".join(map(_row, results)),
    )


def _row(result: Result) -> str:
    cells = [
        f"`{result.name}`",
        f"`{result.class_name}`",
        result.outcome,
        " and ".join(result.how),
        str(result.layers or ""),
        ", ".join(result.batches),
        _escaped(result.reason),
    ]
    # Empty cells as Markdown formatters write them.
    return f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |")


def _escaped(text: str) -> str:
    """Text that Markdown shows as it is."""
    if not text:
        return ""
    # A bar would begin another cell, a backquote would end the code.
    plain = text.replace("`", "'").replace("|", "/")
    return f"`{plain}`"
