"""Path patching equals a computation by hand; attribution patching is a first-order estimate that can fail."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.model_configs import V, ids
from support.observed_models import close
from support.patching import FAMILIES
from torch import Tensor, nn
from torch.nn import functional as F

import regard
from regard import RegardError
from regard.interp import LogitDifference, Site, attribution_patch, patch, patch_sweep, path_patch
from regard.nn import Decoder


def two_layers(layers: int = 2) -> tuple[Any, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Decoder(12, heads=6, kv_heads=2, layers=layers, vocab=V).eval().double()
    for parameter in model.parameters():
        parameter.data *= 1.5
    return model, ids(2, 7), ids(2, 7, seed=9)


class ByHand:
    """The forward pass of a decoder, written out, with values that can be given.

    - ``z``: (layer, head) → the output of a head. ``inputs``: (layer, head, part) → q, k or v of a head.
    - ``feedforward``: layer → the output of the feed-forward network.
    """

    def __init__(
        self,
        model: Any,
        text: Tensor,
        z: dict[tuple[int, int], Tensor] | None = None,
        inputs: dict[tuple[int, int, str], Tensor] | None = None,
        feedforward: dict[int, Tensor] | None = None,
    ) -> None:
        self.z: dict[tuple[int, int], Tensor] = {}
        self.inputs: dict[tuple[int, int, str], Tensor] = {}
        self.feedforward: dict[int, Tensor] = {}
        x = model.tokens(text)
        hidden = torch.ones(text.shape[1], text.shape[1]).triu(1).bool()
        for layer, block in enumerate(model.blocks):
            attention = block.attention
            y = block.attention_norm(x)
            heads = []
            for head in range(6):
                group = head // 3
                parts = {
                    "q": attention.q_proj(y)[..., 2 * head : 2 * head + 2],
                    "k": attention.k_proj(y)[..., 2 * group : 2 * group + 2],
                    "v": attention.v_proj(y)[..., 2 * group : 2 * group + 2],
                }
                for part in parts:
                    parts[part] = (inputs or {}).get((layer, head, part), parts[part])
                    self.inputs[layer, head, part] = parts[part]
                scores = parts["q"] @ parts["k"].transpose(-1, -2) / math.sqrt(2)
                A = scores.masked_fill(hidden, -math.inf).softmax(-1)
                heads.append((z or {}).get((layer, head), A @ parts["v"]))
                self.z[layer, head] = heads[-1]
            x = x + attention.out_proj(torch.cat(heads, -1))
            added = (feedforward or {}).get(layer, block.feedforward(block.feedforward_norm(x)))
            self.feedforward[layer] = added
            x = x + added
        self.logits: Tensor = model.tokens.logits(model.norm(x))


METRIC = LogitDifference(-1, 5, 6)


@pytest.mark.parametrize("freeze", [None, "*.feedforward"])
@torch.no_grad()
def test_path_patching_is_the_computation_by_hand(freeze: str | None) -> None:
    model, base, source = two_layers(3)
    plain = ByHand(model, base)
    other = ByHand(model, source)
    close(plain.logits, model(base), 1e-9)
    frozen_feedforward = plain.feedforward if freeze is not None else None
    sender, receiver_layer = (0, 1), 2
    # All heads as in the base run, and the sender as in the source.
    z = plain.z | {sender: other.z[sender]}
    direct = ByHand(model, base, z, feedforward=frozen_feedforward)
    found = path_patch(model, sender, "logits", base, source, METRIC, freeze=freeze)
    assert found.after == pytest.approx(float(METRIC(direct.logits)), rel=1e-9)
    assert abs(found.change) > 1e-4
    assert found.before == pytest.approx(float(METRIC(plain.logits))) and found.source is not None
    for part in ("q", "k", "v"):
        receiver = (receiver_layer, 4, part)
        expected = METRIC(ByHand(model, base, inputs={receiver: direct.inputs[receiver]}).logits)
        found = path_patch(model, sender, receiver, base, source, METRIC, freeze=freeze)
        assert found.after == pytest.approx(float(expected), rel=1e-9)
        assert abs(found.change) > 1e-7


@torch.no_grad()
def test_several_senders_receivers_and_positions() -> None:
    model, base, source = two_layers()
    plain = ByHand(model, base)
    other = ByHand(model, source)
    z = dict(plain.z)
    for head in (1, 3):
        z[0, head] = plain.z[0, head].clone()
        z[0, head][:, 2] = other.z[0, head][:, 2]
    direct = ByHand(model, base, z)
    receivers = [(1, 0, "k"), (1, 5, "v")]
    expected = METRIC(ByHand(model, base, inputs={receiver: direct.inputs[receiver] for receiver in receivers}).logits)
    senders = [Site(0, head, "output", [2]) for head in (1, 3)]
    found = path_patch(model, senders, receivers, base, source, METRIC)
    assert found.after == pytest.approx(float(expected), rel=1e-9)


@pytest.mark.parametrize("family", ["llama", "gpt2", "t5", "torch encoder", "handwritten"])
def test_all_paths_into_the_last_layer(family: str) -> None:
    """All heads before the last layer send to its q, k and v; sending what they are in the base run changes nothing."""
    case = FAMILIES[family]
    model = case.make()
    with torch.no_grad(), regard.watch(model) as recording:
        case.run(model, case.base)
    last = list(recording)[-1]
    senders = [Site(path, None) for path in list(recording)[:-1]]
    receivers = [Site(last, None, part) for part in ("q", "k", "v")]
    with torch.no_grad():
        shape = case.run(model, case.base).shape
    factors = torch.randn(shape, generator=torch.Generator().manual_seed(0))

    # Not a sum of squares, which a last norm keeps constant.
    def metric(out: Tensor) -> Tensor:
        return (out * factors).sum()

    def inputs() -> Tensor:
        return case.run(model, case.base)

    for source in (lambda: case.run(model, case.source), torch.zeros_like):
        found = path_patch(model, senders, receivers, inputs, source, metric)
        assert math.isfinite(found.after) and abs(found.change) > 1e-4
    nothing = path_patch(model, senders, receivers, inputs, inputs, metric)
    assert nothing.after == pytest.approx(nothing.before, rel=1e-5, abs=1e-5)


def test_paths_that_do_not_exist_are_refused() -> None:
    model, base, source = two_layers()
    arguments = (base, source, METRIC)
    cases: list[tuple[str, Any]] = [
        ("before the receiver", lambda: path_patch(model, (1, 0), (1, 1, "q"), *arguments)),
        ("before the receiver", lambda: path_patch(model, (1, 0), ("blocks.0.attention", 1, "q"), *arguments)),
        ("sender", lambda: path_patch(model, [], (1, 1, "q"), *arguments)),
        ("sender", lambda: path_patch(model, (0, 0, "v"), (1, 1, "q"), *arguments)),
        ("receiver", lambda: path_patch(model, (0, 0), (1, 1), *arguments)),
        ("receiver", lambda: path_patch(model, (0, 0), [], *arguments)),
        ("layer 5", lambda: path_patch(model, (0, 0), (5, 1, "q"), *arguments)),
        ("freeze", lambda: path_patch(model, (0, 0), "logits", *arguments, freeze="x.*")),
        ("freeze", lambda: path_patch(model, (0, 0), "logits", *arguments, freeze=3)),  # type: ignore[arg-type]
        ("no attention", lambda: path_patch(nn.Linear(2, 2), (0, 0), "logits", lambda: 1.0, source)),
    ]
    for name, attempt in cases:
        with pytest.raises(RegardError, match=name):
            attempt()
    assert not any(module._forward_hooks for module in model.modules())


# --- attribution ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_estimates_are_right_to_first_order(family: str) -> None:
    """A change of each output by 0.1%: what is measured is what is estimated, up to the second order."""
    case = FAMILIES[family]
    model = case.make()
    base = case.base
    # One of its inputs is a constant in float32.
    if family != "torch attention":
        model = model.double()
        base = base.double() if base.is_floating_point() else base
    requires = [parameter.requires_grad for parameter in model.parameters()]
    with torch.no_grad():
        shape = case.run(model, base).shape
    factors = torch.randn(shape, generator=torch.Generator().manual_seed(0))

    def larger(z: Tensor) -> Tensor:
        return 1.001 * z

    def metric(out: Tensor) -> Tensor:
        return (out * factors).sum()

    def run() -> Tensor:
        return case.run(model, base)

    estimates = attribution_patch(model, run, larger, metric)
    assert [parameter.requires_grad for parameter in model.parameters()] == requires
    assert all(parameter.grad is None for parameter in model.parameters())
    heads = [(estimates.rows[0]["path"], 0), (estimates.rows[-1]["path"], 1)]
    measured = patch_sweep(model, run, larger, metric, heads=heads)
    totals = {(row["path"], row["head"]): row["change"] for row in estimates.over_positions().rows}
    largest = max(map(abs, totals.values()))
    for row in measured.rows:
        assert row["change"] == pytest.approx(totals[row["path"], row["head"]], abs=0.05 * largest)


def test_estimates_are_exact_where_the_metric_is_linear() -> None:
    case = FAMILIES["own"]
    model = case.make()

    def runs(x: Tensor) -> Any:
        return lambda: case.run(model, x)

    estimates = attribution_patch(model, runs(case.base), runs(case.source), torch.sum)
    measured = patch_sweep(model, runs(case.base), runs(case.source), torch.sum, positions="each")
    found = [row["change"] for row in estimates.rows]
    assert found == pytest.approx([row["change"] for row in measured.rows], abs=1e-4)
    assert measured.compare(estimates).rank_correlation > 0.99
    assert measured.source == estimates.source and estimates.is_estimate


class Direction(nn.Module):
    """Attention to one key, whose value is the input: +1 or −1."""

    def forward(self, x: Tensor) -> Tensor:
        one = torch.ones(1, 1, 1, 1)
        return F.scaled_dot_product_attention(one, one, x.reshape(1, 1, 1, 1))


class Choice(nn.Module):
    """Attention to the key +1 or −1 that the query names, with so large a scale that all weight is on one of them."""

    def forward(self, q: Tensor) -> Tensor:
        k = torch.tensor([1.0, -1.0]).reshape(1, 1, 2, 1)
        v = torch.tensor([10.0, 20.0]).reshape(1, 1, 2, 1)
        return F.scaled_dot_product_attention(q, k, v, scale=50.0)


def test_a_saturated_softmax_hides_an_effect_from_the_estimate() -> None:
    """The known failure: patching the first layer turns the second one to its other key, but the gradient is 0."""
    model = nn.Sequential(Direction(), Choice())

    def runs(direction: float) -> Any:
        return lambda: model(torch.tensor(direction))

    measured = patch_sweep(model, runs(1.0), runs(-1.0), torch.sum)
    estimates = attribution_patch(model, runs(1.0), runs(-1.0), torch.sum)
    assert (measured.before, measured.source) == (10.0, 20.0)
    assert measured.rows[0]["effect"] == pytest.approx(1.0)
    assert estimates.rows[0]["effect"] == pytest.approx(0.0, abs=1e-6)
    assert estimates.rows[1]["effect"] == pytest.approx(1.0)


def test_a_module_that_is_called_twice_has_no_estimate() -> None:
    direction = Direction()
    model = nn.Sequential(direction, direction)
    with pytest.raises(RegardError, match="more than once"):
        attribution_patch(model, lambda: model(torch.tensor(1.0)), torch.zeros_like, torch.sum)
    # Patching replaces both calls.
    found = patch(model, [(0, 0)], lambda: model(torch.tensor(3.0))).change(lambda: model(torch.tensor(1.0)), torch.sum)
    assert (found.before, found.after) == (1.0, 3.0)


def test_rank_correlation_on_the_bundled_model() -> None:
    model = regard.models.load(regard.models.bundled()).float()
    base = torch.randperm(1024, generator=torch.Generator().manual_seed(0))[:12].repeat(1, 2)[:, :18]
    source = base.clone()
    source[0, 6] = 200
    metric = LogitDifference(-1, int(base[0, 6]), 200)
    measured = patch_sweep(model, base, source, metric)
    estimates = attribution_patch(model, base, source, metric)
    comparison = measured.compare(estimates)
    assert comparison.sites == 12 and comparison.rank_correlation > 0.6 and "rank" in str(comparison)
    assert estimates.compare(measured).rank_correlation == comparison.rank_correlation
    together = patch(model, [(row["path"], row["head"]) for row in measured.rows], source).change(base, metric)
    # The last row has the same token in both runs, so that its heads are all that differs.
    assert together.effect == pytest.approx(1.0, abs=1e-3)
