"""Builds BERT, RoBERTa and DistilBERT: post-norm encoders over tokens, positions and token types."""

from __future__ import annotations

from functools import partial

from torch import nn

from regard._config_json import Config, activation_name
from regard.models._checkpoint_keys import Key, KeyTable, TensorLookup
from regard.models._text_encoder import MaskedHead, Pooler, TextEncoder
from regard.nn import Block, Encoder, FeedForward, LayerNorm, MultiHeadAttention
from regard.nn._norm import NormFactory
from regard.nn._stack import TokenEmbedding
from regard.positions import Learned

MODEL_TYPES = ("bert", "roberta", "distilbert")

# Class name without its prefix → kind of head: a token for each masked one, a class per text, a class per token …
HEADS = {
    "Model": None,
    "ForMaskedLM": "masked",
    "ForSequenceClassification": "text",
    "ForTokenClassification": "token",
    "ForQuestionAnswering": "answer",
}
BERT_HEADS = HEADS | {"ForPreTraining": "masked", "ForNextSentencePrediction": "next"}

# Key tables: our names first, then those of the checkpoint; {base} is "bert.", "roberta." or "distilbert.".
EMBEDDINGS = (
    Key("tokens.embedding", "{base}embeddings.word_embeddings"),
    Key("position", "{base}embeddings.position_embeddings"),
    Key("token_types", "{base}embeddings.token_type_embeddings"),
    Key("norm", "{base}embeddings.LayerNorm"),
)
# Ours → (BERT's and RoBERTa's, DistilBERT's), within one layer.
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
# Pooler and masked head; the first entry of BERT and RoBERTa is the pooler.
HEAD_KEYS = {
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
# In a text classifier our pooler is the first layer of the classifier.
CLASSIFIER_KEYS = {
    "bert": (Key("pooler.dense", "{base}pooler.dense"), Key("head", "classifier")),
    "roberta": (Key("pooler.dense", "classifier.dense"), Key("head", "classifier.out_proj")),
    "distilbert": (Key("pooler.dense", "pre_classifier"), Key("head", "classifier")),
}
# Tensor that some files store a second time → the tensor that it is tied to.
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
# transformers' entries of BERT and RoBERTa → those of DistilBERT, which has other names for the same sizes.
DISTILBERT_ENTRIES = {
    "hidden_size": "dim",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "num_hidden_layers": "n_layers",
    "hidden_act": "activation",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
}


def build(config: Config, stored: TensorLookup) -> TextEncoder:
    """The model that a config describes; it has a pooler and a next-sentence head if the files have them."""
    model_type = config.model_type
    heads = HEADS
    if model_type == "bert":
        heads = BERT_HEADS
    head = heads.get(config.head_name(*heads))
    config.refuse("is_decoder", "these models are read as encoders")
    config.refuse("add_cross_attention", "these models are read as encoders")
    config.require("position_embedding_type", "absolute")
    if head == "masked":
        config.require("tie_word_embeddings", True)

    distil = model_type == "distilbert"
    entries = {name: name for name in DISTILBERT_ENTRIES}
    if distil:
        entries = DISTILBERT_ENTRIES
    d = config.integer(entries["hidden_size"])
    activation = activation_name(config, entries["hidden_act"], "gelu")
    eps = 1e-12  # fixed in DistilBERT
    if not distil:
        eps = config.number("layer_norm_eps", eps)
    norm = partial(LayerNorm, eps=eps)
    dropout = config.number(entries["hidden_dropout_prob"], 0.1)
    attention_dropout = config.number(entries["attention_probs_dropout_prob"], 0.1)
    blocks = []
    for _ in range(config.layer_count(entries["num_hidden_layers"])):
        attention = MultiHeadAttention(
            d, config.integer(entries["num_attention_heads"]), qkv_bias=True, dropout=attention_dropout
        )
        feedforward = FeedForward(d, config.integer(entries["intermediate_size"]), activation=activation)
        blocks.append(Block(attention, feedforward, norm=norm, order="post", dropout=dropout))

    # Optional parts: token types, the pooler, and the next-sentence head beside a masked one.
    token_types = pooler = next_sentence = padding_id = None
    if not distil:
        token_types = nn.Embedding(config.integer("type_vocab_size", 2), d)
    if head in ("text", "next") or stored(f"{model_type}.pooler.dense.weight") is not None:
        pooler = Pooler(d, "relu" if distil else "tanh")
    if head != "next" and stored("cls.seq_relationship.weight") is not None:
        next_sentence = nn.Linear(d, 2)
    if model_type == "roberta":
        padding_id = config.integer("pad_token_id", 1, least=0)
    return TextEncoder(
        config,
        key_table(model_type, head),
        tokens=TokenEmbedding(config.integer("vocab_size"), d, head=None, scale=1.0),
        position=Learned(config.integer("max_position_embeddings"), d),
        token_types=token_types,
        norm=norm(d),
        encoder=Encoder.from_blocks(blocks),
        pooler=pooler,
        head=_make_head(head, config, d, activation, norm),
        pooled_head=head in ("text", "next"),
        next_sentence=next_sentence,
        position_padding_id=padding_id,
        dropout=dropout,
    )


def key_table(model_type: str, head: str | None) -> KeyTable:
    """The keys of one model type with a kind of head."""
    base = f"{model_type}."
    distil = model_type == "distilbert"
    layer = f"{base}encoder.layer.{{i}}."
    if distil:
        layer = f"{base}transformer.layer.{{i}}."
    keys = [Key(f"encoder.blocks.{{i}}.{ours}", layer + theirs[distil]) for ours, theirs in LAYERS.items()]

    head_keys = HEAD_KEYS[model_type]
    if head == "text":
        head_keys = CLASSIFIER_KEYS[model_type]
    elif head == "next":
        head_keys = (Key("pooler.dense", "{base}pooler.dense"), Key("head", "cls.seq_relationship"))
    elif head == "token":
        head_keys = (head_keys[0], Key("head", "classifier"))
    elif head == "answer":
        head_keys = (head_keys[0], Key("head", "qa_outputs"))
    for key in (*EMBEDDINGS, *head_keys):
        keys.append(Key(key.ours, key.theirs.replace("{base}", base)))
    return KeyTable(
        keys=keys,
        prefix=base,
        unprefixed=({"bert": "BertModel", "roberta": "RobertaModel", "distilbert": "DistilBertModel"}[model_type],),
        renames=((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")),
        ignored=(r"embeddings\.(position_ids|token_type_ids)$",),
        tied=TIED[model_type] if head == "masked" else {},
    )


def _make_head(head: str | None, config: Config, d: int, activation: str, norm: NormFactory) -> nn.Module | None:
    if head is None:
        return None
    if head == "masked":
        return MaskedHead(config.integer("vocab_size"), d, activation, norm(d))
    if head in ("next", "answer"):
        return nn.Linear(d, 2)
    return nn.Linear(d, config.class_count())
