"""What a lab shows at once: each open model's heads on a sample, made before the page is opened."""

from __future__ import annotations

from dataclasses import replace

from regard.lab.lab import Lab
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


def first_look(lab: Lab) -> Seen | None:
    """A recording of the first open text model on ``SAMPLE``, unless something is recorded already."""
    recorded = lab.all("recording")
    if recorded:
        return lab.seen(recorded[0].id)
    for one in lab.all("model"):
        if one.about.get("reads") == "text":
            name, folder = lab.new_recording()
            look(load(one.folder), SAMPLE, observe=replace(LOOK, keep=True)).save(folder)
            lab.made(name, "sample text", {"model": one.id})
            return lab.seen(name)
    return None
