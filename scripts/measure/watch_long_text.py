"""Watch a whole model on a long text: time against the same model unwatched, and peak memory.

    python examples/smollm2.py smollm2
    python scripts/measure/watch_long_text.py smollm2 8192 [--rounds 2]  # transformers with sdpa, unwatched and watched
    python scripts/measure/watch_long_text.py smollm2 32768 --layers "*.1?.*" --alone  # some layers, watched only
    python scripts/measure/watch_long_text.py smollm2 8192 --estimate  # memory of eager weights, computed and not run

The text is CPython's documentation. Every head is observed with all row values and a 64 × 64 map. The outputs of both
models are compared in every round.
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path
from pydoc_data.topics import topics

import torch
from common import peak_memory, print_conditions, print_figures
from torch import Tensor

import regard
from regard import Observe, models

OBSERVE = Observe(map=64)


def text_ids(folder: Path, n: int) -> Tensor:
    """The first n tokens of Python's documentation, which is repeated if it is too short."""
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("\n".join(topics.values())).ids
    repeats = n // len(ids) + 1
    return torch.tensor([(ids * repeats)[:n]])


def estimate_eager_memory(folder: Path, n: int) -> dict[str, object]:
    """The bytes of all float32 weights, which eager attention of transformers would return."""
    config = models.load(folder).config
    heads = config.integer("num_attention_heads") * config.layer_count("num_hidden_layers")
    return {"eager weights, all layers, GB": round(4 * n * n * heads / 1e9, 1)}


@torch.no_grad()
def measure(options: argparse.Namespace) -> dict[str, object]:
    """Time both models in turns, and compare their outputs."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(options.folder, attn_implementation="sdpa", dtype=torch.float32).eval()
    ids = text_ids(options.folder, options.n)

    def run_model() -> Tensor:
        return model(ids, use_cache=False, logits_to_keep=1).logits

    watched_times = []
    plain_times = []
    error = 0.0
    for _ in range(1 if options.alone else options.rounds):
        start = time.perf_counter()
        with regard.watch(model, OBSERVE, layers=options.layers) as recording:
            watched_logits = run_model()
        watched_times.append(time.perf_counter() - start)
        if not options.alone:
            start = time.perf_counter()
            plain_logits = run_model()
            plain_times.append(time.perf_counter() - start)
            error = float((watched_logits - plain_logits).abs().max() / plain_logits.abs().max())
            assert error < 1e-4, f"watching changed the output by {error}"

    figures: dict[str, object] = {
        "tokens": options.n,
        "layers watched": len(recording),
        "watched, s": round(min(watched_times), 1),
    }
    if plain_times:
        figures["unwatched, sdpa, s"] = round(min(plain_times), 1)
        figures["watched / unwatched"] = round(min(watched_times) / min(plain_times), 2)
        figures["largest relative difference"] = f"{error:.1e}"
    figures["peak memory of the process, GB"] = round(peak_memory() / 1e9, 2)
    strongest_sink = max(float(recording[path].mean("sink").max()) for path in recording)
    figures["largest sink mass of a head"] = round(strongest_sink, 3)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("n", type=int, help="number of tokens")
    parser.add_argument("--layers", help="pattern of the module paths to watch")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--alone", action="store_true", help="do not run the unwatched model")
    parser.add_argument("--estimate", action="store_true", help="only compute the memory of eager weights")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.estimate:
        print_figures(estimate_eager_memory(options.folder, options.n))
        return
    print_figures(measure(options))
    print_conditions()


if __name__ == "__main__":
    main()
