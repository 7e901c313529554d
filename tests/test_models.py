"""Loaded models compute what `transformers` computes, for random configurations of every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import in_float64, make, transformers, write
from support.model_configs import (
    ALL,
    DECODERS,
    ENCODERS,
    IMAGES,
    LENGTHS,
    LLAMA,
    SEQ2SEQ,
    V,
    ids,
    name,
    real_rows,
)
from torch import Tensor

from regard import Observe, RegardError
from regard.models import TextDecoder, create, load


def result(output: Any) -> Tensor:
    """What our call returns, from an output of theirs."""
    if "start_logits" in output:
        return torch.stack([output.start_logits, output.end_logits], dim=-1)
    for entry in ("prediction_logits", "logits", "last_hidden_state"):
        if entry in output:
            return output[entry]
    raise AssertionError(f"no result in {list(output)}")


def close(ours: Tensor, theirs: Tensor, bound: float) -> None:
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    assert (ours - theirs).abs().max() <= bound * (1 + theirs.abs().max())


def rotary_of(model: Any) -> Any:
    """The rotary positions of a decoder; some layers of SmolLM3 have none."""
    positions = [block.attention.position for block in model.decoder.blocks]
    return next((position for position in positions if position is not None), None)


def both(case: tuple[str, dict[str, Any]], folder: Path) -> tuple[Any, Any]:
    theirs = make(*case)
    return theirs, load(write(theirs, folder))


@pytest.mark.parametrize("case", ENCODERS, ids=name)
def test_text_encoders(case: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    theirs, ours = both(case, tmp_path)
    real, tokens = real_rows(7), ids()
    tokens = tokens.masked_fill(~real, ours.config.get("pad_token_id", 0))
    kinds = case[1].get("type_vocab_size", 2)
    types = None if case[0].startswith("Distil") else torch.arange(21).reshape(3, 7) % kinds
    given = {} if types is None else {"token_type_ids": types}
    for dtype, bound in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        with torch.no_grad():
            expected = result(theirs.to(dtype)(tokens, attention_mask=real.long(), **given))
            found = ours.to(dtype)(tokens, token_types=types, padding=real)
        seen = real if found.ndim == 3 else slice(None)
        close(found[seen], expected[seen], bound)
        with torch.no_grad():
            assert torch.equal(ours(tokens, token_types=types, padding=LENGTHS)[seen], found[seen])
    if case[0] in ("BertModel", "RobertaModel"):
        close(ours.pooled(found), theirs(tokens, attention_mask=real.long(), **given).pooler_output, 1e-10)
    if case[0] == "BertForPreTraining":
        pooled = ours.pooled(ours.hidden_states(tokens, token_types=types, padding=real))
        expected = theirs(tokens, attention_mask=real.long(), **given).seq_relationship_logits
        close(ours.next_sentence(pooled), expected, 1e-10)


@pytest.mark.parametrize("case", DECODERS, ids=name)
def test_text_decoders(case: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    """With padding on the right, on the left, and longer than a rotary model was trained for."""
    theirs, ours = both(case, tmp_path)
    rotary = rotary_of(ours)
    lengths = (7,) if ours.max_positions else (7, 23)
    # In float64 once as they are, with norms and angles in float32, and once with these in float64 too.
    for dtype, bound in ((torch.float32, 1e-5), (torch.float64, 2e-6), (torch.float64, 1e-10)):
        ours, theirs = ours.to(dtype), in_float64(theirs, rotary) if bound == 1e-10 else theirs.to(dtype)
        for n in lengths:
            tokens, right = ids(n=n), real_rows(n)
            with torch.no_grad(), pytest.warns(UserWarning, match="trained") if _first(ours, n) else _nothing():
                found = ours(tokens, padding=right)
            with torch.no_grad():
                expected = result(theirs(tokens, attention_mask=right.long(), use_cache=False))
            close(found[right], expected[right], bound)
            left = right.flip(-1)
            at = (left.cumsum(-1) - 1).clamp(min=0)
            with torch.no_grad():
                found = ours(tokens, padding=left, position_ids=at)
                expected = result(theirs(tokens, attention_mask=left.long(), position_ids=at, use_cache=False))
            close(found[left], expected[left], bound)


def _first(model: Any, n: int) -> bool:
    return model.trained_length is not None and n > model.trained_length and not model._warned_of_length


class _nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


@pytest.mark.parametrize("case", SEQ2SEQ, ids=name)
def test_text_to_text(case: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    theirs, ours = both(case, tmp_path)
    source, target, real = ids(), ids(3, 5, seed=2), real_rows(7)
    for dtype, bound in ((torch.float32, 1e-5), (torch.float64, 2e-6), (torch.float64, 1e-10)):
        ours, theirs = ours.to(dtype), in_float64(theirs) if bound == 1e-10 else theirs.to(dtype)
        with torch.no_grad():
            if case[0] == "T5EncoderModel":
                expected, found = result(theirs(source, attention_mask=real.long())), ours(source, padding=real)
                found, expected = found[real], expected[real]
            else:
                given = {"attention_mask": real.long(), "decoder_input_ids": target}
                expected, found = result(theirs(source, **given)), ours(source, target, padding=real)
        close(found, expected, bound)


@pytest.mark.parametrize("case", IMAGES, ids=name)
def test_images(case: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    theirs, ours = both(case, tmp_path)
    theirs.set_attn_implementation("sdpa")
    g = torch.Generator().manual_seed(1)
    images = torch.randn(2, ours.vit.channels, *ours.vit.image, generator=g)
    for dtype, bound in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        with torch.no_grad():
            output = theirs.to(dtype)(images.to(dtype))
            found = ours.to(dtype)(images.to(dtype))
        close(found, result(output), bound)
    if case[0] == "ViTModel":
        close(ours.pooled(found), output.pooler_output, 1e-10)


@pytest.mark.parametrize("case", [c for c in DECODERS if not c[0].endswith("Model") or "LMHead" in c[0]], ids=name)
def test_decoders_write_what_transformers_writes(case: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    """Greedy, token for token: with a cache, without one, one text and a batch padded on the left."""
    theirs, ours = both(case, tmp_path)
    rotary = rotary_of(ours)
    theirs, ours = in_float64(theirs, rotary), ours.double()
    rows = [ids(1, n, seed=n)[0].tolist() for n in (5, 2, 3)]
    for prompts in (rows[:1], rows):
        n = max(map(len, prompts))
        padded = torch.tensor([[36] * (n - len(row)) + row for row in prompts])
        real = torch.tensor([[0] * (n - len(row)) + [1] * len(row) for row in prompts])
        expected = theirs.generate(padded, attention_mask=real, max_new_tokens=9, do_sample=False)[:, n:]
        assert torch.equal(ours.generate(prompts, 9), expected)
        given = {"attention_mask": real, "max_new_tokens": 9, "do_sample": False, "use_cache": False}
        uncached = theirs.generate(padded, **given)[:, n:]
        # Only longrope turns kept keys otherwise than new ones, beyond its trained length.
        assert torch.equal(uncached, expected) or "short_factor" in ours.config.section("rope_parameters")
        assert torch.equal(ours.generate(prompts, 9, cache=False), uncached)
        assert torch.equal(torch.stack(list(ours.stream(prompts, 9)), dim=1), expected)


@pytest.mark.parametrize("case", SEQ2SEQ[:5], ids=name)
def test_encoder_decoders_write_what_transformers_writes(case: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    theirs, ours = both(case, tmp_path)
    theirs, ours = in_float64(theirs), ours.double()
    rows = [ids(1, n, seed=n)[0].tolist() for n in (5, 2, 3)]
    for prompts in (rows[:1], rows):
        n = max(map(len, prompts))
        padded = torch.tensor([row + [0] * (n - len(row)) for row in prompts])
        real = torch.tensor([[1] * len(row) + [0] * (n - len(row)) for row in prompts])
        expected = theirs.generate(padded, attention_mask=real, max_new_tokens=9, do_sample=False)[:, 1:]
        assert torch.equal(ours.generate(prompts, 9), expected)
        assert torch.equal(ours.generate(prompts, 9, cache=False), expected)


@pytest.mark.parametrize("case", ALL, ids=name)
def test_what_is_saved_is_what_transformers_reads(case: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    theirs, ours = both(case, tmp_path / "theirs")
    ours.save(tmp_path / "ours")
    again, report = type(theirs).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    before, after = theirs.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    reloaded = load(tmp_path / "ours")
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), reloaded.parameters(), strict=True))


def test_frequencies_are_theirs(tmp_path: Path) -> None:
    """In float32, as they have them; ours are the same numbers in float64."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for kind, entries in DECODERS:
        if not kind.startswith("Llama"):
            continue
        theirs, ours = both((kind, entries), tmp_path / str(id(entries)))
        position, config = ours.decoder.blocks[0].attention.position, theirs.config
        module = theirs.get_submodule("model.rotary_emb" if kind != "LlamaModel" else "rotary_emb")
        for length in (5, 40):
            if module.rope_type == "default":
                theta, sharper = module.compute_default_rope_parameters(config)
            else:
                theta, sharper = ROPE_INIT_FUNCTIONS[module.rope_type](config, torch.device("cpu"), seq_len=length)
            found = position.for_length(length, torch.device("cpu"))
            torch.testing.assert_close(found.float(), theta, rtol=2e-6, atol=0)
            assert position.attention_factor == pytest.approx(sharper, rel=1e-6)


def test_observing_a_loaded_model_changes_nothing_and_names_every_head(tmp_path: Path) -> None:
    for case, part in ((ENCODERS[0], "encoder"), (DECODERS[6], "decoder"), (IMAGES[0], "vit.encoder")):
        _, ours = both(case, tmp_path / part)
        given = torch.randn(2, 3, 12, 12) if part == "vit.encoder" else ids()
        with torch.no_grad():
            plain = ours(given)
            watched, seen = ours(given, observe=Observe(map=4))
        torch.testing.assert_close(watched, plain)
        assert list(seen) == [f"{part}.blocks.{i}.attention" for i in range(2)]
        assert all(dict(ours.named_modules())[path].heads == o.entropy.shape[1] for path, o in seen.items())


FIRST_OF_EACH = {case[0]: case for case in reversed(DECODERS) if case[0].endswith("ForCausalLM")}


@pytest.mark.parametrize("case", FIRST_OF_EACH.values(), ids=name)
def test_observed_weights_are_those_of_transformers(case: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    theirs, ours = both(case, tmp_path)
    theirs.set_attn_implementation("eager")
    with torch.no_grad():
        expected = theirs(ids(), output_attentions=True, use_cache=False).attentions
        _, observations = ours(ids(), observe=Observe(keep=True))
    assert len(observations) == len(expected)
    for observation, weights in zip(observations.values(), expected, strict=True):
        for head in range(weights.shape[1]):
            torch.testing.assert_close(observation.weights(head, batch=1), weights[1, head], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", FIRST_OF_EACH.values(), ids=name)
def test_tokens_one_by_one_give_the_logits_of_the_whole_text(case: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    """In float32, where blocks that consist of our layers alone run as native calls."""
    _, ours = both(case, tmp_path)
    tokens = ids(n=12)
    with torch.inference_mode():
        whole = ours(tokens)
        cache = ours.new_cache(12)
        steps = [ours(tokens[:, :5], cache=cache)[:, -1:]]
        for i in range(5, 12):
            steps.append(ours(tokens[:, i : i + 1], cache=cache))
    close(torch.cat(steps, dim=1), whole[:, 4:], 1e-5)


def test_an_untied_head_of_t5(tmp_path: Path) -> None:
    """T5 1.1 and its kin hold a head of their own; transformers' newest config cannot say so, the files can."""
    from safetensors.torch import load_file, save_file

    theirs, _ = both(SEQ2SEQ[1], tmp_path)
    head = torch.randn(V, 12)
    save_file(load_file(tmp_path / "model.safetensors") | {"lm_head.weight": head}, tmp_path / "model.safetensors")
    theirs.lm_head.weight = torch.nn.Parameter(head)
    ours = load(tmp_path)
    assert ours.decoder.tokens.head is not None
    with torch.no_grad():
        close(ours(ids(), ids(3, 5)), theirs(ids(), decoder_input_ids=ids(3, 5)).logits, 1e-5)


HALVES = [DECODERS[0]]
for _family in ("Gemma", "Gemma2", "Olmo2", "Llama"):
    HALVES.append(FIRST_OF_EACH[f"{_family}ForCausalLM"])


def test_half_precision(tmp_path: Path) -> None:
    for case in HALVES:
        theirs, ours = both(case, tmp_path / case[0])
        half = load(tmp_path / case[0], dtype=torch.bfloat16)
        assert half.dtype == torch.bfloat16 and ours.dtype == torch.float32
        with torch.no_grad():
            exact, found = ours(ids()), half(ids())
            other = result(theirs.to(torch.bfloat16)(ids()))
        assert found.dtype == torch.bfloat16
        assert (found - exact).abs().max() <= 2 * (other - exact).abs().max() + 1e-2
    assert isinstance(half, TextDecoder) and half.generate(ids(1, 3), 4).shape == (1, 4)


def test_transformers_is_there() -> None:
    assert transformers.__version__


@pytest.mark.parametrize(
    ("family", "entry", "value"),
    [
        ("gemma", "use_bidirectional_attention", True),
        ("gemma2", "layer_types", ["sliding_attention"]),
        ("gemma2", "attn_logit_softcapping", -1.0),
        ("olmo", "clip_qkv", 8.0),
        ("phi3", "sliding_window", 0),
        ("phi3", "partial_rotary_factor", "half"),
        ("smollm3", "no_rope_layers", [1]),
        ("smollm3", "no_rope_layers", [1, 2]),
        ("stablelm", "qk_layernorm", True),
        ("stablelm", "use_parallel_residual", True),
        ("llama", "partial_rotary_factor", 0.5),
    ],
)
def test_what_a_family_does_not_have_is_refused(family: str, entry: str, value: object) -> None:
    sizes = LLAMA | {"model_type": family, "head_dim": 8}
    assert isinstance(create(sizes), TextDecoder)
    with pytest.raises(RegardError, match=entry):
        create(sizes | {entry: value})
