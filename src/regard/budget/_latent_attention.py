"""Multi-head latent attention (MLA): keys and values are expanded from one small vector per token, which is cached."""

from __future__ import annotations

from dataclasses import dataclass

from regard.budget._attention_parts import Attention
from regard.budget._parts import Call, Product, Weight
from regard.budget._symbols import Number


@dataclass(frozen=True)
class LatentAttention(Attention):
    """Attention whose keys and values come from a latent vector c and a rotated key that all heads share.

        c = norm(W_c x)      K = [W_uk c, rotated W_r x]      V = W_uv c      Q = W_uq norm(W_qa x)

    The cache holds c and the rotated key of each token: `kv_rank` + `d_rope` numbers, for all heads together.

    - `d_key`: width of a query head, `d_rope` included; `d_value`: width of a value head.
    - `q_rank`: width of the latent vector of queries; 0 if queries are projected directly.
    - `qkv_bias`: whether the maps to latent vectors have biases.

    A pass over a whole text expands keys and values. A pass that continues from a cache does not: queries are mapped
    to the latent space instead, which gives the same scores with fewer FLOPs.
    """

    q_rank: Number = 0
    kv_rank: Number = 1
    d_rope: Number = 0

    @property
    def _d_plain(self) -> Number:
        """The width of a query head without its rotated part."""
        return self.d_key - self.d_rope

    def weights(self) -> tuple[Weight, ...]:
        queries = self.heads * self.d_key
        weights: list[Weight] = []
        if self.q_rank == 0:
            weights.append(Weight("q.weight", (queries, self.d_in)))
        else:
            weights += self._down_map("q_down", self.q_rank)
            weights.append(Weight("q_norm.weight", (self.q_rank,)))
            weights.append(Weight("q.weight", (queries, self.q_rank)))
        weights += self._down_map("kv_down", self.kv_rank + self.d_rope)
        weights.append(Weight("kv_norm.weight", (self.kv_rank,)))
        weights.append(Weight("k.weight", (self.heads * self._d_plain, self.kv_rank)))
        weights.append(Weight("v.weight", (self.heads * self.d_value, self.kv_rank)))
        weights.append(Weight("out.weight", (self.d_out, self.heads * self.d_value)))
        if self.out_bias:
            weights.append(Weight("out.bias", (self.d_out,)))
        return tuple(weights)

    def _down_map(self, name: str, width: Number) -> list[Weight]:
        """The map from the input to a latent vector."""
        weights = [Weight(f"{name}.weight", (width, self.d_in))]
        if self.qkv_bias:
            weights.append(Weight(f"{name}.bias", (width,)))
        return weights

    def products(self, call: Call) -> tuple[Product, ...]:
        new_keys = call.batch * call.new_keys
        products: list[Product] = []
        query_input = self.d_in
        if self.q_rank != 0:
            products.append(Product("q down", "projections", call.tokens, self.d_in, self.q_rank))
            query_input = self.q_rank
        products.append(Product("q", "projections", call.tokens, query_input, self.heads * self.d_key))
        latent = self.kv_rank + self.d_rope
        products.append(Product("kv down", "projections", new_keys, self.d_in, latent))

        repeats = call.batch * self.heads
        share = self.visible_share(call)
        if call.keys == call.new_keys:
            widths = self.heads * (self._d_plain + self.d_value)
            products.append(Product("k and v", "projections", new_keys, self.kv_rank, widths))
            inner = self.d_key
            columns = self.d_value
        else:
            # From a cache: each head's key and value maps are applied to queries and results, not to all keys.
            rows = call.tokens * self.heads
            to_latent = Product("q to latent", "projections", rows, self._d_plain, self.kv_rank, matrices=self.heads)
            from_latent = Product("v from latent", "projections", rows, self.kv_rank, self.d_value, matrices=self.heads)
            products += [to_latent, from_latent]
            inner = latent
            columns = self.kv_rank
        products.append(Product("scores", "attention", call.rows, inner, call.keys, repeats, False, share))
        products.append(Product("values", "attention", call.rows, call.keys, columns, repeats, False, share))
        products.append(Product("out", "projections", call.tokens, self.heads * self.d_value, self.d_out))
        return tuple(products)

    def stored_elements(self, batch: Number, tokens: Number) -> Number:
        """The number of elements that a cache keeps: one latent vector and one rotated key per token."""
        return batch * tokens * (self.kv_rank + self.d_rope)

    def saved_bytes(self, call: Call, size: Number) -> dict[str, Number]:
        saved = super().saved_bytes(call, size)
        # The latent vectors before and after their norms.
        widths = 2 * self.q_rank + 2 * self.kv_rank + self.d_rope
        saved["latent vectors"] = size * call.tokens * widths
        return saved

    def forward_peak(self, call: Call, size: Number) -> Number:
        latents = size * call.tokens * (self.q_rank + self.kv_rank + self.d_rope)
        return super().forward_peak(call, size) + latents
