"""``make notebook``: the server is pinned, a failed installation is explained, and the server starts."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_every_package_of_the_server_has_a_pinned_version() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pinned = set(re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    packages = {re.match(r"[\w-]+", requirement)[0] for requirement in extras["notebook"]}  # type: ignore[index]
    assert {"jupyter_server", *packages} <= pinned
    script = (ROOT / "scripts" / "notebook").read_text()
    assert all(package in script for package in packages)
    assert "scripts/notebook" in (ROOT / "Makefile").read_text()


def test_a_failed_installation_is_explained(tmp_path: Path) -> None:
    # An environment without pip cannot install anything.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / ".venv"], check=True)
    (tmp_path / "scripts").mkdir()
    script = Path(shutil.copy(ROOT / "scripts" / "notebook", tmp_path / "scripts"))
    result = subprocess.run([script], capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 1
    assert "could not be installed" in result.stderr and "examples/tour.ipynb" in result.stderr


@pytest.mark.full
def test_the_server_prints_its_address(tmp_path: Path) -> None:
    """Installs the server into .venv if it is not there yet."""
    log = tmp_path / "log.txt"
    with log.open("wb") as output:
        command = [ROOT / "scripts" / "notebook", "--no-browser", "--port=0"]
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            for _ in range(600):
                if "http://" in log.read_text() or server.poll() is not None:
                    break
                time.sleep(1)
            assert re.search(r"http://\S+token=", log.read_text()), log.read_text()
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)
