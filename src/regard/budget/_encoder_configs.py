"""Build encoders from their configs: ELECTRA and ModernBERT."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from regard._config_json import CLASS_PREFIXES, Config
from regard.budget._attention_parts import Attention
from regard.budget._decoder_entries import NoFormulaError
from regard.budget._model import Model, PlacedPart, Stack
from regard.budget._models_from_sizes import encoder
from regard.budget._parts import Embedding, FeedForward, Linear, Norm, Part, Table


def electra_from_config(config: Config) -> Model:
    """ELECTRA: a BERT whose embeddings may be narrower than its blocks."""
    config.require("position_embedding_type", "absolute")
    for entry in ("is_decoder", "add_cross_attention"):
        config.refuse(entry, "these models are read as encoders")
    d = config.integer("hidden_size")
    width = config.integer("embedding_size", 128)
    vocab = config.integer("vocab_size")
    positions = config.integer("max_position_embeddings", 512)
    model = encoder(
        d,
        config.integer("num_attention_heads"),
        config.layer_count("num_hidden_layers"),
        hidden=config.integer("intermediate_size"),
        qkv_bias=True,
        order="post",
        dropout=config.number("hidden_dropout_prob", 0.1) > 0,
    )
    before: list[tuple[str, Part]] = [
        ("tokens", Embedding(vocab, width)),
        ("positions", Table("positions", (positions, width), width)),
        ("types", Table("types", (config.integer("type_vocab_size", 2), width), width)),
        ("embedding norm", Norm(width)),
    ]
    if width != d:
        before.append(("embedding projection", Linear(width, d)))
    (stack,) = model.stacks
    parts = tuple(PlacedPart(name, part) for name, part in before)

    after: list[tuple[str, Part]] = []
    logits: int | None = None
    head = config.head_name("Model", "ForMaskedLM", "ForPreTraining") or "Model"
    if head == "ForMaskedLM":
        config.require("tie_word_embeddings", True)
        after = [("head: linear", Linear(d, width)), ("head: norm", Norm(width))]
        after.append(("logits", Linear(width, vocab, bias=True, tied=True)))
        logits = vocab
    elif head == "ForPreTraining":
        # The discriminator: one number per token, whether the token was replaced.
        after = [("head: linear", Linear(d, d)), ("replaced", Linear(d, 1))]
        logits = 1
    placed = tuple(PlacedPart(name, part) for name, part in after)
    stack = replace(stack, before=(*parts, *stack.before), after=placed)
    return replace(model, title=_title(config), stacks=(stack,), vocab=logits, max_tokens=positions)


def modernbert_from_config(config: Config) -> Model:
    """ModernBERT: rotary positions, gated networks, and layers that see only near tokens."""
    d = config.integer("hidden_size")
    heads = config.integer("num_attention_heads")
    hidden = config.integer("intermediate_size")
    vocab = config.integer("vocab_size")
    if d % heads:
        raise config.error("num_attention_heads", f"it must divide hidden_size={d}")
    d_key = d // heads
    norm = Norm(d, bias=config.boolean("norm_bias", False))
    bias = config.boolean("attention_bias", False)
    forward = FeedForward(d, hidden, True, config.boolean("mlp_bias", False))

    # The embedding has its own norm, so the first layer has none before its attention.
    kinds = [(index == 0, band) for index, band in enumerate(_bands(config))]
    blocks: list[PlacedPart] = []
    for (is_first, band), layers in Counter(kinds).items():
        attention = Attention(d, heads, d_key, d_key, d, heads, qkv_bias=bias, out_bias=bias, rotary=True, band=band)
        first_norm: Part = Part() if is_first else norm
        parts = (
            ("attention norm", first_norm),
            ("attention", attention),
            ("feed-forward norm", norm),
            ("feed-forward", forward),
        )
        blocks += [PlacedPart(name, part, layers) for name, part in parts]

    before = (PlacedPart("tokens", Embedding(vocab, d)), PlacedPart("embedding norm", norm))
    after = [PlacedPart("last norm", norm)]
    logits: int | None = None
    if (config.head_name("Model", "ForMaskedLM") or "Model") == "ForMaskedLM":
        config.require("tie_word_embeddings", True)
        after.append(PlacedPart("head: linear", Linear(d, d, bias=config.boolean("classifier_bias", False))))
        after.append(PlacedPart("head: norm", norm))
        after.append(PlacedPart("logits", Linear(d, vocab, bias=config.boolean("decoder_bias", True), tied=True)))
        logits = vocab
    stack = Stack("encoder", before, tuple(blocks), tuple(after), "pre", len(kinds))
    context = config.integer("max_position_embeddings", 8192)
    return Model(_title(config), "encoder", d, (stack,), logits, context_length=context)


def _bands(config: Config) -> list[int | None]:
    """For each layer how far a query sees to both sides; None means to the ends."""
    layers = config.layer_count("num_hidden_layers")
    # Half of this many tokens before a query, and half of them after it.
    reach = config.integer("local_attention", 128) // 2
    types = config.get("layer_types")
    if types is None:
        every = config.integer("global_attn_every_n_layers", 3)
        types = ["sliding_attention"] * layers
        types[::every] = ["full_attention"] * len(types[::every])
    if not isinstance(types, list) or len(types) != layers:
        raise config.error("layer_types", f"it must name {layers} layers")
    seen = {"full_attention": None, "sliding_attention": reach}
    if not all(isinstance(name, str) and name in seen for name in types):
        raise NoFormulaError(f"{config.file}: layer_types has layers without formulas")
    return [seen[name] for name in types]


def _title(config: Config) -> str:
    return config.architecture or f"{CLASS_PREFIXES[config.model_type]}Model"
