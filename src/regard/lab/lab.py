"""What one lab has open: models, recordings and training runs, each under an id; and its jobs.

Requests name ids, never paths: nothing can be reached that was not opened. Recordings and runs that the lab makes are
in its own folder, ``state``, whose ``lab.json`` lists what is open, so that a lab started again has it open again.
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
from pathlib import Path
from typing import IO, Any, TypeVar

from regard import models
from regard.config import Config, read_json
from regard.files import renamed
from regard.lab.endpoints import Gone
from regard.lab.jobs import Jobs
from regard.models.folder import Folder
from regard.training.folder import read_run
from regard.version import __version__
from regard.watching import Seen
from regard.watching import open as open_recording

__all__ = ["Lab", "Opened", "default_state"]

MADE = {"recording": 24, "run": 8}  # what the lab has made and keeps; older ones are removed
OWN = {"recording": re.compile(r"r[0-9a-f]{8}"), "run": re.compile(r"t[0-9a-f]{8}")}  # their ids, which name folders
CACHED = 256 * 2**20  # bytes of what was computed for views and may be asked for again
T = TypeVar("T")


def default_state() -> Path:
    """Where a lab keeps what is its own: ``$XDG_STATE_HOME/regard/lab``, or ~/.local/state/regard/lab.

    >>> default_state().parts[-2:]
    ('regard', 'lab')
    """
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
        about = {name: value for name, value in self.about.items() if name != "model_folder"}  # paths stay here
        return {"id": self.id, "kind": self.kind, "title": self.title, "made": self.made, **about}


class Lab:
    """What is open in a lab (models, recordings, runs), and the jobs that work on it; ``regard lab`` serves one.

    ``state``: the lab's own folder, which one lab uses at a time.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as state:
    ...     lab = Lab(Path(state))
    ...     model = lab.open(models.bundled())
    ...     lab.close()
    >>> model.kind, model.title
    ('model', 'bundled model')
    """

    def __init__(self, state: Path) -> None:
        self.state = state
        state.mkdir(parents=True, exist_ok=True)
        self._alone = _alone(state)
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
            self.open_model_of(run)
            return run
        if not (folder / "config.json").is_file():
            files = "config.json, recording.json or run.json"
            raise ValueError(f"{folder} is no model, recording or run: it has no {files}")
        config = Folder(folder).config
        title = folder.parent.name if folder.name == "model" else folder.name
        if folder == models.bundled().resolve():
            title = "bundled model"
        model = self._add(Opened("", "model", folder, title, about={"reads": _reads(config), "type": config.kind}))
        if (folder / "evolution").is_dir():  # how it learned came along
            about = {"task": _task(folder), "model": model.id}
            self._add(Opened(f"{model.id}-run", "run", folder, title, about=about))
        return model

    def open_model_of(self, run: Opened) -> None:
        """Open the model that a run has made, once it is there."""
        folder = run.folder / "model"
        with self._lock:
            if "model" not in run.about and (folder / "config.json").is_file():
                model = self.open(folder)
                if run.made:
                    model.title = run.title
                run.about["model"] = model.id

    def get(self, name: str, kind: str) -> Opened:
        """What is open under an id."""
        with self._lock:
            found = self._open.get(name)
        if found is None or found.kind != kind:
            raise Gone(f"no {kind} {name!r} is open here")
        return found

    def all(self, kind: str) -> list[Opened]:
        """What is open of a kind: "model", "recording" or "run", in the order of opening."""
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

    def made(self, name: str, title: str, model: Opened) -> Opened:
        """A model was recorded: it is open from now on, and the oldest beyond ``MADE`` is removed."""
        folder = self.state / "recordings" / name
        seen = open_recording(folder)
        about = {**_of_recording(seen), "model": model.id, "model_folder": str(model.folder)}
        one = self._add(Opened(name, "recording", folder, title, True, about, seen))
        for old in [x for x in self.all("recording") if x.made][: -MADE["recording"]]:
            self.close_recording(old.id)
        self._save()
        return one

    def new_run(self, title: str, task: str) -> Opened:
        """A run that a job will make; it is open at once, so that it can be watched."""
        name = f"t{secrets.token_hex(4)}"
        one = self._add(Opened(name, "run", self.state / "runs" / name, title, True, {"task": task}))
        for old in [x for x in self.all("run") if x.made and not self.is_training(x)][: -MADE["run"]]:
            self.close_run(old.id)
        self._save()
        return one

    def is_training(self, run: Opened) -> bool:
        """Whether a job of this lab works on a run, or will."""
        try:
            return self.jobs.get(str(run.about.get("job"))).state in ("queued", "running")
        except Gone:
            return False

    def close_run(self, name: str) -> None:
        """Close a run; one that the lab made is removed, with its model."""
        one = self.get(name, "run")
        with self._lock:
            del self._open[name]
            if one.made:
                self._open.pop(str(one.about.get("model")), None)
        self._cache.drop(name)
        if one.made:
            shutil.rmtree(one.folder, ignore_errors=True)
        self._save()

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
        """Everything that is open, as plain data for a page."""
        with self._lock:
            return {
                "version": __version__,
                **{f"{kind}s": [one.to_dict() for one in self.all(kind)] for kind in ("model", "recording", "run")},
            }

    def close(self) -> None:
        """Write down what is open, end all jobs, and leave the folder to the next lab."""
        self._save()
        self.jobs.close()
        self._alone.close()

    def model_of(self, recording: Opened) -> Opened | None:
        """The open model that a recording was made with: of that id and in that folder, for ids come again."""
        found = self._open.get(str(recording.about.get("model")))
        same = found is not None and str(found.folder) == recording.about.get("model_folder")
        return found if same and found is not None and found.kind == "model" else None

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
            told = {}
            for kind in OWN:
                mine = [x for x in self.all(kind) if x.made]
                told[f"{kind}s"] = [{"id": x.id, "title": x.title, "about": x.about} for x in mine]
            with renamed(self.state / "lab.json") as temporary:
                temporary.write_text(json.dumps(told, ensure_ascii=False), encoding="utf-8")

    def _restore(self) -> None:
        """What an earlier lab had made; what cannot be read any more is left out."""
        try:
            told = json.loads((self.state / "lab.json").read_text(encoding="utf-8"))
            for one in told["recordings"]:
                self._restore_one("recording", one, "recording.json")
            for one in told.get("runs", []):
                self._restore_one("run", one, "run.json")
        except FileNotFoundError:
            return
        except (ValueError, KeyError, TypeError, AttributeError, OSError):
            return
        for kind, own in OWN.items():
            known = {one.id for one in self.all(kind)}
            for folder in (self.state / f"{kind}s").iterdir():  # of jobs that never ended
                if own.fullmatch(folder.name) and folder.name not in known:
                    shutil.rmtree(folder, ignore_errors=True)

    def _restore_one(self, kind: str, told: dict[str, Any], file: str) -> None:
        name = str(told["id"])
        folder = self.state / f"{kind}s" / Path(name).name
        if OWN[kind].fullmatch(name) and (folder / file).is_file():
            about = {key: value for key, value in dict(told["about"]).items() if kind == "recording" or key == "task"}
            one = self._add(Opened(name, kind, folder, str(told["title"]), True, about))
            if kind == "run":
                self.open_model_of(one)


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
            try:
                made = make()
            finally:
                with self._lock:
                    self._making.pop(key, None)
            with self._lock:
                self._held += size(made) - self._values.get(key, (None, 0))[1]
                self._values[key] = (made, size(made))
                while self._held > self._most and len(self._values) > 1:
                    _, (_, bytes_) = self._values.popitem(last=False)
                    self._held -= bytes_
            return made

    def drop(self, first: str) -> None:
        with self._lock:
            for key in [x for x in self._values if x[0] == first]:
                self._held -= self._values.pop(key)[1]


def _alone(state: Path) -> IO[str]:
    """A file that is locked as long as it is open: two labs in one folder would remove each other's recordings."""
    file = (state / ".lock").open("w")
    try:
        import fcntl
    except ImportError:  # another system: whoever starts two labs there must give them two folders
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ValueError(f"another lab uses {state}; end it, or give this one a folder: --state FOLDER") from None
    return file


def _of_recording(seen: Seen) -> dict[str, Any]:
    sizes = [x.n or 0 for calls in seen.calls.values() for x in calls]
    return {"model_name": str(seen.about.get("model") or ""), "tokens": max(sizes, default=0)}


def _task(folder: Path) -> str:
    """Which task a model's folder says it was trained for."""
    try:
        return str(read_json(folder / "result.json")["task"])
    except (ValueError, LookupError, TypeError, OSError):
        return ""


def _reads(config: Config) -> str:
    """What a model of this kind reads: "text", "pair" (a source and a target) or "image"."""
    kind = config.kind
    if kind == "t5":
        return "pair"
    return "image" if kind == "vit" or kind.startswith("regard-") else "text"
