"""Watching models: what every head does, on our models, those of ``transformers``, and any of PyTorch."""

from regard.watching import figures, heads, huggingface
from regard.watching.ablation import ablate
from regard.watching.look import LOOK, look
from regard.watching.rollout import rollout
from regard.watching.seen import Seen
from regard.watching.seen import open_recording as open
from regard.watching.watch import watch

__all__ = ["LOOK", "Seen", "ablate", "figures", "heads", "huggingface", "look", "open", "rollout", "watch"]
