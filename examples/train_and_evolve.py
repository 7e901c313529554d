"""Train a small model, record every head, and print when each head took its type.

python examples/train_and_evolve.py [--steps 500] [--out runs/repeats]
"""

import argparse

from regard.training import evolution, train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="40 seconds on 2 cores")
    parser.add_argument("--out", default="runs/repeats", help="Ctrl-C stops the run; the same command continues it")
    arguments = parser.parse_args()

    # Random tokens with a repeated block: only attention to the first copy can predict the second.
    result = train("repeats", arguments.out, {"steps": arguments.steps, "warmup": arguments.steps // 5})
    print(f"accuracy on repeated tokens: {result.best['scores']['accuracy']:.3f}")

    heads = evolution(arguments.out)
    for step, scores in zip(heads.steps, heads.value("induction score"), strict=True):
        best = scores.nan_to_num().max().item()
        print(f"step {step:>5}   strongest induction head {best:.2f} {'█' * round(30 * best)}")
    for row in heads.arrivals():
        if row["after"] is not None:  # the head did not have the type at the first record
            steps = f"between step {row['after']} and {row['step']}"
            print(f"layer {row['layer']} head {row['head']} took the type {row['kind']} {steps}")


if __name__ == "__main__":
    main()
