"""GGUF files compute what the model computes that they were written from."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from support.checkpoints import perturb, transformers
from support.commands import command
from support.gguf_files import write_gguf
from support.model_configs import V, ids

from regard import Observe, RegardError
from regard.interp._atlas_store import model_fingerprint
from regard.interp._head_atlas import is_as_loaded
from regard.lab.workspace import Workspace
from regard.models import Model, TextDecoder, create, load
from regard.models._gguf_format import is_gguf
from regard.models._gguf_model import partial_factor

EPS = 2.0**-20  # exact in float32, in which files store it
LLAMA = {
    "vocab_size": V,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "intermediate_size": 20,
    "max_position_embeddings": 64,
    "rms_norm_eps": EPS,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "eos_token_id": 36,
}
GPT2 = {"vocab_size": V, "n_embd": 12, "n_layer": 2, "n_head": 3, "n_positions": 19, "n_inner": 17}
GPT2 |= {"layer_norm_epsilon": EPS}
QUARTER = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.25}}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5, "tie_word_embeddings": True}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "LlamaForCausalLM", LLAMA),
    ("llama", "LlamaForCausalLM", LLAMA | {"tie_word_embeddings": True, "num_key_value_heads": 3}),
    ("llama", "LlamaForCausalLM", LLAMA | {"attention_bias": True, "mlp_bias": True, "head_dim": 10}),
    ("llama", "MistralForCausalLM", LLAMA | {"sliding_window": 4}),
    ("qwen2", "Qwen2ForCausalLM", LLAMA | {"tie_word_embeddings": True}),
    ("qwen3", "Qwen3ForCausalLM", LLAMA | {"head_dim": 8}),
    ("gemma", "GemmaForCausalLM", LLAMA | {"head_dim": 8, "tie_word_embeddings": True}),
    ("gemma2", "Gemma2ForCausalLM", LLAMA | {"head_dim": 8, "sliding_window": 3, "query_pre_attn_scalar": 8} | CAPS),
    ("olmo2", "Olmo2ForCausalLM", LLAMA),
    ("olmo", "OlmoForCausalLM", LLAMA | {"layer_norm_eps": 1e-5}),
    ("phi3", "Phi3ForCausalLM", LLAMA | {"sliding_window": 5}),
    ("smollm3", "SmolLM3ForCausalLM", LLAMA | {"num_hidden_layers": 5, "tie_word_embeddings": True}),
    ("stablelm", "StableLmForCausalLM", LLAMA | {"hidden_size": 24, "layer_norm_eps": EPS} | QUARTER),
    ("gpt2", "GPT2LMHeadModel", GPT2),
    ("gpt2", "GPT2LMHeadModel", GPT2 | {"tie_word_embeddings": False}),
]
WIDE = LLAMA | {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 96}


def built(architecture: str, entries: dict[str, Any], seed: int = 0) -> Model:
    """A model of a config, with random numbers in all parameters."""
    model_type = architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel").lower()
    model = create({"model_type": model_type, "architectures": [architecture], **entries})
    perturb(model, seed)
    return model.eval()


def case_name(case: tuple[str, str, dict[str, Any]]) -> str:
    return case[1]


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_a_file_gives_the_model_that_it_was_written_from(case: tuple[str, str, dict[str, Any]], tmp_path: Path) -> None:
    kind, architecture, entries = case
    source = built(architecture, entries)
    metadata = {}
    if "partial_rotary_factor" in source.config.section("rope_parameters"):
        metadata[f"{kind}.rope.dimension_count"] = source.decoder.blocks[0].attention.position.rotate
    model = load(write_gguf(source, tmp_path / "model.gguf", kind, metadata=metadata))
    assert isinstance(model, TextDecoder) and model.config.architecture == architecture
    theirs = dict(source.named_parameters())
    assert {name: p.shape for name, p in model.named_parameters()} == {name: p.shape for name, p in theirs.items()}
    for name, p in model.named_parameters():
        if kind.startswith("gemma") and "norm" in name:  # the file has 1 + p, rounded to float32
            torch.testing.assert_close(p, theirs[name], rtol=0, atol=2.0**-22)
            theirs[name].data.copy_(p)
        assert torch.equal(p, theirs[name])
    with torch.no_grad():
        logits, observations = model(ids(), observe=Observe(map=4))
        assert torch.equal(model(ids()), source(ids()))
        torch.testing.assert_close(logits, source(ids()))
    assert list(observations) == [f"decoder.blocks.{i}.attention" for i in range(len(model.decoder.blocks))]
    assert torch.equal(model.generate(ids(2, 3), 5, end=None), source.generate(ids(2, 3), 5, end=None))


@pytest.mark.parametrize("case", [CASES[0], CASES[4], CASES[5], *CASES[6:14]], ids=case_name)
def test_transformers_reads_the_same_from_the_saved_folder(
    case: tuple[str, str, dict[str, Any]], tmp_path: Path
) -> None:
    kind, architecture, entries = case
    # Without these, transformers takes the ids of the published models, which are beyond this vocabulary.
    metadata = {"tokenizer.ggml.padding_token_id": 36, "tokenizer.ggml.eos_token_id": 36}
    if kind == "stablelm":
        metadata["stablelm.rope.dimension_count"] = 2
    model = load(write_gguf(built(architecture, entries), tmp_path / "model.gguf", kind, metadata=metadata))
    model.save(tmp_path / "folder")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder").eval()
    with torch.no_grad():
        expected = theirs(ids(), use_cache=False).logits
        assert (model(ids()) - expected).abs().max() <= 1e-5 * (1 + expected.abs().max())


@pytest.mark.parametrize("scheme", ["linear", "yarn", "llama3"])
def test_rotary_schemes(scheme: str, tmp_path: Path) -> None:
    rope: dict[str, Any] = {"rope_type": scheme, "rope_theta": 100.0, "factor": 4.0}
    metadata: dict[str, Any] = {}
    extra = {}
    if scheme != "llama3":
        metadata = {"llama.rope.scaling.type": scheme, "llama.rope.scaling.factor": 4.0}
    if scheme == "yarn":
        rope["original_max_position_embeddings"] = 16
        metadata["llama.rope.scaling.original_context_length"] = 16
    if scheme == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    source = built("LlamaForCausalLM", LLAMA | {"head_dim": 16, "rope_parameters": rope})
    if scheme == "llama3":
        # The converter stores the quotient of the plain frequencies and those of the scheme.
        plain = 100.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
        theta = source.decoder.blocks[0].attention.position.for_length(8, torch.device("cpu"))
        extra["rope_freqs.weight"] = (plain / theta).float().numpy()
    model = load(write_gguf(source, tmp_path / "model.gguf", "llama", metadata=metadata, extra=extra))
    with torch.no_grad():
        torch.testing.assert_close(model(ids(n=40)), source(ids(n=40)), rtol=1e-4, atol=1e-5)


def test_the_two_sets_of_factors_of_phi3(tmp_path: Path) -> None:
    short = [1.0, 1.5, 2.0]
    long = [2.0, 4.0, 8.0]
    rope = {"rope_type": "longrope", "rope_theta": 100.0, "short_factor": short, "long_factor": long}
    sizes = LLAMA | {"hidden_size": 24, "original_max_position_embeddings": 16}
    source = built("Phi3ForCausalLM", sizes | {"rope_parameters": rope | {"partial_rotary_factor": 0.75}})
    extra = {
        "rope_factors_short.weight": np.array(short, np.float32),
        "rope_factors_long.weight": np.array(long, np.float32),
    }
    metadata = {"phi3.rope.dimension_count": 6, "phi3.rope.scaling.original_context_length": 16}
    model = load(write_gguf(source, tmp_path / "model.gguf", "phi3", metadata=metadata, extra=extra))
    with torch.no_grad():
        for n in (7, 40):  # within the first length, and beyond it
            assert torch.equal(model(ids(n=n)), source(ids(n=n)))
    del extra["rope_factors_long.weight"]
    with pytest.raises(RegardError, match="rope_factors_long"):
        load(write_gguf(source, tmp_path / "half.gguf", "phi3", metadata=metadata, extra=extra))


@pytest.mark.parametrize(("kind", "dtype"), [("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_half_precision_is_the_rounded_model(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    source = built("LlamaForCausalLM", LLAMA)
    file = write_gguf(source, tmp_path / "model.gguf", "llama", quantise=kind)
    theirs = dict(source.named_parameters())
    # The norms are float32 in the file, and the widest dtype of a file is the model's.
    for name, p in load(file).named_parameters():
        assert p.dtype == torch.float32
        rounded = theirs[name] if p.ndim == 1 else theirs[name].to(dtype).float()
        assert torch.equal(p, rounded)
    assert load(file, dtype=dtype).dtype == dtype


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"])
def test_quantised_weights_are_within_one_step(kind: str, tmp_path: Path) -> None:
    source = built("LlamaForCausalLM", WIDE)
    file = write_gguf(source, tmp_path / "model.gguf", "llama", quantise=kind)
    model = load(file)
    levels = {"Q8_0": 127, "Q5_1": 31, "Q5_0": 16, "Q4_1": 15, "Q4_0": 8}[kind]
    theirs = dict(source.named_parameters())
    for name, p in model.named_parameters():
        if p.ndim == 1:
            assert torch.equal(p, theirs[name])
            continue
        blocks = theirs[name].detach().reshape(-1, 32)
        reach = blocks.abs().amax(dim=1)
        if kind.endswith("1"):  # these types have a step and a smallest number
            reach = blocks.amax(dim=1) - blocks.amin(dim=1)
        # Q4_0 and Q5_0 reach 8 and 16 steps on one side only: the other end is one step off. Scales are float16.
        step = reach / levels + blocks.abs().amax(dim=1) * 2**-9
        error = (p.detach() - theirs[name]).reshape(-1, 32).abs().amax(dim=1)
        assert (error <= step).all() and error.max() > 0
    half = load(file, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    for ours, exact in zip(half.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, exact.to(torch.bfloat16))


def test_rows_are_converted_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(built("LlamaForCausalLM", WIDE), tmp_path / "model.gguf", "llama", quantise="Q5_1")
    whole = load(file)
    monkeypatch.setattr("regard.models._gguf_format.NUMBERS_AT_ONCE", 320)
    for ours, expected in zip(load(file).parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, expected)


def q4_k(block: np.ndarray) -> list[float]:
    """The 256 numbers of a block of Q4_K, as ggml's ``dequantize_row_q4_K`` computes them, one by one."""
    d, least = block[:4].view(np.float16).astype(np.float32)
    packed = [int(x) for x in block[4:16]]
    numbers = []
    for group in range(8):
        if group < 4:
            scale = packed[group] & 63
            offset = packed[group + 4] & 63
        else:
            scale = (packed[group + 4] & 15) | ((packed[group - 4] >> 6) << 4)
            offset = (packed[group + 4] >> 4) | ((packed[group] >> 6) << 4)
        for i in range(32):
            byte = int(block[16 + 32 * (group // 2) + i])
            quantised = byte >> 4 if group % 2 else byte & 15
            numbers.append(float(d * np.float32(scale) * np.float32(quantised) - least * np.float32(offset)))
    return numbers


def test_blocks_of_256_are_converted_as_ggml_does(tmp_path: Path) -> None:
    entries = LLAMA | {"hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    source = built("LlamaForCausalLM", entries | {"tie_word_embeddings": True})
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (V, 144), dtype=np.uint8)
    blocks[:, :4] = random.normal(0, 0.01, (V, 2)).astype(np.float16).view(np.uint8)
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    read = gguf.GGUFReader(write_gguf(source, tmp_path / "plain.gguf", "llama"))
    for field in read.fields.values():
        if field.name.startswith("llama."):
            writer.add_key_value(field.name, field.contents(), field.types[0])
    for tensor in read.tensors:
        if tensor.name == "token_embd.weight":
            writer.add_tensor(tensor.name, blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_K)
        else:
            writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = torch.tensor([q4_k(block) for block in blocks])
    torch.testing.assert_close(load(file).decoder.tokens.embedding.weight.detach(), expected, rtol=1e-6, atol=1e-6)


def test_training_does_not_change_the_file(tmp_path: Path) -> None:
    file = write_gguf(built("LlamaForCausalLM", LLAMA), tmp_path / "model.gguf", "llama")
    before = file.read_bytes()
    model = load(file)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    del model
    assert file.read_bytes() == before


def test_a_file_is_found_by_its_first_bytes_too(tmp_path: Path) -> None:
    source = built("LlamaForCausalLM", LLAMA)
    file = write_gguf(source, tmp_path / "model.gguf", "llama")
    blob = file.rename(tmp_path / "sha256-0123")
    assert is_gguf(blob) and not is_gguf(tmp_path)
    with torch.no_grad():
        assert torch.equal(load(blob)(ids()), source(ids()))


def test_quantised_tensors_need_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = write_gguf(built("LlamaForCausalLM", LLAMA), tmp_path / "plain.gguf", "llama")
    file = write_gguf(built("LlamaForCausalLM", WIDE), tmp_path / "model.gguf", "llama", quantise="Q8_0")
    monkeypatch.setattr("regard.models._gguf_format.find_spec", lambda name: None)
    with pytest.raises(RegardError, match=r"weight is quantised.*regard\[gguf\]"):
        load(file)
    assert isinstance(load(plain), TextDecoder)


def test_commands_and_the_lab_read_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = partial(command, monkeypatch, capsys)
    file = write_gguf(built("LlamaForCausalLM", LLAMA | {"vocab_size": 256}), tmp_path / "model.gguf", "llama")
    (tmp_path / "text.txt").write_text("the cat")
    letters = [f"<0x{i:02X}>" for i in range(256)]
    metadata = {"model": "llama", "tokens": letters, "scores": [0.0] * 256}
    entries = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    file = write_gguf(load(file), tmp_path / "texts.gguf", "llama", metadata=entries)
    page = tmp_path / "page.html"
    text = tmp_path / "text.txt"
    code, printed, _ = run("look", file, "--text", text, "--generate", 2, "--html", page)
    assert code == 0 and "6 heads of decoder.blocks.*.attention" in printed
    assert page.stat().st_size > 1000
    code, printed, _ = run("describe", file)
    assert code == 0 and "LlamaForCausalLM" in printed
    assert run("generate", file, "a", "--length", 2)[0] == 0
    code, _, errors = run("look", text, "--text", text)
    assert code != 0 and len(errors) == 1 and "MODEL" in errors[0] and "GGUF" in errors[0]
    code, _, errors = run("look", tmp_path / "models.gguf", "--text", text)
    assert code != 0 and len(errors) == 1 and str(file.parent / "model.gguf") in errors[0]
    workspace = Workspace(tmp_path / "state")
    item = workspace.open(file)
    assert item.kind == "model" and item.details == {"reads": "text", "type": "llama"}
    workspace.close()


def test_the_fingerprint_of_a_file_changes_with_it(tmp_path: Path) -> None:
    file = write_gguf(built("LlamaForCausalLM", LLAMA), tmp_path / "model.gguf", "llama")
    before = model_fingerprint(file)
    assert before == model_fingerprint(file)
    os.utime(file, ns=(1, 1))
    assert model_fingerprint(file) != before
    assert is_as_loaded(load(file))


def test_the_rotated_part_of_a_head_survives_the_division() -> None:
    for d_key in range(2, 300):
        for rotated in range(2, d_key + 1, 2):
            assert int(d_key * partial_factor(rotated, d_key)) == rotated
