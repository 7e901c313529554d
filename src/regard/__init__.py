"""regard: attention you can compute, count, prove and see.

>>> import torch, regard
>>> q = k = v = torch.randn(1, 8, 1024, 64)
>>> out, observation = regard.attention(q, k, v, mask=regard.Causal(), observe=regard.Observe(map=16))
>>> observation.map.shape
torch.Size([8, 16, 16])

``regard.__version__`` is the installed version.
"""

from typing import TYPE_CHECKING

from regard._lazy_names import import_at_first_use
from regard._version import __version__

if TYPE_CHECKING:
    from regard import budget, claims, convolution, interp, masks, models, nn, parallel, plots, positions, training
    from regard._errors import RegardError
    from regard._groups import Groups
    from regard._observables import Observation, Observe
    from regard._operator import attention, scaled_dot_product_attention
    from regard.interp import watch
    from regard.masks import Causal, Dense, Padding, Prefix, Segments, Window
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

__all__ = [
    "ALiBi",
    "Causal",
    "Dense",
    "Grid",
    "Groups",
    "Learned",
    "Observation",
    "Observe",
    "Padding",
    "Prefix",
    "Quadratic",
    "RegardError",
    "RelativeKeys",
    "RelativeTable",
    "Rotary",
    "Segments",
    "Sinusoidal",
    "T5Buckets",
    "Window",
    "__version__",
    "attention",
    "budget",
    "claims",
    "convolution",
    "interp",
    "masks",
    "models",
    "nn",
    "parallel",
    "plots",
    "positions",
    "scaled_dot_product_attention",
    "training",
    "watch",
]

# Name → its module, which is imported when the name is first used: `import regard` alone does not import torch.
_SOURCES = {
    "ALiBi": "regard.positions",
    "Causal": "regard.masks",
    "Dense": "regard.masks",
    "Grid": "regard.positions",
    "Groups": "regard._groups",
    "Learned": "regard.positions",
    "Observation": "regard._observables",
    "Observe": "regard._observables",
    "Padding": "regard.masks",
    "Prefix": "regard.masks",
    "Quadratic": "regard.positions",
    "RegardError": "regard._errors",
    "RelativeKeys": "regard.positions",
    "RelativeTable": "regard.positions",
    "Rotary": "regard.positions",
    "Segments": "regard.masks",
    "Sinusoidal": "regard.positions",
    "T5Buckets": "regard.positions",
    "Window": "regard.masks",
    "attention": "regard._operator",
    "budget": "regard.budget",
    "claims": "regard.claims",
    "convolution": "regard.convolution",
    "interp": "regard.interp",
    "masks": "regard.masks",
    "models": "regard.models",
    "nn": "regard.nn",
    "parallel": "regard.parallel",
    "plots": "regard.plots",
    "positions": "regard.positions",
    "scaled_dot_product_attention": "regard._operator",
    "training": "regard.training",
    "watch": "regard.interp",
}
__getattr__, __dir__ = import_at_first_use(__name__, _SOURCES)
