"""``Observe(differentiable=True)``: gradients of entropy and logit_max, against autograd through the dense formula."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import dense_attention
from support.cases import Case, build, pairs
from support.operator_runs import draw_dropout_seed, with_gradients
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import regard
from regard import Observe
from regard.interp import watch
from regard.kernels import native

CHOICES = list(pairs())
SIZES = [(7, 11, 3, 5), (11, 7, 5, 3)]
DIFFERENTIABLE = Observe(differentiable=True)
needs_native = pytest.mark.skipif(not native.built(), reason="the native module was not built")


def settled(choice: dict[str, str], index: int) -> Case:
    """A case in which no rounding decides which of two logits is larger: ties have several subgradients."""
    n, m, d, e = SIZES[index % 2]
    case = build(choice | {"values": "normal"}, n, m, d, e, index)
    if case.options["scale"] == math.inf:
        case = replace(case, q=dense_attention.on_grid(case.q), k=dense_attention.on_grid(case.k))
    return case


def dense_values(case: Case, leaves: list[Tensor], options: dict[str, Any], seed: Tensor | None) -> list[Tensor]:
    """Output, entropy and logit_max of the dense formula."""
    out, A, lse, s = dense_attention.attention(*leaves, **options, seed=seed)
    log_A = s - torch.where(lse == -math.inf, 0.0, lse).unsqueeze(-1)
    entropy = -torch.where(A == 0, 0.0, A * torch.where(A == 0, 0.0, log_A)).sum(-1)
    if options.get("sinks") is not None:
        log_sink = options["sinks"].to(lse.dtype).view(1, -1, 1) - lse
        entropy = entropy - log_sink.exp() * log_sink
    return [out, entropy, s.amax(-1)]


def gradients(values: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """Gradients of a weighted sum of all values; empty rows have logit_max −inf and no gradient."""
    loss = values[0].new_zeros(())
    for x in values:
        weights = torch.linspace(-1, 2, x.numel(), dtype=torch.float64).reshape(x.shape).to(x.dtype)
        loss = loss + (torch.where(x == -math.inf, 0.0, x) * weights).sum()
    results = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(x) if grad is None else grad for grad, x in zip(results, leaves, strict=True)]


def run(case: Case, dtype: torch.dtype, call: Any) -> list[Tensor]:
    """Values and gradients of ``call`` in a dtype, on inputs that were rounded to float32."""
    leaves = [x.detach().float().to(dtype).requires_grad_() for x in (case.q, case.k, case.v)]
    options, learned = with_gradients(case)
    values = call(leaves, options)
    return [*[x.detach() for x in values], *gradients(values, leaves + learned)]


def compare(choice: dict[str, str], index: int, backend: str, dtype: torch.dtype) -> None:
    case = settled(choice, index)
    seed = draw_dropout_seed() if case.options["dropout"] else None

    def ours(leaves: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
        out, observation = regard.attention(*leaves, **options, observe=DIFFERENTIABLE, backend=backend)
        assert observation.entropy is not None and observation.logit_max is not None
        return [out, observation.entropy, observation.logit_max]

    def formula(leaves: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
        return dense_values(case, leaves, options, seed)

    found = run(case, dtype, ours)
    exact = run(case, torch.float64, formula)
    single = None
    for place, (a, b) in enumerate(zip(found, exact, strict=True)):
        assert a.shape == b.shape
        hidden = b == -math.inf
        assert torch.equal(a == -math.inf, hidden)
        error = torch.where(hidden, 0.0, a.double() - b).abs()
        largest = float(torch.where(hidden, 0.0, b).abs().max()) if b.numel() else 0.0
        allowed = 1e-10 * (1 + largest)
        if dtype == torch.float32:
            allowed = 1e-5 * (1 + largest)
            if bool((error > allowed).any()):
                # The formula in float32 has a similar error.
                single = single if single is not None else run(case, torch.float32, formula)
                of_formula = torch.where(hidden, 0.0, single[place].double() - b).abs()
                allowed = max(allowed, 2 * float(of_formula.max()))
        assert bool((error <= allowed).all()), (case.choice, place, float(error.max()), allowed)


@pytest.mark.parametrize("part", range(4))
def test_the_reference_agrees_with_dense_autograd(part: int) -> None:
    for index, choice in list(enumerate(CHOICES))[part::16]:
        compare(choice, index, "reference", torch.float64)


@needs_native
@pytest.mark.parametrize("part", range(4))
def test_the_native_kernel_has_the_error_of_float32(part: int) -> None:
    for index, choice in list(enumerate(CHOICES))[part::16]:
        compare(choice, index, "native", torch.float32)


def test_gradcheck() -> None:
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)

    def values(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor) -> tuple[Tensor, ...]:
        out, observation = regard.attention(
            q, k, v, bias=bias, sinks=sinks, softcap=2.0, mask=regard.Causal(), observe=DIFFERENTIABLE
        )
        assert observation.entropy is not None and observation.logit_max is not None
        return out, observation.entropy, observation.logit_max

    assert torch.autograd.gradcheck(
        values, (some(2, 2, 3, 3), some(2, 1, 5, 3), some(2, 1, 5, 2), some(2, 3, 5), some(2))
    )


def small_inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1, 2, 7, 5, generator=generator, dtype=dtype, requires_grad=True) for _ in range(3)]


class _PassThrough(TorchDispatchMode):
    """A mode that does nothing: it makes the call go through the operator of ``torch.library``."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_the_operator_has_the_same_gradients(backend: str) -> None:
    def loss(inputs: list[Tensor]) -> Tensor:
        out, observation = regard.attention(*inputs, observe=DIFFERENTIABLE, mask=regard.Causal(), backend=backend)
        assert observation.entropy is not None and observation.logit_max is not None
        return out.sum() + observation.entropy.square().sum() + observation.logit_max.sum()

    inputs = small_inputs()
    eager = torch.autograd.grad(loss(inputs), inputs)
    with _PassThrough():
        through_operator = torch.autograd.grad(loss(inputs), inputs)
    for a, b in zip(eager, through_operator, strict=True):
        torch.testing.assert_close(a, b)


def test_a_loss_of_the_entropy_alone() -> None:
    q, k, v = small_inputs(torch.float64)
    _, observation = regard.attention(q, k, v, observe=DIFFERENTIABLE)
    assert observation.entropy is not None
    found = torch.autograd.grad(observation.entropy.sum(), [q, k, v])
    log_A = torch.log_softmax(q @ k.transpose(-1, -2) / math.sqrt(5), -1)
    expected = torch.autograd.grad(-(log_A.exp() * log_A).sum(), [q, k])
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1])
    assert not found[2].any()


def test_selected_heads_keep_their_graph() -> None:
    for dropout in (0.0, 0.4):
        q, k, v = small_inputs()
        observe = Observe(differentiable=True, heads=(1,))
        _, observation = regard.attention(q, k, v, observe=observe, dropout=dropout)
        assert observation.entropy is not None
        grad = torch.autograd.grad(observation.entropy.sum(), q)[0]
        assert not grad[:, 0].any()
        assert grad[:, 1].any()


def test_only_these_two_values_have_a_graph_and_only_if_asked() -> None:
    q, k, v = small_inputs()
    _, plain = regard.attention(q, k, v, observe=Observe(map=3, top=2, key_mass=True))
    assert plain.entropy is not None and not plain.entropy.requires_grad
    _, kept = regard.attention(q, k, v, observe=Observe(map=3, top=2, key_mass=True, differentiable=True))
    for name in ("entropy", "logit_max"):
        assert getattr(kept, name).requires_grad
    for name in ("lse", "peak", "map", "top", "key_mass", "sink"):
        assert not getattr(kept, name).requires_grad
    torch.testing.assert_close(kept.entropy, plain.entropy)


def test_of_equal_logits_the_lowest_key_gets_the_gradient() -> None:
    for backend in ("reference", "auto"):
        q = torch.ones(1, 1, 1, 1)
        k = torch.tensor([1.0, 3.0, 3.0, 2.0]).view(1, 1, 4, 1).requires_grad_()
        _, observation = regard.attention(q, k, k, scale=1.0, observe=DIFFERENTIABLE, backend=backend)
        assert observation.logit_max is not None
        grad = torch.autograd.grad(observation.logit_max.sum(), k)[0]
        assert grad.flatten().tolist() == [0, 1, 0, 0]


def test_a_watched_model_learns_from_its_entropy(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = regard.nn.Encoder(6, heads=2, layers=2)
    x = torch.randn(1, 5, 6)
    with watch(model, DIFFERENTIABLE) as recording:
        model(x)
    entropy = recording[1].entropy
    assert entropy is not None
    entropy.mean().backward()
    weight = model.get_parameter("blocks.0.attention.q_proj.weight")
    assert weight.grad is not None and bool(weight.grad.any())
    # The numbers can be saved; a graph cannot.
    recording.save(tmp_path / "recording")
    assert regard.interp.load_recording(tmp_path / "recording")[0].entropy is not None


def test_refusals() -> None:
    with pytest.raises(regard.RegardError, match="differentiable"):
        Observe(differentiable=1)  # type: ignore[arg-type]

    class ByHand(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(x @ x.transpose(-1, -2), -1) @ x

    model = ByHand()
    with pytest.raises(regard.RegardError, match="differentiable"), watch(model, DIFFERENTIABLE):
        model(torch.randn(1, 3, 5, 2, requires_grad=True))


def test_sharded_attention_refuses_it() -> None:
    q, k, v = small_inputs()
    with pytest.raises(regard.RegardError, match="differentiable"):
        regard.parallel.attention(q, k, v, observe=DIFFERENTIABLE)
