"""Gradient checkpointing of the blocks of any model, within a context: backward computes a block again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from regard._hooks import Observer
from regard.interp import huggingface
from regard.interp._torch_adapter import capture_interception
from regard.nn import Block

# Parts of the names of classes and attributes that compute attention.
_ATTENTION_NAMES = ("attn", "attention")


@contextmanager
def recomputed_blocks(observer: Observer) -> Iterator[None]:
    """Within the context a backward pass computes the blocks of the observer's model again, one at a time.

    What a block computes inside is then not stored for the backward pass, only its input. The observer acts in the
    second run of a block too, so that both runs compute the same.
    """
    with ExitStack() as stack:
        for module in observer.paths:
            if huggingface.is_pretrained(module):
                _switch_cache_off(module, stack)
        for block in find_blocks(observer.model):
            stack.callback(_restore_forward, block, block.__dict__.get("forward"))
            # An attribute of the instance, because hooks of the module must run outside of what is recomputed.
            object.__setattr__(block, "forward", _recomputed(block.forward, observer))
        yield


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model, none within another.

    Blocks of regard and those that ``transformers`` itself can checkpoint. In other models the elements of a list of
    modules, if each of them contains attention by its name; of nested lists the inner one.

    >>> model = regard.nn.Encoder(6, heads=3, layers=2)
    >>> find_blocks(model) == list(model.blocks)
    True
    """
    blocks = _outermost(model, _is_known_block)
    if blocks:
        return blocks
    found: list[nn.Module] = []
    for module in model.modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        elements = list(module)
        if len(elements) > 1 and all(map(_contains_attention, elements)):
            # Lists come before the lists inside of them.
            inner = {id(part) for element in elements for part in element.modules()}
            found = [block for block in found if not any(id(part) in inner for part in block.modules())]
            found += elements
    return found


def _outermost(module: nn.Module, condition: Callable[[nn.Module], bool]) -> list[nn.Module]:
    if condition(module):
        return [module]
    found = []
    for child in module.children():
        found += _outermost(child, condition)
    return found


def _is_known_block(module: nn.Module) -> bool:
    if isinstance(module, Block):
        return True
    return any(base.__name__ == "GradientCheckpointingLayer" for base in type(module).__mro__)


def _contains_attention(module: nn.Module) -> bool:
    for path, part in module.named_modules():
        names = f"{path} {type(part).__name__}".lower()
        if any(name in names for name in _ATTENTION_NAMES):
            return True
    return False


def _switch_cache_off(module: nn.Module, stack: ExitStack) -> None:
    """A block that runs twice would append its keys to a cache twice."""
    config: Any = getattr(module, "config", None)
    if getattr(config, "use_cache", False):
        stack.callback(setattr, config, "use_cache", config.use_cache)
        config.use_cache = False


def _restore_forward(block: nn.Module, forward: Any) -> None:
    if forward is None:
        del block.__dict__["forward"]
    else:
        block.__dict__["forward"] = forward


def _recomputed(forward: Callable[..., Any], observer: Observer) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        resume = capture_interception()

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            return nullcontext(), resume()

        def run_block(*inner: Any, **named: Any) -> Any:
            outer = observer.replays
            observer.replays = True
            try:
                return forward(*inner, **named)
            finally:
                observer.replays = outer

        return checkpoint(run_block, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return run
