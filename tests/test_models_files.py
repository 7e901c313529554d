"""Files of models: shards, older and newer spellings, memory shared with what is on disk, and saving."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.checkpoints import make, write
from support.model_configs import BERT, DECODERS, ENCODERS, GPT2, IMAGES, LLAMA, SEQ2SEQ, VIT, V, ids, name
from torch import Tensor, nn

from regard.models import load

Case = tuple[str, dict[str, Any]]
ONE_EACH = [ENCODERS[3], ENCODERS[9], ENCODERS[13], DECODERS[0], DECODERS[6], SEQ2SEQ[0], IMAGES[0]]


def same(a: nn.Module, b: nn.Module) -> None:
    ours, others = dict(a.named_parameters()), dict(b.named_parameters())
    assert ours.keys() == others.keys()
    assert all(torch.equal(ours[key], others[key]) for key in ours)


def rewritten(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    """The same folder with its tensors renamed or joined by others."""
    tensors = {key: x.clone() for key, x in load_file(folder / "model.safetensors").items()}
    save_file({key: x.contiguous() for key, x in change(tensors).items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("case", ONE_EACH, ids=name)
def test_several_files(case: Case, tmp_path: Path) -> None:
    theirs = make(*case)
    one, several = write(theirs, tmp_path / "one"), write(theirs, tmp_path / "several", max_shard_size="4KB")
    assert len(list(several.glob("model-*.safetensors"))) > 2 and not (several / "model.safetensors").exists()
    same(load(one), load(several))


def test_layer_norms_as_gamma_and_beta(tmp_path: Path) -> None:
    write(make("BertForMaskedLM", BERT), tmp_path)
    before = load(tmp_path)

    def older(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        spelled = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        found = {}
        for key, x in tensors.items():
            for new, old in spelled.items():
                key = key.replace(new, old)
            found[key] = x
        assert sum("gamma" in key for key in found) == 6
        return found

    same(load(rewritten(tmp_path, older)), before)


NEWER = {
    "encoder.layer.": "layers.",
    "attention.attention.query": "attention.q_proj",
    "attention.attention.key": "attention.k_proj",
    "attention.attention.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
}


@pytest.mark.parametrize("kind", ["ViTForImageClassification", "ViTModel"])
def test_newer_names_of_vit(kind: str, tmp_path: Path) -> None:
    write(make(kind, VIT | {"image_size": 8}), tmp_path)

    def spelled(names: dict[str, str]) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
        def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            found = {}
            for key, x in tensors.items():
                for old, new in names.items():
                    key = key.replace(old, new)
                found[key] = x
            return found

        return change

    older = load(rewritten(tmp_path, spelled({})))
    newer = load(rewritten(tmp_path, spelled(NEWER)))
    base = "vit." if kind != "ViTModel" else ""
    assert f"{base}layers.0.attention.q_proj.weight" in load_file(tmp_path / "model.safetensors")
    same(newer, older)


def test_gpt2_as_it_was_first_published(tmp_path: Path) -> None:
    """Without a prefix, with its masks, and with a head that is the embedding once more."""
    write(make("GPT2LMHeadModel", GPT2), tmp_path)
    before = load(tmp_path)

    def first(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {key.removeprefix("transformer."): x for key, x in tensors.items()}
        for i in range(2):
            found[f"h.{i}.attn.bias"] = torch.ones(19, 19).tril().bool()[None, None]
            found[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
        return found | {"lm_head.weight": found["wte.weight"].clone()}

    after = load(rewritten(tmp_path, first))
    same(after, before)
    after.save(tmp_path / "saved")
    assert all(key.startswith("transformer.") for key in load_file(tmp_path / "saved" / "model.safetensors"))


@pytest.mark.parametrize("case", ONE_EACH, ids=name)
def test_base_models_with_and_without_their_prefix(case: Case, tmp_path: Path) -> None:
    """A headless file of a model with a head says what is missing; T5 has no prefix."""
    folder = write(make(*case), tmp_path)
    model = load(folder)
    prefix = model.keys.prefix
    stripped = load(rewritten(folder, lambda tensors: {k.removeprefix(prefix): x for k, x in tensors.items()}))
    same(stripped, model)


def test_bert_as_it_was_first_published(tmp_path: Path) -> None:
    """All of pre-training's weights, under an architecture that uses a part of them; nothing is lost by saving."""
    write(make("BertForPreTraining", BERT), tmp_path)
    whole = load(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["BertForMaskedLM"]}))

    def first(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        embedding = tensors["bert.embeddings.word_embeddings.weight"]
        counted = {"bert.embeddings.position_ids": torch.arange(19)[None]}
        return tensors | counted | {"cls.predictions.decoder.weight": embedding.clone()}

    model = load(rewritten(tmp_path, first))
    same(model, whole)
    assert model.next_sentence is not None and model.pooler is not None
    assert torch.equal(model(ids()), whole(ids()))
    model.save(tmp_path / "saved")
    same(load(tmp_path / "saved"), whole)


def mapped(file: Path) -> list[range]:
    """Where this process has a file in its memory."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(file)):
            first, last = (int(x, 16) for x in line.split()[0].split("-"))
            found.append(range(first, last))
    return found


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux shows a process its mappings")
@pytest.mark.parametrize("case", ONE_EACH, ids=name)
def test_parameters_are_views_of_the_file(case: Case, tmp_path: Path) -> None:
    model = load(write(make(*case), tmp_path))
    places = mapped(tmp_path / "model.safetensors")
    assert places and all(any(p.data_ptr() in place for place in places) for p in model.parameters())
    converted = load(tmp_path, dtype=torch.float64)
    places = mapped(tmp_path / "model.safetensors")
    assert not any(p.data_ptr() in place for p in converted.parameters() for place in places)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    write(make("LlamaForCausalLM", LLAMA), tmp_path / "single")
    single, found = load(tmp_path / "single"), load(tmp_path / "single", dtype=dtype)
    assert single.dtype == torch.float32 and found.dtype == dtype
    assert all(torch.equal(a.to(dtype), b) for a, b in zip(single.parameters(), found.parameters(), strict=True))
    found.save(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    again = load(tmp_path / "saved")
    assert again.dtype == dtype
    same(again, found)


@pytest.mark.parametrize(
    ("one", "other", "widest"),
    [
        (torch.float16, torch.float32, torch.float32),
        (torch.float16, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float64, torch.float64),
    ],
)
def test_mixed_dtypes_become_the_widest(
    one: torch.dtype, other: torch.dtype, widest: torch.dtype, tmp_path: Path
) -> None:
    write(make("GPT2LMHeadModel", GPT2), tmp_path)
    before = load(tmp_path, dtype=torch.float64)

    def mixed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {key: x.to(other if "ln_f" in key else one) for key, x in tensors.items()}

    model = load(rewritten(tmp_path, mixed))
    assert {p.dtype for p in model.parameters()} == {widest}
    for (key, p), exact in zip(model.named_parameters(), before.parameters(), strict=True):
        assert torch.equal(p, exact.to(other if key.startswith("decoder.norm") else one).to(widest))
    half = load(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


def test_changing_a_model_does_not_change_its_file(tmp_path: Path) -> None:
    write(make("GPT2LMHeadModel", GPT2), tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    model, other = load(tmp_path), load(tmp_path)
    expected = other(ids()).detach().clone()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert torch.equal(other(ids()), expected) and not model(ids()).any()


def test_training_a_loaded_model(tmp_path: Path) -> None:
    write(make("LlamaForCausalLM", LLAMA), tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    model = load(tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(ids()[:, :-1]).flatten(0, 1), ids()[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(p.grad is not None for p in model.parameters())
    assert losses[2] < losses[0]
    assert (tmp_path / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("case", ONE_EACH, ids=name)
def test_saving_over_the_folder_it_came_from(case: Case, tmp_path: Path) -> None:
    write(make(*case), tmp_path)
    (tmp_path / "notes.txt").write_text("kept")
    model, untouched = load(tmp_path), load(tmp_path)
    kept = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        next(iter(model.parameters())).mul_(2)
    model.save(tmp_path)
    assert torch.equal(next(iter(model.parameters())), 2 * kept[0])
    assert all(torch.equal(a, b) for a, b in zip(untouched.parameters(), kept, strict=True))
    same(load(tmp_path), model)
    assert (tmp_path / "notes.txt").read_text() == "kept"
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")]


def test_what_lies_beside_is_written_back(tmp_path: Path) -> None:
    write(make("GPT2LMHeadModel", GPT2), tmp_path / "a")
    beside = {"tokenizer_config.json": "{}", "vocab.json": '{"é": 0}', "merges.txt": "#version\n"}
    beside |= {"chat_template.jinja": "{{ x }}", "1_Pooling/config.json": "{}", "code.py": "x", "old.bin": "x"}
    (tmp_path / "a" / "1_Pooling").mkdir()
    for file, content in beside.items():
        (tmp_path / "a" / file).write_text(content)
    config = json.loads((tmp_path / "a" / "config.json").read_text()) | {"note": "é", "torch_dtype": "float32"}
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    load(tmp_path / "a").save(tmp_path / "deep" / "b")
    there = tmp_path / "deep" / "b"
    kept = list(beside)[:5]
    assert {file: (there / file).read_text() for file in kept} == {file: beside[file] for file in kept}
    assert not (there / "code.py").exists() and not (there / "old.bin").exists()
    assert (there / "generation_config.json").read_bytes() == (tmp_path / "a" / "generation_config.json").read_bytes()
    saved = json.loads((there / "config.json").read_text())
    assert saved["note"] == "é" and saved["dtype"] == "float32" and "torch_dtype" not in saved
    with safe_open(there / "model.safetensors", framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert (there / "model.safetensors").stat().st_mode == (there / "config.json").stat().st_mode
    assert load(there)(ids()).shape == (3, 7, V)


def test_loading_does_not_import_the_compiler() -> None:
    """It would take longer than all else: torch imports it where a tensor without memory is filled."""
    script = (
        "from regard.models import bundled, load; load(bundled()); import sys; print('torch._dynamo' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300)
    assert ran.stdout.strip() == "False"
