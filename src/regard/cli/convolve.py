"""``regard convolve``: a convolution as attention, verified and timed; heads of a trained model as convolutions."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from regard import plots
from regard._checks import check_integer
from regard._errors import RegardError
from regard._files import check_regular_file
from regard._terminal import frameless_table
from regard.cli.output_file import check_figure_file, path_option
from regard.convolution import AttentionConvolution, to_attention
from regard.convolution._geometry import Geometry
from regard.convolution._verify import Verification, best_time, verify

if TYPE_CHECKING:
    from regard.convolution._replace_in_run import ReplacementInRun

MAX_POSITIONS = 2**14  # positions of the input; attention compares every pair of them
MAX_TAPS = 2**10
MAX_CHANNELS = 2**12
MAX_ENTRIES = 2**24  # numbers of the kernel
MAX_KEYS = 2**16  # positions of the input with its padding
MAX_PRODUCTS = 2**30  # multiplications of one pass of the attention, about ten seconds on one core; a call makes 12
SMALLEST_ALPHA = 1e-9  # below, the weights are uniform in float64
LARGEST_ALPHA = 1e9  # above, scores leave the range in which they are exact; inf is computed without scores

PADDING_MODES = ("zeros", "reflect", "replicate", "circular")

Rows = list[dict[str, Any]]


def convolve_command(
    kernel: Annotated[str, typer.Option(help="taps per axis: 3x3, or 5 in one dimension")] = "3x3",
    channels: Annotated[int, typer.Option(help="input channels")] = 3,
    out: Annotated[int, typer.Option(help="output channels")] = 8,
    size: Annotated[str, typer.Option(help="size of the input: 16x16, or 64 in one dimension; default 16")] = "",
    stride: Annotated[str, typer.Option(help="2, or 2x1")] = "1",
    dilation: Annotated[str, typer.Option(help="2, or 2x1")] = "1",
    padding: Annotated[str, typer.Option(help="same, valid, 1 or 1x2; default same if the stride is 1")] = "",
    mode: Annotated[str, typer.Option(help="padding mode: zeros, reflect, replicate or circular")] = "zeros",
    groups: Annotated[int, typer.Option(help="groups of channels")] = 1,
    bias: Annotated[bool, typer.Option(help="whether the convolution has a bias")] = True,
    weights: Annotated[
        Path | None, typer.Option(parser=path_option, metavar="FILE", help="a safetensors file with trained kernels")
    ] = None,
    name: Annotated[str | None, typer.Option(help="the tensor in --weights that is the kernel")] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            parser=path_option,
            metavar="FOLDER",
            help="a run of the task pixels or digits, whose heads become convolutions",
        ),
    ] = None,
    threshold: Annotated[float, typer.Option(help="with --run: heads with this fit or more are replaced")] = 0.9,
    radius: Annotated[int, typer.Option(help="with --run: kernels have 2r + 1 taps per axis")] = 3,
    alpha: Annotated[float, typer.Option(help="sharpness of the quadratic encoding; inf is hard and exact")] = math.inf,
    dense: Annotated[bool, typer.Option(help="compute all positions, then apply the stride")] = False,
    precision: Annotated[str, typer.Option(help="float64 or float32")] = "float64",
    seed: Annotated[int, typer.Option(help="seed of weights and input")] = 0,
    plot: Annotated[
        Path | None,
        typer.Option(
            parser=path_option, metavar="FILE", help="plot the kernel and the heads' offsets: PNG, SVG or PDF"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Write a convolution as attention: which head is which tap, whether both agree, how long both take.

    regard convolve --kernel 3x3 --channels 16 --out 32 --size 32x32
    regard convolve --kernel 5 --stride 2 --padding 2 --mode circular
    regard convolve --weights model.safetensors --name conv1.weight --alpha 8

    With --run: replace the heads of a trained model that act as convolutions, and print the change of its accuracy and
    its time on images of --size pixels per side, 64 by default.

    regard convolve --run runs/pixels --threshold 0.95 --plot kernels.png
    """
    if plot is not None:
        check_figure_file(plot)
    if run is not None:
        sides = _axis_sizes("--size", size or "64", 2)
        if sides[0] != sides[1]:
            raise RegardError(f"--size must be one number with --run, because its images are square, got {size!r}")
        return _replace_heads(run, threshold, radius, sides[0], plot, as_json)
    # No half precision: its rounding errors would hide errors of the conversion.
    dtype = {"float32": torch.float32, "float64": torch.float64}.get(precision)
    if dtype is None:
        raise RegardError(f"--precision must be float64 or float32, got {precision!r}")

    if alpha != math.inf and not SMALLEST_ALPHA <= alpha <= LARGEST_ALPHA:
        raise RegardError(f"--alpha must be between {SMALLEST_ALPHA:g} and {LARGEST_ALPHA:g}, or inf, got {alpha:g}")
    torch.manual_seed(check_integer("--seed", seed, least=-(2**63), most=2**64 - 1))
    options = {"stride": stride, "dilation": dilation, "padding": padding}
    if weights is None:
        conv = _make_convolution(_parse_sizes("--kernel", kernel), channels, out, groups, mode, bias, options)
    else:
        tensors = _read_kernel(weights, name)
        out, group_channels, *taps = tensors["weight"].shape
        channels = group_channels * groups
        conv = _make_convolution(tuple(taps), channels, out, groups, mode, "bias" in tensors, options)
        conv.load_state_dict(tensors)
    conv = conv.to(dtype)

    sides = _axis_sizes("--size", size or "16", len(conv.kernel_size))
    _check_work(conv, sides)
    x = torch.randn(1, conv.in_channels, *sides, dtype=dtype)
    layer = to_attention(conv, alpha=alpha, direct=not dense)
    verification = verify(conv, layer, x)
    rows = _head_rows(layer, x)
    times = {"convolution": best_time(lambda: conv(x)), "attention": best_time(lambda: layer(x))}
    if plot is not None:
        plots.save(_plot_heads(layer, rows), plot)
    if as_json:
        entries: dict[str, Any] = {
            "convolution": str(conv),
            "alpha": None if layer.alpha == math.inf else layer.alpha,
            "heads": rows,
        }
        entries |= {**vars(verification), "holds": verification.holds, "seconds": times}
        typer.echo(json.dumps(entries, ensure_ascii=False))
    else:
        _print_conversion(conv, layer, verification, rows, times)
    if not verification.holds:
        raise typer.Exit(1)


# --- options ---------------------------------------------------------------------------------------------------------


def _make_convolution(
    taps: tuple[int, ...], channels: int, out: int, groups: int, mode: str, bias: bool, options: dict[str, str]
) -> nn.Conv1d | nn.Conv2d:
    # Checked here, because torch's errors name torch's arguments, not these options.
    for option, value in (("--channels", channels), ("--out", out), ("--groups", groups)):
        check_integer(option, value, least=1, most=MAX_CHANNELS)
    if mode not in PADDING_MODES:
        raise RegardError(f"--mode must be one of {', '.join(PADDING_MODES)}, got {mode!r:.60}")
    if channels % groups or out % groups:
        raise RegardError(f"--groups must divide --channels, {channels}, and --out, {out}, got {groups}")
    # Each tap becomes a head.
    if math.prod(taps) > MAX_TAPS:
        raise RegardError(f"--kernel must have at most {MAX_TAPS:,} taps, got {math.prod(taps):,}")
    # Attention stores the kernel of grouped channels as one matrix for all of them.
    if math.prod(taps) * channels * out > MAX_ENTRIES:
        raise RegardError(
            f"--kernel times --channels times --out must be at most {MAX_ENTRIES:,} numbers, got "
            f"{math.prod(taps) * channels * out:,}"
        )
    stride = _axis_sizes("--stride", options["stride"], len(taps))
    dilation = _axis_sizes("--dilation", options["dilation"], len(taps))
    conv_class: Any = nn.Conv1d if len(taps) == 1 else nn.Conv2d
    return conv_class(
        channels,
        out,
        taps,
        stride=stride,
        dilation=dilation,
        padding=_parse_padding(options["padding"], taps, stride, dilation),
        groups=groups,
        bias=bias,
        padding_mode=mode,
    )


def _check_work(conv: nn.Conv1d | nn.Conv2d, sides: tuple[int, ...]) -> None:
    """Raise for an input whose attention would take minutes or more memory than there is."""
    positions = math.prod(sides)
    if positions > MAX_POSITIONS:
        raise RegardError(f"--size must have at most {MAX_POSITIONS:,} positions, got {positions:,}")
    geometry = Geometry.of(conv)
    padded = [sum(axis) for axis in zip(sides, geometry.before, geometry.after, strict=True)]
    keys = math.prod(padded)
    if keys > MAX_KEYS:
        raise RegardError(f"--padding must leave at most {MAX_KEYS:,} positions, got {keys:,}")

    # A head is a tap: it compares all positions with all keys, and adds up the values of all channels.
    heads = math.prod(conv.kernel_size)
    products = heads * positions * keys * (conv.in_channels + len(sides) + 1)
    products += heads * positions * conv.in_channels * conv.out_channels
    if products > MAX_PRODUCTS:
        raise RegardError(
            f"--size must be smaller: {positions:,} positions, {heads:,} taps and {conv.in_channels:,} channels take "
            f"{products:.1e} multiplications, at most {MAX_PRODUCTS:.1e} are accepted"
        )


def _parse_sizes(option: str, text: str, least: int = 1) -> tuple[int, ...]:
    """Parse ``"3x3"`` to (3, 3)."""
    parts = text.lower().replace("×", "x").split("x")
    if len(parts) > 2 or not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise RegardError(f"{option} must be one integer or two, for example 3 or 3x3, got {text!r}")
    return tuple(check_integer(option, int(part), least=least) for part in parts)


def _axis_sizes(option: str, text: str, axes: int, least: int = 1) -> tuple[int, ...]:
    """Return one size per axis; a single number is used for all axes: ``"2"`` becomes (2, 2)."""
    sizes = _parse_sizes(option, text, least)
    if len(sizes) == 1:
        return sizes * axes
    if len(sizes) != axes:
        raise RegardError(f"{option} must be one number, because the kernel has one axis, got {text!r}")
    return sizes


def _parse_padding(
    text: str, taps: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]
) -> str | tuple[int, ...]:
    if text in ("same", "valid"):
        return text
    if text:
        return _axis_sizes("--padding", text, len(taps), least=0)
    if set(stride) == {1}:
        return "same"
    # torch refuses "same" with a stride, so the same padding is given as numbers.
    return tuple(d * (k - 1) // 2 for k, d in zip(taps, dilation, strict=True))


def _read_kernel(file: Path, name: str | None) -> dict[str, Tensor]:
    """The kernel with that name, and its bias if the file has one."""
    check_regular_file(file)
    try:
        tensors = load_file(file)
    except SafetensorError as error:
        raise RegardError(f"--weights must be a safetensors file, got {file}: {error}") from None
    kernels = [key for key, x in tensors.items() if x.ndim in (3, 4) and x.is_floating_point()]
    if name is None or name not in kernels:
        listed = ", ".join(kernels[:5]) or "none"
        if len(kernels) > 5:  # a large model has hundreds
            listed += " …"
        raise RegardError(f"--name must be a kernel of {file.name}: {listed}, got {name!r}")

    # A bias has the name of its kernel, with bias instead of weight.
    result = {"weight": tensors[name]}
    bias_name = f"{name.removesuffix('weight')}bias"
    if name.endswith("weight") and bias_name in tensors and tensors[bias_name].shape == tensors[name].shape[:1]:
        result["bias"] = tensors[bias_name]
    return result


# --- a convolution as attention --------------------------------------------------------------------------------------


def _head_rows(layer: AttentionConvolution, x: Tensor) -> Rows:
    """One row per head: its offset, the offset that it was measured to attend to, and the norm of its tap."""
    offsets, weights = layer.measured_offsets(x)
    norms = layer.kernel.detach().flatten(2).flatten(0, 1).norm(dim=0)
    rows = []
    for head, shift in enumerate(layer.shifts):
        rows.append(
            {
                "head": head,
                "offset": list(shift),
                "looks at": [round(v, 6) for v in offsets[head].tolist()],
                "weight there": float(weights[head]),
                "norm": float(norms[head]),
            }
        )
    return rows


def _plot_heads(layer: AttentionConvolution, rows: Rows) -> Any:
    """Plot ‖W_Δ‖ at each offset, and a ring at the measured offset of each head."""
    norms = torch.tensor([row["norm"] for row in rows]).view(layer.geometry.kernel)
    title = f"‖W_Δ‖ of {len(rows)} heads, and where they look"
    across = [row["looks at"][-1] for row in rows]
    columns = sorted({row["offset"][-1] for row in rows})
    if layer.geometry.axes == 1:
        # A kernel with one axis is drawn as a line, so its rings have the height 0.
        down = [0.0] * len(rows)
        figure = plots.profile(columns, norms.numpy(), title=title, value_label="‖W_Δ‖")
    else:
        down = [row["looks at"][0] for row in rows]
        lines = sorted({row["offset"][0] for row in rows})
        figure = plots.profile((lines, columns), norms.numpy(), title=title, value_label="‖W_Δ‖")
    figure.axes[0].scatter(across, down, s=40, facecolors="none", edgecolors="#d55e00", linewidths=1.2, zorder=4)
    return figure


def _print_conversion(
    conv: nn.Module, layer: AttentionConvolution, verification: Verification, rows: Rows, times: dict[str, float]
) -> None:
    console = Console(highlight=False, markup=False)
    attention = layer.attention
    kind = "hard"
    if layer.alpha < math.inf:
        kind = f"alpha {layer.alpha:g}"
    widths = f"keys of width {attention.d_key}, values of {attention.d_value}, one key head"
    console.print(str(conv))
    console.print(f"as attention: {attention.heads} heads, {kind}; {widths}")
    console.print(_head_table(rows))

    # Hard attention equals the convolution up to rounding; a finite alpha stays within a bound.
    line = f"outputs differ by {verification.outputs:.1e}"
    verdict = "holds"
    if verification.bound:
        line += f", at most {verification.bound:.1e} by the bound"
    else:
        gradients = max(verification.input_gradient, verification.kernel_gradient)
        line += f", gradients by {gradients:.1e}; allowed {verification.allowed:.1e}"
        verdict = "equal"
    if not verification.holds:
        verdict = "WRONG"
    console.print(f"{line}: {verdict}")
    console.print(f"convolution {times['convolution'] * 1e3:.3f} ms, attention {times['attention'] * 1e3:.3f} ms")


def _vector(numbers: list[float]) -> str:
    return ", ".join(f"{x:g}" for x in numbers)


def _head_table(rows: Rows) -> Table:
    table = frameless_table()
    for column in ("head", "offset", "looks at", "weight there", "‖W_Δ‖"):
        table.add_column(column, justify="right")
    for row in rows:
        weight = f"{row['weight there']:.4f}"
        norm = f"{row['norm']:.3f}"
        table.add_row(str(row["head"]), _vector(row["offset"]), _vector(row["looks at"]), weight, norm)
    return table


# --- heads of a run as convolutions ----------------------------------------------------------------------------------


def _replace_heads(run: Path, threshold: float, radius: int, side: int, plot: Path | None, as_json: bool) -> None:
    """Replace heads of a trained model by convolutions, and print, plot and time the result."""
    # Here, not at the top: training takes a second to import.
    from regard.convolution._replace_in_run import replace_in_run

    result = replace_in_run(run, threshold, radius=radius, side=side)
    rows = _candidate_rows(result)
    if plot is not None:
        plots.save(_plot_candidates(result), plot)
    if not as_json:
        return _print_replacement(result, rows, threshold, radius)

    entries: dict[str, Any] = {"heads": rows, "side": result.side}
    for name, comparison in (("small", result.replacement.comparison), ("larger", result.larger)):
        entries[name] = {**vars(comparison), "speedup": comparison.speedup}
    before, after = result.accuracy
    entries["accuracy"] = {"before": before, "after": after, "pictures": result.pictures}
    typer.echo(json.dumps(entries, ensure_ascii=False))


def _candidate_rows(result: ReplacementInRun) -> Rows:
    """One row per head of the model, with the convolution that is closest to it."""
    rows = []
    for layer, (path, candidates) in enumerate(result.replacement.candidates.items()):
        replaced = {candidate.head for candidate in result.replacement.replaced.get(path, ())}  # in this layer
        for candidate in candidates:
            rows.append(
                {
                    "layer": layer,
                    "head": candidate.head,
                    "centre": list(candidate.centre),
                    "width": candidate.width,
                    "fit": candidate.fit,
                    "uniform": candidate.uniform_fit,
                    "off": candidate.row_error,
                    "replaced": candidate.head in replaced,
                }
            )
    return rows


def _print_replacement(result: ReplacementInRun, rows: Rows, threshold: float, radius: int) -> None:
    table = frameless_table()
    for column in ("layer.head", "centre", "width", "fit", "if uniform", "replaced"):
        table.add_column(column, justify="right")
    for row in rows:
        centre = ", ".join(f"{x:+.2f}" for x in row["centre"])  # an offset has a sign
        numbers = [f"{row['width']:.2f}", f"{row['fit']:.4f}", f"{row['uniform']:.4f}"]
        mark = "yes" if row["replaced"] else ""
        table.add_row(f"{row['layer']}.{row['head']}", centre, *numbers, mark)
    Console(highlight=False, markup=False).print(table)

    console = Console(highlight=False, markup=False, soft_wrap=True)
    replaced, heads = result.replacement.heads
    taps = f"{2 * radius + 1} × {2 * radius + 1} taps"
    console.print(f"{replaced} of {heads} heads have a fit of {threshold:g} or more with {taps}, and are replaced")
    before, after = result.accuracy
    console.print(
        f"accuracy on {result.pictures} held-out images: {before:.4f} before, {after:.4f} after "
        f"({100 * (after - before):+.2f} points)"
    )
    larger = result.larger
    pixels = f"{result.side} × {result.side} pixels"
    console.print(
        f"{pixels}: {larger.before * 1e3:.1f} ms before, {larger.after * 1e3:.1f} ms after, "
        f"{larger.speedup:.1f} times as fast; logits differ by {100 * larger.relative:.2g}% of their size"
    )


def _plot_candidates(result: ReplacementInRun) -> Any:
    """Plot the kernel of every head with its fit, one row per layer."""
    layers = list(result.replacement.candidates.values())
    kernels: list[list[Any]] = [[] for _ in layers]
    titles = []
    for row, candidates in zip(kernels, layers, strict=True):
        for candidate in candidates:
            row.append(candidate.kernel.numpy())
            titles.append(f"{candidate.fit:.3f}")
    return plots.grid(
        kernels,
        titles,
        row_labels=range(len(layers)),
        column_labels=range(max(map(len, layers))),
        x_label="head",
        y_label="layer",
        title="the convolution closest to each head, and its fit; the query is in the middle",
        value_label="kernel weight",
    )
