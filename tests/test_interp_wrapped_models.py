"""Watching models that were wrapped (LoRA), quantised, offloaded or compiled, and generation with other caches.

Observables are compared with formulas on the weights of eager attention, norms of values with v and the effective W_O.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import make, perturb
from support.model_configs import BERT, GPT2, LLAMA, ids
from support.observed_models import ASK, CASES, TEXT, check_against, close, outputs
from torch import Tensor, nn

from regard import Observe, RegardError, watch
from regard.interp import ablate
from regard.interp._compiled_models import without_compiled_graphs
from regard.nn import Decoder

WIDE = LLAMA | {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32}
BERT_32 = BERT | {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 32}

# class and config; attention; value projection; output projection; value heads; heads per value head; third of v
LLAMA_LAYER = "model.layers.1.self_attn"
BERT_LAYER = "encoder.layer.1.attention"
GPT2_LAYER = "transformer.h.1.attn"
MODELS: dict[str, tuple[str, dict[str, Any], str, str, str, int, int]] = {
    "llama": ("LlamaForCausalLM", WIDE, LLAMA_LAYER, f"{LLAMA_LAYER}.v_proj", f"{LLAMA_LAYER}.o_proj", 2, 2),
    "bert": (
        "BertModel",
        BERT_32,
        f"{BERT_LAYER}.self",
        f"{BERT_LAYER}.self.value",
        f"{BERT_LAYER}.output.dense",
        4,
        1,
    ),
    "gpt2": ("GPT2LMHeadModel", GPT2, GPT2_LAYER, f"{GPT2_LAYER}.c_attn", f"{GPT2_LAYER}.c_proj", 3, 1),
}
LORA_TARGETS = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "bert": ["query", "value", "dense"],
    "gpt2": ["c_attn", "c_proj"],
}
REAL = TEXT["attention_mask"].bool()


@contextmanager
def outputs_of(model: nn.Module, *paths: str) -> Iterator[list[Tensor]]:
    """The outputs of these modules, in the order of their calls."""
    found: list[Tensor] = []
    hooks = [model.get_submodule(path).register_forward_hook(lambda _m, _x, y: found.append(y)) for path in paths]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def expected_norms(kind: str, v: Tensor, W_OD: Tensor) -> Tensor:
    """‖v_j W_h‖ from the output of the value projection and from W_O ``[D_out, H·E]``."""
    *_, groups, each = MODELS[kind]
    if kind == "gpt2":
        v = v.chunk(3, -1)[2]
    v_BHME = v.unflatten(-1, (groups, -1)).transpose(1, 2).repeat_interleave(each, 1).float()
    return torch.einsum("bhme,ohe->bhmo", v_BHME, W_OD.float().unflatten(1, (groups * each, -1))).norm(dim=-1)


def eager(model: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output and the weights of a model of transformers with its eager attention."""
    old = model.config._attn_implementation
    model.set_attn_implementation("eager")
    result = model(**TEXT, output_attentions=True)
    model.set_attn_implementation(old)
    return outputs(result), result.attentions


def check_watched(kind: str, model: Any, prefix: str = "", plain: Any = None) -> Tensor:
    """Compare a watch of the model with eager attention; returns the output of the value projection.

    - ``prefix``: what the wrapper puts before the paths.
    - ``plain``: the model that eager attention runs on, if it is not the same.
    """
    _, _, path, v_path, *_ = MODELS[kind]
    expected, weights = eager(model if plain is None else plain)
    with outputs_of(model, prefix + v_path) as v, watch(model, ASK, values=True) as recording:
        watched = outputs(model(**TEXT))
    close(watched[REAL], expected[REAL], 1e-4)
    assert len(recording) == len(weights) == 2 and list(recording)[1] == prefix + path
    for A, observation in zip(weights, recording.values(), strict=True):
        check_against(A, observation)
    return v[0]


def check_norms(kind: str, model: Any, W_OD: Tensor, prefix: str = "", bound: float = 1e-4) -> None:
    """Compare norms, and weights times norms, with those of the effective W_O."""
    _, _, path, v_path, *_ = MODELS[kind]
    with outputs_of(model, prefix + v_path) as v, watch(model, Observe(keep=True), values=True) as recording:
        model(**TEXT)
    expected = expected_norms(kind, v[0], W_OD)
    observation = recording[prefix + path]
    close(observation.value_norm, expected, bound)
    close(observation.value_weighted(1, batch=1), observation.weights(1, batch=1) * expected[1, 1], bound)


def lora(kind: str, **options: Any) -> tuple[Any, Any]:
    """A model with random LoRA weights, and its config."""
    peft = pytest.importorskip("peft", reason="needs peft")
    if kind == "gpt2":
        options["fan_in_fan_out"] = True
    model = make(*MODELS[kind][:2])
    config = peft.LoraConfig(r=3, target_modules=LORA_TARGETS[kind], lora_dropout=0.5, **options)
    return perturb(peft.get_peft_model(model, config), 3).eval(), config


PEFT = "base_model.model."


@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_lora(kind: str) -> None:
    model, _ = lora(kind)
    check_watched(kind, model, PEFT)
    layer = model.get_submodule(PEFT + MODELS[kind][4])
    base = layer.base_layer.weight
    delta = layer.get_delta_weight("default")
    assert delta.norm() > 0.1 * base.norm()  # the base alone is something else
    effective = base + delta
    without = base.clone()
    if kind == "gpt2":
        effective = effective.T
        without = without.T
    check_norms(kind, model, effective, PEFT)
    with model.disable_adapter():
        check_norms(kind, model, without, PEFT)
    model.merge_adapter()
    check_norms(kind, model, effective, PEFT)


@pytest.mark.parametrize("options", [{"use_dora": True}, {"use_rslora": True, "bias": "lora_only"}], ids=str)
@torch.no_grad()
def test_other_kinds_of_lora(options: dict[str, Any]) -> None:
    model, _ = lora("llama", **options)
    merged = copy.deepcopy(model).merge_and_unload()
    check_norms("llama", model, merged.get_submodule(MODELS["llama"][4]).weight, PEFT)


@torch.no_grad()
def test_a_change_of_the_adapter_is_noticed() -> None:
    """Layers are measured once per watch, but the weights may change within it. Dropout has no part in the norms."""
    model, _ = lora("llama")
    layer = model.get_submodule(PEFT + MODELS["llama"][4])
    path = PEFT + MODELS["llama"][2]
    with watch(model, values=True) as recording, outputs_of(model, PEFT + MODELS["llama"][3]) as v:
        model(**TEXT)
        model(**TEXT)
        before = layer.base_layer.weight + layer.get_delta_weight("default")
        layer.lora_B["default"].weight.mul_(-2)
        model.train()
        model(**TEXT)
    assert model.training and layer.lora_dropout["default"].training
    after = layer.base_layer.weight + layer.get_delta_weight("default")
    for call, values, W in zip(recording.calls[path], v, (before, before, after), strict=True):
        close(call.value_norm, expected_norms("llama", values, W), 1e-4)


@torch.no_grad()
def test_adapters_that_differ_within_a_batch_have_no_norms() -> None:
    model, config = lora("llama")
    model.add_adapter("other", config)
    perturb(model, 5).eval()
    names = ["default", "other", "__base__"]
    plain = model(**TEXT, adapter_names=names).logits
    with watch(model, ASK, values=True) as recording:
        watched = model(**TEXT, adapter_names=names).logits
    close(watched[REAL], plain[REAL], 1e-4)
    assert [observation.value_norm for observation in recording.values()] == [None, None]
    assert all(observation.entropy is not None for observation in recording.values())


@pytest.mark.parametrize("kind", ["prefix", "prompt"])
@torch.no_grad()
def test_virtual_tokens(kind: str) -> None:
    """Trained tokens before the text: keys without queries, or rows that count like others."""
    peft = pytest.importorskip("peft", reason="needs peft")
    config = {"prefix": peft.PrefixTuningConfig, "prompt": peft.PromptTuningConfig}[kind]
    model = peft.get_peft_model(make("LlamaForCausalLM", WIDE), config(task_type="CAUSAL_LM", num_virtual_tokens=3))
    perturb(model, 3).eval()
    with watch(model, ASK, values=True) as recording:
        model(**TEXT)
    model.base_model.set_attn_implementation("eager")
    weights = model(**TEXT, output_attentions=True).attentions
    for A, observation in zip(weights, recording.values(), strict=True):
        assert observation.m == 10 and observation.value_norm is not None
        check_against(A, observation)


@torch.no_grad()
def test_lora_in_our_layers_and_in_those_of_torch() -> None:
    peft = pytest.importorskip("peft", reason="needs peft")
    torch.manual_seed(0)
    model = Decoder(24, heads=6, kv_heads=2, layers=2, vocab=37).eval()
    config = peft.LoraConfig(r=3, target_modules=["v_proj", "out_proj"])
    perturb(peft.inject_adapter_in_model(config, model), 3).eval()
    attention = model.blocks[1].attention
    with outputs_of(model, "blocks.1.attention.v_proj") as v, watch(model, values=True) as recording:
        model(ids())
    W = attention.out_proj.base_layer.weight + attention.out_proj.get_delta_weight("default")
    v_BHME = v[0].unflatten(-1, (2, -1)).transpose(1, 2).repeat_interleave(3, 1)
    expected = torch.einsum("bhme,ohe->bhmo", v_BHME, W.unflatten(1, (6, -1))).norm(dim=-1)
    close(recording["blocks.1.attention"].value_norm, expected, 1e-4)

    layer = nn.ModuleDict({"attn": nn.MultiheadAttention(12, 3, batch_first=True)}).eval()
    perturb(peft.inject_adapter_in_model(peft.LoraConfig(r=3, target_modules=["attn"]), layer), 3).eval()
    x = torch.randn(2, 5, 12)
    with watch(layer, values=True) as recording:
        layer["attn"](x, x, x)
    assert list(recording) == ["attn.base_layer"]
    layer["attn"].merge()
    merged = layer["attn"].base_layer
    v_BHME = (x @ merged.in_proj_weight[24:].T + merged.in_proj_bias[24:]).unflatten(-1, (3, 4)).transpose(1, 2)
    W = merged.out_proj.base_layer.weight
    expected = torch.einsum("bhme,ohe->bhmo", v_BHME, W.unflatten(1, (3, -1))).norm(dim=-1)
    close(recording["attn.base_layer"].value_norm, expected, 1e-4)


def quantised(kind: str, name: str) -> Any:
    quantization = pytest.importorskip("torchao.quantization", reason="needs torchao")
    model = make(*MODELS[kind][:2])
    quantization.quantize_(model, getattr(quantization, name)())
    return model


@pytest.mark.parametrize("kind", ["llama", "bert"])
@torch.no_grad()
def test_int8_weights(kind: str) -> None:
    model = quantised(kind, "Int8WeightOnlyConfig")
    weight = model.get_submodule(MODELS[kind][4]).weight
    assert type(weight) is not nn.Parameter
    check_watched(kind, model)
    check_norms(kind, model, weight.dequantize())


@torch.no_grad()
def test_int8_weights_and_activations() -> None:
    """An activation near the middle of two steps may be rounded to either one, so q and k come from the watched run."""
    model = quantised("bert", "Int8DynamicActivationInt8WeightConfig")
    plain = model(**TEXT).last_hidden_state
    layer = f"{BERT_LAYER}.self"
    with outputs_of(model, f"{layer}.query", f"{layer}.key") as found, watch(model, ASK) as recording:
        watched = model(**TEXT).last_hidden_state
    close(watched[REAL], plain[REAL], 0.05)
    q, k = (x.unflatten(-1, (4, -1)).transpose(1, 2) for x in found)
    scores = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(~REAL[:, None, None], -torch.inf)
    check_against(scores.softmax(-1), recording[layer])
    check_norms("bert", model, model.get_submodule(MODELS["bert"][4]).weight.dequantize())
    llama = quantised("llama", "Int8DynamicActivationInt8WeightConfig")
    check_norms("llama", llama, llama.get_submodule(MODELS["llama"][4]).weight.dequantize())


@torch.no_grad()
def test_lora_over_int8_weights() -> None:
    peft = pytest.importorskip("peft", reason="needs peft")
    model = peft.get_peft_model(
        quantised("llama", "Int8WeightOnlyConfig"), peft.LoraConfig(r=3, target_modules=LORA_TARGETS["llama"])
    ).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.normal_()
    layer = model.get_submodule(PEFT + MODELS["llama"][4])
    check_watched("llama", model, PEFT)
    check_norms("llama", model, layer.base_layer.weight.dequantize() + layer.get_delta_weight("default"), PEFT)


@torch.no_grad()
def test_weights_of_8_bits_by_bitsandbytes() -> None:
    bnb = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    model = make("LlamaForCausalLM", WIDE)
    old = model.get_submodule(MODELS["llama"][4])
    new = bnb.nn.Linear8bitLt(32, 32, bias=False, has_fp16_weights=False)
    new.weight = bnb.nn.Int8Params(old.weight.data.clone(), has_fp16_weights=False, requires_grad=False)
    model.get_submodule(MODELS["llama"][2]).o_proj = new.to("cpu").eval()
    check_watched("llama", model)
    scale = old.weight.abs().amax(1, keepdim=True) / 127
    # Its inputs and scales are rounded to float16.
    check_norms("llama", model, (old.weight / scale).round() * scale, bound=0.01)


class Rounded(nn.Module):
    """A layer of another library: integers with scales, and no subclass of ``nn.Linear``."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("integers", (linear.weight.detach() / scale).round().to(torch.int8))

    def dequantised(self) -> Tensor:
        return self.integers * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.dequantised().T + 1e3


class Integers(Tensor):
    """A quantised weight as a subclass of Tensor, which can do nothing but multiply in ``F.linear``."""

    @staticmethod
    def __new__(cls: Any, weight: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype)

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.scale = weight.detach().abs().amax(1, keepdim=True) / 127
        self.integers = (weight.detach() / self.scale).round().to(torch.int8)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            x, weight, bias = args
            return func(x, weight.integers * weight.scale, bias)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} of quantised weights")


@pytest.mark.parametrize("kind", ["llama", "bert"])
@torch.no_grad()
def test_a_weight_that_is_no_ordinary_tensor(kind: str) -> None:
    model = make(*MODELS[kind][:2])
    layer = model.get_submodule(MODELS[kind][4])
    weight = Integers(layer.weight)
    del layer.weight
    layer.weight = weight
    check_watched(kind, model)
    check_norms(kind, model, weight.integers * weight.scale)


class Bent(Rounded):
    """A layer that is not linear."""

    def __init__(self, linear: nn.Linear, bend: Callable[[Tensor], Tensor]) -> None:
        super().__init__(linear)
        self.bend = bend

    def forward(self, x: Tensor) -> Tensor:
        return self.bend(super().forward(x) - 1e3)


@torch.no_grad()
def test_a_layer_of_an_unknown_library() -> None:
    model = make("LlamaForCausalLM", WIDE)
    attention = model.get_submodule(MODELS["llama"][2])
    linear = attention.o_proj
    attention.o_proj = Rounded(linear)
    # The large bias costs digits of the output, in the model as in the measurement.
    check_norms("llama", model, attention.o_proj.dequantised(), bound=1e-3)
    # What SiLU adds to x/2 does not depend on the sign of x, and tanh is odd.
    for bend in (nn.functional.silu, torch.tanh):
        attention.o_proj = Bent(linear, bend)
        with watch(model, values=True) as recording:
            model(**TEXT)
        assert recording[1].value_norm is None and recording[0].value_norm is not None


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("where", ["disk", "cpu"])
@torch.no_grad()
def test_offloaded(kind: str, where: str, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate")
    plain = make(*MODELS[kind][:2])
    model = copy.deepcopy(plain)
    if where == "disk":
        accelerate.disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    else:
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    layer = model.get_submodule(MODELS[kind][4])
    assert layer.weight.is_meta
    check_watched(kind, model, plain=plain)
    W = plain.get_submodule(MODELS[kind][4]).weight
    if kind == "gpt2":
        W = W.T
    check_norms(kind, model, W)
    assert layer.weight.is_meta  # the weights were not left in memory


@torch.no_grad()
def test_a_layer_on_disk_is_ablated(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate")
    plain = make("LlamaForCausalLM", WIDE)
    model = copy.deepcopy(plain)
    accelerate.disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    with ablate(plain, [(1, 2)]):
        expected = plain(**TEXT).logits
    with ablate(model, [(1, 2)]):
        close(model(**TEXT).logits[REAL], expected[REAL], 1e-4)


@torch.no_grad()
def test_tied_logits_of_an_offloaded_embedding_are_refused(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate")
    torch.manual_seed(0)
    models = [Decoder(24, heads=3, layers=1, vocab=37, tied=tied).eval() for tied in (False, True)]
    expected = models[0](ids())
    for model, name in zip(models, ("untied", "tied"), strict=True):
        accelerate.disk_offload(model, tmp_path / name, execution_device=torch.device("cpu"))
    with watch(models[0], values=True) as recording:
        close(models[0](ids()), expected)
    assert recording[0].value_norm is not None
    with pytest.raises(RegardError, match="token embedding"):
        models[1](ids())


class Counting:
    """A compiler that changes nothing and counts its graphs and their calls."""

    def __init__(self) -> None:
        self.graphs = 0
        self.calls = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.calls += 1
            return graph.forward(*args)

        return run


@pytest.fixture
def compiler() -> Iterator[Counting]:
    torch._dynamo.reset()
    yield Counting()
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "kind",
    ["llama", pytest.param("bert", marks=pytest.mark.full), pytest.param("gpt2", marks=pytest.mark.full)],
)
@torch.no_grad()
def test_compiled(kind: str, compiler: Counting) -> None:
    plain = make(*MODELS[kind][:2])
    compiled = torch.compile(copy.deepcopy(plain), backend=compiler, fullgraph=kind == "gpt2")
    compiled(**TEXT)
    graphs = compiler.graphs
    assert graphs and compiler.calls
    calls = compiler.calls
    check_watched(kind, compiled, "_orig_mod.", plain)
    W = plain.get_submodule(MODELS[kind][4]).weight
    if kind == "gpt2":
        W = W.T
    check_norms(kind, compiled, W, "_orig_mod.")
    # The graphs wait for the end of the watch.
    assert (compiler.graphs, compiler.calls) == (graphs, calls)
    compiled(**TEXT)
    assert compiler.graphs == graphs and compiler.calls > calls


@pytest.mark.parametrize("way", ["wrapped", "in place"])
@torch.no_grad()
def test_a_compiled_part(way: str, compiler: Counting) -> None:
    plain = make("LlamaForCausalLM", WIDE)
    model = copy.deepcopy(plain)
    attention = model.get_submodule(MODELS["llama"][2])
    if way == "wrapped":
        attention.o_proj = torch.compile(attention.o_proj, backend=compiler)
        model.model.layers[0].mlp = torch.compile(model.model.layers[0].mlp, backend=compiler)
    else:
        model.model.layers[1].compile(backend=compiler)
    model(**TEXT)
    graphs = compiler.graphs
    assert graphs
    check_watched("llama", model, plain=plain)
    check_norms("llama", model, plain.get_submodule(MODELS["llama"][4]).weight)
    assert compiler.graphs == graphs


@torch.no_grad()
def test_the_last_watch_gives_the_graphs_back(compiler: Counting) -> None:
    """Watches of several threads overlap in any order."""
    double = torch.compile(lambda x: 2 * x, backend=compiler)
    first = without_compiled_graphs()
    second = without_compiled_graphs()
    x = torch.ones(3)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.equal(double(x), 2 * x) and compiler.calls == 0
    second.__exit__(None, None, None)
    assert torch.equal(double(x), 2 * x) and compiler.calls == 1


LEFT_PADDED = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
CACHES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "static": ("LlamaForCausalLM", WIDE, {"cache_implementation": "static"}),
    "static, beams": ("LlamaForCausalLM", WIDE, {"cache_implementation": "static", "num_beams": 3}),
    "dynamic, beams": ("LlamaForCausalLM", WIDE, {"num_beams": 3}),
    "sliding": ("MistralForCausalLM", LLAMA | {"sliding_window": 3}, {"cache_implementation": "sliding_window"}),
    "hybrid": (*CASES["gemma2"][:2], {"cache_implementation": "hybrid"}),
    "static gpt2": ("GPT2LMHeadModel", GPT2, {"cache_implementation": "static"}),
}


@pytest.mark.parametrize("name", CACHES)
@torch.no_grad()
def test_every_step_with_other_caches(name: str) -> None:
    kind, entries, options = CACHES[name]
    model = make(kind, entries)
    options = options | {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "attention_mask": LEFT_PADDED}
    model.set_attn_implementation("eager")
    expected = model.generate(ids(2, 4), **options, output_attentions=True, return_dict_in_generate=True)
    with watch(model, ASK, values=True) as recording:
        text = model.generate(ids(2, 4), **options)
    assert torch.equal(text, expected.sequences)
    for layer, calls in enumerate(recording.calls.values()):
        assert len(calls) == len(expected.attentions)
        for call, weights in zip(calls, expected.attentions, strict=True):
            # The keys after the text are the empty part of the cache.
            A = weights[layer]
            assert not A[call.counted][..., call.m :].any()
            check_against(A[..., : call.m], call)
            assert call.value_norm is not None and call.value_norm.shape[-1] == call.m
