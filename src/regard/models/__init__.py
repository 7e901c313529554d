"""Transformers from Hugging Face folders: BERT, GPT-2, Llama, T5, ViT and their kin, built of ``regard.nn``."""

from regard.models.bundled import bundled
from regard.models.create import create
from regard.models.describe import describe
from regard.models.image_model import ImageModel
from regard.models.load import known, load
from regard.models.model import Model
from regard.models.sampling import Sampling
from regard.models.text_decoder import TextDecoder
from regard.models.text_encoder import TextEncoder
from regard.models.text_to_text import TextReader, TextToText

__all__ = [
    "ImageModel",
    "Model",
    "Sampling",
    "TextDecoder",
    "TextEncoder",
    "TextReader",
    "TextToText",
    "bundled",
    "create",
    "describe",
    "known",
    "load",
]
