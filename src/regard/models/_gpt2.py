"""Builds GPT-2: a pre-norm decoder with learned positions and a tied head; its weights are stored transposed."""

from __future__ import annotations

from functools import partial

from regard._config_json import Config, activation_name
from regard.models._checkpoint_keys import Key, KeyTable, TensorLookup
from regard.models._text_decoder import TextDecoder
from regard.nn import Block, Decoder, FeedForward, LayerNorm, MultiHeadAttention
from regard.nn._stack import TokenEmbedding, head_kind
from regard.positions import Learned

MODEL_TYPES = ("gpt2",)

_ATTENTION = "decoder.blocks.{i}.attention"
KEYS = KeyTable(
    keys=(
        Key("decoder.tokens.embedding", "transformer.wte"),
        Key("decoder.position", "transformer.wpe"),
        Key("decoder.blocks.{i}.attention_norm", "transformer.h.{i}.ln_1"),
        # GPT-2 stores q, k and v as one matrix.
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
    unprefixed=("GPT2Model",),
    ignored=(r"\.attn\.(bias|masked_bias)$",),
    tied={"lm_head.weight": "transformer.wte.weight"},
)


def build(config: Config, stored: TensorLookup) -> TextDecoder:
    """The model that a config describes."""
    has_head = config.head_name("LMHeadModel", "Model") == "LMHeadModel"
    config.refuse("add_cross_attention", "this model is read as a decoder without a context")
    d = config.integer("n_embd")
    heads = config.integer("n_head")
    positions = config.integer("n_positions")
    # Names and defaults of the entries are those of transformers' GPT2Config.
    norm = partial(LayerNorm, eps=config.number("layer_norm_epsilon", 1e-5))
    activation = activation_name(config, "activation_function", "gelu_new")
    blocks = []
    for i in range(config.layer_count("n_layer")):
        scale = _scale(config, d // heads, layer=i)
        attention = MultiHeadAttention(d, heads, qkv_bias=True, scale=scale, dropout=config.number("attn_pdrop", 0.1))
        feedforward = FeedForward(d, config.integer("n_inner", 4 * d), activation=activation)
        blocks.append(Block(attention, feedforward, norm=norm, dropout=config.number("resid_pdrop", 0.1)))

    tied = config.boolean("tie_word_embeddings", True)
    head = head_kind(tied) if has_head else None
    decoder = Decoder.from_blocks(
        blocks,
        norm=norm(d),
        tokens=TokenEmbedding(config.integer("vocab_size"), d, head=head, scale=1.0),
        position=Learned(positions, d),
        dropout=config.number("embd_pdrop", 0.1),
    )
    return TextDecoder(config, KEYS, decoder, max_positions=positions, trained_length=None)


def _scale(config: Config, d_key: int, layer: int) -> float:
    """The factor of q·k in one layer; two entries change GPT-2's usual 1/√d_key."""
    scale = 1.0
    if config.boolean("scale_attn_weights", True):
        scale = d_key**-0.5
    if config.boolean("scale_attn_by_inverse_layer_idx", False):
        scale /= layer + 1
    return scale
