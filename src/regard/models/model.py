"""What all loaded models share: where they came from, how they are described and saved."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from regard.config import Config
from regard.models.folder import write_folder
from regard.models.keys import Stored, Table
from regard.models.text import Bytes, NoText, Text
from regard.nn.stack import Observations

__all__ = ["Build", "Model", "named"]

Build = Callable[[Config, Stored], "Model"]


class Model(nn.Module):
    """A transformer with its ``config``, its key ``table`` and the small files that lay ``beside`` its weights.

    ``text`` turns words into token ids and back (bytes for a small vocabulary without ``tokenizer.json``).

    ``load`` makes one from a folder, ``create`` one that has learned nothing:

    >>> model = regard.models.load(regard.models.bundled())
    >>> model.config["num_hidden_layers"], model.dtype, "tokenizer.json" in model.beside
    (3, torch.bfloat16, True)
    >>> model.text.tokens(model.text.encode("Return the number"))
    ['<|endoftext|>', 'Return', 'Ġthe', 'Ġnumber']
    """

    def __init__(self, config: Config, table: Table) -> None:
        nn.Module.__init__(self)  # by name: a model may also be one of the layers' classes, made elsewhere
        self.config, self.table = config, table
        self.generation = Config()
        self.beside: dict[str, bytes] = {}
        self.text: Text | Bytes | NoText = Bytes()

    @property
    def dtype(self) -> torch.dtype:
        """What the parameters are stored in."""
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.parameters()).device

    @property
    def labels(self) -> list[str]:
        """The names of a classifier's classes, by number; none without one.

        >>> sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 24}
        >>> classes = {"architectures": ["ViTForImageClassification"], "id2label": {"0": "cat", "1": "dog"}}
        >>> regard.models.create({"model_type": "vit", "image_size": 8, "patch_size": 4, **sizes, **classes}).labels
        ['cat', 'dog']
        """
        head = getattr(self, "head", None)
        names = self.config.part("id2label")
        return [
            str(names.get(str(i), f"class {i}")) for i in range(head.out_features if isinstance(head, nn.Linear) else 0)
        ]

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write ``config.json``, ``model.safetensors`` and what lay beside them, as ``transformers`` reads them.

        Each file is written under another name and renamed when it is whole. Other files in the folder stay.

        >>> from tempfile import TemporaryDirectory
        >>> model = regard.models.load(regard.models.bundled(), dtype=torch.float32)
        >>> with TemporaryDirectory() as folder:
        ...     model.save(folder)
        ...     print("model.safetensors" in os.listdir(folder), regard.models.load(folder).dtype)
        True torch.float32
        """
        params = dict(self.named_parameters(remove_duplicate=False))
        prefix = self.table.prefix if self.config.architecture in self.table.bare else ""
        tensors = {pair.theirs.removeprefix(prefix): pair.write(params) for pair in self.table.pairs(self)}
        entries: dict[str, Any] = {k: v for k, v in self.config.items() if k != "torch_dtype"}
        entries["dtype"] = str(self.dtype).removeprefix("torch.")
        write_folder(folder, entries, tensors, self.beside)

    def extra_repr(self) -> str:
        return (
            f"{self.config.architecture or self.config.kind}, {sum(p.numel() for p in self.parameters()):,} parameters"
        )


def named(prefix: str, result: Tensor | tuple[Tensor, Observations]) -> Tensor | tuple[Tensor, Observations]:
    """A part's result with its observations named by their path in the whole model."""
    if isinstance(result, Tensor):
        return result
    return result[0], {f"{prefix}.{name}": part for name, part in result[1].items()}
