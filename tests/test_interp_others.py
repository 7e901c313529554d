"""Watching what others built: `diffusers`, GPT-OSS with its sinks, and the layers of torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support.checkpoints import make
from support.model_configs import real_rows
from support.observed_models import ASK, CASES, LEFT, TEXT, check_against, close
from torch import Tensor, nn

from regard import watch

pytest.importorskip("diffusers")
from diffusers import FluxTransformer2DModel, UNet2DConditionModel
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.attention_processor import Attention, AttnProcessor


class Keeping(AttnProcessor):
    """Attention by hand, as `diffusers` itself writes it; its weights are kept by module."""

    def __init__(self) -> None:
        self.weights: dict[nn.Module, Tensor] = {}

    def __call__(self, attn: Any, *args: Any, **kwargs: Any) -> Tensor:
        scores = attn.get_attention_scores

        def keep(*given: Any) -> Tensor:
            A = scores(*given)
            self.weights[attn] = A.unflatten(0, (-1, attn.heads))
            return A

        attn.get_attention_scores = keep
        try:
            return super().__call__(attn, *args, **kwargs)
        finally:
            del attn.get_attention_scores


def by_hand(model: nn.Module, call: Callable[[], Tensor]) -> tuple[Tensor, dict[nn.Module, Tensor]]:
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    before, keeping = [layer.processor for layer in layers], Keeping()
    for layer in layers:
        layer.set_processor(keeping)
    out = call()
    for layer, processor in zip(layers, before, strict=True):
        layer.set_processor(processor)
    return out, keeping.weights


@pytest.mark.parametrize("width", [None, 11])
@pytest.mark.parametrize("kind", ["none", "float", "bool"])
@torch.no_grad()
def test_diffusers_attention(width: int | None, kind: str) -> None:
    torch.manual_seed(0)
    layer = nn.ModuleDict({"attn": Attention(10, width, heads=3, dim_head=5, bias=True)}).eval()
    attn = layer["attn"]
    x, context, m = torch.randn(2, 7, 10), None if width is None else torch.randn(2, 13, width), 13 if width else 7
    see = (torch.arange(m) < torch.tensor([[m], [5]])).unsqueeze(1)
    added = torch.zeros(2, 1, m).masked_fill(~see, -10000.0)  # what its models make of a mask
    mask = {"none": None, "float": added, "bool": see}[kind]
    plain = attn(x, context, attention_mask=mask)
    with watch(layer, ASK) as seen:
        watched = attn(x, context, attention_mask=mask)
    # By hand a mask is added to the scores, so a bool one must be given as numbers.
    eager, weights = by_hand(layer, lambda: attn(x, context, attention_mask=None if kind == "none" else added))
    close(watched, plain)
    close(watched, eager)
    assert list(seen) == ["attn"] and (seen["attn"].n, seen["attn"].m) == (7, m)
    check_against(weights[attn], seen["attn"])


@pytest.mark.parametrize("name", ["block", "unet"])
@torch.no_grad()
def test_diffusers_models(name: str) -> None:
    torch.manual_seed(0)
    context, real = torch.randn(2, 13, 11), (torch.arange(13) < torch.tensor([[13], [5]])).float()
    model: Any
    if name == "block":
        model, x = BasicTransformerBlock(15, 3, 5, cross_attention_dim=11).eval(), torch.randn(2, 7, 15)
        call = lambda: model(x, encoder_hidden_states=context)  # noqa: E731
    else:
        kinds = {"down_block_types": ("CrossAttnDownBlock2D",), "up_block_types": ("CrossAttnUpBlock2D",)}
        sizes = {"sample_size": 5, "block_out_channels": (6,), "layers_per_block": 1, "norm_num_groups": 3}
        model = UNet2DConditionModel(**kinds, **sizes, cross_attention_dim=11, attention_head_dim=3).eval()
        x = torch.randn(2, 4, 5, 5)
        call = lambda: model(x, 3, context, encoder_attention_mask=real).sample  # noqa: E731
    plain = call()
    with watch(model, ASK) as seen:
        watched = call()
    eager, weights = by_hand(model, call)
    close(watched, plain)
    close(watched, eager)
    modules = dict(model.named_modules())
    assert {modules[path] for path in seen} == set(weights) and len(seen) >= 2
    for path, observation in seen.items():
        check_against(weights[modules[path]], observation)


@torch.no_grad()
def test_diffusers_joint_attention() -> None:
    """Flux reaches torch through diffusers' dispatcher, with text and image as one sequence."""
    torch.manual_seed(0)
    sizes = {"in_channels": 3, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16}
    sizes |= {"num_attention_heads": 3, "joint_attention_dim": 11, "pooled_projection_dim": 13}
    model = FluxTransformer2DModel(patch_size=1, axes_dims_rope=(4, 4, 8), **sizes).eval()
    given = {"hidden_states": torch.randn(2, 7, 3), "encoder_hidden_states": torch.randn(2, 5, 11)}
    given |= {"pooled_projections": torch.randn(2, 13), "timestep": torch.rand(2)}
    given |= {"img_ids": torch.randn(7, 3), "txt_ids": torch.randn(5, 3)}
    plain = model(**given).sample
    with watch(model, ASK) as seen:
        watched = model(**given).sample
    close(watched, plain)
    assert list(seen) == ["transformer_blocks.0.attn", "single_transformer_blocks.0.attn"]
    assert all((o.n, o.m) == (12, 12) for o in seen.values())


@pytest.mark.parametrize("given", [TEXT, LEFT], ids=["right", "left"])
@torch.no_grad()
def test_sinks_of_gpt_oss(given: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.gpt_oss import modeling_gpt_oss as theirs

    full: list[Tensor] = []
    eager = theirs.eager_attention_forward

    def keeping(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, **kw: Any) -> Any:
        s = query @ theirs.repeat_kv(key, module.num_key_value_groups).transpose(2, 3) * scaling + mask
        sinks = module.sinks.reshape(1, -1, 1, 1).expand(*s.shape[:-1], 1)
        full.append(torch.cat([s, sinks], -1).double().softmax(-1))
        return eager(module, query, key, value, mask, scaling, **kw)

    monkeypatch.setattr(theirs, "eager_attention_forward", keeping)
    model = make(*CASES["gpt-oss"][:2])
    model.set_attn_implementation("eager")
    plain = model(**given).logits
    with watch(model, ASK) as seen:
        watched = model(**given).logits
    real = given["attention_mask"].bool()
    close(watched[real], plain[real])
    assert len(full) == len(seen) == 2
    for A, observation in zip(full, seen.values(), strict=True):
        assert torch.equal(observation.counted, real[:, None].expand_as(observation.counted))
        took = A[..., -1]
        assert took[observation.counted].mean() > 0.1  # it matters here
        # The sink is one more outcome of the entropy; without its term it is that of the real keys.
        rest = replace(observation, entropy=observation.entropy.double() + took * took.log())
        check_against(A[..., :-1], rest)


def multihead_weights(model: nn.Module, call: Callable[[], Any]) -> dict[str, Tensor]:
    """The weights of each `nn.MultiheadAttention`, which is called once more as it is called, and asked for them."""
    found: dict[str, Tensor] = {}

    def ask(path: str, layer: Any, args: Any, kwargs: Any) -> None:
        if path not in found:  # asking calls this hook again
            found[path] = torch.empty(0)
            found[path] = layer(*args, **kwargs | {"need_weights": True, "average_attn_weights": False})[1]

    layers = [(path, layer) for path, layer in model.named_modules() if isinstance(layer, nn.MultiheadAttention)]
    hooks = [layer.register_forward_pre_hook(partial(ask, path), with_kwargs=True) for path, layer in layers]
    call()
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("kind", ["plain", "causal", "said to be causal", "padded"])
@torch.no_grad()
def test_torch_transformer(kind: str) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {} if kind == "plain" else {"tgt_mask": nn.Transformer.generate_square_subsequent_mask(5)}
    if kind == "said to be causal":
        options["tgt_is_causal"] = True
    if kind == "padded":
        options["src_key_padding_mask"] = options["memory_key_padding_mask"] = torch.where(real_rows(7), 0.0, -math.inf)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 3, 20, batch_first=True), 1, None, False)
    model = nn.Transformer(12, 3, 1, 2, 20, custom_encoder=encoder, batch_first=True).eval()
    x, y = torch.randn(3, 7, 12), torch.randn(3, 5, 12)
    plain = model(x, y, **options)
    weights = multihead_weights(model, lambda: model(x, y, **options))
    with watch(model, ASK) as seen:
        watched = model(x, y, **options)
    close(watched, plain)
    assert set(seen) == set(weights) and len(seen) == 5
    for path, observation in seen.items():
        n, m = (5, 7) if "multihead" in path else (7, 7) if "encoder" in path else (5, 5)
        assert (observation.n, observation.m) == (n, m)
        check_against(weights[path], observation)


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 11, "vdim": 13}], ids=str)
@pytest.mark.parametrize("need_weights", [True, False])
@torch.no_grad()
def test_multihead_attention_with_more_or_other_keys(options: dict[str, Any], need_weights: bool) -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(12, 3, batch_first=True, **options).eval()
    x, k, v = torch.randn(2, 5, 12), torch.randn(2, 7, layer.kdim), torch.randn(2, 7, layer.vdim)
    plain, _ = layer(x, k, v, need_weights=need_weights)
    _, A = layer(x, k, v, average_attn_weights=False)
    with watch(layer, ASK) as seen:
        watched, _ = layer(x, k, v, need_weights=need_weights)
    close(watched, plain)
    assert seen[""].m == (7 if "kdim" in options else 8)
    check_against(A, seen[""])


@torch.no_grad()
def test_padded_rows_of_torch_do_not_count() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 2, 20, batch_first=True), 1).eval()
    with watch(model) as seen:
        model(torch.randn(3, 7, 12), src_key_padding_mask=~real_rows(7))
    assert torch.equal(seen["layers.0.self_attn"].counted[:, 0], real_rows(7))
