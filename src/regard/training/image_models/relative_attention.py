"""Image models with attention in place of convolution: heads attend by the offset between two pixels.

After Cordonnier, Loukas and Jaggi, "On the Relationship between Self-Attention and Convolutional Layers" (2020).
"""

from __future__ import annotations

from typing import Any

from torch import nn

from regard._config_json import Config
from regard._errors import RegardError
from regard.models._checkpoint_keys import Key, TensorLookup
from regard.nn import Block, Encoder, FeedForward, LayerNorm, MultiHeadAttention
from regard.positions import Grid, Quadratic
from regard.training.image_models.mean_pooled import MeanImageModel, PatchEncoder, image_key_table, patch_grid

MODEL_TYPES = ("regard-relative-attention",)
ENCODINGS = ("quadratic", "relative", "content")

_BLOCK_PARTS = (
    *("attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.out_proj"),
    *("attention.position.centers", "attention.position.alpha", "attention.position.y", "attention.position.x"),
    *("attention.position.key_y", "attention.position.key_x"),
    *("attention_norm", "feedforward_norm", "feedforward.up", "feedforward.down"),
)
TABLE = image_key_table(*(Key(f"vit.encoder.blocks.{{i}}.{part}", f"blocks.{{i}}.{part}") for part in _BLOCK_PARTS))


class RelativeAttention(MeanImageModel):
    """``x ← x + MHA(norm(x))``, ``x ← x + FFN(norm(x))``, ``logits = W mean_i norm(x^L)_i + b``

    No positions are added to x. The weight of pixel j for pixel i depends on their offset δ, as ``encoding`` says:

    - ``"quadratic"``: softmax_j(−α_h‖δ − Δ_h‖²), with Δ_h and α_h learned in every layer;
    - ``"relative"``: softmax_j(y_h[δ₁] + x_h[δ₂]), learned tables, independent of the content of the pixels;
    - ``"content"``: softmax_j(y_h[δ₁] + x_h[δ₂] + q_i·(k_j + r^y_h[δ₁] + r^x_h[δ₂])/√d), where d is the width of q_i.

    The first two do not use queries and keys: these have width 1 and are fixed at 0, and the scale is 0. The attention
    weights are then the same for all images, as the kernels of a convolutional network are. ``config.json`` also
    contains ``heads``, ``layers``, ``value`` (D_o of a head), ``hidden`` and ``encoding``.
    """

    @property
    def attentions(self) -> list[MultiHeadAttention]:
        """The attention layers, in order."""
        return [module for module in self.modules() if isinstance(module, MultiHeadAttention)]

    def resized(self, side: int) -> RelativeAttention:
        """Return a model with the same weights for images of another size; only for the quadratic encoding."""
        encoding = self.config.string("encoding", "quadratic")
        if encoding != "quadratic":
            raise RegardError(f"encoding is {encoding!r}, whose tables have a fixed size; it must be 'quadratic'")
        other = build(Config({**self.config, "side": side}), lambda key: None)
        other.load_state_dict(self.state_dict())
        return other.to(next(self.parameters())).train(self.training)


def build(config: Config, stored: TensorLookup) -> RelativeAttention:
    """Build the model that a config describes."""
    encoding = config.string("encoding", "quadratic")
    if encoding not in ENCODINGS:
        raise RegardError(f"config.json: encoding is {encoding!r}; it must be one of {', '.join(ENCODINGS)}")
    d = config.integer("d")
    blocks = []
    for _ in range(config.layer_count("layers")):
        # Create the attention first: the order decides which random numbers the initial weights get.
        attention = _create_attention(config, encoding)
        blocks.append(Block(attention, FeedForward(d, config.integer("hidden"), activation="gelu")))
    encoder = Encoder.from_blocks(blocks, norm=LayerNorm(d))
    return RelativeAttention(config, TABLE, PatchEncoder(config, encoder, config.class_count()))


def _create_attention(config: Config, encoding: str) -> MultiHeadAttention:
    d = config.integer("d")
    heads = config.integer("heads")
    value = config.integer("value")
    grid = patch_grid(config)
    if encoding == "content":
        if d % heads:
            raise RegardError(f"config.json: heads is {heads}; it must divide d, which is {d}")
        position: Any = Grid(*grid, heads, d=d // heads)
        return MultiHeadAttention(d, heads, d_key=d // heads, d_value=value, qkv_bias=True, position=position)

    position = Quadratic(*grid, heads) if encoding == "quadratic" else Grid(*grid, heads)
    layer = MultiHeadAttention(d, heads, d_key=1, d_value=value, scale=0.0, position=position)
    # Queries and keys are not used, so their projections are not trained.
    for projection in (layer.q_proj, layer.k_proj):
        nn.init.zeros_(projection.weight)
        projection.weight.requires_grad_(False)
    return layer
