"""Tiny configurations: every size of an architecture's default configuration, replaced by a small one.

The sizes are chosen by the names of the fields. Names of the same meaning get the same value, so that the widths of
connected parts agree.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

WIDTH = 64
HEADS = 4
KEY_VALUE_HEADS = 2
HEAD_WIDTH = 16
FEED_FORWARD = 96
RANK = 16
VOCABULARY = 160
FIRST_SPECIAL_TOKEN = 120  # special tokens get the ids from here on, texts use lower ones
POSITIONS = 128
IMAGE = 32
PATCH = 8
WINDOW = 4
LAYERS = 2
EXPERTS = 4
LARGEST_LISTED_WIDTH = 64

# The first rule whose pattern matches a whole name decides: a value, or a function of the default value.
KEEP = object()


def _at_most(limit: int) -> Any:
    return lambda value: min(value, limit)


RULES: tuple[tuple[str, Any], ...] = (
    (r"(n_group|num_group|topk_group|num_expert_group\w*)", 1),
    # Numbers that look like sizes and are not.
    (
        r".*(_layer_id|_conv_\w*|conv_\w*|_stride|_kernel\w*|_groups?|_in_index|_loss_\w*|_rate|_factor|_ratio|_expansion)",
        KEEP,
    ),
    (r"num_conv_pos_embeddings", 16),
    (r"num_channels|in_channels|in_chans|audio_channels|out_channels", KEEP),
    (r"chunk_size_feed_forward|type_vocab_size|pretraining_tp|vision_feature_layer\w*|num_labels", KEEP),
    # Mixtures of experts.
    (r"(num_experts_per_tok|moe_topk|moe_k|top_k|num_experts_per_token|moe_top_k)", _at_most(2)),
    (r"(n_shared_experts|num_shared_experts|moe_num_shared_experts)", _at_most(1)),
    (r"(num_experts|n_routed_experts|num_local_experts|moe_num_experts|expert_num|zero_expert_num)", EXPERTS),
    (r"first_k_dense_replace|num_dense_layers|max_window_layers|num_adapter_layers", _at_most(1)),
    (r"decoder_sparse_step|moe_layer_freq|interleave_moe_layer_step", 1),
    (r"attn_layer_period|expert_layer_period", 2),
    (r"attn_layer_offset|expert_layer_offset", 1),
    (r"num_nextn_predict_layers|num_mtp_layers|num_kv_shared_layers|num_hidden_groups|inner_group_num", _at_most(1)),
    # Depth.
    (r"(num_|n_|[a-z0-9]+_)*(hidden_)?layers?", _at_most(LAYERS)),
    (r"depth|num_blocks|num_encoder_blocks|resampler_depth|.*_depth|num_self_attends_per_block", _at_most(LAYERS)),
    # Attention.
    (r".*(key_value|kv)_heads|multi_query_group_num", KEY_VALUE_HEADS),
    (r"(num_|n_|[a-z0-9]+_)*heads?", HEADS),
    (r".*(lora_rank|_rank)", _at_most(RANK)),
    (r".*(head_dim|head_size|d_head|d_kv|dim_head|kv_channels)|rotary_dim", HEAD_WIDTH),
    (r"query_pre_attn_scalar", HEAD_WIDTH),
    (r"index_topk", 4),
    (r"index_block_size|block_size", _at_most(WINDOW)),
    (r"sliding_window(_size)?|attention_chunk_size|attention_window(_size)?|local_attention|window_size", _at_most(4)),
    # Widths.
    (r".*(intermediate|ffn|d_ff|mlp_dim|dim_ff|feedforward|d_inner|n_inner|feed_forward)\w*", FEED_FORWARD),
    (r".*(hidden_size|hidden_dim|d_model|n_embd|embed_dim|embedding_dim|embedding_size|emb_dim|emb_size)", WIDTH),
    (r".*(projection_dim|proj_dim|output_dim|codebook_dim|_hidden_units|latent_dim|mask_dim|pos_dim)", WIDTH),
    (r"dim|encoder_hidden|fpn_feature_size|mask_feature_size|vit_dim|d_latents|descriptor_dim|n_embed", WIDTH),
    # Inputs.
    (r".*vocab(_size)?(_per_layer_input)?", _at_most(VOCABULARY)),
    (r"image_size|pretrain_image_size|max_image_size|img_size|input_image_size|resolution|crop_size", IMAGE),
    (r"patch_size", _at_most(PATCH)),
    (r"max_source_positions", _at_most(32)),
    (
        r".*(position_embeddings|n_positions|n_ctx|positions|context_length|max_seq_len|max_pos_emb)",
        _at_most(POSITIONS),
    ),
    (r"num_mel_bins|n_mel_bins|num_mel_bands", _at_most(16)),
    (r"num_queries|num_query_tokens|num_latents|two_stage_num_proposals|num_denoising|num_points", _at_most(8)),
    (r"codebook_size|num_embeddings", _at_most(32)),
    (r".*(num_frames)", _at_most(4)),
)


# Fields whose default is None, although models need a value.
MISSING_VALUES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "head_dim": HEAD_WIDTH,
    "num_experts_per_tok": 2,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_key_value_heads": KEY_VALUE_HEADS,
    "prediction_length": 5,
}

# Models that divide the pairs of a rotary encoding among time, height and width.
SECTIONED_ROTARY = re.compile(r"(glm4v|glm46v|glm_ocr|glm_image|glmga|qwen\d|paddleocr|ernie4_5_vl|hunyuan_vl).*")

# How much is replaced. Some architectures have widths that must agree in ways that names do not tell.
ALL_SIZES = 0
NO_LISTS = 1  # lists of widths keep their defaults
ONLY_DEPTH = 2  # all widths keep their defaults
LEVELS = (ALL_SIZES, NO_LISTS, ONLY_DEPTH)
NOT_WIDTHS = re.compile(
    r".*(layers?|depth|depths|blocks|vocab(_size)?\w*|position_embeddings|positions|experts|expert_num)|layer_types"
)


def tiny_config(config_class: Any, overrides: Mapping[str, Any] | None = None, level: int = ALL_SIZES) -> Any:
    """A configuration of ``config_class`` with tiny sizes.

    - ``overrides``: fields that get these values; the value of a part of the configuration is a mapping of its fields.
    - ``level``: one of ``LEVELS``: how much is replaced.

    >>> from transformers import LlamaConfig
    >>> config = tiny_config(LlamaConfig, {"num_hidden_layers": 3})
    >>> config.hidden_size, config.num_attention_heads, config.num_hidden_layers
    (64, 4, 3)
    """
    return config_class(**tiny_fields(config_class, {}, overrides or {}, level))


def tiny_fields(
    config_class: Any, defaults: Mapping[str, Any], overrides: Mapping[str, Any], level: int = ALL_SIZES
) -> dict[str, Any]:
    """The fields of a configuration that differ from its defaults, parts of the configuration as objects.

    - ``defaults``: what the larger configuration passes to this part.
    """
    values = {**_default_fields(config_class), **defaults}
    tiny: dict[str, Any] = dict(defaults)
    parts = getattr(config_class, "sub_configs_defaults", None) or {}
    for name, value in values.items():
        if name not in parts:
            tiny_one = _tiny_at_level(name, value, level)
            if tiny_one is not KEEP:
                tiny[name] = tiny_one

    for name, part in parts.items():
        own = overrides.get(name, {})
        if own is None or not isinstance(own, Mapping):
            tiny[name] = own
            continue
        part_class = part.config_class
        model_type = own.get("model_type", part.model_type)
        if not hasattr(part_class, "model_type"):
            part_class = part.get_config_class(model_type)
        part_defaults = part.init_kwargs if model_type == part.model_type else {}
        own = {key: value for key, value in own.items() if key != "model_type"}
        tiny[name] = part_class(**tiny_fields(part_class, part_defaults, own, level))

    _fit_attention(config_class, {**values, **tiny}, tiny, level)

    for name, value in overrides.items():
        if name not in parts:
            tiny[name] = value
    _renumber_tokens({**values, **tiny}, tiny, overrides)
    return tiny


def _tiny_at_level(name: str, value: Any, level: int) -> Any:
    if value is None and name in MISSING_VALUES and level < ONLY_DEPTH:
        return MISSING_VALUES[name]
    if level >= NO_LISTS and isinstance(value, list | tuple) and not NOT_WIDTHS.fullmatch(name):
        return KEEP
    if level == ONLY_DEPTH and not NOT_WIDTHS.fullmatch(name):
        return KEEP
    return tiny_value(name, value)


def _fit_attention(config_class: Any, values: Mapping[str, Any], tiny: dict[str, Any], level: int) -> None:
    """Make fields of attention agree with each other: kinds of layers, and parts of positions."""
    # Latent attention has one key per head, whatever the number of key and value heads says.
    if values.get("kv_lora_rank") and "num_key_value_heads" in tiny:
        tiny["num_key_value_heads"] = values["num_attention_heads"]
    default = _default_instance(config_class)
    # A backbone must have the layers whose outputs are used.
    for name, make in (("out_indices", int), ("out_features", "stage{}".format)):
        used = values.get(name)
        if isinstance(used, list | tuple) and used and "num_hidden_layers" in values:
            tiny[name] = [make(number) for number in range(1, len(used) + 1)]
            tiny["num_hidden_layers"] = max(LAYERS, len(used))
    kinds = getattr(default, "layer_types", None)
    if kinds and "num_hidden_layers" in tiny:
        # One layer of each kind, and at least two layers.
        different = list(dict.fromkeys(kinds))
        count = max(LAYERS, len(different))
        tiny["num_hidden_layers"] = count
        if "layer_types" in values:
            tiny["layer_types"] = (different * LAYERS)[:count]
    rope = getattr(default, "rope_parameters", None)
    sectioned = "mrope_section" in (rope or ()) or SECTIONED_ROTARY.fullmatch(config_class.model_type)
    if level < ONLY_DEPTH and isinstance(rope, dict) and sectioned:
        width = values.get("head_dim") or HEAD_WIDTH
        pairs = int(width * rope.get("partial_rotary_factor", 1.0)) // 2
        part = pairs // 3
        tiny["rope_parameters"] = {**rope, "mrope_section": [pairs - 2 * part, part, part]}


def _default_instance(config_class: Any) -> Any:
    try:
        return config_class()
    except Exception:
        # Some configurations have no valid default.
        return None


def tiny_value(name: str, value: Any) -> Any:
    """The tiny value of one field; ``KEEP`` if its default stays.

    >>> tiny_value("num_hidden_layers", 32), tiny_value("hidden_sizes", (64, 128, 256)), tiny_value("depths", [3, 6])
    (2, (16, 32, 64), [1, 1])
    """
    if isinstance(value, bool):
        return KEEP
    if isinstance(value, int):
        return _tiny_number(name, value)
    if isinstance(value, list | tuple) and value and all(type(entry) is int for entry in value):
        return _tiny_list(name, value)
    return KEEP


def _tiny_number(name: str, value: int) -> Any:
    if value <= 0 or name.endswith(("_id", "_index")):
        return KEEP
    for pattern, rule in RULES:
        if re.fullmatch(pattern, name):
            if callable(rule):
                return rule(value)
            return rule
    return KEEP


def _tiny_list(name: str, values: Any) -> Any:
    kind = type(values)
    if name in ("depths", "depth", "layers", "num_blocks", "encode_layers", "stage_numb_of_layers", "block_sizes"):
        return kind([1] * len(values))
    if name == "num_heads":
        return kind([KEY_VALUE_HEADS] * len(values))
    if name in ("image_size", "img_size"):
        return kind([IMAGE] * len(values))
    if name == "patch_size" and len(values) == 2:
        return kind([min(size, PATCH) for size in values])
    widths = r".*(hidden_sizes|embed_dims?|conv_dim|in_channels|out_channels|widths|tdnn_dim|feature_dims|channels)"
    if re.fullmatch(widths, name) and max(values) > LARGEST_LISTED_WIDTH:
        divisor = 1
        while max(values) > LARGEST_LISTED_WIDTH * divisor:
            divisor *= 2
        return kind([max(8, size // divisor) for size in values])
    return KEEP


def _default_fields(config_class: Any) -> dict[str, Any]:
    defaults = {}
    for field in fields(config_class):
        if field.default is not MISSING:
            defaults[field.name] = field.default
        elif field.default_factory is not MISSING:
            defaults[field.name] = field.default_factory()
    return defaults


def _renumber_tokens(values: Mapping[str, Any], tiny: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """Give special tokens beyond the tiny vocabulary new ids, each its own."""
    used = FIRST_SPECIAL_TOKEN
    numbers: dict[int, int] = {}
    for name, value in values.items():
        is_token = re.fullmatch(r".*(token_id|token_index|_id|_idx|token_ids|pad_index|_token)", name)
        if not is_token or name in overrides or isinstance(value, bool):
            continue
        entries = value if isinstance(value, list | tuple) else [value]
        if not entries or not all(type(entry) is int for entry in entries):
            continue
        if max(entries) < FIRST_SPECIAL_TOKEN:
            continue
        new = []
        for entry in entries:
            # Tokens that are equal stay equal.
            if entry not in numbers:
                numbers[entry] = used
                used += 1
            new.append(numbers[entry])
        tiny[name] = new[0] if value is entries[0] else type(value)(new)
