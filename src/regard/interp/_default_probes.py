"""The sizes and the natural text of the default probes. This module does not import torch."""

from __future__ import annotations

from pydoc_data.topics import topics

TOKENS = 256  # per natural text
BLOCK = 48  # tokens of the block that is repeated
TEXTS = 2  # per probe
TIMES = 3  # that a block is repeated
FEWEST_TOKENS = 16  # different tokens of a natural text; with fewer the tokenizer does not read English
NOISE_IMAGES = 4  # images of random noise, the probe of an image model
CHARACTERS_PER_TOKEN = 40  # an upper bound: it limits how much text is tokenized for a probe


def documentation_text() -> str:
    """Ordinary English that every machine has: the documentation of Python's language."""
    return "\n".join(topics.values())
