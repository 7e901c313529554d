"""Without a head: the same as without its columns of W_O, whatever the model is, and nothing of it stays."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make, write
from test_models import LLAMA, V, ids, real_rows
from test_watching import CASES, TEXT, close, outputs
from test_watching_moved import Own
from torch import Tensor, nn

from regard import watch
from regard.models import load
from regard.nn import Decoder, EncoderDecoder
from regard.watching import ablate

X = torch.randn(3, 7, 12, generator=torch.Generator().manual_seed(7))
TO = torch.randn(3, 5, 12, generator=torch.Generator().manual_seed(8))
REAL = real_rows(7)
GROUPED = LLAMA | {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 2}


class Calls(nn.Module):
    """``nn.MultiheadAttention`` as it is called most: with weights, which nobody looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.MultiheadAttention(12, 3, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.a(x, x, x)[0]
        return x + self.b(x, TO, TO)[0]


def encoder(norm_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(12, 3, 20, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


class Case:
    """A model, how it is called, its attention and output layers in the order of the calls, and its real rows."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        call: Callable[[nn.Module], Any],
        out: list[str],
        heads: int = 3,
        real: Tensor | None = None,
    ) -> None:
        self.build, self.call, self.out, self.heads = build, call, out, heads
        self.real = real

    def make(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build()

    @torch.no_grad()
    def run(self, model: nn.Module) -> Tensor:
        found = self.call(model)
        return found if isinstance(found, Tensor) else outputs(found)


T5_OUT = [f"encoder.block.{i}.layer.0.SelfAttention.o" for i in range(2)]
for _i in range(2):
    T5_OUT += [f"decoder.block.{_i}.layer.0.SelfAttention.o", f"decoder.block.{_i}.layer.1.EncDecAttention.o"]
KINDS: dict[str, Case] = {
    "ours": Case(
        lambda: Decoder(12, heads=6, kv_heads=2, layers=2, vocab=V).eval(),
        lambda m: m(ids(), padding=[7, 4, 1]),
        [f"blocks.{i}.attention.out_proj" for i in range(2)],
        *(6, REAL),
    ),
    "ours both": Case(
        lambda: EncoderDecoder(12, heads=3, layers=1, vocab=V).eval(),
        lambda m: m(ids(), ids(3, 7, seed=2)),
        ["encoder.blocks.0.attention.out_proj", *(f"decoder.blocks.0.{x}.out_proj" for x in ("attention", "cross"))],
    ),
    "llama": Case(
        lambda: make("LlamaForCausalLM", GROUPED),
        lambda m: m(**TEXT),
        [f"model.layers.{i}.self_attn.o_proj" for i in range(2)],
        *(6, REAL),
    ),
    "gpt2": Case(
        lambda: make(*CASES["gpt2"][:2]),
        lambda m: m(**TEXT),
        [f"transformer.h.{i}.attn.c_proj" for i in range(2)],
        real=REAL,
    ),
    "bert": Case(
        lambda: make(*CASES["bert"][:2]),
        lambda m: m(**TEXT),
        [f"encoder.layer.{i}.attention.output.dense" for i in range(2)],
        real=REAL,
    ),
    "t5": Case(lambda: make(*CASES["t5"][:2]), lambda m: m(**CASES["t5"][2]), T5_OUT),
    "torch encoder": Case(lambda: encoder(True), lambda m: m(X), [f"layers.{i}.self_attn.out_proj" for i in range(2)]),
    "torch encoder post": Case(
        lambda: encoder(False),
        lambda m: m(X, src_key_padding_mask=~REAL),
        [f"layers.{i}.self_attn.out_proj" for i in range(2)],
        real=REAL,
    ),
    "torch attention": Case(Calls, lambda m: m(X), ["a.out_proj", "b.out_proj"]),
    "own": Case(lambda: nn.Sequential(Own()).eval(), lambda m: m(X[..., :10]), ["0.out"]),
}


def columns(linear: Any) -> Tensor:
    """``[H·E, D_out]``, a view of W_O."""
    return linear.weight.T if isinstance(linear, nn.Linear) else linear.weight


@torch.no_grad()
def without(case: Case, model: nn.Module, pairs: list[tuple[int, int]]) -> nn.Module:
    """A copy whose W_O has zeros for these heads."""
    twin = copy.deepcopy(model)
    for layer, head in pairs:
        W = columns(twin.get_submodule(case.out[layer]))
        wide = len(W) // case.heads
        W[head * wide : (head + 1) * wide] = 0
    return twin


def rows(case: Case, x: Tensor) -> Tensor:
    """Those that mean something."""
    return x if case.real is None else x[case.real]


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
    found = ablate(model, pairs).change(text)
    assert found.before == pytest.approx(loss(model), rel=1e-5)
    assert found.after == pytest.approx(loss(without(case, model, pairs)), rel=1e-5)
    assert found.change == found.after - found.before != 0
    assert str(found) == f"loss {found.before:.4f} → {found.after:.4f} ({found.change:+.4f})"
    as_function = ablate(model, pairs).change(lambda: loss(model))
    assert as_function.after == pytest.approx(found.after, rel=1e-5)
    mean = ablate(model, pairs, by="mean").change(text)  # over what the loss is taken of
    same = ablate(model, pairs, by="mean", over=text).change(text)
    other = ablate(model, pairs, by="mean", over=lambda: model(ids(2, 5))).change(text)
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
