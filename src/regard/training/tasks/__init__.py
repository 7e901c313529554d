"""The tasks by name."""

from regard.training.task import Task

TASKS: dict[str, type[Task]] = {}
