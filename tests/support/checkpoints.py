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
        if type(module).__name__ in ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "T5LayerNorm"):
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, Float64Norm(module.weight, module.variance_epsilon))
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
