"""regard: attention you can compute, count, prove and see.

>>> import torch, regard
>>> q = k = v = torch.randn(1, 8, 1024, 64)
>>> out, seen = regard.attention(q, k, v, mask=regard.Causal(), observe=regard.Observe(map=16))
>>> seen.map.shape
torch.Size([8, 16, 16])

``regard.__version__`` is the installed version.
"""

from regard import masks, nn, positions, watching
from regard.attention import attention, scaled_dot_product_attention
from regard.masks import Causal, Dense, Padding, Prefix, Segments, Window
from regard.observables import Observation, Observe
from regard.positions import (
    ALiBi,
    Grid,
    Learned,
    Quadratic,
    RelativeKeys,
    RelativeTable,
    Rotary,
    Sinusoidal,
    T5Buckets,
)
from regard.version import __version__
from regard.watching import watch

__all__ = [
    "ALiBi",
    "Causal",
    "Dense",
    "Grid",
    "Learned",
    "Observation",
    "Observe",
    "Padding",
    "Prefix",
    "Quadratic",
    "RelativeKeys",
    "RelativeTable",
    "Rotary",
    "Segments",
    "Sinusoidal",
    "T5Buckets",
    "Window",
    "__version__",
    "attention",
    "masks",
    "nn",
    "positions",
    "scaled_dot_product_attention",
    "watch",
    "watching",
]
