"""What loading refuses: by name, in one line, and before anything is built."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import make, write
from support.model_configs import LLAMA, V, ids, rope
from support.refusing import configure, copy, folders, refused, weigh

from regard.models import load, model_types


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return folders(tmp_path_factory)


@pytest.fixture
def gpt2(written: dict[str, Path], tmp_path: Path) -> Path:
    return copy(written["gpt2"], tmp_path)


def test_folders_that_are_none(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "nowhere does not exist", "config.json and *.safetensors")
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", "file is a file", "a model is a folder")
    refused(tmp_path, "has no config.json")
    (tmp_path / "config.json").mkdir()
    refused(tmp_path, "config.json must be a regular file", "a folder")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[1, 2]", "holds list"),
        (b"{}", "config.json has no model_type"),
        (b'{"model_type": 3}', "model_type is 3"),
    ],
)
def test_config_that_is_none(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    refused(tmp_path, said, str(tmp_path))


@pytest.mark.parametrize("value", ["x", -1, 0, True, 1.5, [3], {}])
def test_entries_of_wrong_types(value: Any, gpt2: Path) -> None:
    refused(configure(gpt2, n_embd=value), f"n_embd is {value!r}", "an integer ≥ 1", str(gpt2))


@pytest.mark.parametrize(
    ("kind", "entry", "value", "said"),
    [
        ("gpt2", "n_head", ..., "has no n_head; a gpt2 needs one"),
        ("bert", "hidden_size", None, "has no hidden_size; a bert needs one"),
        ("bert", "layer_norm_eps", float("nan"), "layer_norm_eps is nan; it must be a finite number"),
        ("bert", "layer_norm_eps", True, "layer_norm_eps is True; it must be a finite number"),
        ("bert", "hidden_act", "mish", "hidden_act is 'mish'; known are relu, gelu"),
        ("bert", "hidden_act", 3, "hidden_act is 3"),
        ("bert", "is_decoder", True, "is_decoder is True; these models are read as encoders"),
        ("bert", "add_cross_attention", True, "add_cross_attention is True"),
        ("bert", "position_embedding_type", "relative_key", "position_embedding_type is 'relative_key'"),
        ("bert", "tie_word_embeddings", False, "tie_word_embeddings is False"),
        ("gpt2", "tie_word_embeddings", "no", "tie_word_embeddings is 'no'; it must be true or false"),
        ("gpt2", "activation_function", "tan", "activation_function is 'tan'; known are"),
        ("gpt2", "add_cross_attention", True, "add_cross_attention is True"),
        ("gpt2", "n_head", 5, "12"),
        ("llama", "pretraining_tp", 2, "pretraining_tp is 2; only 1"),
        ("llama", "rope_parameters", [], "rope_parameters is []"),
        ("llama", "rope_parameters", {"rope_type": "spiral"}, "rope_type is 'spiral'; known are default, linear"),
        ("llama", "rope_parameters", {"full": {"rope_type": "default"}}, "rope_parameters is"),
        ("llama", "rope_parameters", rope("linear")["rope_parameters"], "has no factor"),
        ("llama", "rope_parameters", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; only 1"),
        ("llama", "num_key_value_heads", 2, "heads"),
        ("t5", "dense_act_fn", "mish", "dense_act_fn is 'mish'; known are"),
        ("vit", "image_size", [8, 8, 8], "image_size is [8, 8, 8]; it must be an integer ≥ 1 or two of them"),
        ("vit", "patch_size", 3, "3"),
        ("vit", "pooler_act", "relu", "pooler_act"),
    ],
)
def test_entries_that_cannot_be_honoured(
    kind: str, entry: str, value: Any, said: str, written: dict[str, Path], tmp_path: Path
) -> None:
    folder = configure(copy(written[kind], tmp_path), **{entry: value})
    refused(folder, said, str(folder))


def test_unknown_families_and_classes(written: dict[str, Path], tmp_path: Path) -> None:
    folder = copy(written["gpt2"], tmp_path)
    refused(configure(folder, model_type="mamba"), "model_type is 'mamba'", str(folder), *model_types())
    for kind, unknown, classes in (
        ("gpt2", "GPT2DoubleHeadsModel", ["GPT2LMHeadModel", "GPT2Model"]),
        ("bert", "BertForMultipleChoice", ["BertModel", "BertForMaskedLM", "BertForNextSentencePrediction"]),
        ("llama", "LlamaForSequenceClassification", ["LlamaForCausalLM", "LlamaModel"]),
        ("t5", "T5ForTokenClassification", ["T5ForConditionalGeneration", "T5EncoderModel"]),
        ("vit", "ViTForMaskedImageModeling", ["ViTForImageClassification", "ViTModel"]),
    ):
        folder = copy(written[kind], tmp_path / kind)
        refused(configure(folder, architectures=[unknown]), f"architectures is {unknown}", *classes)
    refused(configure(folder, architectures="ViTModel"), "architectures is 'ViTModel'; it must be a list of names")
    refused(configure(folder, architectures=[3]), "architectures is [3]; it must be a list of names")


def test_no_weights_and_pickles(gpt2: Path) -> None:
    (gpt2 / "model.safetensors").unlink()
    refused(gpt2, "has no weights", "model.safetensors")
    (gpt2 / "pytorch_model.bin").write_bytes(b"cos\nabort\n(tR.")
    (gpt2 / "pytorch_model.bin").chmod(0)
    refused(gpt2, "pytorch_model.bin, a pickle", "never opened", "save_pretrained(folder)")


def test_a_pickle_beside_safetensors_is_not_looked_at(gpt2: Path) -> None:
    (gpt2 / "pytorch_model.bin").write_bytes(b"cos\nabort\n(tR.")
    assert load(gpt2)(ids()).shape == (3, 7, V)


def test_damaged_weights(gpt2: Path) -> None:
    file = gpt2 / "model.safetensors"
    whole = file.read_bytes()
    header = int.from_bytes(whole[:8], "little")
    for content in (
        b"",
        whole[:5],
        whole[: 8 + header // 2],
        whole[:-3],
        b"\xff" * 64,
        (2).to_bytes(8, "little") + b"[]" + whole,
        bytes(range(256)) * 9,
    ):
        file.write_bytes(content)
        refused(gpt2, f"{file} is truncated or not a safetensors file")


def test_files_without_an_index(gpt2: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        shutil.copy(gpt2 / "model.safetensors", gpt2 / name)
    (gpt2 / "model.safetensors").unlink()
    refused(gpt2, "a.safetensors, b.safetensors", "model.safetensors.index.json")
    (gpt2 / "b.safetensors").unlink()
    assert load(gpt2)(ids()).shape == (3, 7, V)


def indexed(folder: Path, weight_map: Any) -> Path:
    """A folder of one shard, ``a.safetensors``, and an index."""
    if (folder / "model.safetensors").exists():
        (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_indices(gpt2: Path) -> None:
    good = dict.fromkeys(load_file(gpt2 / "model.safetensors"), "a.safetensors")
    assert load(indexed(gpt2, good))(ids()).shape == (3, 7, V)
    refused(indexed(gpt2, good | {"x": "b.safetensors"}), "names b.safetensors, which does not exist")
    refused(indexed(gpt2, good | {"x": "a.safetensors"}), "names x, which its files do not hold")
    shutil.copy(gpt2 / "a.safetensors", gpt2.parent / "x.safetensors")
    for path in ("../x.safetensors", str(gpt2.parent / "x.safetensors"), "..", "", 3, None):
        refused(indexed(gpt2, good | {"x": path}), f"names {path!r}", "a file beside it")
    refused(indexed(gpt2, [1]), "has no weight_map")
    shutil.copy(gpt2 / "a.safetensors", gpt2 / "b.safetensors")
    refused(indexed(gpt2, good | {"x": "b.safetensors"}), "is in b.safetensors and in another file")
    (gpt2 / "model.safetensors.index.json").write_text("{")
    refused(gpt2, "index.json is not JSON")


def test_tensors_that_do_not_fit(written: dict[str, Path], tmp_path: Path) -> None:
    def fresh(number: int) -> Path:
        return copy(written["gpt2"], tmp_path / str(number))

    norm = "transformer.h.1.ln_1.weight"
    message = refused(weigh(fresh(0), {norm: None}), f"1 tensor is missing for GPT2LMHeadModel: {norm}")
    assert message.startswith(str(tmp_path / "0"))
    refused(weigh(fresh(1), {"extra": torch.ones(2)}), "1 tensor is left over for GPT2LMHeadModel: extra")
    many = {f"extra.{i}": torch.ones(2) for i in range(5)}
    refused(weigh(fresh(2), many), "5 tensors are left over", "extra.0, extra.1, extra.2 and 2 more")
    refused(weigh(fresh(3), {norm: torch.ones(11)}), f"{norm} has shape [11], but the config makes it [12]")
    c_attn = "transformer.h.0.attn.c_attn.weight"
    refused(weigh(fresh(4), {c_attn: torch.ones(36, 12)}), f"{c_attn} has shape [36, 12]", "makes it [12, 36]")
    refused(configure(fresh(5), vocab_size=41), "transformer.wte.weight has shape [37, 12]", "makes it [41, 12]")
    refused(configure(fresh(6), n_layer=3), "tensors are missing", "transformer.h.2.")
    refused(configure(fresh(7), n_layer=1), "tensors are left over", "transformer.h.1.")
    both = {"wte.weight": torch.ones(V, 12)}
    refused(weigh(fresh(8), both), "1 tensor is left over for GPT2LMHeadModel: wte.weight")
    refused(weigh(fresh(9), {norm: torch.ones(12, dtype=torch.int8)}), norm, "torch.int8", "quantised", "torch.float32")


def test_one_tensor_under_two_names(written: dict[str, Path], tmp_path: Path) -> None:
    folder = weigh(copy(written["bert"], tmp_path), {"bert.embeddings.LayerNorm.gamma": torch.ones(12)})
    refused(folder, "bert.embeddings.LayerNorm.gamma", "bert.embeddings.LayerNorm.weight", "two names")


def test_tied_tensors_that_differ(written: dict[str, Path], tmp_path: Path) -> None:
    for kind, copied, original, hint in (
        ("gpt2", "lm_head.weight", "transformer.wte.weight", True),
        ("bert", "cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight", False),
        ("t5", "encoder.embed_tokens.weight", "shared.weight", False),
    ):
        folder = weigh(copy(written[kind], tmp_path / kind), {copied: torch.ones(V, 12)})
        message = refused(folder, f"{copied} differs from {original}", "tied")
        assert ("tie_word_embeddings = false" in message) == hint
    folder = configure(weigh(tmp_path / "gpt2" / "model", {}), tie_word_embeddings=False)
    assert torch.equal(load(folder).decoder.tokens.head.weight, torch.ones(V, 12))


@pytest.mark.parametrize("dtype", ["float32", torch.int8, 3, torch.complex64, float])
def test_dtypes(dtype: Any, gpt2: Path) -> None:
    refused(gpt2, "dtype must be torch.float64", "or None", repr(dtype), dtype=dtype)


def test_small_files_that_are_damaged(written: dict[str, Path], tmp_path: Path) -> None:
    folder = copy(written["vit"], tmp_path)
    for content, said in (
        ("{", "preprocessor_config.json is not JSON"),
        ('{"do_resize": 1}', "preprocessor_config.json: do_resize is 1; it must be true or false"),
        ('{"resample": 9}', "preprocessor_config.json: resample is 9; known are 0 (nearest)"),
        ('{"size": "x"}', "preprocessor_config.json: size is 'x'"),
        ('{"size": {"shortest_edge": 0}}', "preprocessor_config.json: size is {'shortest_edge': 0}"),
        ('{"size": {"shortest_edge": 8, "longest_edge": 9}}', "preprocessor_config.json: size is"),
        ('{"do_center_crop": true, "crop_size": {"shortest_edge": 8}}', "crop_size is {'shortest_edge': 8}"),
        ('{"image_mean": [1, 2]}', "preprocessor_config.json: image_mean is [1, 2]; it must be 3 finite numbers"),
        ('{"image_std": ["a", 1, 1]}', "preprocessor_config.json: image_std is"),
    ):
        (folder / "preprocessor_config.json").write_text(content)
        refused(folder, said, str(folder))
    folder = copy(written["gpt2"], tmp_path / "text")
    (folder / "tokenizer.json").write_text("{}")
    refused(folder, "tokenizer.json cannot be read", str(folder))
    (folder / "tokenizer.json").unlink()
    (folder / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(ValueError, match=r"generation_config.json: eos_token_id is 'x'"):
        load(folder).generate([[3]], 2)


def test_absurd_numbers_of_layers_are_refused_before_anything_is_built(tmp_path: Path) -> None:
    folder = write(make("LlamaForCausalLM", LLAMA), tmp_path)
    configure(folder, num_hidden_layers=10**9)
    with pytest.raises(ValueError, match="num_hidden_layers is 1000000000; at most"):
        load(folder)


def test_a_padding_id_that_is_none_is_none(tmp_path: Path) -> None:
    """Old Llama files say −1; texts of several lengths are written all the same."""
    folder = write(make("LlamaForCausalLM", LLAMA), tmp_path)
    configure(folder, pad_token_id=-1)
    model = load(folder)
    alone = [model.generate([row], 5) for row in ([5, 6, 7], [8])]
    assert torch.equal(model.generate([[5, 6, 7], [8]], 5), torch.cat(alone))
