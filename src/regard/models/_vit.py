"""Builds ViT: image patches as tokens, a class token, a pre-norm encoder and a classifier."""

from __future__ import annotations

from functools import partial

from torch import nn

from regard._config_json import Config, activation_name
from regard.models._checkpoint_keys import Key, KeyTable, TensorLookup
from regard.models._image_model import ImageModel
from regard.models._text_encoder import Pooler
from regard.nn import LayerNorm, VisionTransformer

MODEL_TYPES = ("vit",)

_OURS = "vit.encoder.blocks.{i}."
_THEIRS = "vit.encoder.layer.{i}."
KEYS = KeyTable(
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
    unprefixed=("ViTModel",),
    # Newer versions of transformers have other names for the same layers.
    renames=(
        (r"^(vit\.)?layers\.(\d+)\.attention\.q_proj\.", r"\1encoder.layer.\2.attention.attention.query."),
        (r"^(vit\.)?layers\.(\d+)\.attention\.k_proj\.", r"\1encoder.layer.\2.attention.attention.key."),
        (r"^(vit\.)?layers\.(\d+)\.attention\.v_proj\.", r"\1encoder.layer.\2.attention.attention.value."),
        (r"^(vit\.)?layers\.(\d+)\.attention\.o_proj\.", r"\1encoder.layer.\2.attention.output.dense."),
        (r"^(vit\.)?layers\.(\d+)\.mlp\.fc1\.", r"\1encoder.layer.\2.intermediate.dense."),
        (r"^(vit\.)?layers\.(\d+)\.mlp\.fc2\.", r"\1encoder.layer.\2.output.dense."),
        (r"^(vit\.)?layers\.(\d+)\.", r"\1encoder.layer.\2."),
    ),
)


def build(config: Config, stored: TensorLookup) -> ImageModel:
    """The model that a config describes; it has a pooler if the files have one."""
    classifies = config.head_name("ForImageClassification", "Model") == "ForImageClassification"
    d = config.integer("hidden_size")
    config.require("pooler_output_size", d)
    config.require("pooler_act", "tanh")
    vit = VisionTransformer(
        config.pair("image_size", 224),
        config.pair("patch_size", 16),
        config.class_count() if classifies else 1,  # replaced below if there is no classifier
        d,
        config.integer("num_attention_heads"),
        config.layer_count("num_hidden_layers"),
        config.integer("intermediate_size"),
        channels=config.integer("num_channels", 3),
        head="linear",
        dropout=config.number("hidden_dropout_prob", 0.0),
        norm=partial(LayerNorm, eps=config.number("layer_norm_eps", 1e-12)),
        activation=activation_name(config, "hidden_act", "gelu"),
        qkv_bias=config.boolean("qkv_bias", True),
    )
    # transformers' ViT has its own dropout for attention weights and none for hidden vectors.
    for block in vit.encoder.blocks:
        block.attention.dropout = config.number("attention_probs_dropout_prob", 0.0)  # type: ignore[union-attr]
        block.feedforward.dropout.p = 0.0  # type: ignore[union-attr]
    if not classifies:
        vit.head = nn.Identity()
    pooler = None
    if stored("vit.pooler.dense.weight") is not None:
        pooler = Pooler(d, "tanh")
    return ImageModel(config, KEYS, vit, pooler=pooler)
