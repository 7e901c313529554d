"""Attention as a part: four maps, scores and values; what masks leave of them; tiled, or plain with n × m stored."""

from __future__ import annotations

from dataclasses import dataclass, field

import sympy

from regard.budget.parts import Call, Part, Product, Weight, largest, total
from regard.budget.symbols import Number

__all__ = ["Attention", "visible"]


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
    dropout: bool = False  # on the result; on weights it costs nothing
    relative: Number = 0  # relative codes r that each query meets (Shaw): q·r is a product of n rows with them
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
        near = (
            (Product("positions", "attention", call.rows, self.d_key, self.relative, times, False),)
            if self.relative != 0
            else ()
        )
        scores = Product("scores", "attention", call.rows, self.d_key, call.keys, times, False, share)
        values = Product("values", "attention", call.rows, call.keys, self.d_value, times, False, share)
        return (q, k, v, scores, *near, values, out)

    def share(self, call: Call) -> Number | sympy.Rational:
        """The part of all (query, key) pairs that the masks leave; all of none, where a source has been read before."""
        if call.rows == 0:
            return 1
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

    def looked_at(self, call: Call) -> Number:
        """Values of keys and values that some query may see: a window leaves the oldest out."""
        keys = call.keys
        if self.window is not None:
            within = call.rows + self.window - 1
            keys = min(keys, within) if isinstance(keys, int) and isinstance(within, int) else sympy.Min(keys, within)
        return call.batch * keys * self.kv_heads * (self.d_key + self.d_value)

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

    def _near(self, call: Call) -> Number:
        """Bytes of q·r, in float32."""
        return 4 * call.tokens * self.heads * self.relative

    def _repeated(self, call: Call) -> Number:
        """Values of keys and values where each query head has its own, as plain attention makes them."""
        return call.batch * call.keys * self.heads * (self.d_key + self.d_value)

    def kept(self, call: Call, size: Number) -> dict[str, Number]:
        q, kv, out = self._heads(call)
        wide = largest(size, 4)  # plain attention computes in float32 at least, and keeps that
        kept: dict[str, Number] = {"input": size * call.tokens * self.d_in, "joined heads": size * out}
        if self.relative != 0:
            kept["q·r"] = self._near(call)
        if self.qk_norm:
            keys = call.batch * call.keys * self.kv_heads * self.d_key
            kept["q and k normed"] = 2 * wide * (q + keys)
        if self.dropout:
            kept["dropout"] = size * call.tokens * self.d_out
        if not self.tiled:
            weights = wide * self.matrices(call)
            return kept | {"q": wide * q, "k and v": wide * self._repeated(call), "weights": weights}
        # A row's largest score and its sum, in float64.
        rows = 16 * call.tokens * self.heads
        return kept | {"q": size * q, "k and v": size * kv, "heads": size * out, "rows' maxima and totals": rows}

    def kept_once(self, call: Call, size: Number) -> Number:
        if self.d_context is None:
            return 0
        return size * call.batch * call.keys * self.d_context

    def work(self, call: Call, size: Number) -> Number:
        q, _, out = self._heads(call)
        fresh = call.batch * call.fresh * self.kv_heads * (self.d_key + self.d_value)
        turned = q + self._turned_keys(call) if self.rotary else 0
        tiled = size * (turned + q + fresh + 2 * out + call.tokens * self.d_out)
        if self.relative != 0:  # done with before heads are joined
            tiled = largest(tiled, size * (turned + q + fresh + out) + self._near(call))
        return tiled if self.tiled else largest(tiled, size * (q + fresh) + self._plain_work(call, size, q))

    def _plain_work(self, call: Call, size: Number, q: Number) -> Number:
        """Scaled q, scores, their softmax and which rows are empty; half precision is computed in float32."""
        wide, matrices = largest(size, 4), self.matrices(call)
        copies = size * self._repeated(call) if self.kv_heads != self.heads else 0
        if size != wide:
            copies = copies + wide * (q + self._repeated(call))
        mask = (size + 1) * call.rows * call.keys if self.causal else 0
        return wide * q + copies + (2 * wide + 1) * matrices + mask

    def back(self, call: Call, size: Number) -> Number:
        q, kv, out = self._heads(call)
        if self.tiled:
            kept = self.kept(call, size)
            # The joined heads are done with; half precision sums its gradients in float32.
            sums = largest(size, 4) * (q + kv) if size < 4 else 0
            return total(kept.values()) - kept["joined heads"] + size * (q + kv + out) + sums + self._near(call)
        wide, matrices, repeated = largest(size, 4), self.matrices(call), self._repeated(call)
        values = call.batch * call.keys * self.heads * self.d_value
        # The weights, their gradient and that of the scores; then those of q, k and v.
        worst = largest(
            wide * (values + 3 * matrices), wide * (matrices + q + repeated), wide * matrices + 2 * size * out
        )
        return size * call.tokens * self.d_in + wide * (q + repeated) + worst

    def moved(self, call: Call) -> Number:
        q, kv, out = self._heads(call)
        turned = 3 * (q + self._turned_keys(call)) if self.rotary else 0
        # Heads are joined, and the result is added to what came in.
        return 2 * out + 3 * call.tokens * self.d_out + turned


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
