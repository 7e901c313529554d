"""The recorder in ``transformers``' own training: ``Trainer(…, callbacks=[RecorderCallback("run/evolution")])``."""

from __future__ import annotations

import importlib
import os
from functools import lru_cache
from typing import Any

from regard.training.recorder import Recorder

__all__ = ["RecorderCallback"]


def RecorderCallback(folder: str | os.PathLike[str], tokenizer: Any = None, **options: Any) -> Any:
    """A ``TrainerCallback`` that records how heads evolve into ``folder``; ``options`` are those of ``Recorder``.

    The tokenizer is the trainer's ``processing_class`` unless given (or ``images=`` or ``probes=``). Training that goes
    on from a checkpoint goes on with its records. All processes take part, and the first one writes.

    >>> callback = RecorderCallback("runs/gpt2/evolution", share=0.02)
    >>> callback.folder, callback.options  # transformers.Trainer(…, callbacks=[callback])
    ('runs/gpt2/evolution', {'share': 0.02})
    """
    return _made()(folder, tokenizer, options)


@lru_cache
def _made() -> type:
    """The class, made when it is first asked for: ``transformers`` is slow to import, and may not be there."""
    try:
        base: Any = importlib.import_module("transformers").TrainerCallback
    except ImportError:
        raise ImportError("RecorderCallback needs transformers, which is not installed") from None

    class HeadRecorder(base):
        def __init__(self, folder: str | os.PathLike[str], tokenizer: Any, options: dict[str, Any]) -> None:
            self.folder, self.tokenizer, self.options = folder, tokenizer, options
            self.recorder: Recorder | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            tokenizer = self.tokenizer
            if tokenizer is None and not {"images", "probes"} & set(self.options):
                tokenizer = given.get("processing_class")
            options: dict[str, Any] = {"total": state.max_steps or None} | self.options
            self.recorder = Recorder(given["model"], self.folder, tokenizer, **options)
            if state.global_step:
                self.recorder.back_to(state.global_step)
            self.recorder.step(state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            assert self.recorder is not None
            self.recorder.step(state.global_step)

        def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            assert self.recorder is not None
            self.recorder.finish(state.global_step)

    return HeadRecorder
