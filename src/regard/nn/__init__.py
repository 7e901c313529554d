"""Layers and transformers on top of the operator: multi-head attention, norms, blocks, stacks."""

from regard.nn.block import Block, make_block
from regard.nn.cache import BlockCache, DecoderCache, KeyValueCache
from regard.nn.decoder import Decoder
from regard.nn.encoder import Encoder
from regard.nn.encoder_decoder import EncoderDecoder
from regard.nn.feedforward import FeedForward
from regard.nn.multihead import MultiHeadAttention
from regard.nn.norm import LayerNorm, RMSNorm
from regard.nn.stack import Stack, Tokens
from regard.nn.vit import VisionTransformer

__all__ = [
    "Block",
    "BlockCache",
    "Decoder",
    "DecoderCache",
    "Encoder",
    "EncoderDecoder",
    "FeedForward",
    "KeyValueCache",
    "LayerNorm",
    "MultiHeadAttention",
    "RMSNorm",
    "Stack",
    "Tokens",
    "VisionTransformer",
    "make_block",
]
