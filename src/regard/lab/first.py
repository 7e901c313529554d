"""What a lab shows at once: a model's heads on a sample, made before the page is opened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from regard.lab.lab import Lab, Opened
from regard.models import load
from regard.watching import Seen
from regard.watching.look import LOOK, look

__all__ = ["SAMPLE", "first_look"]

# Words that come again, so that heads which look for them have something to find.
SAMPLE = (
    "The iterator returns the items of a container, one item at a time. When there are no more items, the iterator "
    "raises StopIteration, and it raises StopIteration at every later call. A container returns a new iterator each "
    "time; an iterator returns itself. The built-in function next() returns the next item of the iterator, and calls "
    "the method __next__() of the iterator to get it. The built-in function iter() calls the method __iter__() of the "
    "container, and returns a new iterator."
)


def first_look(lab: Lab, given: Sequence[Opened] = ()) -> Seen | None:
    """What was given first, or else any open model, as a recording: one that is there, or ``SAMPLE`` read now."""
    for one in given or lab.all("model"):
        if one.kind == "recording":
            return lab.seen(one.id)
        model = lab.get(str(one.about["model"]), "model") if one.kind == "run" and "model" in one.about else one
        if model.about.get("reads") == "text":
            return _of_model(lab, model)
    return None


def _of_model(lab: Lab, model: Opened) -> Seen:
    for one in lab.all("recording"):
        if lab.model_of(one) is model:
            try:
                return lab.seen(one.id)
            except (ValueError, OSError):  # damaged, or of another version
                lab.close_recording(one.id)
    name, folder = lab.new_recording()
    look(load(model.folder), SAMPLE, observe=replace(LOOK, keep=True)).save(folder)
    lab.made(name, "sample text", model)
    return lab.seen(name)
