"""Responses of the Budget page: a request becomes a plan of ``regard.budget``, and the plan becomes plain data."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec
from sympy import Integer

from regard._config_json import Config
from regard._errors import RegardError
from regard._files import json_safe
from regard.budget._attention_parts import Attention
from regard.budget._compare_models import compare
from regard.budget._cost_figure import cost_curves
from regard.budget._experts_part import Experts
from regard.budget._hf_configs import model_from_config
from regard.budget._machine import Machine, find_machine, machines
from regard.budget._machine_benchmark import saved_machine, this_machine
from regard.budget._make_plan import plan
from regard.budget._model import Model
from regard.budget._models_from_fields import FIELDS, build_model
from regard.budget._parts import FeedForward
from regard.budget._plan import Plan
from regard.budget._presets import PRESETS, Preset
from regard.budget._symbols import to_int
from regard.lab.budget.endpoints import CompareRequest, ModelFields, PlanRequest

MAX_SHARED = 6000  # the longest config, in characters, that fits into a page's URL


def start_response() -> dict[str, Any]:
    """Return what the page offers: kinds of model with their fields, presets and machines."""
    offered = set(ModelFields.__struct_fields__)
    kinds = {}
    for kind, names in FIELDS.items():
        kinds[kind] = [name for name in names if name in offered]
    machine = saved_machine()
    return {
        "kinds": kinds,
        "presets": preset_requests(),
        "machines": [_machine_fields(find_machine(name)) for name in machines()],
        "this": None if machine is None else _machine_fields(machine),
    }


def preset_requests() -> dict[str, dict[str, Any]]:
    """Return the presets of ``regard.budget`` by name: title, length, and kind with fields or the text of a config."""
    requests: dict[str, dict[str, Any]] = {}
    for name, preset in PRESETS.items():
        entry: dict[str, Any] = {"title": preset.title}
        if preset.tokens is not None:
            entry["tokens"] = preset.tokens
        if preset.kind is None:
            entry["config"] = json.dumps(preset.config, separators=(",", ":"))
        else:
            entry |= {"kind": preset.kind, "fields": dict(preset.fields)}
        requests[name] = entry
    return requests


def _machine_fields(machine: Machine) -> dict[str, Any]:
    return {
        "name": machine.name,
        "dtypes": sorted(machine.peak),
        "peak": dict(machine.peak),
        "bandwidth": machine.bandwidth,
        "memory": machine.memory,
        "measured": machine.measured,
        "load": machine.load,
        "measurement": machine.measurement,
    }


def fields_of(request: PlanRequest) -> dict[str, Any]:
    """Return the fields that are set. Raises an error for fields that the kind of model does not have."""
    fields = {}
    for name, value in msgspec.structs.asdict(request.fields).items():
        if value is None:
            continue
        if name not in FIELDS[request.kind]:
            raise RegardError(f"{request.kind} has no {name}; it has {', '.join(FIELDS[request.kind])}")
        fields[name] = value
    return fields


def model_of(request: PlanRequest) -> Model:
    """Return the model of a request, from its config or from its kind and fields."""
    if request.config is not None:
        config = _parse_config(request.config)
        model = model_from_config(config)
        preset = _find_preset(None, config)
    else:
        fields = fields_of(request)
        model = build_model(request.kind, fields)
        preset = _find_preset(request.kind, fields)
    if preset is not None:
        model = replace(model, context_length=preset.build().context_length)
    return model if request.tiled else model.with_plain_attention()


def _find_preset(kind: str | None, entries: Mapping[str, Any]) -> Preset | None:
    """Return the preset with exactly these fields or this config (if `kind` is None); None if there is none."""
    for preset in PRESETS.values():
        own = preset.fields if kind is not None else preset.config
        if preset.kind == kind and dict(own or {}) == dict(entries):
            return preset
    return None


def build_plan(request: PlanRequest) -> Plan:
    """Return the plan that ``regard.budget.plan`` gives for a request."""
    return plan(model_of(request), request.tokens, **run_options(request))


def run_options(request: PlanRequest) -> dict[str, Any]:
    """Return the arguments of ``regard.budget.plan`` besides the model and its length."""
    names = ("source", "batch", "dtype", "weights", "training", "optimizer", "memory_limit")
    options = {name: getattr(request, name) for name in names}
    return options | {"machine": _find_machine(request.machine)}


def _find_machine(name: str | None) -> Machine | None:
    if name is None:
        return None
    if name != "this":
        return find_machine(name)
    # Measuring takes seconds, which a request should not wait for.
    machine = saved_machine()
    if machine is None:
        raise RegardError("machine='this' is not measured yet; measure it first")
    return machine


def plan_response(request: PlanRequest) -> dict[str, Any]:
    """Return a plan as plain data, with the sizes of its model."""
    full_plan = build_plan(request)
    model = full_plan.model
    response = full_plan.to_dict() | {
        "sizes": model_sizes(model),
        "needs_source": model.has_source,
        "fixed": model.fixed_tokens is not None,
        "longest": model.max_tokens,
        "shortest": model.image_tokens or 1,
        "decodes_any_length": full_plan.decodes_any_length,
        "theory": _theory_exercise(full_plan),
        "tiled": all(part.tiled for _, part in model.attention_parts),
    }
    if full_plan.machine is not None:
        response["machine"] = _machine_fields(full_plan.machine)
    safe: dict[str, Any] = json_safe(response)
    return safe


def model_sizes(model: Model) -> dict[str, int]:
    """Return the sizes of a model's first attention layer and feed-forward network, defaults included."""
    # Of a model of images and text, the sizes of its decoder, which runs last.
    stacks = [stack for stack in model.stacks if stack.name != "image"]
    part = next(placed.part for placed in stacks[0] if isinstance(placed.part, Attention))
    sizes = {name: getattr(part, name) for name in ("heads", "kv_heads", "d_key", "d_value", "d_out")}
    sizes |= {"d": model.d, "layers": stacks[0].layers, "decoder_layers": model.stacks[-1].layers}
    for placed in stacks[0]:
        if isinstance(placed.part, FeedForward | Experts):
            sizes["hidden"] = placed.part.hidden
            break
    if model.vocab is not None:
        sizes["vocab"] = model.vocab
    return {name: to_int(size) for name, size in sizes.items()}


def _theory_exercise(full_plan: Plan) -> dict[str, int] | None:
    """Return the numbers of parameters by part, and their sum, if the model is one attention layer."""
    if full_plan.model.kind != "attention":
        return None
    ((_, part),) = full_plan.model.attention_parts
    counts = {name: to_int(count) for name, count in attention_parameters(part).items()}
    return counts | {"in all": full_plan.parameters}


def attention_parameters(part: Attention) -> dict[str, Any]:
    """Return the numbers of parameters of one head, of all heads (their q, k and v), and of the output projection."""
    heads = Integer(0)
    output = Integer(0)
    for weight in part.weights():
        name = weight.name.split(".")[0]
        if name == "out":
            output += weight.count
        elif name in ("q", "k", "v"):
            heads += weight.count
    counts = {"all heads": heads, "output": output}
    if part.kv_heads != part.heads:  # heads that share keys and values have no parameters per head
        return counts
    return {"a head": heads / part.heads, **counts}


def compare_response(request: CompareRequest) -> dict[str, Any]:
    """Return the figures of two models under the same conditions, and their titles."""
    second = msgspec.structs.replace(
        request.first, kind=request.second.kind, fields=request.second.fields, config=request.second.config
    )
    models = [model_of(request.first), model_of(second)]
    # The page always has a length. If the second model has fewer learned positions, or an image that needs more
    # tokens, both are compared there.
    tokens = request.first.tokens
    for model in models:
        if tokens is not None and model.max_tokens is not None:
            tokens = min(tokens, to_int(model.max_tokens))
    for model in models:
        if tokens is not None and model.fixed_tokens is None:
            tokens = max(tokens, model.image_tokens or 1)
    comparison = compare(models[0], models[1], tokens, **run_options(request.first))
    figures = comparison.to_dict()["figures"]
    response: dict[str, Any] = {
        "titles": [comparison.first.model.title, comparison.second.model.title],
        "tokens": [comparison.first.lengths.n, comparison.second.lengths.n],
        "figures": figures,
        "without_limit": {figure["figure"]: comparison.without_limit(figure["figure"]) for figure in figures},
    }
    safe: dict[str, Any] = json_safe(response)
    return safe


def cost_response(request: PlanRequest) -> dict[str, Any]:
    """Return the cost by number of tokens n. An image model has a fixed n, and so no curves."""
    full_plan = build_plan(request)
    response: dict[str, Any] = {
        "unit": "FLOPs" if full_plan.machine is None else "seconds",
        "n": [],
        "lines": {},
        "at": full_plan.lengths.n,
        "crossover": None,
    }
    if full_plan.model.fixed_tokens is None:
        points, curves = cost_curves(full_plan)
        response |= {"n": points, "lines": curves, "crossover": full_plan.crossover}
    return response


class _TrackedConfig(Config):
    """A config that remembers which of its entries were read."""

    keys_read: set[str]

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_read.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.keys_read.add(str(key))
        return super().__contains__(key)


def config_response(text: str) -> dict[str, Any]:
    """Return the title of a config's model, and its relevant entries as text; "" if they are too long for a URL."""
    config = _TrackedConfig(_parse_config(text))
    config.keys_read = set()
    model = model_from_config(config)
    entries = {key: value for key, value in config.items() if key in config.keys_read}
    if entries.get("id2label"):  # only the number of labels matters
        entries["num_labels"] = len(entries.pop("id2label"))
    short = json.dumps(entries, separators=(",", ":"), ensure_ascii=False)
    return {"title": model.title, "config": short if len(short) <= MAX_SHARED else ""}


def _parse_config(text: str) -> Config:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RegardError(f"config is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise RegardError(f"config must be a JSON object, got {type(config).__name__}")
    return Config(config)


def measure_machine(args: dict[str, Any], progress: Callable[..., None]) -> dict[str, Any]:
    """Return this machine's figures. Measures them if there are none yet, or if ``args["again"]`` is true."""
    machine = this_machine(bool(args["again"]), lambda done, of: progress(done, of, "measuring"))
    fields: dict[str, Any] = json.loads(machine.to_json())
    return fields
