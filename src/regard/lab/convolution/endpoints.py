"""Endpoints of the Convolution page. They take a kernel and an image, and return both outputs and their difference."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from regard.lab.convolution import responses
from regard.lab.convolution.images import sample_images
from regard.lab.endpoint import BinaryResponse, Endpoints, Request
from regard.lab.workspace import Workspace

ENDPOINTS = Endpoints()

Number = Annotated[float, Meta(ge=-1000, le=1000)]
Alpha = Annotated[float, Meta(ge=0.05, le=1000)]
Step = Annotated[int, Meta(ge=1, le=3)]
Side = Annotated[int, Meta(ge=1, le=28)]
Kernel = Annotated[list[Annotated[list[Number], Meta(min_length=1, max_length=7)]], Meta(min_length=1, max_length=7)]
Pixels = Annotated[list[Annotated[list[Number], Meta(min_length=1, max_length=28)]], Meta(min_length=1, max_length=28)]
PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]


class ConvolutionRequest(Request, frozen=True, kw_only=True):
    """A kernel K × K, an image of one channel, and the options of the convolution."""

    kernel: Kernel
    picture: Pixels
    mode: PaddingMode = "zeros"
    stride: Step = 1
    dilation: Step = 1


class CompareRequest(ConvolutionRequest, frozen=True, kw_only=True):
    """``alpha`` is the sharpness of the attention; None means hard attention, which is exact."""

    alpha: Alpha | None = None


class ErrorsRequest(ConvolutionRequest, frozen=True, kw_only=True):
    """Several values of alpha. Their number is limited, because a person waits for the response."""

    alphas: Annotated[list[Alpha], Meta(min_length=1, max_length=4)]


class HeadsRequest(Request, frozen=True):
    """An output pixel. Weights depend on positions only, so no kernel or image is needed, only their sizes."""

    size: Annotated[int, Meta(ge=1, le=7)]
    height: Side
    width: Side
    row: Annotated[int, Meta(ge=0, le=60)]
    column: Annotated[int, Meta(ge=0, le=60)]
    stride: Step = 1
    dilation: Step = 1
    alpha: Alpha | None = None


@ENDPOINTS.get("/api/convolution")
def start(workspace: Workspace, request: Any) -> dict[str, Any]:
    """List images to begin with: digits if scikit-learn is installed, and generated ones."""
    return sample_images()


@ENDPOINTS.post("/api/convolution/both", CompareRequest)
def compare(workspace: Workspace, request: CompareRequest) -> dict[str, Any]:
    """Return the outputs of a convolution and of its attention, their difference, and the bound on it."""
    return responses.compare(request)


@ENDPOINTS.post("/api/convolution/errors", ErrorsRequest)
def errors(workspace: Workspace, request: ErrorsRequest) -> dict[str, Any]:
    """Return the largest difference and its bound for each alpha."""
    return responses.errors(request)


@ENDPOINTS.get("/api/convolution/heads", HeadsRequest)
def heads(workspace: Workspace, request: HeadsRequest) -> BinaryResponse:
    """Return every head's weights from one output pixel on all padded pixels: float32 [K², height, width]."""
    return responses.head_weights(request)
