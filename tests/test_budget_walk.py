"""A live model counted, operator by operator: against hand formulas, in every backend, and by torch's own counter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.walking import Calls, attention_flops, encoder_layer_flops, meta, seen_whole
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import regard
from regard.budget import register_flop_formulas
from regard.budget._count_live_model import count
from regard.budget._op_flops import FORMULAS, find_formula
from regard.kernels import native

BACKENDS = ["reference", *(["native"] if native.built() else [])]


# --- parameters ------------------------------------------------------------------------------------------------------


def test_shared_parameters_count_once_where_they_first_stand() -> None:
    first, second = nn.Linear(5, 7), nn.Linear(5, 7, bias=False)
    second.weight = first.weight
    model = nn.Sequential(first, second, nn.BatchNorm1d(7).half(), first)
    model[0].bias.requires_grad_(False)
    found = count(model)
    assert (found.parameters, found.trainable) == (35 + 7 + 14, 35 + 14)
    assert (found.weight_bytes, found.buffer_bytes) == (4 * 42 + 2 * 14, 2 * 14 + 8)
    assert found.by_module == (("0", "Linear", 42), ("2", "BatchNorm1d", 14))
    assert (
        found.forward_flops,
        found.backward_flops,
        found.flops_by_module,
        found.uncounted_operators,
        found.ran_on,
    ) == (
        None,
        None,
        {},
        (),
        "nothing",
    )


def test_parts_add_up() -> None:
    model = regard.nn.Decoder(12, heads=3, layers=2, vocab=37)
    found = count(model)
    assert found.parameters == sum(p.numel() for p in model.parameters()) == sum(n for _, _, n in found.by_module)


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
        assert found.backward_flops == 2 * forward


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
    backward = find_formula(torch.ops.aten._efficient_attention_backward.default)
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


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_torchs_encoder_layer(mode: str) -> None:
    model = getattr(nn.TransformerEncoderLayer(12, 3, 29, batch_first=True), mode)()
    x, forward = torch.randn(2, 5, 12, requires_grad=True), encoder_layer_flops(2, 5, 12, 29)
    assert seen_whole(count(model, x, backward=True)) == (forward, 2 * forward)
    with torch.no_grad():
        found = count(model, x.detach())
    assert seen_whole(found) == (forward, None)
    assert found.flops_by_module == {
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
    register_flop_formulas()
    register_flop_formulas()


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
