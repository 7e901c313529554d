"""Check one architecture: build it tiny, run it on eager attention and within ``regard.watch``, and compare."""

from __future__ import annotations

import copy
import inspect
import re
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard._errors import RegardError
from regard._observables import Observe
from regard.interp._recording import Recording
from regard.interp._watch import watch
from regard.zoo._architectures import Architecture, find_class
from regard.zoo._comparison import MAP_SIZE, output_difference, recording_difference, unseen_places
from regard.zoo._inputs import BATCH, LOWEST_TOKEN, input_candidates
from regard.zoo._reference import Reference, attention_classes, captured
from regard.zoo._results import Result
from regard.zoo._tiny_config import LEVELS, ONLY_DEPTH
from regard.zoo._tiny_models import tiny_model_config

OBSERVE = Observe(map=MAP_SIZE, key_mass=True)
PACKAGE = Path(__file__).resolve().parent.parent
# Padding of the first and of the second text of a padded batch.
LEFT_PADDING = 2
RIGHT_PADDING = 3
EAGER_DIFFERS = "compared with torch's attention function: the model's own eager attention gives another output"
# What watch warns of: places that it does not recognise, or nothing at all.
WARNINGS = ("does not recognise", "nothing was recorded")
LONGEST_REASON = 300
MOST_PARAMETERS = 120_000_000


def check_architecture(architecture: Architecture) -> Result:
    """Check one architecture; whatever goes wrong is part of the result."""
    result = Result(architecture.name, architecture.class_name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            # Whatever fails here fails without regard.
            eager, config, inputs = build_runnable(architecture)
        except Exception as error:
            return result.finished("not built", _reason(error))
        # Users load models with their default attention, so that is what is watched.
        try:
            watched = build(architecture, config, None)
            watched.load_state_dict(eager.state_dict())
        except Exception:
            # The architecture has eager attention alone.
            watched = eager
        result.inputs = sorted(inputs)
        try:
            _check_batch(result, eager, watched, inputs, None)
            padded = _padded(eager, inputs)
            if padded is not None and result.outcome in ("exact", "partly"):
                plain = result
                result = copy.deepcopy(plain)
                _check_batch(result, eager, watched, padded, padded["attention_mask"].bool())
                # What was not seen in one of the batches was not seen.
                if plain.outcome == "partly" and result.outcome == "exact":
                    result = plain
        except RegardError as error:
            return result.finished("refused", _reason(error))
        except Exception as error:
            return result.finished("error", f"{_owner(error)}: {_reason(error)}")
    return result


def build_runnable(architecture: Architecture) -> tuple[Any, Any, dict[str, Any]]:
    """A tiny eager model of an architecture, its configuration, and inputs that it accepts.

    Several configurations and inputs are tried. Raises the first error if the model runs with none of them.
    """
    model_class = find_class(architecture)
    first: Exception | None = None
    for level in LEVELS:
        try:
            config = tiny_model_config(model_class, architecture.name, level)
            if level == ONLY_DEPTH and _parameter_count(model_class, config) > MOST_PARAMETERS:
                continue
            model = build(architecture, config, "eager")
            candidates = list(input_candidates(model, architecture.name))
        except Exception as error:
            first = first if first is not None else error
            continue
        for inputs in candidates:
            try:
                with _same_random_numbers():
                    model(**copy.deepcopy(inputs))
            except Exception as error:
                first = first if first is not None else error
            else:
                return model, config, inputs
    assert first is not None
    raise first


def build(architecture: Architecture, config: Any, implementation: str | None) -> Any:
    """The model of a configuration with random weights, in eval mode."""
    # Configurations remember the attention that they were built with.
    torch.manual_seed(0)
    options = {}
    if implementation is not None:
        options["attn_implementation"] = implementation
    model = find_class(architecture)._from_config(copy.deepcopy(config), **options).eval()
    _enlarge_weights(model)
    return model


def _parameter_count(model_class: Any, config: Any) -> int:
    """The number of parameters, without memory for them."""
    with torch.device("meta"):
        model = model_class._from_config(copy.deepcopy(config), attn_implementation="eager")
    return sum(x.numel() for x in model.parameters())


def _enlarge_weights(model: nn.Module) -> None:
    """Give linear layers larger random weights: with the usual initial ones all attention weights are nearly equal."""
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight.is_floating_point() and module.weight.numel():
            with torch.no_grad():
                module.weight.normal_(0, module.in_features**-0.5, generator=generator)


def run_eager(model: nn.Module, inputs: dict[str, Any]) -> tuple[Any, Reference]:
    """The output of a model on eager attention, and the weights that it computes."""
    with _same_random_numbers(), captured(model) as reference:
        expected = model(**copy.deepcopy(inputs))
    return expected, reference


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Some models draw random numbers while they run."""
    torch.manual_seed(2)
    with torch.no_grad():
        yield


def _check_batch(
    result: Result, eager: nn.Module, watched: nn.Module, inputs: dict[str, Any], real: Tensor | None
) -> None:
    """Compare with eager attention; where the model's own default differs from it, too, compare with that."""
    expected, reference = run_eager(eager, inputs)
    _check_inputs(result, watched, inputs, expected, reference, real)
    if result.outcome == "differs" and watched is not eager:
        default, default_reference = run_eager(watched, inputs)
        if output_difference(expected, default, real) is not None:
            _check_inputs(result, watched, inputs, default, default_reference, real)
            # Where nothing else is to be said, say why this is not eager attention.
            if not result.reason:
                result.reason = EAGER_DIFFERS


def _check_inputs(
    result: Result, model: nn.Module, inputs: dict[str, Any], expected: Any, reference: Reference, real: Tensor | None
) -> None:
    """Watch the model on these inputs, compare, and write what was found into the result."""
    batch = "plain" if real is None else "padded"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with _same_random_numbers(), watch(model, OBSERVE) as recording:
            actual = model(**copy.deepcopy(inputs))
    messages = [str(entry.message) for entry in caught]
    warned = " ".join(text for text in messages if any(words in text for words in WARNINGS))
    unseen = unseen_places(recording, reference)
    _count_layers(result, recording, unseen)
    if not recording.calls and not unseen:
        names = attention_classes(model)
        if names:
            result.finished("other attention", f"no softmax over keys: {', '.join(names)}")
        else:
            result.finished("no attention", "")
        return
    # Outputs first: if they differ, the observables of later layers differ for that reason alone.
    problem = output_difference(expected, actual, real)
    if problem is None:
        problem = recording_difference(recording, reference, real, unseen)
    if problem is not None:
        result.finished("differs", f"{batch}: {problem}")
    elif unseen or _names_others(warned, recording):
        silent = "" if warned else "without a warning "
        places = ", ".join(unseen[:3]) or warned.rpartition(": ")[2]
        result.finished("partly", f"not seen {silent}({len(unseen)} places): {places}")
    else:
        result.finished("exact", "")
        result.batches.append(batch)


def _names_others(warned: str, recording: Recording) -> bool:
    """Whether a warning of ``watch`` names a module that was not recorded.

    The weights of the modules that were recorded are compared, call by call.
    """
    if "does not recognise" not in warned:
        return False
    paths = warned.rpartition(": ")[2].removesuffix(" …").split(", ")
    return any(path not in recording.calls for path in paths)


def _count_layers(result: Result, recording: Recording, unseen: list[str]) -> None:
    how = recording.metadata.get("how", {})
    result.how = sorted(set(how.values()))
    result.layers = len(recording.calls)
    result.unseen = unseen


def _padded(eager: nn.Module, inputs: dict[str, Any]) -> dict[str, Any] | None:
    """The same inputs with padding; None if the model does not take a mask of its texts."""
    ids = inputs.get("input_ids")
    names = inspect.signature(eager.forward).parameters
    if not isinstance(ids, Tensor) or "attention_mask" not in names or ids.ndim != 2:
        return None
    # Several rows of codes may belong to one batch entry.
    if len(ids) != BATCH:
        return None
    both_sides = torch.ones_like(ids)
    both_sides[0, :LEFT_PADDING] = 0
    both_sides[1, -RIGHT_PADDING:] = 0
    right = torch.ones_like(ids)
    right[1, -RIGHT_PADDING:] = 0
    # Some models accept padding on the right only, and some none, which is no matter of regard.
    for mask in (both_sides, right):
        # Some models take the output at the largest token id, which must not be padding.
        padding_ids = ids.masked_fill(mask == 0, LOWEST_TOKEN)
        padded = {**inputs, "input_ids": padding_ids, "attention_mask": mask}
        try:
            with _same_random_numbers():
                eager(**copy.deepcopy(padded))
        except Exception:
            continue
        return padded
    return None


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    missing = re.search(r"requires the (\S+) library", text)
    if missing:
        return f"it needs {missing[1]}, which is not installed"
    # torch's message is about the size of one allocation.
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in text:
        return "it needs more memory than the limit"
    if isinstance(error, RegardError):
        return text[:LONGEST_REASON]
    return f"{type(error).__name__}: {text}"[:LONGEST_REASON]


def _owner(error: BaseException) -> str:
    """Whose code raised an error: the last frame that is not torch's decides."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/torch/" not in frame.filename]
    if own and Path(own[-1].filename).is_relative_to(PACKAGE):
        return f"in {Path(own[-1].filename).name}:{own[-1].lineno}"
    return "in the model"
