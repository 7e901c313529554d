"""Compile the Triton kernels for GPUs that are not here, and print what each variant needs, as a Markdown table.

    python scripts/measure/gpu_variants.py                       # the table, about half an hour on one core
    python scripts/measure/gpu_variants.py --widths 64 --targets sm_80 gfx942 --passes forward
    python scripts/measure/gpu_variants.py --store build/variants --processes 4
    python scripts/measure/gpu_variants.py --passes "every pass, all options"      # not in the table

No GPU is needed: Triton contains the assemblers. Each variant is a real call, whose kernels are recorded instead of
started, so the table shows what a call compiles. "Careful" is the second launch of a call that can hide keys: it starts
in each such call, and its programs end at once where the first launch was finite.

``--store`` keeps results as JSON, so that a run that was stopped goes on where it was. The exit status is 1 if a
variant does not compile, if it needs more shared memory than its GPU has, or if the first launch of a forward pass
spills registers up to a width of 128.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# The interpreter's kernels cannot be compiled.
os.environ.pop("TRITON_INTERPRET", None)
# Fused multiply–adds, as in kernels that a GPU runs; without a choice Triton warns.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import regard
from regard import Groups, Observe
from regard._lowered_scores import Scores
from regard.kernels.reference import Forward
from regard.kernels.triton import _launch, _run_backward, _run_forward, _run_observed

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
# The newer assembler knows all targets. Older versions of Triton have one assembler.
ASSEMBLERS = [TOOLS / name for name in ("ptxas-blackwell", "ptxas") if (TOOLS / name).exists()]
WIDTHS = (32, 64, 96, 128, 256)
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
TABLE_DTYPES = ("float16", "bfloat16")  # float32 has tests of its largest tiles, and takes half as long again
PASSES = (
    "forward",
    "forward, careful",
    "forward, all options",
    "forward, all options, careful",
    "forward, observed",
    "forward, observed, careful",
    "backward, queries",
    "backward, queries, careful",
    "backward, keys",
    "backward, keys, careful",
    "bias gradients, all options",
    "second pass",
)
# Not in the table: all kernels of calls with rare options, of which the tests compile some.
RARE = (
    "forward, observed, all options",
    "backward, queries, all options",
    "backward, queries, all options, careful",
    "backward, keys, all options",
    "backward, keys, all options, careful",
    "second pass, all options",
    "every pass, all options",
    "every pass, hard attention",
    "every pass, scale 0",
    "every pass, sizes of 1",
)
# The kernel of a pass.
KERNELS = {
    "forward": "forward",
    "forward, observed": "forward",
    "backward, queries": "backward_queries",
    "backward, keys": "backward_keys",
    "bias gradients": "bias_gradients",
    "second pass": "second_pass",
}
# The name of a target: what Triton and the assembler call it, and the shared memory of one program in KiB.
TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), "sm_80", 163),
    "sm_86": (GPUTarget("cuda", 86, 32), "sm_86", 99),
    "sm_90": (GPUTarget("cuda", 90, 32), "sm_90a", 227),
    "sm_100": (GPUTarget("cuda", 100, 32), "sm_100a", 227),
    "gfx942": (GPUTarget("hip", "gfx942", 64), "gfx942", 64),
}
# Up to this width nothing of the forward pass may be spilled.
NO_SPILLS_TO = 128


@dataclass(frozen=True)
class Variant:
    """One kernel with its switches, for one width, dtype and GPU."""

    name: str
    width: int
    dtype: str
    target: str


@dataclass(frozen=True)
class Needs:
    """What a compiled variant needs. Registers are per thread, spilled bytes per thread, shared memory per program."""

    registers: int
    spilled: int
    shared: int


# --- recording what a call would start --------------------------------------------------------------------------------


def record_kernels(run: Any) -> list[tuple[Any, Any, dict[str, Any]]]:
    """The kernel, the tile and the arguments of every launch of ``run()``; nothing is started."""
    launches = []

    def record(kernel: Any, programs: int, tile: Any, arguments: dict[str, Any]) -> None:
        launches.append((kernel, tile, arguments))

    modules = (_launch, _run_forward, _run_observed, _run_backward)
    originals = [module.run_kernel for module in modules]
    try:
        for module in modules:
            module.run_kernel = record
        run()
    finally:
        for module, original in zip(modules, originals, strict=True):
            module.run_kernel = original
    return launches


def find_launches(variant: Variant) -> list[tuple[Any, Any, dict[str, Any]]]:
    """The launches that a variant names: one kernel, or all kernels of a rare case."""
    dtype = DTYPES[variant.dtype]
    heads = 4
    length = 256
    q = torch.zeros(2, heads, length, variant.width, dtype=dtype)
    k = torch.zeros(2, heads // 2, length, variant.width, dtype=dtype)
    hi = torch.arange(1, length + 1).expand(1, length).contiguous()
    plain = Scores(0.125, hi=hi)
    if variant.name == "every pass, all options":
        return _all_launches(q, k, _all_options(q, hi))
    if variant.name == "every pass, hard attention":
        return _all_launches(q, k, Scores(math.inf, hi=hi, bias=torch.zeros(1, 1, 1, length)))
    if variant.name == "every pass, scale 0":
        return _all_launches(q, k, Scores(0.0, hi=hi, bias=torch.zeros(1, heads, length, 1)))
    # Sizes of 1 are constants of a kernel.
    if variant.name == "every pass, sizes of 1":
        one = q[:1, :1, :1]
        return _all_launches(one, one, _all_options(one, hi[:, :1]))
    return [_find_launch(variant.name, q, k, _all_options(q, hi) if "all options" in variant.name else plain)]


def _find_launch(name: str, q: torch.Tensor, k: torch.Tensor, scores: Scores) -> tuple[Any, Any, dict[str, Any]]:
    """The launch of one pass, the first or the careful one."""
    second_pass = name.startswith("second pass")
    if "observed" in name or second_pass:
        observe = Observe(key_mass=True, top=8, profile=16) if second_pass else Observe(map=64)
        launches = record_kernels(lambda: _run_observed.run_observed(q, k, k, scores, observe, None))
    elif name.startswith("forward"):
        launches = record_kernels(lambda: _run_forward.run_forward(q, k, k, scores, None))
    else:
        launches = _backward_launches(q, k, scores)

    kernel = KERNELS[name.removesuffix(", careful").removesuffix(", all options")]
    careful = name.endswith(", careful")
    found = []
    for launch in launches:
        if launch[0].__name__ == kernel and launch[2].get("CAREFUL", False) == careful:
            found.append(launch)
    (launch,) = found
    return launch


def _backward_launches(q: torch.Tensor, k: torch.Tensor, scores: Scores) -> list[tuple[Any, Any, dict[str, Any]]]:
    sums = q.new_zeros(q.shape[:3], dtype=torch.float32)
    result = Forward(q, sums, sums)
    return record_kernels(lambda: _run_backward.run_backward(q, q, k, k, result, scores, biases=True))


def _all_launches(q: torch.Tensor, k: torch.Tensor, scores: Scores) -> list[tuple[Any, Any, dict[str, Any]]]:
    """The kernels of the forward and the backward pass, observed and not, and of exact tiles."""
    sums = q.new_zeros(q.shape[:3], dtype=torch.float32)
    observe = Observe(map=1, key_mass=True, top=1, profile=1, queries=torch.ones(1, q.shape[2], dtype=torch.bool))
    # The widest values that groups need, and the narrowest.
    groups = [Groups(torch.zeros(1, k.shape[2], dtype=torch.int64), list(map(str, range(count)))) for count in (256, 3)]
    real = observe.real_queries(q.shape[2])
    launches = record_kernels(lambda: _run_forward.run_forward(q, k, k, scores, (sums, sums)))
    launches += record_kernels(lambda: _run_observed.run_observed(q, k, k, scores, observe, real))
    for one in groups:
        request = Observe(groups=one)
        launches += record_kernels(lambda request=request: _run_observed.run_observed(q, k, k, scores, request, None))
    launches += _backward_launches(q, k, scores)
    edges = torch.tensor([0, k.shape[2]])
    launches += record_kernels(lambda: _run_observed.run_bin_masses(q, k, sums, sums, scores, edges))
    return launches


def _all_options(q: torch.Tensor, hi: torch.Tensor) -> Scores:
    """Scores with every option at once."""
    _, heads, length, _ = q.shape
    terms = regard.ALiBi().terms(q, length) + regard.RelativeTable(heads, 16).terms(q, length)
    return Scores(
        scale=0.125,
        softcap=30.0,
        lo=torch.zeros_like(hi),
        hi=hi,
        mask=torch.ones(1, 1, length, length, dtype=torch.bool),
        bias=torch.zeros(1, heads, length, length, dtype=q.dtype),
        terms=terms,
        sinks=torch.zeros(heads),
        dropout=0.1,
        seed=torch.zeros((), dtype=torch.int64),
    )


# --- compiling --------------------------------------------------------------------------------------------------------

_POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
}


def argument_type(value: Any, path: tuple[int, ...], constants: dict[Any, Any], attributes: dict[Any, Any]) -> Any:
    """The type of an argument, as Triton names it; constants and alignments are entered into the two tables."""
    if isinstance(value, tuple):
        types = [argument_type(part, (*path, i), constants, attributes) for i, part in enumerate(value)]
        return type(value)(*types) if hasattr(value, "_fields") else tuple(types)
    # The rules of Triton's launcher: None, bool, str and the number 1 are constants.
    if value is None or isinstance(value, bool | str) or (isinstance(value, int) and value == 1):
        constants[path] = value
        return "constexpr"
    if isinstance(value, torch.Tensor):
        # Memory of torch is aligned; on a GPU working sums are float32.
        attributes[path] = [["tt.divisibility", 16]]
        return "*fp32" if value.dtype == torch.float64 else _POINTERS[value.dtype]
    if isinstance(value, int):
        if value % 16 == 0:
            attributes[path] = [["tt.divisibility", 16]]
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"


def compile_variant(variant: Variant) -> Needs:
    """Compile the kernels of a variant; of several, the most that any of them needs."""
    warnings.simplefilter("ignore")
    needs = [compile_launch(*launch, variant.target) for launch in find_launches(variant)]
    return Needs(
        registers=max(need.registers for need in needs),
        spilled=max(need.spilled for need in needs),
        shared=max(need.shared for need in needs),
    )


def compile_kernel(kernel: Any, tile: Any, arguments: dict[str, Any], target_name: str) -> Any:
    """One kernel, compiled for these arguments; its attribute ``asm`` has the code of every step."""
    constants: dict[Any, Any] = {}
    attributes: dict[Any, Any] = {}
    signature: dict[str, Any] = {}
    for index, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr:
            constants[(index,)] = value
            signature[parameter.name] = "constexpr"
        else:
            signature[parameter.name] = argument_type(value, (index,), constants, attributes)
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return triton.compile(source, target=TARGETS[target_name][0], options=options)


def compile_launch(kernel: Any, tile: Any, arguments: dict[str, Any], target_name: str) -> Needs:
    """Compile one kernel for these arguments and read what it needs."""
    compiled = compile_kernel(kernel, tile, arguments, target_name)
    assembler_name = TARGETS[target_name][1]
    if "ptx" in compiled.asm:
        registers, spilled = _read_ptx(compiled.asm["ptx"], assembler_name)
    else:
        text = compiled.asm["amdgcn"]
        registers = int(re.findall(r"\.vgpr_count:\s+(\d+)", text)[0])
        spilled = 4 * int(re.findall(r"\.vgpr_spill_count:\s+(\d+)", text)[0])
    return Needs(registers, spilled, compiled.metadata.shared)


def _read_ptx(ptx: str, name: str) -> tuple[int, int]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        command = [ASSEMBLERS[0], "-v", f"--gpu-name={name}", file, "-o", os.devnull]
        printed = subprocess.run(command, capture_output=True, text=True, check=True)
    text = printed.stdout + printed.stderr
    registers = int(re.findall(r"Used (\d+) registers", text)[0])
    spilled = int(re.findall(r"(\d+) bytes spill stores", text)[0])
    return registers, spilled


# --- the command ------------------------------------------------------------------------------------------------------


def _sources_digest() -> str:
    """A digest of the kernels, so that stored results of other kernels are not used."""
    digest = hashlib.sha256(triton.__version__.encode())
    for path in sorted(Path(_launch.__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def needs_of(variant: Variant, store: Path | None) -> Needs:
    """``compile_variant``, or the result that an earlier run stored."""
    if store is None:
        return compile_variant(variant)
    key = f"{variant.name} {variant.width} {variant.dtype} {variant.target} {_sources_digest()}"
    file = store / (hashlib.sha256(key.encode()).hexdigest()[:24] + ".json")
    if file.exists():
        return Needs(**json.loads(file.read_text()))
    needs = compile_variant(variant)
    store.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(asdict(needs)))
    return needs


def problem(variant: Variant, needs: Needs) -> str:
    """Why a variant is not acceptable; empty if it is."""
    if needs.shared > TARGETS[variant.target][2] * 1024:
        return f"needs {needs.shared} bytes of shared memory"
    first_forward = variant.name.startswith("forward") and not variant.name.endswith("careful")
    if first_forward and variant.width <= NO_SPILLS_TO and needs.spilled:
        return f"spills {needs.spilled} bytes"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS, help="the widths of q, k and v")
    parser.add_argument("--dtypes", nargs="+", default=TABLE_DTYPES, choices=DTYPES)
    parser.add_argument("--targets", nargs="+", default=tuple(TARGETS), choices=TARGETS)
    parser.add_argument("--passes", nargs="+", default=PASSES, choices=PASSES + RARE)
    parser.add_argument("--store", type=Path, help="a folder for results, so that a stopped run can go on")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()

    variants = []
    for name in options.passes:
        for dtype in options.dtypes:
            for width in options.widths:
                for target in options.targets:
                    variants.append(Variant(name, width, dtype, target))

    print("Registers per thread / bytes spilled per thread / KiB of shared memory per program.\n")
    print(f"| pass | dtype | d | {' | '.join(options.targets)} |")
    print(f"|---|---|---|{'---|' * len(options.targets)}")
    problems = []
    cells = []
    with ProcessPoolExecutor(options.processes) as pool:
        results = pool.map(needs_of, variants, [options.store] * len(variants))
        for variant, needs in zip(variants, results, strict=True):
            cells.append(f"{needs.registers} / {needs.spilled} / {needs.shared / 1024:.0f}")
            reason = problem(variant, needs)
            if reason:
                problems.append(f"{variant.name}, {variant.dtype}, d = {variant.width}, {variant.target}: {reason}")
            if len(cells) == len(options.targets):
                print(f"| {variant.name} | {variant.dtype} | {variant.width} | {' | '.join(cells)} |", flush=True)
                cells = []
    for line in problems:
        print(line, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
