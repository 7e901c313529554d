"""The text task: documents and their split, tokens, windows, scores, and folders that others read."""

from __future__ import annotations

import math
import os
import random
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from regard.models import load
from regard.training.corpus import Document, docstrings, own_documents, own_tokens, python_documents, split
from regard.training.recipe import Recipe
from regard.training.tasks.text import END, TextTask

SAID = "the head of a token looks at what came before it and gives more weight to one key than another"
SMALL = {
    **{"batch": 4, "model.d": 32, "model.heads": 2, "model.layers": 2, "model.hidden": 48},
    **{"data.vocabulary": 300, "data.window": 64, "data.opening": 0.0, "data.quoted": 0.0},
}


def prose(seed: int, paragraphs: int) -> str:
    """English of a kind, with some letters beyond ASCII, in paragraphs."""
    draw = random.Random(seed)
    said = (" ".join(draw.choices(SAID.split(), k=draw.randint(8, 30))) + " — één.\n" for _ in range(paragraphs))
    return "\n".join(said)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("own") / "prose.txt"
    found.write_text(prose(0, 400), encoding="utf-8")
    return found


def recipe(path: Path | str, **changes: object) -> Recipe:
    return TextTask.recipe.changed({**SMALL, "data.path": str(path), **changes})


def opened(path: Path | str, prepared: Path | None = None, **changes: object) -> TextTask:
    task = TextTask(recipe(path, **changes), prepared)
    task.prepare()
    task.open()
    return task


@pytest.fixture(scope="module")
def task(file: Path) -> TextTask:
    return opened(file)


def test_docstrings_are_read_and_not_run(tmp_path: Path) -> None:
    (tmp_path / "pkg" / "tests").mkdir(parents=True)
    (tmp_path / "pkg" / "one.py").write_text(
        '"""The module.\n\nSecond paragraph of this module, which is long enough."""\nraise SystemExit\n'
        'class A:\n    """A class."""\n    def f(self):\n        """A method."""\n        def g():\n'
        '            """Inside."""\n    if True:\n        async def h(self):\n            "Async."\n'
        'x = "no docstring"\n'
    )
    inside = ["A class.", "A method.", "Inside.", "Async."]
    module = "The module.\n\nSecond paragraph of this module, which is long enough."
    assert list(docstrings(tmp_path / "pkg" / "one.py")) == [module, *inside]
    quoted = '"""Second paragraph of this module, which is\nlong enough.\n\nNew."""\ndef f():\n    "A method."\n'
    (tmp_path / "pkg" / "two.py").write_text(quoted)
    (tmp_path / "pkg" / "broken.py").write_text("def :")
    (tmp_path / "pkg" / "bytes.py").write_bytes(b'"""\xff"""')
    (tmp_path / "pkg" / "half.py").write_text('"""\\ud800"""')  # no text that can be written
    (tmp_path / "pkg" / "tests" / "test_one.py").write_text('"""A test."""')
    found = {x.name: x.text for x in python_documents(tmp_path) if not x.name.startswith("topics/")}
    assert list(found) == ["pkg/one.py", "pkg/two.py"]
    assert found["pkg/one.py"] == module + "\n\n" + "\n\n".join(inside) + "\n"
    assert found["pkg/two.py"] == "New.\n\nA method.\n"  # what is long and was said before is left out


def test_topics_do_not_quote_each_other(tmp_path: Path) -> None:
    documents = python_documents(tmp_path)
    assert len(documents) > 60
    assert sum(len(x.text) for x in documents) > 250_000
    seen: dict[str, str] = {}
    for document in documents:
        for paragraph in document.text.split("\n\n"):
            words = " ".join(paragraph.split())
            if len(words) >= 40:
                assert seen.setdefault(words, document.name) == document.name


def test_a_name_alone_says_which_side() -> None:
    documents = [Document(f"file{i}.py", "x") for i in range(2000)]
    train, held = split(documents, 0.1)
    assert len(train) + len(held) == 2000
    assert not {x.name for x in train} & {x.name for x in held}
    assert 150 < len(held) < 250
    assert split(documents[::-1], 0.1)[1] == held[::-1]
    assert [x.name for x in held[:3]] == ["file0.py", "file11.py", "file24.py"]  # on every machine
    fewer = split(documents[:50], 0.1)[1]
    assert fewer == held[: len(fewer)]


@pytest.mark.parametrize("share", [0.0001, 0.9999])
def test_neither_side_is_empty(share: float) -> None:
    for count in (2, 3, 10):
        train, held = split([Document(str(i), "x") for i in range(count)], share)
        assert train
        assert held


def test_a_text_is_cut_into_pieces_that_are_the_text(file: Path, tmp_path: Path) -> None:
    documents = own_documents(file)
    assert "".join(x.text for x in documents) == file.read_text()
    assert len(documents) >= 40
    assert all(x.text.endswith("\n\n") for x in documents[:-1])
    assert len({x.name for x in documents}) == len(documents)
    line = tmp_path / "line.txt"  # one line, no blank to cut at
    line.write_text("".join(chr(97 + i % 26) + str(i) for i in range(5000)))
    documents = own_documents(line)
    assert "".join(x.text for x in documents) == line.read_text()
    assert len(documents) >= 40


def test_a_folder_has_a_document_a_file(tmp_path: Path) -> None:
    for inner in ("inner", ".git"):
        (tmp_path / inner).mkdir()
    texts = {"a.txt": "one", "b.md": "two", "inner/c.rst": "three", "d.py": "four"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    for name, text in (
        *(("again.txt", "two"), ("empty.txt", " \n"), ("image.png", "png"), ("e.json", "{}")),
        *((".hidden.txt", "six"), (".git/f.txt", "seven")),
    ):
        (tmp_path / name).write_text(text)
    found = {x.name: x.text for x in own_documents(tmp_path)}
    assert sorted(found.values()) == sorted(texts.values())  # what stands there twice is kept once
    assert set(found) <= {*texts, "again.txt"}


@pytest.mark.parametrize("kind", ["npy", "safetensors", "two dimensions"])
def test_token_arrays(tmp_path: Path, kind: str) -> None:
    ids = np.random.default_rng(0).integers(0, 40, 6000)
    path = tmp_path / ("ids.safetensors" if kind == "safetensors" else "ids.npy")
    if kind == "safetensors":
        save_file({"ids": torch.from_numpy(ids)}, path)
    else:
        np.save(path, ids.astype(np.uint16).reshape(60, 100) if kind == "two dimensions" else ids)
    assert np.array_equal(np.concatenate([x.ids for x in own_tokens(path, 40)]), ids)
    task = opened(path, tmp_path / "prepared", **{"data.vocabulary": 40, "data.bytes": 2.0})
    assert task.end is None
    assert len(task.data.train) + len(task.data.held) == 6000
    model = task.model()
    assert model.config.whole("vocab_size") == 40
    assert "tokenizer.json" not in model.beside
    with torch.no_grad():
        scores = task.scores(task.check(model, task.checks()[0]))
    assert math.isclose(scores["bits per byte"], scores["loss"] / math.log(2) / 2)
    assert set(task.batch(3)) == {"ids"}
    names = [(x.name, list(x.ids.shape)) for x in task.probes()]
    assert names == [("natural", [2, 64]), ("repeated", [2, 39]), ("random", [2, 39])]
    # Nothing can be known of random tokens.
    assert all(math.log2(40) < 2 * bits < 8 for bits in task.baselines().values())


def test_windows_count_each_held_out_token_once(task: TextTask) -> None:
    held = task.data.held
    for window in (64, 50, 33, len(held) - 1):
        task.n, before = window, task.n
        try:
            checks = task.checks()
        finally:
            task.n = before
        ids, counted = (torch.cat([x[name] for x in checks]) for name in ("ids", "counted"))
        assert torch.equal(ids[:, 1:][counted], held[1:].long())
        assert (ids[:, 0] == 0).all()
        assert counted.any(-1).all()
        fair = counted[1:-1].long().argmax(-1)  # where the first token that counts stands
        assert (fair >= window // 2).all()


def test_bits_per_byte_are_those_of_one_long_sum(task: TextTask, file: Path) -> None:
    torch.manual_seed(0)
    model = task.model().eval()
    held = task.data.held.long()
    nats = torch.zeros(len(held) - 1, dtype=torch.float64)
    with torch.no_grad():
        sums: dict[str, float] = {}
        for batch in task.checks():
            for name, value in task.check(model, batch).items():
                sums[name] = sums.get(name, 0.0) + value
        done = 0
        for start in [*range(0, len(held) - 1 - 64, 32), len(held) - 1 - 64]:  # later windows know more
            window = held[start : start + 65].clone()
            window[0] = 0
            logp = F.log_softmax(model(window[None, :-1])[0].double(), -1).gather(1, window[1:, None])[:, 0]
            new = slice(done - start, 64)
            nats[start : start + 64][new] = -logp[new]
            done = start + 64
    documents = split(own_documents(file), 0.1)[1]
    size = sum(len(x.text.encode()) for x in documents)
    assert sums["tokens"] == len(held) - 1
    expected = float(nats.sum()) / math.log(2) / size
    assert math.isclose(task.scores(sums)["bits per byte"], expected, rel_tol=1e-6)
    assert expected < 8
    assert math.isclose(task.scores(sums)["loss"], float(nats.mean()), rel_tol=1e-6)


def test_batches_are_functions_of_the_step(task: TextTask, file: Path) -> None:
    other = opened(file)
    for step in (5, 0, 17):
        assert torch.equal(task.batch(step)["ids"], other.batch(step)["ids"])
    assert not torch.equal(task.batch(0)["ids"], task.batch(1)["ids"])
    seeded = TextTask(recipe(file, seed=1))
    seeded.open()
    assert not torch.equal(task.batch(0)["ids"], seeded.batch(0)["ids"])
    assert task.batch(0)["ids"].shape == (4, 65)
    assert task.count(task.batch(0)) == 4 * 64


def test_an_epoch_reads_every_window_once(task: TextTask) -> None:
    train = task.data.train.long()
    many = (len(train) - 1) // task.n - 1
    steps = -(-many // 4)
    ids = torch.cat([task.batch(step)["ids"] for step in range(steps)])[:many, 1:]
    said = train.tolist()
    places = {tuple(said[at : at + task.n]): at for at in range(len(said) - task.n + 1)}
    starts = sorted(places[tuple(row)] for row in ids.tolist())
    assert all(b - a == task.n for a, b in pairwise(starts))
    assert starts[0] < task.n + 1


def test_the_tokenizer_knows_the_training_part_alone(tmp_path: Path) -> None:
    names = [f"{i}.txt" for i in range(40)]
    held = {x.name for x in split([Document(name, "") for name in names], 0.1)[1]}
    for i, name in enumerate(names):
        rare = "zyzzyva zyzzyva zyzzyva " if name in held else "quokka quokka quokka "
        (tmp_path / name).write_text(rare * 20 + prose(i, 4))
    task = opened(tmp_path, **{"data.vocabulary": 400})
    text = task.model().text
    assert len(text.encode(" quokka")) == 2  # <|endoftext|>, quokka
    assert len(text.encode(" zyzzyva")) > 4
    # Documents stand between ends, and none is on both sides.
    pieces = "".join(text.tokens(task.data.held.tolist())).split(END)
    assert pieces[0] == pieces[-1] == ""
    assert len(pieces) == len(held) + 2


def test_a_text_may_say_endoftext(tmp_path: Path) -> None:
    for i in range(30):
        (tmp_path / f"{i}.txt").write_text(f"{END} is what {END} means {i}. " * 20)
    task = opened(tmp_path)
    assert int((task.data.train == 0).sum()) + int((task.data.held == 0).sum()) == 30 + 2


def test_what_was_prepared_is_read(file: Path, tmp_path: Path, task: TextTask) -> None:
    written = opened(file, tmp_path / "prepared")
    names = sorted(x.name for x in (tmp_path / "prepared").iterdir())
    assert names == ["tokenizer.json", "tokens.safetensors"]
    again = TextTask(recipe(tmp_path / "nowhere.txt"), tmp_path / "prepared")  # the data is not read again
    again.prepare()
    again.open()
    for one in (written, again):
        assert torch.equal(one.data.train, task.data.train)
        assert torch.equal(one.data.held, task.data.held)
        assert one.data.size == task.data.size
    (tmp_path / "prepared" / "tokens.safetensors").write_bytes(b"broken")
    with pytest.raises(ValueError, match="truncated"):
        again.open()
    with pytest.raises(ValueError, match="prepare"):
        TextTask(recipe(file), tmp_path / "empty").open()
    with pytest.raises(RuntimeError, match="not open"):
        TextTask(recipe(file)).model()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_folders_are_read_here_and_by_transformers(file: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    task = opened(file, **{"model.bias": True})
    torch.manual_seed(1)
    model = task.model().eval()
    biases = [x for name, x in model.named_parameters() if name.endswith("q_proj.bias")]
    assert len(biases) == 2
    for bias in biases:
        torch.nn.init.normal_(bias)
    task.save(model, tmp_path / "model")
    same, theirs = load(tmp_path / "model"), AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    text = "the key — één  is\n\n    another 🎉\t"
    ids = same.text.encode(text)
    assert ids[0] == 0
    assert tokenizer.encode(text) == ids
    assert same.text.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 0)
    assert type(theirs).__name__ == "LlamaForCausalLM"
    given = torch.tensor([ids])
    with torch.no_grad():
        expected = model(given)
        assert torch.equal(same(given), expected)
        assert torch.allclose(theirs(given).logits, expected, atol=1e-5)
    assert isinstance(same.generate("the head", 4), str)


@pytest.mark.parametrize("tied", [True, False])
def test_it_learns(file: Path, tied: bool) -> None:
    task = opened(file, **{"model.tied": tied})
    torch.manual_seed(0)
    model = task.model().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    def score() -> float:
        with torch.no_grad():
            batches = [task.check(model, x) for x in task.checks()]
        return task.scores({k: sum(x[k] for x in batches) for k in batches[0]})["bits per byte"]

    before = score()
    for step in range(30):
        batch = task.batch(step)
        (task.loss(model, batch) / task.count(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert score() < 0.7 * before
    assert all(0 < bits < before for bits in task.baselines().values())


def test_probes_are_of_the_held_out_text(task: TextTask) -> None:
    natural, again, other = task.probes()
    assert (natural.name, again.name, other.name) == ("natural", "repeated", "random")
    assert natural.ids.shape == (2, 64)
    assert (natural.ids[:, 0] == 0).all()
    joined = "".join(task.model().text.decode(row.tolist()) for row in natural.ids)
    held = task.model().text.decode(task.data.held.tolist())
    assert held.startswith(joined)
    assert again.block == 21  # what of 48 a window of 64 holds three times
    assert torch.equal(again.ids[:, 1:22], again.ids[:, 22:43])


def write(tmp_path: Path, name: str, content: bytes) -> Path:
    (tmp_path / name).write_bytes(content)
    return tmp_path / name


def test_what_cannot_be_read_is_refused_in_one_line(tmp_path: Path, file: Path) -> None:
    np.save(tmp_path / "floats.npy", np.zeros(100))
    np.save(tmp_path / "objects.npy", np.array([{}] * 100, dtype=object), allow_pickle=True)
    np.save(tmp_path / "large.npy", np.arange(5000))
    np.save(tmp_path / "few.npy", np.arange(5))
    np.savez(tmp_path / "several.npz", a=np.arange(5))
    (tmp_path / "several.npz").rename(tmp_path / "several.npy")
    save_file({"a": torch.zeros(99), "b": torch.zeros(9)}, tmp_path / "two.safetensors")
    save_file({"a": torch.zeros(99)}, tmp_path / "real.safetensors")
    save_file({"a": torch.zeros(99, dtype=torch.bool)}, tmp_path / "truth.safetensors")
    (tmp_path / "folder").mkdir()
    head = "{'descr': '<i8', 'fortran_order': False, 'shape': %s, }"
    shapes = {"huge": "(1000000000000,)", "wide": "(4294967296, 4294967296, 2)", "beyond": f"({10**400},)"}
    for name, said in {**shapes, "unclosed": "(((", "named": "(9,)"}.items():
        text = (head % said).ljust(1023).encode() + b"\n"
        version = b"\x03\x00" if name == "named" else b"\x01\x00"
        size = len(text).to_bytes(4 if name == "named" else 2, "little")
        write(tmp_path, f"{name}.npy", b"\x93NUMPY" + version + size + text + bytes(800))
    write(tmp_path, "cut.npy", (tmp_path / "large.npy").read_bytes()[:-1])
    cases: list[tuple[Path, dict[str, object], str]] = [
        (tmp_path / "missing.txt", {}, "does not exist"),
        (tmp_path / "missing.npy", {}, "does not exist"),
        (tmp_path / "folder", {}, "no text files"),
        (write(tmp_path, "empty.txt", b""), {}, "empty"),
        (write(tmp_path, "blank.txt", b" \n\n \n"), {}, "empty"),
        (write(tmp_path, "short.txt", b"short"), {}, "too short"),
        (write(tmp_path, "latin.txt", b"caf\xe9 " * 50), {}, "not UTF-8 text: invalid continuation byte at byte 3"),
        (write(tmp_path, "brief.txt", b"a few words, each once. " * 4), {}, "too few for a window of 64"),
        (write(tmp_path, "broken.npy", b"nothing"), {}, "without pickle"),
        (write(tmp_path, "broken.safetensors", b"nothing"), {}, "no safetensors"),
        (file, {"data.vocabulary": 256}, "257 or more"),
        (file, {"data.held": 0.0}, "data.held is 0.0"),
        (file, {"data.held": 1.0}, "data.held is 1.0"),
        (file, {"data.window": 4}, "data.window is 4"),
        (tmp_path / "floats.npy", {}, "holds float64"),
        (tmp_path / "real.safetensors", {}, "holds float32"),
        (tmp_path / "truth.safetensors", {}, "holds bool"),
        (tmp_path / "objects.npy", {}, "without pickle"),
        (tmp_path / "several.npy", {}, "several arrays"),
        (tmp_path / "two.safetensors", {}, "2 tensors"),
        (tmp_path / "few.npy", {}, "5 tokens"),
        (tmp_path / "large.npy", {}, "ids from 0 to 4999; data.vocabulary is 300"),
        (tmp_path / "large.npy", {"data.vocabulary": 1}, "data.vocabulary is 1"),
        (tmp_path / "large.npy", {"data.bytes": 0.0}, "data.bytes is 0.0"),
        (
            tmp_path / "huge.npy",
            {},
            "truncated or no array that can be read without pickle: it says that it has 8,000,",
        ),
        (tmp_path / "wide.npy", {}, "truncated"),
        (tmp_path / "beyond.npy", {}, "truncated"),
        (tmp_path / "unclosed.npy", {}, "truncated"),
        (tmp_path / "named.npy", {}, "its format is 3.0"),
        (tmp_path / "cut.npy", {}, "truncated"),
        (file, {"data.vocabulary": 10**25}, "data.vocabulary is 10000000000000000000000000; it must be a whole number"),
        (file, {"data.window": 10**9}, "data.window is 1000000000; it must be a whole number from 8 to 65,536"),
        (file, {"data.vocabulary": 2**20, "model.d": 2048}, "1,048,576 vectors for tokens and places make about 2e+09"),
        (file, {"model.dropout": 1.0}, "model.dropout is 1; it must be ≥ 0 and < 1"),
        (file, {"model.dropout": math.nan}, "model.dropout is nan"),
        (file, {"batch": 10**12}, "batch is 1,000,000,000,000, of 64 numbers each (tokens)"),
        (Path("~nobody-of-that-name/x"), {}, "no such home folder"),
    ]
    for path, changes, said in cases:
        with pytest.raises(ValueError, match=re.escape(said)) as caught:
            opened(path, **changes)
        assert "\n" not in str(caught.value)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes, so that no file can be one")
def test_pipes_are_not_waited_for(tmp_path: Path) -> None:
    for name in ("pipe.txt", "pipe.npy", "pipe.safetensors"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(ValueError, match=r"neither a file nor a folder|is no file"):
            opened(tmp_path / name)
    with pytest.raises(ValueError, match="no text files"):
        opened(tmp_path)
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_text("two")
    assert [x.name for x in own_documents(tmp_path)] == ["a.txt", "b.txt"]
    os.mkfifo(tmp_path / "pipe.py")
    assert all(x.name.startswith("topics/") for x in python_documents(tmp_path))


def test_more_than_memory_holds_is_not_read(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt", "ids.npy", "ids.safetensors"):
        with (tmp_path / name).open("wb") as sparse:
            sparse.truncate(2**30 + 1)
        with pytest.raises(ValueError, match=r"has 1,073,741,825 bytes to read; at most 1,073,741,824 are taken"):
            opened(tmp_path / name)
    with pytest.raises(ValueError, match="2,147,483,650 bytes"):
        opened(tmp_path)


def test_a_text_may_lie_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prose.txt").write_text(prose(0, 400), encoding="utf-8")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(opened("~/prose.txt").data.train) > 64


def test_a_corpus_of_one_document_is_refused() -> None:
    with pytest.raises(ValueError, match="two at least"):
        split([Document("a", "x")], 0.1)
    with pytest.raises(ValueError, match="one name"):
        split([Document("a", "x"), Document("a", "y")], 0.1)
