"""The room «budget»: a request as a plan, and a plan as plain data."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from regard.budget import fields as known
from regard.budget import tables
from regard.budget.attending import Attention
from regard.budget.configs import read
from regard.budget.machine import Machine, machines, named
from regard.budget.model import Model
from regard.budget.parts import FeedForward
from regard.budget.plan import Plan, plan
from regard.budget.symbols import whole
from regard.budget.this_machine import kept
from regard.config import Config
from regard.lab.budget import Ask, Fields

__all__ = ["against_n", "counted", "fields_of", "model_of", "plan_of", "read_config", "start"]

EXACT = 2**53  # up to here a browser counts without rounding
SHARED = 6000  # characters of a config that an address can still carry

# Models to begin with; all of their sizes can be turned.
PRESETS: dict[str, dict[str, Any]] = {
    "Transformer base: attention": {
        "kind": "attention", "fields": {"d": 512, "heads": 8, "bias": False}, "tokens": 512,
    },
    "Transformer base": {
        "kind": "encoder-decoder", "tokens": 512,
        "fields": {"d": 512, "heads": 8, "layers": 6, "vocab": 37000, "order": "post", "position": "sinusoidal"},
    },
    "BERT-base": {
        "kind": "encoder", "tokens": 512,
        "fields": {
            "d": 768, "heads": 12, "layers": 12, "vocab": 30522, "qkv_bias": True, "order": "post",
            "position": "learned", "reach": 512,
        },
    },
    "GPT-2": {
        "kind": "decoder", "tokens": 1024,
        "fields": {
            "d": 768, "heads": 12, "layers": 12, "vocab": 50257, "qkv_bias": True, "position": "learned", "reach": 1024,
        },
    },
    "Llama 2 7B": {
        "kind": "decoder", "tokens": 4096,
        "fields": {
            "d": 4096, "heads": 32, "layers": 32, "hidden": 11008, "vocab": 32000, "bias": False, "gated": True,
            "norm": "rms", "tied": False, "position": "rotary",
        },
    },
    "Llama 3 8B": {
        "kind": "decoder", "tokens": 8192,
        "fields": {
            "d": 4096, "heads": 32, "kv_heads": 8, "layers": 32, "hidden": 14336, "vocab": 128256, "bias": False,
            "gated": True, "norm": "rms", "tied": False, "position": "rotary",
        },
    },
    "ViT-B/16": {
        "kind": "vit",
        "fields": {"image": 224, "patch": 16, "d": 768, "heads": 12, "layers": 12, "classes": 1000},
    },
}  # fmt: skip


def start() -> dict[str, Any]:
    """What the page offers."""
    here = set(Fields.__struct_fields__)
    mine = kept()
    return {
        "kinds": {kind: [name for name in names if name in here] for kind, names in known.FIELDS.items()},
        "presets": PRESETS,
        "machines": [_machine(named(name)) for name in machines()],
        "this": None if mine is None else _machine(mine),
    }


def _machine(one: Machine) -> dict[str, Any]:
    return {
        "name": one.name,
        "dtypes": sorted(one.peak),
        "peak": dict(one.peak),
        "bandwidth": one.bandwidth,
        "memory": one.memory,
        "measured": one.measured,
    }


def fields_of(asked: Ask) -> dict[str, Any]:
    """The fields that were given; what the kind does not take is refused by name."""
    given = {name: x for name, x in msgspec.structs.asdict(asked.fields).items() if x is not None}
    for name in given:
        if name not in known.FIELDS[asked.kind]:
            raise ValueError(f"{asked.kind} has no {name}; it takes {', '.join(known.FIELDS[asked.kind])}")
    return given


def model_of(asked: Ask) -> Model:
    """The model that is asked about, from its config or from its kind and fields."""
    made = known.build(asked.kind, fields_of(asked)) if asked.config is None else read(_parsed(asked.config))
    return made if asked.tiled else made.plain()


def plan_of(asked: Ask) -> Plan:
    """The plan that ``regard.budget.plan`` gives."""
    return plan(
        model_of(asked),
        asked.tokens,
        source=asked.source,
        batch=asked.batch,
        dtype=asked.dtype,
        weights=asked.weights,
        training=asked.training,
        optimizer=asked.optimizer,
        machine=_named(asked.machine),
    )


def _named(name: str | None) -> Machine | None:
    """A machine by its name. One that is not measured yet is refused: a request does not wait for five seconds."""
    if name != "this":
        return None if name is None else named(name)
    mine = kept()
    if mine is None:
        raise ValueError("this machine is not measured yet; measure it first")
    return mine


def counted(asked: Ask) -> dict[str, Any]:
    """A plan as plain data, with the sizes that it has in the end."""
    found = plan_of(asked)
    told = found.to_dict() | {
        "sizes": sizes(found.model),
        "needs_source": len(found.model.stacks) > 1,
        "fixed": found.model.tokens is not None,
        "longest": found.model.longest,
        "theory": _theory(found),
        "tiled": all(part.tiled for _, part in found.model.attentions),
    }
    if found.machine is not None:
        told["machine"] = _machine(found.machine)
    return _rounded(told)


def sizes(model: Model) -> dict[str, int]:
    """The sizes of a model's (first) attention and feed-forward network, whoever gave them."""
    part = model.attentions[0][1]
    told = {"d": model.d, "heads": part.heads, "kv_heads": part.kv_heads, "d_key": part.d_key, "d_value": part.d_value}
    told |= {"d_out": part.d_out, "layers": model.stacks[0].layers, "decoder_layers": model.stacks[-1].layers}
    hidden = [placed.part.hidden for placed in model if isinstance(placed.part, FeedForward)]
    told |= {"hidden": hidden[0]} if hidden else {}
    told |= {} if model.vocab is None else {"vocab": model.vocab}
    return {name: whole(x) for name, x in told.items()}


def _theory(found: Plan) -> dict[str, int] | None:
    """The theory's exercise, where the model is one attention layer: parameters of a head, of all, of the output."""
    if found.model.kind != "attention":
        return None
    ((_, part),) = found.model.attentions
    heads, out = (whole(x) for x in split(part))
    each = {"a head": heads // whole(part.heads)} if part.kv_heads == part.heads else {}
    return each | {"all heads": heads, "output": out, "in all": found.parameters}


def split(part: Attention) -> tuple[Any, Any]:
    """Parameters of the maps of heads, and of the map behind them."""
    sides: dict[bool, Any] = {True: 0, False: 0}
    for weight in part.weights():
        name = weight.name.split(".")[0]
        if name in ("q", "k", "v", "out"):
            sides[name == "out"] = sides[name == "out"] + weight.count
    return sides[False], sides[True]


def against_n(asked: Ask) -> dict[str, Any]:
    """Cost by n; an image model has one n alone, and no lines."""
    found = plan_of(asked)
    unit = "FLOPs" if found.machine is None else "seconds"
    if found.model.tokens is not None:
        return {"unit": unit, "n": [], "lines": {}, "at": found.lengths.n, "crossover": None}
    points, lines = tables.cost_lines(found)
    return {"unit": unit, "n": points, "lines": lines, "at": found.lengths.n, "crossover": found.crossover}


class _Noted(Config):
    """A config that remembers which entries were looked at."""

    seen: set[str]

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.seen.add(str(key))
        return super().__contains__(key)


def read_config(text: str) -> dict[str, Any]:
    """A config's model; ``config``: the entries that matter, short enough for an address, else ""."""
    entries = _Noted(_parsed(text))
    entries.seen = set()
    model = read(entries)
    kept_ = {name: x for name, x in entries.items() if name in entries.seen}
    if kept_.get("id2label"):  # only how many there are matters
        kept_["num_labels"] = len(kept_.pop("id2label"))
    short = json.dumps(kept_, separators=(",", ":"), ensure_ascii=False)
    return {"title": model.title, "config": short if len(short) <= SHARED else ""}


def _parsed(text: str) -> Config:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"this is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError("a config.json is a table of entries, { … }")
    return Config(found)


def _rounded(told: Any) -> Any:
    """Whole numbers that a browser would round anyway as what it makes of them; JSON here ends at 64 bits."""
    if isinstance(told, dict):
        return {name: _rounded(x) for name, x in told.items()}
    if isinstance(told, list | tuple):
        return [_rounded(x) for x in told]
    return float(told) if isinstance(told, int) and abs(told) > EXACT else told
