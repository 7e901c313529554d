"""Records of heads on disk: whole, or said not to be."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from regard.interp import _records as records
from regard.training.tasks import image_data as pictures
from regard.training.tasks import text


def kept(folder: Path, **changes: object) -> Path:
    """A record of two heads, with some of what its header says changed."""
    place = records.AttentionLayer("blocks.0.attention", (0, 1), 5, 5, False)
    tensors = {"means": torch.zeros(2, 7), "map": torch.zeros(2, 3, 3), "profile": torch.zeros(2, 5)}
    seconds = {"cost": 0.5, "spent": 1, "elapsed": 2.0}
    file = records.write_record(folder, records.Record(1, "Toy", (place,), tensors, {}, seconds, (2, 3)))
    with safe_open(file, framework="pt") as opened:
        told = json.loads(opened.metadata()["regard"])
    told |= changes
    save_file(tensors, file, metadata={"regard": json.dumps(told)})
    return file


def test_a_record_is_whole_or_said_not_to_be(tmp_path: Path) -> None:
    whole = records.read_record(kept(tmp_path))
    assert whole.seconds == {"cost": 0.5, "spent": 1.0, "elapsed": 2.0}
    assert whole.grid == (2, 3)
    assert records.read_record(kept(tmp_path, grid=None)).grid is None
    place = {"path": "a", "heads": [0, 1], "n": 5, "m": 5, "cross": False}
    wrong: list[dict[str, object]] = [
        *({"seconds": {"cost": x, "spent": 1, "elapsed": 2}} for x in (math.inf, math.nan, 10**400, -1, "1", True)),
        *({"seconds": x} for x in ({}, 3, None, [])),
        *({"grid": x} for x in (3, "23", [2], [2, 0], [2.0, 3.0], [1, 2, 3], [True, 1], {"2": 3}, [10**30, 1], [])),
        *(
            {"places": [place | x]}
            for x in ({"cross": 1}, {"cross": "no"}, {"n": 1e400}, {"heads": 2}, {"heads": "01"})
        ),
        *({"places": x} for x in (3, [3], [[]], {})),
    ]
    for changes in wrong:
        with pytest.raises(ValueError, match="is not a complete record") as error:
            records.read_record(kept(tmp_path, **changes))
        assert "\n" not in str(error.value)


def test_a_folder_with_a_record_s_name_is_none(tmp_path: Path) -> None:
    file = kept(tmp_path)
    (tmp_path / "step-00000002.safetensors").mkdir()
    (tmp_path / ".step-00000003.safetensors.half").mkdir()
    assert records.list_records(tmp_path) == {1: file}
    records.remove_unfinished_records(tmp_path)
    records.remove_record(tmp_path, 1)
    assert sorted(x.name for x in tmp_path.iterdir()) == [
        *(".step-00000003.safetensors.half", "step-00000002.safetensors")
    ]
    with pytest.raises(ValueError, match="regular file"):
        records.read_record(tmp_path / "step-00000002.safetensors")


def test_a_disk_that_takes_no_more_is_an_error_of_the_system(tmp_path: Path) -> None:
    """As of any other file: safetensors has an error of its own, which nobody expects of writing."""
    resource = pytest.importorskip("resource")
    read = pictures.LabelledImages(torch.zeros(9, 1, 2, 2), torch.zeros(9), torch.zeros(9), ["a"])
    ids = text._Data(torch.zeros(9), torch.zeros(9), 9.0, 2, None)
    wanted: list[tuple[str, Callable[[Path], object]]] = [
        ("records", kept),
        ("pictures", lambda folder: pictures.write_images(read, folder)),
        ("text", lambda folder: text._write_data(ids, folder)),
    ]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for name, write in wanted:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
            with pytest.raises(OSError, match="File too large"):
                write(tmp_path / name)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert list((tmp_path / name).iterdir()) == []
