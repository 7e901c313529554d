"""Image models of attention alone: no feed-forward network anywhere; what ``regard train digits`` can learn with."""

from __future__ import annotations

from torch import Tensor, nn

from regard.config import Config
from regard.models.bert import classes
from regard.models.image_model import ImageModel
from regard.models.keys import Key, Stored, Table
from regard.nn import LayerNorm, MultiHeadAttention
from regard.nn.stack import Observations
from regard.nn.vit import cut_patches
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


class _Vision(nn.Module):
    """What ``VisionTransformer`` is to a ViT: patches, an encoder and a head, here without a class token."""

    def __init__(self, side: int, channels: int, patch: int, d: int, heads: int, layers: int, labels: int) -> None:
        super().__init__()
        if side % patch:
            raise ValueError(f"patch {patch} does not divide the side of a picture, {side}; patches must tile it")
        self.image, self.channels, self.grid = (side, side), channels, (side // patch, side // patch)
        self.patches = nn.Conv2d(channels, d, kernel_size=patch, stride=patch)
        self.encoder = _Encoder(self.grid[0] * self.grid[1], d, heads, layers)
        self.head = nn.Linear(d, labels)

    def patch_tokens(self, images: Tensor) -> Tensor:
        """``images [B, C, side, side] → [B, N, D]``: patches row by row; no positions."""
        return cut_patches(images, self.patches, self.image)


class AttentionOnly(ImageModel):
    """``x⁰ = pE + E_pos``, ``x ← x + MHA(norm(x))``, ``logits = W mean_i norm(x^L)_i + b``

        image [C, side, side] cut into N = (side/P)² patches p [C·P²]      E [C·P², D]      E_pos [N, D], learned

    What tells pictures apart beyond a linear map is the softmax's doing. ``transformers`` has no such model;
    ``config.json`` says ``side``, ``channels``, ``patch``, ``d``, ``heads``, ``layers`` and ``id2label``.
    """

    def forward(self, images: Tensor, *, observe: Observe | None = None) -> Tensor | tuple[Tensor, Observations]:
        """Logits ``[B, classes]``; with ``observe`` also observations by module name."""
        result = self.hidden(images, observe=observe)
        y, seen = (result, None) if isinstance(result, Tensor) else result
        logits: Tensor = self.head(self.pooled(y))
        return logits if seen is None else (logits, seen)

    def pooled(self, y: Tensor) -> Tensor:
        """``y [B, N, D] → [B, D]``: the mean over the patches."""
        return y.mean(1)


def build(config: Config, stored: Stored) -> AttentionOnly:
    """The model that a config describes."""
    sizes = {name: config.whole(name) for name in ("side", "channels", "patch", "d", "heads")}
    vision = _Vision(**sizes, layers=config.layers("layers"), labels=classes(config))
    return AttentionOnly(config, TABLE, vision)  # type: ignore[arg-type]  # it has what ImageModel asks of a vit
