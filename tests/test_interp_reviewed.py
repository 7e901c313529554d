"""Watched models that change tensors in place, nest contexts, reuse memory, or write attention in unusual layouts."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.handwritten import B, D, E, H, Handwritten, N, own_weights, plain, scores_of
from support.observed_models import ASK, check_against, close
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from regard import Causal, Padding, watch
from regard.interp import ablate
from regard.interp._deferred_scores import DeferredScores
from regard.interp._mask_tensor import MaskTensor, attach_mask_value, mask_value_of
from regard.interp._matrix_products import matrix_product, value_product

LOW = -1e9


@pytest.fixture
def x() -> Tensor:
    return torch.randn(B, N, 6, generator=torch.Generator().manual_seed(5))


class Two(nn.Module):
    """Two layers, one after the other."""

    def __init__(self, attend: Any = plain) -> None:
        super().__init__()
        self.a = Handwritten(attend)
        self.b = Handwritten(attend)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


def check_exact(module: nn.Module, x: Tensor) -> None:
    """Check that a watched module computes the same, and that its weights are recorded or are named as unseen."""
    expected = module(x)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with watch(module, ASK) as recording:
            watched = module(x)
    close(watched, expected)
    assert watched.requires_grad == expected.requires_grad
    if not recording:
        assert any("does not recognise" in str(warning.message) for warning in caught)
    elif isinstance(module, Handwritten):
        check_against(own_weights(module, x).detach(), recording[""])


# Changes in place


def test_scores_that_changed_in_place_may_be_kept(x: Tensor) -> None:
    class Keeps(Handwritten):
        last: Any = None

        def forward(self, x: Tensor) -> Any:
            q, k, v = self.heads(x)
            scores = q @ k.mT
            scores /= math.sqrt(D)
            self.last = scores.softmax(-1)
            return self.out((self.last @ v).transpose(1, 2).flatten(-2)), self.last

    module = Keeps(plain)
    with torch.no_grad():
        expected = module(x)
        with watch(module, ASK) as recording:
            watched = module(x)
    close(watched[0], expected[0])
    close(watched[1], expected[1])
    check_against(expected[1], recording[""])


def scores_change_through_a_view(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = scores_of(q, k)
    weights = scores.softmax(-1)
    before = weights @ v
    for row in scores.unbind(1):
        row.fill_(0.0)
    return before + weights.tanh() @ v


def weights_change_through_a_view(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = scores_of(q, k).softmax(-1)
    weights[..., 0].zero_()
    return weights @ v


def scores_change_after_squashed_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = scores_of(q, k).tanh()
    weights = scores.softmax(-1)
    scores[..., 0].fill_(5.0)
    return weights @ v


def temperature_changes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    temperature = torch.tensor(0.5)
    scores = (q @ k.mT) * temperature
    temperature.fill_(5.0)
    return scores.tanh().softmax(-1) @ v


def fill_value_changes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    low = torch.tensor(LOW)
    scores = scores_of(q, k).masked_fill(torch.ones(q.shape[2], k.shape[2]).triu(1).bool(), low)
    low.fill_(0.0)
    return scores.tanh().softmax(-1) @ v


def condition_changes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    visible = torch.ones(q.shape[2], k.shape[2]).tril().bool()
    scores = torch.where(visible, scores_of(q, k), LOW)
    visible.fill_(True)
    return scores.tanh().softmax(-1) @ v


IN_PLACE = [
    scores_change_through_a_view,
    weights_change_through_a_view,
    scores_change_after_squashed_softmax,
    temperature_changes,
    fill_value_changes,
    condition_changes,
]


@pytest.mark.parametrize("attend", IN_PLACE)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_changes_in_place_counts_as_it_was(attend: Any, mode: Callable[[], Any], x: Tensor) -> None:
    module = Handwritten(attend)
    with mode():
        if attend is scores_change_through_a_view:
            # Its two products have weights of their own.
            expected = module(x)
            with pytest.warns(UserWarning, match="does not recognise"), watch(module):
                close(module(x), expected)
            return
        check_exact(module, x)


def test_returned_weights_do_not_follow_a_change_of_their_scores(x: Tensor) -> None:
    class Returns(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            scores = x @ x.mT
            weights = scores.softmax(-1)
            y = weights @ x
            scores[..., 0].zero_()
            return y, weights

    module = Returns()
    with torch.no_grad():
        expected = module(x)
        with watch(module):
            watched = module(x)
    close(watched[0], expected[0])
    close(watched[1], expected[1])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_mask_that_changes_in_place_is_no_mask_value(mode: Callable[[], Any]) -> None:
    def visible() -> Tensor:
        return torch.ones(5, 5).tril().bool()[None, None].clone()

    def assign(mask: Tensor) -> None:
        mask[:, :, :, 1] = False

    def change_a_view(mask: Tensor) -> None:
        mask[:, :, :, 1].fill_(False)

    def change_in_numpy(mask: Tensor) -> None:
        mask.numpy()[:, :, :, 1] = False

    def change_the_data(mask: Tensor) -> None:
        mask.data[:, :, :, 1] = False

    with mode():
        for change in (assign, change_a_view, change_in_numpy, change_the_data):
            mask = MaskTensor(Causal(), visible, (1, 1, 5, 5), "cpu")
            assert int(mask.sum()) == 15 and mask_value_of(mask) is not None
            change(mask)
            assert mask_value_of(mask) is None and not bool(mask[..., 1].any())
        # What `generate` prepares is an ordinary tensor.
        for change in (assign, change_a_view):
            dense = attach_mask_value(visible(), Causal())
            assert mask_value_of(dense) is not None
            change(dense)
            assert mask_value_of(dense) is None


def test_a_mask_that_changes_after_it_was_added(x: Tensor) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = MaskTensor(Padding(torch.arange(k.shape[2])[None] > 1), make, (1, 1, N, N), "cpu", torch.float32)
        scores = scores_of(q, k) + mask
        mask[..., 3] = LOW
        return scores.tanh().softmax(-1) @ v

    def make() -> Tensor:
        return torch.where(torch.arange(N) > 1, 0.0, LOW).expand(1, 1, N, N).clone()

    with torch.no_grad():
        check_exact(Handwritten(attend), x)


# Gradients


class Tempered(nn.Module):
    """Only a number is learned: the temperature, or the score of hidden keys."""

    num_heads = H

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.number = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (H, 2)).transpose(1, 2)
        scores = q @ q.mT
        if self.how == "times":
            scores = scores * self.number
        elif self.how == "divided":
            scores = scores / self.number.exp()
        else:
            scores = scores.masked_fill(torch.ones(N, N).triu(1).bool(), self.number * LOW)
        return scores.softmax(-1) @ q


@pytest.mark.parametrize("how", ["times", "divided", "filled"])
def test_a_learned_number_keeps_its_gradient(how: str, x: Tensor) -> None:
    module = Tempered(how)
    module(x).square().sum().backward()
    assert module.number.grad is not None
    expected = module.number.grad.clone()
    module.number.grad = None
    with watch(module):
        module(x).square().sum().backward()
    close(module.number.grad, expected)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("attend", [plain, sdpa])
def test_heads_that_are_checkpointed_are_not_ablated(attend: Any, reentrant: bool, x: Tensor) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = Handwritten(attend)

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.a, x, use_reentrant=reentrant)

    model = Checkpointed()
    x.requires_grad_()
    with pytest.raises(ValueError, match="checkpointing"), ablate(model, [("a", 1)]):
        model(x)
    with torch.no_grad(), ablate(model, [("a", 1)]):
        model(x.detach())


# Nested contexts


def test_contexts_of_a_model_and_of_its_part(x: Tensor) -> None:
    model = Two()
    other = Two()
    with torch.no_grad():
        with watch(model) as whole, watch(model.a) as part:
            model(x)
        assert list(whole) == ["a", "b"] and list(part) == [""]
        with watch(model.a) as part, watch(model) as whole:
            model(x)
        assert list(whole) == ["a", "b"] and list(part) == [""]
        with watch(model) as first, watch(other) as second:
            model(x)
            other(x)
        assert list(first) == list(second) == ["a", "b"]

        with ablate(model, [("a", 0)]):
            expected = model(x)
        with ablate(model, [("a", 0)]), watch(other) as recording:
            close(model(x), expected)
            other(x)
        assert list(recording) == ["a", "b"]
        with watch(model) as recording, ablate(model.a, [("", 0)]):
            close(model(x), expected)
        assert list(recording) == ["a", "b"]


def test_a_part_that_ends_first_leaves_the_weights_of_the_whole(x: Tensor) -> None:
    class Split(nn.Module):
        num_heads = H

        def __init__(self) -> None:
            super().__init__()
            self.softmax = nn.Softmax(-1)

        def forward(self, x: Tensor) -> Tensor:
            q = x.unflatten(-1, (H, 2)).transpose(1, 2)
            return self.softmax(q @ q.mT) @ q

    model = Split()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        nothing = pytest.warns(UserWarning, match="nothing was recorded")
        with watch(model) as whole, nothing, watch(model.softmax):
            model(x)
        assert list(whole) == [""] and whole.metadata["how"] == {"": "attention"}


def test_what_a_part_and_the_whole_do_not_see_is_named_in_both(x: Tensor) -> None:
    def sigmoids(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scores_of(q, k).sigmoid() @ v

    model = Two(sigmoids)
    with (
        torch.no_grad(),
        pytest.warns(UserWarning, match="2 modules: a, b"),
        watch(model),
        pytest.warns(UserWarning, match="1 module: the model itself"),
        watch(model.b),
    ):
        model(x)


def test_contexts_that_end_in_the_order_in_which_they_began(x: Tensor) -> None:
    model = Handwritten(plain)
    first = watch(model)
    second = watch(model)
    with torch.no_grad():
        one = first.__enter__()
        other = second.__enter__()
        model(x)
        first.__exit__(None, None, None)
        model(x)
        second.__exit__(None, None, None)
        model(x)
    assert len(one.calls[""]) == 1 and len(other.calls[""]) == 2


# Layouts in memory, and the layer that reads the heads


def viewed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = scores_of(q, k).softmax(-1) @ v
    return out.view(B * H, N, -1).view(out.shape)


def viewed_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = F.scaled_dot_product_attention(q[..., :E], k[..., :E], v)
    return out.transpose(1, 2).view(B, N, -1).unflatten(-1, (H, -1)).transpose(1, 2)


def viewed_contiguous_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = F.scaled_dot_product_attention(q[..., :E].contiguous(), k[..., :E].contiguous(), v)
    return out.view(B * H, N, -1).view(out.shape)


def wide_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = F.scaled_dot_product_attention(q, k, v)
    return out.view(B * H, N, -1).view(out.shape)


def merged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As Bloom, XGLM and DeBERTa-v2: the heads are joined with the batch."""
    q, k, v = (each.reshape(B * H, N, -1) for each in (q, k, v))
    return torch.bmm(scores_of(q, k).softmax(-1), v).view(B, H, N, -1)


def cast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As GPT-J in bfloat16: the attention is in single precision."""
    return (scores_of(q.double(), k.double()).softmax(-1) @ v.double()).to(v.dtype)


def sequence_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = torch.einsum("bhqk,bhkd->qbhd", scores_of(q, k).softmax(-1), v)
    return out.permute(1, 2, 0, 3)


@pytest.mark.parametrize(
    "attend", [viewed, viewed_sdpa, viewed_contiguous_sdpa, wide_sdpa, merged, cast, sequence_first, plain]
)
@pytest.mark.parametrize("gradients", [False, True])
def test_norms_of_values_do_not_change_the_layout(attend: Any, gradients: bool, x: Tensor) -> None:
    module = Handwritten(attend)
    with torch.set_grad_enabled(gradients):
        expected = module(x)
        with watch(module):
            close(module(x), expected)
        with watch(module, values=True) as recording:
            close(module(x), expected)
        v = module.heads(x)[2].detach()
    W = module.out.weight.detach().unflatten(1, (H, E))
    close(recording[""].value_norm, torch.einsum("bhme,ohe->bhmo", v, W).norm(dim=-1))


EQUATIONS = [
    "bhqk,bhkd->bhqd",
    "bhqk,bkhd->bqhd",
    "bkhd,bhqk->bqhd",
    "bhqk,bhkd->qbhd",
    "bkhd,bhqk->bhdq",
    "bhqk,bhkd->bdqh",
]


@pytest.mark.parametrize("equation", EQUATIONS)
def test_products_have_the_memory_of_torchs_own(equation: str) -> None:
    sizes = {"b": 2, "h": 3, "q": 5, "k": 7, "d": 11}
    terms = equation.split("->")[0].split(",")
    factors = [torch.randn([sizes[label] for label in term]) for term in terms]
    expected = torch.einsum(equation, *factors)
    product = matrix_product(torch.einsum, (equation, *factors), {})
    assert product is not None
    first = terms[0] == "bhqk"
    values = value_product(product, first, 3, list)
    assert values is not None
    model = values.as_model(values.heads_first(expected))
    assert model.stride() == expected.stride() and torch.equal(model, expected)


class Permuted(Handwritten):
    """The features that the linear layer reads are in another order than the heads."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attend(*self.heads(x)).permute(0, 2, 3, 1).flatten(-2))


class Scaled(Handwritten):
    """The heads are scaled before the linear layer reads them."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.attend(*self.heads(x)).transpose(1, 2).reshape(B, N, -1)
        y.mul_(torch.arange(1, H * E + 1))
        return self.out(y)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", [Permuted, Scaled])
def test_layers_without_norms_are_named(kind: Any, mode: Callable[[], Any], x: Tensor) -> None:
    module = kind(plain)
    with mode():
        expected = module(x)
        with pytest.warns(UserWarning, match="no norms of values at 1 module"), watch(module, values=True) as recording:
            close(module(x), expected)
    assert recording[""].value_norm is None


# Code that is not followed


def test_torchs_attention_within_function_transforms(x: Tensor) -> None:
    module = Handwritten(sdpa)
    parameters = dict(module.named_parameters())

    def loss(parameters: Any) -> Tensor:
        return torch.func.functional_call(module, parameters, (x,)).square().sum()

    expected = torch.func.grad(loss)(parameters)
    mapped = torch.func.vmap(module)(torch.stack([x, x + 1]))
    with pytest.warns(UserWarning, match="does not recognise"), watch(module):
        gradients = torch.func.grad(loss)(parameters)
        close(torch.func.vmap(module)(torch.stack([x, x + 1])), mapped)
    close(gradients["out.weight"], expected["out.weight"])


def test_flex_attention_is_named(x: Tensor) -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")

    class Flex(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return flex.flex_attention(x, x, x)

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = Handwritten(plain)
            self.b = Flex()

        def forward(self, x: Tensor) -> Any:
            return self.b(self.a(x)[:, None])

    model = Mixed()
    with torch.no_grad(), warnings.catch_warnings():
        # Torch warns of slow code.
        warnings.simplefilter("ignore")
        expected = model(x)
        with pytest.warns(UserWarning, match="1 module: b"), watch(model) as recording:
            close(model(x), expected)
    assert list(recording) == ["a"]


def test_a_model_that_is_traced_within_a_context(x: Tensor) -> None:
    module = Handwritten(plain)
    with torch.no_grad(), warnings.catch_warnings():
        # Torch and regard both say what they do not do here.
        warnings.simplefilter("ignore")
        with watch(module):
            traced: Any = torch.jit.trace(module, x)
            exported = torch.export.export(module, (x,))
        close(traced(x + 1), module(x + 1))
        close(exported.module()(x + 1), module(x + 1))


# Layouts of heads


class Unnamed(Handwritten):
    num_heads = None  # type: ignore[assignment]


def heads_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (each.transpose(0, 1) for each in (q, k, v))
    return (scores_of(q, k).softmax(-1) @ v).transpose(0, 1)


def heads_first_in_one_axis(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads, batch = q.shape[1], q.shape[0]
    q, k, v = (each.transpose(0, 1).reshape(heads * batch, each.shape[2], -1) for each in (q, k, v))
    return (scores_of(q, k).softmax(-1) @ v).view(heads, batch, q.shape[1], -1).transpose(0, 1)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize(
    ("attend", "kind", "batch_size"),
    [
        (heads_first, Unnamed, B),
        (heads_first, Unnamed, H),
        (heads_first, Handwritten, H),
        (heads_first_in_one_axis, Unnamed, H),
        (heads_first_in_one_axis, Handwritten, H),
    ],
)
def test_heads_first_are_not_taken_for_batch_entries(
    attend: Any, kind: Any, batch_size: int, gradients: bool, x: Tensor
) -> None:
    module = kind(attend)
    x = torch.randn(batch_size, N, 6)
    with torch.set_grad_enabled(gradients):
        expected = module(x)
        with pytest.warns(UserWarning, match="does not recognise"), watch(module) as recording:
            close(module(x), expected)
    assert not recording
    # The usual order is recognised, whatever the sizes are.
    usual = kind(plain)
    with torch.set_grad_enabled(gradients), watch(usual, ASK) as recording:
        usual(x)
    check_against(own_weights(usual, x).detach(), recording[""])


class OneKeyHead(Handwritten):
    """Several query heads read one head of keys and values; heads come after the queries."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        scores = torch.einsum("bnhd,bmd->bnhm", q.transpose(1, 2), k[:, 0])
        self.weights = scores.softmax(-1)
        return self.out(torch.einsum("bnhm,bmd->bnhd", self.weights, v[:, 0]).flatten(-2))


@pytest.mark.parametrize("gradients", [False, True])
def test_heads_after_the_queries(gradients: bool, x: Tensor) -> None:
    module = OneKeyHead(plain)
    with torch.set_grad_enabled(gradients):
        expected = module(x)
        weights = module.weights.transpose(1, 2).detach()
        with watch(module, ASK) as recording:
            close(module(x), expected)
        check_against(weights, recording[""])
        # As many queries as heads: nothing says which axis is which.
        short = x[:, :H]
        expected = module(short)
        with pytest.warns(UserWarning, match="does not recognise"), watch(module) as recording:
            close(module(short), expected)
        assert not recording


@pytest.mark.parametrize("gradients", [False, True])
def test_query_heads_in_groups(gradients: bool, x: Tensor) -> None:
    class Grouped(nn.Module):
        num_heads = 6

        def __init__(self) -> None:
            super().__init__()
            self.weights = torch.zeros(())
            self.q = nn.Linear(6, 24)
            self.kv = nn.Linear(6, 12)

        def forward(self, x: Tensor) -> Tensor:
            q = self.q(x).unflatten(-1, (H, 2, 4)).permute(0, 2, 3, 1, 4)
            k = self.kv(x).unflatten(-1, (H, 4)).transpose(1, 2).unsqueeze(2)
            self.weights = (q @ k.mT).softmax(-1)
            return self.weights @ k

    module = Grouped()
    with torch.set_grad_enabled(gradients):
        expected = module(x)
        weights = module.weights.flatten(1, 2).detach()
        with watch(module, ASK) as recording:
            close(module(x), expected)
    check_against(weights, recording[""])


def test_a_similarity_with_a_part_of_a_parameter_is_no_attention(x: Tensor) -> None:
    class Codes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = Handwritten(plain)
            self.table = nn.Parameter(torch.randn(9, 6))

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            codes = self.table[:5].expand(B, 5, 6)
            return (h @ codes.mT).softmax(-1) @ codes

    model = Codes()
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode(), watch(model) as recording:
            model(x)
        assert list(recording) == ["a"]


# What is reported, and errors


def test_how_a_layer_was_observed_counts_all_its_calls(x: Tensor) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scores_of(q, k).tanh().softmax(-1) @ v + scores_of(q, k).softmax(-1) @ v

    module = Handwritten(attend)
    with torch.no_grad(), watch(module) as recording:
        module(x)
    assert len(recording.calls[""]) == 2 and recording.metadata["how"] == {"": "weights"}


def test_layers_that_match_nothing(x: Tensor) -> None:
    model = Two()
    for gradients in (False, True):
        with (
            torch.set_grad_enabled(gradients),
            pytest.raises(ValueError, match="2 attention layers: a, b"),
            watch(model, layers="none"),
        ):
            model(x)


def test_errors_are_torchs_own(x: Tensor) -> None:
    def tries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        products: list[Callable[[], Tensor]] = [
            lambda: q @ k,
            lambda: torch.bmm(q, k.mT),
            lambda: torch.einsum("bhqd,bhdk->bhqk", q, k),
            lambda: q[:, :2] @ k.mT,
            lambda: scores_of(q, k).softmax(-1) @ v[:, :, :3],
            lambda: scores_of(q, k).softmax(-1) @ v.double(),
            lambda: scores_of(q, k).softmax(-1) @ v[:, :2],
            lambda: F.scaled_dot_product_attention(q.half(), k, v),
            lambda: F.scaled_dot_product_attention(q, k[..., :2], v),
        ]
        for product in products:
            with pytest.raises(RuntimeError):
                product()
        return plain(q, k, v)

    module = Handwritten(tries)
    with torch.no_grad():
        expected = module(x)
        with warnings.catch_warnings():
            # A softmax that was never used is named.
            warnings.simplefilter("ignore")
            with watch(module):
                close(module(x), expected)


def test_a_mask_and_causal_at_once(x: Tensor) -> None:
    visible = torch.ones(N, N, dtype=torch.bool)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        try:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=True)
        except RuntimeError:
            return F.scaled_dot_product_attention(q, k, v)

    module = Handwritten(attend)
    expected = module(x)
    with warnings.catch_warnings():
        # Some of torch's kernels take both, and regard does not.
        warnings.simplefilter("ignore")
        with watch(module):
            close(module(x), expected)


@dataclasses.dataclass
class Result:
    """What a model returns."""

    hidden: Tensor
    weights: list[Tensor]


def test_a_data_class_holds_ordinary_tensors(x: Tensor) -> None:
    class Returns(Handwritten):
        def forward(self, x: Tensor) -> Any:
            q, k, v = self.heads(x)
            weights = scores_of(q, k).softmax(-1)
            return Result(weights @ v, [weights])

    module = Returns(plain)
    with torch.no_grad():
        expected = module(x)
        with watch(module):
            watched = module(x)
    assert type(watched.weights[0]) is Tensor
    close(watched.weights[0], expected.weights[0])


def test_scores_of_an_earlier_pass_are_ordinary_tensors(x: Tensor) -> None:
    class Remembers(Handwritten):
        last: Any = None

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.heads(x)
            before = self.last
            self.last = scores_of(q, k).softmax(-1)
            y = self.last @ v
            return y if before is None else y + before.sum()

    module = Remembers(plain)
    with torch.no_grad():
        first = module(x)
        second = module(x)
        module.last = None
        with watch(module):
            close(module(x), first)
            assert isinstance(module.last, DeferredScores) and module.last.is_released
            close(module(x), second)
