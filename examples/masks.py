"""A tour of masks: values that compose, and that draw themselves. True means: may attend.

python examples/masks.py
"""

import torch

import regard
from regard import Causal, Padding, Prefix, Segments, Window


def main() -> None:
    tour = {
        "a decoder": Causal(),
        "a window of three": Causal() & Window(2),
        "the first two tokens stay in sight": Causal() & (Window(2) | Prefix(2)),
        "a prefix is read both ways": Causal() | Prefix(3),
        "two documents in one row": Causal() & Segments(torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])),
        "a text of five, padded to eight": Padding([5]),
    }
    for name, mask in tour.items():
        print(f"{name}: {mask.draw(8)}\n")

    # Packing two texts in one row gives what each gives alone.
    q, k, v = torch.randn(3, 1, 2, 8, 16)
    packed = regard.attention(q, k, v, mask=tour["two documents in one row"])
    alone = [regard.attention(q[:, :, s], k[:, :, s], v[:, :, s], mask=Causal()) for s in (slice(3), slice(3, 8))]
    torch.testing.assert_close(packed, torch.cat(alone, 2))
    print("packed documents equal those computed alone")


if __name__ == "__main__":
    main()
