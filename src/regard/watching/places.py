"""Where keys stand relative to queries, and weights summed by that: on a line, and on a grid of patches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Where"]


@dataclass(frozen=True)
class Where:
    """Where keys stand relative to queries: on a line, or on a grid behind ``m − height·width`` other tokens.

    A pair's place is the number of its offset. A pair that stands nowhere on the grid has the place behind the last.
    """

    n: int
    m: int
    grid: tuple[int, int] | None

    @property
    def places(self) -> int:
        if self.grid is None:
            return self.n + self.m - 1
        return (2 * self.grid[0] - 1) * (2 * self.grid[1] - 1)

    def offsets(self) -> Tensor:
        """The offset at each place, ``[1 or 2, places]``: key − query; on a grid down, then across."""
        if self.grid is None:
            return torch.arange(1 - self.m, self.n).double().unsqueeze(0)
        height, width = self.grid
        down, across = torch.arange(1 - height, height), torch.arange(1 - width, width)
        return torch.stack([down.repeat_interleave(2 * width - 1), across.repeat(2 * height - 1)]).double()

    def coordinates(self) -> tuple[Tensor, Tensor]:
        """Of the queries ``[n, axes]`` and of the keys ``[m, axes]``, float64; 0 where a token stands nowhere."""
        query, key = torch.arange(self.n) + self.m - self.n, torch.arange(self.m)
        if self.grid is None:
            return query.double().unsqueeze(-1), key.double().unsqueeze(-1)
        return self._cells(query), self._cells(key)

    def nowhere(self) -> Tensor:
        """Queries that stand nowhere ``[n]``, bool."""
        first = 0 if self.grid is None else self.m - self.grid[0] * self.grid[1]
        return torch.arange(self.n) + self.m - self.n < first

    def place(self, rows: slice) -> Tensor:
        """The places of pairs ``[r, m]``."""
        query, key = self.coordinates()
        query = query[rows].long()
        if self.grid is None:
            return key.long().squeeze(-1) - query + self.m - 1
        height, width = self.grid
        delta = key.long() - query.unsqueeze(1)
        found = (delta[..., 0] + height - 1) * (2 * width - 1) + delta[..., 1] + width - 1
        beside = torch.arange(self.m) < self.m - height * width
        return found.masked_fill(beside | self.nowhere()[rows].unsqueeze(-1), self.places)

    def laid_out(self, x: Tensor, rows: slice, place: Tensor) -> Tensor:
        """``x [K, r, m]`` by place: ``[K, r, places + 1]``, 0 at offsets that a row has no key at."""
        K, r, m = x.shape
        if self.grid is not None:
            return x.new_zeros(K, r, self.places + 1).scatter_(2, place.expand_as(x), x)
        # Rows are written one by one place further right in a table that is read one place wider: offsets line up.
        wide = m + r - 1
        table = x.new_zeros(K, r * (wide + 1))
        table[:, : r * wide].view(K, r, wide)[:, :, r - 1 :] = x
        return table.view(K, r, wide + 1)[:, :, :wide]

    def span(self, rows: slice) -> slice:
        """Which places ``laid_out`` gives for these rows."""
        if self.grid is not None:
            return slice(0, self.places + 1)
        return slice(self.n - rows.stop, self.n - rows.start + self.m - 1)

    def _cells(self, at: Tensor) -> Tensor:
        assert self.grid is not None
        height, width = self.grid
        at = at - (self.m - height * width)
        found = torch.stack([torch.div(at, width, rounding_mode="floor"), at % width], -1)
        return found.masked_fill((at < 0).unsqueeze(-1), 0).double()
