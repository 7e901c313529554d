"""Everything that regard does with a recording, a model folder, a recipe, a run or a lab's state: the fuzzer's readers.

Each function takes a folder with damaged files, uses it in every way, and notes findings with ``Attempts``.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console

from regard import budget, interp, models, training
from regard._observables import Observation
from regard.interp import Recording, figures, load_recording
from regard.interp._token_text import label_tokens
from regard.lab.app import ENDPOINTS, _json_response
from regard.lab.endpoint import BinaryResponse
from regard.lab.workspace import Workspace
from regard.models import ImageModel, TextToText
from regard.models._generate import TextGenerator
from regard.training import figures as training_figures
from regard.training._recipe import read_recipe
from regard.training._train import load_trained_model, train
from regard.training.tasks import TASKS
from support.attempts import Attempts, control_characters, run_command, snapshot
from support.file_seeds import RUN_CHANGES, TEXT
from support.tiny_task import Tiny

RARELY = 6  # figures take longer than all other uses together; every sixth case draws them
HANDLERS = {endpoint.path: endpoint for endpoint in ENDPOINTS}


def request(workspace: Workspace, path: str, **fields: Any) -> Any:
    """Call an endpoint of the lab, and encode its response as the server does."""
    endpoint = HANDLERS[path]
    result = endpoint.handler(workspace, msgspec.convert(fields, endpoint.request_type, strict=False))
    if not isinstance(result, BinaryResponse):
        _json_response(result)
    return result


def render(table: Any) -> None:
    """Print a table as a terminal would show it."""
    output = io.StringIO()
    Console(file=output, width=120).print(table)
    found = control_characters(output.getvalue())
    assert not found, f"control characters reach the terminal: {found!r}"


def _open_in_lab(attempt: Attempts, folder: Path, state: Path) -> tuple[Workspace, Any]:
    workspace = Workspace(state)
    return workspace, attempt("lab opens", workspace.open, folder)


# Recordings


def use_recording(attempt: Attempts, folder: Path, scratch: Path) -> None:
    """Load a recording; tables, pages, figures, exact weights; save it again; open it in the lab and the terminal."""
    recording = attempt("load", load_recording, folder)
    attempt("regard look", run_command, "look", str(folder), "--csv", str(scratch / "look.csv"))
    if recording is None:
        return
    attempt("repr", repr, recording)
    attempt("heads", recording.heads)
    attempt("table", lambda: render(recording.table()))
    attempt("table of groups", lambda: render(recording.table(groups=True)))
    attempt("csv", recording.to_csv)
    attempt("json", recording.to_json)
    attempt("html", recording.to_html)
    attempt("sizes", recording.sizes)
    attempt("rollout", interp.rollout, recording)
    observations = attempt("observations", recording.observations) or {}
    for observation in observations.values():
        _use_observation(attempt, observation)
    if attempt.number % RARELY == 0:
        attempt("figure of heads", figures.heads, recording)
        for path in list(recording)[:1]:
            attempt("map figure", figures.head_map, recording, path, 0)
            attempt("profile figure", figures.head_profile, recording, path, 0)
            attempt("lines figure", figures.head_lines, recording, path, 0)
    attempt("save", _save_again, recording, scratch / "again")
    workspace, item = _open_in_lab(attempt, folder, scratch / "state")
    if item is not None:
        _request_recording(attempt, workspace, item.id, len(observations))
    workspace.close()


def _save_again(recording: Recording, folder: Path) -> None:
    recording.save(folder)
    load_recording(folder)


def _use_observation(attempt: Attempts, observation: Observation) -> None:
    attempt("repr of an observation", repr, observation)
    for name in ("logit_max", "entropy", "distance", "visible", "groups"):
        attempt("mean", observation.mean, name)
    attempt("group map", observation.group_map)
    heads = attempt("head numbers", lambda: observation.heads) or ()
    for head in (*heads[:4], 99):
        for batch in (0, 1):
            attempt("weights", observation.weights, head, batch=batch)
            attempt("weights of rows", observation.weights, head, -1, [0, 0, -1], batch=batch)
            attempt("tile", observation.tile, head, size=3, batch=batch)
            attempt("tile of a region", observation.tile, head, slice(1, 4), slice(0, 4), size=2, batch=batch)
        attempt("visible keys", observation.visible_keys, head)
        attempt("value weighted", observation.value_weighted, head)
    attempt("merge", lambda: observation.merge(observation))


def _request_recording(attempt: Attempts, workspace: Workspace, recording: str, layers: int) -> None:
    attempt("lab workspace", request, workspace, "/api/workspace")
    attempt("lab recording", request, workspace, "/api/look/recording", recording=recording)
    for place in range(layers):
        head = {"recording": recording, "place": place, "head": 1}
        attempt("lab levels", request, workspace, "/api/look/levels", **head)
        attempt("lab tile", request, workspace, "/api/look/tile", **head, level=0, x=0, y=0)
        attempt("lab row", request, workspace, "/api/look/row", **head, row=1)
        attempt("lab column", request, workspace, "/api/look/row", **head, row=1, direction="to")
        attempt("lab weight", request, workspace, "/api/look/why", **head, row=1, key=1)
        attempt("lab head", request, workspace, "/api/look/head", **head)
        attempt("lab variant", request, workspace, "/api/look/head", **head, beta=2.0, mask=False)
        attempt("lab hard", request, workspace, "/api/look/levels", **head, hard=True, position=False)
    for kind in ("html", "csv", "json"):
        attempt(f"lab {kind}", request, workspace, "/api/look/export", recording=recording, format=kind)


# Model folders


def use_model(attempt: Attempts, folder: Path, scratch: Path) -> None:
    """Load a model, run it, generate, describe it, count its cost, save it; open it in the lab and the terminal."""
    attempt("regard budget", run_command, "budget", str(folder / "config.json"), "--tokens", "16")
    config = attempt("budget of a config", budget.from_config, folder)
    if config is not None:
        attempt("plan", lambda: str(budget.plan(config, tokens=16)))
    attempt("regard describe", run_command, "describe", str(folder))
    text = scratch / "text.txt"
    text.write_text(TEXT)
    attempt("regard look", run_command, "look", str(folder), "--text", str(text))
    workspace, _ = _open_in_lab(attempt, folder, scratch / "state")
    attempt("lab workspace", request, workspace, "/api/workspace")
    workspace.close()
    model = attempt("load", models.load, folder)
    if model is None:
        return
    attempt("describe", lambda: str(models.describe(model)))
    attempt("forward", _forward, model)
    if isinstance(model, TextGenerator):
        attempt("generate", model.generate, torch.tensor([[1, 2, 3]]), 2)
        attempt("stream", lambda: list(model.stream(TEXT, 2)))
    attempt("save", lambda: model.save(scratch / "again"))


def use_gguf(attempt: Attempts, folder: Path, scratch: Path) -> None:
    """Load a GGUF file, run it, generate, describe it, save it as a folder; open it in the lab and the terminal."""
    file = folder / "model.gguf"
    attempt("regard describe", run_command, "describe", str(file))
    text = scratch / "text.txt"
    text.write_text(TEXT)
    attempt("regard look", run_command, "look", str(file), "--text", str(text), "--csv", str(scratch / "look.csv"))
    if file.exists():  # the command refuses what is not there, before the lab opens it
        workspace, _ = _open_in_lab(attempt, file, scratch / "state")
        attempt("lab workspace", request, workspace, "/api/workspace")
        workspace.close()
    model = attempt("load", models.load, file)
    if model is None:
        return
    attempt("forward", _forward, model)
    attempt("generate", model.generate, torch.tensor([[1, 2, 3]]), 2)
    attempt("stream", lambda: list(model.stream(TEXT, 2)))
    attempt("tokens", model.tokenizer.tokens, [0, 1, 36])
    attempt("save", lambda: model.save(scratch / "again"))


def _forward(model: Any) -> None:
    with torch.no_grad():
        if isinstance(model, ImageModel):
            model(torch.zeros(1, model.vit.channels, *model.vit.image))
        elif isinstance(model, TextToText):
            model(torch.tensor([[1, 2, 3]]), torch.tensor([[1, 2]]))
        else:
            model(torch.tensor([[1, 2, 3]]))


def use_preprocessor(attempt: Attempts, folder: Path, scratch: Path) -> None:
    """Load an image model and give it an image file."""
    picture = folder / "picture.png"
    attempt("regard look", run_command, "look", str(folder), "--image", str(picture))
    model = attempt("load", models.load, folder)
    if not isinstance(model, ImageModel):
        return
    pixels = attempt("preprocess", model.preprocessor, picture)
    if pixels is not None:
        attempt("forward", lambda: model(pixels))
    attempt("look", lambda: interp.look(model, image=picture).to_html())


def use_tokenizer(attempt: Attempts, folder: Path, scratch: Path) -> None:
    """Load a model with a tokenizer, and read texts with it in every way."""
    # Here, not at the top: this imports transformers, which takes seconds.
    from support.text_tokenizers import TEXTS

    model = attempt("load", models.load, folder)
    attempt("lab opens", _open_and_close, folder, scratch / "state")
    if model is None:
        return
    tokenizer = model.tokenizer
    for text in (TEXT, *TEXTS.values()):
        ids = attempt("encode", tokenizer.encode, text) or []
        attempt("decode", tokenizer.decode, ids)
        attempt("tokens", tokenizer.tokens, ids)
        attempt("stream", lambda ids=ids: list(tokenizer.decode_stream(iter(ids))))
        attempt("labels", label_tokens, tokenizer, text)
        attempt("labels of ids", label_tokens, tokenizer, ids=[*ids, 399, 400])
    if hasattr(tokenizer, "encode_pair"):
        attempt("pair", tokenizer.encode_pair, TEXT, TEXT)
    attempt("length", len, tokenizer)
    if isinstance(model, TextGenerator):
        attempt("generate", model.generate, TEXT, 2)
    attempt("look", lambda: interp.look(model, TEXT).to_html())
    text_file = scratch / "text.txt"
    text_file.write_text(TEXT)
    attempt("regard look", run_command, "look", str(folder), "--text", str(text_file), "--generate", "2")
    attempt("regard generate", run_command, "generate", str(folder), TEXT, "--length", "2")


def _open_and_close(folder: Path, state: Path) -> None:
    workspace = Workspace(state)
    try:
        workspace.open(folder)
    finally:
        workspace.close()


# Recipes and runs


def use_recipe(attempt: Attempts, folder: Path, scratch: Path) -> None:
    """Read a recipe, check it against every task, and build the models of the tasks that accept it."""
    file = folder / "recipe.toml"
    entries = attempt("read", read_recipe, file)
    for name in TASKS:
        attempt("regard train", run_command, "train", name, "--config", str(file), "--recipe")
    if entries is None:
        return
    name = entries.pop("task", None)
    task = TASKS.get(name) if isinstance(name, str) else None
    if task is None:
        return
    recipe = attempt("check", task.default_recipe.with_changes, entries)
    if recipe is None:
        return
    attempt("write", recipe.to_toml)
    attempt("task", task, recipe, scratch / "data")


def use_checkpoint(attempt: Attempts, folder: Path, scratch: Path) -> None:
    """Load the model of a run, read the run as the lab does, and continue its training."""
    attempt("load model", load_trained_model, folder, task=Tiny)
    attempt("load step 2", load_trained_model, folder, 2, task=Tiny)
    _use_run_in_lab(attempt, folder, scratch)
    before = snapshot(folder)
    result = attempt("train", train, Tiny, folder, RUN_CHANGES)
    after = snapshot(folder)
    if result is None:
        lost = sorted(name for name in before if name not in after and not name.endswith(".lock"))
        attempt.expect("train", not lost, f"it failed and removed {lost}")
    else:
        attempt.expect("train", result.steps == RUN_CHANGES["steps"], f"it ended at step {result.steps}")
        attempt("load model again", load_trained_model, folder, task=Tiny)


def use_record(attempt: Attempts, folder: Path, scratch: Path) -> None:
    """Read the records of a run: every value, table, map, figure and file, and the lab's Evolve page."""
    evolution = attempt("evolution", training.evolution, folder)
    if evolution is not None:
        attempt("repr", repr, evolution)
        for name in attempt("names", evolution.names) or ():
            attempt("value", evolution.value, name)
        attempt("rows", evolution.rows)
        attempt("arrivals", evolution.arrivals)
        attempt("counts", lambda: evolution.counts)
        attempt("table of types", lambda: render(evolution.table()))
        attempt("table of heads", lambda: render(evolution.table(heads=True)))
        attempt("csv", evolution.to_csv)
        attempt("json", evolution.to_json)
        attempt("describe", evolution.describe_records)
        for path, head in evolution.heads[:3]:
            attempt("map", evolution.map, evolution.steps[-1], path, head)
            attempt("profile", evolution.profile, evolution.steps[-1], path, head)
        if attempt.number % RARELY == 0:
            attempt("figures", training_figures.save_figures, evolution, scratch)
    _use_run_in_lab(attempt, folder, scratch)


def _use_run_in_lab(attempt: Attempts, folder: Path, scratch: Path) -> None:
    workspace, item = _open_in_lab(attempt, folder, scratch / "state")
    attempt("lab runs", request, workspace, "/api/evolve/runs")
    if item is not None and item.kind == "run":
        _request_run(attempt, workspace, item.id)
    workspace.close()


def _request_run(attempt: Attempts, workspace: Workspace, run: str) -> None:
    attempt("lab run", request, workspace, "/api/evolve/run", run=run)
    attempt("lab value", request, workspace, "/api/evolve/value", run=run, name="entropy")
    attempt("lab maps", request, workspace, "/api/evolve/maps", run=run, step=2)
    attempt("lab film", request, workspace, "/api/evolve/film", run=run, head=0)
    attempt("lab profiles", request, workspace, "/api/evolve/film", run=run, head=0, of="profile")
    attempt("lab offsets", request, workspace, "/api/evolve/offsets", run=run)


# The lab's own folder


def use_lab_state(attempt: Attempts, folder: Path, scratch: Path) -> None:
    """Start the lab three times in a damaged state folder, and look at everything that is open."""
    before = snapshot(folder)
    for _ in range(3):
        workspace = attempt("start", Workspace, folder)
        if workspace is None:
            continue
        attempt("lab workspace", request, workspace, "/api/workspace")
        attempt("lab runs", request, workspace, "/api/evolve/runs")
        for item in workspace.items("recording"):
            _request_recording(attempt, workspace, item.id, 1)
        for item in workspace.items("run"):
            _request_run(attempt, workspace, item.id)
        attempt("close", workspace.close)
    _expect_nothing_lost(attempt, before, folder)
    workspace = attempt("start", Workspace, folder)
    if workspace is None:
        return
    attempt("undo", request, workspace, "/api/workspace/undo", item="r00000003")
    attempt("lab workspace", request, workspace, "/api/workspace")
    attempt("close", workspace.close)
    _expect_nothing_lost(attempt, before, folder)


def _expect_nothing_lost(attempt: Attempts, before: dict[str, str], folder: Path) -> None:
    """Every file must still exist somewhere in the folder; the lab may move them, and writes its own list anew."""
    contents = set(snapshot(folder).values())
    lost = []
    for name, content in before.items():
        is_list = name == "lab.json" or (name.startswith("trash/") and name.count("/") == 1)
        if content not in contents and not is_list:
            lost.append(name)
    attempt.expect("lab", not lost, f"it removed {lost}")
