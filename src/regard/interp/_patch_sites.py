"""``Site``: a part of a head at some positions, where patching replaces values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from regard._checks import check_integer, describe_value
from regard._errors import RegardError, RegardTypeError
from regard.interp._register_observers import list_paths

# Part → what its positions are.
PARTS = {"output": "rows", "pattern": "rows", "q": "rows", "k": "keys", "v": "keys"}
# The parts that are not known where a model computes its attention weights itself.
NEEDS_QUERIES_AND_KEYS = ("q", "k")

Positions = int | Sequence[int] | Tensor | None


@dataclass(frozen=True)
class Site:
    """A part of a head at some positions: where ``patch`` replaces values.

    - ``layer``: a module path, or the number of the layer in the order of the attention calls.
    - ``head``: the number of the query head; None means all heads of the layer.
    - ``part``: ``"output"`` (before W_O), ``"pattern"`` (the weights), ``"q"``, ``"k"`` or ``"v"``. k and v are those
      that the chosen query head reads: other query heads of the same key head do not see the change.
    - ``positions``: query rows for output, pattern and q; keys for k and v. Negative ones count from the end. None
      means all.

    >>> Site(1, 0, "v", positions=[3, -1])
    Site(layer=1, head=0, part='v', positions=(3, -1))
    """

    layer: int | str
    head: int | None
    part: str = "output"
    positions: Positions = None

    def __post_init__(self) -> None:
        if not isinstance(self.layer, str):
            check_integer("layer", self.layer, least=0)
        if self.head is not None:
            check_integer("head", self.head, least=0)
        if self.part not in PARTS:
            raise RegardError(f"part must be one of {', '.join(PARTS)}, got {self.part!r}")
        if self.positions is not None:
            # A tuple, so that a site can be compared and hashed.
            object.__setattr__(self, "positions", _as_tuple(self.positions))

    @property
    def indices(self) -> tuple[int, ...] | None:
        """The positions as a tuple; None means all."""
        return self.positions  # type: ignore[return-value]


SiteLike = Site | tuple[Any, ...]


def as_site(value: Any) -> Site:
    """A site, or a tuple with the arguments of one, such as ``(layer, head)``."""
    if isinstance(value, Site):
        return value
    if isinstance(value, tuple | list) and 2 <= len(value) <= 4:
        return Site(*value)
    raise RegardTypeError(
        f"a site must be a Site or a tuple such as (3, 0) or (3, 0, 'v'), got {describe_value(value)}"
    )


def as_sites(values: Any) -> list[Site]:
    """A list of sites from one site or several."""
    if isinstance(values, Site):
        return [values]
    if not isinstance(values, Iterable) or isinstance(values, str | Tensor):
        raise RegardTypeError(f"sites must be a list of Site, got {describe_value(values)}")
    values = list(values)
    # One tuple without a list around it: its first entry is a layer.
    if values and isinstance(values[0], int | str):
        return [as_site(tuple(values))]
    return [as_site(value) for value in values]


def resolve_positions(site: Site, path: str, length: int, where: str) -> list[int] | None:
    """The positions of a site as indices below ``length``; None means all.

    - ``where``: "this run" or "the source", for the error message.
    """
    if site.indices is None:
        return None
    resolved = []
    for position in site.indices:
        if not -length <= position < length:
            raise RegardError(
                f"position {position} of {site.part!r} at {path!r} must be between {-length} and {length - 1}: "
                f"{where} has {length} {PARTS[site.part]} there"
            )
        resolved.append(position % length)
    return resolved


class SiteSelection:
    """Sites by layer: what is patched or captured in each attention call."""

    def __init__(self, sites: Iterable[Site]) -> None:
        self.sites = list(sites)

    def at(self, path: str, number: int) -> list[Site]:
        """The sites of a layer, which may be named by its path or by its number."""
        return [site for site in self.sites if site.layer in (path, number)]

    def check(self, reached: Mapping[str, int]) -> None:
        """Raise if a layer of a site is not among the ``reached`` paths."""
        known = {*reached, *reached.values()}
        for site in self.sites:
            if reached and site.layer not in known:
                raise RegardError(
                    f"a site names layer {site.layer!r}, but attention was computed at {len(reached)} layers: "
                    f"{list_paths(reached)}"
                )


def heads_of(site: Site, path: str, H: int) -> list[int]:
    """The heads of a site in a layer of H heads."""
    if site.head is None:
        return list(range(H))
    if site.head >= H:
        raise RegardError(f"a site names head {site.head} of {path!r}, which has heads 0 … {H - 1}")
    return [site.head]


def _as_tuple(positions: Positions) -> tuple[int, ...]:
    if isinstance(positions, Tensor):
        positions = positions.reshape(-1).tolist()
    if isinstance(positions, str) or not isinstance(positions, Iterable):
        positions = [positions]  # type: ignore[list-item]
    indices = tuple(check_integer("positions", position, least=None) for position in positions)
    if not indices:
        raise RegardError("positions is empty; give at least one, or None for all")
    if len(set(indices)) < len(indices):
        raise RegardError(f"positions must differ from each other, got {list(indices)}")
    return indices
