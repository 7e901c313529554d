"""Run models of Hugging Face ``transformers`` on regard's attention.

``install()`` registers the attention and the mask function under the name ``"regard"``; after that
``model.set_attn_implementation("regard")`` works. ``use(model)`` does both, and checks that the model calls regard's
attention and still computes the same output.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard import _hooks as hooks
from regard._errors import RegardError, RegardTypeError
from regard._operator import attention
from regard.interp._head_outputs import head_outputs
from regard.interp._mask_tensor import mask_value_of
from regard.interp._selected_keys import selected_keys
from regard.interp._transformers_masks import (
    CacheMask,
    implied_mask,
    make_eager_mask,
    make_mask,
    mask_and_bias,
    wrap_generate,
)

__all__ = ["NAME", "install", "use"]

NAME = "regard"
# For models that run on eager attention, some of them because they know no other. They expect eager attention's masks.
EAGER_NAME = "regard_eager"
TOLERANCE = 1e-3  # relative to the largest output; a mask that is ignored changes outputs by far more


@dataclass
class _SwitchedConfig:
    """A config within ``switched``: the name that it had before, and how many contexts switched it."""

    config: Any
    name: Any
    contexts: int = 0


# By identity, because configs have no hash. The entries keep the configs alive.
_switched: dict[int, _SwitchedConfig] = {}
_switched_lock = threading.Lock()


def install() -> None:
    """Register regard's attention and mask functions in ``transformers`` as ``"regard"``; a second call has no effect.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> sizes = {"vocab_size": 64, "n_embd": 12, "n_layer": 2, "n_head": 3, "bos_token_id": 0, "eos_token_id": 0}
    >>> install()
    >>> model = GPT2LMHeadModel(GPT2Config(**sizes, attn_implementation="regard"))
    >>> model(torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3, 64])
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)
    AttentionInterface.register(EAGER_NAME, attend_eager)
    AttentionMaskInterface.register(EAGER_NAME, make_eager_mask)
    wrap_generate()


def use(model: Any, *inputs: Any, **named_inputs: Any) -> Any:
    """Set a model of ``transformers`` to regard's attention permanently, and check the result.

    The check runs the model twice in eval mode, with its old implementation and with regard's.

    - ``model``: a ``PreTrainedModel``.
    - ``inputs``, ``named_inputs``: what the check calls the model with; a few random tokens or a small random image by
      default.

    Returns the model. Raises ``RegardError`` if the model never calls regard's attention, or if its output changes; the
    model then keeps its old implementation.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> sizes = {"vocab_size": 64, "n_embd": 12, "n_layer": 2, "n_head": 3, "bos_token_id": 0, "eos_token_id": 0}
    >>> use(GPT2LMHeadModel(GPT2Config(**sizes))).config._attn_implementation
    'regard'
    """
    if not isinstance(model, nn.Module) or not is_pretrained(model):
        raise RegardTypeError(
            f"model must be a model of transformers, got {type(model).__name__}; regard.watch takes any model"
        )
    old_names = _implementations(model)
    if not inputs and not named_inputs:
        named_inputs = _short_input(model)
    observer = hooks.Observer(model)
    training = model.training
    model.eval()
    try:
        # The first batch entry of the first result: the short input never pads it.
        with torch.no_grad():
            before = model(*inputs, **named_inputs)[0][:1]
            _switch(model)
            with hooks.registered(observer, observer.paths):
                after = model(*inputs, **named_inputs)[0][:1]
        if not observer.reached:
            raise RegardError(
                f"{type(model).__name__} never calls transformers' attention interface; it keeps its own attention"
            )
        same_shape = before.shape == after.shape
        if not same_shape or not bool((before - after).abs().max() <= TOLERANCE * (1 + before.abs().max())):
            raise RegardError(f"{type(model).__name__} has another output with regard's attention; it keeps its own")
    except BaseException:
        _restore(old_names)
        raise
    finally:
        model.train(training)
    return model


@contextmanager
def switched(model: nn.Module) -> Iterator[None]:
    """Run every ``transformers`` model inside ``model`` on regard's attention within the context.

    ``regard.watch`` and ``ablate`` enter it:

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> sizes = {"vocab_size": 64, "n_embd": 12, "n_layer": 2, "n_head": 3, "bos_token_id": 0, "eos_token_id": 0}
    >>> model = GPT2LMHeadModel(GPT2Config(**sizes))
    >>> before = model.config._attn_implementation
    >>> with regard.watch(model):
    ...     print(model.config._attn_implementation)
    regard
    >>> model.config._attn_implementation == before
    True
    """
    pretrained = list(filter(is_pretrained, model.modules()))
    configs: dict[int, Any] = {}
    for module in pretrained:
        for config, name in _implementations(module):
            if id(config) in configs:
                continue
            configs[id(config)] = config
            with _switched_lock:
                # Contexts may end in another order than they began.
                entry = _switched.setdefault(id(config), _SwitchedConfig(config, name))
                entry.contexts += 1
    for module in pretrained:
        _switch(module)
    try:
        yield
    finally:
        with _switched_lock:
            for config in configs.values():
                entry = _switched[id(config)]
                entry.contexts -= 1
                if entry.contexts == 0:
                    config._attn_implementation_internal = entry.name
                    del _switched[id(config)]


def is_pretrained(module: nn.Module) -> bool:
    """Whether a module is a model of ``transformers``; the check does not import it."""
    for base in type(module).__mro__:
        if base.__name__ == "PreTrainedModel" and base.__module__ == "transformers.modeling_utils":
            return True
    return False


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, Any]:
    """The attention function that is registered with ``transformers``: ``[B, H, n, d]`` → ``[B, n, H, e]``.

    The order of operations is the same in both libraries: scaling, softcap, position bias, mask, softmax with sinks.
    The second result, where ``transformers`` expects weights, is the ``Observation`` of an observer or None.
    """
    if attention_mask is None:
        attention_mask = implied_mask(module, query.shape[-2], options)
    return attend_eager(module, query, key, value, attention_mask, scaling, dropout, **options)


def attend_eager(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, Any]:
    """``attend`` for models that only know eager attention: without a mask, every key is visible."""
    # The masks of `make_mask` hold the mask value they were made from.
    mask_value = mask_value_of(attention_mask)
    if mask_value is not None:
        attention_mask = mask_value
    if isinstance(attention_mask, CacheMask):
        key = key[..., : attention_mask.key_count, :]
        value = value[..., : attention_mask.key_count, :]
    mask, bias = mask_and_bias(key.shape[-2], attention_mask, options)
    selected = selected_keys(module, query, key, options)
    if selected is not None:
        mask = selected if mask is None else mask & selected
    call: dict[str, Any] = {
        "mask": mask,
        "bias": bias,
        "scale": scaling,
        "softcap": options.get("softcap"),
        "sinks": options.get("s_aux"),
        "dropout": dropout if module.training else 0.0,
    }
    # The registry is empty unless something is observed, and this is called in every layer.
    observation = None
    if hooks.observed and module in hooks.observed:
        out, observation = hooks.observed[module](module, query, key, value, **call)
    elif torch.compiler.is_compiling():
        out = attention(query, key, value, **call)
    else:
        with hooks.own_computation():
            out = attention(query, key, value, **call)
    # Merged attention (T5 Gemma 2) cuts the weights into those of self-attention and those of cross-attention.
    if type(module).__name__.endswith("MergedAttention"):
        observation = None
    joined = out.transpose(1, 2).contiguous()
    head_outputs.pass_on(out, joined, heads=joined.transpose(1, 2))
    return joined, observation


def _implementations(model: Any) -> list[tuple[Any, Any]]:
    """Every config inside a model, with the name of the attention implementation that it holds."""
    # Several modules may share a config, and a config has no hash.
    configs: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation_internal"):
            configs[id(config)] = config
    return [(config, config._attn_implementation_internal) for config in configs.values()]


def _switch(model: Any) -> None:
    install()
    if all(name in (NAME, EAGER_NAME) for _, name in _implementations(model)):
        return
    were_eager = {id(config) for config, name in _implementations(model) if name == "eager"}
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(_is_not_about_support)
    try:
        model.set_attn_implementation(NAME)
    finally:
        logger.removeFilter(_is_not_about_support)
    # What ran on eager attention may use its masks in code of its own.
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        is_eager = id(config) in were_eager or (is_pretrained(module) and not module._supports_sdpa)
        if is_eager and getattr(config, "_attn_implementation_internal", None) == NAME:
            config._attn_implementation_internal = EAGER_NAME


def _is_not_about_support(record: logging.LogRecord) -> bool:
    """False for the warnings about models that write attention by hand: it is observed without a switch."""
    message = record.getMessage()
    return not ("does not support setting" in message or "without finding the associated sub-model" in message)


def _restore(old_names: list[tuple[Any, Any]]) -> None:
    for config, name in old_names:
        config._attn_implementation_internal = name


def _short_input(model: Any) -> dict[str, Any]:
    """A few random tokens, or a small random image, to check a model with."""
    generator = torch.Generator().manual_seed(0)
    parameter = next(model.parameters())
    config = model.config
    name = model.main_input_name
    if name == "pixel_values":
        size = config.image_size
        if not isinstance(size, list | tuple):
            size = (size, size)
        pixels = torch.randn(1, config.num_channels, *size, generator=generator)
        return {name: pixels.to(parameter.device, parameter.dtype)}
    if name != "input_ids":
        raise RegardError(f"{type(model).__name__} takes {name}; give use(model, …) an input for its check")

    # The second text is padded, as in an ordinary batch.
    ids = torch.randint(config.get_text_config().vocab_size, (2, 7), generator=generator).to(parameter.device)
    real = torch.tensor([[1] * 7, [1] * 5 + [0] * 2], device=parameter.device)
    short_input = {"input_ids": ids, "attention_mask": real}
    if config.is_encoder_decoder:
        short_input["decoder_input_ids"] = ids[:, :5]
    return short_input
