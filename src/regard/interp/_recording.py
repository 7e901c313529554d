"""``Recording``: the observations of a model by module path, in the order of the calls."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from rich.table import Table

from regard._files import write_text
from regard._observables import Observation
from regard.interp import _group_table, _head_means, _head_table, _html_page, _recording_files
from regard.interp._head_types import HEAD_TYPES
from regard.interp._join_calls import joined_observation, joined_size
from regard.interp._page_types import add_types, page_types
from regard.interp._register_observers import list_paths
from regard.interp._token_labels import check_token_labels, is_cross_attention, shares_source

if TYPE_CHECKING:
    from regard.interp._atlas_table import Atlas

FRAME_STYLE = "width: 100%; height: 720px; border: 0"


class Recording(Mapping[str, Observation]):
    """Observations by module path: ``recording["encoder.layer.3.attention"]``. ``regard.watch`` makes it.

    - ``calls``: the observations of each path, one per call.
    - ``metadata``: what the recording is of, for example ``"model"`` and ``"tokens"``; plain data.

    If a module was called several times, ``recording[path]`` joins the calls. If each call continues the text of the
    call before (``model.generate`` with a cache), they are lined up by position, and the result is an observation of
    the whole text: row i of the map is query i, with the weights of its own step. What cannot be lined up is None: the
    map of a prompt with more tokens than bins (unless q and k were kept), and all that names keys if a sliding cache
    has dropped some. Other calls of equal sizes are merged along the batch. Calls of unequal sizes keep what
    ``Observation.merge`` can merge.

    >>> model = regard.nn.Decoder(6, heads=3, layers=2, vocab=11).eval()
    >>> with regard.watch(model) as recording:
    ...     logits = model(torch.tensor([[3, 1, 4, 1, 5]]))
    >>> recording, list(recording)
    (Recording(2 layers, 2 calls), ['blocks.0.attention', 'blocks.1.attention'])
    >>> recording["blocks.1.attention"].mean("visible")
    tensor([3., 3., 3.], dtype=torch.float64)
    >>> recording[1] is recording["blocks.1.attention"]  # a path, or its number
    True
    """

    def __init__(self, calls: dict[str, list[Observation]] | None = None, **metadata: Any) -> None:
        self.calls: dict[str, list[Observation]] = calls if calls is not None else {}
        self.metadata: dict[str, Any] = metadata
        self.on_add: Callable[[], Any] | None = None  # called after each call, for a progress bar
        self._joined: dict[str, tuple[tuple[Observation, ...], Observation]] = {}  # by path: calls, and all as one

    def save(self, folder: str | os.PathLike[str], *, tokens: Sequence[str] | None = None, **metadata: Any) -> None:
        """Write a folder that ``regard.interp.load_recording`` reads.

        - ``folder``: a new or empty folder, or an older recording, which is replaced.
        - ``tokens``: the tokens of the input; whoever can read the folder can read them.
        - ``metadata``: plain data that is stored with the recording's own.

        >>> from tempfile import TemporaryDirectory
        >>> model = regard.models.load(regard.models.bundled())
        >>> recording = regard.interp.look(model, "a b c a b c")
        >>> with TemporaryDirectory() as folder:
        ...     recording.save(f"{folder}/recording", note="two times a b c")
        ...     loaded = regard.interp.load_recording(f"{folder}/recording")
        >>> loaded, loaded.metadata["note"]
        (Recording(3 layers, 3 calls), 'two times a b c')
        """
        metadata = self.metadata | metadata
        if tokens is not None:
            metadata["tokens"] = list(map(str, tokens))
        check_token_labels(metadata, self.sizes())
        _recording_files.write_recording(folder, self.calls, metadata)

    def add(self, path: str, observation: Observation) -> None:
        """Add one more call of a module."""
        self.calls.setdefault(path, []).append(observation)
        if self.on_add is not None:
            self.on_add()

    def heads(self) -> list[dict[str, Any]]:
        """One row per head: path, head, the number of counted rows, and means of the row values.

        Distance, offset and local are None in cross-attention, whose queries and keys are of different sequences. With
        ``Observe(groups=…)`` there is the mean weight on each group, ``"on <name>"``, and ``"elsewhere"``: on keys in
        no group and on learned sinks.

        >>> recording = regard.interp.look(regard.models.load(regard.models.bundled()), "a b c a b c")
        >>> most = max(recording.heads(), key=lambda row: row["local"])  # the head that attends to the nearest keys
        >>> most["path"], most["head"], round(most["local"], 1)
        ('decoder.blocks.1.attention', 0, 1.0)
        """
        return _head_means.head_rows(self.observations(), self.metadata)

    def table(self, sort: str | None = None, limit: int | None = None, *, groups: bool = False) -> Table:
        """The heads as a table for the terminal (``rich.print(recording.table("sink", 10))``).

        - ``sort``: the column to sort by, largest first; by default the order of the calls. If ``metadata["kinds"]``
          has the types of the heads, ``"confidence"`` sorts by the most confident type.
        - ``limit``: how many heads; all by default.
        - ``groups``: show the mean weight of each head on each group of keys (``Observe(groups=…)``) instead.

        >>> recording = regard.interp.look(regard.models.load(regard.models.bundled()), "a b c a b c")
        >>> recording.table("local", 3).row_count
        3
        """
        if groups:
            return _group_table.group_table(self.heads(), sort, limit)
        rows = add_types(self.heads(), page_types(None, self.metadata))
        return _head_table.head_table(rows, sort, limit, has_cross=self.has_cross())

    def to_csv(self, file: str | os.PathLike[str] | None = None, *, atlas: Atlas | None = None) -> str:
        """The heads as comma-separated text; also written to ``file`` if one is given.

        - ``atlas``: as in ``to_html``. If types are known, there are columns ``labels`` and ``<type> confidence``.

        >>> recording = regard.interp.look(regard.models.load(regard.models.bundled()), "a b c a b c")
        >>> recording.to_csv().splitlines()[0]
        'path,head,rows,entropy,spread,peak,distance,offset,sink,local'
        """
        types = page_types(atlas, self.metadata)
        heads = self.heads()
        columns = ["path", "head", "rows", *_head_table.HEAD_COLUMNS, *_group_table.group_columns(heads)]
        rows = add_types(heads, types)
        if types is not None:
            columns += ["labels", *(f"{name} confidence" for name in HEAD_TYPES)]
            rows = [{**row, "labels": " ".join(row["labels"] or ())} for row in rows]
        return write_text(_head_table.csv_text(columns, rows), file)

    def to_json(self, file: str | os.PathLike[str] | None = None, *, atlas: Atlas | None = None) -> str:
        """The heads as JSON, with the meaning of the columns; also written to ``file`` if one is given.

        - ``atlas``: as in ``to_html``.
        """
        types = page_types(atlas, self.metadata)
        data: dict[str, Any] = {"columns": _head_table.HEAD_COLUMNS}
        if types is not None:
            data["types from"] = types[0]
        heads = self.heads()
        columns = _group_table.group_columns(heads)
        if columns:
            data["groups"] = [name.removeprefix(_group_table.PREFIX) for name in columns[:-1]]
            data["columns"] = data["columns"] | {
                **dict.fromkeys(columns, "mean weight on the keys of this group"),
                _group_table.ELSEWHERE: _group_table.ELSEWHERE_MEANING,
            }
        data["heads"] = add_types(heads, types)
        return write_text(json.dumps(data, indent=1, ensure_ascii=False), file)

    def to_html(
        self,
        file: str | os.PathLike[str] | None = None,
        *,
        batch: int = 0,
        atlas: Atlas | None = None,
        title: str | None = None,
        head: tuple[str | int, int] | None = None,
    ) -> str:
        """One HTML page of all heads that needs no network; also written to ``file`` if one is given.

        The page shows what was observed: its maps need ``Observe(map=64)``, its view of the text needs ``top=8``;
        ``regard.interp.PAGE_OBSERVABLES`` has both. The text comes from ``metadata["tokens"]``.

        - ``batch``: the batch entry whose text is shown.
        - ``atlas``: of ``regard.interp.atlas``, for the types of the heads; by default those in ``metadata["kinds"]``.
        - ``title``: of the page; the name of the model by default.
        - ``head``: the pair (layer, head) that is shown first; by default the first head with a map.

        >>> recording = regard.interp.look(regard.models.load(regard.models.bundled()), "a b c a b c")
        >>> recording.to_html().startswith("<!doctype html>")
        True
        """
        page = _html_page.html_page(self, batch=batch, atlas=atlas, title=title, head=head)
        return write_text(page, file)

    def _repr_html_(self) -> str:
        """In a notebook a recording shows its page, in a frame of its own."""
        if not self.calls:
            return escape(repr(self))
        # The sandbox keeps the page's script away from the notebook.
        return f'<iframe sandbox="allow-scripts" srcdoc="{escape(self.to_html())}" style="{FRAME_STYLE}"></iframe>'

    def to_pandas(self) -> Any:
        """The heads as a ``pandas.DataFrame``; pandas must be installed."""
        try:
            pandas = importlib.import_module("pandas")
        except ImportError:
            raise ImportError("to_pandas needs pandas, which is not installed; to_csv needs nothing") from None
        return pandas.DataFrame(self.heads())

    def path(self, layer: str | int) -> str:
        """The module path of a layer, which may be given by its number in the order of the calls.

        >>> Recording({"blocks.0.attention": [], "blocks.1.attention": []}).path(1)
        'blocks.1.attention'
        """
        path = str(layer)
        if isinstance(layer, int) and 0 <= layer < len(self.calls):
            path = list(self.calls)[layer]
        if path not in self.calls:
            raise KeyError(f"the recording has no layer {path!r}; it has {len(self.calls)}: {list_paths(self.calls)}")
        return path

    def __getitem__(self, layer: str | int) -> Observation:
        """The observation of a layer: its path, or its number in the order of the calls."""
        path = self.path(layer)
        calls = self.calls[path]
        if len(calls) == 1:
            return calls[0]
        # Joining hundreds of steps takes time, and pages ask for the same layer again and again.
        parts, joined = self._joined.get(path, ((), None))
        if joined is None or len(parts) != len(calls) or any(a is not b for a, b in zip(parts, calls, strict=True)):
            cross = is_cross_attention(self.metadata, path)
            joined = joined_observation(calls, cross, shares_source(self.metadata, path))
            self._joined[path] = (tuple(calls), joined)
        return joined

    def __contains__(self, path: object) -> bool:
        return path in self.calls

    def has_cross(self) -> bool:
        """Whether a layer is cross-attention: its queries and keys are of different sequences.

        >>> regard.interp.look(regard.models.load(regard.models.bundled()), "a b c").has_cross()
        False
        """
        return any(is_cross_attention(self.metadata, path) for path in self.calls)

    def sizes(self) -> dict[str, tuple[int | None, int | None]]:
        """The numbers of queries and keys of each layer; None if calls of unequal sizes are merged there.

        >>> recording = regard.interp.look(regard.models.load(regard.models.bundled()), "a b c a b c")
        >>> recording.sizes()["decoder.blocks.1.attention"]
        (7, 7)
        """
        sizes = {}
        for path, calls in self.calls.items():
            cross = is_cross_attention(self.metadata, path)
            sizes[path] = joined_size(calls, cross, shares_source(self.metadata, path))
        return sizes

    def observations(self) -> dict[str, Observation]:
        """The observation of each layer; calls that observed different heads stay separate, as ``path (1)`` …"""
        observations: dict[str, Observation] = {}
        for path, calls in self.calls.items():
            if len({call.heads for call in calls}) == 1:
                observations[path] = self[path]
                continue
            # The calls observed different heads.
            for number, call in enumerate(calls, 1):
                observations[f"{path} ({number})"] = call
        return observations

    def __iter__(self) -> Iterator[str]:
        return iter(self.calls)

    def __len__(self) -> int:
        return len(self.calls)

    def __repr__(self) -> str:
        total = sum(map(len, self.calls.values()))
        return f"Recording({len(self.calls)} layers, {total} calls)"


def load_recording(folder: str | os.PathLike[str]) -> Recording:
    """Load a recording that ``Recording.save`` wrote. Its numbers are read from the file when they are needed.

    - ``folder``: the folder of the recording.

    Raises ``FileNotFoundError`` if there is no recording, ``RegardError`` if it is damaged or of another version.

    >>> from tempfile import TemporaryDirectory
    >>> recording = regard.interp.look(regard.models.load(regard.models.bundled()), "a b c a b c")
    >>> with TemporaryDirectory() as folder:
    ...     recording.save(f"{folder}/recording")
    ...     loaded = regard.interp.load_recording(f"{folder}/recording")
    >>> torch.equal(loaded[0].entropy, recording[0].entropy), loaded.metadata["tokens"][1:]
    (True, ['a', ' b', ' c', ' a', ' b', ' c'])
    """
    recording = Recording()
    recording.calls, recording.metadata = _recording_files.read_recording(folder)
    return recording
