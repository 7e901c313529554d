"""Random shapes and options, native against float64, for as many seconds as the first argument says.

    python tests/fuzz.py 600

Each case is printed before it is blamed, with the seed that makes it again. Not a test of its own: `make fuzz` runs it.
"""

from __future__ import annotations

import random
import sys
import time

import torch
from cases import CHOICES, build
from test_native import check, run

import regard
from regard import Observe
from regard.kernels import native

SIZES = (0, 1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 130, 257)


def case_of(seed: int):
    rng = random.Random(seed)
    choice = {name: rng.choice(values) for name, values in CHOICES.items()}
    if rng.random() < 0.1:  # decoding: few queries, many keys
        n, m = rng.randrange(1, 18), rng.randrange(1500, 5000)
        choice |= {"heads": rng.choice(("one", "grouped")), "batch": "one", "bias": rng.choice(("none", "alibi", "t5"))}
    else:
        n, m = rng.choice(SIZES), rng.choice(SIZES)
    return rng, choice, build(choice, n, m, rng.randrange(1, 140), rng.randrange(1, 140), seed)


def observe(rng: random.Random, case) -> None:
    """Watching changes no bit of the output, and the rows' masses lie between 0 and 1."""
    options = case.options | {"dropout": 0.0}
    q, k, v = (x.float() for x in (case.q, case.k, case.v))
    what = Observe(map=rng.choice((0, 1, 7, 64)), sink=rng.randrange(4), local=rng.randrange(6))
    out, seen = regard.attention(q, k, v, observe=what, backend="native", **options)
    assert torch.equal(out, regard.attention(q, k, v, backend="native", **options))
    for name in ("peak", "sink", "local"):
        x = getattr(seen, name)
        assert ((x >= 0) & (x <= 1 + 1e-4)).all(), name


def main(seconds: float) -> None:
    end, seed = time.monotonic() + seconds, int(time.time())
    first = seed
    names = native.instruction_sets()
    while time.monotonic() < end:
        rng, choice, case = case_of(seed)
        chosen = names[seed % len(names)]
        native.instruction_set = lambda name=chosen: name  # type: ignore[assignment]
        try:
            check(case)
            observe(rng, case)
            if rng.random() < 0.2 and choice["values"] != "large":  # half precision: finite where float32 is
                for dtype in (torch.bfloat16, torch.float16):
                    out = run(case, dtype, lambda *a, **o: regard.attention(*a, **o, backend="native"))
                    assert all(x.isfinite().all() for x in out)
        except Exception:
            shapes = [list(x.shape) for x in (case.q, case.k, case.v)]
            print(f"seed {seed}, {native.instruction_set()}: {choice} {shapes}", flush=True)
            raise
        seed += 1
    print(f"{seed - first} cases in {seconds:.0f} s, on {', '.join(names)}: nothing found")


if __name__ == "__main__":
    main(float(sys.argv[1]))
