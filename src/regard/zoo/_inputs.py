"""Small random inputs for any model of ``transformers``, chosen by the names of the arguments that it takes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from regard.zoo._special_inputs import SPECIAL_INPUTS

BATCH = 2
# Prime lengths: axes of texts cannot be mistaken for axes of heads.
TOKENS = 11
DECODER_TOKENS = 7
LOWEST_TOKEN = 5  # lower ids are often special tokens
HIGHEST_TOKEN = 70
AUDIO_FRAMES = 64
SAMPLES = 3840  # of a sound; some models need a multiple of 1920
GRID = 4  # patches along each side of an image that is given as a list of patches

# The names that configurations give to the same thing.
IMAGE_TOKENS = (
    "image_token_id",
    "image_token_index",
    "media_placeholder_token_id",
    "image_pad_token_id",
    "img_context_token_id",
)
PARTS = (
    "vision_config",
    "image_config",
    "vit_config",
    "vision",
    "image_model_config",
    "backbone_config",
    "encoder_config",
    "image_encoder_config",
    "vision_encoder_config",
    "encoder",
)
AUDIO_PARTS = ("audio_config", "encoder_config", "speech_encoder", "audio_encoder_config", "audio_encoder")
MEL_NAMES = (
    "num_mel_bins",
    "feature_size",
    "n_mels",
    "input_feat_size",
    "num_mels",
    "input_dim",
    "feature_projection_input_dim",
    "input_feat_per_channel",
    "n_mel_bins",
    "num_mel_bands",
)


def input_candidates(model: nn.Module, name: str, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Inputs for a model, the best ones first: models differ in layouts that the names of arguments do not tell.

    - ``name``: the architecture.
    """
    generator = torch.Generator().manual_seed(seed)
    if name in SPECIAL_INPUTS:
        yield SPECIAL_INPUTS[name](model, model.config, generator)
        return
    inputs = _random_inputs(model, generator)
    # Models of images and texts also run without an image, but then their vision part is not checked.
    with_image = _with_image(model, inputs, generator)
    if with_image is not None:
        yield with_image
    yield inputs
    for other in _other_layouts(model, inputs, generator):
        yield {**inputs, **other}


def _random_inputs(model: nn.Module, g: torch.Generator) -> dict[str, Any]:
    config: Any = model.config
    parameters = inspect.signature(model.forward).parameters
    names = set(parameters)
    main: Any = model.main_input_name
    main = [main] if isinstance(main, str) else list(main)
    inputs: dict[str, Any] = {}

    # What the model itself calls its main input, then whatever it cannot do without.
    for name in main:
        if name in names and name in MAKERS:
            inputs[name] = MAKERS[name](config, g)
    for name, parameter in parameters.items():
        if name in inputs or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if (parameter.default is parameter.empty or name == "bbox") and name in MAKERS:
            inputs[name] = MAKERS[name](config, g)
    if "grid_thw" in names:
        # The vision part of models that take an image as a list of patches.
        inputs["grid_thw"] = _grids()
        inputs[next(iter(names & {"hidden_states", "pixel_values"}), "pixel_values")] = _patches(config, g)

    # Models of images and texts of the contrastive kind take both.
    if {"input_ids", "pixel_values"} <= names and image_token(config) is None:
        inputs.setdefault("input_ids", _tokens(config, g))
        if hasattr(config, "vision_config") and hasattr(config, "text_config"):
            inputs.setdefault("pixel_values", _image(config, g))
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in names:
        inputs["decoder_input_ids"] = _tokens(config, g, DECODER_TOKENS)
    return inputs


def _with_image(model: Any, inputs: dict[str, Any], g: torch.Generator) -> dict[str, Any] | None:
    """The inputs with an image and as many image tokens as it needs; None if the model does not take it in this way."""
    config = model.config
    names = set(inspect.signature(model.forward).parameters)
    token = image_token(config)
    if token is None or "pixel_values" not in names or "input_ids" not in inputs:
        return None
    if not hasattr(model, "get_image_features"):
        return None
    images: dict[str, Any] = {"pixel_values": _image(config, g)}
    if "image_grid_thw" in names:
        images = {"pixel_values": _patches(vision(config), g), "image_grid_thw": _grids()}
    elif "image_sizes" in names:
        images["image_sizes"] = torch.tensor([image_sides(config)] * BATCH)
    # How many tokens an image becomes depends on strides and pooling, so the model is asked.
    try:
        with torch.no_grad():
            count = _row_count(model.get_image_features(**images)) // BATCH
    except Exception:
        return None
    # The image is inside the text, as a chat template places it.
    ids = inputs["input_ids"]
    image_ids = ids.new_full((BATCH, count), token)
    together = torch.cat([ids[:, :2], image_ids, ids[:, 2:]], 1)
    extended = {**inputs, **images, "input_ids": together}
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in names:
            extended[name] = (together == token).long()
    return extended


def _row_count(features: Any) -> int:
    """How many vectors the features of images have in all."""
    for name in ("pooler_output", "last_hidden_state"):
        if getattr(features, name, None) is not None:
            features = getattr(features, name)
            break
    if isinstance(features, list | tuple):
        return sum(map(_row_count, features))
    return features.shape[:-1].numel()


def _other_layouts(model: Any, inputs: dict[str, Any], g: torch.Generator) -> Iterator[dict[str, Any]]:
    """The same inputs in the other layouts that models use."""
    config = model.config
    if "grid_thw" in inputs:
        name = next(key for key in ("hidden_states", "pixel_values") if key in inputs)
        # Two frames of a video per patch, and patches as small images.
        yield {name: torch.cat([inputs[name]] * 2, 1)}
        size = math.isqrt(inputs[name].shape[1] // 3)
        yield {name: torch.randn(len(inputs[name]), 3, size, size, generator=g)}
    elif "pixel_values" in inputs:
        image = _image(config, g)
        if image_token(config) is not None:
            yield {"pixel_values": image.unsqueeze(1)}
        yield {"pixel_values": _video(config, g)}
        yield {"pixel_values": image.unsqueeze(1).expand(-1, 2, -1, -1, -1)}
    # Spectrograms come with the frequencies first or last, and with masks of two names.
    if "input_features" in inputs:
        mel = mel_bins(config)
        first = torch.randn(BATCH, mel, AUDIO_FRAMES, generator=g)
        mask = torch.ones(BATCH, AUDIO_FRAMES, dtype=torch.long)
        yield {"input_features": first}
        yield {"input_features": first, "input_features_mask": mask}
        yield {"input_features": first.mT, "input_features_mask": mask}
        yield {"input_features": first.mT, "attention_mask": mask}
        yield {"input_features": first, "attention_mask": mask}
    # Codecs want the channel of a sound as an axis; one model takes a spectrogram under this name.
    if "input_values" in inputs:
        samples = inputs["input_values"]
        yield {"input_values": samples.unsqueeze(1)}
        yield {"input_values": torch.randn(BATCH, getattr(config, "max_length", 0) or 1, mel_bins(config), generator=g)}
    if "input_ids" in inputs:
        yield {"attention_mask": torch.ones_like(inputs["input_ids"])}


def image_token(config: Any) -> int | None:
    """The token that stands for a piece of an image; None if there is none."""
    for name in IMAGE_TOKENS:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return None


def vision(config: Any) -> Any:
    """The part of a configuration that describes the images."""
    for name in PARTS:
        part = getattr(config, name, None)
        if part is not None and not isinstance(part, dict):
            return part
    return config


def image_sides(config: Any) -> tuple[int, int]:
    """Height and width of the images."""
    for part in (config, vision(config), vision(vision(config))):
        for name in ("image_size", "img_size", "input_image_size"):
            size = getattr(part, name, None)
            if isinstance(size, dict):
                return size["height"], size["width"]
            if isinstance(size, list | tuple):
                return size[0], size[-1]
            if size is not None:
                return size, size
    return 64, 64


def channels(config: Any) -> int:
    """The number of channels of the images."""
    for part in (config, vision(config), vision(vision(config))):
        for name in ("num_channels", "in_channels", "in_chans", "num_input_channels"):
            size = getattr(part, name, None)
            if isinstance(size, int):
                return size
    return 3


def mel_bins(config: Any) -> int:
    """The number of frequencies of a spectrogram."""
    parts = [config, *(getattr(config, name) for name in AUDIO_PARTS if hasattr(config, name))]
    for part in parts:
        for name in MEL_NAMES:
            size = getattr(part, name, None)
            if isinstance(size, int):
                return size
    return 80


def _tokens(config: Any, g: torch.Generator, count: int = TOKENS) -> Tensor:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    highest = min(HIGHEST_TOKEN, getattr(text, "vocab_size", None) or HIGHEST_TOKEN)
    return torch.randint(LOWEST_TOKEN, highest, (BATCH, count), generator=g)


def _image(config: Any, g: torch.Generator) -> Tensor:
    return torch.randn(BATCH, channels(config), *image_sides(config), generator=g)


def _video(config: Any, g: torch.Generator) -> Tensor:
    frames = 4
    for name in ("num_frames", "frames_per_clip"):
        frames = getattr(config, name, None) or getattr(vision(config), name, None) or frames
    return torch.randn(BATCH, frames, channels(config), *image_sides(config), generator=g)


def _grids() -> Tensor:
    return torch.tensor([[1, GRID, GRID]] * BATCH)


def _patches(config: Any, g: torch.Generator) -> Tensor:
    """The images as one list of patches."""
    size = config.patch_size
    # Some models have a patch size for time, height and width.
    if isinstance(size, list | tuple):
        size = size[-1]
    width = channels(config) * size * size * (getattr(config, "temporal_patch_size", None) or 1)
    return torch.randn(BATCH * GRID * GRID, width, generator=g)


def _features(config: Any, g: torch.Generator) -> Tensor:
    return torch.randn(BATCH, AUDIO_FRAMES, mel_bins(config), generator=g)


def _hidden(config: Any, g: torch.Generator) -> Tensor:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return torch.randn(BATCH, TOKENS, text.hidden_size, generator=g)


def _boxes(config: Any, g: torch.Generator) -> Tensor:
    return torch.tensor([10, 20, 30, 40]).expand(BATCH, TOKENS, 4).clone()


def _decoder_tokens(config: Any, g: torch.Generator) -> Tensor:
    return _tokens(config, g, DECODER_TOKENS)


def _samples(config: Any, g: torch.Generator) -> Tensor:
    return torch.randn(BATCH, SAMPLES, generator=g)


def _latents(config: Any, g: torch.Generator) -> Tensor:
    return torch.randn(BATCH, config.hidden_size, TOKENS, generator=g)


MAKERS: dict[str, Any] = {
    "input_ids": _tokens,
    "pixel_values": _image,
    "pixel_values_videos": _video,
    "input_features": _features,
    "input_values": _samples,
    "decoder_input_ids": _decoder_tokens,
    "hidden_states": _hidden,
    "inputs_embeds": _hidden,
    "bbox": _boxes,
    "latents": _latents,
}
