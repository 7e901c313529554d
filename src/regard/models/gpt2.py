"""GPT-2: a pre-norm decoder with learned positions and a tied head; its linear maps are stored transposed."""

from __future__ import annotations

from functools import partial

from regard.config import Config
from regard.models.activations import activation
from regard.models.keys import Key, Stored, Table
from regard.models.text_decoder import TextDecoder
from regard.nn import Block, Decoder, FeedForward, LayerNorm, MultiHeadAttention
from regard.nn.stack import Tokens
from regard.positions import Learned

__all__ = ["KINDS", "TABLE", "build"]

KINDS = ("gpt2",)

_ATTENTION = "decoder.blocks.{i}.attention"
TABLE = Table(
    keys=(
        Key("decoder.tokens.embedding", "transformer.wte"),
        Key("decoder.position", "transformer.wpe"),
        Key("decoder.blocks.{i}.attention_norm", "transformer.h.{i}.ln_1"),
        Key(
            (f"{_ATTENTION}.q_proj", f"{_ATTENTION}.k_proj", f"{_ATTENTION}.v_proj"),
            "transformer.h.{i}.attn.c_attn",
            transposed=True,
        ),
        Key(f"{_ATTENTION}.out_proj", "transformer.h.{i}.attn.c_proj", transposed=True),
        Key("decoder.blocks.{i}.feedforward_norm", "transformer.h.{i}.ln_2"),
        Key("decoder.blocks.{i}.feedforward.up", "transformer.h.{i}.mlp.c_fc", transposed=True),
        Key("decoder.blocks.{i}.feedforward.down", "transformer.h.{i}.mlp.c_proj", transposed=True),
        Key("decoder.norm", "transformer.ln_f"),
        Key("decoder.tokens.head", "lm_head"),
    ),
    prefix="transformer.",
    bare=("GPT2Model",),
    unused=(r"\.attn\.(bias|masked_bias)$",),
    copies={"lm_head.weight": "transformer.wte.weight"},
)


def build(config: Config, stored: Stored) -> TextDecoder:
    """The model that a config describes."""
    known = ("GPT2LMHeadModel", "GPT2Model")
    if config.architecture and config.architecture not in known:
        raise ValueError(f"config.json: architectures is {config.architecture}; known for gpt2 are {', '.join(known)}")
    config.refuse("add_cross_attention", "this model is read as a decoder without a context")
    d, heads, length = config.whole("n_embd"), config.whole("n_head"), config.whole("n_positions")
    norm = partial(LayerNorm, eps=config.real("layer_norm_epsilon", 1e-5))
    blocks = [
        Block(
            MultiHeadAttention(
                d, heads, qkv_bias=True, scale=_scale(config, d // heads, i), dropout=config.real("attn_pdrop", 0.1)
            ),
            FeedForward(
                d, config.whole("n_inner", 4 * d), activation=activation(config, "activation_function", "gelu_new")
            ),
            norm=norm,
            dropout=config.real("resid_pdrop", 0.1),
        )
        for i in range(config.layers("n_layer"))
    ]
    tied = config.flag("tie_word_embeddings", True)
    tokens = Tokens(
        config.whole("vocab_size"),
        d,
        head=None if config.architecture != "GPT2LMHeadModel" else "tied" if tied else "own",
        scale=1.0,
    )
    decoder = Decoder.of(
        blocks, norm=norm(d), tokens=tokens, position=Learned(length, d), dropout=config.real("embd_pdrop", 0.1)
    )
    return TextDecoder(config, TABLE, decoder, longest=length, trained=None)


def _scale(config: Config, d_key: int, layer: int) -> float:
    scale = d_key**-0.5 if config.flag("scale_attn_weights", True) else 1.0
    return scale / (layer + 1) if config.flag("scale_attn_by_inverse_layer_idx", False) else scale
