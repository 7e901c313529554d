"""Counts the fused multiply–adds and the stack accesses in the innermost loops of a kernel's object file.

    scripts/test-native arm
    python scripts/measure/inner_loops.py build/native-arm/regard_core/CMakeFiles/regard_core.dir/kernels_neon.cpp.o \\
        --objdump aarch64-linux-gnu-objdump

A loop is a backward branch and the instructions that it jumps over. The table lists the loops with the most fused
multiply–adds. A stack access in such a loop is a register that did not fit.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Iterator

INSTRUCTION = re.compile(r"^\s*([0-9a-f]+):\t(?:[0-9a-f]{2,8} )+\s*\t?([a-z][\w.]*)\s*(.*)$")
MULTIPLY_ADD = re.compile(r"^(fmla|bfdot|vfmadd\w+|vdpbf16ps)$")
BRANCH = re.compile(r"^(b|b\.\w+|cbn?z|tbn?z|j\w+)$")
STACK = re.compile(r"\[sp\b|\(%rsp")

Instruction = tuple[int, str, str]  # address, name, operands


def functions_of(objdump: str, path: str) -> Iterator[list[Instruction]]:
    """Yield the instructions of each function."""
    text = subprocess.run([objdump, "-d", path], check=True, capture_output=True, text=True).stdout
    for function in text.split("\n\n"):
        matches = [INSTRUCTION.match(line) for line in function.splitlines()]
        instructions = [(int(found[1], 16), found[2], found[3]) for found in matches if found is not None]
        if instructions:
            yield instructions


def innermost_loops(instructions: list[Instruction]) -> Iterator[list[Instruction]]:
    """Yield the instructions of each loop that contains no other loop."""
    spans = []
    for address, name, operands in instructions:
        target = re.search(r"(?:^|, )([0-9a-f]+) <", operands)
        if BRANCH.match(name) and target and int(target[1], 16) <= address:
            spans.append((int(target[1], 16), address))
    for start, end in spans:
        if any(start <= a and b <= end and (a, b) != (start, end) for a, b in spans):
            continue
        yield [instruction for instruction in instructions if start <= instruction[0] <= end]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("object", help="an object file, for example kernels_neon.cpp.o")
    parser.add_argument("--objdump", default="objdump")
    parser.add_argument("--least", type=int, default=60, help="the least number of multiply–adds of a listed loop")
    options = parser.parse_args()

    rows = set()
    for function in functions_of(options.objdump, options.object):
        for loop in innermost_loops(function):
            products = sum(bool(MULTIPLY_ADD.match(name)) for _, name, _ in loop)
            stack = sum(bool(STACK.search(operands)) for _, _, operands in loop)
            if products >= options.least:
                rows.add((products, len(loop), stack))
    print("multiply–adds  instructions  share  stack accesses")
    for products, size, stack in sorted(rows, reverse=True):
        print(f"{products:13}  {size:12}  {products / size:5.0%}  {stack:14}")


if __name__ == "__main__":
    main()
