"""``regard look MODEL --text FILE``: load a model, observe its heads on an input, print them and write files."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from regard import models
from regard._config_json import LARGEST_JSON
from regard._error_report import error_line, is_report
from regard._errors import RegardError
from regard._files import read_regular
from regard._observables import Observation
from regard.cli.head_types import model_head_types
from regard.cli.look_printing import print_count, print_line, progress_bar
from regard.interp import Recording, load_recording
from regard.interp._atlas_store import model_fingerprint, stored_atlas
from regard.interp._audio_models import reads_audio
from regard.interp._group_table import group_columns, group_table
from regard.interp._groups_of import without_names
from regard.interp._head_table import HEAD_COLUMNS, head_table
from regard.interp._look import PAGE_OBSERVABLES, look
from regard.interp._page_types import add_types, page_types, types_metadata
from regard.interp._token_text import visible_label
from regard.models._folder import TOKENIZER, ModelFolder, shorten_list
from regard.models._gguf_format import is_gguf
from regard.models._load import check_finite
from regard.models._tokenizer import Tokenizer

# The entries of a recording that contain its input.
INPUT_METADATA = ("tokens", "ids", "text", "spans", "source", "source_text", "source_spans", "prompt_length", "image")


def observe_model(
    folder: Path,
    text: str | None,
    image: Path | None,
    *,
    tokens: int | None,
    generate: int | None,
    layers: str | None,
    keep: bool,
    no_text: bool,
    groups: str | None = None,
) -> Recording:
    """Load the model of a folder and observe it on a text or an image; the arguments are the options of the command."""
    loaded, tokenizer = load_model(folder, generates=generate is not None)
    with progress_bar("observing") as progress:
        recording = look(
            loaded,
            text,
            image,
            tokenizer=tokenizer,
            observe=replace(PAGE_OBSERVABLES, keep=keep),
            layers=layers,
            groups=groups,
            tokens=tokens,
            generate=generate,
            keep_input=not no_text,
            progress=progress,
        )
    # With this the lab finds the model of the recording among those that are open. A model of transformers has other
    # module paths than the lab's.
    if isinstance(loaded, models.Model):
        recording.metadata["model_files"] = model_fingerprint(folder)
    return recording


def read_recording(folder: Path, no_text: bool) -> Recording:
    """Load a recording, without the text or image in it if ``no_text`` is True."""
    recording = load_recording(folder)
    if no_text:
        metadata = recording.metadata
        recording.metadata = {name: metadata[name] for name in metadata if name not in INPUT_METADATA}
        # Names of groups may be parts of the text, unless it is known that they are not.
        if metadata.get("groups_by") not in ("special", "chat"):
            recording.calls = {path: [_unnamed(call) for call in calls] for path, calls in recording.calls.items()}
    return recording


def _unnamed(call: Observation) -> Observation:
    """An observation whose groups have numbers as names."""
    if call.observe.groups is None:
        return call
    return replace(call, observe=replace(call.observe, groups=without_names(call.observe.groups)))


def add_head_types(recording: Recording, folder: Path, compute: bool) -> None:
    """Put the types of the model's heads into a recording: stored ones, or computed ones if ``compute`` is True.

    Types come from probes, not from the text of the recording.
    """
    types = model_head_types(folder, None) if compute else stored_atlas(folder)
    if types is not None:
        recording.metadata["kinds"] = types_metadata(types)


def print_recording(recording: Recording, column: str, most: int, *, generated: bool, with_types: bool) -> None:
    """Print the table of heads, with their types if they were requested, and what the model generated."""
    rows = recording.heads()
    types = None
    if with_types:
        types = page_types(None, recording.metadata)
    typed = add_types(rows, types)
    Console().print(head_table(typed, column, most or None, has_cross=recording.has_cross()))  # 0 means all heads
    if types is not None:
        print_line(f"types from {types[0]}, not from this input")
    print_count(len(rows), most, column)
    if group_columns(rows):
        Console().print(group_table(rows, column if column in HEAD_COLUMNS else None, most or None))
    if recording.metadata.get("unknown_tokens"):
        print_line(f"note: {recording.metadata['unknown_tokens']}")
    if generated:
        _print_generated(recording)


def _print_generated(recording: Recording) -> None:
    """Print what the model generated, unless the recording was made without its text."""
    metadata = recording.metadata
    if "text" not in metadata:
        return
    # The answer of a text-to-text model is generated as a whole.
    first = metadata.get("prompt_length", 0)
    start = metadata["spans"][first][0]
    count = len(metadata["tokens"]) - first
    print_line(f"generated {count} tokens: {visible_label(metadata['text'][start:])}")


def write_files(recording: Recording, csv: Path | None, out: Path | None, html: Path | None) -> None:
    if csv is not None:
        recording.to_csv(csv)
        print_line(f"numbers: {csv}")
    if out is not None:
        recording.save(out)
        print_line(f"recording: {out}")
    if html is not None:
        recording.to_html(html)
        print_line(f"page: {html} ({html.stat().st_size / 1e6:.1f} MB)")


def load_model(folder: Path, *, generates: bool = False) -> tuple[nn.Module, Any]:
    """Load a model of this library, or a model and its tokenizer that only ``transformers`` can load.

    ``generates``: load a model of ``transformers`` with its language head, which predicts tokens.
    """
    if is_gguf(folder):
        return models.load(folder), None
    model_type = ModelFolder(folder).config.model_type
    in_python = "observe it in Python: with regard.watch(model) as recording: …"
    if reads_audio(folder):
        raise RegardError(
            f"{folder}: a {model_type} model reads audio, and regard look gives texts and images; {in_python}"
        )
    if model_type in models.model_types() or find_spec("transformers") is None:
        return models.load(folder), None
    _check_no_code(folder, model_type)
    try:
        with _quiet_transformers():
            loaded, tokenizer = _load_from_transformers(folder, generates)
    except BaseException as error:
        # Any error, panics too: a damaged file can make transformers fail in every way.
        if not is_report(error) or isinstance(error, RegardError | MemoryError):
            raise
        # The messages of transformers list all their classes, over many lines.
        raise RegardError(
            f"{folder}: transformers cannot load a {model_type} model that reads text "
            f"({error_line(error, longest=160)}); {in_python}"
        ) from None
    check_finite(loaded.named_parameters(), folder)
    return loaded, tokenizer


def _check_no_code(folder: Path, model_type: str) -> None:
    """Raise for a model whose own Python code would have to run, or code from the internet that its config names."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = ModelFolder(folder).config
    if model_type not in CONFIG_MAPPING:
        reason = "which transformers does not know"
        if "auto_map" in config:
            reason = "whose Python code is in the folder; code of a model is never run"
        raise RegardError(
            f"{folder} must be a model that regard or transformers can load, got {model_type!r}, {reason}"
        )
    for name, value in config.items():
        # A name with a slash is a repository of compiled kernels, which transformers would download and run.
        if name.endswith("_implementation") and "/" in str(value):
            raise RegardError(
                f"{folder}: config.json: {name} names code to download, {value!r:.80}, which is never run"
            )


def _load_from_transformers(folder: Path, generates: bool) -> tuple[nn.Module, Any]:
    import transformers

    # A damaged tokenizer.json makes the tokenizer of transformers panic, and this one report what is wrong.
    tokenizer_file = folder / TOKENIZER
    if tokenizer_file.exists():
        Tokenizer(read_regular(tokenizer_file, LARGEST_JSON)).encode("a")
    # Only local files and no code: a command must not download a model by itself, nor run Python that is in its folder.
    # None instead of False would ask on standard input whether to run it.
    options = {"local_files_only": True, "trust_remote_code": False}
    config = transformers.AutoConfig.from_pretrained(folder, **options)
    model_class: Any = transformers.AutoModel
    if config.is_encoder_decoder:
        model_class = transformers.AutoModelForSeq2SeqLM
    elif generates:
        model_class = transformers.AutoModelForCausalLM
    loaded, report = model_class.from_pretrained(folder, use_safetensors=True, output_loading_info=True, **options)
    random_weights = sorted([*report["missing_keys"], *[entry[0] for entry in report["mismatched_keys"]]])
    if random_weights:
        warnings.warn(
            f"{folder}: its files lack {shorten_list(random_weights)}; these weights are random", stacklevel=2
        )
    return loaded.eval(), transformers.AutoTokenizer.from_pretrained(folder, **options)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Switch off the messages and the progress bars of transformers, which print names from files as they are."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    shows_progress = logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shows_progress:
            logging.enable_progress_bar()
