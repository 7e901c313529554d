"""Build a decoder from a config and the traits of its family: layers of equal kind become one group of blocks."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from regard._config_json import Config
from regard._errors import RegardError
from regard.budget._attention_parts import Attention
from regard.budget._decoder_entries import Entries, LayerKind, NoFormulaError, expert_layers, layer_windows
from regard.budget._decoder_families import DECODERS
from regard.budget._decoder_traits import DecoderTraits, ExpertTraits
from regard.budget._experts_part import Experts
from regard.budget._latent_attention import LatentAttention
from regard.budget._model import Model, PlacedPart, Stack
from regard.budget._parts import Dropout, Embedding, FeedForward, Linear, Norm, Part, Table, Weight


class _Sizes(NamedTuple):
    """Sizes that all layers share."""

    d: int
    heads: int
    kv_heads: int
    d_key: int
    hidden: int | None  # None if the family has no dense feed-forward network


def decoder_from_config(config: Config) -> Model:
    """Build the decoder that a config of one of `DECODERS` describes."""
    traits = DECODERS[config.model_type]
    entries = Entries(config, traits)
    architecture = _check_supported(config, traits)
    traits = _falcon_traits(entries) if config.model_type == "falcon" else traits
    entries = Entries(config, traits)
    sizes = _sizes(entries)

    kinds = []
    layers_of = zip(layer_windows(entries), expert_layers(entries), _rotary_layers(entries), strict=True)
    for (window, chunk), has_experts, is_rotary in layers_of:
        kinds.append(LayerKind(window, chunk, has_experts, is_rotary))
    blocks: list[PlacedPart] = []
    for kind, layers in Counter(kinds).items():
        for name, part in _block_parts(entries, sizes, kind):
            blocks.append(PlacedPart(name, part, layers))

    vocab = entries.integer("vocab_size")
    order: Literal["pre", "post"] = "pre"
    if config.model_type == "opt" and not config.boolean("do_layer_norm_before", True):
        order = "post"
        blocks = _norms_last(blocks)
    before, max_tokens = _parts_before(entries, sizes, vocab)
    after = _parts_after(entries, sizes, vocab, has_norm=order == "pre")
    logits: int | None = vocab
    if architecture == traits.prefix + traits.bare:
        after = tuple(placed for placed in after if placed.name != "logits")
        logits = None
    stack = Stack("decoder", before, tuple(blocks), after, order, len(kinds))
    title = architecture or traits.prefix + "ForCausalLM"
    return Model(title, "decoder", sizes.d, (stack,), logits, max_tokens=max_tokens, architecture=title)


def decoder_context_length(config: Config) -> int | None:
    """The length that a decoder's config names; None if positions limit it, or there is no such entry."""
    traits = DECODERS[config.model_type]
    entries = Entries(config, traits)
    if traits.position == "learned" or not entries.has("max_position_embeddings"):
        return None
    return entries.integer("max_position_embeddings")


def _check_supported(config: Config, traits: DecoderTraits) -> str:
    """Return the class that the config names; raise if there are no formulas for it."""
    if config.model_type == "mpt":
        _check_mpt(config)
    # Some configs were published before transformers had the class, and write it in other letters.
    classes = ("", f"{traits.prefix}ForCausalLM", traits.prefix + traits.bare)
    named = [name for name in classes if name.lower() == config.architecture.lower()]
    if not named:
        raise NoFormulaError(
            f"{config.file}: architectures is {config.architecture[:60]}; formulas exist for {classes[1]} "
            f"and {classes[2]}"
        )
    for name in traits.unsupported:
        if config.get(name):
            raise NoFormulaError(f"{config.file}: {name} is {str(config.get(name))[:40]}; there is no formula for it")
    return named[0]


def _check_mpt(config: Config) -> None:
    """Raise for entries of an MPT that change its parameters or positions, and that transformers leaves out too."""
    attention = config.section("attn_config")
    for name, only in (("qk_ln", False), ("alibi", True), ("attn_type", "multihead_attention")):
        if attention.get(name) not in (None, only):
            given = repr(attention[name])[:40]
            raise RegardError(
                f"{config.file}: {name} of attn_config is {given}; only {json.dumps(only)} can be counted, because "
                "transformers ignores other values"
            )
    config.require("no_bias", True)


def _falcon_traits(entries: Entries) -> DecoderTraits:
    """The traits of a Falcon: its three architectures differ in norms, key heads and positions."""
    config = entries.config
    traits = entries.traits
    if config.boolean("alibi", False):
        traits = replace(traits, position="alibi")
    groups = config.boolean("new_decoder_architecture", False)
    heads = config.integer("num_attention_heads")
    if groups:
        kv_heads = config.integer("num_kv_heads", heads)
    else:
        kv_heads = 1 if config.boolean("multi_query", True) else heads
    norms_in_parallel = config.integer("num_ln_in_parallel_attn", 2 if groups else 1)
    if config.boolean("parallel_attn", True) and norms_in_parallel == 1:
        traits = replace(traits, norms="shared")
    # The entry of this name, which other families have, says nothing here.
    names = {**traits.names, "num_key_value_heads": "num_kv_heads"}
    if not groups:
        names["num_key_value_heads"] = ""
    return replace(traits, names=names, defaults={**traits.defaults, "num_key_value_heads": kv_heads})


def _sizes(entries: Entries) -> _Sizes:
    d = entries.integer("hidden_size")
    heads = entries.integer("num_attention_heads")
    kv_heads = heads
    if entries.traits.groups:
        kv_heads = entries.integer("num_key_value_heads", _default_kv_heads(entries, heads))
    if heads % kv_heads:
        raise RegardError(
            f"{entries.config.file}: num_key_value_heads must divide num_attention_heads={heads}, got {kv_heads}"
        )
    if entries.has("head_dim"):
        d_key = entries.integer("head_dim")
    else:
        if d % heads and not entries.traits.latent:
            raise RegardError(
                f"{entries.config.file}: num_attention_heads must divide hidden_size={d} without head_dim, got {heads}"
            )
        d_key = d // heads
    hidden = None
    if entries.traits.experts is None or entries.has("intermediate_size"):
        hidden = entries.integer("intermediate_size", _default_hidden(entries, d))
    return _Sizes(d, heads, kv_heads, d_key, hidden)


def _default_kv_heads(entries: Entries, heads: int) -> int:
    if entries.config.model_type == "gpt_bigcode":
        return 1 if entries.config.boolean("multi_query", True) else heads
    default = entries.traits.defaults.get("num_key_value_heads", heads)
    assert isinstance(default, int)
    return default


def _default_hidden(entries: Entries, d: int) -> int | None:
    """The hidden width of families that may leave it out: 4·d, or another multiple that the config names."""
    if entries.config.model_type == "mpt":
        return d * entries.config.integer("expansion_ratio", 4)
    if entries.config.model_type in ("gptj", "codegen", "gpt_neo", "gpt_bigcode", "bloom", "falcon"):
        return 4 * d
    return None


def _rotary_layers(entries: Entries) -> list[bool]:
    """Whether each layer has rotary positions; SmolLM3 leaves them out in some layers."""
    if entries.config.model_type == "smollm3":
        return entries.config.rotary_layers()
    return [entries.traits.position == "rotary"] * entries.layers()


# --- parts -----------------------------------------------------------------------------------------------------------


def _norm(entries: Entries, d: int) -> Norm:
    traits = entries.traits
    return Norm(d, traits.norm, traits.norm_bias, entries.flag(traits.norm_learned))


def _block_parts(entries: Entries, sizes: _Sizes, kind: LayerKind) -> list[tuple[str, Part]]:
    """The parts of one block of this kind, by name, in the order in which they run."""
    norm = _norm(entries, sizes.d)
    attention = ("attention", _attention(entries, sizes, kind))
    forward: tuple[str, Part] = ("feed-forward", _feed_forward(entries, sizes))
    if kind.has_experts and entries.traits.experts is not None:
        forward = ("experts", _experts(entries, entries.traits.experts, sizes))
    before = ("attention norm", norm)
    between = ("feed-forward norm", norm)
    places = entries.traits.norms
    if places == "shared":
        return [("norm", norm), attention, forward]
    if places == "output":
        return [attention, before, forward, between]
    if places == "sandwich":
        outputs = (("attention output norm", norm), ("feed-forward output norm", norm))
        return [before, attention, outputs[0], between, forward, outputs[1]]
    return [before, attention, between, forward]


def _norms_last(blocks: list[PlacedPart]) -> list[PlacedPart]:
    """The parts of a block with each norm after its part."""
    ordered: list[PlacedPart] = []
    for norm, part in zip(blocks[::2], blocks[1::2], strict=True):
        ordered += [part, norm]
    return ordered


def _attention(entries: Entries, sizes: _Sizes, kind: LayerKind) -> Part:
    traits = entries.traits
    options: dict[str, Any] = {
        "qkv_bias": entries.flag(traits.qkv_bias),
        "out_bias": entries.flag(traits.out_bias),
        "causal": True,
        "window": kind.window,
        "chunk": kind.chunk,
        "rolling": traits.windows != "local",  # transformers' cache does not know GPT-Neo's windows
        "sinks": traits.sinks,
        "rotary": kind.is_rotary,
        "dropout": _has_dropout(entries),
    }
    if traits.latent:
        return _latent_attention(entries, sizes, options)
    norms: tuple[Weight, ...] = ()
    has_norm = not traits.qk_norm_entry or entries.flag(traits.qk_norm_entry)
    if traits.qk_norm != "none" and has_norm:
        norms = _query_norms(traits.qk_norm, sizes)
        options["qk_norm"] = traits.qk_norm == "head"
    d_key = sizes.d_key
    return Attention(sizes.d, sizes.heads, d_key, d_key, sizes.d, sizes.kv_heads, norms=norms, **options)


def _query_norms(place: str, sizes: _Sizes) -> tuple[Weight, ...]:
    """The weights of the norms of queries and keys; () if ``Attention.qk_norm`` counts them."""
    d_key = sizes.d_key
    if place == "full":
        return (Weight("q_norm", (sizes.heads * d_key,)), Weight("k_norm", (sizes.kv_heads * d_key,)))
    if place == "per head":
        return (Weight("q_norm", (sizes.heads, d_key)), Weight("k_norm", (sizes.kv_heads, d_key)))
    if place == "layer":
        return (Weight("q_norm", (2, d_key)), Weight("k_norm", (2, d_key)))
    return ()


def _latent_attention(entries: Entries, sizes: _Sizes, options: dict[str, Any]) -> LatentAttention:
    config = entries.config
    q_rank = 0
    # Here null does not count as absent: it means that queries have no latent vector.
    if config.get("q_lora_rank") is not None or "q_lora_rank" not in config:
        q_rank = entries.integer("q_lora_rank")
    d_rope = entries.integer("qk_rope_head_dim")
    return LatentAttention(
        sizes.d,
        sizes.heads,
        entries.integer("qk_nope_head_dim") + d_rope,
        entries.integer("v_head_dim"),
        sizes.d,
        sizes.heads,
        q_rank=q_rank,
        kv_rank=entries.integer("kv_lora_rank"),
        d_rope=d_rope,
        **options,
    )


def _feed_forward(entries: Entries, sizes: _Sizes) -> FeedForward:
    traits = entries.traits
    hidden = sizes.hidden
    if traits.experts is not None and traits.experts.dense_hidden != "intermediate_size":
        hidden = entries.integer(traits.experts.dense_hidden, sizes.hidden)
    return FeedForward(sizes.d, hidden or 1, traits.gated, entries.flag(traits.mlp_bias), _has_dropout(entries))


def _experts(entries: Entries, names: ExpertTraits, sizes: _Sizes) -> Experts:
    hidden = entries.integer(names.hidden)
    experts = entries.integer(_experts_entry(entries, names))
    used = entries.integer(names.used)
    if used > experts:
        raise RegardError(f"{entries.config.file}: {names.used} must be at most {names.experts}={experts}, got {used}")
    shared = 0
    if names.shared:
        shared = entries.integer(names.shared, least=0)
    elif names.shared_count and entries.has(names.shared_count):
        shared = hidden * entries.integer(names.shared_count, least=0)
    return Experts(
        sizes.d, hidden, experts, used, names.bias, names.router_bias, shared, names.shared_gate and shared > 0
    )


def _experts_entry(entries: Entries, names: ExpertTraits) -> str:
    """The entry with the number of experts; files that newer versions of transformers wrote name it differently."""
    for name in (names.experts, "num_local_experts", "num_experts", "n_routed_experts"):
        if entries.config.get(name) is not None:
            return name
    return names.experts


def _has_dropout(entries: Entries) -> bool:
    name = entries.traits.dropout
    return bool(name) and entries.config.number(name, 0.0) > 0


def _parts_before(entries: Entries, sizes: _Sizes, vocab: int) -> tuple[tuple[PlacedPart, ...], int | None]:
    """The parts before the blocks, and the number of positions if they are learned."""
    traits = entries.traits
    d = sizes.d
    width = entries.integer("word_embed_proj_dim", d) if entries.config.model_type == "opt" else d
    parts: list[tuple[str, Part]] = [("tokens", Embedding(vocab, width, traits.scaled))]
    if width != d:
        parts.append(("input projection", Linear(width, d, bias=False)))
    max_tokens = None
    if traits.position == "learned":
        max_tokens = entries.integer("max_position_embeddings")
        parts.append(("positions", Table("positions", (max_tokens + traits.position_offset, d), d)))
    if traits.embedding_norm:
        parts.append(("embedding norm", Norm(d, traits.norm)))
    if _has_dropout(entries):
        parts.append(("dropout", Dropout(d)))
    return tuple(PlacedPart(name, part) for name, part in parts), max_tokens


def _parts_after(entries: Entries, sizes: _Sizes, vocab: int, *, has_norm: bool) -> tuple[PlacedPart, ...]:
    """The last norm, and the logits."""
    traits = entries.traits
    d = sizes.d
    parts: list[tuple[str, Part]] = []
    if has_norm:
        parts.append(("last norm", _norm(entries, d)))
    width = entries.integer("word_embed_proj_dim", d) if entries.config.model_type == "opt" else d
    if width != d:
        parts.append(("output projection", Linear(d, width, bias=False)))
    tied = entries.config.boolean("tie_word_embeddings", traits.tied)
    parts.append(("logits", Linear(width, vocab, bias=entries.flag(traits.head_bias), tied=tied)))
    return tuple(PlacedPart(name, part) for name, part in parts)
