"""A plan as a dictionary for JSON. docs/budget.md documents every key.

A key means the same wherever it occurs. Keys are the names of attributes, except where two records have an attribute of
the same name for different figures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from regard.budget._plan_records import COUNTED_BY_FORMULAS

if TYPE_CHECKING:
    from regard.budget._plan import Plan

PART_KEYS = {"name": "part", "flops": "forward_flops"}
DECODING_KEYS = {
    "flops": "token_flops",
    "bytes_read": "token_bytes_read",
    "seconds": "token_seconds",
    "cache_bytes": "cache",
    "max_batch": "decoding_max_batch",
    "max_batch_tokens_per_second": "decoding_max_batch_tokens_per_second",
}


def plan_dict(plan: Plan) -> dict[str, Any]:
    """Return all numbers of a plan by key."""
    machine = None
    if plan.machine is not None:
        machine = {"name": plan.machine.name, "measured": plan.machine.measured, "load": plan.machine.load}
    decoding = None
    if plan.decoding is not None:
        decoding = _renamed(plan.decoding, DECODING_KEYS)
    return {
        "model": plan.model.title,
        "architecture": plan.model.architecture,
        "kind": plan.model.kind,
        "counted": COUNTED_BY_FORMULAS,
        "unknown": [],
        "parts_not_run": [],
        "uncounted_operators": [],
        "batch": plan.lengths.batch,
        "tokens": plan.lengths.n,
        "source": plan.lengths.m,
        "dtype": plan.dtype,
        "weight_dtype": plan.weight_dtype,
        "training": plan.training,
        "parameters": plan.parameters,
        "active_parameters": plan.active_parameters,
        "forward_flops": plan.forward_flops,
        "unmasked_flops": plan.unmasked_flops,
        "backward_flops": plan.backward_flops,
        "recomputation_flops": plan.recomputation_flops,
        "bytes": dict(vars(plan.memory)),
        "parts": [_renamed(row, PART_KEYS) for row in plan.rows],
        "shares": plan.shares,
        "share_basis": plan.share_basis,
        "crossover": plan.crossover,
        "bottleneck": plan.bottleneck,
        "seconds": plan.seconds,
        "machine": machine,
        "memory_limit": plan.available_memory,
        "fits": plan.fits,
        "max_batch": plan.max_batch,
        "max_tokens_forward": plan.max_tokens_forward,
        "max_tokens_decoding": plan.max_tokens_decoding,
        "max_tokens_training": plan.max_tokens_training,
        "context_length": plan.context_length,
        "decoding": decoding,
    }


def _renamed(record: object, keys: dict[str, str]) -> dict[str, Any]:
    return {keys.get(name, name): value for name, value in vars(record).items()}
