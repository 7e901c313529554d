"""``regard lab`` as a person starts and ends it."""

from __future__ import annotations

import signal
import subprocess
import sys
import urllib.request

import pytest

from regard import models
from regard.lab.lab import Lab

LAB = [sys.executable, "-m", "regard", "lab", "--no-browser"]


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*LAB, *options], capture_output=True, text=True, encoding="utf-8", timeout=300)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_lab_checks_itself(host, tmp_path):
    done = run("--check", "--host", host)
    assert done.returncode == 0, done.stderr
    assert "12 heads of decoder.blocks" in done.stdout and done.stdout.endswith("the lab answers\n")
    assert "200 /api/look/tile" in done.stdout and "200 /plotly.js" in done.stdout


def test_it_serves_until_it_is_interrupted(tmp_path):
    with subprocess.Popen([*LAB, "--state", str(tmp_path)], stdout=subprocess.PIPE, text=True, encoding="utf-8") as lab:
        assert lab.stdout is not None
        line = next(line for line in lab.stdout if "The lab is at" in line)
        address = line.split()[4]
        with urllib.request.urlopen(address + "api/workspace", timeout=60) as answer:
            assert answer.status == 200
        second = run("--state", str(tmp_path))
        assert second.returncode == 2 and "another lab uses" in second.stderr
        lab.send_signal(signal.SIGINT)
        assert lab.wait(60) == 0
    assert (tmp_path / "lab.json").is_file()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["nowhere"], "is no model, recording or run"),
        (["--port", "0"], "--port"),
        (["--port", "99999"], "--port"),
        (["--host", "256.1.1.1", "--port", "8500"], "cannot be had"),
    ],
)
def test_what_cannot_be_is_one_line(options, said, tmp_path):
    done = run("--state", str(tmp_path), *options)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1


def test_a_taken_port_is_said(tmp_path):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run("--state", str(tmp_path), "--port", str(port))
    assert done.returncode == 2 and f"port {port} of 127.0.0.1 cannot be had" in done.stderr


def test_models_are_opened_by_folder(tmp_path):
    lab = Lab(tmp_path)
    assert lab.open(models.bundled()).about == {"reads": "text", "type": "llama"}
    lab.close()
