"""Train small transformers and record how their heads evolve, in one process or in several.

``train`` runs a task in a folder and resumes an interrupted run. ``load_trained_model`` loads a checkpoint of a run.
``Recorder`` records the heads of any model in any training loop, and ``evolution`` reads what it recorded.
``AttentionMonitor`` measures every head at every step, and warns before attention saturates.
"""

from regard.training._evolution import Evolution, evolution
from regard.training._loop import Listener
from regard.training._monitor import AttentionMonitor, AttentionWarning, MonitorRecord
from regard.training._recipe import Recipe
from regard.training._recorder import Recorder
from regard.training._task import Task
from regard.training._train import Result, load_trained_model, train

__all__ = [
    "AttentionMonitor",
    "AttentionWarning",
    "Evolution",
    "Listener",
    "MonitorRecord",
    "Recipe",
    "Recorder",
    "Result",
    "Task",
    "evolution",
    "load_trained_model",
    "train",
]
