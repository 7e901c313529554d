"""Attention that a model writes by hand is observed: from q and k where that is possible, else from its own weights."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints import make
from support.handwritten import (
    ADDED,
    ALIBI,
    CAUSAL,
    LOWEST,
    B,
    D,
    E,
    H,
    Handwritten,
    N,
    Parts,
    own_weights,
    plain,
    scores_of,
)
from support.model_configs import V, ids, real_rows
from support.observed_models import ASK, check_against, close
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from regard import Observe, watch
from regard.interp import ablate
from regard.interp._deferred_scores import DeferredScores


def gpt(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(2, 3)) * D**-0.5
    scores = torch.where(CAUSAL, scores, torch.tensor(LOWEST))
    weights = F.dropout(F.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype), p=0.1, training=False)
    return torch.matmul(weights, v)


def added_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.max(scores_of(q, k) + ADDED, torch.tensor(LOWEST))
    return torch.softmax(scores.float(), 3).type_as(v) @ v


def filled_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q / math.sqrt(D)) @ k.mT
    return scores.masked_fill(~CAUSAL, -math.inf).softmax(-1).matmul(v)


def in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(2, 3))
    scores *= D**-0.5
    scores += ALIBI
    scores.masked_fill_(~CAUSAL, -math.inf)
    return scores.softmax(-1) @ v


def merged_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As Bloom: one axis for batch entries and heads."""
    merged = [x.reshape(B * H, *x.shape[2:]) for x in (q, k, v)]
    added = ALIBI.expand(B, H, N, N).reshape(B * H, N, N)
    scores = torch.baddbmm(added, merged[0], merged[1].mT, beta=1.0, alpha=D**-0.5)
    scores = scores.view(B, H, N, N) + ADDED
    weights = F.softmax(scores, dim=-1).view(B * H, N, N)
    return torch.bmm(weights, merged[2]).view(B, H, N, E)


def sum_then_scale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (torch.einsum("bhqd,bhkd->bhqk", q, k) + ALIBI + ADDED) / math.sqrt(D)
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)


def heads_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * D**-0.5
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(dim=-1), v).transpose(1, 2)


def one_key_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Multi-query attention, without repeated keys."""
    scores = torch.einsum("bhqd,bkd->bhqk", q, k[:, 0]) * D**-0.5
    return torch.einsum("bhqk,bkd->bhqd", scores.softmax(-1), v[:, 0])


FROM_QUERIES = [plain, gpt, added_mask, filled_mask, in_place, merged_heads, sum_then_scale, heads_last, one_key_head]


def no_softmax_of_scores_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As CogView: the largest score is subtracted first."""
    scores = scores_of(q, k) / 4
    scores = (scores - scores.amax(-1, keepdim=True)) * 4
    return scores.softmax(-1) @ v


def softcapped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (torch.tanh(scores_of(q, k) / 2) * 2 + ADDED).softmax(-1) @ v


def keys_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The softmax over the first of both axes."""
    scores = k @ q.transpose(-1, -2) / math.sqrt(D)
    return torch.einsum("bhkq,bhkd->bhqd", scores.softmax(2), v)


def talking_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhqk,hg->bgqk", scores_of(q, k), torch.tensor([[1.0, 0.5, 0], [0, 1, 0], [0.2, 0, 1]]))
    return scores.softmax(-1) @ v


def weights_filled_later(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As DeBERTa's XSoftmax: zeros at hidden keys after the softmax, too."""
    hidden = ~CAUSAL.clone()
    hidden[2] = True
    weights = scores_of(q, k).masked_fill(hidden, LOWEST).softmax(-1)
    return weights.masked_fill(hidden, 0) @ v


def changed_before_use(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The queries change after the product: their old numbers count."""
    scores = q @ k.transpose(-1, -2)
    q.mul_(3)
    return (scores / math.sqrt(D)).softmax(-1) @ v


def changed_view(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = scores_of(q, k)
    merged = scores.view(B * H, N, N)
    merged += ADDED[0]
    return scores.softmax(-1) @ v


def scored_again(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores change in place after something was made of them."""
    scores = scores_of(q, k)
    doubled = scores * 2
    scores.zero_()
    return (doubled + scores).softmax(-1) @ v


FROM_WEIGHTS = [no_softmax_of_scores_alone, softcapped, keys_first, talking_heads, weights_filled_later]
FROM_WEIGHTS += [changed_view, scored_again]


@pytest.fixture
def x() -> Tensor:
    return torch.randn(B, N, 6, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("attend", "how"),
    [(attend, "attention") for attend in FROM_QUERIES]
    + [(attend, "weights") for attend in FROM_WEIGHTS]
    + [(changed_before_use, "attention")],
)
def test_every_style(attend: Parts, how: str, x: Tensor) -> None:
    module = Handwritten(attend)
    with torch.no_grad():
        expected = module(x)
        with watch(module, ASK) as recording:
            watched = module(x)
        # Each product with values needs its own E, which the unit matrix has not.
        weights = own_weights(module, x) if attend is not merged_heads else merged_weights(module, x)
    close(watched, expected)
    assert type(watched) is Tensor
    if attend is not changed_before_use:
        assert recording.metadata["how"] == {"": how}
    check_against(weights, recording[""])


def merged_weights(module: Handwritten, x: Tensor) -> Tensor:
    q, k, _ = module.heads(x)
    return (scores_of(q, k) + ALIBI + ADDED).softmax(-1)


def test_keys_are_not_repeated_for_heads_and_no_matrix_is_made() -> None:
    """Deferred scores never exist: no tensor of the pass is as large as one map."""
    largest = [0]

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, tuple | list) else (out,):
                if type(x) is Tensor:
                    largest[0] = max(largest[0], x.numel())
            return out

    n = 301
    module = Handwritten(plain)
    x = torch.randn(1, n, 6)
    with torch.no_grad(), Sizes():
        module(x)
        assert largest[0] >= n * n
        largest[0] = 0
        with watch(module) as recording:
            module(x)
    assert recording.metadata["how"] == {"": "attention"}
    assert largest[0] < n * n


def test_gradients_flow(x: Tensor) -> None:
    for attend in (plain, softcapped, in_place):
        module = Handwritten(attend)
        expected = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
        with watch(module):
            watched = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
        for a, b in zip(watched, expected, strict=True):
            close(a, b, 1e-4)


def torch_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("attend", [plain, softcapped, torch_attention])
def test_checkpointing_that_runs_the_model_again(attend: Parts, x: Tensor) -> None:
    """In backward torch turns modes off, and compares the tensors that the second run saves with those of the first."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Handwritten(attend)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    model = Checkpointed()
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    with watch(model, ASK) as recording:
        loss = model(x).square().sum()
        watched = torch.autograd.grad(loss, list(model.parameters()))
    for a, b in zip(watched, expected, strict=True):
        close(a, b)
    assert len(recording.calls["inner"]) == 1
    check_against(own_weights(model.inner, x).detach(), recording["inner"])


def test_zero_lengths() -> None:
    def squashed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scores_of(q, k).tanh().softmax(-1) @ v

    for attend in (plain, squashed):
        module = Handwritten(attend)
        for shape in ((0, N, 6), (B, 0, 6), (B, 1, 6)):
            with torch.no_grad(), watch(module) as recording:
                out = module(torch.zeros(shape))
            assert out.shape == shape and recording[""].n == shape[1]


@pytest.mark.parametrize("attend", [plain, softcapped, merged_heads, heads_last])
def test_heads_are_ablated(attend: Parts, x: Tensor) -> None:
    module = Handwritten(attend)
    with torch.no_grad():
        heads = module.attend(*module.heads(x))
        heads[:, 1] = 0
        expected = module.out(heads.transpose(1, 2).flatten(-2))
        # A watch sees the weights, whatever an ablation does to the output, in either order.
        with watch(module) as outside, ablate(module, [("", 1)]), watch(module) as inside:
            ablated = module(x)
        with watch(module) as alone:
            module(x)
    close(ablated, expected)
    close(outside[""].entropy, alone[""].entropy)
    close(inside[""].entropy, alone[""].entropy)


def test_half_precision(x: Tensor) -> None:
    for attend in (plain, no_softmax_of_scores_alone):
        module = Handwritten(attend).bfloat16()
        with torch.no_grad():
            expected = module(x.bfloat16())
            with watch(module, ASK) as recording:
                watched = module(x.bfloat16())
            weights = own_weights(module.float(), x.bfloat16().float())
        assert watched.dtype == torch.bfloat16
        close(watched.float(), expected.float(), 0.05)
        close(recording[""].peak, weights.amax(-1), 0.05)


def test_dropout_is_the_models_own(x: Tensor) -> None:
    """While the model trains, its own random numbers decide; the weights before dropout are measured."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.dropout(scores_of(q, k).softmax(-1), 0.5, module.training) @ v

    module = Handwritten(attend)
    torch.manual_seed(1)
    expected = module(x)
    torch.manual_seed(1)
    with watch(module, ASK) as recording:
        watched = module(x)
    close(watched, expected)
    assert recording.metadata["how"] == {"": "weights"}
    module.eval()
    check_against(own_weights(module, x).detach(), recording[""])


def test_weights_that_are_returned_are_ordinary_tensors(x: Tensor) -> None:
    class Returns(nn.Module):
        num_heads = H

        def __init__(self) -> None:
            super().__init__()
            self.inner = Handwritten(plain)
            self.last: Tensor | None = None

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            q, k, v = self.inner.heads(x)
            scores = scores_of(q, k)
            weights = scores.softmax(-1)
            self.last = weights
            return {"out": weights @ v, "weights": weights, "scores": scores}

    module = Returns()
    with torch.no_grad():
        expected = module(x)
        with watch(module) as recording:
            watched = module(x)
    assert recording.metadata["how"] == {"": "attention"}
    for name, value in expected.items():
        assert type(watched[name]) is Tensor
        close(watched[name], value)
    # What a module keeps for itself has its numbers, too, although its inputs may be gone.
    assert isinstance(module.last, DeferredScores) and module.last.is_computed
    close(module.last + 0, expected["weights"])


def test_what_is_not_attention_is_not_recorded(x: Tensor) -> None:
    """Products of activations without a softmax, and a softmax without values."""

    class Products(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            linear_attention = x @ (x.mT @ x)
            gates = (x @ x.mT).mean(-1, keepdim=True).sigmoid()
            probabilities = x.softmax(-1)
            return linear_attention * gates + probabilities

    module = Products()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with watch(module) as recording:
            watched = module(x)
    close(watched, module(x))
    assert len(recording) == 0


def test_attention_that_is_not_recognised_is_named(x: Tensor) -> None:
    def sigmoid_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scores_of(q, k).sigmoid() @ v

    def sorted_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = scores_of(q, k).softmax(-1)
        return weights.sort(-1).values @ v

    def blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Two blocks of queries, each with all keys: no batch entries."""
        q = q[:, :, :6].reshape(B, H, 2, 3, D)
        weights = torch.einsum("bhcqd,bhkd->bchqk", q, k).softmax(-1)
        y = torch.einsum("bchqk,bhkd->bchqd", weights, v).transpose(1, 2).reshape(B, H, 6, E)
        return torch.cat([y, v[:, :, -1:]], 2)

    def two_parts(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The weights of either part of the keys do not sum to 1."""
        weights = scores_of(q, k).softmax(-1)
        return weights[..., :2] @ v[:, :, :2] + weights[..., 2:] @ v[:, :, 2:]

    def collected(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As Longformer: the scores of chunks are copied into one tensor."""
        scores = q.new_zeros(B, N, H, N)
        scores[:, :4] = scores_of(q[:, :, :4], k).transpose(1, 2)
        scores[:, 4:] = scores_of(q[:, :, 4:], k).transpose(1, 2)
        chunks = scores.softmax(-1).transpose(1, 2).split(4, 2)
        return torch.cat([chunk @ v for chunk in chunks], 2)

    for attend in (sigmoid_attention, sorted_weights, blocks, two_parts, collected):
        both = nn.Sequential(Handwritten(plain), Handwritten(attend))
        expected = both(x)
        with pytest.warns(UserWarning, match=r"not recorded, at 1 module: 1$"), watch(both) as recording:
            watched = both(x)
        close(watched, expected)
        assert list(recording) == ["0"]


def test_a_softmax_that_nobody_uses_is_no_attention(x: Tensor) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores_of(q, k).softmax(-1)
        return F.scaled_dot_product_attention(q, k, v)

    module = Handwritten(attend)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        with watch(module) as recording:
            module(x)
    assert len(recording.calls[""]) == 1


def test_layers_that_are_not_selected_run_as_they_are(x: Tensor) -> None:
    both = nn.Sequential(Handwritten(plain), Handwritten(softcapped))
    with torch.no_grad():
        expected = both(x)
        with watch(both, layers="1") as recording:
            watched = both(x)
    close(watched, expected)
    assert list(recording) == ["1"]


SMALL = {"vocab_size": V, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MODELS = {
    "bloom": ("BloomForCausalLM", {"hidden_size": 12, "n_layer": 2, "n_head": 3}),
    "gpt-j": ("GPTJForCausalLM", {"n_embd": 12, "n_layer": 2, "n_head": 3, "rotary_dim": 4, "n_positions": 32}),
    "gpt-neo": (
        "GPTNeoForCausalLM",
        {
            "hidden_size": 12,
            "num_layers": 2,
            "num_heads": 3,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 3,
            "max_position_embeddings": 32,
        },
    ),
    "mpt": ("MptForCausalLM", {"d_model": 12, "n_layers": 2, "n_heads": 3, "max_seq_len": 32}),
    "codegen": (
        "CodeGenForCausalLM",
        {"n_embd": 16, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 32, "n_ctx": 32},
    ),
    "xglm": (
        "XGLMForCausalLM",
        {"d_model": 12, "num_layers": 2, "attention_heads": 3, "ffn_dim": 20, "max_position_embeddings": 32},
    ),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("side", ["right", "left", "none"])
def test_models_of_transformers(name: str, side: str) -> None:
    kind, sizes = MODELS[name]
    model = make(kind, SMALL | sizes)
    real = real_rows(7)
    if side == "left":
        real = real.flip(-1)
    elif side == "none":
        real = torch.ones_like(real)
    given = {"input_ids": ids(), "attention_mask": real.long()}
    with torch.no_grad():
        plain_run = model(**given, output_attentions=True)
        with watch(model, ASK) as recording:
            watched = model(**given)
    close(watched.logits[real], plain_run.logits[real])
    assert len(recording) == 2
    for weights, observation in zip(plain_run.attentions, recording.values(), strict=True):
        check_against(weights, observation)
    # A query that sees nothing must get what the model gives it, so the model's own weights are used then.
    how = set(recording.metadata["how"].values())
    if side == "left":
        assert how == {"weights"}
    elif side == "none" or name != "gpt-neo":
        assert how == {"attention"}


@pytest.mark.parametrize("name", ["bloom", "gpt-neo", "codegen"])
def test_generated_text(name: str) -> None:
    kind, sizes = MODELS[name]
    model = make(kind, SMALL | sizes)
    prompt = ids(2, 4)
    plain_text = model.generate(prompt, max_new_tokens=5, do_sample=False, eos_token_id=None)
    with watch(model) as recording:
        text = model.generate(prompt, max_new_tokens=5, do_sample=False, eos_token_id=None)
    assert torch.equal(text, plain_text)
    with torch.no_grad(), watch(model) as whole:
        model(text[:, :-1])
    for path, observation in recording.items():
        assert observation.n == observation.m == 8
        close(observation.entropy, whole[path].entropy, 1e-4)
        close(observation.distance, whole[path].distance, 1e-4)


def test_saved_calls_give_exact_weights(x: Tensor) -> None:
    """``keep=True`` stores q and k of attention by hand, or the scores that the model made."""
    for attend in (gpt, softcapped):
        module = Handwritten(attend)
        with torch.no_grad():
            with watch(module, Observe(keep=True)) as recording:
                module(x)
            weights = own_weights(module, x)
        rows = torch.tensor([0, 3, 6])
        for head in range(H):
            close(recording[""].weights(head, rows, batch=1), weights[1, head, rows])


def test_values_are_measured(x: Tensor) -> None:
    for attend in (plain, softcapped):
        module = Handwritten(attend)
        with torch.no_grad(), watch(module, values=True) as recording:
            module(x)
        v = module.heads(x)[2].detach()
        W = module.out.weight.detach().unflatten(1, (H, E))
        expected = torch.einsum("bhme,ohe->bhmo", v, W).norm(dim=-1)
        close(recording[""].value_norm, expected)


def test_nothing_is_logged_about_an_attention_interface(caplog: pytest.LogCaptureFixture) -> None:
    """A model of transformers that writes attention by hand is observed all the same."""
    model = make("BloomForCausalLM", SMALL | MODELS["bloom"][1])
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        with torch.no_grad(), watch(model) as recording:
            model(ids())
    finally:
        logger.removeHandler(caplog.handler)
    assert len(recording) == 2
    assert not caplog.records


# Operations on scores [B, H, n, n] and, after the softmax, on weights. Each returns what the model goes on with.
SCORE_OPERATIONS: dict[str, Parts | Callable[[Tensor], Tensor]] = {
    "scaled": lambda s: s * 0.5,
    "divided by a tensor": lambda s: s / torch.tensor(1.5),
    "scaled in place": lambda s: s.mul_(0.7),
    "biased": lambda s: s + ALIBI,
    "biased in place": lambda s: s.add_(ALIBI),
    "masked": lambda s: s + ADDED,
    "filled": lambda s: s.masked_fill(~CAUSAL, LOWEST),
    "filled in place": lambda s: s.masked_fill_(~CAUSAL, -math.inf),
    "chosen": lambda s: torch.where(CAUSAL, s, torch.tensor(-1e9)),
    "bounded": lambda s: s.clamp(min=LOWEST),
    "split": lambda s: s.view(1, B, H, N, N).squeeze(0),
    "merged": lambda s: s.reshape(B * H, N, N).unsqueeze(0).reshape(B, H, N, N),
    "in double": lambda s: s.double().to(torch.float32),
    "detached": lambda s: s.detach().contiguous(),
    "copied": lambda s: s.clone(),
    "squashed": lambda s: s.tanh(),
    "turned": lambda s: s.transpose(-1, -2).transpose(-1, -2),
    "changed through a view": lambda s: (s.view(B * H, N, N).add_(0.25), s)[1],
    "changed through a slice": lambda s: (s[:, 0].mul_(2), s)[1],
    "changed after use": lambda s: (s * 2, s.zero_())[0],
    "printed": lambda s: (repr(s), s)[1],
    "read": lambda s: s + s.amax() * 0,
}
WEIGHT_OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "merged": lambda w: w.view(B * H, N, N).view(B, H, N, N),
    "cast": lambda w: w.to(torch.float64).type(torch.float32),
    "dropped": lambda w: F.dropout(w, 0.5, training=False),
    "copied": lambda w: w.clone(),
    "turned": lambda w: w.mT.mT,
    "zeroed": lambda w: w.masked_fill(~CAUSAL, 0.0),
    "halved": lambda w: w * 0.5,
}


@given(
    before=st.lists(st.sampled_from(sorted(SCORE_OPERATIONS)), max_size=5),
    after=st.lists(st.sampled_from(sorted(WEIGHT_OPERATIONS)), max_size=2),
    by_einsum=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_any_sequence_of_operations_computes_the_same(before: list[str], after: list[str], by_einsum: bool) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) if by_einsum else q @ k.mT
        for name in before:
            scores = SCORE_OPERATIONS[name](scores)
        weights = scores.softmax(-1)
        for name in after:
            weights = WEIGHT_OPERATIONS[name](weights)
        return weights @ v

    torch.manual_seed(0)
    module = Handwritten(attend)
    x = torch.randn(B, N, 6)
    with torch.no_grad(), warnings.catch_warnings():
        # Some sequences make no weights that sum to 1, which is told.
        warnings.simplefilter("ignore")
        expected = module(x)
        with watch(module, ASK) as recording:
            watched = module(x)
        close(watched, expected)
        if recording and "halved" not in after:
            check_against(own_weights(module, x), recording[""])


def test_a_model_of_which_nothing_is_recognised_names_the_places() -> None:
    """Longformer's windows overlap, so their products with values are no attention over all keys."""
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 16}
    model = make("LongformerModel", SMALL | sizes | {"attention_window": [4, 4], "max_position_embeddings": 40})
    with (
        pytest.warns(UserWarning, match=r"at 2 modules: encoder\.layer\.0\.attention\.self, "),
        watch(model) as recording,
    ):
        model(ids(1, 8))
    assert len(recording) == 0
