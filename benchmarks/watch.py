"""A whole model watched on a long text: time against the same model unwatched, and peak memory.

    python examples/smollm2.py smollm2
    python benchmarks/watch.py smollm2 8192 [--rounds 2]           transformers' model, sdpa against regard.watch
    python benchmarks/watch.py smollm2 32768 --layers "*.1?.*" --alone    watched only, some layers
    python benchmarks/watch.py smollm2 8192 --estimate             what eager weights would take, computed, not run

The text is CPython's own documentation. Every head is observed with all row values and a 64 × 64 map. Outputs are
compared before anything is timed. Prints a table.
"""

from __future__ import annotations

import argparse
import resource
import time
import warnings
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch

import regard
from regard import Observe

ASK = Observe(map=64)


def text_ids(folder: Path, n: int) -> torch.Tensor:
    """n tokens of Python's documentation, from the start again where it ends."""
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("\n".join(topics.values())).ids
    return torch.tensor([(ids * (n // len(ids) + 1))[:n]])


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("n", type=int)
    parser.add_argument("--layers")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--alone", action="store_true", help="do not run the unwatched model")
    parser.add_argument("--estimate", action="store_true", help="only compute the memory of eager weights")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    found = estimate(given.folder, given.n) if given.estimate else watched(given)
    for name, value in found.items():
        print(f"{name:>36}  {value}")


def estimate(folder: Path, n: int) -> dict[str, object]:
    config = regard.models.load(folder).config
    heads, layers = config.whole("num_attention_heads"), config.layers("num_hidden_layers")
    return {"eager weights, all layers, GB": round(4 * n * n * heads * layers / 1e9, 1)}


@torch.no_grad()
def watched(given: Any) -> dict[str, object]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(given.folder, attn_implementation="sdpa").eval()
    ids = text_ids(given.folder, given.n)

    def plain() -> torch.Tensor:
        return model(ids, use_cache=False, logits_to_keep=1).logits

    def seen() -> tuple[torch.Tensor, regard.watching.Seen]:
        with regard.watch(model, ASK, layers=given.layers) as found:
            return plain(), found

    best = {"unwatched, sdpa": float("inf"), "watched": float("inf")}
    error = None
    for _ in range(1 if given.alone else given.rounds):
        start = time.perf_counter()
        out, found = seen()
        best["watched"] = min(best["watched"], time.perf_counter() - start)
        if not given.alone:
            start = time.perf_counter()
            expected = plain()
            best["unwatched, sdpa"] = min(best["unwatched, sdpa"], time.perf_counter() - start)
            error = float((out - expected).abs().max() / expected.abs().max())
            assert error < 1e-4, f"watching changed the output by {error}"
    sinks = max(float(found[path].mean("sink").max()) for path in found)
    return {
        "tokens": given.n,
        "layers watched": len(found),
        **{f"{name}, s": round(t, 1) for name, t in best.items() if t < float("inf")},
        "watched / unwatched": "" if given.alone else round(best["watched"] / best["unwatched, sdpa"], 2),
        "largest relative difference": "" if error is None else f"{error:.1e}",
        "peak memory of the process, GB": round(peak() / 1e9, 2),
        "strongest sink head's mass": round(sinks, 3),
        "threads": torch.get_num_threads(),
    }


if __name__ == "__main__":
    import regard.models

    main()
