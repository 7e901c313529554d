"""BERT, RoBERTa and DistilBERT: post-norm encoders over tokens, positions and sentence types."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from regard.config import Config
from regard.models.activations import activation
from regard.models.keys import Key, Stored, Table
from regard.models.text_encoder import Dense, MaskedHead, Read, TextEncoder
from regard.nn import Block, Encoder, FeedForward, LayerNorm, MultiHeadAttention
from regard.nn.stack import Tokens
from regard.positions import Learned

__all__ = ["KINDS", "build"]

KINDS = ("bert", "roberta", "distilbert")

# What a class puts on top: nothing, a token for each masked one, a class for each text, a class for each token.
HEADS = {
    "Model": None,
    "ForPreTraining": "masked",
    "ForMaskedLM": "masked",
    "ForSequenceClassification": "text",
    "ForNextSentencePrediction": "next",
    "ForTokenClassification": "token",
    "ForQuestionAnswering": "answer",
}
PREFIXES = {"bert": "Bert", "roberta": "Roberta", "distilbert": "DistilBert"}

EMBEDDINGS = (
    Key("tokens.embedding", "{base}embeddings.word_embeddings"),
    Key("position", "{base}embeddings.position_embeddings"),
    Key("types", "{base}embeddings.token_type_embeddings"),
    Key("norm", "{base}embeddings.LayerNorm"),
)
LAYERS = {
    "attention.q_proj": ("attention.self.query", "attention.q_lin"),
    "attention.k_proj": ("attention.self.key", "attention.k_lin"),
    "attention.v_proj": ("attention.self.value", "attention.v_lin"),
    "attention.out_proj": ("attention.output.dense", "attention.out_lin"),
    "attention_norm": ("attention.output.LayerNorm", "sa_layer_norm"),
    "feedforward.up": ("intermediate.dense", "ffn.lin1"),
    "feedforward.down": ("output.dense", "ffn.lin2"),
    "feedforward_norm": ("output.LayerNorm", "output_layer_norm"),
}
TOPS = {
    "bert": (
        Key("pooler.dense", "{base}pooler.dense"),
        Key("head.dense", "cls.predictions.transform.dense"),
        Key("head.norm", "cls.predictions.transform.LayerNorm"),
        Key("head.bias", "cls.predictions.bias"),
        Key("next_sentence", "cls.seq_relationship"),
    ),
    "roberta": (
        Key("pooler.dense", "{base}pooler.dense"),
        Key("head.dense", "lm_head.dense"),
        Key("head.norm", "lm_head.layer_norm"),
        Key("head.bias", "lm_head.bias"),
    ),
    "distilbert": (
        Key("head.dense", "vocab_transform"),
        Key("head.norm", "vocab_layer_norm"),
        Key("head.bias", "vocab_projector.bias"),
    ),
}
# Where a text is classified, the classifier's first map is our pooler.
CLASSIFIERS = {
    "bert": (Key("pooler.dense", "{base}pooler.dense"), Key("head", "classifier")),
    "roberta": (Key("pooler.dense", "classifier.dense"), Key("head", "classifier.out_proj")),
    "distilbert": (Key("pooler.dense", "pre_classifier"), Key("head", "classifier")),
}
TIED = {
    "bert": {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    "roberta": {
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
    "distilbert": {"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
}


def build(config: Config, stored: Stored) -> TextEncoder:
    """The model that a config describes; poolers and next-sentence heads are kept where a file has them."""
    kind = config.kind
    head = _head(config)
    config.refuse("is_decoder", "these models are read as encoders")
    config.refuse("add_cross_attention", "these models are read as encoders")
    if config.name("position_embedding_type", "absolute") != "absolute":
        raise ValueError(
            f"config.json: position_embedding_type is {config['position_embedding_type']!r}; only absolute"
        )
    if not config.flag("tie_word_embeddings", True) and head == "masked":
        raise ValueError("config.json: tie_word_embeddings is false; the masked head here is always tied")
    distil = kind == "distilbert"
    d = config.whole("dim" if distil else "hidden_size")
    heads = config.whole("n_heads" if distil else "num_attention_heads")
    hidden = config.whole("hidden_dim" if distil else "intermediate_size")
    phi = activation(config, "activation" if distil else "hidden_act", "gelu")
    norm = partial(LayerNorm, eps=1e-12 if distil else config.real("layer_norm_eps", 1e-12))
    dropout = config.real("dropout" if distil else "hidden_dropout_prob", 0.1)
    watched = config.real("attention_dropout" if distil else "attention_probs_dropout_prob", 0.1)
    blocks = [
        Block(
            MultiHeadAttention(d, heads, qkv_bias=True, dropout=watched),
            FeedForward(d, hidden, activation=phi),
            norm=norm,
            order="post",
            dropout=dropout,
        )
        for _ in range(config.layers("n_layers" if distil else "num_hidden_layers"))
    ]
    base = f"{kind}."
    pools = head in ("text", "next") or stored(f"{base}pooler.dense.weight") is not None
    return TextEncoder(
        config,
        table(kind, head),
        tokens=Tokens(config.whole("vocab_size"), d, head=None, scale=1.0),
        position=Learned(config.whole("max_position_embeddings"), d),
        types=None if distil else nn.Embedding(config.whole("type_vocab_size", 2), d),
        norm=norm(d),
        encoder=Encoder.of(blocks),
        pooler=Dense(d, "relu" if distil else "tanh") if pools else None,
        head=_made_head(head, config, d, phi, norm),
        reads=_reads(head),
        next_sentence=nn.Linear(d, 2) if head != "next" and stored("cls.seq_relationship.weight") is not None else None,
        counts_from_pad=config.whole("pad_token_id", 1, least=0) if kind == "roberta" else None,
        dropout=dropout,
    )


def table(kind: str, head: str | None) -> Table:
    """The keys of one of the three, with the head that it carries."""
    base, distil = f"{kind}.", kind == "distilbert"
    within = f"{base}transformer.layer.{{i}}." if distil else f"{base}encoder.layer.{{i}}."
    layers = [Key(f"encoder.blocks.{{i}}.{ours}", within + theirs[distil]) for ours, theirs in LAYERS.items()]
    tops: tuple[Key, ...]
    if head == "text":
        tops = CLASSIFIERS[kind]
    elif head == "next":
        tops = (Key("pooler.dense", "{base}pooler.dense"), Key("head", "cls.seq_relationship"))
    elif head in ("token", "answer"):
        tops = (*TOPS[kind][:1], Key("head", "classifier" if head == "token" else "qa_outputs"))
    else:
        tops = TOPS[kind]
    keys = [Key(key.ours, key.theirs.replace("{base}", base)) for key in (*EMBEDDINGS, *tops)]
    return Table(
        keys=[*keys, *layers],
        prefix=base,
        bare=(f"{PREFIXES[kind]}Model",),
        spellings=((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")),
        unused=(r"embeddings\.(position_ids|token_type_ids)$",),
        copies=TIED[kind] if head == "masked" else {},
    )


def _head(config: Config) -> str | None:
    name = config.architecture.removeprefix(PREFIXES[config.kind])
    known = {n: h for n, h in HEADS.items() if config.kind == "bert" or (h != "next" and n != "ForPreTraining")}
    if name and name not in known:
        classes = ", ".join(PREFIXES[config.kind] + n for n in known)
        raise ValueError(f"config.json: architectures is {config.architecture}; known for {config.kind} are {classes}")
    return known.get(name)


def _reads(head: str | None) -> Read:
    return "first" if head in ("text", "next") else "tokens"


def _made_head(
    head: str | None, config: Config, d: int, phi: str, norm: Callable[[int], nn.Module]
) -> nn.Module | None:
    if head is None:
        return None
    if head == "masked":
        return MaskedHead(config.whole("vocab_size"), d, phi, norm(d))
    return nn.Linear(d, 2 if head in ("next", "answer") else classes(config))


def classes(config: Config) -> int:
    """How many classes a classifier has: as many as ``id2label`` names, two where nothing is said."""
    return len(config.part("id2label")) or config.whole("num_labels", 2)
