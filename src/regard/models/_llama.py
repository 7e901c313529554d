"""Builds Llama, Mistral and Qwen: pre-norm decoders with rotary positions, RMSNorm and gated feed-forward networks."""

from __future__ import annotations

from functools import partial

from regard._config_json import CLASS_PREFIXES, Config, activation_name
from regard.masks import Window
from regard.models._checkpoint_keys import Key, KeyTable, TensorLookup
from regard.models._rope import rotary_from_config
from regard.models._text_decoder import TextDecoder
from regard.nn import Block, Decoder, FeedForward, MultiHeadAttention, RMSNorm
from regard.nn._stack import TokenEmbedding, head_kind

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")

KEYS = KeyTable(
    keys=(
        Key("decoder.tokens.embedding", "model.embed_tokens"),
        Key("decoder.blocks.{i}.attention_norm", "model.layers.{i}.input_layernorm"),
        Key("decoder.blocks.{i}.attention.q_proj", "model.layers.{i}.self_attn.q_proj"),
        Key("decoder.blocks.{i}.attention.k_proj", "model.layers.{i}.self_attn.k_proj"),
        Key("decoder.blocks.{i}.attention.v_proj", "model.layers.{i}.self_attn.v_proj"),
        Key("decoder.blocks.{i}.attention.out_proj", "model.layers.{i}.self_attn.o_proj"),
        Key("decoder.blocks.{i}.attention.q_norm", "model.layers.{i}.self_attn.q_norm"),
        Key("decoder.blocks.{i}.attention.k_norm", "model.layers.{i}.self_attn.k_norm"),
        Key("decoder.blocks.{i}.feedforward_norm", "model.layers.{i}.post_attention_layernorm"),
        Key("decoder.blocks.{i}.feedforward.gate", "model.layers.{i}.mlp.gate_proj"),
        Key("decoder.blocks.{i}.feedforward.up", "model.layers.{i}.mlp.up_proj"),
        Key("decoder.blocks.{i}.feedforward.down", "model.layers.{i}.mlp.down_proj"),
        Key("decoder.norm", "model.norm"),
        Key("decoder.tokens.head", "lm_head"),
    ),
    prefix="model.",
    unprefixed=tuple(f"{CLASS_PREFIXES[model_type]}Model" for model_type in MODEL_TYPES),
    ignored=(r"rotary_emb\.inv_freq$",),
    tied={"lm_head.weight": "model.embed_tokens.weight"},
)


def build(config: Config, stored: TensorLookup) -> TextDecoder:
    """The model that a config describes."""
    model_type = config.model_type
    has_head = config.head_name("ForCausalLM", "Model") == "ForCausalLM"
    config.require("pretraining_tp", 1)
    d = config.integer("hidden_size")
    heads = config.integer("num_attention_heads")
    # The defaults are those of transformers' config classes.
    d_key = config.integer("head_dim", {"qwen3": 128}.get(model_type, d // heads))
    kv_heads = config.integer("num_key_value_heads", {"mistral": 8}.get(model_type, heads))
    norm = partial(RMSNorm, eps=config.number("rms_norm_eps", 1e-6))
    position = rotary_from_config(config, d_key)
    activation = activation_name(config, "hidden_act", "silu")
    # Qwen2 has biases on q, k and v only; the others have them on all four projections or on none.
    attention_bias = config.boolean("attention_bias", False) and model_type in ("llama", "qwen3")
    mlp_bias = config.boolean("mlp_bias", False) and model_type == "llama"

    blocks = []
    for window in config.sliding_windows():
        mask = None
        if window is not None:
            mask = Window(window - 1, 0)  # a window of w keys is the query and w − 1 before it
        attention = MultiHeadAttention(
            d,
            heads,
            d_key=d_key,
            d_value=d_key,
            kv_heads=kv_heads,
            qkv_bias=attention_bias or model_type == "qwen2",
            out_bias=attention_bias,
            position=position,
            mask=mask,
            qk_norm=norm if model_type == "qwen3" else None,
            dropout=config.number("attention_dropout", 0.0),
        )
        hidden = config.integer("intermediate_size")
        feedforward = FeedForward(d, hidden, activation=activation, gated=True, bias=mlp_bias)
        blocks.append(Block(attention, feedforward, norm=norm))

    tied = config.boolean("tie_word_embeddings", False)
    head = head_kind(tied) if has_head else None
    tokens = TokenEmbedding(config.integer("vocab_size"), d, head=head, scale=1.0)
    decoder = Decoder.from_blocks(blocks, norm=norm(d), tokens=tokens)
    trained_length = config.integer("max_position_embeddings", 2048)
    return TextDecoder(config, KEYS, decoder, max_positions=None, trained_length=trained_length)
