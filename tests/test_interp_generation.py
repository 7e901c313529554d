"""Watching `generate`: the steps are lined up by position, and give the maps of one pass over the whole text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.checkpoints import make, write
from support.model_configs import GPT2, LLAMA, T5
from support.observed_models import CASES, close, ids

from regard import Observe
from regard.interp import Recording, load_recording, watch
from regard.models import load

OBSERVE = Observe(map=16, profile=5, key_mass=True, top=3)


def generated(model: Any, prompt: torch.Tensor, steps: int, observe: Observe) -> tuple[Recording, Recording]:
    """A recording of generate, and one of a single pass over what it read."""
    torch.manual_seed(0)
    with torch.no_grad():
        with watch(model, observe) as seen:
            text = model.generate(prompt, max_new_tokens=steps, min_new_tokens=steps, do_sample=False)
        with watch(model, replace(observe, keep=True)) as whole:
            model(text[:, :-1])
    return seen, whole


@pytest.mark.parametrize(
    ("name", "entries"),
    [("GPT2LMHeadModel", GPT2 | {"n_positions": 32}), ("LlamaForCausalLM", LLAMA)],
    ids=["gpt2", "llama"],
)
@pytest.mark.parametrize(
    ("prompt", "steps", "change"),
    [
        (5, 6, {}),  # every key has a bin
        (11, 9, {}),  # more keys than bins in the last steps
        (21, 4, {"keep": True}),  # the prompt itself is longer than the map
        (5, 6, {"key_mass": False}),  # the rows are in the maps of the steps
        (5, 6, {"keep": True, "heads": (1,)}),
    ],
)
def test_maps_of_steps_are_those_of_one_pass(
    name: str, entries: dict[str, Any], prompt: int, steps: int, change: dict[str, Any]
) -> None:
    observe = replace(OBSERVE, **change)
    model = make(name, entries)
    seen, whole = generated(model, ids(2, prompt), steps, observe)
    n = prompt + steps - 1
    for path, observation in seen.items():
        expected = whole[path]
        assert len(seen.calls[path]) == steps and observation.n == observation.m == n
        close(observation.map, expected.map, 1e-4)
        assert torch.equal(observation.map_rows, expected.map_rows)
        close(observation.profile, expected.profile, 1e-4)
        assert torch.equal(observation.profile_rows, expected.profile_rows)
        assert torch.equal(observation.rows, expected.rows)
        if observe.key_mass:
            close(observation.key_mass, expected.key_mass, 1e-4)
        if observe.keep:
            for batch in range(2):
                for head in observation.heads:
                    weights = expected.weights(head, batch=batch)
                    close(observation.weights(head, batch=batch), weights, 1e-4)
                    assert torch.equal(observation.visible_keys(head, batch=batch), torch.ones(n, n).tril().bool())


def test_a_row_of_the_map_is_the_row_of_its_step() -> None:
    """With as many bins as tokens, row i of the map is the exact row of the call that computed it."""
    model = make("LlamaForCausalLM", LLAMA)
    seen, _ = generated(model, ids(1, 5), 12, replace(OBSERVE, keep=True))
    for path, observation in seen.items():
        assert observation.n == 16 and observation.map is not None
        for head in observation.heads:
            rows = []
            for call in seen.calls[path]:
                weights = call.weights(head)
                rows.append(torch.nn.functional.pad(weights, (0, 16 - weights.shape[1])))
            close(observation.map[head], torch.cat(rows), 1e-5)


def test_a_long_prompt_without_q_and_k_has_no_map() -> None:
    """The bins of its map are not bins of the whole text: unknown, not approximate."""
    seen, whole = generated(make("LlamaForCausalLM", LLAMA), ids(1, 21), 3, OBSERVE)
    for path, observation in seen.items():
        assert observation.map is None and observation.map_rows is None
        close(observation.key_mass, whole[path].key_mass, 1e-4)
    assert seen.to_html().startswith("<!doctype html>")


def test_a_sliding_cache_names_no_keys() -> None:
    kind, entries, _ = CASES["mistral"]
    seen, whole = generated(make(kind, entries), ids(2, 4), 5, OBSERVE)
    for path, observation in seen.items():
        assert observation.n == 8 and observation.m is None
        assert observation.map is None and observation.top_at is None and observation.key_mass is None
        close(observation.entropy, whole[path].entropy, 1e-4)


def test_our_models_and_cross_attention(tmp_path: Any) -> None:
    llama = load(write(make("LlamaForCausalLM", LLAMA), tmp_path / "llama"))
    t5 = load(write(make("T5ForConditionalGeneration", T5), tmp_path / "t5"))
    prompt = ids(1, 5)
    with torch.no_grad():
        with watch(llama, OBSERVE) as seen:
            new = llama.generate(prompt, 6, end=None)  # type: ignore[attr-defined]
        with watch(llama, OBSERVE) as whole:
            llama(torch.cat([prompt, new], 1)[:, :-1])
        with watch(t5, OBSERVE) as answer:
            new = t5.generate(prompt, 4, end=None)  # type: ignore[attr-defined]
        with watch(t5, OBSERVE) as answer_whole:
            target = torch.cat([torch.tensor([[t5.decoder_start_id]]), new], 1)[:, :-1]  # type: ignore[attr-defined]
            t5(prompt, target)
    pairs = [(seen[path], whole[path]) for path in seen] + [(answer[path], answer_whole[path]) for path in answer]
    for observation, expected in pairs:
        assert (observation.n, observation.m) == (expected.n, expected.m)
        close(observation.map, expected.map, 1e-4)


def test_a_saved_generation_has_its_maps(tmp_path: Any) -> None:
    seen, whole = generated(make("LlamaForCausalLM", LLAMA), ids(1, 5), 4, OBSERVE)
    seen.save(tmp_path / "r", tokens=[f" w{i}" for i in range(9)])
    again = load_recording(tmp_path / "r")
    for path, observation in again.items():
        close(observation.map, whole[path].map, 1e-4)
        assert again[path] is observation  # joined once
    assert '" w8"' not in again.to_html()  # the last token was not read
