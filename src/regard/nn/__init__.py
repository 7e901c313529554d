"""Layers and transformers built on ``regard.attention``: multi-head attention, norms, blocks, encoders, decoders."""

from regard.nn._block import Block, make_block
from regard.nn._cache import BlockCache, DecoderCache, KeyValueCache
from regard.nn._decoder import Decoder
from regard.nn._encoder import Encoder
from regard.nn._encoder_decoder import EncoderDecoder
from regard.nn._feed_forward import FeedForward
from regard.nn._multi_head_attention import MultiHeadAttention
from regard.nn._norm import LayerNorm, RMSNorm
from regard.nn._stack import Stack, TokenEmbedding
from regard.nn._vision_transformer import VisionTransformer

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
    "TokenEmbedding",
    "VisionTransformer",
    "make_block",
]
