"""A classifier of pictures whose blocks are attention alone: no feed-forward network anywhere."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from regard.models.folder import Folder, write_folder
from regard.nn import LayerNorm, MultiHeadAttention
from regard.positions import Learned

__all__ = ["AttentionOnly"]

KIND = "regard-attention-only"


class AttentionOnly(nn.Module):
    """``x⁰ = pE + E_pos``, ``x ← x + MHA(norm(x))``, ``logits = W mean_i norm(x^L)_i + b``

        image [C, side, side] cut into N = (side/P)² patches p [C·P²]      E [C·P², D]      E_pos [N, D], learned

    What tells pictures apart beyond a linear map is the softmax's doing. A folder that ``save`` wrote is read by
    ``AttentionOnly.load``: ``config.json`` (``model_type`` is "regard-attention-only", then the arguments of this
    class) and ``model.safetensors``, whose tensors have the names of these parameters.

    >>> model = AttentionOnly(side=6, channels=1, patch=2, d=6, heads=3, layers=2, labels=["a", "b"])
    >>> model(torch.zeros(4, 1, 6, 6)).shape
    torch.Size([4, 2])
    """

    def __init__(
        self, *, side: int, channels: int, patch: int, d: int, heads: int, layers: int, labels: Sequence[str]
    ) -> None:
        super().__init__()
        if side % patch:
            raise ValueError(f"patch {patch} does not divide the side of a picture, {side}; patches must tile it")
        self.settings = {
            **{"side": side, "channels": channels, "patch": patch, "d": d, "heads": heads, "layers": layers}
        }
        self.labels = list(labels)
        self.grid = (side // patch, side // patch)
        self.patches = nn.Conv2d(channels, d, kernel_size=patch, stride=patch)
        self.position = Learned(self.grid[0] * self.grid[1], d)
        self.norms = nn.ModuleList(LayerNorm(d) for _ in range(layers))
        self.attentions = nn.ModuleList(MultiHeadAttention(d, heads, qkv_bias=True) for _ in range(layers))
        self.norm = LayerNorm(d)
        self.head = nn.Linear(d, len(self.labels))

    def forward(self, images: Tensor) -> Tensor:
        """``images [B, C, side, side] → logits [B, classes]``"""
        side, channels = self.settings["side"], self.settings["channels"]
        if images.ndim != 4 or tuple(images.shape[1:]) != (channels, side, side):
            raise ValueError(
                f"images have shape {list(images.shape)}; this model takes [batch, {channels}, {side}, {side}]"
            )
        x_BND = self.position(self.patches(images).flatten(2).transpose(1, 2))
        for norm, attention in zip(self.norms, self.attentions, strict=True):
            x_BND = x_BND + attention(norm(x_BND))
        logits: Tensor = self.head(self.norm(x_BND).mean(1))
        return logits

    def save(self, folder: str | os.PathLike[str], beside: Mapping[str, bytes] | None = None) -> None:
        """Write the folder; every file appears whole or not at all."""
        names = {str(i): label for i, label in enumerate(self.labels)}
        tensors = {name: p.detach().contiguous() for name, p in self.named_parameters()}
        write_folder(folder, {"model_type": KIND, **self.settings, "id2label": names}, tensors, beside or {})

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> AttentionOnly:
        """The model of a folder, ready to use (``eval``)."""
        there = Folder(folder)
        config = there.config
        if config.kind != KIND:
            raise ValueError(f"{there.path}: config.json: model_type is {config.kind!r}; {KIND!r} is read here")
        sizes = {name: config.whole(name) for name in ("side", "channels", "patch", "d", "heads")}
        names = config.part("id2label")
        labels = [str(names.get(str(i))) for i in range(len(names))]
        with torch.device("meta"):
            model = cls(**sizes, layers=config.layers("layers"), labels=labels)
        _fill(model, there)
        return model.eval()


def _fill(model: AttentionOnly, there: Folder) -> None:
    stored, wanted = there.tensors(), dict(model.named_parameters())
    for what, names in (("missing", wanted.keys() - stored.keys()), ("left over", stored.keys() - wanted.keys())):
        if names:
            raise ValueError(f"{there.path}: {', '.join(sorted(names)[:3])} {what} in the weights")
    for name, parameter in wanted.items():
        if stored[name].shape != parameter.shape:
            shapes = f"{list(stored[name].shape)}, but config.json makes it {list(parameter.shape)}"
            raise ValueError(f"{there.path}: {name} has shape {shapes}")
    model.load_state_dict(stored, assign=True)
