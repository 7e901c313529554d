"""What a lab finds in its state folder when it starts: the list ``lab.json``, and the folders of recordings and runs.

Nothing that a user would miss is removed here. An entry that cannot be read does not hide the others, a folder that is
not listed is recognized by its own files, and only leftovers that were never complete are removed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard._config_json import LARGEST_JSON, read_json
from regard._errors import RegardError
from regard._files import TEMPORARY_FOLDER, atomic_write, read_regular
from regard._terminal import printable
from regard.interp import Recording
from regard.training._run_folder import read_run

LAB_FILE = "lab.json"
LARGEST_CHECKED = 16 * 2**20  # bytes of a recording.json that is read when a lab starts
LONGEST_SUBJECT = 40  # characters of a recording's text in the title of a recovered recording
# The form of ids of recordings and runs that the lab created. Ids are folder names; other folders are never touched.
CREATED_ID = {"recording": re.compile(r"r[0-9a-f]{8}"), "run": re.compile(r"t[0-9a-f]{8}")}
# Leftovers of a process that was killed are removed only at this age, so that no process can still be writing them.
ABANDONED_SECONDS = 3600.0
# Names of the temporary files of ``atomic_write``, and of lock files.
TEMPORARY_FILE = re.compile(r"\..+\.[a-z0-9_]{8}|\.lock")
# Those that the lab itself writes beside its other files.
OWN_TEMPORARY_FILE = re.compile(r"\.(lab\.json(\.bad\d*)?|open\.html|[rt][0-9a-f]{8}\.json)\.[a-z0-9_]{8}")
# The types of the details of a recording in ``lab.json``. Details of other names or types are left out.
DETAIL_TYPES = {
    "model": str,
    "model_folder": str,
    "model_title": str,
    "model_name": str,
    "model_files": str,
    "task": str,
    "tokens": int,
}


@dataclass(frozen=True)
class SavedItem:
    """An entry of ``lab.json``, or what a folder tells about itself."""

    kind: str  # "recording" or "run"
    id: str
    title: str
    details: dict[str, Any]


def make_private(state: Path) -> None:
    """Create the state folder, if needed, and let only its owner read it: it contains texts and the lab's address."""
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        state.chmod(0o700)
    except OSError as error:
        reason = f"its permissions cannot be changed ({error.strerror})"
        raise RegardError(f"the lab's state folder must be your own, got {state}: {reason}; use --state") from None


def read_lab_file(file: Path) -> tuple[list[SavedItem], list[str]]:
    """Read ``lab.json`` entry by entry. Returns the entries that can be read, and what is wrong with the others."""
    if not os.path.lexists(file):
        return [], []
    try:
        content = json.loads(read_regular(file, LARGEST_JSON))
    except (OSError, ValueError, RecursionError) as error:
        reason = str(error)
        if isinstance(error, OSError):
            reason = str(error.strerror)
        return [], [f"{file.name} cannot be read: {printable(reason)}"]
    if not isinstance(content, dict):
        return [], [f"{file.name} must contain an object, got {type(content).__name__}"]

    items: list[SavedItem] = []
    problems = []
    for kind in CREATED_ID:
        entries = content.get(f"{kind}s", [])
        if not isinstance(entries, list):
            problems.append(f"{file.name}: {kind}s must be a list, got {type(entries).__name__}")
            continue
        for number, entry in enumerate(entries, 1):
            try:
                items.append(parse_entry(kind, entry))
            except RegardError as error:
                problems.append(f"{file.name}: entry {number} of {kind}s: {error}")
    return items, problems


def parse_entry(kind: str, entry: Any) -> SavedItem:
    """Check an entry of ``lab.json`` or of the trash. Raises RegardError if it has no valid id or no title."""
    if not isinstance(entry, dict):
        raise RegardError(f"it must be an object, got {type(entry).__name__}")
    item_id = entry.get("id")
    if not isinstance(item_id, str) or not CREATED_ID[kind].fullmatch(item_id):
        raise RegardError(f"id must be that of a {kind} of this lab")
    if not isinstance(entry.get("title"), str):
        raise RegardError(f"title of {item_id} must be a text, got {type(entry.get('title')).__name__}")
    about = entry.get("about")
    if not isinstance(about, dict):
        raise RegardError(f"about of {item_id} must be an object, got {type(about).__name__}")
    details = {}
    for name, accepted in DETAIL_TYPES.items():
        if type(about.get(name)) is accepted:
            details[name] = about[name]
    return SavedItem(kind, item_id, entry["title"], details)


def keep_bad_file(file: Path) -> str:
    """Keep a damaged ``lab.json`` under another name, and return that name. Earlier ones are not overwritten.

    Raises RegardError if it cannot be kept, because the next save would overwrite it.
    """
    target = file.with_name(f"{file.name}.bad")
    number = 2
    while os.path.lexists(target):
        target = file.with_name(f"{file.name}.bad{number}")
        number += 1
    try:
        try:
            content = read_regular(file, LARGEST_JSON)
        except (OSError, RegardError):  # a folder, a pipe, a huge file, or a file without read permission
            file.rename(target)
        else:
            # A copy: the file itself stays until the new list replaces it, so there is a list at any moment.
            with atomic_write(target) as temporary:
                temporary.write_bytes(content)
    except OSError as error:
        reason = f"cannot be kept as {target.name}: {error.strerror or error}"
        raise RegardError(f"{file} is damaged and {reason}; move it away, or use --state") from None
    return target.name


def find_damage(item: SavedItem, folder: Path) -> str | None:
    """Return why the files of an item cannot be read; None if nothing is wrong. Large files are not read."""
    try:
        if item.kind == "run":
            read_run(folder)
        elif not (folder / "recording.json").is_file():
            raise FileNotFoundError("it has no recording.json")
        elif (folder / "recording.json").stat().st_size <= LARGEST_CHECKED:
            read_json(folder / "recording.json")
    except (OSError, ValueError) as error:
        return printable(str(error).replace(f"{folder}{os.sep}", "").replace(str(folder), folder.name))
    return None


def recovered_run(folder: Path) -> SavedItem:
    """Describe a run that ``lab.json`` does not list by its own ``run.json``. Raises if that cannot be read."""
    task, recipe = read_run(folder)
    title = f"{task}, {recipe.get('steps')} steps, seed {recipe.get('seed')} (recovered)"
    return SavedItem("run", folder.name, printable(title), {"task": task})


def recovered_title(recording: Recording) -> str:
    """Return a title for a recording that ``lab.json`` does not list: its text, or the time when it was saved."""
    subject = " ".join(str(recording.metadata.get("text") or "").split())
    if not subject:
        subject = str(recording.metadata.get("saved"))
    return f"{printable(subject[:LONGEST_SUBJECT])} (recovered)"


def unlisted_folders(state: Path, kind: str, listed: set[str]) -> Iterator[Path]:
    """Yield the folders of a kind that the lab created and that are not among ``listed`` ids, in order of their age."""
    folders = []
    for folder in (state / f"{kind}s").iterdir():
        if CREATED_ID[kind].fullmatch(folder.name) and folder.name not in listed and folder.is_dir():
            folders.append(folder)
    yield from sorted(folders, key=lambda folder: folder.stat().st_mtime_ns)


def remove_abandoned(state: Path) -> None:
    """Remove what killed processes left behind: temporary files and folders, and folders without a complete file."""
    for place in (state, state / "trash"):
        for path in place.iterdir():
            if OWN_TEMPORARY_FILE.fullmatch(path.name) and path.is_file() and _age(path) > ABANDONED_SECONDS:
                path.unlink(missing_ok=True)
    for kind, id_pattern in CREATED_ID.items():
        for folder in (state / f"{kind}s").iterdir():
            is_own = id_pattern.fullmatch(folder.name) or folder.name.startswith(TEMPORARY_FOLDER)
            if is_own and folder.is_dir() and is_abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)


def remove_unfinished(folder: Path) -> None:
    """Remove what a job that has ended left of a folder that it did not complete."""
    for path in folder.parent.glob(f"{TEMPORARY_FOLDER}{folder.name}-*"):
        shutil.rmtree(path, ignore_errors=True)


def is_abandoned(folder: Path) -> bool:
    """Return whether a folder has no complete file, and nothing in it has changed for ``ABANDONED_SECONDS``."""
    unfinished = folder.name.startswith(TEMPORARY_FOLDER)
    youngest = _age(folder)
    for path in folder.rglob("*"):
        youngest = min(youngest, _age(path))
        inside = path.relative_to(folder).parts
        is_temporary = unfinished or any(part.startswith(TEMPORARY_FOLDER) for part in inside)
        if not path.is_dir() and not is_temporary and not TEMPORARY_FILE.fullmatch(path.name):
            return False
    return youngest > ABANDONED_SECONDS


def _age(path: Path) -> float:
    """Return how many seconds ago a file or folder was changed."""
    return time.time() - path.lstat().st_mtime
