"""Compare the size of a page of all heads with BertViz' model view, for a model of the size of GPT-2.

    pip install --no-deps --target peers bertviz
    PYTHONPATH=peers python scripts/measure/page_size.py [128]

``--target`` keeps bertviz out of this environment, so that it cannot change the version of torch. The weights are
random: both pages hold the same number of values whatever a model has learned. Without bertviz only our page is made.
"""

from __future__ import annotations

import argparse
import importlib.util

import torch

import regard
from regard.interp import PAGE_OBSERVABLES
from regard.nn import Decoder

LAYERS = 12
HEADS = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", type=int, nargs="?", default=128)
    n = parser.parse_args().tokens
    token_labels = [f"word{i}" for i in range(n)]

    model = Decoder(768, heads=HEADS, layers=LAYERS, vocab=1000).eval()
    with torch.no_grad(), regard.watch(model, PAGE_OBSERVABLES) as recording:
        model(torch.randint(1000, (1, n)))
    recording.metadata["tokens"] = token_labels
    print(f"regard   {len(recording.to_html().encode()) / 1e6:8.1f} MB")

    if importlib.util.find_spec("bertviz"):
        from bertviz import model_view

        weights = tuple(torch.rand(1, HEADS, n, n).softmax(-1) for _ in range(LAYERS))
        page = model_view(weights, token_labels, html_action="return")
        print(f"BertViz  {len(page.data.encode()) / 1e6:8.1f} MB")


if __name__ == "__main__":
    main()
