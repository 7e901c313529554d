"""Whole live models counted: nothing allocated, nothing touched, what nobody knows named."""

from __future__ import annotations

import copy
import random
import resource
import sys
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.walking import Calls, encoder_layer_flops, meta, seen_whole
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import regard
from regard.budget._count_live_model import count
from regard.budget._op_flops import may_contain_products

# --- whole models ----------------------------------------------------------------------------------------------------


def decoder_flops(B: int, n: int, D: int, hidden: int, layers: int, vocab: int) -> int:
    return layers * encoder_layer_flops(B, n, D, hidden) + 2 * B * n * D * vocab


@pytest.mark.skipif(
    sys.platform != "linux",
    reason="the test limits a process's memory to show that none is taken, which only Linux lets it do",
)
def test_a_long_decoder_is_counted_without_its_memory() -> None:
    """One head's weights alone would be 4 GiB; the process may grow by half of one."""
    n, D, layers, vocab = 32_768, 64, 2, 50_000
    model = regard.nn.Decoder(D, heads=2, layers=layers, vocab=vocab)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**29, before[1]))
    try:
        with pytest.raises(RuntimeError, match="allocate"):
            torch.empty(2**29, dtype=torch.float32)  # the limit does hold
        found = count(model, torch.empty(1, n, dtype=torch.int64, device="meta"), backward=True)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    forward = decoder_flops(1, n, D, 4 * D, layers, vocab)
    assert seen_whole(found) == (forward, 2 * forward)
    assert found.flops_by_module["blocks.1"] == encoder_layer_flops(1, n, D, 4 * D)


def test_a_model_without_weights_in_memory() -> None:
    with torch.device("meta"):
        model = regard.nn.Decoder(12, heads=3, layers=2, vocab=37)
    forward = decoder_flops(2, 5, 12, 48, 2, 37)
    assert seen_whole(count(model, torch.zeros(2, 5, dtype=torch.int64), backward=True)) == (forward, 2 * forward)


@pytest.mark.parametrize("how", ["sdpa", "eager"])
def test_bert_of_transformers(how: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=37, hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=29
    )
    config._attn_implementation = how
    model = transformers.BertModel(config).eval()
    forward = 2 * encoder_layer_flops(2, 5, 12, 29) + 2 * 2 * 12 * 12  # the pooler sees one position
    found = count(model, input_ids=torch.randint(37, (2, 5)), backward=True)
    assert seen_whole(found) == (forward, 2 * forward)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found.flops_by_module["encoder.layer.1.intermediate.dense"] == 2 * 2 * 5 * 12 * 29


def test_llama_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=37,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        intermediate_size=29,
    )
    model = transformers.LlamaForCausalLM(config)
    B, n, D, keys, hidden = 2, 5, 24, 8, 29
    layer = 2 * B * n * (2 * D * D + 2 * D * keys + 3 * D * hidden) + 4 * B * n * n * D
    found = count(model, torch.randint(37, (B, n)), backward=True, use_cache=False)
    forward = 2 * layer + 2 * B * n * D * 37
    # The angles of rotary positions are taken by a product of n × 1 and 1 × d/2, without a gradient.
    angles = found.flops_by_module.get("model.rotary_emb", 0)
    assert seen_whole(found) == (forward + angles, 2 * forward)
    assert found.flops_by_module["model.layers.1.mlp"] == 2 * B * n * 3 * D * hidden


def test_compiled_and_checkpointed_models() -> None:
    inner = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 5))
    forward = 2 * 3 * 2 * 35
    x = torch.randn(3, 5, requires_grad=True)
    assert seen_whole(count(torch.compile(inner), x, backward=True)) == (forward, 2 * forward)
    for reentrant in (False, True):
        again = Calls(lambda x, reentrant=reentrant: checkpoint(inner, x, use_reentrant=reentrant))
        runs_again = forward if reentrant else forward // 2  # the newer one stops where nothing more is wanted
        assert seen_whole(count(again, x, backward=True)) == (forward, 2 * forward + runs_again)


@dataclass
class Answer:
    logits: Tensor
    more: UserDict[str, Tensor]


def test_gradients_start_at_every_output_wherever_it_stands() -> None:
    maps = nn.ModuleList(nn.Linear(5, 7) for _ in range(3))
    several = Calls(lambda x: (Answer(maps[0](x), UserDict(last=maps[1](x))), {"third": [maps[2](x)]}, "a word"))
    assert seen_whole(count(several, torch.randn(3, 5), backward=True)) == (3 * 210, 3 * 210)


# --- what nobody knows -----------------------------------------------------------------------------------------------


@pytest.fixture
def foreign() -> Any:
    with torch.library._scoped_library("regard_tests", "FRAGMENT") as library:
        library.define("product(Tensor a, Tensor b) -> Tensor")
        library.impl("product", lambda a, b: a @ b, "CPU")
        yield torch.ops.regard_tests.product


def test_a_foreign_operator_is_named(foreign: Any, capfd: pytest.CaptureFixture[str]) -> None:
    model = Calls(lambda a, b: foreign(a, b) @ b)
    found = count(model, torch.randn(5, 5), torch.randn(5, 5))
    assert (found.uncounted_operators, found.forward_flops) == (("regard_tests::product",), 2 * 125)
    assert found.ran_on == "values"  # it has no form for shapes alone
    assert capfd.readouterr().err == ""  # which torch would report at length
    with pytest.raises(ValueError, match="does not run on shapes alone; give real inputs"):
        count(model, meta(5, 5), meta(5, 5))


def test_a_branch_is_named() -> None:
    model = Calls(lambda x: torch.cond(x.sum() > 0, lambda x: x @ x, lambda x: x + x, (x,)))
    assert count(model, torch.randn(5, 5)).uncounted_operators == ("higher_order::cond",)


def test_solving_is_named_and_harmless_operators_are_not() -> None:
    found = count(Calls(torch.linalg.solve), torch.eye(5), torch.randn(5, 3))
    assert found.uncounted_operators == ("aten::_linalg_solve_ex",) and found.forward_flops == 0
    aten, x = torch.ops.aten, torch.randn(5, 5)
    for op in (aten.cat.default, aten.native_layer_norm.default, aten.mse_loss.default, aten.add.Tensor):
        assert not may_contain_products(op, ([x, x],))
    for op in (aten._cdist_forward.default, aten.linalg_lu_solve.default, aten._sparse_addmm.default):
        assert may_contain_products(op, (x, x))


def test_a_vision_model_is_seen_whole() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.SiLU(),
        nn.MaxPool2d(2),
        nn.GroupNorm(2, 8),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(),
        nn.PReLU(),
        nn.Linear(8, 11),
        nn.LogSoftmax(-1),
    )
    target = torch.randint(11, (2,))
    learns = Calls(lambda x: F.nll_loss(model(x), target))
    learns.inner = model
    forward = 2 * 2 * 16 * 16 * 3 * 8 * 9 + 2 * 2 * 8 * 11
    assert seen_whole(count(learns, torch.randn(2, 3, 16, 16), backward=True))[0] == forward


# --- nothing is touched ----------------------------------------------------------------------------------------------


class Remembers(nn.Module):
    """Changes whatever a module can change of itself, and looks at a value if asked to."""

    def __init__(self, looks: bool) -> None:
        super().__init__()
        self.looks, self.calls, self.last = looks, [], None
        self.map, self.norm, self.drop = nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(self.map(x)))
        self.last = x
        self.calls.append(random.random() + np.random.rand())
        return self.map(x) if self.looks and float(x.detach().abs().sum()) >= 0 else x


@pytest.mark.parametrize("looks", [False, True])
def test_the_model_stays_as_it_was(looks: bool) -> None:
    model, x = Remembers(looks).train(), torch.randn(3, 5, requires_grad=True)
    model.map.weight.grad = torch.ones(5, 5)
    model.drop.eval()
    before = copy.deepcopy(model.state_dict())
    chances = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    found = count(model, x, backward=True)
    assert found.ran_on == ("values" if looks else "shapes")
    assert found.forward_flops == (1 + looks) * 2 * 3 * 25
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert model.calls == [] and model.last is None and model.training and not model.drop.training
    assert torch.equal(model.map.weight.grad, torch.ones(5, 5)) and model.map.bias.grad is None and x.grad is None
    assert type(model.map.weight) is nn.Parameter
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.equal(torch.get_rng_state(), chances[0]) and random.getstate() == chances[1]
    assert np.array_equal(np.random.get_state()[1], chances[2])


@pytest.mark.parametrize("looks", [False, True])
def test_what_a_function_reaches_stays_as_it_was_too(looks: bool) -> None:
    """A loss around a model is often a lambda; functions are not copied, nor is what they hold."""
    inner = nn.Linear(5, 7)
    inner.weight.grad = torch.ones(7, 5)
    loss = Calls(lambda x: inner(x).sum() * (float(x.sum()) if looks else 1))
    found = count(loss, torch.randn(3, 5), backward=True)
    assert (found.forward_flops, found.backward_flops, found.parameters) == (2 * 3 * 35, 2 * 3 * 35, 0)
    assert found.ran_on == ("values" if looks else "shapes")
    assert torch.equal(inner.weight.grad, torch.ones(7, 5)) and inner.bias.grad is None


def test_a_failed_count_leaves_nothing_behind() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(5, 7))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        count(model, torch.randn(3, 5))
    assert torch.backends.mha.get_fastpath_enabled() and torch._C._len_torch_dispatch_stack() == 0
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


# --- refusals --------------------------------------------------------------------------------------------------------


def one_line(call: Callable[[], object], kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_refusals() -> None:
    one_line(lambda: count(torch.relu, meta(3)), TypeError, "must be a torch.nn.Module, got builtin")
    one_line(lambda: count(nn.LazyLinear(3)), ValueError, "weight has no shape yet")
    one_line(lambda: count(nn.Linear(3, 5), backward=True), ValueError, "needs inputs")
    frozen = nn.Linear(3, 5).requires_grad_(False)
    one_line(lambda: count(frozen, meta(3), backward=True), ValueError, "backward=True")
    assert count(frozen, meta(3, grad=True), backward=True).backward_flops == 2 * 15
    apart = Calls(lambda x: x.detach())
    one_line(lambda: count(apart, torch.ones(3, requires_grad=True), backward=True), ValueError, "backward=True")
    one_line(lambda: count(nn.Linear(3, 5), meta(3, 7)), ValueError, "does not run on shapes alone")
    held = nn.Linear(3, 5)
    held.open = open(__file__)  # noqa: SIM115
    with held.open:
        one_line(lambda: count(held, torch.ones(3)), TypeError, "^model and inputs")
