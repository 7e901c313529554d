"""The parts of a transformer as data: their weights, matrix products and memory, in numbers or symbols.

Every size may be an integer or a sympy symbol: the same code gives 1,048,576 and ``4·D²``. Nothing here imports
``regard.nn``. The two are written independently, so tests that compare them check both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import sympy

from regard.budget._symbols import Number

# The purpose of a matrix product. Costs are reported by these groups.
Group = Literal["embedding", "projections", "attention", "feed-forward", "logits"]
GROUPS: tuple[Group, ...] = get_args(Group)


@dataclass(frozen=True)
class Weight:
    """One learned tensor."""

    name: str
    shape: tuple[Number, ...]

    @property
    def count(self) -> Number:
        """The number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Product:
    """`repeats` matrix products ``[rows × inner]·[inner × columns]``: ``2·repeats·rows·inner·columns`` FLOPs.

    The backward pass needs two products of the same size, one for each factor.

    - `learned`: the right factor is a weight, which is read once for all repeats.
    - `visible_share`: the share of the (row, column) pairs that no mask hides; 1 if nothing is hidden.
    - `matrices`: the number of different right factors that the rows are spread over, for example experts.
    """

    name: str
    group: Group
    rows: Number
    inner: Number
    columns: Number
    repeats: Number = 1
    learned: bool = True
    visible_share: Number | sympy.Rational = 1
    matrices: Number = 1

    @property
    def flops(self) -> Number:
        """FLOPs, two per multiply–add, masked pairs included."""
        return 2 * self.repeats * self.rows * self.inner * self.columns

    @property
    def unmasked_flops(self) -> Number:
        """FLOPs of the pairs that no mask hides; a kernel can skip the others."""
        return self.flops * self.visible_share


@dataclass(frozen=True)
class Call:
    """The sizes of one call of a part.

    - `batch`: number of sequences; `rows`, `keys`: queries and keys per sequence.
    - `new_keys`: the number of keys that this call projects; the other keys come from a cache.
    """

    batch: Number
    rows: Number
    keys: Number
    new_keys: Number

    @property
    def tokens(self) -> Number:
        """Rows of all sequences."""
        return self.batch * self.rows


class Part:
    """Base class of all parts. Methods return bytes for values of `size` bytes, as ``regard.nn`` allocates them."""

    operator_calls = 1  # operators of a forward pass that are not matrix products

    def weights(self) -> tuple[Weight, ...]:
        """The learned tensors."""
        return ()

    def products(self, call: Call) -> tuple[Product, ...]:
        """The matrix products of a forward pass."""
        return ()

    def saved_bytes(self, call: Call, size: Number) -> dict[str, Number]:
        """Bytes that a forward pass saves for the backward pass, by name; the part's input is included."""
        return {}

    def shared_saved_bytes(self, call: Call, size: Number) -> Number:
        """Bytes that are saved only once for all layers that have this part (the context of cross-attention)."""
        return 0

    def forward_peak(self, call: Call, size: Number) -> Number:
        """The most bytes that a forward pass without gradients holds at once; the output counts, the input does not."""
        return 0

    def backward_peak(self, call: Call, size: Number) -> Number:
        """The most bytes that the backward pass holds at once. The gradient of the output does not count."""
        return sum(self.saved_bytes(call, size).values())

    def elements_moved(self, call: Call) -> Number:
        """Elements that the operators other than matrix products read and write in a forward pass."""
        return 0

    def activation_elements(self, call: Call) -> Number:
        """Elements that go through an activation function."""
        return 0

    @property
    def parameters(self) -> Number:
        """The number of elements of all weights."""
        return sum(weight.count for weight in self.weights())

    @property
    def active_parameters(self) -> Number:
        """The number of elements of all weights that one token uses."""
        return self.parameters


@dataclass(frozen=True)
class Linear(Part):
    """A head: ``y = x Wᵀ + b`` with W [d_out, d_in]. If `tied`, W is the embedding's matrix, which is counted there."""

    d_in: Number
    d_out: Number
    bias: bool = True
    tied: bool = False

    def weights(self) -> tuple[Weight, ...]:
        weights = []
        if not self.tied:
            weights.append(Weight("weight", (self.d_out, self.d_in)))
        if self.bias:
            weights.append(Weight("bias", (self.d_out,)))
        return tuple(weights)

    def products(self, call: Call) -> tuple[Product, ...]:
        return (Product("linear", "logits", call.tokens, self.d_in, self.d_out),)

    def saved_bytes(self, call: Call, size: Number) -> dict[str, Number]:
        # A classifier that reads only the first row saves all rows: its input is a view of them.
        return {"input": size * call.batch * call.keys * self.d_in}

    def forward_peak(self, call: Call, size: Number) -> Number:
        return size * call.tokens * self.d_out

    def backward_peak(self, call: Call, size: Number) -> Number:
        return 2 * size * call.tokens * self.d_in  # the input and its gradient


@dataclass(frozen=True)
class Norm(Part):
    """LayerNorm ``γ ⊙ (x − μ)/√(σ² + ε) + β`` (γ and β [d]) or RMSNorm ``γ ⊙ x/√(mean(x²) + ε)``.

    If not `learned`, there is neither γ nor β.
    """

    d: Number
    kind: Literal["layer", "rms"] = "layer"
    bias: bool = True
    learned: bool = True

    def weights(self) -> tuple[Weight, ...]:
        if not self.learned:
            return ()
        weight = Weight("weight", (self.d,))
        if self.bias and self.kind == "layer":
            return (weight, Weight("bias", (self.d,)))
        return (weight,)

    def _vector_bytes(self, call: Call, size: Number) -> Number:
        # At least float32: half precision would be too coarse for the mean and the variance.
        return largest(size, 4) * call.tokens * self.d

    def saved_bytes(self, call: Call, size: Number) -> dict[str, Number]:
        # The centred and the normalized vectors are saved; the input is not needed once it is centred.
        vectors = self._vector_bytes(call, size)
        return {"centred": vectors, "normed": vectors, "deviations": largest(size, 4) * call.tokens}

    def forward_peak(self, call: Call, size: Number) -> Number:
        return size * call.tokens * self.d

    def backward_peak(self, call: Call, size: Number) -> Number:
        return 6 * self._vector_bytes(call, size)  # the saved vectors, and products with their gradients

    def elements_moved(self, call: Call) -> Number:
        return 2 * call.tokens * self.d


@dataclass(frozen=True)
class Embedding(Part):
    """``x_i = E[id_i]`` with E [rows, d]: a look-up, not a matrix product.

    - `scaled`: whether the vectors are multiplied by √D afterwards, which takes one more operator.
    - `shared`: whether E belongs to another embedding; then its parameters are counted there.
    """

    rows: Number
    d: Number
    scaled: bool = False
    shared: bool = False

    def weights(self) -> tuple[Weight, ...]:
        if self.shared:
            return ()
        return (Weight("embedding", (self.rows, self.d)),)

    @property
    def _operators(self) -> int:
        return 2 if self.scaled else 1

    def forward_peak(self, call: Call, size: Number) -> Number:
        return size * call.tokens * self.d * self._operators

    def elements_moved(self, call: Call) -> Number:
        return 2 * call.tokens * self.d * self._operators


@dataclass(frozen=True)
class Table(Part):
    """Numbers that are used without a matrix product: position codes, a class token, a table of biases.

    - `shape`: shape of the learned tensor; None if the numbers are computed, not learned.
    - `d`: width of the vectors that the numbers are added to; 0 if they are not added to vectors.
    """

    name: str
    shape: tuple[Number, ...] | None
    d: Number = 0

    def weights(self) -> tuple[Weight, ...]:
        if self.shape is None:
            return ()
        return (Weight(self.name, self.shape),)

    def forward_peak(self, call: Call, size: Number) -> Number:
        return size * call.tokens * self.d

    def elements_moved(self, call: Call) -> Number:
        return 3 * call.tokens * self.d


@dataclass(frozen=True)
class Dropout(Part):
    """``x ⊙ mask/(1 − p)`` in training: the mask is saved."""

    d: Number

    def saved_bytes(self, call: Call, size: Number) -> dict[str, Number]:
        return {"dropout": size * call.tokens * self.d}

    def backward_peak(self, call: Call, size: Number) -> Number:
        return 2 * size * call.tokens * self.d

    def elements_moved(self, call: Call) -> Number:
        return 3 * call.tokens * self.d


@dataclass(frozen=True)
class Patches(Part):
    """``p E + b``: patches p [channels·height·width] of an image as vectors [d], a convolution with stride = kernel.

    The rows are the patches and the class token; the class token needs no product. The image needs no gradient, so
    the backward pass has one product, not two.

    - `bias`: whether there is b; `class_token`: whether the rows include a class token.
    """

    channels: Number
    size: tuple[Number, Number]
    d: Number
    bias: bool = True
    class_token: bool = True

    def weights(self) -> tuple[Weight, ...]:
        weight = Weight("weight", (self.d, self.channels, *self.size))
        if self.bias:
            return (weight, Weight("bias", (self.d,)))
        return (weight,)

    def products(self, call: Call) -> tuple[Product, ...]:
        inner = self.channels * math.prod(self.size)  # numbers in a patch
        patches = call.rows - 1 if self.class_token else call.rows
        return (Product("patches", "embedding", call.batch * patches, inner, self.d),)

    def forward_peak(self, call: Call, size: Number) -> Number:
        # The patches, and the copy that joins them with the class token.
        return 2 * size * call.tokens * self.d


@dataclass(frozen=True)
class FeedForward(Part):
    """``φ(x W_up + b) W_down + b``; gated: ``(φ(x W_gate) ⊙ x W_up) W_down``.

    W_up, W_gate [d, hidden]      W_down [hidden, d]
    """

    operator_calls = 3

    d: Number
    hidden: Number
    gated: bool = False
    bias: bool = True
    dropout: bool = False

    @property
    def _inputs(self) -> tuple[str, ...]:
        """Names of the maps from the input to the hidden width."""
        return ("up", "gate") if self.gated else ("up",)

    def weights(self) -> tuple[Weight, ...]:
        shapes = dict.fromkeys(self._inputs, (self.hidden, self.d))
        shapes["down"] = (self.d, self.hidden)
        weights = []
        for name, shape in shapes.items():
            weights.append(Weight(f"{name}.weight", shape))
            if self.bias:
                weights.append(Weight(f"{name}.bias", shape[:1]))
        return tuple(weights)

    def products(self, call: Call) -> tuple[Product, ...]:
        inputs = [Product(name, "feed-forward", call.tokens, self.d, self.hidden) for name in self._inputs]
        return (*inputs, Product("down", "feed-forward", call.tokens, self.hidden, self.d))

    def saved_bytes(self, call: Call, size: Number) -> dict[str, Number]:
        hidden = size * call.tokens * self.hidden
        stream = size * call.tokens * self.d
        saved = {"input": stream, "before φ": hidden, "after φ": hidden}
        if self.gated:
            saved |= {"up": hidden, "gated": hidden}
        if self.dropout:
            # The masks of the hidden vectors and of the result.
            saved["dropout"] = hidden + stream
        return saved

    def forward_peak(self, call: Call, size: Number) -> Number:
        hidden = size * call.tokens * self.hidden
        # The hidden vectors before and after φ. With a gate: x W_up, x W_gate, φ(x W_gate) and their product.
        vectors = 2 * len(self._inputs)
        return largest(vectors * hidden, hidden + size * call.tokens * self.d)

    def backward_peak(self, call: Call, size: Number) -> Number:
        saved = super().backward_peak(call, size)
        return saved + len(self._inputs) * size * call.tokens * self.hidden

    def elements_moved(self, call: Call) -> Number:
        # φ reads and writes, a gate multiplies; then the result is added to the residual stream.
        passes = 5 if self.gated else 2
        return call.tokens * (self.hidden * passes + 3 * self.d)

    def activation_elements(self, call: Call) -> Number:
        return call.tokens * self.hidden


def smallest(*terms: Number) -> Number:
    """The smallest of numbers and symbols."""
    if all(isinstance(term, int) for term in terms):
        return min(terms)
    return sympy.Min(*terms)


def largest(*terms: Number) -> Number:
    """The largest of numbers and symbols."""
    if all(isinstance(term, int) for term in terms):
        return max(terms)
    return sympy.Max(*terms)
