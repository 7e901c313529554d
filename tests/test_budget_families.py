"""Formulas of families of decoders and encoders against transformers: parameters, FLOPs and caches of tiny models.

The models are built on the meta device by the planner's own fallback, which counts by walking: two derivations that
know nothing of each other.
"""

from __future__ import annotations

import json
import logging
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import command

from regard import budget
from regard._config_json import Config
from regard._errors import RegardError
from regard.budget import _hf_configs as configs
from regard.budget._cost_figure import cost_curves
from regard.budget._counted_model import CountedModel, build_counted
from regard.budget._counted_plan import CountedPlan
from regard.budget._decoder_entries import NoFormulaError
from regard.budget._decoder_families import DECODERS
from regard.budget._experts_part import Experts
from regard.budget._parts import Embedding
from regard.budget._symbols import SYMBOLS

transformers = pytest.importorskip("transformers")

BASE: dict[str, Any] = {
    **{"hidden_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4},
    **{"intermediate_size": 56, "vocab_size": 61, "max_position_embeddings": 64},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
GPT: dict[str, Any] = {"n_embd": 24, "n_head": 4, "n_layer": 3, "vocab_size": 61, "n_positions": 64}
MPT: dict[str, Any] = {"d_model": 24, "n_heads": 4, "n_layers": 3, "vocab_size": 61, "max_seq_len": 64}
GPT_NEO: dict[str, Any] = {
    **{"hidden_size": 24, "num_heads": 4, "num_layers": 4, "vocab_size": 61, "max_position_embeddings": 64},
    **{"attention_types": [[["global", "local"], 2]], "window_size": 8},
}
BLOOM: dict[str, Any] = {"hidden_size": 24, "n_head": 4, "n_layer": 3, "vocab_size": 61}
FALCON: dict[str, Any] = {"hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 3, "vocab_size": 61}
WINDOW = {"sliding_window": 8}
WIDE = {"head_dim": 14}
BIASES = {"attention_bias": True, "mlp_bias": True}
EXPERTS = {"num_experts": 5, "num_local_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 13}
ROUTED: dict[str, Any] = {
    **{"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "n_shared_experts": 2, "moe_intermediate_size": 13},
    **{"num_experts_per_tok": 2, "first_k_dense_replace": 1},
}
LATENT = ROUTED | {
    **{"num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4},
    "v_head_dim": 5,
}
POSITIONS = {"max_position_embeddings": 64}
ROBERTA = BASE | {"pad_token_id": 1}
CHUNKS = {"num_experts_per_tok": 1, "intermediate_size_mlp": 50, "attention_chunk_size": 8}

# (model_type, entries besides BASE, or all entries if they have sizes of their own)
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", BASE | BIASES),
    ("mistral", BASE | WINDOW),
    ("qwen2", BASE | WINDOW | {"use_sliding_window": True, "max_window_layers": 2}),
    ("qwen3", BASE | WIDE),
    ("gpt2", GPT),
    ("gemma", BASE | WIDE),
    ("gemma", BASE | WIDE | BIASES),
    ("gemma2", BASE | WIDE | WINDOW),
    ("gemma3_text", BASE | WIDE | WINDOW | {"num_hidden_layers": 8}),
    ("gemma3_text", BASE | WIDE | WINDOW | {"layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2}),
    ("phi", BASE | {"hidden_size": 32}),
    ("phi", BASE | {"hidden_size": 32, "qk_layernorm": True, "resid_pdrop": 0.1}),
    ("phi3", BASE | WINDOW),
    ("stablelm", BASE | {"hidden_size": 32}),
    ("stablelm", BASE | {"hidden_size": 32, "use_qkv_bias": True, "qk_layernorm": True}),
    ("granite", BASE | BIASES),
    ("cohere", BASE | {"use_qk_norm": True}),
    ("cohere2", BASE | WINDOW | BIASES),
    ("olmo", BASE),
    ("olmo2", BASE),
    ("olmo3", BASE | WINDOW),
    ("glm", BASE | WIDE),
    ("glm4", BASE | WIDE | {"attention_bias": False}),
    ("starcoder2", BASE | WINDOW),
    ("starcoder2", BASE | {"use_bias": False, "tie_word_embeddings": False}),
    ("smollm3", BASE | BIASES),
    ("nemotron", BASE | BIASES),
    ("arcee", BASE),
    ("helium", BASE | {"head_dim": 10}),
    ("seed_oss", BASE | WIDE | {"attention_out_bias": True}),
    ("exaone4", BASE | WINDOW),
    ("ernie4_5", BASE | WIDE | {"use_bias": True}),
    ("hunyuan_v1_dense", BASE | {"head_dim": 10}),
    ("ministral3", BASE | WIDE | WINDOW),
    ("gpt_neox", BASE),
    ("gpt_neox", BASE | {"attention_bias": False, "use_parallel_residual": False}),
    ("gptj", GPT | {"rotary_dim": 4}),
    ("codegen", GPT | {"rotary_dim": 4}),
    ("gpt_neo", GPT_NEO),
    ("gpt_bigcode", GPT),
    ("gpt_bigcode", GPT | {"multi_query": False}),
    ("opt", BASE | {"ffn_dim": 56, "word_embed_proj_dim": 40}),
    ("opt", BASE | {"ffn_dim": 56, "word_embed_proj_dim": 12, "do_layer_norm_before": False}),
    ("opt", BASE | {"ffn_dim": 56, "enable_bias": False, "layer_norm_elementwise_affine": False}),
    ("bloom", BLOOM),
    ("falcon", FALCON),
    ("falcon", FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("falcon", FALCON | {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
    ("mpt", MPT),
    ("mixtral", BASE | EXPERTS | WINDOW),
    ("phimoe", BASE | EXPERTS | {"attention_bias": True, "lm_head_bias": True}),
    ("qwen2_moe", BASE | EXPERTS | {"shared_expert_intermediate_size": 17}),
    ("qwen2_moe", BASE | EXPERTS | {"shared_expert_intermediate_size": 17, "decoder_sparse_step": 2}),
    ("qwen3_moe", BASE | EXPERTS | WIDE | {"mlp_only_layers": [0, 3]}),
    ("gpt_oss", BASE | EXPERTS | WIDE | WINDOW),
    ("olmoe", BASE | EXPERTS),
    ("granitemoe", BASE | EXPERTS),
    ("granitemoeshared", BASE | EXPERTS | {"shared_intermediate_size": 17}),
    ("glm4_moe", BASE | ROUTED | {"head_dim": 10, "use_qk_norm": True}),
    ("dots1", BASE | ROUTED | {"head_dim": 10, "sliding_window": None}),
    ("llama4_text", BASE | EXPERTS | WIDE | CHUNKS),
    ("llama4_text", BASE | EXPERTS | WIDE | CHUNKS | {"interleave_moe_layer_step": 2}),
    ("deepseek_v2", BASE | LATENT),
    ("deepseek_v2", BASE | LATENT | {"q_lora_rank": None}),
    ("deepseek_v3", BASE | LATENT),
    ("bert", BASE),
    ("roberta", BASE),
    ("distilbert", {"dim": 40, "n_heads": 4, "n_layers": 3, "hidden_dim": 56, "vocab_size": 61} | POSITIONS),
    ("xlm-roberta", ROBERTA | {"architectures": ["XLMRobertaForMaskedLM"]}),
    ("camembert", ROBERTA | {"architectures": ["CamembertModel"]}),
    ("electra", BASE | {"embedding_size": 12, "architectures": ["ElectraModel"]}),
    ("electra", BASE | {"embedding_size": 12, "architectures": ["ElectraForMaskedLM"]}),
    ("electra", BASE | {"embedding_size": 40, "architectures": ["ElectraForPreTraining"]}),
    ("modernbert", BASE | {"local_attention": 8, "architectures": ["ModernBertForMaskedLM"]}),
    ("modernbert", BASE | {"local_attention": 8, "architectures": ["ModernBertModel"], "norm_bias": True} | BIASES),
]
# transformers stores keys and values once for each query head, although heads share them.
EXPANDED_CACHES = {"falcon": "new_decoder_architecture"}
BATCH = 2
TOKENS = 17


def full_entries(family: str, entries: dict[str, Any]) -> dict[str, Any]:
    """All entries of the config, as transformers writes them."""
    written: dict[str, Any] = transformers.CONFIG_MAPPING[family](**entries).to_dict()
    return written | {"model_type": family}


def flops_of_other_experts(model: budget.Model) -> int:
    """The FLOPs of the experts that no token uses: transformers computes them all for Llama 4."""
    flops = 0
    for placed in model:
        if isinstance(placed.part, Experts):
            part = placed.part
            unused = int(part.experts) - int(part.used)
            flops += int(placed.repeats) * 6 * BATCH * TOKENS * int(part.d) * int(part.hidden) * unused
    return flops


@pytest.mark.parametrize(("family", "entries"), CASES, ids=[f"{i} {family}" for i, (family, _) in enumerate(CASES)])
def test_a_family_by_formula(family: str, entries: dict[str, Any]) -> None:
    """Parameters and cache exactly, FLOPs within 1%; from the entries as typed, and as transformers writes them."""
    architecture = {"bert": "BertModel", "roberta": "RobertaModel", "distilbert": "DistilBertModel"}.get(family)
    if architecture is not None:
        entries = entries | {"architectures": [architecture]}
    written = full_entries(family, entries)
    walked = budget.plan(build_counted(Config(written)), TOKENS, batch=BATCH)
    assert walked.active_parameters is not None and walked.forward_flops is not None
    for config in (written, entries | {"model_type": family}):
        model = configs.model_from_config(Config(config))
        plan = budget.plan(model, TOKENS, batch=BATCH)
        assert plan.parameters == walked.parameters
        assert plan.active_parameters == walked.active_parameters
        flops = plan.forward_flops
        if family == "llama4_text":
            flops += flops_of_other_experts(model)
        assert flops == pytest.approx(walked.forward_flops, rel=0.01)
        copies = 1
        if entries.get(EXPANDED_CACHES.get(family, "")):
            copies = entries["num_attention_heads"] // entries["num_kv_heads"]
        assert copies * plan.memory.cache == walked.cache_bytes


def test_every_family_is_tried() -> None:
    tried = {family for family, _ in CASES}
    # test_budget_flops.py and test_budget_parameters.py; test_relatives_of_t5 below
    elsewhere = {"t5", "vit", "mt5", "umt5"}
    assert tried | elsewhere == set(DECODERS) | set(configs.FAMILIES) | set(configs.OTHERS)


# Relatives of T5

MT5: dict[str, Any] = {
    **{
        "d_model": 24,
        "d_kv": 8,
        "d_ff": 40,
        "num_heads": 3,
        "num_layers": 2,
        "num_decoder_layers": 3,
        "vocab_size": 61,
    },
    "feed_forward_proj": "gated-gelu",
}


@pytest.mark.parametrize("family", ["mt5", "umt5"])
@pytest.mark.parametrize("ties", [None, True, False])
def test_relatives_of_t5(family: str, ties: bool | None) -> None:
    """With ``tie_word_embeddings: false`` their checkpoints have an output matrix, which transformers 5 ties."""
    entries = MT5 | {"model_type": family}
    if ties is not None:
        entries["tie_word_embeddings"] = ties
    counted = build_counted(Config(entries))
    model = budget.from_config(entries)
    assert isinstance(model, budget.Model)
    plan = budget.plan(model, 17, source=11, batch=2)
    walked = budget.plan(counted, 17, source=11, batch=2)
    assert plan.forward_flops == walked.forward_flops and plan.memory.cache == walked.cache_bytes

    own_matrix = 61 * 24 if ties is False else 0
    module_parameters = sum(parameter.numel() for parameter in counted.module.parameters())
    assert plan.parameters == walked.parameters == module_parameters + own_matrix
    assert counted.untied_parameters == own_matrix
    assert (f"{own_matrix:,} of them in an output matrix" in " ".join(str(walked).split())) == (ties is False)


def test_published_parameters_of_mt5() -> None:
    """mT5-small, as published: its checkpoint has 300,176,768 parameters."""
    entries = MT5 | {"model_type": "mt5", "d_model": 512, "d_kv": 64, "d_ff": 1024, "num_heads": 6, "num_layers": 8}
    entries |= {"num_decoder_layers": 8, "vocab_size": 250112, "tie_word_embeddings": False}
    assert budget.from_config(entries).parameters == 300_176_768


# Images and text

TEXT: dict[str, Any] = {
    **{"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3, "head_dim": 6},
    **{"intermediate_size": 56, "vocab_size": 61, "max_position_embeddings": 64, "pad_token_id": 0},
}
TOWER: dict[str, Any] = {
    **{"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 128},
    **{"image_size": 28, "patch_size": 7},
}
WIDTHS = {"vision_output_dim": 31, "projector_input_dim": 31, "projector_output_dim": 31}
IMAGE_CASES: dict[str, dict[str, Any]] = {
    "llava": {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": TOWER | {"model_type": "clip_vision_model", "projection_dim": 24},
    },
    "paligemma": {
        "text_config": TEXT | {"model_type": "gemma"},
        "vision_config": TOWER | {"model_type": "siglip_vision_model", "projection_dim": 24},
        "projection_dim": 24,
    },
    "gemma3": {"text_config": TEXT, "vision_config": TOWER, "mm_tokens_per_image": 4},
    "llama4": {
        "text_config": TEXT | {"num_local_experts": 4, "intermediate_size_mlp": 50},
        "vision_config": TOWER | WIDTHS,
        "pad_token_id": 0,
    },
}


@pytest.mark.parametrize("family", IMAGE_CASES)
def test_images_and_text_are_sums_of_parts(family: str) -> None:
    """The FLOPs are those of the text alone, of the tower alone, and of the maps between them."""
    written = full_entries(family, IMAGE_CASES[family]) | {"pad_token_id": 0}
    counted = build_counted(Config(written))
    assert counted.parts_not_run == ("vision",)
    model = configs.model_from_config(Config(written))
    plan = budget.plan(model, TOKENS, batch=BATCH)
    walked = budget.plan(counted, TOKENS, batch=BATCH)
    assert plan.parameters == walked.parameters and plan.active_parameters == walked.active_parameters
    assert plan.memory.cache == walked.cache_bytes

    module: Any = counted.module
    tower = module.vision_model if family == "llama4" else module.model.vision_tower
    images = torch.zeros(BATCH, 3, TOWER["image_size"], TOWER["image_size"], device="meta")
    tower_flops = budget.count(tower, images).forward_flops
    assert tower_flops is not None and walked.forward_flops is not None
    between = sum(row.flops for row in plan.rows if "projector" in row.name)
    assert between > 0
    flops = plan.forward_flops - between
    if family == "llama4":
        flops += flops_of_other_experts(model)
    assert flops == tower_flops + walked.forward_flops


def test_a_token_after_an_image_does_not_read_it_again() -> None:
    written = full_entries("gemma3", IMAGE_CASES["gemma3"])
    whole = budget.plan(configs.model_from_config(Config(written)), TOKENS)
    text = budget.plan(configs.model_from_config(Config(TEXT | {"model_type": "gemma3_text"})), TOKENS)
    assert whole.decoding is not None and text.decoding is not None
    assert whole.decoding.flops == text.decoding.flops
    assert whole.parameters > text.parameters and whole.forward_flops > text.forward_flops


def test_a_text_has_a_place_for_the_image() -> None:
    """LLaVA's image of 28 × 28 tiles is 784 tokens: shorter texts are refused, and the default is longer."""
    entries = IMAGE_CASES["llava"] | {"model_type": "llava"}
    entries["vision_config"] = entries["vision_config"] | {"image_size": 28, "patch_size": 1}
    model = configs.model_from_config(Config(entries))
    assert model.image_tokens == 784
    default = budget.plan(model)
    assert int(default.lengths.n) > 784
    with pytest.raises(ValueError, match=r"^tokens .*784"):
        budget.plan(model, 783)
    assert min(cost_curves(default)[0]) >= 784
    assert int(budget.compare("gpt2", model).first.lengths.n) > 784
    # Where the image does not fit, nothing does.
    needs = budget.plan(model, 784).memory.total
    assert budget.plan(model, memory_limit=needs).max_tokens_forward == 784
    assert budget.plan(model, memory_limit=needs - 1).max_tokens_forward == 0
    others = {"paligemma": 16, "gemma3": 4, "llama4": 4}
    for family, tokens in others.items():
        config = Config(IMAGE_CASES[family] | {"model_type": family})
        assert configs.model_from_config(config).image_tokens == tokens


def test_a_tower_of_another_family_is_counted() -> None:
    vision = TOWER | {"model_type": "siglip_vision_model"}
    entries = {"model_type": "llava", "text_config": TEXT | {"model_type": "llama"}, "vision_config": vision}
    assert isinstance(budget.from_config(entries), CountedModel)


@pytest.mark.parametrize("text", ["qwen2", "gemma2", "llama", "gemma3", None])
def test_the_text_of_gemma_3_is_its_own(text: str | None) -> None:
    """transformers builds Gemma 3's decoder whatever the section says."""
    entries = IMAGE_CASES["gemma3"] | {"model_type": "gemma3"}
    entries["text_config"] = TEXT | {"model_type": text}
    model = budget.from_config(entries)
    assert isinstance(model, budget.Model)
    assert model.parameters == build_counted(Config(entries)).parameters


@pytest.mark.parametrize("text", ["llava", "bert", "t5", "vit", "modernbert"])
def test_a_text_that_is_not_a_decoder_has_no_formula(text: str) -> None:
    entries = IMAGE_CASES["llava"] | {"model_type": "llava", "text_config": TEXT | {"model_type": text}}
    with pytest.raises(NoFormulaError, match="text_config"):
        configs.model_from_config(Config(entries))


def test_sections_in_sections_are_refused() -> None:
    entries: dict[str, Any] = {"model_type": "llava"}
    for _ in range(800):
        entries = {"model_type": "llava", "text_config": entries, "vision_config": {}}
    with pytest.raises(ValueError, match="levels"):
        budget.from_config(entries)


# Published models, from configs as their owners publish them, typed by hand

DEEPSEEK_V3: dict[str, Any] = {
    **{"model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432},
    **{"moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128},
    **{"n_shared_experts": 1, "n_routed_experts": 256, "num_experts_per_tok": 8, "first_k_dense_replace": 3},
    **{"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
}
MIXTRAL: dict[str, Any] = {
    **{"model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336},
    **{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
    **{"num_local_experts": 8, "num_experts_per_tok": 2},
}
GPT_OSS: dict[str, Any] = {
    **{"model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880},
    **{"num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64},
    **{"num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128},
}
GEMMA_3: dict[str, Any] = {
    "model_type": "gemma3",
    "mm_tokens_per_image": 256,
    "text_config": {
        **{"hidden_size": 5376, "intermediate_size": 21504, "num_attention_heads": 32, "num_key_value_heads": 16},
        **{"head_dim": 128, "num_hidden_layers": 62, "sliding_window": 1024, "vocab_size": 262208},
    },
    "vision_config": {
        **{"hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16, "num_hidden_layers": 27},
        **{"image_size": 896, "patch_size": 14, "vision_use_head": False},
    },
}
LLAMA_4: dict[str, Any] = {
    "model_type": "llama4",
    "text_config": {
        **{"hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384, "vocab_size": 202048},
        **{"num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 48},
        **{"num_local_experts": 16, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1},
    },
    "vision_config": {
        **{"hidden_size": 1408, "intermediate_size": 5632, "num_attention_heads": 16, "num_hidden_layers": 34},
        **{"image_size": 336, "patch_size": 14, "projector_input_dim": 4096, "projector_output_dim": 4096},
        **{"vision_output_dim": 4096, "pixel_shuffle_ratio": 0.5},
    },
}
# Entries, total and active parameters in billions, the last digit that is published, and whether the publisher counts
# the embedding's table among the active parameters. The sources:
# - DeepSeek-V3: "671B total parameters with 37B activated for each token", abstract of arXiv 2412.19437.
# - Mixtral 8x7B: "46.7B total parameters but only uses 12.9B parameters per token", Mistral AI's announcement.
# - gpt-oss-120b: "116.83B" and "5.13B", table 1 of its model card (arXiv 2508.10925), active without the embedding.
# - Gemma 3 27B: 417M in the vision encoder, 25,600M besides embeddings: table 1 of arXiv 2503.19786.
# - Llama 4 Scout: "17 billion active parameters with 16 experts", 109 billion in total, Meta's announcement.
PUBLISHED: dict[str, tuple[dict[str, Any], float, float, float, bool]] = {
    "DeepSeek-V3": (DEEPSEEK_V3, 671, 37, 1, False),
    "Mixtral 8x7B": (MIXTRAL, 46.7, 12.9, 0.1, True),
    "gpt-oss-120b": (GPT_OSS, 116.83, 5.13, 0.01, False),
    "Llama 4 Scout": (LLAMA_4, 109, 17, 1, True),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_totals_and_active_parameters(name: str) -> None:
    entries, total, active, digit, has_embedding = PUBLISHED[name]
    model = configs.model_from_config(Config(entries))
    assert abs(int(model.parameters) / 1e9 - total) <= digit / 2
    counted = int(model.active_parameters)
    if not has_embedding:
        counted -= sum(int(placed.part.parameters) for placed in model if isinstance(placed.part, Embedding))
    tower = sum(int(placed.parameters) for stack in model.stacks if stack.name == "image" for placed in stack)
    # A token of text does not use the tower.
    assert abs((counted - tower) / 1e9 - active) <= digit / 2


def test_published_parts_of_gemma_3() -> None:
    model = configs.model_from_config(Config(GEMMA_3))
    image, text = model.stacks
    tower = sum(int(placed.parameters) for placed in image if "projector" not in placed.name)
    embedding = sum(int(placed.parameters) for placed in text.before)
    rest = sum(int(placed.parameters) for placed in text) - embedding
    assert round(tower / 1e6) == 417
    assert abs(rest / 1e6 - 25_600) < 1
    # Five of six layers keep only the last 1,023 of 32,768 keys.
    cache = budget.plan(model, 32768, dtype="bfloat16").memory.cache
    per_token = 2 * 2 * 16 * 128
    assert cache == per_token * (10 * 32768 + 52 * 1023)


def test_the_cache_of_latents_is_small() -> None:
    """DeepSeek-V3 keeps 512 + 64 numbers per token and layer, whatever the number of heads."""
    plan = budget.plan(configs.model_from_config(Config(DEEPSEEK_V3)), 1000, dtype="bfloat16")
    assert plan.memory.cache == 61 * 1000 * (512 + 64) * 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_caches_in_other_dtypes(dtype: str) -> None:
    config = full_entries("deepseek_v3", BASE | LATENT)
    model = configs.model_from_config(Config(config))
    walked = budget.plan(build_counted(Config(config)), TOKENS, dtype=dtype)
    assert budget.plan(model, TOKENS, dtype=dtype).memory.cache == walked.cache_bytes


def test_the_bare_model_has_no_logits() -> None:
    for family, bare in (("olmo2", "Olmo2Model"), ("mixtral", "MixtralModel"), ("deepseek_v3", "DeepseekV3Model")):
        config = full_entries(family, BASE | LATENT | EXPERTS | {"architectures": [bare]})
        model = configs.model_from_config(Config(config))
        assert model.vocab is None
        assert model.parameters == build_counted(Config(config)).parameters


# Latent attention


def test_a_token_after_a_latent_cache_expands_no_keys() -> None:
    """Continuing from latents costs per key `kv_rank + d_rope` and `kv_rank` products per head, and no k and v maps."""
    config = Config(BASE | LATENT | {"model_type": "deepseek_v3", "num_hidden_layers": 1})
    model = configs.model_from_config(config)
    costs = []
    for n in (100, 101):
        decoding = budget.plan(model, n).decoding
        assert decoding is not None
        costs.append(decoding.flops)
    heads, rank, rope = 4, 8, 4
    assert costs[1] - costs[0] == 2 * heads * (rank + rope + rank)


def test_a_training_step_of_experts_reads_and_saves_more_with_more_of_them() -> None:
    config = BASE | EXPERTS | {"model_type": "mixtral"}
    plans = []
    for used in (1, 4):
        model = configs.model_from_config(Config(config | {"num_experts_per_tok": used}))
        plans.append(budget.plan(model, TOKENS, training=True, machine="A100 80GB"))
    few, many = plans
    assert few.parameters == many.parameters and few.active_parameters < many.active_parameters
    assert few.forward_flops < many.forward_flops
    assert few.memory.activations < many.memory.activations
    assert few.seconds is not None and many.seconds is not None and few.seconds < many.seconds


def test_a_chunk_hides_the_keys_before_it() -> None:
    entries = BASE | EXPERTS | WIDE | CHUNKS | {"model_type": "llama4_text", "num_hidden_layers": 4}
    (chunked, whole) = (
        budget.plan(configs.model_from_config(Config(entries | {"layer_types": [kind] * 4})), 20)
        for kind in ("chunked_attention", "full_attention")
    )
    # Of 20 tokens in chunks of 8, 8, and 4: 36 + 36 + 10 pairs, not 210.
    heads, d_key = 4, 14
    pair = 4 * 4 * heads * d_key  # layers · 4 · N_h · D_hid
    assert whole.unmasked_flops - chunked.unmasked_flops == pair * (210 - 82)


@pytest.mark.parametrize("family", ["llama4_text", "gpt_oss", "deepseek_v3", "modernbert"])
def test_letters_say_what_numbers_say(family: str) -> None:
    entries = next(entries for name, entries in CASES if name == family)
    model = configs.model_from_config(Config(full_entries(family, entries)))
    formulas = budget.formulas(model)
    values = {SYMBOLS["n"]: 21, SYMBOLS["t"]: 21, SYMBOLS["B"]: 1}
    plan = budget.plan(model, 21)
    assert formulas["FLOPs, forward"].subs(values) == plan.forward_flops
    assert formulas["  masks exploited"].subs(values) == plan.unmasked_flops < plan.forward_flops
    if plan.decoding is not None:
        assert formulas["FLOPs, a token after t"].subs(values) == plan.decoding.flops
        assert 4 * formulas["cache after t, values"].subs(values) == plan.memory.cache


# Counted by walking

MAMBA = {"model_type": "mamba", "hidden_size": 24, "num_hidden_layers": 2, "vocab_size": 61}


def write(entries: dict[str, Any], folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(entries))
    return folder


def test_a_family_without_a_formula_is_counted_and_says_so(tmp_path: Path) -> None:
    model = budget.from_config(write(MAMBA, tmp_path))
    assert isinstance(model, CountedModel) and model.title == tmp_path.name
    plan = budget.plan(model, tokens=TOKENS)
    assert isinstance(plan, CountedPlan)
    theirs = transformers.MambaForCausalLM(
        transformers.MambaConfig(**{k: v for k, v in MAMBA.items() if k != "model_type"})
    )
    assert plan.parameters == sum(parameter.numel() for parameter in theirs.parameters())
    # Two layers keep, for 48 inner channels, the last 4 inputs of the convolution and 16 numbers of the state.
    assert plan.cache_bytes == 2 * 48 * (4 + 16) * 4
    data = plan.to_dict()
    assert data["counted"] == "by walking" and {"bytes.peak", "crossover", "seconds"} <= set(data["unknown"])
    assert data["bytes"]["peak"] is None and data["parts"] is None
    assert "no formula" in str(plan) and "unknown" in str(plan)


def test_one_call_gives_flops_and_cache() -> None:
    model = budget.from_config(MAMBA)
    assert isinstance(model, CountedModel)
    calls = []
    model.module.register_forward_pre_hook(lambda module, inputs: calls.append(module))
    plan = budget.plan(model, TOKENS)
    assert plan.forward_flops and plan.cache_bytes
    assert len(calls) == 1


def test_a_walk_that_takes_too_long_is_given_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loop over 10,000 tokens stops at the deadline, and the command says meanwhile that it goes on."""
    monkeypatch.setattr("regard.budget._walk_counted.MOST_WALK_SECONDS", 0.3)
    monkeypatch.setattr("regard.cli.budget_modes.SILENT_SECONDS", 0.0)
    code, out, err = command(monkeypatch, capsys, "budget", json.dumps(MAMBA), "--tokens", "10000", "--json")
    data = json.loads(out)
    assert code == 0 and data["parameters"] > 0 and data["forward_flops"] is data["bytes"]["cache"] is None
    assert {"forward_flops", "bytes.cache"} <= set(data["unknown"])
    assert len(err) == 1 and "still counting" in err[0]
    plan = budget.plan(budget.from_config(MAMBA), 10000, training=True)
    assert plan.backward_flops is None and "limit" in plan.walk.reasons["backward_flops"]


def test_a_model_that_returns_no_cache_has_an_unknown_one() -> None:
    """RecurrentGemma keeps its states in its layers."""
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 3, "intermediate_size": 40}
    plan = budget.plan(budget.from_config({"model_type": "recurrent_gemma", "vocab_size": 61, **sizes}), 8)
    assert plan.forward_flops and plan.cache_bytes is None and "bytes.cache" in plan.unknown
    assert "returns no cache" in " ".join(str(plan).split())
    # An encoder has none.
    encoder = budget.plan(budget.from_config(BASE | {"model_type": "albert", "embedding_size": 12}), 8)
    assert encoder.cache_bytes == 0


def test_a_model_that_does_not_run_logs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would log the traceback of the failed run, on standard error."""
    records = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    monkeypatch.setattr(logging.getLogger("torch._subclasses.fake_tensor"), "handlers", [handler])
    entries = {"model_type": "xlstm", "hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 61, "num_heads": 4}
    plan = budget.plan(budget.from_config(entries), 64)
    assert plan.forward_flops is None and "xLSTM" in str(plan)
    assert not records


@pytest.mark.parametrize(
    ("entries", "architecture"),
    [
        ({"model_type": "bart", "d_model": 24}, "BartForConditionalGeneration"),
        ({"model_type": "whisper", "d_model": 24}, "WhisperForConditionalGeneration"),
    ],
)
def test_the_default_class_of_an_encoder_decoder_has_both(entries: dict[str, Any], architecture: str) -> None:
    sizes: dict[str, Any] = {"vocab_size": 61, "pad_token_id": 0}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 1, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 40}
    model = budget.from_config(entries | sizes)
    assert isinstance(model, CountedModel) and model.architecture == architecture


def test_both_kinds_of_plan_have_the_same_keys() -> None:
    counted = budget.plan(budget.from_config(MAMBA), 16).to_dict()
    formula = budget.plan("gpt2", 16).to_dict()
    assert set(counted) == set(formula)
    assert set(counted["bytes"]) == set(formula["bytes"])
    assert formula["counted"] == "by formulas" and formula["unknown"] == []


def test_a_variant_without_a_formula_is_counted() -> None:
    for entries in (
        BASE | {"model_type": "stablelm", "use_parallel_residual": True},
        BASE | {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
        GPT | {"model_type": "gpt2", "architectures": ["GPT2ForTokenClassification"]},
    ):
        assert isinstance(budget.from_config(entries), CountedModel)


def test_an_encoder_decoder_reads_a_source() -> None:
    entries: dict[str, Any] = {"model_type": "bart", "d_model": 24, "vocab_size": 61, "max_position_embeddings": 64}
    for side in ("encoder", "decoder"):
        entries |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 40}
    model = budget.from_config(entries | {"architectures": ["BartForConditionalGeneration"]})
    short, long = (budget.plan(model, 16, source=m) for m in (16, 32))
    assert short.forward_flops is not None and long.forward_flops is not None
    assert short.forward_flops < long.forward_flops
    with pytest.raises(ValueError, match="source=3"):
        budget.plan(budget.from_config(MAMBA), 16, source=3)


def test_images_are_counted_at_the_size_of_the_config() -> None:
    entries = {"model_type": "dinov2", "hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2}
    model = budget.from_config(entries | {"image_size": 28, "patch_size": 14})
    assert isinstance(model, CountedModel) and model.reads == "images"
    plan = budget.plan(model, batch=3)
    assert plan.forward_flops is not None and plan.forward_flops > 0
    # Such a model has no n.
    assert "forward pass of 3 images, float32" in str(plan) and plan.to_dict()["tokens"] is None
    with pytest.raises(ValueError, match=r"^tokens=5"):
        budget.plan(model, 5)


def test_an_input_that_is_neither_text_nor_image_is_unknown() -> None:
    entries = {"model_type": "wav2vec2", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
    plan = budget.plan(budget.from_config(entries | {"intermediate_size": 40, "architectures": ["Wav2Vec2Model"]}))
    assert plan.forward_flops is None and "forward_flops" in plan.to_dict()["unknown"]
    assert "unknown: the input input_values" in " ".join(str(plan).split())


@pytest.mark.parametrize(
    ("family", "entries"),
    [
        ("albert", BASE | {"embedding_size": 12}),
        ("deberta-v2", BASE),
        ("mamba2", {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "n_groups": 1, "num_hidden_layers": 2}),
        ("jamba", BASE | {"num_experts": 4}),
        ("falcon_mamba", {"hidden_size": 24, "num_hidden_layers": 2, "vocab_size": 61}),
        ("rwkv", {"hidden_size": 24, "num_hidden_layers": 2, "vocab_size": 61}),
        ("clip", {"text_config": TEXT, "vision_config": TOWER, "projection_dim": 16}),
    ],
)
def test_other_families_are_counted(family: str, entries: dict[str, Any]) -> None:
    """Every figure is a number, or is among the unknown ones with its reason."""
    plan = budget.plan(budget.from_config(entries | {"model_type": family}), TOKENS)
    assert isinstance(plan, CountedPlan)
    data = plan.to_dict()
    for name, value in (("forward_flops", plan.forward_flops), ("cache", plan.cache_bytes)):
        assert value is not None or name in plan.walk.reasons
    for name in ("forward_flops", "active_parameters"):
        assert (data[name] is None) == (name in data["unknown"])
    assert plan.parameters > 0 and str(plan)


def test_training_counts_the_backward_pass() -> None:
    plan = budget.plan(budget.from_config(MAMBA), 16, training=True)
    assert plan.backward_flops is not None and plan.forward_flops is not None
    assert plan.backward_flops > plan.forward_flops
    figures = plan.to_dict()["bytes"]
    assert figures["gradients"] == 4 * plan.parameters and figures["optimizer"] == 8 * plan.parameters


# Refusals


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"num_hidden_layers": 1000}, "modules"),
        ({"num_hidden_layers": 2**30}, "num_hidden_layers is"),
        ({"hidden_size": 2**25}, "hidden_size is"),
        ({"num_experts": 2**20}, "num_experts is"),
        ({"first_k_dense_replace": 2**20}, "first_k_dense_replace is"),
        ({"hidden_size": "wide"}, "transformers cannot build"),
        ({"backbone": "somewhere/else"}, "backbone"),
        ({"architectures": ["LlamaForCausalLM"]}, "architectures is"),
        ({"architectures": ["set_seed"]}, "architectures is"),
        ({"nested": [[[[[[[[[[[1]]]]]]]]]]]}, "levels"),
    ],
)
def test_what_cannot_be_built_is_refused(entries: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.budget._counted_model.MOST_MODULES", 500)
    with pytest.raises(ValueError, match=said) as error:
        budget.from_config(MAMBA | entries)
    assert "\n" not in str(error.value)


@pytest.mark.skipif(sys.platform != "linux", reason="the test limits the memory of a process, as only Linux can")
@pytest.mark.parametrize(
    "entries",
    [
        MAMBA | {"num_labels": 10**9},
        {"model_type": "gemma3_text", "hidden_size": 40, "num_labels": 10**9},  # a formula, after defaults
        {"model_type": "clip", "text_config": {"num_labels": 2**20 + 1}},
    ],
)
def test_a_number_of_labels_takes_no_memory(entries: dict[str, Any]) -> None:
    """Every config class of transformers makes dictionaries with an entry for each label."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**28, before[1]))
    try:
        with pytest.raises(ValueError, match="num_labels is"):
            budget.from_config(entries)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize(
    "types",
    [
        [[["global"], 10**9]],
        [[["global", "local"] * 1000, 2]],
        [["global", 2]],
        [[3, 2]],
        7,
        [[["far"], 4]],
        [[[["global"]], 4]],
        [[["global"], float("inf")]],
    ],
)
def test_groups_of_layers_that_do_not_fit_are_refused(types: Any) -> None:
    with pytest.raises(ValueError, match=r"^config\.json: attention_types is") as error:
        budget.from_config(GPT_NEO | {"model_type": "gpt_neo", "attention_types": types})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "modernbert"])
def test_types_of_layers_that_are_not_names_are_refused(family: str) -> None:
    entries = BASE | {"model_type": family, "use_sliding_window": True, "sliding_window": 8}
    for types in ([[], []], [{}] * 4, [3] * 4):
        with pytest.raises(ValueError, match="layer_types"):
            configs.model_from_config(Config(entries | {"layer_types": types}))


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"attn_config": {"qk_ln": True}}, "qk_ln of attn_config"),
        ({"attn_config": {"alibi": False}}, "alibi of attn_config"),
        ({"attn_config": {"attn_type": "multiquery_attention"}}, "attn_type of attn_config"),
        ({"no_bias": False}, "no_bias is"),
    ],
)
def test_what_transformers_leaves_out_of_an_mpt_is_refused(entries: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        budget.from_config(MPT | {"model_type": "mpt"} | entries)
    usual = {"attn_config": {"alibi": True, "qk_ln": False, "attn_type": "multihead_attention"}, "no_bias": True}
    assert isinstance(budget.from_config(MPT | {"model_type": "mpt"} | usual), budget.Model)


def test_code_of_a_folder_is_never_used(tmp_path: Path) -> None:
    """`auto_map` names classes in files beside the config; the class of transformers is counted instead."""
    (tmp_path / "evil.py").write_text("raise SystemExit('this code ran')")
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    model = budget.from_config(write(MAMBA | {"auto_map": auto_map, "trust_remote_code": True}, tmp_path))
    assert isinstance(model, CountedModel) and model.architecture == "MambaForCausalLM"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tokens": 0}, "tokens"),
        ({"batch": 0}, "batch"),
        ({"dtype": "int8"}, "dtype"),
        ({"weights": "int3"}, "weights"),
        ({"weights": "int4", "training": True}, "weights"),
        ({"optimizer": "lion"}, "optimizer"),
        ({"machine": "A100 80GB"}, "machine"),
        ({"memory_limit": "24GB"}, "memory_limit"),
    ],
)
def test_options_that_a_counted_plan_cannot_take(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}\\b"):
        budget.plan(budget.from_config(MAMBA), **options)


def test_without_transformers_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ImportError, match=r"model_type 'mamba'.*regard\[hf\]"):
        budget.from_config(MAMBA)


BLOOM = {"vocab_size": 61, "n_layer": 2, "num_attention_heads": 3}
LLAVA_TEXT = {"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}


def test_configs_as_they_were_published() -> None:
    """They use other names, leave out what their class sets, and name older classes than those of transformers."""
    whole = budget.from_config({"model_type": "bloom", "hidden_size": 24, **BLOOM})
    renamed = budget.from_config({"model_type": "bloom", "n_embed": 24, **BLOOM})
    assert isinstance(renamed, budget.Model) and renamed.parameters == whole.parameters

    sizes = {"d_model": 24, "n_heads": 3, "n_layers": 2, "vocab_size": 61}
    new = budget.from_config({"model_type": "mpt", "architectures": ["MptForCausalLM"], **sizes})
    old = budget.from_config({"model_type": "mpt", "architectures": ["MPTForCausalLM"], **sizes})
    assert isinstance(old, budget.Model) and old.parameters == new.parameters

    # Phi-3.5-MoE names its class as it was before transformers had it; so does a model that is counted.
    moe = BASE | EXPERTS | {"model_type": "phimoe", "architectures": ["PhiMoEForCausalLM"]}
    model = budget.from_config(moe)
    assert isinstance(model, budget.Model) and model.architecture == "PhimoeForCausalLM"
    mamba = budget.from_config(MAMBA | {"architectures": ["MAMBAForCausalLM"]})
    assert isinstance(mamba, CountedModel) and (mamba.architecture, mamba.reason) == ("MambaForCausalLM", "")
    # A class that transformers does not have: that of the family, and the report says so.
    other = budget.from_config(MAMBA | {"architectures": ["MambaForPoetry"]})
    assert isinstance(other, CountedModel) and other.architecture == "MambaForCausalLM"
    assert "no MambaForPoetry" in " ".join(str(budget.plan(other, 8)).split())

    # The tower of this LLaVA is that of the class.
    llava = {"model_type": "llava", "text_config": {"model_type": "llama", "intermediate_size": 40, **LLAVA_TEXT}}
    short = budget.from_config(llava)
    assert isinstance(short, budget.Model)
    assert short.parameters == build_counted(Config(llava)).parameters


def test_errors_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"model_type": "llama", "hidden_size": 0}))
    with pytest.raises(RegardError, match=r"^mine\.json: hidden_size"):
        budget.from_config(file)
    file.write_text(json.dumps(MAMBA | {"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(RegardError, match=r"^mine\.json: architectures"):
        budget.from_config(file)


def test_the_reason_is_that_of_the_complete_config() -> None:
    """What is left out is filled in; what then has no formula is the reason."""
    text = LLAVA_TEXT | {"model_type": "gemma2", "intermediate_size": 40, "head_dim": 8, "num_key_value_heads": 3}
    vision = {name: size for name, size in TOWER.items() if name != "image_size"}
    vision |= {"model_type": "siglip_vision_model", "projection_dim": 24}
    model = budget.from_config({"model_type": "paligemma", "text_config": text, "vision_config": vision})
    assert isinstance(model, CountedModel) and "use_bidirectional_attention" in model.reason
