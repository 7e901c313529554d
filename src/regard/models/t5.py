"""T5: an encoder–decoder with learned buckets of distance, RMSNorm, no biases and unscaled products."""

from __future__ import annotations

from functools import partial
from typing import TypeVar

import torch

from regard.config import Config
from regard.models.activations import activation
from regard.models.keys import Key, Stored, Table
from regard.models.text_to_text import TextReader, TextToText
from regard.nn import Block, Decoder, Encoder, EncoderDecoder, FeedForward, MultiHeadAttention, RMSNorm
from regard.nn.stack import Tokens
from regard.positions import T5Buckets

__all__ = ["KINDS", "build"]

KINDS = ("t5",)
Stack = TypeVar("Stack", Encoder, Decoder)
CLASSES = ("T5ForConditionalGeneration", "T5Model", "T5EncoderModel")


def _attention(ours: str, theirs: str) -> list[Key]:
    names = (("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v"), ("out_proj", "o"))
    return [Key(f"{ours}.{a}", f"{theirs}.{b}") for a, b in names]


def _stack(name: str, last: int) -> list[Key]:
    """The keys of one stack; its feed-forward network is sublayer ``last``: 1, or 2 after a cross-attention."""
    ours, theirs = f"{name}.blocks.{{i}}", f"{name}.block.{{i}}.layer"
    keys = [
        # One table for all layers, kept by the first.
        Key(f"{name}.blocks.0.attention.position", f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias"),
        Key(f"{ours}.attention_norm", f"{theirs}.0.layer_norm"),
        *_attention(f"{ours}.attention", f"{theirs}.0.SelfAttention"),
        Key(f"{ours}.feedforward_norm", f"{theirs}.{last}.layer_norm"),
        Key(f"{ours}.feedforward.down", f"{theirs}.{last}.DenseReluDense.wo"),
        Key(f"{name}.norm", f"{name}.final_layer_norm"),
    ]
    if last == 2:
        keys += [
            Key(f"{ours}.cross_norm", f"{theirs}.1.layer_norm"),
            *_attention(f"{ours}.cross", f"{theirs}.1.EncDecAttention"),
        ]
    return keys


def _table(gated: bool, reads_only: bool) -> Table:
    stacks = [("encoder", 1)] if reads_only else [("encoder", 1), ("decoder", 2)]
    keys = [Key("encoder.tokens.embedding", "shared"), Key("decoder.tokens.head", "lm_head")]
    for name, last in stacks:
        keys += _stack(name, last)
        ours, theirs = f"{name}.blocks.{{i}}.feedforward", f"{name}.block.{{i}}.layer.{last}.DenseReluDense"
        keys += (
            [Key(f"{ours}.gate", f"{theirs}.wi_0"), Key(f"{ours}.up", f"{theirs}.wi_1")]
            if gated
            else [Key(f"{ours}.up", f"{theirs}.wi")]
        )
    copies = {f"{name}.embed_tokens.weight": "shared.weight" for name, _ in stacks}
    return Table(keys=keys, copies=copies | {"lm_head.weight": "shared.weight"})


def build(config: Config, stored: Stored) -> TextToText | TextReader:
    """The model that a config describes; its head is tied unless the files hold a different one."""
    if config.architecture and config.architecture not in CLASSES:
        raise ValueError(f"config.json: architectures is {config.architecture}; known for t5 are {', '.join(CLASSES)}")
    gated, phi = _feedforward(config)
    table = _table(gated, config.architecture == "T5EncoderModel")
    d = config.whole("d_model")
    generates = config.architecture == "T5ForConditionalGeneration"
    # T5 1.1 says tie_word_embeddings = false, and means: do not scale. Newer files say that by a name of its own.
    scaled = config.flag("scale_decoder_outputs", config.get("tie_word_embeddings") is not False)
    head, embedding = stored("lm_head.weight"), stored("shared.weight")
    own = head is not None and embedding is not None and not torch.equal(head, embedding)
    tokens = Tokens(
        config.whole("vocab_size"),
        d,
        head=None if not generates else "own" if own else "tied",
        scale=1.0,
        logit_scale=d**-0.5 if scaled else 1.0,
    )
    reads = _make(Encoder, config, gated, phi, config.layers("num_layers"), tokens)
    if config.architecture == "T5EncoderModel":
        return TextReader(config, table, reads)
    layers = config.layers("num_decoder_layers", config.layers("num_layers"))
    writes = _make(Decoder, config, gated, phi, layers, tokens)
    return TextToText(config, table, EncoderDecoder.of(reads, writes))


def _feedforward(config: Config) -> tuple[bool, str]:
    """Whether it is gated, and its activation: ``feed_forward_proj``, or what newer files say in two entries."""
    form = config.name("feed_forward_proj", "relu")
    # "gated-gelu" has always meant the tanh form of gelu here.
    usual = "gelu_new" if form == "gated-gelu" else form.removeprefix("gated-")
    gated = config.flag("is_gated_act", form.startswith("gated-"))
    return gated, activation(config, "dense_act_fn", usual)


def _make(kind: type[Stack], config: Config, gated: bool, phi: str, layers: int, tokens: Tokens) -> Stack:
    d, heads, d_key = config.whole("d_model"), config.whole("num_heads"), config.whole("d_kv")
    dropout = config.real("dropout_rate", 0.1)
    norm = partial(RMSNorm, eps=config.real("layer_norm_epsilon", 1e-6))
    attend = partial(
        MultiHeadAttention, d, heads, d_key=d_key, d_value=d_key, out_bias=False, scale=1.0, dropout=dropout
    )
    position = T5Buckets(
        heads,
        config.whole("relative_attention_num_buckets", 32),
        config.whole("relative_attention_max_distance", 128),
        bidirectional=kind is Encoder,
    )
    blocks = [
        Block(
            attend(position=position),
            FeedForward(
                d,
                config.whole("d_ff"),
                activation=phi,
                gated=gated,
                bias=False,
                dropout=dropout,
            ),
            norm=norm,
            cross=attend() if kind is Decoder else None,
            dropout=dropout,
        )
        for _ in range(layers)
    ]
    return kind.of(blocks, norm=norm(d), tokens=tokens, dropout=dropout)
