"""Dropout of weights, by the hash of ``regard._lowered_scores.dropout_keep``: the same weights in every backend."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mix_bits(x):
    """The final mixing step of the hash function MurmurHash3, on unsigned 32-bit words."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def row_hash(call, b, h, rows):
    """The part of the hash that is the same for all keys of a row."""
    seed = tl.load(call.seed)
    low = seed.to(tl.uint32)
    high = (seed >> 32).to(tl.uint32)
    hash = mix_bits(low ^ mix_bits(high) ^ (tl.cast(b, tl.uint32) * 0x9E3779B1))
    hash = mix_bits(hash ^ (tl.cast(h, tl.uint32) * 0x85EBCA77))
    return mix_bits(hash ^ (rows.to(tl.uint32) * 0xC2B2AE3D))


@triton.jit
def keep_tile(call, row_hashes, keys):
    """Which weights of a tile survive. The factor of the survivors is ``call.keep_factor``, which is 0 at p = 1."""
    key_hashes = mix_bits(keys.to(tl.uint32) + 0x27D4EB2F)
    keep_from = tl.cast(call.keep_from, tl.uint32, bitcast=True)
    return mix_bits(row_hashes[:, None] ^ key_hashes[None, :]) >= keep_from
