"""What the schemes, and the layers that hold them, share: checks, the initial law of learned tables, their dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from regard.masks import Mask
from regard.scores import Bias, SumOfBiases
from regard.shapes import integer, number, readable

INITIAL_STD = 0.02  # learned tables start as N(0, 0.02²), the usual law for embeddings


def table_dtype(q: Tensor) -> torch.dtype:
    """float64 for float64 queries, else float32: in bfloat16 a distance of 1,001 does not exist, so no table uses it.

    >>> table_dtype(torch.zeros(1, dtype=torch.bfloat16))
    torch.float32
    """
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def summing_dtype(q: Tensor) -> torch.dtype:
    """For tables in which many places share one parameter: float64 on a CPU, so that its gradient is summed in float64.

    >>> summing_dtype(torch.zeros(1, dtype=torch.bfloat16))
    torch.float64
    """
    return torch.float64 if q.device.type in ("cpu", "meta") else table_dtype(q)


def learned(*sizes: int) -> nn.Parameter:
    """A learned table of that size; ``reset`` gives it its first values."""
    return nn.Parameter(torch.empty(*sizes))


def reset(*tables: Tensor) -> None:
    """First values of learned tables: N(0, 0.02²)."""
    for table in tables:
        nn.init.normal_(table, std=INITIAL_STD)


def check_offset(offset: int | None) -> int | None:
    """``offset`` as given: None (the last query stands at the last key) or any whole number."""
    return None if offset is None else integer("offset", offset, least=None)


def check_grid(name: str, grid: object) -> tuple[int, int]:
    """``(height, width)``, both at least 1."""
    if not isinstance(grid, tuple | list) or len(grid) != 2:
        raise TypeError(f"{name} must be (height, width), two whole numbers, got {grid!r}")
    return integer(f"{name} height", grid[0], least=1), integer(f"{name} width", grid[1], least=1)


def check_heads(scheme: object, heads: int, q: Tensor) -> None:
    """A scheme made for H heads serves queries ``q [B, H, n, d]`` of as many."""
    if q.shape[1] != heads:
        raise ValueError(
            f"{type(scheme).__name__} is made for {heads} heads, but q has {q.shape[1]}; they must be equal"
        )


def check_width(scheme: object, d: int, q: Tensor) -> None:
    """A scheme that multiplies queries serves queries of its own width."""
    if q.shape[-1] != d:
        raise ValueError(
            f"{type(scheme).__name__} is made for d={d}, but q has width {q.shape[-1]}; they must be equal"
        )


def check_scale(scale: float | None, d: int) -> float:
    """``scale`` as a finite number ≥ 0; None is 1/√d."""
    if scale is None:
        return float(d**-0.5)
    scale = number("scale", scale, least=0.0)
    if scale == float("inf"):
        raise ValueError("scale is inf; a term that is added to scores needs a finite number ≥ 0")
    return scale


def check_floating(name: str, x: object) -> None:
    """``x`` is a floating tensor; else refused by name."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"{name} must be a floating tensor, got {x.dtype if isinstance(x, Tensor) else repr(x)}")


def check_at(at: object, n: int, batch: Sequence[int], x: Tensor) -> None:
    """``at`` are whole positions ``[n]`` or ``[*batch, n]`` for the rows of x; batch dimensions may be 1."""
    check_whole("at", at)
    assert isinstance(at, Tensor)
    fits = at.ndim >= 1 and at.shape[-1] == n and at.ndim - 1 <= len(batch)
    if not fits or any(a not in (1, b) for a, b in zip(reversed(at.shape[:-1]), reversed(batch), strict=False)):
        raise ValueError(f"at has shape {list(at.shape)}; for x {list(x.shape)} it must be [{n}] or {[*batch, n]}")


def check_whole(name: str, x: object) -> None:
    """``x`` is a tensor of whole numbers; else refused by name."""
    if not isinstance(x, Tensor) or x.dtype == torch.bool or x.is_floating_point() or x.is_complex():
        given = x.dtype if isinstance(x, Tensor) else repr(x)
        raise TypeError(f"{name} must be a tensor of whole numbers, got {given}")


def finite_tensor(name: str, values: Tensor | Sequence[float] | Sequence[Sequence[float]]) -> Tensor:
    """Numbers as a floating tensor (float64 unless a floating tensor was given), all finite; else refused by name."""
    if isinstance(values, str | bytes) or not isinstance(values, Tensor | Sequence):
        raise TypeError(f"{name} must be a tensor or a sequence of numbers, got {values!r}")
    try:
        # On the CPU whatever the default device is: on "meta" there would be nothing to check or to keep.
        x = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.float64, device="cpu")
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a tensor or a sequence of numbers, got {values!r}") from None
    if x.dtype == torch.bool or x.is_complex():
        raise TypeError(f"{name} must be real numbers, got {x.dtype}")
    x = x if x.is_floating_point() else x.double()
    if readable(x) and not bool(x.isfinite().all()):
        raise ValueError(f"{name} must be finite numbers, got {x.tolist()}")
    return x


# --- layers ----------------------------------------------------------------------------------------------------------


def described(x: object) -> str:
    """How an error names what it was given: a class by its name, a module or tensor by its kind, a number as it is."""
    if isinstance(x, type):
        return f"the class {x.__name__}"
    if isinstance(x, Tensor):
        return f"a tensor, {x.dtype} {list(x.shape)}"
    said = repr(x) if isinstance(x, int | float | str | list | tuple) else ""
    return said if said and len(said) <= 60 and "\n" not in said else type(x).__name__


def check_kind(name: str, x: object, *kinds: type) -> None:
    """``x`` is an instance of one of the kinds; else refused by name."""
    if not isinstance(x, kinds):
        raise TypeError(f"{name} must be {' or '.join(_full_name(kind) for kind in kinds)}, got {described(x)}")


def probability(name: str, p: object) -> float:
    """``p`` as a number between 0 and 1; NaN is none."""
    p = number(name, p, least=0.0)
    if p > 1:
        raise ValueError(f"{name} must be between 0 and 1, got {p}")
    return p


def check_dtype(name: str, x: Tensor, layer: nn.Module) -> None:
    """``x`` has the dtype of the layer's weight (any, under autocast; layers put in its place may take any too)."""
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or x.dtype == weight.dtype:
        return
    if torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type):
        return
    raise TypeError(
        f"{name} is {x.dtype}, but this layer's weights are {weight.dtype}; convert "
        + (f"one of them: {name}.to({weight.dtype}) or layer.to({x.dtype})" if x.is_floating_point() else name)
    )


def check_mask(name: str, mask: object) -> None:
    """``mask`` is None, a mask value or a bool tensor."""
    if mask is None or isinstance(mask, Mask) or (isinstance(mask, Tensor) and mask.dtype == torch.bool):
        return
    if not isinstance(mask, Tensor):
        hint = "; lengths are a Padding(lengths)" if isinstance(mask, list | tuple) else ""
        raise TypeError(
            f"{name} must be a mask value or a bool tensor with True = may attend, got {described(mask)}{hint}"
        )
    if mask.is_floating_point():
        hint = "for numbers that are added to scores use position=, or regard.attention(bias=)"
    else:
        hint = "a mask of 0 and 1 is mask.bool()"
    raise TypeError(f"{name} is {mask.dtype}; a layer takes bool masks with True = may attend: {hint}")


def check_bias_fits(bias: Bias, heads: int, d_key: int) -> None:
    """A bias that is made for some number of heads or some width of queries is made for this layer's."""
    if isinstance(bias, SumOfBiases):
        for part in bias.parts:
            check_bias_fits(part, heads, d_key)
        return
    kind = type(bias).__name__
    for attribute, name, here in (("heads", "heads", heads), ("d", "d_key", d_key)):
        made_for = getattr(bias, attribute, None)
        if isinstance(made_for, int) and made_for != here:
            raise ValueError(
                f"position {kind} is made for {attribute}={made_for}, but this layer has {name}={here}; "
                "they must be equal"
            )


def _full_name(kind: type) -> str:
    return f"nn.{kind.__name__}" if kind.__module__.startswith("torch.") else f"regard.nn.{kind.__name__}"
