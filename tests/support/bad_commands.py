"""Command lines that must be refused, made from the options that the commands themselves declare."""

from __future__ import annotations

import os
import random
import socket
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, get_args, get_origin, get_type_hints

from typer.models import OptionInfo

from regard.cli.commands import COMMANDS

__all__ = ["bad_command_lines", "make_bad_files"]

# A call of each command that would be accepted. Bad options are added to it.
CALLS = {
    "attribute": ["attribute", "MODEL", "--text", "text.txt"],
    "bench": ["bench", "--list"],
    "budget": ["budget", "gpt2"],
    "claims": ["claims", "--only", "hard-limit"],
    "convolve": ["convolve", "--size", "4"],
    "describe": ["describe"],
    "doctor": ["doctor"],
    "generate": ["generate", "MODEL", "a"],
    "lab": ["lab", "--no-browser"],
    "look": ["look", "MODEL", "--text", "text.txt"],
    "patch": ["patch", "MODEL", "--text", "text.txt"],
    "train": ["train", "dates", "--recipe"],
    "zoo": ["zoo", "no-such-architecture"],
}
DIGITS = "9" * 400
NOT_INTEGERS = ["x", "", "1.5", "1e3", "nan", "--", "0x10", "１２３x", "1 2", "\x1b[31m5"]
NOT_NUMBERS = ["x", "", "1,5", "--", "1e", "\x1b[31m5"]
# Names that no file can have, whatever is read or written there.
NOT_PATHS = ["", " ", "no/such/folder/x.png", "x" * 5000, "file.txt/x.png", "loop"]
# Kinds of files that can be neither read nor written.
NOT_FILES = ["folder.png", "pipe.png", "socket.png"]
NOT_MODELS = ["", " ", "nosuch", "file.txt", "folder.png", "pipe.png", "socket.png", "garbage", "loop", "\x1b[31mx"]
# Options with a text that only some values are accepted for.
NOT_WORDS = ["\x1b[31mnosuch\x07", "nosuch" * 2000, DIGITS, "-5", "=", "{", "nan"]
# Options whose text means something only to a model, and arguments that may be anything.
ANY_TEXT = {("generate", "prompt"), ("look", "layers"), ("convolve", "name"), ("look", "stdin")}
ANY_TEXT |= {(command, name) for command in ("attribute", "patch") for name in ("target", "against")}
ANY_TEXT |= {("attribute", "stdin"), ("patch", "layers"), ("patch", "positions")}
# Options that name a folder. One that does not exist is made, and --recipe does not use --out.
BAD_FOLDERS = {
    ("look", "out"): ["", " ", "x" * 5000, "file.txt/x", "file.txt", "pipe.png", "socket.png", "loop"],
    ("look", "compare"): ["", " ", "nosuch", "loop", "pipe.png"],
    ("lab", "state"): ["", " ", "x" * 5000, "file.txt/x", "file.txt", "pipe.png", "socket.png", "loop"],
    ("train", "out"): ["", " "],
}
READ_FILES = {("look", "text"), ("look", "image"), ("convolve", "weights"), ("train", "config"), ("convolve", "run")}
READ_FILES |= {("attribute", "text"), ("patch", "text"), ("patch", "source")}
OUT_OF_RANGE = {
    ("attribute", "tokens"): ["0", "-1", "-" + DIGITS],
    ("attribute", "most"): ["-1", "-" + DIGITS],
    ("attribute", "steps"): ["0", "-1", "-" + DIGITS],
    ("attribute", "position"): ["999", "-999", DIGITS],
    ("patch", "tokens"): ["0", "-1", "-" + DIGITS],
    ("patch", "most"): ["-1", "-" + DIGITS],
    ("patch", "position"): ["0", "3", DIGITS],
    ("patch", "positions"): ["", "x", "1.5", "1,", "999", DIGITS],
    ("generate", "length"): ["-1", DIGITS],
    ("generate", "temperature"): ["-1", "nan"],
    ("generate", "top_k"): ["0", "-5", "3"],
    ("generate", "top_p"): ["0", "-1", "2", "nan"],
    ("generate", "seed"): [DIGITS],
    ("look", "tokens"): ["0", "-1", "-" + DIGITS],
    ("look", "generate"): ["0", "-1", DIGITS],
    ("look", "most"): ["-1", "-" + DIGITS],
    ("lab", "port"): ["0", "-1", "65536", DIGITS],
    ("convolve", "channels"): ["0", "-1", "5000", DIGITS],
    ("convolve", "out"): ["0", "-1", "5000", DIGITS],
    ("convolve", "groups"): ["0", "-1", "2", DIGITS],
    ("convolve", "alpha"): ["0", "-1", "nan", "1e-300", "1e300", "5e-324"],
    ("convolve", "seed"): [DIGITS, "-" + DIGITS],
    ("convolve", "size"): ["0", "9999", "128x128", "99999999", DIGITS, "4x4x4"],
    ("convolve", "kernel"): ["0", "9999", DIGITS, "3x", "999x999"],
    ("convolve", "stride"): ["0", DIGITS],
    ("convolve", "dilation"): ["0", "99999999", DIGITS],
    ("convolve", "padding"): ["99999999", DIGITS, "-1"],
    ("bench", "seconds"): ["-1", "nan"],
    ("zoo", "seconds"): ["0", "nan", "inf", DIGITS],
    ("zoo", "memory"): ["0", DIGITS],
    ("zoo", "jobs"): ["0", DIGITS],
    ("budget", "tokens"): ["0", "-1", DIGITS, "1.5"],
    ("budget", "batch"): ["0", DIGITS],
    ("budget", "memory"): ["0", "5", "-1GB", DIGITS + "GB"],
    ("train", "changes"): [
        "steps",
        "steps=",
        "steps=x",
        f"steps={DIGITS}",
        "nosuch=1",
        "steps=-1",
        "=",
        "model.layers=0",
    ],
}


def make_bad_files(folder: Path) -> None:
    """Make the files that the command lines name, in a folder that becomes the current one."""
    (folder / "folder.png").mkdir()
    (folder / "file.txt").touch()
    (folder / "text.txt").write_text("a b c")
    os.mkfifo(folder / "pipe.png")
    (folder / "loop").symlink_to("loop")
    garbage = folder / "garbage"
    garbage.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "recording.json", "run.json"):
        (garbage / name).write_bytes(random.Random(name).randbytes(300))
    (folder / "garbage.bin").write_bytes(random.Random(0).randbytes(3000))
    listener = socket.socket(socket.AF_UNIX)
    # The address of a socket is short, so it is made relative to its folder.
    here = os.open(".", os.O_RDONLY)
    try:
        os.chdir(folder)
        listener.bind("socket.png")
    finally:
        os.fchdir(here)
        os.close(here)
        listener.close()


def bad_command_lines(model: Path, count: int, seed: int = 0) -> list[list[str]]:
    """``count`` command lines: each bad part alone first, then combinations of two or three of one command."""
    singles: list[list[str]] = [["nosuch"], ["--nosuch"], ["budge"], ["\x1b[31mx"], ["-Z"], ["--version=3"]]
    parts_of: dict[str, list[list[str]]] = {}
    for command in COMMANDS:
        parts_of[command] = [["--nosuch"], ["--nosuch=3"], ["-Z"], ["--help=3"]]
        for parameter in _parameters(command):
            parts_of[command] += _bad_parts(command, parameter)
    calls = {command: [str(model) if word == "MODEL" else word for word in call] for command, call in CALLS.items()}
    for command, parts in parts_of.items():
        singles += [_joined(calls[command], part) for part in parts]
    if len(singles) >= count:
        step = len(singles) / count
        return [singles[int(i * step)] for i in range(count)]

    lines = list(singles)
    choose = random.Random(seed)
    while len(lines) < count:
        command = choose.choice(list(COMMANDS))
        line = calls[command]
        for part in choose.sample(parts_of[command], min(len(parts_of[command]), choose.choice((2, 3)))):
            line = _joined(line, part)
        lines.append(line)
    return lines


def _joined(call: list[str], part: list[str]) -> list[str]:
    """A call with a bad part. An argument replaces that of the call; an option is put at its end."""
    if part[0].startswith("@"):
        position = int(part[0][1:])
        return [*call[:position], part[1], *call[position + 1 :]]
    return [*call, *part]


class Parameter(NamedTuple):
    """An option or an argument of a command."""

    name: str
    kind: type
    option: str | None  # None for an argument


def _parameters(command: str) -> list[Parameter]:
    """What the function of a command declares."""
    module = import_module(f"regard.cli.{COMMANDS[command].module}")
    hints = get_type_hints(getattr(module, f"{command}_command"), include_extras=True)
    hints.pop("return")
    parameters = []
    for name, hint in hints.items():
        annotation, info = get_args(hint)
        kinds = [kind for kind in get_args(annotation) or (annotation,) if kind is not type(None)]
        kind = get_args(kinds[0])[0] if get_origin(kinds[0]) is list else kinds[0]
        option = None
        if isinstance(info, OptionInfo):
            option = (info.param_decls or [f"--{name.replace('_', '-')}"])[0]
        parameters.append(Parameter(name, kind, option))
    return parameters


def _bad_parts(command: str, parameter: Parameter) -> list[list[str]]:
    if parameter.option is None:
        return _bad_arguments(command, parameter.name)
    if parameter.kind is bool:
        return [[f"{parameter.option}=maybe"]]
    key = (command, parameter.name)
    values = list(OUT_OF_RANGE.get(key, []))
    if parameter.kind is int:
        values += [*NOT_INTEGERS, DIGITS + "x"]
    elif parameter.kind is float:
        values += NOT_NUMBERS
    elif parameter.kind is Path:
        values += BAD_FOLDERS.get(key, NOT_PATHS)
        if key in READ_FILES:
            values += ["nosuch", "garbage.bin", "pipe.png", "socket.png"]
        elif key not in BAD_FOLDERS:
            values += NOT_FILES
    elif key not in ANY_TEXT:
        values += NOT_WORDS
    return [[parameter.option], *[[parameter.option, value] for value in values]]


def _bad_arguments(command: str, name: str) -> list[list[str]]:
    """Values of an argument, with ``@`` and its position in the call of the command."""
    if name in ("folder", "folders") or (command, name) in (
        ("attribute", "model"),
        ("look", "model"),
        ("patch", "model"),
    ):
        return [["@1", value] for value in NOT_MODELS]
    if (command, name) in (("budget", "model"), ("train", "task"), ("bench", "words"), ("zoo", "names")):
        return [["@1", value] for value in ("", "nosuch", "\x1b[31mnosuch", "x" * 5000, DIGITS)]
    if (command, name) == ("budget", "fields"):
        return [[value] for value in ("d=x", f"d={DIGITS}", "=", "nosuch=1", "d=0", "d=-5", "\x1b[31m=1")]
    return []
