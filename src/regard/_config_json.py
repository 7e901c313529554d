"""Reads and checks a model's ``config.json``; every error names the entry, its value and what is accepted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from regard._errors import RegardError
from regard._files import read_regular

_MISSING: Any = object()
MOST_LAYERS = 1024
LARGEST_JSON = 64 * 2**20  # bytes

# model_type → the prefix of its class names in transformers.
CLASS_PREFIXES = {
    "bert": "Bert",
    "roberta": "Roberta",
    "xlm-roberta": "XLMRoberta",
    "camembert": "Camembert",
    "electra": "Electra",
    "modernbert": "ModernBert",
    "distilbert": "DistilBert",
    "gpt2": "GPT2",
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "olmo": "Olmo",
    "olmo2": "Olmo2",
    "phi3": "Phi3",
    "smollm3": "SmolLM3",
    "stablelm": "StableLm",
    "t5": "T5",
    "mt5": "MT5",
    "umt5": "UMT5",
    "vit": "ViT",
}


class UnknownHeadError(RegardError):
    """The config's architecture is a class of its family that is not among those that the caller knows."""


def read_json(file: Path) -> dict[str, Any]:
    """Return the entries of a JSON file. Raises if the file is too large, is not JSON or is not an object."""
    content = read_regular(file, LARGEST_JSON)
    try:
        entries = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise RegardError(f"{file} is not JSON: {error}") from None
    if not isinstance(entries, dict):
        raise RegardError(f"{file} holds {type(entries).__name__}; it must be an object with entries")
    return entries


# transformers' name → ours
ACTIVATION_NAMES = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}


class MissingEntryError(RegardError):
    """An entry that a config needs is missing."""


class Config(dict[str, Any]):
    """The entries of a JSON config file; null counts as absent. ``file`` is the name of the file in error messages.

    >>> Config(hidden_size=12).integer("hidden_size")
    12
    """

    file = "config.json"

    @property
    def model_type(self) -> str:
        """``model_type``, the name of the model family."""
        return self.string("model_type")

    @property
    def architecture(self) -> str:
        """The first of ``architectures``: the class that wrote the checkpoint; "" if there is none."""
        names = self.get("architectures") or [""]
        if not isinstance(names, list) or not isinstance(names[0], str):
            raise self.error("architectures", "it must be a list of names")
        return names[0]

    def head_name(self, *names: str) -> str:
        """Return the task head of the architecture: its name without the model prefix, for example "ForCausalLM".

        Raises if it is not one of ``names``. Returns "" if the config has no architecture.
        """
        prefix = CLASS_PREFIXES[self.model_type]
        if not self.architecture:
            return ""
        name = self.architecture.removeprefix(prefix)
        if self.architecture != prefix + name or name not in names:
            known = ", ".join(prefix + name for name in names)
            raise UnknownHeadError(f"{self.file}: architectures is {self.architecture}; it must be one of {known}")
        return name

    def class_count(self) -> int:
        """Number of classes of a classifier: the entries of ``id2label``, else ``num_labels``, else 2."""
        return len(self.section("id2label")) or self.integer("num_labels", 2)

    def sliding_windows(self) -> list[int | None]:
        """Return, per layer of a Llama-like decoder, how many keys a query sees, its own included. None means all."""
        layers = self.layer_count("num_hidden_layers")
        if self.model_type in ("llama", "gemma", "olmo", "olmo2", "stablelm"):
            return [None] * layers
        window = None
        if self.get("sliding_window") is not None:
            window = self.integer("sliding_window")
        if self.model_type == "phi3":
            return [window] * layers
        if self.model_type == "mistral":
            # An exception: here null does not count as absent. It disables the window; a missing entry means 4096.
            return [window if "sliding_window" in self else 4096] * layers
        if self.model_type != "gemma2" and not self.boolean("use_sliding_window", False):
            return [None] * layers

        choices = {"full_attention": None, "sliding_attention": window if window is not None else 4096}
        layer_types = self.get("layer_types")
        if self.model_type == "smollm3":
            choices["sliding_attention"] = window  # None: no window
            if layer_types is None:
                names = {True: "full_attention", False: "sliding_attention"}
                layer_types = [names[rotates] for rotates in self.rotary_layers()]
        if self.model_type == "gemma2":
            choices["sliding_attention"] = window if "sliding_window" in self else 4096  # as for Mistral
            if layer_types is None:
                layer_types = [("sliding_attention", "full_attention")[i % 2] for i in range(layers)]
        if layer_types is None:
            first = self.integer("max_window_layers", 28, least=0)
            layer_types = ["full_attention"] * min(first, layers) + ["sliding_attention"] * max(0, layers - first)
        # A list or an object among the names cannot be looked up.
        valid = isinstance(layer_types, list) and all(isinstance(x, str) and x in choices for x in layer_types)
        if not valid or len(layer_types) != layers:
            raise self.error("layer_types", f"it must name {layers} layers as {' or '.join(choices)}")
        return [choices[layer_type] for layer_type in layer_types]

    def rotary_layers(self) -> list[bool]:
        """Return, per layer of a SmolLM3, whether it has rotary positions; the others have none at all."""
        layers = self.layer_count("num_hidden_layers")
        rotates = self.get("no_rope_layers")
        if rotates is None:
            interval = self.integer("no_rope_layer_interval", 4)
            return [(i + 1) % interval != 0 for i in range(layers)]
        # 1 means that the layer does have rotary positions, although the name says otherwise.
        if not isinstance(rotates, list) or len(rotates) < layers or any(x not in (0, 1) for x in rotates):
            raise self.error("no_rope_layers", f"it must be a list of 0 and 1 for {layers} layers")
        return [bool(x) for x in rotates[:layers]]

    def integer(self, name: str, default: int = _MISSING, least: int = 1) -> int:
        """Return an entry that must be an integer ≥ ``least`` and below 2³¹."""
        value = self._value(name, default)
        if not _is_size(value, least):
            raise self.error(name, f"it must be an integer ≥ {least}, below 2³¹")
        assert isinstance(value, int)
        return value

    def layer_count(self, name: str, default: int = _MISSING) -> int:
        """Return the number of layers. It is limited, because all layers are built before any weight is read."""
        value = self.integer(name, default)
        if value > MOST_LAYERS:
            raise self.error(name, f"at most {MOST_LAYERS:,} are accepted")
        return value

    def number(self, name: str, default: float = _MISSING, least: float = 0.0) -> float:
        """Return an entry that must be a finite number ≥ ``least``."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < 1e300:
            raise self.error(name, f"it must be a finite number ≥ {least:g}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        """Return an entry that must be true or false."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "it must be true or false")
        return value

    def string(self, name: str, default: str = _MISSING) -> str:
        """Return an entry that must be a string."""
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.error(name, "it must be a string")
        return value

    def section(self, name: str) -> Config:
        """Return a nested object; it is empty if the entry is absent."""
        value = self._value(name, {})
        if not isinstance(value, Mapping):
            raise self.error(name, "it must be an object with entries")
        section = Config(value)
        section.file = self.file
        return section

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Return one token id or a list of them as a tuple; () if the entry is absent."""
        ids = self._value(name, [])
        if not isinstance(ids, list):
            ids = [ids]
        if not all(_is_size(x, least=0) for x in ids):
            raise self.error(name, "it must be a token id or a list of them, below 2³¹")
        return tuple(ids)

    def pair(self, name: str, default: int) -> tuple[int, int]:
        """Return (height, width) from one integer or a pair."""
        sizes = self._value(name, default)
        if not isinstance(sizes, list | tuple):
            sizes = [sizes, sizes]
        if len(sizes) != 2 or not all(_is_size(x, least=1) for x in sizes):
            raise self.error(name, "it must be an integer ≥ 1 or two of them, below 2³¹")
        return sizes[0], sizes[1]

    def require(self, name: str, value: object) -> None:
        """Raise unless an entry is absent or has the only value that this library supports."""
        if self.get(name) not in (None, value):
            raise self.error(name, f"only {json.dumps(value)} is supported")

    def refuse(self, name: str, reason: str) -> None:
        """Raise if an entry is set and is not false, 0 or empty: it is not supported and must not be ignored."""
        if self.get(name):
            raise self.error(name, reason)

    def error(self, name: str, accepted: str) -> RegardError:
        """Return the error for an entry: its name, its value, and what is accepted."""
        text = repr(self.get(name))
        if len(text) > 40:  # a number of a thousand digits must not fill the screen
            text = text[:37] + "…"
        return RegardError(f"{self.file}: {name} is {text}; {accepted}")

    def _value(self, name: str, default: Any) -> Any:
        value = self.get(name)
        if value is None and default is _MISSING:
            raise MissingEntryError(f"{self.file} has no {name}; a {self.get('model_type', 'model')} needs one")
        return value if value is not None else default


def _is_size(value: object, least: int) -> bool:
    """Whether a value is an integer from ``least`` to 2³¹ − 1, not a bool; larger ones overflow in torch."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**31


def activation_name(config: Config, entry: str, default: str) -> str:
    """Our name of the activation in an entry of a config; ``default`` is transformers' name.

    >>> activation_name(Config(hidden_act="gelu_new"), "hidden_act", "gelu")
    'gelu_tanh'
    """
    name = config.string(entry, default)
    if name not in ACTIVATION_NAMES:
        raise config.error(entry, f"known are {', '.join(ACTIVATION_NAMES)}")
    return ACTIVATION_NAMES[name]
