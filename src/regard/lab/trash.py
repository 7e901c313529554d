"""The trash of a lab: recordings and runs that were closed, so that closing can be undone for a while.

Each closed item is the folder ``trash/ID`` in the lab's state folder, with ``trash/ID.json``, which says what it is.
What is older than a day is removed when a lab starts; beyond ``MAX_ITEMS`` the oldest are removed at once.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from regard._config_json import LARGEST_JSON
from regard._files import fsync_folder, read_regular, write_text
from regard.lab.endpoint import NotFound

MAX_ITEMS = 8
MAX_SECONDS = 24 * 3600.0


class Trash:
    """The closed items of a lab.

    - ``state``: the lab's state folder.
    - ``id_patterns``: kind → the form of the ids of items that the lab created. Other files are never touched.
    """

    def __init__(self, state: Path, id_patterns: Mapping[str, re.Pattern[str]]) -> None:
        self.state = state
        self.folder = state / "trash"
        self.id_patterns = id_patterns
        self.folder.mkdir(exist_ok=True)
        self._return_undescribed()
        self._remove_old(MAX_SECONDS)

    def put(self, entry: Mapping[str, Any], folder: Path) -> bool:
        """Move the folder of a closed item into the trash; return False if it has no folder.

        - ``entry``: its ``kind``, ``id``, ``title`` and ``about``, as in ``lab.json``.

        Raises OSError if the folder cannot be moved, for example because the disk is full. It then stays where it is.
        """
        if not folder.is_dir():  # nothing was saved yet
            return False
        target = self.folder / str(entry["id"])
        file = target.with_suffix(".json")
        # The description comes first: whenever the process is killed, a folder in the trash has its description.
        write_text(json.dumps(entry, ensure_ascii=False), file)
        try:
            folder.rename(target)
        except OSError as error:
            file.unlink(missing_ok=True)
            raise OSError(f"{entry['id']} cannot be moved to the trash: {error.strerror}; it stays open") from None
        self._fsync(folder.parent)
        for old in self._entries()[:-MAX_ITEMS]:
            self._remove(old)
        return True

    def holds(self, item_id: str) -> bool:
        """Return whether a closed item can be restored."""
        is_described = self.folder / f"{item_id}.json" in self._entries()
        return is_described and (self.folder / item_id).is_dir()

    def restore(self, item_id: str) -> dict[str, Any]:
        """Move an item back to its place and return its entry. Raises NotFound."""
        file = self.folder / f"{item_id}.json"
        if not self.holds(item_id):
            raise NotFound(f"{item_id!r} cannot be brought back: it was not closed here, or too long ago")
        try:
            entry: dict[str, Any] = json.loads(read_regular(file, LARGEST_JSON))
            place = self.state / f"{entry['kind']}s" / item_id
            if entry["id"] != item_id or not self.id_patterns[entry["kind"]].fullmatch(item_id):
                raise ValueError(item_id)
            file.with_suffix("").rename(place)
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            raise NotFound(f"{item_id!r} cannot be brought back: its files are damaged") from None
        self._fsync(place.parent)
        file.unlink(missing_ok=True)
        return entry

    def _entries(self) -> list[Path]:
        """Return the files that describe items, in the order in which the items were closed."""
        entries = []
        for file in self.folder.glob("*.json"):
            if any(pattern.fullmatch(file.stem) for pattern in self.id_patterns.values()):
                entries.append(file)
        return sorted(entries, key=lambda file: file.stat().st_mtime_ns)

    def _return_undescribed(self) -> None:
        """Move folders without a description back to their place; the lab finds them there by their own files."""
        for kind, pattern in self.id_patterns.items():
            for folder in self.folder.iterdir():
                place = self.state / f"{kind}s" / folder.name
                is_own = pattern.fullmatch(folder.name) is not None and folder.is_dir()
                if is_own and not folder.with_suffix(".json").exists() and not place.exists():
                    folder.rename(place)

    def _fsync(self, other: Path) -> None:
        """Wait until a move between the trash and another folder is on the disk."""
        for folder in (self.folder, other):
            # Some file systems cannot sync a folder, and the move itself has succeeded.
            with suppress(OSError):
                fsync_folder(folder)

    def _remove_old(self, seconds: float) -> None:
        for file in self._entries():
            if time.time() - file.stat().st_mtime > seconds:
                self._remove(file)

    def _remove(self, file: Path) -> None:
        folder = file.with_suffix("")
        shutil.rmtree(folder, ignore_errors=True)
        # What could not be removed keeps its description, and is removed later.
        if not folder.exists():
            file.unlink(missing_ok=True)
