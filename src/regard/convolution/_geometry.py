"""The geometry of a convolution: the offset of each tap, the padding, and the input positions that have an output."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard._errors import RegardError, RegardTypeError

# The name of each padding mode in ``nn.Conv2d``, and its name in ``F.pad``.
PAD_MODES = {"zeros": "constant", "reflect": "reflect", "replicate": "replicate", "circular": "circular"}


@dataclass(frozen=True)
class Geometry:
    """Sizes of the convolution ``y_i = Σ_Δ W_Δ x_{s·i + Δ} + b``.

    Each tuple has one entry per axis (1 axis for a sequence, 2 for an image), rows before columns. Tap k = 0 … K − 1
    has the offset Δ = d·k − before. With "same" padding the middle tap therefore has Δ = 0: the pixel itself.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    before: tuple[int, ...]  # padding before the first position of each axis
    after: tuple[int, ...]  # padding after the last position of each axis
    groups: int
    channels: int
    out: int
    mode: str

    @classmethod
    def of(cls, conv: nn.Conv1d | nn.Conv2d) -> Geometry:
        """Return the geometry of a layer; only ``nn.Conv1d`` and ``nn.Conv2d`` themselves are accepted."""
        # Subclasses may compute something else, so the type must match exactly.
        if type(conv) not in (nn.Conv1d, nn.Conv2d):
            raise RegardTypeError(f"conv must be an nn.Conv1d or nn.Conv2d, not a subclass, got {type(conv).__name__}")
        kernel = tuple(conv.kernel_size)
        dilation = tuple(conv.dilation)

        if conv.padding == "same":
            total = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
            before = tuple(t // 2 for t in total)
            after = tuple(t - b for t, b in zip(total, before, strict=True))
        elif conv.padding == "valid":
            before = after = (0,) * len(kernel)
        else:
            before = after = tuple(conv.padding)  # type: ignore[arg-type]

        return cls(
            kernel=kernel,
            stride=tuple(conv.stride),
            dilation=dilation,
            before=before,
            after=after,
            groups=conv.groups,
            channels=conv.in_channels,
            out=conv.out_channels,
            mode=conv.padding_mode,
        )

    @property
    def axes(self) -> int:
        """p: 1 for a sequence, 2 for an image."""
        return len(self.kernel)

    @property
    def shifts(self) -> list[tuple[int, ...]]:
        """The offset Δ of each tap, in the order of the kernel's entries. Each tap becomes one head."""
        per_axis = []
        for size, dilation, before in zip(self.kernel, self.dilation, self.before, strict=True):
            per_axis.append([dilation * k - before for k in range(size)])
        return list(product(*per_axis))

    def pad(self, x: Tensor) -> Tensor:
        """Return ``x [*, C, *size]`` with the padding of the layer added."""
        # F.pad takes the last axis first: (before, after) of the columns, then of the rows.
        widths: list[int] = []
        for before, after in zip(reversed(self.before), reversed(self.after), strict=True):
            widths += [before, after]
        if not any(widths):
            return x
        return F.pad(x, widths, mode=PAD_MODES[self.mode])

    def output_positions(self, size: tuple[int, ...], *, dense: bool = False) -> list[range]:
        """Return the input positions s·i that have an output, per axis; ``dense`` returns those for stride 1.

        ``size`` is the size of the input without padding.
        """
        positions = []
        sizes = zip(size, self.kernel, self.stride, self.dilation, self.before, self.after, strict=True)
        for n, kernel, stride, dilation, before, after in sizes:
            span = dilation * (kernel - 1) + 1
            padded = n + before + after
            if padded < span:
                raise RegardError(f"the padded input must be at least {span} wide, as the kernel is, got {padded}")
            step = 1 if dense else stride
            positions.append(range(0, padded - span + 1, step))
        return positions


def grid_positions(axes: list[range], *, like: Tensor) -> Tensor:
    """Return all positions of a grid, row by row, ``[N, p]``, in the dtype and on the device of ``like``."""
    coordinates = [torch.tensor(list(axis), dtype=like.dtype, device=like.device) for axis in axes]
    return torch.stack([x.flatten() for x in torch.meshgrid(*coordinates, indexing="ij")], -1)
