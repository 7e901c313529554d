"""Attention as a part: four projections, scores and weighted sums, with or without stored weights."""

from __future__ import annotations

from dataclasses import dataclass, field

import sympy
from sympy import Expr

from regard._checks import check_integer
from regard._errors import RegardError
from regard.budget._parts import Call, Part, Product, Weight, largest, smallest
from regard.budget._symbols import Number

POSITIONS = ("none", "learned", "sinusoidal", "rotary", "alibi", "t5", "table", "shaw", "quadratic")
DEFAULT_REACH = 32  # T5's buckets, or the largest offset of a relative table


@dataclass(frozen=True)
class Attention(Part):
    """``[A¹V¹ … A^{N_h}V^{N_h}] W_out + b_out`` with ``A = softmax(β Q Kᵀ)``.

        W_q [D_in, N_h·D_hid]   W_k [D_c, N_kv·D_hid]   W_v [D_c, N_kv·D_o]   W_out [N_h·D_o, D_out]

    Parameters, with N_kv = N_h and D_c = D_in: ``N_h·D_in·(2·D_hid + D_o) + N_h·D_o·D_out + D_out``.

    - `d_context`: width of the context; None for self-attention.
    - `causal`, `window`: the masks. A window of w means that a query sees at most w keys, its own key included.
    - `tiled`: if True, attention weights are never stored; if False, all ``N_h·n·m`` weights are stored.
    - `rotary`, `qk_norm`: whether queries and keys are rotated, and whether they are normalized per head.
    - `dropout`: whether there is dropout on the result; dropout on the weights costs nothing.
    - `chunk`: a query sees only the keys of its own chunk of this many tokens; needs a causal mask.
    - `band`: a query sees only keys at most this many tokens away, on both sides; for attention that is not causal.
    - `rolling`: whether the cache drops keys that a window or a chunk hides, as transformers' cache does.
    - `norms`: learned weights of norms of queries and keys, if `qk_norm` does not describe them.
    - `relative`: number of relative position codes r (Shaw); each query is multiplied with every code: q·r.
    - `positions`: learned tables added to the scores.
    """

    operator_calls = 3

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
    dropout: bool = False
    relative: Number = 0
    positions: tuple[Weight, ...] = field(default=())
    chunk: Number | None = None
    rolling: bool = False
    band: Number | None = None
    norms: tuple[Weight, ...] = field(default=())

    def _projections(self) -> tuple[tuple[str, Number, Number, bool], ...]:
        """(name, input width, output width, bias) of the four linear maps."""
        context = self.d_in if self.d_context is None else self.d_context
        return (
            ("q", self.d_in, self.heads * self.d_key, self.qkv_bias),
            ("k", context, self.kv_heads * self.d_key, self.qkv_bias),
            ("v", context, self.kv_heads * self.d_value, self.qkv_bias),
            ("out", self.heads * self.d_value, self.d_out, self.out_bias),
        )

    def weights(self) -> tuple[Weight, ...]:
        weights: list[Weight] = []
        for name, width_in, width_out, bias in self._projections():
            weights.append(Weight(f"{name}.weight", (width_out, width_in)))
            if bias:
                weights.append(Weight(f"{name}.bias", (width_out,)))
        if self.sinks:
            weights.append(Weight("sinks", (self.heads,)))
        if self.qk_norm:
            weights.append(Weight("q_norm.weight", (self.d_key,)))
            weights.append(Weight("k_norm.weight", (self.d_key,)))
        return (*weights, *self.norms, *self.positions)

    def products(self, call: Call) -> tuple[Product, ...]:
        # Only new tokens are projected to keys and values; the other keys and values are in the cache.
        new_keys = call.batch * call.new_keys
        rows = {"q": call.tokens, "k": new_keys, "v": new_keys, "out": call.tokens}
        q, k, v, out = (
            Product(name, "projections", rows[name], width_in, width_out)
            for name, width_in, width_out, _ in self._projections()
        )

        share = self.visible_share(call)
        repeats = call.batch * self.heads
        scores = Product("scores", "attention", call.rows, self.d_key, call.keys, repeats, False, share)
        values = Product("values", "attention", call.rows, call.keys, self.d_value, repeats, False, share)
        if self.relative == 0:
            return (q, k, v, scores, values, out)
        # Shaw's codes: each query is multiplied with each code once.
        relative = Product("positions", "attention", call.rows, self.d_key, self.relative, repeats, False)
        return (q, k, v, scores, relative, values, out)

    def visible_share(self, call: Call) -> Number | sympy.Rational:
        """The share of all (query, key) pairs that no mask hides; 1 if there are no queries."""
        if call.rows == 0:
            return 1
        visible = visible_pairs(call.rows, call.keys, self.causal, self.window)
        if self.chunk is not None:
            visible = _pairs_in_chunks(call.keys, self.chunk) - _pairs_in_chunks(call.keys - call.rows, self.chunk)
        if self.band is not None:
            farther = largest(call.rows - self.band - 1, 0)
            visible = call.rows * call.rows - farther * (farther + 1)
        pairs = call.rows * call.keys
        if isinstance(visible, int) and isinstance(pairs, int):
            return sympy.Rational(visible, pairs)  # exact, so that the FLOPs stay an integer
        return sympy.simplify(visible / pairs)

    def textbook_memory(self, call: Call) -> dict[str, Number]:
        """Values in memory as the theory counts them: ``Q, K, V``, the weights ``N_h·n·m``, and the heads' outputs.

        This count leaves out the input, the scores before the softmax, and the projected output.
        """
        q, kv, out = self._head_elements(call)
        return {"Q, K, V": q + kv, "attention matrices": self.weight_elements(call), "heads' outputs": out}

    def weight_elements(self, call: Call) -> Number:
        """The number of attention weights of all heads, ``B·N_h·n·m``; tiled attention never stores them."""
        return call.batch * self.heads * call.rows * call.keys

    def stored_elements(self, batch: Number, tokens: Number) -> Number:
        """The number of elements that a cache keeps for `tokens` tokens: ``B·t·N_kv·(D_hid + D_o)``."""
        return self.projected_elements(batch, tokens)

    def projected_elements(self, batch: Number, tokens: Number) -> Number:
        """The number of elements of the keys and values of `tokens` tokens: ``B·t·N_kv·(D_hid + D_o)``."""
        return batch * tokens * self.kv_heads * (self.d_key + self.d_value)

    def cache_elements(self, batch: Number, tokens: Number) -> Number:
        """The number of elements in the cache after `tokens` tokens; a rolling one keeps what the next token sees."""
        if self.rolling and self.reach is not None:
            tokens = smallest(tokens, self.reach - 1)
        return self.stored_elements(batch, tokens)

    @property
    def reach(self) -> Number | None:
        """The largest number of keys that a query sees; None without a window or chunks."""
        return self.window if self.chunk is None else self.chunk

    def visible_cache_elements(self, call: Call) -> Number:
        """The number of elements of all keys and values that at least one query can see; a window hides the oldest."""
        keys = call.keys
        if self.reach is not None:
            keys = sympy.Min(keys, call.rows + self.reach - 1)
        return self.stored_elements(call.batch, keys)

    def _head_elements(self, call: Call) -> tuple[Number, Number, Number]:
        """Three numbers of elements: of all queries, of all keys and values, and of the heads' outputs."""
        q = call.tokens * self.heads * self.d_key
        out = call.tokens * self.heads * self.d_value
        return q, self.projected_elements(call.batch, call.keys), out

    def _rotated_elements(self, call: Call) -> Number:
        """The number of elements of queries and new keys that are rotated."""
        if not self.rotary:
            return 0
        return call.tokens * self.heads * self.d_key + call.batch * call.new_keys * self.kv_heads * self.d_key

    def _relative_bytes(self, call: Call) -> Number:
        """Bytes of the products q·r with the relative codes, in float32."""
        return 4 * call.tokens * self.heads * self.relative

    def _expanded_elements(self, call: Call) -> Number:
        """The number of elements of all keys and values if each query head has its own copy, as in plain attention."""
        return call.batch * call.keys * self.heads * (self.d_key + self.d_value)

    def saved_bytes(self, call: Call, size: Number) -> dict[str, Number]:
        q, kv, out = self._head_elements(call)
        wide = largest(size, 4)  # plain attention computes and saves at least float32
        saved: dict[str, Number] = {"input": size * call.tokens * self.d_in, "joined heads": size * out}
        if self.relative != 0:
            saved["q·r"] = self._relative_bytes(call)
        if self.qk_norm:
            keys = call.batch * call.keys * self.kv_heads * self.d_key
            saved["q and k normed"] = 2 * wide * (q + keys)
        if self.dropout:
            saved["dropout"] = size * call.tokens * self.d_out

        if not self.tiled:
            saved["q"] = wide * q
            saved["k and v"] = wide * self._expanded_elements(call)
            saved["weights"] = wide * self.weight_elements(call)
            return saved
        saved |= {"q": size * q, "k and v": size * kv, "heads": size * out}
        # The largest score of each row and the row's sum, in float64.
        saved["rows' maxima and totals"] = 16 * call.tokens * self.heads
        return saved

    def shared_saved_bytes(self, call: Call, size: Number) -> Number:
        if self.d_context is None:
            return 0
        return size * call.batch * call.keys * self.d_context  # all layers read the same context

    def forward_peak(self, call: Call, size: Number) -> Number:
        q, _, out = self._head_elements(call)
        new_kv = self.projected_elements(call.batch, call.new_keys)
        rotated = self._rotated_elements(call)
        peak = size * (rotated + q + new_kv + 2 * out + call.tokens * self.d_out)
        if self.relative != 0:
            # q·r is released before the heads are joined.
            peak = largest(peak, size * (rotated + q + new_kv + out) + self._relative_bytes(call))
        if self.tiled:
            return peak
        return largest(peak, size * (q + new_kv) + self._plain_forward_peak(call, size, q))

    def _plain_forward_peak(self, call: Call, size: Number, q: Number) -> Number:
        """Bytes of the scaled queries, the scores, their softmax and one boolean per weight."""
        wide = largest(size, 4)
        # Shared keys and values are copied for each query head, and half-precision inputs are converted to float32.
        copies: Number = 0
        if self.kv_heads != self.heads:
            copies = size * self._expanded_elements(call)
        if size != wide:
            copies = copies + wide * (q + self._expanded_elements(call))
        if self.causal:
            # The mask, as booleans and as numbers.
            copies = copies + (size + 1) * call.rows * call.keys
        return wide * q + copies + (2 * wide + 1) * self.weight_elements(call)

    def backward_peak(self, call: Call, size: Number) -> Number:
        if not self.tiled:
            return self._plain_backward_peak(call, size)
        q, kv, out = self._head_elements(call)
        saved = self.saved_bytes(call, size)
        gradients = size * (q + kv + out)
        if size < 4:
            # Gradients in half precision are accumulated in float32.
            gradients = gradients + 4 * (q + kv)
        # The joined heads are no longer needed at this point.
        return sum(saved.values()) - saved["joined heads"] + gradients + self._relative_bytes(call)

    def _plain_backward_peak(self, call: Call, size: Number) -> Number:
        q, _, out = self._head_elements(call)
        wide = largest(size, 4)
        weights = self.weight_elements(call)
        expanded = self._expanded_elements(call)
        values = call.batch * call.keys * self.heads * self.d_value

        # First come the weights, their gradient and the gradient of the scores; then the gradients of q, k and v.
        worst = largest(wide * (values + 3 * weights), wide * (weights + q + expanded), wide * weights + 2 * size * out)
        return size * call.tokens * self.d_in + wide * (q + expanded) + worst

    def elements_moved(self, call: Call) -> Number:
        _, _, out = self._head_elements(call)
        # Heads are joined, the result is added to the residual stream, queries and keys are rotated.
        return 2 * out + 3 * call.tokens * self.d_out + 3 * self._rotated_elements(call)


def visible_pairs(rows: Number, keys: Number, causal: bool, window: Number | None) -> Number:
    """The number of (query, key) pairs that no mask hides; the last query is aligned with the last key.

    With a causal mask: ``n·m − n(n−1)/2``, which is ``n(n+1)/2`` if n = m. With a window of w, a query sees only the
    last w of these keys, its own key included.
    """
    if not causal and window is None:
        return rows * keys
    # `attention` refuses a window without a causal mask.
    assert causal, "a window counts keys up to the query's own"

    # The query at position p = m − n … m − 1 sees p + 1 keys, and only the last w of them.
    visible = _triangular(keys) - _triangular(keys - rows)
    if window is not None:
        visible = visible - (_triangular(keys - window) - _triangular(keys - rows - window))
    return visible


def _pairs_in_chunks(tokens: Number, chunk: Number) -> Number:
    """The number of (query, key) pairs of the first `tokens` tokens, if a query sees its chunk up to its own key."""
    if isinstance(tokens, int) and isinstance(chunk, int):
        return tokens // chunk * _triangular(chunk) + _triangular(tokens % chunk)
    rest = sympy.Mod(tokens, chunk)
    # Not floor(tokens / chunk): printed formulas round the fractions in it.
    return (tokens - rest) / chunk * _triangular(chunk) + _triangular(rest)


def _triangular(x: Number) -> Number:
    """``1 + 2 + … + x = x(x + 1)/2``; 0 if x is negative."""
    positive = largest(x, 0)
    if isinstance(positive, int):
        return positive * (positive + 1) // 2
    return positive * (positive + 1) / 2


def attention(
    d_in: Number,
    heads: Number,
    *,
    d_key: Number | None = None,
    d_value: Number | None = None,
    d_out: Number | None = None,
    d_context: Number | None = None,
    kv_heads: Number | None = None,
    qkv_bias: bool = False,
    out_bias: bool = True,
    causal: bool = False,
    window: Number | None = None,
    sinks: bool = False,
    qk_norm: bool = False,
    dropout: bool = False,
    position: str = "none",
    reach: Number | None = None,
) -> Attention:
    """Build one multi-head attention layer from the theory's five dimensions.

    - `d_in`, `heads`: width of the input and number of heads.
    - `d_key`, `d_value`: widths of a head; default d_in/heads.
    - `d_out`, `d_context`: widths of the output and of a context; default d_in and self-attention.
    - `kv_heads`: key and value heads; default `heads`.
    - `causal`, `window`: masks; a window of w means that a query sees at most w keys, its own key included.
    - `position`: a position scheme that changes the scores, or q and k.
    - `reach`: number of buckets, or largest offset, of the position scheme; default 32.

    >>> attention(512, 8, out_bias=False).parameters
    1048576
    """
    d_in = check_size("d_in", d_in)
    heads = check_size("heads", heads)
    kv_heads = check_size("kv_heads", heads if kv_heads is None else kv_heads)
    if d_key is None:
        d_key = head_width(d_in, heads)
    if d_value is None:
        d_value = head_width(d_in, heads)
    d_key = check_size("d_key", d_key)

    # These combinations are errors in ``regard.nn`` too.
    if isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads:
        raise RegardError(f"kv_heads must divide heads, got kv_heads={kv_heads} and heads={heads}")
    if position in ("learned", "sinusoidal"):
        raise RegardError(f"position={position} needs a stack, because it is added to the stack's input; leave it out")
    if window is not None and not causal:
        raise RegardError(f"window={window} needs causal attention; set causal too, or leave window out")
    if position == "rotary" and d_context is not None:
        raise RegardError("position=rotary needs self-attention; leave out position or d_context")
    if position == "rotary" and isinstance(d_key, int) and d_key % 2:
        raise RegardError(f"d_key must be even with position=rotary, got {d_key}")

    relative: Number = 0
    if position == "shaw":
        relative = 2 * _check_reach(reach) + 1
    return Attention(
        d_in,
        heads,
        d_key,
        check_size("d_value", d_value),
        d_in if d_out is None else check_size("d_out", d_out),
        kv_heads,
        _check_optional_size("d_context", d_context),
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        causal=causal,
        window=_check_optional_size("window", window),
        sinks=sinks,
        qk_norm=qk_norm,
        rotary=position == "rotary",
        dropout=dropout,
        relative=relative,
        positions=position_tables(position, heads, d_key, reach),
    )


def _check_reach(reach: Number | None) -> Number:
    return DEFAULT_REACH if reach is None else check_size("reach", reach)


def position_tables(position: str, heads: Number, d_key: Number, reach: Number | None) -> tuple[Weight, ...]:
    """The learned tables that a position scheme adds to the scores; `reach`: its buckets or its largest offset."""
    if position not in POSITIONS:
        raise RegardError(f"position must be one of {', '.join(POSITIONS)}, got {position!r}")
    # Schemes that are not listed learn nothing inside attention.
    reach = _check_reach(reach)
    shapes: dict[str, tuple[tuple[Number, ...], ...]] = {
        "t5": ((reach, heads),),
        "table": ((heads, 2 * reach + 1),),
        "shaw": ((2 * reach + 1, d_key),),
        "quadratic": ((heads, 2), (heads,)),
    }
    return tuple(Weight("position", shape) for shape in shapes.get(position, ()))


def check_size(name: str, size: Number) -> Number:
    """Check that a size is an integer ≥ 1; symbols pass."""
    return size if isinstance(size, Expr) else check_integer(name, size, least=1)


def _check_optional_size(name: str, size: Number | None) -> Number | None:
    return None if size is None else check_size(name, size)


def head_width(d: Number, heads: Number) -> Number:
    """The width of a head: d/heads."""
    if not isinstance(d, int) or not isinstance(heads, int):
        return d / heads
    if d % heads:
        raise RegardError(f"heads must divide d unless d_key is given, got heads={heads} and d={d}")
    return d // heads
