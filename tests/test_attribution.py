"""``regard.interp.attribute``: against finite differences and dense autograd, for every kind of model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import regard
from regard._hooks import AttentionCall, Observer
from regard._observables import Observation
from regard.interp import Attribution, ablate, attribute, watch
from regard.interp._recomputed_blocks import find_blocks
from regard.interp._register_observers import observing
from regard.nn import Decoder

# Of models of transformers.
SIZES = {
    "vocab_size": 13,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]])


def small_decoder(**options: Any) -> Decoder:
    torch.manual_seed(0)
    return Decoder(12, heads=3, layers=2, vocab=13, **options).double()


class SmallModel(nn.Module):
    """A model of plain PyTorch, with attention of one kind in its blocks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(13, 12)
        if kind == "torch":
            layer = nn.TransformerEncoderLayer(12, 3, 24, batch_first=True)
            self.blocks: nn.Module = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        else:
            self.blocks = nn.Sequential(*[SmallBlock(kind) for _ in range(2)])
        self.head = nn.Linear(12, 13)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(ids)))


class SmallBlock(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.attention = SmallAttention(kind)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return x + self.attention(self.norm(x))


class SmallAttention(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.num_heads = 3
        self.qkv = nn.Linear(12, 36)
        self.out = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        B, n, _ = x.shape
        q, k, v = self.qkv(x).view(B, n, 3, 3, 4).permute(2, 0, 3, 1, 4)
        if self.kind == "sdpa":
            heads = F.scaled_dot_product_attention(q, k, v)
        elif self.kind == "checkpointed":
            heads = torch_checkpoint(F.scaled_dot_product_attention, q, k, v, use_reentrant=False)
        else:
            heads = (q @ k.transpose(-1, -2) / 2).softmax(-1) @ v
        return self.out(heads.transpose(1, 2).reshape(B, n, 12))


class _Scaled(Observer):
    """Multiplies the output of one head."""

    def __init__(self, model: nn.Module, path: str, head: int, factor: float) -> None:
        super().__init__(model)
        self.path = path
        self.head = head
        self.factor = factor

    def after(self, call: AttentionCall, out: Tensor, observation: Observation | None) -> Tensor:
        if call.path != self.path:
            return out
        out = out.clone()
        out[:, self.head] *= self.factor
        return out


def assert_same(a: Attribution, b: Attribution, tolerance: float = 1e-6) -> None:
    assert list(a) == list(b)
    torch.testing.assert_close(a.tokens, b.tokens, atol=tolerance, rtol=tolerance)
    for path in a:
        for name in ("keys", "rows", "map"):
            torch.testing.assert_close(getattr(a[path], name), getattr(b[path], name), atol=tolerance, rtol=tolerance)


def test_a_heads_contribution_is_the_derivative_by_its_scale() -> None:
    model = small_decoder()
    attribution = attribute(model, IDS, (4, 7, 2), map=3)

    def value(path: str, head: int, factor: float) -> float:
        with torch.no_grad(), observing(_Scaled(model, path, head, factor)):
            logits = model(IDS)
        assert isinstance(logits, Tensor)
        return float(logits[0, 4, 7] - logits[0, 4, 2])

    assert attribution.value == pytest.approx(value("", 0, 1.0), abs=1e-9)
    step = 1e-4
    for path, head, contribution in attribution.top(6):
        slope = (value(path, head, 1 + step) - value(path, head, 1 - step)) / (2 * step)
        assert contribution == pytest.approx(slope, abs=1e-6)


def test_all_sums_agree_and_the_future_contributes_nothing() -> None:
    attribution = attribute(small_decoder(), IDS, (4, 7), map=11)
    for layer in attribution.values():
        assert layer.map is not None
        torch.testing.assert_close(layer.keys.sum(-1), layer.heads)
        torch.testing.assert_close(layer.rows.sum(-1), layer.heads)
        # A map with as many cells as tokens has one contribution per cell.
        torch.testing.assert_close(layer.map.sum(2), layer.keys)
        torch.testing.assert_close(layer.map.sum(3), layer.rows)
        assert not layer.map.triu(1).any()
        assert not layer.keys[..., 5:].any()
    assert not attribution.tokens[:, 5:].any()


def test_tokens_are_embedding_times_gradient() -> None:
    model = small_decoder(position=regard.Sinusoidal(12))
    attribution = attribute(model, IDS, lambda logits: logits[0, :, 3].sum())
    assert model.tokens is not None
    embedding = model.tokens(IDS).detach().requires_grad_()
    position = model.position
    assert position is not None
    hidden = model.run_blocks(position(embedding, start=0, position_ids=None), causal=True)[0]
    gradient = torch.autograd.grad(model.tokens.logits(hidden)[0, :, 3].sum(), embedding)[0]
    torch.testing.assert_close(attribution.tokens, (embedding.detach() * gradient).sum(-1))


def test_the_path_from_zero_is_complete() -> None:
    model = small_decoder(position=regard.Learned(20, 12))
    errors = []
    for steps in (4, 40):
        attribution = attribute(model, IDS, (-1, 7), steps=steps)
        assert attribution.baseline is not None
        difference = attribution.value - attribution.baseline
        errors.append(abs(float(attribution.tokens.sum()) - difference) / abs(difference))
    assert errors[1] < 0.01
    assert errors[1] < errors[0]
    logits = model(IDS)
    assert isinstance(logits, Tensor)
    assert attribution.value == pytest.approx(float(logits[0, -1, 7].detach()), abs=1e-9)


@pytest.mark.parametrize("kind", ["torch", "sdpa", "hand"])
def test_models_of_pytorch(kind: str) -> None:
    model = SmallModel(kind)
    stored = attribute(model, IDS, (2, 3), map=3, checkpoint=False)
    recomputed = attribute(model, IDS, (2, 3), map=3)
    assert len(stored) == 2
    assert_same(stored, recomputed)


def test_attention_by_hand_agrees_with_torch() -> None:
    by_hand = SmallModel("hand")
    fused = SmallModel("sdpa")
    fused.load_state_dict(by_hand.state_dict())
    ids = IDS.expand(2, -1)
    assert_same(attribute(by_hand, ids, 5, map=4), attribute(fused, ids, 5, map=4), tolerance=1e-5)


def test_blocks_are_computed_again_in_backward() -> None:
    model = SmallModel("sdpa")
    blocks = [block for block in model.modules() if isinstance(block, SmallBlock)]
    assert find_blocks(model) == blocks
    attribute(model, IDS, 3)
    assert [block.runs for block in blocks] == [2, 2]
    attribute(model, IDS, 3, checkpoint=False)
    assert [block.runs for block in blocks] == [3, 3]
    assert all("forward" not in vars(block) for block in blocks)


@pytest.mark.parametrize("nested", [False, True])
def test_lists_of_blocks_are_found_without_lists_of_other_parts(nested: bool) -> None:
    class WithExperts(SmallBlock):
        def __init__(self) -> None:
            super().__init__("sdpa")
            self.experts = nn.ModuleList([nn.Linear(12, 12) for _ in range(3)])

    blocks = nn.ModuleList([WithExperts() for _ in range(2)])
    model: nn.Module = nn.ModuleList([nn.ModuleList([*blocks])])
    if nested:
        others = nn.ModuleList([WithExperts() for _ in range(2)])
        model = nn.ModuleList([blocks, others])
        assert find_blocks(model) == [*blocks, *others]
    else:
        assert find_blocks(model) == [*blocks]
    assert find_blocks(nn.Linear(3, 3)) == []


class TestTransformers:
    """Models of ``transformers``, with grouped heads, several stacks and images."""

    transformers = pytest.importorskip("transformers")

    def check(self, model: nn.Module, inputs: Any, target: Any, layers: int) -> Attribution:
        stored = attribute(model, inputs, target, map=3, checkpoint=False)
        assert_same(stored, attribute(model, inputs, target, map=3))
        assert len(stored) == layers
        assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
        return stored

    def test_a_decoder_computes_the_logits_of_one_position(self) -> None:
        torch.manual_seed(0)
        config = self.transformers.LlamaConfig(**SIZES, num_key_value_heads=2)
        model = self.transformers.LlamaForCausalLM(config)
        rows = []
        model.lm_head.register_forward_hook(lambda module, args, out: rows.append(out.shape[1]))
        attribution = self.check(model, IDS, (6, 5), 2)
        assert set(rows) == {1}
        assert attribution[0].keys.shape == (1, 4, 11)
        by_function = attribute(model, IDS, lambda out: out.logits[0, 6, 5], map=3)
        assert_same(attribution, by_function, tolerance=1e-5)
        by_run = attribute(model, lambda: model(IDS), (6, 5), map=3)
        assert_same(attribution, by_run, tolerance=1e-5)
        assert model.config.use_cache

    def test_encoders_classifiers_and_images(self) -> None:
        torch.manual_seed(0)
        bert = self.transformers.BertForSequenceClassification(self.transformers.BertConfig(**SIZES))
        self.check(bert, IDS, 1, 2)
        config = {name: size for name, size in SIZES.items() if name != "vocab_size"}
        vit = self.transformers.ViTForImageClassification(
            self.transformers.ViTConfig(**config, image_size=8, patch_size=2)
        )
        pixels = torch.randn(1, 3, 8, 8)
        attribution = self.check(vit, lambda: vit(pixels), 1, 2)
        assert attribution.tokens.shape == (1, 16)

    def test_an_encoder_and_a_decoder(self) -> None:
        torch.manual_seed(0)
        config = self.transformers.T5Config(vocab_size=13, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4)
        model = self.transformers.T5ForConditionalGeneration(config)
        attribution = self.check(model, lambda: model(input_ids=IDS, decoder_input_ids=IDS[:, :5]), 3, 6)
        # The first layer of the decoder depends on no token of the encoder, and is attributed all the same.
        first = attribution["decoder.block.0.layer.0.SelfAttention"]
        assert first.keys.shape == (1, 4, 5)
        assert bool(first.keys.any())


def test_an_ablated_head_contributes_nothing() -> None:
    model = small_decoder()
    with ablate(model, [(1, 2)]):
        attribution = attribute(model, IDS, 3)
    contributions = attribution[1].heads[0]
    assert contributions[2] == 0
    assert bool(contributions[:2].all())


def test_a_watched_model_can_be_attributed() -> None:
    model = small_decoder()
    plain = attribute(model, IDS, 3, map=3)
    with watch(model) as recording:
        watched = attribute(model, IDS, 3, map=3)
    assert_same(plain, watched, tolerance=1e-12)
    # The second run of the blocks, in backward, is not recorded.
    assert recording[0].entropy is not None and recording[0].entropy.shape == (1, 3, 11)


def test_selected_layers() -> None:
    model = small_decoder()
    both = attribute(model, IDS, 3)
    one = attribute(model, IDS, 3, layers="blocks.1.*")
    assert list(one) == ["blocks.1.attention"]
    torch.testing.assert_close(one[0].keys, both[1].keys)
    torch.testing.assert_close(one.tokens, both.tokens)
    with pytest.raises(regard.RegardError, match="layers"):
        attribute(model, IDS, 3, layers="nothing")


def test_a_layer_that_is_called_twice_has_the_sum_of_both() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(13, 12)
            self.block = SmallBlock("sdpa")
            self.head = nn.Linear(12, 13)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.block(self.block(self.embedding(ids))))

    torch.manual_seed(0)
    model = Twice()
    attribution = attribute(model, IDS, 3)
    assert list(attribution) == ["block.attention"]
    torch.testing.assert_close(attribution[0].rows.sum(-1), attribution[0].heads)


def test_modes_and_gradients_are_restored() -> None:
    model = small_decoder().train()
    frozen = model.get_parameter("blocks.0.attention.q_proj.weight").requires_grad_(False)
    model.get_submodule("blocks.1").eval()
    attribute(model, IDS, 3)
    assert not frozen.requires_grad
    assert sum(not parameter.requires_grad for parameter in model.parameters()) == 1
    assert model.training and not model.get_submodule("blocks.1").training
    assert all(parameter.grad is None for parameter in model.parameters())
    with torch.no_grad():
        assert len(attribute(model, IDS, 3)) == 2


def test_several_batch_entries_are_independent() -> None:
    model = small_decoder()
    ids = torch.cat([IDS, IDS.flip(1)])
    both = attribute(model, ids, 3, map=2)
    alone = attribute(model, ids[1:], 3, map=2)
    torch.testing.assert_close(both.tokens[1:], alone.tokens)
    torch.testing.assert_close(both[0].keys[1:], alone[0].keys)
    assert both.value == pytest.approx(attribute(model, IDS, 3).value + alone.value)


def test_tables_and_files(tmp_path: Path) -> None:
    attribution = attribute(small_decoder(), IDS, 3)
    rows = attribution.heads()
    assert len(rows) == 6
    assert all(row["absolute"] >= abs(row["contribution"]) - 1e-12 for row in rows)
    assert attribution.table("absolute", 2).row_count == 2
    assert attribution.to_csv(tmp_path / "heads.csv") == (tmp_path / "heads.csv").read_text()
    top = [abs(contribution) for _, _, contribution in attribution.top(6)]
    assert top == sorted(top, reverse=True)
    assert attribution[1] is attribution["blocks.1.attention"]
    with pytest.raises(KeyError, match="no layer"):
        attribution[2]
    with pytest.raises(regard.RegardError, match="sort"):
        attribution.table("nothing")


def test_wrong_arguments_are_refused_by_name() -> None:
    model = small_decoder()
    refused: list[tuple[str, dict[str, Any]]] = [
        ("inputs", {"inputs": torch.zeros(1, 3)}),
        ("target", {"target": (1, 2, 3, 4)}),
        ("target", {"target": "x"}),
        ("names token 13", {"target": 13}),
        ("target position", {"target": (11, 3)}),
        ("target function", {"target": lambda logits: logits}),
        ("does not depend", {"target": lambda logits: torch.zeros(1)}),
        ("steps", {"steps": 0}),
        ("map", {"map": -1}),
    ]
    for name, changes in refused:
        arguments = {"inputs": IDS, "target": 3} | changes
        with pytest.raises(regard.RegardError, match=name):
            attribute(model, **arguments)
    with pytest.raises(regard.RegardError, match="embedding"):
        attribute(regard.nn.Encoder(6, heads=2, layers=1), lambda: torch.zeros(1), 3)
    no_attention = nn.Sequential(nn.Embedding(13, 12), nn.Linear(12, 13))
    with pytest.raises(regard.RegardError, match="attention"):
        attribute(no_attention, IDS, 3)


def test_checkpointing_of_the_model_itself_is_refused() -> None:
    model = SmallModel("checkpointed")
    with pytest.raises(regard.RegardError, match="checkpointing"):
        attribute(model, IDS, 3, checkpoint=False)


def test_no_value_is_not_finite() -> None:
    attribution = attribute(small_decoder(), IDS, 3, map=5)
    for layer in attribution.values():
        assert layer.map is not None
        assert all(bool(x.isfinite().all()) for x in (layer.keys, layer.rows, layer.map))
    assert math.isfinite(attribution.value)
