"""Image models of attention alone: no feed-forward network anywhere; what ``regard train digits`` can learn with."""

from __future__ import annotations

from torch import Tensor, nn

from regard.config import Config
from regard.models.bert import classes
from regard.models.keys import Key, Stored, Table
from regard.models.mean_image import MeanImageModel, Vision, cells
from regard.nn import LayerNorm, MultiHeadAttention
from regard.nn.stack import Observations
from regard.observables import Observation, Observe
from regard.positions import Learned

__all__ = ["KINDS", "TABLE", "AttentionOnly", "build"]

KINDS = ("regard-attention-only",)

_OURS = "vit.encoder.blocks.{i}."
TABLE = Table(
    keys=(
        Key("vit.patches", "patches"),
        Key("vit.encoder.position.weight", "position.weight"),
        Key(_OURS + "norm", "norms.{i}"),
        *(Key(f"{_OURS}attention.{x}_proj", f"attentions.{{i}}.{x}_proj") for x in ("q", "k", "v", "out")),
        Key("vit.encoder.norm", "norm"),
        Key("vit.head", "head"),
    )
)


class _Block(nn.Module):
    """``x ← x + MHA(norm(x))``"""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.norm, self.attention = LayerNorm(d), MultiHeadAttention(d, heads, qkv_bias=True)

    def forward(self, x_BND: Tensor, *, observe: Observe | None = None) -> tuple[Tensor, Observation | None]:
        result = self.attention(self.norm(x_BND), observe=observe)
        y_BND, seen = (result, None) if isinstance(result, Tensor) else result
        return x_BND + y_BND, seen


class _Encoder(nn.Module):
    """``x⁰ = x + E_pos``, the blocks in turn, ``y = norm(x^L)``:  x ``[B, N, D]`` → y ``[B, N, D]``"""

    def __init__(self, n: int, d: int, heads: int, layers: int) -> None:
        super().__init__()
        self.position = Learned(n, d)
        self.blocks = nn.ModuleList(_Block(d, heads) for _ in range(layers))
        self.norm = LayerNorm(d)

    def forward(self, x_BND: Tensor, *, observe: Observe | None = None) -> Tensor | tuple[Tensor, Observations]:
        x_BND, seen = self.position(x_BND), {}
        for i, block in enumerate(self.blocks):
            x_BND, part = block(x_BND, observe=observe)
            if part is not None:
                seen[f"blocks.{i}.attention"] = part
        y_BND: Tensor = self.norm(x_BND)
        return y_BND if observe is None else (y_BND, seen)


class AttentionOnly(MeanImageModel):
    """``x⁰ = pE + E_pos``, ``x ← x + MHA(norm(x))``, ``logits = W mean_i norm(x^L)_i + b``;  E_pos ``[N, D]`` learned

    What tells pictures apart beyond a linear map is the softmax's doing. ``config.json`` also says ``heads`` and
    ``layers``.
    """


def build(config: Config, stored: Stored) -> AttentionOnly:
    """The model that a config describes."""
    rows, columns = cells(config)
    encoder = _Encoder(rows * columns, config.whole("d"), config.whole("heads"), config.layers("layers"))
    return AttentionOnly(config, TABLE, Vision(config, encoder, classes(config)))
