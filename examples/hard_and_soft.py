"""From averaging to argmax: one number, the inverse temperature, takes attention from soft to hard.

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
        out, seen = regard.attention(q, k, v, scale=beta, observe=regard.Observe())
        away = (out - hard).abs().max()
        print(f"{beta:<9g} {seen.mean('entropy').item():7.3f}   {seen.mean('peak').item():14.3f}   {away:.1e}")
    print(f"\nβ = 0 averages all keys: its entropy is ln 64 = {math.log(64):.3f}")


if __name__ == "__main__":
    main()
