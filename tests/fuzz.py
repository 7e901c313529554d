"""Compare the native kernel with float64 on random shapes and options, for the given number of seconds.

    python tests/fuzz.py 600

A case that fails is printed with the seed that builds it again. pytest does not collect this file; `make fuzz` runs it.
"""

from __future__ import annotations

import random
import sys
import time

import torch
from support.cases import CHOICES, build
from support.operator_runs import check_native, run_float32_case

import regard
from regard import Groups, Observe
from regard.kernels import native

SIZES = (0, 1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 130, 257)


def build_case(seed: int):
    """A random generator, the choice of each option, and the case."""
    rng = random.Random(seed)
    choice = {name: rng.choice(values) for name, values in CHOICES.items()}
    if rng.random() < 0.1:  # decoding: few queries, many keys
        n = rng.randrange(1, 18)
        m = rng.randrange(1500, 5000)
        choice |= {"heads": rng.choice(("one", "grouped")), "batch": "one", "bias": rng.choice(("none", "alibi", "t5"))}
    else:
        n = rng.choice(SIZES)
        m = rng.choice(SIZES)
    return rng, choice, build(choice, n, m, rng.randrange(1, 140), rng.randrange(1, 140), seed)


def check_observation(rng: random.Random, case) -> None:
    """Observation changes no bit of the output, and the masses of rows are between 0 and 1."""
    options = case.options | {"dropout": 0.0}
    q, k, v = (x.float() for x in (case.q, case.k, case.v))
    labels = torch.tensor([rng.randrange(-1, 4) for _ in range(rng.randrange(1, 300))])
    groups = Groups(labels, names=("a", "b", "c", "d"))
    observe = Observe(map=rng.choice((0, 1, 7, 64)), sink=rng.randrange(4), local=rng.randrange(6), groups=groups)
    out, observation = regard.attention(q, k, v, observe=observe, backend="native", **options)
    assert torch.equal(out, regard.attention(q, k, v, backend="native", **options))
    for name in ("peak", "sink", "local"):
        value = getattr(observation, name)
        assert ((value >= 0) & (value <= 1 + 1e-4)).all(), name
    assert (observation.groups.sum(-1) <= 1 + 1e-4).all()


def main(seconds: float) -> None:
    """Try cases with increasing seeds until the time is up, on all instruction sets in turn."""
    end = time.monotonic() + seconds
    seed = int(time.time())
    first = seed
    names = native.instruction_sets()
    while time.monotonic() < end:
        rng, choice, case = build_case(seed)
        instruction_set = names[seed % len(names)]
        native.instruction_set = lambda name=instruction_set: name  # type: ignore[assignment]
        try:
            check_native(case)
            check_observation(rng, case)
            if rng.random() < 0.2 and choice["values"] != "large":  # half precision is finite if float32 is
                for dtype in (torch.bfloat16, torch.float16):
                    out = run_float32_case(case, dtype, lambda *a, **o: regard.attention(*a, **o, backend="native"))
                    assert all(x.isfinite().all() for x in out)
        except Exception:
            shapes = [list(x.shape) for x in (case.q, case.k, case.v)]
            print(f"seed {seed}, {native.instruction_set()}: {choice} {shapes}", flush=True)
            raise
        seed += 1
    print(f"{seed - first} cases in {seconds:.0f} s, on {', '.join(names)}: no error")


if __name__ == "__main__":
    main(float(sys.argv[1]))
