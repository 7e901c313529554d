"""`look`, in Python and on the command line: a model on a text or a picture, and what is written of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make, transformers, write
from commands import command
from PIL import Image
from test_models import BERT, GPT2, IMAGES, LLAMA, T5
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as models_of_tokens
from trained import ROOT

import regard.watching
from regard.models import bundled, load
from regard.models.model import Model
from regard.watching import look
from regard.watching.look import _spoken

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
    assert seen.about["tokens"] == list(TEXT) and steps == [(i + 1, len(seen)) for i in range(len(seen))]
    for observation in seen.values():
        assert observation.n == observation.m == len(TEXT)
        assert observation.map is not None and observation.top is not None and observation.profile is not None
    first = look(models[name], TEXT, tokens=5, words=False)
    assert "tokens" not in first.about and next(iter(first.values())).n == 5


def test_text_to_text_has_a_source_and_an_answer(models: dict[str, Model]) -> None:
    seen = look(models["t5"], TEXT)
    assert seen.about["source"] == list(TEXT)
    answer = seen.about["tokens"]
    cross = seen["decoder.blocks.0.cross"]
    assert cross.m == len(TEXT) and cross.n == len(answer) > 1
    page = seen.to_html()
    assert "decoder.blocks.0.cross" in page


def test_a_picture(models: dict[str, Model], picture: Path) -> None:
    model = models["vit"]
    seen = look(model, picture=picture)
    height, width = model.vit.grid  # type: ignore[union-attr]
    observation = next(iter(seen.values()))
    assert seen.about["grid"] == [height, width] and observation.m == height * width + 1
    assert seen.about["image"].startswith("data:image/png;base64,") and observation.observe.grid == (height, width)
    assert "image" not in look(model, picture=picture, words=False).about
    assert seen.about["image"] in seen.to_html()


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
    gemma = theirs("Gemma2ForCausalLM", LLAMA | {"vocab_size": 61, "head_dim": 4}, tmp_path / "gemma")
    code, said, _ = run("look", gemma, "-", "--html", tmp_path / "page.html", stdin=TEXT.encode())
    assert code == 0 and said.startswith("6 heads of layers.*.self_attn")
    assert '"t","h","e"' in (tmp_path / "page.html").read_text()
    bart = {"vocab_size": 61, "d_model": 12, "max_position_embeddings": 64, "decoder_start_token_id": 1}
    bart |= {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    bart |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "forced_eos_token_id": None}
    folder = theirs("BartForConditionalGeneration", bart, tmp_path / "bart")
    code, said, _ = run("look", folder, "-", "--out", tmp_path / "seen", stdin=TEXT.encode())
    seen = regard.watching.open(tmp_path / "seen")
    assert code == 0 and seen.about["source"] == list(TEXT)
    assert seen["model.decoder.layers.0.encoder_attn"].m == len(TEXT)
    assert seen["model.decoder.layers.0.encoder_attn"].n == len(seen.about["tokens"])


def test_what_a_model_cannot_read(models: dict[str, Model], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the text has 470 tokens and the model reads at most 64: ask for tokens=64"):
        look(models["gpt2"], TEXT * 10)
    small = load(write(make("LlamaForCausalLM", LLAMA), tmp_path / "small"))
    with pytest.raises(ValueError, match=r"has no tokenizer\.json, and its \d+ tokens are not bytes"):
        look(small, TEXT)
    seen = look(models["llama"], TEXT)
    for wrong in (lambda: seen.save(tmp_path / "r", tokens=["x"]), lambda: page_of(seen, ["a", "b"])):
        with pytest.raises(ValueError, match="words, but at least 47 queries were seen at every place"):
            wrong()
    assert not (tmp_path / "r").exists()


def page_of(seen: regard.watching.Seen, tokens: list[str]) -> str:
    seen.about["tokens"] = tokens
    return seen.to_html()


def test_refusals(models: dict[str, Model], picture: Path) -> None:
    with pytest.raises(ValueError, match="a text or a picture, one of them"):
        look(models["llama"])
    with pytest.raises(ValueError, match="a text or a picture, one of them"):
        look(models["llama"], TEXT, picture)
    with pytest.raises(ValueError, match="a llama reads no pictures here; give it a text"):
        look(models["llama"], picture=picture)
    with pytest.raises(ValueError, match="the text is empty"):
        look(models["llama"], "")
    with pytest.raises(ValueError, match="the text is empty"):  # though its tokenizer begins with a token of its own
        look(load(bundled()), "")
    with pytest.raises(ValueError, match="LlamaForCausalLM needs a tokenizer"):
        look(make("LlamaForCausalLM", LLAMA), TEXT)
    with pytest.raises(ValueError, match="TextDecoder brings its own tokenizer"):
        look(models["llama"], TEXT, tokenizer=models["llama"].text)
    with pytest.raises(ValueError, match="a vit reads no text; give it a picture"):
        look(models["vit"], TEXT)


def test_the_command(run: Run, folders: dict[str, Path], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    out, page = tmp_path / "recording", tmp_path / "page.html"
    code, said, _ = run("look", folders["llama"], "--text", text, "--out", out, "--html", page, "--most", 2, "--keep")
    lines = said.splitlines()
    assert code == 0 and lines[0].startswith("6 heads of") and "2 of 6 heads" in said
    assert max(map(len, lines[:-2])) <= 80
    seen = regard.watching.open(out)
    assert seen.about["tokens"] == list(TEXT) and seen["decoder.blocks.0.attention"].weights(0).shape == (47, 47)
    assert page.read_text().startswith("<!doctype html>")

    _, again, _ = run("look", out, "--most", 2, "--no-text", "--html", tmp_path / "bare.html")
    assert again.splitlines()[:4] == lines[:4]
    assert '"t","h","e"' not in (tmp_path / "bare.html").read_text() and '"t","h","e"' in page.read_text()

    code, _, _ = run("look", folders["llama"], "-", "--no-text", "--out", tmp_path / "bare", stdin=TEXT.encode())
    assert code == 0
    assert not {"tokens", "source", "image"} & set(json.loads((tmp_path / "bare" / "recording.json").read_text()))


@pytest.mark.usefixtures("full_tiles")
def test_the_command_names_heads(run: Run, folders: dict[str, Path], tmp_path: Path) -> None:
    code, said, _ = run("look", folders["llama"], "--kinds", "--csv", tmp_path / "heads.csv", "--most", 0)
    assert code == 0 and "kinds (confidence)" in said
    assert max(map(len, said.splitlines()[:-1])) <= 80
    lines = (tmp_path / "heads.csv").read_text().splitlines()
    assert len(lines) == 7 and lines[0].startswith("path,layer,head,sinks,moved,")
    own = run("look", folders["llama"], "-", "--kinds", "--sort", "prev", stdin=TEXT.encode() * 20)
    assert own[0] == 0 and own[1].splitlines()[0].rstrip().endswith("by prev") and own[1] != said
    code, _, lines = run("look", folders["vit"], "--kinds")
    assert code == 2 and lines[-1].endswith("reads pictures: atlas(model, images=…, grid=(height, width))")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give one thing to look at: --text FILE, --image FILE, or - for a text from standard input"),
        (("-", "--image", "x.png"), "give one thing to look at"),
        (("a text",), "'a text' is neither - nor an option; a text is given as a file, --text FILE, or through -"),
        (("--text", "missing.txt"), "missing.txt cannot be read: No such file or directory"),
        (("--image", "x.png", "--tokens", "3"), "--tokens cuts a text"),
        (("-", "--layers", "nope*"), "no layer matches 'nope*'; attention was computed at decoder.blocks.0.attention"),
        (("-", "--out", str(ROOT)), "is there and is no recording"),
        (("-",), "standard input is no UTF-8 text"),
        (("-", "--sort", "colour"), "--sort is 'colour'; there are entropy"),
        (("-", "--most", "-3"), "--most"),
        (("-", "--tokens", "0"), "tokens must be at least 1"),
        (("-", "--keep"), "--keep saves q and k in the recording: give --out FOLDER too"),
        (("-", "--html", "."), ". cannot be written: give a file in a folder that is there"),
        (("-", "--html", "nowhere/page.html"), "nowhere/page.html cannot be written"),
        (("--kinds", "--out", "x"), "--kinds takes no --out"),
        (("--kinds", "--sort", "peak"), "--sort is 'peak'; there are sinks"),
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


def test_words_are_read_as_people_read_them() -> None:
    spell = {
        0: ("Ġthe", " the"),
        1: ("ÃĤ", "�"),
        2: ("Ã©", "é"),
        3: ("▁big", "big"),
        4: ("##ing", "##ing"),
        5: ("Ċ", "\n"),
    }
    words = _spoken(list(spell), [token for token, _ in spell.values()], lambda i: spell[i[0]][1])
    assert words == [" the", "�", "é", " big", "##ing", "\n"]
    assert _spoken([0], ["Ġgħal"], lambda _: "Ġgħal") == ["Ġgħal"]  # a Maltese word in a vocabulary of words


@torch.no_grad()
def test_a_recording_shows_itself_in_a_notebook(models: dict[str, Model]) -> None:
    shown = look(models["llama"], TEXT)._repr_html_()
    assert shown.startswith('<iframe sandbox="allow-scripts" srcdoc="&lt;!doctype html&gt;') and shown.count('"') == 6
    assert regard.watching.Seen()._repr_html_() == "Seen(0 places, 0 calls)"
