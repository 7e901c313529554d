"""Read and split the documents of the text task: Python's own documentation, or the user's texts and token arrays.

Every machine has Python's reference (``pydoc_data.topics``) and the docstrings of its standard library, about 2.1 MB of
English. They are read from the source files, which are never imported.
"""

from __future__ import annotations

import ast
import hashlib
import math
import os
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics
from tokenize import TokenError
from typing import TypeVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from regard._checks import is_integer_dtype
from regard._errors import RegardError

SUFFIXES = (".txt", ".md", ".rst", ".py")
ARRAY_SUFFIXES = (".npy", ".safetensors")
SKIPPED_FOLDERS = ("test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data", "__pycache__")
MIN_QUOTE = 40  # characters; shorter paragraphs ("Return True.") may occur in several documents
MAX_PIECE = 4096  # characters of a piece of a large text, or tokens of a long array
MIN_PIECES = 50  # a long text is cut into at least 50 pieces, because a tenth of them is held out
MIN_PIECE = 16  # characters or tokens
MAX_BYTES = 2**30  # of everything that is read; more does not fit into memory


@dataclass(frozen=True)
class Document:
    """A text, and the name that decides whether it is held out."""

    name: str
    text: str


@dataclass(frozen=True)
class TokenPiece:
    """Token ids, and the name that decides whether they are held out."""

    name: str
    ids: np.ndarray


T = TypeVar("T", Document, TokenPiece)


def split_documents(documents: Sequence[T], share: float) -> tuple[list[T], list[T]]:
    """Split documents into (train, held out): a document is held out if hash(name) / 2⁶⁴ < ``share``.

    If a part would be empty, it gets the document whose hash is nearest to the limit. Otherwise only the name decides,
    so a document is in the same part on every machine, whatever the other documents are.
    """
    if not 0 < share < 1:
        raise RegardError(f"data.held is {share}; it must be a share between 0 and 1, for example 0.1")
    if len(documents) < 2:
        raise RegardError(f"the data has {len(documents)} documents; there must be at least two, to hold one out")
    hashes = {x.name: int.from_bytes(hashlib.sha256(x.name.encode()).digest()[:8]) / 2**64 for x in documents}
    if len(hashes) < len(documents):
        raise RegardError("two documents have the same name; names must differ, because they decide what is held out")
    # These two limits leave at least one document on each side.
    smallest = min(hashes.values())
    limit = min(share, max(hashes.values()))
    train = []
    held_out = []
    for document in documents:
        value = hashes[document.name]
        if value <= smallest or value < limit:
            held_out.append(document)
        else:
            train.append(document)
    return train, held_out


def python_documents(library: Path | None = None) -> list[Document]:
    """Return Python's reference by topic, and the docstrings of its standard library, one document per source file.

    Topics quote each other, and files share docstrings. A paragraph that an earlier document contains is left out, so
    that held-out text does not occur in the training text.
    """
    root = Path(sysconfig.get_path("stdlib")) if library is None else library
    texts = {f"topics/{name}": text for name, text in sorted(topics.items())}
    for name in _list_files(root, (".py",), SKIPPED_FOLDERS):
        texts[name] = "\n\n".join(dict.fromkeys(docstrings(root / name)))

    documents = []
    known = set[str]()
    for name, text in texts.items():
        new = []
        long = set[str]()
        for paragraph in re.split(r"\n\s*\n", text):
            words = " ".join(paragraph.split())
            if words not in known:
                new.append(paragraph)
            if len(words) >= MIN_QUOTE:
                long.add(words)
        known |= long
        joined = "\n\n".join(new)
        if joined.strip():
            documents.append(Document(name, joined.strip("\n") + "\n"))
    return documents


def docstrings(file: Path) -> Iterator[str]:
    """Yield the docstrings of a source file from top to bottom; nothing if this Python version cannot parse it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old files contain invalid escapes
            tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    # A stack instead of recursion: source files may be nested deeply.
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            # Some sources contain lone surrogates, which cannot be written as UTF-8.
            if text and text == text.encode(errors="ignore").decode():
                yield text
        children = [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr)]
        stack += reversed(children)


def read_documents(path: Path) -> list[Document]:
    """Read a text file in pieces, or the text files of a folder as one document each; equal texts are kept once.

    Sub-folders are read too, except those whose names start with a dot.
    """
    if not path.exists():
        raise RegardError(f"data.path is {path}, which does not exist; give a text, a folder of texts or a token array")
    if path.is_dir():
        names = _list_files(path, SUFFIXES)
        if not names:
            accepted = "*" + ", *".join(SUFFIXES)
            raise RegardError(f"data.path is {path}, a folder without text files; accepted are {accepted}")
        _check_size(path, names)
        documents = [Document(name, _read_text(path / name)) for name in names]
        # If the folder has one file only, cut it into pieces: otherwise nothing could be held out.
        if len(documents) == 1:
            documents = _cut_text(documents[0])
    elif path.is_file():
        _check_size(path)
        documents = _cut_text(Document(path.name, _read_text(path)))
    else:
        raise RegardError(f"data.path is {path}, which is neither a file nor a folder; give one of them")

    # Otherwise a held-out text could also occur in the training text.
    different: dict[str, Document] = {}
    for document in documents:
        if document.text.strip():
            different.setdefault(document.text, document)
    if not different:
        raise RegardError(f"data.path is {path}, which is empty; give a text to learn from")
    if len(different) < 2:
        raise RegardError(f"data.path is {path}, which is too short to hold a part of it out; give more text")
    return list(different.values())


def read_token_array(path: Path, vocabulary: int) -> list[TokenPiece]:
    """Read a token array in pieces: the ids of a ``.npy`` file, or the only tensor of a ``.safetensors`` file."""
    if not path.is_file():
        problem = "is not a file" if path.exists() else "does not exist"
        raise RegardError(f"data.path is {path}, which {problem}")
    _check_size(path)
    ids = _read_npy(path) if path.suffix == ".npy" else _read_safetensors(path)
    if ids.dtype.kind not in "iu":
        raise RegardError(f"{path} contains {ids.dtype}; token ids must be integers")
    ids = ids.reshape(-1)
    if len(ids) < 2 * MIN_PIECE:
        raise RegardError(f"{path} has {len(ids)} tokens; it must have at least {2 * MIN_PIECE}")
    # An id outside the vocabulary would fail deep inside the model.
    low = int(ids.min())
    high = int(ids.max())
    if low < 0 or high >= vocabulary:
        accepted = f"0 … {vocabulary - 1}, because data.vocabulary is {vocabulary}"
        raise RegardError(f"{path} has ids from {low} to {high}; they must be in {accepted}")

    # The last piece also takes the remainder, so that no piece is shorter than the others.
    size = _piece_size(len(ids))
    count = max(1, len(ids) // size)
    ends = [*range(0, count * size, size), len(ids)]
    return [TokenPiece(f"{path.name}:{k}", ids[a:b]) for k, (a, b) in enumerate(pairwise(ends))]


def _list_files(root: Path, suffixes: Sequence[str], skipped: Sequence[str] = ()) -> list[str]:
    """Return the sorted names of the files below a folder, without hidden files and folders."""
    names = []
    for folder, subfolders, files in os.walk(root):
        # os.walk descends only into the folders that are left in this list.
        subfolders[:] = [name for name in subfolders if name not in skipped and not name.startswith(".")]
        for name in files:
            file = Path(folder) / name
            # Only regular files: reading a pipe or a device would never end.
            if file.suffix in suffixes and not name.startswith(".") and file.is_file():
                names.append(file.relative_to(root).as_posix())
    return sorted(names)


def _check_size(path: Path, names: Iterable[str] = ("",)) -> None:
    """Raise, before anything is read, if the files are too large together."""
    total = sum((path / name).stat().st_size for name in names)
    if total > MAX_BYTES:
        raise RegardError(f"data.path is {path} with {total:,} bytes; at most {MAX_BYTES:,} are accepted")


def _read_npy(path: Path) -> np.ndarray:
    try:
        _check_npy_header(path)
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError, SyntaxError, TypeError, TokenError, RecursionError, MemoryError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise RegardError(f"{path} is truncated, or not an array that can be read without pickle: {reason}") from None
    if not isinstance(array, np.ndarray):
        raise RegardError(f"{path} contains several arrays; it must contain one, written by numpy.save")
    return array


def _check_npy_header(path: Path) -> None:
    """Raise if a ``.npy`` file claims more numbers than it has: NumPy would first allocate all that is claimed."""
    with path.open("rb") as opened:
        if opened.read(len(np.lib.format.MAGIC_PREFIX)) != np.lib.format.MAGIC_PREFIX:
            return  # not a .npy file; numpy.load says what is wrong
        opened.seek(0)
        version = np.lib.format.read_magic(opened)
        if version == (1, 0):
            shape, _, dtype = np.lib.format.read_array_header_1_0(opened)
        elif version == (2, 0):
            shape, _, dtype = np.lib.format.read_array_header_2_0(opened)
        else:
            raise RegardError(f"its format is {'.'.join(map(str, version))}; arrays of numbers have 1.0 or 2.0")
        available = path.stat().st_size - opened.tell()
    claimed = math.prod(shape) * dtype.itemsize
    if claimed > available and not dtype.hasobject:
        raise RegardError(f"it claims {claimed:,} bytes of numbers, and has {available:,}")


def _read_safetensors(path: Path) -> np.ndarray:
    try:
        with safe_open(path, framework="pt") as opened:
            names = list(opened.keys())
            if len(names) != 1:
                raise RegardError(f"{path} contains {len(names)} tensors; a token array must be one")
            tensor: torch.Tensor = opened.get_tensor(names[0])
    except (SafetensorError, OSError) as error:
        raise RegardError(f"{path} is truncated, or not a safetensors file: {error}") from None
    if not is_integer_dtype(tensor.dtype):
        raise RegardError(f"{path} contains {str(tensor.dtype).removeprefix('torch.')}; token ids must be integers")
    return np.asarray(tensor.to(torch.int64).numpy())


def _read_text(file: Path) -> str:
    try:
        return file.read_bytes().decode()
    except OSError as error:
        raise RegardError(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RegardError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start:,}") from None


def _cut_text(document: Document) -> list[Document]:
    """Cut a text into pieces, at blank lines, or at line ends if it has few blank lines; nothing is left out."""
    text = document.text
    size = _piece_size(len(text))
    mark = "\n\n" if text.count("\n\n") >= MIN_PIECES else "\n"
    pieces: list[str] = []
    pending = ""
    parts = [part + mark for part in text.split(mark)]
    parts[-1] = parts[-1].removesuffix(mark)  # the text ends without it
    for part in parts:
        pending += part
        while len(pending) >= size:
            # A part that is much too long, such as a book in one line, is cut anywhere.
            end = len(pending) if len(pending) < 2 * size else size
            pieces.append(pending[:end])
            pending = pending[end:]
    if pending:
        pieces.append(pending)
    return [Document(f"{document.name}:{k}", piece) for k, piece in enumerate(pieces)]


def _piece_size(length: int) -> int:
    return max(MIN_PIECE, min(MAX_PIECE, length // MIN_PIECES))
