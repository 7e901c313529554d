"""What people do with heads taken out: nest it, watch it, raise within it, train through it, ask for nonsense."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from support.checkpoints import make
from support.model_configs import V, ids
from support.observed_models import CASES, KINDS, close, columns, outputs, rows, without
from torch import Tensor

from regard import watch
from regard._hooks import observed
from regard.interp import ablate
from regard.nn import Decoder, Encoder, EncoderDecoder


@pytest.mark.parametrize("kind", ["ours", "llama", "torch attention", "own"])
def test_nested_with_watch_and_with_itself(kind: str) -> None:
    case = KINDS[kind]
    model, last = case.make(), len(case.out) - 1
    plain, pairs = case.run(model), [(0, 0), (last, 1)]
    expected = case.run(without(case, model, pairs))
    gone, bare = ablate(model, pairs), without(case, model, pairs)
    with watch(bare) as wanted:
        case.run(bare)
    with watch(model) as outside, gone:
        close(rows(case, case.run(model)), rows(case, expected))
    with gone, watch(model) as inside:
        close(rows(case, case.run(model)), rows(case, expected))
    for seen in (outside, inside):
        assert list(seen) == list(wanted)
        for path, observation in seen.items():
            close(observation.entropy[observation.counted], wanted[path].entropy[observation.counted], 1e-4)
    with gone:
        with gone:
            close(rows(case, case.run(model)), rows(case, expected))
        close(rows(case, case.run(model)), rows(case, expected))  # still without them
        with ablate(model, [(0, 2)]):
            both = case.run(model)
    close(rows(case, both), rows(case, case.run(without(case, model, [*pairs, (0, 2)]))))
    assert torch.equal(case.run(model), plain)


@pytest.mark.parametrize("kind", ["ours", "llama", "torch encoder", "own"])
def test_everything_is_put_back(kind: str) -> None:
    case = KINDS[kind]
    model = case.make()
    plain = case.run(model)
    gone = ablate(model, [(0, 0)])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="mine"), gone:
            raise RuntimeError("mine")
        with pytest.raises(ZeroDivisionError):
            gone.loss_change(lambda: 1 / 0)
        assert not any(m._forward_hooks or m._forward_pre_hooks or m in observed for m in model.modules())
        assert torch.equal(case.run(model), plain)
    if kind == "llama":
        assert model.config._attn_implementation == "sdpa"
    assert gone.loss_change(lambda: case.run(model).sum()).change != 0


def test_gradients_flow_through_what_is_left() -> None:
    for kind in ("ours", "llama", "torch attention", "own"):
        case = KINDS[kind]
        model, pairs = case.make(), [(0, 1)]
        twin = without(case, model, pairs)
        results = []
        for each in (model, twin):
            with ablate(model, pairs) if each is model else nullcontext():
                found = case.call(each)
            found = found if isinstance(found, Tensor) else outputs(found)
            rows(case, found).square().mean().backward()
            results.append({name: p.grad for name, p in each.named_parameters()})
        W = columns(model.get_submodule(case.out[0]))
        wide = len(W) // case.heads
        for name, grad in results[0].items():
            if name == f"{case.out[0]}.weight":  # a head that gives 0 teaches its columns nothing
                head = grad.T
                assert not head[wide : 2 * wide].any() and head[:wide].any()
            elif grad is not None:
                torch.testing.assert_close(grad, results[1][name], rtol=1e-3, atol=1e-5)


def test_refusals() -> None:
    model, text = Decoder(12, heads=3, layers=2, vocab=V).eval(), ids()
    with pytest.raises(TypeError, match="model must be"):
        ablate(3, [(0, 0)])
    for wrong in (0, (0,), (0, 1, 2), "a"):
        with pytest.raises(TypeError, match="heads"):
            ablate(model, [wrong])
    for wrong in ((-1, 0), (0, -1)):
        with pytest.raises(ValueError, match="-1"):
            ablate(model, [wrong])
    for wrong in ((0.5, 0), (0, None), (True, 0)):
        with pytest.raises(TypeError):
            ablate(model, [wrong])
    with pytest.raises(ValueError, match="heads is empty"):
        ablate(model, [])
    with pytest.raises(ValueError, match=r"by must be .*'median'"):
        ablate(model, [(0, 0)], by="median")
    with pytest.raises(ValueError, match=r"over .*by='zero'"):
        ablate(model, [(0, 0)], over=text)
    with pytest.raises(ValueError, match="by='mean' needs over="), ablate(model, [(0, 0)], by="mean"):
        pass
    with pytest.raises(ValueError, match=r"head 3 of 'blocks\.1\.attention'"):
        ablate(model, [(1, 3)]).loss_change(text)
    for layer in (2, "blocks.2.attention"):
        missing = f"layer {layer!r}.* 2 layers: blocks.0.attention"
        with pytest.raises(ValueError, match=missing):
            ablate(model, [(0, 0), (layer, 0)]).loss_change(text)
        with pytest.raises(ValueError, match=missing), ablate(model, [(layer, 0)]):
            model(text)
    for wrong_ids in (torch.ones(7, dtype=torch.int64), text[:, :1], text.float(), text[None]):
        with pytest.raises(ValueError, match=r"ids must be whole numbers \[B, n\]"):
            ablate(model, [(0, 0)]).loss_change(wrong_ids)
    for wrong_loss in (None, "3", torch.ones(2)):
        with pytest.raises(TypeError, match="function must return one number"):
            ablate(model, [(0, 0)]).loss_change(lambda wrong=wrong_loss: wrong)
    with pytest.raises(ValueError, match=r"BertModel .* logits"):
        ablate(make(*CASES["bert"][:2]), [(0, 0)]).loss_change(text)
    both = EncoderDecoder(12, heads=3, layers=1, vocab=V).eval()
    with pytest.raises(ValueError, match=r"over .*decoder\.blocks\.0\.attention"):
        ablate(both, [(1, 0)], by="mean", over=lambda: both.encoder(text)).loss_change(lambda: both(text, text).sum())
    assert not observed


def test_a_model_whose_attention_cannot_be_reached_is_refused() -> None:
    """Mamba has no attention: a change of 0 would be a lie."""
    mamba = make("MambaForCausalLM", {"vocab_size": V, "hidden_size": 12, "num_hidden_layers": 1, "state_size": 4})
    with pytest.raises(ValueError, match="MambaForCausalLM called no attention"):
        ablate(mamba, [(0, 0)]).loss_change(ids())
    with pytest.raises(ValueError, match="Encoder called no attention"):
        ablate(Encoder(12, heads=3, layers=1), [(0, 0)]).loss_change(lambda: 1.0)
