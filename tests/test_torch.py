"""The operator inside torch: opcheck, compile, export, autocast, threads, fork, refusals, and torch's own signature."""

from __future__ import annotations

import inspect
import math
import multiprocessing
import threading
from dataclasses import fields

import pytest
import torch
from support.cases import CHOICES, build
from support.key_groups import GROUPS
from support.operator_runs import gradients, with_gradients
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

import regard
from regard import Causal, Observe, Padding, Window
from regard._lowered_scores import Scores
from regard.kernels import ops
from regard.masks import RowMask

DEFAULTS = {name: values[0] for name, values in CHOICES.items()} | {"heads": "grouped", "batch": "two"}
VARIANTS = {
    "plain": {},
    "causal alibi": {"mask": "causal", "bias": "alibi"},
    "padding bias": {"mask": "padding", "bias": "full"},
    "dense t5 sinks": {"mask": "dense-heads", "bias": "t5", "sinks": "sinks", "softcap": "cap"},
    "shaw": {"mask": "window", "bias": "keys"},
    "grid": {"bias": "grid-q", "scale": "hard"},
    "dropout": {"dropout": "some"},
}


def case_of(name: str):
    return build(DEFAULTS | VARIANTS[name], 5, 7, 3, 2, 0)


@pytest.mark.parametrize("name", VARIANTS)
def test_opcheck(name: str) -> None:
    """Schema, fake tensors, autograd and compilation of the operators, with the lowered options of real calls."""
    case, seen = case_of(name), []
    real = ops.attention_op
    ops_attention = lambda *args: seen.append(args) or real(*args)  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "attention_op", ops_attention)
        patch.setattr(ops, "can_skip_dispatcher", lambda *_: False)
        regard.attention(case.q.requires_grad_(), case.k, case.v, **case.options)
    (args,) = seen
    args = tuple(_leaf(x) for x in args)
    torch.library.opcheck(ops.attention_op, args)
    observe = Observe(map=2, profile=1, key_mass=True, top=2)
    torch.library.opcheck(ops.observed_op, (*args, None, None, ops.encode_observe(observe, 5, 7)))
    groups = GROUPS[0].for_call(args[0].shape[0], 7, args[0].device)
    observe = Observe(map=2, groups=groups)
    torch.library.opcheck(ops.observed_op, (*args, None, ops.key_groups(observe), ops.encode_observe(observe, 5, 7)))
    out, high, total = ops.attention_op(*args)
    grads = (torch.randn_like(out), *args[:3], out.detach(), high, total, *args[3:], True)
    torch.library.opcheck(ops.backward_op, tuple(_detached(x) for x in grads))


def _leaf(x):
    if isinstance(x, list):
        return [_leaf(y) for y in x]
    return x.detach().clone().requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def _detached(x):
    return [_detached(y) for y in x] if isinstance(x, list) else x.detach() if isinstance(x, torch.Tensor) else x


class Layer(nn.Module):
    """Masks and biases are built inside, so that their lowering is traced too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = regard.T5Buckets(2, buckets=8, max_distance=9).double()

    def forward(self, q, k, v, lengths):
        mask = Causal() & Padding(lengths) & Window(9)
        one, seen = regard.attention(q, k, v, mask=mask, bias=self.table, observe=Observe(map=3, top=2))
        two = regard.attention(
            q, k, v, mask=Causal() | regard.Prefix(lengths), bias=regard.ALiBi(), sinks=q[0, :, 0, 0]
        )
        return one + two, seen.map, seen.entropy


def inputs(n: int, grad: bool = True):
    g = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(2, 2, n, 3, generator=g, dtype=torch.float64, requires_grad=grad) for _ in range(3))
    return q, k, v, torch.tensor([n, n - 2])


@pytest.mark.parametrize(
    ("backend", "dynamic"),
    [
        ("aot_eager", False),
        ("aot_eager", True),
        ("inductor", True),
        pytest.param("inductor", False, marks=pytest.mark.full),  # compiles for each length
    ],
)
def test_compile_without_graph_breaks(backend: str, dynamic: bool) -> None:
    layer = Layer()
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=dynamic)
    for n in (5, 11):
        results = []
        for f in (layer, compiled):
            args = inputs(n)
            out, pooled, entropy = f(*args)
            grads = torch.autograd.grad(out.sum(), (*args[:3], layer.table.weight))
            results.append((out, pooled, entropy, *grads))
        for a, b in zip(*results, strict=True):
            assert torch.allclose(a, b, atol=1e-12)


def test_compile_takes_masks_as_arguments_and_returns_observations() -> None:
    torch._dynamo.reset()
    call = torch.compile(
        lambda q, mask: regard.attention(q, q, q, mask=mask, observe=Observe(keep=True)),
        fullgraph=True,
        backend="aot_eager",
    )
    q = torch.randn(2, 1, 5, 3, dtype=torch.float64)
    for mask in (Causal(), Causal() & Padding([5, 3])):
        out, seen = call(q, mask)
        expected, want = regard.attention(q, q, q, mask=mask, observe=Observe(keep=True))
        assert torch.allclose(out, expected) and torch.allclose(seen.entropy, want.entropy)
        assert torch.allclose(seen.weights(0, batch=1), want.weights(0, batch=1))


@pytest.mark.parametrize("strict", [True, False])
def test_export(strict: bool) -> None:
    layer, args = Layer(), inputs(7, grad=False)
    program = torch.export.export(layer, args, strict=strict)
    for a, b in zip(program.module()(*args), layer(*args), strict=True):
        assert torch.allclose(a, b)


class Masked(nn.Module):
    def forward(self, q, mask):
        return regard.attention(q, q, q, mask=mask, observe=Observe(map=2))


def test_export_with_masks_in_and_observations_out() -> None:
    q = torch.randn(2, 1, 5, 3, dtype=torch.float64)
    mask = Causal() & Padding(torch.tensor([5, 3]))
    program = torch.export.export(Masked(), (q, mask), strict=False)
    other = Causal() & Padding(torch.tensor([2, 4]))
    out, seen = program.module()(q, other)
    want, want_seen = regard.attention(q, q, q, mask=other, observe=Observe(map=2))
    assert torch.allclose(out, want) and torch.allclose(seen.map, want_seen.map)


@pytest.mark.parametrize("mask", [Causal() & Padding(torch.tensor([5, 3])), Window(1, 0, offset=1)])
def test_an_exported_program_with_masks_can_be_saved_and_loaded(tmp_path, mask) -> None:
    q = torch.randn(2, 1, 5, 3, dtype=torch.float64)
    torch.export.save(torch.export.export(Masked(), (q, mask), strict=False), tmp_path / "p.pt2")
    out, seen = torch.export.load(tmp_path / "p.pt2").module()(q, mask)
    want, want_seen = regard.attention(q, q, q, mask=mask, observe=Observe(map=2))
    assert torch.allclose(out, want) and torch.allclose(seen.map, want_seen.map)


@pytest.mark.parametrize("where", ["meta", "fake"])
def test_shapes_without_values(where: str) -> None:
    """Every mask, bias and observable runs where tensors have no values."""
    with FakeTensorMode() if where == "fake" else torch.device("meta"):
        q, v = torch.empty(2, 4, 5, 3), torch.empty(2, 4, 5, 7)
        lengths = torch.empty(2, dtype=torch.int64)
        ids, keys = torch.empty(2, 5, dtype=torch.int64), torch.empty(2, 5, dtype=torch.bool)
        masks = (Padding(lengths), Padding(keys), regard.Prefix(lengths), regard.Segments(ids), regard.Dense(keys[0]))
        for mask in (*masks, Causal() | regard.Prefix(lengths), Window(1) | Window(2, 0), Causal() & Padding(lengths)):
            out, seen = regard.attention(q, q, v, mask=mask, bias=regard.ALiBi(), observe=Observe(map=2, profile=1))
            assert out.shape == (2, 4, 5, 7) and seen.map.shape == (4, 2, 2) and seen.lse.dtype == torch.float32
            assert type(mask).__name__ in repr(mask) or "|" in repr(mask) or "&" in repr(mask)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_fake_results_have_the_real_ones_dtypes(dtype: torch.dtype) -> None:
    x = torch.randn(1, 2, 5, 3).to(dtype)
    observe = Observe(map=2, profile=1, key_mass=True, top=2, groups=GROUPS[0])
    out, seen = regard.attention(x, x, x, observe=observe)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        fake_observe = pytree.tree_map_only(torch.Tensor, mode.from_tensor, observe)
        fake_out, fake_seen = regard.attention(fake, fake, fake, observe=fake_observe)
    assert fake_out.dtype == out.dtype
    for f in fields(seen):
        a, b = getattr(seen, f.name), getattr(fake_seen, f.name)
        assert not isinstance(a, torch.Tensor) or (a.dtype, a.shape) == (b.dtype, b.shape), f.name


def test_constants_are_checked_under_compile_too() -> None:
    torch._dynamo.reset()
    q = torch.randn(1, 1, 3, 2)
    for options in ({"scale": -1.0}, {"mask_before": -1}):

        def call(x, options=options):
            mask = Window(options["mask_before"]) if "mask_before" in options else None
            return regard.attention(x, x, x, mask=mask, scale=options.get("scale"))

        with pytest.raises(Exception, match=r"must be (a number ≥ 0|at least 0), got -1"):
            torch.compile(call, fullgraph=True, backend="eager")(q)


def test_values_survive_a_trip_through_pytrees() -> None:
    mask = (
        (Causal(offset=1) | regard.Prefix([2]))
        & regard.Segments([0, 0, 1])
        & regard.Dense(torch.ones(3, 3, dtype=torch.bool))
    )
    values = [
        mask,
        Window(2),
        regard.ALiBi(slopes=torch.tensor([0.5])),
        Observe(map=3, queries=torch.tensor([2])),
        Scores(1.0),
    ]
    for value in values:
        leaves, spec = torch.utils._pytree.tree_flatten(value)
        assert all(isinstance(x, torch.Tensor) for x in leaves)
        again = torch.utils._pytree.tree_unflatten(leaves, spec)
        assert repr(again) == repr(value)
    assert RowMask().as_dense(2, 3).all()


def test_double_backward_and_vmap_are_refused() -> None:
    q = torch.randn(1, 1, 3, 2, requires_grad=True)
    (grad,) = torch.autograd.grad(regard.attention(q, q, q).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.sum().backward()
    with pytest.raises(RuntimeError, match="does not run under vmap"):
        torch.vmap(lambda x: regard.attention(x, x, x))(torch.randn(4, 1, 3, 2))


def test_gradients_only_where_asked() -> None:
    q, k, v = (torch.randn(1, 2, 3, 4) for _ in range(3))
    bias = torch.zeros(3, 3, requires_grad=True)
    (found,) = torch.autograd.grad(regard.attention(q, k, v, bias=bias).sum(), bias)
    assert found.shape == bias.shape
    k.requires_grad_()
    out, seen = regard.attention(q, k, v, observe=Observe())
    assert out.requires_grad and not seen.lse.requires_grad
    assert torch.autograd.grad(out.sum(), k)[0].shape == k.shape


def test_autocast_takes_autocasts_dtype_but_leaves_float64() -> None:
    q = torch.randn(1, 2, 3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert regard.attention(q, q, q).dtype == torch.bfloat16
        assert regard.attention(q, q.bfloat16(), q).dtype == torch.bfloat16
        assert regard.attention(*[q.double()] * 3).dtype == torch.float64


def test_a_backend_that_cannot_honour_the_call_says_so() -> None:
    q = torch.zeros(1, 1, 2, 2, dtype=torch.float64)
    with pytest.raises(ValueError, match="backend='native' cannot be honoured"):
        regard.attention(q, q, q, backend="native")
    assert torch.equal(regard.attention(q, q, q, backend="reference"), regard.attention(q, q, q))


def test_the_shortcut_past_the_dispatcher_is_not_taken_where_somebody_watches() -> None:
    q = torch.randn(1, 2, 3, 4)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert regard.attention(q, q, q).shape == q.shape
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda x: regard.attention(x, x, x))(q)
    assert "regard.attention" in graph.code
    assert torch.allclose(graph(q), regard.attention(q, q, q))


@pytest.mark.parametrize("name", VARIANTS)
def test_the_shortcut_and_the_operator_agree_bit_for_bit(name: str) -> None:
    def call() -> list[torch.Tensor]:
        case = case_of(name)
        options, learned = with_gradients(case)
        leaves = [x.requires_grad_() for x in (case.q, case.k, case.v)]
        torch.manual_seed(0)
        out = regard.attention(*leaves, **options)
        return [out, *gradients(out, leaves + learned)]

    short = call()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "can_skip_dispatcher", lambda *_: False)
        for a, b in zip(short, call(), strict=True):
            assert torch.equal(a, b)


def test_several_threads_and_a_forked_child_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    # Large enough for two threads of the kernel. torch itself keeps its number of threads.
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    q = torch.randn(2, 2, 257, 16)
    expected = regard.attention(q, q, q, mask=Causal())
    found: list[torch.Tensor] = []
    workers = [
        threading.Thread(target=lambda: found.append(regard.attention(q, q, q, mask=Causal()))) for _ in range(4)
    ]
    for w in workers:
        w.start()
    for w in workers:
        w.join(60)
    assert len(found) == 4 and all(torch.equal(x, expected) for x in found)
    queue = multiprocessing.get_context("fork").Queue()
    child = multiprocessing.get_context("fork").Process(target=_in_child, args=(queue, q, expected))
    child.start()
    assert queue.get(timeout=60)
    child.join(60)


def _in_child(queue, q: torch.Tensor, expected: torch.Tensor) -> None:
    torch.set_num_threads(1)
    queue.put(torch.allclose(regard.attention(q, q, q, mask=Causal()), expected, atol=1e-6))


# --- torch's own signature -------------------------------------------------------------------------------------------


def test_sdpa_has_torchs_signature() -> None:
    ours = inspect.signature(regard.scaled_dot_product_attention)
    names = ["query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"]
    assert list(ours.parameters) == names
    defaults = {name: p.default for name, p in ours.parameters.items() if p.default is not inspect.Parameter.empty}
    assert defaults == {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}


@pytest.mark.parametrize(
    "shapes, options",
    [
        (((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 6)), {}),
        (((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 6)), {"is_causal": True}),
        (((2, 3, 7, 4), (2, 3, 5, 4), (2, 3, 5, 6)), {"is_causal": True, "scale": 0.3}),
        (((2, 6, 5, 4), (2, 2, 7, 4), (2, 2, 7, 6)), {"enable_gqa": True}),
        (((2, 6, 5, 4), (2, 1, 7, 4), (2, 1, 7, 6)), {}),
        (((2, 1, 5, 4), (2, 3, 7, 4), (2, 3, 7, 6)), {"scale": -0.5}),
        (((3, 5, 4), (3, 7, 4), (3, 7, 6)), {}),
        (((5, 4), (7, 4), (7, 6)), {}),
        (((5, 4), (1, 7, 4), (1, 7, 6)), {}),
        (((5, 4), (7, 4), (3, 7, 6)), {}),
        (((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 6)), {"attn_mask": torch.rand(5, 7) < 0.7}),
        (((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 6)), {"attn_mask": torch.randn(2, 1, 5, 7, dtype=torch.float64)}),
    ],
)
def test_sdpa_equals_torch(shapes, options) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(s, dtype=torch.float64) for s in shapes)
    if (mask := options.get("attn_mask")) is not None and mask.dtype == torch.bool:
        mask[:, 0] = True
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(q, k, v, **options)
    ours = regard.scaled_dot_product_attention(q, k, v, **options)
    assert ours.shape == expected.shape and torch.allclose(ours, expected, atol=1e-13)


def test_sdpa_refuses_what_torch_refuses() -> None:
    x = torch.zeros(1, 6, 3, 2)
    with pytest.raises(ValueError, match="both given"):
        regard.scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(3, 3, dtype=torch.bool), is_causal=True)
    with pytest.raises(ValueError, match="enable_gqa"):
        regard.scaled_dot_product_attention(x, x[:, :2], x[:, :2])
    with pytest.raises(ValueError, match="v must have one value"):
        regard.scaled_dot_product_attention(x, x[:, :2], x[:, :3], enable_gqa=True)
    with pytest.raises(TypeError, match="positional"):
        regard.scaled_dot_product_attention(x, x, x, None, 0.0, False, 1.0)
    assert (regard.scaled_dot_product_attention(x, x, x, dropout_p=1.0) == 0).all()


def test_scale_infinity_is_an_ordinary_constant_for_compile() -> None:
    torch._dynamo.reset()
    q = torch.randn(1, 2, 3, 4, dtype=torch.float64)
    hard = torch.compile(lambda x: regard.attention(x, x, x, scale=math.inf), fullgraph=True, backend="aot_eager")
    assert torch.equal(hard(q), regard.attention(q, q, q, scale=math.inf))


def test_autocast_does_not_reach_inside_the_kernel() -> None:
    x = torch.randn(1, 2, 64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    _, exact = regard.attention(x, x, x, observe=Observe(keep=True), backend="reference")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, seen = regard.attention(x, x, x, observe=Observe(keep=True), backend="reference")
        assert torch.allclose(seen.lse, exact.lse, atol=1e-5)
        assert torch.allclose(seen.weights(0).sum(-1), torch.ones(64), atol=1e-4)


def test_forward_mode_is_refused() -> None:
    x = torch.randn(1, 1, 3, 4)
    with pytest.raises(RuntimeError, match="no forward-mode derivative"):
        torch.func.jvp(lambda y: regard.attention(y, y, y), (x,), (x,))
