"""The recorder: what it writes is what watching says, it disturbs nothing, keeps to its share, and goes on."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import recorder_worker
from support.checkpoints import make
from support.model_configs import GPT2
from support.probe_tokenizers import in_transformers
from support.recorder_worker import VOCAB, model, probes, record, short, steps
from torch import Tensor, nn

from regard import Observe, watch
from regard.interp import _records as records
from regard.interp._head_atlas import atlas
from regard.interp._head_table import HEAD_COLUMNS
from regard.interp._probes import Probe
from regard.models._tokenizer import ByteTokenizer
from regard.nn import Decoder, VisionTransformer
from regard.training._recorder import Recorder
from regard.training.huggingface import RecorderCallback

pytestmark = pytest.mark.usefixtures("full_tiles")


def same(a: records.Record, b: records.Record, bound: float = 1e-6) -> None:
    assert a.layers == b.layers and a.names == b.names and a.tensors.keys() == b.tensors.keys()
    for name, x in a.tensors.items():
        torch.testing.assert_close(x, b.tensors[name], atol=bound, rtol=bound, equal_nan=True)


# --- what is recorded ------------------------------------------------------------------------------------------------


def test_a_record_is_what_watching_says(tmp_path: Path) -> None:
    asked = probes()
    assert Recorder(model(), tmp_path, probes=asked, map=6, profile=4).step(0)
    found = record(tmp_path)
    made = model().eval()
    with torch.no_grad(), watch(made, Observe(map=6, profile=4)) as seen:
        made(asked[0].ids)
    rows = seen.heads()
    assert found.heads == [(row["path"], row["head"]) for row in rows]
    wanted = torch.tensor([[row[name] for name in HEAD_COLUMNS] for row in rows])
    torch.testing.assert_close(found.tensors["means"], wanted, atol=1e-5, rtol=1e-5)
    for name in ("map", "profile"):
        whole = torch.cat([getattr(seen[path], name) for path in seen])
        torch.testing.assert_close(found.tensors[name], whole, atol=1e-6, rtol=1e-5)
    assert {x.dtype for x in found.tensors.values()} == {torch.float32}
    largest = max(x.numel() for x in found.tensors.values())
    assert largest <= 6 * max(36, 20)  # heads times cells or names, nothing that grows with the text


def test_scores_are_those_of_the_atlas(tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = Decoder(12, heads=3, layers=2, vocab=256)
    Recorder(made, tmp_path, ByteTokenizer()).step(0)
    found = record(tmp_path)
    rows = atlas(made, ByteTokenizer(), control=False).rows
    for at, row in enumerate(rows):
        mine = found.scores(at)
        assert mine.keys() == row["scores"].keys()
        for probe, by_weights in row["scores"].items():
            for weights, values in by_weights.items():
                assert mine[probe][weights] == pytest.approx(values, rel=1e-5, abs=1e-5, nan_ok=True)


def attending(kind: str) -> tuple[nn.Module, Callable[..., Any]]:
    """Models of torch alone, as people write them, and how they are called."""
    torch.manual_seed(0)

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.qkv, self.out = nn.Embedding(VOCAB, 12), nn.Linear(12, 36), nn.Linear(12, VOCAB)

        def forward(self, ids: Tensor) -> Tensor:
            q, k, v = (x.unflatten(-1, (3, 4)).transpose(1, 2) for x in self.qkv(self.embed(ids)).chunk(3, -1))
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.3 if self.training else 0)
            return self.out(attended.transpose(1, 2).flatten(2))

    if kind == "sdpa":
        return Own(), lambda m, ids: m(ids)
    encoder = nn.Sequential(nn.Embedding(VOCAB, 12), nn.TransformerEncoderLayer(12, 3, 24, batch_first=True))
    return nn.Sequential(*encoder, nn.Linear(12, VOCAB)), lambda m, ids: m(ids)


@pytest.mark.parametrize("kind", ["ours", "sdpa", "multihead"])
@pytest.mark.parametrize("cast", [False, True])
def test_training_is_left_alone(kind: str, cast: bool, tmp_path: Path) -> None:
    """The same weights, random numbers and modes with and without the recorder, in a user's own loop."""
    ends = []
    for watched in (False, True):
        if kind == "ours":
            torch.manual_seed(0)
            made, call = Decoder(12, heads=3, layers=2, vocab=VOCAB, dropout=0.2), None
        else:
            made, call = attending(kind)
        next(made.children()).eval()  # a part that its user keeps in eval mode
        optimizer = torch.optim.AdamW(made.parameters(), 1e-2)
        recorder = Recorder(made, tmp_path / kind, probes=probes(), call=call, share=None) if watched else None
        assert recorder is None or recorder.step(0)
        torch.manual_seed(7)
        for k in range(1, 4):
            ids = torch.randint(VOCAB, (4, 10))
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                logits = made(ids)
                loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
                loss.backward()
                if recorder is not None and k == 2:
                    assert recorder.step(k)  # within autocast, and with gradients there
            optimizer.step()
            optimizer.zero_grad()
            if recorder is not None and k != 2:
                assert recorder.step(k)
        modes = [module.training for module in made.modules()]
        ends.append((modes, torch.rand(3), *made.state_dict().values()))
    assert ends[0][0] == ends[1][0] and False in ends[0][0] and True in ends[0][0]
    assert all(torch.equal(a, b) for a, b in zip(ends[0][1:], ends[1][1:], strict=True))
    assert steps(tmp_path / kind) == [0, 1, 2, 3]
    assert not record(tmp_path / kind, 2).tensors["map"].isnan().any()


def test_pictures(tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = VisionTransformer(12, 4, 3, 12, heads=3, layers=2)
    images = torch.randn(3, 3, 12, 12)
    Recorder(made, tmp_path / "own", images=images, grid=(3, 3), profile=2).step(0)
    found = record(tmp_path / "own")
    assert found.tensors["profile"].shape == (6, 5, 5) and found.grid == (3, 3) and found.layers[0].n == 10
    assert set(found.names) == {"natural raw", "natural clean"}
    probe = [Probe("natural", images, torch.zeros(0, dtype=torch.bool))]
    Recorder(made, tmp_path / "probes", probes=probe, grid=(3, 3), profile=2).step(0)
    same(found, record(tmp_path / "probes"), 0)
    with pytest.raises(ValueError, match="give the model's own"):
        Recorder(made, tmp_path / "wrong", images=images, grid=(1, 1)).step(0)
    assert not (tmp_path / "wrong").exists()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    for name, made in (("exact", model()), ("other", model().to(dtype))):
        Recorder(made, tmp_path / name, probes=probes()).step(0)
        assert {x.dtype for x in made.parameters()} == {dtype if name == "other" else torch.float32}
    a, b = (record(tmp_path / name).tensors["means"] for name in ("exact", "other"))
    torch.testing.assert_close(a, b, atol=1e-5 if dtype == torch.float64 else 0.1, rtol=1e-5)


def test_a_model_that_is_compiled_or_has_no_attention(tmp_path: Path) -> None:
    wrapped = nn.Module()
    wrapped._orig_mod = model()  # as torch.compile wraps one
    Recorder(wrapped, tmp_path / "wrapped", probes=probes()).step(0)
    Recorder(model(), tmp_path / "plain", probes=probes()).step(0)
    same(record(tmp_path / "wrapped"), record(tmp_path / "plain"), 0)
    with pytest.raises(ValueError, match="called no attention"):
        Recorder(nn.Embedding(VOCAB, 3), tmp_path / "none", probes=probes()).step(0)


# --- files -----------------------------------------------------------------------------------------------------------


def test_who_is_stopped_while_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = short(tmp_path, share=None)
    mine.step(0)

    def stopped(tensors: Any, file: Path, metadata: Any) -> None:
        Path(file).write_bytes(b"half of it")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(records, "save_tensors", stopped)
        mine.step(1)
    assert os.listdir(tmp_path) == ["step-00000000.safetensors"]
    assert mine.step(1)


def test_who_is_killed_while_writing_leaves_no_half_record(tmp_path: Path) -> None:
    """A process that is killed can tidy up nothing; the next one does."""
    code = """
import os, pathlib, signal, sys
from regard.interp import _records as records
from support import recorder_worker
from regard.training._recorder import Recorder
def killed(tensors, file, metadata):
    pathlib.Path(file).write_bytes(b"half of it")
    os.kill(os.getpid(), signal.SIGKILL)
mine = Recorder(recorder_worker.model(), sys.argv[1], probes=recorder_worker.probes(), share=None)
mine.step(0)
records.save_tensors = killed
mine.step(1)
"""
    env = os.environ | {"PYTHONPATH": str(Path(recorder_worker.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code, tmp_path], env=env, check=False)
    assert done.returncode != 0
    assert steps(tmp_path) == [0] and len(os.listdir(tmp_path)) == 2
    mine = Recorder(model(), tmp_path, probes=probes(), share=None)
    assert os.listdir(tmp_path) == ["step-00000000.safetensors"]
    assert mine.step(1)


def test_what_cannot_be_is_said_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    image = VisionTransformer(12, 4, 3, 12, heads=3, layers=1)
    twice = [probes()[0], probes()[0]]
    wrong: list[tuple[str, Callable[[], Any]]] = [
        ("is a file", lambda: short(tmp_path / "file")),
        ("share is 5; it must be a number from 0 to 1", lambda: short(tmp_path, share=5)),
        (r"has no tokenizer.*RecorderCallback\(folder, tokenizer\)", lambda: Recorder(model(), tmp_path)),
        ("has no tokenizer", lambda: Recorder(model(), tmp_path, "gpt2")),
        (
            "tokenizer, probes and images",
            lambda: Recorder(model(), tmp_path, ByteTokenizer(), probes=probes()),
        ),
        ("different names", lambda: Recorder(model(), tmp_path, probes=twice)),
        ("different names", lambda: Recorder(model(), tmp_path, probes=[])),
        ("images and grid", lambda: Recorder(image, tmp_path, images=torch.zeros(1, 3, 12, 12))),
        (
            r"images has shape \[3, 12, 12\]",
            lambda: Recorder(image, tmp_path, images=torch.zeros(3, 12, 12), grid=(3, 3)),
        ),
        ("step", lambda: short(tmp_path).step(-1)),
    ]
    for message, call in wrong:
        with pytest.raises(ValueError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)
    for call in (lambda: Recorder(None, tmp_path), lambda: Recorder(model(), tmp_path, probes=[3])):
        with pytest.raises(TypeError):
            call()
    with pytest.raises(TypeError, match="steps must be"):
        short(tmp_path, steps=3)


# --- transformers ----------------------------------------------------------------------------------------------------


def test_short_models_get_short_probes(tmp_path: Path) -> None:
    made = make("GPT2LMHeadModel", GPT2 | {"vocab_size": 100, "n_positions": 29})
    Recorder(made, tmp_path, in_transformers()).step(0)
    assert [place.n for place in record(tmp_path).layers] == [29, 29]


def test_in_transformers_own_training(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    made = make("GPT2LMHeadModel", GPT2 | {"vocab_size": 100, "n_positions": 29, "attn_pdrop": 0.1})
    draw = torch.Generator().manual_seed(0)
    data = [{"input_ids": x, "labels": x} for x in torch.randint(100, (20, 12), generator=draw)]

    def trained(most: int, *callbacks: Any, **resume: Any) -> dict[str, Tensor]:
        args = transformers.TrainingArguments(
            output_dir=str(tmp_path / "out"),
            **{"use_cpu": True, "report_to": [], "max_steps": most, "per_device_train_batch_size": 2, "save_steps": 6},
            **{"disable_tqdm": True, "logging_steps": 100, "learning_rate": 1e-3, "seed": 1},
        )
        one = copy.deepcopy(made)
        trainer = transformers.Trainer(model=one, args=args, train_dataset=data, callbacks=list(callbacks))
        trainer.train(**resume)
        return one.state_dict()

    plain = trained(10)
    seen = trained(10, RecorderCallback(tmp_path / "heads", in_transformers(), share=None))
    assert all(torch.equal(plain[name], seen[name]) for name in plain)
    assert not torch.equal(plain["transformer.wte.weight"], made.state_dict()["transformer.wte.weight"])
    assert steps(tmp_path / "heads") == [0, 1, 2, 3, 4, 6, 8, 10]
    checkpoint = str(tmp_path / "out" / "checkpoint-6")
    callback = RecorderCallback(tmp_path / "heads", in_transformers(), share=None, steps=[7])
    trained(9, callback, resume_from_checkpoint=checkpoint)
    assert steps(tmp_path / "heads") == [0, 1, 2, 3, 4, 6, 7, 9]
    with pytest.raises(ValueError, match="records up to step 9"):  # another training, the same folder
        trained(2, RecorderCallback(tmp_path / "heads", in_transformers()))


# --- processes -------------------------------------------------------------------------------------------------------


def test_two_processes_are_one(tmp_path: Path) -> None:
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    options: dict[str, Any] = {"env": env, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    call = [sys.executable, recorder_worker.__file__]
    running = [subprocess.Popen([*call, str(r), "2", tmp_path / "store", tmp_path], **options) for r in range(2)]
    try:
        said = [process.communicate(timeout=200)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], said
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert "is not a complete record" in told[0].pop("broken") and "see the first process" in told[1].pop("broken")
    assert (
        told[0]
        == told[1]
        == {
            **{"steps": [True, False, False, False], "grads": False},
            **{"again": [False, False], "back": [False, True]},
        }
    )
    assert steps(tmp_path / "ddp") == [0, 4, 6, 8] and steps(tmp_path / "fsdp") == [0]
    Recorder(model(), tmp_path / "one", probes=probes()).step(0)
    for of, step in (("ddp", 0), ("ddp", 4), ("fsdp", 0)):
        found, one = record(tmp_path / of, step), record(tmp_path / "one")
        same(found, one, 1e-6)
