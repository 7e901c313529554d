"""Recordings on disk: what is read is what was seen, and a save that is stopped leaves the old one or the new one."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import regard
from regard import ALiBi, Causal, Observe, Padding, RelativeKeys, Window
from regard.interp import Recording, load_recording, watch
from regard.nn import Decoder, Encoder


def seen_by(observe: Observe, **options) -> Recording:
    torch.manual_seed(0)
    model = Decoder(12, heads=3, layers=2, vocab=37, **options).eval()
    with torch.no_grad(), watch(model, observe) as seen:
        model(torch.randint(37, (2, 7)), padding=[7, 5])
        model(torch.randint(37, (2, 7)))
    return seen


def same(a: Recording, b: Recording) -> None:
    assert list(a) == list(b)
    for path, calls in a.calls.items():
        assert len(calls) == len(b.calls[path])
        for x, y in zip(calls, b.calls[path], strict=True):
            assert (x.n, x.m, x.observe) == (y.n, y.m, y.observe)
            for field in fields(x):
                one, other = getattr(x, field.name), getattr(y, field.name)
                if isinstance(one, Tensor):
                    assert torch.equal(one, other) and one.dtype == other.dtype, field.name


ASKED = {
    "rows": Observe(),
    "all": Observe(map=4, profile=2, key_mass=True, top=2, sink=2, local=3),
    "kept": Observe(map=4, keep=True),
}


@pytest.mark.parametrize("asked", ASKED)
def test_what_is_read_is_what_was_seen(asked: str, tmp_path: Path) -> None:
    seen = seen_by(ASKED[asked])
    seen.save(tmp_path / "a", tokens=["é", *"bcdefg"], note=3)
    again = load_recording(tmp_path / "a")
    same(seen, again)
    assert (
        again.metadata["model"] == "Decoder"
        and again.metadata["tokens"] == ["é", *"bcdefg"]
        and again.metadata["note"] == 3
    )
    assert again.metadata["versions"]["torch"] == torch.__version__
    assert torch.equal(again["blocks.1.attention"].mean("entropy"), seen["blocks.1.attention"].mean("entropy"))
    again.save(tmp_path / "b")
    same(load_recording(tmp_path / "b"), seen)


@pytest.mark.parametrize("position", [ALiBi(), RelativeKeys(4, 2, heads=3)], ids=["alibi", "keys"])
def test_exact_weights_come_back(position, tmp_path: Path) -> None:
    seen = seen_by(Observe(keep=True), position=position)
    seen.save(tmp_path)
    again = load_recording(tmp_path)
    for path in seen:
        for call, other in zip(seen.calls[path], again.calls[path], strict=True):
            for batch in (0, 1):
                assert torch.equal(call.weights(1, batch=batch), other.weights(1, batch=batch))
                assert torch.equal(call.tile(2, size=3, batch=batch), other.tile(2, size=3, batch=batch))


def test_options_of_every_kind_come_back(tmp_path: Path) -> None:
    q = k = v = torch.randn(2, 3, 5, 4)
    calls = [
        regard.attention(q, k, v, scale=math.inf, observe=Observe(keep=True)),
        regard.attention(q, k, v, softcap=2.0, sinks=torch.randn(3), observe=Observe(keep=True)),
        regard.attention(q, k, v, mask=Causal() & Window(2) & Padding([5, 3]), observe=Observe(keep=True)),
        regard.attention(q, k, v, mask=torch.rand(5, 5) < 0.7, bias=torch.randn(5, 5), observe=Observe(keep=True)),
        regard.attention(q[:, :, :4], k[:, :, :4], v[:, :, :4], observe=Observe(grid=(2, 2), profile=(1, 1))),
    ]
    seen = Recording({str(i): [observation] for i, (_, observation) in enumerate(calls)})
    seen.save(tmp_path)
    again = load_recording(tmp_path)
    same(seen, again)
    for place in "0123":
        assert torch.equal(seen[place].weights(1), again[place].weights(1))


def test_long_inputs_store_nothing_of_their_square(tmp_path: Path) -> None:
    model = Encoder(8, heads=2, layers=1).eval()
    n = 3000
    with torch.no_grad(), watch(model, Observe(map=16, keep=True)) as seen:
        model(torch.randn(1, n, 8))
    seen.save(tmp_path)
    size = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert size < 2 * n * n / 10
    with safe_open(next(tmp_path.glob("*.safetensors")), framework="pt") as opened:
        assert all(opened.get_slice(name).get_shape().count(n) <= 1 for name in opened.keys())  # noqa: SIM118


def test_folders_that_are_no_recordings(tmp_path: Path) -> None:
    seen = seen_by(Observe())
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(FileNotFoundError, match="is not a recording"):
            load_recording(path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="is not a recording"):
        seen.save(tmp_path / "mine")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError, match="is not a recording"):
        seen.save(tmp_path / "file")
    seen.save(tmp_path / "a")
    described = json.loads((tmp_path / "a" / "recording.json").read_text())
    values = tmp_path / "a" / described["values"]
    whole = values.read_bytes()
    for content in (whole[:100], whole[: len(whole) // 2], b""):
        values.write_bytes(content)
        with pytest.raises(ValueError, match="not a complete recording") as error:
            load_recording(tmp_path / "a")
        assert "\n" not in str(error.value)
    values.write_bytes(whole)
    foreign = ["{", "[]", '{"kind": "x"}', '{"kind": "regard recording"}', "{}"]
    foreign += [json.dumps(described | change) for change in ({"format": 99}, {"values": "../x"}, {"places": 3})]
    for text in foreign:
        (tmp_path / "a" / "recording.json").write_text(text)
        with pytest.raises(ValueError, match="not a complete recording") as error:
            load_recording(tmp_path / "a")
        assert "\n" not in str(error.value)


def test_a_save_that_fails_leaves_the_old_recording(tmp_path: Path, monkeypatch) -> None:
    old, new = seen_by(Observe()), seen_by(Observe(map=4))
    old.save(tmp_path)
    real, left = os.replace, [1]

    def replace(*args):
        left[0] -= 1
        if left[0] < 0:
            raise OSError("no space")
        return real(*args)

    for allowed in (0, 1):
        left[0] = allowed
        monkeypatch.setattr(os, "replace", replace)
        with pytest.raises(OSError, match="no space"):
            new.save(tmp_path)
        monkeypatch.setattr(os, "replace", real)
        same(load_recording(tmp_path), old)
        assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")]
    new.save(tmp_path)
    same(load_recording(tmp_path), new)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_save_that_is_killed_leaves_a_whole_recording(tmp_path: Path) -> None:
    """Killed with −9 again and again while it saves two recordings in turn."""
    code = f"""
        import itertools, sys, torch
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_interp_recording import seen_by, Observe
        both = [seen_by(Observe(keep=True)), seen_by(Observe(map=64, keep=True))]
        both[0].save({str(tmp_path)!r})
        print("ready", flush=True)
        for seen in itertools.cycle(both):
            seen.save({str(tmp_path)!r})
    """
    for pause in (0.0, 0.013, 0.05):
        process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        time.sleep(pause)
        process.send_signal(signal.SIGKILL)
        process.wait()
        found = load_recording(tmp_path)
        assert len(found) == 2 and found["blocks.0.attention"].entropy is not None


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("observe", "heads"), [3], "1 heads and 3 counts"),
        (("observe", "heads"), [0, 1, 2, 3], "4 heads and 3 counts"),
        (("n",), -5, "n and m must be at least 0"),
        (("n",), 10**9, "has shape"),
        (("n",), "5", "n and m must be"),
        (("m",), 6, "has shape"),
        (("observe", "map"), "x", "Observe map"),
    ],
)
def test_a_recording_that_lies_about_itself(place: tuple[str, ...], value: object, said: str, tmp_path: Path) -> None:
    """It may come from anybody: sizes that are not those of its numbers are one clear error."""
    seen_by(ASKED["all"]).save(tmp_path / "r")
    file = tmp_path / "r" / "recording.json"
    about = json.loads(file.read_text())
    inside = about["places"][0]["calls"][0]
    for name in place[:-1]:
        inside = inside[name]
    inside[place[-1]] = value
    file.write_text(json.dumps(about))
    with pytest.raises(ValueError, match="is not a complete recording") as refused:
        load_recording(tmp_path / "r")
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_a_recording_may_say_anything_about_itself(tmp_path: Path) -> None:
    seen = seen_by(ASKED["rows"])
    seen.metadata |= {"calls": "x", "self": 3, "cross": 5}
    seen.save(tmp_path / "r")
    again = load_recording(tmp_path / "r")
    same(seen, again)
    assert (again.metadata["calls"], again.metadata["self"]) == ("x", 3) and again.heads()
