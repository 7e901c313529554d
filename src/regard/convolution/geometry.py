"""Where a convolution looks: offsets of its taps, what it pads, which places it answers for."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Geometry", "places"]

MODES = {"zeros": "constant", "reflect": "reflect", "replicate": "replicate", "circular": "circular"}


@dataclass(frozen=True)
class Geometry:
    """``y_i = Σ_Δ W_Δ x_{s·i + Δ} + b``: one entry an axis (p axes: 1 on a line, 2 in the plane), rows before columns.

    Δ = d·k − before for tap k = 0 … K − 1, so that Δ = 0 is the pixel itself where the padding is that of "same".
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    before: tuple[int, ...]  # padded before the first place of an axis, and after its last
    after: tuple[int, ...]
    groups: int
    channels: int
    out: int
    mode: str

    @classmethod
    def of(cls, conv: nn.Conv1d | nn.Conv2d) -> Geometry:
        """That of a layer; layers that are no plain convolution of one or two axes are refused."""
        if type(conv) not in (nn.Conv1d, nn.Conv2d):
            raise TypeError(
                f"{type(conv).__name__} cannot be converted; nn.Conv1d and nn.Conv2d can, transposed, lazy and 3-D "
                "ones cannot"
            )
        kernel, dilation = tuple(conv.kernel_size), tuple(conv.dilation)
        if conv.padding == "same":
            total = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
            before = tuple(t // 2 for t in total)
            after = tuple(t - b for t, b in zip(total, before, strict=True))
        else:
            before = after = (0,) * len(kernel) if isinstance(conv.padding, str) else tuple(conv.padding)
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
        """p: 1 on a line, 2 in the plane."""
        return len(self.kernel)

    @property
    def shifts(self) -> list[tuple[int, ...]]:
        """Δ of each tap, in the order of the kernel's entries: one head each."""
        each = zip(self.kernel, self.dilation, self.before, strict=True)
        return list(product(*([d * k - b for k in range(size)] for size, d, b in each)))

    def padded(self, x: Tensor) -> Tensor:
        """``x [*, C, *size]`` with what the layer pads."""
        width = [n for pair in zip(reversed(self.before), reversed(self.after), strict=True) for n in pair]
        return F.pad(x, width, mode=MODES[self.mode]) if any(width) else x

    def answered(self, size: tuple[int, ...], *, dense: bool = False) -> list[range]:
        """The places s·i, an axis, for which there is an output; ``dense``: all that stride 1 would have."""
        found = []
        each = zip(size, self.kernel, self.stride, self.dilation, self.before, self.after, strict=True)
        for n, k, s, d, b, a in each:
            last = n + b + a - d * (k - 1) - 1
            if last < 0:
                raise ValueError(
                    f"an input of {n} with padding is {n + b + a} wide, narrower than the kernel, which spans "
                    f"{d * (k - 1) + 1}"
                )
            found.append(range(0, last + 1, 1 if dense else s))
        return found


def places(axes: list[range], *, like: Tensor) -> Tensor:
    """``[N, p]``: all places of a grid, row by row, in a tensor's dtype and on its device."""
    each = [torch.tensor(list(axis), dtype=like.dtype, device=like.device) for axis in axes]
    return torch.stack([x.flatten() for x in torch.meshgrid(*each, indexing="ij")], -1)
