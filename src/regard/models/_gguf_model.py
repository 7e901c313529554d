"""A GGUF file as a model folder: its config, its tensors under the names of ``transformers``, its tokenizer."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard._config_json import CLASS_PREFIXES, Config
from regard._errors import RegardError
from regard.models._folder import TOKENIZER
from regard.models._gguf_format import GgufFile
from regard.models._gguf_names import GGUF_FAMILIES, UNSUPPORTED_KEYS
from regard.models._gguf_tokenizer import tokenizer_json

# Tensors with divisors of rotary frequencies, which become entries of the config: one set of Llama 3.1, two of Phi-3.
FREQUENCY_FACTORS = "rope_freqs.weight"
LONG_FACTORS = "rope_factors_long.weight"
SHORT_FACTORS = "rope_factors_short.weight"
MOST_FACTORS = 2**16
CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
GEMMA2_27B_LAYERS = 46
OLMO_EPSILON = 1e-5  # the only one that OLMo's config can have


class GgufModel:
    """The model in a GGUF file, with the methods of ``ModelFolder``.

    - ``path``: the file.
    - ``dtype``: the dtype of quantised tensors; None (default) means float32. They are converted one after the other.
    """

    def __init__(self, path: Path, dtype: torch.dtype | None = None) -> None:
        self.path = path
        self._dtype = dtype
        self._file = GgufFile(path)
        metadata = Config(self._file.metadata)
        metadata.file = path.name
        architecture = metadata.string("general.architecture")
        if architecture not in GGUF_FAMILIES:
            known = ", ".join(GGUF_FAMILIES)
            raise RegardError(f"{path}: general.architecture must be one of {known}, got {architecture!r:.40}")
        self._family = GGUF_FAMILIES[architecture]
        # Keys of the architecture, without its name.
        keys = {key.removeprefix(f"{architecture}."): value for key, value in metadata.items()}
        self._entries = Config(keys)
        self._entries.file = f"{path.name}: {architecture}"
        self._tokenizer, self.no_tokenizer_reason = tokenizer_json(metadata, path.name)
        self.config = self._read_config()

    def read_config(self, name: str) -> Config:
        """The other configs of a folder; a file has none."""
        config = Config()
        config.file = name
        return config

    def extra_files(self) -> dict[str, bytes]:
        """The ``tokenizer.json``, if the file's tokenizer can be read."""
        if self._tokenizer is None:
            return {}
        return {TOKENIZER: self._tokenizer}

    def tensors(self) -> dict[str, Tensor]:
        """All tensors, as the checkpoint has them: names, order of rows, orientation."""
        tensors: dict[str, Tensor] = {}
        for name in self._file.arrays:
            if name in (FREQUENCY_FACTORS, LONG_FACTORS, SHORT_FACTORS):
                continue
            tensor = self._restore(name, self._file.read(name, self._dtype))
            theirs = self._checkpoint_name(name)
            if theirs in tensors:
                raise RegardError(f"{self.path}: {name} and another tensor are both {theirs}")
            tensors[theirs] = tensor
        return tensors

    def _checkpoint_name(self, name: str) -> str:
        """The name in a checkpoint; an unknown name stays, and is then a tensor that is left over."""
        module, _, leaf = name.rpartition(".")
        number = re.match(r"blk\.(\d{1,4})\.", module)
        layer = ""
        if number is not None:
            layer = number[1]
            module = "blk.{i}." + module[number.end() :]
        if module not in self._family.names:
            return name
        return self._family.names[module].format(i=layer) + f".{leaf}"

    def _restore(self, name: str, tensor: Tensor) -> Tensor:
        """Undo what the program that wrote the file has changed in a tensor."""
        part = name.split(".")[-2] if "." in name else name
        if part in self._family.transposed and tensor.ndim == 2:
            return tensor.T
        if self._family.pairs_together and part in ("attn_q", "attn_k"):
            heads = self.config.integer("num_attention_heads")
            if part == "attn_k":
                heads = self.config.integer("num_key_value_heads")
            return _split_pairs(name, tensor, heads)
        if self._family.shifted_norms and part.endswith("norm"):
            return tensor - 1
        return tensor

    def _read_config(self) -> Config:
        """The entries of the ``config.json`` of this model."""
        family = self._family
        entries = self._entries
        for key in UNSUPPORTED_KEYS:
            if key not in family.supported:
                entries.refuse(key, "this is not supported")
        if not entries.boolean("attention.causal", True):
            raise entries.error("attention.causal", "only models in which a token attends to earlier tokens are read")
        if "token_embd.weight" not in self._file.arrays:
            raise RegardError(f"{self.path}: token_embd.weight is missing; a model needs one")

        config = Config(model_type=family.model_type)
        config.file = self.path.name
        config["architectures"] = [CLASS_PREFIXES[family.model_type] + family.head]
        config["vocab_size"] = self._file.arrays["token_embd.weight"].shape[0]
        for name, key in family.entries.items():
            config[name] = self._value(key)
        # A file without an output matrix uses the embedding.
        config["tie_word_embeddings"] = "output.weight" not in self._file.arrays
        if family.rotary:
            self._add_attention(config)
        self._add_special_tokens(config)
        return config

    def _value(self, key: str) -> int | float:
        """A size or an ε: a number that the file must have."""
        if "epsilon" in key:
            return self._entries.number(key)
        return self._entries.integer(key)

    def _add_attention(self, config: Config) -> None:
        """Widths of heads, biases, windows and rotary positions."""
        entries = self._entries
        heads = entries.integer("attention.head_count")
        d_key = entries.integer("attention.key_length", entries.integer("embedding_length") // heads)
        if entries.integer("attention.value_length", d_key) != d_key:
            raise entries.error("attention.value_length", f"it must be the key length, {d_key}")
        config["num_key_value_heads"] = entries.integer("attention.head_count_kv", heads)
        config["head_dim"] = d_key
        family = self._family
        for name in family.bias_entries:
            config[name] = "blk.0.attn_q.bias" in self._file.arrays
        if family.model_type in ("llama", "smollm3"):
            config["mlp_bias"] = "blk.0.ffn_up.bias" in self._file.arrays
        if entries.get("attention.sliding_window"):
            if not family.windowed:
                raise entries.error("attention.sliding_window", f"{family.model_type} is read without a window")
            config["model_type"] = family.windowed
            config["architectures"] = [CLASS_PREFIXES[family.windowed] + family.head]
            config["sliding_window"] = entries.integer("attention.sliding_window")
        if family.model_type == "olmo" and not math.isclose(config["layer_norm_eps"], OLMO_EPSILON, rel_tol=1e-6):
            raise entries.error("attention.layer_norm_epsilon", f"it must be {OLMO_EPSILON}")
        if family.model_type == "gemma2":
            self._add_caps(config, d_key)
        config["rope_parameters"] = self._rope(d_key)
        if LONG_FACTORS in self._file.arrays:
            config["original_max_position_embeddings"] = entries.integer("rope.scaling.original_context_length")

    def _add_caps(self, config: Config, d_key: int) -> None:
        """The soft caps of Gemma 2, and the scale of its scores, which files do not have."""
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            config[name] = self._entries.number(name, CAPS[name])
        # As llama.cpp does: the largest one, of 27B, divides by another width.
        config["query_pre_attn_scalar"] = d_key
        if config["num_hidden_layers"] == GEMMA2_27B_LAYERS:
            config["query_pre_attn_scalar"] = config["hidden_size"] // config["num_attention_heads"]

    def _rope(self, d_key: int) -> dict[str, Any]:
        """The entry ``rope_parameters``."""
        entries = self._entries
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": entries.number("rope.freq_base", 10000.0)}
        rotated = entries.integer("rope.dimension_count", d_key)
        if self._family.partial and rotated <= d_key:
            rope["partial_rotary_factor"] = partial_factor(rotated, d_key)
        elif rotated != d_key:
            raise entries.error("rope.dimension_count", f"it must be the width of a head, {d_key}")
        scheme = entries.string("rope.scaling.type", "none")
        trained = entries.integer("rope.scaling.original_context_length", entries.integer("context_length"))
        if FREQUENCY_FACTORS in self._file.arrays:
            # Llama 3.1: each frequency has a divisor, which the file stores instead of the rule that gave it.
            factors = self._read_numbers(FREQUENCY_FACTORS)
            rope |= {"rope_type": "longrope", "short_factor": factors, "long_factor": factors}
            return rope | {"attention_factor": 1.0, "original_max_position_embeddings": trained}
        if LONG_FACTORS in self._file.arrays or SHORT_FACTORS in self._file.arrays:
            rope |= {"rope_type": "longrope", "original_max_position_embeddings": trained}
            rope |= {"short_factor": self._read_numbers(SHORT_FACTORS), "long_factor": self._read_numbers(LONG_FACTORS)}
            if entries.get("rope.scaling.attn_factor") is not None:
                rope["attention_factor"] = entries.number("rope.scaling.attn_factor")
            return rope
        factor = entries.number("rope.scaling.factor", entries.number("rope.scale_linear", 1.0))
        if scheme == "linear" or (scheme == "none" and factor != 1):
            return rope | {"rope_type": "linear", "factor": factor}
        if scheme == "yarn":
            for key in ("rope.scaling.yarn_log_multiplier", "rope.scaling.attn_factor"):
                entries.require(key, 1 if key.endswith("attn_factor") else 0)
            rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": trained}
            rope["beta_fast"] = entries.number("rope.scaling.yarn_beta_fast", 32.0)
            rope["beta_slow"] = entries.number("rope.scaling.yarn_beta_slow", 1.0)
            return rope
        if scheme != "none":
            raise entries.error("rope.scaling.type", "known are none, linear and yarn")
        return rope

    def _read_numbers(self, name: str) -> list[float]:
        """The numbers of a small tensor, as an entry of a config."""
        if name not in self._file.arrays:
            raise RegardError(f"{self.path}: {name} is missing; a file with one set of factors needs both")
        if math.prod(self._file.arrays[name].shape) > MOST_FACTORS:
            raise RegardError(f"{self.path}: {name} must have at most {MOST_FACTORS:,} numbers")
        return self._file.read(name).double().flatten().tolist()

    def _add_special_tokens(self, config: Config) -> None:
        """The ids of the start, the padding and the end. Chat models end their answers with a token of its own."""
        metadata = self._entries
        for name, key in (("bos_token_id", "bos_token_id"), ("pad_token_id", "padding_token_id")):
            if metadata.get(f"tokenizer.ggml.{key}") is not None:
                config[name] = metadata.integer(f"tokenizer.ggml.{key}", least=0)
        ends = []
        for key in ("eos_token_id", "eot_token_id", "eom_token_id"):
            if metadata.get(f"tokenizer.ggml.{key}") is not None:
                ends.append(metadata.integer(f"tokenizer.ggml.{key}", least=0))
        if ends:
            config["eos_token_id"] = list(dict.fromkeys(ends))


def partial_factor(rotated: int, d_key: int) -> float:
    """The factor whose product with ``d_key``, rounded down as transformers does, is ``rotated``.

    >>> int(44 * (30 / 44)), int(44 * partial_factor(30, 44))
    (29, 30)
    """
    factor = rotated / d_key
    if int(d_key * factor) < rotated:
        return math.nextafter(factor, math.inf)
    return factor


def _split_pairs(name: str, tensor: Tensor, heads: int) -> Tensor:
    """Rows of q or k whose rotary pairs are neighbours → rows with the first features of all pairs, then the second."""
    rows = tensor.shape[0]
    if rows % (2 * heads):
        raise RegardError(f"{name} must have an even number of rows for each of {heads} heads, got {rows} rows")
    pairs = tensor.unflatten(0, (heads, rows // heads // 2, 2))
    return pairs.transpose(1, 2).reshape(tensor.shape)
