"""Stored atlases: the records of a training run, or a file in the user's cache folder, so that heads are scored once.

A run of ``regard train`` records its heads while it trains. When it ends or is stopped, ``result.json`` names the step
of the model's weights and the hash of its file: if both are there, the record of that step is the atlas of the model.
Every other model is scored on the text probes, and the result is saved in the cache. Its key is made of the model's
files, the probes and the version of the scoring. The lab, the command line and ``interp.atlas`` all read from here.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import platformdirs

from regard._config_json import read_json
from regard._errors import RegardError
from regard._files import atomic_write, json_safe, open_regular, read_regular
from regard.interp._atlas_table import ATLAS_COLUMNS, Atlas
from regard.interp._default_probes import BLOCK, NOISE_IMAGES, TEXTS, TIMES, TOKENS, documentation_text
from regard.interp._head_types import HEAD_TYPES

SCORING = 1  # the version of the scoring; a change of scores, controls or thresholds must increase it
MOST_FILES = 256  # atlases in the cache; beyond this the oldest are removed
LARGEST_FILE = 256 * 2**20
WEIGHTS = "model.safetensors"
RESULT_FILE = "result.json"


def cache_folder() -> Path:
    """The folder of computed atlases; on Linux ``$XDG_CACHE_HOME/regard/atlases`` or ~/.cache/regard/atlases."""
    return platformdirs.user_cache_path("regard") / "atlases"


def model_fingerprint(folder: Path) -> str:
    """A hash of the names, sizes and times of a model's files. It changes if the model is trained further."""
    parts = [str(folder.resolve())]
    files = [*sorted(folder.glob("*.safetensors")), folder / "config.json", *sorted(folder.glob("tokenizer*"))]
    if folder.is_file():  # a GGUF file has everything
        files = [folder]
    for file in files:
        status = file.stat()
        parts.append(f"{file.name} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def stored_atlas(folder: Path) -> Atlas | None:
    """The atlas of the model in a folder, without running or loading the model; None if there is none yet."""
    try:
        fingerprint = model_fingerprint(folder)
    except OSError:  # not the folder of a model
        return None
    atlas = recorded_atlas(folder)
    if atlas is None:
        atlas = _read_atlas(_cache_file(fingerprint))
    return atlas


def recorded_atlas(folder: Path) -> Atlas | None:
    """The atlas of a run's model from the records of its training; None if no record is of exactly these weights.

    - ``folder``: a model's folder that also has ``result.json`` and ``evolution``, or ``model`` in the folder of a run.
    """
    folder = folder.resolve()  # the name and the parent of "." are those of no folder
    for run in (folder, folder.parent):
        try:
            step = _step_of_weights(run, folder)
            if step is None:
                continue
            # Here, not at the top: this imports torch, which takes seconds. A file in the cache is read without it.
            from regard.interp._records import list_records, read_record

            files = list_records(run / "evolution")
            if step not in files:
                continue
            record = read_record(files[step])
            first = read_record(files[0]) if 0 in files else None
        except (OSError, RegardError):
            continue
        # A record of probes of the user's own may lack the scores of the atlas.
        is_complete = "natural raw" in record.names and "natural clean" in record.names
        is_one_run = first is None or (first.layers == record.layers and first.names == record.names)
        if is_complete and is_one_run:
            return Atlas.from_record(record, first)
    return None


def weights_hash(folder: Path) -> str:
    """The SHA-256 of a model's file of weights, which ``result.json`` names."""
    digest = hashlib.sha256()
    with open_regular(folder / WEIGHTS) as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def save_atlas(fingerprint: str, atlas: Atlas) -> None:
    """Save the atlas of the model files that have this fingerprint. A full or read-only disk is not an error."""
    file = _cache_file(fingerprint)
    content = {"scoring": SCORING, "model": atlas.model, "source": atlas.source, "heads": atlas.rows}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as temporary:
            temporary.write_text(json.dumps(json_safe(content), allow_nan=False), encoding="utf-8")
        _remove_old_files(file.parent)
    except OSError:
        return


def _step_of_weights(run: Path, folder: Path) -> int | None:
    """The step whose weights a model folder holds, if the run's result says so and the weights are unchanged."""
    # Only the folder itself and the folder "model" of a run belong to a run's result.
    if folder != run and folder.name != "model":
        return None
    result = read_json(run / RESULT_FILE)
    if result.get("weights") != weights_hash(folder):
        return None
    return saved_model_step(result)


def saved_model_step(result: Mapping[str, Any]) -> int | None:
    """The step whose weights a run saved as its model, by its ``result.json``; None if the file does not say it."""
    step = result.get("model_step")
    # Files of earlier versions name only the best step.
    if step is None and isinstance(result.get("best"), Mapping):
        step = result["best"].get("step")
    return step if isinstance(step, int) else None


def _cache_file(fingerprint: str) -> Path:
    key = hashlib.sha256(f"{SCORING} {_probes_key()} {fingerprint}".encode()).hexdigest()[:32]
    return cache_folder() / f"{key}.json"


@lru_cache(maxsize=1)
def _probes_key() -> str:
    """A hash of the default probes: their sizes, and the text, which other versions of Python have changed."""
    sizes = f"{TOKENS} {BLOCK} {TEXTS} {TIMES} {NOISE_IMAGES}"
    return hashlib.sha256(f"{sizes}\n{documentation_text()}".encode()).hexdigest()


def _read_atlas(file: Path) -> Atlas | None:
    """Read a saved atlas; None if the file is missing or damaged."""
    try:
        content = json.loads(read_regular(file, LARGEST_FILE).decode("utf-8"))
        if content["scoring"] != SCORING or not content["heads"]:
            return None
        for row in content["heads"]:
            _check_row(row)
        return Atlas(str(content["model"]), content["heads"], str(content["source"]))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def _check_row(row: dict[str, Any]) -> None:
    """Raise an error if a row of a file lacks something that a table, a page or CSV shows."""
    valid = isinstance(row["path"], str)
    for name in ("layer", "head"):
        valid = valid and type(row[name]) is int and 0 <= row[name] < 2**31
    for name in ATLAS_COLUMNS:
        valid = valid and (row[name] is None or _is_number(row[name]))
    for name, values in row["kinds"].items():
        valid = valid and name in HEAD_TYPES
        for part in ("score", "control", "confidence"):
            valid = valid and _is_number(values[part])
    valid = valid and isinstance(row["labels"], list) and all(label in row["kinds"] for label in row["labels"])
    valid = valid and _are_scores(row["scores"]) and (row["untrained"] is None or _are_scores(row["untrained"]))
    if not valid:
        raise RegardError("a row is damaged")


def _are_scores(probes: dict[str, dict[str, dict[str, Any]]]) -> bool:
    """Whether scores are numbers, or unknown, by probe, weights and name."""
    for probe in probes.values():
        for weights in probe.values():
            for value in weights.values():
                if value is not None and not _is_number(value):
                    return False
    return True


def _is_number(x: object) -> bool:
    """Whether x is a finite number; a comparison with NaN is False."""
    return isinstance(x, int | float) and not isinstance(x, bool) and abs(x) < 1e300


def _remove_old_files(folder: Path) -> None:
    files = sorted(folder.glob("*.json"), key=os.path.getmtime)
    for file in files[:-MOST_FILES]:
        file.unlink(missing_ok=True)
