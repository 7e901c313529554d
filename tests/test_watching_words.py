"""Which words stand at the queries and keys of a place."""

from __future__ import annotations

import pytest

from regard.watching.words import words


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
    assert words(about, path, n, m) == (queries and list(queries), keys and list(keys))


def test_words_without_a_source_or_of_another_kind() -> None:
    assert words({"tokens": list("abc")}, "encoder.layer.0.attention", 3, 3) == (list("abc"), list("abc"))
    assert words({"tokens": list("abc")}, "decoder.0.cross", 3, 3) == (list("abc"), None)
    assert words({}, "blocks.0", 3, 3) == words({"tokens": "abc"}, "blocks.0", 3, 3) == (None, None)
    assert words({"tokens": [1, None]}, "blocks.0", 2, 2) == (["1", "None"], ["1", "None"])
