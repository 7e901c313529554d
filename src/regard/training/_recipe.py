"""Recipes: every setting that decides what a run does, as plain data, with checks and conversion from and to TOML."""

from __future__ import annotations

import json
import math
import stat
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import tomli_w

from regard._errors import RegardError

Value = bool | int | float | str
TABLES = ("model", "data")
MAX_FILE_BYTES = 2**14  # the time of tomllib grows with the square of a name's length; a recipe has about 500 bytes

# The smallest accepted value of each integer setting.
INTEGERS = {"steps": 1, "batch": 1, "accumulate": 1, "evaluate": 1, "save": 1, "keep": 1}
INTEGERS |= {"seed": 0, "warmup": 0, "patience": 0, "record_every": 0}
CHOICES = {"precision": ("float32", "bfloat16"), "parallel": ("ddp", "fsdp")}
TYPE_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}


@dataclass(frozen=True)
class Recipe:
    """Every setting of a run, as plain data. Two runs of a recipe on one machine end with bit-identical weights.

    - ``task``: the name of the task.
    - ``steps``: the number of optimizer steps.
    - ``batch``: examples per optimizer step, over all processes and all pieces of ``accumulate``.
    - ``rate``: the learning rate. It rises over ``warmup`` steps and falls as a cosine to ``floor · rate``.
    - ``seed``: seed of the initial weights, of the examples and of dropout.
    - ``accumulate``: the number of pieces that a batch is cut into; they are computed one after the other.
    - ``decay``, ``beta1``, ``beta2``: the settings of AdamW; the decay applies to matrices, not to vectors.
    - ``clip``: the largest norm of the gradient; 0 disables clipping.
    - ``precision``: "float32", or "bfloat16": autocast computes matrix products in bfloat16, weights stay float32.
    - ``evaluate``: the steps between two evaluations on held-out examples.
    - ``patience``: the run ends after this many evaluations without a better score; 0 disables this.
    - ``save``: the steps between two checkpoints.
    - ``keep``: how many of the newest checkpoints stay, besides the best one.
    - ``record``: the share of the time that recording the heads may take; 0 disables recording.
    - ``record_every``: the steps between two records. Before the first multiple, and everywhere if it is 0, the steps
      0, 1, 2, 3, 4, 6, 8, 11 … (2^(k/2), rounded) are recorded.
    - ``parallel``: under torchrun "ddp" (one model per process) or "fsdp" (one share of the model per process).
    - ``model``, ``data``: the settings of the task itself.

    A setting that is out of range raises ``RegardError``.

    >>> from regard.training.tasks import TASKS
    >>> recipe = TASKS["repeats"].default_recipe.with_changes({"steps": 300, "model.layers": 3})
    >>> recipe.steps, recipe.rate, dict(recipe.model)
    (300, 0.002, {'d': 64, 'heads': 4, 'layers': 3, 'hidden': 128})
    """

    task: str
    steps: int
    batch: int
    rate: float
    seed: int = 0
    accumulate: int = 1
    warmup: int = 100
    floor: float = 0.1
    decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    precision: str = "float32"
    evaluate: int = 100
    patience: int = 0
    save: int = 100
    keep: int = 1
    record: float = 0.05
    record_every: int = 0
    parallel: str = "ddp"
    model: Mapping[str, Value] = field(default_factory=dict)
    data: Mapping[str, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, least in INTEGERS.items():
            value = getattr(self, name)
            if not isinstance(value, int) or not least <= value < 2**53:
                raise RegardError(f"{name} is {value!r}; it must be an integer ≥ {least}")

        # Each condition is written so that NaN fails it.
        accepted = {
            "rate": (0 < self.rate < math.inf, "> 0"),
            "floor": (0 <= self.floor <= 1, "≥ 0 and ≤ 1"),
            "decay": (0 <= self.decay < math.inf, "≥ 0"),
            "clip": (0 <= self.clip < math.inf, "≥ 0"),
            "beta1": (0 <= self.beta1 < 1, "≥ 0 and < 1"),
            "beta2": (0 <= self.beta2 < 1, "≥ 0 and < 1"),
            "record": (0 <= self.record <= 1, "≥ 0 and ≤ 1"),
        }
        for name, (valid, limits) in accepted.items():
            if not valid:
                raise RegardError(f"{name} is {getattr(self, name)}; it must be a number {limits}")
        if self.warmup >= self.steps > 1:
            raise RegardError(f"warmup is {self.warmup} and steps {self.steps}; warmup must be smaller than steps")
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise RegardError(f"{name} is {getattr(self, name)!r}; it must be {' or '.join(choices)}")
        if self.batch % self.accumulate:
            raise RegardError(f"accumulate is {self.accumulate}; it must divide batch, which is {self.batch}")

    def with_changes(self, changes: Mapping[str, Any]) -> Recipe:
        """Return this recipe with some settings changed.

        - ``changes``: names and values, ``{"steps": 100, "model.layers": 2}`` or with nested tables. A text is parsed
          as the type of the setting. An unknown name or a wrong type raises ``RegardError``. If ``steps`` becomes too
          small for the warmup and ``warmup`` is not given, the warmup becomes a quarter of the steps.

        >>> Recipe("mine", steps=200, batch=8, rate=1e-3).with_changes({"rate": "2e-3", "warmup": 20}).rate
        0.002
        """
        tables: dict[str, dict[str, Value]] = {name: dict(getattr(self, name)) for name in TABLES}
        own: dict[str, Any] = {}
        for name, value in flatten_recipe(changes).items():
            # Only existing settings can be changed, so a typing mistake is an error.
            table, _, inner = name.rpartition(".")
            if table in TABLES and inner in tables[table]:
                tables[table][inner] = _convert(name, value, tables[table][inner])
            elif not table and name in self._own_names():
                own[name] = _convert(name, value, getattr(self, name))
            else:
                raise RegardError(f"a {self.task} recipe has no {name}; it has {', '.join(self.names())}")
        # Whoever asks only for fewer steps did not ask for a warmup that is longer than the run.
        steps = own.get("steps", self.steps)
        if "warmup" not in own and self.warmup >= steps > 1:
            own["warmup"] = steps // 4
        return replace(self, **own, **tables)  # type: ignore[arg-type]

    def names(self) -> list[str]:
        """Return the names of all settings that can be changed."""
        names = self._own_names()
        for table in TABLES:
            for inner in getattr(self, table):
                names.append(f"{table}.{inner}")
        return names

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe as plain data that can be written as JSON."""
        return asdict(replace(self, model=dict(self.model), data=dict(self.data)))

    def to_toml(self) -> str:
        """Return the recipe as TOML, which ``read_recipe`` and ``--config`` read.

        >>> Recipe("mine", steps=200, batch=8, rate=1e-3, model={"d": 16}).to_toml().splitlines()[:4]
        ['task = "mine"', 'steps = 200', 'batch = 8', 'rate = 0.001']
        """
        return tomli_w.dumps(self.to_dict())

    def _own_names(self) -> list[str]:
        return [f.name for f in fields(self) if f.name not in ("task", *TABLES)]


def flatten_recipe(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Replace nested tables by names with a dot: ``{"model": {"layers": 2}}`` becomes ``{"model.layers": 2}``."""
    flat: dict[str, Any] = {}
    for name, value in recipe.items():
        if isinstance(value, Mapping):
            for inner, inner_value in value.items():
                flat[f"{name}.{inner}"] = inner_value
        else:
            flat[name] = value
    return flat


def read_recipe(file: Path) -> dict[str, Any]:
    """Read a TOML file as a dictionary; ``Recipe.with_changes`` checks it against a task's recipe."""
    try:
        # Reading a device file such as /dev/zero, or a pipe, may never end.
        status = file.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_FILE_BYTES:
            raise RegardError(f"{file} is not a recipe: it must be a regular file of at most {MAX_FILE_BYTES:,} bytes")
        content = file.read_bytes()
    except OSError as error:
        raise RegardError(f"{file} cannot be read: {error.strerror}") from None
    try:
        return tomllib.loads(content.decode())
    # A ValueError is also text that is not UTF-8, and a number of more digits than Python converts.
    except (ValueError, RecursionError) as error:
        raise RegardError(f"{file} is not TOML: {error}") from None


def parse_assignments(texts: Iterable[str]) -> dict[str, str]:
    """Turn the arguments of ``--set``, such as "steps=100", into a dictionary from names to strings."""
    assignments = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise RegardError(f"--set is {text!r}; it must be name=value, for example steps=200 or model.layers=2")
        assignments[name.strip()] = value.strip()
    return assignments


def _convert(name: str, value: Any, current: Value) -> Value:
    """Convert a value to the type of the current one: texts are parsed, and integers are accepted as floats."""
    kind = type(current)
    problem = f"{name} is {value!r}; it must be {TYPE_NAMES[kind]}, for example {json.dumps(current)}"
    if isinstance(value, str) and kind is not str:
        try:
            return _parse(value.replace("_", "").lower(), kind)
        except (KeyError, ValueError):
            raise RegardError(problem) from None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise RegardError(problem) from None
    if type(value) is not kind:
        raise RegardError(problem)
    return value


def _parse(text: str, kind: type) -> Value:
    if kind is bool:
        return {"true": True, "false": False}[text]
    if kind is int and text.lstrip("+-").isdigit():
        return int(text)
    number = float(text)
    if kind is float:
        return number
    # People write integers as 1e4 too.
    if not number.is_integer():
        raise RegardError(f"{text} is not an integer")
    return int(number)
