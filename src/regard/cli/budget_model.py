"""The model of ``regard budget``: a kind with fields, the name of a preset, a config.json, or the text of one."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regard._errors import RegardError
from regard.budget._counted_model import CountedModel
from regard.budget._hf_configs import from_config
from regard.budget._model import Model
from regard.budget._models_from_fields import build_model, parse_fields, symbolic_model
from regard.budget._models_from_sizes import KINDS
from regard.budget._presets import Preset, close_presets, match_preset, title_with_fields

ACCEPTED = f"a kind ({', '.join(KINDS)}) with fields, a name such as gpt2 (--list prints them), or a config.json"


@dataclass(frozen=True)
class ModelChoice:
    """What the command line says about a model.

    - `kind`, `fields`: a kind of model and its fields. For a preset, `fields` are those that change.
    - `preset`: a known model, or None.
    - `config`: entries of a config, or the path of its file; None if there is none.
    """

    kind: str | None
    fields: dict[str, Any] = field(default_factory=dict)
    preset: Preset | None = None
    config: Mapping[str, Any] | str | None = None

    def build(self, changes: Mapping[str, Any] | None = None) -> Model:
        """Build the model; `changes` replaces fields."""
        fields = {**self.fields, **(changes or {})}
        if self.preset is not None:
            return self.preset.build(fields)
        if self.config is not None:
            model = from_config(self.config)
            if isinstance(model, CountedModel):
                raise RegardError(f"{model.title} has no formula; only a plan of this model alone can be counted")
            return model
        return build_model(str(self.kind), fields)

    def build_counted(self) -> CountedModel | None:
        """Build the model of a config without a formula, which is counted by walking; None for other models."""
        if self.config is None:
            return None
        model = from_config(self.config)
        return model if isinstance(model, CountedModel) else None

    @property
    def preset_title(self) -> str | None:
        """The title of the preset with its changed fields; None if the model is not a preset."""
        return None if self.preset is None else self.preset.changed_title(self.fields)

    def build_symbolic(self) -> Model | None:
        """Build the model with symbols for its sizes; None if a config describes it, which has only numbers."""
        if self.kind is None:
            return None
        fields = dict(self.fields)
        if self.preset is not None:
            fields = {**self.preset.fields, **fields}
        return symbolic_model(self.kind, fields)


def choose_model(text: str, field_texts: Sequence[str]) -> ModelChoice:
    """Find out what the first argument means: a kind, an existing file or folder, a config as text, or a preset.

    - `text`: the argument.
    - `field_texts`: the fields after it, as ``name=value``.
    """
    kind = text.lower()
    if kind in KINDS:
        return ModelChoice(kind, parse_fields(kind, field_texts))
    if not text.strip():
        raise RegardError(f"model must be {ACCEPTED}, got an empty text")

    # A file that exists is meant, even if a preset has the same name.
    path = Path(text)
    if path.suffix == ".gguf":
        raise RegardError(f"model must be {ACCEPTED}, got the GGUF file {text}; regard describe counts its parameters")
    # Also a pipe or a device: reading it is refused by name.
    is_config = _exists(path) and (not path.is_dir() or _exists(path / "config.json"))
    if is_config or text.lstrip().startswith("{"):
        if field_texts:
            raise RegardError(f"model must be a kind or a preset if it has fields, got a config with {field_texts[0]}")
        return ModelChoice(None, config=text if is_config else _parse_config(text))
    preset = match_preset(text)
    if preset is not None:
        return _change_preset(preset, field_texts)
    raise RegardError(_unknown_model(text, path))


def choose_from_line(line: str) -> ModelChoice:
    """Find the model of ``--against``, which is one text: ``mistral-7b`` or ``"decoder d=512 heads=8 layers=6"``."""
    if not line.strip():
        raise RegardError(f"--against must be {ACCEPTED}, got an empty text")
    if line.lstrip().startswith("{") or _exists(Path(line)):
        return choose_model(line, [])
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise RegardError(f"--against must be one model, got {line!r}: {error}") from None
    # Quotes around nothing are one empty word, which no model has as its name.
    return choose_model(words[0], words[1:])


def distinct_titles(choices: Sequence[ModelChoice], models: Sequence[Model]) -> list[str]:
    """The titles of two models; if they are equal, with what tells the models apart: fields, or paths as given."""
    titles = [model.title for model in models]
    if titles[0] != titles[1]:
        return titles
    first, second = choices
    if isinstance(first.config, str) and isinstance(second.config, str):
        return [first.config, second.config]
    # Models of the same title that have fields are of the same kind.
    if first.kind is not None and second.kind is not None:
        return [_title_besides(titles[0], first, second), _title_besides(titles[1], second, first)]
    return titles


def _title_besides(title: str, choice: ModelChoice, other: ModelChoice) -> str:
    """The title with the fields that the other model does not have, or has with another value."""
    fields = {}
    for name, value in choice.fields.items():
        if name not in other.fields or other.fields[name] != value:
            fields[name] = value
    return title_with_fields(title, fields)


def _change_preset(preset: Preset, field_texts: Sequence[str]) -> ModelChoice:
    """Return a preset with changed fields."""
    if preset.kind is None and field_texts:
        raise RegardError(f"{preset.name} takes no fields, got {field_texts[0]}; it is counted from its config.json")
    fields: dict[str, Any] = {}
    if preset.kind is not None:
        fields = parse_fields(preset.kind, field_texts)
    return ModelChoice(preset.kind, fields, preset)


def _parse_config(text: str) -> Mapping[str, Any]:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RegardError(f"model is not valid JSON: {error}") from None
    entries: Mapping[str, Any] = config
    return entries


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that is too long or has a zero byte
        return False


def _unknown_model(text: str, path: Path) -> str:
    """Say what is wrong with a model that is neither known nor a file."""
    shown = repr(text if len(text) <= 80 else text[:80] + "…")
    if _exists(path):
        return f"model {shown} is a folder without a config.json; give a folder that has one"
    close = close_presets(text)
    if close and "/" not in text:
        return f"unknown model {shown}; did you mean {', '.join(close)}? (--list prints all names)"
    if "/" in text or text.endswith(".json"):
        return f"{shown} does not exist; model must be {ACCEPTED}"
    return f"unknown model {shown}; model must be {ACCEPTED}"
