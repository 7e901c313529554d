"""Watched models give the same on the Triton kernels, in the interpreter, as on the CPU's kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.key_groups import GROUPS

import regard
from regard.interp import ablate
from regard.kernels import choose_backend, self_check, triton

pytest.importorskip("triton")
transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("full_tiles"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter computes NaN with numpy
]
OBSERVE = regard.Observe(map=4, key_mass=True, profile=3, top=2, groups=GROUPS[0])
ROWS = ("lse", "logit_max", "entropy", "peak", "offset", "distance", "sink", "local", "groups")
FIELDS = (*ROWS, "map", "key_mass", "profile", "top")


@pytest.fixture
def on_triton(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """``auto`` takes the Triton kernels for tensors of the CPU. The list receives the name of each kernel that runs."""
    if not triton.interpreted():
        pytest.skip("the Triton kernels run on the GPU")
    monkeypatch.setattr(choose_backend, "_is_on_gpu", lambda q: q.device.type == "cpu")
    monkeypatch.setattr(self_check, "verdict_of", lambda *arguments: self_check.Verdict(""))
    started: list[str] = []
    for name in ("output", "forward", "observed", "bin_masses"):
        monkeypatch.setattr(triton, name, recorded(getattr(triton, name), started))
    return started


def recorded(function: Any, started: list[str]) -> Any:
    """The function; each call adds its name to ``started``."""

    def run(*arguments: Any, **options: Any) -> Any:
        started.append(function.__name__)
        return function(*arguments, **options)

    return run


def gpt2() -> torch.nn.Module:
    config = transformers.GPT2Config(n_embd=24, n_head=3, n_layer=2, vocab_size=31, n_positions=40)
    return transformers.GPT2LMHeadModel(config).eval()


def llama() -> torch.nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        intermediate_size=40,
        vocab_size=31,
    )
    return transformers.LlamaForCausalLM(config).eval()


def bert() -> torch.nn.Module:
    config = transformers.BertConfig(
        hidden_size=24, num_attention_heads=3, num_hidden_layers=2, intermediate_size=40, vocab_size=31
    )
    return transformers.BertModel(config).eval()


def run(model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """The first output, and what was observed, of two texts, one of which is padded."""
    ids = torch.arange(34).reshape(2, 17) % 31
    mask = torch.ones(2, 17, dtype=torch.long)
    mask[1, 11:] = 0
    with torch.no_grad(), regard.watch(model, OBSERVE) as recording:
        output = model(input_ids=ids, attention_mask=mask)[0]
    return output, recording


@pytest.mark.parametrize("make", [gpt2, llama, bert])
def test_a_watched_model_gives_the_same_on_triton(make: Any, on_triton: list[str], monkeypatch: Any) -> None:
    torch.manual_seed(0)
    model = make()
    ours, recording = run(model)
    assert "observed" in on_triton
    monkeypatch.setattr(choose_backend, "_is_on_gpu", lambda q: False)
    theirs, expected = run(model)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert list(recording) == list(expected)
    for path in expected:
        for field in FIELDS:
            a, b = getattr(recording[path], field), getattr(expected[path], field)
            torch.testing.assert_close(a.double(), b.double(), rtol=1e-3, atol=1e-4, msg=f"{path} {field}")
        assert torch.equal(recording[path].visible, expected[path].visible)


def test_weights_on_demand_and_ablation_on_triton(on_triton: list[str], monkeypatch: Any) -> None:
    torch.manual_seed(0)
    model = gpt2()
    ids = torch.arange(17)[None] % 31
    results = []
    for on_gpu in (True, False):
        monkeypatch.setattr(choose_backend, "_is_on_gpu", lambda q, on_gpu=on_gpu: on_gpu)
        with torch.no_grad(), regard.watch(model, regard.Observe(keep=True)) as recording:
            model(ids)
        path = list(recording)[1]
        weights = recording[path].weights(head=2, rows=slice(3, 9))
        tile = recording[path].tile(1, size=5)
        with torch.no_grad(), ablate(model, [(path, 0)]):
            ablated = model(ids)[0]
        results.append((weights, tile, ablated))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-4, atol=1e-5)
