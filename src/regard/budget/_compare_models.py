"""Compares two models: their figures under the same conditions, and the differences.

`alternatives` is another comparison: one attention layer against recurrence and convolution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from regard._errors import RegardError
from regard.budget._attention_parts import Attention
from regard.budget._make_plan import default_tokens, plan
from regard.budget._model import Model, PlacedPart, as_model
from regard.budget._plan import Plan
from regard.budget._presets import preset

Unit = Literal["count", "bytes", "seconds", "tokens", "tokens/s"]
DECODING_LENGTH = "longest n, decoding"  # the figure that memory does not limit if every layer has a window


@dataclass(frozen=True)
class ComparedFigure:
    """One figure of both models; None if a model does not have it, or has no limit there (`Comparison.without_limit`).

    >>> regard.budget.ComparedFigure("parameters", "count", 12, 24).difference
    12
    """

    name: str
    unit: Unit
    first: float | None
    second: float | None

    @property
    def difference(self) -> float | None:
        """``second - first``; None if one of them is None."""
        if self.first is None or self.second is None:
            return None
        return self.second - self.first

    @property
    def ratio(self) -> float | None:
        """``second / first``; None if one of them is None or the first is 0."""
        if not self.first or self.second is None:
            return None
        return self.second / self.first


@dataclass(frozen=True)
class Comparison:
    """Two plans under the same conditions; ``print`` shows them as a table.

    >>> compare("gpt2", "bert-base").figures[0].name
    'parameters'
    """

    first: Plan
    second: Plan

    @property
    def figures(self) -> tuple[ComparedFigure, ...]:
        """The figures that at least one of the models has."""
        figures = []
        pairs = zip(_plan_figures(self.first), _plan_figures(self.second), strict=True)
        for (name, unit, first), (_, _, second) in pairs:
            figure = ComparedFigure(name, unit, first, second)
            if figure.first is not None or figure.second is not None or any(self.without_limit(name)):
                figures.append(figure)
        return tuple(figures)

    def without_limit(self, name: str) -> tuple[bool, bool]:
        """Whether a figure of the first and of the second model is None because memory does not limit it."""
        if name != DECODING_LENGTH:
            return (False, False)
        return (self.first.decodes_any_length, self.second.decodes_any_length)

    def to_dict(self) -> dict[str, Any]:
        """Both plans and the figures as a dictionary that can be written as JSON."""
        figures = []
        for figure in self.figures:
            figures.append(
                {
                    "figure": figure.name,
                    "unit": figure.unit,
                    "first_value": figure.first,
                    "second_value": figure.second,
                    "difference": figure.difference,
                    "ratio": figure.ratio,
                }
            )
        return {"first": self.first.to_dict(), "second": self.second.to_dict(), "figures": figures}

    def __str__(self) -> str:
        # Here, not at the top: the report imports this module.
        from regard.budget._report_comparison import comparison_text

        return comparison_text(self)


def compare(
    first: Model | Attention | tuple[PlacedPart, ...] | str,
    second: Model | Attention | tuple[PlacedPart, ...] | str,
    tokens: int | None = None,
    **options: Any,
) -> Comparison:
    """Plan two models under the same conditions.

    - `first`, `second`: as `model` in `plan`: models, or names of presets.
    - `tokens`: n for both; default: the smaller of their default lengths, or the tokens of an image if these are more.
      An image model keeps its own length.
    - `options`: other arguments of `plan`, for both models. An option that one of the models cannot take is an error;
      only `source` is left out for a model that reads no source.

    >>> comparison = compare("llama-3-8b", "mistral-7b", dtype="bfloat16")
    >>> cache = comparison.figures[3]
    >>> cache.name, cache.first == cache.second == 2 * 32 * 8192 * 8 * 128 * 2
    ('cache', True)
    >>> comparison.figures[0].difference
    -788529152
    """
    models = [preset(model) if isinstance(model, str) else as_model(model) for model in (first, second)]
    if options.get("source") is not None and not any(model.has_source for model in models):
        raise RegardError(f"source={options['source']} is given, but neither model reads a source; leave it out")

    # One length that both models can read.
    if tokens is None:
        lengths = [default_tokens(model) for model in models if model.fixed_tokens is None]
        if lengths:
            images = [model.image_tokens or 1 for model in models]
            tokens = max(min(lengths), *images)
    plans = []
    for model in models:
        own_tokens = tokens if model.fixed_tokens is None else None
        own_options = dict(options)
        if not model.has_source:
            own_options.pop("source", None)
        plans.append(plan(model, own_tokens, **own_options))
    return Comparison(plans[0], plans[1])


def _plan_figures(plan: Plan) -> list[tuple[str, Unit, float | None]]:
    """Name, unit and value of every figure of a plan, in the order in which they are shown."""
    memory: Any = plan.memory
    figures: list[tuple[str, Unit, float | None]] = [
        ("parameters", "count", plan.parameters),
        ("FLOPs, forward", "count", plan.forward_flops),
    ]
    if plan.training:
        figures += [
            ("FLOPs, backward", "count", plan.backward_flops),
            ("weights", "bytes", memory.weights),
            ("optimizer", "bytes", memory.optimizer),
            ("peak of the step", "bytes", memory.peak),
        ]
    else:
        figures += [
            ("weights", "bytes", memory.weights),
            # A model that does not generate has no cache. 0 would be a wrong answer.
            ("cache", "bytes", memory.cache or None),
            ("peak of the pass", "bytes", memory.peak),
        ]
    figures += [("total memory", "bytes", memory.total), ("time", "seconds", plan.seconds)]
    if plan.decoding is not None and not plan.training:
        figures.append(("decoding, tokens/s", "tokens/s", plan.decoding.tokens_per_second))
    elif not plan.training:
        figures.append(("decoding, tokens/s", "tokens/s", None))
    figures += [
        ("crossover n*", "tokens", plan.crossover),
        ("longest n, one pass", "tokens", plan.max_tokens_forward),
        (DECODING_LENGTH, "tokens", plan.max_tokens_decoding),
        ("longest n, training", "tokens", plan.max_tokens_training),
        ("context length", "tokens", plan.context_length),
    ]
    return figures
