"""Without a head: the same as without its columns of W_O, whatever the model is, and nothing of it stays."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import write
from support.model_configs import ids
from support.observed_models import (
    KINDS,
    REAL,
    T5_OUT,
    Case,
    X,
    close,
    encoder,
    rows,
    without,
)
from torch import Tensor, nn

from regard import watch
from regard.interp import ablate
from regard.models import load

for _i in range(2):
    T5_OUT += [f"decoder.block.{_i}.layer.0.SelfAttention.o", f"decoder.block.{_i}.layer.1.EncDecAttention.o"]


@pytest.mark.parametrize("kind", KINDS)
def test_zero_is_a_zero_in_the_output_matrix(kind: str) -> None:
    case, last = KINDS[kind], len(KINDS[kind].out) - 1
    model = case.make()
    plain = case.run(model)
    with torch.no_grad(), watch(model) as seen:
        case.run(model)
    assert len(seen) == len(case.out)
    for pairs in ([(0, 1)], [(last, 2), (0, 0), (last, 0)]):
        expected = case.run(without(case, model, pairs))
        assert (rows(case, expected) - rows(case, plain)).abs().max() > 1e-3
        by_path = [(list(seen)[layer], head) for layer, head in pairs]
        for heads in (pairs, by_path):
            with ablate(model, heads):
                close(rows(case, case.run(model)), rows(case, expected), 1e-5)
    assert torch.equal(case.run(model), plain)
    everything = [(layer, head) for layer in range(last + 1) for head in range(case.heads)]
    with ablate(model, everything):
        found = case.run(model)
    hooks = [attention_as_bias(model, path) for path in case.out] if "torch" not in kind else []
    expected = case.run(model if hooks else without(case, model, everything))
    for hook in hooks:
        hook.remove()
    close(rows(case, found), rows(case, expected), 1e-5)


def attention_as_bias(model: nn.Module, path: str) -> Any:
    """Attention that adds nothing but b_out."""

    def only_bias(linear: Any, _: Any, y: Tensor) -> Tensor:
        return torch.zeros_like(y) + (0 if getattr(linear, "bias", None) is None else linear.bias)

    return model.get_submodule(path).register_forward_hook(only_bias)


def heads_given(case: Case, model: nn.Module, path: str) -> Tensor:
    """What an output layer reads, ``[B, n, H·E]``."""
    found: list[Tensor] = []
    hook = model.get_submodule(path).register_forward_pre_hook(lambda _, given: found.append(given[0]))
    case.run(model)
    hook.remove()
    return found[0]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "torch" not in kind])
@torch.no_grad()
def test_mean_is_the_mean_of_real_rows(kind: str) -> None:
    case, last = KINDS[kind], len(KINDS[kind].out) - 1
    model = case.make()
    plain = case.run(model)
    pairs, hooks, expected_model = [(0, 1), (last, 2)], [], copy.deepcopy(model)
    for layer, head in pairs:
        given = heads_given(case, model, case.out[layer])
        counted = given.flatten(0, 1)
        if case.real is not None and given.shape[1] == 7:
            counted = given[case.real]
        if kind == "t5" and layer == 0:  # the source is padded, the target is not
            counted = given[REAL]
        wide = given.shape[-1] // case.heads
        at = slice(head * wide, (head + 1) * wide)
        mean = torch.stack([row[at] for row in counted]).double().mean(0).float()

        def put(_: Any, args: Any, at: slice = at, mean: Tensor = mean) -> tuple[Tensor]:
            x = args[0].clone()
            x[..., at] = mean
            return (x,)

        hooks.append(expected_model.get_submodule(case.out[layer]).register_forward_pre_hook(put))
    expected = case.run(expected_model)
    with ablate(model, pairs, by="mean", over=lambda: case.run(model)):
        found = case.run(model)
    close(rows(case, found), rows(case, expected), 1e-4)
    assert (rows(case, found) - rows(case, plain)).abs().max() > 1e-3
    with ablate(model, pairs):
        assert not torch.allclose(rows(case, found), rows(case, case.run(model)), atol=1e-4)
    assert torch.equal(case.run(model), plain)


@torch.no_grad()
def test_mean_in_torch_encoder() -> None:
    """Its heads by hand: A v of one layer, over rows that are real; a mean that is always said is a bias."""
    model = encoder(False)
    model.layers = model.layers[:1]
    layer = model.layers[0].self_attn
    _, A = layer(X, X, X, key_padding_mask=~REAL, average_attn_weights=False)
    v = (X @ layer.in_proj_weight[24:].T + layer.in_proj_bias[24:]).unflatten(-1, (3, 4)).transpose(1, 2)
    mean = (A @ v)[:, 1][REAL].mean(0)
    twin = copy.deepcopy(model)
    out = twin.layers[0].self_attn.out_proj
    out.bias += out.weight[:, 4:8] @ mean
    out.weight[:, 4:8] = 0
    with ablate(model, [(0, 1)], by="mean", over=lambda: model(X, src_key_padding_mask=~REAL)):
        found = model(X, src_key_padding_mask=~REAL)
    close(found[REAL], twin(X, src_key_padding_mask=~REAL)[REAL], 1e-5)


@pytest.mark.parametrize("kind", ["ours", "llama", "gpt2"])
def test_change_of_the_loss(kind: str) -> None:
    case, text = KINDS[kind], ids(3, 7, seed=5)
    model = case.make()

    def loss(m: nn.Module) -> float:
        with torch.no_grad():
            found = m(text)
        logits = getattr(found, "logits", found).double()
        each = [-logits[b, i].log_softmax(-1)[text[b, i + 1]] for b in range(3) for i in range(6)]
        return float(torch.stack(each).mean())

    pairs = [(1, 2), (0, 0)]
    found = ablate(model, pairs).loss_change(text)
    assert found.before == pytest.approx(loss(model), rel=1e-5)
    assert found.after == pytest.approx(loss(without(case, model, pairs)), rel=1e-5)
    assert found.change == found.after - found.before != 0
    assert str(found) == f"loss {found.before:.4f} → {found.after:.4f} ({found.change:+.4f})"
    as_function = ablate(model, pairs).loss_change(lambda: loss(model))
    assert as_function.after == pytest.approx(found.after, rel=1e-5)
    mean = ablate(model, pairs, by="mean").loss_change(text)  # over what the loss is taken of
    same = ablate(model, pairs, by="mean", over=text).loss_change(text)
    other = ablate(model, pairs, by="mean", over=lambda: model(ids(2, 5))).loss_change(text)
    assert mean == same and mean.after != other.after and mean.after != found.after
    with ablate(model, pairs, by="mean", over=text):
        assert loss(model) == pytest.approx(mean.after, rel=1e-5)


def test_generation(tmp_path: Path) -> None:
    """Ours with its fast step for single tokens, and transformers with its cache."""
    case, pairs = KINDS["llama"], [(0, 1), (0, 4), (1, 0), (1, 5)]
    theirs = case.make()
    ours = load(write(theirs, tmp_path / "model"))
    options = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False}
    prompt = ids(2, 3)
    expected = without(case, theirs, pairs).generate(prompt, **options)
    with ablate(theirs, pairs):
        assert torch.equal(theirs.generate(prompt, **options), expected)
    assert not torch.equal(theirs.generate(prompt, **options), expected)
    twin = Case(lambda: ours, lambda m: m(prompt), [f"blocks.{i}.attention.out_proj" for i in range(2)], heads=6)
    twin.out = [path for path, module in ours.named_modules() if path.endswith("out_proj")]
    bare = without(twin, ours, pairs)
    for cache in (True, False):
        expected = bare.generate(prompt.tolist(), 9, end=None, cache=cache)
        with ablate(ours, pairs):
            assert torch.equal(ours.generate(prompt.tolist(), 9, end=None, cache=cache), expected)
        assert not torch.equal(ours.generate(prompt.tolist(), 9, end=None, cache=cache), expected)
