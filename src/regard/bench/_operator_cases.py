"""Benchmark cases of ``regard.attention``: dense, causal, windows, biases, padding, gradients, decoding."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from regard._operator import attention
from regard.bench import _peers as peers
from regard.bench._race import OURS, Call, Case, PeerSkipped, assert_same, random_qkv
from regard.masks import Causal, Padding, Window
from regard.positions import ALiBi, T5Buckets

GROUP = "operator"
Shape = tuple[int, int, int, int]
DTYPE_LABELS = {torch.float32: "", torch.bfloat16: " bfloat16"}  # float32 is the default, so it is not named
LONG: Shape = (1, 8, 4096, 64)  # batch, heads, tokens, width of a head
SHORTER: Shape = (1, 8, 1024, 64)
SHORTEST: Shape = (1, 8, 512, 64)
WIDE: Shape = (1, 16, 2048, 128)
MANY: Shape = (8, 12, 128, 64)


def operator_cases() -> Iterator[Case]:
    """Yield all cases of the operator, most of them with a target ratio on a CPU with AVX-512."""
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
    yield Case(GROUP, "padding, filled 25–100%, 8×12×1024×64", _padded, 1.8)
    for shape, causal, target in ((LONG, False, 1.3), (LONG, True, 1.45), (MANY, False, 1.6), (MANY, True, 2.5)):
        yield _with_gradients(shape, causal, target)
    yield Case(GROUP, "decoding, 32 heads × 8192 × 128", lambda: _decode(f32, 32), 1.7)
    yield Case(GROUP, "decoding bfloat16, 32 heads × 8192 × 128", lambda: _decode(bf16, 32), 6)
    yield Case(GROUP, "decoding, 32 heads, 8 key heads", lambda: _decode(f32, 8))


def _name(shape: Shape) -> str:
    return "×".join(map(str, shape))


def _forward(shape: Shape, causal: bool, dtype: torch.dtype, target: float) -> Case:
    def make() -> Mapping[str, Call]:
        q, k, v = random_qkv(*shape, dtype=dtype)
        mask = Causal() if causal else None
        calls: dict[str, Call] = {
            OURS: lambda: attention(q, k, v, mask=mask),
            "SDPA": lambda: peers.sdpa(q, k, v, is_causal=causal),
        }
        # The following libraries compute in float32 only.
        if dtype == torch.float32:
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

    return Case(GROUP, f"{'causal' if causal else 'dense'}{DTYPE_LABELS[dtype]} {_name(shape)}", make, target)


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


def _with_gradients(shape: Shape, causal: bool, target: float) -> Case:
    def make() -> Mapping[str, Call]:
        # The gradient of the output is given, so that only attention and its backward pass are timed.
        q, k, v = random_qkv(*shape, grad=True)
        grad = torch.ones(shape)
        mask = Causal() if causal else None

        def ours() -> tuple[Tensor, ...]:
            return torch.autograd.grad(attention(q, k, v, mask=mask), (q, k, v), grad)

        def theirs() -> tuple[Tensor, ...]:
            return torch.autograd.grad(peers.sdpa(q, k, v, is_causal=causal), (q, k, v), grad)

        for a, b in zip(ours(), theirs(), strict=True):
            assert_same(a, b)
        return {OURS: ours, "SDPA": theirs}

    return Case(GROUP, f"with gradients, {'causal' if causal else 'dense'} {_name(shape)}", make, target)


def _window() -> Mapping[str, Call]:
    q, k, v = random_qkv(1, 8, 16384, 64)
    mask = Window(256)
    see = mask.dense(16384, 16384)  # SDPA takes only a dense mask
    calls: dict[str, Call] = {
        OURS: lambda: attention(q, k, v, mask=mask),
        "SDPA": lambda: peers.sdpa(q, k, v, attn_mask=see),
    }
    flex = peers.flex_window(q, k, v, 256)
    if flex is not None:
        calls["FlexAttention"] = flex
    return _check_equal(calls)


def _biased(bias: ALiBi | T5Buckets) -> Mapping[str, Call]:
    q, k, v = random_qkv(*LONG)
    with torch.no_grad():
        built = bias.dense(q, LONG[2]).contiguous()  # SDPA takes only a dense bias

    @torch.no_grad()
    def ours() -> Tensor:
        return attention(q, k, v, bias=bias)

    return _check_equal({OURS: ours, "SDPA": lambda: peers.sdpa(q, k, v, attn_mask=built)})


def _padded() -> Mapping[str, Call]:
    q, k, v = random_qkv(8, 12, 1024, 64)
    lengths = torch.linspace(256, 1024, 8).long()  # sequences fill 25% to 100% of the padded length
    see = Padding(lengths).dense(1024, 1024)
    return _check_equal(
        {
            OURS: lambda: attention(q, k, v, mask=Padding(lengths)),
            "SDPA": lambda: peers.sdpa(q, k, v, attn_mask=see),
        }
    )


def _decode(dtype: torch.dtype, key_heads: int) -> Mapping[str, Call]:
    # One new query against a long cache; keys and values may have fewer heads (grouped-query attention).
    q, _, _ = random_qkv(1, 32, 1, 128, dtype=dtype)
    k, v, _ = random_qkv(1, key_heads, 8192, 128, dtype=dtype)
    return _check_equal(
        {OURS: lambda: attention(q, k, v), "SDPA": lambda: peers.sdpa(q, k, v, enable_gqa=key_heads != 32)}
    )
