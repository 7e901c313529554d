"""Parameters by formula against regard.nn, against transformers, against published figures; letters against numbers."""

from __future__ import annotations

import json
import random
import warnings
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st
from support import budgets
from support.checkpoints import make, write
from torch import nn

from regard import models
from regard.budget import _flops as flops
from regard.budget import _hf_configs as configs
from regard.budget import _memory as memory
from regard.budget import _models_from_sizes as spec
from regard.budget._attention_parts import POSITIONS
from regard.budget._model import Lengths, Model
from regard.budget._parts import FeedForward, Norm
from regard.budget._symbols import SYMBOLS, to_int
from regard.nn import LayerNorm, RMSNorm

PLACES = tuple(name for name in POSITIONS if name not in ("learned", "sinusoidal"))
SEEDS = range(40)


def shapes(module: nn.Module) -> Counter[tuple[int, ...]]:
    # A single table for all heads has a first dimension of 1 that the budget leaves out (RelativeKeys).
    return Counter(tuple(p.shape)[1:] if p.ndim == 3 and len(p) == 1 else tuple(p.shape) for p in module.parameters())


# Layers: 280 attentions, 40 feed-forward networks, 160 blocks


@pytest.mark.parametrize("position", PLACES)
def test_attention_with_all_dimensions_free(position: str) -> None:
    for seed in SEEDS:
        pair = budgets.attention(random.Random(seed), cross=False if position == "rotary" else None, position=position)
        part = pair.model.stacks[0].blocks[0].part
        assert part.parameters == budgets.numel(pair.module), f"seed {seed}: {pair.module}"
        assert Counter(weight.shape for weight in part.weights()) == shapes(pair.module)


def test_feed_forward() -> None:
    for seed in SEEDS:
        pair = budgets.feed_forward(random.Random(seed))
        part = pair.model.stacks[0].blocks[0].part
        assert part.parameters == budgets.numel(pair.module), f"seed {seed}: {pair.module}"
        assert Counter(weight.shape for weight in part.weights()) == shapes(pair.module)


@pytest.mark.parametrize("d", budgets.PRIMES)
def test_norms(d: int) -> None:
    assert Norm(d).parameters == budgets.numel(LayerNorm(d)) == 2 * d
    assert Norm(d, bias=False).parameters == budgets.numel(LayerNorm(d, bias=False)) == d
    assert Norm(d, "rms").parameters == budgets.numel(RMSNorm(d)) == d


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
def test_blocks(cross: bool, sinks: bool) -> None:
    for seed in SEEDS:
        pair = budgets.block(random.Random(seed), cross=cross, sinks=sinks)
        assert pair.model.parameters == budgets.numel(pair.module), f"seed {seed}: {pair.module}"
        weights = Counter(weight.shape for placed in pair.model for weight in placed.part.weights())
        assert weights == shapes(pair.module)


# Stacks: 40 of each kind and position (a learned table on scores is one for all layers, and one a stack)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("kind", ["encoder", "decoder", "encoder_decoder"])
def test_stacks(kind: str, position: str) -> None:
    for seed in SEEDS:
        pair = budgets.stack(random.Random(seed), kind, (position,))
        assert pair.model.parameters == budgets.numel(pair.module), f"seed {seed}: {pair.module}"


def test_vision_transformers() -> None:
    for seed in SEEDS:
        pair = budgets.vit(random.Random(seed))
        assert pair.model.parameters == budgets.numel(pair.module), f"seed {seed}: {pair.module}"


def test_the_worked_example() -> None:
    """D = 512, 8 heads of 64: 98,304 a head in W_q, W_k and W_v, 786,432 for all, 262,144 in W_out."""
    count = {weight.name: weight.count for weight in spec.attention(512, 8, out_bias=False).weights()}
    assert sum(count[f"{name}.weight"] for name in "qkv") == 786_432
    assert sum(count[f"{name}.weight"] for name in "qkv") // 8 == 98_304
    assert count["out.weight"] == 262_144
    assert sum(count.values()) == 1_048_576
    # A head of its own has the same three matrices.
    alone = spec.attention(512, 1, d_key=64, d_value=64, out_bias=False).weights()
    assert sum(weight.count for weight in alone if weight.name != "out.weight") == 98_304


# Every family that regard.models loads

BERT = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 56}
BERT |= {"vocab_size": 61, "max_position_embeddings": 19}
DISTIL = {"dim": 24, "n_heads": 3, "n_layers": 2, "hidden_dim": 56, "vocab_size": 61, "max_position_embeddings": 19}
GPT2 = {"n_embd": 24, "n_head": 3, "n_layer": 2, "n_positions": 19, "vocab_size": 61}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}
LLAMA = {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
LLAMA |= {"intermediate_size": 56, "vocab_size": 61, "max_position_embeddings": 64}
T5 = {"d_model": 24, "d_kv": 7, "num_heads": 3, "num_layers": 2, "num_decoder_layers": 3, "d_ff": 56, "vocab_size": 61}
VIT = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 56}
VIT |= {"image_size": 12, "patch_size": 4}
SMALL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # within the vocabulary
TURNED = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.34}}
SLIDING = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}

FAMILIES: list[tuple[str, dict[str, Any]]] = [
    *((f"Bert{end}", BERT) for end in ("Model", "ForMaskedLM", "ForPreTraining", "ForNextSentencePrediction")),
    *((f"Bert{end}", BERT) for end in ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")),
    ("BertForSequenceClassification", BERT | {"num_labels": 5, "type_vocab_size": 3}),
    *((f"Roberta{end}", BERT) for end in ("Model", "ForMaskedLM")),
    *((f"Roberta{end}", BERT) for end in ("ForSequenceClassification", "ForTokenClassification")),
    *((f"DistilBert{end}", DISTIL) for end in ("Model", "ForMaskedLM")),
    *((f"DistilBert{end}", DISTIL) for end in ("ForSequenceClassification", "ForQuestionAnswering")),
    *((f"GPT2{end}", GPT2) for end in ("LMHeadModel", "Model")),
    ("GPT2LMHeadModel", GPT2 | {"n_inner": 40}),
    *((f"Llama{end}", LLAMA) for end in ("ForCausalLM", "Model")),
    ("LlamaForCausalLM", LLAMA | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("MistralForCausalLM", LLAMA),
    ("Qwen2ForCausalLM", LLAMA | SLIDING),
    ("Qwen3ForCausalLM", LLAMA | {"head_dim": 6}),
    *((f"Gemma{end}", LLAMA) for end in ("ForCausalLM", "Model")),
    ("GemmaForCausalLM", LLAMA | {"head_dim": 10, "attention_bias": True, "tie_word_embeddings": False}),
    *((f"Phi3{end}", LLAMA | SMALL) for end in ("ForCausalLM", "Model")),
    ("SmolLM3ForCausalLM", LLAMA | SMALL | {"num_hidden_layers": 5}),
    ("SmolLM3ForCausalLM", LLAMA | SMALL | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    *((f"StableLm{end}", LLAMA | TURNED) for end in ("ForCausalLM", "Model")),
    ("StableLmForCausalLM", LLAMA | TURNED | {"use_qkv_bias": True, "tie_word_embeddings": True}),
    *((f"T5{end}", T5) for end in ("ForConditionalGeneration", "Model", "EncoderModel")),
    ("T5ForConditionalGeneration", T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    *((f"ViT{end}", VIT) for end in ("ForImageClassification", "Model")),
    ("ViTForImageClassification", VIT | {"num_labels": 7, "qkv_bias": False}),
]


@pytest.mark.parametrize(("kind", "entries"), FAMILIES, ids=[f"{i} {kind}" for i, (kind, _) in enumerate(FAMILIES)])
def test_a_family_from_its_config_alone(kind: str, entries: dict[str, Any], tmp_path: Path) -> None:
    theirs = make(kind, entries)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write(theirs, tmp_path)
        loaded = models.load(tmp_path)
    assert configs.from_config(tmp_path).parameters == budgets.numel(loaded) == budgets.numel(theirs)


DECODES = {"is_decoder": True, "add_cross_attention": True}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("GPT2DoubleHeadsModel", GPT2),
    ("GPT2LMHeadModel", GPT2 | {"add_cross_attention": True}),
    ("GPT2LMHeadModel", GPT2 | {"tie_word_embeddings": False}),
    ("BertLMHeadModel", BERT | {"is_decoder": True}),
    ("BertModel", BERT | DECODES),
    ("BertForMaskedLM", BERT | {"tie_word_embeddings": False}),
    ("ViTModel", VIT | {"pooler_output_size": 7}),
    ("Qwen3ForCausalLM", LLAMA | {"attention_bias": True}),
    ("Qwen2ForCausalLM", LLAMA | {"head_dim": 14}),
]


@pytest.mark.parametrize(("kind", "entries"), VARIANTS, ids=[f"{i} {kind}" for i, (kind, _) in enumerate(VARIANTS)])
def test_a_rare_variant_is_counted_right_or_refused(kind: str, entries: dict[str, Any], tmp_path: Path) -> None:
    theirs = make(kind, entries)
    theirs.config.architectures = [kind]
    theirs.config.save_pretrained(tmp_path)
    try:
        counted = configs.from_config(tmp_path).parameters
    except ValueError as error:
        assert "\n" not in str(error)
    else:
        assert counted == budgets.numel(theirs)


def test_every_family_is_tried() -> None:
    tried = {kind.lower().split("for")[0].split("model")[0].split("lmhead")[0] for kind, _ in FAMILIES}
    assert {name.removesuffix("encoder") for name in tried} - set(configs.DECODERS) == set(configs.FAMILIES)


# Published figures, from config.json as typed by hand


def bert(d: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    sized = {"hidden_size": d, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": 4 * d}
    usual = {"model_type": "bert", "vocab_size": 30522, "max_position_embeddings": 512, "type_vocab_size": 2}
    return usual | sized | more


ROBERTA = {"model_type": "roberta", "vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}
EYE = {"model_type": "vit", "architectures": ["ViTForImageClassification"], "num_labels": 1000}


def gpt2(d: int, layers: int, heads: int) -> dict[str, Any]:
    usual = {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024}
    return usual | {"n_embd": d, "n_layer": layers, "n_head": heads}


def t5(d: int, hidden: int, heads: int, layers: int, **more: Any) -> dict[str, Any]:
    usual = {"model_type": "t5", "vocab_size": 32128, "d_kv": 64}
    return usual | {"d_model": d, "d_ff": hidden, "num_heads": heads, "num_layers": layers} | more


def llama(kind: str, vocab: int, d: int, hidden: int, layers: int, heads: int, kv: int, **more: Any) -> dict[str, Any]:
    sized = {"model_type": kind, "vocab_size": vocab, "hidden_size": d, "intermediate_size": hidden}
    return sized | {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv} | more


PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "bert-base-uncased": (bert(768, 12, 12), 109_482_240),
    "bert-large-uncased": (bert(1024, 24, 16), 335_141_888),
    "roberta-base": (bert(768, 12, 12, **ROBERTA), 124_645_632),
    "distilbert-base-uncased": (
        {"model_type": "distilbert", "dim": 768, "n_heads": 12, "n_layers": 6, "hidden_dim": 3072}
        | {"vocab_size": 30522, "max_position_embeddings": 512},
        66_362_880,
    ),
    "gpt2": (gpt2(768, 12, 12), 124_439_808),
    "gpt2-medium": (gpt2(1024, 24, 16), 354_823_168),
    "gpt2-large": (gpt2(1280, 36, 20), 774_030_080),
    "gpt2-xl": (gpt2(1600, 48, 25), 1_557_611_200),
    "t5-small": (t5(512, 2048, 8, 6), 60_506_624),
    "t5-base": (t5(768, 3072, 12, 12), 222_903_552),
    "t5-large": (t5(1024, 4096, 16, 24), 737_668_096),
    "flan-t5-base": (
        t5(768, 2048, 12, 12, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
        247_577_856,
    ),
    # Its checkpoint has an output matrix of its own, although transformers 5 ties it in spite of the config.
    "t5-v1_1-base": (
        t5(768, 2048, 12, 12, num_decoder_layers=12, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
        247_577_856,
    ),
    "vit-base-patch16-224": (bert(768, 12, 12, **EYE), 86_567_656),
    "vit-large-patch16-224": (bert(1024, 24, 16, **EYE), 304_326_632),
    "Llama-2-7b": (llama("llama", 32000, 4096, 11008, 32, 32, 32), 6_738_415_616),
    "Llama-2-13b": (llama("llama", 32000, 5120, 13824, 40, 40, 40), 13_015_864_320),
    "Llama-2-70b": (llama("llama", 32000, 8192, 28672, 80, 64, 8), 68_976_648_192),
    "Meta-Llama-3-8B": (llama("llama", 128256, 4096, 14336, 32, 32, 8), 8_030_261_248),
    "Mistral-7B-v0.1": (llama("mistral", 32000, 4096, 14336, 32, 32, 8), 7_241_732_096),
    "Qwen2-0.5B": (llama("qwen2", 151936, 896, 4864, 24, 14, 2, tie_word_embeddings=True), 494_032_768),
    "Qwen3-0.6B": (llama("qwen3", 151936, 1024, 3072, 28, 16, 8, tie_word_embeddings=True), 596_049_920),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_figures(name: str, tmp_path: Path) -> None:
    entries, published = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(entries))
    assert configs.from_config(tmp_path / "config.json").parameters == published


# Refusals: one line that names the entry and says what would be right


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"model_type": "spaceship"}, "model_type is 'spaceship'; it has no formula, and transformers"),
        ({"model_type": ...}, "has no model_type"),
        ({"model_type": 3}, "model_type is 3"),
        ({"architectures": ["GPT2Model"]}, "architectures is 'GPT2Model'; it must be a class of transformers"),
        ({"architectures": "BertModel"}, "it must be a list of names"),
        ({"vocab_size": ...}, "has no vocab_size; a bert needs one"),
        ({"num_attention_heads": 7}, "got heads=7 and d=768"),
        ({"hidden_size": 0}, "hidden_size is 0; it must be an integer ≥ 1"),
        ({"hidden_size": -768}, "hidden_size is -768; it must be an integer ≥ 1"),
        ({"hidden_size": True}, "hidden_size is True; it must be an integer ≥ 1"),
        ({"hidden_size": 768.0}, "hidden_size is 768.0; it must be an integer ≥ 1"),
        ({"intermediate_size": "3072"}, "intermediate_size is '3072'; it must be an integer ≥ 1"),
        ({"num_hidden_layers": 10**9}, "at most 1,024"),
        ({"type_vocab_size": 0}, "type_vocab_size is 0; it must be an integer ≥ 1"),
        ({"hidden_dropout_prob": "much"}, "hidden_dropout_prob is 'much'; it must be a finite number"),
        ({"id2label": [1], "architectures": ["BertForTokenClassification"]}, "id2label is [1]"),
        ({"model_type": "gpt2"}, "has no n_embd; a gpt2 needs one"),
        (gpt2(768, 12, 12) | {"architectures": ["os.system"]}, "architectures is 'os.system'; it must be a class"),
        (PUBLISHED["Llama-2-70b"][0] | {"num_key_value_heads": 7}, "got kv_heads=7 and heads=64"),
        (PUBLISHED["Llama-2-70b"][0] | {"num_attention_heads": 7, "num_key_value_heads": 7}, "divide"),
        (bert(768, 12, 12, **EYE) | {"patch_size": 15}, "divisible by patch 15, got 224"),
        (bert(768, 12, 12, **EYE) | {"image_size": [224]}, "image_size is [224]; it must be an integer"),
    ],
)
def test_a_config_that_cannot_be_is_refused(entries: dict[str, Any], said: str, tmp_path: Path) -> None:
    found = {name: value for name, value in (bert(768, 12, 12) | entries).items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(found))
    with pytest.raises(ValueError) as error:
        configs.from_config(tmp_path)
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "null", "\0"])
def test_what_is_no_table_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json (is not JSON|holds)") as error:
        configs.from_config(tmp_path)
    assert "\n" not in str(error.value)


def test_no_such_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "config.json", str(tmp_path / "nowhere")):
        with pytest.raises(FileNotFoundError, match=r"does not exist; give a config\.json, or a folder"):
            configs.from_config(path)


@pytest.mark.parametrize("name", ["d", "heads", "layers", "hidden", "vocab", "d_key", "kv_heads"])
@pytest.mark.parametrize(("bad", "error"), [(0, ValueError), (-3, ValueError), (True, TypeError), (2.0, TypeError)])
def test_sizes_that_are_none_are_refused(name: str, bad: Any, error: type[Exception]) -> None:
    for build in (spec.encoder, spec.decoder, spec.encoder_decoder):
        with pytest.raises(error, match=f"^{name}\\b") as said:
            build(**{"d": 6, "heads": 3, "layers": 2, "hidden": 5, "vocab": 7, name: bad})
        assert "\n" not in str(said.value)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: spec.attention(7, 2), "got heads=2 and d=7"),
        (lambda: spec.attention(6, 3, kv_heads=2), "got kv_heads=2 and heads=3"),
        (lambda: spec.attention(6, 3, position="fourier"), "position must be one of none, learned"),
        (lambda: spec.encoder(6, 3, 2, position="fourier"), "position must be one of none, learned"),
        (lambda: spec.encoder(6, 3, 2, colour=1), "unknown option 'colour'; a block takes d_key"),  # type: ignore[call-arg]
        (lambda: spec.encoder(6, 3, 2, norm="batch"), "norm"),  # type: ignore[arg-type]
        (lambda: spec.encoder(6, 3, 2, order="mid"), "order"),  # type: ignore[arg-type]
        (
            lambda: spec.vision_transformer((6, 6), (4, 2), 5, 6, 3, 2),
            "image height must be divisible by patch 4, got 6",
        ),
        (lambda: spec.vision_transformer((6, 6), (2, 2), 5, 6, 3, 2, head="wide"), "head"),  # type: ignore[arg-type]
        (lambda: memory.count_memory(spec.encoder(6, 3, 2), Lengths(), dtype="int8"), "dtype must be one of"),
        (lambda: memory.count_memory(spec.encoder(6, 3, 2), Lengths(), optimizer="lion"), "optimizer must be one of"),
        (lambda: memory.count_memory(spec.encoder(6, 3, 2), Lengths(), weights="int3"), "weights must be one of"),
        (lambda: flops.decode(spec.encoder(6, 3, 2), 1, 5), "Encoder does not generate"),
    ],
)
def test_builders_refuse(call: Any, said: str) -> None:
    with pytest.raises(ValueError) as error:
        call()
    assert said in str(error.value) and "\n" not in str(error.value)


# Letters

D, N_H, N_KV, D_HID, D_FF, L, L_DEC, V, B, N, M = (
    SYMBOLS[name] for name in ("D", "N_h", "N_kv", "D_hid", "D_ff", "L", "L_dec", "V", "B", "n", "m")
)
RICH = {"d_key": D_HID, "kv_heads": N_KV, "norm": "rms", "gated": True, "qk_norm": True, "sinks": True, "window": 3}


def built(name: str, of: dict[sympy.Symbol, Any]) -> Model:
    """A model whose sizes are letters, or the numbers that ``of`` gives them."""
    d, heads, layers, hidden, vocab = (of.get(x, x) for x in (D, N_H, L, D_FF, V))
    rich = {key: of.get(value, value) for key, value in RICH.items()}
    rich["d_key"] *= 2  # rotary turns pairs
    builders = {
        "encoder": lambda: spec.encoder(d, heads, layers, hidden=hidden, vocab=vocab, position="learned", reach=19),
        "post": lambda: spec.encoder(d, heads, layers, order="post", qkv_bias=True, position="table", reach=vocab),
        "decoder": lambda: spec.decoder(d, heads, layers, hidden=hidden, vocab=vocab, tied=False),
        "rich": lambda: spec.decoder(d, heads, layers, hidden=hidden, vocab=vocab, position="rotary", **rich),
        "both": lambda: spec.encoder_decoder(
            d, heads, layers, decoder_layers=of.get(L_DEC, L_DEC), hidden=hidden, vocab=vocab, position="t5"
        ),
        "vit": lambda: spec.vision_transformer((8, 6), (4, 3), vocab, d, heads, layers, hidden=hidden),
    }
    return builders[name]()


def figures(model: Model, lengths: Lengths) -> dict[str, Any]:
    found = {"parameters": model.parameters, "kept": memory.saved_activations(model, lengths)}
    found |= {
        "recomputed": memory.saved_activations(model, lengths, checkpoint=True),
        "plain": memory.saved_activations(model.with_plain_attention(), lengths),
    }
    return found | {f.__name__: f(model, lengths) for f in (flops.forward, flops.backward, flops.unmasked)}


@cache
def symbolic_model(name: str) -> dict[str, Any]:
    return figures(built(name, {}), Lengths(B, N, M))


@pytest.mark.parametrize("name", ["encoder", "post", "decoder", "rich", "both", "vit"])
@given(rng=st.randoms(use_true_random=False))
@settings(max_examples=25)
def test_letters_say_what_numbers_say(name: str, rng: random.Random) -> None:
    heads, kv = budgets.heads_of(rng)
    numbers: dict[sympy.Symbol, int] = {x: rng.choice(budgets.PRIMES) for x in (D_HID, D_FF, L, L_DEC, V, B, N, M)}
    numbers |= {N_H: heads, N_KV: kv, D: heads * rng.choice(budgets.PRIMES)}
    expected = figures(built(name, numbers), Lengths(numbers[B], numbers[N], numbers[M]))
    for what, formula in symbolic_model(name).items():
        assert to_int(sympy.sympify(formula).subs(numbers)) == expected[what], what


def test_letters_give_the_theory_s_formula() -> None:
    d_in, d_hid, d_o, d_out = (SYMBOLS[name] for name in ("D_in", "D_hid", "D_o", "D_out"))
    part = spec.attention(d_in, N_H, d_key=d_hid, d_value=d_o, d_out=d_out)
    assert sympy.expand(part.parameters - (N_H * d_in * (2 * d_hid + d_o) + N_H * d_o * d_out + d_out)) == 0
    assert sympy.expand(FeedForward(D, D_FF).parameters - (2 * D * D_FF + D_FF + D)) == 0
    assert sympy.expand(spec.attention(D, N_H, out_bias=False).parameters) == 4 * D**2
