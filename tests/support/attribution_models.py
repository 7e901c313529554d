"""Tiny random models of many families, whose logits and scores are split; and models that people wrote in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.checkpoints import make
from support.model_configs import BERT, GPT2, T5, V

SIZES = {"vocab_size": V, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 20}
SIZES |= {"max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = SIZES | {"num_key_value_heads": 1, "head_dim": 4}
OPT = SIZES | {"ffn_dim": 20, "word_embed_proj_dim": 12}
GPTJ = {"vocab_size": V, "n_embd": 12, "n_layer": 2, "n_head": 3, "n_positions": 32, "rotary_dim": 4}
BLOOM = {"vocab_size": V, "hidden_size": 12, "n_layer": 2, "n_head": 3}
PAIRS = {"vocab_size": V, "d_model": 12, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1}
PAIRS |= {"eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None}
PAIRS |= {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers",)}
PAIRS |= {f"{side}_attention_heads": 3 for side in ("encoder", "decoder")}
PAIRS |= {f"{side}_ffn_dim": 20 for side in ("encoder", "decoder")}
GRANITE = {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0, "attention_multiplier": 0.7}
GEMMA2 = {"query_pre_attn_scalar": 4, "sliding_window": 3, "final_logit_softcapping": 5.0}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bart": ("BartForConditionalGeneration", PAIRS),
    "bloom": ("BloomForCausalLM", BLOOM),
    "falcon": ("FalconForCausalLM", SIZES),
    "falcon with alibi": ("FalconForCausalLM", SIZES | {"alibi": True, "parallel_attn": False, "bias": True}),
    "gemma": ("GemmaForCausalLM", LLAMA),
    "gemma2": ("Gemma2ForCausalLM", LLAMA | GEMMA2),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "gpt_neox": ("GPTNeoXForCausalLM", SIZES),
    "gpt_oss": (
        "GptOssForCausalLM",
        LLAMA | {"num_local_experts": 3, "num_experts_per_tok": 2, "max_position_embeddings": 4096},
    ),
    "gptj": ("GPTJForCausalLM", GPTJ),
    "granite": ("GraniteForCausalLM", LLAMA | GRANITE),
    "llama": ("LlamaForCausalLM", LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "marian": ("MarianMTModel", PAIRS),
    "mistral": ("MistralForCausalLM", LLAMA | {"sliding_window": 3}),
    "mixtral": ("MixtralForCausalLM", LLAMA | {"num_local_experts": 3, "num_experts_per_tok": 2}),
    "olmo2": ("Olmo2ForCausalLM", LLAMA),
    "opt": ("OPTForCausalLM", OPT),
    "opt with post-norm and projections": (
        "OPTForCausalLM",
        OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 8},
    ),
    "phi": ("PhiForCausalLM", SIZES),
    "qwen2": ("Qwen2ForCausalLM", LLAMA),
    "qwen3": ("Qwen3ForCausalLM", LLAMA),
    "stablelm": ("StableLmForCausalLM", LLAMA | {"use_parallel_residual": True, "qk_layernorm": True}),
    "t5": ("T5ForConditionalGeneration", T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
}
# Families with a nonlinear prediction head.
NONLINEAR = {"bert": ("BertForMaskedLM", BERT), "roberta": ("RobertaForCausalLM", BERT | {"is_decoder": True})}


def token_ids(n: int, seed: int = 1) -> Tensor:
    return torch.randint(3, V - 1, (1, n), generator=torch.Generator().manual_seed(seed))


def family(name: str) -> tuple[Any, Any]:
    """A model of ``transformers``, and its inputs: ids, or a function for a model that reads pairs of texts."""
    model = make(*(FAMILIES | NONLINEAR)[name])
    if model.config.is_encoder_decoder:
        return model, lambda: model(input_ids=token_ids(7), decoder_input_ids=token_ids(5, seed=2))
    return model, token_ids(7)


class OwnBlock(nn.Module):
    """A block as people write it: attention by hand or torch's own layer, and a feed-forward network."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm_1, self.norm_2 = nn.LayerNorm(12), nn.LayerNorm(12)
        if kind == "layer":
            self.attention = nn.MultiheadAttention(12, 3, batch_first=True)
        else:
            self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)
        self.up, self.down = nn.Linear(12, 20), nn.Linear(20, 12)
        self.n_head = 3

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        y = self.norm_1(x)
        if self.kind == "layer":
            x = x + self.attention(y, y, y, attn_mask=hidden, need_weights=False)[0]
        else:
            q, k, v = self.qkv(y).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
            if self.kind == "function":
                heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                heads = (q @ k.transpose(-1, -2) / 2).masked_fill(hidden, -torch.inf).softmax(-1) @ v
            x = x + self.out(heads.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class OwnModel(nn.Module):
    """A language model in plain torch. ``change`` is applied to the stream before the last norm."""

    def __init__(self, kind: str, change: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(V, 12), nn.Embedding(32, 12)
        self.blocks = nn.ModuleList([OwnBlock(kind) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, V)
        self.change = change

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        if self.change is not None:
            x = self.change(x)
        return self.head(self.norm(x))
