"""A loaded model on one text or picture, every head watched, and what was read kept beside it."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from regard.models import ImageModel, TextDecoder, TextEncoder, TextToText
from regard.models.images import Picture
from regard.models.model import Model
from regard.models.text import Bytes
from regard.nn import MultiHeadAttention
from regard.observables import Observe
from regard.shapes import integer
from regard.watching.recorder import Layers
from regard.watching.seen import Seen
from regard.watching.visitor import UNSEEN
from regard.watching.watch import watch

__all__ = ["LOOK", "look"]

LOOK = Observe(map=64, profile=32, key_mass=True, top=8)  # what the page shows
PICTURE = 256  # pixels a side of the picture that is kept
ANSWER = 64  # tokens that a text-to-text model writes


def look(
    model: nn.Module,
    text: str | None = None,
    picture: Picture | None = None,
    *,
    tokenizer: Any = None,
    observe: Observe = LOOK,
    layers: Layers = None,
    tokens: int | None = None,
    answer: str | None = None,
    words: bool = True,
    progress: Callable[[int, int | None], None] | None = None,
) -> Seen:
    """Watch a model of ``regard.models`` on a text, or an image model on a picture.

    A text model of ``transformers`` comes with its ``tokenizer``.

    ``seen.about`` then has the ``tokens`` (a text-to-text model's answer, and its ``source``) and their ``ids``, or the
    picture with the ``grid`` of its patches; ``words=False`` leaves all of that out. ``tokens`` cuts a text to its
    first ones. ``answer``: what a text-to-text model is to have answered, instead of what it writes.

    >>> seen = look(regard.models.load(regard.models.bundled()), "a b c a b c")
    >>> seen, seen.about["tokens"]
    (Seen(3 places, 3 calls), ['<|endoftext|>', 'a', ' b', ' c', ' a', ' b', ' c'])
    >>> seen["decoder.blocks.1.attention"].map.shape, seen.to_html().count("<html")
    (torch.Size([4, 64, 64]), 1)
    """
    if (text is None) == (picture is None):
        raise ValueError("give a text or a picture, one of them")
    about: dict[str, Any]
    if isinstance(model, Model) == (tokenizer is not None):
        what = (
            "brings its own tokenizer" if isinstance(model, Model) else "needs a tokenizer: look(model, …, tokenizer=…)"
        )
        raise ValueError(f"{type(model).__name__} {what}")
    if picture is not None:
        run, about, observe = _picture(model, picture, observe)
    else:
        assert text is not None
        if not text:  # a tokenizer may add tokens of its own, which are nobody's text
            raise ValueError("the text is empty: there is nothing to read")
        if answer is not None and not isinstance(model, TextToText):
            raise ValueError(
                f"{type(model).__name__} answers nothing: answer= is for text-to-text models of regard.models"
            )
        run, about = (
            _text(model, text, tokens, answer) if isinstance(model, Model) else _theirs(model, tokenizer, text, tokens)
        )
    with torch.no_grad(), watch(model, observe, layers=layers) as seen:
        if progress is not None:
            seen.on_add = _counting(progress, sum(isinstance(x, MultiHeadAttention) for x in model.modules()))
        run()
        if not seen and layers is None:
            raise ValueError(f"{type(model).__name__} {UNSEEN}")
    seen.about |= about if words else {name: x for name, x in about.items() if name == "grid"}
    if isinstance(model, Model):
        seen.about["model"] = model.config.architecture or model.config.kind
    return seen


def _counting(progress: Callable[[int, int | None], None], total: int) -> Callable[[], None]:
    done = 0

    def one() -> None:
        nonlocal done
        done += 1
        progress(done, total or None)  # how many there are in a model of others shows at the end

    return one


def _text(model: Model, text: str, most: int | None, reply: str | None) -> tuple[Callable[[], Any], dict[str, Any]]:
    ids = model.text.encode(text)
    if most is not None:
        ids = ids[: integer("tokens", most, least=1)]
    if not ids:
        raise ValueError("the text is empty: there is nothing to read")
    vocabulary = model.config.get("vocab_size")
    if isinstance(model.text, Bytes) and isinstance(vocabulary, int) and max(ids) >= vocabulary:
        raise ValueError(
            f"the folder has no tokenizer.json, and its {vocabulary} tokens are not bytes: it reads no text"
        )
    longest = getattr(model, "longest", None)
    if longest is not None and len(ids) > longest:
        raise ValueError(
            f"the text has {len(ids)} tokens and the model reads at most {longest}: ask for tokens={longest}"
        )
    given = torch.tensor([ids])
    words = _spoken(ids, model.text.tokens(ids), model.text.decode)
    if isinstance(model, TextToText):
        start = torch.tensor([[model.begins]])
        written = model.generate([ids], ANSWER) if reply is None else torch.tensor([model.text.encode(reply)])
        assert isinstance(written, Tensor)  # ids in, ids out
        answer = torch.cat([start, written.long()], 1)
        wrote = answer[0].tolist()
        said = _spoken(wrote, model.text.tokens(wrote), model.text.decode)
        return lambda: model(given, answer), {"tokens": said, "source": words, "ids": wrote}
    if not isinstance(model, TextEncoder | TextDecoder):
        raise ValueError(f"a {model.config.kind} reads no text; give it a picture")
    if isinstance(model, TextDecoder):
        model.warn_beyond(len(ids))
    # Vectors alone: the logits of a long text take more memory than all its heads.
    return lambda: model.hidden(given), {"tokens": words, "ids": ids}


def _theirs(model: Any, tokenizer: Any, text: str, most: int | None) -> tuple[Callable[[], Any], dict[str, Any]]:
    """A text model of ``transformers``."""
    ids = tokenizer(text)["input_ids"]
    if text and not ids:
        raise ValueError("the tokenizer gives no tokens for this text; has the folder a tokenizer.json?")
    ids = ids if most is None else ids[: integer("tokens", most, least=1)]
    if not ids:
        raise ValueError("the text is empty: there is nothing to read")
    given = torch.tensor([ids])
    words = _spoken(ids, tokenizer.convert_ids_to_tokens(ids), tokenizer.decode)
    if not model.config.is_encoder_decoder:
        return lambda: model(given), {"tokens": words}
    answer = model.generate(given, max_new_tokens=ANSWER, do_sample=False)
    wrote = answer[0].tolist()
    said = _spoken(wrote, tokenizer.convert_ids_to_tokens(wrote), tokenizer.decode)
    return lambda: model(given, decoder_input_ids=answer), {"tokens": said, "source": words}


def _picture(model: nn.Module, picture: Picture, observe: Observe) -> tuple[Callable[[], Any], dict[str, Any], Observe]:
    if not isinstance(model, ImageModel):
        kind = model.config.kind if isinstance(model, Model) else type(model).__name__
        raise ValueError(f"a {kind} reads no pictures here; give it a text")
    pixels = model.images(picture)
    grid = model.vit.grid
    wide = max(grid) - 1  # offsets beyond the picture are none
    asked = replace(observe, grid=grid, profile=None if observe.profile is None else min(wide, max(observe.radii())))
    return lambda: model.hidden(pixels), {"grid": list(grid), "image": _shown(pixels[0])}, asked


def _shown(pixels: Tensor) -> str:
    """What the model sees, ``[C, height, width]``, as a small PNG in a line of text."""
    low, high = pixels.amin(), pixels.amax()
    scaled = ((pixels - low) / (high - low).clamp(min=1e-9) * 255).round().byte().permute(1, 2, 0).numpy()
    image = Image.fromarray(np.ascontiguousarray(scaled[..., 0] if scaled.shape[-1] == 1 else scaled))
    image.thumbnail((PICTURE, PICTURE))
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _spoken(ids: Sequence[int], tokens: Sequence[str], decode: Callable[[list[int]], str]) -> list[str]:
    """Each token as a person reads it, spaces included.

    Byte-level vocabularies spell a space Ġ and other characters byte by byte: what the token decodes to is meant, � for
    a part of a character. Others write ▁ for a space, which decoding drops.
    """
    found = []
    for i, token in zip(ids, tokens, strict=True):
        said = decode([i])
        spelled = not token.isascii() and "▁" not in token
        found.append(said if spelled and said else token.replace("▁", " "))
    return found
