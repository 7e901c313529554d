"""A recipe: everything that decides what a run does, as plain data; from a task's defaults, a file and ``--set``."""

from __future__ import annotations

import json
import math
import stat
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

__all__ = ["Recipe", "Value", "assigned", "flat", "read_recipe"]

Value = bool | int | float | str
TABLES = ("model", "data")
LARGEST = 2**20  # bytes of a recipe file


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a run, as plain data: how a task is learned.

    A recipe is a run's law: two runs of one recipe on one machine end with the same weights, bit for bit.

    - ``batch`` counts examples a step, over all processes and pieces.
    - ``rate`` rises over ``warmup`` steps and falls as a cosine to ``floor · rate`` at the last step.
    - ``decay`` (of matrices, not of vectors), ``beta1`` and ``beta2`` are AdamW's; ``clip`` bounds the gradient's
      norm, 0 does not.
    - ``accumulate`` cuts a batch into pieces that are computed one after the other.
    - ``precision``: float32, or bfloat16 for the products (weights and sums stay float32).
    - every ``evaluate`` steps the held-out score is taken; ``patience`` evaluations without a better one end the run
      (0: never).
    - every ``save`` steps a checkpoint is written, and the last ``keep`` and the best one stay.
    - ``record``: the share of the time that watching the heads may take, 0 does not watch; at steps 0, 1, 2, 3, 4, 6,
      8, 11 … (2^(k/2), rounded), or every ``record_every`` steps.
    - ``parallel``: under torchrun, ``ddp`` (a model in every process) or ``fsdp`` (a share of it).
    - ``model`` and ``data`` are the task's own.

    >>> from regard.training.tasks import TASKS
    >>> recipe = TASKS["repeats"].recipe.changed({"steps": 300, "model.layers": 3})
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
        least = {"steps": 1, "batch": 1, "accumulate": 1, "evaluate": 1, "save": 1, "keep": 1}
        for name in (*least, "seed", "warmup", "patience", "record_every"):
            value, few = getattr(self, name), least.get(name, 0)
            if not isinstance(value, int) or not few <= value < 2**53:
                raise ValueError(f"{name} is {value!r}; it must be a whole number ≥ {few}")
        for name, low, high in (
            *(("rate", 0.0, math.inf), ("floor", 0.0, 1.0), ("decay", 0.0, math.inf), ("clip", 0.0, math.inf)),
            *(("beta1", 0.0, 1.0), ("beta2", 0.0, 1.0), ("record", 0.0, 1.0)),
        ):
            number: float = getattr(self, name)
            beta, above = name.startswith("beta"), name == "rate"
            less = number <= low if above else number < low
            if not math.isfinite(number) or less or (number >= high if beta else number > high):
                until = "" if high == math.inf else f" and {'<' if beta else '≤'} {high:g}"
                raise ValueError(f"{name} is {number}; it must be a number {'>' if above else '≥'} {low:g}{until}")
        if self.warmup >= self.steps > 1:
            raise ValueError(
                f"warmup is {self.warmup} and steps {self.steps}; the rate must rise in fewer steps than all"
            )
        for name, known in (("precision", ("float32", "bfloat16")), ("parallel", ("ddp", "fsdp"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be {' or '.join(known)}")
        if self.batch % self.accumulate:
            raise ValueError(f"accumulate={self.accumulate} does not divide batch={self.batch}; pieces must be alike")

    def changed(self, changes: Mapping[str, Any]) -> Recipe:
        """This recipe with some entries changed: ``{"steps": 100, "model.layers": 2}``; nested tables may be given.

        >>> Recipe("mine", steps=200, batch=8, rate=1e-3).changed({"rate": "2e-3", "warmup": 20}).rate  # texts are read
        0.002
        """
        tables: dict[str, dict[str, Value]] = {name: dict(getattr(self, name)) for name in TABLES}
        own: dict[str, Any] = {}
        for name, value in flat(changes).items():
            table, _, inner = name.rpartition(".")
            if table in TABLES and inner in tables[table]:
                tables[table][inner] = _as(name, value, tables[table][inner])
            elif not table and name in self._names():
                own[name] = _as(name, value, getattr(self, name))
            else:
                raise ValueError(f"a {self.task} recipe has no {name}; it has {', '.join(self.names())}")
        return replace(self, **own, **tables)  # type: ignore[arg-type]

    def names(self) -> list[str]:
        """Everything that can be set."""
        nested = [f"{table}.{inner}" for table in TABLES for inner in getattr(self, table)]
        return [*self._names(), *nested]

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        return asdict(replace(self, model=dict(self.model), data=dict(self.data)))

    def to_toml(self) -> str:
        """As a file that ``read_recipe`` and ``--config`` take.

        >>> Recipe("mine", steps=200, batch=8, rate=1e-3, model={"d": 16}).to_toml().splitlines()[:4]
        ['task = "mine"', 'steps = 200', 'batch = 8', 'rate = 0.001']
        """
        told = self.to_dict()
        lines = [f"{name} = {_toml(told[name])}" for name in ("task", *self._names())]
        for table in TABLES:
            lines += ["", f"[{table}]", *(f"{name} = {_toml(value)}" for name, value in told[table].items())]
        return "\n".join(lines) + "\n"

    def _names(self) -> list[str]:
        return [f.name for f in fields(self) if f.name not in ("task", *TABLES)]


def flat(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Tables in a table as names with a dot: ``{"model": {"layers": 2}}`` → ``{"model.layers": 2}``."""
    found: dict[str, Any] = {}
    for name, value in recipe.items():
        found |= {f"{name}.{x}": y for x, y in value.items()} if isinstance(value, Mapping) else {name: value}
    return found


def read_recipe(file: Path) -> dict[str, Any]:
    """What a TOML file says; checked against a task's recipe by ``Recipe.changed``."""
    try:
        if not stat.S_ISREG(file.stat().st_mode) or file.stat().st_size > LARGEST:
            raise ValueError(f"{file} has {file.stat().st_size:,} bytes or is no file; that is no recipe")
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{file} is not TOML: {error}") from None


def assigned(texts: Iterable[str]) -> dict[str, str]:
    """``["steps=100", "model.layers=2"]`` as a table of texts, which ``Recipe.changed`` reads as what they set."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise ValueError(f"--set is {text!r}; it must be name=value, e.g. steps=200 or model.layers=2")
        found[name.strip()] = value.strip()
    return found


def _as(name: str, given: Any, before: Value) -> Value:
    """A value of the kind that stands there now; texts are read, whole numbers serve as numbers."""
    kind = type(before)
    wanted = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}[kind]
    wrong = ValueError(f"{name} is {given!r}; it must be {wanted}, e.g. {json.dumps(before)}")
    if isinstance(given, str) and kind is not str:
        text = given.replace("_", "").lower()
        try:
            if kind is bool:
                return {"true": True, "false": False}[text]
            number = float(text)
            return number if kind is float else int(text) if text.lstrip("+-").isdigit() else _whole(number)
        except (KeyError, ValueError):
            raise wrong from None
    if kind is float and isinstance(given, int) and not isinstance(given, bool):
        return float(given)
    if type(given) is not kind:
        raise wrong
    return given


def _whole(number: float) -> int:
    if not math.isfinite(number) or number != int(number):
        raise ValueError
    return int(number)  # 1e4 is a whole number as people write it


def _toml(value: Value) -> str:
    return json.dumps(value, ensure_ascii=False)  # TOML's numbers, texts and truth values are written as JSON's
