"""Endpoints of the Budget page. Each response is a plan of ``regard.budget``.

Handlers import the planner at the first request: importing sympy takes half a second, and the lab must start fast.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from regard.lab.endpoint import Endpoints, Request
from regard.lab.workspace import Workspace

ENDPOINTS = Endpoints()

Width = Annotated[int, Meta(ge=1, le=2**18)]
Heads = Annotated[int, Meta(ge=1, le=4096)]
Layers = Annotated[int, Meta(ge=1, le=1024)]
VocabularySize = Annotated[int, Meta(ge=1, le=2**24)]
Tokens = Annotated[int, Meta(ge=1, le=2**24)]
MachineName = Annotated[str, Meta(max_length=60)]
Position = Literal["none", "learned", "sinusoidal", "rotary", "alibi", "t5", "table", "shaw", "quadratic"]
Kind = Literal["attention", "block", "encoder", "decoder", "encoder-decoder", "vit"]
ConfigText = Annotated[str, Meta(max_length=2**20)]


class ModelFields(Request, frozen=True):
    """Sizes and options of a model, as in ``regard budget``. The defaults are those of ``regard.nn``."""

    d: Width | None = None
    heads: Heads | None = None
    d_key: Width | None = None
    d_value: Width | None = None
    d_out: Width | None = None
    kv_heads: Heads | None = None
    layers: Layers | None = None
    decoder_layers: Layers | None = None
    hidden: Annotated[int, Meta(ge=1, le=2**20)] | None = None
    vocab: VocabularySize | None = None
    window: Tokens | None = None
    reach: Tokens | None = None
    image: Annotated[int, Meta(ge=1, le=2**13)] | None = None
    patch: Annotated[int, Meta(ge=1, le=2**13)] | None = None
    channels: Annotated[int, Meta(ge=1, le=1024)] | None = None
    classes: VocabularySize | None = None
    bias: bool | None = None
    qkv_bias: bool | None = None
    gated: bool | None = None
    tied: bool | None = None
    scaled: bool | None = None
    dropout: bool | None = None
    causal: bool | None = None
    norm: Literal["layer", "rms"] | None = None
    order: Literal["pre", "post"] | None = None
    position: Position | None = None


class PlanRequest(Request, frozen=True):
    """A model (a kind and its fields, or the text of a ``config.json``), and what it runs on."""

    kind: Kind = "attention"
    fields: ModelFields = ModelFields()
    config: ConfigText | None = None
    tokens: Tokens | None = None
    source: Tokens | None = None
    batch: Annotated[int, Meta(ge=1, le=2**20)] = 1
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    weights: Literal["int8", "int4"] | None = None
    training: bool = False
    optimizer: Literal["adam", "adam32", "momentum", "sgd", "none"] = "adam"
    tiled: bool = True
    machine: MachineName | None = None
    memory_limit: Annotated[int, Meta(ge=1, le=2**50)] | None = None


class ModelRequest(Request, frozen=True):
    """A model alone: a kind and its fields, or the text of a ``config.json``."""

    kind: Kind = "attention"
    fields: ModelFields = ModelFields()
    config: ConfigText | None = None


class CompareRequest(Request, frozen=True):
    """Two models; the second runs as the first."""

    first: PlanRequest
    second: ModelRequest


class ConfigRequest(Request, frozen=True):
    """The text of a ``config.json``."""

    config: ConfigText


class MeasureRequest(Request, frozen=True):
    """Measure this machine; with ``again``, even if it was measured before."""

    again: bool = False


@ENDPOINTS.get("/api/budget")
def start(workspace: Workspace, request: Any) -> dict[str, Any]:
    """List the kinds of model with their fields, presets and machines."""
    from regard.lab.budget.responses import start_response

    return start_response()


@ENDPOINTS.post("/api/budget/plan", PlanRequest)
def plan(workspace: Workspace, request: PlanRequest) -> dict[str, Any]:
    """Count a model: parameters, FLOPs, bytes, seconds, bottleneck and crossover."""
    from regard.lab.budget.responses import plan_response

    return plan_response(request)


@ENDPOINTS.post("/api/budget/compare", CompareRequest)
def compare(workspace: Workspace, request: CompareRequest) -> dict[str, Any]:
    """Count two models under the same conditions, with differences."""
    from regard.lab.budget.responses import compare_response

    return compare_response(request)


@ENDPOINTS.post("/api/budget/costs", PlanRequest)
def costs(workspace: Workspace, request: PlanRequest) -> dict[str, Any]:
    """Return the cost by number of tokens: attention, all the rest, and where they are equal."""
    from regard.lab.budget.responses import cost_response

    return cost_response(request)


@ENDPOINTS.post("/api/budget/formulas", PlanRequest)
def formulas(workspace: Workspace, request: PlanRequest) -> dict[str, Any]:
    """Return the formulas in symbols, with numbers inserted, and their values, as MathML."""
    from regard.lab.budget.formulas import formulas_response

    return formulas_response(request)


@ENDPOINTS.post("/api/budget/config", ConfigRequest)
def config(workspace: Workspace, request: ConfigRequest) -> dict[str, Any]:
    """Read a ``config.json``: its model, and the entries that describe it."""
    from regard.lab.budget.responses import config_response

    return config_response(request.config)


@ENDPOINTS.post("/api/budget/measure", MeasureRequest)
def measure(workspace: Workspace, request: MeasureRequest) -> dict[str, Any]:
    """Measure this machine. Starts a job."""
    return workspace.jobs.start("machine", {"again": request.again}).to_dict()
