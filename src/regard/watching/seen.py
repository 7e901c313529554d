"""What was seen of a model: observations by module path, in the order of the calls."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from regard.files import renamed
from regard.observables import ROW_VALUES, Observation
from regard.watching import page, recording, table
from regard.watching.words import check_words, is_cross, one_source

__all__ = ["Seen", "open_recording"]


class Seen(Mapping[str, Observation]):
    """Observations by module path: ``seen["encoder.layer.3.attention"]``; ``calls`` has each call apart.

    Where a module was called several times, ``seen[path]`` is one observation of all calls: merged along the batch
    where their sizes agree, appended along the queries where each call reads on from the one before (generation with
    a cache: row values, ``n`` and ``m`` then cover the whole text; maps of single steps mean nothing and are left
    out). Calls that do neither merge what can be merged: see ``Observation.merge``.

    >>> model = regard.nn.Decoder(6, heads=3, layers=2, vocab=11).eval()
    >>> with regard.watch(model) as seen:
    ...     logits = model(torch.tensor([[3, 1, 4, 1, 5]]))
    >>> seen, list(seen)
    (Seen(2 places, 2 calls), ['blocks.0.attention', 'blocks.1.attention'])
    >>> seen["blocks.1.attention"].mean("visible"), seen[1] is seen["blocks.1.attention"]  # a path, or its number
    (tensor([3., 3., 3.], dtype=torch.float64), True)
    """

    def __init__(self, calls: dict[str, list[Observation]] | None = None, **about: Any) -> None:
        self.calls: dict[str, list[Observation]] = {} if calls is None else calls
        self.about: dict[str, Any] = about  # what the recording is of: model, tokens
        self.on_add: Callable[[], Any] | None = None  # called at each addition: for a progress bar

    def save(self, folder: str | os.PathLike[str], *, tokens: Sequence[str] | None = None, **about: Any) -> None:
        """Write a folder that ``regard.watching.open`` reads back; see ``recording``.

        ``tokens`` (the words of the input, which are then in the file, readable by all who read it) and anything else
        that is plain data become part of what it says about itself.

        >>> from tempfile import TemporaryDirectory
        >>> model = regard.models.load(regard.models.bundled())
        >>> seen = regard.watching.look(model, "a b c a b c")
        >>> with TemporaryDirectory() as folder:
        ...     seen.save(f"{folder}/recording", note="two times a b c")
        ...     again = regard.watching.open(f"{folder}/recording")
        >>> again, again.about["note"]
        (Seen(3 places, 3 calls), 'two times a b c')
        """
        said = self.about | about | ({} if tokens is None else {"tokens": [str(token) for token in tokens]})
        check_words(said, [x.n for calls in self.calls.values() for x in calls])
        recording.write(folder, self.calls, said)

    def add(self, path: str, observation: Observation) -> None:
        """One more call of a module."""
        self.calls.setdefault(path, []).append(observation)
        if self.on_add is not None:
            self.on_add()

    def heads(self) -> list[dict[str, Any]]:
        """One row a head: path, head, counted rows and the means that ``watching.table`` names; plain numbers.

        >>> seen = regard.watching.look(regard.models.load(regard.models.bundled()), "a b c a b c")
        >>> most = max(seen.heads(), key=lambda row: row["local"])  # the head that looks nearest
        >>> most["path"], most["head"], round(most["local"], 1)
        ('decoder.blocks.1.attention', 0, 1.0)
        """
        return table.rows(self.each())

    def table(self, sort: str | None = None, most: int | None = None) -> Table:
        """The heads as a table for the terminal (``rich.print(seen.table("sink", 10))``).

        >>> seen = regard.watching.look(regard.models.load(regard.models.bundled()), "a b c a b c")
        >>> seen.table("local", 3).row_count
        3
        """
        return table.as_table(self.heads(), sort, most)

    def to_csv(self, file: str | os.PathLike[str] | None = None) -> str:
        """The heads as comma-separated text, written to ``file`` where one is given.

        >>> seen = regard.watching.look(regard.models.load(regard.models.bundled()), "a b c a b c")
        >>> seen.to_csv().splitlines()[0]
        'path,head,rows,entropy,spread,peak,distance,offset,sink,local'
        """
        return written(table.as_csv(self.heads()), file)

    def to_json(self, file: str | os.PathLike[str] | None = None) -> str:
        """The heads as JSON, written to ``file`` where one is given."""
        return written(table.as_json(self.heads()), file)

    def to_html(self, file: str | os.PathLike[str] | None = None, *, batch: int = 0) -> str:
        """One offline page of all heads, written to ``file`` where one is given; see ``watching.page``.

        It shows what was observed: maps need ``Observe(map=64)``, the view on the text ``top=8``, which is what
        ``watching.LOOK`` asks for. Words come from ``about["tokens"]``.

        >>> seen = regard.watching.look(regard.models.load(regard.models.bundled()), "a b c a b c")
        >>> seen.to_html().startswith("<!doctype html>")
        True
        """
        return written(page.html(self, batch=batch), file)

    def _repr_html_(self) -> str:
        """In a notebook a recording shows itself: the page, in a frame of its own."""
        if not self.calls:
            return escape(repr(self))
        page, style = escape(self.to_html()), "width: 100%; height: 720px; border: 0"
        return f'<iframe sandbox="allow-scripts" srcdoc="{page}" style="{style}"></iframe>'

    def to_pandas(self) -> Any:
        """The heads as a ``pandas.DataFrame``; pandas must be installed."""
        try:
            pandas = importlib.import_module("pandas")
        except ImportError:
            raise ImportError("to_pandas needs pandas, which is not installed; to_csv needs nothing") from None
        return pandas.DataFrame(self.heads())

    def path(self, place: str | int) -> str:
        """The path of a place that was seen, which may be given by its number in the order of the calls.

        >>> Seen({"blocks.0.attention": [], "blocks.1.attention": []}).path(1)
        'blocks.1.attention'
        """
        path = dict(enumerate(self.calls)).get(place, str(place)) if isinstance(place, int) else place
        if path not in self.calls:
            known = ", ".join(list(self.calls)[:6]) + (" …" if len(self.calls) > 6 else "")
            raise KeyError(f"nothing was seen at {path!r}; there are {len(self.calls)} places: {known}")
        return path

    def __getitem__(self, place: str | int) -> Observation:
        """What was seen at a place: its path, or its number in the order of the calls."""
        path = self.path(place)
        calls = self.calls[path]
        if len(calls) == 1:
            return calls[0]
        return _joined(calls, is_cross(self.about, path), one_source(self.about, path))

    def __contains__(self, path: object) -> bool:
        return path in self.calls

    def each(self) -> dict[str, Observation]:
        """The places and what was seen there; calls that cannot be one (other heads) stand alone, as ``path (1)`` …"""
        found: dict[str, Observation] = {}
        for path, calls in self.calls.items():
            if len({call.heads for call in calls}) == 1:
                found[path] = self[path]
            else:
                found |= {f"{path} ({i})": call for i, call in enumerate(calls, 1)}
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.calls)

    def __len__(self) -> int:
        return len(self.calls)

    def __repr__(self) -> str:
        total = sum(map(len, self.calls.values()))
        return f"Seen({len(self.calls)} places, {total} calls)"


def written(text: str, file: str | os.PathLike[str] | None) -> str:
    if file is not None:
        with renamed(Path(file)) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return text


def _joined(calls: list[Observation], cross: bool, one_source: bool) -> Observation:
    first = calls[0]
    if cross:
        steps = one_source and all(call.n == 1 and call.m == first.m and _alike(first, call) for call in calls)
        return _appended(calls, whole=True) if steps else first.merge(*calls[1:])
    # A text begins with its first tokens: as many queries as keys.
    if first.n in (1, first.m) and all(_follows(a, b) for a, b in pairwise(calls)):
        return _appended(calls, whole=all(b.m == (a.m or 0) + (b.n or 0) for a, b in pairwise(calls)))
    return first.merge(*calls[1:])


def _follows(a: Observation, b: Observation) -> bool:
    """Whether b read on where a ended: its keys are a's and its own, or a token pushed an old key out of a window."""
    if a.n is None or a.m is None or b.n is None or b.m is None or a.entropy is None or b.entropy is None:
        return False
    return _alike(a, b) and (b.m == a.m + b.n or _pushes_out(a, b))


def _alike(a: Observation, b: Observation) -> bool:
    return a.entropy is not None and b.entropy is not None and a.entropy.shape[:2] == b.entropy.shape[:2]


def _pushes_out(a: Observation, b: Observation) -> bool:
    return b.n == 1 and b.m is not None and a.m is not None and 1 < b.m <= a.m


def _appended(calls: list[Observation], whole: bool) -> Observation:
    """One text read in pieces: row values side by side, per-head means by counted rows.

    Where it is not ``whole``, a window let old keys go, and a key's number says nothing any more: what names keys is
    left out.
    """
    first, last = calls[0], calls[-1]

    def side_by_side(name: str, dim: int = 2) -> Tensor | None:
        values = [getattr(call, name) for call in calls]
        return None if any(x is None for x in values) else torch.cat(values, dim=dim)

    m = last.m
    assert m is not None
    rows = torch.stack([call.rows for call in calls]).sum(0)
    key_mass = None
    if whole and all(call.key_mass is not None for call in calls):
        sums = [torch.nn.functional.pad(c.key_mass * c.rows[:, None], (0, m - c.m)) for c in calls]  # type: ignore[operator]
        key_mass = torch.stack(sums).sum(0) / rows.clamp(min=1)[:, None]
    merged = first.merge(*calls[1:])
    joined: dict[str, Any] = {name: side_by_side(name) for name in (*ROW_VALUES, "counted", "top", "top_at")}
    if not whole:
        joined |= {"peak_at": None, "top_at": None}
    return replace(
        merged,
        n=sum(call.n or 0 for call in calls),
        m=m if whole else None,
        **joined,
        key_mass=key_mass,
        value_norm=last.value_norm if whole else None,
        map=None,
        map_rows=None,
        kept=(),
    )


def open_recording(folder: str | os.PathLike[str]) -> Seen:
    """A recording that ``Seen.save`` wrote; numbers are mapped from the file and read when they are looked at.

    As ``regard.watching.open``:

    >>> from tempfile import TemporaryDirectory
    >>> seen = regard.watching.look(regard.models.load(regard.models.bundled()), "a b c a b c")
    >>> with TemporaryDirectory() as folder:
    ...     seen.save(f"{folder}/recording")
    ...     again = regard.watching.open(f"{folder}/recording")
    >>> torch.equal(again[0].entropy, seen[0].entropy), again.about["tokens"][1:]
    (True, ['a', ' b', ' c', ' a', ' b', ' c'])
    """
    seen = Seen()
    seen.calls, seen.about = recording.read(folder)
    return seen
