"""Find the heads that look up what followed before, and show that a model needs them.

python examples/induction_heads.py [FOLDER]
"""

import sys

import torch

from regard.models import bundled, load
from regard.watching import ablate
from regard.watching.heads import atlas


def main(folder: str) -> None:
    model = load(folder)
    found = atlas(model, tokens=192, block=32)
    heads = found.top("induction", 2)  # scored on random tokens that repeat, where nothing else can help
    print("strongest induction heads:", ", ".join(f"{path} head {head}" for path, head in heads))

    # Random tokens, said twice: the second half can be known only by looking back.
    g = torch.Generator().manual_seed(0)
    block = torch.randint(model.config["vocab_size"], (4, 64), generator=g)
    twice = torch.cat([block, block], 1)
    print("without them:         ", ablate(model, heads, by="mean").change(twice))
    others = [(path, head) for path, head in found.top("spread", 4) if (path, head) not in heads][:2]
    print("without two others:   ", ablate(model, others, by="mean").change(twice))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(bundled()))
