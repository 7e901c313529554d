"""Models from folders: find the family, build it without memory, and let its parameters be views of the files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard.models import attention_only, bert, gpt2, llama, relative_attention, resnet, t5, vit
from regard.models.folder import Folder, some
from regard.models.image_model import ImageModel
from regard.models.images import Preprocessor
from regard.models.keys import Table
from regard.models.model import Build, Model
from regard.models.text import text_of

__all__ = ["known", "load"]

FAMILIES: dict[str, Build] = {
    kind: file.build
    for file in (bert, gpt2, llama, t5, vit, attention_only, relative_attention, resnet)
    for kind in file.KINDS
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def known() -> tuple[str, ...]:
    """The ``model_type``s that can be loaded.

    >>> "llama" in known(), "mamba" in known()
    (True, False)
    """
    return tuple(FAMILIES)


def load(folder: str | os.PathLike[str], *, dtype: torch.dtype | None = None) -> Model:
    """A Hugging Face folder as a model of this library, ready to use (``eval``): the same function, every head open.

    - the folder has ``config.json`` and ``model.safetensors``, or an index with several files; ``tokenizer.json`` and
      ``preprocessor_config.json`` are used where they are there. Nothing is downloaded and no pickle is opened.
    - known are BERT, RoBERTa, DistilBERT, GPT-2, Llama, Mistral, Qwen2, Qwen3, T5 and ViT, with the heads that their
      files name, and the image models that ``regard train digits`` and ``pixels`` make. A tensor that is missing,
      left over or of the wrong shape raises, by name.
    - ``dtype`` None keeps the files': parameters are then views of mapped files, read as they are needed (a mixture of
      dtypes becomes the widest of them); another one is converted, tensor by tensor. A file that is replaced while a
      model uses it does not change it; one that is overwritten in place does.

    >>> model = load(regard.models.bundled())
    >>> ids = torch.tensor([model.text.encode("Return the number")])
    >>> logits, seen = model(ids, observe=regard.Observe(map=4))
    >>> logits.shape, list(seen)[0], seen["decoder.blocks.0.attention"].map.shape
    (torch.Size([1, 4, 1024]), 'decoder.blocks.0.attention', torch.Size([4, 4, 4]))
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype must be {', '.join(str(x) for x in DTYPES)} or None, got {dtype!r}")
    there = Folder(folder)
    try:
        model = _filled(_family(there), there, dtype)
    except (ValueError, TypeError, ArithmeticError, RuntimeError) as error:
        # What torch or arithmetic has against absurd numbers is about the config too: its first line says what.
        kind = type(error) if type(error) in (ValueError, TypeError) else ValueError
        said = str(error).split("\n")[0]
        raise kind(said if str(there.path) in said else f"{there.path}: {said}") from None
    return model.eval()


def _family(there: Folder) -> Build:
    if there.config.kind not in FAMILIES:
        raise ValueError(f"config.json: model_type is {there.config.kind!r}; known are {', '.join(FAMILIES)}")
    return FAMILIES[there.config.kind]


def _filled(build: Build, there: Folder, dtype: torch.dtype | None) -> Model:
    stored = there.tensors()
    with torch.device("meta"), _Unfilled():
        table = build(there.config, lambda key: None).table
        names = _canonical(table, stored)
        model = build(there.config, lambda key: stored.get(table.find(key, names) or ""))
    _fill(model, names, stored, dtype)
    model.beside = there.beside()
    model.generation = there.entries("generation_config.json")
    model.text = text_of(model.beside, there.config.get("vocab_size"))
    if isinstance(model, ImageModel):
        settings = there.entries("preprocessor_config.json")
        model.images = Preprocessor(settings, model.vit.image, model.vit.channels)
    return model


class _Unfilled(TorchFunctionMode):
    """Within: ``nn.init`` does nothing. There is no memory to fill, and to fill none torch imports its compiler."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == nn.init.__name__:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def _canonical(table: Table, stored: Mapping[str, Tensor]) -> dict[str, str]:
    """Names as the table spells them → names in the file, without what is no parameter."""
    names: dict[str, str] = {}
    for name in stored:
        spelled = table.canonical(name)
        if spelled is None:
            continue
        if spelled in names:
            raise ValueError(f"{name} and {names[spelled]} are the same tensor under two names")
        names[spelled] = name
    return names


def _fill(model: Model, names: Mapping[str, str], stored: Mapping[str, Tensor], dtype: torch.dtype | None) -> None:
    """Put every stored tensor where it belongs, or raise before anything is put anywhere."""
    table, params = model.table, dict(model.named_parameters(remove_duplicate=False))
    found: dict[str, Tensor] = {}
    used: dict[str, str] = {}
    missing = []
    for pair in table.pairs(model):
        name = table.find(pair.theirs, names)
        if name is None:
            missing.append(pair.theirs)
            continue
        used[pair.theirs] = name
        found |= pair.read(_floating(name, stored[name]), params)
    architecture = model.config.architecture
    left = sorted(set(names.values()) - set(used.values()))
    left = [name for name in left if not _is_copy(name, table, used, names, stored, architecture)]
    for what, which in (("missing", missing), ("left over", left)):
        if which:
            count = "1 tensor is" if len(which) == 1 else f"{len(which)} tensors are"
            raise ValueError(f"{count} {what} for {model.config.architecture or model.config.kind}: {some(which)}")
    widest = dtype
    if widest is None:
        for tensor in found.values():
            widest = tensor.dtype if widest is None else torch.promote_types(widest, tensor.dtype)
    for name, tensor in found.items():
        _set(model, name, tensor.to(widest))


def _is_copy(
    name: str,
    table: Table,
    used: Mapping[str, str],
    names: Mapping[str, str],
    stored: Mapping[str, Tensor],
    architecture: str,
) -> bool:
    """Whether a tensor that is left over is tied to one that is used; tied tensors that differ raise."""
    for copy, original in table.copies.items():
        if table.find(copy, names) == name and original in used:
            if not torch.equal(stored[name], stored[used[original]]):
                untie = "; tie_word_embeddings = false in config.json keeps both" if copy == "lm_head.weight" else ""
                if not architecture:
                    untie = "; config.json names no architectures, so that it was read without a head"
                raise ValueError(f"{name} differs from {used[original]}, but the two are tied in this model{untie}")
            return True
    return False


def _floating(name: str, tensor: Tensor) -> Tensor:
    if tensor.dtype not in DTYPES:
        raise ValueError(
            f"{name} is {tensor.dtype}; quantised checkpoints are not read, only {', '.join(map(str, DTYPES))}"
        )
    return tensor


def _set(model: nn.Module, name: str, tensor: Tensor) -> None:
    """A parameter with what is stored; one that is fixed (``requires_grad`` False) stays so."""
    module, _, leaf = name.rpartition(".")
    owner = model.get_submodule(module)
    setattr(owner, leaf, nn.Parameter(tensor, requires_grad=getattr(owner, leaf).requires_grad))
