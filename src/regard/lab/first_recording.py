"""Makes sure that a new lab has a recording to show: a sample text, read by the first model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from regard._error_report import error_line
from regard._errors import RegardError
from regard._files import atomic_folder
from regard._terminal import printable
from regard.interp import Recording
from regard.interp._look import PAGE_OBSERVABLES, look
from regard.lab.open_item import OpenItem
from regard.lab.workspace import Workspace
from regard.models import load

# The text repeats words and phrases, so that induction and previous-token heads have something to find.
SAMPLE_TEXT = (
    "The iterator returns the items of a container, one item at a time. When there are no more items, the iterator "
    "raises StopIteration, and it raises StopIteration at every later call. A container returns a new iterator each "
    "time; an iterator returns itself. The built-in function next() returns the next item of the iterator, and calls "
    "the method __next__() of the iterator to get it. The built-in function iter() calls the method __iter__() of the "
    "container, and returns a new iterator."
)


def ensure_recording(workspace: Workspace, items: Sequence[OpenItem] = ()) -> Recording | None:
    """Return a recording of the first usable item; make one of ``SAMPLE_TEXT`` if there is none.

    ``items`` are recordings, models and runs in order of preference; by default all open models. Returns None if no
    item is a recording or a model that reads text. A model that cannot be loaded becomes a notice.
    """
    for item in items or workspace.items("model"):
        if item.kind == "recording":
            return workspace.recording(item.id)
        model = item
        if item.kind == "run" and "model" in item.details:
            model = workspace.get(str(item.details["model"]), "model")
        if model.details.get("reads") != "text":
            continue
        try:
            return _recording_of_model(workspace, model)
        except (RegardError, OSError, MemoryError) as error:
            # One model that cannot be loaded must not keep people from the others.
            reason = error_line(error).replace(str(model.folder), model.folder.name)
            workspace.add_notice(f"{printable(model.folder.name)} cannot be observed: {reason}")
    return None


def _recording_of_model(workspace: Workspace, model: OpenItem) -> Recording:
    for item in workspace.items("recording"):
        if workspace.model_of(item) is model:
            try:
                return workspace.recording(item.id)
            except (ValueError, OSError) as error:  # damaged, or written by another version: it is left as it is
                reason = printable(str(error).replace(str(item.folder), item.id))
                workspace.add_notice(f"recording {item.id} cannot be read: {reason}; its files are left as they are")
    item_id, folder = workspace.new_recording()
    recording = look(load(model.folder), SAMPLE_TEXT, observe=replace(PAGE_OBSERVABLES, keep=True))
    with atomic_folder(folder) as temporary:
        recording.save(temporary)
    workspace.add_recording(item_id, "sample text", model)
    return workspace.recording(item_id)
