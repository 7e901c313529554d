"""Our own layers: each ``MultiHeadAttention`` observes itself when it is asked to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from regard.nn import MultiHeadAttention
from regard.observables import Observe
from regard.watching.recorder import Recorder, first

__all__ = ["asked"]


@contextmanager
def asked(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Within: every wanted layer is called with ``observe``, and what it saw is taken from its result.

    Layers that are not wanted are left as they are, and run at full speed.
    """
    asked_for: dict[str, Observe] = {}
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, MultiHeadAttention) and recorder.wants(recorder.paths[module]):
                path = recorder.paths[module]
                before = module.register_forward_pre_hook(_asking(recorder, path, asked_for), with_kwargs=True)
                after = module.register_forward_hook(_taking(recorder, path, asked_for), with_kwargs=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
        yield


def _asking(recorder: Recorder, path: str, asked_for: dict[str, Observe]) -> Any:
    def ask(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if kwargs.get("observe") is not None or not recorder.wants(path):
            return None
        asked_for[path] = recorder.spec(path, (args[0] if args else kwargs["x"]).shape[-2])
        return args, kwargs | {"observe": asked_for[path]}

    return ask


def _taking(recorder: Recorder, path: str, asked_for: dict[str, Observe]) -> Any:
    def take(module: nn.Module, args: Any, kwargs: Any, result: Any) -> Any:
        if asked_for.pop(path, None) is None:  # whoever asked for it themselves gets what they asked for
            return None
        out, observation = first(result)
        recorder.add(path, observation)
        return out

    return take
