"""A language model that writes: tokens a second against transformers, and the memory that loading takes.

    python examples/smollm2.py smollm2
    python benchmarks/decode.py smollm2 [--tokens 64] [--dtype bfloat16] [--json decode.json]
    python benchmarks/decode.py smollm2 --parts     where a token's time goes
    python benchmarks/decode.py smollm2 --load      peak memory of loading and of one token, in a process of its own

Both models read the same files in the same dtype and write the same tokens (asserted before anything is timed), greedy,
one text, end tokens ignored; rounds are interleaved and the best of each counts. transformers runs with sdpa.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional as F

from regard import models
from regard.kernels import layers, native
from regard.nn import block as block_module

PROMPT = "The capital of France is"


def load(folder: Path) -> dict[str, object]:
    """Peak memory above what a process holds before: after loading, and after one token."""
    before = _peak()
    start = time.perf_counter()
    model = models.load(folder)
    seconds, loaded = time.perf_counter() - start, _peak()
    model.generate(PROMPT, 1)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return {
        "file MB": round(size / 1e6),
        "load s": round(seconds, 2),
        "load peak / file": round((loaded - before) / size, 3),
        "load + 1 token peak / file": round((_peak() - before) / size, 3),
    }


def race(folder: Path, tokens: int, dtype: torch.dtype, rounds: int) -> dict[str, object]:
    """Milliseconds a token, ours and theirs."""
    from transformers import AutoModelForCausalLM

    ours = models.load(folder, dtype=dtype)
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=dtype).eval()
    theirs.generation_config.eos_token_id = None
    ids = torch.tensor([ours.text.encode(PROMPT)])
    calls = {
        "regard": lambda: ours.generate(ids, tokens, end=None),
        "transformers": lambda: theirs.generate(ids, max_new_tokens=tokens, do_sample=False)[:, ids.shape[1] :],
    }
    first, second = (call() for call in calls.values())
    if dtype == torch.float32:
        assert torch.equal(first, second), "the two models write different tokens"
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], (time.perf_counter() - start) / tokens * 1e3)
    return {
        **{f"{name} ms/token": round(t, 2) for name, t in best.items()},
        **{f"{name} tokens/s": round(1e3 / t, 1) for name, t in best.items()},
        "ratio": round(best["transformers"] / best["regard"], 2),
        "same tokens": bool(torch.equal(first, second)),
    }


@torch.inference_mode()
def parts(folder: Path, dtype: torch.dtype, rounds: int) -> dict[str, object]:
    """Where a token's time goes, in milliseconds: reading the weights, their products, and everything."""
    model = models.load(folder, dtype=dtype)
    weights = [p.detach() for p in model.parameters() if p.ndim == 2]
    rows = {w.shape[1]: torch.randn(1, w.shape[1]).to(dtype) for w in weights}
    ids = torch.tensor([model.text.encode(PROMPT)])

    def written(step: object) -> None:
        real, block_module.step = block_module.step, step
        try:
            model.generate(ids, 16, end=None)
        finally:
            block_module.step = real

    calls: dict[str, Callable[[], object]] = {
        "sum of all weights": lambda: [w.sum() for w in weights],
        "products, torch": lambda: [F.linear(rows[w.shape[1]], w) for w in weights],
        "products, regard": lambda: [layers.linear(rows[w.shape[1]], w) for w in weights],
        "token, layer by layer": lambda: written(lambda *_: None),
        "token, block by block": lambda: written(block_module.step),
    }
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], (time.perf_counter() - start) * 1e3 / (16 if "token" in name else 1))
    return {f"{name} ms": round(t, 1) for name, t in best.items()}


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--load", action="store_true", help="measure memory instead of speed")
    parser.add_argument("--parts", action="store_true", help="measure where a token's time goes")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if given.load:
        found = load(given.folder)
    elif given.parts:
        found = parts(given.folder, getattr(torch, given.dtype), given.rounds)
    else:
        found = race(given.folder, given.tokens, getattr(torch, given.dtype), given.rounds)
    found |= {"dtype": given.dtype, "threads": torch.get_num_threads(), "torch": torch.__version__}
    found["kernel"] = native.instruction_set() if native.built() else "none"
    for name, value in found.items():
        print(f"{name:>28}  {value}")
    if given.json:
        given.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
