"""Find the induction heads of a model, and show that the model needs them.

python examples/induction_heads.py [FOLDER]
"""

import sys

import torch

from regard.interp import ablate, atlas
from regard.models import bundled, load


def main(folder: str) -> None:
    model = load(folder)
    scores = atlas(model, tokens=192, block=32)
    heads = scores.top("induction", 2)  # measured on repeated random tokens, which only induction can predict
    print("strongest induction heads:", ", ".join(f"{path} head {head}" for path, head in heads))

    # Random tokens, repeated once: the second half can be predicted only from the first.
    generator = torch.Generator().manual_seed(0)
    block = torch.randint(model.config["vocab_size"], (4, 64), generator=generator)
    twice = torch.cat([block, block], 1)
    print("without them:         ", ablate(model, heads, by="mean").loss_change(twice))
    others = [(path, head) for path, head in scores.top("spread", 4) if (path, head) not in heads][:2]
    print("without two others:   ", ablate(model, others, by="mean").loss_change(twice))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(bundled()))
