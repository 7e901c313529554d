"""``patch_sweep``: patch one site after another, and measure what each of them changes."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from regard._checks import check_instance
from regard._errors import RegardError
from regard._hooks import AttentionCall, Observer
from regard._observables import Observation
from regard.interp._patch import Patcher
from regard.interp._patch_capture import Inputs, run_model
from regard.interp._patch_file import SweepFile, sweep_header
from regard.interp._patch_heads import check_known
from regard.interp._patch_metrics import Metric, check_metric, describe_metric, evaluating, metric_number, source_number
from regard.interp._patch_sites import PARTS, Positions, Site, SiteSelection
from regard.interp._patch_sources import SourceLike, resolve_source
from regard.interp._patch_table import PatchSweep, sweep_row
from regard.interp._register_observers import NO_VISIBLE_ATTENTION, Head, HeadSelection, list_paths, observing
from regard.interp._watch import Layers


def patch_sweep(
    model: nn.Module,
    inputs: Inputs,
    source: SourceLike,
    metric: Metric = "loss",
    *,
    layers: Layers = None,
    heads: Iterable[Head] | None = None,
    parts: Sequence[str] = ("output",),
    positions: Literal["all", "each"] | Positions = "all",
    file: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> PatchSweep:
    """Patch every head alone, and measure how much of the way from the base run to the source it goes.

        effect = (patched − base) / (source − base)

    - ``model``, ``source``: as in ``patch``. If the source is a run, it runs once, and what it gives is kept for all
      sites: as much as the chosen parts of all heads have, nothing of size n × m.
    - ``inputs``: the base run: token ids, or a function that runs the model and returns its output.
    - ``metric``: as in ``patch(…).change``.
    - ``layers``, ``heads``: only these, as in ``regard.watch``; all by default.
    - ``parts``: "output", "pattern", "q", "k" and "v".
    - ``positions``: "all" patches all positions of a head together; "each", or a list of positions, patches each of
      them alone.
    - ``file``: a file that gets a line after each run. If it exists, the sweep continues: what is in it is not run
      again. A file of another model, input, metric or set of sites is refused.
    - ``progress``: ``progress(done, total)`` is called after each site.

    Ctrl-C stops between two sites or within one; the model is restored, and ``file`` has every site that was finished.

    >>> model = regard.models.load(regard.models.bundled()).float()
    >>> base = torch.randperm(1024, generator=torch.Generator().manual_seed(0))[:24].repeat(1, 2)[:, :30]
    >>> source = base.clone()
    >>> source[0, 6] = 200  # another token where the base has the one that comes next
    >>> metric = regard.interp.LogitDifference(-1, right=int(base[0, 6]), wrong=200)
    >>> sweep = patch_sweep(model, base, source, metric)
    >>> sweep
    PatchSweep of 12 sites of TextDecoder: logit 683 − 200 at -1
    >>> [(site.layer, site.head) for site in sweep.top(2)]  # the induction heads
    [('decoder.blocks.2.attention', 3), ('decoder.blocks.2.attention', 2)]
    """
    check_instance("model", model, nn.Module)
    check_metric(metric)
    with evaluating(model), torch.no_grad():
        layout = Layout(model)
        with observing(layout):
            before = metric_number(metric, run_model(model, inputs), inputs)
        sites = layout.sites(layers, heads, parts, positions)
        selection = SiteSelection([Site(site.path, site.head, site.part) for site in sites])
        resolved, outputs = resolve_source(model, source, selection)
        source_value = None
        if outputs:
            source_value = source_number(metric, outputs.pop(), inputs)

        result = PatchSweep(type(model).__name__, describe_metric(metric), before, source_value, [])
        lines = None
        if file is not None:
            keys = [site.key for site in sites]
            header = sweep_header(model, inputs, source, result.metric, keys, before, source_value)
            lines = SweepFile(Path(file), header, keys)
        patcher = Patcher(model, SiteSelection([]), resolved)
        with observing(patcher):
            for done, site in enumerate(sites, 1):
                if lines is not None and site.key in lines.finished:
                    after = lines.finished[site.key]
                else:
                    patcher.sites = SiteSelection([site.as_site()])
                    after = metric_number(metric, run_model(model, inputs), inputs)
                    if lines is not None:
                        lines.add(site.key, after)
                row = sweep_row(site.path, layout.numbers[site.path], site.head, site.part, site.position)
                result.add(row, after)
                if progress is not None:
                    progress(done, len(sites))
    return result


@dataclass(frozen=True)
class SweepSite:
    """One head and part, at one position or at all."""

    path: str
    head: int
    part: str
    position: int | None

    @property
    def key(self) -> tuple[str, int, str, int | None]:
        """The site as plain data."""
        return self.path, self.head, self.part, self.position

    def as_site(self) -> Site:
        """The site as ``patch`` takes it."""
        return Site(self.path, self.head, self.part, self.position)


class Layout(Observer):
    """The layers of a model in the order of their calls, with their numbers of heads, queries and keys."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.sizes: dict[str, tuple[int, int, int]] = {}
        self.calls: dict[str, AttentionCall] = {}
        self.numbers: dict[str, int] = {}

    def after(self, call: AttentionCall, out: Tensor, observation: Observation | None) -> Tensor:
        if call.path not in self.sizes:
            self.sizes[call.path] = (out.shape[-3], out.shape[-2], call.v.shape[-2])
            # Only the way in which the call is observed is needed later: tensors must not stay alive.
            empty = call.v.new_empty(0)
            self.calls[call.path] = AttentionCall(call.path, call.number, None, None, empty, call.cross, None, call.how)
            self.numbers[call.path] = call.number
        return out

    def sites(
        self, layers: Layers, heads: Iterable[Head] | None, parts: Sequence[str], positions: Any
    ) -> list[SweepSite]:
        """The selected sites, layer by layer."""
        if not self.sizes:
            raise RegardError(f"{type(self.model).__name__} {NO_VISIBLE_ATTENTION}; there is nothing to patch")
        _check_parts(parts)
        selection = HeadSelection(heads) if heads is not None else None
        if selection is not None:
            selection.check(self.numbers)
        sites = []
        for path, (H, n, m) in self.sizes.items():
            if not _matches(layers, path):
                continue
            chosen = range(H)
            if selection is not None:
                chosen = selection.at(path, self.numbers[path])  # type: ignore[assignment]
                if chosen and max(chosen) >= H:
                    raise RegardError(f"heads names head {max(chosen)} of {path!r}, which has heads 0 … {H - 1}")
            for head in chosen:
                for part in parts:
                    check_known(self.calls[path], part)
                    length = n if PARTS[part] == "rows" else m
                    sites += [SweepSite(path, head, part, position) for position in _each(positions, length, part)]
        if not sites:
            raise RegardError(
                f"layers={layers!r} and heads={heads!r} select none of {len(self.sizes)} layers: "
                f"{list_paths(self.sizes)}"
            )
        return sites


def _matches(layers: Layers, path: str) -> bool:
    if layers is None:
        return True
    if callable(layers):
        return bool(layers(path))
    patterns = [layers] if isinstance(layers, str) else layers
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def _check_parts(parts: Any) -> None:
    if isinstance(parts, str) or not parts:
        raise RegardError(f"parts must be a list such as ('output', 'v'), got {parts!r}")
    for part in parts:
        if part not in PARTS:
            raise RegardError(f"parts must be of {', '.join(PARTS)}, got {part!r}")
    if len(set(parts)) < len(parts):
        raise RegardError(f"parts must differ from each other, got {list(parts)}")


def _each(positions: Any, length: int, part: str) -> list[int | None]:
    """The positions that are patched one after another; None is all of them at once."""
    if isinstance(positions, str):
        if positions == "all":
            return [None]
        if positions == "each":
            return list(range(length))
        raise RegardError(f"positions must be 'all', 'each' or a list of positions, got {positions!r}")
    # A site checks the type of positions.
    indices = Site(0, 0, part, positions).indices
    if indices is None:
        return [None]
    for position in indices:
        if not -length <= position < length:
            raise RegardError(f"positions must be between {-length} and {length - 1}, got {position}")
    return [position % length for position in indices]
