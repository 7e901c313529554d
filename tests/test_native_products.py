"""The products of the native kernel: one order of sums in all passes, pairs of bfloat16, dense biases in any layout."""

from __future__ import annotations

import math
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import dense_attention
from support.cases import CHOICES, Case, build
from support.key_groups import GROUPS
from support.operator_runs import draw_dropout_seed, run_rounded_case
from torch import Tensor
from torch.nn import functional as F

import regard
from regard import Causal, Dense, Observe
from regard.kernels import native

pytestmark = pytest.mark.skipif(not native.built(), reason="the native module was not built")
SETS = native.instruction_sets() or ("none",)
CSRC = Path(__file__).parent.parent / "csrc"


@pytest.fixture(params=SETS)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each instruction set in turn."""
    monkeypatch.setattr(native, "instruction_set", lambda: request.param)
    return str(request.param)


def draw(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


# --- one order of sums ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("largest", [1e3, 1e5, 1e6])
@pytest.mark.parametrize("n", [1, 3, 4, 8, 16])
def test_gradients_of_few_rows_with_large_scores(isa: str, n: int, largest: float) -> None:
    """The backward pass computes the same scores as the forward pass, to the last bit; else dv would lose digits."""
    q, k, v, grad = draw((1, 2, n, 64), (1, 2, 512, 64), (1, 2, 512, 64), (1, 2, n, 64))
    q = q * (largest / (q @ k.mT / 8).abs().max())

    def dv(call, dtype: torch.dtype) -> Tensor:
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(call(*leaves), leaves, grad.to(dtype))[2]

    exact = dv(F.scaled_dot_product_attention, torch.float64)
    torch_error = (dv(F.scaled_dot_product_attention, torch.float32) - exact).abs().max()
    error = (dv(lambda *x: regard.attention(*x, backend="native"), torch.float32) - exact).abs().max()
    assert error <= 3 * torch_error + torch.finfo(torch.float32).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [1, 5, 16, 33])
def test_weights_of_a_row_add_up_in_every_pass(full_tiles: None, isa: str, dtype: torch.dtype, n: int) -> None:
    """A second pass, which divides by the sums of the first one, finds weights with the sum 1, for any scores."""
    q, k = (x.to(dtype) for x in draw((1, 2, n, 64), (1, 2, 300, 64)))
    q = q * 4096
    _, observation = regard.attention(q, k, k, observe=Observe(keep=True, key_mass=True), backend="native")
    torch.testing.assert_close(observation.key_mass.sum(-1), torch.ones(2, dtype=observation.key_mass.dtype))
    for head in range(2):
        tile = observation.tile(head, size=1)
        torch.testing.assert_close(tile.double(), torch.ones_like(tile.double()), rtol=1e-5, atol=1e-5)


# --- bfloat16 ---------------------------------------------------------------------------------------------------------


SIZES = st.sampled_from([1, 3, 7, 16, 17, 33, 64, 65, 130])
CASES = st.builds(
    build,
    st.fixed_dictionaries({name: st.sampled_from(values) for name, values in CHOICES.items()}).filter(
        lambda choice: choice["scale"] not in ("hard", "large") and choice["values"] == "normal"
    ),
    SIZES,
    SIZES,
    st.sampled_from([1, 2, 5, 16, 33, 64]),
    st.sampled_from([1, 2, 5, 16, 33, 64]),
    st.integers(0, 2**31),
)


@given(CASES, st.sampled_from(SETS))
@settings(max_examples=80)
def test_every_option_in_bfloat16(case: Case, name: str) -> None:
    """Errors are a few roundings of a bfloat16 number, whether products are float32 or pairs of bfloat16."""
    half = torch.bfloat16
    seed = draw_dropout_seed() if case.options["dropout"] else None
    exact = run_rounded_case(
        case, half, torch.float64, lambda *a, **o: dense_attention.attention(*a, **o, seed=seed)[0]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "instruction_set", lambda: name)
        draw_dropout_seed()
        ours = run_rounded_case(case, half, half, lambda *a, **o: regard.attention(*a, **o, backend="native"))
    largest = max((x.abs().max().item() for x in exact if x.numel()), default=0.0)
    rows = case.q.numel() / case.q.shape[-1]  # the gradient of a value that all rows share is a sum over them
    for a, b in zip(ours, exact, strict=True):
        assert a.isfinite().all()
        if a.numel():
            assert (a - b).abs().max() <= torch.finfo(half).eps * (1 + largest) * (2 + math.sqrt(rows) / 4)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [1, 16, 40, 300])
def test_observables_of_bfloat16_inputs(full_tiles: None, isa: str, n: int, causal: bool) -> None:
    """Observables are measured on weights that are not rounded: they equal those of float64 on the same inputs."""
    q, k, v = (x.to(torch.bfloat16) for x in draw((1, 4, n, 64), (1, 2, 300, 64), (1, 2, 300, 48)))
    mask = Causal() if causal else None
    observe = Observe(map=8, key_mass=True, profile=3, top=2, groups=GROUPS[0])
    _, ours = regard.attention(q, k, v, mask=mask, observe=observe, backend="native")
    exact = [x.double() for x in (q, k, v)]
    _, theirs = regard.attention(*exact, mask=mask, observe=observe, backend="reference")
    rows = ("lse", "logit_max", "entropy", "peak", "offset", "distance", "sink", "local", "groups")
    for field in (*rows, "map", "key_mass", "profile", "top"):
        a = getattr(ours, field).double()
        torch.testing.assert_close(a, getattr(theirs, field).double(), rtol=2e-4, atol=2e-4, msg=field)
    assert torch.equal(ours.peak_at, theirs.peak_at) and torch.equal(ours.visible, theirs.visible)


# --- dense biases and masks -------------------------------------------------------------------------------------------


LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.mT.contiguous().mT,
    "sliced": lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
    "one row for all": lambda x: x[..., :1, :],
    "one column for all": lambda x: x[..., :1],
    "one head for all": lambda x: x[:, :1],
}


PAIRS_OF_LAYOUTS = [(layout, None) for layout in LAYOUTS] + [(None, layout) for layout in LAYOUTS]
PAIRS_OF_LAYOUTS += [("contiguous", "contiguous"), ("contiguous", "one row for all"), ("transposed", "contiguous")]


@pytest.mark.parametrize(("bias_layout", "mask_layout"), PAIRS_OF_LAYOUTS)
def test_dense_biases_and_masks_in_every_layout(isa: str, bias_layout: str | None, mask_layout: str | None) -> None:
    q, k, v, bias, drawn = draw((2, 3, 35, 8), (2, 3, 83, 8), (2, 3, 83, 8), (2, 3, 35, 83), (2, 3, 35, 83))
    bias[0, 0, 3, 5] = -math.inf
    bias = LAYOUTS[bias_layout](bias) if bias_layout else None
    mask = Dense(LAYOUTS[mask_layout](drawn > 0)) if mask_layout else None
    ours = regard.attention(q, k, v, bias=bias, mask=mask, backend="native")
    exact = [x.double() for x in (q, k, v)]
    theirs = regard.attention(*exact, bias=None if bias is None else bias.double(), mask=mask, backend="reference")
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


# --- symbols ----------------------------------------------------------------------------------------------------------


KERNEL_FILES = sorted(path.stem for path in CSRC.glob("kernels_*.cpp"))
FLAGS = {
    "kernels_portable": [],
    "kernels_avx2": ["-mavx2", "-mfma", "-mf16c"],
    "kernels_emulated": ["-O1", "-mavx2", "-mfma", "-mf16c", "-Wno-psabi"],
    "kernels_avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c"],
}
FLAGS["kernels_avx512bf16"] = [*FLAGS["kernels_avx512"], "-mavx512bf16"]
FLAGS["kernels_neon"] = ["-fno-schedule-insns"]
FLAGS["kernels_neonbf16"] = ["-fno-schedule-insns", "-march=armv8.2-a+bf16"]


def test_kernels_use_no_containers_of_the_standard_library() -> None:
    """Their functions would be compiled once per instruction set under one name, and the linker would keep any one."""
    arguments = {"attention_call.h", "decode_call.h"}  # filled by the bindings; the long test below checks their use
    included = {"define_kernels.h"}
    for _ in range(10):
        for name in list(included):
            included |= set(re.findall(r'#include "(\w+\.h)"', (CSRC / name).read_text(encoding="utf-8")))
    for name in included - arguments - {"instruction_sets.h"}:
        text = re.sub(r"//.*", "", (CSRC / name).read_text(encoding="utf-8"))
        assert not re.search(r"std::(vector|string|map|set|function|unique_ptr|shared_ptr|deque)\b", text), name


@pytest.mark.full
@pytest.mark.parametrize("name", KERNEL_FILES)
def test_objects_of_instruction_sets_share_no_function(name: str, tmp_path: Path) -> None:
    """Every weak function of an object belongs to the namespace of its instruction set."""
    for_arm = name.startswith("kernels_neon")
    compiler = "aarch64-linux-gnu-g++" if for_arm else "g++"
    if not for_arm and platform.machine() != "x86_64":
        pytest.skip("this compiler does not compile for x86")
    if shutil.which(compiler) is None or shutil.which("nm") is None:
        pytest.skip(f"{compiler} or nm is not installed")
    command = [compiler, "-std=c++17", "-O3", "-fPIC", "-fopenmp", *FLAGS[name], "-c", str(CSRC / f"{name}.cpp")]
    subprocess.run([*command, "-o", str(tmp_path / "kernels.o")], check=True)
    symbols = subprocess.run(
        ["nm", "--defined-only", tmp_path / "kernels.o"], check=True, capture_output=True, text=True
    ).stdout
    namespace = name.removeprefix("kernels_")
    weak = re.findall(r"^[0-9a-f]* [WVu] (\S+)$", symbols, flags=re.MULTILINE)
    assert weak  # the kernels themselves
    shared = [symbol for symbol in weak if f"{len(namespace)}{namespace}" not in symbol]
    assert shared in ([], ["DW.ref.__gxx_personality_v0"])
