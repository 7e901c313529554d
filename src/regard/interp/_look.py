"""``look``: run a loaded model on one text or image, record every head, and keep the input with the recording."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from regard._checks import check_integer
from regard._errors import RegardError
from regard._observables import Observe
from regard.interp._groups_of import name_groups
from regard.interp._recording import Recording
from regard.interp._register_observers import NO_VISIBLE_ATTENTION
from regard.interp._token_text import TokenText, label_tokens
from regard.interp._unknown_tokens import describe_unknown_tokens
from regard.interp._watch import Layers, watch
from regard.models import ImageModel, TextDecoder, TextEncoder, TextToText
from regard.models._images import ImageLike
from regard.models._model import Model
from regard.models._tokenizer import ByteTokenizer
from regard.nn import MultiHeadAttention

PAGE_OBSERVABLES = Observe(map=64, profile=32, key_mass=True, top=8)  # what the HTML page shows
IMAGE_PIXELS = 256  # per side of the image that is stored
ANSWER_TOKENS = 64  # that a text-to-text model generates


@dataclass(frozen=True)
class _Run:
    """How to run the model on the input, and the metadata that describes the input."""

    forward: Callable[[], Any]
    metadata: dict[str, Any]
    unknown_tokens: str = ""  # what the model cannot read of the text, in words


def look(
    model: nn.Module,
    text: str | None = None,
    image: ImageLike | None = None,
    *,
    tokenizer: Any = None,
    observe: Observe = PAGE_OBSERVABLES,
    layers: Layers = None,
    groups: str | Mapping[str, Any] | None = None,
    tokens: int | None = None,
    answer: str | None = None,
    generate: int | None = None,
    keep_input: bool = True,
    progress: Callable[[int, int | None], None] | None = None,
) -> Recording:
    """Record every head of a model on one text, or of an image model on one image.

    - ``model``: a model of ``regard.models``, or a text model of ``transformers`` with its ``tokenizer``.
    - ``text``, ``image``: the input; give one of them.
    - ``observe``: what to measure; by default, what the HTML page shows.
    - ``layers``: which layers to observe, as in ``regard.watch``; all by default.
    - ``groups``: also measure the weight on groups of the text's tokens, ``"special"``, ``"sentences"``, ``"words"``,
      ``"chat"`` or a mapping name → token id: see ``groups_of``. Not for images and text-to-text models.
    - ``tokens``: use only the first tokens of the text; all by default.
    - ``answer``: the target text of a text-to-text model; by default it generates one.
    - ``generate``: let a language model continue the text by up to this many of its most likely tokens, and record
      text and continuation in one pass. Its weights are those of the single steps, because a query does not see later
      tokens (only rotary positions that depend on the length, ``dynamic`` and ``longrope``, change them). For a
      text-to-text model it is the largest number of tokens of the answer, by default 64.
    - ``keep_input``: whether ``recording.metadata`` stores the input: ``tokens`` (readable labels), ``ids``, ``text``
      and ``spans`` (the characters of the text that each token covers), or the ``image``. For a text-to-text model
      these are of its answer, and ``source``, ``source_text`` and ``source_spans`` of the text it read.
    - ``progress``: ``progress(done, total)`` is called after each layer; ``total`` is None if it is not known.

    Returns the ``Recording``. For an image model, its metadata has the ``grid`` of the patches. If the vocabulary lacks
    words of the text, ``metadata["unknown_tokens"]`` says so. Raises ``RegardError`` if the model cannot read the
    input.

    >>> recording = look(regard.models.load(regard.models.bundled()), "a b c a b c")
    >>> recording, recording.metadata["tokens"]
    (Recording(3 layers, 3 calls), ['<|endoftext|>', 'a', ' b', ' c', ' a', ' b', ' c'])
    >>> recording["decoder.blocks.1.attention"].map.shape, recording.to_html().count("<html")
    (torch.Size([4, 64, 64]), 1)
    >>> look(regard.models.load(regard.models.bundled()), "import os", generate=3).metadata["text"]
    'import os.path'
    """
    if (text is None) == (image is None):
        raise RegardError("give either a text or an image")
    if isinstance(model, Model) and tokenizer is not None:
        raise RegardError(f"{type(model).__name__} has its own tokenizer; leave tokenizer= out")
    if not isinstance(model, Model) and tokenizer is None:
        raise RegardError(f"{type(model).__name__} needs a tokenizer: look(model, …, tokenizer=…)")
    if image is not None:
        if generate is not None:
            raise RegardError("generate= needs a text; leave it out with an image")
        run = _image_run(model, image)
        observe = _observe_on_grid(observe, run.metadata["grid"])
    else:
        # The tokenizer may add tokens of its own, so an empty text is checked as text.
        if not isinstance(text, str) or not text.strip():
            raise RegardError(f"the text must have at least one character that is not a space, got {text!r:.40}")
        if answer is not None and not isinstance(model, TextToText):
            raise RegardError(f"{type(model).__name__} generates no answer; answer= is for text-to-text models")
        if generate is not None:
            check_integer("generate", generate, least=1)
            if answer is not None:
                raise RegardError("give either answer= or generate=, not both")
        if isinstance(model, Model):
            run = _text_run(model, text, tokens, answer, generate)
        else:
            run = _transformers_run(model, tokenizer, text, tokens, generate)

    if groups is not None:
        observe = _observe_groups(observe, model, tokenizer, run, groups, with_text=keep_input)

    with torch.no_grad(), watch(model, observe, layers=layers) as recording:
        if progress is not None:
            # How many layers a model of transformers has is not known before it has run.
            total = sum(isinstance(module, MultiHeadAttention) for module in model.modules()) or None
            recording.on_add = lambda: progress(sum(map(len, recording.calls.values())), total)
        run.forward()
        if not recording and layers is None:
            raise RegardError(f"{type(model).__name__} {NO_VISIBLE_ATTENTION}")
    if keep_input:
        recording.metadata |= run.metadata
    elif "grid" in run.metadata:
        recording.metadata["grid"] = run.metadata["grid"]
    if isinstance(groups, str):
        recording.metadata["groups_by"] = groups
    if run.unknown_tokens:
        recording.metadata["unknown_tokens"] = run.unknown_tokens
    if isinstance(model, Model):
        recording.metadata["model"] = model.config.architecture or model.config.model_type
    return recording


def _observe_groups(
    observe: Observe, model: nn.Module, tokenizer: Any, run: _Run, by: str | Mapping[str, Any], *, with_text: bool
) -> Observe:
    """The same measurements, and groups of the tokens that the model reads."""
    if observe.groups is not None:
        raise RegardError("groups were given twice, in observe and as groups=; give them once")
    if "ids" not in run.metadata:
        raise RegardError("groups= needs a text; for an image give Observe(groups=regard.Groups(…))")
    if "source" in run.metadata:
        raise RegardError(
            f"groups= needs one text, and {type(model).__name__} reads one and writes another: use regard.watch with "
            "layers= and Observe(groups=regard.interp.groups_of(…))"
        )
    if isinstance(model, Model):
        tokenizer = model.tokenizer
    return replace(observe, groups=name_groups(tokenizer, run.metadata["ids"], by, with_text=with_text))


def _text_run(model: Model, text: str, most: int | None, answer: str | None, generate: int | None) -> _Run:
    """A text model of ``regard.models``."""
    tokenizer = model.tokenizer
    whole_text = label_tokens(tokenizer, text)
    tokens = _first_tokens(whole_text, most)
    unknown_tokens = describe_unknown_tokens(tokenizer, tokens.ids)
    ids = tokens.ids
    vocabulary = model.config.get("vocab_size")
    if isinstance(tokenizer, ByteTokenizer) and isinstance(vocabulary, int) and max(ids) >= vocabulary:
        raise RegardError(
            f"the folder has no tokenizer.json, and its {vocabulary} tokens are not bytes: the model cannot read text"
        )
    _check_length(len(ids), generate, getattr(model, "max_positions", None), isinstance(model, TextToText))
    inputs = torch.tensor([ids], device=model.device)

    if isinstance(model, TextToText):
        if answer is None:
            answer_ids = model.generate([ids], generate or ANSWER_TOKENS)
        else:
            answer_ids = torch.tensor([tokenizer.encode(answer)], device=model.device)
        assert isinstance(answer_ids, Tensor)  # generate gives a tensor for ids, and text for text
        start = torch.tensor([[model.decoder_start_id]], device=model.device)
        target = torch.cat([start, answer_ids.long()], 1)
        answer_tokens = label_tokens(tokenizer, ids=target[0].tolist())
        return _Run(lambda: model(inputs, target), _text_metadata(answer_tokens, source=tokens), unknown_tokens)
    if not isinstance(model, TextEncoder | TextDecoder):
        raise RegardError(f"a {model.config.model_type} model cannot read text; give it an image")
    prompt_length = None
    if generate is not None:
        if not isinstance(model, TextDecoder):
            raise RegardError(f"a {model.config.model_type} model generates no text; leave generate= out")
        continuation = model.generate([ids], generate)
        assert isinstance(continuation, Tensor)
        prompt_length = len(ids)
        tokens = _continued(tokenizer, whole_text, tokens, continuation[0].tolist())
        inputs = torch.tensor([tokens.ids], device=model.device)
    if isinstance(model, TextDecoder):
        model.warn_beyond_training(len(tokens.ids))
    # Only the hidden states: the logits of a long text take more memory than all its heads.
    return _Run(
        lambda: model.hidden_states(inputs), _text_metadata(tokens, prompt_length=prompt_length), unknown_tokens
    )


def _transformers_run(model: Any, tokenizer: Any, text: str, most: int | None, generate: int | None) -> _Run:
    """A text model of ``transformers``."""
    whole_text = label_tokens(tokenizer, text)
    if not whole_text.ids:
        raise RegardError("the tokenizer gives no tokens for this text; is there a tokenizer.json in the folder?")
    tokens = _first_tokens(whole_text, most)
    unknown_tokens = describe_unknown_tokens(tokenizer, tokens.ids)
    inputs = torch.tensor([tokens.ids], device=model.device)
    can_generate = callable(getattr(model, "can_generate", None)) and model.can_generate()
    if generate is not None and not can_generate:
        raise RegardError(
            f"{type(model).__name__} generates no text; leave generate= out, or load it with a language head"
        )
    if model.config.is_encoder_decoder:
        target = model.generate(inputs, max_new_tokens=generate or ANSWER_TOKENS, do_sample=False)
        answer_tokens = label_tokens(tokenizer, ids=target[0].tolist())
        metadata = _text_metadata(answer_tokens, source=tokens)
        return _Run(lambda: model(inputs, decoder_input_ids=target), metadata, unknown_tokens)
    prompt_length = None
    if generate is not None:
        mask = torch.ones_like(inputs)
        inputs = model.generate(inputs, attention_mask=mask, max_new_tokens=generate, do_sample=False)
        prompt_length = len(tokens.ids)
        tokens = _continued(tokenizer, whole_text, tokens, inputs[0, prompt_length:].tolist())
    return _Run(lambda: model(inputs), _text_metadata(tokens, prompt_length=prompt_length), unknown_tokens)


def _check_length(count: int, generate: int | None, most: int | None, is_text_to_text: bool) -> None:
    """Raise if a text and its continuation are longer than the model can read."""
    if most is None:
        return
    if count > most:
        raise RegardError(f"the text has {count} tokens, the model reads at most {most}: use tokens={most}")
    if generate is not None and not is_text_to_text and count + generate > most:
        raise RegardError(
            f"generate must be at most {most - count}, because the text has {count} of the {most} tokens that the "
            f"model reads, got {generate}"
        )


def _continued(tokenizer: Any, whole_text: TokenText, prompt: TokenText, new_ids: list[int]) -> TokenText:
    """The tokens of a prompt, the first tokens of a text, and of its continuation."""
    ids = prompt.ids + new_ids
    if len(prompt.ids) < len(whole_text.ids):
        # The continuation does not follow the text but a part of it, which may end within a character.
        return label_tokens(tokenizer, ids=ids)
    return label_tokens(tokenizer, whole_text.text, ids)


def _text_metadata(
    tokens: TokenText, *, source: TokenText | None = None, prompt_length: int | None = None
) -> dict[str, Any]:
    """The metadata of a text; ``prompt_length`` is the number of tokens that were not generated."""
    metadata: dict[str, Any] = {
        "tokens": tokens.labels,
        "ids": tokens.ids,
        "text": tokens.text,
        "spans": [list(span) for span in tokens.spans],
    }
    if source is not None:
        metadata["source"] = source.labels
        metadata["source_text"] = source.text
        metadata["source_spans"] = [list(span) for span in source.spans]
    if prompt_length is not None:
        metadata["prompt_length"] = prompt_length
    return metadata


def _first_tokens(tokens: TokenText, most: int | None) -> TokenText:
    if most is not None:
        tokens = tokens.first(check_integer("tokens", most, least=1))
    return tokens


def _image_run(model: nn.Module, image: ImageLike) -> _Run:
    if not isinstance(model, ImageModel):
        name = type(model).__name__
        if isinstance(model, Model):
            name = model.config.model_type
        raise RegardError(f"a {name} model cannot read images here; give it a text")
    pixels = model.preprocessor(image)
    metadata = {"grid": list(model.vit.grid), "image": _image_url(pixels[0])}
    pixels = pixels.to(next(model.parameters()).device)
    return _Run(lambda: model.hidden_states(pixels), metadata)


def _observe_on_grid(observe: Observe, grid: Sequence[int]) -> Observe:
    """The same measurements on a grid of patches; a profile cannot reach beyond the image."""
    profile = observe.profile
    if profile is not None:
        profile = min(max(grid) - 1, max(observe.profile_radii()))
    return replace(observe, grid=(grid[0], grid[1]), profile=profile)


def _image_url(pixels: Tensor) -> str:
    """The model's input ``[C, height, width]`` as a small PNG in a data URL."""
    low = pixels.amin()
    high = pixels.amax()
    scaled = ((pixels - low) / (high - low).clamp(min=1e-9) * 255).round().byte().permute(1, 2, 0).numpy()
    if scaled.shape[-1] == 1:
        scaled = scaled[..., 0]
    image = Image.fromarray(np.ascontiguousarray(scaled))
    image.thumbnail((IMAGE_PIXELS, IMAGE_PIXELS))
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
