"""Tokens in the offline page and in figures: the same labels everywhere, and every character can be seen."""

from __future__ import annotations

from typing import Any

import pytest

from regard import models
from regard.interp import figures, look

TEXT = "a é\n\tb 猫"


@pytest.fixture(scope="module")
def recording() -> Any:
    return look(models.load(models.bundled()), TEXT)


def test_the_page_reads_as_the_text(recording: Any, show_page: Any) -> None:
    labels = recording.metadata["tokens"]
    tab = show_page(recording.to_html())
    tokens = tab.locator("#texts .token")
    assert tokens.count() == len(labels)
    # A character in several tokens is written once, and its parts are numbered.
    first = labels.index("é·1/2")
    assert tokens.nth(first).inner_text() == "é1/2" and tokens.nth(first + 1).inner_text() == "2/2"
    assert tokens.nth(first + 1).get_attribute("aria-label") == f"é·2/2, {first + 1}"
    # A number has the colour of its token, which can be read on every shade.
    colours = tokens.nth(first).evaluate("x => [x, x.querySelector('.part')].map((y) => getComputedStyle(y).color)")
    assert colours[0] == colours[1]
    # Special tokens stand apart; line breaks and tabs are visible.
    assert tab.locator(".token.special").all_inner_texts() == ["<|endoftext|>"]
    assert {"↵", "⇥"} <= set(tokens.all_inner_texts())
    tokens.nth(first + 1).click()
    assert "é·2/2" in tab.locator("#strongest-of").inner_text()
    # Without numbers and special tokens, the page reads as the text.
    shown = tab.locator("#texts .text").evaluate(
        "box => { for (const part of box.querySelectorAll('.part, .special')) part.remove(); return box.textContent }"
    )
    assert shown.replace("␣", " ") == TEXT.replace("\n", "↵").replace("\t", "⇥")


def test_figures_have_the_same_labels(recording: Any) -> None:
    axes = figures.head_map(recording, 0, 0).axes[0]
    labels = [label.get_text().strip() for label in axes.get_yticklabels()]
    assert labels[0] == "<|endoftext|>" and "é·1/2" in labels and "↵" in labels
    assert not any(character in "".join(labels) for character in "Ġ\n\t")
