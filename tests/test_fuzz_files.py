"""Damaged files of every kind: no reader crashes, hangs, raises an unexpected error, or deletes anything.

The corpus in tests/corpus holds the damage that was found earlier. `make fuzz-files` tries new damage.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.mutations import OPERATIONS, apply_edits, read_files, write_files

ROOT = Path(__file__).resolve().parent.parent
CORPUS = ROOT / "tests" / "corpus"
KINDS = ("recording", "model", "gguf", "preprocessor", "tokenizer", "recipe", "checkpoint", "record", "lab")


def fuzz(*options: str) -> str:
    """Run the fuzzer in a process of its own, which forks others. Returns what it prints."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tests" / "fuzz_files.py"), *options]
    process = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout[-6000:] + process.stderr[-3000:]
    return process.stdout


def test_what_was_found_stays_mended_and_a_few_new_cases_find_nothing() -> None:
    printed = fuzz("--corpus", "--cases", "4", "--first", "1")
    for kind in KINDS:
        assert f" {kind}" in printed


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_damaged_files_of_each_kind(kind: str) -> None:
    assert f"1000 {kind}" in fuzz("--cases", "1000", "--first", "100000", "--kinds", kind)


def test_the_corpus_is_plain_data() -> None:
    for file in sorted(CORPUS.glob("*.jsonl")):
        assert file.stem in KINDS
        assert file.stat().st_size < 64 * 1024
        for line in file.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            assert set(entry) == {"why", "seed", "edits"} and entry["why"] and entry["edits"]
            assert all(edit["do"] in OPERATIONS for edit in entry["edits"])


def test_edits_do_what_they_say(tmp_path: Path) -> None:
    files = {"a.json": b'{"x": [1, 2], "y": "z"}', "b.txt": b"abc"}
    edits = [
        {"do": "set", "file": "a.json", "path": ["x", 1], "value": {"$digits": 30}},
        {"do": "drop", "file": "a.json", "path": ["y"]},
        {"do": "set", "file": "a.json", "path": ["deep"], "value": {"$nest": 3}},
        {"do": "flip", "file": "b.txt", "at": 0, "bit": 1},
        {"do": "special", "file": "c", "kind": "fifo"},
    ]
    edited = apply_edits(files, edits, strict=True)
    assert json.loads(edited["a.json"]) == {"x": [1, int("9" * 30)], "deep": [[[]]]}
    write_files(edited, tmp_path)
    assert read_files(tmp_path)["b.txt"] == b"cbc"
    assert (tmp_path / "c").is_fifo()
