"""What another user of the machine gets from a running lab: nothing over its port, and no file."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.lab_pages import note_token, send

from regard import RegardError
from regard.lab.app import ENDPOINTS
from regard.lab.workspace import Workspace

OTHER_USER = 65534  # "nobody" on most systems

# Runs as the other user: argument 1 has the lab's address, its requests, and a folder. Prints what was possible.
ATTACK = """
import encodings.idna, http.client, json, os, sys, urllib.parse  # all of them now: later it cannot read libraries
wanted = json.loads(sys.argv[1])
where = urllib.parse.urlsplit(wanted["address"])
os.setgroups([])
os.setgid(wanted["user"])
os.setuid(wanted["user"])
statuses = set()
for method, path in wanted["requests"]:
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=60)
    connection.request(method, path)
    statuses.add(connection.getresponse().status)
    connection.close()
readable = []
for path in wanted["paths"]:
    try:
        if os.path.isdir(path):
            os.listdir(path)
        else:
            open(path, "rb").close()
        readable.append(path)
    except OSError:
        pass
arguments = ""
for process in os.listdir("/proc"):
    if process.isdecimal():
        try:
            with open(f"/proc/{process}/cmdline", "rb") as file:
                arguments += file.read().decode("utf-8", "replace")
        except OSError:
            pass
token_seen = wanted["token"] in arguments.replace(sys.argv[1], "")
print(json.dumps({"user": os.getuid(), "statuses": sorted(statuses), "readable": readable, "token": token_seen}))
"""


class Lab(NamedTuple):
    """A running lab: its address without the token, the token, and its state folder."""

    address: str
    token: str
    state: Path


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """A lab that was started as a command, with the usual umask, in a state folder that everybody could read.

    It has a recording. Its browser is a program that goes on running, so that its arguments can be seen.
    """
    # Not in pytest's own folder, which other users cannot enter.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        state = folder / "state"
        state.mkdir(mode=0o755)
        (state / "lab.json").write_text('{"recordings": [], "runs": []}', encoding="utf-8")
        (state / "lab.json").chmod(0o644)
        program = folder / "browser"
        program.write_text("#!/bin/sh\nexec sleep 300\n", encoding="utf-8")
        program.chmod(0o755)
        environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "BROWSER": str(program)}
        code = "import sys; sys.stdout.isatty = lambda: True; from regard.cli import main; main()"
        command = [sys.executable, "-c", code, "lab", "--state", str(state)]
        environment.pop("SSH_CONNECTION", None)
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, encoding="utf-8", umask=0o022, env=environment
        ) as process:
            assert process.stdout is not None
            try:
                printed = next(line for line in process.stdout if "The lab is at" in line).split()[4]
                address = note_token(printed)
                yield Lab(address, printed.partition("?token=")[2], state)
            finally:
                process.send_signal(signal.SIGINT)
                process.wait(60)


@pytest.mark.skipif(os.name != "posix", reason="other systems have no such permissions")
def test_only_the_owner_can_read_what_the_lab_writes(lab: Lab) -> None:
    check_permissions(lab, {"recording.json", "lab.json", "open.html"})


@pytest.mark.full
@pytest.mark.skipif(os.name != "posix", reason="other systems have no such permissions")
def test_only_the_owner_can_read_a_run(lab: Lab) -> None:
    _, started = send(lab.address, "api/evolve/train", {"task": "digits", "steps": 3, "layers": 1, "seed": 7})
    job: dict[str, Any] = started["job"]
    while job["state"] in ("queued", "running"):
        job = send(lab.address, f"api/jobs/{job['id']}?after={job['seq']}&wait=10")[1]
    assert job["state"] == "done", job
    check_permissions(lab, {"run.json", "state.json", "model.safetensors"})


def check_permissions(lab: Lab, expected_names: set[str]) -> None:
    """Only the owner can read any file or folder of the lab, and these are among them."""
    files = [lab.state, *lab.state.rglob("*"), *(lab.state.parent / "cache").rglob("*")]
    names = {file.name for file in files}
    assert expected_names <= names
    open_to_others = []
    for file in files:
        if stat.S_IMODE(file.stat().st_mode) & 0o077:
            open_to_others.append(file)
    assert open_to_others == []


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="needs root, to become another user")
def test_another_user_gets_nothing(lab: Lab) -> None:
    requests = [(endpoint.method, endpoint.path) for endpoint in ENDPOINTS]
    for path in ("/", "/static/app.js", "/plotly.js", "/openapi.json", "/api/jobs/1", "/nothing", "/?token=x"):
        requests.append(("GET", path))
    paths = [str(path) for path in (lab.state, *lab.state.rglob("*"))]
    wanted = {"address": lab.address, "requests": requests, "paths": paths, "user": OTHER_USER, "token": lab.token}
    result = subprocess.run(
        [sys.executable, "-c", ATTACK, json.dumps(wanted)], capture_output=True, text=True, timeout=300, cwd="/"
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == {"user": OTHER_USER, "statuses": [401], "readable": [], "token": False}


def test_a_state_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, mode: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "chmod", refuse)
    with pytest.raises(RegardError, match="--state"):
        Workspace(tmp_path)
