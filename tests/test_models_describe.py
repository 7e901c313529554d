"""`describe` shows a model as a table that adds up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import make, write
from support.commands import command
from support.model_configs import ALL, name
from torch import nn

from regard import Sinusoidal
from regard.models import describe, load
from regard.nn import Decoder, Encoder


def numbers(line: str) -> list[int]:
    return [int(word.replace(",", "")) for word in line.split() if word.replace(",", "").isdigit()]


def check(model: nn.Module) -> str:
    """The rows, the printed rows and the parameters have one sum; every line but the title has one width."""
    found, count = describe(model), sum(p.numel() for p in model.parameters())
    assert found.parameters == count == sum(row.parameters for row in found.rows)
    assert all(row.count >= 1 and row.parameters_each >= 1 for row in found.rows)
    title, *table = str(found).splitlines()
    assert len({len(line) for line in table}) == 1
    rows = [line for line in table[3:-2] if len(numbers(line)) >= 2]  # others name the place of those below
    assert len(rows) == len(found.rows)
    assert sum(numbers(line)[-1] for line in rows) == count == numbers(table[-1])[-1]
    printed = sorted((numbers(line)[-2], numbers(line)[-1]) for line in rows)
    assert printed == sorted((row.count, row.parameters) for row in found.rows)
    return title.split(",")[0]


@pytest.mark.parametrize("case", ALL, ids=name)
def test_rows_add_up(case: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    model = load(write(make(*case), tmp_path))
    assert check(model) == f"{type(model).__name__} ({case[0]})"


def test_equal_layers_share_a_row_and_others_do_not() -> None:
    model = Decoder(12, heads=3, layers=3, vocab=37)
    assert [row.path for row in describe(model).rows if "attention" in row.path] == [
        "blocks.0–2.attention",
        "blocks.0–2.attention_norm",
    ]
    model.blocks[2].feedforward = nn.Linear(12, 12)
    rows = {row.path: row.count for row in describe(model).rows}
    assert rows["blocks.0–1.feedforward"] == 2 and rows["blocks.2.feedforward"] == 1
    check(model)


def test_shared_parameters_count_once() -> None:
    a, b = nn.Linear(5, 3), nn.Linear(5, 3)
    b.weight = a.weight
    model = nn.Sequential(a, b, a)
    check(model)
    assert [row.parameters for row in describe(model).rows] == [18, 3]


class Mixed(nn.Module):
    """Parameters of its own beside parts, and a part without any."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.scale = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.tensor(1.0))
        self.parts = nn.ModuleDict({"a": nn.Conv2d(3, 5, 2), "b": nn.LSTM(3, 4), "c": nn.ReLU()})


@pytest.mark.parametrize(
    "model",
    [
        Mixed(),
        nn.Linear(3, 5),
        nn.Sequential(),
        nn.ReLU(),
        nn.Transformer(12, 2, 2, 2, 20, batch_first=True),
        nn.Embedding(7, 3),
        Decoder(12, heads=3, layers=2, vocab=37, position=Sinusoidal(12)),
        Encoder(12, heads=3, layers=1),
        nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))),
    ],
    ids=lambda model: type(model).__name__,
)
def test_any_module(model: nn.Module) -> None:
    assert check(model) == type(model).__name__


def test_what_is_no_module() -> None:
    with pytest.raises(TypeError, match=r"model must be .*Module, got 3"):
        describe(3)


def test_the_command_describes_the_bundled_model_unless_told(monkeypatch, capsys):
    code, out, _ = command(monkeypatch, capsys, "describe")
    assert code == 0 and "LlamaForCausalLM" in out
