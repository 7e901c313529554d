"""Corners of watching that went wrong once: compiled stacks, static caches, unrelated calls, outputs nobody reads."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from support.checkpoints import make
from support.model_configs import LLAMA, T5, V, ids
from support.observed_models import CASES, TEXT, close
from torch import Tensor, nn
from torch.nn import functional as F

from regard import Observe, watch
from regard.interp import ablate
from regard.interp._value_norms import ValueNorms
from regard.nn import Decoder


@torch.no_grad()
def test_a_compiled_stack_of_ours_keeps_its_names() -> None:
    torch._dynamo.reset()
    model, x = Decoder(12, heads=3, layers=3, vocab=V).eval(), ids(2, 5)
    compiled, plain = torch.compile(model, backend="eager"), model(x)
    for ready in (False, True):  # a graph made within, and one made before
        with watch(model) as seen:
            close(compiled(x), plain)
        assert {path: len(calls) for path, calls in seen.calls.items()} == {
            f"blocks.{i}.attention": 1 for i in range(3)
        }
        if not ready:
            close(compiled(x), plain)


STATIC: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", LLAMA),
    "mistral, a narrow window": ("MistralForCausalLM", LLAMA | {"sliding_window": 5}),
    "mistral, a wide window": ("MistralForCausalLM", LLAMA | {"sliding_window": 50}),
    "gemma2": ("Gemma2ForCausalLM", LLAMA | {"sliding_window": 5, "head_dim": 4, "query_pre_attn_scalar": 4}),
    "t5": ("T5ForConditionalGeneration", T5),
}


@pytest.mark.parametrize("name", STATIC)
@pytest.mark.parametrize("new", [1, 5])
def test_generation_with_a_static_cache(name: str, new: int) -> None:
    model = make(*STATIC[name])
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "disable_compile": True}
    plain = model.generate(ids(2, 7), **options)
    with watch(model) as dynamic:
        assert torch.equal(model.generate(ids(2, 7), **options), plain)
    with watch(model) as seen:
        assert torch.equal(model.generate(ids(2, 7), cache_implementation="static", **options), plain)
    assert list(seen) == list(dynamic)
    for path, calls in seen.calls.items():
        assert len(calls) == len(dynamic.calls[path])
        for a, b in zip(calls, dynamic.calls[path], strict=True):
            close(a.entropy, b.entropy, 1e-4)
            close(a.distance, b.distance, 1e-4)


@torch.no_grad()
def test_a_static_cache_with_padding_at_its_end() -> None:
    from transformers import DynamicCache, StaticCache

    model, x = make("LlamaForCausalLM", LLAMA), ids(1, 8)
    real = torch.tensor([[1] * 6 + [0] * 2])
    found = []
    for cache in (DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=16)):
        with watch(model) as seen:
            model(x[:, :4], past_key_values=cache)
            model(x[:, 4:], past_key_values=cache, attention_mask=real)
        found.append(seen.calls["model.layers.0.self_attn"][1])
    assert (found[1].n, found[1].m) == (4, 8)
    close(found[1].offset, found[0].offset, 1e-4)


@torch.no_grad()
def test_pooling_over_other_texts_is_not_one_text() -> None:
    layer, probe = nn.MultiheadAttention(12, 3, batch_first=True), torch.randn(2, 1, 12)
    texts = [torch.randn(2, 7, 12) for _ in range(2)]
    with watch(layer, Observe(keep=True)) as seen:
        for text in texts:
            layer(probe, text, text)
    assert (seen[""].n, seen[""].m, seen[""].entropy.shape) == (1, 7, (4, 3, 1)) and len(seen[""].saved_calls) == 2


class Read(nn.Module):
    """Heads whose output is read by two layers, or by none as it is."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.a, self.b = how, nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (3, 2)).transpose(1, 2)
        y = F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(x.shape)
        if self.how == "away":
            return F.scaled_dot_product_attention(heads, heads, heads, scale=-0.7).transpose(1, 2).reshape(x.shape)
        if self.how == "two":
            return torch.cat([self.a(y[:, :3]), self.b(y[:, 3:])], 1)
        return self.a(y * 2) if self.how == "none" else self.a(y)


@torch.no_grad()
def test_outputs_that_no_one_layer_reads_have_no_norms() -> None:
    x = torch.randn(1, 5, 6)
    for how in ("one", "two", "none"):
        model = Read(how)
        with watch(model, values=True) as seen:
            for _ in range(20):
                model(x)
            waiting = len(seen_norms(seen, model))
        assert all((call.value_norm is not None) == (how == "one") for call in seen.calls[""])
        assert waiting <= 8  # they do not pile up


def seen_norms(seen: Any, model: nn.Module) -> dict[int, Any]:
    """What waits for a reader: from the hook that stands on the model's linear layer."""
    for hook in model.a._forward_pre_hooks.values():  # type: ignore[union-attr]
        observer = getattr(hook._function, "__self__", None)
        if isinstance(observer, ValueNorms):
            return observer._pending
    raise AssertionError("no hook of ValueNorms")


@torch.no_grad()
def test_a_negative_scale_is_torchs_too() -> None:
    model, x = Read("away"), torch.randn(1, 5, 6)
    plain = model(x)
    with watch(model):
        close(model(x), plain)


@torch.no_grad()
def test_a_model_without_attention_is_told() -> None:
    mlp = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with (
        pytest.warns(UserWarning, match="Sequential called no attention"),
        watch(mlp) as seen,
    ):
        mlp(torch.ones(2, 4))
    assert not seen
    refused = pytest.raises(ValueError, match=r"Sequential called no attention")
    with refused, ablate(mlp, [(0, 0)]):
        mlp(torch.ones(2, 4))


def test_a_change_in_loss_is_not_dropouts() -> None:
    model = Decoder(12, heads=3, layers=2, vocab=V, dropout=0.3).train()
    changes = {ablate(model, [(0, 1)]).loss_change(ids()).change for _ in range(3)}
    assert len(changes) == 1 and model.training


@torch.no_grad()
def test_another_thread_may_run_the_same_model() -> None:
    """What another thread computes is not filed under this one's names."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 3, 20, batch_first=True), 2).eval()
    x, stop = torch.randn(2, 5, 12), threading.Event()

    def busy() -> None:
        with torch.no_grad():
            while not stop.is_set():
                model.layers[0](x)

    other = threading.Thread(target=busy)
    with watch(model) as seen:
        other.start()
        for _ in range(30):
            model(x)
        stop.set()
        other.join()
    assert {path: len(calls) for path, calls in seen.calls.items()} == {f"layers.{i}.self_attn": 30 for i in range(2)}


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
@torch.no_grad()
def test_a_mask_of_the_users_own(kind: torch.dtype) -> None:
    """A finished B × 1 × n × n mask, as transformers takes one, of either kind."""
    model, see = make("LlamaForCausalLM", LLAMA), torch.rand(2, 1, 5, 5) < 0.7
    see |= torch.eye(5, dtype=torch.bool)
    mask = see if kind == torch.bool else torch.zeros(see.shape).masked_fill(~see, torch.finfo(kind).min)
    model.set_attn_implementation("eager" if kind == torch.float32 else "sdpa")
    plain = model(ids(2, 5), attention_mask=mask).logits
    with watch(model, Observe(keep=True)) as seen:
        close(model(ids(2, 5), attention_mask=mask).logits, plain)
    A = seen["model.layers.0.self_attn"].weights(0, batch=1)
    assert torch.equal(A > 1e-30, see[1, 0])


@torch.no_grad()
def test_a_layer_that_was_asked_to_observe_is_seen_by_both() -> None:
    model, x = Decoder(12, heads=3, layers=2, vocab=V).eval(), torch.randn(2, 5, 12)
    layer = model.blocks[1].attention
    with ablate(model, [("blocks.1.attention", 0)]), watch(model) as seen:
        out, mine = layer(x, observe=Observe(top=2))
        model(ids(2, 5))
    assert mine.top is not None and torch.equal(mine.entropy, seen.calls["blocks.1.attention"][0].entropy)
    weight = layer.out_proj.weight.clone()
    weight[:, :4] = 0
    close(out, layer_heads(layer, x) @ weight.T + layer.out_proj.bias)


def layer_heads(layer: Any, x: Tensor) -> Tensor:
    """What the heads of a layer give, side by side, before W_O."""
    found = []
    hook = layer.out_proj.register_forward_pre_hook(lambda _, args: found.append(args[0]))
    layer(x)
    hook.remove()
    return found[0]


@torch.no_grad()
def test_padded_texts_in_a_batch_of_a_causal_model() -> None:
    """The mask that transformers is given holds the padding of the keys that are there, and no more."""
    kind, entries, _ = CASES["llama"]
    model = make(kind, entries)
    with watch(model) as seen:
        model(**TEXT)
    for observation in seen.values():
        assert observation.counted is not None
        assert torch.equal(observation.counted[:, 0], TEXT["attention_mask"].bool())
