"""The room «convolution» of the lab: a kernel and a picture in; both outputs, their difference and its bound out."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from regard.lab.endpoints import Asked, Bytes, Endpoints
from regard.lab.lab import Lab

__all__ = ["ENDPOINTS", "Convolve", "Errors", "Heads", "Mode"]

ENDPOINTS = Endpoints()

Number = Annotated[float, Meta(ge=-1000, le=1000)]
Alpha = Annotated[float, Meta(ge=0.05, le=1000)]
Step = Annotated[int, Meta(ge=1, le=3)]
Side = Annotated[int, Meta(ge=1, le=28)]
Kernel = Annotated[list[Annotated[list[Number], Meta(min_length=1, max_length=7)]], Meta(min_length=1, max_length=7)]
Picture = Annotated[list[Annotated[list[Number], Meta(min_length=1, max_length=28)]], Meta(min_length=1, max_length=28)]
Mode = Literal["zeros", "reflect", "replicate", "circular"]


class Convolve(Asked, frozen=True):
    """A kernel K × K, a picture of one channel, and how the one is laid on the other. ``alpha`` None: hard, exact."""

    kernel: Kernel
    picture: Picture
    mode: Mode = "zeros"
    stride: Step = 1
    dilation: Step = 1
    alpha: Alpha | None = None


class Errors(Asked, frozen=True):
    """The same for several α: as many as can be computed while a person waits."""

    alphas: Annotated[list[Alpha], Meta(min_length=1, max_length=4)]
    kernel: Kernel
    picture: Picture
    mode: Mode = "zeros"
    stride: Step = 1
    dilation: Step = 1


class Heads(Asked, frozen=True):
    """Where heads look from one output pixel: positions alone say it, not the kernel's entries nor the picture's."""

    size: Annotated[int, Meta(ge=1, le=7)]
    height: Side
    width: Side
    row: Annotated[int, Meta(ge=0, le=60)]
    column: Annotated[int, Meta(ge=0, le=60)]
    stride: Step = 1
    dilation: Step = 1
    alpha: Alpha | None = None


@ENDPOINTS.get("/api/convolution")
def start(lab: Lab, asked: Any) -> dict[str, Any]:
    """Pictures to begin with: digits where scikit-learn is there, and generated ones."""
    from regard.lab import convolution_pictures

    return convolution_pictures.pictures()


@ENDPOINTS.post("/api/convolution/both", Convolve)
def both(lab: Lab, asked: Convolve) -> dict[str, Any]:
    """A convolution's output, attention's, their difference, its largest entry and the bound on it."""
    from regard.lab import convolution_answers

    return convolution_answers.both(asked)


@ENDPOINTS.post("/api/convolution/errors", Errors)
def errors(lab: Lab, asked: Errors) -> dict[str, Any]:
    """The largest difference and its bound for each α."""
    from regard.lab import convolution_answers

    return convolution_answers.errors(asked)


@ENDPOINTS.get("/api/convolution/heads", Heads)
def heads(lab: Lab, asked: Heads) -> Bytes:
    """Every head's weights on all pixels, padded ones too, from one output pixel: float32 [K², height, width]."""
    from regard.lab import convolution_answers

    return convolution_answers.heads(asked)
