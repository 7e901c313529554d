"""The parts of a transformer as data: their weights, matrix products and memory, in numbers or in letters.

Every size may be a whole number or a sympy letter: the same lines give 1,048,576 and ``4·D²``. Nothing here knows
``regard.nn``: that the two agree is evidence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

import sympy

from regard.budget.symbols import Number

__all__ = [
    "GROUPS",
    "Attention",
    "Call",
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
    """What all parts answer. ``kept`` and ``work`` are numbers of values (elements), not bytes."""

    def weights(self) -> tuple[Weight, ...]:
        """The learned tensors."""
        return ()

    def products(self, call: Call) -> tuple[Product, ...]:
        """The matrix products of a forward pass."""
        return ()

    def kept(self, call: Call) -> dict[str, Number]:
        """Values that a forward pass keeps for the backward pass, the part's input among them."""
        return {}

    def work(self, call: Call) -> Number:
        """Values that a forward pass without gradients holds at once, input not counted, output counted."""
        return 0

    def back(self, call: Call) -> Number:
        """Values that the backward pass holds at once: what is kept, and gradients; not that of the part's output."""
        return sum(self.kept(call).values())

    def moved(self, call: Call) -> Number:
        """Values that everything but matrix products reads and writes in a forward pass."""
        return 0

    def activated(self, call: Call) -> Number:
        """Values that go through an activation function (or a softmax that is a pass of its own)."""
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

    def kept(self, call: Call) -> dict[str, Number]:
        return {"input": call.tokens * self.d_in}

    def work(self, call: Call) -> Number:
        return call.tokens * self.d_out

    def back(self, call: Call) -> Number:
        return 2 * call.tokens * self.d_in


@dataclass(frozen=True)
class Norm(Part):
    """LayerNorm ``γ ⊙ (x − μ)/√(σ² + ε) + β`` (γ and β [d]) or RMSNorm ``γ ⊙ x/√(mean(x²) + ε)``, over ``each`` rows.

    ``each``: vectors normed for a token: 1, or the heads of a norm on queries.
    """

    d: Number
    kind: Literal["layer", "rms"] = "layer"
    bias: bool = True
    each: Number = 1

    def weights(self) -> tuple[Weight, ...]:
        shift = (Weight("bias", (self.d,)),) if self.bias and self.kind == "layer" else ()
        return (Weight("weight", (self.d,)), *shift)

    def _size(self, call: Call) -> Number:
        return call.tokens * self.each * self.d

    def kept(self, call: Call) -> dict[str, Number]:
        # The centred vector and the normed one before γ; the input itself is not needed once it is centred.
        return {"centred": self._size(call), "normed": self._size(call), "deviations": 2 * call.tokens * self.each}

    def work(self, call: Call) -> Number:
        return self._size(call)

    def back(self, call: Call) -> Number:
        return 6 * self._size(call)

    def moved(self, call: Call) -> Number:
        return 2 * self._size(call)


@dataclass(frozen=True)
class Embedding(Part):
    """``x_i = E[id_i]``: E [rows, d]; a look-up, no product. ``scaled``: times √D, a pass of its own."""

    rows: Number
    d: Number
    scaled: bool = False

    def weights(self) -> tuple[Weight, ...]:
        return (Weight("embedding", (self.rows, self.d)),)

    def work(self, call: Call) -> Number:
        return call.tokens * self.d * (2 if self.scaled else 1)

    def back(self, call: Call) -> Number:
        return 0

    def moved(self, call: Call) -> Number:
        return call.tokens * self.d * (4 if self.scaled else 2)


@dataclass(frozen=True)
class Table(Part):
    """Learned numbers that cost no product: position codes added to the input, a class token, a table of biases."""

    name: str
    shape: tuple[Number, ...]
    d: Number = 0  # width of the vectors it is added to, 0 where it is added to none

    def weights(self) -> tuple[Weight, ...]:
        return (Weight(self.name, self.shape),)

    def work(self, call: Call) -> Number:
        return call.tokens * self.d

    def back(self, call: Call) -> Number:
        return 0

    def moved(self, call: Call) -> Number:
        return 3 * call.tokens * self.d


@dataclass(frozen=True)
class Patches(Part):
    """``p E + b``: patches p [channels·height·width] of an image as vectors [d], a convolution with stride = kernel.

    The image needs no gradient, so backward has one product, not two.
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
        return (Product("patches", "embedding", call.tokens, inner, self.d),)

    def kept(self, call: Call) -> dict[str, Number]:
        return {}

    def work(self, call: Call) -> Number:
        return call.tokens * self.d

    def back(self, call: Call) -> Number:
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

    def kept(self, call: Call) -> dict[str, Number]:
        hidden = call.tokens * self.hidden
        kept = {"input": call.tokens * self.d, "before φ": hidden, "after φ": hidden}
        kept |= {"up": hidden, "gated": hidden} if self.gated else {}
        return kept | ({"dropout": 2 * hidden} if self.dropout else {})

    def work(self, call: Call) -> Number:
        hidden = call.tokens * self.hidden
        # Before and after φ, then the product with the gate: x W_up, x W_gate, φ(x W_gate) and what they make.
        return largest((4 if self.gated else 2) * hidden, hidden + call.tokens * self.d)

    def back(self, call: Call) -> Number:
        kept, hidden = total(self.kept(call).values()), call.tokens * self.hidden
        return kept + (2 * hidden if self.gated else hidden)

    def moved(self, call: Call) -> Number:
        # φ reads and writes, a gate multiplies; then the sum with what came in.
        return call.tokens * (self.hidden * (5 if self.gated else 2) + 3 * self.d)

    def activated(self, call: Call) -> Number:
        return call.tokens * self.hidden


@dataclass(frozen=True)
class Attention(Part):
    """``[A¹V¹ … A^{N_h}V^{N_h}] W_out + b_out``, ``A = softmax(β Q Kᵀ)``

        W_q [D_in, N_h·D_hid]   W_k [D_c, N_kv·D_hid]   W_v [D_c, N_kv·D_o]   W_out [N_h·D_o, D_out]

    Parameters, with N_kv = N_h and D_c = D_in: ``N_h·D_in·(2·D_hid + D_o) + N_h·D_o·D_out + D_out``.

    ``d_context`` None: self-attention. ``causal`` and ``window`` (keys a query sees, itself included) say what may be
    skipped. ``tiled``: weights are never stored; otherwise ``N_h·n·m`` of them are. ``positions`` are learned tables on
    scores, ``rotary`` turns queries and keys, ``qk_norm`` norms each head's.
    """

    calls = 3

    d_in: Number
    heads: Number
    d_key: Number
    d_value: Number
    d_out: Number
    kv_heads: Number
    d_context: Number | None = None
    qkv_bias: bool = False
    out_bias: bool = True
    causal: bool = False
    window: Number | None = None
    sinks: bool = False
    qk_norm: bool = False
    rotary: bool = False
    tiled: bool = True
    positions: tuple[Weight, ...] = field(default=())

    def _maps(self) -> tuple[tuple[str, Number, Number, bool], ...]:
        """(name, from, to, bias) of the four linear maps."""
        given = self.d_in if self.d_context is None else self.d_context
        return (
            ("q", self.d_in, self.heads * self.d_key, self.qkv_bias),
            ("k", given, self.kv_heads * self.d_key, self.qkv_bias),
            ("v", given, self.kv_heads * self.d_value, self.qkv_bias),
            ("out", self.heads * self.d_value, self.d_out, self.out_bias),
        )

    def weights(self) -> tuple[Weight, ...]:
        found: list[Weight] = []
        for name, given, made, bias in self._maps():
            found += [Weight(f"{name}.weight", (made, given))]
            found += [Weight(f"{name}.bias", (made,))] if bias else []
        found += [Weight("sinks", (self.heads,))] if self.sinks else []
        found += [Weight(f"{name}_norm.weight", (self.d_key,)) for name in ("q", "k") if self.qk_norm]
        return (*found, *self.positions)

    def products(self, call: Call) -> tuple[Product, ...]:
        rows = {"q": call.tokens, "k": call.batch * call.fresh, "v": call.batch * call.fresh, "out": call.tokens}
        q, k, v, out = (Product(name, "projections", rows[name], given, made) for name, given, made, _ in self._maps())
        share = self.share(call)
        times = call.batch * self.heads
        scores = Product("scores", "attention", call.rows, self.d_key, call.keys, times, False, share)
        values = Product("values", "attention", call.rows, call.keys, self.d_value, times, False, share)
        return q, k, v, scores, values, out

    def share(self, call: Call) -> Number | sympy.Rational:
        """The part of all (query, key) pairs that the masks leave."""
        seen = visible(call.rows, call.keys, self.causal, self.window)
        if isinstance(seen, int) and isinstance(call.rows, int) and isinstance(call.keys, int):
            pairs = call.rows * call.keys
            return sympy.Rational(seen, pairs) if pairs and seen != pairs else 1
        return sympy.simplify(seen / (call.rows * call.keys))

    def stored(self, call: Call) -> dict[str, Number]:
        """What the theory counts as memory: ``Q, K, V``, the weights ``N_h·n·m`` and the heads' outputs, in values.

        The input, the scores before the softmax and the projected output are left out there.
        """
        q, kv, out = self._heads(call)
        return {"Q, K, V": q + kv, "attention matrices": self.matrices(call), "heads' outputs": out}

    def matrices(self, call: Call) -> Number:
        """Weights of all heads, ``B·N_h·n·m``: what plain attention stores, and tiled attention never."""
        return call.batch * self.heads * call.rows * call.keys

    def cached(self, batch: Number, tokens: Number) -> Number:
        """Values of keys and values in a cache: ``B·t·N_kv·(D_hid + D_o)``."""
        return batch * tokens * self.kv_heads * (self.d_key + self.d_value)

    def _heads(self, call: Call) -> tuple[Number, Number, Number]:
        """Values of queries; of keys and values; of the heads' outputs."""
        keys = call.batch * call.keys * self.kv_heads
        return (
            call.tokens * self.heads * self.d_key,
            keys * (self.d_key + self.d_value),
            call.tokens * self.heads * self.d_value,
        )

    def _turned_keys(self, call: Call) -> Number:
        return call.batch * call.fresh * self.kv_heads * self.d_key

    def kept(self, call: Call) -> dict[str, Number]:
        q, kv, out = self._heads(call)
        kept: dict[str, Number] = {"input": call.tokens * self.d_in, "q": q, "k and v": kv, "joined heads": out}
        if self.qk_norm:
            keys = call.batch * call.keys * self.kv_heads * self.d_key
            kept["q and k normed"] = 2 * (q + keys)
        if self.tiled:
            return kept | {"heads": out, "rows' maxima and totals": 2 * call.tokens * self.heads}
        return kept | {"weights": self.matrices(call)}

    def work(self, call: Call) -> Number:
        q, kv, out = self._heads(call)
        turned = q + self._turned_keys(call) if self.rotary else 0
        if self.tiled:
            return turned + q + kv + 2 * out + call.tokens * self.d_out
        return turned + q + kv + out + 2 * self.matrices(call)

    def back(self, call: Call) -> Number:
        q, kv, out = self._heads(call)
        kept = total(self.kept(call).values())
        return kept + q + kv + out + (0 if self.tiled else 2 * self.matrices(call))

    def moved(self, call: Call) -> Number:
        q, kv, out = self._heads(call)
        turned = 3 * (q + self._turned_keys(call)) if self.rotary else 0
        # Heads are joined, and the result is added to what came in.
        around = 2 * out + 3 * call.tokens * self.d_out
        return around + turned + (0 if self.tiled else 4 * self.matrices(call))

    def activated(self, call: Call) -> Number:
        return 0 if self.tiled else self.matrices(call)


def visible(rows: Number, keys: Number, causal: bool, window: Number | None) -> Number:
    """Pairs that a mask leaves; the last query stands at the last key.

    Causal: ``n·m − n(n−1)/2``, with n = m ``n(n+1)/2``. A window of w keys (the query's own among them) takes from that
    what lies further back.
    """
    if not causal and window is None:
        return rows * keys
    assert causal, "a window counts keys up to the query's own"
    # The query at position p = m − n … m − 1 may see p + 1 keys, and of those the last w.
    seen = _up_to(keys) - _up_to(keys - rows)
    if window is not None:
        seen = seen - (_up_to(keys - window) - _up_to(keys - rows - window))
    return seen


def _up_to(x: Number) -> Number:
    """1 + 2 + … + x, nothing where x is negative."""
    if isinstance(x, int):
        return triangle(max(x, 0))
    return triangle(sympy.Max(x, 0))


def triangle(x: Number) -> Number:
    """``x(x + 1)/2``"""
    return x * (x + 1) // 2 if isinstance(x, int) else x * (x + 1) / 2


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
