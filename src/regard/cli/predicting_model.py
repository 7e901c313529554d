"""What ``regard attribute`` and ``regard patch`` share: a model that predicts tokens, its text, and tokens by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard._errors import RegardError
from regard.cli.look_model import load_model
from regard.interp import TokenText, label_tokens
from regard.models import TextDecoder
from regard.models._model import Model

MOST_FLOAT32_PARAMETERS = 2**30  # 4 GiB


@dataclass(frozen=True)
class PredictingModel:
    """A model that predicts the next token of a text, and its tokenizer."""

    model: nn.Module
    tokenizer: Any

    @classmethod
    def load(cls, folder: Path) -> PredictingModel:
        """Load the model of a folder or GGUF file. Raises ``RegardError`` if it does not predict next tokens."""
        model, tokenizer = load_model(folder, generates=True)
        predicts = isinstance(model, TextDecoder)
        if not isinstance(model, Model):
            is_pair = bool(getattr(model.config, "is_encoder_decoder", False))
            can_generate: Any = getattr(model, "can_generate", None)
            predicts = callable(can_generate) and bool(can_generate()) and not is_pair
        if not predicts:
            raise RegardError(f"MODEL must predict the next token of a text, got {folder}, a {type(model).__name__}")
        if isinstance(model, Model):
            tokenizer = model.tokenizer
        # Differences of half-precision numbers are coarse. A very large model would not fit into memory twice as large.
        if sum(parameter.numel() for parameter in model.parameters()) <= MOST_FLOAT32_PARAMETERS:
            model = model.float()
        return cls(model.eval(), tokenizer)

    def read(self, text: str, tokens: int | None) -> TokenText:
        """The tokens of a text: the first ``tokens``, or all."""
        if not text.strip():
            raise RegardError("the text must have at least one character that is not a space")
        labelled = label_tokens(self.tokenizer, text)
        if tokens is not None:
            if tokens < 1:
                raise RegardError(f"--tokens must be at least 1, got {tokens}")
            labelled = labelled.first(tokens)
        most = getattr(self.model, "max_positions", None)
        if isinstance(most, int) and len(labelled.ids) > most:
            raise RegardError(
                f"the text has {len(labelled.ids)} tokens, the model reads at most {most}: use --tokens {most}"
            )
        return labelled

    def logits(self, ids: Tensor) -> Tensor:
        """The logits ``[B, n, vocabulary]`` of token ids."""
        with torch.no_grad():
            output = self.model(ids)
        logits: Tensor = getattr(output, "logits", output)
        return logits

    def token_id(self, option: str, name: str) -> int:
        """The id of a token that an option names: by its text, or by its number as ``#123``."""
        if name.startswith("#") and name[1:].isdecimal():
            return int(name[1:])
        ids = self._ids(name)
        if len(ids) != 1:
            labels = " ".join(repr(label) for label in label_tokens(self.tokenizer, ids=ids).labels)
            raise RegardError(
                f"{option} must be one token, or #ID, got {name!r}, which is {len(ids)} tokens: {labels}. "
                "A token that begins a word usually starts with a space"
            )
        return ids[0]

    def label(self, token: int) -> str:
        """A readable label of a token."""
        return label_tokens(self.tokenizer, ids=[token]).labels[0]

    def _ids(self, name: str) -> list[int]:
        """The ids of a text, without those that the tokenizer adds to every text."""
        added = label_tokens(self.tokenizer, "a").ids[:-1]
        ids = label_tokens(self.tokenizer, name).ids
        if added and ids[: len(added)] == added:
            ids = ids[len(added) :]
        return ids


def checked_position(position: int, n: int) -> int:
    """A position in a text of n tokens; negative ones count from the end."""
    if not -n <= position < n:
        raise RegardError(
            f"--position must be between {-n} and {n - 1}, because the text has {n} tokens, got {position}"
        )
    return position % n
