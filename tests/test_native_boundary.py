"""The typed boundary of the compiled module: a wrong tensor is an error that names the argument."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import regard
from regard import Causal, Observe, Padding, models
from regard._lowered_scores import NO_POSITION, RelativeTerm, Scores
from regard.interp import load_recording
from regard.kernels import native, native_decode_layers, reference
from regard.kernels.linear_norm_rope import linear, rms_norm
from regard.kernels.reference_observables import FLOAT_ROWS

pytestmark = pytest.mark.skipif(not native.built(), reason="the native module was not built")

B, H, G, N, M, D, E = 2, 6, 3, 5, 7, 11, 13


def isa() -> str:
    return native.instruction_set()


def attention_call(**changes: object) -> object:
    """An ``AttentionCall`` on zeros; ``changes`` replace arguments."""
    arguments: dict[str, object] = {
        "q": torch.zeros(B, H, N, D),
        "k": torch.zeros(B, G, M, D),
        "v": torch.zeros(B, G, M, E),
        "out": torch.zeros(B, H, N, E),
        "scale": 1.0,
        "softcap": 0.0,
        "dropout": 0.0,
        "seed": 0,
        "threads": 1,
    }
    return native.compiled().AttentionCall(**(arguments | changes))


def rows(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.zeros(B, H, N, dtype=dtype)


def call_with_sums() -> object:
    call = attention_call()
    call.set_row_sums(row_max=rows(), row_sum=rows())
    assert call.forward(isa())
    return call


def misaligned(x: Tensor) -> Tensor:
    """The same numbers, one byte away from where they should lie, as a file with an odd header gives them."""
    stored = torch.empty(x.numel() * x.element_size() + 1, dtype=torch.uint8)
    moved = torch.frombuffer(stored.numpy(), dtype=x.dtype, offset=1, count=x.numel()).view(x.shape)
    moved.copy_(x)
    assert moved.data_ptr() % x.element_size() == 1
    return moved


WRONG_INPUTS = {
    "q at an odd address": ("q", misaligned(torch.zeros(B, H, N, D))),
    "q in bfloat16 at an odd address": ("q", misaligned(torch.zeros(B, H, N, D, dtype=torch.bfloat16))),
    "q of another dtype": ("q", torch.zeros(B, H, N, D, dtype=torch.float64)),
    "q of another rank": ("q", torch.zeros(H, N, D)),
    "q of five dimensions": ("q", torch.zeros(1, B, H, N, D)),
    "q on another device": ("q", torch.zeros(B, H, N, D, device="meta")),
    "q with strided rows": ("q", torch.zeros(B, H, D, N).transpose(2, 3)),
    "k of another dtype": ("k", torch.zeros(B, G, M, D, dtype=torch.bfloat16)),
    "k of another batch": ("k", torch.zeros(B + 1, G, M, D)),
    "k of another width": ("k", torch.zeros(B, G, M, D + 1)),
    "k whose heads do not divide": ("k", torch.zeros(B, 4, M, D)),
    "k without heads": ("k", torch.zeros(B, 0, M, D)),
    "v of another length": ("v", torch.zeros(B, G, M - 1, E)),
    "v of another batch": ("v", torch.zeros(B + 1, G, M, E)),
    "v of other heads": ("v", torch.zeros(B, H, M, E)),
    "out of another width": ("out", torch.zeros(B, H, N, D)),
    "out of another dtype": ("out", torch.zeros(B, H, N, E, dtype=torch.float16)),
}


@pytest.mark.parametrize("name", WRONG_INPUTS)
def test_inputs_are_checked_against_each_other(name: str) -> None:
    argument, tensor = WRONG_INPUTS[name]
    with pytest.raises(ValueError, match=f"^{argument} must .*got") as caught:
        attention_call(**{argument: tensor})
    assert "\n" not in str(caught.value)


def test_what_is_not_a_tensor_is_refused() -> None:
    class Forged:
        dtype = torch.float32
        is_cpu = True
        shape = (B, H, N, D)

        def stride(self) -> tuple[int, ...]:
            return (H * N * D, N * D, D, 1)

        def data_ptr(self) -> int:
            return 1

    for wrong in (Forged(), [1.0], 3, None):
        with pytest.raises(TypeError):
            attention_call(q=wrong)


def test_numbers_are_checked() -> None:
    for name, value in (("scale", -1.0), ("scale", float("nan")), ("softcap", -1.0), ("dropout", 1.5)):
        with pytest.raises(ValueError, match=f"^{name} must"):
            attention_call(**{name: value})
    with pytest.raises(ValueError, match=r"^instruction_set must be one of"):
        attention_call().forward("mmx")


WRONG_OPTIONS = {
    "lo of another length": ("set_lo", torch.zeros(B, N + 1, dtype=torch.int64)),
    "lo of another batch": ("set_lo", torch.zeros(B + 1, N, dtype=torch.int64)),
    "lo of another dtype": ("set_lo", torch.zeros(B, N, dtype=torch.int32)),
    "hi with strided rows": ("set_hi", torch.zeros(B, 2 * N, dtype=torch.int64)[:, ::2]),
    "mask that does not broadcast": ("set_mask", torch.ones(B, H, N, M + 1, dtype=torch.bool)),
    "mask of another dtype": ("set_mask", torch.ones(B, H, N, M)),
    "bias that does not broadcast": ("set_bias", torch.zeros(1, 2, N, M)),
    "bias of another rank": ("set_bias", torch.zeros(N, M)),
    "bias of another dtype": ("set_bias", torch.zeros(1, 1, N, M, dtype=torch.float64)),
    "sinks of another length": ("set_sinks", torch.zeros(H - 1)),
    "sinks with strides": ("set_sinks", torch.zeros(2 * H)[::2]),
}


@pytest.mark.parametrize("name", WRONG_OPTIONS)
def test_options_are_checked_against_the_inputs(name: str) -> None:
    method, tensor = WRONG_OPTIONS[name]
    with pytest.raises(ValueError, match=f"^{method.removeprefix('set_')} must .*got"):
        getattr(attention_call(), method)(tensor)


def test_terms_are_checked() -> None:
    right = {
        "table": torch.zeros(1, H, 1, 9),
        "query_positions": torch.arange(N),
        "key_positions": torch.arange(M),
        "first_offset": -4,
    }
    call = attention_call()
    call.add_term(**right)
    assert call.is_toeplitz(0)
    with pytest.raises(ValueError, match=r"^term must be"):
        call.is_toeplitz(1)
    for argument, wrong in (
        ("table", torch.zeros(1, H, N + 1, 9)),
        ("table", torch.zeros(1, H, 1, 0)),
        ("table", torch.zeros(1, H, 1, 9, dtype=torch.float64)),
        ("query_positions", torch.arange(N + 1)),
        ("key_positions", torch.arange(M, dtype=torch.int32)),
    ):
        with pytest.raises(ValueError, match=f"^{argument} must"):
            call.add_term(**(right | {argument: wrong}))


def test_bounds_beyond_the_keys_are_the_last_key() -> None:
    torch.manual_seed(0)
    inputs = {"q": torch.randn(B, H, N, D), "k": torch.randn(B, G, M, D), "v": torch.randn(B, G, M, E)}
    outputs = []
    for low, high in ((0, M), (-(2**40), 2**40)):
        out = torch.zeros(B, H, N, E)
        call = attention_call(**inputs, out=out)
        call.set_lo(torch.full((1, N), low))
        call.set_hi(torch.full((1, N), high))
        assert call.forward(isa())
        outputs.append(out)
    assert torch.equal(*outputs)


FAR = 2**63 - 1  # the largest int64: sums and differences with it wrap around


@pytest.mark.parametrize("query_start", [0, FAR - 2, -FAR, NO_POSITION - 2])
@pytest.mark.parametrize("key_step", [1, 3, -FAR // M])
@pytest.mark.parametrize("first_offset", [-4, FAR, -FAR - 1])
def test_positions_of_any_size_read_the_column_of_the_reference(
    query_start: int, key_step: int, first_offset: int
) -> None:
    torch.manual_seed(0)
    q = torch.randn(B, H, N, D)
    k = torch.randn(B, G, M, D)
    positions = (torch.arange(N) + query_start, torch.arange(M) * key_step)
    terms = (RelativeTerm(torch.randn(1, H, 1, 9), *positions, first_offset),)
    scores = Scores(1.0, terms=terms)
    torch.testing.assert_close(native.output(q, k, k, scores), reference.output(q, k, k, scores))


def test_offsets_of_queries_are_checked() -> None:
    counted = rows(torch.bool)
    for wrong in (2**41, -(2**41)):
        with pytest.raises(ValueError, match=r"^query_offset must"):
            call_with_sums().second_pass(isa(), counted=counted, query_offset=wrong)


def test_tensors_that_share_their_elements_are_not_written() -> None:
    with pytest.raises(ValueError, match=r"^out must .*memory"):
        attention_call(out=torch.zeros(B, 1, N, E).expand(B, H, N, E))
    call = call_with_sums()
    gradients = {"dq": torch.zeros(B, H, N, D), "dk": torch.zeros(B, G, M, D), "dv": torch.zeros(B, G, M, E)}
    gradients |= {"grad_out": torch.ones(B, H, N, E), "delta": rows(torch.float32)}
    with pytest.raises(ValueError, match=r"^bias_grad must .*memory"):
        call.backward(isa(), **gradients, bias_grad=torch.zeros(1).expand(B, H, N, M), term_grads=[])
    cache = torch.zeros(3, 1, 1, 4).expand(3, 1, 5, 4)
    token = torch.ones(3, 1, 8)
    with pytest.raises(ValueError, match=r"^k_cache must .*memory"):
        decode_block().run(
            isa(), x=token, y=token.clone(), k_cache=cache, v_cache=cache, length=2, visible=2, threads=1
        )


def test_sizes_whose_product_overflows_are_refused() -> None:
    module = native.compiled()
    row = torch.zeros(1, 1)
    half = row.expand(2**62, 1)
    with pytest.raises(ValueError, match=r"^matrices must"):
        module.linear(isa(), x=row, matrices=[(half, None)] * 4, y=row[:, :0], threads=1)
    many = module.LinearParameters(weight=torch.zeros(1, 8).expand(2**40, 8))
    with pytest.raises(ValueError, match=r"^(k_proj|out_proj) must"):
        decode_block(q_proj=many, v_proj=many, heads=2**40)


@pytest.mark.skipif("REGARD_TEST_MODULE" in os.environ, reason="the sanitizers end a process without memory")
def test_memory_that_is_not_there_is_an_error_and_not_the_end() -> None:
    """Each thread needs a vector of N + M biases; a process with little memory gets an exception for it."""
    code = """
        import resource, torch
        from regard.kernels import native

        torch.set_num_threads(2)
        small = torch.zeros(1, 8, 256, 4)
        native.output(small, small, small, native.Scores(1.0))  # the threads start before memory is short
        n = 2**22
        x = torch.zeros(1, 2, n, 1, dtype=torch.float16)
        positions = torch.arange(n)
        call = native.compiled().AttentionCall(
            q=x, k=x[:, :1, :1], v=x[:, :1, :1], out=torch.zeros_like(x), scale=1.0, softcap=0.0, dropout=0.0, seed=0,
            threads=2,
        )
        call.add_term(
            table=torch.zeros(1, 1, 1, 1), query_positions=positions, key_positions=positions[:1], first_offset=0
        )
        in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + 2**23, in_use + 2**23))
        try:
            call.forward(native.instruction_set())
        except MemoryError:
            print("refused")
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert result.stdout == "refused\n", result


def test_passes_that_read_the_row_sums_need_them() -> None:
    counted = rows(torch.bool)
    with pytest.raises(ValueError, match="row_max and row_sum must be set"):
        attention_call().second_pass(isa(), counted=counted, query_offset=0)
    with pytest.raises(ValueError, match=r"^row_sum must"):
        attention_call().set_row_sums(row_max=rows(), row_sum=rows(torch.float32))


def test_observables_are_checked() -> None:
    right = {name: rows(torch.float32) for name in FLOAT_ROWS}
    right |= {
        "peak_at": rows(torch.int64),
        "visible": rows(torch.int64),
        "map": torch.zeros(H, 3, 3, dtype=torch.int64),
        "groups": torch.zeros(B, H, N, 2),
        "key_groups": torch.full((1, M), 1),
    }
    numbers = {"query_offset": 0, "sink_keys": 1, "local_radius": 1}
    assert attention_call().forward_observed(isa(), **right, **numbers)
    for argument, wrong in (
        ("entropy", rows()),
        ("peak_at", rows(torch.int32)),
        ("visible", torch.zeros(B, N, H, dtype=torch.int64)),
        ("map", torch.zeros(H, 3, 4, dtype=torch.int64)),
        ("real_queries", torch.ones(B + 1, N, dtype=torch.bool)),
        ("real_queries", torch.ones(B, N + 1, dtype=torch.bool)),
        ("groups", torch.zeros(B, H, N)),
        ("groups", torch.zeros(B, H, N, 2, dtype=torch.float64)),
        ("key_groups", torch.zeros(1, M, dtype=torch.int32)),
        ("key_groups", torch.zeros(1, M + 1, dtype=torch.int64)),
        ("key_groups", torch.zeros(B + 1, M, dtype=torch.int64)),
        ("key_groups", torch.full((1, M), 2)),
        ("key_groups", torch.full((1, M), -2)),
    ):
        with pytest.raises(ValueError, match=f"^{argument} must"):
            attention_call().forward_observed(isa(), **(right | {argument: wrong}), **numbers)


def test_the_second_pass_is_checked() -> None:
    call = call_with_sums()
    counted = rows(torch.bool)
    for argument, wrong in (
        ("key_mass", torch.zeros(H, M + 1, dtype=torch.int64)),
        ("profile", torch.zeros(H, 4, dtype=torch.int64)),
        ("top", torch.zeros(B, H, N + 1, 2)),
    ):
        with pytest.raises(ValueError, match=f"^{argument} must"):
            call.second_pass(isa(), counted=counted, query_offset=0, **{argument: wrong})
    with pytest.raises(TypeError, match=r"^profile_rows must"):
        call.second_pass(isa(), counted=counted, query_offset=0, profile=torch.zeros(H, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"^masses must"):
        call.sum_bins(isa(), edges=torch.tensor([0, 3, M]), masses=torch.zeros(B, H, N, 3))
    with pytest.raises(ValueError, match=r"^edges must"):
        call.sum_bins(isa(), edges=torch.tensor([0]), masses=torch.zeros(B, H, N, 0))
    masses = torch.zeros(B, H, N, 2)
    for edges in ([-5, 3, M], [0, 3, M + 1], [0, 2**62, 2**63 - 1], [4, 3, M], [0, M, 3]):
        with pytest.raises(ValueError, match=r"^edges must .*got"):
            call.sum_bins(isa(), edges=torch.tensor(edges), masses=masses)
    call.sum_bins(isa(), edges=torch.tensor([0, 3, M]), masses=masses)
    torch.testing.assert_close(masses.sum(-1), torch.ones(B, H, N))


def test_gradients_are_checked() -> None:
    call = call_with_sums()
    right = {
        "grad_out": torch.ones(B, H, N, E),
        "dq": torch.zeros(B, H, N, D),
        "dk": torch.zeros(B, G, M, D),
        "dv": torch.zeros(B, G, M, E),
        "delta": rows(torch.float32),
        "term_grads": [],
    }
    assert call.backward(isa(), **right)
    for argument, wrong in (
        ("grad_out", torch.ones(B, H, N, E, dtype=torch.bfloat16)),
        ("dq", torch.zeros(B, H, N, D, dtype=torch.bfloat16)),
        ("dk", torch.zeros(1, G, M, D)),
        ("dv", torch.zeros(B, G, M, D)),
        ("delta", rows()),
        ("toeplitz_grad", torch.zeros(B, H, N)),
        ("bias_grad", torch.zeros(B, H, N + 1, M)),
    ):
        with pytest.raises(ValueError, match=f"^{argument} must"):
            call.backward(isa(), **(right | {argument: wrong}))
    with pytest.raises(ValueError, match=r"^term_grads must have"):
        call.backward(isa(), **(right | {"term_grads": [None]}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_that_require_gradients_are_read(dtype: torch.dtype) -> None:
    q = torch.randn(B, H, N, D).to(dtype).requires_grad_()
    inputs = {"q": q, "k": torch.randn(B, G, M, D).to(dtype), "v": torch.ones(B, G, M, E, dtype=dtype)}
    out = torch.zeros(B, H, N, E, dtype=dtype)
    assert attention_call(**inputs, out=out).forward(isa())
    torch.testing.assert_close(out, torch.ones_like(out))


def test_layers_are_checked() -> None:
    module = native.compiled()
    x = torch.ones(2, D)
    right = {"x": x, "matrices": [(torch.ones(E, D), None)], "y": torch.zeros(2, E), "threads": 1}
    module.linear(isa(), **right)
    assert torch.equal(right["y"], torch.full((2, E), float(D)))
    for argument, changes in (
        ("x", {"x": torch.ones(2, D, dtype=torch.float64)}),
        ("weight", {"matrices": [(torch.ones(E, D + 1), None)]}),
        ("weight", {"matrices": [(torch.ones(E, D, dtype=torch.float16), None)]}),
        ("bias", {"matrices": [(torch.ones(E, D), torch.ones(E + 1))]}),
        ("y", {"y": torch.zeros(2, E + 1)}),
    ):
        with pytest.raises(ValueError, match=f"^{argument} must"):
            module.linear(isa(), **(right | changes))
    with pytest.raises(TypeError, match=r"^matrices must be"):
        module.linear(isa(), **(right | {"matrices": [torch.ones(E, D)]}))

    right = {"kind": module.NormKind.rms, "x": x, "weight": torch.ones(D), "eps": 0.0, "y": torch.zeros(2, D)}
    module.norm(isa(), **right, threads=1)
    for argument, wrong in (("weight", torch.ones(D - 1)), ("bias", torch.ones(1)), ("y", torch.zeros(D, 2))):
        with pytest.raises(ValueError, match=f"^{argument} must"):
            module.norm(isa(), **(right | {argument: wrong}), threads=1)
    with pytest.raises(TypeError):
        module.norm(isa(), **(right | {"kind": True}), threads=1)

    heads = torch.ones(B, H, N, D)
    right = {"layout": module.RopeLayout.pairs, "x": heads, "cos": torch.ones(N, 4), "sin": torch.zeros(N, 4)}
    y = torch.zeros_like(heads)
    module.rope(isa(), **right, y=y)
    assert torch.equal(y, heads)
    for argument, wrong in (
        ("cos", torch.ones(N, 3)),
        ("cos", torch.ones(N, D + 1)),
        ("cos", torch.ones(N + 1, 4)),
        ("cos", torch.ones(3, 1, N, 4)),
        ("sin", torch.ones(N, 4, dtype=torch.float64)),
        ("x", torch.ones(B, H, D, N).transpose(2, 3)),
    ):
        with pytest.raises(ValueError, match=f"^{argument} must"):
            module.rope(isa(), **(right | {argument: wrong}), y=y)


def decode_block(**changes: object) -> object:
    """A block of width 8 with 2 query heads on one key head."""
    module = native.compiled()
    shapes = {"q_proj": (8, 8), "k_proj": (4, 8), "v_proj": (4, 8), "out_proj": (8, 8), "up": (9, 8), "down": (8, 9)}
    arguments: dict[str, object] = {
        name: module.LinearParameters(weight=torch.zeros(*shape)) for name, shape in shapes.items()
    }
    for name in ("attention_norm", "feedforward_norm"):
        arguments[name] = module.NormParameters(kind=module.NormKind.rms, weight=torch.ones(8), eps=1e-5)
    arguments |= {"heads": 2, "kv_heads": 1, "activation": module.Activation.relu, "scale": 1.0, "softcap": 0.0}
    arguments |= {"rope_width": 0, "rope_layout": module.RopeLayout.halves}
    return module.DecodeBlock(**(arguments | changes))


def test_blocks_are_checked() -> None:
    module = native.compiled()
    for argument, parameters in (
        ("k_proj", module.LinearParameters(weight=torch.zeros(5, 8))),
        ("out_proj", module.LinearParameters(weight=torch.zeros(8, 9))),
        ("up", module.LinearParameters(weight=torch.zeros(9, 7))),
        ("down", module.LinearParameters(weight=torch.zeros(8, 10))),
        ("gate", module.LinearParameters(weight=torch.zeros(10, 8))),
        ("up", module.LinearParameters(weight=torch.zeros(9, 8, dtype=torch.bfloat16))),
        ("q_norm", module.NormParameters(kind=module.NormKind.rms, weight=torch.ones(8), eps=1e-5)),
        ("sinks", torch.zeros(3)),
    ):
        with pytest.raises(ValueError, match=f"^{argument} must"):
            decode_block(**{argument: parameters})
    with pytest.raises(ValueError, match=r"^heads must be"):
        decode_block(heads=3, kv_heads=2)
    with pytest.raises(ValueError, match=r"^rope_width must be"):
        decode_block(rope_width=6)
    with pytest.raises(TypeError):
        decode_block(activation=0)

    right = {"x": torch.ones(3, 1, 8), "y": torch.zeros(3, 1, 8), "length": 2, "visible": 2, "threads": 1}
    right |= {"k_cache": torch.zeros(3, 1, 5, 4), "v_cache": torch.zeros(3, 1, 5, 4)}
    assert decode_block().run(isa(), **right)
    assert torch.equal(right["y"], right["x"])
    for argument, wrong in (
        ("x", torch.ones(3, 2, 8)),
        ("y", torch.ones(2, 1, 8)),
        ("length", 6),
        ("visible", 3),
        ("visible", 0),
        ("k_cache", torch.zeros(2, 1, 5, 4)),
        ("v_cache", torch.zeros(3, 1, 5, 6)),
        ("v_cache", torch.zeros(3, 1, 5, 4, dtype=torch.float16)),
    ):
        named = "k_cache" if argument == "length" else argument
        with pytest.raises(ValueError, match=f"^{named} must"):
            decode_block().run(isa(), **(right | {argument: wrong}))
    with pytest.raises(TypeError, match=r"^cos must"):
        decode_block(rope_width=4).run(isa(), **right)


def test_a_parameter_that_moved_is_refused() -> None:
    module = native.compiled()
    weight = torch.nn.Parameter(torch.zeros(8, 8))
    block = decode_block(q_proj=module.LinearParameters(weight=weight))
    weight.data = torch.ones(8, 8)
    x = torch.ones(1, 1, 8)
    cache = torch.zeros(1, 1, 5, 4)
    with pytest.raises(ValueError, match=r"^q_proj must"):
        block.run(isa(), x=x, y=x.clone(), k_cache=cache, v_cache=cache, length=1, visible=1, threads=1)


# --- elements that are not at multiples of their size in memory -------------------------------------------------------


def shift_numbers(file: Path) -> None:
    """Lengthen the header of a safetensors file by one space, so that all its numbers lie at odd addresses."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    file.write_bytes((length + 1).to_bytes(8, "little") + content[8 : 8 + length] + b" " + content[8 + length :])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_copies_what_is_not_aligned(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {"q": (B, H, N, D), "k": (B, G, M, D), "v": (B, G, M, E)}
    inputs = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in tensors.items()}
    bias = torch.randn(B, H, N, M, generator=generator)
    sinks = torch.randn(H, generator=generator)
    lengths = torch.tensor([3, M])
    grad = torch.randn(B, H, N, E, generator=generator).to(dtype)

    def results(prepare: Callable[[Tensor], Tensor]) -> list[Tensor]:
        leaves = {name: prepare(x).requires_grad_() for name, x in inputs.items()}
        options = {"bias": prepare(bias), "sinks": prepare(sinks), "mask": Padding(prepare(lengths)) & Causal()}
        out, observation = regard.attention(**leaves, **options, observe=Observe(keep=True), backend="native")
        out.backward(prepare(grad))
        return [out.detach(), observation.entropy, observation.tile(0, size=2), *(x.grad for x in leaves.values())]

    for shifted, expected in zip(results(misaligned), results(torch.clone), strict=True):
        assert torch.equal(shifted, expected)


def test_layers_take_parameters_that_are_not_aligned() -> None:
    x = torch.randn(2, 16)
    weight = torch.randn(8, 16)
    bias = torch.randn(8)
    expected = linear(x, weight, bias)
    for tensors in ((misaligned(x), weight, bias), (x, misaligned(weight), bias), (x, weight, misaligned(bias))):
        torch.testing.assert_close(linear(*tensors), expected)
    torch.testing.assert_close(rms_norm(misaligned(x), misaligned(x[0]), 1e-6), rms_norm(x, x[0], 1e-6))
    with pytest.raises(ValueError, match=r"^weight must have its elements at multiples of their size"):
        native_decode_layers.norm(x, misaligned(x[0]), None, 1e-6, "rms")


def test_files_with_a_header_of_odd_length(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(models.bundled(), tmp_path / "model"))
    model = models.load(folder)
    ids = torch.tensor([[1, 5, 9, 5, 9]])
    with regard.watch(model, observe=Observe(keep=True)) as recording:
        logits = model(ids)
    recording.save(tmp_path / "recording")
    tokens = model.generate(ids, length=4)
    for file in (folder / "model.safetensors", *(tmp_path / "recording").glob("*.safetensors")):
        shift_numbers(file)
        with safe_open(file, framework="pt") as opened:
            assert opened.get_tensor(next(iter(opened.keys()))).data_ptr() % 2 == 1

    shifted = models.load(folder)
    torch.testing.assert_close(shifted(ids), logits)
    assert torch.equal(shifted.generate(ids, length=4), tokens)
    for name, observation in load_recording(tmp_path / "recording").items():
        assert torch.equal(observation.weights(0, 1), recording[name].weights(0, 1))
        assert torch.equal(observation.tile(0, size=2), recording[name].tile(0, size=2))
