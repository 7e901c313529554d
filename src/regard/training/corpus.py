"""Documents to learn from: those that every machine has, or one's own; and which of them are held out.

Every machine has Python's own reference (``pydoc_data.topics``) and the docstrings of its standard library, about
2.1 MB of English. They are read from the source files, which are never imported.
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
from pathlib import Path
from pydoc_data.topics import topics
from tokenize import TokenError
from typing import TypeVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

__all__ = ["SUFFIXES", "Document", "Tokens", "is_tokens", "own_documents", "own_tokens", "python_documents", "split"]

SUFFIXES = (".txt", ".md", ".rst", ".py")
ARRAYS = (".npy", ".safetensors")
OUTSIDE = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data", "__pycache__"})
QUOTED = 40  # characters of a paragraph that is no phrase of everyone's ("Return True.")
PIECE = 4096  # characters of a piece of one large text, or tokens of one long array
PIECES = 50  # that a text is cut into at least, where it is long enough: a tenth of them is held out
SHORTEST = 16  # characters or tokens of a piece
LARGEST = 2**30  # bytes of all that is read; more does not belong in memory


@dataclass(frozen=True)
class Document:
    """A text and the name that says whether it is held out."""

    name: str
    text: str


@dataclass(frozen=True)
class Tokens:
    """Token ids and the name that says whether they are held out."""

    name: str
    ids: np.ndarray


T = TypeVar("T", Document, Tokens)


def split(documents: Sequence[T], share: float) -> tuple[list[T], list[T]]:
    """(train, held out):  held out are those with  hash(name) / 2⁶⁴ < share,  or the one that comes nearest.

    A name alone decides, so that a document stays on its side on every machine, whatever else there is.
    """
    if not 0 < share < 1:
        raise ValueError(f"data.held is {share}; it must be a share between 0 and 1, e.g. 0.1")
    if len(documents) < 2:
        raise ValueError(f"the data has {len(documents)} documents; two at least are needed, to hold one out")
    at = {x.name: int.from_bytes(hashlib.sha256(x.name.encode()).digest()[:8]) / 2**64 for x in documents}
    if len(at) < len(documents):
        raise ValueError("two documents have one name; their names say which are held out")
    first, last = min(at.values()), max(at.values())
    out = [at[x.name] <= first or at[x.name] < min(share, last) for x in documents]
    return [x for x, o in zip(documents, out, strict=True) if not o], [
        x for x, o in zip(documents, out, strict=True) if o
    ]


def python_documents(library: Path | None = None) -> list[Document]:
    """Python's reference by topic, and the docstrings of its library: a document a source file.

    Topics quote each other and files share docstrings. A paragraph that an earlier document has is left out, so that
    what is held out was not read elsewhere.
    """
    root = Path(sysconfig.get_path("stdlib")) if library is None else library
    pairs = [(f"topics/{name}", text) for name, text in sorted(topics.items())]
    pairs += [(name, "\n\n".join(dict.fromkeys(docstrings(root / name)))) for name in _files(root, (".py",), OUTSIDE)]
    found, known = [], set[str]()
    for name, text in pairs:
        paragraphs = [(x, " ".join(x.split())) for x in re.split(r"\n\s*\n", text)]
        new = [x for x, words in paragraphs if words not in known]
        known |= {words for _, words in paragraphs if len(words) >= QUOTED}
        if any(x.strip() for x in new):
            found.append(Document(name, "\n\n".join(new).strip("\n") + "\n"))
    return found


def docstrings(file: Path) -> Iterator[str]:
    """The docstrings of a source file, from top to bottom; none of a file that is no Python of this version."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that old files write
            tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and _writable(text):
                yield text
        waiting += [x for x in reversed(list(ast.iter_child_nodes(node))) if not isinstance(x, ast.expr)]


def is_tokens(path: Path) -> bool:
    """Whether a path names a token array."""
    return path.suffix in ARRAYS


def own_documents(path: Path) -> list[Document]:
    """A text file in pieces, or a folder's text files, each a document; texts that stand there twice are kept once.

    Folders in the folder are read too, but none whose name begins with a dot.
    """
    if not path.exists():
        raise ValueError(f"data.path is {path}, which does not exist; give a text, a folder of texts or a token array")
    if path.is_dir():
        names = _files(path, SUFFIXES)
        if not names:
            raise ValueError(f"{path} has no text files; read are {', '.join('*' + x for x in SUFFIXES)}")
        _check_size(path, names)
        pairs = [(name, _read(path / name)) for name in names]
        if len(pairs) == 1:
            pairs = _pieces(*pairs[0])
    elif path.is_file():
        _check_size(path)
        pairs = _pieces(path.name, _read(path))
    else:
        raise ValueError(f"data.path is {path}, which is neither a file nor a folder; give one of them")
    once: dict[str, str] = {}
    for name, text in pairs:
        if text.strip():
            once.setdefault(text, name)
    if not once:
        raise ValueError(f"{path} is empty; there is nothing to learn from")
    if len(once) < 2:
        raise ValueError(f"{path} is too short to be split: a part of it is held out; give more text")
    return [Document(name, text) for text, name in once.items()]


def own_tokens(path: Path, vocabulary: int) -> list[Tokens]:
    """A token array in pieces: ids of a ``.npy`` file, or the one tensor of a ``.safetensors`` file."""
    if not path.is_file():
        raise ValueError(f"data.path is {path}, which {'is no file' if path.exists() else 'does not exist'}")
    _check_size(path)
    ids = _npy(path) if path.suffix == ".npy" else _safetensors(path)
    if ids.dtype.kind not in "iu":
        raise ValueError(f"{path} holds {ids.dtype}; token ids must be whole numbers")
    ids = ids.reshape(-1)
    if len(ids) < 2 * SHORTEST:
        raise ValueError(f"{path} has {len(ids)} tokens; {2 * SHORTEST} at least are needed")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocabulary:
        raise ValueError(
            f"{path} has ids from {low} to {high}; data.vocabulary is {vocabulary}, so they must lie in 0 … "
            f"{vocabulary - 1}"
        )
    size = _size(len(ids))
    starts = range(0, len(ids) - len(ids) % size or len(ids), size)
    ends = [*starts[1:], len(ids)]
    return [Tokens(f"{path.name}:{k}", ids[a:b]) for k, (a, b) in enumerate(zip(starts, ends, strict=True))]


def _files(root: Path, suffixes: Sequence[str], outside: frozenset[str] = frozenset()) -> list[str]:
    """Names of the files below a folder, sorted, the same on every machine; nothing hidden, and nothing ``outside``.

    Files alone: a pipe or a device that has a text's name would never end.
    """
    found = []
    for folder, inner, files in os.walk(root):
        inner[:] = [x for x in inner if x not in outside and not x.startswith(".")]
        paths = [Path(folder) / x for x in files if Path(x).suffix in suffixes and not x.startswith(".")]
        found += [x.relative_to(root).as_posix() for x in paths if x.is_file()]
    return sorted(found)


def _check_size(path: Path, names: Iterable[str] = ("",)) -> None:
    """Before anything is read: whether it is too much in all."""
    total = sum((path / name).stat().st_size for name in names)
    if total > LARGEST:
        raise ValueError(f"{path} has {total:,} bytes to read; at most {LARGEST:,} are taken, give a part of it")


def _npy(path: Path) -> np.ndarray:
    try:
        _check_header(path)
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError, SyntaxError, TypeError, TokenError, RecursionError, MemoryError) as error:
        said = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"{path} is truncated or no array that can be read without pickle: {said}") from None
    if not isinstance(found, np.ndarray):
        raise ValueError(f"{path} holds several arrays; give one, written with numpy.save")
    return found


def _check_header(path: Path) -> None:
    """Raise if a ``.npy`` file claims more numbers than it holds: room for all that is claimed would be made first."""
    with path.open("rb") as opened:
        if opened.read(len(np.lib.format.MAGIC_PREFIX)) != np.lib.format.MAGIC_PREFIX:
            return  # of another kind, which says what it is when it is read
        opened.seek(0)
        version = np.lib.format.read_magic(opened)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(
                f"its format is {'.'.join(map(str, version))}, not 1.0 or 2.0, in which numbers are written"
            )
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = header(opened)
        there = path.stat().st_size - opened.tell()
    claimed = math.prod(shape) * dtype.itemsize
    if claimed > there and not dtype.hasobject:
        raise ValueError(f"it says that it has {claimed:,} bytes of numbers, and has {there:,}")


def _safetensors(path: Path) -> np.ndarray:
    try:
        with safe_open(path, framework="pt") as opened:
            names = list(opened.keys())
            if len(names) != 1:
                raise ValueError(f"{path} holds {len(names)} tensors; a token array is one")
            found: torch.Tensor = opened.get_tensor(names[0])
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is truncated or no safetensors file: {error}") from None
    if found.is_floating_point() or found.is_complex() or found.dtype == torch.bool:
        raise ValueError(f"{path} holds {str(found.dtype).removeprefix('torch.')}; token ids must be whole numbers")
    return np.asarray(found.to(torch.int64).numpy())


def _read(file: Path) -> str:
    try:
        return file.read_bytes().decode()
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start:,}") from None


def _pieces(name: str, text: str) -> list[tuple[str, str]]:
    """A text cut at blank lines (at lines, where there are none) into pieces; together they are the text."""
    size = _size(len(text))
    mark = "\n\n" if text.count("\n\n") >= PIECES else "\n"
    parts: list[str] = []
    held = ""
    for part in _kept(text, mark):
        held += part
        while len(held) >= size:  # a line of a whole book is cut where it must be
            end = len(held) if len(held) < 2 * size else size
            parts.append(held[:end])
            held = held[end:]
    if held:
        parts.append(held)
    return [(f"{name}:{k}", part) for k, part in enumerate(parts)]


def _kept(text: str, mark: str) -> Iterable[str]:
    """``text.split(mark)`` with each mark at the end of its part."""
    parts = text.split(mark)
    return [x + mark for x in parts[:-1]] + parts[-1:]


def _size(length: int) -> int:
    return max(SHORTEST, min(PIECE, length // PIECES))


def _writable(text: str) -> bool:
    """Whether a text is Unicode that can be written: sources may spell lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
