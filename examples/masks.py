"""Masks are values that can be combined and printed. True means: may attend.

python examples/masks.py
"""

import torch

import regard
from regard import Causal, Padding, Prefix, Segments, Window


def main() -> None:
    masks = {
        "a decoder": Causal(),
        "a sliding window of three": Causal() & Window(2),
        "a window that keeps the first two tokens": Causal() & (Window(2) | Prefix(2)),
        "a prefix language model": Causal() | Prefix(3),
        "two documents in one row": Causal() & Segments(torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])),
        "a text of five, padded to eight": Padding([5]),
    }
    for name, mask in masks.items():
        print(f"{name}: {mask.draw(8)}\n")

    # Two texts packed into one row give the same outputs as each text alone.
    q, k, v = torch.randn(3, 1, 2, 8, 16)
    packed = regard.attention(q, k, v, mask=masks["two documents in one row"])
    alone = [regard.attention(q[:, :, s], k[:, :, s], v[:, :, s], mask=Causal()) for s in (slice(3), slice(3, 8))]
    torch.testing.assert_close(packed, torch.cat(alone, 2))
    print("packed documents equal those computed alone")


if __name__ == "__main__":
    main()
