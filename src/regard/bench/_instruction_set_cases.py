"""Benchmark cases that compare the instruction sets of this machine: a better one must not be the slower one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from regard._devices import CPU
from regard._operator import attention
from regard.bench._race import OURS, Call, Case, MissingPeer, assert_same, random_qkv
from regard.kernels import native
from regard.masks import Causal

GROUP = "instructions"


def instruction_set_cases(device: torch.device = CPU) -> Iterator[Case]:
    """Yield the cases: calls with few rows and short calls, where wide vectors are hard to fill, and longer ones.

    Only CPUs have them.
    """
    if device.type != "cpu":
        return
    f32 = torch.float32
    bf16 = torch.bfloat16
    for n in (1, 4, 16, 32, 64):
        yield _case(f"n = {n}, 8 × 12 heads", (8, 12, n, 64), n, 12, f32)
    for n in (1, 8):
        yield _case(f"n = {n}, 2048 keys × 128", (1, 32, n, 128), 2048, 32, f32)
    yield _case("n = 1, 2048 keys × 128, bfloat16", (1, 32, 1, 128), 2048, 32, bf16)
    yield _case("n = 1, 8192 keys, 8 key heads", (1, 32, 1, 128), 8192, 8, f32)
    yield _case("n = 128, causal, 8 × 12 heads", (8, 12, 128, 64), 128, 12, f32, causal=True)
    yield _case("n = 1024, 8 heads", (1, 8, 1024, 64), 1024, 8, f32)
    yield _case("n = 1024, 8 heads, bfloat16", (1, 8, 1024, 64), 1024, 8, bf16)


def compared_sets() -> tuple[str, ...]:
    """The sets that the cases compare, best first: the one in use and weaker ones, without emulation and plain C++."""
    if not native.built():
        return ()
    sets = native.instruction_sets()
    in_use = sets.index(native.instruction_set())
    return tuple(name for name in reversed(sets[: in_use + 1]) if name not in ("emulated", "portable"))


def _case(
    name: str, shape: tuple[int, int, int, int], keys: int, key_heads: int, dtype: torch.dtype, causal: bool = False
) -> Case:
    def make() -> Mapping[str, Call]:
        sets = compared_sets()
        if len(sets) < 2:
            raise MissingPeer("there is only one instruction set to compare")
        q, _, _ = random_qkv(*shape, dtype=dtype)
        k, v, _ = random_qkv(shape[0], key_heads, keys, shape[3], dtype=dtype)
        mask = Causal() if causal else None

        def run() -> Tensor:
            return attention(q, k, v, mask=mask, backend="native")

        calls: dict[str, Call] = {OURS: _on(sets[0], run)}
        for weaker in sets[1:]:
            calls[weaker] = _on(weaker, run)
        expected = calls[OURS]()
        for call in calls.values():
            result = call()
            assert isinstance(expected, Tensor) and isinstance(result, Tensor)
            assert_same(expected, result)
        return calls

    return Case(GROUP, name, make, least=1.0)


def _on(instruction_set: str, call: Call) -> Call:
    """The call on one instruction set."""

    def run() -> object:
        with native.use_instruction_set(instruction_set):
            return call()

    return run
