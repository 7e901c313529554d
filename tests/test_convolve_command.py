"""``regard convolve``: what it prints, draws and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.commands import command
from torch import nn

from regard.convolution import to_attention
from regard.convolution._verify import verify
from regard.models import bundled

HERE, BUNDLED = Path(__file__), bundled() / "model.safetensors"
Patch, Captured = pytest.MonkeyPatch, pytest.CaptureFixture[str]


def test_heads_are_listed_and_both_agree(monkeypatch: Patch, capsys: Captured) -> None:
    code, out, err = command(monkeypatch, capsys, "convolve", "--size", "6x7", "--channels", 2)
    lines = out.splitlines()
    assert code == 0 and not err
    assert lines[0] == "Conv2d(2, 8, kernel_size=(3, 3), stride=(1, 1), padding=same)"
    assert lines[1].startswith("as attention: 9 heads, hard")
    rows = [line.split() for line in lines if line.split()[:1] and line.split()[0].isdigit()]
    assert len(rows) == 9
    assert rows[5][1:5] == ["0,", "1", "0,", "1"]  # offset, and where it looks
    assert "equal" in lines[-2] and "allowed 1.0e-12" in lines[-2]
    assert max(map(len, lines)) <= 80


def test_json_has_the_same(monkeypatch: Patch, capsys: Captured) -> None:
    options = ("--kernel", "4", "--stride", 2, "--padding", 3, "--mode", "circular", "--size", 9, "--dense", "--json")
    code, out, _ = command(monkeypatch, capsys, "convolve", *options)
    told = json.loads(out)
    assert code == 0 and told["holds"] and told["outputs"] < 1e-12 and told["alpha"] is None
    assert [row["offset"] for row in told["heads"]] == [[-3], [-2], [-1], [0]]
    assert all(row["offset"] == row["looks at"] and row["weight there"] == 1 for row in told["heads"])
    assert set(told["seconds"]) == {"convolution", "attention"}


def test_soft_heads_stay_under_the_bound(monkeypatch: Patch, capsys: Captured) -> None:
    options = ("--alpha", 5, "--precision", "float32", "--size", "6x6", "--groups", 2, "--channels", 4)
    code, out, _ = command(monkeypatch, capsys, "convolve", *options)
    assert code == 0 and "by the bound: holds" in out


def test_trained_kernels_are_read_and_drawn(monkeypatch: Patch, capsys: Captured, tmp_path: Path) -> None:
    conv = nn.Conv2d(2, 3, (2, 3))
    save_file({"c.weight": conv.weight.detach(), "c.bias": conv.bias.detach()}, tmp_path / "w.safetensors")
    given = ("--weights", tmp_path / "w.safetensors", "--name", "c.weight", "--plot", tmp_path / "k.png")
    code, out, _ = command(monkeypatch, capsys, "convolve", *given, "--size", "5x5", "--json")
    told = json.loads(out)
    assert code == 0 and told["convolution"].startswith("Conv2d(2, 3, kernel_size=(2, 3)")
    norms = conv.weight.detach().flatten(2).flatten(0, 1).norm(dim=0)
    torch.testing.assert_close(torch.tensor([row["norm"] for row in told["heads"]]), norms)
    assert (tmp_path / "k.png").read_bytes().startswith(b"\x89PNG")
    line = ("--kernel", 3, "--size", 5, "--plot", tmp_path / "line.png")
    assert command(monkeypatch, capsys, "convolve", *line)[0] == 0


def test_what_is_wrong_ends_with_1(monkeypatch: Patch, capsys: Captured) -> None:
    import regard.cli.convolve as module

    def other(conv: nn.Conv2d, **options: object) -> nn.Module:
        layer = to_attention(conv)
        layer.kernel.data[0, 0, 0, 0] += 1e-6
        return layer

    monkeypatch.setattr(module, "to_attention", other)
    code, out, _ = command(monkeypatch, capsys, "convolve", "--size", "5x5")
    assert code == 1 and "WRONG" in out


def test_a_wrong_offset_is_seen(monkeypatch: Patch) -> None:
    conv, x = nn.Conv2d(2, 2, 3, padding=1).double(), torch.randn(1, 2, 5, 5).double()
    layer = to_attention(conv)
    with torch.no_grad():
        layer.attention.q_proj.weight.view(9, 3, 3)[4, 2, 0] += 2
    where, weight = layer.measured_offsets(x)
    assert not torch.equal(where[4].round(), torch.zeros(2).double())
    assert torch.equal(where[0], torch.tensor([-1.0, -1.0]).double()) and weight[0] == 1
    assert not verify(conv, layer, x).holds


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--kernel", "0"), "--kernel must be at least 1"),
        (("--kernel", "3x3x3"), "--kernel must be one integer or two"),
        (("--kernel", "3", "--padding", "1x2"), "the kernel has one axis"),
        (("--stride", "0"), "--stride must be at least 1"),
        (("--groups", "2"), "--groups must divide --channels, 3, and --out, 8"),
        (("--kernel", "64x64"), "--kernel must have at most 1,024 taps"),
        (("--size", "1000x1000"), "--size must have at most"),
        (("--channels", "99999"), "--channels"),
        (("--mode", "foo"), "--mode must be one of"),
        (("--precision", "float16"), "--precision must be"),
        (("--alpha", "-1"), "--alpha must be between"),
        (("--weights", str(HERE), "--name", "x"), f"--weights must be a safetensors file, got {HERE}"),
        (("--weights", str(BUNDLED)), "--name must be a kernel of model.safetensors: none"),
    ],
)
def test_refusals_are_one_line(monkeypatch: Patch, capsys: Captured, options: tuple[str, ...], said: str) -> None:
    code, out, err = command(monkeypatch, capsys, "convolve", *options)
    assert code == 2 and not out
    assert len(err) == 1 and said in err[0]
