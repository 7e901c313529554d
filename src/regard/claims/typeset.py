"""Statements for a page: formulas as MathML in pieces that may stand below each other, indices in running text."""

from __future__ import annotations

import re
from html import escape

from latex2mathml.converter import convert

__all__ = ["formula", "text", "title"]

GREEK = "α-ωΑ-Ω"
# A letter that stands alone, or the end of a product such as tμ: so names of functions keep their underscores.
INDEX = re.compile(
    rf"((?<![A-Za-z])[A-Za-z]|[{GREEK}])_(\{{[^{{}}]*\}}|\([^()]*\)|[A-Za-z0-9]+|[{GREEK}])|([A-Za-z]+)_([{GREEK}])"
)
POWER = re.compile(rf"\^(\{{[^{{}}]*\}}|\([^()]*\)|[−-]?(?:\d+(?:\.\d+)?|[½⅓¼]|√?[A-Za-z{GREEK}]))")
SPECIAL = {"rnn": "RNN", "vit": "ViT", "8x512": "8 × 512", "1x1": "1 × 1"}
NORM = '<mo stretchy="false">&#x02016;</mo>'  # both bars of a norm as high as the letters: an index hides one's height
ARROWS = (r"\Rightarrow", r"\Leftrightarrow")


def text(words: str) -> str:
    """Running text as HTML: ``μ_a`` with an index, ``d^−½`` with a power."""

    def index(found: re.Match[str]) -> str:
        return f"{found[1] or found[3]}<sub>{_bare(found[2] or found[4])}</sub>"

    return POWER.sub(lambda found: f"<sup>{_bare(found[1])}</sup>", INDEX.sub(index, escape(words)))


def _bare(part: str) -> str:
    return part[1:-1] if part[0] in "{(" else part


def title(name: str) -> str:
    """A claim's id as words."""
    words = " ".join(SPECIAL.get(word, word) for word in name.split("-"))
    return words[0].upper() + words[1:]


def formula(latex: str) -> str:
    """LaTeX as MathML, one element for each part between wide spaces, so that a narrow page can break there.

    ``\\allowbreak`` marks a place to break where no space is wanted.
    """
    shown = []
    for part, close in parts(latex):
        math = convert(part, display="block").replace('display="block"', 'display="inline" displaystyle="true"', 1)
        math = math.replace("<mo>&#x02016;</mo>", NORM)
        shown.append(f'<span class="part{" close" * close}">{math}</span>')
    return "".join(shown)


def parts(latex: str) -> list[tuple[str, bool]]:
    """What stands between ``\\quad``, ``\\qquad`` and ``\\allowbreak`` outside of braces, and whether after the last.

    An arrow stays with what it leads to.
    """
    found, depth = [("", False)], 0
    for piece in re.split(r"(\\q?quad(?![A-Za-z])|\\allowbreak|\\[{}]|[{}])", latex):
        if depth == 0 and piece in (r"\quad", r"\qquad", r"\allowbreak") and found[-1][0].strip() not in ARROWS:
            found.append(("", piece == r"\allowbreak"))
            continue
        depth += (piece == "{") - (piece == "}")
        found[-1] = (found[-1][0] + piece, found[-1][1])
    return [(part.strip(), close) for part, close in found if part.strip()]
