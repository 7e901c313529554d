"""FLOPs by formula against torch's own counter, exactly; masks against brute force; decoding; deepspeed's profiler."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import budgets
from support.budgets import Pair, alone, plain_attention, vectors
from support.checkpoints import make
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import regard
from regard import Causal, Window
from regard._config_json import Config
from regard.budget import _flops as flops
from regard.budget import _hf_configs as configs
from regard.budget import _models_from_sizes as spec
from regard.budget._attention_parts import visible_pairs
from regard.budget._model import Lengths, Model, PlacedPart
from regard.budget._symbols import SYMBOLS
from regard.nn import Decoder, EncoderDecoder


def counted(call: Callable[[], Tensor]) -> tuple[int, int]:
    """(forward, backward) by torch's counter. Under MATH attention is two matrix products, which it sees."""
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            y = call()
        with FlopCounterMode(display=False) as backward:
            y.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


def predicted(model: Model, lengths: Lengths) -> tuple[Any, Any]:
    return flops.forward(model, lengths), flops.backward(model, lengths)


KINDS: dict[str, Callable[[random.Random], Pair]] = {
    "self-attention": partial(budgets.attention, cross=False),
    "cross-attention": partial(budgets.attention, cross=True),
    "feed-forward": budgets.feed_forward,
    "pre-norm block": partial(budgets.block, order="pre"),
    "post-norm block": partial(budgets.block, order="post"),
    "block with cross-attention": partial(budgets.block, cross=True),
    "llama block": budgets.llama_block,
    "encoder": partial(budgets.stack, kind="encoder"),
    "decoder": partial(budgets.stack, kind="decoder"),
    "encoder-decoder": partial(budgets.stack, kind="encoder_decoder"),
    "vision transformer": budgets.vit,
}


@pytest.mark.parametrize("seeds", [range(15), pytest.param(range(15, 50), marks=pytest.mark.full)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_models_of_each_kind(kind: str, seeds: range) -> None:
    for seed in seeds:
        pair = KINDS[kind](random.Random(seed))
        # With gradients: few rows without them go to a native kernel, which the counter does not see.
        with plain_attention(pair.module):
            found = counted(lambda pair=pair: pair.module(*pair.inputs))  # type: ignore[misc]
        assert found == predicted(pair.model, pair.lengths), f"seed {seed}: {pair.lengths} {pair.module}"


# Torch's own layers


@pytest.mark.parametrize("seed", range(10))
def test_torch_s_attention(seed: int) -> None:
    rng = random.Random(seed)
    heads, (b, n, m, _) = rng.choice([1, 2, 3]), budgets.sizes(rng)
    d, context = heads * rng.choice(budgets.PRIMES), rng.choice(budgets.PRIMES)
    own = nn.MultiheadAttention(d, heads, batch_first=True)
    x, c = vectors(b, n, d), vectors(b, m, context)
    part = spec.attention(d, heads, qkv_bias=True)
    assert counted(lambda: own(x, x, x, need_weights=False)[0]) == predicted(alone(part), Lengths(b, n))
    cross = nn.MultiheadAttention(d, heads, kdim=context, vdim=context, batch_first=True)
    placed = PlacedPart("cross", spec.attention(d, heads, d_context=context, qkv_bias=True), keys="m")
    assert counted(lambda: cross(x, c, c, need_weights=False)[0]) == predicted(alone(placed), Lengths(b, n, m))


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("norm_first", [False, True])
def test_torch_s_layers(seed: int, norm_first: bool) -> None:
    rng = random.Random(seed)
    heads, (b, n, m, _) = rng.choice([1, 2, 3]), budgets.sizes(rng)
    d, hidden = heads * rng.choice(budgets.PRIMES), rng.choice(budgets.PRIMES)
    sizes: dict[str, Any] = {"dim_feedforward": hidden, "batch_first": True, "norm_first": norm_first}
    # In training mode: the fused path of inference is one operator, opaque to the counter.
    encodes = nn.TransformerEncoderLayer(d, heads, dropout=0.1, **sizes).train()
    decodes = nn.TransformerDecoderLayer(d, heads, dropout=0.1, **sizes).train()
    x, c = vectors(b, n, d), vectors(b, m, d)
    order: Any = {"order": "pre" if norm_first else "post"}
    assert counted(lambda: encodes(x)) == predicted(alone(*spec.block(d, heads, hidden, **order)), Lengths(b, n))
    block = alone(*spec.block(d, heads, hidden, d_context=d, causal=True, **order))
    causal = nn.Transformer.generate_square_subsequent_mask(n)
    assert counted(lambda: decodes(x, c, tgt_mask=causal)) == predicted(block, Lengths(b, n, m))


# transformers' models, from their config's entries alone

SIZES = {"hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 56, "vocab_size": 61}
GPT2 = {"n_embd": 24, "n_head": 3, "n_layer": 2, "n_positions": 19, "vocab_size": 61, "bos_token_id": 1}
TURNED = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.34}}
T5 = {"d_model": 24, "d_kv": 7, "num_heads": 3, "num_layers": 2, "num_decoder_layers": 3, "d_ff": 56, "vocab_size": 61}


@pytest.mark.parametrize(
    ("kind", "entries", "field"),
    [
        ("BertModel", SIZES, "pooler_output"),
        ("BertForMaskedLM", SIZES, "logits"),
        ("GPT2LMHeadModel", GPT2 | {"eos_token_id": 2}, "logits"),
        ("LlamaForCausalLM", SIZES | {"num_key_value_heads": 2}, "logits"),
        ("Qwen3ForCausalLM", SIZES | {"num_key_value_heads": 2, "head_dim": 10}, "logits"),
        ("GemmaForCausalLM", SIZES | {"num_key_value_heads": 2, "head_dim": 10}, "logits"),
        ("Phi3ForCausalLM", SIZES | {"num_key_value_heads": 2, "pad_token_id": 0}, "logits"),
        ("SmolLM3ForCausalLM", SIZES | {"num_key_value_heads": 2, "pad_token_id": 0}, "logits"),
        ("StableLmForCausalLM", SIZES | TURNED | {"num_key_value_heads": 2}, "logits"),
        ("T5ForConditionalGeneration", T5, "logits"),
        ("ViTForImageClassification", SIZES | {"image_size": 12, "patch_size": 4}, "logits"),
    ],
)
def test_transformers_models(kind: str, entries: dict[str, Any], field: str) -> None:
    theirs = make(kind, entries | {"attn_implementation": "eager"})
    model = configs.model_from_config(Config({**theirs.config.to_dict(), "architectures": [kind]}))
    b, n, m = 2, 13 if model.fixed_tokens is None else int(model.fixed_tokens), 7
    given: dict[str, Tensor] = {"input_ids": torch.randint(0, 61, (b, m if model.kind == "encoder-decoder" else n))}
    if model.kind == "encoder-decoder":
        given["decoder_input_ids"] = torch.randint(0, 61, (b, n))
    if model.kind == "vit":
        given = {"pixel_values": torch.randn(b, 3, 12, 12)}
    found = counted(lambda: theirs(**given)[field])
    assert found == predicted(model, Lengths(b, n, m))


# Masks


def brute(n: int, m: int, causal: bool, window: int | None) -> int:
    """Pairs (i, j) with j ≤ p and p − j < w, for the query at p = i + m − n."""
    where = [(i + m - n, j) for i in range(n) for j in range(m)]
    return sum((not causal or j <= p) and (window is None or p - j < window) for p, j in where)


LENGTH = st.integers(1, 40)


@given(n=LENGTH, m=LENGTH, window=st.none() | st.integers(1, 45))
def test_visible_pairs(n: int, m: int, window: int | None) -> None:
    assert visible_pairs(n, m, False, None) == brute(n, m, False, None)
    mask = Causal() if window is None else Causal() & Window(window - 1)
    assert visible_pairs(n, m, True, window) == brute(n, m, True, window) == int(mask.dense(n, m).sum())


def test_a_window_without_causality_is_refused() -> None:
    for call in (partial(spec.attention, 6, 3), partial(spec.encoder, 6, 3, 2)):
        with pytest.raises(ValueError, match="window=3"):
            call(window=3)


@given(n=LENGTH, m=LENGTH, window=st.none() | st.integers(1, 45))
def test_visible_pairs_in_letters(n: int, m: int, window: int | None) -> None:
    rows, keys = SYMBOLS["n"], SYMBOLS["m"]
    formula = visible_pairs(rows, keys, True, window)
    assert formula.subs({rows: n, keys: m}) == brute(n, m, True, window)


@given(n=LENGTH, m=LENGTH, window=st.none() | st.integers(1, 45), rng=st.randoms(use_true_random=False))
def test_needed_is_what_the_mask_leaves(n: int, m: int, window: int | None, rng: random.Random) -> None:
    """Scores and values on visible pairs alone, 2·(D_hid + D_o) a pair and head; projections in full."""
    heads, d_key, d_value = 3, rng.choice(budgets.PRIMES), rng.choice(budgets.PRIMES)
    part = spec.attention(7, heads, d_key=d_key, d_value=d_value, causal=True, window=window)
    model, lengths = alone(PlacedPart("attention", part, keys="m")), Lengths(2, n, m)
    pairs = 2 * heads * 2 * (d_key + d_value)
    assert flops.unmasked(model, lengths) == flops.forward(model, lengths) - pairs * (n * m - brute(n, m, True, window))
    groups = flops.by_group(model, lengths, skip_masked=True)
    assert groups.get("attention", 0) == pairs * brute(n, m, True, window)
    assert sum(groups.values()) == flops.unmasked(model, lengths)
    assert sum(flops.by_group(model, lengths).values()) == flops.forward(model, lengths)


def test_needed_is_whole_where_nothing_is_hidden() -> None:
    for seed in range(20):
        pair = budgets.stack(random.Random(seed), "encoder")
        assert flops.unmasked(pair.model, pair.lengths) == flops.forward(pair.model, pair.lengths)


# Decoding


def drawn_decoder(seed: int, **more: Any) -> tuple[Model, int]:
    rng = random.Random(seed)
    heads, kv = budgets.heads_of(rng)
    d, hidden, given = budgets.options(rng, heads, kv, **more)
    vocab = rng.choice([None, 19])
    return spec.decoder(d, heads, rng.choice([1, 2, 3]), hidden=hidden, vocab=vocab, **given), rng.choice([1, 2, 3])


@pytest.mark.parametrize("window", [None, 1, 3, 7])
def test_all_steps_together_cost_what_the_mask_leaves_of_one_pass(window: int | None) -> None:
    """``Σ_{t<n} needed(one token after t) = needed(n tokens)``; without a window a step needs all it computes."""
    for seed in range(20):
        model, b = drawn_decoder(seed, window=window)
        n = random.Random(seed).choice(budgets.PRIMES)
        steps = [flops.unmasked(model, Lengths(b, 1, cached=t)) for t in range(n)]
        assert sum(steps) == flops.unmasked(model, Lengths(b, n))
        if window is None:
            assert steps == [flops.decode(model, b, t) for t in range(n)]


def test_a_step_is_the_last_row_of_a_pass() -> None:
    """Without a window: ``decode(t) = needed(t + 1) − needed(t)``, which grows by ``4·B·L·N_h·D_hid`` a token."""
    for seed in range(20):
        model, b = drawn_decoder(seed)
        (part,) = {part for _, part in model.attention_parts}
        for t in range(1, 12):
            whole, before = (flops.unmasked(model, Lengths(b, n)) for n in (t + 1, t))
            assert flops.decode(model, b, t) == whole - before
            grown = 4 * b * model.layers * part.heads * part.d_key
            assert flops.decode(model, b, t) - flops.decode(model, b, t - 1) == grown


def test_steps_with_a_source_leave_out_what_was_read_before() -> None:
    """``Σ_t decode(t, m) = needed(n, m) − encoder − keys and values of the source``"""
    for seed in range(20):
        pair = budgets.stack(random.Random(seed), "encoder_decoder")
        b, n, m = pair.lengths.batch, int(pair.lengths.n), int(pair.lengths.m or 0)
        encoder = flops.forward(Model("Encoder", "encoder", 1, pair.model.stacks[:1]), pair.lengths)
        crossing = [(p.repeats, part) for p, part in pair.model.attention_parts if part.d_context is not None]
        read = sum(t * 2 * b * m * a.d_context * a.kv_heads * (a.d_key + a.d_value) for t, a in crossing)  # type: ignore[operator]
        steps = sum(flops.decode(pair.model, b, t, m) for t in range(n))
        assert steps == flops.unmasked(pair.model, pair.lengths) - encoder - read


@pytest.mark.parametrize("seed", range(10))
def test_a_real_step_with_a_cache(seed: int) -> None:
    rng = random.Random(seed)
    d, heads, layers, t, b = 6, 3, rng.choice([1, 2]), rng.choice(budgets.PRIMES), 11  # 11: too many for native kernels
    vocab, kv = rng.choice([19, 23]), rng.choice([1, 3])
    given: Any = {"vocab": vocab, "hidden": 7, "kv_heads": kv}
    model, lone = EncoderDecoder(d, heads, layers, **given).eval(), Decoder(d, heads, layers, **given).eval()
    words = torch.randint(0, vocab, (b, t + 1))
    with torch.no_grad(), plain_attention(model), plain_attention(lone):
        cache = lone.new_cache()
        lone(words[:, :-1], cache=cache)
        with FlopCounterMode(display=False) as step:
            lone(words[:, -1:], cache=cache)
        assert step.get_total_flops() == flops.decode(spec.decoder(d, heads, layers, **given), b, t)
        cache, context = model.new_cache(), model.encode(words[:, :5])
        model.decode(words[:, :-1], context, cache=cache)
        with FlopCounterMode(display=False) as step:
            model.decode(words[:, -1:], context, cache=cache)
        m = context.shape[1]
        assert step.get_total_flops() == flops.decode(spec.encoder_decoder(d, heads, layers, **given), b, t, m)


def test_recomputation_is_the_blocks_forward_pass() -> None:
    model, lengths = spec.decoder(6, 3, 2, vocab=19), Lengths(2, 5)
    assert flops.recomputation(model, lengths) == flops.forward(spec.decoder(6, 3, 2), lengths)
    assert flops.forward(model, lengths) - flops.recomputation(model, lengths) == 2 * 2 * 5 * 6 * 19


# Where attention costs as much as the rest


def test_crossover() -> None:
    assert flops.crossover(spec.encoder(512, 8, 6)) == 3072
    d, hidden = SYMBOLS["D"], SYMBOLS["D_ff"]
    heads, layers = SYMBOLS["N_h"], SYMBOLS["L"]
    assert sympy.expand(flops.crossover(spec.encoder(d, heads, layers)) - 6 * d) == 0
    assert sympy.expand(flops.crossover(spec.encoder(d, heads, layers, hidden=hidden)) - 2 * d - hidden) == 0


@pytest.mark.parametrize("kind", ["encoder", "decoder", "encoder_decoder", "vit"])
def test_at_the_crossover_attention_costs_what_the_rest_costs(kind: str) -> None:
    for seed in range(10):
        rng = random.Random(seed)
        model = (budgets.vit(rng) if kind == "vit" else budgets.stack(rng, kind)).model
        at = flops.crossover(model)
        assert at is not None and at > 0
        groups = flops.by_group(model, Lengths(1, at, at))
        attention = groups.pop("attention")
        assert sympy.simplify(attention - sum(groups.values())) == 0


def test_no_attention_no_crossover() -> None:
    assert flops.crossover(alone(spec.FeedForward(3, 5))) is None


# Another profiler, and independence


def test_deepspeed_s_profiler() -> None:
    profiler = pytest.importorskip("deepspeed.profiling.flops_profiler", reason="deepspeed is not installed")
    for seed in range(5):
        pair = budgets.block(random.Random(seed), gated=False, norm="layer")
        profile = profiler.FlopsProfiler(pair.module)
        with plain_attention(pair.module):
            profile.start_profile()
            pair.module(*pair.inputs)
            found = profile.get_total_macs()
            profile.end_profile()
        assert 2 * found == flops.forward(pair.model, pair.lengths), f"seed {seed}"


def test_the_formulas_know_no_module() -> None:
    """Agreement with regard.nn is evidence only while the budget does not look there."""
    folder = Path(regard.__file__).parent / "budget"
    files = sorted(folder.rglob("*.py"))
    assert len(files) > 5
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(f"{node.module}.{name}" for name in names)]
            for name in names:
                assert not name.startswith(("regard.nn", "regard.models")), f"{file.name} imports {name}"
