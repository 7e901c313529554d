"""Model folders of strangers: no code of them runs, nothing hangs, and every error is one line without escape codes."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import stat
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import torch
from safetensors.torch import load_file, save_file
from starlette.datastructures import QueryParams
from support.commands import command
from support.hostile_folders import DAMAGED_TOKENIZERS, copy_bundled, damaged_tokenizer, edit_json

from regard import models
from regard._config_json import Config
from regard._error_report import LARGEST_LOG, error_line, held_back_stderr, log_file, report_error
from regard._errors import RegardError
from regard._terminal import printable, printable_json
from regard.models import load
from regard.models._folder import MOST_EXTRA_FILES
from regard.models._images import Preprocessor
from regard.models._tokenizer import Tokenizer

ESCAPE = "\x1b[31m\x9b2J\x07"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u202e]")


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "state"))
    (tmp_path / "text.txt").write_text("a b c a b c")


def refused(monkeypatch: pytest.MonkeyPatch, capfd: Any, *words: object, stdin: bytes = b"") -> str:
    """Run a command that must print one line and end with code 2. Returns the line."""
    code, out, errors = command(monkeypatch, capfd, *words, stdin=stdin)
    assert code == 2 and len(errors) == 1 and errors[0].startswith("regard: "), (code, out, errors)
    assert not CONTROL.search(out + errors[0]) and "unexpected error" not in errors[0]
    return errors[0]


# --- code ------------------------------------------------------------------------------------------------------------

CODE = """
from pathlib import Path
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
Path({mark!r}).touch()
class C(PretrainedConfig):
    model_type = "strange"
class M(PreTrainedModel):
    config_class = C
class T(PreTrainedTokenizerFast):
    pass
"""


# The sizes of a model that only transformers knows.
SMALL_GPTJ = {"n_embd": 16, "n_layer": 1, "n_head": 2, "rotary_dim": 4, "n_positions": 64}


@pytest.mark.parametrize("model_type", ["strange", "gptj"])
def test_no_code_of_a_folder_runs_whatever_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any, model_type: str
) -> None:
    pytest.importorskip("transformers")
    folder = copy_bundled(tmp_path / "model")
    mark = tmp_path / "code-has-run"
    (folder / "code.py").write_text(CODE.format(mark=str(mark)))
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(CODE.format(mark=str(mark)))
    classes = {"AutoConfig": "code.C", "AutoModel": "code.M", "AutoModelForCausalLM": "code.M"}
    edit_json(folder / "config.json", model_type=model_type, auto_map=classes, architectures=["M"], **SMALL_GPTJ)
    edit_json(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["code.T", "code.T"]}, tokenizer_class="T")
    # If transformers asks, it reads the answer from here.
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 20))
    for words in (("look", folder, "--text", tmp_path / "text.txt"), ("describe", folder)):
        refused(monkeypatch, capfd, *words, stdin=b"y\n" * 20)
    assert not mark.exists()


def test_a_config_cannot_name_kernels_to_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    pytest.importorskip("transformers")
    folder = copy_bundled(tmp_path / "model")
    edit_json(folder / "config.json", model_type="gptj", attn_implementation="somebody/kernel")
    assert "attn_implementation" in refused(monkeypatch, capfd, "look", folder, "--text", tmp_path / "text.txt")


def test_every_call_of_transformers_refuses_code() -> None:
    """A new call of ``from_pretrained`` must say it too."""
    for file in (Path(models.__file__).parent.parent).rglob("*.py"):
        for match in re.finditer(r"\.from_pretrained\((?!folder\)\.save)(.*?)\)\n", file.read_text(), re.DOTALL):
            assert "**options" in match[1] or "trust_remote_code=False" in match[1], f"{file}: {match[0]}"


# --- tokenizers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DAMAGED_TOKENIZERS)
def test_a_damaged_tokenizer_is_one_error(name: str, capfd: Any) -> None:
    with pytest.raises(RegardError, match=r"tokenizer\.json") as caught:
        Tokenizer(damaged_tokenizer(name)).encode("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa b z")
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""  # where Rust prints its panics


@pytest.mark.parametrize("name", ["an empty table of characters", "a template with a token that is not there"])
def test_commands_survive_a_damaged_tokenizer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    folder = copy_bundled(tmp_path / "model")
    (folder / "tokenizer.json").write_bytes(damaged_tokenizer(name))
    assert "tokenizer.json" in refused(monkeypatch, capfd, "look", folder, "--text", tmp_path / "text.txt")
    assert "tokenizer.json" in refused(monkeypatch, capfd, "generate", folder, "a b")


def test_what_is_held_back_is_printed_unless_it_is_discarded(capfd: Any) -> None:
    with held_back_stderr():
        os.write(2, b"first\n")
    with held_back_stderr() as discard:
        os.write(2, b"second\n")
        discard()
        os.write(2, b"third\n")
    assert capfd.readouterr().err == "first\nthird\n"


# --- the report of errors --------------------------------------------------------------------------------------------


class Panic(BaseException):
    """As Rust's: not an ``Exception``."""


Panic.__module__ = "pyo3_runtime"


@pytest.mark.parametrize(
    "error", [Panic("broken"), KeyError("layer"), OverflowError("int too large"), RecursionError()]
)
def test_an_unexpected_error_is_one_line_that_names_the_log(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("regard.models.load", fail)
    code, _, errors = command(monkeypatch, capfd, "describe")
    assert code == 2 and len(errors) == 1 and type(error).__name__ in errors[0] and str(log_file()) in errors[0]
    assert "Traceback" in log_file().read_text() and stat.S_IMODE(log_file().stat().st_mode) == 0o600


def test_the_log_is_bounded_and_never_a_reason_to_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    error = KeyError("x" * 10**5)
    for _ in range(40):
        report_error(error)
    files = list(log_file().parent.iterdir())
    assert len(files) == 2 and sum(file.stat().st_size for file in files) < 3 * LARGEST_LOG
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert "log" not in report_error(ZeroDivisionError("division"))
    assert "log" not in report_error(RegardError("expected"))
    assert len(error_line(error, longest=100)) == 100


# --- files that are none ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "model.safetensors.index.json"])
def test_a_pipe_in_place_of_a_file_is_refused_at_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    folder = copy_bundled(tmp_path / "model")
    if name == "model.safetensors.index.json":
        (folder / "model.safetensors").unlink()
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises((RegardError, OSError), match=re.escape(name)):
        load(folder)
    assert name in refused(monkeypatch, capfd, "look", folder, "--text", tmp_path / "text.txt")


def test_pipes_as_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "pipe" in refused(monkeypatch, capfd, "look", models.bundled(), "--text", pipe)
    with pytest.raises(RegardError, match="pipe"):
        Preprocessor(Config(), (8, 8))(pipe)
    assert "pipe" in refused(monkeypatch, capfd, "convolve", "--weights", pipe, "--name", "x")
    assert "pipe" in refused(monkeypatch, capfd, "budget", pipe)
    # A pipe that the shell has opened, as <(command) does, is read.
    reading, writing = os.pipe()
    os.write(writing, b"a b c")
    os.close(writing)
    code, out, _ = command(monkeypatch, capfd, "look", models.bundled(), "--text", f"/dev/fd/{reading}")
    os.close(reading)
    assert code == 0 and "heads" in out


def test_extra_files_are_limited_and_inside_the_folder(tmp_path: Path) -> None:
    folder = copy_bundled(tmp_path / "model")
    (tmp_path / "secret.txt").write_text("secret")
    (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
    (folder / "inside.txt").symlink_to("tokenizer_config.json")
    os.mkfifo(folder / "pipe.txt")
    assert {"inside.txt", "tokenizer.json"} <= set(load(folder).extra_files)
    assert not {"link.txt", "pipe.txt"} & set(load(folder).extra_files)

    (folder / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    (folder / "tokenizer.json").symlink_to(tmp_path / "tokenizer.json")
    with pytest.raises(RegardError, match=r"tokenizer\.json is a link out of its folder"):
        load(folder)


def test_a_snapshot_of_the_hugging_face_cache_loads_through_its_links(tmp_path: Path) -> None:
    repository = tmp_path / "models--somebody--model"
    (repository / "blobs").mkdir(parents=True)
    snapshot = repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    original = copy_bundled(tmp_path / "model")
    for i, file in enumerate(sorted(original.iterdir())):
        shutil.copy(file, repository / "blobs" / str(i))
        (snapshot / file.name).symlink_to(f"../../blobs/{i}")
    loaded = load(snapshot)
    assert loaded.extra_files == load(original).extra_files and "tokenizer.json" in loaded.extra_files


@pytest.mark.parametrize(("count", "size"), [(200, 40 * 2**20), (MOST_EXTRA_FILES, 1)])
def test_many_files_beside_a_model_are_refused(tmp_path: Path, count: int, size: int) -> None:
    folder = copy_bundled(tmp_path / "model")
    for i in range(count):
        with (folder / f"{i}.txt").open("wb") as opened:
            opened.truncate(size)  # sparse
    with pytest.raises(RegardError, match="with the suffixes"):
        load(folder)


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [10**12, 10**400, {"shortest_edge": 10**12}, {"height": 8, "width": 10**400}])
def test_huge_sizes_of_images_are_refused(size: Any) -> None:
    with pytest.raises(RegardError, match="size"):
        Preprocessor(Config(size=size), (8, 8))
    with pytest.raises(RegardError, match="image_mean"):
        Preprocessor(Config(image_mean=[10**400, 0, 0]), (8, 8))


@pytest.mark.parametrize("entry", ["vocab_size", "hidden_size", "num_attention_heads", "eos_token_id"])
def test_huge_numbers_in_a_config_are_one_line(
    entry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    folder = copy_bundled(tmp_path / "model")
    edit_json(folder / "config.json", **{entry: 10**400})
    for words in (("describe", folder), ("budget", folder), ("generate", folder, "a")):
        code, _, errors = command(monkeypatch, capfd, *words)
        assert code in (0, 2) and len(errors) == (code == 2)
        assert "unexpected error" not in "".join(errors)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_an_error_with_the_name_of_the_tensor(
    value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    folder = copy_bundled(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    name = max(tensors, key=lambda key: tensors[key].numel())
    tensors[name].view(-1)[7] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RegardError, match="must be finite, got 1 of"):
        load(folder)
    assert not all(bool(x.isfinite().all()) for x in load(folder, allow_nonfinite=True).parameters())
    assert "must be finite" in refused(monkeypatch, capfd, "look", folder, "--text", tmp_path / "text.txt")


def test_large_finite_weights_are_accepted(tmp_path: Path) -> None:
    folder = copy_bundled(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    for tensor in tensors.values():
        tensor.fill_(torch.finfo(tensor.dtype).max)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    load(folder)


# --- escape codes ----------------------------------------------------------------------------------------------------


def test_printable_keeps_text_and_replaces_what_a_terminal_obeys() -> None:
    text = "naïve 你好 🙂\u200d🙂 ×\u00a0↵"
    assert printable(text) == text and printable("a\nb\tc", lines=True) == "a\nb\tc"
    assert not CONTROL.search(printable(ESCAPE + "\n\u2028\u202e\x00")) and printable("\x1b[0m") == "�[0m"
    assert json.loads(printable_json(json.dumps(ESCAPE, ensure_ascii=False))) == ESCAPE


def test_escape_codes_of_a_folder_do_not_reach_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    folder = copy_bundled(tmp_path / f"model{ESCAPE}")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    # Tokens that the text below does not need become escape codes.
    for token in [token for token in vocabulary if len(token) > 3 and not token.startswith("<")]:
        index = vocabulary.pop(token)
        vocabulary[f"{ESCAPE}{index}"] = index
    tokenizer["model"]["merges"] = []
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    recording = tmp_path / f"recording{ESCAPE}"
    text = tmp_path / "text.txt"
    text.write_text(f"a b {ESCAPE} c")
    calls = [
        ("describe", folder),
        ("budget", folder),
        ("budget", folder, "--json"),
        ("generate", folder, "a", "--length", 20, "--temperature", 5, "--seed", 1),
        ("look", folder, "--text", text, "--generate", 5, "--out", recording),
        ("look", recording),
        ("train", "dates", "--set", f"steps={ESCAPE}"),
        ("look", f"nosuch{ESCAPE}"),
    ]
    for words in calls:
        code, out, errors = command(monkeypatch, capfd, *words)
        assert code in (0, 2) and not CONTROL.search(out + "".join(errors)), (words, out, errors)

    for entry in ("model_type", "architectures", "hidden_act", "torch_dtype"):
        other = copy_bundled(tmp_path / entry)
        value: Any = [ESCAPE] if entry == "architectures" else ESCAPE
        edit_json(other / "config.json", **{entry: value})
        for name in ("describe", "budget"):
            code, out, errors = command(monkeypatch, capfd, name, other)
            assert not CONTROL.search(out + "".join(errors)), (entry, name)


# --- the lab ---------------------------------------------------------------------------------------------------------


def test_the_lab_starts_with_a_model_that_cannot_be_read(tmp_path: Path) -> None:
    from regard.lab.first_recording import ensure_recording
    from regard.lab.workspace import Workspace

    damaged = copy_bundled(tmp_path / "damaged")
    (damaged / "tokenizer.json").write_bytes(damaged_tokenizer("an empty table of characters"))
    workspace = Workspace(tmp_path / "lab")
    try:
        items = [workspace.open(damaged), workspace.open(models.bundled())]
        recording = ensure_recording(workspace, items)
        notices = " ".join(workspace.notices)
    finally:
        workspace.close()
    assert recording is not None and "damaged" in notices and "tokenizer.json" in notices


def panic(*_: object) -> None:
    raise Panic("broken")


def test_a_panic_ends_neither_the_worker_nor_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.lab import app, worker
    from regard.lab.endpoint import Endpoint, NoFields

    output = io.StringIO()
    monkeypatch.setattr(worker, "job_function", lambda kind: panic)
    worker.run_jobs([json.dumps({"kind": "look", "args": {}})] * 2, output)
    ends = [json.loads(line) for line in output.getvalue().splitlines() if "error" in line]
    assert len(ends) == 2 and all("broken" in end["error"] and str(log_file()) in end["error"] for end in ends)

    respond = app._route(None, Endpoint("GET", "/api/panic", NoFields, panic))  # type: ignore[arg-type]
    request = SimpleNamespace(query_params=QueryParams(""), app=SimpleNamespace(state=SimpleNamespace(limiter=None)))
    response = anyio.run(respond, request)
    assert response.status_code == 500 and "broken" in json.loads(response.body)["error"]
