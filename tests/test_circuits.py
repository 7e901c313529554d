"""Circuits from weights: exact against D × D and V × V matrices, every layout of weights, refusals, a trained model."""

from __future__ import annotations

import copy
import csv
import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from support import circuits_by_definition as definition
from torch import Tensor, nn

import regard
from regard.interp import Circuits, atlas, circuits
from regard.interp._circuits_rotation import Rotation, apply, find_rotation
from regard.interp._head_atlas import untrained_copy
from regard.models import bundled, load
from regard.positions import Rotary

WINDOW = 7
MODELS = [
    {"layernorm": False, "tied": True, "position": "rotary"},
    {"layernorm": True, "tied": False, "position": "learned", "kv_heads": 4},
    {"layernorm": True, "tied": True, "position": "none", "kv_heads": 1},
]


@pytest.fixture(params=MODELS, ids=["rotary", "learned", "plain"], scope="module")
def small(request: pytest.FixtureRequest) -> tuple[Any, Circuits, definition.PlainDecoder]:
    model = definition.decoder(**request.param)
    with torch.no_grad():
        return model, circuits(model, window=WINDOW), definition.plain(model, WINDOW)


@pytest.fixture(scope="module")
def trained() -> Circuits:
    return circuits(load(bundled()))


# --- exactness -------------------------------------------------------------------------------------------------------


def test_the_matrices_are_those_of_the_layers(small: Any) -> None:
    model, found, _ = small
    x = torch.randn(1, 5, 10, dtype=torch.float64)
    for layer, head, weights in definition.heads_of(found, model):
        block = model.blocks[layer]
        attention = block.attention
        read = x
        if isinstance(block.attention_norm, regard.nn.LayerNorm):
            read = read - read.mean(-1, keepdim=True)
        u = read / (read.square().mean(-1, keepdim=True) + block.attention_norm.eps).sqrt()
        group = head * attention.kv_heads // attention.heads
        normed = block.attention_norm(x)
        q = attention.q_proj(normed)[..., 6 * head : 6 * head + 6]
        k = attention.k_proj(normed)[..., 6 * group : 6 * group + 6]
        v = attention.v_proj(normed)[..., 6 * group : 6 * group + 6]
        torch.testing.assert_close(u @ weights.query + weights.query_bias, q)
        torch.testing.assert_close(u @ weights.key + weights.key_bias, k)
        torch.testing.assert_close(u @ weights.value + weights.value_bias, v)
        torch.testing.assert_close(weights.out, attention.out_proj.weight[:, 6 * head : 6 * head + 6].T)


def test_eigenvalues_are_those_of_the_circuit_from_token_to_token(small: Any) -> None:
    model, found, tokens = small
    for layer, head, weights in definition.heads_of(found, model):
        circuit_VV = tokens.tokens @ weights.value @ weights.out @ tokens.unembedding.T / 13
        expected = torch.linalg.eigvals(circuit_VV.detach())
        expected = expected[expected.abs().argsort(descending=True)]
        eigenvalues = found.eigenvalues(layer, head)
        assert len(eigenvalues) == 6
        assert float(expected[6:].abs().max()) < 1e-8
        for value in eigenvalues:
            assert float((expected - value).abs().min()) < 1e-9
        copying = expected.real.sum() / expected.abs().sum()
        assert found.heads[4 * layer + head]["copying"] == pytest.approx(float(copying), abs=1e-6)


def test_scores_of_heads_are_those_of_all_tokens_and_offsets(small: Any) -> None:
    model, found, tokens = small
    rows = found.heads
    for layer, head, weights in definition.heads_of(found, model):
        row = rows[4 * layer + head]
        assert row["duplicate"] == pytest.approx(definition.duplicate(tokens, weights, WINDOW), abs=1e-9)
        assert row["previous"] == pytest.approx(definition.previous(tokens, weights, WINDOW), abs=1e-9)


def test_scores_of_pairs_are_those_of_large_matrices(small: Any) -> None:
    model, found, tokens = small
    heads = definition.heads_of(found, model)
    for kind in ("q", "k", "v"):
        edges = {(edge.earlier, edge.later): edge for edge in found.composition(kind)}
        assert len(edges) == 16 and all(edge.baseline == pytest.approx(10**-0.5) for edge in edges.values())
        for _, g, earlier in heads[:4]:
            for _, h, later in heads[4:]:
                expected = definition.composition(tokens, earlier, later, kind, WINDOW)
                edge = edges[f"0.{g}", f"1.{h}"]
                assert edge.value**2 == pytest.approx(float(expected), rel=1e-9)
                assert edge.excess == edge.value - edge.baseline and edge.ends == (0, g, 1, h)
    pairs = {(pair.earlier, pair.later): pair for pair in found.induction()}
    for _, g, earlier in heads[:4]:
        for _, h, later in heads[4:]:
            pair = pairs[f"0.{g}", f"1.{h}"]
            assert pair.match == pytest.approx(definition.match(tokens, earlier, later, WINDOW), abs=1e-9)
            assert pair.score == pytest.approx(max(pair.previous, 0) * max(pair.match, 0))


def test_the_baseline_is_that_of_random_rotations() -> None:
    """The mean of value² is 1/D and its deviation is the one that z divides by."""
    generator = torch.Generator().manual_seed(0)
    D, samples = 9, 4000
    written = torch.randn(D, 2, generator=generator).double() @ torch.randn(2, D, generator=generator).double()
    read = torch.randn(D, 3, generator=generator).double() @ torch.randn(3, D, generator=generator).double()
    turns = torch.linalg.qr(torch.randn(samples, D, D, generator=generator, dtype=torch.float64))[0]
    signs = torch.randn(samples, 1, D, generator=generator).sign().double()
    products = written @ (turns * signs) @ read
    squares = products.square().sum((1, 2)) / (written.square().sum() * read.square().sum())

    from regard.interp._circuits_scores import Ends, composition_scores

    def ends(matrix: Tensor) -> Ends:
        return Ends(writes=matrix.unsqueeze(0), reads={"k": matrix.T.unsqueeze(0)})

    value, z = composition_scores(ends(written), ends(read), "k")
    deviation = (float(value) ** 2 - 1 / D) / float(z)
    standard_error = float(squares.std()) / samples**0.5
    assert abs(float(squares.mean()) - 1 / D) < 4 * standard_error
    assert deviation == pytest.approx(float(squares.std()), rel=0.1)


def test_rotations_are_those_of_the_positions() -> None:
    for rotary in (Rotary(8), Rotary(8, layout="pairs", rotate=4), Rotary(6, base=50.0)):
        x = torch.randn(3, 2, 17, rotary.d, dtype=torch.float64)
        found = find_rotation([x], [rotary(x)], 1e-9)
        assert found is not None
        torch.testing.assert_close(apply(found, x), rotary(x))
        torch.testing.assert_close(found.matrix(5) @ x[0, 0, 0], rotary(x[:1, :, :1], start=5)[0, 0, 0])
        offsets = torch.arange(4)
        moments = x[0].mT @ x[0]
        matrices = [found.matrix(p) for p in range(4)]
        expected = torch.stack([R @ moments @ R.T for R in matrices]).mean(0)
        torch.testing.assert_close(found.mean_turned(moments, offsets), expected)
        expected = torch.stack([R.T @ moments @ R for R in matrices]).mean(0)
        torch.testing.assert_close(found.mean_turned(moments, offsets, inverse=True), expected)
        torch.testing.assert_close(found.mean_matrix(offsets), torch.stack(matrices).mean(0))
    assert find_rotation([x], [x.square()], 1e-6) is None
    assert isinstance(found, Rotation)


def test_a_bias_of_offsets_counts_for_the_previous_score() -> None:
    torch.manual_seed(0)
    rows = []
    for weight in (0.0, 30.0):
        bias = regard.positions.RelativeTable(2, 4)
        with torch.no_grad():
            bias.weight.zero_()
            bias.weight[0, 3] = weight  # of the offset −1
        model = regard.nn.Decoder(6, heads=2, layers=1, vocab=11, position=bias)
        rows.append(circuits(model, window=8).heads)
    assert abs(rows[0][0]["previous"]) < 1e-3
    assert rows[1][0]["previous"] > 1 > abs(rows[1][1]["previous"])


# --- layouts ---------------------------------------------------------------------------------------------------------

SIZES = {"vocab_size": 37, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 20}


def pretrained(name: str, **config: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model_class = getattr(transformers, name)
    model = model_class(model_class.config_class(**{**SIZES, **config})).eval()
    for module in model.modules():  # with the usual small weights all attention is uniform
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name.lower() or "ln_" in parameter_name:
            nn.init.normal_(parameter, 1.0 if parameter_name.endswith("weight") else 0.0, 0.2)
    return model


LAYOUTS = {
    "LlamaForCausalLM": {"num_key_value_heads": 2},
    "GPT2LMHeadModel": {"n_embd": 16, "n_head": 4, "n_layer": 2, "n_positions": 32},
    "GPTNeoXForCausalLM": {"rotary_pct": 0.5},
    "BloomForCausalLM": {"n_head": 4, "n_layer": 2},
    "FalconForCausalLM": {"new_decoder_architecture": True, "num_kv_heads": 2, "num_attention_heads": 4},
    "Phi3ForCausalLM": {"num_key_value_heads": 2, "pad_token_id": 0, "max_position_embeddings": 64},
    "BertForMaskedLM": {},
    "OPTForCausalLM": {"ffn_dim": 20, "word_embed_proj_dim": 16, "max_position_embeddings": 40},
    "T5ForConditionalGeneration": {
        "d_model": 16,
        "num_heads": 4,
        "d_kv": 4,
        "d_ff": 20,
        "num_layers": 2,
        "decoder_start_token_id": 0,
    },
    "Qwen3ForCausalLM": {"num_key_value_heads": 2, "head_dim": 6},
    "Gemma2ForCausalLM": {"num_key_value_heads": 2, "head_dim": 4},
}


def expected_weight(name: str, model: Any, part: str, head: int) -> Tensor | None:
    """W_Q, W_K or W_V ``[D, d]`` of one head of the last layer, cut from the fused parameters; None: not compared."""
    index = "qkv".index(part)
    if name == "LlamaForCausalLM":
        layer = model.model.layers[1].self_attn
        head = head if part == "q" else head // 2
        return getattr(layer, f"{part}_proj").weight[4 * head : 4 * head + 4].T
    if name == "GPT2LMHeadModel":
        return model.transformer.h[1].attn.c_attn.weight[:, 16 * index + 4 * head : 16 * index + 4 * head + 4]
    if name == "GPTNeoXForCausalLM":
        weight = model.gpt_neox.layers[1].attention.query_key_value.weight
        return weight.view(4, 3, 4, 16)[head, index].T
    if name == "BloomForCausalLM":
        weight = model.transformer.h[1].self_attention.query_key_value.weight
        return weight.view(4, 3, 4, 16)[head, index].T
    if name == "FalconForCausalLM":
        weight = model.transformer.h[1].self_attention.query_key_value.weight.view(2, 4, 4, 16)
        place = head % 2 if part == "q" else 1 + index
        return weight[head // 2, place].T
    if name == "Phi3ForCausalLM":
        weight = model.model.layers[1].self_attn.qkv_proj.weight
        if part == "q":
            return weight[4 * head : 4 * head + 4].T
        start = 16 + 8 * (index - 1) + 4 * (head // 2)
        return weight[start : start + 4].T
    if name == "BertForMaskedLM":
        layer = model.bert.encoder.layer[1].attention.self
        return getattr(layer, {"q": "query", "k": "key", "v": "value"}[part]).weight[4 * head : 4 * head + 4].T
    if name == "OPTForCausalLM":
        layer = model.model.decoder.layers[1].self_attn
        scale = 4**-0.5 if part == "q" else 1.0  # the model multiplies its queries itself
        return scale * getattr(layer, f"{part}_proj").weight[4 * head : 4 * head + 4].T
    if name == "T5ForConditionalGeneration":
        layer = model.decoder.block[1].layer[1].EncDecAttention
        return getattr(layer, part).weight[4 * head : 4 * head + 4].T
    return None


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_of_weights_is_found(name: str) -> None:
    """Extraction compares q, k, v and outputs of a run with the found matrices; here they are compared by name."""
    model = pretrained(name, **LAYOUTS[name])
    found = circuits(model, window=8)
    last = found._layers[-1].layer
    for head in range(4):
        for part in "qkv":
            expected = expected_weight(name, model, part, head)
            projection = getattr(last, part)
            index = head if part == "q" else last.key_head(head)
            if expected is not None:
                torch.testing.assert_close(projection.plain[index], expected.detach())
            # Every one of these layers has a norm before it.
            assert projection.kind == ("rms" if name[:2] in ("Ll", "Ph", "T5", "Qw", "Ge") else "layer")
    has_logits = name != "BertForMaskedLM"  # its head is not linear
    assert (found.heads[-1]["copying"] is not None) == has_logits
    assert found.composition("v") and bool(found.notes) == (name[:2] in ("Qw", "Ge", "Be"))
    if name.startswith("T5"):
        stacks = {(edge.earlier.split(".")[0], edge.later.split(".")[0]) for edge in found.composition("k")}
        # Layers 0 and 1 encode, 2 and 4 are self-attention and 3 and 5 cross-attention of the decoder.
        assert stacks == {("0", "1"), ("0", "3"), ("1", "3"), ("0", "5"), ("1", "5"), ("2", "4"), ("3", "4")}
        assert found.heads[-1]["previous"] is None and found.heads[0]["previous"] is not None


def test_layers_of_torch_and_single_layers() -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(12, 3, batch_first=False)
    found = circuits(layer)
    torch.testing.assert_close(found.weights(0, 1).query, layer.in_proj_weight[4:8].T.detach())
    torch.testing.assert_close(found.weights(0, 1).out, layer.out_proj.weight[:, 4:8].T.detach())
    assert found.heads[0]["copying"] is None and "no token vectors" in found.notes[0]
    with pytest.raises(ValueError, match="no eigenvalues"):
        found.eigenvalues(0, 0)

    stack = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(12, 3, 20, batch_first=True), 2, enable_nested_tensor=False
    )
    found = circuits(stack, torch.randn(5, 9, 12))
    assert len(found.composition("q")) == 9 and found.induction() == []
    # A post-norm layer reads what the norm of the layer before has made; the first one reads its input.
    assert [factors.layer.q.kind for factors in found._layers] == [None, "layer"]

    ours = regard.nn.EncoderDecoder(12, heads=3, layers=1, vocab=11)
    assert [path.split(".")[0] for path in circuits(ours).paths] == ["encoder", "decoder", "decoder"]


class Wrapped(nn.Module):
    """A linear layer whose matrix is no tensor of its own, as adapters and quantised layers have it."""

    def __init__(self, base: nn.Linear, change: float = 0.0) -> None:
        super().__init__()
        self.base = base
        self.change = change
        self.in_features = base.in_features
        self.out_features = base.out_features

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        return y + self.change * y.square()


def test_wrapped_layers_are_asked_for_their_matrix() -> None:
    model = pretrained("LlamaForCausalLM", num_key_value_heads=2)
    plain = circuits(model, window=8)
    layer = model.model.layers[1].self_attn
    layer.q_proj = Wrapped(layer.q_proj)
    layer.o_proj = Wrapped(layer.o_proj)
    wrapped = circuits(model, window=8)
    for head in range(4):
        torch.testing.assert_close(wrapped.weights(1, head).query, plain.weights(1, head).query)
        torch.testing.assert_close(wrapped.weights(1, head).out, plain.weights(1, head).out)


# --- refusals --------------------------------------------------------------------------------------------------------


def test_layers_that_cannot_be_verified_are_named() -> None:
    model = pretrained("LlamaForCausalLM", num_key_value_heads=2)
    for part, place in (("v_proj", "values|not the linear map"), ("o_proj", "o_proj is not the linear map")):
        changed = copy.deepcopy(model)
        layer = changed.model.layers[1].self_attn
        setattr(layer, part, Wrapped(getattr(layer, part), change=0.5))
        with pytest.raises(ValueError, match=rf"layers\.1\.self_attn.*({place})"):
            circuits(changed, window=8)

    class Bent(nn.Module):
        """Queries that are no linear map."""

        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in (self.q(x).tanh(), self.k(x), self.v(x)))
            out = nn.functional.scaled_dot_product_attention(q, k, v)
            y: Tensor = self.o(out.transpose(1, 2).flatten(2))
            return y

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Bent()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.attention(x)
            return y

    with pytest.raises(ValueError, match="attention are unknown: no linear layer gives its queries"):
        circuits(Holder(), torch.randn(3, 5, 8))
    with pytest.raises(ValueError, match="Linear called no attention"):
        circuits(nn.Linear(3, 3), torch.randn(2, 3))
    with pytest.raises(ValueError, match="inputs="):
        circuits(nn.Linear(3, 3))

    class TwoInputs(nn.Module):
        """Reads more than random inputs."""

        def __init__(self) -> None:
            super().__init__()
            self.stack = regard.nn.Encoder(6, heads=2, layers=1, vocab=11)

        def forward(self, ids: Tensor, more: Tensor) -> Tensor:
            y: Tensor = self.stack(ids) + more
            return y

    two = TwoInputs()
    with pytest.raises(ValueError, match=r"TwoInputs does not run on random inputs.*inputs="):
        circuits(two)
    ids = torch.randint(0, 11, (3, 5))
    assert circuits(two, lambda: two(ids, torch.zeros(6))).heads[1]["duplicate"] is not None


def test_arguments_are_checked(trained: Circuits) -> None:
    model = definition.decoder(**MODELS[0])
    for arguments, name in (({"window": 2}, "window"), ({"tokens": 1}, "tokens"), ({"means": "x"}, "means")):
        with pytest.raises(ValueError, match=name):
            circuits(model, **arguments)
    with pytest.raises(ValueError, match="inputs"):
        circuits(model, "a text")
    with pytest.raises(ValueError, match="inputs must hold at least 2 texts"):
        circuits(model, torch.tensor([[1, 2, 3]]))
    for call, name in (
        (lambda: trained.composition("x"), "kind"),
        (lambda: trained.top("entropy"), "column"),
        (lambda: trained.weights(3, 0), "layer"),
        (lambda: trained.weights("blocks.9", 0), "layer"),
        (lambda: trained.weights(0, 4), "head"),
    ):
        with pytest.raises(ValueError, match=name):
            call()


# --- a trained model -------------------------------------------------------------------------------------------------


def test_the_bundled_model_shows_its_induction_circuit(trained: Circuits) -> None:
    """The strongest K-compositions lead from the previous-token head to the induction heads; random ones are weak."""
    head_atlas = atlas(load(bundled()))
    (path, head), *_ = head_atlas.top("previous", 1)
    source = f"{trained.paths.index(path)}.{head}"
    targets = {f"{trained.paths.index(path)}.{head}" for path, head in head_atlas.top("induction", 2)}
    edges = trained.composition("k")
    assert source == "1.0" and targets == {"2.2", "2.3"}
    assert {(edge.earlier, edge.later) for edge in edges[:2]} == {(source, target) for target in targets}
    assert {(pair.earlier, pair.later) for pair in trained.induction(2)} == {(source, target) for target in targets}
    assert all(edge.z > 20 and edge.value > 2 * edge.baseline for edge in edges[:2])
    rows = {f"{row['layer']}.{row['head']}": row for row in trained.heads}
    assert all(rows[target]["copying"] > 0.5 and rows[target]["source"] == source for target in targets)
    assert max(rows, key=lambda name: rows[name]["previous"] if name[0] == "1" else -math.inf) == source

    control = circuits(untrained_copy(load(bundled())))
    strongest = control.composition("k")
    assert max(edge.z for edge in strongest) < 5  # of 48 pairs
    assert control.induction(1)[0].score < 0.05 < trained.induction(1)[0].score
    assert all(abs(row["copying"]) < 0.5 for row in control.heads)


def test_means_of_random_tokens_agree_on_the_trained_model() -> None:
    found = circuits(load(bundled()), means="random tokens")
    assert {pair.later for pair in found.induction(2)} == {"2.2", "2.3"}
    assert found.induction(1, copying=True)[0].score < found.induction(1)[0].score
    # Position tables give one mean vector per position.
    learned = definition.decoder(**MODELS[1])
    assert all(math.isfinite(row["previous"]) for row in circuits(learned, window=WINDOW, means="random tokens").heads)


def test_a_sample_of_tokens_is_enough_for_the_trained_model() -> None:
    found = circuits(load(bundled()), tokens=256)
    assert {(pair.earlier, pair.later) for pair in found.induction(2)} == {("1.0", "2.2"), ("1.0", "2.3")}


def test_tables_and_figures(trained: Circuits, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = list(csv.DictReader(io.StringIO(trained.to_csv(tmp_path / "heads.csv"))))
    assert len(rows) == 12 and (tmp_path / "heads.csv").exists() and rows[10]["source"] == "1.0"
    console = Console(width=100, file=io.StringIO())
    console.print(trained.table("induction", 3))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "12 heads of TextDecoder" in printed and printed.index("2.2") < printed.index("2.3")

    text = trained.graph(4, kinds=("q", "k", "v"), file=tmp_path / "graph.svg")
    assert text == (tmp_path / "graph.svg").read_text()
    for label in ("K-composition", "1.0", "2.2", "2.3", "layer", "head"):
        assert f">{label}</text>" in text
    svg = trained._repr_svg_()
    assert svg is not None and ">2.2</text>" in svg
    # Many heads: names that would overlap are left out in a fixed width.
    edges = {"K": [(0, 3, 39, 7, 1.0), (4, 0, 5, 0, 0.5), (4, 0, 7, 0, 0.1)]}
    wide = regard.plots.graph([8] * 40, edges)
    assert {"0.3", "39.7"} <= {label.get_text() for label in wide.axes[0].texts}
    narrow = regard.plots.graph([8] * 40, edges, style=regard.plots.FigureStyle(width="column"))
    assert [label.get_text() for label in narrow.axes[0].texts] == ["K"]
    for columns, edges, name in (
        ([], {}, "columns"),
        ([2, 2], {"K": [(1, 0, 0, 0, 1.0)]}, "edges"),
        ([2, 2], {"K": [(0, 0, 1, 2, 1.0)]}, "edges"),
        ([2, 2], {"K": [(0, 0, 1, 0, 1.5)]}, "strengths"),
    ):
        with pytest.raises(ValueError, match=name):
            regard.plots.graph(columns, edges)
