"""Every count of a model as a formula in symbols."""

from __future__ import annotations

import sympy

from regard.budget import _flops as flops
from regard.budget._attention_parts import Attention
from regard.budget._memory import cache_elements, saved_activations
from regard.budget._model import Lengths, Model, PlacedPart, as_model
from regard.budget._symbols import SYMBOLS, Number

CROSSOVER = "n* (attention = the rest)"


def formulas(model: Model | Attention | tuple[PlacedPart, ...]) -> dict[str, Number]:
    """The counts of a model on a batch of B sequences of n tokens, as formulas by name.

    >>> model = regard.budget.symbolic_model("block", {"heads": 8})
    >>> for name, formula in formulas(model).items():
    ...     print(name, "=", regard.budget.to_text(formula))
    parameters = 2·D·D_ff + 4D² + 6D + D_ff
    FLOPs, forward = 4·B·n²·D + 4·B·n·D·D_ff + 8·B·n·D²
    ...
    n* (attention = the rest) = 2D + D_ff
    """
    model = as_model(model)
    batch = SYMBOLS["B"]
    cached = SYMBOLS["t"]

    # m appears only if some part reads a source; an image model has a fixed n.
    m = SYMBOLS["m"] if model.has_source else None
    n: Number = SYMBOLS["n"] if model.fixed_tokens is None else model.fixed_tokens
    lengths = Lengths(batch, n, m)

    results: dict[str, Number] = {"parameters": model.parameters}
    results["FLOPs, forward"] = flops.forward(model, lengths)
    # Add a second formula only if the masks hide some pairs.
    unmasked = flops.unmasked(model, lengths)
    if sympy.expand(unmasked - results["FLOPs, forward"]) != 0:
        results["  masks exploited"] = unmasked
    results["FLOPs, backward"] = flops.backward(model, lengths)

    if model.generates:
        results["FLOPs, a token after t"] = flops.decode(model, batch, cached, m)
        results["cache after t, values"] = cache_elements(model, Lengths(batch, cached, m))

    results["activations, values"] = _in_values(saved_activations(model, lengths))
    results["  recomputing blocks"] = _in_values(saved_activations(model, lengths, checkpoint=True))
    weights: Number = 0
    for placed, part in model.attention_parts:
        weights = weights + placed.repeats * part.weight_elements(placed.call(lengths))
    results["n × n, values"] = weights

    if model.attention_parts and model.fixed_tokens is None:
        crossover = flops.crossover(model)
        if crossover is not None:
            results[CROSSOVER] = crossover
        masked_crossover = flops.crossover(model, skip_masked=True)
        if masked_crossover is not None and masked_crossover != crossover:
            results["n*, masks exploited"] = masked_crossover
    return {name: sympy.expand(formula) for name, formula in results.items()}


def _in_values(x: Number) -> Number:
    """Convert bytes to a number of float32 values; a value of 8 bytes counts as 2, a boolean as 1/4."""
    return sympy.sympify(x) / 4
