"""What people do while they watch: nest it, copy the model, compile it, run two threads, raise, generate."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.checkpoints import make
from support.model_configs import BERT, V, ids
from support.observed_models import ASK, CASES, TEXT, Odd, close, outputs
from torch import Tensor, nn
from torch.nn import functional as F

from regard import watch
from regard.interp import Recording
from regard.nn import Encoder


@torch.no_grad()
def test_under_autocast() -> None:
    for name in ("llama", "bert", "t5"):
        kind, entries, given = CASES[name]
        model = make(kind, entries)
        with watch(model, ASK) as exact:
            full = outputs(model(**given))
        with torch.autocast("cpu", torch.bfloat16):
            plain = outputs(model(**given))
            with watch(model, ASK) as seen:
                watched = outputs(model(**given))
        assert watched.dtype == plain.dtype
        real = TEXT["attention_mask"].bool() if name != "t5" else slice(None)
        error, theirs = ((x.float() - full)[real].abs().max() for x in (watched, plain))
        assert error <= 2 * theirs + 0.01 * full.abs().max()
        for path, observation in seen.items():
            assert observation.entropy.dtype == torch.float32
            close(observation.entropy[observation.counted], exact[path].entropy[observation.counted], 0.05)


@torch.no_grad()
def test_dropout_comes_after_what_is_seen() -> None:
    bert = make("BertModel", BERT | {"attention_probs_dropout_prob": 0.5, "hidden_dropout_prob": 0.0})
    layer, x = nn.TransformerEncoderLayer(12, 3, 20, dropout=0.5, batch_first=True), torch.randn(2, 5, 12)
    for model, call in ((bert, lambda: bert(**TEXT)[0]), (layer, lambda: layer(x))):
        with watch(model.eval(), ASK) as still:
            calm = call()
        with watch(model.train(), ASK) as seen:
            dropped = call()
        assert not torch.allclose(calm, dropped)
        path = next(iter(seen))  # the first layer, which reads the same as without dropout
        for value in ("entropy", "peak", "map", "top"):
            close(getattr(seen[path], value), getattr(still[path], value))


def calls_of(seen: Recording) -> set[int]:
    return {len(calls) for calls in seen.calls.values()}


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any]]] = {
    "transformers": (lambda: make(*CASES["llama"][:2]), lambda m: m(**TEXT)),
    "ours": (lambda: Encoder(12, heads=3, layers=2), lambda m: m(torch.ones(2, 5, 12))),
    "torch": (lambda: nn.TransformerEncoderLayer(12, 3, 20), lambda m: m(torch.ones(2, 5, 12))),
    "sdpa": (lambda: nn.Sequential(Odd()), lambda m: m(torch.ones(2, 5, 6))),
}


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_nested(kind: str) -> None:
    model, call = KINDS[kind][0](), KINDS[kind][1]
    each = 2 if kind == "sdpa" else 1  # attention calls in one call of a module
    with watch(model) as outer:
        call(model)
        with watch(model) as inner:
            call(model)
        call(model)
    assert calls_of(inner) == {each} and calls_of(outer) == {3 * each}


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_in_turn_and_after_an_exception(kind: str) -> None:
    (build, call), each = KINDS[kind], 2 if kind == "sdpa" else 1
    a, b = build(), build()
    leaf = [module for module in a.modules() if isinstance(module, nn.Linear)][-2 if kind == "sdpa" else -1]
    with watch(a) as seen:
        hook = leaf.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            call(a)
        hook.remove()
        before = {path: len(calls) for path, calls in seen.calls.items()}
        call(a)
        call(b)
        x = torch.ones(1, 1, 3, 2)
        F.scaled_dot_product_attention(x, x, x)  # outside of the model: nobody's
    assert {len(calls) - before.get(path, 0) for path, calls in seen.calls.items()} == {each}
    with watch(b) as other:
        call(a)
        call(b)
    assert list(other) == list(seen) and calls_of(other) == {each}


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_state_and_copies(kind: str) -> None:
    """A copy made while watched is not watched; one of a transformers model keeps our attention, as docs say."""
    model, call = KINDS[kind][0](), KINDS[kind][1]
    names = list(model.state_dict())
    with watch(model) as seen:
        call(model)
        assert list(model.state_dict()) == names
        twin = copy.deepcopy(model)
    before = calls_of(seen)
    call(twin)
    assert list(twin.state_dict()) == names and calls_of(seen) == before
    assert kind != "transformers" or (twin.config._attn_implementation, model.config._attn_implementation) == (
        "regard",
        "sdpa",
    )


class Around(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside, self.own = inside, Odd()

    def forward(self, **given: Any) -> Tensor:
        return self.inside(**given).logits + self.own(torch.ones(2, 5, 6)).sum()


@torch.no_grad()
def test_parts_of_a_model() -> None:
    model, real = make(*CASES["llama"][:2]), TEXT["attention_mask"].bool()
    plain = model(**TEXT).logits
    with watch(model, ASK) as whole:
        model(**TEXT)
    for part, prefix in ((model.model, "model."), (model.model.layers, "model.layers.")):
        with watch(part, ASK) as seen:
            watched = model(**TEXT).logits
        close(watched[real], plain[real])
        assert [prefix + path for path in seen] == list(whole)
        for path, observation in seen.items():
            counted = whole[prefix + path].counted
            close(observation.entropy[counted], whole[prefix + path].entropy[counted])
    user = Around(model)
    with watch(user, ASK) as seen:
        user(**TEXT)
    for path, observation in whole.items():
        close(seen[f"inside.{path}"].map, observation.map)
    assert model.config._attn_implementation == "sdpa"


@torch.no_grad()
def test_mixtures() -> None:
    user = Around(make(*CASES["llama"][:2]))
    with watch(user) as seen:
        user(**TEXT)
    falcon = make(
        "FalconForCausalLM", {"vocab_size": V, "hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3}
    )
    with watch(falcon) as direct:  # calls torch's function itself, not through transformers' interface
        falcon(**TEXT)
    assert "own" in seen.calls and len(direct) == 1


@pytest.mark.parametrize("before", ["sdpa", "eager"])
@torch.no_grad()
def test_output_attentions_are_the_observations(before: str) -> None:
    """No weights exist to be returned; in their place stands what was seen, which nobody can mistake for a tensor."""
    model = make(*CASES["llama"][:2])
    model.set_attn_implementation(before)
    with watch(model, ASK) as seen:
        found = model(**TEXT, output_attentions=True).attentions
    assert len(found) == len(seen) == 2
    for given, observation in zip(found, seen.values(), strict=True):
        assert not isinstance(given, Tensor) and torch.equal(given.entropy, observation.entropy)


@torch.no_grad()
def test_compiled() -> None:
    """A graph that was made before, and one made within: what is watched is seen, and nothing of it stays."""
    torch._dynamo.reset()
    model, x = nn.Sequential(Odd()), torch.randn(2, 5, 6)
    compiled, plain = torch.compile(model, backend="eager"), model(x)
    close(compiled(x), plain)
    with watch(compiled) as seen:
        close(compiled(x), plain)
    close(compiled(x), plain)
    assert {path: len(calls) for path, calls in seen.calls.items()} == {"_orig_mod.0": 2}


def test_two_threads() -> None:
    """One comes while the other is inside, and leaves after it."""
    real, inside, left, found = F.scaled_dot_product_attention, threading.Event(), threading.Event(), {}

    def run(n: int, wait: Callable[[], Any]) -> None:
        layer, x = nn.MultiheadAttention(12, 3), torch.randn(n, 2, 12)
        with torch.no_grad(), watch(layer, layers=lambda _: wait() or True) as seen:
            layer(x, x, x)
        found[n] = [call.n for call in seen.calls[""]]

    def first() -> None:
        inside.set()
        second_in.wait(0.5)

    def second() -> None:
        second_in.set()
        left.wait(0.5)

    second_in = threading.Event()
    a, b = threading.Thread(target=run, args=(5, first)), threading.Thread(target=run, args=(7, second))
    a.start()
    inside.wait(5)
    b.start()
    a.join()
    left.set()
    b.join()
    after, F.scaled_dot_product_attention = F.scaled_dot_product_attention, real
    assert found == {5: [5], 7: [7]} and after is real


@torch.no_grad()
def test_a_watched_model_can_be_forgotten() -> None:
    model = make(*CASES["llama"][:2])
    with watch(model):
        model(**TEXT)
    layer = weakref.ref(model.model.layers[0].self_attn)
    del model
    gc.collect()
    assert layer() is None


@torch.no_grad()
def test_one_module_with_calls_of_other_head_counts() -> None:
    model = Odd()
    with watch(model) as seen:
        model(torch.ones(2, 5, 6))
    assert "" in seen and "inner" not in seen and len(seen.calls[""]) == 2


@torch.no_grad()
def test_cross_attention_to_two_texts_is_not_one_text() -> None:
    layer = nn.MultiheadAttention(12, 3)
    with watch(layer, ASK) as seen:
        for n, m in ((5, 4), (3, 7)):
            layer(torch.randn(n, 2, 12), *[torch.randn(m, 2, 12)] * 2)
    assert seen[""].n is None and seen[""].entropy is None and seen[""].map is not None


def test_generation_with_beams() -> None:
    """Each beam is an entry of the batch; a row is of the text that the beam held at that step."""
    model = make(*CASES["gpt2"][:2])
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "num_beams": 2}
    plain = model.generate(ids(3, 4), **options)
    with watch(model) as seen:
        watched = model.generate(ids(3, 4), **options)
    assert torch.equal(watched, plain)
    for path, observation in seen.items():
        assert [(c.n, c.m) for c in seen.calls[path]] == [(4, 4), (1, 5), (1, 6), (1, 7), (1, 8)]
        assert observation.entropy.shape == (6, 3, 8) and observation.m == 8


def test_generation_with_a_static_cache() -> None:
    model = make(*CASES["llama"][:2])
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "disable_compile": True}
    plain = model.generate(ids(2, 4), **options)
    with watch(model) as seen:
        assert torch.equal(model.generate(ids(2, 4), cache_implementation="static", **options), plain)
    with torch.no_grad(), watch(model) as whole:
        model(plain[:, :-1])
    for path, observation in seen.items():
        close(observation.distance, whole[path].distance, 1e-4)


@torch.no_grad()
def test_distances_in_a_static_cache() -> None:
    from transformers import StaticCache

    model = make(*CASES["llama"][:2])
    with watch(model) as whole:
        plain = model(ids(2, 5)).logits
    with watch(model) as seen:
        watched = model(ids(2, 5), past_key_values=StaticCache(model.config, max_cache_len=11)).logits
    close(watched, plain)
    for path, observation in seen.items():
        close(observation.entropy, whole[path].entropy, 1e-4)
        close(observation.distance, whole[path].distance, 1e-4)
        close(observation.local, whole[path].local, 1e-4)


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_generation_of_encoder_decoders(name: str) -> None:
    kind, entries, given = CASES[name]
    model, given = make(kind, entries), {k: v for k, v in given.items() if k != "decoder_input_ids"}
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    plain = model.generate(**given, **options)
    with watch(model, ASK) as seen:
        watched = model.generate(**given, **options)
    assert torch.equal(watched, plain)
    source = 7 if name == "t5" else 15
    for path, observation in seen.items():
        sizes = [(call.n, call.m) for call in seen.calls[path]]
        if "decoder" not in path:
            assert sizes == [(source, source)]
        elif "EncDec" in path or "encoder_attn" in path:  # each step looks at the same source
            assert sizes == [(1, source)] * 5 and observation.n == 5 and observation.entropy.shape[-1] == 5
        else:
            assert sizes == [(1, i + 1) for i in range(5)] and (observation.n, observation.m) == (5, 5)


def test_keys_of_a_source_keep_their_names() -> None:
    model = make(*CASES["t5"][:2])
    with watch(model, ASK) as seen:
        model.generate(**TEXT, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    cross = seen["decoder.block.0.layer.1.EncDecAttention"]
    assert cross.m == 7 and cross.key_mass is not None and cross.peak_at is not None
