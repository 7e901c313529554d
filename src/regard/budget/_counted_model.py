"""Models without a formula: `transformers` builds them from a config without data, and they are counted by walking.

Nothing of the file is executed: only classes that are part of transformers are built, on the meta device, where tensors
have shapes and no memory. The number of modules and the time are limited.
"""

from __future__ import annotations

import copy
import re
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from regard._config_json import MOST_LAYERS, Config
from regard._errors import RegardError
from regard.budget._count_live_model import count

# Limits of what is built from a file. The largest published models have fewer than 100,000 modules.
MOST_MODULES = 200_000
MOST_SECONDS = 60.0
MOST_NESTED = 8
MOST_ENTRIES = 100_000
# Configs make lists as long as the number of layers before a module is built, so these entries are limited by name.
MOST_EXPERTS = 2**16
MOST_LABELS = 2**20  # every config class makes two dictionaries with an entry for each label
LARGEST_SIZE = 2**24  # longer than any vocabulary or context
LISTED_NAMES = re.compile("(layers?|depths?|blocks|stages|first_k_dense_replace)$")
NOT_SIZES = re.compile("theta|seed|(^|_)(ids?|index|token|base|value|factor|eps|freq)(_|$)|label")

# Entries that choose how a model runs or where code and weights come from, not what the model is.
IGNORED = frozenset(
    {
        *("auto_map", "dtype", "torch_dtype", "quantization_config", "compression_config", "attn_implementation"),
        *("_attn_implementation", "_attn_implementation_internal", "experts_implementation", "_name_or_path"),
        *("_experts_implementation", "_experts_implementation_internal", "transformers_version", "trust_remote_code"),
    }
)
# Names of the entries that hold the number of experts, and how many of them a token uses.
EXPERT_ENTRIES = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "ffn_num_experts")
CHOSEN_ENTRIES = (
    *("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts"),
    "experts_per_token",
)


@dataclass(frozen=True)
class CountedModel:
    """A model that has no formula. ``regard.budget.plan`` counts it by walking, at each length anew.

    - `title`, `architecture`: the name to print, and the class of transformers that was built.
    - `parameters`: all parameters; shared weights count once.
    - `active_parameters`: all but those of experts that a token does not use; equal to `parameters` without experts;
      None if there are experts, but not how many of them a token uses.
    - `reads`: "text", "text and source", "images", "text and images", or the name of another input; then FLOPs are
      unknown.
    - `parts_not_run`: parts of the model that a call on text alone does not run, for example an image tower.
    - `context_length`: as in `Model`.
    - `reason`: why a model of a family that has formulas is counted, and why the class is not the one that the config
      names; "" if neither is so.
    - `untied_parameters`: those among `parameters` that the checkpoint has, but not the module: an output matrix of its
      own, which the config asks for (``tie_word_embeddings: false``) and the class of transformers does not build.

    >>> sizes = {"hidden_size": 24, "num_hidden_layers": 2, "vocab_size": 61}
    >>> model = regard.budget.from_config({"model_type": "mamba", **sizes})
    >>> type(model).__name__, model.architecture, model.parameters
    ('CountedModel', 'MambaForCausalLM', 14112)
    """

    title: str
    architecture: str
    parameters: int
    active_parameters: int | None
    reads: str
    parts_not_run: tuple[str, ...]
    context_length: int | None
    module: nn.Module = field(repr=False, compare=False)
    reason: str = ""
    untied_parameters: int = 0

    @property
    def reads_tokens(self) -> bool:
        """Whether the model reads text, so that its costs depend on n."""
        return self.reads in ("text", "text and source", "text and images")


def build_counted(config: Config, title: str | None = None, reason: str = "") -> CountedModel:
    """Build the model of a config on the meta device, and count its parameters.

    - `reason`: why it has no formula, if its family has one.
    """
    family = config.model_type
    _check_entries(config, family)
    module, other_class = _build_module(config, family)
    untied = _untied_parameters(config, module)
    parameters = count(module).parameters + untied
    architecture = type(module).__name__
    if other_class:
        reason = "; ".join(filter(None, (reason, other_class)))
    return CountedModel(
        title=title or architecture,
        architecture=architecture,
        parameters=parameters,
        active_parameters=_active_parameters(module, parameters),
        reads=_input_kind(module),
        parts_not_run=_parts_not_run(module),
        context_length=_context_length(module),
        module=module,
        reason=reason,
        untied_parameters=untied,
    )


def with_defaults(config: Config) -> Config | None:
    """The config with the entries that its class in transformers adds; None if that is not possible."""
    family = config.model_type
    try:
        import transformers
    except ImportError:
        return None
    if family not in transformers.CONFIG_MAPPING:
        return None
    _check_entries(config, family)
    entries = _without_ignored(config)
    entries.pop("model_type")
    try:
        with warnings.catch_warnings(), quiet_transformers(transformers):
            warnings.simplefilter("ignore")
            complete = Config(transformers.CONFIG_MAPPING[family](**entries).to_dict())
    except MemoryError:
        raise RegardError(f"{config.file}: not enough memory for the config of a {family[:40]}") from None
    except Exception:  # the class checks values with errors of all kinds; the formulas name what they need
        return None
    complete["model_type"] = family
    if config.get("architectures"):
        complete["architectures"] = config["architectures"]
    # Some classes set this entry to true whatever the file says; see `_untied_parameters`.
    if config.get("tie_word_embeddings") is not None:
        complete["tie_word_embeddings"] = config["tie_word_embeddings"]
    complete.file = config.file
    return complete


# --- building --------------------------------------------------------------------------------------------------------


def import_transformers(family: str) -> Any:
    try:
        import transformers
    except ImportError:
        raise ImportError(
            f"model_type {family!r} has no formula; to count it, transformers must be installed: "
            "pip install 'regard[hf]'"
        ) from None
    return transformers


def _check_entries(config: Config, family: str) -> None:
    """Raise an error for sizes that no model has, before anything is built from them."""
    for name in ("backbone", "use_timm_backbone", "use_pretrained_backbone"):
        # Such a backbone would be read from another place than this config.
        config.refuse(name, "models with a backbone of another library cannot be counted")
    entries = 0
    nested: list[tuple[str, Any, int]] = [(name, value, 0) for name, value in config.items()]
    while nested:
        name, value, depth = nested.pop()
        entries += 1
        if entries > MOST_ENTRIES or depth > MOST_NESTED:
            raise RegardError(
                f"{config.file}: a {family[:40]} has {name[:40]} as its entry {entries:,}, {depth} levels deep; "
                f"at most {MOST_ENTRIES:,} entries and {MOST_NESTED} levels are accepted"
            )
        if isinstance(value, Mapping):
            nested += [(str(key), each, depth + 1) for key, each in value.items()]
        elif isinstance(value, list):
            nested += [(name, each, depth + 1) for each in value]
        elif isinstance(value, int) and abs(value) > _largest(name):
            raise RegardError(
                f"{config.file}: {name[:40]} is {str(value)[:40]}; at most {_largest(name):,} is accepted"
            )


def _largest(name: str) -> int:
    """The largest integer that is accepted for an entry of this name."""
    if LISTED_NAMES.search(name):
        return MOST_LAYERS
    if "experts" in name:
        return MOST_EXPERTS
    if name == "num_labels":
        return MOST_LABELS
    if NOT_SIZES.search(name):
        return 2**31 - 1
    return LARGEST_SIZE


def _build_module(config: Config, family: str) -> tuple[nn.Module, str]:
    """The model on the meta device, and why its class is not the one that the config names; "" if it is."""
    transformers = import_transformers(family)
    if family not in transformers.CONFIG_MAPPING:
        raise RegardError(
            f"{config.file}: model_type is {family[:60]!r}; it has no formula, and transformers "
            f"{transformers.__version__} does not know it either"
        )
    entries = _without_ignored(config)
    entries.pop("model_type")
    try:
        with warnings.catch_warnings(), quiet_transformers(transformers), _limited(config), torch.device("meta"):
            warnings.simplefilter("ignore")
            built_config = transformers.CONFIG_MAPPING[family](**entries)
            model_class, other_class = _model_class(transformers, built_config, config)
            # Experts as batched products of the experts that are used: other ways read values, or need bfloat16.
            built_config._experts_implementation = "batched_mm"
            module = model_class._from_config(built_config, dtype=torch.float32)
    except RegardError:
        raise
    except Exception as error:  # any error of transformers, which checks some values only while it builds
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = " ".join(lines)[:200] or type(error).__name__
        raise RegardError(f"{config.file}: transformers cannot build this {family[:40]}: {reason}") from None
    return module.eval(), other_class


def _without_ignored(entries: Mapping[str, Any]) -> dict[str, Any]:
    """The entries without those of `IGNORED`, at every level."""
    kept: dict[str, Any] = {}
    for name, value in entries.items():
        if name in IGNORED:
            continue
        kept[name] = _without_ignored(value) if isinstance(value, Mapping) else copy.deepcopy(value)
    return kept


def _model_class(transformers: Any, built_config: Any, config: Config) -> tuple[Any, str]:
    """The class that a config names, or else that of its family; and why it is not the one that the config names."""
    architecture = config.architecture
    if not architecture:
        return _default_class(transformers, built_config, config), ""
    named: Any = None
    is_name = re.fullmatch(r"[A-Za-z0-9_]{1,80}", architecture) is not None
    if is_name:
        named = _named_class(transformers, architecture)
    if named is None and is_name:
        default = _default_class(transformers, built_config, config)
        return default, f"transformers has no {architecture[:60]}, so its {default.__name__} is counted"
    is_model = isinstance(named, type) and issubclass(named, transformers.PreTrainedModel)
    if not is_model or named.config_class is not type(built_config):
        raise RegardError(
            f"{config.file}: architectures is {architecture[:60]!r}; it must be a class of transformers "
            f"for model_type {config.model_type!r}"
        )
    return named, ""


def _named_class(transformers: Any, architecture: str) -> Any:
    """What transformers has under this name; None if it has nothing.

    Some configs were published before transformers had the class, and write it in other letters: PhiMoEForCausalLM.
    """
    exact = getattr(transformers, architecture, None)
    if exact is not None:
        return exact
    for name in dir(transformers):
        if name.lower() == architecture.lower():
            return getattr(transformers, name)
    return None


def _default_class(transformers: Any, built_config: Any, config: Config) -> Any:
    """The class of a family that generates text, or else the bare model."""
    # Models of images and text first: they may be listed as generators of text too, with the class of their text part.
    tasks = ["IMAGE_TEXT_TO_TEXT", "CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM"]
    if getattr(built_config, "is_encoder_decoder", False):
        # The generator of text of such a family may be its decoder alone.
        tasks = ["IMAGE_TEXT_TO_TEXT", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "CAUSAL_LM"]
    for mapping in (*(f"MODEL_FOR_{task}_MAPPING" for task in tasks), "MODEL_MAPPING"):
        classes = getattr(transformers, mapping)
        if type(built_config) in classes:
            return classes[type(built_config)]
    raise RegardError(f"{config.file}: architectures is missing; transformers has no model for {config.model_type!r}")


@contextmanager
def quiet_transformers(transformers: Any) -> Iterator[None]:
    """Without messages of transformers on standard error, and without network."""
    from huggingface_hub import constants

    level = transformers.logging.get_verbosity()
    offline = constants.HF_HUB_OFFLINE
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
        constants.HF_HUB_OFFLINE = offline


@contextmanager
def _limited(config: Config) -> Iterator[None]:
    """Stop a build that makes too many modules, or takes too long: a file may ask for 2³¹ layers."""
    modules = 0
    last = time.monotonic() + MOST_SECONDS

    def check(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        nonlocal modules
        modules += 1
        if modules > MOST_MODULES:
            raise RegardError(f"{config.file}: its model has more than {MOST_MODULES:,} modules; that is the limit")
        if time.monotonic() > last:
            raise RegardError(
                f"{config.file}: its model takes more than {MOST_SECONDS:.0f} s to build; that is the limit"
            )

    hook = register_module_module_registration_hook(check)
    try:
        yield
    finally:
        hook.remove()


# --- parameters ------------------------------------------------------------------------------------------------------


def _untied_parameters(config: Config, module: nn.Module) -> int:
    """The size of an output matrix of its own that the config asks for, and that the class ties to the embedding.

    The T5 family of transformers 5 ties them whatever the config says; the published checkpoints have both.
    """
    if config.get("tie_word_embeddings") is not False or not getattr(module.config, "tie_word_embeddings", False):
        return 0
    model: Any = module
    try:
        embedding = model.get_input_embeddings()
        output = model.get_output_embeddings()
    except NotImplementedError:  # a model that does not read tokens
        return 0
    weight = getattr(output, "weight", None)
    is_shared = weight is getattr(embedding, "weight", None)
    return weight.numel() if isinstance(weight, Tensor) and is_shared else 0


def _active_parameters(module: nn.Module, parameters: int) -> int | None:
    """All parameters but those of the experts that a token does not use; None if that number is unknown."""
    configs = module_configs(module)
    experts = _expert_modules(module)
    if not experts:
        declared = any(first_entry(config, EXPERT_ENTRIES) not in (None, 0, 1) for config in configs)
        # A config that speaks of experts, and no module that can be told to hold them: do not guess.
        return None if declared else parameters
    totals = {first_entry(config, EXPERT_ENTRIES) for config in configs} - {None, 0}
    chosen = {first_entry(config, CHOSEN_ENTRIES) for config in configs} - {None, 0}
    if len(totals) != 1 or len(chosen) != 1:
        return None
    (total,) = totals
    (used,) = chosen
    assert total is not None and used is not None

    unused = 0
    for expert in experts:
        held = sum(parameter.numel() for parameter in expert.parameters())
        if held % total:
            return None
        unused += held // total * max(0, total - used)
    return parameters - unused


def _expert_modules(module: nn.Module) -> list[nn.Module]:
    """The modules that hold all experts of one layer."""
    found: list[nn.Module] = []
    prefixes: list[str] = []
    for path, child in module.named_modules():
        if any(path.startswith(prefix) for prefix in prefixes):
            continue  # inside experts
        is_named = path.rpartition(".")[2] == "experts" or type(child).__name__.endswith("Experts")
        if is_named and any(True for _ in child.parameters()):
            found.append(child)
            prefixes.append(path + ".")
    return found


def module_configs(module: nn.Module) -> list[Any]:
    """The config of a model, and those of its parts."""
    own = module.config
    parts = [getattr(own, name, None) for name in getattr(own, "sub_configs", {})]
    return [own, *[part for part in parts if part is not None]]


def first_entry(config: Any, names: tuple[str, ...]) -> int | None:
    """The first of these entries that a config has as an integer."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


# --- what it reads ---------------------------------------------------------------------------------------------------


def _input_kind(module: nn.Module) -> str:
    name = str(getattr(module, "main_input_name", "input_ids"))
    if name == "pixel_values":
        return "images"
    if hasattr(module, "get_text_features") and hasattr(module, "get_image_features"):
        return "text and images"
    if name != "input_ids":
        return name
    if getattr(module.config, "is_encoder_decoder", False):
        return "text and source"
    return "text"


def _parts_not_run(module: nn.Module) -> tuple[str, ...]:
    """The names of the parts that read images, sound or video, if the main input is text."""
    if _input_kind(module) not in ("text", "text and source"):
        return ()
    names = getattr(module.config, "sub_configs", {})
    return tuple(name.removesuffix("_config") for name in names if re.match("vision|audio|video|speech", name))


def _context_length(module: nn.Module) -> int | None:
    for config in module_configs(module):
        length = first_entry(config, ("max_position_embeddings", "n_positions", "max_seq_len"))
        if length is not None and length > 0:
            return length
    return None
