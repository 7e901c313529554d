"""Attention as convolution: convert a convolution to attention, find a head's nearest convolution, replace heads."""

from regard.convolution._convolved_attention import ConvolvedAttention
from regard.convolution._replace import Comparison, Replacement, compare, replace, swap
from regard.convolution._to_attention import AttentionConvolution, leak, to_attention
from regard.convolution._to_convolution import HeadConvolution, to_convolution

__all__ = [
    "AttentionConvolution",
    "Comparison",
    "ConvolvedAttention",
    "HeadConvolution",
    "Replacement",
    "compare",
    "leak",
    "replace",
    "swap",
    "to_attention",
    "to_convolution",
]
