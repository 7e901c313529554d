"""Some heads of many: what is observed of them is what is observed of all, and nothing else changes."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from support.cases import CHOICES, build
from support.checkpoints import make
from support.key_groups import GROUPS
from support.model_configs import ids
from support.observed_models import ASK, CASES, TEXT, close
from torch import Tensor, nn

import regard
from regard import Observe, watch
from regard._observables import ROW_VALUES
from regard.interp import Recording, load_recording
from regard.nn import Encoder, EncoderDecoder, MultiHeadAttention

# Sizes in which heads, groups, rows, keys and widths are all different.
PER_HEAD = ("rows", "key_mass", "map", "map_rows", "profile", "profile_rows")
BY_ROW = (*ROW_VALUES, "counted", "top", "top_at", "groups")
HEADS = {"one": [0], "many": [2, 0], "grouped": [5, 0, 4], "shared": [1, 2]}


def same(a: Tensor, b: Tensor) -> None:
    """Equal, −inf and all, up to the rounding of float32."""
    assert a.shape == b.shape and a.dtype == b.dtype
    torch.testing.assert_close(a.double(), b.double(), rtol=1e-5, atol=1e-5)


@settings(max_examples=60)
@given(
    choice=st.fixed_dictionaries(
        {name: st.sampled_from(values) for name, values in CHOICES.items()} | {"values": st.just("normal")}
    ),
    backend=st.sampled_from(["native", "reference"]),
    seed=st.integers(0, 10**6),
)
def test_chosen_heads_are_slices_of_all_heads(choice: dict[str, str], backend: str, seed: int) -> None:
    case = build(choice, n=7, m=11, d=3, e=5, seed=seed)
    q, k, v = (x.float() for x in (case.q, case.k, case.v))
    options = case.options | {"backend": backend}
    for name in ("bias", "sinks"):
        if isinstance(options.get(name), Tensor | nn.Module):
            options[name] = options[name].float()
    asked: dict[str, Any] = {"map": 3, "profile": 2, "key_mass": True, "top": 2, "sink": 2, "local": 1, "keep": True}
    asked["groups"] = GROUPS[0]
    heads = tuple(HEADS[choice["heads"]])

    def call(observe: Observe | None) -> Any:
        torch.manual_seed(5)  # of dropout
        return regard.attention(q, k, v, **options, observe=observe)

    plain, (all_out, full) = call(None), call(Observe(**asked))
    out, seen = call(Observe(**asked, heads=heads))
    same(out, plain)
    same(out, all_out)
    assert seen.heads == heads and (seen.n, seen.m) == (full.n, full.m)
    for name in BY_ROW:
        same(getattr(seen, name), getattr(full, name)[:, list(heads)])
    for name in PER_HEAD:
        same(getattr(seen, name), getattr(full, name)[list(heads)])
    last = full.lse.shape[0] - 1
    for head in heads:  # by their numbers, not by their places
        same(seen.weights(head, batch=last), full.weights(head, batch=last))
        same(seen.tile(head, size=3, batch=last), full.tile(head, size=3, batch=last))
        assert torch.equal(seen.visible_keys(head, batch=last), full.visible_keys(head, batch=last))
    if len(heads) > 1:
        merged = seen.merge(seen)
        assert merged.heads == heads and merged.entropy.shape[1] == len(heads)


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_flow_as_without_a_choice(backend: str, dropout: float) -> None:
    g = torch.Generator().manual_seed(0)
    table = regard.RelativeTable(6, 3)
    nn.init.normal_(next(table.parameters()), generator=g)
    sinks = torch.randn(6, generator=g)
    leaves = [torch.randn(2, h, n, 5, generator=g) for h, n in ((6, 7), (2, 11), (2, 11))] + [sinks]
    towards = torch.randn(2, 6, 7, 5, generator=g)

    def gradients(observe: Observe | None) -> list[Tensor]:
        q, k, v, s = (x.clone().requires_grad_() for x in leaves)
        torch.manual_seed(3)
        call = {"mask": regard.Causal(), "bias": table, "sinks": s, "dropout": dropout, "backend": backend}
        found = regard.attention(q, k, v, **call, observe=observe)
        out = found if isinstance(found, Tensor) else found[0]
        return list(torch.autograd.grad((out * towards).sum(), [q, k, v, s, *table.parameters()]))

    for a, b in zip(gradients(Observe(heads=(4, 1), key_mass=True)), gradients(None), strict=True):
        assert b.any()
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_what_is_no_choice_of_heads_is_refused() -> None:
    for wrong in ([0, 1], (), (1, 1), 3, "01"):
        with pytest.raises(ValueError, match="Observe heads"):
            Observe(heads=wrong)
    for wrong in ((-1,), (0.5,), ("0",), (None,)):
        with pytest.raises((ValueError, TypeError), match="Observe heads"):
            Observe(heads=wrong)
    x = torch.randn(1, 3, 5, 2)
    for dropout in (0.0, 0.5):
        with pytest.raises(ValueError, match=r"Observe heads must be between 0 and 2"):
            regard.attention(x, x, x, dropout=dropout, observe=Observe(heads=(3, 0)))
    _, seen = regard.attention(x, x, x, observe=Observe(heads=(2, 0), keep=True))
    with pytest.raises(ValueError, match="head is 1; this observation has heads 2, 0"):
        seen.weights(1)


def mha() -> nn.Module:
    layer = nn.TransformerEncoderLayer(12, 3, 20, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any]]] = {
    "ours": (lambda: Encoder(12, heads=3, layers=2).eval(), lambda m: m(torch.ones(2, 5, 12))),
    "ours both": (lambda: EncoderDecoder(12, heads=3, layers=1, vocab=37).eval(), lambda m: m(ids(), ids(3, 5))),
    "llama": (lambda: make(*CASES["llama"][:2]), lambda m: m(**TEXT)),
    "t5": (lambda: make(*CASES["t5"][:2]), lambda m: m(**CASES["t5"][2])),
    "torch": (mha, lambda m: m(torch.ones(2, 5, 12))),
}


@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_watch_chosen_heads(kind: str, tmp_path: Path) -> None:
    model, call = MODELS[kind][0](), MODELS[kind][1]
    with watch(model, ASK) as whole:
        plain = call(model)
    first, *_, last = whole
    number = len(whole) - 1
    for chosen in ([(0, 2), (number, 1), (number, 0)], [(first, 2), (last, 1), (number, 0), (last, 1)]):
        with watch(model, ASK, heads=chosen) as seen:
            out = call(model)
        if isinstance(out, Tensor):
            close(out, plain)
        assert list(seen) == [first, last] and (seen[first].heads, seen[last].heads) == ((2,), (1, 0))
        for path, observation in seen.items():
            at = list(observation.heads)
            same(observation.entropy, whole[path].entropy[:, at])
            same(observation.map, whole[path].map[at])
    seen.save(tmp_path / "recording")
    for found in (seen, load_recording(tmp_path / "recording")):
        check_numbers(found, [(first, 2), (last, 1), (last, 0)], whole)


def check_numbers(seen: Recording, pairs: list[tuple[str, int]], whole: Recording) -> None:
    """Heads go by their own numbers wherever they are listed."""
    rows = seen.heads()
    assert [(row["path"], row["head"]) for row in rows] == pairs
    all_rows = {(row["path"], row["head"]): row for row in whole.heads()}
    for row in rows:
        expected = all_rows[row["path"], row["head"]]
        assert list(row) == list(expected)
        for name in row.keys() - {"path", "head"}:
            if expected[name] is None:  # a distance of cross-attention
                assert row[name] is None
            else:
                assert row[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5)
    read = list(csv.DictReader(io.StringIO(seen.to_csv())))
    assert [(row["path"], int(row["head"])) for row in read] == pairs
    table = seen.table("entropy")
    column = list(next(c for c in table.columns if c.header == "head").cells)
    by_entropy = sorted(rows, key=lambda row: -row["entropy"])
    assert column == [str(row["head"]) for row in by_entropy]
    Console(file=io.StringIO()).print(table)


@torch.no_grad()
def test_what_is_not_reached_is_said_with_what_is() -> None:
    for kind, (build_model, call) in MODELS.items():
        model = build_model()
        with watch(model) as whole:
            call(model)
        some = next(iter(whole))
        for layer in (len(whole), "nowhere"):
            wrong = pytest.raises(ValueError, match=f"layer {layer!r}.* {len(whole)} layers: {some}")
            with wrong, watch(model, heads=[(0, 0), (layer, 0)]):
                call(model)
        with pytest.raises(ValueError, match="heads"), watch(model, heads=[(0, 3)]):
            call(model)
        with watch(model) as after:
            call(model)
        assert list(after) == list(whole), kind
    with pytest.raises(ValueError, match="heads were given twice"), watch(model, Observe(heads=(0,)), heads=[(0, 0)]):
        pass
    for wrong_pair in (3, (1,), (1, 2, 3), "ab c"):
        with pytest.raises(TypeError, match="heads"), watch(model, heads=[wrong_pair]):
            pass
    with pytest.raises(ValueError, match="heads is empty"), watch(model, heads=[]):
        pass


class Backwards(nn.Module):
    """Layers that are called in another order than they are named in."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.never, self.first = (MultiHeadAttention(6, heads=3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


@torch.no_grad()
def test_layers_are_numbered_as_they_are_called() -> None:
    model, x = Backwards(), torch.randn(2, 5, 6)
    with watch(model) as whole:
        model(x)
    assert list(whole) == ["first", "second"]
    with watch(model, heads=[(0, 1)]) as seen:
        model(x)
    assert list(seen) == ["first"]
    wrong = pytest.raises(ValueError, match=r"layer 'never'.* 2 layers")
    with wrong, watch(model, heads=[("never", 1)]):
        model(x)
