"""A plan: everything that is counted of one model at one length, and the bottleneck in words."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import sympy

from regard.budget import flops
from regard.budget.attending import Attention
from regard.budget.machine import Machine, named
from regard.budget.memory import Memory, bytes_of, dtype_name, kept_by, memory
from regard.budget.model import Lengths, Model, Placed, as_model
from regard.budget.parts import Dropout
from regard.budget.roofline import Spent, read, spent, update
from regard.budget.symbols import whole
from regard.budget.this_machine import this
from regard.shapes import integer

__all__ = ["Decoding", "Plan", "Row", "plan"]

LINEAR = ("projections", "feed-forward", "embedding", "norms")


@dataclass(frozen=True)
class Row:
    """One part: how often it stands there, its parameters, FLOPs and kept bytes (all layers), and its seconds."""

    name: str
    times: int
    parameters: int
    flops: int
    kept: int
    seconds: float | None


@dataclass(frozen=True)
class Decoding:
    """One more token for each sequence of the batch: FLOPs, bytes of weights, keys and values that are read, seconds.

    ``most``: the largest batch whose weights and caches fit the machine's memory, 0 where not even one does.
    """

    flops: int
    read: int
    cache: int
    seconds: float | None
    tokens_per_second: float | None
    most: int | None
    most_per_second: float | None


@dataclass(frozen=True)
class Plan:
    """What a model costs on sequences of ``lengths.n`` tokens; ``print`` gives a table (``regard.budget.report``).

    All numbers are derived when they are asked for. FLOPs count two a multiply–add, masks not exploited; ``needed`` is
    what remains of them when causal and window masks are.

    >>> model = regard.budget.decoder(768, heads=12, layers=12, vocab=50257)
    >>> found = plan(model, tokens=1024, training=True, machine="A100 80GB", dtype="bfloat16")
    >>> found.parameters, found.forward, found.needed < found.forward, found.most
    (123625728, 291648307200, True, 99)
    >>> found.bottleneck
    'projections, 65% (...): d is large for this length; attention overtakes at n* = 15,369'
    """

    model: Model
    lengths: Lengths
    dtype: str = "float32"
    weights: str | None = None
    training: bool = False
    optimizer: str = "adam"
    machine: Machine | None = None

    @cached_property
    def parameters(self) -> int:
        """Of the whole model."""
        return whole(self.model.parameters)

    @cached_property
    def forward(self) -> int:
        """FLOPs of a forward pass."""
        return whole(flops.forward(self.model, self.lengths))

    @cached_property
    def needed(self) -> int:
        """FLOPs of a forward pass that skips what masks hide."""
        return whole(flops.needed(self.model, self.lengths))

    @cached_property
    def backward(self) -> int:
        """FLOPs of a backward pass."""
        return whole(flops.backward(self.model, self.lengths))

    @cached_property
    def recomputation(self) -> int:
        """FLOPs of a second forward pass of all blocks."""
        return whole(flops.recomputation(self.model, self.lengths))

    @cached_property
    def memory(self) -> Memory:
        """Bytes, as whole numbers."""
        found = memory(
            self.model,
            self.lengths,
            dtype=self.dtype,
            weights=self.weights,
            optimizer=self.optimizer,
            training=self.training,
        )
        # Scales of quantised weights make fractions of a byte.
        sizes = {name: None if x is None else whole(sympy.ceiling(x)) for name, x in vars(found).items()}
        return Memory(**sizes)

    @cached_property
    def spent(self) -> list[Spent]:
        """Seconds by part, where a machine is given: forward, with ``training`` backward too."""
        if self.machine is None:
            return []
        found = spent(self.model, self.lengths, self.machine, self.dtype, self.weights, training=self.training)
        return [*found, update(self.parameters, self.optimizer, self.dtype, self.machine)] if self.training else found

    @property
    def seconds(self) -> float | None:
        """Of a pass, or of a training step with its update, where a machine is given."""
        return sum(one.seconds for one in self.spent) if self.machine is not None else None

    @property
    def rows(self) -> tuple[Row, ...]:
        """One row a part, in the order in which they run.

        >>> for row in plan(regard.budget.encoder(512, heads=8, layers=6), tokens=512).rows:
        ...     print(row.name, row.times, row.parameters)
        attention norm 6 6144
        attention 6 6294528
        feed-forward norm 6 6144
        feed-forward 6 12598272
        last norm 1 1024
        """
        merged: dict[str, Row] = {}
        for stack in self.model.stacks:
            prefix = f"{stack.name}: " if len(self.model.stacks) > 1 else ""
            for placed in stack:
                if isinstance(placed.part, Dropout) and not self.training:
                    continue
                row = self._row(placed, prefix)
                merged[row.name] = _sum(merged[row.name], row) if row.name in merged else row
        rows = tuple(merged.values())
        if not self.training or self.machine is None:
            return rows
        return (*rows, Row("update", 1, 0, 0, 0, sum(one.seconds for one in self.spent if one.placed is None)))

    def _row(self, placed: Placed, prefix: str) -> Row:
        call, times = placed.call(self.lengths), whole(placed.times)
        products = sum(whole(product.flops) for product in placed.part.products(call))
        size = bytes_of(self.dtype)
        took = sum(one.seconds for one in self.spent if one.placed is placed)
        return Row(
            prefix + placed.name,
            times,
            whole(placed.parameters),
            times * products,
            whole(sympy.ceiling(times * kept_by(placed, self.lengths, size) + placed.part.kept_once(call, size))),
            None if self.machine is None else took,
        )

    @cached_property
    def shares(self) -> dict[str, float]:
        """The share of each group: of a pass's seconds where a machine is given, else of the FLOPs that are needed."""
        found: dict[str, float] = {}
        if self.machine is not None:
            for one in self.spent:
                if one.placed is None:
                    continue
                found[one.group] = found.get(one.group, 0.0) + one.seconds
        else:
            tiled = all(part.tiled for _, part in self.model.attentions)
            groups = flops.by_group(self.model, self.lengths, exploited=tiled)
            found = {group: float(whole(x)) for group, x in groups.items()}
        total = sum(found.values())
        return {group: x / total for group, x in found.items()} if total else {}

    @cached_property
    def crossover(self) -> int | None:
        """The least n from which on attention costs half of all, in FLOPs or in seconds; None: it never does.

        FLOPs are those of pairs that masks leave, where attention is tiled. Windows can cause a never, for then
        attention too is linear in n in the end. A source that was given stays.
        """
        if not self.model.attentions or self.model.tokens is not None:
            return None

        def ahead(n: int) -> bool:
            return replace(self, lengths=replace(self.lengths, n=n)).shares.get("attention", 0.0) >= 0.5

        # From above: short calls can be all overhead, and attention ahead there too.
        high = 2**40
        if not ahead(high):
            return None
        while high > 1 and ahead(high // 2):
            high //= 2
        between = range(high // 2 + 1, high + 1)
        return between[bisect_left(between, True, key=ahead)]

    @property
    def bottleneck(self) -> str:
        """Where the time goes, why, and when that changes, on one line."""
        shares = self.shares
        if not shares:
            return "nothing to compute"
        linear = {group: shares[group] for group in LINEAR if group in shares}
        sides = {
            "attention": shares.get("attention", 0.0),
            "projections": sum(linear.values()),
            "logits": shares.get("head", 0.0),
        }
        worst = max(sides, key=lambda name: sides[name])
        share = f"{sides[worst]:.0%}"
        what = f"{worst}, {share}"
        if worst == "projections" and len(linear) > 1:
            parts = sorted(((x, name) for name, x in linear.items() if x >= 0.05), reverse=True)
            named = {"projections": "q, k, v, out"}
            what += f" ({', '.join(f'{named.get(name, name)} {x:.0%}' for x, name in parts)})"
        return f"{what}: {self._why(worst)}{self._when(worst)}"

    def _why(self, worst: str) -> str:
        if self.machine is not None:
            groups = {"projections": LINEAR, "attention": ("attention",), "logits": ("head",)}[worst]
            inside = [one for one in self.spent if one.group in groups]
            seconds = sum(one.seconds for one in inside)
            if sum(one.arithmetic for one in inside) < 0.5 * seconds:
                if worst == "attention":
                    return "calls and memory set the time, not arithmetic"
                ridge = self.machine.ridge(self.dtype)
                return f"memory sets the time, too few rows share what is read ({ridge:.0f} FLOPs a byte would pay)"
        return {
            "attention": "n is large for this width",
            "projections": "d is large for this length",
            "logits": "the vocabulary is large for this width",
        }[worst]

    def _when(self, worst: str) -> str:
        if self.crossover is None:
            return ""
        at = f"n* = {self.crossover:,}"
        if self.crossover <= whole(self.lengths.n):
            return f"; it overtook the rest at {at}" if worst == "attention" else ""
        return f"; it overtakes all the rest at {at}" if worst == "attention" else f"; attention overtakes at {at}"

    @cached_property
    def most(self) -> int | None:
        """The largest batch of such steps that the machine's memory holds, 0 where not even one does."""
        if self.machine is None:
            return None
        there = self.machine.memory

        def too_large(batch: int) -> bool:
            return replace(self, lengths=replace(self.lengths, batch=batch)).memory.total > there

        return bisect_left(range(1, 2**40), True, key=too_large)

    @cached_property
    def decoding(self) -> Decoding | None:
        """What one more token costs after n of them; None for a model that does not write.

        >>> model = regard.budget.decoder(768, heads=12, layers=12, vocab=50257)
        >>> token = plan(model, tokens=1024, dtype="bfloat16").decoding
        >>> token.cache == 2 * 12 * 1024 * 768 * 2  # keys and values, layers × n × D of 2 bytes
        True
        """
        model, batch, n, m = self.model, self.lengths.batch, self.lengths.n, self.lengths.m
        if not model.writes or model.vocab is None:
            return None
        return self._decoding(model, whole(batch), whole(n), n if m is None else m)

    def _decoding(self, model: Model, batch: int, n: int, m: Any) -> Decoding:
        step = replace(self, lengths=Lengths(batch, 1, m, n), training=False)
        size = self.memory
        one = -(-size.cache // batch)
        sizes = [float(bytes_of(name)) for name in (self.dtype, self.dtype if self.weights is None else self.weights)]
        seconds = step.seconds
        most = most_per_second = None
        if self.machine is not None:
            most = max(0, (self.machine.memory - whole(size.weights)) // one) if one else None
            if most:
                full = replace(step, lengths=Lengths(most, 1, m, n)).seconds
                most_per_second = most / full if full else None
        return Decoding(
            flops=whole(flops.decode(model, batch, n, m)),
            read=int(read(model, step.lengths, *sizes)),
            cache=whole(size.cache),
            seconds=seconds,
            tokens_per_second=batch / seconds if seconds else None,
            most=most,
            most_per_second=most_per_second,
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything, as what JSON can hold.

        >>> plan(regard.budget.encoder(512, heads=8, layers=6), tokens=512).to_dict()["flops"]["forward"]
        22548578304
        """
        machine = None if self.machine is None else {"name": self.machine.name, "measured": self.machine.measured}
        decoding = self.decoding
        return {
            "model": self.model.title,
            "kind": self.model.kind,
            "batch": self.lengths.batch,
            "tokens": self.lengths.n,
            "source": self.lengths.m,
            "dtype": self.dtype,
            "weights": self.dtype if self.weights is None else self.weights,
            "training": self.training,
            "parameters": self.parameters,
            "flops": {
                "forward": self.forward,
                "forward_masks_exploited": self.needed,
                "backward": self.backward,
                "recomputation": self.recomputation,
            },
            "bytes": vars(self.memory),
            "parts": [vars(row) for row in self.rows],
            "shares": self.shares,
            "crossover": self.crossover,
            "bottleneck": self.bottleneck,
            "seconds": self.seconds,
            "most": self.most,
            "machine": machine,
            "decoding": None if decoding is None else vars(decoding),
        }

    def __str__(self) -> str:
        from regard.budget.report import printed

        return printed(self)


def plan(
    model: Model | Attention | tuple[Placed, ...],
    tokens: int | None = None,
    *,
    source: int | None = None,
    batch: int = 1,
    dtype: object = "float32",
    weights: object = None,
    training: bool = False,
    optimizer: str = "adam",
    machine: Machine | str | None = None,
) -> Plan:
    """The plan of a model on ``batch`` sequences of ``tokens`` tokens (an image model has its own number).

    ``model`` may be one attention or the parts of a block; ``machine`` a name, or "this"; dtypes names or torch's.

    >>> from regard.budget import spec
    >>> plan(spec.encoder(512, 8, 1), tokens=512).forward
    3758096384
    """
    model = as_model(model)
    letters = sympy.sympify(model.parameters + flops.needed(model, Lengths(1, 8, 8))).free_symbols
    if letters:
        names = ", ".join(sorted(map(str, letters)))
        raise ValueError(f"this model has letters for sizes ({names}); plans have numbers, formulas(model) has letters")
    if machine is not None and not isinstance(machine, str | Machine):
        raise TypeError(f'machine must be a name, "this" or a Machine, got {type(machine).__name__}')
    if isinstance(machine, str):
        machine = this() if machine == "this" else named(machine)
    dtype, weights = dtype_name(dtype), None if weights is None else dtype_name(weights)
    if model.tokens is not None:
        if tokens not in (None, model.tokens):
            raise ValueError(f"tokens={tokens}, but this image model always has {model.tokens}; leave it out")
        tokens = whole(model.tokens)
    if tokens is None:
        tokens = 512 if model.longest is None else min(512, whole(model.longest))
    integer("tokens", tokens, least=1)
    if model.longest is not None and tokens > whole(model.longest):
        raise ValueError(f"tokens={tokens}, but the learned positions of this model reach {whole(model.longest):,}")
    if source is not None:
        if len(model.stacks) < 2 and not any(placed.keys == "m" for placed in model):
            raise ValueError(f"source={source}, but {model.title} reads no source; leave it out")
        integer("source", source, least=1)
        if model.longest is not None and source > whole(model.longest):
            raise ValueError(f"source={source}, but the learned positions of this model reach {whole(model.longest):,}")
    integer("batch", batch, least=1)
    if machine is not None:
        machine.rate(dtype)
    found = Plan(model, Lengths(batch, tokens, source), dtype, weights, training, optimizer, machine)
    found.memory  # noqa: B018  refusals come here, not when something is asked for
    return found


def _sum(a: Row, b: Row) -> Row:
    seconds = None if a.seconds is None or b.seconds is None else a.seconds + b.seconds
    return Row(a.name, a.times + b.times, a.parameters + b.parameters, a.flops + b.flops, a.kept + b.kept, seconds)
