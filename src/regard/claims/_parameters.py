"""The numbers of a check that users may change: plain names, ranges, and how they limit each other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from regard._errors import RegardError
from regard.claims._claim import Claim

Number = float | int

# A parameter can be set to values from 1/8 of its recorded value to 4 times its recorded value, unless ``RANGES`` has
# another range for it. A parameter whose recorded value is tiny or huge spans two decades in both directions.
LOWEST_PART = 8
HIGHEST_FACTOR = 4
SEEDS = 100
SMALL = 24  # a slider has every integer up to this number, if its recorded value is not above it
# Steps of a slider within one decade, and within one octave for numbers whose recorded value is a power of two.
DECADE = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
OCTAVE = (1, 1.5)

LABELS = {
    "n": "positions (n)",
    "m": "keys (m)",
    "d": "width of a vector (d)",
    "d_value": "width of a value (d_v)",
    "heads": "heads",
    "kv_heads": "key and value heads",
    "layers": "layers",
    "seed": "seed of the random numbers",
    "samples": "random samples",
    "dropout": "dropped share of the weights",
    "beta": "inverse temperature (β)",
    "alpha": "variance of the noise on keys (α)",
    "along": "variance along the mean of key a",
    "t": "length of the query (t)",
    "largest": "largest size tested",
    "longest": "longest sequence tested (n)",
    "side": "side of the image, in pixels",
    "channels": "input channels",
    "steps": "training steps",
    "rate": "learning rate",
    "keys": "keys",
    "queries": "queries",
}
# Labels that hold for one claim only.
CLAIM_LABELS = {
    "softmax-keeps-order": {
        "n": "scores in a row (n)",
        "rows": "rows of scores",
        "shift": "number added to all scores",
    },
    "matrix-form-equals-per-query-form": {"n": "queries (n)"},
    "column-convention-equals-row-convention": {"n": "queries (n)", "t": "width of a value (t)"},
    "score-variance-is-d": {"largest": "largest width tested (d)"},
    "unscaled-softmax-saturates": {
        "n": "keys (n)",
        "largest": "largest width tested (d)",
        "sets": "random sets of keys",
        "eps": "saturated if the largest weight is above 1 − ε (ε)",
        "batch": "sequences in a batch",
    },
    "jacobian-norm-bound": {"n": "weights in a row (n)"},
    "hard-limit": {"n": "keys (n)", "gap": "lead of the largest score (gap)"},
    "soft-limit": {"n": "keys (n)", "largest": "largest β tested"},
    "copying": {"n": "keys (n)", "short": "weight that may be missing (ε)"},
    "average-of-two": {"n": "keys (n)"},
    "subspace-selector": {
        "m": "dimensions of the subspace of v_a (m)",
        "p": "dimensions of the subspace of v_b (p)",
        "sharpness": "inverse temperature (β)",
    },
    "average-under-isotropic-noise": {"n": "keys (n)"},
    "noisy-key-breaks-one-head": {"n": "keys (n)"},
    "two-heads-are-steadier": {"n": "keys (n)"},
    "zero-mean-key-noise": {"n": "queries (n)"},
    "key-scaling-first-order": {"n": "queries (n)", "far": "largest factor on the key (α)"},
    "parameter-count": {"samples": "random sizes"},
    "cost-absolute": {"largest": "largest N and D tested"},
    "cost-relative": {"largest": "largest N and D tested"},
    "relative-is-cheaper": {"largest": "largest N and D tested", "positions": "width of a position code (D_p)"},
    "cost-multi-head": {"largest": "largest sizes tested"},
    "bottleneck-regimes": {"largest": "largest width tested (d)", "ratio": "ratio of length and width"},
    "sequential-heads-save-memory": {"d": "width of a head (d_head)"},
    "order-blind": {"permutations": "random permutations"},
    "position-breaks-symmetry": {"longest": "words of the longest sentence"},
    "sinusoid-offsets-are-linear": {"reach": "last position tested", "n": "positions in the figure (n)"},
    "padding-mask": {"length": "real tokens"},
    "causal-makes-right-padding-free": {"shortest": "real tokens of the shortest sequence"},
    "attention-is-convolution": {"size": "side of the image, in pixels", "out": "output channels"},
    "convolution-needs-value-width": {
        "d": "channels (D)",
        "low": "rank of the low-rank kernel",
    },
    "offset-sign-is-convention": {"d": "channels (D)"},
    "head-is-kernel-or-tap": {"channels": "channels and kernels (C)", "size": "side of the kernel, in pixels"},
    "vit-patches-are-a-convolution": {"d": "width of a token (d)", "batch": "images in a batch"},
    "receptive-field": {"most": "most heads tested (k)", "samples": "random stacks"},
    "layer-norm-depends-on": {"rows": "rows of the batch"},
    "layer-norm-radius": {"rows": "random vectors", "gamma": "scale (γ)", "shift": "shift (β)"},
    "feed-forward-is-pointwise": {"hidden": "hidden width"},
    "heads-have-low-rank": {"d_key": "width of a key (d_k)"},
    "ov-eigenvalues-from-a-small-matrix": {"vocab": "tokens (V)"},
    "composition-has-a-baseline": {"d": "width of the stream (D)", "d_head": "width of a head"},
    "heads-evolve": {"seed": "seed of the first training (long version only)"},
    "heads-differ-in-a-trained-model": {
        "texts": "texts",
        "tokens": "tokens of each text",
        "least": "least distance of two heads that counts",
    },
}
# Ranges that differ from the usual one, because a check tells nothing outside of them: there is nothing to measure, its
# control cannot fail, or the statement is about another regime. ``tests/test_claims_ranges.py`` runs every end.
RANGES: dict[str, dict[str, tuple[Number, Number]]] = {
    "weights-are-a-distribution": {"dropout": (0.05, 0.8)},
    # Layer norm of two numbers gives ±1, whatever the input, so that a model of width 2 has almost no gradients.
    "information-flows-to-the-query": {"d": (4, 64)},
    "distance-cannot-see-direction": {"n": (3, 36), "d": (4, 64)},  # a swap of two positions is a reversal
    "causal-mask": {"n": (2, 24), "layers": (1, 8)},  # one gradient per pair of positions
    "mask-placement": {"n": (5, 28), "d": (4, 48), "layers": (1, 4)},  # sequences of n − 3 tokens and more
    "layer-norm-radius": {"d": (3, 64)},
    "feed-forward-is-pointwise": {"hidden": (4, 80)},
    "unscaled-softmax-saturates": {"n": (2, 16)},  # with more keys, the widths tested are too small for one to win
    "score-variance-is-d": {"samples": (2_500, 40_000)},
    "hard-limit": {"n": (6, 32)},
    "average-of-two": {"n": (3, 40)},  # with two keys, the output is the average at every β
    "subspace-selector": {
        "p": (1, 20),
        "sharpness": (40.0, 800.0),
    },  # the third key has the weight e^−β, which must be negligible
    "average-under-isotropic-noise": {"n": (3, 32), "samples": (250, 4_000)},  # there must be another key than a and b
    # A head jumps only if the noise moves the scores by much more than 1.
    "noisy-key-breaks-one-head": {"along": (0.25, 2.0), "t": (15.0, 80.0), "samples": (1_000, 16_000)},
    "two-heads-are-steadier": {"along": (0.25, 0.75), "t": (15.0, 80.0), "samples": (2_000, 16_000)},
    # Orders are measured where the score of a key changes by less than 1; at β = 1 a missing factor β is no error.
    "zero-mean-key-noise": {"d": (2, 32), "beta": (0.03, 0.5), "samples": (400, 6_000)},
    "key-scaling-first-order": {"d": (2, 32), "beta": (0.03, 0.5)},
    "cost-absolute": {"largest": (8, 128)},
    "design-8x512": {"longest": (32, 256)},  # an eighth of it is counted too
    "cost-multi-head": {"heads": (2, 16)},  # a single head shares its keys with no other
    "bottleneck-regimes": {"ratio": (8, 32)},  # at 2 both parts cost the same
    "attention-vs-rnn": {"longest": (32, 256)},  # an eighth of it is counted too
    "position-breaks-symmetry": {"longest": (3, 6)},  # all n! orders are compared
    "band-of-thirds-is-convolution-3": {"n": (3, 40)},
    # Every pixel of an image is a token, so the work grows as the fourth power of its side.
    "attention-is-convolution": {"size": (3, 14)},
    "convolution-needs-value-width": {"side": (3, 12), "d": (9, 40), "low": (2, 16)},
    "offset-sign-is-convention": {"side": (3, 12)},
    "head-is-kernel-or-tap": {"size": (1, 5), "side": (3, 12)},
    "dilated": {"side": (5, 16)},
    "strided": {"side": (6, 20)},
    "quadratic-encoding-realises-offsets": {"side": (3, 12)},
    "receptive-field": {"layers": (3, 7), "most": (1, 6)},  # the longest sequence has (k+1)ⁿ positions
    "same-initialisation-same-head": {"heads": (2, 8), "steps": (4, 60), "rate": (0.125, 1.5)},  # above, it diverges
    # The mean over texts needs several texts; heads of the bundled model differ by 0.5 to 0.6.
    "heads-differ-in-a-trained-model": {"texts": (4, 16), "tokens": (16, 128), "least": (0.05, 0.4)},
    "heads-have-low-rank": {"d": (10, 48), "heads": (2, 8), "d_key": (1, 9), "d_value": (1, 4)},
    "ov-eigenvalues-from-a-small-matrix": {"vocab": (24, 120), "d": (4, 24), "d_value": (1, 20)},
    # Narrow heads, and few samples, have a mean that is off by more than 5% by chance.
    "composition-has-a-baseline": {"d": (24, 96), "d_head": (4, 16), "samples": (400, 1600)},
    # Short or slow trainings end before heads are local; after long and fast ones each head has a single pixel.
    "attention-learns-convolution": {"steps": (60, 150), "heads": (2, 8), "rate": (0.05, 0.2)},
}
# The only values that make sense: these checks use sizes from a fixed list.
CHOICES: dict[str, dict[str, tuple[Number, ...]]] = {
    "score-variance-is-d": {"largest": (16, 64, 256, 1024)},
    "unscaled-softmax-saturates": {"largest": (512, 1024, 2048)},
    "attention-vs-rnn": {"heads": (1, 2, 4, 8)},
}


@dataclass(frozen=True)
class Rule:
    """A relation that parameters of one claim must satisfy.

    ``factor`` times the sum of ``left`` divides ``right``, is at most ``right``, or is below ``right``.
    """

    left: tuple[str, ...]
    relation: str  # "divides", "at most" or "below"
    right: str
    factor: int = 1

    def holds(self, values: Mapping[str, Number]) -> bool:
        """Whether the values satisfy the rule."""
        total = self.factor * sum(values[name] for name in self.left)
        if self.relation == "divides":
            return values[self.right] % total == 0
        if self.relation == "below":
            return total < values[self.right]
        return total <= values[self.right]


_HEADS_DIVIDE_WIDTH = (Rule(("heads",), "divides", "d"),)
RULES: dict[str, tuple[Rule, ...]] = {
    "ov-eigenvalues-from-a-small-matrix": (Rule(("d_value",), "at most", "d"),),
    "column-convention-equals-row-convention": (Rule(("heads",), "at most", "t"), Rule(("heads",), "at most", "d")),
    "concat-is-sum-of-heads": (Rule(("kv_heads",), "divides", "heads"),),
    "information-flows-to-the-query": _HEADS_DIVIDE_WIDTH,
    "weights-explain-output": (Rule(("d_value",), "below", "keys", factor=2),),  # d_v + 1 keys determine the weights
    # These keys are orthogonal, or their means are.
    "average-of-two": (Rule(("n",), "at most", "d"),),
    "average-under-isotropic-noise": (Rule(("n",), "at most", "d"),),
    "noisy-key-breaks-one-head": (Rule(("n",), "at most", "d"),),
    "two-heads-are-steadier": (Rule(("n",), "at most", "d"),),
    "subspace-selector": (Rule(("m", "p"), "at most", "d"),),
    "heads-cost-nothing-extra": _HEADS_DIVIDE_WIDTH,
    # These checks also use a half and a quarter of the largest size.
    "relative-is-cheaper": (Rule(("heads",), "divides", "largest"),),
    "cost-multi-head": (Rule(("heads",), "divides", "largest", factor=4),),
    "bottleneck-regimes": (Rule(("heads",), "divides", "largest", factor=4),),
    "attention-less-work-than-rnn": _HEADS_DIVIDE_WIDTH,
    "sequential-heads-save-memory": (Rule(("d",), "at most", "n", factor=16),),  # n² must exceed the inputs, n·d
    "order-blind": _HEADS_DIVIDE_WIDTH,
    "position-breaks-symmetry": (Rule(("heads",), "divides", "d", factor=2),),  # rotary positions turn pairs
    "distance-cannot-see-direction": _HEADS_DIVIDE_WIDTH,
    "causal-mask": _HEADS_DIVIDE_WIDTH,
    "padding-mask": (*_HEADS_DIVIDE_WIDTH, Rule(("length",), "below", "n")),
    "causal-makes-right-padding-free": (*_HEADS_DIVIDE_WIDTH, Rule(("shortest",), "below", "n")),
    "mask-placement": _HEADS_DIVIDE_WIDTH,
    "diagonal-attention-is-1x1-convolution": (Rule(("n",), "at most", "d"),),
    "convolution-needs-value-width": (Rule(("low",), "below", "d"),),
    "same-initialisation-same-head": _HEADS_DIVIDE_WIDTH,
}


@dataclass(frozen=True)
class Parameter:
    """A number of a check: its name, what it is called on pages, its recorded value, and the steps of its slider."""

    name: str
    label: str
    value: Number
    low: Number
    high: Number
    values: tuple[Number, ...]

    def to_dict(self) -> dict[str, Any]:
        """The parameter as plain data, for JSON."""
        return {**vars(self), "values": list(self.values), "integer": isinstance(self.value, int)}


@cache
def parameters(claim: Claim) -> tuple[Parameter, ...]:
    """The parameters of a claim's check, each with its range.

    Every step of a slider satisfies the rules of the claim while all other parameters have their recorded values.
    """
    described = []
    recorded_values = claim.parameters
    for name, recorded in recorded_values.items():
        choices = CHOICES.get(claim.id, {}).get(name)
        if choices is None:
            low, high = RANGES.get(claim.id, {}).get(name) or _range(name, recorded)
            choices = _steps(name, recorded, low, high)
        valid = []
        for value in choices:
            values = {**recorded_values, name: value}
            if all(rule.holds(values) for rule in rules(claim)):
                valid.append(value)
        described.append(Parameter(name, label(claim, name), recorded, choices[0], choices[-1], tuple(valid)))
    return tuple(described)


def rules(claim: Claim) -> tuple[Rule, ...]:
    """The rules that parameters of a claim must satisfy together."""
    return RULES.get(claim.id, ())


def label(claim: Claim, name: str) -> str:
    """What a parameter is called on pages, in plain words."""
    return CLAIM_LABELS.get(claim.id, {}).get(name) or LABELS[name]


def check_parameters(claim: Claim, changes: Mapping[str, Number]) -> dict[str, Number]:
    """All parameters of a claim, with some of them changed. Raises ``RegardError`` for a value that is not accepted."""
    values: dict[str, Number] = dict(claim.parameters)
    known = {parameter.name: parameter for parameter in parameters(claim)}
    for name, value in changes.items():
        if name not in known:
            raise RegardError(f"{claim.id} has no parameter {name}; it has {', '.join(known)}")
        parameter = known[name]
        if not math.isfinite(value) or not parameter.low <= value <= parameter.high:
            raise RegardError(
                f"{name}: {parameter.label} must be between {parameter.low:g} and {parameter.high:g}, got {value:g}"
            )
        if isinstance(parameter.value, int) and value != int(value):
            raise RegardError(f"{name}: {parameter.label} must be an integer, got {value:g}")
        values[name] = type(parameter.value)(value)
    for rule in rules(claim):
        if not rule.holds(values):
            raise RegardError(rule_message(claim, rule, values))
    return values


def rule_message(claim: Claim, rule: Rule, values: Mapping[str, Number]) -> str:
    """What is wrong, what was given and what is accepted, if values break a rule."""
    left = " + ".join(label(claim, name) for name in rule.left)
    if rule.factor > 1:
        left = f"{rule.factor} × {left}"
    total = rule.factor * sum(values[name] for name in rule.left)
    relation = {"divides": "divide", "at most": "be at most", "below": "be below"}[rule.relation]
    return f"{left} must {relation} {label(claim, rule.right)}, got {total:g} and {values[rule.right]:g}"


def _range(name: str, recorded: Number) -> tuple[Number, Number]:
    if name == "seed":
        return 0, SEEDS - 1
    if isinstance(recorded, int):
        # If a check was recorded with several items (for example heads or layers), a single item is rarely enough.
        least = 2 if recorded > 4 else 1
        return max(least, math.ceil(recorded / LOWEST_PART)), HIGHEST_FACTOR * recorded
    if _spans_decades(recorded):
        return recorded / 100, recorded * 100
    return recorded / LOWEST_PART, recorded * HIGHEST_FACTOR


def _spans_decades(recorded: Number) -> bool:
    return isinstance(recorded, float) and not 1e-3 < recorded < 1e3


def _steps(name: str, recorded: Number, low: Number, high: Number) -> tuple[Number, ...]:
    """The steps of a slider: every small integer, then round numbers. The recorded value is always one of them."""
    if name == "seed":
        return tuple(range(SEEDS))
    is_integer = isinstance(recorded, int)
    candidates: set[Number] = {recorded}
    if is_integer and recorded <= SMALL:
        candidates.update(range(int(low), min(int(high), SMALL) + 1))

    # Powers of two and numbers half-way between them, or round decimal numbers. Over several decades 1, 2 and 5 do.
    if is_integer and math.log2(recorded).is_integer():
        exponents = range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)
        round_numbers = [digit * 2.0**exponent for exponent in exponents for digit in OCTAVE]
    else:
        exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        digits = (1, 2, 5) if _spans_decades(recorded) else DECADE
        round_numbers = [float(f"{digit}e{exponent}") for exponent in exponents for digit in digits]
    for number in round_numbers:
        if not is_integer:
            candidates.add(number)
        elif number == int(number):
            candidates.add(int(number))
    slack = 1e-9 * high  # rounding must not remove an end of the range
    return tuple(sorted(value for value in candidates if low - slack <= value <= high + slack))
