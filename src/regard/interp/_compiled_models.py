"""Run compiled models without their graphs while they are observed: a graph does not call observers."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

# The compiler has one stance for all threads. The first context sets it, and the last one restores it.
_lock = threading.Lock()
_stance = ExitStack()
_contexts = 0


@contextmanager
def without_compiled_graphs() -> Iterator[None]:
    """Within the context the code of a compiled model runs as if it had not been compiled, in all threads.

    >>> f = torch.compile(lambda x: x + int(torch.compiler.is_compiling()), backend="eager")
    >>> with without_compiled_graphs():
    ...     f(torch.zeros(1))
    tensor([0.])
    """
    # Importing the compiler takes more than a second. Without it, nothing was compiled.
    if "torch._dynamo" not in sys.modules or _in_compiled_code():
        yield
        return
    _enter()
    try:
        yield
    finally:
        _leave()


def _in_compiled_code() -> bool:
    """Whether compiled code runs in this thread. The stance cannot be changed there."""
    from torch._C._dynamo.eval_frame import get_eval_frame_callback

    return get_eval_frame_callback() not in (None, False)


def _enter() -> None:
    global _contexts
    with _lock:
        if _contexts == 0:
            _stance.enter_context(torch.compiler.set_stance("force_eager"))
        _contexts += 1


def _leave() -> None:
    global _contexts
    with _lock:
        _contexts -= 1
        if _contexts == 0:
            _stance.close()
