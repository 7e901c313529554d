"""Attention is convolution: a convolution as attention, the one nearest to a head, and heads replaced by theirs."""

from regard.convolution.convolved import ConvolvedAttention
from regard.convolution.replace import Comparison, Replaced, compare, replace, swap
from regard.convolution.to_attention import AttentionConvolution, leak, to_attention
from regard.convolution.to_convolution import HeadConvolution, to_convolution

__all__ = [
    "AttentionConvolution",
    "Comparison",
    "ConvolvedAttention",
    "HeadConvolution",
    "Replaced",
    "compare",
    "leak",
    "replace",
    "swap",
    "to_attention",
    "to_convolution",
]
