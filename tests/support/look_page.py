"""Helpers of the Look page's browser tests: the page's state, its address, and the exact weights behind it."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qs, urlsplit

from playwright.sync_api import expect

from regard.lab.workspace import Workspace

LEFT, TOP, RIGHT = 70, 50, 30  # pixels of a map's axes, and beside its last label
LOADED_MAP = 'figure[data-map=B] canvas.map[data-loading="0"]'


def wait_until_ready(tab: Any) -> Any:
    """Wait until the selected head is shown, down to the computation of its locked weight. Returns the map."""
    tab.locator(LOADED_MAP).wait_for()
    tab.locator(".chain li").first.wait_for()
    expect(tab).to_have_url(re.compile("(?=.*recording=)(?=.*place=)(?=.*head=)"))
    return tab.locator("figure[data-map=B] canvas.map")


def address_fields(tab: Any) -> dict[str, str]:
    """Return the query fields of the page's address."""
    return {name: values[0] for name, values in parse_qs(urlsplit(tab.url).query).items()}


def expect_address(tab: Any, **expected: str) -> None:
    """Wait until the address has these fields; an empty value means that the field is absent."""
    for name, value in expected.items():
        pattern = rf"[?&]{name}={re.escape(value)}(&|$)" if value else rf"^(?!.*[?&]{name}=)"
        expect(tab).to_have_url(re.compile(pattern))


def exact_weight(workspace: Workspace, tab: Any, row: int, key: int) -> float:
    """Return a weight of the head in the page's address, from the recording itself."""
    fields = address_fields(tab)
    recording = workspace.recording(fields["recording"])
    observation = recording[list(recording)[int(fields["place"])]]
    return float(observation.weights(int(fields["head"]), row, key))


def cell_position(canvas: Any, row: int, key: int, n: int, m: int) -> tuple[float, float]:
    """Return where a cell of the whole map is on the screen."""
    box = canvas.bounding_box()
    width = box["width"] - LEFT - RIGHT
    height = box["height"] - TOP
    size = min(width / m, height / n)
    x = box["x"] + LEFT + width / 2 + (key + 0.5 - m / 2) * size
    return x, box["y"] + TOP + height / 2 + (row + 0.5 - n / 2) * size


def shown_weight(tab: Any, row: int, key: int) -> float:
    """Return the weight that the page shows for a cell, once it shows it exactly."""
    line = tab.locator(f'.readout[data-row="{row}"][data-key="{key}"][data-level="0"]')
    line.wait_for()
    return float(line.get_attribute("data-value"))
