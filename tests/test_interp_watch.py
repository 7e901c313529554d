"""Watched models compute what they computed before, and what was seen is what their weights say."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import make, write
from support.model_configs import BERT, GPT2, IMAGES, LLAMA, T5, V, ids, real_rows
from support.observed_models import ASK, CASES, Odd, check_against, close, outputs
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from regard import watch
from regard._hooks import has_cross_attention_name, observed
from regard.interp import huggingface
from regard.models import load
from regard.nn import Encoder, EncoderDecoder


def weights_of(result: Any, path: str, layer: int) -> Tensor:
    """The eager weights of a module, from what `output_attentions` returns."""
    if "decoder_attentions" not in result:
        return result.attentions[layer]
    if not path.startswith(("decoder", "model.decoder")):
        return result.encoder_attentions[layer]
    cross = "EncDec" in path or "encoder_attn" in path
    return (result.cross_attentions if cross else result.decoder_attentions)[layer]


@pytest.mark.parametrize("name", CASES)
def test_transformers_models(name: str) -> None:
    kind, entries, given = CASES[name]
    model = make(kind, entries)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        plain = model(**given, output_attentions=True)
        with watch(model, ASK) as seen:
            watched = model(**given)
        after = model(**given)
    assert model.config._attn_implementation == "eager"
    real = slice(None)
    if "attention_mask" in given and outputs(plain).shape[1] == 7 and kind != "T5ForConditionalGeneration":
        real = given["attention_mask"].bool()
    close(outputs(watched)[real], outputs(plain)[real])
    assert torch.equal(outputs(after), outputs(plain))
    modules = dict(model.named_modules())
    per_stack: dict[str, int] = {}
    for path, observation in seen.items():
        assert path in modules
        stack = re.split(r"\.(?:layers?|block|h)\.\d", path)[0]
        stack += " cross" if "EncDec" in path or "encoder_attn" in path else ""
        layer = per_stack.get(stack, 0)
        per_stack[stack] = layer + 1
        if name != "gpt-oss":  # its eager weights leave the sink out, and say nothing of it
            check_against(weights_of(plain, path, layer), observation)
    assert sum(per_stack.values()) == len(seen) > 0


@pytest.mark.parametrize(
    ("path", "is_cross"),
    [
        ("decoder.layers.0.encoder_attn", True),
        ("decoder.block.0.layer.1.EncDecAttention", True),
        ("encoder.layer.1.crossattention.self", True),
        ("layers.2.multihead_attn", True),
        ("cross_modal_text_layers.0.crossattention.self", True),
        ("cross_modal_text_layers.0.attention.self", False),
        ("decoder.layers.0.self_attn", False),
    ],
)
def test_cross_attention_is_known_by_its_name(path: str, is_cross: bool) -> None:
    assert has_cross_attention_name(path) == is_cross


def test_padding_of_a_text_is_not_read_as_rows_of_another() -> None:
    """In T5's cross-attention over a source as long as the target every target row counts."""
    kind, entries, given = CASES["t5"]
    model = make(kind, entries)
    with torch.no_grad(), watch(model) as seen:
        model(**given)
    for path, observation in seen.items():
        assert observation.counted is not None
        assert bool(observation.counted.all()) == ("decoder" in path)


def test_generation_is_one_recording() -> None:
    for name in ("gpt2", "llama", "mistral"):
        kind, entries, _ = CASES[name]
        model = make(kind, entries)
        prompt = ids(2, 4)
        plain = model.generate(prompt, max_new_tokens=5, do_sample=False)
        with watch(model) as seen:
            watched = model.generate(prompt, max_new_tokens=5, do_sample=False)
        assert torch.equal(plain, watched)
        with torch.no_grad(), watch(model) as whole:
            model(watched[:, :-1])
        for path, observation in seen.items():
            assert observation.n == 8 and len(seen.calls[path]) == 5
            close(observation.entropy, whole[path].entropy, 1e-4)
            close(observation.distance, whole[path].distance, 1e-4)
            if name == "mistral":  # its cache lets old keys go
                assert observation.m is None and observation.peak_at is None
            else:
                assert observation.m == 8 and torch.equal(observation.peak_at, whole[path].peak_at)


def test_our_models(tmp_path: Path) -> None:
    for name in ("bert", "llama", "t5"):
        kind, entries, given = CASES[name]
        theirs = make(kind, entries)
        theirs.set_attn_implementation("eager")
        ours = load(write(theirs, tmp_path / name))
        padding = given["attention_mask"].bool()
        call = (given["input_ids"], given["decoder_input_ids"]) if name == "t5" else (given["input_ids"],)
        with torch.no_grad():
            plain = ours(*call, padding=padding)
            with watch(ours, ASK) as seen:
                watched = ours(*call, padding=padding)
            expected = theirs(**given, output_attentions=True)
        close(watched, plain)
        for i, (path, observation) in enumerate(seen.items()):
            if name != "t5":
                check_against(expected.attentions[i], observation)
            assert path in dict(ours.named_modules())
    with watch(ours) as seen:
        text = ours.generate([[5, 6, 7]], 4)
    assert len(seen.calls["decoder.blocks.0.attention"]) == 4 and text.shape[1] == 4


def test_layers_that_are_not_wanted_run_as_always() -> None:
    model = Encoder(12, heads=3, layers=3)
    with torch.no_grad(), watch(model, layers="blocks.1.*") as seen:
        assert model.blocks[0].attention not in observed and model.blocks[1].attention in observed
        model(torch.randn(1, 5, 12))
    assert list(seen) == ["blocks.1.attention"] and not observed
    with torch.no_grad(), watch(model, layers=lambda path: path.startswith("blocks.2")) as seen:
        model(torch.randn(1, 5, 12))
    assert list(seen) == ["blocks.2.attention"]
    missed = pytest.raises(ValueError, match=r"layers='layers\.9'.*blocks\.0\.attention")
    with missed, watch(model, layers="layers.9"):
        model(torch.randn(1, 5, 12))
    with pytest.raises(KeyError, match="no layer 'x'"):
        seen["x"]


def test_any_model_that_calls_torch_attention() -> None:
    model, x = Odd(), torch.randn(2, 5, 6)
    float_mask = torch.randn(5, 5).masked_fill(torch.rand(5, 5) < 0.3, -math.inf)
    float_mask[:, 0] = 0
    for options in ({}, {"causal": True}, {"mask": torch.rand(5, 5) < 0.8}, {"mask": float_mask}):
        if options.get("mask") is not None and options["mask"].dtype == torch.bool:
            options["mask"][:, 0] = True
        with torch.no_grad():
            plain = model(x, **options)
            with watch(model, ASK) as seen:
                watched = model(x, **options)
        close(watched, plain)
        assert [o.entropy.shape for o in seen.calls[""]] == [(2, 1, 5), (2, 3, 5)]
    outside = torch.randn(1, 1, 3, 2)
    with watch(model) as seen:
        F.scaled_dot_product_attention(outside, outside, outside)
    assert not seen.calls


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_torch_multihead_attention(batch_first: bool, need_weights: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Sequential()
    layer.add_module("mha", nn.MultiheadAttention(12, 3, batch_first=batch_first).eval())
    x, context = torch.randn(2, 5, 12), torch.randn(2, 7, 12)
    if not batch_first:
        x, context = x.transpose(0, 1), context.transpose(0, 1)
    hidden = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])
    options = {"key_padding_mask": hidden, "need_weights": need_weights}
    with torch.no_grad():
        plain, _ = layer.mha(x, context, context, **options)
        _, A = layer.mha(x, context, context, key_padding_mask=hidden, average_attn_weights=False)
        with watch(layer, ASK) as seen:
            watched, given = layer.mha(x, context, context, **options)
    close(watched, plain)
    assert (given is not None) == need_weights
    check_against(A, seen["mha"])


@pytest.mark.parametrize("norm_first", [True, False])
def test_torch_transformer_encoder(norm_first: bool) -> None:
    """Its fused path leaves zeros at padded rows; watched, they are still zeros, and the other rows the same."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(12, 2, 20, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).eval()
    x, hidden = torch.randn(3, 7, 12), ~real_rows(7)
    with torch.no_grad():
        plain = model(x, src_key_padding_mask=hidden)
        with watch(model, ASK) as seen:
            watched = model(x, src_key_padding_mask=hidden)
    assert list(seen) == ["layers.0.self_attn", "layers.1.self_attn"]
    close(watched[~hidden], plain[~hidden])
    if not norm_first:
        assert not plain[hidden].any() and not watched[hidden].any()


def test_gradients_flow_and_checkpointing_counts_once() -> None:
    model = make("LlamaForCausalLM", LLAMA)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    with watch(model) as seen:
        loss = model(ids(), labels=ids()).loss
        loss.backward()
    assert all(len(calls) == 1 for calls in seen.calls.values()) and len(seen) == 2
    assert all(p.grad is not None for p in model.parameters())

    encoder = Encoder(12, heads=3, layers=2)
    x = torch.randn(1, 5, 12, requires_grad=True)
    for reentrant in (True, False):
        with watch(encoder) as seen:
            checkpoint(encoder, x, use_reentrant=reentrant).sum().backward()
        assert {path: len(calls) for path, calls in seen.calls.items()} == {f"blocks.{i}.attention": 1 for i in (0, 1)}


def test_everything_is_put_back_when_something_raises() -> None:
    for model in (make("LlamaForCausalLM", LLAMA), Encoder(12, heads=3, layers=1), Odd()):
        with pytest.raises(RuntimeError, match="mine"), watch(model):
            raise RuntimeError("mine")
        assert not any(m._forward_hooks or m._forward_pre_hooks or m in observed for m in model.modules())
    assert make("LlamaForCausalLM", LLAMA).config._attn_implementation == "sdpa"


def test_contexts_that_end_in_the_order_in_which_they_began() -> None:
    """As two threads that watch one model do."""
    model = make("LlamaForCausalLM", LLAMA)
    first = watch(model)
    second = watch(model)
    first.__enter__()
    recording = second.__enter__()
    first.__exit__(None, None, None)
    with torch.no_grad():
        model(ids())
    second.__exit__(None, None, None)
    assert len(recording) == 2
    assert model.config._attn_implementation == "sdpa"


def test_what_cannot_be_watched_is_refused() -> None:
    with pytest.raises(TypeError, match="model must be"):
        watch(3).__enter__()
    with pytest.raises(TypeError, match=r"observe must be a regard\.Observe"):
        watch(nn.Linear(1, 1), observe=4).__enter__()


def test_use_sets_our_attention_for_good_or_not_at_all() -> None:
    for kind, entries in (
        ("BertModel", BERT),
        ("T5ForConditionalGeneration", T5),
        IMAGES[0],
        ("GPT2LMHeadModel", GPT2),
    ):
        model = make(kind, entries)
        assert huggingface.use(model) is model and model.config._attn_implementation == "regard"
    given = {"input_ids": ids(), "attention_mask": real_rows(7).long()}
    with torch.no_grad():
        ours = model(**given).logits
        model.set_attn_implementation("sdpa")
        close(ours[real_rows(7)], model(**given).logits[real_rows(7)])
    bloom = make("BloomForCausalLM", {"vocab_size": V, "hidden_size": 12, "n_layer": 1, "n_head": 3})
    with pytest.raises(ValueError, match="BloomForCausalLM never calls transformers' attention interface"):
        huggingface.use(bloom)
    assert bloom.config._attn_implementation != "regard"


def test_an_encoder_decoder_of_ours() -> None:
    model = EncoderDecoder(12, heads=3, layers=1, vocab=V).eval()
    with torch.no_grad(), watch(model) as seen:
        model(ids(), ids(3, 7), padding=[7, 4, 1])
    assert list(seen) == ["encoder.blocks.0.attention", "decoder.blocks.0.attention", "decoder.blocks.0.cross"]
    assert seen["decoder.blocks.0.cross"].counted.all() and not seen["encoder.blocks.0.attention"].counted.all()
