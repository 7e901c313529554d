"""Dates: from the many ways that people write one to ISO's, character by character, with an encoder–decoder."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from regard.config import Config
from regard.models import Model, create
from regard.training.recipe import Recipe
from regard.training.task import Batch, Task, drawn
from regard.training.tasks.common import END, NOTHING, PAD, SPECIAL, UNKNOWN, characters, summed
from regard.watching.probes import Probe

__all__ = ["FORMS", "DatesTask", "held_out"]

ONES = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
ONES_ = ("", *ONES.split(), "eighteen", "nineteen")
TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
