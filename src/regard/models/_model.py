"""The base class of all models: config, key table, tokenizer, and saving."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard._config_json import Config
from regard.models._checkpoint_keys import KeyTable, TensorLookup
from regard.models._folder import write_folder
from regard.models._tokenizer import ByteTokenizer, MissingTokenizer, Tokenizer
from regard.nn._stack import Observations

BuildFunction = Callable[[Config, TensorLookup], "Model"]


class Model(nn.Module):
    """A transformer with its ``config``, its ``tokenizer`` and the small files of its folder, ``extra_files``.

    ``load`` reads one from a folder, ``create`` makes one with random weights. A small vocabulary without
    ``tokenizer.json`` is read as bytes.

    >>> model = regard.models.load(regard.models.bundled())
    >>> model.config["num_hidden_layers"], model.dtype, "tokenizer.json" in model.extra_files
    (3, torch.bfloat16, True)
    >>> model.tokenizer.tokens(model.tokenizer.encode("Return the number"))
    ['<|endoftext|>', 'Return', 'Ġthe', 'Ġnumber']
    """

    def __init__(self, config: Config, keys: KeyTable) -> None:
        # Not super(): a subclass may also derive from a layer class, whose __init__ takes sizes.
        nn.Module.__init__(self)
        self.config = config
        self.keys = keys
        self.generation_config = Config()
        self.extra_files: dict[str, bytes] = {}
        self.folder: Path | None = None  # that load has read
        self.tokenizer: Tokenizer | ByteTokenizer | MissingTokenizer = ByteTokenizer()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(self.parameters()).device

    @property
    def labels(self) -> list[str]:
        """The names of a classifier's classes; [] without a classifier.

        >>> sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 24}
        >>> classes = {"architectures": ["ViTForImageClassification"], "id2label": {"0": "cat", "1": "dog"}}
        >>> regard.models.create({"model_type": "vit", "image_size": 8, "patch_size": 4, **sizes, **classes}).labels
        ['cat', 'dog']
        """
        head = getattr(self, "head", None)
        if not isinstance(head, nn.Linear):  # no head, or a head over tokens
            return []
        names = self.config.section("id2label")
        return [str(names.get(str(i), f"class {i}")) for i in range(head.out_features)]

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write ``config.json``, ``model.safetensors`` and the extra files, in the format of ``transformers``.

        Each file is written under another name and renamed when it is complete. Other files in the folder stay.

        >>> from tempfile import TemporaryDirectory
        >>> model = regard.models.load(regard.models.bundled(), dtype=torch.float32)
        >>> with TemporaryDirectory() as folder:
        ...     model.save(folder)
        ...     print("model.safetensors" in os.listdir(folder), regard.models.load(folder).dtype)
        True torch.float32
        """
        params = dict(self.named_parameters(remove_duplicate=False))
        # The base model of a family is stored without the prefix that a model with a head has.
        prefix = ""
        if self.config.architecture in self.keys.unprefixed:
            prefix = self.keys.prefix
        tensors = {}
        for stored in self.keys.stored_tensors(self):
            tensors[stored.theirs.removeprefix(prefix)] = stored.write(params)
        entries: dict[str, Any] = dict(self.config)
        entries.pop("torch_dtype", None)  # the old name of the entry "dtype"
        entries["dtype"] = str(self.dtype).removeprefix("torch.")
        write_folder(folder, entries, tensors, self.extra_files)

    def extra_repr(self) -> str:
        name = self.config.architecture or self.config.model_type
        return f"{name}, {sum(p.numel() for p in self.parameters()):,} parameters"


def prefix_observations(
    prefix: str, result: Tensor | tuple[Tensor, Observations]
) -> Tensor | tuple[Tensor, Observations]:
    """A submodule's result, with its observations renamed to their paths in the whole model."""
    if isinstance(result, Tensor):
        return result
    out, observations = result
    return out, {f"{prefix}.{name}": observation for name, observation in observations.items()}
