"""Train a small model while every head is watched, and read when each became what it is.

python examples/train_and_evolve.py [--steps 500] [--out runs/repeats]
"""

import argparse

from regard.training import evolution, train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="40 seconds on 2 cores")
    parser.add_argument("--out", default="runs/repeats", help="Ctrl-C stops it; the same command goes on")
    given = parser.parse_args()

    # Random tokens with a block that comes twice: only looking back can tell what follows.
    result = train("repeats", given.out, {"steps": given.steps, "warmup": given.steps // 5})
    print(f"accuracy on what can be looked up: {result.best['scores']['accuracy']:.3f}")

    seen = evolution(given.out)
    for step, scores in zip(seen.steps, seen.value("induction score"), strict=True):
        best = scores.nan_to_num().max().item()
        print(f"step {step:>5}   strongest induction head {best:.2f} {'█' * round(30 * best)}")
    for row in seen.arrivals():
        print(f"layer {row['layer']} head {row['head']} is a head of kind {row['kind']} since step {row['step']}")


if __name__ == "__main__":
    main()
