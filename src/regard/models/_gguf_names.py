"""What the architectures of GGUF files are called in checkpoints of ``transformers``: their tensors and entries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Names of modules in a file → names in a checkpoint. A weight and a bias have the suffixes .weight and .bias in both.
_LAYER = "model.layers.{i}."
_LLAMA_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.{i}.attn_norm": _LAYER + "input_layernorm",
    "blk.{i}.attn_q": _LAYER + "self_attn.q_proj",
    "blk.{i}.attn_k": _LAYER + "self_attn.k_proj",
    "blk.{i}.attn_v": _LAYER + "self_attn.v_proj",
    "blk.{i}.attn_output": _LAYER + "self_attn.o_proj",
    "blk.{i}.attn_q_norm": _LAYER + "self_attn.q_norm",
    "blk.{i}.attn_k_norm": _LAYER + "self_attn.k_norm",
    "blk.{i}.ffn_norm": _LAYER + "post_attention_layernorm",
    "blk.{i}.ffn_gate": _LAYER + "mlp.gate_proj",
    "blk.{i}.ffn_up": _LAYER + "mlp.up_proj",
    "blk.{i}.ffn_down": _LAYER + "mlp.down_proj",
}
# The entry of a config → the key of the file, without the architecture before it.
_LLAMA_ENTRIES = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_LAYER_NORM_ENTRIES = {name: key for name, key in _LLAMA_ENTRIES.items() if name != "rms_norm_eps"}
_LAYER_NORM_ENTRIES["layer_norm_eps"] = "attention.layer_norm_epsilon"
# Phi-3 has q, k and v in one matrix, and the two inner matrices of the feed-forward network in another one.
_PHI3_NAMES = _LLAMA_NAMES | {
    "blk.{i}.attn_qkv": _LAYER + "self_attn.qkv_proj",
    "blk.{i}.ffn_up": _LAYER + "mlp.gate_up_proj",
}
# Norms before and after the sublayers of Gemma 2; OLMo 2 has only those after them.
_GEMMA2_NAMES = _LLAMA_NAMES | {
    "blk.{i}.post_attention_norm": _LAYER + "post_attention_layernorm",
    "blk.{i}.ffn_norm": _LAYER + "pre_feedforward_layernorm",
    "blk.{i}.post_ffw_norm": _LAYER + "post_feedforward_layernorm",
}
# GPT-2 keeps q, k and v in one matrix, and has a table of positions.
_GPT2_NAMES = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "blk.{i}.attn_norm": "transformer.h.{i}.ln_1",
    "blk.{i}.attn_qkv": "transformer.h.{i}.attn.c_attn",
    "blk.{i}.attn_output": "transformer.h.{i}.attn.c_proj",
    "blk.{i}.ffn_norm": "transformer.h.{i}.ln_2",
    "blk.{i}.ffn_up": "transformer.h.{i}.mlp.c_fc",
    "blk.{i}.ffn_down": "transformer.h.{i}.mlp.c_proj",
}
_GPT2_ENTRIES = {
    "n_embd": "embedding_length",
    "n_layer": "block_count",
    "n_head": "attention.head_count",
    "n_inner": "feed_forward_length",
    "n_positions": "context_length",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
}


@dataclass(frozen=True)
class GgufFamily:
    """How files of one architecture are read, and what the program that wrote them has changed in the weights.

    - ``model_type``: the family of the checkpoint.
    - ``head``: the name of its language model, without the family's prefix.
    - ``names``: the name of a module in the file → its name in the checkpoint.
    - ``entries``: the entry of the config → the key of the file that has its value, without the architecture.
    - ``rotary``: positions are rotary (default True).
    - ``pairs_together``: the rows of q and k are in another order: the two features of a rotary pair are neighbours
      (default False: the second half of the features belongs to the first).
    - ``transposed``: modules whose weights the checkpoint stores as ``[in, out]``.
    - ``shifted_norms``: the weights of norms are stored with 1 added (default False).
    - ``bias_entries``: the entries of the config that say whether the attention has biases.
    - ``partial``: the config says which part of the features of a head is rotated (default False: all are).
    - ``supported``: keys of ``UNSUPPORTED_KEYS`` that this family does have.
    - ``windowed``: the family that has the same layers and a sliding window; "" means that there is none.
    """

    model_type: str
    names: Mapping[str, str]
    entries: Mapping[str, str]
    head: str = "ForCausalLM"
    rotary: bool = True
    pairs_together: bool = False
    transposed: tuple[str, ...] = ()
    shifted_norms: bool = False
    bias_entries: tuple[str, ...] = ()
    partial: bool = False
    windowed: str = ""
    supported: tuple[str, ...] = ()


_BIASES = ("attention_bias",)
GGUF_FAMILIES = {
    "gpt2": GgufFamily(
        "gpt2",
        _GPT2_NAMES,
        _GPT2_ENTRIES,
        head="LMHeadModel",
        rotary=False,
        transposed=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
    ),
    "llama": GgufFamily(
        "llama", _LLAMA_NAMES, _LLAMA_ENTRIES, pairs_together=True, bias_entries=_BIASES, windowed="mistral"
    ),
    "qwen2": GgufFamily("qwen2", _LLAMA_NAMES, _LLAMA_ENTRIES),
    "qwen3": GgufFamily("qwen3", _LLAMA_NAMES, _LLAMA_ENTRIES, bias_entries=_BIASES),
    "gemma": GgufFamily("gemma", _LLAMA_NAMES, _LLAMA_ENTRIES, shifted_norms=True, bias_entries=_BIASES),
    "gemma2": GgufFamily(
        "gemma2",
        _GEMMA2_NAMES,
        _LLAMA_ENTRIES,
        shifted_norms=True,
        bias_entries=_BIASES,
        windowed="gemma2",
        supported=("attn_logit_softcapping", "final_logit_softcapping"),
    ),
    "olmo": GgufFamily("olmo", _LLAMA_NAMES, _LAYER_NORM_ENTRIES, pairs_together=True, bias_entries=_BIASES),
    "olmo2": GgufFamily("olmo2", _GEMMA2_NAMES, _LLAMA_ENTRIES, bias_entries=_BIASES),
    "phi3": GgufFamily("phi3", _PHI3_NAMES, _LLAMA_ENTRIES, partial=True, windowed="phi3"),
    "smollm3": GgufFamily("smollm3", _LLAMA_NAMES, _LLAMA_ENTRIES, pairs_together=True, bias_entries=_BIASES),
    "stablelm": GgufFamily("stablelm", _LLAMA_NAMES, _LAYER_NORM_ENTRIES, bias_entries=("use_qkv_bias",), partial=True),
}

# Keys that change what a model computes, and that the families here do not have. A file that sets one is refused.
UNSUPPORTED_KEYS = (
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.scale",
    "attention.temperature_scale",
    "attn_logit_softcapping",
    "embedding_scale",
    "expert_count",
    "final_logit_softcapping",
    "logit_scale",
    "residual_scale",
    "use_parallel_residual",
)
