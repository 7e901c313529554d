"""One tile of logits [ROWS, KEYS], as every pass computes it: products, softcap, biases, masks.

    logit = softcap·tanh(scale·q·k / softcap) + bias + Σ terms,   −inf where hidden

The logit of a visible key is at least ``LOWEST``: −inf means hidden, so no sum may become −inf by overflow. Only in
hard attention a visible key may have the logit −inf, because another key has a larger product.

``SCORES`` is how products become scores: "scaled" (the usual case), "zero" (scale 0: q and k are not read) or "hard"
(scale inf: the keys with the row's largest product get the logit of their bias).
"""

from __future__ import annotations

import triton
import triton.language as tl

# The smallest finite float32. It is the initial running maximum, so that −inf − max is not NaN.
LOWEST = tl.constexpr(-3.402823466e38)
# The coordinate of a token without a position (NO_POSITION in regard/_lowered_scores.py). It has no relative bias.
NO_POSITION = tl.constexpr(-(2**30))
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(a, b, sums):
    """sums + a @ b, with products of float32 numbers that are not rounded to fewer digits."""
    # The interpreter multiplies the bits of bfloat16 as if they were integers; as float32 the products are the same.
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, sums, input_precision="ieee")


@triton.jit
def as_dtype(x, dtype: tl.constexpr):
    """float32 numbers in another dtype, rounded to the nearest number; of two, to the even one."""
    # The interpreter cuts digits off where a GPU rounds.
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(is_finite(x), bits.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def is_finite(x):
    """Which numbers of a tile are finite."""
    x = x.to(tl.float32)
    return x - x == 0


@triton.jit
def load_rows(view, b, h, rows, count, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Rows of one head as a tile [rows, PADDED]; 0 in rows from ``count`` on and in columns from WIDTH on."""
    columns = tl.arange(0, PADDED)
    first = view.data + tl.cast(b, tl.int64) * view.batch_stride + tl.cast(h, tl.int64) * view.head_stride
    at = first + rows.to(tl.int64)[:, None] * view.row_stride + columns[None, :] * view.column_stride
    inside = rows[:, None] < count
    if PADDED != WIDTH:
        inside = inside & (columns[None, :] < WIDTH)
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def store_rows(view, b, h, rows, count, values, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """The inverse of ``load_rows``, in the dtype of the tensor."""
    columns = tl.arange(0, PADDED)
    first = view.data + tl.cast(b, tl.int64) * view.batch_stride + tl.cast(h, tl.int64) * view.head_stride
    at = first + rows.to(tl.int64)[:, None] * view.row_stride + columns[None, :] * view.column_stride
    inside = rows[:, None] < count
    if PADDED != WIDTH:
        inside = inside & (columns[None, :] < WIDTH)
    tl.store(at, as_dtype(values, view.data.dtype.element_ty), mask=inside)


@triton.jit
def row_bounds(call, b, rows):
    """The keys lo ≤ j < hi of each row. A row after the last one sees nothing.

    The bounds are clamped to 0 … M, so that a wrong value cannot lead to a key that does not exist. They are int64, and
    are clamped before they become int32.
    """
    exists = rows < call.N
    lo = tl.zeros_like(rows)
    hi = tl.where(exists, call.M, 0)
    if call.lo is not None:
        bound = tl.load(call.lo + tl.cast(b, tl.int64) * call.lo_batch_stride + rows, mask=exists, other=0)
        lo = tl.minimum(tl.maximum(bound, 0), call.M).to(tl.int32)
    if call.hi is not None:
        bound = tl.load(call.hi + tl.cast(b, tl.int64) * call.hi_batch_stride + rows, mask=exists, other=0)
        # A row that does not exist has read 0.
        hi = tl.minimum(tl.maximum(bound, 0), call.M).to(tl.int32)
    return lo, hi


@triton.jit
def key_range(call, lo, hi, KEYS: tl.constexpr):
    """No row sees a key outside first ≤ j < end. All tiles of rows share one grid of blocks of keys."""
    first = tl.min(tl.where(lo < hi, lo, call.M), 0)
    end = tl.max(tl.where(lo < hi, hi, 0), 0)
    return first // KEYS * KEYS, end


@triton.jit
def tanh(x):
    """tanh of float32. Near 0, where 1 − 2/(e^2x + 1) would lose digits, it is a polynomial."""
    square = x * x
    series = 62.0 / 2835.0 * square - 17.0 / 315.0
    series = series * square + 2.0 / 15.0
    series = series * square - 1.0 / 3.0
    near = x + x * square * series
    far = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(x)) + 1.0)
    far = tl.where(x < 0, -far, far)
    return tl.where(tl.abs(x) < 0.25, near, far)


@triton.jit
def hard_products(call, b, h, g, rows, keys, D: tl.constexpr):
    """q·k for hard attention: one chain of fused multiply–adds over d, so that equal keys tie exactly."""
    q_at = call.q.data + tl.cast(b, tl.int64) * call.q.batch_stride + tl.cast(h, tl.int64) * call.q.head_stride
    k_at = call.k.data + tl.cast(b, tl.int64) * call.k.batch_stride + tl.cast(g, tl.int64) * call.k.head_stride
    q_at = q_at + rows.to(tl.int64) * call.q.row_stride
    k_at = k_at + keys.to(tl.int64) * call.k.row_stride
    products = tl.zeros([rows.shape[0], keys.shape[0]], tl.float32)
    for t in range(0, D):
        q = tl.load(q_at + t * call.q.column_stride, mask=rows < call.N, other=0.0).to(tl.float32)
        k = tl.load(k_at + t * call.k.column_stride, mask=keys < call.M, other=0.0).to(tl.float32)
        q, k = tl.broadcast(q[:, None], k[None, :])
        products = tl.fma(q, k, products)
    return products


@triton.jit
def score_tile(call, b, h, g, rows, keys, q, k, SCORES: tl.constexpr, D: tl.constexpr):
    """softcap·tanh(scale·q·k / softcap); at scale 0 zeros, and in hard attention the products."""
    if SCORES == "zero":
        scores = tl.zeros([rows.shape[0], keys.shape[0]], tl.float32)
    elif SCORES == "hard":
        scores = hard_products(call, b, h, g, rows, keys, D)
    else:
        scores = tl.zeros([rows.shape[0], keys.shape[0]], tl.float32)
        scores = dot(q, tl.trans(k), scores) * call.scale
        if call.softcap is not None:
            scores = call.softcap * tanh(scores / call.softcap)
    return scores


@triton.jit
def element_offsets(view, b, h, rows, keys):
    """Where the elements of a tile are in a tensor [B, H, N, M], which may be broadcast."""
    first = tl.cast(b, tl.int64) * view.batch_stride + tl.cast(h, tl.int64) * view.head_stride
    row = first + rows.to(tl.int64) * view.row_stride
    return row[:, None] + keys.to(tl.int64)[None, :] * view.column_stride


@triton.jit
def term_columns(call, term, rows, keys):
    """The table column of each pair of a tile, and which pairs have a position."""
    query_positions = tl.load(term.query_positions + rows, mask=rows < call.N, other=0)
    key_positions = tl.load(term.key_positions + keys, mask=keys < call.M, other=0)
    offsets = key_positions[None, :] - query_positions[:, None] - term.first_offset
    columns = tl.minimum(tl.maximum(offsets, 0), term.columns - 1)
    has_position = (query_positions != NO_POSITION)[:, None] & (key_positions != NO_POSITION)[None, :]
    return columns, has_position


@triton.jit
def add_biases(call, b, h, rows, keys, scores, visible):
    """Scores plus biases, and which keys are visible: the mask and a bias of −inf hide a key."""
    if call.mask is not None:
        at = call.mask.data + element_offsets(call.mask, b, h, rows, keys)
        visible = visible & (tl.load(at, mask=visible, other=0) != 0)
    if call.bias is not None:
        at = call.bias.data + element_offsets(call.bias, b, h, rows, keys)
        bias = tl.load(at, mask=visible, other=0.0).to(tl.float32)
        visible = visible & (bias != float("-inf"))
        scores = scores + bias
    for t in tl.static_range(len(call.terms)):
        term = call.terms[t]
        columns, has_position = term_columns(call, term, rows, keys)
        row = tl.cast(b, tl.int64) * term.table.batch_stride + tl.cast(h, tl.int64) * term.table.head_stride
        row = row + rows.to(tl.int64) * term.table.row_stride
        at = term.table.data + row[:, None] + columns
        bias = tl.load(at, mask=visible & has_position, other=0.0).to(tl.float32)
        visible = visible & (bias != float("-inf"))
        scores = scores + bias
    return scores, visible


@triton.jit
def logit_tile(call, b, h, rows, keys, lo, hi, hard_max, scores, SCORES: tl.constexpr):
    """Turn the scores of a tile into logits. Returns them, and which keys are visible."""
    visible = (keys[None, :] >= lo[:, None]) & (keys[None, :] < hi[:, None])
    if SCORES == "hard":
        biases = tl.zeros_like(scores)
        biases, visible = add_biases(call, b, h, rows, keys, biases, visible)
        biases = tl.maximum(biases, LOWEST, propagate_nan=tl.PropagateNan.ALL)
        logits = tl.where(scores == hard_max[:, None], biases, float("-inf"))
        # A visible NaN reaches its whole row, as in ordinary attention.
        logits = tl.where(hard_max[:, None] != hard_max[:, None], float("nan"), logits)
    else:
        logits, visible = add_biases(call, b, h, rows, keys, scores, visible)
        logits = tl.maximum(logits, LOWEST, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(visible, logits, float("-inf")), visible


@triton.jit
def load_hard_max(call, row_index, exists, SCORES: tl.constexpr):
    """The rows' largest products in hard attention, else numbers that nothing reads."""
    hard_max = tl.zeros_like(row_index).to(tl.float32)
    if SCORES == "hard":
        hard_max = tl.load(call.hard_max + row_index, mask=exists, other=0.0)
    return hard_max


@triton.jit
def load_row_sums(row_max_of_rows, row_sum_of_rows, row_index, exists):
    """row_max and 1/row_sum of some rows; 0 and 0 in rows that see nothing."""
    row_max = tl.load(row_max_of_rows + row_index, mask=exists, other=0.0).to(tl.float32)
    row_sum = tl.load(row_sum_of_rows + row_index, mask=exists, other=0.0).to(tl.float32)
    empty = row_sum == 0
    return tl.where(empty, 0.0, row_max), tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, row_sum))


@triton.jit
def weight_tile(logits, visible, row_max, inverse_sum):
    """A = e^(logit − row_max) / row_sum."""
    return tl.where(visible, tl.exp(logits - row_max[:, None]) * inverse_sum[:, None], 0.0)


@triton.jit
def tile_is_finite(x):
    """1 if all numbers of a tile are finite, else 0."""
    return tl.min(tl.min(is_finite(x).to(tl.int32), 1), 0)
