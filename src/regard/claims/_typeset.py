"""Typesets claims as HTML: formulas as MathML that can break between lines, text with subscripts and powers."""

from __future__ import annotations

import re
from html import escape

from latex2mathml.converter import convert

GREEK = "α-ωΑ-Ω"
# A subscript follows a single letter, or a product that ends in a Greek letter, such as tμ. Function names such as
# to_convolution keep their underscores.
SUBSCRIPT = re.compile(
    rf"((?<![A-Za-z])[A-Za-z]|[{GREEK}])_(\{{[^{{}}]*\}}|\([^()]*\)|[A-Za-z0-9]+|[{GREEK}])|([A-Za-z]+)_([{GREEK}])"
)
POWER = re.compile(rf"\^(\{{[^{{}}]*\}}|\([^()]*\)|[−-]?(?:\d+(?:\.\d+)?|[½⅓¼]|√?[A-Za-z{GREEK}]))")
# Both bars of a norm get the height of the letters. Otherwise a subscript would make them unequal.
NORM_BAR = '<mo stretchy="false">&#x02016;</mo>'
ARROWS = (r"\Rightarrow", r"\Leftrightarrow")
BREAKS = (r"\quad", r"\qquad", r"\allowbreak")


def typeset_text(text: str) -> str:
    """Plain text as HTML, with subscripts as in ``μ_a`` and powers as in ``d^−½``."""

    def subscript(match: re.Match[str]) -> str:
        return f"{match[1] or match[3]}<sub>{_without_brackets(match[2] or match[4])}</sub>"

    def power(match: re.Match[str]) -> str:
        return f"<sup>{_without_brackets(match[1])}</sup>"

    return POWER.sub(power, SUBSCRIPT.sub(subscript, escape(text, quote=False)))


def _without_brackets(part: str) -> str:
    return part[1:-1] if part[0] in "{(" else part


def typeset_formula(latex: str) -> str:
    """LaTeX as MathML, one element for each part between wide spaces, so that a narrow page can break there.

    ``\\allowbreak`` marks a possible break without a space.
    """
    elements = []
    for part, follows_closely in split_formula(latex):
        mathml = convert(part, display="block").replace('display="block"', 'display="inline" displaystyle="true"', 1)
        mathml = mathml.replace("<mo>&#x02016;</mo>", NORM_BAR)
        css_class = "part close" if follows_closely else "part"
        elements.append(f'<span class="{css_class}">{mathml}</span>')
    return "".join(elements)


def split_formula(latex: str) -> list[tuple[str, bool]]:
    """The parts between ``\\quad``, ``\\qquad`` and ``\\allowbreak`` outside of braces.

    Returns each part, and whether it follows an ``\\allowbreak``. An arrow stays with the part that it leads to.
    """
    parts = []
    part = ""
    follows_closely = False
    depth = 0
    for piece in re.split(r"(\\q?quad(?![A-Za-z])|\\allowbreak|\\[{}]|[{}])", latex):
        if piece in BREAKS and depth == 0 and part.strip() not in ARROWS:
            parts.append((part.strip(), follows_closely))
            part = ""
            follows_closely = piece == r"\allowbreak"
            continue
        depth += (piece == "{") - (piece == "}")  # spaces inside of braces belong to a fraction or a root
        part += piece
    parts.append((part.strip(), follows_closely))
    return [entry for entry in parts if entry[0]]
