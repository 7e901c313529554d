"""The lab under load: how soon it answers at 32,768 tokens, and what 50 clients do to it.

    python benchmarks/lab.py [PART …] [--tokens 32768] [--seconds 60] [--clients 50]

``tiles``: one head's overview, then 200 random tiles, zoom levels drawn uniformly. ``tab``: what a browser's tab holds
after zooming about in that map (needs chromium). ``grid``: 512 tokens of 16 heads, from a text to the grid. ``load``:
clients that ask for tiles, rows, grids and wrong things at once; memory before and after. ``start``: from command to
address, the second time. All unless named. Each asserts that answers are right, and ends with an error where a bar
that the project set itself is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import torch

from regard import models
from regard.lab.lab import Lab
from regard.lab.serve import serving
from regard.models import create, load
from regard.watching.look import LOOK, look

OVERVIEW, MEDIAN, LATE, GRID, START = 3.0, 0.060, 0.200, 1.5, 6.0  # seconds
TAB = 500e6  # bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--clients", type=int, default=50)
    given = parser.parse_args()
    print(f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}")
    missed = [name for name in given.parts or PARTS if not PARTS[name](given)]
    if missed:
        raise SystemExit(f"below the bar: {', '.join(missed)}")


def _text(tokens: int) -> str:
    """Python's own documentation, as long as asked for."""
    from pydoc_data.topics import topics

    said = "\n".join(str(x) for x in topics.values())
    return said * (1 + 8 * tokens // len(said))


def _recorded(lab: Lab, tokens: int, folder: Path) -> str:
    lab.open(folder)
    name, where = lab.new_recording()
    look(load(folder), _text(tokens), tokens=tokens, observe=replace(LOOK, keep=True, top=0)).save(where)
    return lab.made(name, "benchmark", lab.all("model")[0]).id


def _tiles(given: argparse.Namespace) -> bool:
    with tempfile.TemporaryDirectory() as state:
        lab = Lab(Path(state))
        began = time.perf_counter()
        name = _recorded(lab, given.tokens, models.bundled())
        print(f"recorded {given.tokens:,} tokens of the bundled model in {time.perf_counter() - began:.1f} s")
        with serving(lab, port=0) as (address, _):
            head = f"recording={name}&place=1&head=0"
            sizes, overview = _timed(address, f"api/look/levels?{head}")
            found = json.loads(sizes)
            chance, times = random.Random(0), []
            for _ in range(200):
                level = chance.randint(0, found["top"])
                many = -(-found["n"] // (found["tile"] << level))
                x, y = chance.randrange(many), chance.randrange(many)
                data, took = _timed(address, f"api/look/tile?{head}&level={level}&x={x}&y={y}")
                times.append(took)
            _check_tile(lab, name, address, head)
    times.sort()
    middle, late = statistics.median(times), times[int(0.95 * len(times))]
    print(f"overview {overview:.2f} s (at most {OVERVIEW})")
    print(f"200 tiles: median {1e3 * middle:.1f} ms (at most {1e3 * MEDIAN:.0f})")
    print(f"           p95 {1e3 * late:.1f} ms (at most {1e3 * LATE:.0f})")
    return overview <= OVERVIEW and middle <= MEDIAN and late <= LATE


def _check_tile(lab: Lab, name: str, address: str, head: str) -> None:
    """An exact tile in the middle is what the operator's own weights are."""
    data, _ = _timed(address, f"api/look/tile?{head}&level=0&x=2&y=2")
    shown = torch.from_numpy(numpy.frombuffer(data, "<f4").copy()).view(256, 256)
    there = lab.seen(name)[1].weights(0, slice(512, 768), slice(512, 768))
    torch.testing.assert_close(shown, there.float(), rtol=0, atol=1e-5)


def _tab(given: argparse.Namespace) -> bool:
    """Zoom in at random places and out again, 40 times, then ask the system what the page's process holds."""
    from playwright.sync_api import sync_playwright

    quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
    quiet += ["--disable-background-networking", "--disable-component-update"]
    with tempfile.TemporaryDirectory() as state:
        lab = Lab(Path(state))
        name = _recorded(lab, given.tokens, models.bundled())
        with serving(lab, port=0) as (address, _), sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=quiet)
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.goto(f"{address}?room=look&recording={name}&place=1&head=0")
            box = page.locator('[data-map="B"] canvas')
            box.wait_for(timeout=60_000)
            chance, most = random.Random(0), 0
            for _ in range(40):
                where = box.bounding_box()
                assert where is not None
                across, down = (
                    where["x"] + where["width"] * chance.random(),
                    where["y"] + where["height"] * chance.random(),
                )
                page.mouse.move(across, down)
                for step in [-400] * 8 + [400] * 8:
                    page.mouse.wheel(0, step)
                    page.wait_for_timeout(40)
                most = max(most, _renderers())
            browser.close()
    print(f"the tab held {most / 2**20:.0f} MiB at most (at most {TAB / 2**20:.0f})")
    return most <= TAB


def _renderers() -> int:
    """Bytes in memory of the largest of the browser's processes that draw pages."""
    sizes = [0]
    for process in Path("/proc").iterdir():
        try:
            if b"--type=renderer" in (process / "cmdline").read_bytes():
                sizes.append(int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
        except OSError:
            continue  # no process, or one that has ended
    return max(sizes)


def _grid(given: argparse.Namespace) -> bool:
    """A model of 16 heads reads 512 tokens; the clock stops when the grid's data is there."""
    with tempfile.TemporaryDirectory() as room:
        folder = Path(room) / "model"
        config = json.loads((models.bundled() / "config.json").read_text())
        torch.manual_seed(0)
        made = create(config | {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 4})
        made.save(folder)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (folder / file).write_bytes((models.bundled() / file).read_bytes())
        lab = Lab(Path(room) / "state")
        lab.open(folder)
        text, times = _text(512), []
        with serving(lab, port=0) as (address, _):
            for _ in range(4):  # the first starts the worker
                began = time.perf_counter()
                model = lab.all("model")[0].id
                job = _posted(address, "api/look", {"model": model, "text": text[:6000], "tokens": 512})
                while job["state"] in ("queued", "running"):
                    data, _ = _timed(address, f"api/jobs/{job['id']}?after={job['seq']}&wait=10")
                    job = json.loads(data)
                assert job["state"] == "done", job
                data, _ = _timed(address, f"api/look/recording?recording={job['result']['recording']}")
                times.append(time.perf_counter() - began)
                told = json.loads(data)
                assert sum(len(x["heads"]) for x in told["places"]) == 16 and told["tokens"] == 512
    best = statistics.median(times[1:])
    print(
        f"512 tokens × 16 heads, text to grid: {best:.2f} s (at most {GRID}); with the worker's start {times[0]:.2f} s"
    )
    return best <= GRID


def _load(given: argparse.Namespace) -> bool:
    with tempfile.TemporaryDirectory() as state:
        lab = Lab(Path(state))
        name = _recorded(lab, 4096, models.bundled())
        with serving(lab, port=0) as (address, _):
            head = f"recording={name}&place=1&head="
            paths = [f"api/look/tile?{head}{h}&level={z}&x=0&y=0" for h in range(4) for z in range(5)]
            paths += [f"api/look/row?{head}1&row={row}" for row in range(0, 4096, 512)]
            paths += ["api/workspace", f"api/look/recording?recording={name}", "", "static/app.js"]
            wrong = ["api/look/tile?recording=x", f"api/look/tile?{head}99&level=0&x=0&y=0", "api/nothing", "%00"]
            wrong += [f"api/look/row?{head}0&row=99999999", f"api/look/tile?{head}0&level=-1&x=a&y=0"]
            _hammered(address, paths, wrong, given.clients, 5)  # caches fill
            before = _memory()
            counts = _hammered(address, paths, wrong, given.clients, given.seconds)
            after = _memory()
            _timed(address, "api/workspace")  # it still answers
    total, grown = sum(counts.values()), (after - before) / 2**20
    print(f"{given.clients} clients, {given.seconds:.0f} s: {total:,} answers {dict(sorted(counts.items()))}")
    print(f"memory of the process {before / 2**20:.0f} → {after / 2**20:.0f} MiB ({grown:+.0f})")
    return not any(code >= 500 or code == 0 for code in counts) and grown < 64


def _memory() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _hammered(address: str, paths: list[str], wrong: list[str], clients: int, seconds: float) -> dict[int, int]:
    """How often each status was answered; 0 is no answer."""
    counts: dict[int, int] = {}
    lock, until = threading.Lock(), time.monotonic() + seconds

    def client(seed: int) -> None:
        chance = random.Random(seed)
        while time.monotonic() < until:
            path = chance.choice(wrong if chance.random() < 0.2 else paths)
            try:
                with urllib.request.urlopen(address + path, timeout=30) as answer:
                    answer.read()
                    code = answer.status
            except urllib.error.HTTPError as error:
                error.read()
                code = error.code
            except OSError:
                code = 0
            with lock:
                counts[code] = counts.get(code, 0) + 1

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return counts


def _start(given: argparse.Namespace) -> bool:
    """Until the address is printed; the first start makes the recording that later ones find."""
    times = []
    with tempfile.TemporaryDirectory() as state:
        for _ in range(4):
            began = time.perf_counter()
            command = [sys.executable, "-m", "regard", "lab", "--no-browser", "--state", state]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8") as process:
                assert process.stdout is not None
                next(line for line in process.stdout if "The lab is at" in line)
                times.append(time.perf_counter() - began)
                process.send_signal(2)
                process.wait(30)
    best = statistics.median(times[1:])
    print(f"first start {times[0]:.1f} s, later ones {best:.1f} s (at most {START})")
    return best <= START


def _timed(address: str, path: str) -> tuple[bytes, float]:
    began = time.perf_counter()
    with urllib.request.urlopen(address + path, timeout=60) as answer:
        data: bytes = answer.read()
    return data, time.perf_counter() - began


def _posted(address: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(address + path, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        told: dict[str, Any] = json.load(answer)
    return told


PARTS = {"tiles": _tiles, "tab": _tab, "grid": _grid, "load": _load, "start": _start}

if __name__ == "__main__":
    main()
