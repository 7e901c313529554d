"""Attention is convolution: a convolution as attention, and the convolution nearest to a head."""

from regard.convolution.to_attention import AttentionConvolution, leak, to_attention
from regard.convolution.to_convolution import HeadConvolution, to_convolution

__all__ = ["AttentionConvolution", "HeadConvolution", "leak", "to_attention", "to_convolution"]
