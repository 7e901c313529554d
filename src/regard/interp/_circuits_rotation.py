"""Rotary positions of a layer, as a diagonal of phases: measured from rotated and plain vectors of a run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Rotation:
    """``R_p = Tᴴ diag(e^{i p φ}) T``: the rotation of a vector ``[d]`` by p positions.

    - ``basis``: T, complex and unitary ``[d, d]``. Each pair of features gives two conjugate coordinates.
    - ``phases``: φ ``[d]`` in radians per position: ±θ of a pair, and 0 of a feature that is not rotated.

    >>> rotation = Rotation.of_pairs(torch.tensor([[0, 1]]), torch.tensor([torch.pi / 2]), width=2)
    >>> rotation.matrix(1).round().tolist()
    [[0.0, -1.0], [1.0, 0.0]]
    """

    basis: Tensor
    phases: Tensor

    @classmethod
    def of_pairs(cls, pairs: Tensor, theta: Tensor, width: int) -> Rotation:
        """The rotation of the feature pairs ``[r/2, 2]`` by θ ``[r/2]`` per position, of vectors of a width."""
        basis = torch.eye(width, dtype=torch.complex128)
        phases = torch.zeros(width, dtype=torch.float64)
        for (a, b), angle in zip(pairs.tolist(), theta.tolist(), strict=True):
            # (x_a + i x_b)/√2 turns by +θ, and its conjugate by −θ.
            basis[[a, b]] = 0
            basis[a, a] = basis[b, a] = 0.5**0.5
            basis[a, b] = 1j * 0.5**0.5
            basis[b, b] = -1j * 0.5**0.5
            phases[a] = angle
            phases[b] = -angle
        return cls(basis, phases)

    def matrix(self, position: float) -> Tensor:
        """R_p ``[d, d]`` in float64, for column vectors: R_p x."""
        return self._real(torch.exp(1j * position * self.phases))

    def mean_matrix(self, offsets: Tensor) -> Tensor:
        """The mean of R_p over offsets p."""
        return self._real(torch.exp(1j * torch.outer(offsets.double(), self.phases)).mean(0))

    def mean_turned(self, moments: Tensor, offsets: Tensor, inverse: bool = False) -> Tensor:
        """The mean of ``R_p M R_pᵀ`` over offsets p, for symmetric M ``[*, d, d]``; ``inverse``: of ``R_pᵀ M R_p``."""
        phases = self.phases
        if inverse:
            phases = -phases
        turns = torch.exp(1j * torch.outer(offsets.double(), phases))
        # Entry (a, b) of T M Tᴴ turns by e^{ip(φ_a − φ_b)}, so the mean over p is a product with fixed factors.
        factors = turns.T @ turns.conj() / len(offsets)
        turned = self.basis @ moments.to(torch.complex128) @ self.basis.mH
        return (self.basis.mH @ (turned * factors) @ self.basis).real.to(moments.dtype)

    def _real(self, diagonal: Tensor) -> Tensor:
        return (self.basis.mH @ (diagonal.unsqueeze(-1) * self.basis)).real


def no_rotation(width: int) -> Rotation:
    """The rotation that does nothing."""
    return Rotation(torch.eye(width, dtype=torch.complex128), torch.zeros(width, dtype=torch.float64))


def find_rotation(plain: list[Tensor], turned: list[Tensor], tolerance: float) -> Rotation | None:
    """The rotation that turns row i of the plain vectors into row i of the turned ones; None if there is none.

    - ``plain``, ``turned``: queries and keys ``[B, H, n, d]`` before and after. Row i has position i.
    """
    width = plain[0].shape[-1]
    if _agree(plain, turned, tolerance):
        return no_rotation(width)
    # Features behind the rotated ones stay the same.
    changed = torch.zeros(width, dtype=torch.bool)
    for before, after in zip(plain, turned, strict=True):
        size = before.abs().amax(dim=(0, 1, 2)).clamp(min=1e-300)
        changed |= (after - before).abs().amax(dim=(0, 1, 2)) > tolerance * size
    last = int(changed.nonzero().max()) + 1
    # Slow pairs at the end may look unchanged, so more widths than the smallest one are tried.
    for rotated in dict.fromkeys((width, last + last % 2, width // 2, width // 4)):
        if rotated % 2 or not 2 <= rotated <= width:
            continue
        half = rotated // 2
        index = torch.arange(half)
        for pairs in (torch.stack([index, index + half], 1), torch.stack([2 * index, 2 * index + 1], 1)):
            rotation = Rotation.of_pairs(pairs, _angles(plain, turned, pairs), width)
            if _agree([apply(rotation, x) for x in plain], turned, tolerance):
                return rotation
    return None


def apply(rotation: Rotation, x: Tensor) -> Tensor:
    """Rotate ``x [*, n, d]``: row i by i positions."""
    positions = torch.arange(x.shape[-2], dtype=torch.float64)
    turns = torch.exp(1j * torch.outer(positions, rotation.phases))
    coordinates = x.to(torch.complex128) @ rotation.basis.T
    return ((coordinates * turns) @ rotation.basis.conj()).real.to(x)


def _angles(plain: list[Tensor], turned: list[Tensor], pairs: Tensor) -> Tensor:
    """θ of each pair, from the angle at position 1, and then more exactly from those at 2, 4, 8, …"""
    length = min(x.shape[-2] for x in plain)
    theta = _angle_at(plain, turned, pairs, 1)
    position = 2
    while position < length:
        rest = _angle_at(plain, turned, pairs, position) - position * theta
        wrapped = torch.remainder(rest + torch.pi, 2 * torch.pi) - torch.pi
        theta = theta + wrapped / position
        position *= 2
    return theta


def _angle_at(plain: list[Tensor], turned: list[Tensor], pairs: Tensor, position: int) -> Tensor:
    total = torch.zeros(len(pairs), dtype=torch.complex128)
    for before, after in zip(plain, turned, strict=True):
        total += (_pair(after, pairs, position) * _pair(before, pairs, position).conj()).sum((0, 1))
    return total.angle()


def _pair(x: Tensor, pairs: Tensor, position: int) -> Tensor:
    """The pairs of one row as complex numbers ``[B, H, pairs]``."""
    row = x[..., position, :].double()
    return torch.complex(row[..., pairs[:, 0]], row[..., pairs[:, 1]])


def _agree(found: list[Tensor], expected: list[Tensor], tolerance: float) -> bool:
    return all(bool((x - y).norm() <= tolerance * y.norm()) for x, y in zip(found, expected, strict=True))
