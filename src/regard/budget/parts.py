"""The parts of a transformer as data: their weights, matrix products and memory, in numbers or in letters.

Every size may be a whole number or a sympy letter: the same lines give 1,048,576 and ``4·D²``. Nothing here knows
``regard.nn``: that the two agree is evidence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import sympy

from regard.budget.symbols import Number

__all__ = [
    "GROUPS",
    "Call",
    "Dropout",
    "Embedding",
    "FeedForward",
    "Group",
    "Linear",
    "Norm",
    "Part",
    "Patches",
    "Product",
    "Table",
    "Weight",
]

Group = Literal["embedding", "projections", "attention", "feed-forward", "head"]
GROUPS: tuple[Group, ...] = get_args(Group)


@dataclass(frozen=True)
class Weight:
    """One learned tensor: its name and shape."""

    name: str
    shape: tuple[Number, ...]

    @property
    def count(self) -> Number:
        """How many numbers it holds."""
        return product(self.shape)


@dataclass(frozen=True)
class Product:
    """``[rows × inner]·[inner × columns]``, ``times`` over: ``2·times·rows·inner·columns`` FLOPs

    Backward needs two more of the same size, one for each factor. ``learned``: the right factor is a weight, read once
    for all ``times``. ``share``: the part of the columns that a mask leaves, 1 where nothing is hidden.
    """

    name: str
    group: Group
    rows: Number
    inner: Number
    columns: Number
    times: Number = 1
    learned: bool = True
    share: Number | sympy.Rational = 1

    @property
    def flops(self) -> Number:
        """Two a multiply–add, masks not exploited."""
        return 2 * self.times * self.rows * self.inner * self.columns

    @property
    def needed(self) -> Number:
        """FLOPs on pairs that the mask leaves; the rest is what a kernel can save."""
        return self.flops * self.share if self.share != 1 else self.flops


@dataclass(frozen=True)
class Call:
    """What a part is called on: ``batch`` sequences, ``rows`` queries, ``keys`` keys, ``fresh`` of them just projected.

    ``fresh`` is ``keys`` unless a cache holds the others.
    """

    batch: Number
    rows: Number
    keys: Number
    fresh: Number

    @property
    def tokens(self) -> Number:
        """Rows of all sequences."""
        return self.batch * self.rows


class Part:
    """What all parts answer. Memory is in bytes, for values of ``size`` bytes each, as ``regard.nn`` uses it."""

    def weights(self) -> tuple[Weight, ...]:
        """The learned tensors."""
        return ()

    def products(self, call: Call) -> tuple[Product, ...]:
        """The matrix products of a forward pass."""
        return ()

    def kept(self, call: Call, size: Number) -> dict[str, Number]:
        """What a forward pass keeps for the backward pass, the part's input among it."""
        return {}

    def kept_once(self, call: Call, size: Number) -> Number:
        """What is kept besides, once for all layers that have this part: a context."""
        return 0

    def work(self, call: Call, size: Number) -> Number:
        """The most that a forward pass without gradients holds at once, input not counted, output counted."""
        return 0

    def back(self, call: Call, size: Number) -> Number:
        """The most that the backward pass holds at once: what is kept, and gradients; not that of the output."""
        return total(self.kept(call, size).values())

    def moved(self, call: Call) -> Number:
        """Values that everything but matrix products reads and writes in a forward pass."""
        return 0

    def activated(self, call: Call) -> Number:
        """Values that go through an activation function."""
        return 0

    calls = 1  # operations of a forward pass that are no products

    @property
    def parameters(self) -> Number:
        """Numbers in all weights."""
        return total(weight.count for weight in self.weights())


@dataclass(frozen=True)
class Linear(Part):
    """``y = x Wᵀ + b``: W [d_out, d_in]"""

    d_in: Number
    d_out: Number
    bias: bool = True
    group: Group = "head"
    tied: bool = False  # W is the embedding, counted there

    def weights(self) -> tuple[Weight, ...]:
        matrix = () if self.tied else (Weight("weight", (self.d_out, self.d_in)),)
        return (*matrix, *((Weight("bias", (self.d_out,)),) if self.bias else ()))

    def products(self, call: Call) -> tuple[Product, ...]:
        return (Product("linear", self.group, call.tokens, self.d_in, self.d_out),)

    def kept(self, call: Call, size: Number) -> dict[str, Number]:
        # Whoever reads the first row alone keeps all rows: it is a view of them.
        return {"input": size * call.batch * call.keys * self.d_in}

    def work(self, call: Call, size: Number) -> Number:
        return size * call.tokens * self.d_out

    def back(self, call: Call, size: Number) -> Number:
        return 2 * size * call.tokens * self.d_in


@dataclass(frozen=True)
class Norm(Part):
    """LayerNorm ``γ ⊙ (x − μ)/√(σ² + ε) + β`` (γ and β [d]) or RMSNorm ``γ ⊙ x/√(mean(x²) + ε)``"""

    d: Number
    kind: Literal["layer", "rms"] = "layer"
    bias: bool = True

    def weights(self) -> tuple[Weight, ...]:
        shift = (Weight("bias", (self.d,)),) if self.bias and self.kind == "layer" else ()
        return (Weight("weight", (self.d,)), *shift)

    def _bytes(self, call: Call, size: Number) -> Number:
        """Of all vectors, computed in float32 at least."""
        return largest(size, 4) * call.tokens * self.d

    def kept(self, call: Call, size: Number) -> dict[str, Number]:
        # The centred vector and the normed one before γ; the input itself is not needed once it is centred.
        vectors = self._bytes(call, size)
        return {"centred": vectors, "normed": vectors, "deviations": largest(size, 4) * call.tokens}

    def work(self, call: Call, size: Number) -> Number:
        return size * call.tokens * self.d

    def back(self, call: Call, size: Number) -> Number:
        return 6 * self._bytes(call, size)

    def moved(self, call: Call) -> Number:
        return 2 * call.tokens * self.d


@dataclass(frozen=True)
class Embedding(Part):
    """``x_i = E[id_i]``: E [rows, d]; a look-up, no product. ``scaled``: times √D, a pass of its own.

    ``shared``: E is another look-up's, and counted there.
    """

    rows: Number
    d: Number
    scaled: bool = False
    shared: bool = False

    def weights(self) -> tuple[Weight, ...]:
        return () if self.shared else (Weight("embedding", (self.rows, self.d)),)

    def work(self, call: Call, size: Number) -> Number:
        return size * call.tokens * self.d * (2 if self.scaled else 1)

    def back(self, call: Call, size: Number) -> Number:
        return 0

    def moved(self, call: Call) -> Number:
        return call.tokens * self.d * (4 if self.scaled else 2)


@dataclass(frozen=True)
class Table(Part):
    """Numbers that cost no product: position codes added to the input, a class token, a table of biases.

    ``shape`` None: they are computed, not learned.
    """

    name: str
    shape: tuple[Number, ...] | None
    d: Number = 0  # width of the vectors it is added to, 0 where it is added to none

    def weights(self) -> tuple[Weight, ...]:
        return () if self.shape is None else (Weight(self.name, self.shape),)

    def work(self, call: Call, size: Number) -> Number:
        return size * call.tokens * self.d

    def back(self, call: Call, size: Number) -> Number:
        return 0

    def moved(self, call: Call) -> Number:
        return 3 * call.tokens * self.d


@dataclass(frozen=True)
class Dropout(Part):
    """``x ⊙ mask/(1 − p)`` in training: the mask is kept."""

    d: Number

    def kept(self, call: Call, size: Number) -> dict[str, Number]:
        return {"dropout": size * call.tokens * self.d}

    def back(self, call: Call, size: Number) -> Number:
        return 2 * size * call.tokens * self.d

    def moved(self, call: Call) -> Number:
        return 3 * call.tokens * self.d


@dataclass(frozen=True)
class Patches(Part):
    """``p E + b``: patches p [channels·height·width] of an image as vectors [d], a convolution with stride = kernel.

    Rows are patches and the class token, which is none. The image needs no gradient, so backward has one product, not
    two.
    """

    channels: Number
    size: tuple[Number, Number]
    d: Number
    bias: bool = True

    def weights(self) -> tuple[Weight, ...]:
        shift = (Weight("bias", (self.d,)),) if self.bias else ()
        return (Weight("weight", (self.d, self.channels, *self.size)), *shift)

    def products(self, call: Call) -> tuple[Product, ...]:
        inner = self.channels * product(self.size)
        return (Product("patches", "embedding", call.batch * (call.rows - 1), inner, self.d),)

    def work(self, call: Call, size: Number) -> Number:
        return 2 * size * call.tokens * self.d  # patches, and what joins them with the class token

    def back(self, call: Call, size: Number) -> Number:
        return 0


@dataclass(frozen=True)
class FeedForward(Part):
    """``φ(x W_up + b) W_down + b``, gated ``(φ(x W_gate) ⊙ x W_up) W_down``

    W_up, W_gate [d, hidden]      W_down [hidden, d]
    """

    calls = 3

    d: Number
    hidden: Number
    gated: bool = False
    bias: bool = True
    dropout: bool = False

    def weights(self) -> tuple[Weight, ...]:
        found = []
        for name in ("up", "gate") if self.gated else ("up",):
            found += [Weight(f"{name}.weight", (self.hidden, self.d))]
            found += [Weight(f"{name}.bias", (self.hidden,))] if self.bias else []
        found += [Weight("down.weight", (self.d, self.hidden))]
        found += [Weight("down.bias", (self.d,))] if self.bias else []
        return tuple(found)

    def products(self, call: Call) -> tuple[Product, ...]:
        names = ("up", "gate") if self.gated else ("up",)
        up = tuple(Product(name, "feed-forward", call.tokens, self.d, self.hidden) for name in names)
        return (*up, Product("down", "feed-forward", call.tokens, self.hidden, self.d))

    def kept(self, call: Call, size: Number) -> dict[str, Number]:
        hidden = size * call.tokens * self.hidden
        kept = {"input": size * call.tokens * self.d, "before φ": hidden, "after φ": hidden}
        kept |= {"up": hidden, "gated": hidden} if self.gated else {}
        # Which values dropout left, of the hidden vectors and of the result.
        return kept | ({"dropout": hidden + size * call.tokens * self.d} if self.dropout else {})

    def work(self, call: Call, size: Number) -> Number:
        hidden = size * call.tokens * self.hidden
        # Before and after φ, then the product with the gate: x W_up, x W_gate, φ(x W_gate) and what they make.
        return largest((4 if self.gated else 2) * hidden, hidden + size * call.tokens * self.d)

    def back(self, call: Call, size: Number) -> Number:
        kept, hidden = total(self.kept(call, size).values()), size * call.tokens * self.hidden
        return kept + (2 * hidden if self.gated else hidden)

    def moved(self, call: Call) -> Number:
        # φ reads and writes, a gate multiplies; then the sum with what came in.
        return call.tokens * (self.hidden * (5 if self.gated else 2) + 3 * self.d)

    def activated(self, call: Call) -> Number:
        return call.tokens * self.hidden


def product(factors: object) -> Number:
    """Of whole numbers and letters; 1 of none."""
    found: Number = 1
    for factor in factors:  # type: ignore[attr-defined]
        found = found * factor
    return found


def total(terms: object) -> Number:
    """The sum of whole numbers and letters; 0 of none."""
    found: Number = 0
    for term in terms:  # type: ignore[attr-defined]
        found = found + term
    return found


def largest(*terms: Number) -> Number:
    """The largest, in numbers or letters."""
    return max(terms) if all(isinstance(term, int) for term in terms) else sympy.Max(*terms)
