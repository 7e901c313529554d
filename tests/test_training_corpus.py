"""Documents and token arrays to learn from: how they are read, split, and refused."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.own_text import opened, prose, written

from regard.training._corpus import (
    Document,
    docstrings,
    python_documents,
    read_documents,
    read_token_array,
    split_documents,
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("own"))


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
    train, held = split_documents(documents, 0.1)
    assert len(train) + len(held) == 2000
    assert not {x.name for x in train} & {x.name for x in held}
    assert 150 < len(held) < 250
    assert split_documents(documents[::-1], 0.1)[1] == held[::-1]
    assert [x.name for x in held[:3]] == ["file0.py", "file11.py", "file24.py"]  # on every machine
    fewer = split_documents(documents[:50], 0.1)[1]
    assert fewer == held[: len(fewer)]


@pytest.mark.parametrize("share", [0.0001, 0.9999])
def test_neither_side_is_empty(share: float) -> None:
    for count in (2, 3, 10):
        train, held = split_documents([Document(str(i), "x") for i in range(count)], share)
        assert train
        assert held


def test_a_text_is_cut_into_pieces_that_are_the_text(file: Path, tmp_path: Path) -> None:
    documents = read_documents(file)
    assert "".join(x.text for x in documents) == file.read_text()
    assert len(documents) >= 40
    assert all(x.text.endswith("\n\n") for x in documents[:-1])
    assert len({x.name for x in documents}) == len(documents)
    line = tmp_path / "line.txt"  # one line, no blank to cut at
    line.write_text("".join(chr(97 + i % 26) + str(i) for i in range(5000)))
    documents = read_documents(line)
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
    found = {x.name: x.text for x in read_documents(tmp_path)}
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
    assert np.array_equal(np.concatenate([x.ids for x in read_token_array(path, 40)]), ids)
    task = opened(path, tmp_path / "prepared", **{"data.vocabulary": 40, "data.bytes": 2.0})
    assert task.end is None
    assert len(task.data.train) + len(task.data.held_out) == 6000
    model = task.model()
    assert model.config.integer("vocab_size") == 40
    assert "tokenizer.json" not in model.extra_files
    with torch.no_grad():
        scores = task.scores(task.evaluate_batch(model, task.held_out_batches()[0]))
    assert math.isclose(scores["bits per byte"], scores["loss"] / math.log(2) / 2)
    assert set(task.batch(3)) == {"ids"}
    names = [(x.name, list(x.ids.shape)) for x in task.probes()]
    assert names == [("natural", [2, 64]), ("repeated", [2, 39]), ("random", [2, 39])]
    # Nothing can be known of random tokens.
    assert all(math.log2(40) < 2 * bits < 8 for bits in task.baselines().values())


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
        (tmp_path / "folder", {}, "without text files"),
        (write(tmp_path, "empty.txt", b""), {}, "empty"),
        (write(tmp_path, "blank.txt", b" \n\n \n"), {}, "empty"),
        (write(tmp_path, "short.txt", b"short"), {}, "too short"),
        (write(tmp_path, "latin.txt", b"caf\xe9 " * 50), {}, "not UTF-8 text: invalid continuation byte at byte 3"),
        (write(tmp_path, "brief.txt", b"a few words, each once. " * 4), {}, "data.window is 64"),
        (write(tmp_path, "broken.npy", b"nothing"), {}, "without pickle"),
        (write(tmp_path, "broken.safetensors", b"nothing"), {}, "not a safetensors file"),
        (file, {"data.vocabulary": 256}, "257 or more"),
        (file, {"data.held": 0.0}, "data.held is 0.0"),
        (file, {"data.held": 1.0}, "data.held is 1.0"),
        (file, {"data.window": 4}, "data.window is 4"),
        (tmp_path / "floats.npy", {}, "contains float64"),
        (tmp_path / "real.safetensors", {}, "contains float32"),
        (tmp_path / "truth.safetensors", {}, "contains bool"),
        (tmp_path / "objects.npy", {}, "without pickle"),
        (tmp_path / "several.npy", {}, "several arrays"),
        (tmp_path / "two.safetensors", {}, "2 tensors"),
        (tmp_path / "few.npy", {}, "5 tokens"),
        (tmp_path / "large.npy", {}, "ids from 0 to 4999"),
        (tmp_path / "large.npy", {"data.vocabulary": 1}, "data.vocabulary is 1"),
        (tmp_path / "large.npy", {"data.bytes": 0.0}, "data.bytes is 0"),
        (
            tmp_path / "huge.npy",
            {},
            "it claims 8,000,",
        ),
        (tmp_path / "wide.npy", {}, "truncated"),
        (tmp_path / "beyond.npy", {}, "truncated"),
        (tmp_path / "unclosed.npy", {}, "truncated"),
        (tmp_path / "named.npy", {}, "its format is 3.0"),
        (tmp_path / "cut.npy", {}, "truncated"),
        (file, {"data.vocabulary": 10**25}, "data.vocabulary is 10000000000000000000000000"),
        (file, {"data.window": 10**9}, "data.window is 1000000000"),
        (file, {"data.vocabulary": 2**20, "model.d": 2048}, "1,048,576 embedding vectors make about 2e+09"),
        (file, {"model.dropout": 1.0}, "model.dropout is 1; it must be ≥ 0 and < 1"),
        (file, {"model.dropout": math.nan}, "model.dropout is nan"),
        (file, {"batch": 10**12}, "batch is 1,000,000,000,000 examples of 64 numbers"),
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
        with pytest.raises(ValueError, match=r"neither a file nor a folder|is not a file"):
            opened(tmp_path / name)
    with pytest.raises(ValueError, match="without text files"):
        opened(tmp_path)
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_text("two")
    assert [x.name for x in read_documents(tmp_path)] == ["a.txt", "b.txt"]
    os.mkfifo(tmp_path / "pipe.py")
    assert all(x.name.startswith("topics/") for x in python_documents(tmp_path))


def test_more_than_memory_holds_is_not_read(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt", "ids.npy", "ids.safetensors"):
        with (tmp_path / name).open("wb") as sparse:
            sparse.truncate(2**30 + 1)
        with pytest.raises(ValueError, match=r"1,073,741,825 bytes; at most 1,073,741,824"):
            opened(tmp_path / name)
    with pytest.raises(ValueError, match="2,147,483,650 bytes"):
        opened(tmp_path)


def test_a_text_may_lie_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prose.txt").write_text(prose(0, 400), encoding="utf-8")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(opened("~/prose.txt").data.train) > 64


def test_a_corpus_of_one_document_is_refused() -> None:
    with pytest.raises(ValueError, match="the data has 1 documents"):
        split_documents([Document("a", "x")], 0.1)
    with pytest.raises(ValueError, match="same name"):
        split_documents([Document("a", "x"), Document("a", "y")], 0.1)
