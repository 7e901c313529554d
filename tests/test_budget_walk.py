"""A live model counted: against hand formulas, in every backend, and without touching or allocating anything."""

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
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import regard
from regard.budget.flops_of_ops import FORMULAS, could_hide_products, formula_of
from regard.budget.walk import Counted, count, register
from regard.kernels import native

BACKENDS = ["reference", *(["native"] if native.built() else [])]


class Calls(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def meta(*shape: int, grad: bool = False) -> Tensor:
    return torch.empty(*shape, device="meta", requires_grad=grad)


def seen_whole(found: Counted) -> tuple[int | None, int | None]:
    assert found.uncounted == () and found.ran == "shapes"
    assert found.flops.get("", 0) == found.forward
    return found.forward, found.backward


# --- parameters ------------------------------------------------------------------------------------------------------


def test_shared_parameters_count_once_where_they_first_stand() -> None:
    first, second = nn.Linear(5, 7), nn.Linear(5, 7, bias=False)
    second.weight = first.weight
    model = nn.Sequential(first, second, nn.BatchNorm1d(7).half(), first)
    model[0].bias.requires_grad_(False)
    found = count(model)
    assert (found.parameters, found.trainable) == (35 + 7 + 14, 35 + 14)
    assert (found.weight_bytes, found.buffer_bytes) == (4 * 42 + 2 * 14, 2 * 14 + 8)
    assert found.by_part == (("0", "Linear", 42), ("2", "BatchNorm1d", 14))
    assert (found.forward, found.backward, found.flops, found.uncounted, found.ran) == (None, None, {}, (), "nothing")


def test_parts_add_up() -> None:
    model = regard.nn.Decoder(12, heads=3, layers=2, vocab=37)
    found = count(model)
    assert found.parameters == sum(p.numel() for p in model.parameters()) == sum(n for _, _, n in found.by_part)


# --- single layers ---------------------------------------------------------------------------------------------------


def test_linear() -> None:
    model = nn.Linear(5, 7)
    assert seen_whole(count(model, torch.randn(2, 3, 5), backward=True)) == (2 * 6 * 5 * 7, 2 * 6 * 5 * 7)
    assert seen_whole(count(model, meta(2, 3, 5, grad=True), backward=True)) == (2 * 6 * 5 * 7, 2 * 2 * 6 * 5 * 7)
    assert seen_whole(count(model, meta(5))) == (2 * 5 * 7, None)
    with torch.inference_mode():
        assert seen_whole(count(model, torch.randn(3, 5))) == (2 * 3 * 5 * 7, None)
        assert seen_whole(count(model, meta(3, 5), backward=True)) == (2 * 3 * 5 * 7, 2 * 3 * 5 * 7)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_convolution(groups: int, transposed: bool) -> None:
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    model = kind(4, 8, (3, 5), stride=2, padding=1, groups=groups)
    x = meta(2, 4, 11, 13, grad=True)
    places = 11 * 13 if transposed else 6 * 6  # where the filter is laid: on inputs, or on outputs
    forward = 2 * 2 * places * 4 * 8 * 3 * 5 // groups
    assert seen_whole(count(model, x, backward=True)) == (forward, 2 * forward)


def test_small_products() -> None:
    a, x, y = meta(5, 7), meta(7), meta(5)
    assert seen_whole(count(Calls(torch.mv), a, x)) == (2 * 35, None)
    assert seen_whole(count(Calls(torch.dot), x, x)) == (2 * 7, None)
    assert seen_whole(count(Calls(torch.addmv), y, a, x)) == (2 * 35, None)
    assert seen_whole(count(Calls(torch.addbmm), meta(2, 5), meta(3, 2, 7), meta(3, 7, 5))) == (2 * 3 * 2 * 7 * 5, None)
    three = Calls(lambda *xs: torch.einsum("bhnd,bhmd->bhnm", *xs))
    assert seen_whole(count(three, meta(2, 3, 5, 7), meta(2, 3, 11, 7))) == (2 * 6 * 5 * 11 * 7, None)


def test_bilinear_is_einsum_of_three() -> None:
    """Two products, of which the first is with the larger: x W, then with y."""
    forward = 2 * 11 * 3 * 7 * 5 + 2 * 11 * 3 * 7
    assert seen_whole(count(nn.Bilinear(5, 7, 3), meta(11, 5), meta(11, 7)))[0] == forward


@pytest.mark.parametrize("kind, gates", [(nn.RNN, 1), (nn.GRU, 3), (nn.LSTM, 4)])
@pytest.mark.parametrize("grad", [False, True])
def test_recurrent(kind: Any, gates: int, grad: bool) -> None:
    model = kind(5, 7, num_layers=2, bidirectional=True)
    forward = 2 * 11 * 3 * 2 * gates * 7 * ((5 + 7) + (14 + 7))
    found = count(model, meta(11, 3, 5, grad=grad), backward=grad)
    assert seen_whole(found)[0] == forward
    if kind is nn.LSTM and grad:
        assert found.backward == 2 * forward


def test_products_with_packed_weights() -> None:
    for name in ("quantized::linear_dynamic", "aten::_weight_int8pack_mm", "aten::_weight_int4pack_mm"):
        assert FORMULAS[name](meta(3, 7), meta(3, 5)) == 2 * 3 * 5 * 7
    assert FORMULAS["aten::linear_backward"](None, meta(3, 5), meta(3, 7), meta(7, 5), [True, False, True]) == 210


def test_grouped_product() -> None:
    formula = FORMULAS["aten::_grouped_mm"]
    assert formula(None, meta(11, 5), meta(3, 5, 7)) == 2 * 11 * 5 * 7
    assert formula(None, meta(3, 11, 5), meta(3, 5, 7)) == 3 * 2 * 11 * 5 * 7
    assert formula(None, meta(3, 11, 5), meta(5, 7)) == 2 * 11 * 5 * 7


# --- attention -------------------------------------------------------------------------------------------------------


def attention_flops(B: int, H: int, n: int, m: int, d: int, e: int) -> int:
    return 2 * B * H * n * m * (d + e)


def available() -> list[SDPBackend]:
    found = []
    x = torch.randn(1, 1, 8, 8)
    for kind in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        try:
            with sdpa_kernel(kind):
                F.scaled_dot_product_attention(x, x, x)
            found.append(kind)
        except RuntimeError:
            pass
    return found


@pytest.mark.parametrize("is_causal", [False, True])
def test_torchs_attention_counts_alike_in_every_backend(is_causal: bool) -> None:
    assert {SDPBackend.MATH, SDPBackend.FLASH_ATTENTION} <= set(available())
    forward = attention_flops(2, 3, 17, 17, 8, 8)
    model = Calls(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=is_causal))
    for kind in available():
        with sdpa_kernel(kind):
            found = count(model, *(torch.randn(2, 3, 17, 8, requires_grad=True) for _ in range(3)), backward=True)
        assert seen_whole(found) == (forward, 2 * forward), kind


@pytest.mark.parametrize("kind", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_torchs_grouped_attention(kind: SDPBackend) -> None:
    model = Calls(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True))
    q, k, v = meta(2, 6, 5, 8, grad=True), meta(2, 2, 11, 8, grad=True), meta(2, 2, 11, 8, grad=True)
    forward = attention_flops(2, 6, 5, 11, 8, 8)
    with sdpa_kernel(kind):
        assert seen_whole(count(model, q, k, v, backward=True)) == (forward, 2 * forward)


def test_kernels_of_other_devices_have_the_same_formulas() -> None:
    """They cannot run here; shapes are all that a formula sees."""
    q, k, v = meta(2, 6, 5, 8), meta(2, 2, 11, 8), meta(2, 2, 11, 8)
    forward = attention_flops(2, 6, 5, 11, 8, 8)
    for name, formula in FORMULAS.items():
        if "scaled_dot_product" in name and name.endswith("_backward"):
            assert formula(None, q, q, k, v) == 2 * forward, name
        elif "scaled_dot_product" in name or name == "higher_order::flex_attention":
            assert formula(None, q, k, v) == forward, name


def test_torchs_other_kernels_recompute_off_the_books() -> None:
    """torch's formulas of kernels for ragged batches are used, without the scores that they compute once more."""
    q, forward = meta(2, 5, 3, 8), attention_flops(2, 3, 5, 5, 8, 8)  # lengths stand before heads here
    lengths = (None, None, 5, 5)
    backward = formula_of(torch.ops.aten._efficient_attention_backward.default)
    x = q.transpose(1, 2)
    assert backward(None, x, x, x, x, None, x, *lengths) == 2 * forward


def test_flex_attention() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    mask = flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, 16, 16, device="cpu")
    model = Calls(lambda q, k, v: flex.flex_attention(q, k, v, block_mask=mask))
    found = count(model, *(torch.randn(2, 3, 16, 8) for _ in range(3)))
    assert seen_whole(found) == (attention_flops(2, 3, 16, 16, 8, 8), None)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("observe", [None, regard.Observe(map=2, key_mass=True), regard.Observe(heads=(1, 2))])
def test_our_attention(backend: str, observe: Any) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        out = regard.attention(q, k, v, mask=regard.Causal(), observe=observe, backend=backend)
        return out if observe is None else out[0]

    q, k, v = meta(2, 6, 5, 7, grad=True), meta(2, 3, 11, 7, grad=True), meta(2, 3, 11, 13, grad=True)
    forward = attention_flops(2, 6, 5, 11, 7, 13)
    assert seen_whole(count(Calls(call), q, k, v, backward=True)) == (forward, 2 * forward)
    real = [torch.randn(x.shape) for x in (q, k, v)]
    assert seen_whole(count(Calls(call), *real)) == (forward, None)


def test_our_attention_broadcasts_its_batch() -> None:
    found = count(Calls(regard.attention), meta(1, 3, 5, 7), meta(2, 3, 11, 7), meta(2, 3, 11, 7))
    assert seen_whole(found) == (attention_flops(2, 3, 5, 11, 7, 7), None)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_torchs_multihead(mode: str) -> None:
    B, n, m, D = 2, 5, 11, 12
    model = getattr(nn.MultiheadAttention(D, 3, batch_first=True), mode)()
    forward = 2 * B * (2 * n + 2 * m) * D * D + attention_flops(B, 3, n, m, 4, 4)
    x, y = torch.randn(B, n, D), torch.randn(B, m, D)
    assert seen_whole(count(model, x, y, y))[0] == forward
    assert seen_whole(count(model, x.requires_grad_(), y.requires_grad_(), y, backward=True)) == (forward, 2 * forward)
    itself = 2 * B * 4 * n * D * D + attention_flops(B, 3, n, n, 4, 4)
    with torch.no_grad():  # where nn.MultiheadAttention takes its one-call path
        assert seen_whole(count(model, x, x, x, need_weights=False))[0] == itself


def encoder_layer_flops(B: int, n: int, D: int, hidden: int) -> int:
    return 2 * B * n * (4 * D * D + 2 * D * hidden) + 4 * B * n * n * D


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_torchs_encoder_layer(mode: str) -> None:
    model = getattr(nn.TransformerEncoderLayer(12, 3, 29, batch_first=True), mode)()
    x, forward = torch.randn(2, 5, 12, requires_grad=True), encoder_layer_flops(2, 5, 12, 29)
    assert seen_whole(count(model, x, backward=True)) == (forward, 2 * forward)
    with torch.no_grad():
        found = count(model, x.detach())
    assert seen_whole(found) == (forward, None)
    assert found.flops == {
        "": forward,
        "self_attn": 2 * 2 * 5 * 4 * 12 * 12 + 4 * 2 * 5 * 5 * 12,
        "linear1": 2 * 2 * 5 * 12 * 29,
        "linear2": 2 * 2 * 5 * 12 * 29,
    }
    assert torch.backends.mha.get_fastpath_enabled()


# --- torch's own counter, once it is told ----------------------------------------------------------------------------


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils import flop_counter

    monkeypatch.setattr(flop_counter, "flop_registry", dict(flop_counter.flop_registry))
    register()
    register()


def theirs(call: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as seen:
        call()
    return seen.get_total_flops()


def test_register_lets_torch_see_what_it_did_not(told: None) -> None:
    q = torch.randn(2, 3, 5, 8, requires_grad=True)
    forward = attention_flops(2, 3, 5, 5, 8, 8)
    assert theirs(lambda: regard.attention(q, q, q)) == forward
    assert theirs(lambda: regard.attention(q, q, q).sum().backward()) == 3 * forward
    assert theirs(lambda: F.scaled_dot_product_attention(q, q, q)) == forward


@torch.no_grad()
def test_register_lets_torch_see_the_one_call_layers(told: None) -> None:
    B, n, D = 2, 5, 12
    x = torch.randn(B, n, D)
    one = nn.MultiheadAttention(D, 3, batch_first=True).eval()
    layer = nn.TransformerEncoderLayer(D, 3, 29, batch_first=True).eval()
    assert theirs(lambda: one(x, x, x)) == 2 * B * n * 4 * D * D + 4 * B * n * n * D
    assert theirs(lambda: layer(x)) == encoder_layer_flops(B, n, D, 29)
    padded = torch.zeros(B, n, dtype=torch.bool)
    padded[1, 3:] = True
    layer = nn.TransformerEncoderLayer(D, 2, 29, batch_first=True).eval()  # an even number, or torch pads
    stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).eval()
    ragged = 2 * (encoder_layer_flops(1, 5, D, 29) + encoder_layer_flops(1, 3, D, 29))
    assert theirs(lambda: stack(x, src_key_padding_mask=padded)) == ragged


# --- whole models ----------------------------------------------------------------------------------------------------


def decoder_flops(B: int, n: int, D: int, hidden: int, layers: int, vocab: int) -> int:
    return layers * encoder_layer_flops(B, n, D, hidden) + 2 * B * n * D * vocab


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's")
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
    assert found.flops["blocks.1"] == encoder_layer_flops(1, n, D, 4 * D)


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
    assert found.flops["encoder.layer.1.intermediate.dense"] == 2 * 2 * 5 * 12 * 29


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
    angles = found.flops.get("model.rotary_emb", 0)
    assert seen_whole(found) == (forward + angles, 2 * forward)
    assert found.flops["model.layers.1.mlp"] == 2 * B * n * 3 * D * hidden


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
    assert (found.uncounted, found.forward) == (("regard_tests::product",), 2 * 125)
    assert found.ran == "values"  # it has no form for shapes alone
    assert capfd.readouterr().err == ""  # which torch would report at length
    with pytest.raises(ValueError, match="does not run on shapes alone; give real inputs"):
        count(model, meta(5, 5), meta(5, 5))


def test_a_branch_is_named() -> None:
    model = Calls(lambda x: torch.cond(x.sum() > 0, lambda x: x @ x, lambda x: x + x, (x,)))
    assert count(model, torch.randn(5, 5)).uncounted == ("higher_order::cond",)


def test_solving_is_named_and_harmless_operators_are_not() -> None:
    found = count(Calls(torch.linalg.solve), torch.eye(5), torch.randn(5, 3))
    assert found.uncounted == ("aten::_linalg_solve_ex",) and found.forward == 0
    aten, x = torch.ops.aten, torch.randn(5, 5)
    for op in (aten.cat.default, aten.native_layer_norm.default, aten.mse_loss.default, aten.add.Tensor):
        assert not could_hide_products(op, ([x, x],))
    for op in (aten._cdist_forward.default, aten.linalg_lu_solve.default, aten._sparse_addmm.default):
        assert could_hide_products(op, (x, x))


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
    assert found.ran == ("values" if looks else "shapes")
    assert found.forward == (1 + looks) * 2 * 3 * 25
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
    assert (found.forward, found.backward, found.parameters) == (2 * 3 * 35, 2 * 3 * 35, 0)
    assert found.ran == ("values" if looks else "shapes")
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
    one_line(lambda: count(frozen, meta(3), backward=True), ValueError, "no output depends on")
    assert count(frozen, meta(3, grad=True), backward=True).backward == 2 * 15
    apart = Calls(lambda x: x.detach())
    one_line(lambda: count(apart, torch.ones(3, requires_grad=True), backward=True), ValueError, "no output depends on")
    one_line(lambda: count(nn.Linear(3, 5), meta(3, 7)), ValueError, "does not run on shapes alone")
    held = nn.Linear(3, 5)
    held.open = open(__file__)  # noqa: SIM115
    with held.open:
        one_line(lambda: count(held, torch.ones(3)), TypeError, "cannot be copied")
