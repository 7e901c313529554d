"""What calls, generation, saving and the command line refuse: by name, in one line, with nothing half done."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import command
from support.model_configs import V, ids
from support.refusing import copy, folders

from regard._terminal import printable
from regard.models import load


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return folders(tmp_path_factory)


@pytest.fixture
def gpt2(written: dict[str, Path], tmp_path: Path) -> Path:
    return copy(written["gpt2"], tmp_path)


def test_texts_beyond_a_learned_table(written: dict[str, Path]) -> None:
    gpt2, bert = load(written["gpt2"]), load(written["bert"])
    assert gpt2(ids(1, 19)).shape == bert(ids(1, 19)).shape == (1, 19, V)
    with pytest.raises(ValueError, match=r"length 19"):
        gpt2(ids(1, 20))
    with pytest.raises(ValueError, match="the text has 20 tokens; this model has learned positions for 19"):
        bert(ids(1, 20))
    with pytest.raises(ValueError, match="the prompt has 20 tokens; this model has learned positions for 19"):
        gpt2.generate(ids(1, 20), 3)


def test_writing_into_the_end_of_a_learned_table(written: dict[str, Path]) -> None:
    model = load(written["gpt2"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = model.generate(ids(1, 14), 6, end=None)
    with pytest.warns(UserWarning, match="it writes 6 after a prompt of 14") as caught:
        cut = model.generate(ids(1, 14), 50, end=None)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert cut.shape == (1, 6) and torch.equal(cut, whole)
    with pytest.warns(UserWarning, match="it writes 1 after a prompt of 19"):
        assert model.generate(ids(1, 19), 2, end=None).shape == (1, 1)
    with pytest.warns(UserWarning, match="it writes 6"):
        assert len(list(model.stream(ids(1, 14), 50, end=None))) == 6


def test_one_warning_beyond_the_trained_length(written: dict[str, Path]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(written["llama"])(ids(1, 16))
        load(written["llama"]).generate(ids(1, 10), 7, end=None)
    for call, tokens in (
        (lambda model: model(ids(1, 17)), 17),
        (lambda model: model.generate(ids(1, 10), 8, end=None), 17),
        (lambda model: list(model.stream(ids(1, 10), 9, end=None)), 17),
    ):
        model = load(written["llama"])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call(model)
            call(model)
        assert [str(w.message) for w in caught] == [
            f"this model was trained on up to 16 tokens and now reads {tokens}; expect errors"
        ]
        assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("prompt", "error", "said"),
    [
        ("", ValueError, "prompt is empty"),
        ([""], ValueError, "prompt is empty"),
        ([], TypeError, r"prompt must be a text.* got \[\]"),
        ([[]], ValueError, "prompt is empty"),
        ([[3], []], ValueError, "prompt is empty"),
        (torch.zeros(0, dtype=torch.int64), ValueError, r"prompt has shape \[0\]"),
        (torch.zeros(1, 1, 1, dtype=torch.int64), ValueError, r"prompt has shape \[1, 1, 1\]"),
        (torch.zeros(3), TypeError, "prompt must be a tensor of integers"),
        (["a", 3], TypeError, "not a mixture"),
        (["a", [3]], TypeError, "not a mixture"),
        ([[3], 3], TypeError, "not a mixture"),
        ([[3.0]], TypeError, "not a mixture"),
        ([True], TypeError, "not a mixture"),
        (3, TypeError, "prompt must be a text.* got 3"),
        (None, TypeError, "prompt must be a text.* got NoneType"),
        ([V], ValueError, f"token ids go from {V} to {V}; this vocabulary has 0 … {V - 1}"),
        ([[3], [-1, 4]], ValueError, "token ids go from -1 to 4"),
        ([10**30], ValueError, "token ids go from"),
        ("z", ValueError, "token ids go from 122 to 122"),
    ],
)
def test_prompts(prompt: Any, error: type[Exception], said: str, written: dict[str, Path]) -> None:
    for kind in ("gpt2", "t5"):
        with pytest.raises(error, match=said):
            load(written[kind]).generate(prompt, 2)


def test_ids_of_a_call(written: dict[str, Path]) -> None:
    for kind in ("gpt2", "llama", "bert"):
        model = load(written[kind])
        for bad in (V, -1):
            with pytest.raises(ValueError, match=f"this vocabulary has 0 … {V - 1}"):
                model(torch.tensor([[3, bad]]))
        with pytest.raises(TypeError, match="ids"):
            model(torch.zeros(1, 3))
    for types, error, said in (
        (torch.full((3, 7), 2), ValueError, "this model has 0 … 1"),
        (torch.zeros(3, 6, dtype=torch.int64), ValueError, r"types has shape \[3, 6\], but ids \[3, 7\]"),
        (torch.zeros(3, 7), TypeError, "types must be a tensor of integers"),
    ):
        with pytest.raises(error, match=said):
            model(ids(), token_types=types)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"length": -1}, ValueError, "length must be at least 0, got -1"),
        ({"length": 2.5}, TypeError, "length must be an integer"),
        ({"temperature": -0.5}, ValueError, "temperature must be a finite number ≥ 0"),
        ({"temperature": float("inf")}, ValueError, "temperature must be a finite number ≥ 0"),
        ({"temperature": float("nan")}, ValueError, "temperature must be a finite number ≥ 0"),
        ({"temperature": "hot"}, TypeError, "temperature must be a number, got 'hot'"),
        ({"temperature": True}, TypeError, "temperature must be a number"),
        ({"temperature": 1.0, "top_k": 0}, ValueError, "top_k must be at least 1, got 0"),
        ({"temperature": 1.0, "top_k": 1.5}, TypeError, "top_k must be an integer"),
        ({"temperature": 1.0, "top_p": 0.0}, ValueError, "top_p must be above 0 and at most 1, got 0"),
        ({"temperature": 1.0, "top_p": 1.1}, ValueError, "top_p must be above 0 and at most 1"),
        ({"temperature": 1.0, "top_p": float("nan")}, ValueError, "top_p must be a number"),
        ({"top_k": 5}, ValueError, "top_k .* give a temperature"),
        ({"top_p": 0.5}, ValueError, "top_p .* give a temperature"),
        ({"seed": -1}, ValueError, "seed must be at least 0"),
        ({"seed": "x"}, TypeError, "seed must be an integer"),
        ({"end": "stop"}, ValueError, 'end must be a token id, several, None or "model"'),
        ({"end": [1.5]}, TypeError, "end must be an integer"),
    ],
)
def test_options_of_generate(
    options: dict[str, Any], error: type[Exception], said: str, written: dict[str, Path]
) -> None:
    model = load(written["gpt2"])
    with pytest.raises(error, match=said):
        model.generate([[3]], **options)
    with pytest.raises(error, match=said):
        model.stream([[3]], **options)


def test_who_does_not_write(written: dict[str, Path]) -> None:
    for kind in ("headless", "t5 headless"):
        with pytest.raises(ValueError, match="Model has no head: it gives vectors, not tokens"):
            load(written[kind]).generate([[3]], 2)
    for kind in ("gpt2", "t5"):
        with pytest.raises(ValueError, match=r"training mode.*model.eval\(\)"):
            load(written[kind]).train().generate([[3]], 2)
    with pytest.raises(TypeError, match="prompt is a list of texts"):
        load(written["gpt2"]).stream(["\x03", "\x04"], 2)


def test_saving_where_nothing_can_be_saved(gpt2: Path, tmp_path: Path) -> None:
    model = load(gpt2)
    (tmp_path / "file").write_text("kept")
    with pytest.raises(FileExistsError, match="file is a file; a model is saved as a folder"):
        model.save(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"
    (tmp_path / "several").mkdir()
    (tmp_path / "several" / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(FileExistsError, match=r"several files .* another folder"):
        model.save(tmp_path / "several")
    assert len(list((tmp_path / "several").iterdir())) == 1


@pytest.mark.parametrize("error", [OSError("disk full"), RuntimeError("broken"), KeyboardInterrupt()])
def test_nothing_half_written(error: BaseException, gpt2: Path, tmp_path: Path, monkeypatch: Any) -> None:
    model = load(gpt2)
    before = {file.name: file.read_bytes() for file in gpt2.iterdir()}

    def fails(tensors: Any, file: Any, **_: Any) -> None:
        Path(file).write_bytes(b"half")
        raise error

    monkeypatch.setattr("regard.models._folder.save_tensors", fails)
    for folder in (gpt2, tmp_path / "new"):
        with pytest.raises(type(error)):
            model.save(folder)
    assert {file.name: file.read_bytes() for file in gpt2.iterdir()} == before
    assert list((tmp_path / "new").iterdir()) == []


def test_the_config_comes_last(gpt2: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """A save that breaks off between files leaves no folder that looks like a model."""
    (gpt2 / "tokenizer_config.json").write_text("{}")
    model = load(gpt2)
    write_bytes = Path.write_bytes

    def fails(file: Path, content: bytes) -> int:
        if "tokenizer_config" in file.name:
            raise OSError("disk full")
        return write_bytes(file, content)

    monkeypatch.setattr(Path, "write_bytes", fails)
    with pytest.raises(OSError, match="disk full"):
        model.save(tmp_path / "new")
    names = {file.name for file in (tmp_path / "new").iterdir()}
    assert "model.safetensors" in names and "config.json" not in names and not any(x.startswith(".") for x in names)


@pytest.mark.filterwarnings("always")
def test_commands_that_are_refused(written: dict[str, Path], tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    damaged = copy(written["gpt2"], tmp_path)
    (damaged / "model.safetensors").write_bytes(b"\xff" * 64)
    gpt2, bert = str(written["gpt2"]), str(written["bert"])
    for given, said in (
        (["describe", str(tmp_path / "nowhere")], "nowhere does not exist"),
        (["describe", str(damaged)], "model.safetensors is truncated or not a safetensors file"),
        (["describe", gpt2, "more"], "more"),
        (["draw", gpt2], "draw"),
        (["generate", gpt2, ""], "prompt is empty"),
        (["generate", gpt2, "zzz"], "token ids go from 122 to 122"),
        (["generate", gpt2, "\x03" * 20], "the prompt has 20 tokens"),
        (["generate", gpt2, "\x03", "--length", "x"], "--length"),
        (["generate", gpt2, "\x03", "--length", "-1"], "length must be at least 0"),
        (["generate", gpt2, "\x03", "--temperature", "-1"], "temperature must be a finite number"),
        (["generate", gpt2, "\x03", "--top-k", "3"], "give a temperature"),
        (["generate", gpt2, "\x03", "--hot", "3"], "--hot"),
        (["generate", str(written["headless"]), "\x03"], "GPT2Model has no head"),
        (["generate", bert, "\x03"], f"{bert} holds a BertForMaskedLM, which generates no text; GPT-2, Llama"),
    ):
        code, out, err = command(monkeypatch, capsys, *given)
        assert (code, out, len(err)) == (2, "", 1), (given, out, err)
        assert err[0].startswith("regard: ") and said in err[0]


@pytest.mark.filterwarnings("always")
def test_commands_that_work(written: dict[str, Path], monkeypatch: Any, capsys: Any) -> None:
    assert command(monkeypatch, capsys, "--help")[0] == 0
    code, out, err = command(monkeypatch, capsys, "describe", str(written["gpt2"]))
    assert (code, err) == (0, []) and "TextDecoder (GPT2LMHeadModel)" in out and "total" in out
    model = load(written["gpt2"])
    code, out, err = command(monkeypatch, capsys, "generate", str(written["gpt2"]), "\x03\x04", "--length", "5")
    # The vocabulary of this model has control characters, which a terminal would obey.
    assert (code, out, err) == (0, printable(model.generate("\x03\x04", 5), lines=True) + "\n", [])
    code, out, err = command(monkeypatch, capsys, "generate", str(written["gpt2"]), "\x03\x04", "--length", "50")
    assert code == 0 and err == [
        "regard: this model has learned positions for 19 tokens: it writes 18 after a prompt of 2"
    ]


def test_a_real_process(tmp_path: Path) -> None:
    for given in (["describe", str(tmp_path)], ["generate", str(tmp_path)]):
        call = [sys.executable, "-c", "from regard.cli import main; main()", *given]
        done = subprocess.run(call, capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode, done.stdout) == (2, "")
        assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("regard: ")
