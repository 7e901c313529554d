"""The room «budget» of the lab: what it answers. Each answer is a plan of ``regard.budget``, derived anew.

The planner is imported when it is first asked: sympy takes half a second, which the lab's start should not pay.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from regard.lab.endpoints import Asked, Endpoints
from regard.lab.lab import Lab

__all__ = ["ENDPOINTS", "Ask", "Fields"]

ENDPOINTS = Endpoints()

Width = Annotated[int, Meta(ge=1, le=2**18)]
Heads = Annotated[int, Meta(ge=1, le=4096)]
Layers = Annotated[int, Meta(ge=1, le=1024)]
Words = Annotated[int, Meta(ge=1, le=2**24)]
Tokens = Annotated[int, Meta(ge=1, le=2**24)]
Name = Annotated[str, Meta(max_length=60)]
Config = Annotated[str, Meta(max_length=2**20)]


class Fields(Asked, frozen=True):
    """Sizes and switches of a model as ``regard budget`` takes them; what is left out is as ``regard.nn`` has it."""

    d: Width | None = None
    heads: Heads | None = None
    d_key: Width | None = None
    d_value: Width | None = None
    d_out: Width | None = None
    kv_heads: Heads | None = None
    layers: Layers | None = None
    decoder_layers: Layers | None = None
    hidden: Annotated[int, Meta(ge=1, le=2**20)] | None = None
    vocab: Words | None = None
    window: Tokens | None = None
    reach: Tokens | None = None
    image: Annotated[int, Meta(ge=1, le=2**13)] | None = None
    patch: Annotated[int, Meta(ge=1, le=2**13)] | None = None
    channels: Annotated[int, Meta(ge=1, le=1024)] | None = None
    classes: Words | None = None
    bias: bool | None = None
    qkv_bias: bool | None = None
    gated: bool | None = None
    tied: bool | None = None
    causal: bool | None = None
    norm: Literal["layer", "rms"] | None = None
    order: Literal["pre", "post"] | None = None
    position: Literal["none", "learned", "sinusoidal", "rotary", "alibi", "t5", "table", "shaw", "quadratic"] | None = (
        None
    )


class Ask(Asked, frozen=True):
    """A model, from a kind and its fields or from the text of a ``config.json``, and what it is run on."""

    kind: Literal["attention", "block", "encoder", "decoder", "encoder-decoder", "vit"] = "attention"
    fields: Fields = Fields()
    config: Config | None = None
    tokens: Tokens | None = None
    source: Tokens | None = None
    batch: Annotated[int, Meta(ge=1, le=2**20)] = 1
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    weights: Literal["int8", "int4"] | None = None
    training: bool = False
    optimizer: Literal["adam", "adam32", "momentum", "sgd", "none"] = "adam"
    tiled: bool = True
    machine: Name | None = None


class Read(Asked, frozen=True):
    """The text of a ``config.json``."""

    config: Config


class Measure(Asked, frozen=True):
    """``again``: although there are figures already."""

    again: bool = False


@ENDPOINTS.get("/api/budget")
def start(lab: Lab, asked: Any) -> dict[str, Any]:
    """Kinds of model with the fields that each takes, sizes to begin with, and machines."""
    from regard.lab import budget_answers

    return budget_answers.start()


@ENDPOINTS.post("/api/budget/plan", Ask)
def plan(lab: Lab, asked: Ask) -> dict[str, Any]:
    """Everything that is counted of a model: parameters, FLOPs, bytes, seconds, bottleneck and crossover."""
    from regard.lab import budget_answers

    return budget_answers.counted(asked)


@ENDPOINTS.post("/api/budget/costs", Ask)
def costs(lab: Lab, asked: Ask) -> dict[str, Any]:
    """Cost against n: attention, all the rest, and where they meet."""
    from regard.lab import budget_answers

    return budget_answers.against_n(asked)


@ENDPOINTS.post("/api/budget/formulas", Ask)
def formulas(lab: Lab, asked: Ask) -> dict[str, Any]:
    """Formulas in the theory's letters, the same with the numbers put in, and what they come to; as MathML."""
    from regard.lab import budget_formulas

    return budget_formulas.written(asked)


@ENDPOINTS.post("/api/budget/config", Read)
def config(lab: Lab, asked: Read) -> dict[str, Any]:
    """The model that a ``config.json`` describes, and those of its entries that say so."""
    from regard.lab import budget_answers

    return budget_answers.read_config(asked.config)


@ENDPOINTS.post("/api/budget/measure", Measure)
def measure(lab: Lab, asked: Measure) -> dict[str, Any]:
    """Starts the job that measures this machine."""
    return lab.jobs.start("machine", {"again": asked.again}).to_dict()
