"""Measure the lab's response times at 32,768 tokens, and under the load of 50 clients.

    python scripts/measure/lab_latency.py [PART …] [--tokens 32768] [--seconds 60] [--clients 50]

- ``tiles``: the overview of one head, then 200 random tiles with uniformly drawn zoom levels.
- ``tab``: the memory of a browser tab after zooming in and out of that map (needs chromium).
- ``grid``: 512 tokens of a model with 16 heads, from the text to the grid of heads.
- ``load``: clients that request tiles, rows, grids and invalid addresses at once; memory before and after.
- ``start``: the time from the command to the printed address.

All parts run by default. Each asserts that the responses are correct. Exits with an error if a part misses its target.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import torch
from common import run_parts

from regard import models
from regard.interp._look import PAGE_OBSERVABLES, look
from regard.lab.server import RunningLab, running_server
from regard.lab.workspace import Workspace
from regard.models import create, load

# Targets, in seconds.
MAX_OVERVIEW = 3.0
MAX_TILE_MEDIAN = 0.060
MAX_TILE_P95 = 0.200
MAX_GRID = 1.5
MAX_START = 6.0
# Targets, in bytes.
MAX_TAB = 500e6
MAX_GROWTH = 64 * 2**20
CHROMIUM_FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
CHROMIUM_FLAGS += ["--disable-background-networking", "--disable-component-update"]


def long_text(tokens: int) -> str:
    """Python's documentation, repeated until it has at least this many tokens."""
    from pydoc_data.topics import topics

    text = "\n".join(str(topic) for topic in topics.values())
    return text * (1 + 8 * tokens // len(text))


def add_recording(workspace: Workspace, tokens: int) -> str:
    """Record the bundled model on a long text, and return the id of the recording in the workspace."""
    folder = models.bundled()
    workspace.open(folder)
    item_id, recording_folder = workspace.new_recording()
    observe = replace(PAGE_OBSERVABLES, keep=True, top=0)
    look(load(folder), long_text(tokens), tokens=tokens, observe=observe).save(recording_folder)
    return workspace.add_recording(item_id, "benchmark", workspace.items("model")[0]).id


def lab_request(lab: RunningLab, path: str, data: bytes | None = None) -> urllib.request.Request:
    """A request to the lab with its token; with ``data`` it is a POST request with JSON."""
    headers = {"authorization": f"Bearer {lab.token}", "content-type": "application/json"}
    return urllib.request.Request(lab.url + path, data, headers)


def timed_get(lab: RunningLab, path: str) -> tuple[bytes, float]:
    """The body of a response, and the seconds that it took."""
    start = time.perf_counter()
    with urllib.request.urlopen(lab_request(lab, path), timeout=60) as response:
        data: bytes = response.read()
    return data, time.perf_counter() - start


def get_json(lab: RunningLab, path: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(timed_get(lab, path)[0])
    return data


def post_json(lab: RunningLab, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = lab_request(lab, path, json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as response:
        data: dict[str, Any] = json.load(response)
    return data


def measure_tiles(options: argparse.Namespace) -> bool:
    """The overview of one head, then 200 random tiles."""
    with tempfile.TemporaryDirectory() as state:
        workspace = Workspace(Path(state))
        start = time.perf_counter()
        item_id = add_recording(workspace, options.tokens)
        print(f"recorded {options.tokens:,} tokens of the bundled model in {time.perf_counter() - start:.1f} s")
        with running_server(workspace, port=0) as lab:
            head = f"recording={item_id}&place=1&head=0"
            data, overview = timed_get(lab, f"api/look/levels?{head}")
            levels = json.loads(data)
            rng = random.Random(0)
            times = []
            for _ in range(200):
                level = rng.randint(0, levels["top"])
                tiles_per_side = -(-levels["n"] // (levels["tile"] << level))
                x = rng.randrange(tiles_per_side)
                y = rng.randrange(tiles_per_side)
                _, seconds = timed_get(lab, f"api/look/tile?{head}&level={level}&x={x}&y={y}")
                times.append(seconds)
            check_tile(workspace, item_id, lab, head)
    times.sort()
    median = statistics.median(times)
    p95 = times[int(0.95 * len(times))]
    print(f"overview {overview:.2f} s (target: at most {MAX_OVERVIEW})")
    print(f"200 tiles: median {1e3 * median:.1f} ms (target: at most {1e3 * MAX_TILE_MEDIAN:.0f})")
    print(f"           p95 {1e3 * p95:.1f} ms (target: at most {1e3 * MAX_TILE_P95:.0f})")
    return overview <= MAX_OVERVIEW and median <= MAX_TILE_MEDIAN and p95 <= MAX_TILE_P95


def check_tile(workspace: Workspace, item_id: str, lab: RunningLab, head: str) -> None:
    """Assert that the last complete tile of level 0 on the diagonal has the exact weights of the recording."""
    observation = workspace.recording(item_id)[1]
    size = min(256, observation.lse.shape[-1])
    index = min(2, observation.lse.shape[-1] // size - 1)
    data, _ = timed_get(lab, f"api/look/tile?{head}&level=0&x={index}&y={index}")
    shown = torch.from_numpy(numpy.frombuffer(data, "<f4").copy()).view(size, size)
    part = slice(index * size, (index + 1) * size)
    torch.testing.assert_close(shown, observation.weights(0, part, part).float(), rtol=0, atol=1e-5)


def measure_tab(options: argparse.Namespace) -> bool:
    """Zoom in at random positions and out again, 40 times, and read the memory of the page's process."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as state:
        workspace = Workspace(Path(state))
        item_id = add_recording(workspace, options.tokens)
        with running_server(workspace, port=0) as lab, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=CHROMIUM_FLAGS)
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.goto(f"{lab.address}&page=look&recording={item_id}&place=1&head=0")
            canvas = page.locator('[data-map="B"] canvas')
            canvas.wait_for(timeout=60_000)
            rng = random.Random(0)
            largest = 0
            for _ in range(40):
                box = canvas.bounding_box()
                assert box is not None
                x = box["x"] + box["width"] * rng.random()
                y = box["y"] + box["height"] * rng.random()
                page.mouse.move(x, y)
                for wheel in [-400] * 8 + [400] * 8:
                    page.mouse.wheel(0, wheel)
                    page.wait_for_timeout(40)
                largest = max(largest, renderer_memory())
            browser.close()
    print(f"memory of the tab: {largest / 2**20:.0f} MiB (target: at most {MAX_TAB / 2**20:.0f})")
    return largest <= MAX_TAB


def resident_memory(process: Path) -> int:
    """The bytes of a process that are in memory; ``process`` is its folder in /proc."""
    return int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def renderer_memory() -> int:
    """The bytes in memory of the largest browser process that renders pages."""
    largest = 0
    for process in Path("/proc").iterdir():
        try:
            if b"--type=renderer" in (process / "cmdline").read_bytes():
                largest = max(largest, resident_memory(process))
        except OSError:  # not a process, or one that has ended
            continue
    return largest


def measure_grid(options: argparse.Namespace) -> bool:
    """Send 512 tokens to a model with 16 heads, and wait for the data of the grid."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        config = json.loads((models.bundled() / "config.json").read_text())
        torch.manual_seed(0)
        config |= {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 4}
        create(config).save(folder)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(models.bundled() / file, folder / file)
        workspace = Workspace(Path(scratch) / "state")
        model = workspace.open(folder).id
        body = {"model": model, "text": long_text(512)[:6000], "tokens": 512}
        times = []
        with running_server(workspace, port=0) as lab:
            for _ in range(4):  # the first round also starts the worker process
                start = time.perf_counter()
                job = post_json(lab, "api/look", body)
                while job["state"] in ("queued", "running"):
                    job = get_json(lab, f"api/jobs/{job['id']}?after={job['seq']}&wait=10")
                assert job["state"] == "done", job
                recording = get_json(lab, f"api/look/recording?recording={job['result']['recording']}")
                times.append(time.perf_counter() - start)
                assert sum(len(layer["heads"]) for layer in recording["places"]) == 16
                assert recording["tokens"] == 512
    median = statistics.median(times[1:])
    print(f"512 tokens × 16 heads, from text to grid: {median:.2f} s (target: at most {MAX_GRID})")
    print(f"           with the start of the worker {times[0]:.2f} s")
    return median <= MAX_GRID


def measure_load(options: argparse.Namespace) -> bool:
    """Many clients at once, a fifth of whose requests are invalid: no server error, and no growing memory."""
    with tempfile.TemporaryDirectory() as state:
        workspace = Workspace(Path(state))
        item_id = add_recording(workspace, 4096)
        head = f"recording={item_id}&place=1&head="
        paths = ["api/workspace", f"api/look/recording?recording={item_id}", "", "static/app.js"]
        for index in range(4):
            paths += [f"api/look/tile?{head}{index}&level={level}&x=0&y=0" for level in range(5)]
        paths += [f"api/look/row?{head}1&row={row}" for row in range(0, 4096, 512)]
        invalid = ["api/look/tile?recording=x", f"api/look/tile?{head}99&level=0&x=0&y=0", "api/nothing", "%00"]
        invalid += [f"api/look/row?{head}0&row=99999999", f"api/look/tile?{head}0&level=-1&x=a&y=0"]
        with running_server(workspace, port=0) as lab:
            # Fill the caches first: they may use memory, but must not grow without a limit.
            send_requests(lab, paths, invalid, options.clients, 5)
            before = resident_memory(Path("/proc/self"))
            counts = send_requests(lab, paths, invalid, options.clients, options.seconds)
            after = resident_memory(Path("/proc/self"))
            timed_get(lab, "api/workspace")  # the server still responds
    total = sum(counts.values())
    print(f"{options.clients} clients, {options.seconds:.0f} s: {total:,} responses {dict(sorted(counts.items()))}")
    print(f"memory of the process {before / 2**20:.0f} → {after / 2**20:.0f} MiB")
    failed = any(status == 0 or status >= 500 for status in counts)
    return not failed and after - before < MAX_GROWTH


def send_requests(
    lab: RunningLab, paths: list[str], invalid: list[str], clients: int, seconds: float
) -> dict[int, int]:
    """Send requests from many threads. Returns how often each status was received; 0 means no response."""
    counts: Counter[int] = Counter()
    lock = threading.Lock()
    end = time.monotonic() + seconds

    def run_client(seed: int) -> None:
        rng = random.Random(seed)
        while time.monotonic() < end:
            path = rng.choice(invalid if rng.random() < 0.2 else paths)
            try:
                with urllib.request.urlopen(lab_request(lab, path), timeout=30) as response:
                    response.read()
                    status = response.status
            except urllib.error.HTTPError as error:
                error.read()
                status = error.code
            except OSError:
                status = 0
            with lock:
                counts[status] += 1

    threads = [threading.Thread(target=run_client, args=(seed,)) for seed in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return dict(counts)


def measure_start(options: argparse.Namespace) -> bool:
    """Wait until the address is printed; the first start makes the recording that later ones load."""
    times = []
    with tempfile.TemporaryDirectory() as state:
        command = [sys.executable, "-m", "regard", "lab", "--no-browser", "--state", state]
        for _ in range(4):
            start = time.perf_counter()
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8") as process:
                assert process.stdout is not None
                next(line for line in process.stdout if "The lab is at" in line)
                times.append(time.perf_counter() - start)
                process.send_signal(signal.SIGINT)
                process.wait(30)
    median = statistics.median(times[1:])
    print(f"first start {times[0]:.1f} s, later ones {median:.1f} s (target: at most {MAX_START})")
    return median <= MAX_START


PARTS = {
    "tiles": measure_tiles,
    "tab": measure_tab,
    "grid": measure_grid,
    "load": measure_load,
    "start": measure_start,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--clients", type=int, default=50)
    options = parser.parse_args()
    run_parts(PARTS, options.parts, options)


if __name__ == "__main__":
    main()
