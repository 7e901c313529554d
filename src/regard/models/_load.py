"""Loads a model from a folder: builds it on the meta device, then makes its parameters views of the files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard._errors import RegardError, RegardTypeError
from regard._shapes import DTYPES
from regard.models._checkpoint_keys import KeyTable
from regard.models._families import build_function
from regard.models._folder import ModelFolder, shorten_list
from regard.models._gguf_format import is_gguf
from regard.models._gguf_model import GgufModel
from regard.models._image_model import ImageModel
from regard.models._images import Preprocessor
from regard.models._model import BuildFunction, Model
from regard.models._tokenizer import MissingTokenizer, make_tokenizer


def load(folder: str | os.PathLike[str], *, dtype: torch.dtype | None = None, allow_nonfinite: bool = False) -> Model:
    """Load a Hugging Face folder or a GGUF file as a model of this library, in ``eval`` mode.

    Supported: BERT, RoBERTa, DistilBERT, GPT-2, Llama, Mistral, Qwen2, Qwen3, Gemma, Gemma 2, OLMo, OLMo 2, Phi-3,
    SmolLM3, StableLM, T5 and ViT, with the heads in the files, and the image models of ``regard train digits`` and
    ``pixels``. A tensor that is missing, left over or of the wrong shape raises an error with its name.

    - ``folder``: has ``config.json`` and ``model.safetensors``, or an index of several files. ``tokenizer.json`` and
      ``preprocessor_config.json`` are used if they exist. Nothing is downloaded and no pickle is opened. Or a GGUF file
      of one of the decoders; quantised ones need ``pip install 'regard[gguf]'``.
    - ``dtype``: None (default) keeps the dtype of the files, or the widest of several; quantised tensors become
      float32. The parameters are then views of memory-mapped files: replacing a file does not change the model,
      overwriting it in place does. Another dtype is converted tensor by tensor.
    - ``allow_nonfinite``: accept weights that are NaN or infinite (default: False, an error names the first such
      tensor). The check reads every weight once, which a forward pass would do anyway; True skips it.

    >>> model = load(regard.models.bundled())
    >>> ids = torch.tensor([model.tokenizer.encode("Return the number")])
    >>> logits, observations = model(ids, observe=regard.Observe(map=4))
    >>> logits.shape, list(observations)[0], observations["decoder.blocks.0.attention"].map.shape
    (torch.Size([1, 4, 1024]), 'decoder.blocks.0.attention', torch.Size([4, 4, 4]))
    """
    if dtype is not None and dtype not in DTYPES:
        raise RegardError(f"dtype must be {', '.join(str(x) for x in DTYPES)} or None, got {dtype!r}")
    path = Path(folder)
    try:
        source = open_source(path, dtype)
        build = build_function(source.config.model_type, "config.json: ")
        model = _build_and_fill(build, source, dtype)
        if not allow_nonfinite:
            check_finite(model.named_parameters(), path)
    except (ValueError, TypeError, ArithmeticError, RuntimeError) as error:
        # Errors of torch or of arithmetic come from absurd numbers in the config; their first line is enough.
        message = str(error).split("\n")[0]
        if str(path) not in message:
            message = f"{path}: {message}"
        if isinstance(error, TypeError):
            raise RegardTypeError(message) from None
        raise RegardError(message) from None
    return model.eval()


def open_source(path: Path, dtype: torch.dtype | None = None) -> ModelFolder | GgufModel:
    """The files of a model: a folder, or one GGUF file, whose quantised tensors become ``dtype``."""
    if is_gguf(path):
        return GgufModel(path, dtype)
    return ModelFolder(path)


def _build_and_fill(build: BuildFunction, folder: ModelFolder | GgufModel, dtype: torch.dtype | None) -> Model:
    tensors = folder.tensors()
    with torch.device("meta"), _SkipInitialisation():
        # Build twice: the first model gives the key table, which the second needs to find its optional parts.
        keys = build(folder.config, lambda key: None).keys
        file_names = _file_names(keys, tensors)
        model = build(folder.config, lambda key: tensors.get(keys.find(key, file_names) or ""))
    _fill(model, file_names, tensors, dtype)
    model.folder = folder.path.resolve()
    model.extra_files = folder.extra_files()
    model.generation_config = folder.read_config("generation_config.json")
    model.tokenizer = make_tokenizer(model.extra_files, folder.config.get("vocab_size"))
    if isinstance(folder, GgufModel) and folder.no_tokenizer_reason:
        model.tokenizer = MissingTokenizer(f"{folder.path.name}: {folder.no_tokenizer_reason}", "give token ids")
    if isinstance(model, ImageModel):
        settings = folder.read_config("preprocessor_config.json")
        model.preprocessor = Preprocessor(settings, model.vit.image, model.vit.channels)
    return model


class _SkipInitialisation(TorchFunctionMode):
    """Makes ``nn.init`` do nothing: meta tensors have no values, and torch would import its compiler for them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == nn.init.__name__:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def _file_names(keys: KeyTable, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Canonical name → name in the file, without tensors that are not parameters."""
    names: dict[str, str] = {}
    for name in tensors:
        canonical = keys.canonical(name)
        if canonical is None:
            continue
        if canonical in names:
            raise RegardError(f"{name} and {names[canonical]} are the same tensor under two names")
        names[canonical] = name
    return names


def _fill(
    model: Model, file_names: Mapping[str, str], tensors: Mapping[str, Tensor], dtype: torch.dtype | None
) -> None:
    """Set every parameter to its stored tensor; all checks come before the first change."""
    keys = model.keys
    params = dict(model.named_parameters(remove_duplicate=False))
    values: dict[str, Tensor] = {}
    used: dict[str, str] = {}  # key → name in the file
    missing = []
    for stored in keys.stored_tensors(model):
        name = keys.find(stored.theirs, file_names)
        if name is None:
            missing.append(stored.theirs)
            continue
        used[stored.theirs] = name
        if tensors[name].dtype not in DTYPES:
            dtypes = ", ".join(map(str, DTYPES))
            raise RegardError(f"{name} is {tensors[name].dtype}; quantised checkpoints are not read, only {dtypes}")
        values |= stored.read(tensors[name], params)

    # A second copy of a tied tensor is accepted if it is equal.
    _check_tied(model, used, file_names, tensors)
    tied_copies = {keys.find(copy, file_names) for copy, original in keys.tied.items() if original in used}
    left_over = sorted(set(file_names.values()) - set(used.values()) - tied_copies)
    for problem, names in (("missing", missing), ("left over", left_over)):
        if names:
            count = "1 tensor is" if len(names) == 1 else f"{len(names)} tensors are"
            architecture = model.config.architecture or model.config.model_type
            raise RegardError(f"{count} {problem} for {architecture}: {shorten_list(names)}")

    # Files of mixed dtypes become the widest of them, so that no number is rounded.
    if dtype is None:
        dtype = next(iter(values.values())).dtype
        for tensor in values.values():
            dtype = torch.promote_types(dtype, tensor.dtype)
    for name, tensor in values.items():
        module, _, leaf = name.rpartition(".")
        owner = model.get_submodule(module)
        setattr(owner, leaf, nn.Parameter(tensor.to(dtype), requires_grad=getattr(owner, leaf).requires_grad))


def check_finite(tensors: Iterable[tuple[str, Tensor]], source: Path) -> None:
    """Raise for the first tensor with a number that is NaN or infinite: all that is computed from it would be NaN.

    - ``source``: the folder or file of the tensors, for the message.
    """
    for name, tensor in tensors:
        if tensor.is_meta or tensor.numel() == 0:
            continue
        # The smallest and the largest number are NaN if any number is. This reads the tensor once, at the speed of the
        # memory, and is twenty times faster than isfinite, which stores a result per number.
        with torch.no_grad():
            smallest, largest = torch.aminmax(tensor)
        if bool(smallest.isfinite()) and bool(largest.isfinite()):
            continue
        count = int((~tensor.isfinite()).sum())
        raise RegardError(
            f"{source}: {name} must be finite, got {count:,} of {tensor.numel():,} numbers that are NaN or infinite"
        )


def _check_tied(
    model: Model, used: Mapping[str, str], file_names: Mapping[str, str], tensors: Mapping[str, Tensor]
) -> None:
    """Raise if a file stores two different tensors where the model has one."""
    for copy, original in model.keys.tied.items():
        name = model.keys.find(copy, file_names)
        if name is None or original not in used or name in used.values():
            continue
        if not torch.equal(tensors[name], tensors[used[original]]):
            hint = ""
            if not model.config.architecture:
                hint = "; config.json has no architectures, so the model was read without a head"
            elif copy == "lm_head.weight":
                hint = "; tie_word_embeddings = false in config.json keeps both"
            raise RegardError(f"{name} differs from {used[original]}, but the two are tied in this model{hint}")


def bundled() -> Path:
    """The folder of a language model with 3 layers of 4 heads, trained by ``regard train text``: ``load(bundled())``.

    It also holds the model's recipe, its result and the evolution of its heads
    (``regard.training.evolution(bundled())``).

    >>> sorted(file.name for file in bundled().glob("*.safetensors"))
    ['model.safetensors']
    >>> model = regard.models.load(bundled())
    >>> model.generate("import os", 3)
    '.path'
    """
    return Path(__file__).parent.parent / "bundled"
