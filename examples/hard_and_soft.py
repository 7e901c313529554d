"""From averaging to argmax: the inverse temperature turns soft attention into hard attention.

python examples/hard_and_soft.py
"""

import math

import torch

import regard


def main() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 64, 16, dtype=torch.float64)
    v = torch.randn(1, 1, 64, 16, dtype=torch.float64)
    hard = regard.attention(q, k, v, scale=math.inf)  # the exact limit: only the best key counts, ties share

    print("scale β   entropy   largest weight   distance to hard attention")
    for beta in (0, 0.25, 1, 4, 16, 64, math.inf):  # 0.25 is the usual 1/√d here
        out, observation = regard.attention(q, k, v, scale=beta, observe=regard.Observe())
        entropy = observation.mean("entropy").item()
        peak = observation.mean("peak").item()
        print(f"{beta:<9g} {entropy:7.3f}   {peak:14.3f}   {(out - hard).abs().max():.1e}")
    print(f"\nβ = 0 averages all keys: its entropy is ln 64 = {math.log(64):.3f}")


if __name__ == "__main__":
    main()
