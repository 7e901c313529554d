"""Recipes: what can be set, how it is written down, and what is refused."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from support.tiny_task import Tiny

from regard.training._recipe import Recipe, parse_assignments, read_recipe

RECIPE = Tiny.default_recipe


def test_a_recipe_survives_its_file(tmp_path: Path) -> None:
    changed = RECIPE.with_changes(
        {"steps": 7, "warmup": 2, "rate": 1, "model": {"layers": 3}, "data.noise": 0, "precision": "bfloat16"}
    )
    assert (changed.steps, changed.rate, changed.model["layers"], changed.data["noise"]) == (7, 1.0, 3, 0.0)
    file = tmp_path / "recipe.toml"
    file.write_text(changed.to_toml())
    read = read_recipe(file)
    assert read.pop("task") == "tiny"
    assert RECIPE.with_changes(read) == changed
    assert tomllib.loads(RECIPE.to_toml()) == RECIPE.to_dict()


def test_texts_are_read_as_what_they_set() -> None:
    changed = RECIPE.with_changes(
        parse_assignments(["steps=1e3", "rate = 3e-4", "model.layers=1", "keep=+2", "batch=1_200"])
    )
    assert (changed.steps, changed.rate, changed.model["layers"], changed.keep) == (1000, 3e-4, 1, 2)
    assert changed.batch == 1200 and isinstance(changed.steps, int)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"stepz": 3}, "a tiny recipe has no stepz; it has steps, batch"),
        ({"model.width": 3}, "a tiny recipe has no model.width; .*model.layers"),
        ({"model": 3}, "a tiny recipe has no model;"),
        ({"task": "text"}, "a tiny recipe has no task;"),
        ({"steps": "many"}, "steps is 'many'"),
        ({"steps": "1.5"}, "steps is '1.5'"),
        ({"steps": "inf"}, "steps is 'inf'"),
        ({"steps": 2.0}, "steps is 2.0"),
        ({"steps": True}, "steps is True"),
        ({"steps": 0}, "steps is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"rate": "fast"}, "rate is 'fast'"),
        ({"rate": -1.0}, "rate is -1.0; it must be a number > 0"),
        ({"rate": 0.0}, "rate is 0.0; it must be a number > 0"),
        ({"warmup": 40}, "warmup is 40 and steps 40"),
        ({"warmup": 5, "steps": 4}, "warmup is 5 and steps 4"),
        ({"rate": float("nan")}, "rate is nan; it must be a number"),
        ({"floor": 1.5}, "floor is 1.5; it must be a number ≥ 0 and ≤ 1"),
        ({"beta2": 1.0}, "beta2 is 1.0; it must be a number ≥ 0 and < 1"),
        ({"precision": "float8"}, "precision is 'float8'; it must be float32 or bfloat16"),
        ({"parallel": "tensor"}, "parallel is 'tensor'; it must be ddp or fsdp"),
        ({"precision": 16}, "precision is 16; it must be a text"),
        ({"accumulate": 5}, "accumulate is 5; .* batch.* 12"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RECIPE.with_changes(changes)


def test_the_default_warmup_fits_into_fewer_steps() -> None:
    recipe = Recipe("x", steps=600, batch=1, rate=1.0)  # warmup 100
    assert recipe.with_changes({"steps": 60}).warmup == 15
    assert recipe.with_changes({"steps": "2"}).warmup == 0
    assert recipe.with_changes({"steps": 101}).warmup == recipe.with_changes({"seed": 3}).warmup == 100
    assert recipe.with_changes({"steps": 60, "warmup": 59}).warmup == 59


def test_truth_values_are_true_or_false() -> None:
    recipe = Recipe("x", steps=1, batch=1, rate=1.0, model={"tied": True})
    assert recipe.with_changes({"model.tied": "False"}).model["tied"] is False
    with pytest.raises(ValueError, match=r"model.tied is 'yes'; it must be true or false"):
        recipe.with_changes({"model.tied": "yes"})


def test_files_that_are_no_recipes(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        read_recipe(file)
    file.write_text("steps = = 3")
    with pytest.raises(ValueError, match="is not TOML"):
        read_recipe(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is not TOML"):
        read_recipe(file)
    file.write_bytes(b"#" * (2**20 + 1))
    with pytest.raises(ValueError, match="is not a recipe"):
        read_recipe(file)
    with pytest.raises(ValueError, match="is not a recipe"):
        read_recipe(Path("/dev/zero"))
    file.write_text("a=" + "[" * 10000)
    with pytest.raises(ValueError, match="is not TOML"):
        read_recipe(file)
    for text in ("steps", "=3", " = 4"):
        with pytest.raises(ValueError, match="it must be name=value"):
            parse_assignments([text])
