"""Bytes by formula against the allocator's own record, real caches, gradients and optimizers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import sympy
import torch
from support import budgets
from support.budgets import plain_attention
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from regard import Rotary
from regard._config_json import Config
from regard.budget import _hf_configs as configs
from regard.budget import _memory as memory
from regard.budget import _models_from_sizes as spec
from regard.budget._allocation_profiler import measure_allocations
from regard.budget._memory import BYTES, Memory
from regard.budget._model import Lengths, Model
from regard.budget._symbols import SYMBOLS, to_int
from regard.kernels import native
from regard.nn import Decoder, Encoder, EncoderDecoder, VisionTransformer

WORDS = 200
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
# Attention takes the tile size of use, not the tests' tiny one: tiles are allocated too.
pytestmark = pytest.mark.usefixtures("full_tiles")
measured = pytest.mark.skipif(not native.built(), reason="the formulas are those of the native kernels' allocations")


@dataclass
class Case:
    """A module, its description, how long the call is; what is returned are logits or vectors."""

    module: nn.Module
    model: Model
    lengths: Lengths
    inputs: tuple[Tensor, ...]

    def run(self, training: bool) -> None:
        if not training:
            with torch.no_grad():
                self.module(*self.inputs)
            return
        y = self.module(*self.inputs)
        if self.model.vocab is None:
            y.sum().backward()
        else:
            F.cross_entropy(y.flatten(0, -2), torch.zeros(y.shape[:-1], dtype=torch.long).flatten()).backward()

    def to(self, dtype: str) -> Case:
        inputs = tuple(x.to(DTYPES[dtype]) if x.is_floating_point() else x for x in self.inputs)
        return Case(self.module.to(DTYPES[dtype]), self.model, self.lengths, inputs)

    def memory(self, *, plain: bool = False, **how: Any) -> Memory:
        return memory.count_memory(self.model.with_plain_attention() if plain else self.model, self.lengths, **how)


def words(*lengths: int, batch: int) -> tuple[Tensor, ...]:
    return tuple(torch.randint(0, WORDS, (batch, n)) for n in lengths)


def stack(
    cls: type[nn.Module], build: Callable[..., Model], n: int, d: int, layers: int, batch: int, **how: Any
) -> Case:
    position = {"position": Rotary(d // 4)} if how.get("position") == "rotary" else {}
    module = cls(d, 4, layers, vocab=WORDS, **budgets.real(how) | position)
    both = cls is EncoderDecoder
    lengths = Lengths(batch, n, n // 2 if both else None)
    inputs = words(n // 2, n, batch=batch) if both else words(n, batch=batch)
    return Case(module, build(d, 4, layers, vocab=WORDS, **how), lengths, inputs)


def eye(n: int, d: int, layers: int, batch: int) -> Case:
    """About n patches of 4 × 4."""
    side = 4 * int(n**0.5)
    model = spec.vision_transformer((side, side), (4, 4), 10, d, 4, layers)
    module = VisionTransformer(side, 4, 10, d, 4, layers, head="linear")
    return Case(module, model, Lengths(batch, int(model.fixed_tokens)), (torch.randn(batch, 3, side, side),))  # type: ignore[arg-type]


LLAMA = {"gated": True, "norm": "rms", "position": "rotary", "kv_heads": 2, "bias": False, "tied": False}
CASES: dict[str, Callable[..., Case]] = {
    "encoder": partial(stack, Encoder, spec.encoder),
    "post-norm encoder": partial(stack, Encoder, spec.encoder, order="post"),
    "decoder": partial(stack, Decoder, spec.decoder),
    "llama": partial(stack, Decoder, spec.decoder, **LLAMA),
    "encoder-decoder": partial(stack, EncoderDecoder, spec.encoder_decoder),
    "vision transformer": eye,
}
SIZES = {"256 tokens": (256, 128, 3, 1), "512 tokens, batch 2": (512, 64, 2, 2)}


def peak_of(case: Case, training: bool) -> int:
    # The first call also fills tables that stay (a Rotary's angles).
    case.run(training)
    case.module.zero_grad(set_to_none=True)
    most, _ = measure_allocations(lambda: case.run(training))
    case.module.zero_grad(set_to_none=True)
    return most


def saved_by_part(case: Case) -> int:
    """Bytes that a forward pass leaves behind, its result not counted."""
    case.module(*case.inputs)
    results: list[Tensor] = []
    _, left = measure_allocations(lambda: results.append(case.module(*case.inputs)))
    return left - results[0].numel() * results[0].element_size()


# The peak of a step


@measured
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", CASES)
def test_peak_with_tiled_attention(kind: str, size: str, dtype: str) -> None:
    case = CASES[kind](*SIZES[size]).to(dtype)
    for training in (False, True):
        found = peak_of(case, training)
        assert float(case.memory(training=training, dtype=dtype).peak) == pytest.approx(found, rel=0.1), training


@measured
@pytest.mark.parametrize("tied", [True, False])
def test_peak_where_a_large_vocabulary_sets_it(tied: bool) -> None:
    """Gradients of the table come from the head and from one look-up or two, and meet."""
    sizes, given = (32, 4, 2), {"vocab": 20_000, "tied": tied}
    one = Case(Decoder(*sizes, **given), spec.decoder(*sizes, **given), Lengths(1, 32), words(32, batch=1))
    both = EncoderDecoder(*sizes, **given), spec.encoder_decoder(*sizes, **given)
    for case in (one, Case(*both, Lengths(1, 32, 16), words(16, 32, batch=1))):
        assert float(case.memory(training=True).peak) == pytest.approx(peak_of(case, True), rel=0.02)


@measured
@pytest.mark.parametrize("n", [64, 256, 1024])
@pytest.mark.parametrize("kind", ["encoder", "post-norm encoder", "decoder", "encoder-decoder"])
def test_inference_is_predicted_to_the_percent(kind: str, n: int) -> None:
    case = CASES[kind](n, 64, 2, 1)
    assert float(case.memory().peak) == pytest.approx(peak_of(case, False), rel=0.01)


@measured
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", CASES)
def test_peak_with_plain_attention(kind: str, size: str, dtype: str) -> None:
    """Torch's own plain operator, which computes in float32 at least, and stores its weights so."""
    case = CASES[kind](*SIZES[size]).to(dtype)
    for training in (False, True):
        with plain_attention(case.module):
            found = peak_of(case, training)
        predicted = float(case.memory(plain=True, training=training, dtype=dtype).peak)
        assert predicted == pytest.approx(found, rel=0.15), training


@measured
@pytest.mark.parametrize("n", [128, 512])
def test_tiled_attention_is_linear_in_n_and_plain_is_not(n: int) -> None:
    small, large = (CASES["decoder"](size, 64, 2, 1) for size in (n, 2 * n))
    for training in (False, True):
        peaks = [float(case.memory(training=training).peak) for case in (small, large)]
        assert peaks[1] < 2.01 * peaks[0]
        assert peak_of(large, training) < 2.1 * peak_of(small, training)
    assert (
        large.memory(plain=True, training=True).attention_weights
        == 4 * small.memory(plain=True, training=True).attention_weights
    )


# What a forward pass keeps


@measured
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", CASES)
def test_activations(kind: str, dtype: str, plain: bool) -> None:
    case = CASES[kind](256, 128, 3, 2).to(dtype)
    with plain_attention(case.module) if plain else nullcontext():
        found = saved_by_part(case)
    predicted = float(case.memory(plain=plain, training=True, dtype=dtype).activations)
    assert predicted == pytest.approx(found, rel=0.03)


@measured
@pytest.mark.parametrize("kind", [Encoder, Decoder])
def test_activations_with_dropout(kind: Any) -> None:
    module = kind(128, 4, 3, vocab=WORDS, dropout=0.1).train()
    build = spec.encoder if kind is Encoder else spec.decoder
    case = Case(module, build(128, 4, 3, vocab=WORDS, dropout=True), Lengths(2, 256), words(256, batch=2))
    assert float(case.memory(training=True).activations) == pytest.approx(saved_by_part(case), rel=0.03)


@measured
@pytest.mark.parametrize("kind", ["encoder", "post-norm encoder", "decoder", "llama"])
def test_recomputation_keeps_a_block_s_input_alone(kind: str) -> None:
    case = CASES[kind](256, 128, 5, 2)
    predicted = case.memory(training=True)
    assert predicted.checkpointed_activations < predicted.activations / 4
    assert predicted.checkpointed_peak is not None and predicted.checkpointed_peak < predicted.peak
    for block in case.module.blocks:  # type: ignore[union-attr]
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    assert float(predicted.checkpointed_activations) == pytest.approx(saved_by_part(case), rel=0.05)
    assert float(predicted.checkpointed_peak) == pytest.approx(peak_of(case, True), rel=0.15)


def test_plain_attention_keeps_its_weights_and_nothing_else_grows_with_their_number() -> None:
    b, n, heads, layers = SYMBOLS["B"], SYMBOLS["n"], SYMBOLS["N_h"], SYMBOLS["L"]
    model = spec.decoder(SYMBOLS["D"], heads, layers, vocab=SYMBOLS["V"])
    tiled, plain = (
        sympy.Poly(sympy.expand(memory.saved_activations(each, Lengths(b, n))), n)
        for each in (model, model.with_plain_attention())
    )
    assert tiled.degree() == 1 and plain.degree() == 2
    assert plain.coeff_monomial(n**2) == 4 * b * heads * layers
    assert memory.count_memory(model, Lengths(b, n)).attention_weights == 4 * b * heads * layers * n**2


def test_the_length_of_the_source_counts_too() -> None:
    model = spec.encoder_decoder(64, 4, 2, decoder_layers=3, vocab=WORDS)
    # Encoder m·m, decoder n·n and n·m: 2, 3 and 3 layers of 4 heads.
    assert memory.count_memory(model, Lengths(2, 5, 7)).attention_weights == 4 * 2 * 4 * (2 * 49 + 3 * 25 + 3 * 35)


def test_windows_change_only_the_cache() -> None:
    """Layers with and without a window hold as much; the work differs, and what a cache keeps."""
    config = {"model_type": "qwen2", "vocab_size": WORDS, "hidden_size": 64, "intermediate_size": 128}
    config |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    mixed = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
    models = [configs.model_from_config(Config(entries)) for entries in (config, config | mixed)]
    for training in (False, True):
        same, windowed = (memory.count_memory(model, Lengths(2, 256), training=training) for model in models)
        # The cache of transformers drops what no later query sees: of 2 of 4 layers, 7 keys and values are left.
        dropped = 2 * 2 * (256 - 7) * 2 * (64 // 4) * 2 * 4
        assert same.cache - windowed.cache == dropped
        # A training step has no cache, so its total does not change.
        assert same.total - windowed.total == (0 if training else dropped)
        assert replace(windowed, cache=same.cache, total=same.total) == same


# Caches


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_cache(dtype: str, kv_heads: int) -> None:
    n, batch, layers = 17, 3, 2
    module = Decoder(24, 4, layers, vocab=WORDS, kv_heads=kv_heads, d_key=7).to(DTYPES[dtype]).eval()
    model = spec.decoder(24, 4, layers, vocab=WORDS, kv_heads=kv_heads, d_key=7)
    cache = module.new_cache(n)
    (ids,) = words(n, batch=batch)
    with torch.no_grad():
        module(ids, cache=cache)
    held = sum(x.numel() * x.element_size() for layer in cache.layers for x in layer.attention.get())
    assert held == memory.count_memory(model, Lengths(batch, n), dtype=dtype).cache
    assert held == memory.count_memory(model, Lengths(batch, 1, cached=n - 1), dtype=dtype).cache
    assert held == layers * batch * n * kv_heads * 2 * 7 * BYTES[dtype]


def test_cache_with_a_source() -> None:
    n, m, batch = 11, 5, 2
    module = EncoderDecoder(24, 4, 2, decoder_layers=3, vocab=WORDS, kv_heads=2).eval()
    model = spec.encoder_decoder(24, 4, 2, decoder_layers=3, vocab=WORDS, kv_heads=2)
    source, target = words(m, n, batch=batch)
    cache = module.new_cache()
    with torch.no_grad():
        module.decode(target, module.encode(source), cache=cache)
    layers = [part for layer in cache.layers for part in (layer.attention, layer.cross)]
    held = sum(x.numel() * x.element_size() for layer in layers for x in layer.get())
    assert held == memory.count_memory(model, Lengths(batch, n, m)).cache
    assert held == memory.count_memory(model, Lengths(batch, 1, m, cached=n - 1)).cache


@measured
def test_reading_with_a_cache_needs_the_peak_and_the_cache() -> None:
    case = CASES["decoder"](256, 64, 2, 2)
    (ids,), caches = case.inputs, [case.module.eval().new_cache()]  # type: ignore[union-attr,operator]
    with torch.no_grad():
        most, _ = measure_allocations(lambda: case.module(ids, cache=caches[0]))
    predicted = case.memory()
    assert float(predicted.peak + predicted.cache) == pytest.approx(most, rel=0.02)


@measured
@pytest.mark.parametrize("batch", [1, 16])
def test_a_step_holds_its_own_token_alone(batch: int) -> None:
    """Keys and values of earlier tokens lie in the cache: a step does not allocate them a second time."""
    peaks = {}
    for t in (8, 512):
        module, (ids,) = Decoder(64, 4, 2, vocab=WORDS).eval(), words(t + 2, batch=batch)
        cache = module.new_cache(t + 2)
        with torch.no_grad():
            module(ids[:, :t], cache=cache)
            module(ids[:, t : t + 1], cache=cache)
            peaks[t], _ = measure_allocations(lambda m=module, x=ids, c=cache: m(x[:, -1:], cache=c))  # type: ignore[misc]
    assert peaks[512] < 2 * peaks[8]
    model = spec.decoder(64, 4, 2, vocab=WORDS)
    few, many = (float(memory.count_memory(model, Lengths(batch, 1, cached=t + 1)).peak) for t in (8, 512))
    # The fused step of a small batch holds less than the layers one by one.
    assert peaks[512] / 1.5 < many < 5 * peaks[512]
    assert many < 2 * few


def test_what_does_not_write_has_no_cache() -> None:
    assert memory.count_memory(spec.encoder(24, 4, 2), Lengths(2, 5)).cache == 0


# Weights, gradients, optimizers


def bytes_in(tensors: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("optimizer", "made"),
    [
        ("sgd", partial(torch.optim.SGD, lr=0.1)),
        ("momentum", partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
        ("adam", torch.optim.AdamW),
    ],
)
def test_weights_gradients_and_optimizer(dtype: str, optimizer: str, made: Any) -> None:
    case = CASES["decoder"](7, 24, 2, 1).to(dtype)
    steps = made(case.module.parameters())
    case.run(training=True)
    steps.step()
    predicted = case.memory(training=True, dtype=dtype, optimizer=optimizer)
    parameters = list(case.module.parameters())
    assert predicted.weights == bytes_in(parameters)
    assert predicted.gradients == bytes_in(p.grad for p in parameters)
    # AdamW also counts steps, one number a tensor, which is none a parameter.
    state = [x for each in steps.state.values() for x in each.values() if isinstance(x, Tensor) and x.ndim]
    assert predicted.optimizer == bytes_in(state)
    assert predicted.total == predicted.weights + predicted.optimizer + predicted.peak


def test_adam_in_float32_beside_half_precision() -> None:
    case = CASES["decoder"](7, 24, 2, 1).to("bfloat16")
    master = [p.detach().float().requires_grad_() for p in case.module.parameters()]
    steps = torch.optim.AdamW(master)
    for p in master:
        p.grad = torch.zeros_like(p)
    steps.step()
    state = [x for each in steps.state.values() for x in each.values() if x.ndim]
    predicted = case.memory(training=True, dtype="bfloat16", optimizer="adam32")
    assert predicted.optimizer == bytes_in(state) + bytes_in(master)


def test_inference_has_no_gradients() -> None:
    found = CASES["decoder"](7, 24, 2, 1).memory()
    assert found.gradients == found.optimizer == 0 and found.checkpointed_peak is None


def test_quantised_weights() -> None:
    """Groups of 128 numbers with one float16 scale each; two int4 a byte."""
    model = spec.encoder(128, 4, 2)
    parameters = to_int(model.parameters)
    assert parameters % 128 == 0
    groups = parameters // 128
    scales = torch.empty(groups, dtype=torch.float16)
    for dtype, packed in (("int8", torch.empty(groups, 128)), ("int4", torch.empty(groups, 64))):
        found = memory.count_memory(model, Lengths(1, 7), weights=dtype)
        assert found.weights == bytes_in([packed.to(torch.int8), scales])
        assert found.peak == memory.count_memory(model, Lengths(1, 7)).peak
        with pytest.raises(ValueError, match=f"^weights in {dtype}"):
            memory.count_memory(model, Lengths(1, 7), weights=dtype, training=True)


@pytest.mark.parametrize("kind", CASES)
def test_float64_is_twice_float32(kind: str) -> None:
    case = CASES[kind](64, 64, 2, 1)
    single, double = (case.memory(training=True, dtype=dtype) for dtype in ("float32", "float64"))
    for name in ("weights", "gradients", "optimizer", "attention_weights", "cache"):
        assert getattr(double, name) == 2 * getattr(single, name), name
    # What is summed in float64 in both cases may count once.
    for name in ("activations", "checkpointed_activations", "peak"):
        assert float(getattr(double, name)) == pytest.approx(2 * float(getattr(single, name)), rel=0.02), name
