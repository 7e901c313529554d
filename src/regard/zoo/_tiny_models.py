"""Tiny configurations by architecture: where the rules for names of fields are not enough, the values are here."""

from __future__ import annotations

from typing import Any

from regard.zoo._tiny_config import tiny_config

# By architecture. A mapping is for the fields of a part of the configuration.
OVERRIDES: dict[str, dict[str, Any]] = {
    # Layers with attention, where the default has them beyond the tiny depth.
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass": {
        "text_config": {
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        }
    },
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "step3p7": {"text_config": {"sliding_window": 4}},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["mamba", "hybrid", "hybrid"], "num_hidden_layers": 3},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    # Tokens that stand for images; the default has none.
    "blip-2": {"image_token_index": 101},
    "chameleon": {"vocabulary_map": {"<image>": 101, "IMGIMGA": 102, "IMGIMGB": 103}},
    "emu3": {"vocabulary_map": {"<|extra_200|>": 101, "<image>": 102, "<|visual token 000001|>": 103}},
    "esm": {"pad_token_id": 1, "mask_token_id": 3},
    "instructblip": {"image_token_index": 101},
    "instructblipvideo": {"video_token_index": 101},
    # With this end token, the output of a text is that of its largest token id, which every text has.
    "clip": {"text_config": {"eos_token_id": 2}},
    "clip_text_model": {"eos_token_id": 2},
    "clipseg": {"text_config": {"eos_token_id": 2}},
    "metaclip_2": {"text_config": {"eos_token_id": 2}},
    "xclip": {"text_config": {"eos_token_id": 2}},
    # Channels of convolutions are divided by the number of groups.
    "csm": {"codec_config": {"upsample_groups": 64}},
    "mimi": {"upsample_groups": 64},
    "mimi_decoder": {"upsample_groups": 64},
    "pocket_tts_audio_tokenizer": {"upsample_groups": 64},
    "pocket_tts_audio_tokenizer_decoder": {"upsample_groups": 64},
    # Windows, strides and pooled stages that need a larger image, or a smaller window.
    "depth_pro": {
        "patch_size": 32,
        "image_model_config": {"image_size": 32},
        "patch_model_config": {"image_size": 32},
        "fov_model_config": {"image_size": 32},
    },
    "donut-swin": {"image_size": 128},
    "exaone4_5_vision": {"window_size": 32},
    "levit": {"image_size": 128, "patch_size": 16},
    "lw_detr": {"backbone_config": {"image_size": 64}},
    "lw_detr_vit": {"image_size": 64},
    "maskformer-swin": {"image_size": 128},
    "qwen2_5_vl": {"vision_config": {"window_size": 32}},
    "qwen2_5_vl_vision": {"window_size": 32},
    "qwen3_asr_encoder": {"n_window": 16},
    # Numbers of heads that must be equal, or divide a width that no rule knows.
    "esmc": {"num_key_value_heads": 4},
    "granite_speech5_ctc": {"encoder_config": {"num_key_value_heads": 4}},
    "granite_speech5_encoder": {"num_key_value_heads": 4},
    "mamba2": {"num_heads": 8},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "nemo_speechlm": {"text_config": {"n_groups": 2}},
    "nemotron_h": {"n_groups": 2},
    "swin2sr": {"num_heads": [2, 2, 2, 2, 2, 2]},
    # Keys that are selected: blocks, budgets and pools must divide each other.
    "glm5_next": {"text_config": {"index_kpool": 2}},
    "glm5_next_text": {"index_kpool": 2},
    "qwen4_exp": {
        "text_config": {
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 4,
            "indexer_compress_ratio": 2,
        }
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    # Widths of parts that must agree.
    "align": {
        "vision_config": {
            "width_coefficient": 1.0,
            "depth_coefficient": 0.2,
            "in_channels": [32, 16, 24, 40, 80, 112, 192],
            "out_channels": [16, 24, 40, 80, 112, 192, 64],
            "hidden_dim": 1280,
            "image_size": 64,
        }
    },
    "d_fine": {"decoder_in_channels": [64, 64, 64]},
    "deimv2": {"decoder_in_channels": [64, 64, 64]},
    "layoutlmv3": {"coordinate_size": 8, "shape_size": 16},
    "lilt": {"hidden_size": 96},
    "pp_doclayout_v2": {"decoder_in_channels": [64, 64, 64]},
    "pp_doclayout_v3": {"decoder_in_channels": [64, 64, 64]},
    "pp_doclayout_v4": {"decoder_in_channels": [64, 64, 64]},
    "sam": {
        "vision_config": {"output_channels": 64, "num_pos_feats": 32},
        "mask_decoder_config": {"hidden_size": 64},
        "prompt_encoder_config": {"hidden_size": 64},
    },
    "sam2": {
        "vision_config": {
            "backbone_config": {"hidden_size": 96, "image_size": [128, 128]},
            "backbone_feature_sizes": [[32, 32], [16, 16], [8, 8]],
        },
        "prompt_encoder_config": {"image_size": 128},
    },
    "sam2_hiera_det_model": {"hidden_size": 96, "image_size": [128, 128]},
    "sam2_vision_model": {
        "backbone_config": {"hidden_size": 96, "image_size": [128, 128]},
        "backbone_feature_sizes": [[32, 32], [16, 16], [8, 8]],
    },
    "sam3_tracker": {"vision_config": {"backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]}},
    "vitmatte": {
        "convstream_hidden_sizes": [48, 96, 192],
        "fusion_hidden_sizes": [256, 128, 64, 32],
        "backbone_config": {"patch_size": 16},
    },
    "vjepa2": {"frames_per_clip": 4},
    "vitpose": {"backbone_config": {"part_features": 16, "num_experts": 1}},
    "vitpose_backbone": {"part_features": 16, "num_experts": 1},
    "sam_hq": {
        "vision_config": {"output_channels": 64, "num_pos_feats": 32},
        "mask_decoder_config": {"hidden_size": 64},
        "prompt_encoder_config": {"hidden_size": 64},
    },
    # Parts that the tiny model does not have, or whose lengths must fit.
    "autoformer": {"label_length": 5},
    "cvt": {"depth": [3, 3, 3]},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "ernie4_5_vl_moe": {
        "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [3, 3, 2]}}
    },
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "granite_speech": {"encoder_config": {"context_size": 16, "max_pos_emb": 32}},
    "granite_speech_plus": {"encoder_config": {"context_size": 16, "max_pos_emb": 32}},
    "molmo2": {"adapter_config": {"vision_feature_layer": [-1, -2]}},
    "muse_spark": {"audio_config": {"num_hidden_layers": 4}},
    "muse_spark_audio": {"num_hidden_layers": 4},
}


def tiny_model_config(model_class: Any, name: str, level: int) -> Any:
    """The tiny configuration of an architecture."""
    return tiny_config(model_class.config_class, OVERRIDES.get(name), level)
