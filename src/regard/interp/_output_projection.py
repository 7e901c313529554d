"""What the output projection W_O makes of each head, whatever holds it: a plain layer, or a wrapped or quantised one.

    G_h = W_h W_hᵀ [E, E],   W_h [E, D_out] = the rows of W_O that head h feeds

The weights of a plain linear layer are read. Other layers hold theirs in forms of their own (integers with scales, a
base layer and an update, files on disk), so the layer is asked: it is called on the rows of the identity matrix. This
costs as much as twice H·E tokens, so the answer is kept. It counts as long as the layer gives the same output, bit by
bit, for a few random inputs: a change of the weights or of an adapter changes that output.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from regard.nn._linear import Linear

# A layer that rounds its inputs to 8 bits is linear up to about 1 %. A layer that is not linear differs by far more.
LINEAR_UP_TO = 0.05
RANDOM_ROWS = 8
ROWS_PER_CALL = 4096  # of the identity matrix; all of them at once could need more memory than the model's own call

PLAIN_FORWARDS = (nn.Linear.forward, Linear.forward)


def input_width(module: nn.Module) -> int | None:
    """The number of inputs of a linear layer; None if the module does not look like one.

    Wrappers and quantised layers of other libraries need not be subclasses of ``nn.Linear``, but they have its
    ``in_features`` and ``out_features``. ``Conv1D`` is the linear layer of ``transformers``.
    """
    if type(module).__name__ == "Conv1D":
        return int(module.weight.shape[0])  # type: ignore[index]
    width = getattr(module, "in_features", None)
    if isinstance(width, int) and isinstance(getattr(module, "out_features", None), int):
        return width
    return None


@dataclass(frozen=True, eq=False)
class _Measured:
    """What was measured at a layer.

    - ``inputs``, ``outputs``: random inputs, and what the layer made of them; None if it made nothing of them.
    - ``grams``: the result; None if the layer is not linear, or does not take these inputs.
    """

    inputs: Tensor
    outputs: Tensor | None
    grams: Tensor | None


class OutputProjections:
    """Computes G_h of layers, and keeps what was measured."""

    def __init__(self) -> None:
        self._measured: WeakKeyDictionary[nn.Module, _Measured] = WeakKeyDictionary()

    def grams(self, layer: nn.Module, x: Tensor, heads: int) -> Tensor | None:
        """G_h of all heads, ``[H, E, E]`` in float32; None if the layer is not linear.

        - ``x [*, H·E]``: what the layer read.
        """
        # A compiled layer holds the layer that it was made from.
        original = getattr(layer, "_orig_mod", None)
        if isinstance(original, nn.Module):
            layer = original
        with torch.no_grad():
            with _undisturbed(layer):
                weight_DO = _plain_weight(layer)
                if weight_DO is not None:
                    W_OHE = weight_DO.unflatten(1, (heads, -1))
                    return torch.einsum("ohe,ohf->hef", W_OHE, W_OHE)
                measured = self._measured.get(layer)
                if measured is None or not _is_valid(measured, layer, x):
                    measured = _measure(layer, x.detach(), heads)
                    self._measured[layer] = measured
            return measured.grams


def _plain_weight(layer: nn.Module) -> Tensor | None:
    """The weight ``[D_out, D_in]`` of a layer that multiplies with an ordinary tensor; None if it may do more."""
    # Offloaded layers, whose weights are elsewhere between two calls, have a forward function of their own.
    if "forward" in layer.__dict__:
        return None
    is_conv1d = type(layer).__name__ == "Conv1D"
    if not is_conv1d and type(layer).forward not in PLAIN_FORWARDS:
        return None
    # Quantised weights are subclasses of Tensor.
    weight: Any = layer.weight
    if type(weight) not in (Tensor, nn.Parameter) or not weight.is_floating_point() or weight.is_meta:
        return None
    weight_DO: Tensor = weight.float()
    if is_conv1d:
        weight_DO = weight_DO.T
    return weight_DO


def _is_valid(measured: _Measured, layer: nn.Module, x: Tensor) -> bool:
    """Whether a layer still computes what was measured."""
    if measured.inputs.dtype != x.dtype or measured.inputs.device != x.device:
        return False
    outputs = _outputs(layer, measured.inputs, x.ndim)
    if outputs is None or measured.outputs is None:
        return outputs is measured.outputs
    return torch.equal(outputs, measured.outputs)


def _outputs(layer: nn.Module, rows: Tensor, ndim: int) -> Tensor | None:
    """What a layer makes of rows ``[R, D_in]``, as ``[R, D_out]``; None if it does not take them.

    - ``ndim``: how many axes the layer's own input has.
    """
    # Layers of other libraries may refuse a number of rows or of axes with any kind of error; norms are then unknown.
    try:
        outputs: Any = layer.forward(rows.reshape(*[1] * (ndim - 2), *rows.shape))
    except Exception:
        return None
    if not isinstance(outputs, Tensor) or outputs.ndim != max(ndim, 2) or outputs.shape[-2] != len(rows):
        return None
    return outputs.reshape(len(rows), -1)


def _measure(layer: nn.Module, x: Tensor, heads: int) -> _Measured:
    """Measure G_h by the outputs of a layer for the rows of s·I and −s·I.

    s is the size of the inputs that the layer reads: layers that round their inputs do it for this size. The mean of
    both signs has no bias, and no error of a rounding that is not symmetric.
    """
    width = x.shape[-1]
    size = x.abs().amax()
    if not bool(size.isfinite()) or not bool(size > 0):
        size = torch.ones_like(size)
    generator = torch.Generator().manual_seed(0)
    random = (2 * torch.rand(RANDOM_ROWS, width, generator=generator) - 1).to(x.device, x.dtype) * size
    inputs = torch.cat([random, -random, torch.zeros_like(random[:1])])
    outputs = _outputs(layer, inputs, x.ndim)
    if outputs is None:
        return _Measured(inputs, None, None)

    # The response to the random inputs. The layer is linear if it is the sum of the responses to single inputs, and if
    # a change of the sign only changes the sign of the response.
    response = _odd_part(outputs[:-1])
    even_part = outputs[:RANDOM_ROWS].float() - outputs[-1].float() - response
    total = torch.zeros_like(response)
    head_width = width // heads
    heads_per_call = max(1, ROWS_PER_CALL // (2 * head_width))
    grams = []
    for first in range(0, heads, heads_per_call):
        columns = slice(first * head_width, (first + heads_per_call) * head_width)
        identity = torch.eye(width, dtype=x.dtype, device=x.device)[columns] * size
        responses = _outputs(layer, torch.cat([identity, -identity]), x.ndim)
        if responses is None:
            return _Measured(inputs, outputs, None)
        W_ID = _odd_part(responses) / size.float()
        total += random[:, columns].float() @ W_ID
        W_HED = W_ID.unflatten(0, (-1, head_width))
        grams.append(W_HED @ W_HED.transpose(1, 2))
    error = torch.maximum((total - response).norm(), even_part.norm())
    if not bool(error <= LINEAR_UP_TO * response.norm()):
        return _Measured(inputs, outputs, None)
    return _Measured(inputs, outputs, torch.cat(grams))


def _odd_part(outputs: Tensor) -> Tensor:
    """(f(x) − f(−x)) / 2 from the outputs for x and, below them, those for −x."""
    plus, minus = outputs.float().chunk(2)
    return (plus - minus) / 2


@contextmanager
def _undisturbed(layer: nn.Module) -> Iterator[None]:
    """Call a layer without dropout, and without the hooks of those who observe its parts. Its buffers stay the same."""
    with ExitStack() as stack:
        for buffer in layer.buffers():
            # Offloaded buffers have no numbers now.
            if not buffer.is_meta:
                stack.callback(buffer.copy_, buffer.clone())
        for module in layer.modules():
            for name in ("_forward_pre_hooks", "_forward_hooks"):
                stack.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, OrderedDict())
            stack.callback(setattr, module, "training", module.training)
            module.training = False
        yield
