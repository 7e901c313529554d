"""Pictures become the tensors that `transformers`' own processors make of them."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.checkpoints import make, write
from support.model_configs import VIT
from torch import Tensor
from transformers import CLIPImageProcessorPil, ViTImageProcessorPil

from regard._config_json import Config
from regard.models import load
from regard.models._images import Preprocessor

SHAPES = [(31, 23), (8, 12), (5, 47), (100, 3), (13, 13)]
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def pictures(*shape: int, seed: int = 0) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    return [draw.integers(0, 256, (*size, *shape), dtype=np.uint8) for size in SHAPES]


def close(ours: Tensor, theirs: Any, bound: float = 1e-6) -> None:
    """Both have the resized bytes and do three operations on them in float32."""
    theirs = torch.tensor(np.asarray(theirs), dtype=torch.float32)
    assert ours.shape == theirs.shape and ours.dtype == torch.float32 and ours.is_contiguous()
    torch.testing.assert_close(ours, theirs, rtol=bound, atol=bound)


@pytest.mark.parametrize(
    "entries",
    [
        {},
        {"resample": 3},
        {"resample": 0},
        {"resample": 1},
        {"do_rescale": False},
        {"do_normalize": False},
        {"do_normalize": False, "do_rescale": False, "resample": 3},
        {"image_mean": MEAN, "image_std": STD},
        {"image_mean": MEAN, "image_std": STD, "resample": 3, "rescale_factor": 1 / 127.5},
    ],
)
@pytest.mark.parametrize("size", [(16, 16), (11, 17)])
def test_as_vit_does(entries: dict[str, Any], size: tuple[int, int]) -> None:
    given = entries | {"size": {"height": size[0], "width": size[1]}}
    ours, theirs = Preprocessor(Config(given), size), ViTImageProcessorPil(**given)
    images = [Image.fromarray(x) for x in pictures(3)]
    close(ours(images), theirs(images)["pixel_values"])
    close(ours(images[0]), theirs(images[0])["pixel_values"])
    assert torch.equal(ours(pictures(3)), ours(images))


def test_size_as_one_number_and_as_nothing() -> None:
    images = [Image.fromarray(x) for x in pictures(3)]
    close(Preprocessor(Config(size=9), (9, 9))(images), ViTImageProcessorPil(size=9)(images)["pixel_values"])
    close(Preprocessor(Config(), (9, 7))(images), ViTImageProcessorPil(size=(9, 7))(images)["pixel_values"])


def test_without_a_resize() -> None:
    image = Image.fromarray(pictures(3)[0])
    theirs = ViTImageProcessorPil(do_resize=False)(image)["pixel_values"]
    close(Preprocessor(Config(do_resize=False), (31, 23))(image), theirs)
    with pytest.raises(ValueError, match=r"the image has \[31, 23\] pixels; this model takes \[8, 8\]"):
        Preprocessor(Config(do_resize=False), (8, 8))(image)


@pytest.mark.parametrize(
    ("edge", "crop"), [(16, (16, 16)), (19, (16, 16)), (16, (13, 11)), (9, (16, 16)), (9, (12, 15)), (10, (13, 13))]
)
def test_shortest_edge_and_centre_crop_as_clip_does(edge: int, crop: tuple[int, int]) -> None:
    """Also where a picture is smaller than the crop, and has zeros around it."""
    given = {
        "size": {"shortest_edge": edge},
        "do_center_crop": True,
        "crop_size": {"height": crop[0], "width": crop[1]},
        "resample": 3,
        "image_mean": MEAN,
        "image_std": STD,
    }
    ours, theirs = Preprocessor(Config(given), crop), CLIPImageProcessorPil(**given)
    for shape in ((3,), (4,), ()):
        images = [Image.fromarray(x) for x in pictures(*shape)]
        close(ours(images), theirs(images)["pixel_values"])


def test_grey_and_transparent_pictures() -> None:
    ours = Preprocessor(Config(), (8, 8))
    for shape, mode in (((), "L"), ((3,), "P"), ((), "1"), ((3,), "CMYK")):
        for x in pictures(*shape):
            image = Image.fromarray(x).convert(mode)
            close(ours(image), ViTImageProcessorPil(size=8)(image.convert("RGB"))["pixel_values"])
    grey = pictures()
    assert torch.equal(ours(grey), ours([np.stack([x] * 3, axis=-1) for x in grey]))
    for x in pictures(4):
        on_white = x[..., :3] * (x[..., 3:] / 255) + 255 * (1 - x[..., 3:] / 255)
        close(ours(x), ViTImageProcessorPil(size=8)(on_white.round().astype(np.uint8))["pixel_values"], 0.02)
    x = pictures(4)[0]
    x[..., 3] = 0
    assert torch.equal(ours(x), torch.ones(1, 3, 8, 8))
    one = Preprocessor(Config(), (8, 8), channels=1)
    assert one(grey).shape == (5, 1, 8, 8)
    assert torch.equal(one(grey), ours(grey)[:, :1])


def test_files(tmp_path: Path) -> None:
    files = [tmp_path / f"{i}.png" for i in range(len(SHAPES))]
    for file, x in zip(files, pictures(3), strict=True):
        Image.fromarray(x).save(file)
    ours = Preprocessor(Config(), (8, 8))
    assert torch.equal(ours(files), ours(pictures(3)))
    assert torch.equal(ours(str(files[0])), ours([files[0]]))
    assert torch.equal(ours([files[0], pictures(3)[1], Image.open(files[2])]), ours(files[:3]))


def header_of(width: int, height: int) -> bytes:
    """The beginning of a PNG file that says how large it is."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return b"\x89PNG\r\n\x1a\n" + chunks + struct.pack(">I", 4) + b"IDAT" + b"\0" * 8


def test_files_that_are_no_pictures(tmp_path: Path) -> None:
    ours = Preprocessor(Config(), (8, 8))
    Image.fromarray(pictures(3)[0]).save(tmp_path / "good.png")
    whole = (tmp_path / "good.png").read_bytes()
    broken = bytearray(whole)
    broken[37:41] = b"\xff\xfe\xfd\xfc"
    for name, content in (
        ("empty.png", b""),
        ("text.png", b"no picture"),
        ("cut.png", whole[: len(whole) // 2]),
        ("broken.png", bytes(broken)),
        ("huge.png", header_of(60_000, 60_000)),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name} is not an image that can be read: ") as caught:
            ours([tmp_path / "good.png", tmp_path / name])
        assert "\n" not in str(caught.value) and str(caught.value).count(name) == 1
    with pytest.raises(ValueError, match="must be a regular file, got a folder"):
        ours(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"nowhere\.png"):
        ours(tmp_path / "nowhere.png")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (3, "images must be .* got 3"),
        ([], r"images must be .* got \[\]"),
        ([3], "an image must be .* got 3"),
        (np.zeros((4, 4, 3)), r"array .* got float64 \(4, 4, 3\)"),
        (np.zeros((3, 4, 5), np.uint8), r"got uint8 \(3, 4, 5\)"),
        (np.zeros((4, 4, 1), np.uint8), r"got uint8 \(4, 4, 1\)"),
        (np.zeros(4, np.uint8), r"got uint8 \(4,\)"),
        (np.zeros((2, 4, 4, 3), np.uint8), r"got uint8 \(2, 4, 4, 3\)"),
    ],
)
def test_what_is_no_picture(given: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        Preprocessor(Config(), (8, 8))(given)


def test_a_model_reads_its_own_settings(tmp_path: Path) -> None:
    write(make("ViTForImageClassification", VIT | {"image_size": (8, 12), "num_labels": 3}), tmp_path)
    images = [Image.fromarray(x) for x in pictures(3)]
    plain = load(tmp_path)
    close(plain.preprocessor(images), ViTImageProcessorPil(size=(8, 12))(images)["pixel_values"])
    theirs = ViTImageProcessorPil(size={"height": 8, "width": 12}, resample=3, image_mean=MEAN, image_std=STD)
    theirs.save_pretrained(tmp_path)
    model = load(tmp_path)
    close(model.preprocessor(images), theirs(images)["pixel_values"])
    assert not torch.equal(model.preprocessor(images), plain.preprocessor(images))
    with torch.no_grad():
        assert model(model.preprocessor(images)).shape == (5, 3)
    assert model.labels == ["LABEL_0", "LABEL_1", "LABEL_2"]
