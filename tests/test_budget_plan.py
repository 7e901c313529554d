"""Plans: sums that add up, the bottleneck in words, decoding, rooflines, what fits, other ways, formulas as text."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from regard import budget
from regard.budget import _flops as flops
from regard.budget._attention_vs_alternatives import alternatives
from regard.budget._machine import Machine
from regard.budget._make_plan import plan
from regard.budget._model import Lengths
from regard.budget._plan import Plan
from regard.budget._roofline import time_parts
from regard.budget._solve import MAX_LAYERS, Fit, fit
from regard.budget._symbols import to_int, to_latex, to_text
from regard.budget._units import format_bytes, format_count, format_seconds, parse_integer, parse_quantity

# A machine of round numbers, on which times can be worked out by hand.
ROUND = Machine("round", {"float32": 1000.0, "bfloat16": 4000.0}, bandwidth=100.0, memory=10**12)
GPT2 = budget.decoder(768, 12, 12, vocab=50257, position="learned", reach=1024, qkv_bias=True)


# --- a plan -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    [
        GPT2,
        budget.encoder(30, 5, 3, vocab=11),
        budget.encoder_decoder(30, 5, 2, decoder_layers=3, vocab=11),
        budget.vision_transformer((8, 8), (2, 2), 7, 30, 5, 3),
    ],
    ids=lambda model: model.title,
)
def test_parts_add_up(model: budget.Model) -> None:
    found = plan(model, training=True, machine=ROUND)
    assert sum(row.parameters for row in found.rows) == found.parameters
    assert sum(row.flops for row in found.rows) == found.forward_flops
    assert abs(sum(row.saved_bytes for row in found.rows) - found.memory.activations) <= len(found.rows)
    assert math.isclose(sum(row.seconds or 0 for row in found.rows), found.seconds or 0)
    assert math.isclose(sum(found.shares.values()), 1)
    assert math.isclose(sum(plan(model).shares.values()), 1)


def test_a_plan_says_what_it_counts_in_80_columns() -> None:
    said = str(plan(GPT2, 1024, training=True, machine=budget.find_machine("A100 80GB"), dtype="bfloat16"))
    assert "124,439,808" in said and "on A100 80GB (published peak: a bound)" in said
    assert max(map(len, said.splitlines())) <= 80
    assert said.splitlines()[0] == "Decoder, training step of 1 × 1,024 tokens, bfloat16"


def test_the_theorys_exercise() -> None:
    said = str(plan(budget.build_model("attention", {"d": 512, "heads": 8, "bias": False})))
    assert "98,304 per head, 786,432 all heads, 262,144 output, 1,048,576 total" in said
    assert "8n² + 2,048n values" in said


@pytest.mark.parametrize(
    ("fields", "n", "said"),
    [
        (
            {},
            1280,
            r"linear layers, 71% \(feed-forward 47%, q, k, v, out 24%\): d is large .*overtakes at n\* = 3,072$",
        ),
        ({}, 8192, r"attention, 73%: n is large for this width; it overtook the rest at n\* = 3,072$"),
        ({"causal": True}, 512, r"attention overtakes at n\* = 6,143$"),  # n(n + 1)/2 pairs
        ({"causal": True, "window": 64}, 512, r"d is large for this length$"),  # never: the window's cost is linear too
    ],
)
def test_the_bottleneck_in_words(fields: dict[str, object], n: int, said: str) -> None:
    assert re.search(said, plan(budget.build_model("block", {"d": 512, "heads": 8, **fields}), n).bottleneck)


def test_the_bottleneck_can_be_logits_or_memory() -> None:
    assert plan(budget.decoder(64, 1, 1, vocab=50000), 64).bottleneck.startswith("logits, ")
    few = plan(budget.encoder(512, 8, 2), 1, machine=ROUND)
    assert "memory sets the time" in few.bottleneck


def test_on_a_machine_slow_attention_is_overtaken_sooner() -> None:
    block = budget.build_model("block", {"d": 512, "heads": 8})
    slow = replace(ROUND, attention={"float32": 500.0})
    fast = replace(ROUND, bandwidth=1e9)  # so that arithmetic alone sets the time
    assert plan(block, machine=fast).crossover in range(3072, 3080)
    assert plan(block, machine=replace(slow, bandwidth=1e9)).crossover in range(1536, 1540)


def test_decoding_reads_weights_and_cache() -> None:
    found = plan(GPT2, 1000, batch=3, machine=ROUND).decoding
    assert found is not None
    cache = 3 * 1000 * 12 * 2 * 768 * 4
    rows = 50257 * 768  # one of the embedding's rows is looked up for each token; as the head it is read whole
    learned = 12 * 12 * 768**2 + rows  # biases and norms are not worth counting
    assert (
        found.cache_bytes == cache and found.bytes_read == 4 * learned + cache * 1001 // 1000
    )  # and the new token's own
    # Weights, caches with the new token, and the values of the step itself.
    caches = 1001 * 12 * 2 * 768 * 4
    assert found.max_batch is not None and found.max_batch < (10**12 - 4 * 124_439_808) // caches
    assert found.max_batch == pytest.approx((10**12 - 4 * 124_439_808) // caches, rel=0.02)
    assert found.flops == to_int(flops.decode(GPT2, 3, 1000))
    assert plan(budget.encoder(64, 1, 1), 8).decoding is None
    small = plan(GPT2, 1000, machine=replace(ROUND, memory=10**6)).decoding
    assert small is not None and small.max_batch == 0 and small.max_batch_tokens_per_second is None


def test_where_calls_set_the_time_attention_has_not_overtaken_anything() -> None:
    """Attention is ahead for a moment at n = 1, where all is overhead; n* is where it stays ahead."""
    slow = replace(ROUND, bandwidth=1e9, peak={"float32": 1e9}, attention_call=1e-3)
    found = plan(budget.build_model("block", {"d": 64, "heads": 8}), 2, machine=slow)
    assert found.shares["attention"] > 0.5 and found.crossover is not None and found.crossover > 100
    assert "calls and memory set the time" in found.bottleneck and "overtook" not in found.bottleneck


def test_parts_and_names_are_models_and_machines_too() -> None:
    blocks = budget.block(512, 8, layers=4, order="post")
    whole_ = budget.encoder(512, 8, 4, order="post")
    assert plan(blocks, 100, training=True).memory.peak == plan(whole_, 100, training=True).memory.peak
    assert plan(budget.attention(512, 8), 7, machine="T4", dtype=torch.float16).seconds
    with pytest.raises(ValueError, match=r"^model must have an attention part"):
        plan(blocks[1:2], 5)
    with pytest.raises(TypeError, match=r"^model"):
        plan(3, 5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^machine"):
        plan(blocks, 5, machine=3)  # type: ignore[arg-type]
    for model in (budget.symbolic_model("block", {"heads": 8}), budget.decoder(64, 4, 2, window=sympy.Symbol("w"))):
        with pytest.raises(ValueError, match=r"^model has symbols"):
            plan(model, 5)


def test_lengths_are_checked() -> None:
    with pytest.raises(ValueError, match=r"^tokens .*1,024.* 2000$"):
        plan(GPT2, 2000)
    with pytest.raises(ValueError, match=r"^source=3"):
        plan(GPT2, 7, source=3)
    learned = budget.encoder_decoder(30, 5, 1, vocab=11, position="learned", reach=16)
    with pytest.raises(ValueError, match=r"^source .* 17$"):
        plan(learned, 7, source=17)
    with pytest.raises(ValueError, match=r"^tokens must be 17"):
        plan(budget.vision_transformer((8, 8), (2, 2), 7, 30, 5, 3), 18)
    for name in ("tokens", "batch"):
        with pytest.raises(ValueError, match=name):
            plan(budget.encoder(64, 1, 1), **{"tokens": 5, name: -1})


# --- the roofline -----------------------------------------------------------------------------------------------------


def test_a_product_takes_the_longer_of_both_sides() -> None:
    """x [n, d] W [d, v]: 2·n·d·v FLOPs at 1000/s, 4·(n·d + d·v + n·v) bytes at 100/s."""
    d, v = 100, 1000
    model = budget.decoder(d, 1, 1, vocab=v)
    for n, bound in ((1, "memory"), (1000, "arithmetic")):
        (head,) = (
            one for one in time_parts(model, Lengths(1, n), ROUND, "float32", "float32") if one.group == "logits"
        )
        slow, moved = 2 * n * d * v / 1000, 4 * (n * d + d * v + n * v) / 100
        assert math.isclose(head.seconds, max(slow, moved))
        assert (head.compute_bound > 0) == (slow > moved) == (bound == "arithmetic")


def test_smaller_weights_help_where_memory_is_the_bound() -> None:
    """One token reads every weight; int4 with a scale for 128 of them is 0.516 bytes a weight."""
    model = budget.encoder(512, 8, 2)
    whole_, quarter = (plan(model, 1, machine=ROUND, dtype="bfloat16", weights=w) for w in (None, "int4"))
    assert (quarter.seconds or 0) < 0.3 * (whole_.seconds or 0)
    assert to_int(math.ceil(quarter.memory.weights)) == math.ceil(whole_.parameters * (0.5 + 2 / 128))


@given(n=st.integers(1, 4096), d=st.sampled_from((32, 64, 128)), more=st.integers(2, 5))
def test_time_grows_with_length_and_training(n: int, d: int, more: int) -> None:
    model = budget.decoder(d, 4, 2, vocab=97)
    once, longer = (plan(model, x, machine=ROUND).seconds or 0 for x in (n, more * n))
    assert once < longer and once < (plan(model, n, machine=ROUND, training=True).seconds or 0)


# --- what fits --------------------------------------------------------------------------------------------------------


def fitted(limits: dict[str, float], kind: str = "decoder", n: int = 512, **fields: object) -> list[Fit]:
    return fit(kind, limits, n, fields=fields, machine=ROUND)


def test_what_fits_is_within_all_limits_and_as_deep_as_it_can_be() -> None:
    limits = {"params": 110e6, "memory": 2.0**31}
    found = fitted(limits, vocab=32000)
    assert len(found) == 10
    for one in found:
        assert one.plan.parameters <= 110e6 and one.plan.memory.total <= 2**31
        assert one.fields["d"] % one.fields["heads"] == 0
        deeper = plan(budget.build_model("decoder", {**one.fields, "layers": one.fields["layers"] + 1}), 512)
        assert one.fields["layers"] == MAX_LAYERS or deeper.parameters > 110e6 or deeper.memory.total > 2**31
    assert [one.unusual for one in found] == sorted(one.unusual for one in found)
    sizes = [one.plan.parameters for one in found if not one.unusual]
    assert sizes == sorted(sizes, reverse=True) and len(sizes) > 3
    assert found[0].fields == fitted({"params": "110M", "memory": "2GiB"}, vocab=32000)[0].fields


def test_given_fields_stay() -> None:
    for one in fitted({"params": 50e6}, d=640, vocab=1000):
        assert one.fields["d"] == 640 and one.fields["vocab"] == 1000
    for one in fitted({"params": 50e6}, heads=12):
        assert one.fields["heads"] == 12
    assert all(one.fields["layers"] == 3 for one in fitted({"params": 50e6}, layers=3))


@pytest.mark.parametrize("name", ["params", "memory", "flops", "time"])
def test_a_budget_below_the_smallest_model(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} is below the smallest decoder \(d=64, layers=1\), which needs "):
        fitted({name: 1.0}, vocab=100)


def test_what_cannot_be_fitted_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^limits"):
        fitted({})
    with pytest.raises(ValueError, match=r"^kind .*attention"):
        fitted({"params": 1e9}, kind="attention")
    with pytest.raises(ValueError, match=r"^time .*--machine"):
        fit("decoder", {"time": 1.0}, 5)
    for limit in (0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="params"):
            fitted({"params": limit})
    with pytest.raises(ValueError, match=r"^limits .*'weight'$"):
        fit("decoder", {"weight": 1.0}, 5)
    with pytest.raises(ValueError, match=r"^d, heads and kv_heads"):
        fitted({"params": 1e9}, d=64, heads=7)


# --- other ways -------------------------------------------------------------------------------------------------------


def counted(module: nn.Module, *inputs: torch.Tensor) -> budget.ModelCounts:
    return budget.count(module, *inputs)


def test_recurrence_and_convolution_cost_what_torch_counts() -> None:
    n, d, k = 11, 7, 5
    at = {way.name: way.at(n, d, 3, k) for way in alternatives()}
    x = torch.randn(1, n, d)
    for name, module in (("RNN", nn.RNN(d, d, bias=False)), ("LSTM", nn.LSTM(d, d, bias=False))):
        found = counted(module, x.transpose(0, 1))
        assert at[f"recurrence ({name})"]["flops"] == found.forward_flops
        assert at[f"recurrence ({name})"]["parameters"] == found.parameters
    found = counted(nn.Conv1d(d, d, k, padding="same", bias=False), x.transpose(1, 2))
    assert (at["convolution"]["flops"], at["convolution"]["parameters"]) == (found.forward_flops, found.parameters)


def test_orders_of_evaluation_cost_what_they_run() -> None:
    """The same scores, entry by entry and projected once, counted as they run."""
    n, d = 5, 3

    class EntryByEntry(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(d, d, bias=False) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = [[(self.q(x[i : i + 1]) @ self.k(x[j : j + 1]).T) for j in range(n)] for i in range(n)]
            weights = torch.stack([torch.cat([s.flatten() for s in row]) for row in scores]).softmax(-1)
            return weights @ self.v(x)

    class Once(EntryByEntry):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.q(x) @ self.k(x).T).softmax(-1) @ self.v(x)

    at = {way.name: way.at(n, d, 3, 3) for way in alternatives()}
    x = torch.randn(n, d)
    one, other = EntryByEntry(), Once()
    other.load_state_dict(one.state_dict())
    torch.testing.assert_close(one(x), other(x))
    assert at["absolute, entry by entry"]["flops"] == counted(one, x).forward_flops
    assert at["absolute, projected once"]["flops"] == counted(other, x).forward_flops
    assert at["absolute, projected once"]["parameters"] == counted(other, x).parameters


# --- numbers and formulas as text -------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["", "-5", "0", "1.5", "five", "1e400", "3 apples", "nan", "1GiB"])
def test_what_is_no_whole_number_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match=rf"^d must be an integer ≥ 1, got {given!r}$"):
        parse_integer("d", given)


@pytest.mark.parametrize(("given", "what"), [("2GiB", "count"), ("110M", "size"), ("5", "size"), ("-1s", "time")])
def test_units_of_another_kind_are_refused(given: str, what: str) -> None:
    with pytest.raises(ValueError, match=r"^x must be a positive"):
        parse_quantity("x", given, what)


@given(st.floats(1e-3, 1e17))
def test_what_is_said_can_be_read_again(x: float) -> None:
    for said, kind in ((format_count, "count"), (format_bytes, "size"), (format_seconds, "time")):
        if (x < 1 and kind != "time") or x > {"count": 1e17, "size": 1e15, "time": 1e6}[kind]:
            continue
        read = parse_quantity("x", said(x).replace("µ", "u"), kind)
        assert math.isclose(read, x, rel_tol=0.006) or abs(read - x) <= 0.5


def test_formulas_as_text_mean_what_they_say() -> None:
    """What is printed is Python again, with ^ for powers: it gives the numbers back."""
    model = budget.symbolic_model("decoder", {"heads": 8, "layers": 6, "vocab": 100, "kv_heads": 2, "d_key": 5})
    raised = {"²": "**2", "³": "**3", "·": "*", "−": "-", ",": ""}
    for formula in budget.formulas(model).values():
        said = to_text(formula)
        for a, b in raised.items():
            said = said.replace(a, b)
        for letter in "nmtD":  # 8n is 8·n
            said = re.sub(rf"(\d)({letter})\b", r"\1*\2", said)
        letters = {str(letter): letter for letter in sympy.sympify(formula).free_symbols}
        assert sympy.expand(sympy.sympify(said, locals=letters) - formula) == 0, said
        assert to_latex(formula)


def test_an_integer_has_no_symbols() -> None:
    with pytest.raises(ValueError, match=r"^2D \+ 1 .* symbols D$"):
        to_int(2 * sympy.Symbol("D") + 1)


def test_a_plan_is_a_value() -> None:
    assert isinstance(plan(GPT2, 5), Plan) and plan(GPT2, 5) == plan(GPT2, 5)
