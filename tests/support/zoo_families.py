"""The 40 everyday families of ``transformers``, tiny and random, on eager attention and on their default attention."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from regard.zoo._architectures import Architecture, list_architectures
from regard.zoo._check_architecture import build, build_runnable
from regard.zoo._reference import EAGER_FUNCTION, SOFTMAXES

# Architecture, and the class that generates text; None where the family does not generate.
GENERATING = {
    "bart": "BartForConditionalGeneration",
    "bloom": "BloomForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "falcon": "FalconForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_neo": "GPTNeoForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "gptj": "GPTJForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "llava": "LlavaForConditionalGeneration",
    "marian": "MarianMTModel",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "mpt": "MptForCausalLM",
    "opt": "OPTForCausalLM",
    "paligemma": "PaliGemmaForConditionalGeneration",
    "phi": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "phi4_multimodal": "Phi4MultimodalForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "t5": "T5ForConditionalGeneration",
    "whisper": "WhisperForConditionalGeneration",
}
OTHERS = (
    "bert",
    "clip",
    "deberta-v2",
    "dinov2",
    "dinov3_vit",
    "electra",
    "modernbert",
    "roberta",
    "siglip",
    "siglip2",
    "swinv2",
    "vit",
    "xlnet",
)
FAMILIES = sorted((*GENERATING, *OTHERS))


@dataclass(frozen=True, eq=False)
class Family:
    """A tiny model on eager attention, the same model with its default attention, and inputs for both."""

    name: str
    eager: Any
    default: Any
    inputs: dict[str, Any]

    def run(self, model: Any) -> Any:
        """The output of a model; some models draw random numbers."""
        torch.manual_seed(3)
        with torch.no_grad():
            return model(**self.inputs)


def architecture(name: str) -> Architecture:
    """The architecture of a family, with the class that generates text if there is one."""
    if name in GENERATING:
        return Architecture(name, GENERATING[name])
    return list_architectures()[name]


@functools.lru_cache(maxsize=1)
def family(name: str) -> Family:
    """Build a family; the tests of one family follow each other, so the last one is kept."""
    chosen = architecture(name)
    eager, config, inputs = build_runnable(chosen)
    default = build(chosen, config, None)
    default.load_state_dict(eager.state_dict())
    return Family(name, eager, default, inputs)


@contextmanager
def head_zeroed(model: nn.Module, path: str, head: int) -> Iterator[None]:
    """Run an eager model with the output of one head set to 0, without regard.

    The head's output is set to 0 where the eager attention function of the model's file returns it. Models that write
    attention by hand get weights of 0 from the softmax of that module.
    """
    module = model.get_submodule(path)
    running: list[nn.Module] = []
    inside: list[bool] = []
    with ExitStack() as stack:
        for other in model.modules():
            stack.callback(other.register_forward_pre_hook(lambda other, _: running.append(other)).remove)
            stack.callback(other.register_forward_hook(lambda *_: running.pop() and None).remove)
        for name, file in list(sys.modules.items()):
            if not name.startswith("transformers.models.") or file is None:
                continue
            for attribute, function in list(vars(file).items()):
                if EAGER_FUNCTION.fullmatch(attribute) and callable(function):
                    stack.callback(setattr, file, attribute, function)
                    setattr(file, attribute, _zeroing(function, module, head, inside))
        stack.enter_context(_SoftmaxZeroed(module, head, running, inside))
        yield


def _zeroing(function: Any, module: nn.Module, head: int, inside: list[bool]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        inside.append(True)
        try:
            out = function(*args, **kwargs)
        finally:
            inside.pop()
        if inside or args[0] is not module:
            return out
        heads = out[0].clone()  # [B, n, H, d]
        heads[:, :, head] = 0
        return heads, *out[1:]

    return call


class _SoftmaxZeroed(TorchFunctionMode):
    def __init__(self, module: nn.Module, head: int, running: list[nn.Module], inside: list[bool]) -> None:
        super().__init__()
        self.module = module
        self.head = head
        self.running = running
        self.inside = inside

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in SOFTMAXES or self.inside or not self.running or self.running[-1] is not self.module:
            return out
        weights: Tensor = out.clone()  # [B, H, n, m]
        weights[:, self.head] = 0
        return weights


def mean_error(expected: Any, actual: Any) -> float:
    """The mean difference of two outputs, relative to 1 plus the mean size of the first one."""
    x = expected.double()
    y = actual.double()
    return float((x - y).abs().mean() / (1 + x.abs().mean()))


__all__ = ["FAMILIES", "GENERATING", "F", "Family", "architecture", "family", "head_zeroed", "mean_error"]
