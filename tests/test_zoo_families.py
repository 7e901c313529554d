"""The everyday families of `transformers`: what `regard.watch` records, ablation, generation and bfloat16 are exact."""

import copy
import warnings
from typing import Any

import pytest
import torch
from support.zoo_families import FAMILIES, GENERATING, Family, architecture, family, head_zeroed, mean_error
from torch import Tensor

import regard
from regard.interp import ablate
from regard.zoo._check_architecture import OBSERVE, check_architecture
from regard.zoo._comparison import output_difference, relative_error, tensors_in
from regard.zoo._plain_formulas import plain_observables
from regard.zoo._reference import captured

pytest.importorskip("transformers")

NEW_TOKENS = 4
START_TOKEN = 3
TOLERANCE = 2e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_and_observables_are_those_of_eager_attention(name: str) -> None:
    result = check_architecture(architecture(name))
    assert (result.outcome, result.reason) == ("exact", "")
    assert not result.unseen
    assert "plain" in result.batches
    # Every family that takes texts is checked with a padded batch, too.
    assert ("input_ids" in result.inputs) == ("padded" in result.batches)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_ablated_head_gives_zeros(name: str) -> None:
    members = family(name)
    with warnings.catch_warnings(record=True), regard.watch(members.default) as recording:
        before = members.run(members.default)
    path = list(recording)[-1]
    with head_zeroed(members.eager, path, 1):
        expected = members.run(members.eager)
    with ablate(members.default, [(path, 1)]):
        actual = members.run(members.default)
    assert output_difference(expected, actual, None) is None
    # The head does something: without this, the test could not fail.
    assert output_difference(before, actual, None) is not None


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_is_as_exact_as_eager_attention(name: str) -> None:
    members = family(name)
    # Both models get weights that bfloat16 can hold, and one of them computes in float32.
    low = copy.deepcopy(members.default).to(torch.bfloat16)
    low_eager = copy.deepcopy(members.eager).to(torch.bfloat16)
    exact = copy.deepcopy(low_eager).float()
    inputs = {}
    for key, value in members.inputs.items():
        is_number = isinstance(value, torch.Tensor) and value.is_floating_point()
        inputs[key] = value.bfloat16() if is_number else value
    with torch.no_grad():
        expected = tensors_in(exact(**{key: _as_float(value) for key, value in inputs.items()}))[0][1]
        eager = tensors_in(low_eager(**inputs))[0][1]
        with regard.watch(low) as recording:
            actual = tensors_in(low(**inputs))[0][1]
    assert actual.dtype == eager.dtype
    assert recording.calls
    for observation in recording.observations().values():
        assert bool(observation.entropy.isfinite().all())
    # One rounding of bfloat16 is 2⁻⁸; the mean error hides no head, because a missing one changes every number.
    assert mean_error(expected, actual) <= 2 * mean_error(expected, eager) + 2**-9


@pytest.mark.parametrize("name", sorted(GENERATING))
def test_generation_with_a_cache_is_recorded_as_one_text(name: str) -> None:
    members = family(name)
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    options["use_cache"] = True
    if members.eager.config.is_encoder_decoder:
        options["decoder_start_token_id"] = START_TOKEN
    inputs = {key: value for key, value in members.inputs.items() if key != "decoder_input_ids"}
    expected = members.eager.generate(**inputs, **options)
    with regard.watch(members.default, OBSERVE) as recording:
        actual = members.default.generate(**inputs, **options)
    assert torch.equal(expected, actual)

    with torch.no_grad(), captured(members.eager) as reference:
        members.eager(**members.inputs | _whole_text(members, inputs, actual))
    compared = 0
    for path in recording:
        observation = recording[path]
        # The parts of a model that see images may run once per image.
        eager = torch.cat(reference.attention.get(path) or reference.softmaxes[path])
        assert tuple(observation.entropy.shape) == tuple(eager.shape[:3]), path
        values = plain_observables(eager, observation.counted)
        for key in ("entropy", "peak", "sink"):
            got = torch.where(observation.counted, getattr(observation, key).double(), 0.0)
            assert relative_error(values[key], got) <= TOLERANCE, (path, key)
            compared += 1
    assert compared


def _whole_text(members: Family, inputs: dict[str, Any], ids: Tensor) -> dict[str, Any]:
    """The inputs of one forward pass over a generated text. Its last token was never an input."""
    if members.eager.config.is_encoder_decoder:
        # Whisper leaves out the start token.
        start = torch.full((len(ids), 1 + NEW_TOKENS - ids.shape[1]), START_TOKEN)
        return {"decoder_input_ids": torch.cat([start, ids], 1)[:, :-1]}
    whole = {"input_ids": ids[:, :-1]}
    # New tokens are text, which has the number 0 in one of these arguments and 1 in the other one.
    for name, number in (("mm_token_type_ids", 0), ("token_type_ids", 1)):
        if name in inputs:
            new = inputs[name].new_full((len(ids), NEW_TOKENS - 1), number)
            whole[name] = torch.cat([inputs[name], new], 1)
    return whole


def _as_float(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.float()
    return value
