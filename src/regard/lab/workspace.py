"""The workspace of a lab: its open models, recordings and training runs, each with an id, and its jobs.

Requests contain ids, never paths, so only opened folders can be read. Recordings and runs that the lab creates
live in its state folder. The file ``lab.json`` there lists them, so that they are open again at the next start; what it
does not list is found by its own files. What cannot be read is never removed, and a notice says so.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import shutil
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import platformdirs
from filelock import FileLock, Timeout

from regard import models
from regard._errors import RegardError
from regard._files import write_text
from regard._terminal import printable
from regard._version import __version__
from regard.interp import Recording, load_recording
from regard.interp._audio_models import reads_audio
from regard.interp._records import find_records, list_records
from regard.lab.cache import Cache
from regard.lab.endpoint import NotFound
from regard.lab.jobs import Jobs
from regard.lab.open_item import OpenItem, fingerprint, input_kind, recording_details, training_task
from regard.lab.saved_items import (
    CREATED_ID,
    LAB_FILE,
    SavedItem,
    find_damage,
    keep_bad_file,
    make_private,
    parse_entry,
    read_lab_file,
    recovered_run,
    recovered_title,
    remove_abandoned,
    unlisted_folders,
)
from regard.lab.trash import Trash
from regard.models._load import open_source
from regard.training._run_folder import read_run

log = logging.getLogger("regard.lab")

# How many of its own recordings and runs the lab keeps open; beyond this the oldest go to the trash.
MAX_CREATED = {"recording": 24, "run": 8}
MAX_NOTICES = 20  # beyond this, only the terminal shows them
CACHE_BYTES = 256 * 2**20  # bound on computed results that may be requested again
# The page in the state folder that leads to a running lab; it holds the address with the token.
ADDRESS_FILE = "open.html"


def default_state_folder() -> Path:
    """Return the state folder of a lab; on Linux ``$XDG_STATE_HOME/regard/lab`` or ~/.local/state/regard/lab.

    >>> default_state_folder().parts[-2:]
    ('regard', 'lab')
    """
    return platformdirs.user_state_path("regard") / "lab"


class Workspace:
    """What is open in a lab (models, recordings, runs), and the jobs that work on it.

    ``state`` is the lab's own folder. Only one lab can use a folder at a time.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as state:
    ...     workspace = Workspace(Path(state))
    ...     model = workspace.open(models.bundled())
    ...     workspace.close()
    >>> model.kind, model.title
    ('model', 'bundled model')
    """

    def __init__(self, state: Path) -> None:
        self.state = state
        make_private(state)
        # Two labs in one folder would remove each other's recordings. The thread that closes the workspace, and so
        # releases the lock, need not be the thread that opened it.
        self._folder_lock = FileLock(state / ".lock", mode=0o600, thread_local=False)
        try:
            self._folder_lock.acquire(blocking=False)
        except Timeout:
            address = state / ADDRESS_FILE
            open_it = f"open {address} in a browser, " if address.is_file() else ""
            message = f"another lab uses {state}; {open_it}stop it, or give this one its own folder with --state"
            raise RegardError(message) from None
        self.lock = threading.RLock()  # held while items are opened, closed or saved
        self._items: OrderedDict[str, OpenItem] = OrderedDict()
        self.cache = Cache(CACHE_BYTES)  # computed results; the first part of a key is the id of its item
        self.notices: list[str] = []  # what people should know about their files, one line each
        self.is_closing = False  # whether the lab ends; requests that wait for a job then return
        self._close_lock = threading.Lock()
        self._closed = False
        self.jobs = Jobs()
        try:
            (state / "recordings").mkdir(parents=True, exist_ok=True)
            (state / "runs").mkdir(exist_ok=True)
            self.trash = Trash(state, CREATED_ID)
            self._restore()
        except BaseException:
            self._folder_lock.release()
            raise

    # Open items

    def open(self, folder: Path) -> OpenItem:
        """Open the folder of a model, a recording or a run, or a GGUF file. The files tell which of the three it is.

        The records of a ``Recorder`` in a training of the user's own are a run without a model.
        """
        folder = folder.resolve()
        for item in self._items.values():
            if item.folder == folder:
                return item
        if (folder / "recording.json").is_file():
            recording = load_recording(folder)
            details = recording_details(recording)
            return self._add(OpenItem("", "recording", folder, folder.name, details=details, recording=recording))
        if (folder / "run.json").is_file():
            task, _ = read_run(folder)
            run = self._add(OpenItem("", "run", folder, folder.name, details={"task": task}))
            self.open_model_of(run)
            return run
        if (folder / "config.json").is_file() or folder.is_file():  # a GGUF file
            return self._open_model(folder)
        if folder.name == "evolution" and list_records(folder):
            return self.open(folder.parent)
        if find_records(folder):
            return self._add(OpenItem("", "run", folder, folder.name, details={"task": ""}))
        files = "config.json, recording.json, run.json or records of heads (step-….safetensors)"
        raise RegardError(f"{folder} is not a model, recording or run: it has no {files}, and is not a GGUF file")

    def _open_model(self, folder: Path) -> OpenItem:
        config = open_source(folder).config
        # Refused here: a model that is open would take an input, and fail only when it runs.
        if config.model_type not in models.model_types():
            reads = " reads audio, and" if reads_audio(folder) else ""
            raise RegardError(
                f"{folder}: a {config.model_type} model{reads} cannot run in the lab; observe it in Python with "
                f"regard.watch, and open the recording. The lab runs {', '.join(models.model_types())}"
            )
        title = folder.name
        if folder == models.bundled().resolve():
            title = "bundled model"
        elif title == "model":  # the model of a run, which has the name of the run
            title = folder.parent.name
        details = {"reads": input_kind(config), "type": config.model_type}
        model = self._add(OpenItem("", "model", folder, title, details=details))

        # Some models come with the record of their training, which is shown as a run.
        if (folder / "evolution").is_dir():
            details = {"task": training_task(folder), "model": model.id}
            self._add(OpenItem(f"{model.id}-run", "run", folder, title, details=details))
        return model

    def open_model_of(self, run: OpenItem) -> None:
        """Open the model that a run has saved, if it is there. A model that cannot be read gives a notice."""
        folder = run.folder / "model"
        with self.lock:
            if "model" in run.details or not (folder / "config.json").is_file():
                return
            try:
                model = self.open(folder)
            except (OSError, ValueError, TypeError, LookupError, ArithmeticError) as error:
                reason = printable(str(error).replace(str(run.folder), run.id))
                self.add_notice(f"the model of run {run.id} cannot be opened: {reason}; its files are left as they are")
                return
            if run.created_here:
                model.title = run.title
            run.details["model"] = model.id

    def get(self, item_id: str, kind: str) -> OpenItem:
        """Return the open item of this id and kind. Raises NotFound."""
        with self.lock:
            item = self._items.get(item_id)
        if item is None and self.trash.holds(item_id):
            # Several windows and people can use one lab.
            reasons = "in another window, or because many newer ones were made"
            raise NotFound(f"this {kind} was closed: {reasons}", reopen=item_id)
        if item is None or item.kind != kind:
            raise NotFound(f"no {kind} {item_id!r} is open")
        return item

    def items(self, kind: str) -> list[OpenItem]:
        """Return the open items of a kind ("model", "recording" or "run"), in the order of opening."""
        with self.lock:
            return [item for item in self._items.values() if item.kind == kind]

    def recording(self, item_id: str) -> Recording:
        """Return an open recording, and load it at its first use."""
        item = self.get(item_id, "recording")
        with self.lock:
            if item.recording is None:
                item.recording = load_recording(item.folder)
            return item.recording

    def model_of(self, recording: OpenItem) -> OpenItem | None:
        """Return the open model that a recording was made with, or None.

        A model that is opened later can get the same id, so the model's folder must match too. A model that was trained
        further is another model: its types and weights are not those of the recording.
        """
        model = self._items.get(str(recording.details.get("model")))
        files = recording.details.get("model_files")
        if model is not None and model.kind == "model" and str(model.folder) == recording.details.get("model_folder"):
            is_unchanged = files is None or fingerprint(model.folder) == files
            if is_unchanged:
                return model
        # A recording of ``regard look`` names the files of its model by their fingerprint.
        if isinstance(files, str):
            for model in self.items("model"):
                if fingerprint(model.folder) == files:
                    return model
        return None

    def new_recording(self) -> tuple[str, Path]:
        """Return an id and a folder for a recording that a job will save."""
        item_id = f"r{secrets.token_hex(4)}"
        return item_id, self.state / "recordings" / item_id

    def add_recording(self, item_id: str, title: str, model: OpenItem) -> OpenItem:
        """Open a recording that a job has saved, and close the oldest beyond ``MAX_CREATED``."""
        folder = self.state / "recordings" / item_id
        recording = load_recording(folder)
        details = {**recording_details(recording), "model": model.id, "model_folder": str(model.folder)}
        details["model_files"] = fingerprint(model.folder)
        details["model_title"] = model.title
        item = self._add(OpenItem(item_id, "recording", folder, title, True, details, recording))
        self._close_oldest("recording")
        self._save()
        return item

    def new_run(self, title: str, task: str) -> OpenItem:
        """Open a run that a job will train. It is open at once, so that it can be watched.

        It counts as training until ``run_started`` is called or the run is closed.
        """
        item_id = f"t{secrets.token_hex(4)}"
        run = OpenItem(item_id, "run", self.state / "runs" / item_id, title, True, {"task": task}, is_starting=True)
        return self._add(run)

    def run_started(self, run: OpenItem, job_id: str) -> None:
        """Note the job that trains a run, and close the oldest runs beyond ``MAX_CREATED`` that are not training."""
        with self.lock:
            run.details["job"] = job_id
            run.is_starting = False
            self._close_oldest("run")
            self._save()

    def _close_oldest(self, kind: str) -> None:
        """Close the oldest items that the lab created, beyond ``MAX_CREATED``; runs that train do not count."""
        # One thread at a time: two threads that choose the same item would both close it.
        with self.lock:
            created = []
            for item in self.items(kind):
                if item.created_here and not self.is_training(item):
                    created.append(item)
            for old in created[: -MAX_CREATED[kind]]:
                try:
                    self.close_run(old.id) if kind == "run" else self.close_recording(old.id)
                except OSError as error:  # the new item is open, although an old one could not be closed
                    self.add_notice(printable(str(error)))

    def is_training(self, run: OpenItem) -> bool:
        """Return whether a job of this lab trains a run, waits to train it, or is about to be started."""
        if run.is_starting:
            return True
        try:
            return self.jobs.get(str(run.details.get("job"))).state in ("queued", "running")
        except NotFound:
            return False

    def close_run(self, item_id: str, *, forever: bool = False) -> str | None:
        """Close a run. If the lab created it, close its model too; ``reopen`` brings both back. See ``_close_item``."""
        run = self.get(item_id, "run")
        reopen_id = self._close_item(run, forever)
        if run.created_here:
            with self.lock:
                self._items.pop(str(run.details.get("model")), None)
        return reopen_id

    def close_recording(self, item_id: str, *, forever: bool = False) -> str | None:
        """Close a recording. See ``_close_item``."""
        return self._close_item(self.get(item_id, "recording"), forever)

    def reopen(self, item_id: str) -> OpenItem:
        """Open a recording or a run again that was closed. Raises NotFound."""
        with self.lock:
            entry = self.trash.restore(item_id)
            kind = str(entry["kind"])
            try:
                self._restore_item(parse_entry(kind, entry))
            except RegardError:  # the description of a closed item is damaged
                self._restore_unlisted(kind, self.state / f"{kind}s" / item_id)
            self._save()
            return self.get(item_id, kind)

    def _close_item(self, item: OpenItem, forever: bool) -> str | None:
        """Close an item. Files that the lab created go to the trash, or are removed if ``forever`` is true.

        Returns the id with which ``reopen`` opens it again; None if it cannot be reopened. Raises OSError if its files
        cannot be moved to the trash; then it stays open.
        """
        with self.lock:
            if self._items.get(item.id) is not item:
                raise NotFound(f"no {item.kind} {item.id!r} is open")
            reopen_id = None
            if item.created_here and not forever:
                entry = {"kind": item.kind, "id": item.id, "title": item.title, "about": item.details}
                if self.trash.put(entry, item.folder):
                    reopen_id = item.id
            del self._items[item.id]
            if item.created_here and forever:
                shutil.rmtree(item.folder, ignore_errors=True)
            self.cache.drop(item.id)
            self._save()
        return reopen_id

    # Saving and closing

    def to_dict(self) -> dict[str, Any]:
        """Return everything that is open, as plain data for a page."""
        open_items: dict[str, Any] = {"version": __version__}
        with self.lock:
            open_items["notices"] = list(self.notices)
            for kind in ("model", "recording", "run"):
                open_items[f"{kind}s"] = [item.to_dict() for item in self.items(kind)]
            # The model of an older recording may not be open; another model can have its id.
            for item, fields in zip(self.items("recording"), open_items["recordings"], strict=True):
                model = self.model_of(item)
                fields["model"] = None if model is None else model.id
        return open_items

    def add_notice(self, notice: str) -> None:
        """Tell people about their files, once: in the terminal and on the page. ``notice`` is a line without paths."""
        with self.lock:
            if notice in self.notices:
                return
            if len(self.notices) < MAX_NOTICES:
                self.notices.append(notice)
        log.warning("regard: %s", notice)

    def begin_close(self) -> None:
        """Tell the jobs to stop and waiting requests to return, without waiting for them."""
        self.is_closing = True
        self.jobs.begin_close()

    def close(self) -> None:
        """Write ``lab.json``, stop all jobs (a training saves its state), and release the state folder."""
        self.begin_close()
        # A second caller waits until the first one is done.
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
            try:
                self._save()
            except OSError as error:  # the jobs must be stopped nevertheless
                log.warning("regard: %s", printable(str(error)))
            try:
                self.jobs.close()
            finally:
                self._folder_lock.release()

    def _add(self, item: OpenItem) -> OpenItem:
        with self.lock:
            if not item.id:
                # The id is made from the title, with a number appended if the title is already in use.
                base = re.sub(r"[^A-Za-z0-9._-]+", "-", item.title).strip("-.")[:60] or item.kind
                item.id = base
                number = 2
                while item.id in self._items:
                    item.id = f"{base}-{number}"
                    number += 1
            self._items[item.id] = item
        return item

    def _save(self) -> None:
        with self.lock:
            created: dict[str, list[dict[str, Any]]] = {}
            for kind in CREATED_ID:
                # A run that is starting has no files yet.
                items = [item for item in self.items(kind) if item.created_here and not item.is_starting]
                created[f"{kind}s"] = [{"id": item.id, "title": item.title, "about": item.details} for item in items]
            write_text(json.dumps(created, ensure_ascii=False), self.state / LAB_FILE, mode=0o600)

    def _restore(self) -> None:
        """Open the recordings and runs that earlier labs created here, each on its own, and remove leftovers."""
        remove_abandoned(self.state)
        items, problems = read_lab_file(self.state / LAB_FILE)
        if problems:
            name = keep_bad_file(self.state / LAB_FILE)
            for problem in problems:
                self.add_notice(f"{problem}; the file is kept as {name} in the lab's state folder")
        for item in items:
            self._restore_item(item)
        for kind in CREATED_ID:
            listed = {item.id for item in self.items(kind)}
            for folder in unlisted_folders(self.state, kind, listed):
                self._restore_unlisted(kind, folder)
        # The next start need not find the same things again.
        if self.notices:
            self._save()

    def _restore_item(self, saved: SavedItem) -> None:
        """Open an item that the lab created. If its files cannot be read, it is open all the same, with a notice."""
        folder = self.state / f"{saved.kind}s" / saved.id
        if saved.id in self._items:
            return
        if not folder.is_dir():
            # A lab that was killed while it closed an item still lists it.
            if not self.trash.holds(saved.id):
                self.add_notice(f"the folder of {saved.kind} {saved.id} is missing")
            return
        damage = find_damage(saved, folder)
        if damage is not None:
            self.add_notice(f"{saved.kind} {saved.id} cannot be read: {damage}; its files are left as they are")
        details = saved.details
        if saved.kind == "run":  # the saved ids of its model and its job belong to the earlier lab
            details = {"task": details.get("task", "")}
        item = self._add(OpenItem(saved.id, saved.kind, folder, saved.title, True, details))
        if saved.kind == "run":
            self.open_model_of(item)

    def _restore_unlisted(self, kind: str, folder: Path) -> None:
        """Open an item that ``lab.json`` does not list, if its own files can be read."""
        try:
            if kind == "run":
                self._restore_item(recovered_run(folder))
            else:
                recording = load_recording(folder)
                details = recording_details(recording)
                self._add(OpenItem(folder.name, kind, folder, recovered_title(recording), True, details))
        except (OSError, ValueError, TypeError, LookupError, ArithmeticError) as error:
            reason = printable(str(error).replace(str(folder), folder.name))
            self.add_notice(f"{kind} {folder.name} cannot be read: {reason}; its files are left as they are")
        else:
            self.add_notice(f"{kind} {folder.name} was not listed in {LAB_FILE}, and was found again")
