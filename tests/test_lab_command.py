"""The command ``regard lab``: start, check, errors, Ctrl-C."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import urllib.parse

import pytest
from support.lab_pages import note_token, send

from regard import models
from regard.lab import server
from regard.lab.workspace import Workspace

LAB = [sys.executable, "-m", "regard", "lab", "--no-browser"]


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*LAB, *options], capture_output=True, text=True, encoding="utf-8", timeout=300)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_lab_checks_itself(host, tmp_path):
    result = run("--check", "--host", host)
    assert result.returncode == 0, result.stderr
    assert "12 heads of decoder.blocks" in result.stdout and result.stdout.endswith("the lab responds\n")
    assert "200 /api/look/tile" in result.stdout and "200 /plotly.js" in result.stdout


@pytest.mark.parametrize("has_network", [True, False])
def test_the_printed_address_is_one_that_other_machines_reach(has_network, monkeypatch):
    if not has_network:
        monkeypatch.setattr(socket, "socket", NoNetwork)
    host = urllib.parse.urlsplit(server._address("0.0.0.0", 8000)).hostname
    assert host is not None and host != "0.0.0.0"
    if not has_network:
        assert host == socket.gethostname().lower()


class NoNetwork(socket.socket):
    def connect(self, address):
        raise OSError("no network")


def test_the_lab_serves_until_ctrl_c(tmp_path):
    with subprocess.Popen([*LAB, "--state", str(tmp_path)], stdout=subprocess.PIPE, text=True, encoding="utf-8") as lab:
        assert lab.stdout is not None
        line = next(line for line in lab.stdout if "The lab is at" in line)
        printed = line.split()[4]
        assert "?token=" in printed
        assert send(note_token(printed), "api/workspace")[0] == 200
        # Who has lost the terminal finds the address in a file that only they can read.
        second = run("--state", str(tmp_path))
        assert second.returncode == 2 and "--state" in second.stderr and str(tmp_path / "open.html") in second.stderr
        assert printed in (tmp_path / "open.html").read_text(encoding="utf-8")
        lab.send_signal(signal.SIGINT)
        assert lab.wait(60) == 0
    assert (tmp_path / "lab.json").is_file() and not (tmp_path / "open.html").exists()


@pytest.mark.parametrize(
    ("options", "mention"),
    [
        (["nowhere"], "config.json"),
        (["--port", "0"], "--port"),
        (["--port", "99999"], "--port"),
        (["--host", "256.1.1.1", "--port", "8500"], "port 8500"),
        (["--host", "0.0.0.0", "--no-token"], "--no-token"),
    ],
)
def test_errors_are_one_line(options, mention, tmp_path):
    result = run("--state", str(tmp_path), *options)
    assert result.returncode == 2 and mention in result.stderr and result.stderr.count("\n") == 1


def test_a_port_in_use_is_named(tmp_path):
    import socket

    with socket.socket() as occupied:
        occupied.bind(("127.0.0.1", 0))
        occupied.listen()
        port = occupied.getsockname()[1]
        result = run("--state", str(tmp_path), "--port", str(port))
    assert result.returncode == 2 and f"port {port} of 127.0.0.1" in result.stderr


def test_models_are_opened_by_folder(tmp_path):
    workspace = Workspace(tmp_path)
    assert workspace.open(models.bundled()).details == {"reads": "text", "type": "llama"}
    workspace.close()
