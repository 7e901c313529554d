"""What one lab has open: models, recordings and training runs, each under an id; and its jobs.

Requests name ids, never paths: nothing can be reached that was not opened. Recordings that the lab makes live in its own
folder, ``state``, whose ``lab.json`` lists what is open, so that a lab started again has it open again.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from regard import models
from regard.config import Config
from regard.files import renamed
from regard.lab.endpoints import Gone
from regard.lab.jobs import Jobs
from regard.models.folder import Folder
from regard.training.folder import read_run
from regard.watching import Seen
from regard.watching import open as open_recording

__all__ = ["Lab", "Opened", "default_state"]

MADE = 24  # recordings that the lab has made and keeps; older ones are removed
CACHED = 256 * 2**20  # bytes of what was computed for views and may be asked for again
T = TypeVar("T")


def default_state() -> Path:
    """``$XDG_STATE_HOME/regard/lab``, or ~/.local/state/regard/lab."""
    home = os.environ.get("XDG_STATE_HOME", "")
    base = Path(home) if home.startswith("/") else Path.home() / ".local" / "state"
    return base / "regard" / "lab"


@dataclass
class Opened:
    """One thing that is open: ``kind`` is "model", "recording" or "run"; ``made``: by this lab, and removed by it."""

    id: str
    kind: str
    folder: Path
    title: str
    made: bool = False
    about: dict[str, Any] = field(default_factory=dict)
    seen: Seen | None = None  # of a recording, once it was looked at

    def to_dict(self) -> dict[str, Any]:
        return {"id": self.id, "kind": self.kind, "title": self.title, "made": self.made, **self.about}


class Lab:
    """``state``: the lab's own folder; None keeps nothing beyond this process (a temporary one is the caller's)."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self._lock = threading.RLock()
        self._open: OrderedDict[str, Opened] = OrderedDict()
        self._cache = Cache(CACHED)
        (state / "recordings").mkdir(parents=True, exist_ok=True)
        (state / "runs").mkdir(exist_ok=True)
        self.jobs = Jobs()
        self._restore()

    # What is open

    def open(self, folder: Path) -> Opened:
        """Open a model's folder, a recording or a run; what it is shows in its files."""
        folder = folder.resolve()
        for one in self._open.values():
            if one.folder == folder:
                return one
        if (folder / "recording.json").is_file():
            seen = open_recording(folder)
            return self._add(Opened("", "recording", folder, folder.name, about=_of_recording(seen), seen=seen))
        if (folder / "run.json").is_file():
            task, _ = read_run(folder)
            run = self._add(Opened("", "run", folder, folder.name, about={"task": task}))
            if (folder / "model" / "config.json").is_file():
                self.open(folder / "model")
            return run
        if not (folder / "config.json").is_file():
            raise ValueError(f"{folder} is no model, recording or run: it has no config.json, recording.json or run.json")
        config = Folder(folder).config
        title = folder.parent.name if folder.name == "model" else folder.name
        if folder == models.bundled().resolve():
            title = "bundled model"
        return self._add(Opened("", "model", folder, title, about={"reads": _reads(config), "type": config.kind}))

    def get(self, name: str, kind: str) -> Opened:
        """What is open under an id."""
        with self._lock:
            found = self._open.get(name)
        if found is None or found.kind != kind:
            raise Gone(f"no {kind} {name!r} is open here")
        return found

    def all(self, kind: str) -> list[Opened]:
        with self._lock:
            return [one for one in self._open.values() if one.kind == kind]

    def seen(self, name: str) -> Seen:
        """A recording's observations."""
        one = self.get(name, "recording")
        with self._lock:
            if one.seen is None:
                one.seen = open_recording(one.folder)
            return one.seen

    def new_recording(self) -> tuple[str, Path]:
        """An id and a folder for a recording that a job will make."""
        name = f"r{secrets.token_hex(4)}"
        return name, self.state / "recordings" / name

    def made(self, name: str, title: str, about: dict[str, Any]) -> Opened:
        """A job has made a recording: it is open from now on, and the oldest beyond ``MADE`` is removed."""
        folder = self.state / "recordings" / name
        seen = open_recording(folder)
        one = self._add(Opened(name, "recording", folder, title, True, {**_of_recording(seen), **about}, seen))
        for old in [x for x in self.all("recording") if x.made][:-MADE]:
            self.close_recording(old.id)
        self._save()
        return one

    def close_recording(self, name: str) -> None:
        """Close a recording; one that the lab made is removed."""
        one = self.get(name, "recording")
        with self._lock:
            del self._open[name]
        self._cache.drop(name)
        if one.made:
            shutil.rmtree(one.folder, ignore_errors=True)
        self._save()

    def cached(self, key: tuple[Any, ...], size: Callable[[T], int], make: Callable[[], T]) -> T:
        """Something made once and asked for again; the first part of its key is the recording's id."""
        return self._cache.get(key, size, make)

    def to_dict(self) -> dict[str, Any]:
        with self._lock:
            return {
                "version": version("regard"),
                **{f"{kind}s": [one.to_dict() for one in self.all(kind)] for kind in ("model", "recording", "run")},
            }

    def close(self) -> None:
        self._save()
        self.jobs.close()

    def _add(self, one: Opened) -> Opened:
        with self._lock:
            if not one.id:
                base = re.sub(r"[^A-Za-z0-9._-]+", "-", one.title).strip("-.")[:60] or one.kind
                names = (base, *(f"{base}-{i}" for i in range(2, 10_000)))
                one.id = next(name for name in names if name not in self._open)
            self._open[one.id] = one
        return one

    def _save(self) -> None:
        with self._lock:
            mine = [x for x in self.all("recording") if x.made]
            told = [{"id": x.id, "title": x.title, "about": x.about} for x in mine]
            with renamed(self.state / "lab.json") as temporary:
                temporary.write_text(json.dumps({"recordings": told}, ensure_ascii=False), encoding="utf-8")

    def _restore(self) -> None:
        """What an earlier lab had made; what cannot be read any more is left out."""
        try:
            told = json.loads((self.state / "lab.json").read_text(encoding="utf-8"))["recordings"]
            for one in told:
                name, folder = str(one["id"]), self.state / "recordings" / Path(str(one["id"])).name
                if re.fullmatch(r"r[0-9a-f]{8}", name) and (folder / "recording.json").is_file():
                    self._add(Opened(name, "recording", folder, str(one["title"]), True, dict(one["about"])))
        except FileNotFoundError:
            return
        except (ValueError, KeyError, TypeError, OSError):
            return
        known = {one.id for one in self.all("recording")}
        for folder in (self.state / "recordings").iterdir():  # of jobs that never ended
            if re.fullmatch(r"r[0-9a-f]{8}", folder.name) and folder.name not in known:
                shutil.rmtree(folder, ignore_errors=True)


class Cache:
    """Values by key, the least recently used dropped beyond a number of bytes; each made by one thread."""

    def __init__(self, most: int) -> None:
        self._most, self._held = most, 0
        self._lock = threading.Lock()
        self._values: OrderedDict[tuple[Any, ...], tuple[Any, int]] = OrderedDict()
        self._making: dict[tuple[Any, ...], threading.Lock] = {}

    def get(self, key: tuple[Any, ...], size: Callable[[T], int], make: Callable[[], T]) -> T:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                found: T = self._values[key][0]
                return found
            making = self._making.setdefault(key, threading.Lock())
        with making:
            with self._lock:
                if key in self._values:
                    found = self._values[key][0]
                    return found
            made = make()
            with self._lock:
                self._values[key] = (made, size(made))
                self._held += size(made)
                self._making.pop(key, None)
                while self._held > self._most and len(self._values) > 1:
                    _, (_, bytes_) = self._values.popitem(last=False)
                    self._held -= bytes_
            return made

    def drop(self, first: str) -> None:
        with self._lock:
            for key in [x for x in self._values if x[0] == first]:
                self._held -= self._values.pop(key)[1]


def _of_recording(seen: Seen) -> dict[str, Any]:
    sizes = [x.n or 0 for calls in seen.calls.values() for x in calls]
    return {"model_name": str(seen.about.get("model") or ""), "tokens": max(sizes, default=0)}


def _reads(config: Config) -> str:
    """What a model of this kind reads: "text", "pair" (a source and a target) or "image"."""
    kind = config.kind
    if kind == "t5":
        return "pair"
    return "image" if kind == "vit" or kind.startswith("regard-") else "text"
