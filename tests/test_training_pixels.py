"""Pixels as a task: heads that go by place alone, the controls beside them, and MNIST's own files."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from typer.testing import CliRunner

from regard._observables import Observe
from regard.cli.commands import app
from regard.models import describe, load
from regard.training._optimizer import create_optimizer
from regard.training._train import load_trained_model, train
from regard.training.image_models.relative_attention import RelativeAttention
from regard.training.image_models.resnet import ResNet
from regard.training.tasks import mnist_files
from regard.training.tasks.pixels import PixelsTask

KINDS = ("quadratic", "relative", "content", "resnet")
SMALL = {
    **{"model.d": 18, "model.heads": 9, "model.layers": 2, "model.hidden": 18, "model.value": 2},
    **{"steps": 3, "batch": 6, "evaluate": 3, "save": 3, "warmup": 1},
}
STILL = {"data.shift": 0.0, "data.turn": 0.0, "data.zoom": 0.0}


def made(prepared: Path | None = None, **changes: object) -> PixelsTask:
    task = PixelsTask(PixelsTask.default_recipe.with_changes({"batch": 12, **changes}), prepared)
    task.prepare()
    task.open()
    return task


def fresh(task: PixelsTask) -> nn.Module:
    torch.manual_seed(0)
    return task.model().eval()


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_saved_and_read_back(kind: str, tmp_path: Path) -> None:
    task = made(**{"model.kind": kind})
    model = fresh(task)
    task.save(model, tmp_path)
    back = load(tmp_path)
    assert isinstance(back, ResNet if kind == "resnet" else RelativeAttention)
    images = task.held_out_batches()[0]["images"][:4]
    with torch.no_grad():
        logits = model(images)
        assert torch.equal(back(images), logits)
        assert torch.equal(model.head(model.hidden_states(images).mean(1)), logits)
    assert logits.shape == (4, 10)
    assert len(set(map(tuple, logits.tolist()))) == 4  # pictures are told apart
    assert back.labels == [str(i) for i in range(10)]
    fixed = [[name for name, p in one.named_parameters() if not p.requires_grad] for one in (model, back)]
    assert fixed[0] == fixed[1] and len(fixed[0]) == (12 if kind in ("quadratic", "relative") else 0)


@pytest.mark.usefixtures("full_tiles")
def test_quadratic_models_read_pictures_of_any_size() -> None:
    model = fresh(made(**{"model.layers": 1}))
    larger = model.resized(11)
    assert isinstance(larger, RelativeAttention) and larger.vit.grid == (11, 11) and not larger.training
    _, seen = larger(torch.randn(1, 1, 11, 11), observe=Observe(grid=(11, 11), keep=True))
    centers, alpha = (getattr(model.attentions[0].position, name).double() for name in ("centers", "alpha"))
    cells = torch.cartesian_prod(torch.arange(11), torch.arange(11))
    apart = (cells - cells[60]).double() - centers[3]
    wanted = (-alpha[3] * apart.square().sum(-1)).softmax(-1)
    found = seen["vit.encoder.blocks.0.attention"].weights(3, 60).double().flatten()
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="encoding is 'relative'"):
        fresh(made(**{"model.kind": "relative"})).resized(11)


@pytest.mark.usefixtures("full_tiles")
def test_quadratic_heads_are_looked_at_and_described(tmp_path: Path) -> None:
    task = made()
    model = fresh(task)
    task.save(model, tmp_path / "model")
    Image.fromarray(task.data.pixels[3, 0].numpy()).save(tmp_path / "three.png")
    back = load(tmp_path / "model")
    given = back.preprocessor(tmp_path / "three.png")
    assert torch.allclose(given, task._select(torch.tensor([3]))[0], atol=1e-6)  # read as it was trained on
    with torch.no_grad():
        logits, seen = back(given, observe=Observe(map=4))
        torch.testing.assert_close(logits, model(given))
    assert list(seen) == [f"vit.encoder.blocks.{i}.attention" for i in range(6)]
    assert describe(back).parameters == sum(p.numel() for p in model.parameters())
    run = CliRunner().invoke
    done = run(app, ["look", str(tmp_path / "model"), "--image", str(tmp_path / "three.png"), "--most", "3"])
    assert done.exit_code == 0, done.output
    assert "54 heads of vit.encoder.blocks.*.attention" in done.output
    done = run(app, ["describe", str(tmp_path / "model")])
    assert done.exit_code == 0, done.output
    assert "9 heads" in done.output


def test_a_residual_network_is_described(tmp_path: Path) -> None:
    task = made(**{"model.kind": "resnet"})
    model = fresh(task)
    task.save(model, tmp_path)
    assert sum(isinstance(x, nn.Conv2d) and x.kernel_size == (3, 3) for x in model.modules()) == 6
    # Patches, three blocks of two convolutions and two norms, a last norm, a head.
    wanted = 36 * 2 + 3 * (2 * 9 * 36 * 36 + 2 * 2 * 36) + 2 * 36 + 10 * 37
    assert sum(p.numel() for p in model.parameters()) == wanted
    done = CliRunner().invoke(app, ["describe", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert f"{wanted:,}" in done.output
    with torch.no_grad():
        _, seen = load(tmp_path)(task.held_out_batches()[0]["images"][:2], observe=Observe(map=4))
    assert seen == {}


def weight_tensors(kind: str) -> tuple[RelativeAttention, list[Tensor]]:
    """The weights ``[pictures, heads, 64, 64]`` of every layer, on three pictures."""
    task = made(**{"model.kind": kind, "model.layers": 2})
    model = fresh(task)
    assert isinstance(model, RelativeAttention)
    with torch.no_grad():
        _, seen = model(task.held_out_batches()[0]["images"][:3], observe=Observe(keep=True))
    found = [
        torch.stack([torch.stack([x.weights(h, batch=b) for h in range(9)]) for b in range(3)]) for x in seen.values()
    ]
    return model, found


@pytest.mark.usefixtures("full_tiles")
@pytest.mark.parametrize("kind", ["quadratic", "relative"])
def test_heads_by_place_look_alike_at_every_picture(kind: str) -> None:
    _, layers = weight_tensors(kind)
    for layer in layers:
        assert torch.equal(layer[0], layer[1])
        assert torch.equal(layer[0], layer[2])
        assert not torch.allclose(layer[0, 0], layer[0, 1])  # heads differ
    assert not torch.allclose(layers[0], layers[1])


@pytest.mark.usefixtures("full_tiles")
def test_heads_by_content_look_at_pictures() -> None:
    _, layers = weight_tensors("content")
    for layer in layers:
        assert not torch.allclose(layer[0], layer[1], atol=1e-4)


@pytest.mark.usefixtures("full_tiles")
def test_quadratic_weights_are_the_formula_s() -> None:
    model, layers = weight_tensors("quadratic")
    at = torch.cartesian_prod(torch.arange(8.0), torch.arange(8.0))
    delta = at[None] - at[:, None]  # [query, key, 2]
    for layer, found in zip(model.attentions, layers, strict=True):
        position = layer.position
        far = (delta - position.centers[:, None, None]).square().sum(-1)
        wanted = (-position.alpha[:, None, None] * far).softmax(-1)
        torch.testing.assert_close(found[0], wanted, rtol=1e-4, atol=1e-6)


def test_first_centres_and_widths_are_as_the_recipe_says() -> None:
    model = fresh(made(**{"model.spread": 20.0, "model.alpha": 0.25}))
    centers = torch.cat([layer.position.centers for layer in model.attentions])
    assert 15 < float(centers.detach().std()) < 25
    assert all(bool((layer.position.alpha == 0.25).all()) for layer in model.attentions)
    model = fresh(made(**{"model.spread": 0.0}))
    assert all(bool((layer.position.centers == 0).all()) for layer in model.attentions)


def test_training_moves_centres_and_no_queries(tmp_path: Path) -> None:
    result = train("pixels", tmp_path / "run", {**SMALL, "model.spread": 0.0})
    model = load_trained_model(tmp_path / "run")
    assert isinstance(model, RelativeAttention)
    assert result.ended == "steps"
    assert (tmp_path / "run" / "evolution").is_dir()
    assert len(model.attentions) == 2
    for layer in model.attentions:
        for projection in (layer.q_proj, layer.k_proj):
            assert not projection.weight.requires_grad
            assert bool((projection.weight == 0).all())
        assert layer.v_proj.weight.requires_grad
        assert bool((layer.position.centers != 0).all())  # where they began
        assert bool((layer.position.alpha != 1).all())
    for x, y in zip(model.parameters(), load(tmp_path / "run" / "model").parameters(), strict=True):
        assert torch.equal(x, y)


def test_a_residual_network_is_trained_and_not_recorded(tmp_path: Path) -> None:
    result = train("pixels", tmp_path / "run", {**SMALL, "model.kind": "resnet", "record": 1.0})
    assert result.recording_share is None
    assert not (tmp_path / "run" / "evolution").exists()
    told = json.loads((tmp_path / "run" / "result.json").read_text())
    assert told["watching"] is None
    assert told["steps"] == 3
    assert isinstance(load(tmp_path / "run" / "model"), ResNet)


def test_decay_shrinks_matrices_and_moves_no_centres() -> None:
    task = made(**{"decay": 0.5, "rate": 0.1})
    model = fresh(task)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    create_optimizer(model, task.recipe).step()
    shrunk = set()
    for name, p in model.named_parameters():
        if p.ndim > 1 and p.requires_grad and not name.endswith("position.centers"):
            torch.testing.assert_close(p.detach(), before[name] * (1 - 0.1 * 0.5))
            shrunk.add(name.split(".")[-2])
        else:
            assert torch.equal(p, before[name]), name
    assert shrunk == {"patches", "v_proj", "out_proj", "up", "down", "head"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.kind": "vit"}, "model.kind is 'vit'; it must be quadratic or relative or content or resnet"),
        ({"model.spread": -1.0}, "model.spread is -1"),
        ({"model.spread": 1e6}, "model.spread is 1e+06"),
        ({"model.alpha": 0.0}, "model.alpha is 0; it must be a number > 0"),
        ({"model.alpha": -2.0}, "model.alpha is -2"),
        ({"model.alpha": 1e6}, "model.alpha is 1e+06"),
        ({"model.kind": "resnet", "model.layers": 3}, "model.layers is 3; it must be even"),
        ({"model.value": 0}, "model.value is 0"),
        ({"model.value": 2**20}, "model.layers=6, model.heads=9, model.value=1048576 make about 4e+09 parameters"),
        ({"model.kind": "resnet", "model.d": 5400}, "model.d=5400, model.layers=6 make about 2e+09 parameters"),
        ({"model.patch": 3}, "model.patch is 3; it must divide data.size, which is 8"),
    ],
)
def test_what_no_model_has_is_refused_in_a_line(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        PixelsTask(PixelsTask.default_recipe.with_changes(changes))
    assert "\n" not in str(error.value)


def test_a_residual_network_has_no_hidden_width() -> None:
    PixelsTask(PixelsTask.default_recipe.with_changes({"model.kind": "resnet", "model.hidden": 0}))


@pytest.mark.parametrize(
    ("kind", "old", "new", "message"),
    [
        ("quadratic", '"encoding": "quadratic"', '"encoding": "fourier"', "encoding is 'fourier'"),
        ("content", '"heads": 9', '"heads": 5', "heads is 5; it must divide d, which is 36"),
        ("quadratic", '"patch": 1', '"patch": 3', "patch is 3; it must divide side, which is 8"),
        ("resnet", '"convolutions": 6', '"convolutions": 5', "convolutions is 5"),
        ("quadratic", '"heads": 9', '"heads": 3', "has shape"),
    ],
)
def test_a_changed_config_is_refused(kind: str, old: str, new: str, message: str, tmp_path: Path) -> None:
    task = made(**{"model.kind": kind})
    task.save(fresh(task), tmp_path)
    text = (tmp_path / "config.json").read_text()
    assert old in text
    (tmp_path / "config.json").write_text(text.replace(old, new))
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        load(tmp_path)
    assert "\n" not in str(error.value)


# MNIST's files.
SIDE, TRAIN, TEST = 12, 20, 7


def packed(values: Tensor) -> bytes:
    """A tensor of bytes as a file of MNIST."""
    sizes = b"".join(size.to_bytes(4, "big") for size in values.shape)
    return bytes((0, 0, 8, values.ndim)) + sizes + bytes(values.flatten().tolist())


def mnist(folder: Path, suffix: str = "") -> dict[str, tuple[Tensor, Tensor]]:
    """Four files in a folder, and what they hold."""
    draw = torch.Generator().manual_seed(0)
    folder.mkdir(exist_ok=True)
    held = {}
    for part, many in (("train", TRAIN), ("t10k", TEST)):
        images = torch.randint(256, (many, SIDE, SIDE), generator=draw)
        classes = torch.arange(many) * 3 % 10
        held[part] = images, classes
        for name, values in (("images-idx3-ubyte", images), ("labels-idx1-ubyte", classes)):
            found = packed(values)
            (folder / f"{part}-{name}{suffix}").write_bytes(gzip.compress(found) if suffix else found)
    return held


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_mnist_is_read_byte_by_byte(suffix: str, tmp_path: Path) -> None:
    held = mnist(tmp_path / "mnist", suffix)
    changes = {"data.folder": str(tmp_path / "mnist"), "data.size": SIDE, "batch": TRAIN, "model.patch": 3, **STILL}
    task = made(tmp_path / "prepared", **changes)
    assert task.data.labels == [str(i) for i in range(10)]
    assert task.grid == (4, 4)
    assert torch.equal(task.data.held_out, torch.arange(TRAIN + TEST) >= TRAIN)
    assert torch.equal(task.data.pixels.long(), torch.cat([held["train"][0], held["t10k"][0]]).unsqueeze(1))
    assert torch.equal(task.data.classes, torch.cat([held["train"][1], held["t10k"][1]]))
    (checks,) = task.held_out_batches()
    assert torch.equal(((checks["images"] + 1) * 127.5).round().long().squeeze(1), held["t10k"][0])
    assert torch.equal(checks["labels"], held["t10k"][1])
    # An epoch is every training picture once, each with its own class.
    batch = task.batch(0)
    rows = ((batch["images"] + 1) * 127.5).round().long().flatten(1).tolist()
    known = dict(zip(map(tuple, held["train"][0].flatten(1).tolist()), held["train"][1].tolist(), strict=True))
    assert {tuple(row): label for row, label in zip(rows, batch["labels"].tolist(), strict=True)} == known
    assert len(known) == TRAIN
    with torch.no_grad():
        assert fresh(task)(checks["images"]).shape == (TEST, 10)
    # A run keeps what it began with.
    for file in (tmp_path / "mnist").iterdir():
        file.unlink()
    again = made(tmp_path / "prepared", **changes)
    assert torch.equal(again.data.pixels, task.data.pixels)
    assert torch.equal(again.data.held_out, task.data.held_out)


def test_a_plain_file_goes_before_a_packed_one(tmp_path: Path) -> None:
    held = mnist(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(packed(torch.zeros(TRAIN, dtype=torch.long))))
    _, classes = mnist_files.read_mnist(tmp_path, "train")
    assert torch.equal(classes.long(), held["train"][1])


def cut(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-1])


def written(name: str, found: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(found)


def one_class(folder: Path) -> None:
    for part, many in (("train", TRAIN), ("t10k", TEST)):
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(packed(torch.zeros(many).long()))


def instead(name: str, found: bytes) -> Callable[[Path], object]:
    """A packed file in the place of a plain one."""

    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / f"{name}.gz").write_bytes(found)

    return change


IMAGES, LABELS = "train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
GOOD = gzip.compress(packed(torch.randint(256, (TEST,), generator=torch.Generator().manual_seed(1))))
BROKEN = GOOD[:10] + bytes(x ^ 255 for x in GOOD[10:16]) + GOOD[16:]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / LABELS).unlink(), f"/mnist has neither {LABELS}"),
        (written(LABELS, packed(torch.zeros(TEST, 1, 1).long())), f"{LABELS} does not start as a file of MNIST does"),
        (written(IMAGES, b"\x89PNG and more"), f"{IMAGES} does not start as a file of MNIST does: 89 50 4e 47"),
        (written(IMAGES, b""), f"{IMAGES} does not start as a file of MNIST does: it is empty"),
        (written(IMAGES, bytes((0, 0, 8, 3, 0, 0))), f"{IMAGES} does not start as a file of MNIST does"),
        (cut(IMAGES), f"{IMAGES} claims 20 × 12 × 12 bytes, but has 2,879"),
        (written(LABELS, packed(torch.zeros(TEST).long()) + b"\0"), f"{LABELS} claims 7 bytes, but has 8"),
        (written(LABELS, packed(torch.zeros(6).long())), "/mnist: t10k has 7 images and 6 classes"),
        (written(IMAGES, packed(torch.zeros(0, 12, 12).long())), "/mnist: train has 0 images and 20 classes"),
        (one_class, "of class 0"),
        (instead(LABELS, GOOD[:-9]), f"{LABELS}.gz cannot be read"),
        (instead(LABELS, BROKEN), f"{LABELS}.gz cannot be read"),
        (instead(LABELS, b"not packed at all"), f"{LABELS}.gz cannot be read"),
        (
            written(IMAGES, packed(torch.zeros(TRAIN, 12, 10).long())),
            "/mnist are 12 × 10",
        ),
    ],
)
def test_files_that_are_not_mnist_s_are_refused_in_a_line(
    change: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    mnist(tmp_path / "mnist")
    change(tmp_path / "mnist")
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        made(**{"data.folder": str(tmp_path / "mnist"), "data.size": SIDE})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.size": 8}, "data.size is 8.*12 × 12"),
        ({"data.size": SIDE, "data.channels": 3}, "data.channels is 3; .*/mnist"),
    ],
)
def test_mnist_has_a_size_and_no_colours(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    mnist(tmp_path / "mnist")
    with pytest.raises(ValueError, match=message) as error:
        made(**{"data.folder": str(tmp_path / "mnist"), **changes})
    assert "\n" not in str(error.value)
