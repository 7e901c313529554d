"""Callbacks of the ``transformers`` Trainer: ``callbacks=[RecorderCallback("run/evolution"), MonitorCallback()]``."""

from __future__ import annotations

import importlib
import os
from functools import lru_cache
from typing import Any

from regard.training._monitor import AttentionMonitor
from regard.training._recorder import Recorder

__all__ = ["MonitorCallback", "RecorderCallback"]


def RecorderCallback(folder: str | os.PathLike[str], tokenizer: Any = None, **options: Any) -> Any:
    """Return a ``TrainerCallback`` that records how the heads of the trained model evolve.

    - ``folder``: where the records are written. A training that resumes from a checkpoint continues the records of this
      folder, without those after the checkpoint.
    - ``tokenizer``: by default the trainer's ``processing_class``; not used with ``images=`` or ``probes=``.
    - ``options``: further arguments of ``Recorder``, for example ``share``, the share of time for recording.

    With several processes all of them measure, and the first one (rank 0) writes the records. ``callback.recorder`` is
    the recorder; its ``left_out`` lists the records that were left out to keep to the share.

    >>> callback = RecorderCallback("runs/gpt2/evolution", share=0.02)
    >>> callback.folder, callback.options  # transformers.Trainer(…, callbacks=[callback])
    ('runs/gpt2/evolution', {'share': 0.02})
    """
    return _callback_class()(folder, tokenizer, options)


def MonitorCallback(file: str | os.PathLike[str] | None = None, **options: Any) -> Any:
    """Return a ``TrainerCallback`` with an ``AttentionMonitor`` of the trained model.

    - ``file``: a file to which one line of JSON is appended per step; None writes nothing.
    - ``options``: further arguments of ``AttentionMonitor``, for example ``every``.

    ``callback.monitor`` is the monitor; its ``records`` and ``warned`` stay after the training.

    >>> callback = MonitorCallback(every=10)
    >>> callback.monitor.every  # transformers.Trainer(…, callbacks=[callback])
    10
    """
    return _monitor_class()(AttentionMonitor(None, file, **options))


def _callback_base() -> Any:
    try:
        return importlib.import_module("transformers").TrainerCallback
    except ImportError:
        raise ImportError("this callback needs transformers, which is not installed") from None


@lru_cache
def _monitor_class() -> type:
    base: Any = _callback_base()

    class HeadMonitor(base):
        def __init__(self, monitor: AttentionMonitor) -> None:
            self.monitor = monitor

        def on_train_begin(self, args: Any, state: Any, control: Any, **trainer: Any) -> None:
            self.monitor.attach(trainer["model"])

        def on_step_end(self, args: Any, state: Any, control: Any, **trainer: Any) -> None:
            self.monitor.step(state.global_step)

        def on_train_end(self, args: Any, state: Any, control: Any, **trainer: Any) -> None:
            self.monitor.close()

    return HeadMonitor


@lru_cache
def _callback_class() -> type:
    """Create the class on first use: ``transformers`` is slow to import and may not be installed."""
    base: Any = _callback_base()

    class HeadRecorder(base):
        def __init__(self, folder: str | os.PathLike[str], tokenizer: Any, options: dict[str, Any]) -> None:
            self.folder = folder
            self.tokenizer = tokenizer
            self.options = options
            self.recorder: Recorder | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **trainer: Any) -> None:
            tokenizer = self.tokenizer
            if tokenizer is None and not {"images", "probes"} & set(self.options):
                tokenizer = trainer.get("processing_class")
            total = state.max_steps if state.max_steps > 0 else None
            options: dict[str, Any] = {"total": total} | self.options
            self.recorder = Recorder(trainer["model"], self.folder, tokenizer, **options)
            if state.global_step:
                self.recorder.resume_from(state.global_step)
            self.recorder.step(state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **trainer: Any) -> None:
            assert self.recorder is not None
            self.recorder.step(state.global_step)

        def on_train_end(self, args: Any, state: Any, control: Any, **trainer: Any) -> None:
            assert self.recorder is not None
            self.recorder.finish(state.global_step)

    return HeadRecorder
