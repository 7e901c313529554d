"""Benchmark cases of ``regard.attention``: dense, causal, windows, biases, padding, gradients, decoding."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from regard._devices import CPU
from regard._operator import attention
from regard.bench import _peers as peers
from regard.bench._race import OURS, Call, Case, PeerSkipped, assert_same, random_qkv
from regard.masks import Causal, Padding, Window
from regard.positions import ALiBi, T5Buckets

GROUP = "operator"
Shape = tuple[int, int, int, int]
DTYPE_LABELS = {
    torch.float32: "",
    torch.bfloat16: " bfloat16",
    torch.float16: " float16",
}  # float32 is the default, so it is not named
LONG: Shape = (1, 8, 4096, 64)  # batch, heads, tokens, width of a head
SHORTER: Shape = (1, 8, 1024, 64)
SHORTEST: Shape = (1, 8, 512, 64)
WIDE: Shape = (1, 16, 2048, 128)
MANY: Shape = (8, 12, 128, 64)


def operator_cases(device: torch.device = CPU) -> Iterator[Case]:
    """Yield all cases of the operator. On the CPU most of them have a target ratio, for AVX-512."""
    if device.type != "cpu":
        yield from _device_cases(device)
        return
    f32 = torch.float32
    bf16 = torch.bfloat16
    for shape, target in ((LONG, 1.22), (SHORTER, 1.2), (WIDE, 1.12), (MANY, 1.6)):
        yield _forward(shape, False, f32, target)
    for shape, target in ((LONG, 1.35), (SHORTER, 1.7), (SHORTEST, 2.3), (MANY, 2.6)):
        yield _forward(shape, True, f32, target)
    for shape, causal, target in ((LONG, False, 2.1), (WIDE, False, 2.0), (MANY, False, 2.8), (LONG, True, 2.3)):
        yield _forward(shape, causal, bf16, target)
    yield Case(GROUP, "window ±256, 1×8×16384×64", _window, 38)
    yield Case(GROUP, f"ALiBi, {_name(LONG)}", lambda: _biased(ALiBi()), 1.4)
    yield Case(GROUP, f"T5 buckets, {_name(LONG)}", lambda: _biased(T5Buckets(8)), 1.4)
    yield Case(GROUP, "dense bias, 1×8×2048×64", _dense_bias, 1.2)
    yield Case(GROUP, "bool mask, 1×8×2048×64", _bool_mask, 1.2)
    yield Case(GROUP, "padding, filled 25–100%, 8×12×1024×64", _padded, 1.8)
    for shape, causal, target in ((LONG, False, 1.3), (LONG, True, 1.45), (MANY, False, 1.6), (MANY, True, 2.5)):
        yield _with_gradients(shape, causal, target)
    yield Case(GROUP, "decoding, 32 heads × 8192 × 128", lambda: _decode(f32, 32), 1.7)
    yield Case(GROUP, "decoding bfloat16, 32 heads × 8192 × 128", lambda: _decode(bf16, 32), 6)
    yield Case(GROUP, "decoding, 32 heads, 8 key heads", lambda: _decode(f32, 8))


def _device_cases(device: torch.device) -> Iterator[Case]:
    """The cases of a GPU: the same computations, in its dtypes, and without targets."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for dtype in dtypes:
        for causal in (False, True):
            for shape in (LONG, WIDE, MANY):
                yield _forward(shape, causal, dtype, None, device)
    for dtype in dtypes:
        for causal in (False, True):
            yield _with_gradients(LONG, causal, None, dtype, device)
    window = partial(_window, device)
    yield Case(GROUP, "window ±256, 1×8×16384×64", window, device=device)
    for name, bias in (("ALiBi", ALiBi()), ("T5 buckets", T5Buckets(8))):
        yield Case(GROUP, f"{name}, {_name(LONG)}", partial(_biased, bias, device), device=device)
    yield Case(GROUP, "dense bias, 1×8×2048×64", partial(_dense_bias, device), device=device)
    yield Case(GROUP, "bool mask, 1×8×2048×64", partial(_bool_mask, device), device=device)
    yield Case(GROUP, "padding, filled 25–100%, 8×12×1024×64", partial(_padded, device), device=device)
    for dtype in dtypes:
        label = DTYPE_LABELS[dtype]
        decode = partial(_decode, dtype, 32, device)
        yield Case(GROUP, f"decoding{label}, 32 heads × 8192 × 128", decode, device=device)
    yield Case(GROUP, "decoding, 32 heads, 8 key heads", partial(_decode, torch.float32, 8, device), device=device)


def _name(shape: Shape) -> str:
    return "×".join(map(str, shape))


def _forward(shape: Shape, causal: bool, dtype: torch.dtype, target: float | None, device: torch.device = CPU) -> Case:
    def make() -> Mapping[str, Call]:
        q, k, v = random_qkv(*shape, dtype=dtype, device=device)
        mask = Causal() if causal else None
        calls: dict[str, Call] = {
            OURS: lambda: attention(q, k, v, mask=mask),
            "SDPA": lambda: peers.sdpa(q, k, v, is_causal=causal),
        }
        # The following libraries compute in float32 only on the CPU; the last two are for CPUs.
        if dtype == torch.float32 or device.type != "cpu":
            # FlexAttention is compiled per shape, which takes longer than the race, so it runs on one shape.
            others = {
                "FlexAttention": peers.flex(q, k, v, causal) if shape == LONG else None,
                "OpenVINO": peers.openvino(q, k, v, causal),
                "ONNX Runtime": peers.onnxruntime(q, k, v, causal),
            }
            for name, call in others.items():
                if call is not None:
                    calls[name] = call
        return _check_equal(calls)

    return Case(
        GROUP, f"{'causal' if causal else 'dense'}{DTYPE_LABELS[dtype]} {_name(shape)}", make, target, device=device
    )


def _check_equal(calls: Mapping[str, Call]) -> Mapping[str, Call]:
    """Return the calls after checking that their results are equal; a different result raises ``AssertionError``.

    If the call of another library raises an error, it is left out with a warning.
    """
    expected = calls[OURS]()
    working = {}
    for name, call in calls.items():
        try:
            result = call()
        except Exception as error:  # other libraries raise all kinds of errors
            if name == OURS:
                raise
            reason = str(error).strip().splitlines() or [type(error).__name__]
            warnings.warn(f"{name} is left out: {reason[0][:120]}", PeerSkipped, stacklevel=2)
            continue
        assert isinstance(expected, Tensor) and isinstance(result, Tensor)
        assert_same(expected, result)
        working[name] = call
    return working


def _with_gradients(
    shape: Shape, causal: bool, target: float | None, dtype: torch.dtype = torch.float32, device: torch.device = CPU
) -> Case:
    def make() -> Mapping[str, Call]:
        # The gradient of the output is given, so that only attention and its backward pass are timed.
        q, k, v = random_qkv(*shape, dtype=dtype, grad=True, device=device)
        grad = torch.ones_like(q)
        mask = Causal() if causal else None

        def ours() -> tuple[Tensor, ...]:
            return torch.autograd.grad(attention(q, k, v, mask=mask), (q, k, v), grad)

        def theirs() -> tuple[Tensor, ...]:
            return torch.autograd.grad(peers.sdpa(q, k, v, is_causal=causal), (q, k, v), grad)

        for a, b in zip(ours(), theirs(), strict=True):
            assert_same(a, b)
        return {OURS: ours, "SDPA": theirs}

    label = f"{'causal' if causal else 'dense'}{DTYPE_LABELS[dtype]}"
    return Case(GROUP, f"with gradients, {label} {_name(shape)}", make, target, device=device)


def _window(device: torch.device = CPU) -> Mapping[str, Call]:
    q, k, v = random_qkv(1, 8, 16384, 64, device=device)
    mask = Window(256)
    see = mask.dense(16384, 16384, device)  # SDPA takes only a dense mask
    calls: dict[str, Call] = {
        OURS: lambda: attention(q, k, v, mask=mask),
        "SDPA": lambda: peers.sdpa(q, k, v, attn_mask=see),
    }
    flex = peers.flex_window(q, k, v, 256)
    if flex is not None:
        calls["FlexAttention"] = flex
    return _check_equal(calls)


def _biased(bias: ALiBi | T5Buckets, device: torch.device = CPU) -> Mapping[str, Call]:
    q, k, v = random_qkv(*LONG, device=device)
    if isinstance(bias, T5Buckets):
        bias.to(device)
    with torch.no_grad():
        built = bias.dense(q, LONG[2]).contiguous()  # SDPA takes only a dense bias

    @torch.no_grad()
    def ours() -> Tensor:
        return attention(q, k, v, bias=bias)

    return _check_equal({OURS: ours, "SDPA": lambda: peers.sdpa(q, k, v, attn_mask=built)})


def _dense_bias(device: torch.device = CPU) -> Mapping[str, Call]:
    q, k, v = random_qkv(1, 8, 2048, 64, device=device)
    bias = torch.randn(1, 8, 2048, 2048, generator=torch.Generator().manual_seed(1)).to(device)
    return _check_equal(
        {OURS: lambda: attention(q, k, v, bias=bias), "SDPA": lambda: peers.sdpa(q, k, v, attn_mask=bias)}
    )


def _bool_mask(device: torch.device = CPU) -> Mapping[str, Call]:
    # Every second key at random: no part of the score matrix can be skipped.
    q, k, v = random_qkv(1, 8, 2048, 64, device=device)
    see = torch.rand(1, 8, 2048, 2048, generator=torch.Generator().manual_seed(1)).to(device) < 0.5
    return _check_equal(
        {OURS: lambda: attention(q, k, v, mask=see), "SDPA": lambda: peers.sdpa(q, k, v, attn_mask=see)}
    )


def _padded(device: torch.device = CPU) -> Mapping[str, Call]:
    q, k, v = random_qkv(8, 12, 1024, 64, device=device)
    lengths = torch.linspace(256, 1024, 8).long().to(device)  # sequences fill 25% to 100% of the padded length
    see = Padding(lengths).dense(1024, 1024, device)
    return _check_equal(
        {
            OURS: lambda: attention(q, k, v, mask=Padding(lengths)),
            "SDPA": lambda: peers.sdpa(q, k, v, attn_mask=see),
        }
    )


def _decode(dtype: torch.dtype, key_heads: int, device: torch.device = CPU) -> Mapping[str, Call]:
    # One new query against a long cache; keys and values may have fewer heads (grouped-query attention).
    q, _, _ = random_qkv(1, 32, 1, 128, dtype=dtype, device=device)
    k, v, _ = random_qkv(1, key_heads, 8192, 128, dtype=dtype, device=device)
    return _check_equal(
        {OURS: lambda: attention(q, k, v), "SDPA": lambda: peers.sdpa(q, k, v, enable_gqa=key_heads != 32)}
    )
