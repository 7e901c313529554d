"""Pictures to tensors, as a folder's ``preprocessor_config.json`` says: resize, crop, rescale, normalise."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from regard.config import Config
from regard.positions.common import described

__all__ = ["Picture", "Preprocessor"]

Picture = str | os.PathLike[str] | Image.Image | np.ndarray[Any, Any]
BILINEAR = 2  # PIL's number, which is what configurations hold


class Preprocessor:
    """``x = (pixel · factor − mean) / std`` after a resize to the model's size: pictures → ``[B, C, height, width]``.

    Transparent pictures are put on white.

    What a config leaves out is what ViT's processor does: resize to the model's image size (bilinear), factor 1/255,
    mean and std 1/2. ``size`` may also be ``{"shortest_edge": s}``, with a centre crop after it.
    """

    def __init__(self, config: Config, image: tuple[int, int], channels: int = 3) -> None:
        self.image, self.channels = image, channels
        self.resize = config.flag("do_resize", True)
        self.size = _size("size", config.get("size"), image)
        self.resample = _resampling(config.whole("resample", BILINEAR, least=0))
        self.crop = _crop(config.get("crop_size"), image) if config.flag("do_center_crop", False) else None
        self.factor = config.real("rescale_factor", 1 / 255) if config.flag("do_rescale", True) else 1.0
        normalize = config.flag("do_normalize", True)
        self.mean = _per_channel("image_mean", config.get("image_mean"), channels, 0.5) if normalize else None
        self.std = _per_channel("image_std", config.get("image_std"), channels, 0.5) if normalize else None

    def __call__(self, pictures: Picture | Sequence[Picture]) -> Tensor:
        """Files, PIL pictures or byte arrays ``[height, width(, 3)]``, one or several → ``[B, C, height, width]``."""
        if isinstance(pictures, str | os.PathLike | Image.Image | np.ndarray):
            pictures = [pictures]
        if not isinstance(pictures, Sequence) or not pictures:
            raise TypeError(f"pictures must be files, PIL pictures or arrays of bytes, got {described(pictures)}")
        return torch.stack([self._one(x) for x in pictures])

    def _one(self, given: Picture) -> Tensor:
        picture = _opaque(_opened(given)).convert("L" if self.channels == 1 else "RGB")
        if self.resize:
            height, width = _fitted(self.size, picture)
            picture = picture.resize((width, height), resample=self.resample)
        pixels = np.asarray(picture)
        pixels = pixels[..., None] if pixels.ndim == 2 else pixels
        if self.crop is not None:
            pixels = _cropped(pixels, *self.crop)
        x = torch.from_numpy(pixels.astype(np.float32) * np.float32(self.factor)).permute(2, 0, 1)
        if self.mean is not None and self.std is not None:
            x = (x - self.mean) / self.std
        if tuple(x.shape[1:]) != self.image:
            raise ValueError(f"a picture of {list(x.shape[1:])} pixels is left; this model takes {list(self.image)}")
        return x.contiguous()


def _opened(given: Picture) -> Image.Image:
    if isinstance(given, Image.Image):
        return given
    if isinstance(given, np.ndarray):
        if given.dtype != np.uint8 or not (given.ndim == 2 or (given.ndim == 3 and given.shape[2] in (3, 4))):
            raise TypeError(
                f"an array must hold bytes [height, width] or [height, width, 3], got {given.dtype} {given.shape}"
            )
        return Image.fromarray(given)
    if not isinstance(given, str | os.PathLike):
        raise TypeError(f"a picture must be a file, a PIL picture or an array of bytes, got {described(given)}")
    try:
        picture = Image.open(given)
        picture.load()
    except FileNotFoundError:
        raise
    except UnidentifiedImageError:
        raise ValueError(f"{given} is no picture that can be read: its format is unknown") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"{given} is no picture that can be read: {error}") from None
    return picture


def _opaque(picture: Image.Image) -> Image.Image:
    """On white where it is transparent: what colours lie under that, nobody has seen."""
    if "A" not in picture.getbands() and "transparency" not in picture.info:
        return picture
    picture = picture.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)


def _size(name: str, found: Any, default: tuple[int, int]) -> tuple[int, int] | int:
    """(height, width), or one number: the shortest edge."""
    if found is None:
        return default
    if _positive(found):
        return found, found
    if isinstance(found, dict):
        sides = found.get("height"), found.get("width")
        if set(found) == {"shortest_edge"} and _positive(found["shortest_edge"]):
            return int(found["shortest_edge"])
        if all(map(_positive, sides)):
            return sides  # type: ignore[return-value]
    raise ValueError(f"preprocessor_config.json: {name} is {found!r}; it must be height and width, or shortest_edge")


def _positive(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x > 0


def _crop(found: Any, default: tuple[int, int]) -> tuple[int, int]:
    size = _size("crop_size", found, default)
    if isinstance(size, int):
        raise ValueError(f"preprocessor_config.json: crop_size is {found!r}; it must be height and width")
    return size


def _resampling(number: int) -> Image.Resampling:
    known = {x.value: x for x in Image.Resampling}
    if number not in known:
        names = ", ".join(f"{i} ({x.name.lower()})" for i, x in sorted(known.items()))
        raise ValueError(f"preprocessor_config.json: resample is {number}; known are {names}")
    return known[number]


def _fitted(size: tuple[int, int] | int, picture: Image.Image) -> tuple[int, int]:
    if isinstance(size, tuple):
        return size
    short, long = sorted((picture.height, picture.width))
    stretched = int(size * long / short)
    return (size, stretched) if picture.height <= picture.width else (stretched, size)


def _cropped(pixels: np.ndarray[Any, Any], height: int, width: int) -> np.ndarray[Any, Any]:
    """The middle; where a picture is smaller, zeros around it."""
    missing = [max(0, want - have) for want, have in zip((height, width), pixels.shape[:2], strict=True)]
    if any(missing):
        around = [(-(-x // 2), x // 2) for x in missing]
        pixels = np.pad(pixels, [*around, (0, 0)])
    top, left = (pixels.shape[0] - height) // 2, (pixels.shape[1] - width) // 2
    return pixels[top : top + height, left : left + width]


def _per_channel(name: str, found: Any, channels: int, default: float) -> Tensor:
    values = [default] * channels if found is None else found if isinstance(found, list) else [found] * channels
    if len(values) != channels or not all(isinstance(x, int | float) for x in values):
        raise ValueError(f"preprocessor_config.json: {name} is {found!r}; it must be {channels} numbers, one a channel")
    return torch.tensor(values, dtype=torch.float32).view(-1, 1, 1)
