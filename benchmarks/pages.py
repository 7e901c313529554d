"""A page of every head: its size against BertViz' model view, for a model of GPT-2's size on n tokens.

    pip install --no-deps --target peers bertviz
    PYTHONPATH=peers python benchmarks/pages.py [128]      … beside this environment, so that torch stays

Weights are drawn: both pages hold as many numbers whatever a model has learned. Without bertviz only ours is written.
"""

from __future__ import annotations

import argparse
import importlib.util

import torch

import regard
from regard.nn import Decoder
from regard.watching import LOOK

LAYERS, HEADS = 12, 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", type=int, nargs="?", default=128)
    n = parser.parse_args().tokens
    words = [f"word{i}" for i in range(n)]
    model = Decoder(768, heads=HEADS, layers=LAYERS, vocab=1000).eval()
    with torch.no_grad(), regard.watch(model, LOOK) as seen:
        model(torch.randint(1000, (1, n)))
    seen.about["tokens"] = words
    print(f"regard   {len(seen.to_html().encode()) / 1e6:8.1f} MB")
    if importlib.util.find_spec("bertviz"):
        from bertviz import model_view

        weights = tuple(torch.rand(1, HEADS, n, n).softmax(-1) for _ in range(LAYERS))
        page = model_view(weights, words, html_action="return")
        print(f"BertViz  {len(page.data.encode()) / 1e6:8.1f} MB")


if __name__ == "__main__":
    main()
