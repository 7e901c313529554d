"""Patched runs: with everything patched the source's, with nothing patched the base's; parts follow their formula."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.handwritten import Handwritten
from support.model_configs import V, ids
from support.observed_models import close
from support.patching import FAMILIES
from torch import Tensor, nn

import regard
from regard import RegardError
from regard._hooks import observed
from regard._saved_call import SavedCall
from regard.interp import (
    Captured,
    Logit,
    LogitDifference,
    PatchSweep,
    Site,
    ablate,
    attribution_patch,
    capture,
    patch,
    patch_sweep,
)
from regard.nn import Decoder, MultiHeadAttention
from regard.positions import RelativeKeys


def layers_of(family: str) -> tuple[nn.Module, list[str]]:
    """A model and the paths of its attention layers."""
    case = FAMILIES[family]
    model = case.make()
    with torch.no_grad(), regard.watch(model) as recording:
        case.run(model, case.base)
    return model, list(recording)


# --- every kind of model ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_everything_patched_is_the_run_of_the_source(family: str) -> None:
    case = FAMILIES[family]
    model, paths = layers_of(family)
    base = case.observed(model, case.base)
    expected = case.observed(model, case.source)
    assert (base - expected).abs().max() > 1e-4
    for parts in (["output"], ["q", "k", "v"], ["pattern", "v"]):
        sites = [Site(path, None, part) for path in paths for part in parts]
        with patch(model, sites, lambda: case.call(model, case.source)):
            close(case.run(model, case.base), expected)
    assert torch.equal(case.observed(model, case.base), base)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_nothing_patched_changes_no_bit(family: str) -> None:
    case = FAMILIES[family]
    model, paths = layers_of(family)
    plain = case.run(model, case.base)
    with patch(model, [], torch.zeros_like):
        assert torch.equal(case.run(model, case.base), plain)
    sites = [Site(path, None, part) for path in paths for part in ("output", "pattern", "q", "k", "v")]
    own = capture(model, lambda: case.call(model, case.base), sites)
    with patch(model, [site for site in sites if site.part == "output"], own):
        assert torch.equal(case.run(model, case.base), case.observed(model, case.base))
    # The other parts compute attention again, whose last bit may depend on how many heads are computed together.
    with patch(model, sites, own):
        close(case.run(model, case.base), case.observed(model, case.base), 1e-6)
    assert not any(m._forward_hooks or m._forward_pre_hooks or m in observed for m in model.modules())


@pytest.mark.parametrize("family", ["ours", "llama", "t5", "torch encoder", "own", "handwritten"])
@torch.no_grad()
def test_a_patch_with_zeros_is_an_ablation(family: str) -> None:
    case = FAMILIES[family]
    model, paths = layers_of(family)
    heads = [(0, 1), (paths[-1], 2)]
    with ablate(model, heads):
        expected = case.run(model, case.base)
    for zeros in (torch.zeros_like, lambda z: 0.0 * z, lambda z: z.new_zeros(1)):
        with patch(model, heads, zeros):
            assert torch.equal(case.run(model, case.base), expected)
    with ablate(model, heads), patch(model, [(0, 0)], torch.zeros_like):
        both = case.run(model, case.base)
    with ablate(model, [*heads, (0, 0)]):
        assert torch.equal(case.run(model, case.base), both)


@torch.no_grad()
def test_bfloat16() -> None:
    model = Decoder(12, heads=6, kv_heads=2, layers=2, vocab=V).eval().to(torch.bfloat16)
    base, source = ids(2, 7), ids(2, 7, seed=3)
    source[:, -1] = base[:, -1]
    expected = model(source)[:, -1].float()
    for parts in (["output"], ["q", "k", "v"], ["pattern", "v"]):
        sites = [Site(layer, None, part) for layer in range(2) for part in parts]
        with patch(model, sites, source):
            close(model(base)[:, -1].float(), expected, 2**-7)


# --- one layer, against the formula -----------------------------------------------------------------------------------


class OneLayer(nn.Module):
    """Attention whose output is that of its 6 heads, side by side; pairs of 3 query heads share a key head."""

    def __init__(self, position: Any = None) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(12, heads=6, kv_heads=2, out_bias=False, position=position)
        self.attention.out_proj.weight.data = torch.eye(12)

    def forward(self, x: Tensor) -> Tensor:
        heads: Tensor = self.attention(x, mask=regard.Causal())
        return heads.unflatten(-1, (6, 2)).transpose(1, 2)  # [B, H, n, e]

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, a key head for each query head."""
        q = self.attention.q_proj(x).unflatten(-1, (6, 2)).transpose(1, 2)
        k = self.attention.k_proj(x).unflatten(-1, (2, 2)).transpose(1, 2)
        v = self.attention.v_proj(x).unflatten(-1, (2, 2)).transpose(1, 2)
        return q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1)


def weights(q: Tensor, k: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(2)
    hidden = torch.ones(scores.shape[-2:]).triu(1).bool()
    return scores.masked_fill(hidden, -math.inf).softmax(-1)


def two_inputs(n: int = 7, m: int = 7) -> tuple[OneLayer, Tensor, Tensor]:
    torch.manual_seed(1)
    return OneLayer().eval(), torch.randn(2, n, 12), torch.randn(2, m, 12)


def test_each_part_follows_its_formula() -> None:
    model, base, source = two_inputs()
    with torch.no_grad():
        plain = model(base)
        q, k, v = model.parts(base)
        q_other, k_other, v_other = model.parts(source)
    mixed_k, mixed_v, mixed_q = k.clone(), v.clone(), q.clone()
    mixed_k[:, :, [2, 6]] = k_other[:, :, [2, 6]]
    mixed_v[:, :, [2, 6]] = v_other[:, :, [2, 6]]
    mixed_q[:, :, [2, 6]] = q_other[:, :, [2, 6]]
    mixed_pattern = weights(q, k)
    mixed_pattern[:, :, [2, 6]] = weights(q_other, k_other)[:, :, [2, 6]]
    expected = {
        ("q", None): weights(q_other, k) @ v,
        ("k", None): weights(q, k_other) @ v,
        ("v", None): weights(q, k) @ v_other,
        ("pattern", None): weights(q_other, k_other) @ v,
        ("output", None): weights(q_other, k_other) @ v_other,
        ("q", (2, -1)): weights(mixed_q, k) @ v,
        ("k", (2, -1)): weights(q, mixed_k) @ v,
        ("v", (2, -1)): weights(q, k) @ mixed_v,
        ("pattern", (2, -1)): mixed_pattern @ v,
    }
    for (part, positions), heads in expected.items():
        with torch.no_grad(), patch(model, [Site(0, 1, part, positions)], lambda: model(source)):
            found = model(base)
        close(found[:, 1], heads[:, 1])
        # Heads 0 and 2 share the key head of head 1, and must not see its patched keys.
        others = [0, 2, 3, 4, 5]
        assert torch.equal(found[:, others], plain[:, others])


def test_several_parts_of_one_head() -> None:
    model, base, source = two_inputs()
    q, k, v = model.parts(base)
    q_other, k_other, v_other = model.parts(source)
    with torch.no_grad():
        sites = [Site(0, 4, "pattern"), Site(0, 4, "v", [1]), Site(0, 4, "output", [0])]
        with patch(model, sites, lambda: model(source)):
            found = model(base)
        v[:, 4, 1] = v_other[:, 4, 1]
        expected = (weights(q_other, k_other) @ v)[:, 4]
        expected[:, 0] = model(source)[:, 4, 0]
    close(found[:, 4], expected)


@torch.no_grad()
def test_given_weights() -> None:
    model, base, _ = two_inputs()
    v = model.parts(base)[2]
    uniform = torch.full((7, 7), 1 / 7)
    with patch(model, [(0, 3, "pattern")], uniform):
        close(model(base)[:, 3], uniform @ v[:, 3])
    plain = model(base)
    row = torch.rand(2, 1, 7)
    with patch(model, [Site(0, 3, "pattern", -1)], row):
        found = model(base)
    close(found[:, 3, -1:], row @ v[:, 3])
    assert torch.equal(found[:, 3, :-1], plain[:, 3, :-1])


@torch.no_grad()
def test_texts_of_two_lengths_and_one_source_for_a_batch() -> None:
    model, base, source = two_inputs(7, 5)
    with patch(model, [Site(0, 0, "output", [-1, 0])], lambda: model(source)):
        found = model(base)
    close(found[:, 0, [0, 6]], model(source)[:, 0, [0, 4]])
    with patch(model, [Site(0, 0, "output", [-1])], lambda: model(source[:1])):
        close(model(base)[:, 0, -1], model(source)[:1, 0, -1].expand(2, -1))


@torch.no_grad()
def test_autocast() -> None:
    model, base, source = two_inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(source)
        for parts in (["output"], ["q", "k", "v"], ["pattern", "v"]):
            with patch(model, [Site(0, None, part) for part in parts], lambda: model(source)):
                close(model(base).float(), expected.float(), 2**-7)


@torch.no_grad()
def test_queries_that_also_enter_a_relative_bias() -> None:
    torch.manual_seed(1)
    model = OneLayer(RelativeKeys(2, 3)).eval()
    nn.init.normal_(model.attention.position.weight)  # type: ignore[union-attr, arg-type]
    base, source = torch.randn(2, 7, 12), torch.randn(2, 7, 12)
    sites = [(0, None, part) for part in ("q", "k", "v")]
    with patch(model, sites, lambda: model(source)):
        close(model(base), model(source))
    with pytest.raises(RegardError, match="relative bias"), patch(model, [(0, 1, "q")], torch.zeros_like):
        model(base)


def test_gradients_go_through_a_patched_head() -> None:
    model, base, source = two_inputs()
    base.requires_grad_(True)
    with patch(model, [(0, 1, "v")], lambda: model(source)):
        model(base)[:, 1].square().sum().backward()
    found = base.grad
    base.grad = None
    q, k, _ = model.parts(base)
    (weights(q, k) @ model.parts(source)[2].detach())[:, 1].square().sum().backward()
    assert found is not None and base.grad is not None
    close(found, base.grad)


@torch.no_grad()
def test_a_captured_run_is_reused_and_holds_nothing_of_n_times_n() -> None:
    torch.manual_seed(0)
    n = 600
    model = Decoder(12, heads=3, layers=2, vocab=V).eval()
    captured = capture(model, ids(1, n), [(1, 2, part) for part in ("output", "pattern", "q", "k", "v")])
    total = 0
    for values in captured.values.values():
        for value in values:
            leaves = torch.utils._pytree.tree_leaves(
                [value.q, value.k, value.scores] if isinstance(value, SavedCall) else [getattr(value, "q", value)]
            )
            total += sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor))
    assert total < 40 * n
    assert isinstance(captured, Captured) and captured[1, 2, "v"].shape == (1, n, 4)
    other = ids(1, n, seed=4)
    results = []
    for source in (captured, ids(1, n), lambda: model(ids(1, n)), partial(model, ids(1, n))):
        with patch(model, [(1, 2)], source):
            results += [model(other), model(other)]
    assert all(torch.equal(result, results[0]) for result in results)
    assert not torch.equal(results[0], model(other))


# --- metrics and sweeps -----------------------------------------------------------------------------------------------


def decoder() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Decoder(12, heads=3, layers=2, vocab=V).eval()
    for parameter in model.parameters():
        parameter.data *= 1.5
    base = ids(2, 7)
    source = base.clone()
    source[:, 2] = (base[:, 2] + 3) % V
    return model, base, source


@torch.no_grad()
def test_metrics() -> None:
    model, base, source = decoder()
    logits = model(base)
    assert Logit(-1, 5)(logits) == logits[:, -1, 5].mean()
    assert Logit([1, 2], [3, 4])(logits) == (logits[0, 1, 3] + logits[1, 2, 4]) / 2
    assert LogitDifference(2, 5, [6, 7])(logits) == (logits[:, 2, 5] - logits[[0, 1], 2, [6, 7]]).mean()
    every = [(0, None), (1, None)]
    change = patch(model, every, source).change(base, lambda out: float(out[:, -1].sum()))
    close(torch.tensor(change.after), model(source)[:, -1].sum())
    assert change.effect == pytest.approx(1.0, abs=1e-3) and change.source == pytest.approx(change.after, rel=1e-4)
    # The loss of the source's run is that of predicting the base's tokens.
    loss = patch(model, every, source).change(base)
    targets = base[:, 1:].flatten()
    assert loss.before == pytest.approx(float(nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets)))
    other = model(source)[:, :-1].flatten(0, 1)
    assert loss.source == pytest.approx(float(nn.functional.cross_entropy(other, targets)))
    assert patch(model, every, source).change(lambda: float(model(base).mean())).effect is None
    model.train()
    patch(model, every, torch.zeros_like).change(base)
    assert model.training


def test_a_sweep_measures_each_site_alone() -> None:
    model, base, source = decoder()
    metric = LogitDifference(-1, 5, 6)
    done: list[tuple[int, int]] = []
    sweep = patch_sweep(
        *(model, base, source, metric),
        parts=("output", "v"),
        heads=[(0, 1), (1, 2)],
        positions=[2, -1],
        progress=lambda *numbers: done.append(numbers),
    )
    assert done == [(i, 8) for i in range(1, 9)]
    for row in sweep.rows:
        site = Site(row["path"], row["head"], row["part"], row["position"])
        alone = patch(model, [site], source).change(base, metric)
        assert row["after"] == alone.after and row["before"] == alone.before and row["effect"] == alone.effect
    assert [row["position"] for row in sweep.rows[:4]] == [2, 6, 2, 6]
    top = sweep.top(1)[0]
    largest = max(sweep.rows, key=lambda row: abs(row["change"]))
    assert (top.layer, top.head, top.part) == (largest["path"], largest["head"], largest["part"])
    assert sweep.table(3).row_count == 3 and len(sweep.to_csv().splitlines()) == 9
    each = patch_sweep(model, base, source, metric, layers="*.0.*", positions="each")
    assert len(each.rows) == 3 * 7
    with pytest.raises(RegardError, match="estimates"):
        each.over_positions()


def test_a_sweep_that_was_stopped_continues(tmp_path: Path) -> None:
    model, base, source = decoder()
    file = tmp_path / "sweep.jsonl"
    expected = patch_sweep(model, base, source, Logit(-1, 5))
    runs = 0

    def stop(done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    def count(*_: Any) -> None:
        nonlocal runs
        runs += 1

    with pytest.raises(KeyboardInterrupt):
        patch_sweep(model, base, source, Logit(-1, 5), file=file, progress=stop)
    assert not any(m in observed for m in model.modules())
    assert len(file.read_text().splitlines()) == 4
    # The process may also die while it writes a line.
    with file.open("a") as opened:
        opened.write('{"path": "blocks.1.att')
    hook = model.register_forward_hook(count)
    sweep = patch_sweep(model, base, source, Logit(-1, 5), file=file)
    assert runs == 2 + 3  # base, source, and the sites that were missing
    again = patch_sweep(model, base, source, Logit(-1, 5), file=file)
    assert runs == 2 + 3 + 2
    hook.remove()
    for rows in (sweep.rows, again.rows):
        assert [row["after"] for row in rows] == pytest.approx([row["after"] for row in expected.rows], rel=1e-4)
    content = file.read_text()
    assert len(content.splitlines()) == 7
    # Killed while it wrote the first line.
    for part in (content[:20], ""):
        file.write_text(part)
        patch_sweep(model, base, source, Logit(-1, 5), file=file)
        assert len(file.read_text().splitlines()) == 7


def test_the_file_of_another_sweep_is_refused(tmp_path: Path) -> None:
    model, base, source = decoder()
    file = tmp_path / "sweep.jsonl"
    patch_sweep(model, base, source, Logit(-1, 5), file=file)
    other, *_ = decoder()
    next(other.parameters()).data += 0.1
    cases: list[tuple[str, Any, dict[str, Any]]] = [
        ("model", (other, base, source, Logit(-1, 5)), {}),
        ("inputs", (model, base + 1, source, Logit(-1, 5)), {}),
        ("source", (model, base, source + 1, Logit(-1, 5)), {}),
        ("metric", (model, base, source, Logit(-1, 6)), {}),
        ("set of sites", (model, base, source, Logit(-1, 5)), {"parts": ("v",)}),
    ]
    content = file.read_text()
    for meaning, arguments, options in cases:
        with pytest.raises(RegardError, match=f"another {meaning}"):
            patch_sweep(*arguments, **options, file=file)
    assert file.read_text() == content
    header, first, *_ = content.splitlines()
    wrong = ["not a sweep", "no end of line", "[1]\n", '{"format": 1}\n', f"{header}\nbroken\n{first}\n"]
    wrong += [f"{header}\n{json.dumps({**json.loads(first), 'after': 'x'})}\n"]
    wrong += [f"{header}\n{json.dumps({**json.loads(first), 'after': 10**400})}\n"]
    wrong += [f"{header}\n{json.dumps({**json.loads(first), 'head': 99})}\n"]
    wrong += [f"{header}\n{json.dumps({**json.loads(first), 'head': [1]})}\n"]
    for text in wrong:
        file.write_text(text)
        with pytest.raises(RegardError, match="give another name"):
            patch_sweep(model, base, source, Logit(-1, 5), file=file)
    # Functions are told apart by the metric that they give.
    file.unlink()
    patch_sweep(model, lambda: model(base), source, Logit(-1, 5), file=file)
    with pytest.raises(RegardError, match="another base run"):
        patch_sweep(model, lambda: model(source), source, Logit(-1, 5), file=file)


def test_a_metric_that_is_not_a_number_is_kept(tmp_path: Path) -> None:
    model, base, source = decoder()
    file = tmp_path / "sweep.jsonl"
    for _ in range(2):
        sweep = patch_sweep(model, base, source, lambda out: math.nan, heads=[(0, 1)], file=file)
        assert math.isnan(sweep.rows[0]["after"]) and sweep.rows[0]["effect"] is None
    assert sweep.table().row_count == 1


@pytest.mark.parametrize("positions", ["all", "each"])
def test_a_figure_shows_the_effects(positions: Any) -> None:
    pytest.importorskip("matplotlib")
    model, base, source = decoder()
    sweep = patch_sweep(model, base, source, Logit(-1, 5), positions=positions)
    figure = regard.interp.figures.patching(sweep, style=regard.plots.FigureStyle(palette="grey"))
    cells = figure.axes[0].images[0].get_array()
    effects = torch.tensor([row["effect"] for row in sweep.rows])
    assert cells.shape == ((2, 3) if positions == "all" else (6, 7))
    close(torch.tensor(cells.filled()).flatten(), effects.double())
    several = patch_sweep(model, base, source, Logit(-1, 5), parts=("output", "v"))
    assert regard.interp.figures.patching(several, "v").texts[0].get_text() == "logit 5 at -1 · v"
    with pytest.raises(RegardError, match="part"):
        regard.interp.figures.patching(several)


def test_a_figure_of_many_heads_shows_the_largest() -> None:
    pytest.importorskip("matplotlib")
    rows = []
    for layer in range(2):
        for head in range(40):
            for position in (1, 3):
                row = {"path": f"blocks.{layer}.attention", "layer": layer, "head": head, "part": "output"}
                rows.append(row | {"position": position, "change": 0.0, "effect": head / 40 if head else None})
    sweep = PatchSweep("a model", "a metric", 0.0, 1.0, rows, is_estimate=True)
    figure = regard.interp.figures.patching(sweep, tokens=["a", "b", "c", "d"])
    assert figure.axes[0].images[0].get_array().shape == (64, 2)
    assert figure.texts[0].get_text() == "a metric · output · estimated · 64 of 80 heads"
    assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == ["b", "d"]
    mixed = PatchSweep("a model", "a metric", 0.0, 1.0, [*rows, rows[0] | {"position": None}])
    for name, wrong, options in (
        ("tokens", sweep, {"tokens": ["a"]}),
        ("tokens", PatchSweep("m", "x", 0.0, 1.0, [rows[0] | {"position": None}]), {"tokens": ["a"]}),
        ("no sites", PatchSweep("m", "x", 0.0, 1.0), {}),
        ("of one kind", mixed, {}),
        ("sweep", "a sweep", {}),
    ):
        with pytest.raises(RegardError, match=name):
            regard.interp.figures.patching(wrong, **options)  # type: ignore[arg-type]


def test_a_captured_source_has_a_fingerprint(tmp_path: Path) -> None:
    model, base, source = decoder()
    parts = ("output", "q", "pattern")
    sites = [(0, None, part) for part in parts]
    captured = capture(model, source, sites)
    file = tmp_path / "sweep.jsonl"
    for _ in range(2):
        sweep = patch_sweep(model, base, captured, Logit(-1, 5), layers="*.0.*", parts=parts, file=file)
    assert sweep.source is None and sweep.rows[0]["effect"] is None
    assert len(file.read_text().splitlines()) == 1 + 9
    with pytest.raises(RegardError, match="another source"):
        other = capture(model, base, sites)
        patch_sweep(model, base, other, Logit(-1, 5), layers="*.0.*", parts=parts, file=file)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused() -> None:
    model, base, source = decoder()
    metric = Logit(-1, 5)

    def changed(sites: Any, new: Any = source, of: Any = metric, inputs: Any = base) -> Any:
        return patch(model, sites, new).change(inputs, of)

    one = [(0, 1)]
    cases: list[tuple[str, Any]] = [
        ("part", lambda: Site(0, 1, "weights")),
        ("positions", lambda: Site(0, 1, "q", [])),
        ("positions", lambda: Site(0, 1, "q", [2, 2])),
        ("layer", lambda: Site(-1, 1)),
        ("head", lambda: Site(0, 1.5)),  # type: ignore[arg-type]
        ("site", lambda: patch(model, [3.5], source)),
        ("sites", lambda: patch(model, 7, source)),  # type: ignore[arg-type]
        ("model", lambda: patch(len, one, source)),  # type: ignore[arg-type]
        ("layer 9", lambda: changed([(9, 1)])),
        ("head 7", lambda: changed([(0, 7)])),
        ("position 7", lambda: changed([Site(0, 1, "q", 7)])),
        ("same length", lambda: changed(one, source[:, :5])),
        ("same length", lambda: changed([(0, 1, "pattern")], source[:, :5])),
        ("batch", lambda: changed(one, ids(3, 7))),
        ("batch", lambda: changed([(0, 1, "pattern")], ids(3, 7))),
        ("weights", lambda: changed(one, torch.rand(7, 7))),
        ("weights", lambda: changed([(0, 1, "pattern")], torch.rand(7, 6))),
        ("pattern", lambda: changed([(0, 1, "pattern")], torch.zeros_like)),
        ("function", lambda: changed(one, lambda z: z[:, :2])),
        ("function", lambda: changed(one, lambda z: None)),
        ("source", lambda: changed(one, "text")),
        ("holds no", lambda: changed(one, capture(model, base, [(0, 2)]))),
        ("metric", lambda: changed(one, of="logit")),
        ("metric", lambda: changed(one, of=lambda out: out)),
        ("id", lambda: changed(one, of=Logit(-1, V))),
        ("position", lambda: changed(one, of=Logit(7, 0))),
        ("per batch entry", lambda: changed(one, of=Logit([1, 2, 3], 0))),
        ("inputs", lambda: changed(one, inputs=[1, 2])),
        ("parts", lambda: patch_sweep(model, base, source, metric, parts="v")),
        ("parts", lambda: patch_sweep(model, base, source, metric, parts=("v", "v"))),
        ("parts", lambda: patch_sweep(model, base, source, metric, parts=("x",))),
        ("positions", lambda: patch_sweep(model, base, source, metric, positions="some")),  # type: ignore[arg-type]
        ("positions", lambda: patch_sweep(model, base, source, metric, positions=[9])),
        ("layers", lambda: patch_sweep(model, base, source, metric, layers="x.*")),
        ("heads", lambda: patch_sweep(model, base, source, metric, heads=[(0, 9)])),
        ("folder", lambda: patch_sweep(model, base, source, metric, file=Path(__file__).parent)),
        (
            "no attention",
            lambda: (
                patch(nn.Linear(3, 3), [], source).change(lambda: 1.0) and capture(nn.Linear(3, 3), lambda: 1, [(0, 1)])
            ),
        ),
        ("in common", lambda: PatchSweep("m", "x", 0.0, 1.0).compare(PatchSweep("m", "x", 0.0, 1.0))),
    ]
    for name, attempt in cases:
        with pytest.raises((RegardError, OSError), match=name):
            attempt()


@torch.no_grad()
def test_weights_that_a_model_makes_by_hand() -> None:
    """Where q and k are not known, output, v and given weights can be patched; the rest is refused by name."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(-1, -2)).tanh().softmax(-1) @ v

    torch.manual_seed(0)
    model = nn.Sequential(Handwritten(attend), Handwritten(attend)).eval()
    base, source = torch.randn(2, 7, 6), torch.randn(2, 7, 6)
    first: Any = model[0]
    for part in ("q", "k", "pattern"):
        with pytest.raises(RegardError, match=f"'{part}'"), patch(model, [(0, 1, part)], lambda: model(source)):
            model(base)
        with pytest.raises(RegardError, match=f"'{part}'"):
            patch_sweep(model, lambda: model(base), torch.zeros_like, torch.sum, parts=(part,))
    captured: list[Tensor] = []
    first.out.register_forward_pre_hook(lambda _, args: captured.append(args[0]))
    with patch(model, [(0, 1, "v")], lambda: model(source)):
        model(base)
    q, k, _ = first.heads(base)
    expected = attend(q, k, first.heads(source)[2])[:, 1]
    close(captured[-1].unflatten(-1, (3, -1)).transpose(1, 2)[:, 1], expected)
    with patch(model, [(0, 1, "pattern")], torch.eye(7)):
        model(base)
    close(captured[-1].unflatten(-1, (3, -1)).transpose(1, 2)[:, 1], first.heads(base)[2][:, 1])


def test_a_patch_outside_of_a_run() -> None:
    model, base, source = decoder()
    change = patch(model, [(0, 1)], source)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="mine"), change:
            raise RuntimeError("mine")
        assert not any(m._forward_hooks or m._forward_pre_hooks or m in observed for m in model.modules())
    assert "1 site of Decoder" in repr(change) and "…" in repr(patch(model, [(0, 1)] * 9, source))
    assert patch(model, [], source).change(base).change == 0
    assert str(patch(model, [(0, 1)], torch.zeros_like).change(base)).count("→") == 1
    with pytest.raises(RegardError, match="layer 5"), patch(model, [(5, 1)], torch.zeros_like):
        model(base)
    with pytest.raises(RegardError, match="metric"):
        attribution_patch(model, base, source, lambda out: 1.0)
