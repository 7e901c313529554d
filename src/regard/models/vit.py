"""ViT: patches of an image as tokens, a class token, a pre-norm encoder and a classifier."""

from __future__ import annotations

from functools import partial

from torch import nn

from regard.config import Config
from regard.models.activations import activation
from regard.models.bert import classes
from regard.models.image_model import ImageModel
from regard.models.keys import Key, Stored, Table
from regard.models.text_encoder import Dense
from regard.nn import LayerNorm, VisionTransformer

__all__ = ["KINDS", "TABLE", "build"]

KINDS = ("vit",)
CLASSES = ("ViTForImageClassification", "ViTModel")

_OURS, _THEIRS = "vit.encoder.blocks.{i}.", "vit.encoder.layer.{i}."
TABLE = Table(
    keys=(
        Key("vit.class_token", "vit.embeddings.cls_token", leading=2),
        Key("vit.encoder.position.weight", "vit.embeddings.position_embeddings", leading=1),
        Key("vit.patches", "vit.embeddings.patch_embeddings.projection"),
        Key(_OURS + "attention_norm", _THEIRS + "layernorm_before"),
        Key(_OURS + "attention.q_proj", _THEIRS + "attention.attention.query"),
        Key(_OURS + "attention.k_proj", _THEIRS + "attention.attention.key"),
        Key(_OURS + "attention.v_proj", _THEIRS + "attention.attention.value"),
        Key(_OURS + "attention.out_proj", _THEIRS + "attention.output.dense"),
        Key(_OURS + "feedforward_norm", _THEIRS + "layernorm_after"),
        Key(_OURS + "feedforward.up", _THEIRS + "intermediate.dense"),
        Key(_OURS + "feedforward.down", _THEIRS + "output.dense"),
        Key("vit.encoder.norm", "vit.layernorm"),
        Key("pooler.dense", "vit.pooler.dense"),
        Key("vit.head", "classifier"),
    ),
    prefix="vit.",
    bare=("ViTModel",),
    # The names that newer code gives to the same layers.
    spellings=(
        (r"^(vit\.)?layers\.(\d+)\.attention\.q_proj\.", r"\1encoder.layer.\2.attention.attention.query."),
        (r"^(vit\.)?layers\.(\d+)\.attention\.k_proj\.", r"\1encoder.layer.\2.attention.attention.key."),
        (r"^(vit\.)?layers\.(\d+)\.attention\.v_proj\.", r"\1encoder.layer.\2.attention.attention.value."),
        (r"^(vit\.)?layers\.(\d+)\.attention\.o_proj\.", r"\1encoder.layer.\2.attention.output.dense."),
        (r"^(vit\.)?layers\.(\d+)\.mlp\.fc1\.", r"\1encoder.layer.\2.intermediate.dense."),
        (r"^(vit\.)?layers\.(\d+)\.mlp\.fc2\.", r"\1encoder.layer.\2.output.dense."),
        (r"^(vit\.)?layers\.(\d+)\.", r"\1encoder.layer.\2."),
    ),
)


def build(config: Config, stored: Stored) -> ImageModel:
    """The model that a config describes; a pooler where the files hold one."""
    if config.architecture and config.architecture not in CLASSES:
        raise ValueError(f"config.json: architectures is {config.architecture}; known for vit are {', '.join(CLASSES)}")
    d = config.whole("hidden_size")
    if config.whole("pooler_output_size", d) != d or config.name("pooler_act", "tanh") != "tanh":
        raise ValueError("config.json: pooler_output_size and pooler_act are read as hidden_size and tanh alone")
    classifies = config.architecture == "ViTForImageClassification"
    vit = VisionTransformer(
        config.pair("image_size", 224),
        config.pair("patch_size", 16),
        classes(config) if classifies else 1,
        d,
        config.whole("num_attention_heads"),
        config.layers("num_hidden_layers"),
        config.whole("intermediate_size"),
        channels=config.whole("num_channels", 3),
        head="linear",
        dropout=config.real("hidden_dropout_prob", 0.0),
        norm=partial(LayerNorm, eps=config.real("layer_norm_eps", 1e-12)),
        activation=activation(config, "hidden_act", "gelu"),
        qkv_bias=config.flag("qkv_bias", True),
    )
    for block in vit.encoder.blocks:
        block.attention.dropout = config.real("attention_probs_dropout_prob", 0.0)  # type: ignore[union-attr]
        block.feedforward.dropout.p = 0.0  # type: ignore[union-attr]
    if not classifies:
        vit.head = nn.Identity()
    return ImageModel(
        config, TABLE, vit, pooler=Dense(d, "tanh") if stored("vit.pooler.dense.weight") is not None else None
    )
