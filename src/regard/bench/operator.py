"""regard.attention against its peers: dense, causal, windows, biases, gradients, decoding, padding."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from regard.attention import attention
from regard.bench import peers
from regard.bench.race import OURS, Call, Case, LeftOut, same, tensors
from regard.masks import Causal, Padding, Window
from regard.positions import ALiBi, T5Buckets

__all__ = ["operator"]

GROUP = "operator"
Shape = tuple[int, int, int, int]
SHORT = {torch.float32: "", torch.bfloat16: " bfloat16"}
LONG: Shape = (1, 8, 4096, 64)
SHORTER: Shape = (1, 8, 1024, 64)
SHORTEST: Shape = (1, 8, 512, 64)
WIDE: Shape = (1, 16, 2048, 128)
MANY: Shape = (8, 12, 128, 64)


def operator() -> Iterator[Case]:
    """All cases of the operator, with what is asked of each on a CPU with AVX-512."""
    f32, bf16 = torch.float32, torch.bfloat16
    for shape, wanted in ((LONG, 1.22), (SHORTER, 1.2), (WIDE, 1.12), (MANY, 1.6)):
        yield _forward(shape, False, f32, wanted)
    for shape, wanted in ((LONG, 1.35), (SHORTER, 1.7), (SHORTEST, 2.3), (MANY, 2.6)):
        yield _forward(shape, True, f32, wanted)
    for shape, causal, wanted in ((LONG, False, 2.1), (WIDE, False, 2.0), (MANY, False, 2.8), (LONG, True, 2.3)):
        yield _forward(shape, causal, bf16, wanted)
    yield Case(GROUP, "window ±256, 1×8×16384×64", _window, 38)
    yield Case(GROUP, f"ALiBi, {_name(LONG)}", lambda: _biased(ALiBi()), 1.4)
    yield Case(GROUP, f"T5 buckets, {_name(LONG)}", lambda: _biased(T5Buckets(8)), 1.4)
    yield Case(GROUP, "padding, filled 25–100%, 8×12×1024×64", _padded, 1.8)
    for shape, causal, wanted in ((LONG, False, 1.3), (LONG, True, 1.45), (MANY, False, 1.6), (MANY, True, 2.5)):
        yield _with_gradients(shape, causal, wanted)
    yield Case(GROUP, "decoding, 32 heads × 8192 × 128", lambda: _decode(f32, 32), 1.7)
    yield Case(GROUP, "decoding bfloat16, 32 heads × 8192 × 128", lambda: _decode(bf16, 32), 6)
    yield Case(GROUP, "decoding, 32 heads, 8 key heads", lambda: _decode(f32, 8))


def _name(shape: Shape) -> str:
    return "×".join(map(str, shape))


def _forward(shape: Shape, causal: bool, dtype: torch.dtype, wanted: float) -> Case:
    def make() -> Mapping[str, Call]:
        q, k, v = tensors(*shape, dtype=dtype)
        mask = Causal() if causal else None
        calls: dict[str, Call] = {
            OURS: lambda: attention(q, k, v, mask=mask),
            "SDPA": lambda: peers.sdpa(q, k, v, is_causal=causal),
        }
        if dtype == torch.float32:
            # FlexAttention is compiled for each shape, which takes longer than the race: one shape must do.
            others = {
                "FlexAttention": peers.flex(q, k, v, causal) if shape == LONG else None,
                "OpenVINO": peers.openvino(q, k, v, causal),
                "ONNX Runtime": peers.onnxruntime(q, k, v, causal),
            }
            calls |= {name: call for name, call in others.items() if call is not None}
        return _compared(calls)

    return Case(GROUP, f"{'causal' if causal else 'dense'}{SHORT[dtype]} {_name(shape)}", make, wanted)


def _compared(calls: Mapping[str, Call]) -> Mapping[str, Call]:
    """The calls, after all of them gave the same; without those of others that do not run here."""
    first = calls[OURS]()
    kept = {}
    for name, call in calls.items():
        try:
            other = call()
        except Exception as error:  # whatever another library raises
            if name == OURS:
                raise
            why = str(error).strip().splitlines() or [type(error).__name__]
            warnings.warn(f"{name} is left out: {why[0][:120]}", LeftOut, stacklevel=2)
            continue
        assert isinstance(first, Tensor) and isinstance(other, Tensor)
        same(first, other)
        kept[name] = call
    return kept


def _with_gradients(shape: Shape, causal: bool, wanted: float) -> Case:
    def make() -> Mapping[str, Call]:
        q, k, v = tensors(*shape, grad=True)
        grad, mask = torch.ones(shape), Causal() if causal else None

        def ours() -> tuple[Tensor, ...]:
            return torch.autograd.grad(attention(q, k, v, mask=mask), (q, k, v), grad)

        def theirs() -> tuple[Tensor, ...]:
            return torch.autograd.grad(peers.sdpa(q, k, v, is_causal=causal), (q, k, v), grad)

        for a, b in zip(ours(), theirs(), strict=True):
            same(a, b)
        return {OURS: ours, "SDPA": theirs}

    return Case(GROUP, f"with gradients, {'causal' if causal else 'dense'} {_name(shape)}", make, wanted)


def _window() -> Mapping[str, Call]:
    q, k, v = tensors(1, 8, 16384, 64)
    mask = Window(256)
    see = mask.dense(16384, 16384)
    calls: dict[str, Call] = {
        OURS: lambda: attention(q, k, v, mask=mask),
        "SDPA": lambda: peers.sdpa(q, k, v, attn_mask=see),
    }
    flex = peers.flex_window(q, k, v, 256)
    return _compared(calls if flex is None else calls | {"FlexAttention": flex})


def _biased(bias: ALiBi | T5Buckets) -> Mapping[str, Call]:
    q, k, v = tensors(*LONG)
    with torch.no_grad():
        built = bias.dense(q, LONG[2]).contiguous()  # SDPA takes a bias of n × m only, made before the race

    @torch.no_grad()
    def ours() -> Tensor:
        return attention(q, k, v, bias=bias)

    return _compared({OURS: ours, "SDPA": lambda: peers.sdpa(q, k, v, attn_mask=built)})


def _padded() -> Mapping[str, Call]:
    q, k, v = tensors(8, 12, 1024, 64)
    lengths = torch.linspace(256, 1024, 8).long()
    see = Padding(lengths).dense(1024, 1024)
    return _compared(
        {
            OURS: lambda: attention(q, k, v, mask=Padding(lengths)),
            "SDPA": lambda: peers.sdpa(q, k, v, attn_mask=see),
        }
    )


def _decode(dtype: torch.dtype, key_heads: int) -> Mapping[str, Call]:
    q, _, _ = tensors(1, 32, 1, 128, dtype=dtype)
    k, v, _ = tensors(1, key_heads, 8192, 128, dtype=dtype)
    return _compared(
        {OURS: lambda: attention(q, k, v), "SDPA": lambda: peers.sdpa(q, k, v, enable_gqa=key_heads != 32)}
    )
