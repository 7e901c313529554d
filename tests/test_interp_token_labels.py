"""Which words stand at the queries and keys of a place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import regard
from regard._errors import RegardError
from regard.interp import figures
from regard.interp._recording import Recording
from regard.interp._token_labels import query_and_key_labels
from regard.nn import EncoderDecoder


@pytest.mark.parametrize(
    ("path", "n", "m", "queries", "keys"),
    [
        ("decoder.blocks.0.attention", 3, 3, "abc", "abc"),
        ("decoder.blocks.0.attention", 2, 2, "ab", "ab"),
        ("decoder.blocks.0.attention", 4, 3, None, "abc"),
        ("decoder.blocks.0.cross", 3, 2, "abc", "xy"),
        ("model.decoder.layers.0.encoder_attn", 3, 3, "abc", None),
        ("decoder.block.0.layer.1.EncDecAttention", 3, 2, "abc", "xy"),
        ("encoder.blocks.0.attention", 2, 2, "xy", "xy"),
        ("model.encoder.layers.0.self_attn", 2, 2, "xy", "xy"),
        ("blocks.0.attention", None, None, None, None),
    ],
)
def test_words_of_a_place(path: str, n: int | None, m: int | None, queries: str | None, keys: str | None) -> None:
    about = {"tokens": list("abc"), "source": list("xy")}
    assert query_and_key_labels(about, path, n, m) == (queries and list(queries), keys and list(keys))


def test_words_without_a_source_or_of_another_kind() -> None:
    assert query_and_key_labels({"tokens": list("abc")}, "encoder.layer.0.attention", 3, 3) == (
        list("abc"),
        list("abc"),
    )
    assert query_and_key_labels({"tokens": list("abc")}, "decoder.0.cross", 3, 3) == (list("abc"), None)
    assert (
        query_and_key_labels({}, "blocks.0", 3, 3)
        == query_and_key_labels({"tokens": "abc"}, "blocks.0", 3, 3)
        == (None, None)
    )
    assert query_and_key_labels({"tokens": [1, None]}, "blocks.0", 2, 2) == (["1", "None"], ["1", "None"])


def test_the_encoder_beside_a_decoder_does_not_read_the_answer() -> None:
    """A recording of Whisper has no tokens for its encoder, even where their numbers would fit."""
    about = {"tokens": list("abc"), "cross": {"model.decoder.layers.0.encoder_attn": True}}
    assert query_and_key_labels(about, "model.encoder.layers.0.self_attn", 2, 2) == (None, None)
    assert query_and_key_labels(about, "model.decoder.layers.0.self_attn", 3, 3)[0] == list("abc")


def test_words_of_another_text_name_no_row() -> None:
    """The last token that a model wrote may be too many; more than that are words of another text."""
    assert query_and_key_labels({"tokens": list("abcd")}, "blocks.0", 3, 3)[0] == list("abc")
    assert query_and_key_labels({"tokens": list("abcde")}, "blocks.0", 3, 3) == (None, None)


def _translation() -> Recording:
    model = EncoderDecoder(8, heads=2, layers=1, vocab=20).eval()
    observe = regard.Observe(map=16, top=4)
    with torch.no_grad(), regard.watch(model, observe) as recording:
        model(torch.arange(9)[None], torch.arange(4)[None])
    return recording


def test_the_words_of_the_source_are_refused_as_words_of_the_decoder(tmp_path: Path) -> None:
    recording = _translation()
    words = [f"word{i}" for i in range(9)]
    recording.metadata["tokens"] = words
    for use in (
        lambda: recording.save(tmp_path / "recording"),
        recording.to_html,
        lambda: figures.head_map(recording, "decoder.blocks.0.cross", 0),
        lambda: figures.head_lines(recording, "decoder.blocks.0.cross", 0),
    ):
        with pytest.raises(RegardError, match="source"):
            use()

    recording.metadata |= {"tokens": list("abcd"), "source": words}
    axes = figures.head_map(recording, "decoder.blocks.0.cross", 0).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == list("abcd")
    assert [label.get_text() for label in axes.get_xticklabels()] == words
    encoder = figures.head_map(recording, "encoder.blocks.0.attention", 0).axes[0]
    assert [label.get_text() for label in encoder.get_yticklabels()] == words
    recording.metadata["source"] = words[:5]
    with pytest.raises(RegardError, match="source"):
        recording.to_html()
