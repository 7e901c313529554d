"""Names that configurations give to activations, and ours for the same functions."""

from __future__ import annotations

from regard.config import Config

__all__ = ["activation"]

NAMES = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}


def activation(config: Config, entry: str, default: str) -> str:
    """Our name for the activation that a config names.

    >>> activation(Config(hidden_act="gelu_new"), "hidden_act", "gelu")
    'gelu_tanh'
    """
    name = config.name(entry, default)
    if name not in NAMES:
        raise ValueError(f"config.json: {entry} is {name!r}; known are {', '.join(NAMES)}")
    return NAMES[name]
