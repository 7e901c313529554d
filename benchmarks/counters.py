"""One encoder layer counted by regard and by its peers, against a formula written out by hand.

    python benchmarks/counters.py                                     whatever is installed
    pip install --no-deps --target peers torchinfo thop …
    PYTHONPATH=peers python benchmarks/counters.py                    … beside this environment, so that torch stays

The layer is torch.nn.TransformerEncoderLayer, D = 512, 8 heads, hidden 2,048, on one sequence of 512. Each counter
meets a fresh copy twice: as built (training), and in evaluation without gradients, where torch runs the layer as one
operator. A multiply–add is one; only products count in the truth. What a peer reports in FLOPs is halved, and what it
adds for norms, activations and biases is left in: its figure is shown as it gives it.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.metadata
import io
import platform
import warnings
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from regard.budget.walk import count

N, D, HEADS, HIDDEN = 512, 512, 8, 2048


def truth() -> int:
    """Multiply–adds: four maps D × D, scores and weighted sums of all heads, and two maps between D and hidden."""
    projections = N * 4 * D * D
    attention = 2 * HEADS * N * N * (D // HEADS)
    feedforward = N * 2 * D * HIDDEN
    return projections + attention + feedforward


def with_regard(model: nn.Module, x: Tensor) -> int:
    return (count(model, x).forward or 0) // 2


def with_torch(model: nn.Module, x: Tensor) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as seen:
        model(x)
    return seen.get_total_flops() // 2


def with_torchinfo(model: nn.Module, x: Tensor) -> int:
    mode = "train" if model.training else "eval"
    return importlib.import_module("torchinfo").summary(model, input_data=x, mode=mode, verbose=0).total_mult_adds


def with_thop(model: nn.Module, x: Tensor) -> int:
    return int(importlib.import_module("thop").profile(model, inputs=(x,), verbose=False)[0])


def with_calflops(model: nn.Module, x: Tensor) -> int:
    calculate = importlib.import_module("calflops").calculate_flops
    found = calculate(model, args=[x], print_results=False, print_detailed=False, output_as_string=False)
    return int(found[1])


def with_fvcore(model: nn.Module, x: Tensor) -> int:
    """Its flop is one multiply–add."""
    analysis = importlib.import_module("fvcore.nn").FlopCountAnalysis(model, x)
    return int(analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False).total())


def with_ptflops(model: nn.Module, x: Tensor, backend: str = "pytorch") -> int:
    measure = importlib.import_module("ptflops").get_model_complexity_info
    found = measure(model, (N, D), as_strings=False, print_per_layer_stat=False, verbose=False, backend=backend)
    return int(found[0])


def with_ptflops_aten(model: nn.Module, x: Tensor) -> int:
    return with_ptflops(model, x, "aten")


def with_deepspeed(model: nn.Module, x: Tensor) -> int:
    profile = importlib.import_module("deepspeed.profiling.flops_profiler").get_model_profile
    found = profile(model, args=(x,), print_profile=False, detailed=False, as_string=False, warm_up=0)
    return int(found[1])


# Name in the table, package to install, call. deepspeed is last: importing it changes the most.
COUNTERS: tuple[tuple[str, str, Callable[[nn.Module, Tensor], int]], ...] = (
    ("regard", "", with_regard),
    ("torch FlopCounterMode", "torch", with_torch),
    ("torchinfo", "torchinfo", with_torchinfo),
    ("thop", "thop", with_thop),
    ("fvcore", "fvcore", with_fvcore),
    ("calflops", "calflops", with_calflops),
    ("ptflops", "ptflops", with_ptflops),
    ("ptflops, backend aten", "ptflops", with_ptflops_aten),
    ("deepspeed", "deepspeed", with_deepspeed),
)


def measured(call: Callable[[nn.Module, Tensor], int], layer: nn.Module, training: bool) -> int | str:
    """Multiply–adds, or why there are none, in one line."""
    model, x = copy.deepcopy(layer).train(training), torch.randn(1, N, D)
    talk = io.StringIO()
    try:
        with torch.set_grad_enabled(training), contextlib.redirect_stdout(talk), contextlib.redirect_stderr(talk):
            return call(model, x)
    except Exception as problem:
        return f"{type(problem).__name__}: {str(problem).strip().splitlines()[0] if str(problem).strip() else ''}"[:60]


def row(name: str, package: str, call: Callable[[nn.Module, Tensor], int], layer: nn.Module) -> list[str]:
    version = ""
    if package:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return [f"{name} (pip install --no-deps {package})", "not installed", "", "", ""]
    cells = [f"{name} {version}".rstrip()]
    for training in (True, False):
        found = measured(call, layer, training)
        cells += [found, ""] if isinstance(found, str) else [f"{found / 1e6:,.1f} M", f"{found / truth():.1%}"]
    return cells


def main() -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(D, HEADS, HIDDEN, batch_first=True)
    for training in (True, False):
        assert measured(with_regard, layer, training) == truth(), "regard does not count what the formula says"
    table = Table(title=f"Multiply–adds of one encoder layer: {truth():,}", caption_justify="left")
    sizes = f"D {D}, {HEADS} heads, hidden {HIDDEN}, n {N}, batch 1"
    table.caption = f"{sizes}; torch {torch.__version__}, Python {platform.python_version()}"
    table.add_column("counter", no_wrap=True)
    for heading in ("training", "share", "evaluation", "share"):
        table.add_column(heading, justify="right")
    for name, package, call in COUNTERS:
        table.add_row(*row(name, package, call, layer))
    assert measured(with_regard, layer, True) == truth(), "a peer has left torch changed"
    Console().print(table)


if __name__ == "__main__":
    main()
