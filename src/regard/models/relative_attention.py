"""Image models with attention in a convolution's place: heads go by how far a pixel is from another.

After Cordonnier, Loukas and Jaggi, "On the Relationship between Self-Attention and Convolutional Layers" (2020).
"""

from __future__ import annotations

from typing import Any

from torch import nn

from regard.config import Config
from regard.models.bert import classes
from regard.models.keys import Key, Stored, Table
from regard.models.mean_image import MeanImageModel, Vision, cells
from regard.nn import Block, Encoder, FeedForward, LayerNorm, MultiHeadAttention
from regard.positions import Grid, Quadratic

__all__ = ["ENCODINGS", "KINDS", "TABLE", "RelativeAttention", "build"]

KINDS = ("regard-relative-attention",)
ENCODINGS = ("quadratic", "relative", "content")

_OURS, _THEIRS = "vit.encoder.blocks.{i}.", "blocks.{i}."
TABLE = Table(
    keys=(
        Key("vit.patches", "patches"),
        *(
            Key(f"{_OURS}{part}", f"{_THEIRS}{part}")
            for part in (
                *(f"attention.{x}_proj" for x in ("q", "k", "v", "out")),
                *(f"attention.position.{x}" for x in ("centers", "alpha", "y", "x", "key_y", "key_x")),
                *("attention_norm", "feedforward_norm", "feedforward.up", "feedforward.down"),
            )
        ),
        Key("vit.encoder.norm", "norm"),
        Key("vit.head", "head"),
    )
)


class RelativeAttention(MeanImageModel):
    """``x ← x + MHA(norm(x))``, ``x ← x + FFN(norm(x))``, ``logits = W mean_i norm(x^L)_i + b``;  nothing is added to x

    Where a head looks from pixel i is decided by δ, how far pixel j lies from it, as ``encoding`` says:

    - ``"quadratic"``: softmax_j(−α_h‖δ − Δ_h‖²), learned Δ_h and α_h in every layer;
    - ``"relative"``: softmax_j(y_h[δ₁] + x_h[δ₂]), learned tables, with no regard to what a pixel shows;
    - ``"content"``: the same and, beside it, q_i·k_j and q_i·(r_h[δ₁] + r_h[δ₂]), as in a transformer.

    The first two look at no query and no key: these are one number wide, 0 and fixed, and the scale is 0. In them every
    picture has the same weights, and what tells pictures apart is values, norms and feed-forward networks, as in a
    convolutional network. ``config.json`` also says ``heads``, ``layers``, ``value`` (D_o of a head), ``hidden`` and
    ``encoding``.
    """

    @property
    def attentions(self) -> list[MultiHeadAttention]:
        """The layers' attention, first layer first."""
        return [module for module in self.modules() if isinstance(module, MultiHeadAttention)]

    def resized(self, side: int) -> RelativeAttention:
        """The same weights for pictures of another size: with the quadratic encoding, which is the same at any size."""
        encoding = self.config.name("encoding", "quadratic")
        if encoding != "quadratic":
            raise ValueError(
                f"the encoding is {encoding!r}, whose tables are as large as a picture; quadratic ones are not"
            )
        other = build(Config({**self.config, "side": side}), lambda key: None)
        other.load_state_dict(self.state_dict())
        return other.to(next(self.parameters())).train(self.training)


def build(config: Config, stored: Stored) -> RelativeAttention:
    """The model that a config describes."""
    encoding = config.name("encoding", "quadratic")
    if encoding not in ENCODINGS:
        raise ValueError(f"config.json: encoding is {encoding!r}; known are {', '.join(ENCODINGS)}")
    d = config.whole("d")
    blocks = [
        Block(_attention(config, encoding), FeedForward(d, config.whole("hidden"), activation="gelu"))
        for _ in range(config.layers("layers"))
    ]
    encoder = Encoder.of(blocks, norm=LayerNorm(d))
    return RelativeAttention(config, TABLE, Vision(config, encoder, classes(config)))


def _attention(config: Config, encoding: str) -> MultiHeadAttention:
    d, heads, value, grid = config.whole("d"), config.whole("heads"), config.whole("value"), cells(config)
    if encoding == "content":
        if d % heads:
            raise ValueError(f"config.json: heads is {heads}, which does not divide d, {d}")
        position = Grid(*grid, heads, d=d // heads)
        return MultiHeadAttention(d, heads, d_key=d // heads, d_value=value, qkv_bias=True, position=position)
    by_place: Any = Quadratic(*grid, heads) if encoding == "quadratic" else Grid(*grid, heads)
    layer = MultiHeadAttention(d, heads, d_key=1, d_value=value, scale=0.0, position=by_place)
    for projection in (layer.q_proj, layer.k_proj):
        nn.init.zeros_(projection.weight)
        projection.weight.requires_grad_(False)
    return layer
