"""The architectures of the installed ``transformers``, each with the class that is tested."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Where the class of an architecture is looked up: the bare model first, because it needs the fewest inputs.
PREFERRED = (
    "MODEL_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
)
CONFIGS = "CONFIG_MAPPING_NAMES"


@dataclass(frozen=True)
class Architecture:
    """An architecture: its ``name`` (the ``model_type`` of ``transformers``) and the name of its model class.

    >>> Architecture("gpt2", "GPT2LMHeadModel").name
    'gpt2'
    """

    name: str
    class_name: str


def list_architectures() -> dict[str, Architecture]:
    """Every architecture that has a model of its own, by name, in alphabetical order.

    The other configurations of ``transformers`` are parts of these architectures, for example ``clip_text_model``.

    >>> list_architectures()["gpt2"]
    Architecture(name='gpt2', class_name='GPT2Model')
    """
    from transformers.models.auto import modeling_auto

    tables = [name for name in dir(modeling_auto) if name.endswith("MAPPING_NAMES") and name != CONFIGS]
    others = [name for name in tables if name not in PREFERRED]
    found: dict[str, Architecture] = {}
    for table in (*PREFERRED, *others):
        for name, class_name in getattr(modeling_auto, table).items():
            # Some architectures list several classes: the first one is the largest.
            if not isinstance(class_name, str):
                class_name = class_name[0]
            found.setdefault(name, Architecture(name, class_name))
    return dict(sorted(found.items()))


def find_class(architecture: Architecture) -> Any:
    """The model class of an architecture. Raises ``AttributeError`` or ``ImportError`` if it cannot be imported."""
    import transformers

    return getattr(transformers, architecture.class_name)
