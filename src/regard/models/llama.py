"""Llama, Mistral and Qwen: pre-norm decoders with rotary positions, RMSNorm, gated feed-forward and grouped queries."""

from __future__ import annotations

from functools import partial

from regard.config import Config
from regard.masks import Window
from regard.models.activations import activation
from regard.models.keys import Key, Stored, Table
from regard.models.rope import rotary
from regard.models.text_decoder import TextDecoder
from regard.nn import Block, Decoder, FeedForward, MultiHeadAttention, RMSNorm
from regard.nn.stack import Tokens

__all__ = ["KINDS", "TABLE", "build"]

KINDS = ("llama", "mistral", "qwen2", "qwen3")
CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}

TABLE = Table(
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
    bare=tuple(f"{name}Model" for name in CLASSES.values()),
    unused=(r"rotary_emb\.inv_freq$",),
    copies={"lm_head.weight": "model.embed_tokens.weight"},
)


def build(config: Config, stored: Stored) -> TextDecoder:
    """The model that a config describes."""
    kind = config.kind
    known = (f"{CLASSES[kind]}ForCausalLM", f"{CLASSES[kind]}Model")
    if config.architecture and config.architecture not in known:
        raise ValueError(
            f"config.json: architectures is {config.architecture}; known for {kind} are {', '.join(known)}"
        )
    if config.whole("pretraining_tp", 1) != 1:
        raise ValueError(f"config.json: pretraining_tp is {config['pretraining_tp']}; only 1 is read")
    d, heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    d_key = config.whole("head_dim", 128 if kind == "qwen3" else d // heads)
    norm = partial(RMSNorm, eps=config.real("rms_norm_eps", 1e-6))
    position, windows = rotary(config, d_key), _windows(config)
    # Qwen2 has biases on q, k and v alone; the others have them on all four or on none.
    biases = config.flag("attention_bias", False) and kind in ("llama", "qwen3")
    bias = config.flag("mlp_bias", False) and kind == "llama"
    blocks = [
        Block(
            MultiHeadAttention(
                d,
                heads,
                d_key=d_key,
                d_value=d_key,
                kv_heads=config.whole("num_key_value_heads", 8 if kind == "mistral" else heads),
                qkv_bias=biases or kind == "qwen2",
                out_bias=biases,
                position=position,
                mask=None if window is None else Window(window - 1, 0),
                qk_norm=norm if kind == "qwen3" else None,
                dropout=config.real("attention_dropout", 0.0),
            ),
            FeedForward(
                d,
                config.whole("intermediate_size"),
                activation=activation(config, "hidden_act", "silu"),
                gated=True,
                bias=bias,
            ),
            norm=norm,
        )
        for window in windows
    ]
    tied = config.flag("tie_word_embeddings", False)
    head = None if not config.architecture.endswith("ForCausalLM") else "tied" if tied else "own"
    tokens = Tokens(config.whole("vocab_size"), d, head=head, scale=1.0)  # type: ignore[arg-type]
    decoder = Decoder.of(blocks, norm=norm(d), tokens=tokens)
    return TextDecoder(config, TABLE, decoder, longest=None, trained=config.whole("max_position_embeddings", 2048))


def _windows(config: Config) -> list[int | None]:
    """How many keys each layer's queries see, themselves included; None is all."""
    layers = config.layers("num_hidden_layers")
    if config.kind == "llama":
        return [None] * layers
    window = None if config.get("sliding_window") is None else config.whole("sliding_window")
    if config.kind == "mistral":
        return [4096 if "sliding_window" not in config else window] * layers
    if not config.flag("use_sliding_window", False):
        return [None] * layers
    window = 4096 if window is None else window
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.whole("max_window_layers", 28, least=0)
        return [window if i >= first else None for i in range(layers)]
    known = {"full_attention": None, "sliding_attention": window}
    if not isinstance(kinds, list) or len(kinds) != layers or any(x not in known for x in kinds):
        raise ValueError(f"config.json: layer_types must name {layers} layers as {' or '.join(known)}, got {kinds!r}")
    return [known[x] for x in kinds]
