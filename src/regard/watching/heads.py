"""The head atlas: every head of a model, scored on the standard probes, held against its controls, and named.

``atlas(model, tokenizer)`` runs the probes (``probes``), takes the scores (``scoring``) and gives each head its kinds
(``kinds``). Weights alone mislead: ``moved`` beside ``sinks`` tells how much of what a head moves comes from its sinks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regard.models import ImageModel
from regard.nn import EncoderDecoder
from regard.observables import Observe
from regard.positions.common import check_kind
from regard.watching.atlas import Atlas
from regard.watching.huggingface import is_pretrained
from regard.watching.kinds import kinds, labels
from regard.watching.probes import Probe, Reader, natural, repeated
from regard.watching.scoring import score
from regard.watching.visitor import UNSEEN
from regard.watching.watch import watch
from regard.watching.words import is_cross

__all__ = ["Atlas", "atlas", "run", "untrained", "vocabulary"]

Call = Callable[[nn.Module, Tensor], Any]
Scores = dict[str, dict[str, dict[str, float]]]  # probe → raw or clean → name → number
# What means something between two sequences, where nothing is before or after anything.
ACROSS = ("sink", "sink4", "sinks", "sinks chance", "moved", "spread", "rest")


def atlas(
    model: nn.Module,
    tokenizer: Any = None,
    *,
    images: Tensor | None = None,
    grid: tuple[int, int] | None = None,
    text: str | None = None,
    call: Call | None = None,
    control: bool = True,
    tokens: int = 256,
    block: int = 48,
    progress: Callable[[int, int], None] | None = None,
) -> Atlas:
    """Score every head of a text model, or of an image model on ``images [B, C, height, width]``.

    - ``tokenizer``: of ``transformers``, of ``tokenizers`` or ours; the model's own (``model.text``) unless given.
    - ``images`` go with ``grid``, (height, width) of the patches; the probes of texts are left out.
    - ``text``: natural text of your own, for the probe that is otherwise Python's documentation.
    - ``call(model, ids)`` runs the model, where ``model(ids)`` is not how.
    - ``control=False`` leaves out the untrained twin, which takes as much memory as the model.
    - ``tokens`` a text, ``block`` tokens in the block that is said three times.
    - ``progress(done, of)`` is called as layers are scored.

    Everything random is seeded: two runs give the same numbers.

    >>> model = regard.models.load(regard.models.bundled())
    >>> found = atlas(model, tokens=32, block=8, control=False)  # short, and without the untrained twin: a first look
    >>> found, found.top("previous", 1)
    (Atlas of 12 heads of TextDecoder, [('decoder.blocks.1.attention', 0)])
    """
    check_kind("model", model, nn.Module)
    if (images is None) != (grid is None):
        raise ValueError("images and grid go together: grid is (height, width) of the patches")
    if grid is not None:
        Observe(grid=grid)  # checks it
    if images is None and (isinstance(model, ImageModel) or getattr(model, "main_input_name", "") == "pixel_values"):
        raise ValueError(f"{type(model).__name__} reads pictures: atlas(model, images=…, grid=(height, width))")
    if images is not None and images.ndim != 4:
        raise ValueError(f"images has shape {list(images.shape)}; it must be [batch, channels, height, width]")
    if images is not None:
        probes = [Probe("natural", images, torch.zeros(0, dtype=torch.bool))]
    else:
        reader = Reader(_tokenizer(model, tokenizer))
        probes = [natural(reader, tokens, 2, text), *repeated(reader, block, 3, 2, vocabulary(model, reader))]
    asked = run if call is None else call
    runs = 2 if control else 1
    found = _scored(model, probes, asked, grid, lambda k, of: progress and progress(k, runs * of))
    twin = None
    if control:
        twin = _scored(untrained(model), probes, asked, grid, lambda k, of: progress and progress(of + k, 2 * of))
    rows = []
    for layer, (path, heads) in enumerate(found.items()):
        for head, scores in heads.items():
            rows.append(_row(path, layer, head, scores, None if twin is None else twin[path][head]))
    return Atlas(type(model).__name__, rows)


def untrained(model: nn.Module) -> nn.Module:
    """A copy of the model as it was before it learned anything: its weights drawn anew, from a seed.

    A model of ``transformers`` is made from its config. In others every module that can (``reset_parameters``) does;
    matrices that no module resets are shuffled, which leaves their size and no structure, vectors are left.

    >>> model = regard.nn.Encoder(6, heads=3, layers=1)
    >>> twin = untrained(model)
    >>> torch.equal(twin.blocks[0].attention.q_proj.weight, model.blocks[0].attention.q_proj.weight)
    False
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        if is_pretrained(model):
            first = next(model.parameters())
            twin = type(model)(copy.deepcopy(model.config)).to(first.device, first.dtype)
        else:
            twin = copy.deepcopy(model)
            for module in twin.modules():
                _reset(module)
    return twin.train(model.training)


def _reset(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if callable(reset):
        reset()
        return
    for parameter in module.parameters(recurse=False):
        if parameter.ndim > 1:  # a vector is a norm's or a bias
            parameter.copy_(parameter.flatten()[torch.randperm(parameter.numel())].reshape(parameter.shape))


def _scored(
    model: nn.Module, probes: Sequence[Probe], call: Call, grid: tuple[int, int] | None, progress: Any
) -> dict[str, dict[int, Scores]]:
    """Scores by path and head: by probe, raw or clean, name."""
    found: dict[str, dict[int, Scores]] = {}
    training = model.training
    model.eval()
    try:
        for p, probe in enumerate(probes):
            with torch.no_grad(), watch(model, Observe(keep=True), values=True) as seen:
                call(model, probe.ids)
                if not seen:
                    raise ValueError(f"{type(model).__name__} {UNSEEN}")
            for k, path in enumerate(seen):
                observation = seen[path]
                across = is_cross(seen.about, path)
                for weights, values in score(observation, probe, grid).items():
                    for at, head in enumerate(observation.heads):
                        into = found.setdefault(path, {}).setdefault(head, {}).setdefault(probe.name, {})
                        into[weights] = {
                            name: float(x[at]) for name, x in values.items() if not across or name in ACROSS
                        }
                progress(p * len(seen) + k + 1, len(probes) * len(seen))
    finally:
        model.train(training)
    return found


def _row(path: str, layer: int, head: int, scores: Scores, twin: Scores | None) -> dict[str, Any]:
    raw, clean = scores["natural"]["raw"], scores["natural"]["clean"]
    columns = {
        **{name: raw.get(name) for name in ("sinks", "moved", "previous", "duplicate", "spread", "distance")},
        **{name: clean.get(name) for name in ("positional", "convolution")},
        "induction": scores["repeated"]["raw"].get("induction") if "repeated" in scores else None,
    }
    columns = {name: None if x is None or x != x else x for name, x in columns.items()}
    named = kinds(scores, twin)
    place = {"path": path, "layer": layer, "head": head}
    return {**place, **columns, "labels": labels(named), "kinds": named, "scores": scores, "untrained": twin}


def run(model: nn.Module, inputs: Tensor) -> Any:
    """A model on ids or images; what reads a source and writes a target is given the same for both.

    >>> run(regard.nn.EncoderDecoder(6, heads=3, layers=1, vocab=11), torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 11])
    """
    first = next(model.parameters(), inputs)
    inputs = inputs.to(first.device, first.dtype if inputs.is_floating_point() else None)
    if is_pretrained(model):
        config: Any = model.config
        given: dict[str, Any] = {str(model.main_input_name): inputs}
        return model(**given, **({"decoder_input_ids": inputs} if config.is_encoder_decoder else {}))
    if any(isinstance(part, EncoderDecoder) for part in model.modules()):
        return model(inputs, inputs)
    return model(inputs)


def _tokenizer(model: nn.Module, tokenizer: Any) -> Any:
    found = getattr(model, "text", None) if tokenizer is None else tokenizer
    if found is None or isinstance(found, str) or not hasattr(found, "encode"):
        raise ValueError(f"{type(model).__name__} brings no tokenizer; give one: atlas(model, tokenizer)")
    return found


def vocabulary(model: nn.Module, reader: Reader) -> int:
    """How many tokens both the model and the tokenizer know.

    >>> from regard.models.text import Bytes
    >>> vocabulary(regard.nn.Decoder(6, heads=3, layers=1, vocab=100), Reader(Bytes()))
    100
    """
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        return min(len(reader), int(config.get_text_config().vocab_size))
    tables = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    return min(len(reader), max(tables, default=len(reader)))
