"""Tiny configs of every model family, random token ids, and which rows of a padded batch are real."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

V = 37
TEXT = {"vocab_size": V, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 20}
BERT = TEXT | {"max_position_embeddings": 19}
DISTIL = {"vocab_size": V, "dim": 10, "n_layers": 3, "n_heads": 5, "hidden_dim": 14, "max_position_embeddings": 13}
ENCODERS: list[tuple[str, dict[str, Any]]] = [
    ("BertModel", BERT),
    ("BertModel", BERT | {"hidden_act": "gelu_new", "type_vocab_size": 5, "num_hidden_layers": 1}),
    ("BertForMaskedLM", BERT | {"hidden_act": "relu"}),
    ("BertForPreTraining", BERT | {"layer_norm_eps": 1e-3}),
    ("BertForSequenceClassification", BERT | {"num_labels": 5}),
    ("BertForTokenClassification", BERT | {"num_labels": 3, "num_attention_heads": 1}),
    ("BertForQuestionAnswering", BERT | {"hidden_size": 15, "num_attention_heads": 5}),
    ("BertForNextSentencePrediction", BERT),
    ("RobertaModel", BERT | {"pad_token_id": 1}),
    ("RobertaForMaskedLM", BERT | {"pad_token_id": 3, "type_vocab_size": 1}),
    ("RobertaForSequenceClassification", BERT | {"num_labels": 7}),
    ("RobertaForTokenClassification", BERT | {"num_labels": 4, "hidden_act": "gelu_new"}),
    ("DistilBertModel", DISTIL),
    ("DistilBertForMaskedLM", DISTIL | {"activation": "relu"}),
    ("DistilBertForSequenceClassification", DISTIL | {"num_labels": 3}),
    ("DistilBertForTokenClassification", DISTIL | {"n_layers": 1}),
    ("DistilBertForQuestionAnswering", DISTIL),
]
GPT2 = {"vocab_size": V, "n_embd": 12, "n_layer": 2, "n_head": 3, "n_positions": 19, "bos_token_id": 0}
GPT2 |= {"eos_token_id": 36, "pad_token_id": 36}
LLAMA = TEXT | {"max_position_embeddings": 16, "num_key_value_heads": 1, "eos_token_id": 36, "pad_token_id": 36}


def rope(kind: str, **entries: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 100.0, **entries}}


WHOLE = rope("default", partial_rotary_factor=1.0)
HALF = rope("default", partial_rotary_factor=0.5)
DECODERS: list[tuple[str, dict[str, Any]]] = [
    ("GPT2LMHeadModel", GPT2),
    ("GPT2LMHeadModel", GPT2 | {"n_inner": 17, "activation_function": "relu", "tie_word_embeddings": False}),
    ("GPT2LMHeadModel", GPT2 | {"scale_attn_by_inverse_layer_idx": True, "n_layer": 3}),
    ("GPT2LMHeadModel", GPT2 | {"scale_attn_weights": False, "layer_norm_epsilon": 1e-3}),
    ("GPT2LMHeadModel", GPT2 | {"n_embd": 10, "n_head": 1, "activation_function": "gelu"}),
    ("GPT2Model", GPT2 | {"n_head": 2}),
    ("LlamaForCausalLM", LLAMA),
    ("LlamaForCausalLM", LLAMA | {"num_key_value_heads": 3, "head_dim": 10, "attention_bias": True, "mlp_bias": True}),
    ("LlamaForCausalLM", LLAMA | {"tie_word_embeddings": True} | rope("linear", factor=3.0)),
    ("LlamaForCausalLM", LLAMA | rope("dynamic", factor=2.0)),
    ("LlamaForCausalLM", LLAMA | {"head_dim": 16} | rope("yarn", factor=4.0, original_max_position_embeddings=8)),
    (
        "LlamaForCausalLM",
        LLAMA
        | {"head_dim": 16}
        | rope("yarn", factor=4.0, beta_fast=8.0, mscale=1.5, mscale_all_dim=0.7, truncate=False)
        | {"num_hidden_layers": 1},
    ),
    (
        "LlamaForCausalLM",
        LLAMA
        | {"head_dim": 12}
        | rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    (
        "LlamaForCausalLM",
        LLAMA
        | rope("longrope", short_factor=[1.0, 1.5], long_factor=[2.0, 4.0], original_max_position_embeddings=6)
        | {"num_attention_heads": 3},
    ),
    ("LlamaModel", LLAMA | {"hidden_act": "gelu"}),
    ("MistralForCausalLM", LLAMA | {"sliding_window": 4}),
    ("MistralForCausalLM", LLAMA | {"sliding_window": None, "num_key_value_heads": 3}),
    ("Qwen2ForCausalLM", LLAMA | {"tie_word_embeddings": True}),
    (
        "Qwen2ForCausalLM",
        LLAMA | {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    ("Qwen3ForCausalLM", LLAMA | {"head_dim": 8, "attention_bias": True}),
    ("Qwen3Model", LLAMA | {"head_dim": 6}),
    ("GemmaForCausalLM", LLAMA | {"head_dim": 8}),
    ("GemmaForCausalLM", LLAMA | {"head_dim": 6, "attention_bias": True, "tie_word_embeddings": False}),
    ("GemmaModel", LLAMA | {"head_dim": 4, "hidden_act": "gelu"}),
    ("Gemma2ForCausalLM", LLAMA | {"head_dim": 8, "sliding_window": 4, "num_hidden_layers": 3}),
    (
        "Gemma2ForCausalLM",
        LLAMA
        | {"head_dim": 6, "query_pre_attn_scalar": 9, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5}
        | {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 3},
    ),
    (
        "Gemma2ForCausalLM",
        LLAMA | {"head_dim": 8, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    ("Olmo2ForCausalLM", LLAMA),
    ("Olmo2ForCausalLM", LLAMA | {"num_key_value_heads": 3, "attention_bias": True, "tie_word_embeddings": True}),
    ("Olmo2Model", LLAMA | {"rms_norm_eps": 1e-3}),
    ("Phi3ForCausalLM", LLAMA),
    (
        "Phi3ForCausalLM",
        LLAMA
        | {"hidden_size": 24, "sliding_window": 4, "num_key_value_heads": 3, "original_max_position_embeddings": 16}
        | rope("default", partial_rotary_factor=0.5),
    ),
    (
        "Phi3ForCausalLM",
        LLAMA
        | {"hidden_size": 24, "original_max_position_embeddings": 6, "max_position_embeddings": 64}
        | rope("longrope", partial_rotary_factor=0.5, short_factor=[1.0, 1.5], long_factor=[2.0, 4.0]),
    ),
    ("Phi3Model", LLAMA),
    ("OlmoForCausalLM", LLAMA),
    ("OlmoForCausalLM", LLAMA | {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 3}),
    ("StableLmForCausalLM", LLAMA | {"hidden_size": 24}),
    ("StableLmForCausalLM", LLAMA | {"use_qkv_bias": True, "num_key_value_heads": 3, "layer_norm_eps": 1e-3} | WHOLE),
    ("StableLmModel", LLAMA | {"hidden_size": 24} | HALF),
    ("SmolLM3ForCausalLM", LLAMA | {"num_hidden_layers": 5}),
    (
        "SmolLM3ForCausalLM",
        LLAMA
        | {"num_hidden_layers": 3, "no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 3}
        | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    ),
]
T5 = {"vocab_size": V, "d_model": 12, "d_kv": 5, "d_ff": 20, "num_layers": 2, "num_heads": 3}
T5 |= {"decoder_start_token_id": 0, "eos_token_id": 36}
SEQ2SEQ: list[tuple[str, dict[str, Any]]] = [
    ("T5ForConditionalGeneration", T5),
    ("T5ForConditionalGeneration", T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    ("T5ForConditionalGeneration", T5 | {"feed_forward_proj": "gated-silu", "num_decoder_layers": 1}),
    ("T5ForConditionalGeneration", T5 | {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 6}),
    ("T5ForConditionalGeneration", T5 | {"num_heads": 1, "d_kv": 7, "layer_norm_epsilon": 1e-3}),
    ("T5Model", T5 | {"feed_forward_proj": "gelu"}),
    ("T5EncoderModel", T5 | {"num_layers": 3}),
]
VIT = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 20, "patch_size": 4}
IMAGES: list[tuple[str, dict[str, Any]]] = [
    ("ViTForImageClassification", VIT | {"image_size": 12, "num_labels": 5}),
    ("ViTForImageClassification", VIT | {"image_size": (8, 12), "num_labels": 3, "qkv_bias": False}),
    ("ViTForImageClassification", VIT | {"image_size": 8, "num_channels": 1, "hidden_act": "relu"}),
    ("ViTForImageClassification", VIT | {"image_size": 8, "layer_norm_eps": 1e-3, "num_hidden_layers": 1}),
    ("ViTModel", VIT | {"image_size": 8}),
    ("ViTModel", VIT | {"image_size": 16, "hidden_size": 10, "num_attention_heads": 5}),
]
ALL = [*ENCODERS, *DECODERS, *SEQ2SEQ, *IMAGES]
LENGTHS = [7, 4, 1]


def name(case: tuple[str, dict[str, Any]]) -> str:
    """The class of a case, which names its test."""
    return case[0]


def ids(batch: int = 3, n: int = 7, seed: int = 1) -> Tensor:
    """Random token ids ``[batch, n]`` without special tokens."""
    return torch.randint(4, V - 1, (batch, n), generator=torch.Generator().manual_seed(seed))


def real_rows(n: int) -> Tensor:
    """Bool ``[3, n]``: True in the first 7, 4 and 1 positions."""
    return torch.arange(n) < torch.tensor(LENGTHS).unsqueeze(-1)
