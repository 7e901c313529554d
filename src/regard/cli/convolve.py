"""``regard convolve``: a convolution as attention, checked and timed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from regard import plots
from regard.convolution import AttentionConvolution, to_attention
from regard.convolution.verify import Verdict, timed, verify
from regard.shapes import integer
from regard.terminal import plain_table

MOST = 2**14  # places of an input: attention compares each with each
MOST_TAPS = 2**10
WIDEST = 2**12  # channels


def convolve(
    kernel: Annotated[str, typer.Option(help="taps an axis: 3x3, or 5 on a line")] = "3x3",
    channels: Annotated[int, typer.Option(help="input channels")] = 3,
    out: Annotated[int, typer.Option(help="output channels")] = 8,
    size: Annotated[str, typer.Option(help="of the input: 16x16, or 64 on a line; 16 an axis unless given")] = "",
    stride: Annotated[str, typer.Option(help="2, or 2x1")] = "1",
    dilation: Annotated[str, typer.Option(help="2, or 2x1")] = "1",
    padding: Annotated[str, typer.Option(help="same, valid, 1 or 1x2; same unless there is a stride")] = "",
    mode: Annotated[str, typer.Option(help="zeros, reflect, replicate or circular")] = "zeros",
    groups: Annotated[int, typer.Option(help="of channels")] = 1,
    bias: Annotated[bool, typer.Option(help="whether there is one")] = True,
    weights: Annotated[Path | None, typer.Option(help="a safetensors file with trained kernels")] = None,
    name: Annotated[str | None, typer.Option(help="which tensor of it is the kernel")] = None,
    run: Annotated[Path | None, typer.Option(help="a run of pixels or digits, whose heads become convolutions")] = None,
    threshold: Annotated[float, typer.Option(help="of a run: the fit from which heads are replaced")] = 0.9,
    radius: Annotated[int, typer.Option(help="of a run: kernels have 2r + 1 taps an axis")] = 3,
    alpha: Annotated[float, typer.Option(help="the quadratic encoding's; inf is hard, and exact")] = math.inf,
    dense: Annotated[bool, typer.Option(help="ask at every place, then subsample")] = False,
    precision: Annotated[str, typer.Option(help="float64 or float32")] = "float64",
    seed: Annotated[int, typer.Option(help="of weights and input")] = 0,
    plot: Annotated[Path | None, typer.Option(help="draw the kernel and where heads look: PNG, SVG or PDF")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """A convolution as attention: which head is which tap, whether both agree, how long both take.

    regard convolve --kernel 3x3 --channels 16 --out 32 --size 32x32
    regard convolve --kernel 5 --stride 2 --padding 2 --mode circular
    regard convolve --weights model.safetensors --name conv1.weight --alpha 8

    With --run: the heads of a trained model that are convolutions, replaced by them; what that changes in accuracy, and
    the time at --size pixels a side, 64 unless given.

    regard convolve --run runs/pixels --threshold 0.95 --plot kernels.png
    """
    if run is not None:
        # Here, not at the top: training takes a second to import.
        from regard.cli.convolve_run import convolve_run

        sides = _each("--size", size or "64", 2)
        if sides[0] != sides[1]:
            raise ValueError(f"--size is {size!r}; pictures of a run are square: give one number")
        return convolve_run(run, threshold, radius, sides[0], plot, as_json)
    dtype = {"float32": torch.float32, "float64": torch.float64}.get(precision)
    if dtype is None:
        raise ValueError(f"--precision is {precision!r}; it must be float64 or float32")
    torch.manual_seed(seed)
    options = {"stride": stride, "dilation": dilation, "padding": padding}
    if weights is None:
        conv = _convolution(_sizes("--kernel", kernel), channels, out, groups, mode, bias, options)
    else:
        given = _read(weights, name)
        out, within, *taps = given["weight"].shape
        conv = _convolution(tuple(taps), within * groups, out, groups, mode, "bias" in given, options)
        conv.load_state_dict(given)
    conv = conv.to(dtype)
    x = torch.randn(1, conv.in_channels, *_each("--size", size or "16", len(conv.kernel_size)), dtype=dtype)
    if x[0, 0].numel() > MOST:
        raise ValueError(f"--size has {x[0, 0].numel():,} places; at most {MOST:,} are compared with each other")
    layer = to_attention(conv, alpha=alpha, direct=not dense)
    verdict, rows = verify(conv, layer, x), _heads(layer, x)
    times = {"convolution": timed(lambda: conv(x)), "attention": timed(lambda: layer(x))}
    if plot is not None:
        plots.save(_figure(layer, rows), plot)
    (_print_json if as_json else _print)(conv, layer, verdict, rows, times)
    if not verdict.holds:
        raise typer.Exit(1)


def _convolution(
    taps: tuple[int, ...], channels: int, out: int, groups: int, mode: str, bias: bool, options: dict[str, str]
) -> nn.Conv1d | nn.Conv2d:
    for what, value in (("--channels", channels), ("--out", out), ("--groups", groups)):
        integer(what, value, least=1, most=WIDEST)
    if channels % groups or out % groups:
        raise ValueError(f"--groups is {groups}; it must divide --channels, {channels}, and --out, {out}")
    if math.prod(taps) > MOST_TAPS:
        raise ValueError(f"the kernel has {math.prod(taps):,} taps, and each becomes a head; at most {MOST_TAPS:,} can")
    stride, dilation = (_each(f"--{what}", options[what], len(taps)) for what in ("stride", "dilation"))
    kind: Any = nn.Conv1d if len(taps) == 1 else nn.Conv2d
    found: nn.Conv1d | nn.Conv2d = kind(
        channels,
        out,
        taps,
        stride=stride,
        dilation=dilation,
        padding=_padding(options["padding"], taps, stride, dilation),
        groups=groups,
        bias=bias,
        padding_mode=mode,
    )
    return found


def _sizes(option: str, text: str, least: int = 1) -> tuple[int, ...]:
    """``"3x3"`` → (3, 3)"""
    parts = text.lower().replace("×", "x").split("x")
    if len(parts) > 2 or not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise ValueError(f"{option} is {text!r}; it must be one whole number or two, e.g. 3 or 3x3")
    return tuple(integer(option, int(part), least=least) for part in parts)


def _each(option: str, text: str, axes: int, least: int = 1) -> tuple[int, ...]:
    """The same for an axis or for each: ``"2"`` → (2, 2)"""
    found = _sizes(option, text, least)
    if len(found) not in (1, axes):
        raise ValueError(f"{option} is {text!r}, but the kernel has one axis; give one number")
    return found * axes if len(found) == 1 else found


def _padding(
    text: str, taps: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]
) -> str | tuple[int, ...]:
    if text in ("same", "valid"):
        return text
    if text:
        return _each("--padding", text, len(taps), least=0)
    if set(stride) == {1}:
        return "same"
    return tuple(d * (k - 1) // 2 for k, d in zip(taps, dilation, strict=True))


def _read(file: Path, name: str | None) -> dict[str, Tensor]:
    """The kernel of that name, and the bias beside it where there is one."""
    try:
        found = load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file} is no safetensors file: {error}") from None
    kernels = [key for key, x in found.items() if x.ndim in (3, 4) and x.is_floating_point()]
    if name not in kernels:
        some = ", ".join(kernels[:5]) + (" …" if len(kernels) > 5 else "")
        raise ValueError(f"--name is {name!r}; kernels in {file.name} are: {some or 'none'}")
    beside = f"{name.removesuffix('weight')}bias" if name is not None and name.endswith("weight") else ""
    kept = {"weight": found[str(name)]}
    if beside in found and found[beside].shape == kept["weight"].shape[:1]:
        kept["bias"] = found[beside]
    return kept


def _heads(layer: AttentionConvolution, x: Tensor) -> list[dict[str, Any]]:
    """Each head with its offset, where it was seen to look, and how large its tap is."""
    where, weight = layer.looks(x)
    norms = layer.kernel.detach().flatten(2).flatten(0, 1).norm(dim=0)
    return [
        {
            **{"head": h, "offset": list(shift), "looks at": [round(v, 6) for v in where[h].tolist()]},
            **{"weight there": float(weight[h]), "norm": float(norms[h])},
        }
        for h, shift in enumerate(layer.shifts)
    ]


def _figure(layer: AttentionConvolution, rows: list[dict[str, Any]]) -> Any:
    """‖W_Δ‖ at each offset, and a ring where each head was seen to look."""
    axes = [sorted({row["offset"][a] for row in rows}) for a in range(layer.geometry.axes)]
    norms = torch.tensor([row["norm"] for row in rows]).view(layer.geometry.kernel)
    title = f"‖W_Δ‖ of {len(rows)} heads, and where they look"
    figure = plots.profile(axes[0] if len(axes) == 1 else tuple(axes), norms.numpy(), title=title)
    seen = [row["looks at"] for row in rows]
    across, down = ([s[-1] for s in seen], [s[0] for s in seen] if len(axes) == 2 else [0.0] * len(seen))
    figure.axes[0].scatter(across, down, s=40, facecolors="none", edgecolors="#d55e00", linewidths=1.2, zorder=4)
    return figure


def _print(
    conv: nn.Module, layer: AttentionConvolution, verdict: Verdict, rows: list[dict[str, Any]], times: dict[str, float]
) -> None:
    say = Console(highlight=False, markup=False).print
    a = layer.attention
    kind = "hard" if layer.alpha == math.inf else f"alpha {layer.alpha:g}"
    say(str(conv))
    say(f"as attention: {a.heads} heads, {kind}; keys of width {a.d_key}, values of {a.d_value}, one key head")
    say(_table(rows))
    if verdict.bound:
        said = f"outputs differ by {verdict.outputs:.1e}, at most {verdict.bound:.1e} by the bound"
    else:
        gradients = max(verdict.input_gradient, verdict.kernel_gradient)
        said = f"outputs differ by {verdict.outputs:.1e}, gradients by {gradients:.1e}; allowed {verdict.allowed:.1e}"
    say(f"{said}: {'equal' if verdict.holds and not verdict.bound else 'holds' if verdict.holds else 'WRONG'}")
    say(f"convolution {times['convolution'] * 1e3:.3f} ms, attention {times['attention'] * 1e3:.3f} ms")


def _table(rows: list[dict[str, Any]]) -> Table:
    table = plain_table()
    for column in ("head", "offset", "looks at", "weight there", "‖W_Δ‖"):
        table.add_column(column, justify="right")
    for row in rows:
        offset, seen = (", ".join(f"{x:g}" for x in row[name]) for name in ("offset", "looks at"))
        table.add_row(str(row["head"]), offset, seen, f"{row['weight there']:.4f}", f"{row['norm']:.3f}")
    return table


def _print_json(
    conv: nn.Module, layer: AttentionConvolution, verdict: Verdict, rows: list[dict[str, Any]], times: dict[str, float]
) -> None:
    told = {"convolution": str(conv), "alpha": None if layer.alpha == math.inf else layer.alpha, "heads": rows}
    typer.echo(json.dumps({**told, **vars(verdict), "holds": verdict.holds, "seconds": times}, ensure_ascii=False))
