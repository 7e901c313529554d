"""The built-in tasks by name: ``TASKS``."""

from regard.training._task import Task
from regard.training.tasks.agreement import AgreementTask
from regard.training.tasks.dates import DatesTask
from regard.training.tasks.digits import DigitsTask
from regard.training.tasks.pixels import PixelsTask
from regard.training.tasks.repeats import RepeatsTask
from regard.training.tasks.text import TextTask

__all__ = ["TASKS"]

TASKS: dict[str, type[Task]] = {
    task.name: task for task in (TextTask, AgreementTask, RepeatsTask, DatesTask, DigitsTask, PixelsTask)
}
