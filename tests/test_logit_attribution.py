"""Logit attribution: parts sum to the logit in every family, each part is right, and what is not seen is refused."""

from __future__ import annotations

import csv
import io
import math
from typing import Any

import pytest
import torch
from support.attribution_models import FAMILIES, NONLINEAR, OwnModel, family, token_ids
from support.checkpoints import make, perturb
from support.model_configs import GPT2, V
from torch import Tensor, nn
from torch.nn import functional as F

import regard
from regard import ALiBi, Learned, RelativeTable, Rotary, Sinusoidal
from regard._errors import RegardError, RegardTypeError
from regard.interp import LogitParts, ablate, logit_attribution
from regard.interp._linear_functions import function_name, is_in_place
from regard.nn import Decoder, Encoder, EncoderDecoder, LayerNorm, RMSNorm

pytestmark = pytest.mark.usefixtures("full_tiles")


def check(parts: LogitParts) -> None:
    """The sums: of all parts, and of the tokens that each head read."""
    assert parts.sum() == pytest.approx(parts.logit, abs=1e-4 * max(abs(parts.logit), parts.largest()))
    for part in parts.of("head"):
        shares = parts.by_source(part.path, part.head)
        assert float(shares.sum()) == pytest.approx(part.value, abs=1e-4 * max(1.0, float(shares.abs().sum())))


# --- families ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_the_parts_sum_to_the_logit(name: str) -> None:
    model, inputs = family(name)
    with torch.no_grad():
        output = inputs() if callable(inputs) else model(inputs)
    parts = logit_attribution(model, inputs, (5, 11), position=-2)
    check(parts)
    difference = float(output.logits[0, -2, 5] - output.logits[0, -2, 11])
    assert (parts.softcap is not None) == (name == "gemma2")
    if parts.softcap is None:
        assert parts.logit == pytest.approx(difference, abs=1e-4)
    # Two layers of three heads, and cross-attention in a decoder that reads an encoder.
    layers = 4 if model.config.is_encoder_decoder else 2
    assert len(parts.of("feed-forward")) == 2
    assert len({part.path for part in parts.of("head")}) == layers
    assert len(parts.of("token embedding")) == 1
    assert not parts.of("other")


OURS: dict[str, dict[str, Any]] = {
    "pre-norm": {"position": Rotary(4), "gated": True, "activation": "silu", "bias": False, "norm": RMSNorm},
    "post-norm": {"order": "post", "position": Sinusoidal(12), "qkv_bias": True},
    "learned positions": {"position": Learned(16, 12), "tied": False, "sinks": True},
    "biases of positions": {
        "position": ALiBi(slopes=[0.5, 0.25, 0.125]),
        "softcap": 2.0,
        "kv_heads": 1,
        "token_scale": 1.0,
    },
    "a table": {"position": RelativeTable(3, 4, 4), "order": "post", "norm": RMSNorm, "scale": 0.3},
}


@pytest.mark.parametrize("name", OURS)
def test_models_of_regard(name: str) -> None:
    torch.manual_seed(0)
    model = perturb(Decoder(12, 3, 2, vocab=V, hidden=20, **OURS[name])).eval()
    ids = token_ids(7)
    parts = logit_attribution(model, ids, 5)
    check(parts)
    with torch.no_grad():
        assert parts.logit == pytest.approx(float(model(ids)[0, -1, 5]), abs=1e-4)
    assert [part.path for part in parts.of("feed-forward")] == ["blocks.0.feedforward", "blocks.1.feedforward"]
    assert len(parts.of("head")) == 6
    has_positions = name in ("post-norm", "learned positions")
    assert len(parts.of("position embedding")) == has_positions


def test_an_encoder_has_no_direct_path() -> None:
    torch.manual_seed(0)
    model = perturb(EncoderDecoder(12, heads=3, layers=2, vocab=V)).eval()
    parts = logit_attribution(model, lambda: model(token_ids(7), token_ids(5, seed=2)), 3)
    check(parts)
    assert {part.path.split(".")[0] for part in parts.of("head")} == {"decoder"}
    with pytest.raises(RegardError, match="direct path"):
        parts.by_source("encoder.blocks.0.attention", 0)


@pytest.mark.parametrize("kind", ["by hand", "function", "layer"])
def test_models_in_plain_torch(kind: str) -> None:
    torch.manual_seed(0)
    model = OwnModel(kind).eval()
    parts = logit_attribution(model, token_ids(7), 5)
    check(parts)
    assert len(parts.of("head")) == 6 and len(parts.of("position embedding")) == 1
    assert sorted(part.path for part in parts.of("feed-forward")) == ["blocks.0.down", "blocks.1.down"]


class Mixer(nn.Module):
    """A block without attention: a convolution over the last tokens, with a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.ModuleDict({"in": nn.Linear(12, 24), "out": nn.Linear(12, 12)})
        self.weight = nn.Parameter(torch.randn(12, 1, 3))

    def forward(self, x: Tensor) -> Tensor:
        y, gate = self.conv["in"](x).chunk(2, dim=-1)
        y = F.conv1d(F.pad(y.mT, (2, 0)), self.weight, groups=12).mT
        return x + self.conv["out"](y * F.silu(gate))


def test_layers_of_hybrid_models_are_parts_as_a_whole() -> None:
    torch.manual_seed(0)
    model = OwnModel("function").eval()
    model.blocks.insert(1, Mixer())
    parts = logit_attribution(model, token_ids(7), 5)
    check(parts)
    assert [part.path for part in parts.of("other")] == ["blocks.1.conv"]
    assert len(parts.of("feed-forward")) == 2 and len(parts.of("head")) == 6


# --- the parts are right ----------------------------------------------------------------------------------------------


class Norms:
    """Notes the scale of every norm in one row, and applies the norm as a linear function with this scale."""

    def __init__(self, model: nn.Module, row: int) -> None:
        self.scales: list[tuple[nn.Module, float]] = []
        for module in model.modules():
            if isinstance(module, nn.LayerNorm | LayerNorm):
                module.register_forward_hook(lambda norm, args, out: self._note(norm, args[0], row))

    def _note(self, norm: Any, x: Tensor, row: int) -> None:
        # Only the first run is noted.
        if any(norm is other for other, _ in self.scales):
            return
        centred = x[0, row].double() - x[0, row].double().mean()
        self.scales.append((norm, float((centred.square().mean() + norm.eps).rsqrt())))

    def apply(self, x: Tensor, first: int) -> Tensor:
        """All norms from number ``first`` on, without their biases, for a stream that passes through each of them."""
        for norm, scale in self.scales[first:]:
            x = norm.weight.detach().double() * (x - x.mean()) * scale
        return x


def head_outputs(model: nn.Module, ids: Tensor, path: str, head: int, row: int) -> Tensor:
    """What a head adds to the stream: the layer's output minus its output without the head."""
    outputs = []
    hook = model.get_submodule(path).register_forward_hook(lambda module, args, out: outputs.append(out))
    with torch.no_grad():
        model(ids)
        with ablate(model, [(path, head)]):
            model(ids)
    hook.remove()
    first, second = (x[0] if isinstance(x, tuple) else x for x in outputs)
    return (first - second)[0, row].double()


def test_a_part_of_a_pre_norm_model_is_what_the_last_norm_and_the_logits_make_of_it() -> None:
    model = make("GPT2LMHeadModel", GPT2)
    ids = token_ids(7)
    parts = logit_attribution(model, ids, (5, 11), position=3)
    norms = Norms(model, 3)
    with torch.no_grad():
        model(ids)
    direction = (model.lm_head.weight[5] - model.lm_head.weight[11]).detach().double()
    values = {(part.path, part.head): part.value for part in parts.parts}
    for layer in range(2):
        for head in range(3):
            path = f"transformer.h.{layer}.attn"
            expected = direction @ norms.apply(head_outputs(model, ids, path, head, 3), first=4)
            assert values[path, head] == pytest.approx(float(expected), abs=1e-4)
    bias = model.transformer.h[1].mlp.c_proj.bias.detach().double()
    assert values["transformer.h.1.mlp.c_proj.bias", None] == pytest.approx(
        float(direction @ norms.apply(bias, first=4)), abs=1e-4
    )
    token = model.transformer.wte.weight[ids[0, 3]].detach().double()
    assert values["transformer.wte", None] == pytest.approx(float(direction @ norms.apply(token, first=4)), abs=1e-4)


def test_a_part_of_a_post_norm_model_passes_through_all_later_norms() -> None:
    torch.manual_seed(0)
    model = perturb(Decoder(12, 3, 2, vocab=V, hidden=20, order="post", token_scale=1.0)).eval()
    ids = token_ids(7)
    parts = logit_attribution(model, ids, 5)
    norms = Norms(model, -1)
    with torch.no_grad():
        model(ids)
    direction = model.tokens.embedding.weight[5].detach().double()
    values = {(part.path, part.head): part.value for part in parts.parts}
    for layer in range(2):
        path = f"blocks.{layer}.attention"
        added = head_outputs(model, ids, path, 1, -1)
        assert values[path, 1] == pytest.approx(float(direction @ norms.apply(added, first=2 * layer)), abs=1e-4)
    token = model.tokens.embedding.weight[ids[0, -1]].detach().double()
    assert values["tokens.embedding", None] == pytest.approx(float(direction @ norms.apply(token, first=0)), abs=1e-4)


def test_tokens_behind_a_head_are_its_weights_times_its_values() -> None:
    model, ids = family("llama")
    parts = logit_attribution(model, ids, 5, position=4)
    with torch.no_grad(), regard.watch(model, regard.Observe(keep=True)) as recording:
        model(ids)
    shares = parts.by_source(1, 2)
    weights = recording[1].weights(2, 4)[0]
    assert shares.shape == (7,) and not shares[5:].any()  # later tokens are not seen
    reading = parts.readings["model.layers.1.self_attn"]
    assert reading is not None
    expected = weights.double() * (reading.v[0].double() @ reading.direction[2].double())
    torch.testing.assert_close(shares, expected, rtol=1e-4, atol=1e-6)


def test_in_a_trained_model_the_induction_heads_predict_the_repeated_token() -> None:
    model = regard.models.load(regard.models.bundled())
    ids = torch.tensor(model.tokenizer.encode("import os; import o"))
    target = model.tokenizer.encode("s")[-1]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    parts = logit_attribution(model, ids, target)
    check(parts)  # the model is computed in float32
    best = max(parts.of("head"), key=lambda part: part.value)
    assert best.path == "decoder.blocks.2.attention"
    # It reads the token after the first occurrence of the last token.
    first = ids.tolist()[:-1].index(int(ids[-1]))
    assert best.head is not None and int(parts.by_source(best.path, best.head).argmax()) == first + 1


def test_a_difference_is_the_difference_of_the_parts() -> None:
    model, ids = family("gpt_neox")
    one, other, both = (logit_attribution(model, ids, target) for target in (5, 11, (5, 11)))
    for a, b, c in zip(one.parts, other.parts, both.parts, strict=True):
        assert (a.path, a.head) == (b.path, b.head) == (c.path, c.head)
        assert c.value == pytest.approx(a.value - b.value, abs=1e-4)


# --- nothing is changed -----------------------------------------------------------------------------------------------


def test_the_model_stays_as_it_was() -> None:
    model = Decoder(12, 3, 2, vocab=V).to(torch.bfloat16).train()
    model.tokens.embedding.weight.requires_grad_(False)
    before = {name: (p.dtype, p.requires_grad, p.data_ptr()) for name, p in model.named_parameters()}
    with torch.no_grad():
        logit_attribution(model, token_ids(5), 3)
    with torch.inference_mode():
        logit_attribution(model, token_ids(5), 3)
    with pytest.raises(RegardError):
        logit_attribution(model, lambda: model(token_ids(5)[:, :0]), 3)
    assert before == {name: (p.dtype, p.requires_grad, p.data_ptr()) for name, p in model.named_parameters()}
    assert model.training and all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NONLINEAR)
def test_nonlinear_prediction_heads_are_named(name: str) -> None:
    model, ids = family(name)
    with pytest.raises(RegardError, match=r"gelu in (cls\.predictions\.transform|lm_head)"):
        logit_attribution(model, ids, 5)


def test_models_without_logits_are_refused() -> None:
    with pytest.raises(RegardError, match="GPT2Model must return logits"):
        logit_attribution(make("GPT2Model", GPT2), token_ids(5), 5)
    with pytest.raises(RegardError, match="vectors"):
        logit_attribution(Encoder(12, 3, 2, vocab=V), token_ids(5), 5)
    with pytest.raises(RegardError, match="attention"):
        logit_attribution(nn.Sequential(nn.Embedding(V, 4), nn.Linear(4, V)), token_ids(5), 5)


class OtherGradient(torch.autograd.Function):
    """Doubles what it is given, without telling the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x: x + F.gelu(x), "the model itself"),
        (lambda x: torch.tanh(x), "tanh in the model itself"),
        (lambda x: OtherGradient.apply(x) + x, "was not seen"),
        (lambda x: x * x, "mul"),
    ],
    ids=["adds gelu", "tanh", "a wrong gradient", "a square"],
)
def test_what_does_not_sum_is_refused(change: Any, reason: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(RegardError, match=reason):
        logit_attribution(OwnModel("function", change).eval(), token_ids(5), 5)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: torch.addcmul(x, x, torch.full((12,), 0.5)) - 0.25,
        lambda x: x.clone().mul_(2.0).clamp(-1e9, 1e9),
        lambda x: F.normalize(x, dim=-1) + F.rms_norm(x, (12,)),
        lambda x: torch.cat([x[..., :5], x[..., 5:].flip(-1)], -1).roll(1, -1),
        lambda x: torch.zeros_like(x).index_add_(1, torch.arange(x.shape[1]), x),
        lambda x: x / x.norm(dim=-1, keepdim=True),
    ],
    ids=["addcmul", "in place", "norms", "layouts", "index_add", "a norm by hand"],
)
def test_what_is_linear_with_frozen_norms_sums(change: Any) -> None:
    torch.manual_seed(0)
    check(logit_attribution(OwnModel("function", change).eval(), token_ids(5), 5))


def test_wrong_arguments() -> None:
    model = Decoder(12, 3, 2, vocab=V)
    for inputs in (token_ids(5).expand(2, 5), torch.randn(1, 5), "text"):
        with pytest.raises(RegardTypeError, match="inputs"):
            logit_attribution(model, inputs, 5)
    for target in (V, (1, 2, 3), (1, V)):
        with pytest.raises(RegardError, match="target"):
            logit_attribution(model, token_ids(5), target)
    with pytest.raises(RegardError, match="position"):
        logit_attribution(model, token_ids(5), 5, position=5)
    with pytest.raises(RegardError, match="2 times"):
        logit_attribution(model, lambda: (model(token_ids(5)), model(token_ids(5)))[1], 5)
    parts = logit_attribution(model, token_ids(5), 5)
    for layer, head in ((9, 0), ("blocks.9", 0), (0, 3)):
        with pytest.raises(RegardError, match=r"layer|head"):
            parts.by_source(layer, head)
    with pytest.raises(RegardError, match="kind"):
        parts.of("heads")


# --- tables -----------------------------------------------------------------------------------------------------------


def test_tables_csv_and_figure(tmp_path: Any) -> None:
    model, ids = family("gpt2")
    parts = logit_attribution(model, ids, (5, 11))
    sizes = [abs(part.value) for part in parts.top(4)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == parts.largest()
    assert parts.table(3).row_count == 4 and parts.table(None).row_count == len(parts.parts)
    file = tmp_path / "parts.csv"
    rows = list(csv.DictReader(io.StringIO(parts.to_csv(file))))
    assert file.read_text(encoding="utf-8") == parts.to_csv() and len(rows) == len(parts.parts)
    assert math.fsum(float(row["value"]) for row in rows) == pytest.approx(parts.sum())
    assert math.fsum(map(parts.total, {part.kind for part in parts.parts})) == pytest.approx(parts.sum())
    pytest.importorskip("matplotlib")
    figure = regard.interp.figures.logit_parts(parts, 4, style=regard.plots.FigureStyle(width="column"))
    widths = [bar.get_width() for bar in figure.axes[0].patches]
    assert len(widths) == 5 and math.fsum(widths) == pytest.approx(parts.sum())
    with pytest.raises(RegardError, match="bars"):
        regard.plots.bars(["a"], [1.0, 2.0])


def test_names_of_functions() -> None:
    assert function_name(Tensor.__radd__) == "radd" and function_name(F.linear) == "linear"
    assert is_in_place(Tensor.add_, {}) and is_in_place(Tensor.__setitem__, {}) and is_in_place(Tensor.__iadd__, {})
    assert not is_in_place(Tensor.__add__, {}) and is_in_place(torch.add, {"out": torch.zeros(1)})
