"""Measure how a trained language model generates: time per token against transformers, and memory of loading.

    python examples/smollm2.py smollm2
    python scripts/measure/decode.py smollm2 [--tokens 64] [--dtype bfloat16]
    python scripts/measure/decode.py smollm2 --parts     the time of each part of a token
    python scripts/measure/decode.py smollm2 --load      peak memory of loading, and of one token

Both models read the same files in the same dtype and generate greedily from one prompt, without stopping at end tokens.
In float32 the program asserts that they generate the same tokens before anything is timed. transformers runs with sdpa.
`regard bench "generates, per token"` is the same race with random weights, without a model folder.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from common import peak_memory, print_conditions, print_figures
from torch import Tensor
from torch.nn import functional as F

from regard import models
from regard.bench._race import race
from regard.kernels import linear_norm_rope
from regard.nn import _block as block_module

PROMPT = "The capital of France is"
TOKENS_PER_PART = 16


def measure_load(folder: Path) -> dict[str, object]:
    """Peak memory above that of the process before: after loading, and after one token."""
    before = peak_memory()
    start = time.perf_counter()
    model = models.load(folder)
    seconds = time.perf_counter() - start
    loaded = peak_memory()
    model.generate(PROMPT, 1)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return {
        "file MB": round(size / 1e6),
        "load s": round(seconds, 2),
        "load peak / file": round((loaded - before) / size, 3),
        "load + 1 token peak / file": round((peak_memory() - before) / size, 3),
    }


def race_transformers(folder: Path, tokens: int, dtype: torch.dtype, seconds: float) -> dict[str, object]:
    """Milliseconds per token of both libraries."""
    from transformers import AutoModelForCausalLM

    ours = models.load(folder, dtype=dtype)
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=dtype).eval()
    theirs.generation_config.eos_token_id = None
    ids = torch.tensor([ours.tokenizer.encode(PROMPT)])

    def our_call() -> Tensor:
        return ours.generate(ids, tokens, end=None)

    def their_call() -> Tensor:
        return theirs.generate(ids, max_new_tokens=tokens, do_sample=False)[:, ids.shape[1] :]

    same_tokens = torch.equal(our_call(), their_call())
    assert same_tokens or dtype != torch.float32, "the two models generate different tokens"
    best, _, rounds = race({"regard": our_call, "transformers": their_call}, seconds, tokens)
    return {
        "regard ms/token": best["regard"],
        "transformers ms/token": best["transformers"],
        "ratio": round(best["transformers"] / best["regard"], 2),
        "same tokens": same_tokens,
        "rounds": rounds,
    }


@torch.inference_mode()
def measure_parts(folder: Path, dtype: torch.dtype, seconds: float) -> dict[str, object]:
    """Milliseconds of reading all weights, of their products with one row, and of a whole token."""
    model = models.load(folder, dtype=dtype)
    weights = [p.detach() for p in model.parameters() if p.ndim == 2]
    rows = {w.shape[1]: torch.randn(1, w.shape[1]).to(dtype) for w in weights}
    ids = torch.tensor([model.tokenizer.encode(PROMPT)])
    native_step = block_module.decode_step

    def generate(decode_step: Callable[..., Tensor | None]) -> None:
        block_module.decode_step = decode_step
        try:
            model.generate(ids, TOKENS_PER_PART, end=None)
        finally:
            block_module.decode_step = native_step

    products: dict[str, Callable[[], object]] = {
        "sum of all weights": lambda: [w.sum() for w in weights],
        "products, torch": lambda: [F.linear(rows[w.shape[1]], w) for w in weights],
        "products, regard": lambda: [linear_norm_rope.linear(rows[w.shape[1]], w) for w in weights],
    }
    # A block whose native step returns None falls back to its layers.
    tokens: dict[str, Callable[[], object]] = {
        "token, layer by layer": lambda: generate(lambda *_: None),
        "token, block by block": lambda: generate(native_step),
    }
    best = race(products, seconds)[0] | race(tokens, seconds, TOKENS_PER_PART)[0]
    return {f"{name} ms": round(milliseconds, 1) for name, milliseconds in best.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--load", action="store_true", help="measure memory instead of speed")
    parser.add_argument("--parts", action="store_true", help="measure the time of each part of a token")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=30, help="about how long to time; at least 3 rounds are made")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    dtype = getattr(torch, options.dtype)
    if options.load:
        figures = measure_load(options.folder)
    elif options.parts:
        figures = measure_parts(options.folder, dtype, options.seconds)
    else:
        figures = race_transformers(options.folder, options.tokens, dtype, options.seconds)
    print_figures(figures | {"dtype": options.dtype})
    print_conditions()


if __name__ == "__main__":
    main()
