"""Responses of the Convolution page: a convolution and the attention that equals it, compared in float64."""

from __future__ import annotations

import math
import threading
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from regard._errors import RegardError
from regard._observables import Observe
from regard.convolution import AttentionConvolution, to_attention
from regard.lab.endpoint import BinaryResponse, float32_response

if TYPE_CHECKING:
    from regard.lab.convolution.endpoints import CompareRequest, ConvolutionRequest, ErrorsRequest, HeadsRequest

# torch warns that it copies the image to pad for an even kernel. The page offers even kernels, so this is expected.
warnings.filterwarnings("ignore", message="Using padding='same' with even", category=UserWarning)

# Threads that run many small tensor operations slow each other down, so one request computes at a time.
COMPUTE_LOCK = threading.Lock()

MAX_WEIGHTS = 24_000_000  # attention weights of all heads that one response may compute


def _convolution(kernel: list[list[float]], *, mode: str, stride: int, dilation: int) -> nn.Conv2d:
    """Return the layer with this kernel: one channel, no bias, and one output pixel per ``stride`` pixels."""
    side = len(kernel)
    if any(len(row) != side for row in kernel):
        lengths = ", ".join(str(len(row)) for row in kernel)
        raise RegardError(f"kernel must be square, got {side} rows of lengths {lengths}")
    # An even kernel needs one more pixel on one side. "same" adds it, but torch supports "same" only with stride 1.
    padding: Any = "same" if stride == 1 else dilation * (side - 1) // 2
    options: dict[str, Any] = {"stride": stride, "dilation": dilation, "padding": padding, "padding_mode": mode}
    conv = nn.Conv2d(1, 1, side, bias=False, dtype=torch.float64, **options)
    with torch.no_grad():
        conv.weight.copy_(torch.tensor(kernel, dtype=torch.float64))
    return conv


def _layer_and_image(request: ConvolutionRequest) -> tuple[nn.Conv2d, Tensor]:
    """Return the convolution and the image ``[1, 1, height, width]`` of a request, after checks."""
    conv = _convolution(request.kernel, mode=request.mode, stride=request.stride, dilation=request.dilation)
    lengths = sorted({len(row) for row in request.picture})
    if len(lengths) != 1:
        raise RegardError(f"picture must have rows of one length, got rows of lengths {lengths}")
    image = torch.tensor(request.picture, dtype=torch.float64)[None, None]
    _check_sizes(conv, image)
    return conv, image


def _check_sizes(conv: nn.Conv2d, image: Tensor) -> None:
    """Raise an error for paddings that torch cannot do, and for images with too many attention weights."""
    geometry = to_attention(conv).geometry
    height, width = image.shape[-2:]
    padding = max(*geometry.before, *geometry.after)
    side = min(height, width)
    if (geometry.mode == "reflect" and padding >= side) or (geometry.mode == "circular" and padding > side):
        raise RegardError(f"mode={geometry.mode!r} cannot pad a side of {side} pixels by {padding}; use another mode")
    queries = math.prod(len(axis) for axis in geometry.output_positions((height, width)))
    keys = geometry.pad(image)[0, 0].numel()
    weights = len(geometry.shifts) * queries * keys
    if weights > MAX_WEIGHTS:
        raise RegardError(f"{weights:,} weights exceed the limit of {MAX_WEIGHTS:,}; use a smaller picture or kernel")


def _alpha(alpha: float | None) -> float:
    return math.inf if alpha is None else alpha


@torch.no_grad()
def compare(request: CompareRequest) -> dict[str, Any]:
    """Return both outputs, their difference, and the library's bound on it."""
    conv, image = _layer_and_image(request)
    layer = to_attention(conv, alpha=_alpha(request.alpha))
    with COMPUTE_LOCK:
        expected = conv(image)[0, 0]
        output = layer(image)[0, 0]
    difference = output - expected
    return {
        "convolution": expected.tolist(),
        "attention": output.tolist(),
        "difference": difference.tolist(),
        "largest": float(difference.abs().max()),
        "bound": float(layer.error_bound(image).max()),
        "padded": layer.geometry.pad(image)[0, 0].tolist(),
        "before": list(layer.geometry.before),
        "shifts": [list(shift) for shift in layer.shifts],
    }


@torch.no_grad()
def errors(request: ErrorsRequest) -> dict[str, Any]:
    """Return the largest difference and the bound for each alpha."""
    conv, image = _layer_and_image(request)
    expected = conv(image)
    response: dict[str, list[float]] = {"alphas": [], "errors": [], "bounds": []}
    for alpha in request.alphas:
        layer = to_attention(conv, alpha=alpha)
        with COMPUTE_LOCK:  # taken anew for each alpha, so that other requests are served in between
            error = float((layer(image) - expected).abs().max())
        response["alphas"].append(alpha)
        response["errors"].append(error)
        response["bounds"].append(float(layer.error_bound(image).max()))
    return response


@torch.no_grad()
def head_weights(request: HeadsRequest) -> BinaryResponse:
    """Return the weights of all heads from one output pixel."""
    # Weights do not depend on values, so any kernel and any image of these sizes give them.
    kernel = [[1.0] * request.size] * request.size
    conv = _convolution(kernel, mode="zeros", stride=request.stride, dilation=request.dilation)
    image = torch.zeros(1, 1, request.height, request.width, dtype=torch.float64)
    _check_sizes(conv, image)
    layer = to_attention(conv, alpha=_alpha(request.alpha))
    with COMPUTE_LOCK:
        return float32_response(_weights(layer, image, request.row, request.column))


def _weights(layer: AttentionConvolution, image: Tensor, row: int, column: int) -> Tensor:
    """Return ``[heads, height, width]``: each head's weights on the padded image."""
    positions, queries, keys = layer._tokens(image)
    rows, columns = (len(axis) for axis in positions)
    if row >= rows or column >= columns:
        raise RegardError(f"row and column must be inside the output of {rows} × {columns}, got ({row}, {column})")
    query = row * columns + column
    _, observation = layer.attention(queries[:, query : query + 1], keys, observe=Observe(keep=True))
    weights = torch.stack([observation.weights(head)[0] for head in range(len(layer.shifts))])
    return weights.unflatten(-1, layer.geometry.pad(image).shape[-2:])
