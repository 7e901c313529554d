"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

__all__ = ["lasting", "renamed", "save_tensors"]


@contextmanager
def renamed(file: Path) -> Iterator[Path]:
    """A temporary file beside ``file`` that takes its name once it is whole."""
    try:
        handle, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    except OSError as error:
        raise type(error)(f"{file} cannot be written: {error.strerror}") from None
    os.close(handle)
    try:
        yield Path(name)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)  # mkstemp makes files that nobody else can read
        os.replace(name, file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def lasting(folder: Path) -> None:
    """Wait until a folder's files and its list of names are on the disk: what is renamed next survives a power cut."""
    for path in (*(file for file in folder.iterdir() if file.is_file()), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def save_tensors(tensors: Mapping[str, Tensor], file: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file; a full disk is an ``OSError`` with its reason, as of any other file."""
    try:
        save_file(dict(tensors), file, metadata=metadata)
    except SafetensorError as error:
        found = re.search(r"\(os error (\d+)\)", str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(file)) from None
