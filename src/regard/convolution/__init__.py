"""Attention is convolution: convert both ways."""

from regard.convolution.to_attention import AttentionConvolution, leak, to_attention

__all__ = ["AttentionConvolution", "leak", "to_attention"]
