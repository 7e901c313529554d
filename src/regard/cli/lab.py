"""``regard lab``: serve the web workbench and open it in a browser."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from regard import models
from regard._errors import RegardError
from regard._terminal import printable
from regard.cli.end_signals import EndSignals, exit_at_interrupt
from regard.cli.output_file import path_option
from regard.interp._head_table import head_table

if TYPE_CHECKING:
    from regard.lab.workspace import Workspace

FIRST_HEADS = 12  # rows of the table of heads in the terminal


def lab_command(
    folders: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL|RECORDING|RUN]…",
            help="what to open: folders of models, recordings of regard look --out, runs of regard train, records of a "
            "Recorder, or GGUF files; the default is the bundled model and its run",
            show_default=False,
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="address to listen on; 0.0.0.0 admits other machines that have the printed token")
    ] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="port to listen on; the default is the first free from 8421")
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            parser=path_option,
            metavar="FOLDER",
            help="folder for the lab's recordings and runs; default ~/.local/state/regard/lab",
        ),
    ] = None,
    no_token: Annotated[
        bool, typer.Option("--no-token", help="let every user of this machine use the lab, without a token")
    ] = False,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="print the address, do not open a browser")] = False,
    only_check: Annotated[bool, typer.Option("--check", help="start, send one request of each kind, exit")] = False,
) -> None:
    """Inspect, count, prove and change attention in a browser. Ctrl-C ends it.

    regard lab smollm2 runs/pixels
    """
    # Imported here, so that other commands do not wait for the server's libraries.
    with exit_at_interrupt():
        from regard.lab.server import check_server, check_token_option, running_server, serve
        from regard.lab.workspace import default_state_folder

    check_token_option(host, not no_token)
    # What the lab and its worker processes write contains texts of the user, so only the user can read it.
    os.umask(0o077)
    paths = [_checked_folder(text) for text in folders or ()] or [models.bundled()]
    if only_check:
        # A separate state folder, so that a lab that runs at the same time is not disturbed.
        with TemporaryDirectory() as scratch:
            workspace = _open_workspace(paths, state or Path(scratch))
            with running_server(workspace, host=host, port=port, needs_token=not no_token) as lab:
                for line in check_server(lab):
                    typer.echo(line)
            return typer.echo("the lab responds")
    browser = sys.stdout.isatty() and not os.environ.get("SSH_CONNECTION") and not no_browser
    with EndSignals() as signals:
        workspace = _open_workspace(paths, state or default_state_folder())
        signals.is_serving = True
        try:
            has_ended = serve(
                workspace,
                host=host,
                port=port,
                needs_token=not no_token,
                browser=browser,
                should_stop=lambda: signals.requested,
            )
        finally:
            workspace.close()
        if not has_ended:
            # A request still computes. Everything is saved, and Python cannot end while other threads compute.
            os._exit(0)


def _checked_folder(text: str) -> Path:
    """Return the path of a folder that exists. An empty text is refused: as a path it would mean the current folder."""
    accepted = "give a folder with config.json (a model), recording.json, run.json or records of heads, or a GGUF file"
    if not text.strip():
        raise RegardError(f"folder must not be an empty text; {accepted}")
    path = Path(text)
    if not path.exists():
        raise FileNotFoundError(f"{text} does not exist; {accepted}")
    return path


def _open_workspace(folders: list[Path], state: Path) -> Workspace:
    """Open the folders, print the first heads as a table, and start a worker process that waits for jobs."""
    from regard.lab.first_recording import ensure_recording
    from regard.lab.workspace import Workspace

    workspace = Workspace(state)
    recording = ensure_recording(workspace, [workspace.open(folder) for folder in folders])
    if recording is not None:
        Console().print(head_table(recording.heads(), "peak", FIRST_HEADS))
        # As in ``regard look``: the heads of a model that cannot read the text show little of what they do.
        if recording.metadata.get("unknown_tokens"):
            typer.echo(printable(f"note: {recording.metadata['unknown_tokens']}"))
    workspace.jobs.warm_up("look")
    return workspace
