"""Image models with attention but without feed-forward networks: ``model.kind=attention`` of the task "digits"."""

from __future__ import annotations

from torch import Tensor, nn

from regard._config_json import Config
from regard._observables import Observation, Observe
from regard.models._checkpoint_keys import Key, TensorLookup
from regard.nn import LayerNorm, MultiHeadAttention
from regard.nn._stack import Observations
from regard.positions import Learned
from regard.training.image_models.mean_pooled import MeanImageModel, PatchEncoder, image_key_table, patch_grid

MODEL_TYPES = ("regard-attention-only",)

_BLOCK = "vit.encoder.blocks.{i}."
TABLE = image_key_table(
    Key("vit.encoder.position.weight", "position.weight"),
    Key(_BLOCK + "norm", "norms.{i}"),
    *(Key(f"{_BLOCK}attention.{x}_proj", f"attentions.{{i}}.{x}_proj") for x in ("q", "k", "v", "out")),
)


class _Block(nn.Module):
    """``x ← x + MHA(norm(x))``"""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.norm = LayerNorm(d)
        self.attention = MultiHeadAttention(d, heads, qkv_bias=True)

    def forward(self, x_BND: Tensor, *, observe: Observe | None = None) -> tuple[Tensor, Observation | None]:
        result = self.attention(self.norm(x_BND), observe=observe)
        if isinstance(result, Tensor):
            return x_BND + result, None
        y_BND, observation = result
        return x_BND + y_BND, observation


class _Encoder(nn.Module):
    """``x⁰ = x + E_pos``, then the blocks, then ``y = norm(x^L)``:  x ``[B, N, D]`` → y ``[B, N, D]``"""

    def __init__(self, n: int, d: int, heads: int, layers: int) -> None:
        super().__init__()
        self.position = Learned(n, d)
        self.blocks = nn.ModuleList(_Block(d, heads) for _ in range(layers))
        self.norm = LayerNorm(d)

    def forward(self, x_BND: Tensor, *, observe: Observe | None = None) -> Tensor | tuple[Tensor, Observations]:
        x_BND = self.position(x_BND)
        observations = {}
        for i, block in enumerate(self.blocks):
            x_BND, observation = block(x_BND, observe=observe)
            if observation is not None:
                observations[f"blocks.{i}.attention"] = observation
        y_BND: Tensor = self.norm(x_BND)
        return y_BND if observe is None else (y_BND, observations)


class AttentionOnly(MeanImageModel):
    """``x⁰ = pE + E_pos``, ``x ← x + MHA(norm(x))``, ``logits = W mean_i norm(x^L)_i + b``;  E_pos ``[N, D]`` learned

    The softmax is the only nonlinearity besides the norms. ``config.json`` also contains ``heads`` and ``layers``.
    """


def build(config: Config, stored: TensorLookup) -> AttentionOnly:
    """Build the model that a config describes."""
    rows, columns = patch_grid(config)
    encoder = _Encoder(rows * columns, config.integer("d"), config.integer("heads"), config.layer_count("layers"))
    return AttentionOnly(config, TABLE, PatchEncoder(config, encoder, config.class_count()))
