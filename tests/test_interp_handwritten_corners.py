"""Corners of attention written by hand: changes in place, places of heads, gradients, copies, what stays alive."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import pickle
import warnings
import weakref
from typing import Any

import pytest
import torch
from support.handwritten import CAUSAL, B, D, E, H, Handwritten, N, Parts, own_weights, plain, scores_of
from support.observed_models import ASK, check_against, close
from torch import Tensor, nn
from torch.nn import functional as F

from regard import Observe, watch
from regard.interp import ablate


@pytest.fixture
def x() -> Tensor:
    return torch.randn(B, N, 6, generator=torch.Generator().manual_seed(3))


def unrecognised(module: nn.Module, x: Tensor) -> None:
    """Check that the module computes the same, records nothing, says so, and is not ablated without an effect."""
    with torch.no_grad():
        expected = module(x)
        with pytest.warns(UserWarning, match="does not recognise"), watch(module) as recording:
            watched = module(x)
        close(watched, expected)
        assert len(recording) == 0
        with pytest.raises(ValueError, match="called no attention"), ablate(module, [("", 0)]):
            module(x)


def halved(w: Tensor) -> Tensor:
    w *= 0.5
    return w


def filled_through_a_view(w: Tensor) -> Tensor:
    w.diagonal(dim1=-2, dim2=-1).zero_()
    return w


def first_key_removed(w: Tensor) -> Tensor:
    w[..., 0] = 0
    return w


@pytest.mark.parametrize("change", [halved, filled_through_a_view, first_key_removed])
@pytest.mark.parametrize("squash", [False, True])
def test_weights_that_change_in_place_are_not_those_of_the_softmax(change: Any, squash: bool, x: Tensor) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = scores_of(q, k)
        w = (scores.tanh() if squash else scores).softmax(-1)
        return change(w) @ v

    unrecognised(Handwritten(attend), x)


def test_scores_that_change_after_the_softmax_are_not_those_of_the_weights(x: Tensor) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = scores_of(q, k)
        weights = scores.softmax(-1)
        scores.mul_(5)
        return weights @ v

    module = Handwritten(attend)
    with torch.no_grad(), watch(module, ASK) as recording:
        module(x)
    check_against(own_weights(module, x).detach(), recording[""])


def test_arguments_by_name(x: Tensor) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = torch.reshape(input=q, shape=q.shape)
        scores = torch.matmul(input=q, other=torch.transpose(input=k, dim0=-2, dim1=-1))
        scores = torch.mul(input=scores, other=0.5)
        weights = F.softmax(input=torch.masked_fill(input=scores, mask=~CAUSAL, value=-math.inf), dim=-1)
        weights = F.dropout(input=torch.clone(input=weights), p=0.0)
        return torch.matmul(input=weights, other=v)

    module = Handwritten(attend)
    expected = module(x)
    for context in (torch.enable_grad(), torch.no_grad()):
        with context, warnings.catch_warnings():
            # What is named is not always followed, which is told.
            warnings.simplefilter("ignore")
            with watch(module, ASK) as recording:
                watched = module(x)
        close(watched, expected)
        if recording:
            check_against(own_weights(module, x).detach(), recording[""])


def test_a_hidden_key_may_come_back(x: Tensor) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = scores_of(q, k).masked_fill(~CAUSAL, -1e9) * 1e-9
        return scores.softmax(-1) @ v

    module = Handwritten(attend)
    with torch.no_grad():
        expected = module(x)
        with watch(module, ASK) as recording:
            close(module(x), expected)
        check_against(own_weights(module, x), recording[""])


def heads_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return (scores_of(q, k).softmax(-1) @ v).transpose(0, 1)


def heads_first_in_one_axis(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1).reshape(H * B, N, -1) for x in (q, k, v))
    return (scores_of(q, k).softmax(-1) @ v).view(H, B, N, -1).transpose(0, 1)


def concatenated_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (torch.cat(x.unbind(1), 0) for x in (q, k, v))
    y = scores_of(q, k).softmax(-1) @ v
    return torch.stack(y.chunk(H, 0), 1)


def loop_over_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.stack([scores_of(q[:, h], k[:, h]).softmax(-1) @ v[:, h] for h in range(H)], 1)


@pytest.mark.parametrize(
    ("attend", "batch_size"),
    [
        (heads_first, B),
        (heads_first_in_one_axis, B),
        (concatenated_heads, B),
        (loop_over_heads, B),
        (loop_over_heads, H),
    ],
)
def test_batch_entries_are_not_taken_for_heads(attend: Parts, batch_size: int) -> None:
    unrecognised(Handwritten(attend), torch.randn(batch_size, N, 6))


def test_batch_entries_and_heads_in_one_axis(x: Tensor) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        return (scores_of(q, k).softmax(-1) @ v).unflatten(0, (B, H))

    module = Handwritten(attend)
    with torch.no_grad(), watch(module, ASK) as recording:
        module(x)
        weights = (scores_of(*module.heads(x)[:2])).softmax(-1)
    check_against(weights, recording[""])


def test_what_autograd_sees_is_the_models_own(x: Tensor) -> None:
    def detached(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scores_of(q, k).softmax(-1).detach() @ v

    def without_gradients(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.no_grad():
            scores = scores_of(q, k)
        return scores.softmax(-1) @ v

    def hooked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = scores_of(q, k).softmax(-1)
        if weights.requires_grad:
            weights.register_hook(lambda gradient: gradient * 2)
        return weights @ v

    for attend in (detached, without_gradients, hooked):
        module = Handwritten(attend)
        parameters = list(module.parameters())
        expected = torch.autograd.grad(module(x).square().sum(), parameters, allow_unused=True)
        with watch(module, ASK) as recording:
            watched = torch.autograd.grad(module(x).square().sum(), parameters, allow_unused=True)
        for a, b in zip(watched, expected, strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                close(a, b)
        check_against(own_weights(module, x).detach(), recording[""])


def test_second_derivatives_and_function_transforms_are_the_models_own(x: Tensor) -> None:
    module = Handwritten(plain)
    z = x.clone().requires_grad_()

    def penalty() -> Tensor:
        (gradient,) = torch.autograd.grad(module(z).square().sum(), z, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), z)[0]

    expected = penalty()
    inputs = torch.stack([x, x + 1])
    mapped = torch.func.vmap(module)(inputs)
    with watch(module):
        close(penalty(), expected)
    with warnings.catch_warnings():
        # Within a transform nothing is recorded, which is told.
        warnings.simplefilter("ignore")
        with watch(module):
            close(torch.func.vmap(module)(inputs), mapped)


def test_islands_of_single_precision_in_autocast(x: Tensor) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            scores = scores_of(q.float(), k.float())
        return scores.softmax(-1) @ v

    module = Handwritten(attend)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = module(x)
        with watch(module):
            watched = module(x)
    assert watched.dtype == expected.dtype
    close(watched.float(), expected.float(), 1e-2)


def test_weights_that_are_used_twice_are_measured_once(x: Tensor) -> None:
    def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = scores_of(q, k).softmax(-1)
        return weights @ (weights @ v)

    def in_parts(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = scores_of(q, k).softmax(-1)
        return torch.cat([weights[:, :, :4] @ v, weights[:, :, 4:] @ v], 2)

    for attend in (twice, in_parts):
        module = Handwritten(attend)
        with torch.no_grad():
            heads = module.attend(*module.heads(x))
            heads[:, 0] = 0
            with watch(module) as recording, ablate(module, [("", 0)]):
                ablated = module(x)
            if attend is twice:
                # Ablated, the inner product gives 0 to the outer one.
                close(ablated, module.out(heads.transpose(1, 2).flatten(-2)))
        assert len(recording.calls[""]) == (1 if attend is twice else 2)


def test_saved_keys_of_a_cache_that_is_overwritten(x: Tensor) -> None:
    cache = torch.zeros(B, H, N, D)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache.copy_(k)
        return scores_of(q, cache).softmax(-1) @ v

    module = Handwritten(attend)
    with torch.no_grad():
        with watch(module, Observe(keep=True)) as recording:
            module(x)
            module(x + 1)
        weights = own_weights(module, x)
    for head in range(H):
        close(recording.calls[""][0].weights(head), weights[0, head])


def test_nothing_stays_alive(x: Tensor) -> None:
    alive: list[Any] = []

    class Remembers(Handwritten):
        last: Tensor

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        alive.append(weakref.ref(q))
        module.last = scores_of(q, k).softmax(-1)
        return module.last @ v

    module = Remembers(attend)
    with torch.no_grad(), watch(module):
        module(x)
        expected = repr(own_weights(module, x))
        module(x)
    gc.collect()
    assert [ref() for ref in alive] == [None] * len(alive)
    assert repr(module.last) == expected


def test_copies_of_a_watched_model_are_not_watched(x: Tensor) -> None:
    module = nn.Sequential(nn.Linear(6, 6))
    module.append(nn.MultiheadAttention(6, 2, batch_first=True))
    model = nn.ModuleList([module[1]])
    with watch(model) as recording:
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]  # noqa: S301
        for each in copies:
            each[0](x, x, x)
    assert len(recording) == 0
    for each in copies:
        each[0](x, x, x)


def test_a_hook_that_raises_before_ours_does_not_shift_paths(x: Tensor) -> None:
    class Retries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Handwritten(plain)
            self.second = Handwritten(plain)

        def forward(self, x: Tensor) -> Tensor:
            with contextlib.suppress(RuntimeError):
                x = self.first(x)
            return self.second(x)

    def refuse(module: nn.Module, args: Any) -> None:
        raise RuntimeError("not now")

    model = Retries()
    with torch.no_grad(), watch(model) as recording:
        handle = model.first.register_forward_pre_hook(refuse)
        model(x)
        handle.remove()
        model(x)
    assert {path: len(calls) for path, calls in recording.calls.items()} == {"second": 2, "first": 1}


class Custom(nn.Module):
    """An output projection of another library, which takes inputs of three axes only, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.in_features = H * E
        self.out_features = 6
        self.weight = nn.Parameter(torch.randn(6, H * E))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        _batch, _n, _width = x.shape
        self.calls += 1
        return x @ self.weight.T


def test_norms_of_values_with_other_output_layers(x: Tensor) -> None:
    module = Handwritten(plain)
    module.out = Custom()  # type: ignore[assignment]
    with torch.no_grad(), watch(module, values=True) as recording:
        module(x)
        module(x)
        v = module.heads(x)[2]
    W = module.out.weight.detach().unflatten(1, (H, E))
    expected = torch.einsum("bhme,ohe->bhmo", v, W).norm(dim=-1)
    for call in recording.calls[""]:
        close(call.value_norm, expected)
    assert module.out.calls == 2

    class Gated(Handwritten):
        """Two layers read the output of the heads, so there is no single W_O."""

        def __init__(self) -> None:
            super().__init__(plain)
            self.gate = nn.Linear(H * E, H * E)

        def forward(self, x: Tensor) -> Tensor:
            y = self.attend(*self.heads(x)).transpose(1, 2).flatten(-2)
            return self.out(y) * self.gate(y).mean().sigmoid()

    gated = Gated()
    with torch.no_grad(), watch(gated, values=True) as recording:
        gated(x)
    assert recording[""].value_norm is None


def test_a_mean_of_all_keys_if_every_score_is_low(x: Tensor) -> None:
    """Scores of −10⁴ everywhere hide nothing."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (scores_of(q, k) * 0 - 1e4).softmax(-1) @ v

    module = Handwritten(attend)
    with torch.no_grad(), watch(module) as recording:
        module(x)
    close(recording[""].entropy, torch.full((B, H, N), math.log(N)))


def test_part_of_a_watched_model(x: Tensor) -> None:
    """A part that is called alone gives ordinary tensors, too."""

    class Weighs(nn.Module):
        num_heads = H

        def __init__(self) -> None:
            super().__init__()
            self.inner = Handwritten(plain)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            q, k, v = self.inner.heads(x)
            weights = F.softmax(scores_of(q, k), dim=-1)
            return weights @ v, weights

    model = nn.ModuleList([Weighs()])
    with torch.no_grad(), watch(model) as recording:
        _, weights = model[0](x)
        assert type(weights) is Tensor
    assert list(recording) == ["0"]


def test_a_layer_that_would_be_ablated_only_partly_is_refused(x: Tensor) -> None:
    def both(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scores_of(q, k).softmax(-1) @ v + scores_of(q, k).sigmoid() @ v

    module = Handwritten(both)
    with torch.no_grad(), pytest.raises(ValueError, match="only partly"), ablate(module, [("", 0)]):
        module(x)


def test_products_of_weights_with_weights_are_no_attention(x: Tensor) -> None:
    """As in Nyströmformer, which inverts a matrix of weights by products."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = scores_of(q, k).softmax(-1)
        return (weights @ (weights * 0.5)) @ v

    unrecognised(Handwritten(attend), x)
