"""Converts images to tensors as ``preprocessor_config.json`` describes: resize, crop, rescale, normalise."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from regard._checks import describe_value
from regard._config_json import Config
from regard._errors import RegardError, RegardTypeError
from regard._files import check_regular_file

ImageLike = str | os.PathLike[str] | Image.Image | np.ndarray[Any, Any]
LARGEST_SIDE = 2**14  # pixels of a resized or cropped image
BILINEAR = 2  # PIL's number, which is what configs contain


class Preprocessor:
    """``x = (pixel · factor − mean) / std`` after a resize to the model's size: images → ``[B, C, height, width]``.

    Transparent images are put on white. The defaults are those of ViT's processor: resize to the model's image size
    (bilinear), factor 1/255, mean and std 1/2. ``size`` in the config may also be ``{"shortest_edge": s}``, followed by
    a centre crop.

    - ``config``: the entries of ``preprocessor_config.json``.
    - ``image``: (height, width) that the model takes.
    - ``channels``: 1 or 3 (default 3).
    """

    def __init__(self, config: Config, image: tuple[int, int], channels: int = 3) -> None:
        self.image = image
        self.channels = channels
        self.resize = config.boolean("do_resize", True)
        self.size = _read_size(config, "size", image)
        self.resample = _read_resampling(config)
        self.crop = None
        if config.boolean("do_center_crop", False):
            self.crop = _read_size(config, "crop_size", image)
            if isinstance(self.crop, int):
                raise config.error("crop_size", "it must be height and width")
        self.factor = 1.0
        if config.boolean("do_rescale", True):
            self.factor = config.number("rescale_factor", 1 / 255)
        self.mean = self.std = None
        if config.boolean("do_normalize", True):
            self.mean = _read_per_channel(config, "image_mean", channels, 0.5)
            self.std = _read_per_channel(config, "image_std", channels, 0.5)

    def __call__(self, images: ImageLike | Sequence[ImageLike]) -> Tensor:
        """Files, PIL images or byte arrays ``[height, width(, 3)]``, one or several → ``[B, C, height, width]``."""
        if isinstance(images, str | os.PathLike | Image.Image | np.ndarray):
            images = [images]
        if not isinstance(images, Sequence) or not images:
            raise RegardTypeError(f"images must be files, PIL images or arrays of bytes, got {describe_value(images)}")
        return torch.stack([self._convert(x) for x in images])

    def _convert(self, source: ImageLike) -> Tensor:
        """One image → ``[C, height, width]``."""
        mode = "L" if self.channels == 1 else "RGB"  # PIL's names of grey and colour
        image = _on_white(_open(source)).convert(mode)
        if self.resize:
            height, width = _target_size(self.size, image)
            image = image.resize((width, height), resample=self.resample)
        pixels = np.asarray(image).reshape(image.height, image.width, -1)  # [height, width, C]
        if isinstance(self.crop, tuple):
            pixels = _crop_centre(pixels, *self.crop)
        x = torch.from_numpy(pixels.astype(np.float32) * np.float32(self.factor)).permute(2, 0, 1)
        if self.mean is not None and self.std is not None:
            x = (x - self.mean) / self.std
        if tuple(x.shape[1:]) != self.image:
            raise RegardError(f"the image has {list(x.shape[1:])} pixels; this model takes {list(self.image)}")
        return x.contiguous()


def _open(source: ImageLike) -> Image.Image:
    if isinstance(source, Image.Image):
        return source
    if isinstance(source, np.ndarray):
        if source.dtype != np.uint8 or not (source.ndim == 2 or (source.ndim == 3 and source.shape[2] in (3, 4))):
            raise RegardTypeError(f"an array must be uint8 [height, width(, 3)], got {source.dtype} {source.shape}")
        return Image.fromarray(source)
    if not isinstance(source, str | os.PathLike):
        raise RegardTypeError(f"an image must be a file, PIL image or array of bytes, got {describe_value(source)}")
    check_regular_file(source)
    try:
        image = Image.open(source)
        image.load()
    except FileNotFoundError:
        raise
    except UnidentifiedImageError:
        raise RegardError(f"{source} is not an image that can be read: its format is unknown") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise RegardError(f"{source} is not an image that can be read: {error}") from None
    return image


def _on_white(image: Image.Image) -> Image.Image:
    """Put a transparent image on white: the colours under transparent pixels are arbitrary."""
    if "A" not in image.getbands() and "transparency" not in image.info:
        return image
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)


def _read_size(config: Config, name: str, default: tuple[int, int]) -> tuple[int, int] | int:
    """(height, width), or one number for the shortest edge."""
    size = config.get(name)
    if size is None:
        return default
    if _is_positive(size):
        return size, size
    if isinstance(size, dict):
        if set(size) == {"shortest_edge"} and _is_positive(size["shortest_edge"]):
            return int(size["shortest_edge"])
        if _is_positive(size.get("height")) and _is_positive(size.get("width")):
            return size["height"], size["width"]
    raise config.error(name, f"it must be height and width, or shortest_edge, from 1 to {LARGEST_SIDE:,}")


def _is_positive(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and 0 < x <= LARGEST_SIDE


def _is_finite(x: Any) -> bool:
    """Whether an entry is a number that float32 can hold."""
    return isinstance(x, int | float) and abs(x) < 1e38


def _read_resampling(config: Config) -> Image.Resampling:
    number = config.integer("resample", BILINEAR, least=0)
    methods = {method.value: method for method in Image.Resampling}
    if number not in methods:
        names = ", ".join(f"{i} ({method.name.lower()})" for i, method in sorted(methods.items()))
        raise config.error("resample", f"known are {names}")
    return methods[number]


def _read_per_channel(config: Config, name: str, channels: int, default: float) -> Tensor:
    """One number per channel, ``[C, 1, 1]``; a single number is for all channels."""
    values = config.get(name)
    if values is None:
        values = default
    if not isinstance(values, list):
        values = [values] * channels
    if len(values) != channels or not all(_is_finite(x) for x in values):
        raise config.error(name, f"it must be {channels} finite numbers, one per channel")
    return torch.tensor(values, dtype=torch.float32).view(-1, 1, 1)


def _target_size(size: tuple[int, int] | int, image: Image.Image) -> tuple[int, int]:
    """(height, width) after the resize; a shortest edge keeps the ratio of the sides."""
    if isinstance(size, tuple):
        return size
    short, long = sorted((image.height, image.width))
    stretched = int(size * long / short)
    # A very narrow image would become very long.
    if stretched > LARGEST_SIDE:
        raise RegardError(
            f"an image must have at most {LARGEST_SIDE:,} pixels per side after the resize, got {image.height} × "
            f"{image.width}, whose long side becomes {stretched:,}"
        )
    if image.height <= image.width:
        return size, stretched
    return stretched, size


def _crop_centre(pixels: np.ndarray[Any, Any], height: int, width: int) -> np.ndarray[Any, Any]:
    """The middle of an image; a smaller image gets zeros around it."""
    missing_rows = max(0, height - pixels.shape[0])
    missing_columns = max(0, width - pixels.shape[1])
    if missing_rows or missing_columns:
        rows = (-(-missing_rows // 2), missing_rows // 2)  # an odd number puts one more before than after
        columns = (-(-missing_columns // 2), missing_columns // 2)
        pixels = np.pad(pixels, [rows, columns, (0, 0)])
    top = (pixels.shape[0] - height) // 2
    left = (pixels.shape[1] - width) // 2
    return pixels[top : top + height, left : left + width]
