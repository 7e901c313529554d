"""`look`, in Python and on the command line: a model on a text or a picture, and what is written of it."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.checkpoints import make, transformers, write
from support.commands import command
from support.model_configs import BERT, GPT2, IMAGES, LLAMA, T5
from support.trained import ROOT
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as models_of_tokens

import regard.interp
from regard.cli import look_model
from regard.interp import look
from regard.models import bundled, load
from regard.models._model import Model

TEXT = "the cat sat on the mat, and the cat saw the hat"
BYTES = {"vocab_size": 256}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    cases = {
        "llama": ("LlamaForCausalLM", LLAMA | BYTES),
        "gpt2": ("GPT2LMHeadModel", GPT2 | BYTES | {"n_positions": 64}),
        "bert": ("BertModel", BERT | BYTES | {"max_position_embeddings": 64}),
        "t5": ("T5ForConditionalGeneration", T5 | BYTES),
        "vit": IMAGES[0],
    }
    return {name: write(make(*case), root / name) for name, case in cases.items()}


@pytest.fixture(scope="module")
def models(folders: dict[str, Path]) -> dict[str, Model]:
    return {name: load(folder) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("pictures") / "noise.png"
    noise = np.random.default_rng(0).integers(0, 256, (17, 23, 3), dtype=np.uint8)
    Image.fromarray(noise).save(file)
    return file


Run = Callable[..., tuple[int, str, list[str]]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return partial(command, monkeypatch, capsys)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_a_text(models: dict[str, Model], name: str) -> None:
    steps: list[tuple[int, int]] = []
    seen = look(models[name], TEXT, progress=lambda done, of: steps.append((done, of)))
    assert seen.metadata["tokens"] == list(TEXT) and steps == [(i + 1, len(seen)) for i in range(len(seen))]
    for observation in seen.values():
        assert observation.n == observation.m == len(TEXT)
        assert observation.map is not None and observation.top is not None and observation.profile is not None
    first = look(models[name], TEXT, tokens=5, keep_input=False)
    assert "tokens" not in first.metadata and next(iter(first.values())).n == 5


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_text_and_its_continuation(models: dict[str, Model], name: str, tmp_path: Path) -> None:
    model = models[name]
    seen = look(model, "the cat é", generate=7)
    prompt = list("the cat é".encode())
    ids = seen.metadata["ids"]
    assert ids[: len(prompt)] == prompt and seen.metadata["prompt_length"] == len(prompt)
    assert ids[len(prompt) :] == model.generate([prompt], 7)[0].tolist()  # type: ignore[attr-defined]
    assert seen.metadata["text"].startswith("the cat é") and len(seen.metadata["spans"]) == len(ids)
    for observation in seen.values():
        assert observation.n == observation.m == len(ids) and observation.map is not None
    first = look(model, "the cat é", tokens=9, generate=3)
    assert first.metadata["prompt_length"] == 9 and first[0].n == 12
    seen.save(tmp_path / "r")
    assert regard.interp.load_recording(tmp_path / "r").metadata["spans"] == seen.metadata["spans"]


def test_what_cannot_generate(models: dict[str, Model], picture: Path) -> None:
    with pytest.raises(ValueError, match=r"generate="):
        look(models["bert"], TEXT, generate=3)
    with pytest.raises(ValueError, match=r"generate="):
        look(models["vit"], image=picture, generate=3)
    with pytest.raises(ValueError, match=r"generate="):
        look(models["t5"], TEXT, generate=3, answer="x")
    with pytest.raises(ValueError, match="generate must be at most 17"):
        look(models["gpt2"], TEXT, generate=18)
    assert look(models["t5"], TEXT, generate=3)["decoder.blocks.0.cross"].n <= 4


def test_the_command_generates(run: Run, folders: dict[str, Path], tmp_path: Path) -> None:
    code, said, _ = run("look", folders["gpt2"], "-", "--generate", 5, "--out", tmp_path / "r", stdin=b"the cat")
    seen = regard.interp.load_recording(tmp_path / "r")
    count = len(seen.metadata["tokens"]) - 7
    assert code == 0 and f"generated {count} tokens" in said and seen[0].n == 7 + count
    coder = theirs("Starcoder2ForCausalLM", LLAMA | {"vocab_size": 61, "pad_token_id": 0}, tmp_path / "coder")
    code, said, _ = run("look", coder, "-", "--generate", 4, "--no-text", "--out", tmp_path / "g", stdin=TEXT.encode())
    seen = regard.interp.load_recording(tmp_path / "g")
    assert code == 0 and "generated" not in said and "text" not in seen.metadata
    assert len(TEXT) < seen[0].n <= len(TEXT) + 4  # type: ignore[operator]


def test_text_to_text_has_a_source_and_an_answer(models: dict[str, Model]) -> None:
    seen = look(models["t5"], TEXT)
    assert seen.metadata["source"] == list(TEXT) and seen.metadata["source_text"] == TEXT
    answer = seen.metadata["tokens"]
    cross = seen["decoder.blocks.0.cross"]
    assert cross.m == len(TEXT) and cross.n == len(answer) > 1
    page = seen.to_html()
    assert "decoder.blocks.0.cross" in page


def test_a_picture(models: dict[str, Model], picture: Path) -> None:
    model = models["vit"]
    seen = look(model, image=picture)
    height, width = model.vit.grid  # type: ignore[union-attr]
    observation = next(iter(seen.values()))
    assert seen.metadata["grid"] == [height, width] and observation.m == height * width + 1
    assert seen.metadata["image"].startswith("data:image/png;base64,") and observation.observe.grid == (height, width)
    assert "image" not in look(model, image=picture, keep_input=False).metadata
    assert seen.metadata["image"] in seen.to_html()


def theirs(kind: str, entries: dict[str, Any], folder: Path) -> Path:
    """A folder of a kind that only transformers knows, with a tokenizer of letters."""
    letters = {letter: i + 3 for i, letter in enumerate(sorted(set(TEXT)))}
    tokenizer = Tokenizer(models_of_tokens.WordLevel({"<pad>": 0, "</s>": 1, "<unk>": 2, **letters}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    model = make(kind, entries)
    model.save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>").save_pretrained(folder)
    return folder


def test_models_that_only_transformers_knows(run: Run, tmp_path: Path) -> None:
    coder = theirs("Starcoder2ForCausalLM", LLAMA | {"vocab_size": 61, "pad_token_id": 0}, tmp_path / "coder")
    code, said, _ = run("look", coder, "-", "--html", tmp_path / "page.html", stdin=TEXT.encode())
    assert code == 0 and said.startswith("6 heads of layers.*.self_attn")
    assert '"t","h","e"' in (tmp_path / "page.html").read_text()
    bart = {"vocab_size": 61, "d_model": 12, "max_position_embeddings": 64, "decoder_start_token_id": 1}
    bart |= {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    bart |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "forced_eos_token_id": None}
    folder = theirs("BartForConditionalGeneration", bart, tmp_path / "bart")
    code, said, _ = run("look", folder, "-", "--out", tmp_path / "seen", stdin=TEXT.encode())
    seen = regard.interp.load_recording(tmp_path / "seen")
    assert code == 0 and seen.metadata["source"] == list(TEXT)
    assert seen["model.decoder.layers.0.encoder_attn"].m == len(TEXT)
    assert seen["model.decoder.layers.0.encoder_attn"].n == len(seen.metadata["tokens"])


def test_what_a_model_cannot_read(models: dict[str, Model], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tokens=64"):
        look(models["gpt2"], TEXT * 10)
    small = load(write(make("LlamaForCausalLM", LLAMA), tmp_path / "small"))
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        look(small, TEXT)
    seen = look(models["llama"], TEXT)
    for wrong in (lambda: seen.save(tmp_path / "r", tokens=["x"]), lambda: page_of(seen, ["a", "b"])):
        with pytest.raises(ValueError, match="tokens has"):
            wrong()
    assert not (tmp_path / "r").exists()


def page_of(seen: regard.interp.Recording, tokens: list[str]) -> str:
    seen.metadata["tokens"] = tokens
    return seen.to_html()


def test_refusals(models: dict[str, Model], picture: Path) -> None:
    with pytest.raises(ValueError, match="a text or an image"):
        look(models["llama"])
    with pytest.raises(ValueError, match="a text or an image"):
        look(models["llama"], TEXT, picture)
    with pytest.raises(ValueError, match=r"llama .*give it a text"):
        look(models["llama"], image=picture)
    with pytest.raises(ValueError, match="the text must"):
        look(models["llama"], "")
    with pytest.raises(ValueError, match="the text must"):  # though its tokenizer begins with a token of its own
        look(load(bundled()), "")
    with pytest.raises(ValueError, match="LlamaForCausalLM needs a tokenizer"):
        look(make("LlamaForCausalLM", LLAMA), TEXT)
    with pytest.raises(ValueError, match="TextDecoder has its own tokenizer"):
        look(models["llama"], TEXT, tokenizer=models["llama"].tokenizer)
    with pytest.raises(ValueError, match=r"vit .*give it an image"):
        look(models["vit"], TEXT)


def test_a_page_has_the_stored_types(run: Run, tmp_path: Path) -> None:
    """The bundled model has the records of its training, so its types are known without a computation."""
    page = tmp_path / "page.html"
    assert run("look", "-", "--html", page, "--out", tmp_path / "out", "--most", 1, stdin=b"the cat sat")[0] == 0
    types = regard.interp.atlas(load(bundled()))
    for text in (page.read_text(), regard.interp.load_recording(tmp_path / "out").to_html()):
        data = json.loads(re.findall(r'id="data">(.*?)</script>', text)[0])
        assert data["types"] == types.source
        labels = [head["labels"] for place in data["places"] for head in place["types"]]
        assert labels == [row["labels"] for row in types.rows]


def test_kinds_with_html_computes_the_types(run: Run, folders: dict[str, Path], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    code, _, _ = run("look", folders["llama"], "-", "--kinds", "--html", page, "--most", 1, stdin=TEXT.encode())
    data = json.loads(re.findall(r'id="data">(.*?)</script>', page.read_text())[0])
    assert code == 0 and data["types"] and all(len(place["types"]) == 3 for place in data["places"])


def test_types_are_the_same_in_table_csv_and_page(run: Run, tmp_path: Path) -> None:
    page, csv_file = tmp_path / "page.html", tmp_path / "heads.csv"
    arguments = ("look", "-", "--kinds", "--html", page, "--csv", csv_file, "--most", 0)
    code, said, _ = run(*arguments, stdin=b"the cat sat on the mat")
    atlas = regard.interp.atlas(load(bundled()))
    assert code == 0 and "by confidence" in said.splitlines()[0] and f"types from {atlas.source}" in said
    rows = {(row["path"], int(row["head"])): row for row in csv.DictReader(csv_file.open())}
    assert len(rows) == len(atlas.rows)
    for row in atlas.rows:
        written = rows[row["path"], row["head"]]
        assert written["labels"].split() == row["labels"]
        for name, values in row["kinds"].items():
            assert float(written[f"{name} confidence"]) == values["confidence"]
        for label in row["labels"]:
            assert label in said
    order = [line.split()[:2] for line in said.splitlines() if re.match(r" *\d+ +\d+ ", line)]
    strongest = [f"{path.split('.')[2]} {head}" for path, head in atlas.top("confidence")]
    assert [" ".join(pair) for pair in order] == strongest


def test_audio_is_refused_in_one_line(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "whisper"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "whisper", "num_mel_bins": 80}))
    for arguments in (("-",), ("--kinds",)):
        code, _, lines = run("look", folder, *arguments, stdin=TEXT.encode())
        assert code == 2 and "audio" in lines[-1] and "regard.watch" in lines[-1]
    # A model that transformers does not know is refused in one line too.
    (folder / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    code, _, lines = run("look", folder, "-", stdin=TEXT.encode())
    assert code == 2 and "regard.watch" in lines[-1] and len(lines[-1]) < 500


def test_the_command(run: Run, folders: dict[str, Path], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    out, page = tmp_path / "recording", tmp_path / "page.html"
    code, said, _ = run("look", folders["llama"], "--text", text, "--out", out, "--html", page, "--most", 2, "--keep")
    lines = said.splitlines()
    assert code == 0 and lines[0].startswith("6 heads of") and "2 of 6 heads" in said
    assert max(map(len, lines[:-2])) <= 80
    seen = regard.interp.load_recording(out)
    assert seen.metadata["tokens"] == list(TEXT) and seen["decoder.blocks.0.attention"].weights(0).shape == (47, 47)
    assert page.read_text().startswith("<!doctype html>")

    _, again, _ = run("look", out, "--most", 2, "--no-text", "--html", tmp_path / "bare.html")
    assert again.splitlines()[:4] == lines[:4]
    assert '"t","h","e"' not in (tmp_path / "bare.html").read_text() and '"t","h","e"' in page.read_text()

    code, _, _ = run("look", folders["llama"], "-", "--no-text", "--out", tmp_path / "bare", stdin=TEXT.encode())
    assert code == 0
    assert not {"tokens", "source", "image", "ids", "text", "spans", "source_text", "source_spans"} & set(
        json.loads((tmp_path / "bare" / "recording.json").read_text())
    )


@pytest.mark.usefixtures("full_tiles", "own_cache")
def test_the_command_names_heads(
    run: Run, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, said, _ = run("look", folders["llama"], "--kinds", "--csv", tmp_path / "heads.csv", "--most", 0)
    assert code == 0 and "types (confidence)" in said
    assert max(map(len, said.splitlines()[:-1])) <= 80
    lines = (tmp_path / "heads.csv").read_text().splitlines()
    assert len(lines) == 7 and lines[0].startswith("path,layer,head,sinks,value_weighted,")
    own = run("look", folders["llama"], "-", "--kinds", "--sort", "prev", stdin=TEXT.encode() * 20)
    assert own[0] == 0 and own[1].splitlines()[0].rstrip().endswith("by prev") and own[1] != said
    # An image model is scored on noise, as in the lab.
    code, said, lines = run("look", folders["vit"], "--kinds")
    assert code == 0 and "random noise" in said, lines
    # Sorting again does not compute again.
    monkeypatch.setattr(look_model, "load_model", lambda folder: pytest.fail("the model was loaded"))
    assert run("look", folders["llama"], "--kinds", "--sort", "spread")[0] == 0
    code, said, _ = run("look", folders["llama"], "--kinds", "--compare", folders["vit"])
    assert code == 0 and "heads matched" in said and "B, " in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--text FILE, --image FILE, or -"),
        (("-", "--image", "x.png"), "--text FILE, --image FILE, or -"),
        (("a text",), "--text FILE or through -, got 'a text'"),
        (("--text", "missing.txt"), "missing.txt cannot be read: No such file or directory"),
        (("--image", "x.png", "--tokens", "3"), "--tokens needs a text"),
        (("-", "--layers", "nope*"), "layers='nope*' matches none"),
        (("-", "--out", str(ROOT)), "is not a recording"),
        (("-",), "standard input must be UTF-8 text"),
        (("-", "--sort", "colour"), "--sort must be one of entropy"),
        (("-", "--most", "-3"), "--most"),
        (("-", "--tokens", "0"), "tokens must be at least 1"),
        (("-", "--generate", "0"), "--generate must be at least 1"),
        (("--image", "x.png", "--generate", "3"), "--generate needs a text"),
        (("-", "--keep"), "--keep needs --out FOLDER"),
        (("-", "--html", "."), ". is a folder"),
        (("-", "--html", "nowhere/page.html"), "nowhere/page.html cannot be written"),
        (("--kinds", "--out", "x"), "takes no --out"),
        (("--kinds", "--sort", "peak"), "--sort must be one of confidence, sinks"),
        (("-", "--compare", "."), "--compare needs --kinds"),
    ],
)
def test_the_command_refuses_in_one_line(
    run: Run, folders: dict[str, Path], arguments: tuple[str, ...], said: str
) -> None:
    given = b"\xff\xfe\xff" if arguments == ("-",) else TEXT.encode()
    code, _, lines = run("look", folders["llama"], *arguments, stdin=given)
    assert code == 2 and said in lines[-1] and not any("Traceback" in line for line in lines)


def test_names_are_shown_as_they_are(run: Run, folders: dict[str, Path], tmp_path: Path) -> None:
    """Brackets are no markup, and what steers a terminal does not reach it."""
    out = tmp_path / "a[/b]"
    code, said, _ = run("look", folders["llama"], "-", "--out", out, stdin=TEXT.encode())
    assert code == 0 and f"recording: {out}" in said
    file = out / "recording.json"
    file.write_text(file.read_text().replace("decoder.blocks.0", "x[/b]\\u001b[31m"))
    code, said, _ = run("look", out)
    assert code == 0 and "x[/b]�[31m" in said and "\x1b" not in said


def test_a_recording_reads_nothing(run: Run, folders: dict[str, Path], tmp_path: Path) -> None:
    look(load(folders["llama"]), TEXT).save(tmp_path / "r")
    code, _, lines = run("look", tmp_path / "r", "--text", "x.txt")
    assert code == 2 and lines[-1].endswith("is a recording: it takes no --text")
    assert run("look", tmp_path / "r", "--layers", "x")[0] == 2


def test_input_that_does_not_exist_is_named(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folders: dict[str, Path]
) -> None:
    (tmp_path / "smollm").mkdir()
    monkeypatch.chdir(tmp_path)
    for arguments in (("smolm",), ("smolm", "-")):
        code, _, lines = run("look", *arguments, stdin=TEXT.encode())
        assert code == 2 and len(lines) == 1 and "MODEL" in lines[0] and "'smolm'" in lines[0]
        assert lines[0].endswith("similar: smollm") and "recording" in lines[0] and "bundled" in lines[0]
    code, _, lines = run("look", "elsewhere/nosuch")
    assert code == 2 and "'elsewhere/nosuch'" in lines[-1] and "similar" not in lines[-1]
    code, _, lines = run("look", "smollm", "-")
    assert code == 2 and "'smollm'" in lines[-1] and "config.json" in lines[-1]
    for option in ("--out", "--html", "--csv", "--text"):
        code, _, lines = run("look", folders["llama"], option, "", stdin=TEXT.encode())
        assert code == 2 and len(lines) == 1 and option in lines[0] and "''" in lines[0]
    for text in (b"", b" \n\t "):
        code, _, lines = run("look", folders["llama"], "-", "--out", "x", stdin=text)
        assert code == 2 and len(lines) == 1 and "text" in lines[0]
    assert [file.name for file in tmp_path.iterdir()] == ["smollm"]


@torch.no_grad()
def test_a_recording_shows_itself_in_a_notebook(models: dict[str, Model]) -> None:
    shown = look(models["llama"], TEXT)._repr_html_()
    assert shown.startswith('<iframe sandbox="allow-scripts" srcdoc="&lt;!doctype html&gt;') and shown.count('"') == 6
    assert regard.interp.Recording()._repr_html_() == "Recording(0 layers, 0 calls)"
