"""Count the operations per weight in the loops of the Triton kernels, and what is loaded ahead, as Markdown tables.

    python scripts/measure/gpu_operations.py     # a few seconds; no GPU is needed

Each pass is compiled for one GPU, with a causal mask. In Triton's own representation of the loop over blocks
of keys, every operation on a tile of weights [rows, keys] is one operation per weight: arithmetic, comparisons, choices
and sums. Matrix products, broadcasts and constants are not counted; e^x is one of the operations. Some parts of a loop
are skipped by most blocks, or repeated for each bin of the map: these are counted apart.

The second table counts the asynchronous copies (``cp.async``) in the assembly. Where there are none, a program waits
for each block of keys: Triton loads ahead only in a loop that contains no other loop and no barrier.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from gpu_variants import Variant, compile_kernel, find_launches, record_kernels

from regard import Observe
from regard._lowered_scores import Scores
from regard.kernels.triton import _run_observed

# With this width no other tile has the shape of the weights; the count does not depend on it.
WIDTH = 128
PASSES = ("forward", "forward, observed", "backward, queries", "backward, keys", "second pass")
# Copies and constants, which cost nothing per weight, and matrix products, which have a formula.
FREE = {"tt.broadcast", "tt.splat", "tt.trans", "tt.dot", "arith.constant", "tt.expand_dims"}


def loop_body(code: str) -> Iterator[str]:
    """The lines of the loop over blocks: the first loop that contains a matrix product."""
    lines = code.splitlines()
    for start, line in enumerate(lines):
        if "scf.for" not in line:
            continue
        body = []
        for inner in lines[start + 1 :]:
            if indent(inner) <= indent(line):
                break
            body.append(inner)
        if any("tt.dot" in inner for inner in body):
            yield from body
            return


def indent(line: str) -> int:
    """The number of spaces before a line."""
    return len(line) - len(line.lstrip())


def count_operations(code: str, rows: int, keys: int) -> tuple[int, int]:
    """Operations per weight of every block, and of blocks that enter a part of the loop that others skip."""
    # The pass over keys transposes its weights.
    tile = re.compile(rf"tensor<({rows}x{keys}|{keys}x{rows})x")
    body = list(loop_body(code))
    # Operations next to the matrix products belong to every block that is computed.
    level = next(indent(line) for line in body if "tt.dot" in line)
    always = 0
    sometimes = 0
    for line in body:
        operation = re.match(r'\s*%\S+ = "?([\w.]+)', line)
        # The types of a sum are on its last line.
        is_sum = line.strip().startswith("}) : (")
        if not is_sum and (operation is None or operation[1] in FREE or operation[1] == "scf.for"):
            continue
        if not tile.search(line):
            continue
        if indent(line) == level:
            always += 1
        else:
            sometimes += 1
    return always, sometimes


def observed_launch(kernel: str, observe: Observe) -> tuple[Any, Any, dict[str, Any]]:
    """The first launch of a kernel in a causal call that is observed."""
    q = torch.zeros(2, 4, 256, WIDTH, dtype=torch.float16)
    scores = Scores(0.125, hi=torch.arange(1, 257).unsqueeze(0))
    launches = record_kernels(lambda: _run_observed.run_observed(q, q, q, scores, observe, None))
    return next(launch for launch in launches if launch[0].__name__ == kernel)


def print_copies() -> None:
    """The table of asynchronous copies."""

    def first(name: str) -> tuple[Any, Any, dict[str, Any]]:
        return find_launches(Variant(name, WIDTH, "float16", "sm_80"))[0]

    launches = {
        "forward": first("forward"),
        "forward, observed, without a map": observed_launch("forward", Observe()),
        "forward, observed, with a map": observed_launch("forward", Observe(map=64)),
        "backward, queries": first("backward, queries"),
        "backward, keys": first("backward, keys"),
        "second pass, key mass and profile": observed_launch("second_pass", Observe(key_mass=True, profile=16)),
        "second pass, largest weights": observed_launch("second_pass", Observe(top=8)),
    }
    print("| pass | asynchronous copies |")
    print("|---|---|")
    for name, launch in launches.items():
        compiled = compile_kernel(*launch, "sm_80")
        copies = re.findall(r"cp\.async\.c[ag]", compiled.asm["ptx"])
        print(f"| {name} | {len(copies)} |")


def main() -> None:
    print("| pass | operations per weight | in some blocks |")
    print("|---|---|---|")
    for name in PASSES:
        kernel, tile, arguments = find_launches(Variant(name, WIDTH, "float16", "sm_80"))[0]
        compiled = compile_kernel(kernel, tile, arguments, "sm_80")
        always, sometimes = count_operations(compiled.asm["ttir"], tile.rows, tile.keys)
        print(f"| {name} | {always} | {sometimes} |")
    print()
    print_copies()


if __name__ == "__main__":
    main()
