"""What tasks refuse: sizes and data in the user's own words, before anything is built."""

from __future__ import annotations

import re

import pytest
from support.small_tasks import SMALL, made

from regard.training.tasks import TASKS


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("agreement", {"data.checks": 0}, "data.checks is 0"),
        ("repeats", {"data.shortest": 33}, "data.shortest is 33; it must be 2 … 32"),
        ("repeats", {"data.vocabulary": 63}, "data.vocabulary is 63"),
        ("repeats", {"data.checks": 0}, "data.checks is 0"),
        ("dates", {"data.checks": 0}, "data.checks is 0"),
        ("repeats", {"data.shortest": 1}, "data.shortest is 1"),
        ("repeats", {"data.vocabulary": 10**13}, "data.vocabulary is 10000000000000"),
        ("repeats", {"data.tokens": 10**9}, "data.tokens is 1000000000"),
        ("repeats", {"data.vocabulary": 2**20, "data.checks": 9, "model.d": 1024}, "2e+09 parameters; at most 1e+09"),
        ("repeats", {"data.vocabulary": 2**20, "batch": 1024}, "batch is 1,024 examples of 1,048,576 numbers"),
        ("repeats", {"data.vocabulary": 2**20, "data.checks": 65}, "data.checks is 65 and data.vocabulary 1,048,576"),
        ("agreement", {"batch": 10**12}, "batch is 1,000,000,000,000 examples of 29 numbers"),
        ("dates", {"batch": 10**12}, "batch is 1,000,000,000,000 examples of 75 numbers"),
        ("agreement", {"model.heads": 64}, "model.d is 64 and model.heads 64"),
        ("agreement", {"data.checks": 10**40}, "data.checks is a number of over 30 digits"),
        ("digits", {"data.folder": "nowhere", "data.size": 2**13}, "data.size is 8192"),
        ("digits", {"data.folder": "nowhere", "data.size": 2**12}, "batch is 12 examples of 16,777,216 numbers"),
        (
            "digits",
            {"data.folder": "~nobody-of-that-name/x"},
            "data.folder is ~nobody-of-that-name/x; there is no such",
        ),
        ("digits", {"model.kind": "mlp"}, "model.kind is 'mlp'; it must be vit or attention"),
        ("digits", {"data.size": 16}, "data.size is 16 and data.channels 1"),
        ("digits", {"model.patch": 3}, "model.patch is 3; it must divide data.size, which is 8"),
        ("digits", {"data.folder": "nowhere", "data.channels": 2}, "data.channels is 2"),
        ("digits", {"data.folder": "nowhere"}, "data.folder is nowhere"),
        ("digits", {"data.zoom": 1.0}, "data.zoom is 1; it must be ≥ 0 and < 1"),
        ("pixels", {"data.size": 16}, "data.size is 16 and data.channels 1"),
        ("pixels", {"data.turn": -1.0}, "data.turn is -1; it must be ≥ 0"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(name: str, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        task = made(name, **changes)
        task.model()
        task.held_out_batches()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", [*SMALL, "text"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.heads": 5}, r"model\.heads is 5; it must divide model\.d, which is (36|64|128)"),
        ({"model.heads": 0}, r"model\.heads is 0"),
        ({"model.d": 0}, r"model\.d is 0"),
        ({"model.d": -64}, r"model\.d is -64"),
        ({"model.d": 10**9}, r"model\.d is 1000000000"),
        ({"model.d": 2**20, "model.heads": 2}, r"model\.d=1048576, model\.layers=\d.* make about \de\+\d+ parameters"),
        ({"model.layers": 0}, r"model\.layers is 0"),
        ({"model.layers": 10**6}, r"model\.layers is 1000000"),
    ],
)
def test_sizes_that_no_model_has_are_named_as_they_are_set(name: str, changes: dict[str, int], message: str) -> None:
    """Before anything is built, and before data is prepared."""
    kind = TASKS[name.split()[0]]
    recipe = kind.default_recipe.with_changes({**SMALL.get(name, {}), **changes})
    with pytest.raises(ValueError, match=message) as error:
        kind(recipe)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", [*SMALL, "text"])
def test_hidden_is_asked_for_where_there_is_a_feed_forward_network(name: str) -> None:
    kind = TASKS[name.split()[0]]
    recipe = kind.default_recipe.with_changes({**SMALL.get(name, {}), "model.hidden": 0})
    if name == "digits of attention":
        kind(recipe)
        return
    with pytest.raises(ValueError, match=r"model\.hidden is 0"):
        kind(recipe)


def test_sizes_that_are_large_but_possible_are_taken() -> None:
    kind = TASKS["text"]
    large = {"model.d": 1024, "model.heads": 16, "model.layers": 24, "model.hidden": 4096, "data.vocabulary": 50_000}
    kind(kind.default_recipe.with_changes({**large, "data.window": 2048}))
