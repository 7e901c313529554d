"""Train small transformers and watch their heads evolve, on one process or on many.

``train`` runs a task into a folder and goes on after whatever stopped it; ``Recorder`` watches the heads of any model
in any loop; ``evolution`` opens what it recorded; ``distributed`` attends over sequences that outgrow one process.
"""

from regard.training.evolution import Evolution, evolution
from regard.training.loop import Listener
from regard.training.recipe import Recipe
from regard.training.recorder import Recorder
from regard.training.task import Task
from regard.training.train import Result, train, trained

__all__ = ["Evolution", "Listener", "Recipe", "Recorder", "Result", "Task", "evolution", "train", "trained"]
