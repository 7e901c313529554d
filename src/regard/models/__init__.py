"""Transformers from Hugging Face folders and GGUF files (BERT, GPT-2, Llama, T5, ViT …), built of ``regard.nn``."""

from regard.models._create import create
from regard.models._describe import describe
from regard.models._families import model_types
from regard.models._image_model import ImageModel
from regard.models._load import bundled, load
from regard.models._model import Model
from regard.models._sampling import Sampling
from regard.models._text_decoder import TextDecoder
from regard.models._text_encoder import TextEncoder
from regard.models._text_to_text import TextToText, TextToTextEncoder

__all__ = [
    "ImageModel",
    "Model",
    "Sampling",
    "TextDecoder",
    "TextEncoder",
    "TextToText",
    "TextToTextEncoder",
    "bundled",
    "create",
    "describe",
    "load",
    "model_types",
]
