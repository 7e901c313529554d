"""Tiny GGUF files, written from models of this library by the writer and the tensor names of the `gguf` package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

from regard.models import Model

# Architecture → the keys of sizes that its files have, by the name in a config.
SIZES = {
    "hidden_size": "embedding_length",
    "n_embd": "embedding_length",
    "num_hidden_layers": "block_count",
    "n_layer": "block_count",
    "num_attention_heads": "attention.head_count",
    "n_head": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "intermediate_size": "feed_forward_length",
    "n_inner": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "n_positions": "context_length",
    "head_dim": "attention.key_length",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
EPSILONS = {
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
}
PERMUTED = ("llama", "olmo", "smollm3")  # architectures whose converter reorders the rows of q and k


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """The reordering of q and k in llama.cpp's `convert_hf_to_gguf.py` (`LlamaModel.permute`)."""
    rows = weight.shape[0]
    return weight.reshape(heads, 2, rows // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    model: Model,
    file: Path,
    architecture: str,
    *,
    quantise: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write a model as llama.cpp's converter writes it.

    - ``quantise``: the type of matrices, e.g. "Q8_0" (default: float32).
    - ``metadata``: further entries, or other values for entries; None leaves one out.
    - ``extra``: further tensors.
    """
    config = model.config
    writer = gguf.GGUFWriter(file, architecture)
    entries: dict[str, Any] = {}
    for name, key in SIZES.items():
        if config.get(name) is not None:
            entries[f"{architecture}.{key}"] = config[name]
    for name, key in EPSILONS.items():
        if name in config:
            entries[f"{architecture}.{key}"] = float(config[name])
    if "rope_theta" in config.section("rope_parameters"):
        entries[f"{architecture}.rope.freq_base"] = float(config["rope_parameters"]["rope_theta"])
    entries |= metadata or {}
    for key, value in entries.items():
        _add(writer, key, value)
    for name, array in gguf_tensors(model, architecture).items():
        _add_tensor(writer, name, array, quantise)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def gguf_tensors(model: Model, architecture: str) -> dict[str, np.ndarray]:
    """The tensors of a model under the names, and with the changes, of llama.cpp's converter."""
    with TemporaryDirectory() as folder:
        model.save(folder)
        stored = load_file(Path(folder) / "model.safetensors")
    config = model.config
    layers = config.get("num_hidden_layers", config.get("n_layer"))
    known = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(known[architecture], layers)
    arrays = {}
    for name, tensor in stored.items():
        array = tensor.float().numpy()
        if architecture in PERMUTED and ".q_proj" in name:
            array = interleave(array, config["num_attention_heads"])
        if architecture in PERMUTED and ".k_proj" in name:
            array = interleave(array, config.get("num_key_value_heads", config["num_attention_heads"]))
        if architecture == "gpt2" and ".c_" in name and array.ndim == 2:
            array = array.T
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        arrays[theirs] = np.ascontiguousarray(array)
    return arrays


def byte_pair_entries(vocabulary: Mapping[str, int], merges: Sequence[str], pre: str, **others: Any) -> dict[str, Any]:
    """The metadata of a tokenizer of byte pairs."""
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    entries = {"model": "gpt2", "pre": pre, "tokens": tokens, "merges": list(merges), **others}
    return {f"tokenizer.ggml.{name}": value for name, value in entries.items()}


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _add_tensor(writer: gguf.GGUFWriter, name: str, array: np.ndarray, quantise: str | None) -> None:
    if quantise is None or array.ndim < 2:
        writer.add_tensor(name, array.astype(np.float32))
        return
    kind = gguf.GGMLQuantizationType[quantise]
    writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
