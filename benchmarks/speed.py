"""regard.attention against its peers: the same inputs, interleaved, best of several; right before it is timed.

    python benchmarks/speed.py                      every case, as a table
    python benchmarks/speed.py dense decode         the cases whose names contain one of these words
    python benchmarks/speed.py --json speed.json    the figures and the conditions as a file too

A ratio is the peer's time over ours; "wanted" is the least this project asks of itself on a machine with AVX-512.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import peers
import torch
from torch import Tensor

import regard
from regard import Causal, Observe, Padding, Window
from regard.kernels import native

Calls = dict[str, Callable[[], object]]


def race(calls: Calls, seconds: float = 4.0) -> dict[str, float]:
    """The best time of each call; every round runs all of them, so that noise meets all alike."""
    best = dict.fromkeys(calls, float("inf"))
    end, rounds = time.perf_counter() + seconds, 0
    while rounds < 3 or (time.perf_counter() < end and rounds < 200):
        rounds += 1
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def tensors(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=g).to(dtype).requires_grad_(grad) for _ in range(3)]


def same(a: Tensor, b: Tensor) -> None:
    loose = 2e-2 if a.dtype == torch.bfloat16 else 2e-4
    torch.testing.assert_close(a, b, rtol=loose, atol=loose)


class Case:
    """One line of the table: ours and the peers, and what is wanted of the first peer's time over ours."""

    def __init__(self, name: str, wanted: float | None, calls: Callable[[], Calls], compare: bool = True) -> None:
        self.name, self.wanted, self.calls, self.compare = name, wanted, calls, compare

    def run(self) -> dict[str, object]:
        calls = self.calls()
        results = {name: call() for name, call in calls.items()}
        if self.compare:
            for name, other in results.items():
                if isinstance(other, Tensor) and name != "ours":
                    same(results["ours"], other)  # type: ignore[arg-type]
        best = race(calls)
        ratios = {name: best[name] / best["ours"] for name in calls if name != "ours"}
        return {"name": self.name, "wanted": self.wanted, "ms": {k: 1e3 * t for k, t in best.items()}, "ratio": ratios}


def forward(shape: tuple[int, int, int, int], causal: bool, dtype: torch.dtype, wanted: float) -> Case:
    def calls() -> Calls:
        q, k, v = tensors(*shape, dtype=dtype)
        mask = Causal() if causal else None
        found: Calls = {
            "ours": lambda: regard.attention(q, k, v, mask=mask),
            "SDPA": lambda: peers.sdpa(q, k, v, is_causal=causal),
        }
        if dtype == torch.float32:
            others = {"OpenVINO": peers.openvino(q, k, v, causal), "ONNX Runtime": peers.onnxruntime(q, k, v, causal)}
            found |= {name: call for name, call in others.items() if call is not None}
        return found

    kind = "causal" if causal else "dense"
    return Case(f"{kind} {str(dtype)[6:]} {'×'.join(map(str, shape))}", wanted, calls)


def both(shape: tuple[int, int, int, int], causal: bool, wanted: float) -> Case:
    def calls() -> Calls:
        q, k, v = tensors(*shape, grad=True)
        grad, mask = torch.randn(shape), Causal() if causal else None

        def gradients(out: Tensor) -> Tensor:
            return torch.cat([x.flatten() for x in torch.autograd.grad(out, (q, k, v), grad)])

        same(gradients(regard.attention(q, k, v, mask=mask)), gradients(peers.sdpa(q, k, v, is_causal=causal)))
        return {
            "ours": lambda: torch.autograd.grad(regard.attention(q, k, v, mask=mask), (q, k, v), grad),
            "SDPA": lambda: torch.autograd.grad(peers.sdpa(q, k, v, is_causal=causal), (q, k, v), grad),
        }

    kind = "causal" if causal else "dense"
    return Case(f"forward + backward {kind} {'×'.join(map(str, shape))}", wanted, calls, compare=False)


def window() -> Calls:
    q, k, v = tensors(1, 8, 16384, 64)
    mask = Window(256)
    see = mask.dense(16384, 16384)
    return {
        "ours": lambda: regard.attention(q, k, v, mask=mask),
        "SDPA": lambda: peers.sdpa(q, k, v, attn_mask=see),
        "FlexAttention": peers.flex_window(q, k, v, 256),
    }


def biased(kind: str) -> Calls:
    q, k, v = tensors(1, 8, 4096, 64)
    bias = regard.ALiBi() if kind == "ALiBi" else regard.T5Buckets(8)
    with torch.no_grad():
        built = bias.dense(q, 4096).contiguous()

    def ours() -> Tensor:
        with torch.no_grad():
            return regard.attention(q, k, v, bias=bias)

    return {"ours": ours, "SDPA": lambda: peers.sdpa(q, k, v, attn_mask=built)}


def decode(dtype: torch.dtype, heads: int) -> Calls:
    q, _, _ = tensors(1, 32, 1, 128, dtype=dtype)
    k, v, _ = tensors(1, heads, 8192, 128, dtype=dtype)
    return {
        "ours": lambda: regard.attention(q, k, v),
        "SDPA": lambda: peers.sdpa(q, k, v, enable_gqa=heads != 32),
    }


def observed(n: int) -> Calls:
    q, k, v = tensors(1, 8, n, 64)
    return {
        "ours": lambda: regard.attention(q, k, v),
        "rows": lambda: regard.attention(q, k, v, observe=Observe())[0],
        "rows + 64×64 map": lambda: regard.attention(q, k, v, observe=Observe(map=64))[0],
    }


def padded() -> Calls:
    q, k, v = tensors(8, 12, 1024, 64)
    lengths = torch.linspace(256, 1024, 8).long()
    see = Padding(lengths).dense(1024, 1024)
    return {
        "ours": lambda: regard.attention(q, k, v, mask=Padding(lengths)),
        "SDPA": lambda: peers.sdpa(q, k, v, attn_mask=see),
    }


def cases() -> Iterator[Case]:
    f32, bf16 = torch.float32, torch.bfloat16
    shapes = ((1, 8, 4096, 64), (1, 8, 1024, 64), (1, 16, 2048, 128), (8, 12, 128, 64), (1, 8, 512, 64))
    for shape, wanted in zip(shapes[:4], (1.22, 1.2, 1.12, 1.6), strict=True):
        yield forward(shape, False, f32, wanted)
    for t, wanted in ((0, 1.35), (1, 1.7), (4, 2.3), (3, 2.6)):
        yield forward(shapes[t], True, f32, wanted)
    for t, causal, wanted in ((0, False, 2.1), (2, False, 2.0), (3, False, 2.8), (0, True, 2.3)):
        yield forward(shapes[t], causal, bf16, wanted)
    yield Case("window ±256 1×8×16384×64", 38, window)
    yield Case("ALiBi 1×8×4096×64, SDPA with the bias prebuilt", 1.4, lambda: biased("ALiBi"))
    yield Case("T5 buckets 1×8×4096×64, SDPA with the bias prebuilt", 1.4, lambda: biased("T5"))
    for t, causal, wanted in ((0, False, 1.3), (0, True, 1.45), (3, False, 1.6), (3, True, 2.5)):
        yield both(shapes[t], causal, wanted)
    yield Case("decode float32 32 heads × 8192 × 128", 1.7, lambda: decode(f32, 32))
    yield Case("decode bfloat16 32 heads × 8192 × 128", 6, lambda: decode(bf16, 32))
    yield Case("decode float32 32 heads, 8 key heads", None, lambda: decode(f32, 8))
    yield Case("observing 1×8×4096×64 (at most 1.08)", None, lambda: observed(4096))
    yield Case("observing 1×8×1024×64 (at most 1.15)", None, lambda: observed(1024))
    yield Case("padding, 8 sequences filled 25–100%, 8×12×1024×64", 1.8, padded)


def conditions() -> dict[str, object]:
    cpu = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "cpu": cpu[0] if cpu else platform.processor(),
        "threads": torch.get_num_threads(),
        "native": native.instruction_set() if native.built() else "not built",
        "torch": torch.__version__,
        "torch capability": torch.backends.cpu.get_cpu_capability(),
        "ATEN_CPU_CAPABILITY": os.environ.get("ATEN_CPU_CAPABILITY", ""),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="parts of the names of cases to run")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    args = parser.parse_args()
    print(", ".join(f"{name} {value}" for name, value in conditions().items() if value) + "\n")
    print("| case | ours (ms) | peers' time / ours | wanted |\n|---|---|---|---|")
    rows = []
    for case in cases():
        if args.words and not any(word in case.name for word in args.words):
            continue
        row = case.run()
        rows.append(row)
        ratios = ", ".join(f"{name} {ratio:.2f}" for name, ratio in row["ratio"].items())  # type: ignore[attr-defined]
        wanted = "" if case.wanted is None else f"≥ {case.wanted}"
        print(f"| {case.name} | {row['ms']['ours']:.2f} | {ratios} | {wanted} |", flush=True)  # type: ignore[index]
    if args.json:
        whole = json.dumps({"conditions": conditions(), "cases": rows}, indent=1)
        part = args.json.with_suffix(".part")
        part.write_text(whole)
        part.rename(args.json)


if __name__ == "__main__":
    main()
