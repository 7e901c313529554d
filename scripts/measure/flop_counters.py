"""Count the FLOPs of one encoder layer with regard and with other counters, and compare them with a formula.

    python scripts/measure/flop_counters.py                     # with the counters that are installed
    pip install --no-deps --target peers torchinfo thop …
    PYTHONPATH=peers python scripts/measure/flop_counters.py

``--target`` keeps the other counters out of this environment, so that they cannot change the version of torch. The
layer is torch.nn.TransformerEncoderLayer, D = 512, 8 heads, hidden 2,048, on one sequence of 512 tokens. Each counter
gets a fresh copy twice: in training mode, and in evaluation without gradients, where torch runs the layer as one
operator. The unit is one multiply–add, and the formula counts products only. Counts in FLOPs are halved. What a counter
adds for norms, activations and biases stays in its figure.
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

from regard.budget._count_live_model import count

N = 512
D = 512
HEADS = 8
HIDDEN = 2048
Counter = Callable[[nn.Module, Tensor], int]


def exact_count() -> int:
    """Multiply–adds of four projections, of scores and weighted sums of all heads, and of the feed-forward network."""
    projections = N * 4 * D * D
    attention = 2 * HEADS * N * N * (D // HEADS)
    feedforward = N * 2 * D * HIDDEN
    return projections + attention + feedforward


def with_regard(model: nn.Module, x: Tensor) -> int:
    return (count(model, x).forward_flops or 0) // 2


def with_torch(model: nn.Module, x: Tensor) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        model(x)
    return counter.get_total_flops() // 2


def with_torchinfo(model: nn.Module, x: Tensor) -> int:
    mode = "train" if model.training else "eval"
    return importlib.import_module("torchinfo").summary(model, input_data=x, mode=mode, verbose=0).total_mult_adds


def with_thop(model: nn.Module, x: Tensor) -> int:
    return int(importlib.import_module("thop").profile(model, inputs=(x,), verbose=False)[0])


def with_calflops(model: nn.Module, x: Tensor) -> int:
    calculate = importlib.import_module("calflops").calculate_flops
    _, multiply_adds, _ = calculate(model, args=[x], print_results=False, print_detailed=False, output_as_string=False)
    return int(multiply_adds)


def with_fvcore(model: nn.Module, x: Tensor) -> int:
    """fvcore calls one multiply–add a flop."""
    analysis = importlib.import_module("fvcore.nn").FlopCountAnalysis(model, x)
    return int(analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False).total())


def with_ptflops(model: nn.Module, x: Tensor, backend: str = "pytorch") -> int:
    measure = importlib.import_module("ptflops").get_model_complexity_info
    multiply_adds, _ = measure(
        model, (N, D), as_strings=False, print_per_layer_stat=False, verbose=False, backend=backend
    )
    return int(multiply_adds)


def with_ptflops_aten(model: nn.Module, x: Tensor) -> int:
    return with_ptflops(model, x, "aten")


def with_deepspeed(model: nn.Module, x: Tensor) -> int:
    profile = importlib.import_module("deepspeed.profiling.flops_profiler").get_model_profile
    _, multiply_adds, _ = profile(model, args=(x,), print_profile=False, detailed=False, as_string=False, warm_up=0)
    return int(multiply_adds)


# Name in the table, package to install, function. deepspeed is last, because importing it changes torch the most.
COUNTERS: tuple[tuple[str, str, Counter], ...] = (
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


def run_counter(counter: Counter, layer: nn.Module, training: bool) -> int | str:
    """Multiply–adds, or the error in one line."""
    model = copy.deepcopy(layer).train(training)
    x = torch.randn(1, N, D)
    output = io.StringIO()
    try:
        with torch.set_grad_enabled(training), contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            return counter(model, x)
    except Exception as error:  # another library may raise anything
        message = " ".join(str(error).split())
        return f"{type(error).__name__}: {message}"[:60]


def table_row(name: str, package: str, counter: Counter, layer: nn.Module) -> list[str]:
    """The cells of one counter: its name, then count and share in training and in evaluation."""
    version = ""
    if package:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return [f"{name} (pip install --no-deps {package})", "not installed", "", "", ""]
    cells = [f"{name} {version}".rstrip()]
    for training in (True, False):
        result = run_counter(counter, layer, training)
        if isinstance(result, str):
            cells += [result, ""]
        else:
            cells += [f"{result / 1e6:,.1f} M", f"{result / exact_count():.1%}"]
    return cells


def main() -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(D, HEADS, HIDDEN, batch_first=True)
    for training in (True, False):
        assert run_counter(with_regard, layer, training) == exact_count(), "regard does not agree with the formula"
    table = Table(title=f"Multiply–adds of one encoder layer: {exact_count():,}", caption_justify="left")
    sizes = f"D {D}, {HEADS} heads, hidden {HIDDEN}, n {N}, batch 1"
    table.caption = f"{sizes}; torch {torch.__version__}, Python {platform.python_version()}"
    table.add_column("counter", no_wrap=True)
    for heading in ("training", "share", "evaluation", "share"):
        table.add_column(heading, justify="right")
    for name, package, counter in COUNTERS:
        table.add_row(*table_row(name, package, counter, layer))
    # Counters patch torch; what one of them leaves behind would falsify the others.
    assert run_counter(with_regard, layer, True) == exact_count(), "another counter has changed torch"
    Console().print(table)


if __name__ == "__main__":
    main()
