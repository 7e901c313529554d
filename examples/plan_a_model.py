"""Plan a model before it exists: its size, the cost of a step, the bottleneck, and what fits.

python examples/plan_a_model.py
"""

from regard import budget


def main() -> None:
    small = budget.decoder(768, heads=12, layers=12, vocab=50257)
    plan = budget.plan(small, tokens=1024, batch=8, training=True)
    print(f"{plan.parameters:,} parameters, {(plan.forward_flops + plan.backward_flops) / 1e12:.1f} TFLOP per step,")
    print(f"{plan.memory.peak / 2**30:.1f} GiB at most; bottleneck: {plan.bottleneck}\n")

    print("n        attention's share   memory to read n tokens")
    for n in (512, 2048, 8192, 32768):
        longer = budget.plan(small, tokens=n)
        print(f"{n:<8,} {longer.shares['attention']:>17.0%}   {longer.memory.peak / 2**30:>19.1f} GiB")

    # The same code also gives formulas in the theory's letters.
    letters = budget.symbolic_model("decoder", {"heads": 12, "layers": 12, "vocab": 50257})
    print("\nFLOPs of a forward pass:", budget.to_text(budget.formulas(letters)["FLOPs, forward"]))
    on_gpu = budget.plan(
        small, tokens=1024, batch=8, training=True, machine=budget.find_machine("A100 80GB"), dtype="bfloat16"
    )
    print(f"On an A100 a step takes {on_gpu.seconds * 1e3:.0f} ms at least, and batches of {on_gpu.max_batch} fit.")


if __name__ == "__main__":
    main()
