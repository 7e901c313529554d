"""Read a decoder's config: entries under our names, and what each layer has, windows and experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from regard._config_json import Config
from regard._errors import RegardError
from regard.budget._decoder_traits import DecoderTraits, Flag

WINDOW_TYPES = ("full_attention", "sliding_attention", "chunked_attention")


class NoFormulaError(RegardError):
    """The config describes a variant of its family that has no formula; it can be counted by walking."""


class LayerKind(NamedTuple):
    """What layers of one model may differ in: the window or chunk that a query sees, experts, rotary positions."""

    window: int | None
    chunk: int | None
    has_experts: bool
    is_rotary: bool


@dataclass(frozen=True)
class Entries:
    """The entries of a config under our names, with the defaults of the family."""

    config: Config
    traits: DecoderTraits

    def _own_name(self, name: str) -> str:
        """The name that this config uses; some families accept two."""
        own = self.traits.names.get(name, name)
        if own and self.config.get(own) is None and self.config.get(name) is not None:
            return name
        return own

    def has(self, name: str) -> bool:
        own = self._own_name(name)
        return self.config.get(own) is not None or self.traits.defaults.get(name) is not None

    def integer(self, name: str, default: int | None = None, least: int = 1) -> int:
        own = self._own_name(name)
        if default is None:
            default = self.traits.defaults.get(name)
        if default is None:
            return self.config.integer(own, least=least)
        return self.config.integer(own, default, least=least)

    def layers(self) -> int:
        return self.config.layer_count(self._own_name("num_hidden_layers"))

    def flag(self, value: Flag) -> bool:
        """A flag of the traits: its value, or that of the entry that it names."""
        if isinstance(value, bool):
            return value
        return self.config.boolean(value, bool(self.traits.defaults.get(value, False)))

    def indices(self, name: str) -> set[int] | None:
        """The layers that an entry lists; None if it is absent, or the family has no such entry."""
        listed = self.config.get(name)
        if listed is None:
            return None
        if not isinstance(listed, list) or not all(isinstance(x, int) and not isinstance(x, bool) for x in listed):
            raise self.config.error(name, "it must be a list of layers")
        return set(listed)


# --- layers ----------------------------------------------------------------------------------------------------------


def layer_windows(entries: Entries) -> list[tuple[int | None, int | None]]:
    """(window, chunk) of each layer."""
    config = entries.config
    layers = entries.layers()
    rule = entries.traits.windows
    if rule == "none":
        return [(None, None)] * layers
    if rule == "local":
        return _local_windows(entries, layers)
    if rule == "all":
        window = None
        if entries.has("sliding_window"):
            window = entries.integer("sliding_window")
        return [(window, None)] * layers

    types = config.get("layer_types")
    if types is None:
        types = _default_layer_types(entries, layers, rule)
    if not isinstance(types, list) or len(types) != layers or not all(isinstance(x, str) for x in types):
        raise config.error("layer_types", f"it must name {layers} layers")
    if not set(types) <= set(WINDOW_TYPES):
        raise NoFormulaError(
            f"{config.file}: layer_types has layers without formulas; known are {', '.join(WINDOW_TYPES)}"
        )
    seen: dict[str, tuple[int | None, int | None]] = {"full_attention": (None, None)}
    if "sliding_attention" in types:
        seen["sliding_attention"] = (entries.integer("sliding_window"), None)
    if "chunked_attention" in types:
        seen["chunked_attention"] = (None, entries.integer("attention_chunk_size"))
    return [seen[name] for name in types]


def _default_layer_types(entries: Entries, layers: int, rule: Any) -> list[str]:
    config = entries.config
    if rule == "qwen":
        if not config.boolean("use_sliding_window", False):
            return ["full_attention"] * layers
        if config.model_type == "qwen3_moe":
            return ["sliding_attention"] * layers
        most = config.integer("max_window_layers", 28, least=0)
        return _types(layers, "sliding_attention", lambda index: index % 2 == 0 and index < most)
    other = "sliding_attention"
    if config.model_type == "llama4_text":
        rotated = config.get("no_rope_layers")
        other = "chunked_attention"
        if rotated:
            # A list of 1 for each layer with rotary positions, which are those with chunks, and 0 for the others.
            if not isinstance(rotated, list) or len(rotated) != layers:
                raise config.error("no_rope_layers", f"it must be a list of {layers} numbers")
            return _types(layers, other, lambda index: bool(rotated[index]))
    if config.model_type == "exaone4" and config.get("sliding_window") is None:
        return ["full_attention"] * layers
    pattern = config.integer("sliding_window_pattern", rule)
    return _types(layers, other, lambda index: (index + 1) % pattern != 0)


def _types(layers: int, other: str, is_other: Callable[[int], bool]) -> list[str]:
    """The type of each layer: `other` where `is_other` says so, and full attention elsewhere."""
    types = ["full_attention"] * layers
    for index in range(layers):
        if is_other(index):
            types[index] = other
    return types


def _local_windows(entries: Entries, layers: int) -> list[tuple[int | None, int | None]]:
    """GPT-Neo's layers: ``attention_types`` is a list of (names, how often)."""
    config = entries.config
    groups = config.get("attention_types", [[["global", "local"], layers // 2]])
    window = config.integer("window_size", 256)
    names: list[str] = []
    try:
        for group, times in groups:
            # Longer lists are wrong, and must not be built: a file may ask for any length.
            for _ in range(min(int(times), layers + 1)):
                names += list(group[: layers + 1])
                if len(names) > layers:
                    break
    except (TypeError, ValueError, OverflowError):  # an infinite number overflows
        raise config.error("attention_types", "it must be a list of names and numbers") from None
    if len(names) != layers or not all(name in ("global", "local") for name in names):
        raise config.error("attention_types", f"it must name {layers} layers as global or local")
    seen: dict[str, tuple[int | None, int | None]] = {"local": (window, None), "global": (None, None)}
    return [seen[name] for name in names]


def expert_layers(entries: Entries) -> list[bool]:
    """Whether each layer has experts."""
    layers = entries.layers()
    experts = entries.traits.experts
    if experts is None:
        return [False] * layers
    # Some families list the layers with experts, others describe them by up to three rules.
    chosen = entries.indices(experts.expert_layers)
    if chosen is not None:
        return [index in chosen for index in range(layers)]
    first = 0
    if experts.first_dense and entries.has(experts.first_dense):
        first = entries.integer(experts.first_dense, least=0)
    step = 1
    if experts.step:
        step = entries.integer(experts.step)
    dense = entries.indices(experts.dense_layers) or set()
    has_experts = []
    for index in range(layers):
        is_dense = index < first or (index + 1) % step != 0 or index in dense
        has_experts.append(not is_dense)
    return has_experts
