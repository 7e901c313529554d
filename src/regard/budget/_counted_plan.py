"""The plan of a model without a formula: what walking it finds, with every other figure named as unknown."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sympy

from regard.budget._counted_model import CountedModel
from regard.budget._memory import bytes_per_value, optimizer_bytes
from regard.budget._model import Lengths
from regard.budget._plan_records import COUNTED_BY_WALKING
from regard.budget._symbols import to_int
from regard.budget._units import format_bytes, format_count
from regard.budget._walk_counted import Walk, walk_model

# Figures that only formulas give: walking finds products, not when memory is allocated and released.
NEEDS_FORMULA = (
    *("unmasked_flops", "recomputation_flops", "bytes.activations", "bytes.checkpointed_activations"),
    *("bytes.attention_weights", "bytes.peak", "bytes.checkpointed_peak", "bytes.total", "parts", "shares"),
    *("crossover", "bottleneck", "seconds", "fits", "max_batch", "max_tokens_forward", "max_tokens_decoding"),
    *("max_tokens_training", "decoding"),
)


@dataclass(frozen=True)
class CountedPlan:
    """The costs of a model that has no formula; ``print`` shows them. A figure that is unknown is None.

    `regard.budget.plan` returns it for the model of a config whose family has no formula.

    >>> sizes = {"hidden_size": 24, "num_hidden_layers": 2, "vocab_size": 61}
    >>> plan = regard.budget.plan(regard.budget.from_config({"model_type": "mamba", **sizes}), tokens=16)
    >>> plan.parameters, plan.cache_bytes, "bytes.peak" in plan.unknown
    (14112, 7680, True)
    """

    model: CountedModel
    lengths: Lengths
    dtype: str = "float32"
    weights: str | None = None
    training: bool = False
    optimizer: str = "adam"

    @property
    def weight_dtype(self) -> str:
        """The dtype of the stored weights."""
        return self.dtype if self.weights is None else self.weights

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return self.model.parameters

    @property
    def active_parameters(self) -> int | None:
        """Parameters without the experts that a token does not use; None if unknown."""
        return self.model.active_parameters

    @cached_property
    def walk(self) -> Walk:
        """FLOPs and cache, from one call on tensors without data."""
        return walk_model(self.model, self.lengths, self.dtype, backward=self.training)

    @property
    def forward_flops(self) -> int | None:
        """FLOPs of a forward pass, masked pairs included; None if unknown."""
        return self.walk.forward_flops

    @property
    def backward_flops(self) -> int | None:
        """FLOPs of a backward pass; None if unknown, and for a forward pass."""
        return self.walk.backward_flops

    @property
    def cache_bytes(self) -> int | None:
        """Bytes of the cache that transformers keeps after n tokens; None if unknown, and in training."""
        return None if self.training else self.walk.cache

    @property
    def weight_bytes(self) -> int:
        """Bytes of the stored weights."""
        return to_int(sympy.ceiling(self.parameters * bytes_per_value(self.weight_dtype)))

    @property
    def unknown(self) -> tuple[str, ...]:
        """The keys of `to_dict` whose figures exist, but are unknown."""
        missing = []
        if self.active_parameters is None:
            missing.append("active_parameters")
        if self.forward_flops is None:
            missing.append("forward_flops")
        if self.backward_flops is None:
            missing.append("backward_flops")
        if self.cache_bytes is None and not self.training:
            missing.append("bytes.cache")
        return (*missing, *NEEDS_FORMULA)

    def to_dict(self) -> dict[str, Any]:
        """All numbers as a dictionary that can be written as JSON; an unknown figure is None."""
        size = bytes_per_value(self.dtype)
        gradients = self.parameters * to_int(size) if self.training else 0
        state = to_int(self.parameters * optimizer_bytes(self.optimizer, size)) if self.training else 0
        names = [name for name in NEEDS_FORMULA if "." not in name]
        return {
            "model": self.model.title,
            "architecture": self.model.architecture,
            "kind": "counted",
            "counted": COUNTED_BY_WALKING,
            "unknown": list(self.unknown),
            "parts_not_run": list(self.model.parts_not_run),
            "uncounted_operators": list(self.walk.uncounted_operators),
            "batch": self.lengths.batch,
            "tokens": self.lengths.n if self.model.reads_tokens else None,
            "source": self.lengths.m,
            "dtype": self.dtype,
            "weight_dtype": self.weight_dtype,
            "training": self.training,
            "parameters": self.parameters,
            "active_parameters": self.active_parameters,
            "forward_flops": self.forward_flops,
            "backward_flops": self.backward_flops,
            "bytes": {
                "weights": self.weight_bytes,
                "gradients": gradients,
                "optimizer": state,
                "activations": None,
                "checkpointed_activations": None,
                "attention_weights": None,
                "cache": 0 if self.training else self.cache_bytes,
                "peak": None,
                "checkpointed_peak": None,
                "total": None,
            },
            "share_basis": None,
            "machine": None,
            "memory_limit": None,
            "context_length": self.model.context_length,
            **dict.fromkeys(names),
        }

    def summary(self) -> dict[str, str]:
        """The lines of the report, by name."""
        why = self.model.reason or "there is no formula for this family"
        lines = {"counted": f"by walking the model that transformers builds; {why}"}
        lines["parameters"] = f"{self.parameters:,}"
        if self.model.untied_parameters:
            lines["parameters"] += (
                f"; {self.model.untied_parameters:,} of them in an output matrix of its own, which the config says and "
                "transformers ties"
            )
        if self.active_parameters is None:
            lines["active"] = "unknown: the config does not say how many experts a token uses"
        elif self.active_parameters != self.parameters:
            lines["active"] = f"{self.active_parameters:,} without the experts that a token does not use"
        lines["forward"] = self._flops_line("forward_flops", self.forward_flops)
        if self.walk.uncounted_operators:
            lines["forward"] += f"; not counted: {', '.join(self.walk.uncounted_operators)}"
        if self.model.parts_not_run and self.forward_flops is not None:
            lines["forward"] += f"; on text alone, without {' and '.join(self.model.parts_not_run)}"
        lines["weights"] = format_bytes(self.weight_bytes)
        if self.training:
            lines["backward"] = self._flops_line("backward_flops", self.backward_flops)
            figures = self.to_dict()["bytes"]
            state = f"{self.optimizer} {format_bytes(figures['optimizer'])}"
            lines["training"] = f"gradients {format_bytes(figures['gradients'])}, {state}"
        elif self.cache_bytes is None:
            lines["cache"] = f"unknown: {self.walk.reasons.get('cache', 'no reason')}"
        elif self.cache_bytes:
            tokens = f"{self.lengths.batch:,} × {self.lengths.n:,} tokens"
            lines["cache"] = f"{format_bytes(self.cache_bytes)} for {tokens}, in the cache of transformers"
        context = self.model.context_length
        if context is not None and self.model.reads_tokens and to_int(self.lengths.n) > context:
            lines["context"] = f"the model is made for n ≤ {context:,}; this n is longer"
        lines["unknown"] = "peak, activations, time, longest n: these need a formula"
        return lines

    def _flops_line(self, name: str, flops: int | None) -> str:
        if flops is None:
            return f"unknown: {self.walk.reasons.get(name, 'no reason')}"
        return f"{format_count(flops)}FLOP"

    def __str__(self) -> str:
        # Here, not at the top: the report imports plans.
        from regard.budget._counted_report import counted_report
        from regard.budget._report import as_text

        return as_text(counted_report(self))
