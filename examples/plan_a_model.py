"""Plan a model before it exists: what it weighs, what a step costs, where the time goes, what fits.

python examples/plan_a_model.py
"""

from regard import budget


def main() -> None:
    small = budget.decoder(768, heads=12, layers=12, vocab=50257)
    plan = budget.plan(small, tokens=1024, batch=8, training=True)
    print(f"{plan.parameters:,} parameters, {(plan.forward + plan.backward) / 1e12:.1f} TFLOP a step,")
    print(f"{plan.memory.peak / 2**30:.1f} GiB at most; bottleneck: {plan.bottleneck}\n")

    print("n        attention's share   memory to read n tokens")
    for n in (512, 2048, 8192, 32768):
        at = budget.plan(small, tokens=n)
        print(f"{n:<8,} {at.shares['attention']:>17.0%}   {at.memory.peak / 2**30:>19.1f} GiB")

    # The same lines of code count in the theory's letters.
    letters = budget.in_letters("decoder", {"heads": 12, "layers": 12, "vocab": 50257})
    print("\nFLOPs of a forward pass:", budget.text(budget.formulas(letters)["FLOPs, forward"]))
    fits = budget.plan(small, tokens=1024, batch=8, training=True, machine=budget.named("A100 80GB"), dtype="bfloat16")
    print(f"On an A100 a step takes {fits.seconds * 1e3:.0f} ms at least, and batches of {fits.most} fit.")


if __name__ == "__main__":
    main()
