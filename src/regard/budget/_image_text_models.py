"""Models of images and text as sums of parts: a tower that reads one image per sequence, a projector, and a decoder."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from regard._config_json import Config
from regard._errors import RegardError
from regard.budget._attention_parts import Attention
from regard.budget._decoder_entries import NoFormulaError
from regard.budget._model import Model, PlacedPart, Stack
from regard.budget._parts import FeedForward, Linear, Norm, Part, Patches, Table


@dataclass(frozen=True)
class ImageTextTraits:
    """A family: its class in transformers, the family of its decoder, and the kind of its tower.

    - `own_text`: whether the decoder is always of this family; otherwise the section of the text names it.
    - `tied`: whether embedding and logits share a matrix if the config does not say so.
    """

    architecture: str
    text: str
    tower: str
    own_text: bool
    tied: bool


IMAGE_TEXT: dict[str, ImageTextTraits] = {
    "llava": ImageTextTraits("LlavaForConditionalGeneration", "llama", "clip_vision_model", own_text=False, tied=False),
    "paligemma": ImageTextTraits(
        "PaliGemmaForConditionalGeneration", "gemma", "siglip_vision_model", own_text=False, tied=True
    ),
    "gemma3": ImageTextTraits(
        "Gemma3ForConditionalGeneration", "gemma3_text", "siglip_vision_model", own_text=True, tied=True
    ),
    "llama4": ImageTextTraits(
        "Llama4ForConditionalGeneration", "llama4_text", "llama4_vision_model", own_text=True, tied=False
    ),
}


@dataclass(frozen=True)
class _Tower:
    """The sizes of an image tower."""

    d: int
    heads: int
    layers: int
    hidden: int
    patches: int
    patch: tuple[int, int]
    channels: int


def image_text_from_config(
    config: Config, build_text: Callable[[Config], Model], text_families: Collection[str]
) -> Model:
    """Build the model of images and text that a config describes.

    - `build_text`: builds its decoder.
    - `text_families`: the families that this decoder may be of.

    A section that leaves out sizes has no formula here: its defaults are those of other families.
    """
    traits = IMAGE_TEXT[config.model_type]
    if config.architecture.lower() not in ("", traits.architecture.lower()):
        raise NoFormulaError(f"{config.file}: architectures is {config.architecture[:60]}; there is no formula for it")
    text = config.section("text_config")
    if traits.own_text or text.get("model_type") is None:
        text["model_type"] = traits.text
    if text.model_type not in text_families:
        raise NoFormulaError(
            f"{config.file}: text_config has model_type {text.model_type[:60]!r}, which is not a decoder with formulas"
        )
    text.pop("architectures", None)
    text["tie_word_embeddings"] = config.boolean("tie_word_embeddings", traits.tied)
    vision = config.section("vision_config")
    if vision.string("model_type", traits.tower) != traits.tower:
        raise NoFormulaError(f"{config.file}: vision_config has another tower than {traits.tower}; it has no formula")
    try:
        decoder = build_text(text)
        tower = _tower_sizes(vision)
        stack = _tower_stack(config, vision, tower, int(decoder.d))
    except RegardError as error:
        raise NoFormulaError(str(error)) from None
    stacks = [stack, *(replace(each, name="") for each in decoder.stacks)]
    return replace(
        decoder,
        title=traits.architecture,
        architecture=traits.architecture,
        stacks=tuple(stacks),
        image_tokens=_image_tokens(config, vision, tower),
    )


def _tower_sizes(vision: Config) -> _Tower:
    image = vision.pair("image_size", 224)
    patch = vision.pair("patch_size", 14 if vision.get("model_type") == "llama4_vision_model" else 16)
    if vision.get("patch_size") is None or vision.get("image_size") is None:
        raise NoFormulaError(f"{vision.file}: vision_config leaves out image_size or patch_size")
    return _Tower(
        d=vision.integer("hidden_size"),
        heads=vision.integer("num_attention_heads"),
        layers=vision.layer_count("num_hidden_layers"),
        hidden=vision.integer("intermediate_size"),
        patches=(image[0] // patch[0]) * (image[1] // patch[1]),
        patch=patch,
        channels=vision.integer("num_channels", 3),
    )


def _tower_stack(config: Config, vision: Config, tower: _Tower, d_text: int) -> Stack:
    """The tower and the projector to the width of the text, as one stack."""
    family = config.model_type
    has_class_token = family in ("llava", "llama4")
    rows = tower.patches + 1 if has_class_token else tower.patches

    def placed(name: str, part: Part, layers: int = 1, at: int = rows) -> PlacedPart:
        return PlacedPart(name, part, layers, rows=at, keys=at)

    # SigLIP's patches have a bias; CLIP and Llama 4 have a class token instead, and a norm before the blocks.
    patches = Patches(tower.channels, tower.patch, tower.d, bias=not has_class_token, class_token=has_class_token)
    before = [placed("patches", patches)]
    if has_class_token:
        before.append(placed("class token", Table("class token", (tower.d,))))
    before.append(placed("positions", Table("positions", (rows, tower.d), tower.d)))
    norm = Norm(tower.d)
    if has_class_token:
        before.append(placed("first norm", norm))

    attention = _tower_attention(tower)
    forward = FeedForward(tower.d, tower.hidden)
    blocks = (
        placed("attention norm", norm, tower.layers),
        placed("attention", attention, tower.layers),
        placed("feed-forward norm", norm, tower.layers),
        placed("feed-forward", forward, tower.layers),
    )
    after: list[PlacedPart] = []
    if family == "llava":
        # CLIP normalizes the class token only; the patches go to the projector as they are.
        after.append(placed("last norm", norm, at=1))
    else:
        after.append(placed("last norm", norm))
    is_siglip = IMAGE_TEXT[family].tower == "siglip_vision_model"
    if is_siglip and vision.boolean("vision_use_head", True):
        after += _pooling_head(tower, attention, norm, rows)
    after += _projector(config, vision, tower, d_text)
    return Stack("image", tuple(before), blocks, tuple(after), "pre", tower.layers)


def _tower_attention(tower: _Tower) -> Attention:
    if tower.d % tower.heads:
        raise NoFormulaError(f"num_attention_heads of the tower must divide hidden_size={tower.d}, got {tower.heads}")
    d_key = tower.d // tower.heads
    return Attention(tower.d, tower.heads, d_key, d_key, tower.d, tower.heads, qkv_bias=True)


def _pooling_head(tower: _Tower, attention: Attention, norm: Norm, rows: int) -> list[PlacedPart]:
    """SigLIP's head: one learned query attends to all patches. transformers runs it, although no projector reads it."""
    parts: list[tuple[str, Part, int]] = [
        ("pooling query", Table("pooling query", (tower.d,)), 1),
        ("pooling attention", attention, rows),
        ("pooling norm", norm, 1),
        ("pooling feed-forward", FeedForward(tower.d, tower.hidden), 1),
    ]
    return [PlacedPart(name, part, rows=1, keys=keys) for name, part, keys in parts]


def _image_tokens(config: Config, vision: Config, tower: _Tower) -> int:
    """The number of tokens that the decoder reads in place of one image."""
    if config.model_type == "gemma3":
        # The patches are averaged in squares, until this many are left.
        return config.integer("mm_tokens_per_image", 256)
    if config.model_type == "llama4":
        # Squares of neighbouring patches are joined to one vector each.
        ratio = vision.number("pixel_shuffle_ratio", 0.5)
        return round(tower.patches * ratio * ratio)
    return tower.patches


def _projector(config: Config, vision: Config, tower: _Tower, d_text: int) -> list[PlacedPart]:
    """The maps from the tower's width to the text's."""
    family = config.model_type
    rows = _image_tokens(config, vision, tower)
    parts: list[tuple[str, Part]] = []
    if family == "llava":
        bias = config.boolean("multimodal_projector_bias", True)
        parts.append(("projector up", Linear(tower.d, d_text, bias)))
        parts.append(("projector out", Linear(d_text, d_text, bias)))
    elif family == "paligemma":
        parts.append(("projector", Linear(tower.d, vision.integer("projection_dim"))))
    elif family == "gemma3":
        parts.append(("projector norm", Norm(tower.d, "rms")))
        parts.append(("projector", Linear(tower.d, d_text, bias=False)))
    else:
        inner = vision.integer("projector_input_dim", 4096)
        outer = vision.integer("projector_output_dim", 4096)
        width = vision.integer("vision_output_dim", 7680)
        parts.append(("adapter up", Linear(tower.hidden, inner, bias=False)))
        parts.append(("adapter out", Linear(outer, outer, bias=False)))
        parts.append(("projector", Linear(width, d_text, config.boolean("multi_modal_projector_bias", False))))
    return [PlacedPart(name, part, rows=rows, keys=rows) for name, part in parts]
