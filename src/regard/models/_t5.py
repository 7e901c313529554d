"""Builds T5: an encoder–decoder with learned distance buckets, RMSNorm, no biases and unscaled products."""

from __future__ import annotations

from functools import partial
from typing import Literal, TypeVar

import torch

from regard._config_json import Config, activation_name
from regard.models._checkpoint_keys import Key, KeyTable, TensorLookup
from regard.models._text_to_text import TextToText, TextToTextEncoder
from regard.nn import Block, Decoder, Encoder, EncoderDecoder, FeedForward, MultiHeadAttention, RMSNorm
from regard.nn._stack import TokenEmbedding
from regard.positions import T5Buckets

MODEL_TYPES = ("t5",)
AnyStack = TypeVar("AnyStack", Encoder, Decoder)


def _attention_keys(ours: str, theirs: str) -> list[Key]:
    names = (("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v"), ("out_proj", "o"))
    return [Key(f"{ours}.{a}", f"{theirs}.{b}") for a, b in names]


def _stack_keys(name: str, gated: bool) -> list[Key]:
    """The keys of the encoder or of the decoder; T5 numbers the sublayers of a block."""
    cross = name == "decoder"
    last = 2 if cross else 1  # the number of the feed-forward sublayer, which comes after cross-attention
    ours = f"{name}.blocks.{{i}}"
    theirs = f"{name}.block.{{i}}.layer"
    dense = f"{theirs}.{last}.DenseReluDense"
    keys = [
        # The first layer stores the one table that all layers share.
        Key(f"{name}.blocks.0.attention.position", f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias"),
        Key(f"{ours}.attention_norm", f"{theirs}.0.layer_norm"),
        *_attention_keys(f"{ours}.attention", f"{theirs}.0.SelfAttention"),
        Key(f"{ours}.feedforward_norm", f"{theirs}.{last}.layer_norm"),
        Key(f"{ours}.feedforward.down", f"{dense}.wo"),
        Key(f"{name}.norm", f"{name}.final_layer_norm"),
    ]
    if gated:
        keys += [Key(f"{ours}.feedforward.gate", f"{dense}.wi_0"), Key(f"{ours}.feedforward.up", f"{dense}.wi_1")]
    else:
        keys.append(Key(f"{ours}.feedforward.up", f"{dense}.wi"))
    if cross:
        keys.append(Key(f"{ours}.cross_norm", f"{theirs}.1.layer_norm"))
        keys += _attention_keys(f"{ours}.cross", f"{theirs}.1.EncDecAttention")
    return keys


def _key_table(gated: bool, encoder_only: bool) -> KeyTable:
    stacks = ["encoder", "decoder"]
    if encoder_only:
        stacks = ["encoder"]
    keys = [Key("encoder.tokens.embedding", "shared"), Key("decoder.tokens.head", "lm_head")]
    tied = {"lm_head.weight": "shared.weight"}
    for name in stacks:
        keys += _stack_keys(name, gated)
        tied[f"{name}.embed_tokens.weight"] = "shared.weight"
    return KeyTable(keys=keys, tied=tied)


def build(config: Config, stored: TensorLookup) -> TextToText | TextToTextEncoder:
    """The model that a config describes; its head is tied unless the files hold a different one."""
    head_name = config.head_name("ForConditionalGeneration", "Model", "EncoderModel")
    encoder_only = head_name == "EncoderModel"
    gated, activation = _feed_forward_form(config)
    keys = _key_table(gated, encoder_only)
    d = config.integer("d_model")

    head: Literal["tied", "untied"] | None = None
    if head_name == "ForConditionalGeneration":
        head_weight = stored("lm_head.weight")
        embedding = stored("shared.weight")
        head = "tied"
        if head_weight is not None and embedding is not None and not torch.equal(head_weight, embedding):
            head = "untied"
    # T5 1.1 has tie_word_embeddings = false and means "do not scale the logits". Newer files have an entry for that.
    scaled = config.boolean("scale_decoder_outputs", config.get("tie_word_embeddings") is not False)
    logit_scale = 1.0
    if scaled:
        logit_scale = d**-0.5
    tokens = TokenEmbedding(config.integer("vocab_size"), d, head=head, scale=1.0, logit_scale=logit_scale)

    layers = config.layer_count("num_layers")
    encoder = _make_stack(Encoder, config, gated, activation, layers, tokens)
    if encoder_only:
        return TextToTextEncoder(config, keys, encoder)
    decoder_layers = config.layer_count("num_decoder_layers", layers)
    decoder = _make_stack(Decoder, config, gated, activation, decoder_layers, tokens)
    return TextToText(config, keys, EncoderDecoder.from_stacks(encoder, decoder))


def _feed_forward_form(config: Config) -> tuple[bool, str]:
    """(gated, activation): from ``feed_forward_proj``, or from the two entries of newer files."""
    form = config.string("feed_forward_proj", "relu")
    default = form.removeprefix("gated-")
    if form == "gated-gelu":
        default = "gelu_new"  # T5's "gelu" is the tanh approximation
    gated = config.boolean("is_gated_act", form.startswith("gated-"))
    return gated, activation_name(config, "dense_act_fn", default)


def _make_stack(
    kind: type[AnyStack], config: Config, gated: bool, activation: str, layers: int, tokens: TokenEmbedding
) -> AnyStack:
    """An encoder, or a decoder with cross-attention."""
    d = config.integer("d_model")
    heads = config.integer("num_heads")
    d_key = config.integer("d_kv")
    hidden = config.integer("d_ff")
    dropout = config.number("dropout_rate", 0.1)
    norm = partial(RMSNorm, eps=config.number("layer_norm_epsilon", 1e-6))
    make_attention = partial(
        MultiHeadAttention, d, heads, d_key=d_key, d_value=d_key, out_bias=False, scale=1.0, dropout=dropout
    )
    # One table for all layers, which only the first layer's checkpoint entry holds.
    position = T5Buckets(
        heads,
        config.integer("relative_attention_num_buckets", 32),
        config.integer("relative_attention_max_distance", 128),
        bidirectional=kind is Encoder,
    )
    blocks = []
    for _ in range(layers):
        feedforward = FeedForward(d, hidden, activation=activation, gated=gated, bias=False, dropout=dropout)
        cross = make_attention() if kind is Decoder else None
        blocks.append(Block(make_attention(position=position), feedforward, norm=norm, cross=cross, dropout=dropout))
    return kind.from_blocks(blocks, norm=norm(d), tokens=tokens, dropout=dropout)
