"""A convolution as attention with the same outputs, one head per tap, and back.

python examples/convolution_to_attention.py
"""

import torch
from torch import nn

from regard.convolution import to_attention, to_convolution


def main() -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 16, kernel_size=3, stride=2, padding=1).double()
    image = torch.randn(1, 3, 17, 17, dtype=torch.float64)

    layer = to_attention(conv)  # nine heads; each attends to one neighbour
    print(f"exact: largest difference {(layer(image) - conv(image)).abs().max():.1e}")

    # With the quadratic encoding attention is soft; it approaches the convolution as α grows.
    for alpha in (2.0, 4.0, 8.0, 16.0):
        soft = to_attention(conv, alpha=alpha)
        print(f"α = {alpha:<4g} largest difference {(soft(image) - conv(image)).abs().max():.1e}")

    back = to_convolution(layer)
    print(f"and back: kernels differ by {(back.weight - conv.weight).abs().max():.1e}")


if __name__ == "__main__":
    main()
