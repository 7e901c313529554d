"""Small models of every kind that regard.watch observes, and checks of their observations."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import regard
from regard import Observe
from regard.nn import Decoder, EncoderDecoder
from support.checkpoints import make
from support.model_configs import BERT, GPT2, IMAGES, LLAMA, T5, V, ids, real_rows

G = 4
ASK = Observe(map=G, key_mass=True, top=2, sink=1, local=1)
WHISPER = {"vocab_size": V, "d_model": 12, "num_mel_bins": 8, "max_source_positions": 15, "max_target_positions": 20}
WHISPER |= {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
WHISPER |= {"encoder_ffn_dim": 20, "decoder_ffn_dim": 20, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WHISPER |= {"decoder_start_token_id": 3}
LOCAL = LLAMA | {"sliding_window": 3, "head_dim": 4}
OSS = LOCAL | {"num_local_experts": 2, "num_experts_per_tok": 1}
TEXT = {"input_ids": ids(), "attention_mask": real_rows(7).long()}
LEFT = {"input_ids": ids(), "attention_mask": real_rows(7).flip(-1).long()}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "bert": ("BertModel", BERT, TEXT),
    "gpt2": ("GPT2LMHeadModel", GPT2, TEXT),
    "llama": ("LlamaForCausalLM", LLAMA, TEXT),
    "llama padded left": ("LlamaForCausalLM", LLAMA, LEFT),
    "mistral": ("MistralForCausalLM", LLAMA | {"sliding_window": 3}, TEXT),
    "gemma2": ("Gemma2ForCausalLM", LOCAL | {"query_pre_attn_scalar": 4}, TEXT),
    "gpt-oss": ("GptOssForCausalLM", OSS, TEXT),
    "qwen3": ("Qwen3ForCausalLM", LLAMA | {"head_dim": 8}, LEFT),
    "t5": ("T5ForConditionalGeneration", T5, TEXT | {"decoder_input_ids": ids(3, 7, seed=2)}),
    "whisper": (
        "WhisperForConditionalGeneration",
        WHISPER,
        {"input_features": torch.randn(2, 8, 30), "decoder_input_ids": ids(2, 5)},
    ),
    "vit": (*IMAGES[0], {"pixel_values": torch.randn(2, 3, 12, 12)}),
}


def outputs(result: Any) -> Tensor:
    return result.logits if getattr(result, "logits", None) is not None else result.last_hidden_state


def close(a: Tensor, b: Tensor, bound: float = 1e-5) -> None:
    assert a.shape == b.shape
    assert (a - b).abs().max() <= bound * (1 + b.abs().max())


def check_against(A: Tensor, observation: regard.Observation) -> None:
    """Compare every observable with its formula on the weights A, at the counted rows."""
    A = A.double()
    n, m = A.shape[-2:]
    counted = observation.counted
    assert counted is not None and counted.any()
    delta = torch.arange(m) - torch.arange(n).unsqueeze(-1) - (m - n)
    expected = {
        "entropy": -torch.where(A > 0, A * A.log(), 0.0).sum(-1),
        "peak": A.amax(-1),
        "distance": (A * delta.abs()).sum(-1),
        "offset": (A * delta).sum(-1),
        "sink": A[..., 0],
        "local": (A * (delta.abs() <= 1)).sum(-1),
    }
    for name, values in expected.items():
        close(getattr(observation, name).double()[counted], values[counted], 1e-4)
    rows = counted.sum((0, 2)).clamp(min=1).unsqueeze(-1)
    close(observation.key_mass.double(), (A * counted.unsqueeze(-1)).sum((0, 2)) / rows, 1e-4)
    row_bin, key_bin = torch.arange(n) * G // n, torch.arange(m) * G // m
    pooled = torch.zeros(A.shape[1], G, G, dtype=torch.float64)
    for i in range(n):
        for j in range(m):
            pooled[:, row_bin[i], key_bin[j]] += (A[:, :, i, j] * counted[:, :, i]).sum(0)
    per_bin = torch.zeros(A.shape[1], G, dtype=torch.float64)
    for i in range(n):
        per_bin[:, row_bin[i]] += counted[:, :, i].sum(0)
    close(observation.map.double(), pooled / per_bin.clamp(min=1).unsqueeze(-1), 1e-4)
    close(observation.top.double()[counted], A.topk(min(2, m)).values[counted], 1e-4)


class Odd(nn.Module):
    """Attention as people write it: SDPA imported by name, masks of both kinds, [B, n, d] without heads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.Linear(6, 6)})

    def forward(self, x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        q = self.inner["a"](x)
        y = F.scaled_dot_product_attention(q, x, x, attn_mask=mask, is_causal=causal)
        heads = x.unflatten(-1, (3, 2)).transpose(1, 2)
        return y + F.scaled_dot_product_attention(heads, heads, heads, scale=0.7).transpose(1, 2).flatten(-2)


class Own(nn.Module):
    """Attention as people write it, with an output layer; optionally a second one, with its own output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(10, 3 * 15)
        self.out, self.again = nn.Linear(15, 7), nn.Linear(15, 11, bias=False)
        self.v: Tensor

    def forward(self, x: Tensor, twice: bool = False) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 5)).permute(2, 0, 3, 1, 4)
        self.v = v
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(*x.shape[:2], 15)
        if not twice:
            return self.out(y)
        z = F.scaled_dot_product_attention(k, k, v).transpose(1, 2).reshape(*x.shape[:2], 15)
        return torch.cat([self.out(y), self.again(z)], -1)


X = torch.randn(3, 7, 12, generator=torch.Generator().manual_seed(7))
TO = torch.randn(3, 5, 12, generator=torch.Generator().manual_seed(8))
REAL = real_rows(7)
GROUPED = LLAMA | {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 2}


class Calls(nn.Module):
    """``nn.MultiheadAttention`` in its most common call, which also returns weights that the caller ignores."""

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
        result = self.call(model)
        return result if isinstance(result, Tensor) else outputs(result)


T5_OUT = [f"encoder.block.{i}.layer.0.SelfAttention.o" for i in range(2)]
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
    """A copy of the model whose W_O has zeros for these heads."""
    twin = copy.deepcopy(model)
    for layer, head in pairs:
        W = columns(twin.get_submodule(case.out[layer]))
        width = len(W) // case.heads
        W[head * width : (head + 1) * width] = 0
    return twin


def rows(case: Case, x: Tensor) -> Tensor:
    """The rows of x that belong to real tokens."""
    return x if case.real is None else x[case.real]
