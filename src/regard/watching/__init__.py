"""Watching models: what every head does, on our models, those of ``transformers``, and any of PyTorch."""

from regard.watching import huggingface
from regard.watching.ablation import ablate
from regard.watching.seen import Seen
from regard.watching.seen import open_recording as open
from regard.watching.watch import watch

__all__ = ["Seen", "ablate", "huggingface", "open", "watch"]
