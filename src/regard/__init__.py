"""regard: attention you can compute, count, prove and see."""

from regard import kernels, masks, observables, positions
from regard.attention import attention, scaled_dot_product_attention
from regard.masks import Causal, Dense, Padding, Prefix, Segments, Window
from regard.observables import Observation, Observe
