"""The observers of a thread that torch's functions are intercepted for, and what runs in their models now."""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch

from regard._errors import RegardError
from regard._hooks import Observer
from regard._running_modules import RunningModules


class ActiveObservers(threading.local):
    """The observers of this thread, in the order in which they began. Their models may be parts of one another."""

    def __init__(self) -> None:
        self.observers: list[Observer] = []

    def running(self) -> RunningModules | None:
        """The modules that run now, as the observer of the largest model knows them; None outside of all models."""
        found = None
        for observer in self.observers:
            if observer.running.stack and (found is None or len(observer.running.stack) > len(found.stack)):
                found = observer.running
        return found

    def paths(self) -> list[tuple[Observer, str]]:
        """Every observer in whose model a module runs now, with the path of that module."""
        paths = []
        for observer in self.observers:
            innermost = observer.running.innermost
            if innermost is not None:
                paths.append((observer, innermost.path))
        return paths

    def is_selected(self) -> bool:
        """Whether an observer selects the module that runs now."""
        return any(observer.select(path) for observer, path in self.paths())

    def reached(self) -> list[tuple[Observer, str]]:
        """``paths()`` of a module that computes attention; empty if no observer selects it.

        Raises ``RegardError`` if heads would be replaced that backward computes again without replacing them.
        """
        paths = self.paths()
        for observer, path in paths:
            number = observer.reach(path)
            if observer.replaces(path, number) and _is_checkpointed():
                raise RegardError(
                    f"heads of {path!r} cannot be replaced with gradient checkpointing, because the backward pass "
                    "would compute them again without the replacement; turn checkpointing off"
                )
        # If no observer selects the module, torch's own function runs.
        return paths if self.is_selected() else []

    def note_unseen(self) -> None:
        """Remember that the module that runs now computes attention that is not observed."""
        note_unseen(self.paths())


def note_unseen(paths: list[tuple[Observer, str]]) -> None:
    """Remember that attention was computed at these paths that is not observed."""
    for observer, path in paths:
        if path not in observer.unseen:
            observer.unseen.append(path)


def graph_is_checkpointed() -> bool:
    """Whether what backward needs is packed by hooks, as non-reentrant gradient checkpointing does.

    It runs the model again in backward, where torch turns modes off, and must then find the same operations.
    """
    return _hooks_of_saved_tensors() is not None


def _hooks_of_saved_tensors() -> Any:
    if not torch.is_grad_enabled():
        return None
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _is_checkpointed() -> bool:
    """Whether torch's gradient checkpointing, of either kind, will run the code that runs now again in backward."""
    checkpointing: Any = sys.modules.get("torch.utils.checkpoint")
    if checkpointing is None:
        return False
    if torch.is_grad_enabled():
        hooks = _hooks_of_saved_tensors()
        return hooks is not None and hooks[0].__module__ == checkpointing.__name__
    # The reentrant kind runs the model without gradients in the forward function of an autograd function.
    code = checkpointing.CheckpointFunction.forward.__code__
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code is code:
            return any(frame.f_locals["ctx"].needs_input_grad)
        frame = frame.f_back
    return False
