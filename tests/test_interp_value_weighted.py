"""‖v_j W_O‖ beside the weights: what a head can move, by hand from hooks, whatever the model and its W_O are called."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import make
from support.model_configs import ids
from support.observed_models import CASES, TEXT, Own, close
from torch import Tensor, nn
from torch.nn import functional as F

from regard import Observe, watch
from regard.interp import ablate, load_recording
from regard.nn import Decoder


def norms(v: Tensor, W: Tensor) -> Tensor:
    """‖v_j W_h‖ with ``v [B, H, m, E]`` and ``W [H·E, D_out]``, head by head, key by key."""
    B, H, m, E = v.shape
    found = torch.zeros(B, H, m)
    for b in range(B):
        for h in range(H):
            for j in range(m):
                found[b, h, j] = (v[b, h, j] @ W[h * E : (h + 1) * E]).norm()
    return found


def by_hook(model: nn.Module, projection: str, call: Callable[[], Any]) -> Tensor:
    """What a value projection gives ``[B, m, G·E]``."""
    found: list[Tensor] = []
    hook = model.get_submodule(projection).register_forward_hook(lambda _m, _x, y: found.append(y))
    call()
    hook.remove()
    return found[0]


def heads_of(v: Tensor, groups: int, each: int = 1) -> Tensor:
    return v.unflatten(-1, (groups, -1)).transpose(1, 2).repeat_interleave(each, 1)


# model; call; place; value projection; its heads; heads to each; output projection
BLOCK = "decoder.block.1.layer"
WHERE: dict[str, tuple[Any, Any, str, str, int, int, str]] = {
    "ours": (
        lambda: Decoder(12, heads=6, kv_heads=2, layers=2, vocab=37).eval(),
        lambda m: m(ids()),
        *("blocks.1.attention", "blocks.1.attention.v_proj", 2, 3, "blocks.1.attention.out_proj"),
    ),
    "llama": (
        lambda: make(*CASES["llama"][:2]),
        lambda m: m(**TEXT),
        *("model.layers.1.self_attn", "model.layers.1.self_attn.v_proj", 1, 3, "model.layers.1.self_attn.o_proj"),
    ),
    "gpt2": (
        lambda: make(*CASES["gpt2"][:2]),
        lambda m: m(**TEXT),
        *("transformer.h.1.attn", "transformer.h.1.attn.c_attn", 3, 1, "transformer.h.1.attn.c_proj"),
    ),
    "bert": (
        lambda: make(*CASES["bert"][:2]),
        lambda m: m(**TEXT),
        *("encoder.layer.1.attention.self", "encoder.layer.1.attention.self.value", 3, 1),
        "encoder.layer.1.attention.output.dense",
    ),
    "t5 cross": (
        lambda: make(*CASES["t5"][:2]),
        lambda m: m(**CASES["t5"][2]),
        *(f"{BLOCK}.1.EncDecAttention", f"{BLOCK}.1.EncDecAttention.v", 3, 1, f"{BLOCK}.1.EncDecAttention.o"),
    ),
    "own": (Own, lambda m: m(torch.ones(2, 5, 10).cumsum(1)), "", "qkv", 3, 1, "out"),
}


@pytest.mark.parametrize("kind", WHERE)
@torch.no_grad()
def test_norms_of_values(kind: str, tmp_path: Path) -> None:
    build_model, call, place, projection, groups, each, out = WHERE[kind]
    torch.manual_seed(0)
    model = build_model()
    v = by_hook(model, projection, lambda: call(model))
    v = v.chunk(3, -1)[2] if kind in ("gpt2", "own") else v
    layer = model.get_submodule(out)
    W = layer.weight if kind == "gpt2" else layer.weight.T
    expected = norms(heads_of(v, groups, each), W)
    with watch(model, Observe(keep=True), values=True) as seen:
        call(model)
    close(seen[place].value_norm, expected, 1e-4)
    assert all(observation.value_norm is not None for observation in seen.values())
    seen.save(tmp_path / "r")
    observation, opened = seen[place], load_recording(tmp_path / "r")[place]
    assert torch.equal(opened.value_norm, observation.value_norm)
    A = observation.weights(1, batch=1)
    close(opened.value_weighted(1, batch=1), A * expected[1, 1], 1e-4)
    for keys in (2, -1, [3, 0], range(1, 4), slice(0, 2), torch.tensor([1, -1]), torch.tensor(2)):
        at = [keys] if isinstance(keys, int) or (isinstance(keys, Tensor) and keys.ndim == 0) else keys
        close(observation.value_weighted(1, [2, 0], keys, batch=1), (A * expected[1, 1])[[2, 0]][:, at], 1e-4)
    with watch(model, Observe(keep=True), heads=[(place, 2), (place, 0)], values=True) as some:
        call(model)
    close(some[place].value_norm, expected[:, [2, 0]], 1e-4)
    close(some[place].value_weighted(0, batch=1), observation.value_weighted(0, batch=1), 1e-4)
    with watch(model, Observe(keep=True)) as without:
        call(model)
    with pytest.raises(ValueError, match="values=True"):
        without[place].value_weighted(0)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("need_weights", [True, False])
@torch.no_grad()
def test_norms_in_torch_multihead_attention(need_weights: bool) -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(12, 3, batch_first=True).eval()
    x, context = torch.randn(2, 5, 12), torch.randn(2, 7, 12)
    v = context @ layer.in_proj_weight[24:].T + layer.in_proj_bias[24:]
    with watch(layer, values=True) as seen:
        layer(x, context, context, need_weights=need_weights)
    close(seen[""].value_norm, norms(heads_of(v, 3), layer.out_proj.weight.T), 1e-4)


@torch.no_grad()
def test_norms_in_diffusers() -> None:
    attention = pytest.importorskip("diffusers.models.attention_processor")
    torch.manual_seed(0)
    model = nn.ModuleDict({"attn": attention.Attention(10, 11, heads=3, dim_head=5, bias=True)}).eval()
    x, context = torch.randn(2, 7, 10), torch.randn(2, 13, 11)
    layer = model["attn"]
    with watch(model, values=True) as seen:
        layer(x, context)
    close(seen["attn"].value_norm, norms(heads_of(layer.to_v(context), 3), layer.to_out[0].weight.T), 1e-4)


@torch.no_grad()
def test_two_calls_in_one_module_each_have_their_own_norms() -> None:
    torch.manual_seed(0)
    model, x = Own(), torch.randn(2, 5, 10)
    with watch(model, values=True) as seen:
        model(x, twice=True)
    for call, linear in zip(seen.calls[""], (model.out, model.again), strict=True):
        close(call.value_norm, norms(model.v, linear.weight.T), 1e-4)


class Shared(nn.Module):
    """One memory for all of the batch: v has a batch of 1."""

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.out = nn.Parameter(torch.randn(1, 3, 7, 5)), nn.Linear(15, 11)

    def forward(self, q: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(q, self.memory, self.memory)
        return self.out(y.transpose(1, 2).reshape(len(q), -1, 15))


@torch.no_grad()
def test_values_that_a_batch_shares() -> None:
    model = Shared()
    with watch(model, Observe(keep=True), values=True) as seen:
        model(torch.randn(2, 3, 2, 5))
    expected = norms(model.memory, model.out.weight.T).expand(2, -1, -1)
    close(seen[""].value_norm, expected, 1e-4)
    close(seen[""].value_weighted(2, batch=1), seen[""].weights(2, batch=1) * expected[1, 2], 1e-4)


@torch.no_grad()
def test_there_are_no_norms_where_no_linear_layer_reads_the_heads() -> None:
    x = torch.randn(2, 3, 5, 7)
    model = nn.Sequential(Scaled())
    with watch(model, values=True) as seen:
        model(x)
    assert seen["0"].entropy is not None and seen["0"].value_norm is None


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * F.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("name", ["ours", "gpt2", "llama"])
@torch.no_grad()
def test_generation_with_a_cache_joins_norms(name: str) -> None:
    torch.manual_seed(0)
    model = Writes() if name == "ours" else make(*CASES[name][:2])
    with watch(model, values=True) as seen:
        text = model.generate(ids(2, 4), max_new_tokens=5, min_new_tokens=5, do_sample=False)
    with watch(model, values=True) as whole:
        model(text[:, :-1])
    assert len(seen) == 2
    for path, observation in seen.items():
        assert len(seen.calls[path]) == 5 and observation.m == 8
        close(observation.value_norm, whole[path].value_norm, 1e-4)


class Writes(nn.Module):
    """A decoder of ours that writes greedily, with its cache."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder(12, heads=3, layers=2, vocab=37).eval()

    def forward(self, given: Tensor) -> Tensor:
        return self.decoder(given)

    def generate(self, given: Tensor, max_new_tokens: int, **_: Any) -> Tensor:
        caches, read = self.decoder.new_cache(len(given)), given
        for _step in range(max_new_tokens):
            read = self.decoder(read, cache=caches)[:, -1:].argmax(-1)
            given = torch.cat([given, read], 1)
        return given


@pytest.mark.parametrize("kind", ["ours", "llama", "own"])
@torch.no_grad()
def test_norms_while_heads_are_taken_out(kind: str) -> None:
    """What a head could move does not depend on whether it is let to."""
    build_model, call, place, *_ = WHERE[kind]
    torch.manual_seed(0)
    model = build_model()
    with watch(model, values=True) as plain:
        call(model)
    last = len(plain) - 1
    with ablate(model, [(last, 1)]), watch(model, values=True) as inside:
        call(model)
    close(inside[place].value_norm, plain[place].value_norm, 1e-4)
    with watch(model, values=True) as outside, ablate(model, [(last, 1)]):
        call(model)
    close(outside[place].value_norm, plain[place].value_norm, 1e-4)
