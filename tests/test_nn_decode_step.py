"""One native call for a token through a block gives the same numbers as its layers, or leaves the token to them."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from regard import ALiBi, Rotary, Window
from regard.kernels import native
from regard.nn import Block, Decoder, FeedForward, LayerNorm, MultiHeadAttention, RMSNorm
from regard.nn import _block as block_module
from regard.nn._cache import BlockCache
from regard.nn._linear import Linear
from regard.nn._stack import TokenEmbedding
from regard.positions import Learned

pytestmark = pytest.mark.skipif(not native.built(), reason="the native module was not built")
SETS = native.instruction_sets() or ("none",)
D, V = 12, 37


def decoder(gated: bool = True, norm=RMSNorm, activation: str = "silu", added: bool = False, **options) -> Decoder:
    """Two blocks; ``options`` are the attention's."""
    torch.manual_seed(3)
    options = {"heads": 3, "position": None if added else Rotary(options.get("d_key") or 4)} | options
    blocks = [
        Block(
            MultiHeadAttention(D, **options),
            FeedForward(D, 17, gated=gated, activation=activation),
            norm=norm,
        )
        for _ in range(2)
    ]
    made = Decoder.from_blocks(
        blocks, norm=norm(D), tokens=TokenEmbedding(V, D, scale=1.0), position=Learned(40, D) if added else None
    )
    with torch.no_grad():
        for p in made.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return made.eval()


KINDS = {
    "llama": partial(decoder, kv_heads=1, out_bias=False),
    "qwen": partial(decoder, kv_heads=3, d_key=8, d_value=6, qkv_bias=True, qk_norm=RMSNorm),
    "normed": partial(decoder, qk_norm=LayerNorm),
    "gpt2": partial(decoder, False, LayerNorm, "gelu_tanh", True, qkv_bias=True),
    "gelu": partial(decoder, False, LayerNorm, "gelu", True),
    "relu": partial(decoder, True, LayerNorm, "relu", softcap=3.0),
    "sinks": partial(decoder, sinks=True),
    "window": partial(decoder, mask=Window(3, 0)),
    "part": partial(decoder, position=Rotary(4, rotate=2, layout="pairs"), scale=0.0),
}


@pytest.fixture
def steps(monkeypatch):
    """Which calls of ``decode_step`` did something."""
    done: list[bool] = []
    real = block_module.decode_step

    def counted(*args):
        result = real(*args)
        done.append(result is not None)
        return result

    monkeypatch.setattr(block_module, "decode_step", counted)
    return done


@torch.inference_mode()
def written(model: Decoder, ids: Tensor, first: int = 2) -> Tensor:
    """Logits of every token, the first few in one go and the others one by one."""
    cache = model.new_cache()
    parts = [model(ids[:, :first], cache=cache)]
    parts += [model(ids[:, i : i + 1], cache=cache) for i in range(first, ids.shape[1])]
    assert cache.length == ids.shape[1]
    return torch.cat(parts, dim=1)


def ids(batch: int, n: int = 11) -> Tensor:
    return torch.randint(V, (batch, n), generator=torch.Generator().manual_seed(batch))


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_step_is_its_layers(kind: str, dtype: torch.dtype, isa: str, steps, monkeypatch) -> None:
    monkeypatch.setattr(native, "instruction_set", lambda: isa)
    model = KINDS[kind]()
    with torch.inference_mode():
        exact = copy.deepcopy(model).double()(ids(5))
    model = model.to(dtype)
    for batch in (1, 5, 8):
        tokens = ids(batch)
        ours = written(model, tokens)
        assert len(steps) == 2 * 9
        assert all(steps) or (kind == "sinks" and dtype != torch.float32)  # those are float32 to the kernel
        steps.clear()
        with monkeypatch.context() as patch:
            patch.setattr(block_module, "decode_step", lambda *_: None)
            layers = written(model, tokens)
        if batch == 5:
            floor = 20 * torch.finfo(dtype).eps * exact.abs().max()
            assert (ours - exact).abs().max() <= 2 * (layers - exact).abs().max() + floor
        torch.testing.assert_close(ours, layers, atol=40 * torch.finfo(dtype).eps * exact.abs().max().item(), rtol=0)


def test_what_a_step_cannot_do_the_layers_do(steps) -> None:
    """Each of these takes the layers, and gives what a call without a cache gives."""
    model = KINDS["llama"]()
    cases = {
        "float64": copy.deepcopy(model).double(),
        "alibi": decoder(position=ALiBi()),
        "reference": decoder(backend="reference"),
        "other activation": decoder(activation=torch.tanh),
        "hard": decoder(scale=float("inf")),
        "other norm": decoder(norm=nn.LayerNorm),
    }
    for name, other in cases.items():
        with torch.inference_mode():
            torch.testing.assert_close(written(other, ids(2)), other(ids(2)), msg=name)
        assert steps and not any(steps), name
        steps.clear()
    written(model, ids(9))
    assert not any(steps)


def test_hooks_replacements_and_new_weights_are_seen(steps) -> None:
    model = KINDS["llama"]()
    tokens = ids(2)
    written(model, tokens)
    assert all(steps)
    steps.clear()
    hook_calls: list[str] = []
    handle = model.blocks[1].feedforward.down.register_forward_hook(lambda *_: hook_calls.append("down"))
    written(model, tokens)
    assert hook_calls and steps.count(True) == 9
    handle.remove()

    for change in (
        lambda: model.blocks[0].attention.q_proj.weight.data.mul_(2),
        lambda: setattr(model.blocks[0].attention, "q_proj", nn.Linear(D, D, bias=False)),
        lambda: setattr(model.blocks[1], "feedforward_norm", RMSNorm(D, eps=0.5)),
        lambda: setattr(model.blocks[1].attention, "k_proj", copy.deepcopy(model.blocks[1].attention.v_proj)),
        lambda: setattr(model.blocks[1].attention, "sinks", nn.Parameter(torch.randn(3))),
        lambda: setattr(model.blocks[1].attention, "sinks", None),
        lambda: setattr(model.blocks[0].attention.q_proj, "weight", nn.Parameter(torch.randn(D, D))),
        lambda: setattr(model.blocks[0].attention.q_proj, "bias", nn.Parameter(torch.randn(D))),
        lambda: setattr(model.blocks[0].attention.q_proj, "bias", None),
        lambda: setattr(model.blocks[0].attention.q_proj.weight, "data", torch.randn(D, D).T),
        lambda: setattr(model.blocks[1].attention, "scale", 2.5),
        lambda: setattr(model.blocks[1].attention, "softcap", 1.5),
        lambda: setattr(model.blocks[1].attention, "mask", Window(2, 0)),
        lambda: setattr(model.blocks[1].feedforward, "phi", torch.tanh),
        lambda: setattr(model.blocks[0].feedforward_norm, "eps", 0.9),
        lambda: setattr(model.blocks[0].attention, "position", Rotary(4, base=10.0)),
        lambda: setattr(model.blocks[0].feedforward, "forward", torch.sin),
        lambda: delattr(model.blocks[0].feedforward, "forward"),
        lambda: parametrize.register_parametrization(model.blocks[0].attention.k_proj, "weight", Doubled()),
        lambda: model.load_state_dict({k: v * 0.7 for k, v in model.state_dict().items()}, assign=True),
        lambda: model.bfloat16(),
        lambda: model.float(),
    ):
        change()
        with torch.inference_mode():
            expected = model(tokens)
            atol = 40 * torch.finfo(expected.dtype).eps * expected.abs().max().item()
            torch.testing.assert_close(written(model, tokens), expected, atol=atol, rtol=0)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def test_blocks_and_sizes_of_other_kinds_take_the_layers(steps) -> None:
    """A subclass, a mode of training inside, a layer of another size: the kernel would be wrong, or out of bounds."""

    class Scaled(Block):
        def _sublayer(self, x, norm, f):
            return x + 0.1 * f(norm(x))

    model = KINDS["llama"]()
    model.blocks[0].__class__ = Scaled
    with torch.inference_mode():
        torch.testing.assert_close(written(model, ids(2)), model(ids(2)), atol=1e-5, rtol=1e-5)
    assert steps.count(True) == 9
    steps.clear()

    model = KINDS["llama"]()
    model.blocks[0].feedforward.train()
    model.blocks[1].attention.train()
    written(model, ids(2))
    assert not any(steps)

    block, cache = KINDS["llama"]().blocks[0], BlockCache()
    with torch.inference_mode():
        block(torch.randn(2, 3, D), cache=cache)
        for width in (D - 4, D + 6):
            with pytest.raises(ValueError, match="shape"):
                block(torch.randn(2, 1, width), cache=cache)
        block.attention.q_proj = Linear(D, 48000)
        with pytest.raises((ValueError, RuntimeError)):
            block(torch.randn(2, 1, D), cache=cache)
        block.attention.q_proj = Linear(8, 12)
        with pytest.raises((ValueError, RuntimeError)):
            block(torch.randn(2, 1, D), cache=cache)
    assert len(cache.attention) == 3


def test_copies_and_state_are_free_of_plans() -> None:
    model = KINDS["llama"]()
    written(model, ids(1))
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.blocks[0].attention.q_proj.weight.zero_()
    assert not torch.equal(written(other, ids(1)), written(model, ids(1)))
    assert model.state_dict().keys() == KINDS["llama"]().state_dict().keys()


def test_numbers_that_are_not_finite_go_where_the_layers_send_them(monkeypatch) -> None:
    model = KINDS["llama"]()
    with torch.no_grad():
        model.tokens.embedding.weight[5] = float("nan")
    tokens = ids(2)
    tokens[tokens == 5] = 6
    tokens[0, 6] = 5
    ours = written(model, tokens)
    monkeypatch.setattr(block_module, "decode_step", lambda *_: None)
    torch.testing.assert_close(ours, written(model, tokens), equal_nan=True)
    others = ours[..., :5]  # the embedding is the head too, so that token's own logit is NaN everywhere
    assert others[0, 6:].isnan().all() and not others[0, :6].isnan().any() and not others[1].isnan().any()


def test_a_cache_is_shared_between_steps_and_layers(monkeypatch, steps) -> None:
    """Room that runs out, a crop, another order, a step that fails: the cache holds what was read."""
    model, tokens = KINDS["qwen"](), ids(3, 30)
    with torch.inference_mode():
        cache = model.new_cache()
        model(tokens[:, :3], cache=cache)
        for i in range(3, 25):
            model(tokens[:, i : i + 1], cache=cache)
        cache.crop(20)
        model(tokens[:, 20:24], cache=cache)
        with pytest.raises(ValueError, match="token ids"):
            model(torch.full((3, 1), V), cache=cache)
        assert cache.length == 24
        cache.reorder(torch.tensor([2, 2, 0]))
        ours = model(tokens[[2, 2, 0], 24:25], cache=cache)
        torch.testing.assert_close(ours, model(tokens[[2, 2, 0], :25])[:, -1:], atol=1e-4, rtol=1e-4)
    assert any(steps)


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("activation", ["relu", "silu", "gelu", "gelu_tanh"])
def test_activations_far_out(activation: str, isa: str, monkeypatch) -> None:
    """Each in the tails, where approximations end: the up projection is 1, so that the block is the function."""
    monkeypatch.setattr(native, "instruction_set", lambda: isa)
    block = Block(
        MultiHeadAttention(1, heads=1, out_bias=False),
        FeedForward(1, 1, activation=activation, bias=False),
        norm=RMSNorm,
    ).eval()
    with torch.inference_mode():
        block.attention.out_proj.weight.zero_()
        block.feedforward.down.weight.fill_(1.0)
        for value in (-1e30, -1000.0, -50.0, -9.0, -6.0, -1.0, 0.0, 1.0, 6.0, 50.0, 1e30, float("nan")):
            block.feedforward.up.weight.fill_(value)
            cache = BlockCache()
            block(torch.ones(1, 2, 1), cache=cache)
            ours = block(torch.ones(1, 1, 1), cache=cache) - 1
            exact = block.feedforward.double()(torch.ones(1, 1, 1, dtype=torch.float64))
            block.feedforward.float()
            torch.testing.assert_close(ours.double(), exact, rtol=2e-6, atol=2e-7, equal_nan=True)
