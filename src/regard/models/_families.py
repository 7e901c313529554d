"""Model families by ``model_type``: which function builds the model that a ``config.json`` describes."""

from __future__ import annotations

from importlib import import_module

from regard._errors import RegardError
from regard.models import _bert, _gpt2, _llama, _t5, _vit
from regard.models._model import BuildFunction

FAMILIES: dict[str, BuildFunction] = {}
for _module in (_bert, _gpt2, _llama, _t5, _vit):
    for _model_type in _module.MODEL_TYPES:
        FAMILIES[_model_type] = _module.build

# The training tasks define image models of their own. They live in a package that imports this one, so they are named
# here by path and imported when a folder needs them.
TRAINING_FAMILIES = {
    "regard-attention-only": "regard.training.image_models.attention_only",
    "regard-relative-attention": "regard.training.image_models.relative_attention",
    "regard-resnet": "regard.training.image_models.resnet",
}


def model_types() -> tuple[str, ...]:
    """The values of ``model_type`` that can be loaded.

    >>> "llama" in model_types(), "mamba" in model_types()
    (True, False)
    """
    return (*FAMILIES, *TRAINING_FAMILIES)


def build_function(model_type: str, where: str = "") -> BuildFunction:
    """The function that builds a model of this type from its config; ``where`` is the start of the error message."""
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    if model_type in TRAINING_FAMILIES:
        build: BuildFunction = import_module(TRAINING_FAMILIES[model_type]).build
        return build
    raise RegardError(f"{where}model_type is {model_type!r}; known are {', '.join(model_types())}")
