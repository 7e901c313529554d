"""Read only regular files; write files atomically (complete or absent), durably, as safetensors or strict JSON."""

from __future__ import annotations

import math
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from regard._errors import RegardError

if TYPE_CHECKING:
    from torch import Tensor

TEMPORARY_FOLDER = ".writing-"  # how the names of unfinished folders begin
MAX_EXACT = 2**53  # the largest integer that a browser represents exactly


# How errors name what is in the place of a regular file.
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


# --- reading ---------------------------------------------------------------------------------------------------------


def check_regular_file(file: str | os.PathLike[str]) -> None:
    """Raise unless ``file`` is a regular file, or a link to one.

    To open a pipe waits for its writer, possibly for ever, and a device may never end.
    """
    status = os.stat(file)
    if not stat.S_ISREG(status.st_mode):
        raise RegardError(f"{os.fspath(file)} must be a regular file, got {_kind(status)}")


def open_regular(file: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file to read its bytes; anything else is refused at once."""
    check_regular_file(file)
    # Checked again after the opening, which does not wait: the file may have been replaced in between.
    handle = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise RegardError(f"{os.fspath(file)} must be a regular file, got {_kind(status)}")
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_regular(file: str | os.PathLike[str], most: int) -> bytes:
    """The bytes of a regular file of at most ``most`` bytes."""
    with open_regular(file) as opened:
        size = os.fstat(opened.fileno()).st_size
        # Not only the size decides, because the file may grow while it is read.
        data = b""
        if size <= most:
            data = opened.read(most + 1)
    if max(size, len(data)) > most:
        name = Path(file).name
        raise RegardError(f"{os.fspath(file)} has {max(size, len(data)):,} bytes; a {name} has at most {most:,}")
    return data


def _kind(status: os.stat_result) -> str:
    for is_kind, name in _KINDS:
        if is_kind(status.st_mode):
            return name
    return "another kind of file"


# --- writing ---------------------------------------------------------------------------------------------------------


def check_output_file(file: Path) -> Path:
    """Raise unless ``file`` can be written; commands call this before the computation. Returns the file to write.

    A link is followed, and the file that it leads to is written; that file need not exist. A folder, a device, a pipe
    or a socket is refused, and so is a link that leads to itself.
    """
    target = _output_target(file)
    folder = target.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise OSError(f"{file} cannot be written: {folder} is not a writable folder")
    return target


def _output_target(file: Path) -> Path:
    try:
        status = os.stat(file)
    except FileNotFoundError:
        status = None
    except (OSError, ValueError) as error:  # a zero byte in the name is a ValueError
        reason = getattr(error, "strerror", None) or error
        raise OSError(f"{file} cannot be written: {reason}") from None
    if status is not None and stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(f"{file} is a folder; give the name of a file")
    if status is not None and not stat.S_ISREG(status.st_mode):
        raise RegardError(f"{file} is {_kind(status)}; give the name of a regular file, or of one that does not exist")
    if file.is_symlink():
        return Path(os.path.realpath(file))
    return file


@contextmanager
def atomic_write(file: Path, mode: int | None = None) -> Iterator[Path]:
    """Yield a temporary path in the folder of ``file``.

    At the end of the block the temporary file replaces ``file``; after an error it is deleted. Then the file and its
    entry in the folder are on the disk: after a power cut, ``file`` is the old one or the new one, and complete.

    A link stays a link, and the file that it leads to is replaced. What is not a regular file is refused.

    - ``mode``: the permission bits of the file. None (default) keeps those of the file that is replaced; a new file
      gets the usual ones, which the umask decides.
    """
    target = _output_target(file)
    # A name of at most 255 bytes may be full already.
    temporary = target.parent / f".{target.name[:64]}.{secrets.token_hex(4)}"
    try:
        if mode is None and target.exists():
            mode = stat.S_IMODE(target.stat().st_mode)
        # The umask applies to a new file. The file that replaces another one is private until it is complete.
        creation_mode = 0o666 if mode is None else 0o600
        # Only the name is needed: writers open the file themselves.
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, creation_mode))
        if mode is None:
            mode = stat.S_IMODE(temporary.stat().st_mode)
    except OSError as error:
        raise type(error)(f"{file} cannot be written: {error.strerror}") from None
    try:
        yield temporary
        # A writer may have replaced the temporary file by one of its own, as safetensors does.
        os.chmod(temporary, mode)
        _fsync(temporary)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    # The file is complete and in place. Some file systems cannot sync a folder, which is no reason to fail.
    with suppress(OSError):
        _fsync(target.parent)


@contextmanager
def atomic_folder(folder: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary folder beside ``folder``.

    At the end of the block its files are on the disk and it gets the name ``folder``; after an error it is deleted.

    - ``replace``: whether ``folder`` may exist. Then it is removed, but only when the new folder is complete. False
      (default): it must not exist yet.
    """
    make_folder(folder.parent)
    temporary = folder.parent / f"{TEMPORARY_FOLDER}{folder.name[:64]}-{secrets.token_hex(4)}"
    replaced = folder.parent / f"{temporary.name}-replaced"
    temporary.mkdir()
    try:
        yield temporary
        # The files must be on the disk before the rename: a power cut must not leave a named folder of empty files.
        fsync_folder(temporary)
        if replace and folder.exists():
            # A folder with files cannot be replaced in one step.
            folder.rename(replaced)
        temporary.rename(folder)
        fsync_folder(folder.parent)
    finally:
        # After an error between the two renames, the old folder gets its name back.
        if replaced.exists() and not folder.exists():
            replaced.rename(folder)
        # After the rename there is no folder of this name any more.
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)


def make_folder(folder: Path) -> None:
    """Create a folder and its parents, if needed, so that they survive a power cut."""
    missing = []
    parent = folder
    while not parent.exists():
        missing.append(parent)
        parent = parent.parent
    folder.mkdir(parents=True, exist_ok=True)
    for created in missing:
        with suppress(OSError):  # some file systems cannot sync a folder
            _fsync(created.parent)


def fsync_folder(folder: Path) -> None:
    """Wait until the files of a folder and its directory entries are on the disk, so that they survive a power cut."""
    paths = [file for file in folder.iterdir() if file.is_file()]
    for path in (*paths, folder):
        _fsync(path)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save_tensors(tensors: Mapping[str, Tensor], file: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file. An I/O error, such as a full disk, raises ``OSError``, as for other files.

    The write is not atomic; use ``atomic_write`` for that.
    """
    # Here, not at the top: this imports torch, which takes seconds, and texts are written without it.
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), file, metadata=metadata)
    except SafetensorError as error:
        match = re.search(r"\(os error (\d+)\)", str(error))
        if match is None:
            raise
        code = int(match[1])
        raise OSError(code, os.strerror(code), str(file)) from None


def write_text(text: str, file: str | os.PathLike[str] | None, mode: int | None = None) -> str:
    """Write a text to ``file`` if ``file`` is not None. Returns the text. ``mode`` is that of ``atomic_write``.

    Half of a surrogate pair, which a text from a file can have and UTF-8 has not, is written as in JSON: ``\\ud800``.
    """
    if file is not None:
        with atomic_write(Path(file), mode) as temporary:
            temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    return text


def json_safe(data: Any) -> Any:
    """Replace NaN and infinity by None, and integers above 2^53 by floats, at any depth of dicts and lists.

    JSON has no NaN and no infinity; an integer beyond the range of floats is None too. Browsers round large integers
    anyway, and the JSON encoder accepts at most 64 bits.
    """
    if isinstance(data, dict):
        return {str(name): json_safe(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [json_safe(value) for value in data]
    if isinstance(data, int) and abs(data) > MAX_EXACT:
        # Beyond the range of floats, an integer is as unusable as infinity.
        if abs(data) > sys.float_info.max:
            return None
        return float(data)
    if isinstance(data, float) and not math.isfinite(data):
        return None
    return data
