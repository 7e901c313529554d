"""Starts the Triton kernels. Importing this module imports Triton; the package does so at the first call.

Nothing here waits for the GPU: no value is read back, also not to find out whether a result is finite.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from regard._lowered_scores import Scores
from regard.kernels.triton._call import Call
from regard.kernels.triton._hard import fill_hard_max
from regard.kernels.triton._tile_sizes import TileSize, padded_width, tile_size

# Whether kernels run in Triton's interpreter, on the CPU. Triton decides it when it is imported, by TRITON_INTERPRET.
INTERPRETED = isinstance(fill_hard_max, InterpretedFunction)


def run_kernel(kernel: Any, programs: int, tile: TileSize, arguments: dict[str, Any]) -> None:
    """Start ``programs`` programs of a kernel. The script that compiles all variants replaces this function."""
    if programs == 0:
        return
    with _device_of(arguments["call"].q.data):
        kernel[(programs,)](**arguments, num_warps=tile.warps, num_stages=tile.stages)


def _device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Triton starts kernels on the current device, which need not be that of the call."""
    return torch.cuda.device_of(x) if x.is_cuda else nullcontext()


def score_mode(scale: float) -> str:
    """How products become scores; ``_logits.py`` explains the three ways."""
    if scale == 0:
        return "zero"
    if math.isinf(scale):
        return "hard"
    return "scaled"


def widths(call: Call) -> dict[str, int]:
    """The widths of q and v, and of their tiles, as constants of a kernel."""
    D = call.q.data.shape[3]
    E = call.v.data.shape[3]
    return {"D": D, "E": E, "D_PADDED": padded_width(D), "E_PADDED": padded_width(E)}


def choose_tile(kind: str, call: Call) -> TileSize:
    """The tile of a pass over this call."""
    sizes = widths(call)
    # Values may be wider numbers than queries: those of groups of keys are float32.
    bytes_per_number = max(call.q.data.element_size(), call.v.data.element_size())
    return tile_size(kind, bytes_per_number, max(sizes["D_PADDED"], sizes["E_PADDED"]))


def forward_kind(call: Call, *, observed: bool) -> str:
    """The kind of tile of a forward pass."""
    if observed:
        return "forward observed"
    options = (call.mask, call.bias, call.softcap, call.seed)
    if call.terms or any(option is not None for option in options):
        return "forward with options"
    return "forward"


def count_row_tiles(call: Call, tile: TileSize) -> int:
    """The number of tiles of queries, over all heads and batch entries."""
    return call.B * call.H * -(-call.N // tile.rows)


def with_hard_max(call: Call) -> Call:
    """The call with the largest product of each row, if it is hard attention."""
    if not math.isinf(call.scale):
        return call
    hard_max = torch.empty(call.B, call.H, call.N, dtype=torch.float32, device=call.q.data.device)
    tile = choose_tile("weights", call)
    arguments = {"call": call, "hard_max_of_rows": hard_max, "D": call.q.data.shape[3]}
    arguments |= {"ROWS": tile.rows, "KEYS": tile.keys}
    run_kernel(fill_hard_max, count_row_tiles(call, tile), tile, arguments)
    return call._replace(hard_max=hard_max)


def may_hide_keys(scores: Scores) -> bool:
    """Whether some key may be hidden from some row, so that 0 · NaN of a hidden pair can reach a result."""
    options = (scores.lo, scores.hi, scores.mask, scores.bias)
    return bool(scores.terms) or any(x is not None for x in options)


def new_flags(programs: int, call: Call, scores: Scores) -> Tensor | None:
    """One flag per program, which reports a result that is not finite; None if no key can be hidden."""
    if not may_hide_keys(scores):
        return None
    return torch.empty(programs, dtype=torch.int32, device=call.q.data.device)
