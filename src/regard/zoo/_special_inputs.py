"""Inputs of the architectures whose arguments have names or layouts of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BATCH = 2
TOKENS = 11
LENGTH = 16  # of a series of numbers

Maker = Callable[[Any, Any, torch.Generator], dict[str, Any]]


def _ids(g: torch.Generator, count: int = TOKENS) -> Tensor:
    return torch.randint(5, 100, (BATCH, count), generator=g)


def _randn(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(BATCH, *shape, generator=g)


def _time_series(model: Any, config: Any, g: torch.Generator) -> dict[str, Any]:
    past = config.context_length + max(config.lags_sequence)
    features = config.num_time_features
    return {
        "past_values": _randn(g, past),
        "past_time_features": _randn(g, past, features),
        "past_observed_mask": torch.ones(BATCH, past),
        "future_values": _randn(g, config.prediction_length),
        "future_time_features": _randn(g, config.prediction_length, features),
    }


def _patched_series(model: Any, config: Any, g: torch.Generator) -> dict[str, Any]:
    return {"past_values": _randn(g, config.context_length, config.num_input_channels)}


def _timesfm(model: Any, config: Any, g: torch.Generator) -> dict[str, Any]:
    length = config.patch_length * 4
    return {
        "past_values": _randn(g, length),
        "past_values_padding": torch.zeros(BATCH, length),
        "freq": torch.zeros(BATCH, 1, dtype=torch.long),
    }


def _timesfm2_5(model: Any, config: Any, g: torch.Generator) -> dict[str, Any]:
    return {"past_values": _randn(g, config.patch_length * 4)}


def _udop(model: Any, config: Any, g: torch.Generator) -> dict[str, Any]:
    boxes = torch.tensor([0.1, 0.2, 0.3, 0.4]).expand(BATCH, TOKENS, 4).clone()
    return {"input_ids": _ids(g), "bbox": boxes, "decoder_input_ids": _ids(g, 7)}


def _decision_transformer(model: Any, config: Any, g: torch.Generator) -> dict[str, Any]:
    return {
        "states": _randn(g, 5, config.state_dim),
        "actions": _randn(g, 5, config.act_dim),
        "rewards": _randn(g, 5, 1),
        "returns_to_go": _randn(g, 5, 1),
        "timesteps": torch.arange(5).expand(BATCH, 5),
        "attention_mask": torch.ones(BATCH, 5, dtype=torch.long),
    }


def _lxmert(model: Any, config: Any, g: torch.Generator) -> dict[str, Any]:
    return {
        "input_ids": _ids(g),
        "visual_feats": _randn(g, 6, config.visual_feat_dim),
        "visual_pos": torch.rand(BATCH, 6, config.visual_pos_dim, generator=g),
    }


def _perceiver(model: Any, config: Any, g: torch.Generator) -> dict[str, Any]:
    return {"inputs": _randn(g, TOKENS, config.d_model)}


def _pix2struct(model: Any, config: Any, g: torch.Generator) -> dict[str, Any]:
    patches = _randn(g, TOKENS, 2 + config.vision_config.patch_embed_hidden_size)
    # The first two numbers are the row and the column of the patch.
    patches[..., :2] = torch.randint(0, 4, (BATCH, TOKENS, 2), generator=g).float()
    return {"flattened_patches": patches, "decoder_input_ids": _ids(g, 7)}


def _dia(model: Any, config: Any, g: torch.Generator) -> dict[str, Any]:
    shape = (BATCH, 7, config.decoder_config.num_channels)
    return {"input_ids": _ids(g), "decoder_input_ids": torch.randint(0, 30, shape, generator=g)}


def _patches_with_places(model: Any, config: Any, g: torch.Generator) -> dict[str, Any]:
    rows = torch.arange(6).repeat_interleave(6)
    places = torch.stack([rows, torch.arange(6).repeat(6)], -1)
    return {
        "pixel_values": _randn(g, 36, 3 * config.patch_size**2),
        "pixel_position_ids": places.expand(BATCH, 36, 2).clone(),
    }


def _siglip2(model: Any, config: Any, g: torch.Generator) -> dict[str, Any]:
    vision = getattr(config, "vision_config", config)
    images = {
        "pixel_values": _randn(g, 16, vision.num_channels * vision.patch_size**2),
        "pixel_attention_mask": torch.ones(BATCH, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4]] * BATCH),
    }
    if vision is config:
        return images
    return {"input_ids": _ids(g), **images}


def _seggpt(model: Any, config: Any, g: torch.Generator) -> dict[str, Any]:
    sides = config.image_size
    image = _randn(g, 3, sides[0] // 2, sides[1])
    return {"pixel_values": image, "prompt_pixel_values": image.flip(-1), "prompt_masks": image.flip(-2)}


def _instructblip(model: Any, config: Any, g: torch.Generator) -> dict[str, Any]:
    size = config.vision_config.image_size
    image = _randn(g, 3, size, size)
    if "Video" in type(model).__name__:
        image = image.unsqueeze(1).expand(-1, 2, -1, -1, -1)
    token = next(filter(None, (getattr(config, name, None) for name in ("image_token_index", "video_token_index"))))
    frames = image.shape[1] if image.ndim == 5 else 1
    ids = torch.cat([torch.full((BATCH, config.num_query_tokens * frames), token), _ids(g)], 1)
    return {
        "pixel_values": image,
        "qformer_input_ids": _ids(g, 7),
        "qformer_attention_mask": torch.ones(BATCH, 7, dtype=torch.long),
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
    }


def _idefics(model: Any, config: Any, g: torch.Generator) -> dict[str, Any]:
    size = config.vision_config.image_size
    return {
        "input_ids": _ids(g),
        "attention_mask": torch.ones(BATCH, TOKENS, dtype=torch.long),
        "pixel_values": _randn(g, 1, 3, size, size),
        "image_attention_mask": torch.ones(BATCH, TOKENS, 1, dtype=torch.long),
    }


def _qformer(model: Any, config: Any, g: torch.Generator) -> dict[str, Any]:
    width = config.encoder_hidden_size
    return {"query_embeds": _randn(g, 5, config.hidden_size), "encoder_hidden_states": _randn(g, TOKENS, width)}


def _blip_2(model: Any, config: Any, g: torch.Generator) -> dict[str, Any]:
    size = config.vision_config.image_size
    ids = torch.cat([torch.full((BATCH, config.num_query_tokens), config.image_token_index), _ids(g)], 1)
    return {"pixel_values": _randn(g, 3, size, size), "input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _text_and_image(model: Any, config: Any, g: torch.Generator) -> dict[str, Any]:
    vision = getattr(config, "vision_config", config)
    return {"input_ids": _ids(g), "pixel_values": _randn(g, 3, vision.image_size, vision.image_size)}


def _image_pairs(model: Any, config: Any, g: torch.Generator) -> dict[str, Any]:
    channels = 3
    return {"pixel_values": _randn(g, 2, channels, 64, 64)}


def _clap(model: Any, config: Any, g: torch.Generator) -> dict[str, Any]:
    audio = config.audio_config
    frames = audio.spec_size * audio.spec_size // audio.num_mel_bins
    return {
        "input_ids": _ids(g),
        "input_features": _randn(g, 1, frames, audio.num_mel_bins),
        "is_longer": torch.zeros(BATCH, 1, dtype=torch.bool),
    }


def _clvp(model: Any, config: Any, g: torch.Generator) -> dict[str, Any]:
    return {"input_ids": _ids(g), "input_features": _randn(g, config.decoder_config.feature_size, 64)}


def _kosmos_2(model: Any, config: Any, g: torch.Generator) -> dict[str, Any]:
    size = config.vision_config.image_size
    count = config.latent_query_num
    ids = _ids(g, count + TOKENS)
    places = torch.zeros_like(ids)
    places[:, 1 : count + 1] = 1
    return {"pixel_values": _randn(g, 3, size, size), "input_ids": ids, "image_embeds_position_mask": places}


def _text_and_codes(model: Any, config: Any, g: torch.Generator) -> dict[str, Any]:
    shape = (BATCH, TOKENS, config.num_codebooks + 1)
    return {"input_ids": torch.randint(5, 30, shape, generator=g)}


def _codebook_tokens(model: Any, config: Any, g: torch.Generator) -> dict[str, Any]:
    return {"input_ids": torch.randint(0, 30, (BATCH * config.num_codebooks, TOKENS), generator=g)}


def _spectrogram_with_mask(model: Any, config: Any, g: torch.Generator) -> dict[str, Any]:
    hidden = torch.zeros(BATCH, 64, dtype=torch.bool)
    return {"audio_mel": _randn(g, 64, config.input_feat_size), "audio_mel_mask": hidden}


def _tvp(model: Any, config: Any, g: torch.Generator) -> dict[str, Any]:
    size = config.max_img_size
    return {"input_ids": _ids(g), "pixel_values": _randn(g, config.num_frames, 3, size, size)}


def _oneformer(model: Any, config: Any, g: torch.Generator) -> dict[str, Any]:
    return {"pixel_values": _randn(g, 3, 64, 64), "task_inputs": _ids(g, config.task_seq_len)}


def _image_encoder_decoder(model: Any, config: Any, g: torch.Generator) -> dict[str, Any]:
    size = config.encoder.image_size
    return {"pixel_values": _randn(g, 3, size, size), "decoder_input_ids": _ids(g, 7)}


def _speech_encoder_decoder(model: Any, config: Any, g: torch.Generator) -> dict[str, Any]:
    return {"input_values": _randn(g, 2400), "decoder_input_ids": _ids(g, 7)}


def _speecht5(model: Any, config: Any, g: torch.Generator) -> dict[str, Any]:
    return {
        "input_values": _randn(g, TOKENS, config.hidden_size),
        "decoder_input_values": _randn(g, 7, config.hidden_size),
    }


SPECIAL_INPUTS: dict[str, Maker] = {
    "autoformer": _time_series,
    "blip-2": _blip_2,
    "blip_2_qformer": _qformer,
    "clap": _clap,
    "clvp": _clvp,
    "decision_transformer": _decision_transformer,
    "dia": _dia,
    "gemma3n_audio": _spectrogram_with_mask,
    "gemma4_vision": _patches_with_places,
    "idefics": _idefics,
    "informer": _time_series,
    "instructblip": _instructblip,
    "instructblipvideo": _instructblip,
    "kosmos-2": _kosmos_2,
    "kyutai_speech_to_text": _text_and_codes,
    "lightglue": _image_pairs,
    "lxmert": _lxmert,
    "musicgen": _codebook_tokens,
    "musicgen_melody": _codebook_tokens,
    "oneformer": _oneformer,
    "patchtsmixer": _patched_series,
    "patchtst": _patched_series,
    "perceiver": _perceiver,
    "pix2struct": _pix2struct,
    "seggpt": _seggpt,
    "siglip2": _siglip2,
    "siglip2_vision_model": _siglip2,
    "speech-encoder-decoder": _speech_encoder_decoder,
    "speecht5": _speecht5,
    "superglue": _image_pairs,
    "time_series_transformer": _time_series,
    "timesfm": _timesfm,
    "timesfm2_5": _timesfm2_5,
    "tvp": _tvp,
    "udop": _udop,
    "vilt": _text_and_image,
    "vision-encoder-decoder": _image_encoder_decoder,
}
