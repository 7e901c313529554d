"""Builds Llama and its relatives: pre-norm decoders with rotary positions and gated feed-forward networks.

Mistral, Qwen, Phi-3, Gemma, OLMo, StableLM and SmolLM3 differ from Llama in a few entries of ``VARIANTS``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from torch import nn

from regard._config_json import CLASS_PREFIXES, Config, activation_name
from regard.masks import Window
from regard.models._checkpoint_keys import Key, KeyTable, TensorLookup
from regard.models._llama_parts import (
    CappedTokens,
    JointRMSNorm,
    NormAfterBlock,
    NormAroundBlock,
    ShiftedRMSNorm,
    plain_layer_norm,
)
from regard.models._rope import DEFAULT_BASE, LongRotary, rotary_from_config
from regard.models._text_decoder import TextDecoder
from regard.nn import Block, Decoder, FeedForward, LayerNorm, MultiHeadAttention, RMSNorm
from regard.nn._stack import TokenEmbedding, head_kind


@dataclass(frozen=True)
class Variant:
    """How a family differs from Llama. Defaults of entries are those of transformers' config classes.

    - ``qkv_bias``, ``out_bias``, ``mlp_bias``: the entry that says whether there are biases; "" means none.
    - ``has_qkv_bias``: there are biases of q, k and v without any entry.
    - ``kv_heads``, ``d_key``: the defaults; None means as many as heads, and the width divided by the heads.
    - ``norm``: makes a norm from its width and ε.
    - ``eps_entry``, ``eps``: the entry of ε and its default; "" means that ε is fixed.
    - ``qk_norm``: queries and keys are normalised: "head" (each head alone), "joint" (all heads together), "" (not).
    - ``block``: the class of the blocks.
    - ``tied``: the default of ``tie_word_embeddings``.
    - ``scaled``: the embedding is multiplied by the root of the width.
    - ``activation``, ``activation_entry``: the default activation, and the entry that names it.
    - ``capped``: scores and logits have a soft cap, and an entry gives the scale of the scores.
    - ``base``: the default base of rotary positions.
    - ``partial``: the default part of the features that is rotated; None means that it is always 1.
    - ``rereads``: generation reads the text again where ``longrope`` changes the rotation, so that all keys have one.
    - ``dropout``: the entry of the dropout of sublayers; "" means none.
    - ``required``: entries that may only have this value.
    """

    qkv_bias: str = "attention_bias"
    out_bias: str = "attention_bias"
    mlp_bias: str = ""
    has_qkv_bias: bool = False
    kv_heads: int | None = None
    d_key: int | None = None
    norm: Callable[[int, float], nn.Module] = RMSNorm
    eps_entry: str = "rms_norm_eps"
    eps: float = 1e-6
    qk_norm: Literal["", "head", "joint"] = ""
    block: Callable[..., Block] = Block
    tied: bool = False
    scaled: bool = False
    activation: str = "silu"
    base: float = DEFAULT_BASE
    partial: float | None = None
    rereads: bool = False
    dropout: str = ""
    activation_entry: str = "hidden_act"
    capped: bool = False
    required: Mapping[str, Any] | None = None


_NO_BIAS = Variant(qkv_bias="", out_bias="")
VARIANTS = {
    "llama": Variant(mlp_bias="mlp_bias"),
    "mistral": replace(_NO_BIAS, kv_heads=8),
    "qwen2": replace(_NO_BIAS, has_qkv_bias=True),
    "qwen3": Variant(d_key=128, qk_norm="head"),
    # Norms with 1 + γ, an embedding that is scaled, and a gate with the approximate GELU.
    "gemma": Variant(
        kv_heads=16,
        d_key=256,
        norm=ShiftedRMSNorm,
        tied=True,
        scaled=True,
        activation="gelu_pytorch_tanh",
        required={"use_bidirectional_attention": False},
    ),
    # As Gemma, with more norms, soft caps and windows in every second layer.
    "gemma2": Variant(
        kv_heads=4,
        d_key=256,
        norm=ShiftedRMSNorm,
        block=NormAroundBlock,
        tied=True,
        scaled=True,
        activation="gelu_pytorch_tanh",
        activation_entry="hidden_activation",
        capped=True,
        required={"use_bidirectional_attention": False},
    ),
    # Norms without weights, so that the files have no tensors of them.
    "olmo": Variant(norm=plain_layer_norm, eps_entry="", eps=1e-5, required={"clip_qkv": None}),
    # Norms after the sublayers, and one over the queries or keys of all heads.
    "olmo2": Variant(eps=1e-5, qk_norm="joint", block=NormAfterBlock),
    "phi3": replace(_NO_BIAS, eps=1e-5, partial=1.0, rereads=True, dropout="resid_pdrop"),
    # Every fourth layer has no positions: see ``Config.rotary_layers``.
    "smollm3": Variant(mlp_bias="mlp_bias", kv_heads=4, tied=True, base=2e6),
    # LayerNorm with biases, and a quarter of the features is rotated.
    "stablelm": Variant(
        qkv_bias="use_qkv_bias",
        out_bias="",
        kv_heads=32,
        norm=LayerNorm,
        eps_entry="layer_norm_eps",
        eps=1e-5,
        partial=0.25,
        required={"qk_layernorm": False, "use_parallel_residual": False, "hidden_dropout": 0.0},
    ),
}
MODEL_TYPES = tuple(VARIANTS)

_ATTENTION = "decoder.blocks.{i}.attention"
_LAYER = "model.layers.{i}."
KEYS = KeyTable(
    keys=(
        Key("decoder.tokens.embedding", "model.embed_tokens"),
        Key("decoder.blocks.{i}.attention_norm", _LAYER + "input_layernorm"),
        Key(f"{_ATTENTION}.q_proj", _LAYER + "self_attn.q_proj"),
        Key(f"{_ATTENTION}.k_proj", _LAYER + "self_attn.k_proj"),
        Key(f"{_ATTENTION}.v_proj", _LAYER + "self_attn.v_proj"),
        Key(f"{_ATTENTION}.out_proj", _LAYER + "self_attn.o_proj"),
        Key(f"{_ATTENTION}.q_norm", _LAYER + "self_attn.q_norm"),
        Key(f"{_ATTENTION}.k_norm", _LAYER + "self_attn.k_norm"),
        Key("decoder.blocks.{i}.feedforward_norm", _LAYER + "post_attention_layernorm"),
        Key("decoder.blocks.{i}.feedforward.gate", _LAYER + "mlp.gate_proj"),
        Key("decoder.blocks.{i}.feedforward.up", _LAYER + "mlp.up_proj"),
        Key("decoder.blocks.{i}.feedforward.down", _LAYER + "mlp.down_proj"),
        Key("decoder.norm", "model.norm"),
        Key("decoder.tokens.head", "lm_head"),
    ),
    prefix="model.",
    unprefixed=tuple(f"{CLASS_PREFIXES[model_type]}Model" for model_type in MODEL_TYPES),
    ignored=(r"rotary_emb\.inv_freq$",),
    tied={"lm_head.weight": "model.embed_tokens.weight"},
)
# Phi-3 stores q, k and v as one matrix, and the two inner matrices of the feed-forward network as another one.
_FUSED = (
    Key((f"{_ATTENTION}.q_proj", f"{_ATTENTION}.k_proj", f"{_ATTENTION}.v_proj"), _LAYER + "self_attn.qkv_proj"),
    Key(
        ("decoder.blocks.{i}.feedforward.gate", "decoder.blocks.{i}.feedforward.up"),
        _LAYER + "mlp.gate_up_proj",
    ),
)
_PARTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm")
_PLAIN_KEYS = tuple(key for key in KEYS.keys if not key.theirs.endswith(_NORMS))
# The norms after the sublayers of OLMo 2, and those of Gemma 2, which also has norms before them.
_OLMO2_NORMS = (
    Key("decoder.blocks.{i}.attention_norm", _LAYER + "post_attention_layernorm"),
    Key("decoder.blocks.{i}.feedforward_norm", _LAYER + "post_feedforward_layernorm"),
)
_GEMMA2_NORMS = (
    Key("decoder.blocks.{i}.attention_norm", _LAYER + "input_layernorm"),
    Key("decoder.blocks.{i}.attention_out_norm", _LAYER + "post_attention_layernorm"),
    Key("decoder.blocks.{i}.feedforward_norm", _LAYER + "pre_feedforward_layernorm"),
    Key("decoder.blocks.{i}.feedforward_out_norm", _LAYER + "post_feedforward_layernorm"),
)
PHI3_KEYS = replace(KEYS, keys=(*_FUSED, *(key for key in KEYS.keys if not key.theirs.endswith(_PARTS))))
KEYS_OF_OTHERS = {
    "phi3": PHI3_KEYS,
    "olmo2": replace(KEYS, keys=(*_PLAIN_KEYS, *_OLMO2_NORMS)),
    "gemma2": replace(KEYS, keys=(*_PLAIN_KEYS, *_GEMMA2_NORMS)),
}


def build(config: Config, stored: TensorLookup) -> TextDecoder:
    """The model that a config describes."""
    model_type = config.model_type
    variant = VARIANTS[model_type]
    has_head = config.head_name("ForCausalLM", "Model") == "ForCausalLM"
    config.require("pretraining_tp", 1)
    for name, value in (variant.required or {}).items():
        config.require(name, value)
    d = config.integer("hidden_size")
    eps = variant.eps
    if variant.eps_entry:
        eps = config.number(variant.eps_entry, eps)
    norm = partial(_make_norm, variant, eps)

    blocks = []
    rotary_layers = [True] * config.layer_count("num_hidden_layers")
    if model_type == "smollm3":
        rotary_layers = config.rotary_layers()
    for window, is_rotary in zip(config.sliding_windows(), rotary_layers, strict=True):
        attention = _attention(config, variant, window, is_rotary, norm)
        hidden = config.integer("intermediate_size")
        feedforward = FeedForward(
            d, hidden, activation=_activation(config, variant), gated=True, bias=_flag(config, variant.mlp_bias)
        )
        dropout = config.number(variant.dropout, 0.0) if variant.dropout else 0.0
        blocks.append(variant.block(attention, feedforward, norm=norm, dropout=dropout))

    tied = config.boolean("tie_word_embeddings", variant.tied)
    head = head_kind(tied) if has_head else None
    scale = None if variant.scaled else 1.0  # None is the root of the width
    tokens = TokenEmbedding(config.integer("vocab_size"), d, head=head, scale=scale)
    cap = _cap(config, variant, "final_logit_softcapping", 30.0)
    if cap is not None:
        tokens = CappedTokens(config.integer("vocab_size"), d, head=head, scale=scale, cap=cap)
    decoder = Decoder.from_blocks(blocks, norm=norm(d), tokens=tokens)
    trained_length = config.integer("max_position_embeddings", 2048)
    keys = KEYS_OF_OTHERS.get(model_type, KEYS)
    reread_length = _switch_length(decoder) if variant.rereads else None
    return TextDecoder(
        config, keys, decoder, max_positions=None, trained_length=trained_length, reread_length=reread_length
    )


def _switch_length(decoder: Decoder) -> int | None:
    """The length beyond which ``longrope`` rotates with its long factors; None without ``longrope``."""
    for block in decoder.blocks:
        assert isinstance(block, Block)
        position = block.attention.position
        if isinstance(position, LongRotary):
            return position.trained_length
    return None


def _attention(
    config: Config, variant: Variant, window: int | None, is_rotary: bool, norm: Callable[[int], nn.Module]
) -> MultiHeadAttention:
    d = config.integer("hidden_size")
    heads = config.integer("num_attention_heads")
    d_key = config.integer("head_dim", variant.d_key if variant.d_key is not None else d // heads)
    position = None
    if is_rotary:
        position = rotary_from_config(config, d_key, base=variant.base, partial=variant.partial)
    mask = None
    if window is not None:
        mask = Window(window - 1, 0)  # a window of w keys is the query and w − 1 before it
    scale = None
    if variant.capped:
        scale = config.number("query_pre_attn_scalar", 256.0) ** -0.5
    kv_heads = config.integer("num_key_value_heads", variant.kv_heads if variant.kv_heads is not None else heads)
    attention = MultiHeadAttention(
        d,
        heads,
        d_key=d_key,
        d_value=d_key,
        kv_heads=kv_heads,
        qkv_bias=variant.has_qkv_bias or _flag(config, variant.qkv_bias),
        out_bias=_flag(config, variant.out_bias),
        position=position,
        mask=mask,
        qk_norm=norm if variant.qk_norm == "head" else None,
        scale=scale,
        softcap=_cap(config, variant, "attn_logit_softcapping", 50.0),
        dropout=config.number("attention_dropout", 0.0),
    )
    if variant.qk_norm == "joint":
        eps = config.number(variant.eps_entry, variant.eps)
        attention.q_norm = JointRMSNorm(heads, d_key, eps)
        attention.k_norm = JointRMSNorm(kv_heads, d_key, eps)
    return attention


def _cap(config: Config, variant: Variant, name: str, default: float) -> float | None:
    """The soft cap that an entry gives; None if there is none."""
    # An exception: here null does not count as absent. It removes the cap; a missing entry means the default.
    if not variant.capped or (name in config and config[name] is None):
        return None
    return config.number(name, default)


def _make_norm(variant: Variant, eps: float, d: int) -> nn.Module:
    return variant.norm(d, eps)


def _flag(config: Config, entry: str) -> bool:
    """Whether an entry is set; "" is never set."""
    return bool(entry) and config.boolean(entry, False)


def _activation(config: Config, variant: Variant) -> str:
    name = activation_name(config, variant.activation_entry, variant.activation)
    # Gemma's first configs say gelu and mean its approximation, as transformers knows too.
    if variant.scaled and name == "gelu":
        return "gelu_tanh"
    return name
