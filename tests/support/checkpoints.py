"""Tiny checkpoints written by `transformers`, with random weights in all parameters."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard import Rotary

transformers = pytest.importorskip("transformers")
sdpa_mask = transformers.masking_utils.sdpa_mask


CAPPED = "capped_in_any_dtype"


def _capped_attention(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float = 1.0,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention with a soft cap in the dtype of q: transformers' own takes the softmax in float32."""
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, dim=1).mT * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    n, m = scores.shape[-2:]
    if mask is None:
        mask = torch.ones(n, m, dtype=torch.bool).tril(m - n)
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    out = scores.softmax(dim=-1) @ v.repeat_interleave(groups, dim=1)
    return out.transpose(1, 2).contiguous(), None


transformers.AttentionInterface.register(CAPPED, _capped_attention)
transformers.AttentionMaskInterface.register(CAPPED, sdpa_mask)


def perturb(model: nn.Module, seed: int = 0) -> nn.Module:
    """Add N(0, 0.3²) to every parameter: zero biases and unit norms would hide errors."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=g) * 0.3)
    return model


def make(kind: str, entries: dict[str, Any], seed: int = 0) -> Any:
    """A `transformers` model of the class `kind`, from its config's entries, in float32 and eval mode."""
    cls = getattr(transformers, kind)
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = cls(cls.config_class(**entries))
    if model.config.model_type == "gemma2":
        model.set_attn_implementation(CAPPED)
    return perturb(model, seed).eval()


def write(model: Any, folder: Path, **options: Any) -> Path:
    """Save a model with `save_pretrained`, and return the folder."""
    model.save_pretrained(folder, **options)
    return folder


class Float64Norm(nn.Module):
    """RMSNorm of Llama and T5, without their conversion to float32."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def in_float64(model: Any, position: Rotary | None = None) -> Any:
    """The same model entirely in float64: float32 norms are replaced, and rotary angles come from ``position``."""
    model = model.double()
    for name, module in list(model.named_modules()):
        kind = type(module).__name__
        norm = None
        if kind in ("GemmaRMSNorm", "Gemma2RMSNorm"):
            norm = Float64Norm(1 + module.weight, module.eps)
        elif kind.endswith("RMSNorm") or kind == "T5LayerNorm":
            norm = Float64Norm(module.weight, module.variance_epsilon)
        elif kind == "OlmoLayerNorm":
            norm = nn.LayerNorm(module.normalized_shape, 1e-5, elementwise_affine=False)
        if norm is not None:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, norm)
        if kind.endswith("ScaledWordEmbedding"):
            module.embed_scale.fill_(module.scalar_embed_scale)  # it was rounded to float32
        if type(module).__name__.endswith("RotaryEmbedding"):
            assert position is not None
            module.forward = _waves(position)
    return model


def _waves(position: Rotary) -> Any:
    def forward(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        theta = position.for_length(int(position_ids.max()) + 1, torch.device("cpu"))
        angle = position_ids[..., None].double() * theta
        angle = torch.cat([angle, angle], dim=-1)
        return angle.cos() * position.attention_factor, angle.sin() * position.attention_factor

    return forward
