"""The head atlas: score every head of a model on the probes, compare it with its controls, and label its types."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard._checks import check_instance
from regard._devices import preserved_random_state
from regard._errors import RegardError
from regard._hooks import observed
from regard._observables import Observe
from regard.interp._atlas_store import model_fingerprint, save_atlas, stored_atlas
from regard.interp._atlas_table import Atlas, Scores, atlas_row
from regard.interp._head_scores import CROSS_ATTENTION_SCORES, head_scores
from regard.interp._probes import Probe, ProbeSet, image_probe, noise_probes, run_model, text_probes
from regard.interp._register_observers import NO_VISIBLE_ATTENTION
from regard.interp._token_labels import is_cross_attention
from regard.interp._watch import watch
from regard.interp.huggingface import is_pretrained
from regard.models import ImageModel, Model
from regard.models import load as load_model

Call = Callable[[nn.Module, Tensor], Any]
Progress = Callable[[int, int], None]


def atlas(
    model: nn.Module,
    tokenizer: Any = None,
    *,
    probes: Sequence[Probe] | None = None,
    images: Tensor | None = None,
    grid: tuple[int, int] | None = None,
    text: str | None = None,
    call: Call | None = None,
    control: bool = True,
    tokens: int | None = None,
    block: int | None = None,
    stored: bool = True,
    progress: Progress | None = None,
) -> Atlas:
    """Score every head of a text model on the probes, or of an image model on images.

    - ``model``: any model that ``regard.watch`` takes.
    - ``tokenizer``: of ``transformers``, ``tokenizers`` or regard; ``model.tokenizer`` by default.
    - ``probes``: probes of your own, instead of a tokenizer, a text or images; one of them is named "natural".
    - ``images``: ``[B, C, height, width]`` for an image model; there are no other probes then. A model of
      ``regard.models`` gets images of random noise by default.
    - ``grid``: (height, width) of the patches of ``images``.
    - ``text``: the natural text; Python's documentation by default.
    - ``call``: ``call(model, ids)`` runs the model; needed if ``model(ids)`` does not.
    - ``control``: whether to score an untrained copy too, which takes as much memory as the model.
    - ``tokens``: tokens per natural text; 256 by default, or as many as the model reads.
    - ``block``: tokens in the block that is repeated three times; 48 by default, or as many as fit.
    - ``stored``: whether to use what is stored. A model that ``regard.models.load`` has read and nobody has changed,
      with no other argument than ``progress``, has one atlas: the records of its training, if its folder has them, or
      else what was computed before (``regard look --kinds`` and the lab use the same). False computes anew.
    - ``progress``: ``progress(done, total)`` is called after each layer.

    Returns an ``Atlas``; its ``source`` says where the numbers come from. Everything random is seeded: two runs give
    the same numbers.

    >>> model = regard.models.load(regard.models.bundled())
    >>> heads = atlas(model)  # the model's folder has the records of its training
    >>> heads, heads.source
    (Atlas of 12 heads of TextDecoder, 'records of step 6,000; control: step 0')
    >>> atlas(model, tokens=32, block=8, control=False).top("previous", 1)  # short texts and no untrained copy
    [('decoder.blocks.1.attention', 0)]
    """
    check_instance("model", model, nn.Module)
    options = (tokenizer, probes, images, grid, text, call, tokens, block)
    fingerprint = None
    if stored and control and all(option is None for option in options) and is_as_loaded(model):
        assert isinstance(model, Model) and model.folder is not None
        fingerprint = model_fingerprint(model.folder)
        saved = stored_atlas(model.folder)
        if saved is not None:
            return saved

    if probes is not None:
        probe_set = _own_probes(probes, (tokenizer, images, text, tokens, block))
    elif images is None and grid is None and isinstance(model, ImageModel):
        probe_set = noise_probes(model.preprocessor.channels, *model.preprocessor.image)
        grid = model.vit.grid
    else:
        probe_set = _choose_probes(model, tokenizer, images, grid, text, tokens, block)
    if grid is not None:
        Observe(grid=grid)  # checks the grid
    result = _compute_atlas(model, probe_set, call, grid, control, progress)
    if fingerprint is not None:
        save_atlas(fingerprint, result)
    return result


def folder_atlas(folder: Path, load: Callable[[], tuple[nn.Module, Any]], progress: Progress | None = None) -> Atlas:
    """The atlas of the model in a folder: the stored one, or else computed and stored.

    - ``load``: returns the model of the folder and its tokenizer, None for the model's own. It is called only if
      nothing is stored.
    """
    stored = stored_atlas(folder)
    if stored is not None:
        return stored
    # The files may change while the model is scored, so this comes first.
    fingerprint = model_fingerprint(folder)
    model, tokenizer = load()
    result = atlas(model, tokenizer, stored=False, progress=progress)
    save_atlas(fingerprint, result)
    return result


def is_as_loaded(model: nn.Module) -> bool:
    """Whether a model is what its files say: no other weights, settings, modules, hooks or ablated heads.

    >>> model = regard.models.load(regard.models.bundled())
    >>> before = is_as_loaded(model)
    >>> with torch.no_grad():
    ...     out = model.decoder.blocks[0].attention.q_proj.weight.mul_(2)
    >>> before, is_as_loaded(model)
    (True, False)
    """
    if not isinstance(model, Model) or model.folder is None:
        return False
    try:
        fresh = load_model(model.folder, dtype=model.dtype)
    except (OSError, ValueError, TypeError):  # the folder was removed or changed
        return False
    modules = list(model.modules())
    fresh_modules = list(fresh.modules())
    if len(modules) != len(fresh_modules):
        return False
    for module, other in zip(modules, fresh_modules, strict=True):
        if type(module) is not type(other) or module in observed or _settings(module) != _settings(other):
            return False
        if module._forward_hooks or module._forward_pre_hooks:
            return False
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        others = [*other.parameters(recurse=False), *other.buffers(recurse=False)]
        if len(tensors) != len(others):
            return False
        for tensor, stored in zip(tensors, others, strict=True):
            if tensor.dtype != stored.dtype or not torch.equal(tensor.cpu(), stored):
                return False
    return True


def _settings(module: nn.Module) -> dict[str, Any]:
    """The plain attributes of a module: numbers, flags and names, for example its scale."""
    return {
        name: value
        for name, value in vars(module).items()
        if name != "training" and isinstance(value, bool | int | float | str)
    }


def _own_probes(probes: Sequence[Probe], others: Sequence[object]) -> ProbeSet:
    if any(option is not None for option in others):
        raise RegardError("probes exclude tokenizer, images, text, tokens and block; give one or the other")
    for probe in probes:
        check_instance("probes", probe, Probe)
    names = [probe.name for probe in probes]
    if "natural" not in names or len(set(names)) < len(names):
        raise RegardError(f"probes must have different names, one of them 'natural', got {names}")
    return ProbeSet(list(probes), "probes of the user")


def _choose_probes(
    model: nn.Module,
    tokenizer: Any,
    images: Tensor | None,
    grid: tuple[int, int] | None,
    text: str | None,
    tokens: int | None,
    block: int | None,
) -> ProbeSet:
    if (images is None) != (grid is None):
        raise RegardError("images and grid go together: grid is (height, width) of the patches")
    if images is not None:
        if images.ndim != 4:
            raise RegardError(f"images must have the shape [B, C, height, width], got {list(images.shape)}")
        return ProbeSet([image_probe(images)], f"{len(images)} images of the user")
    if isinstance(model, ImageModel) or getattr(model, "main_input_name", "") == "pixel_values":
        raise RegardError(f"{type(model).__name__} reads images: atlas(model, images=…, grid=(height, width))")
    return text_probes(model, _find_tokenizer(model, tokenizer), text, tokens, block)


def _compute_atlas(
    model: nn.Module,
    probe_set: ProbeSet,
    call: Call | None,
    grid: tuple[int, int] | None,
    control: bool,
    progress: Progress | None,
) -> Atlas:
    """Run the model and its untrained copy on the probes, and score all heads."""
    if call is None:
        call = run_model
    # The untrained copy is scored in the same way, and is the control of each head.
    models = [model]
    source = f"probes: {probe_set.description}; no control"
    if control:
        models.append(untrained_copy(model))
        source = f"probes: {probe_set.description}; control: untrained copy"
    results = []
    for k, scored_model in enumerate(models):
        results.append(_score_heads(scored_model, probe_set.probes, call, grid, _part_of(progress, k, len(models))))

    rows = []
    for layer, (path, heads) in enumerate(results[0].items()):
        for head, scores in heads.items():
            untrained = None
            if control:
                untrained = results[1][path][head]
            rows.append(atlas_row(path, layer, head, scores, untrained))
    return Atlas(type(model).__name__, rows, source)


def _part_of(progress: Progress | None, part: int, parts: int) -> Progress:
    """Progress of one of several equal parts, as progress of the whole."""

    def report(done: int, total: int) -> None:
        if progress is not None:
            progress(part * total + done, parts * total)

    return report


def untrained_copy(model: nn.Module) -> nn.Module:
    """A copy of a model with new random weights, always from the same seed.

    A model of ``transformers`` is made from its config. In other models every module with ``reset_parameters`` calls
    it. Matrices of other modules are shuffled, which keeps their size and removes their structure; vectors stay.

    >>> model = regard.nn.Encoder(6, heads=3, layers=1)
    >>> untrained = untrained_copy(model)
    >>> torch.equal(untrained.blocks[0].attention.q_proj.weight, model.blocks[0].attention.q_proj.weight)
    False
    """
    parameter = next(model.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    # The weights are drawn on the CPU, so that the copy of a model on another device has the same ones.
    with preserved_random_state(torch.device("cpu"), seed=0), torch.no_grad():
        if is_pretrained(model):
            assert parameter is not None
            untrained = type(model)(copy.deepcopy(model.config)).to(device, parameter.dtype)
        else:
            untrained = copy.deepcopy(model)
            if device.type != "cpu":
                untrained.cpu()
            for module in untrained.modules():
                _reset(module)
            if device.type != "cpu":
                untrained.to(device)
    return untrained.train(model.training)


def _reset(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if callable(reset):
        reset()
        return
    for parameter in module.parameters(recurse=False):
        if parameter.ndim > 1:  # a vector is the weight of a norm, or a bias
            parameter.copy_(parameter.flatten()[torch.randperm(parameter.numel())].reshape(parameter.shape))


def _score_heads(
    model: nn.Module, probes: Sequence[Probe], call: Call, grid: tuple[int, int] | None, progress: Progress
) -> dict[str, dict[int, Scores]]:
    """The scores by path and head; then by probe, raw or clean, and name."""
    results: dict[str, dict[int, Scores]] = {}
    training = model.training
    model.eval()
    try:
        for p, probe in enumerate(probes):
            with torch.no_grad(), watch(model, Observe(keep=True), values=True) as recording:
                call(model, probe.ids)
                if not recording:
                    raise RegardError(f"{type(model).__name__} {NO_VISIBLE_ATTENTION}")
            for k, path in enumerate(recording):
                observation = recording[path]
                # In cross-attention most scores have no meaning, and are left out.
                cross = is_cross_attention(recording.metadata, path)
                for weights, scores in head_scores(observation, probe, grid).items():
                    names = [name for name in scores if not cross or name in CROSS_ATTENTION_SCORES]
                    for index, head in enumerate(observation.heads):
                        of_head = results.setdefault(path, {}).setdefault(head, {}).setdefault(probe.name, {})
                        of_head[weights] = {name: float(scores[name][index]) for name in names}
                progress(p * len(recording) + k + 1, len(probes) * len(recording))
    finally:
        model.train(training)
    return results


def _find_tokenizer(model: nn.Module, tokenizer: Any) -> Any:
    if tokenizer is None:
        tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None or isinstance(tokenizer, str) or not hasattr(tokenizer, "encode"):
        raise RegardError(f"{type(model).__name__} has no tokenizer; give one: atlas(model, tokenizer)")
    return tokenizer
