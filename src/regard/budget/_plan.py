"""A plan: all costs of one model at one length, and its bottleneck in words."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import sympy

from regard.budget import _flops as flops
from regard.budget._bottleneck import describe_bottleneck
from regard.budget._largest_size import largest_size
from regard.budget._machine import Machine
from regard.budget._memory import Memory, bytes_per_value, count_memory, saved_by_part
from regard.budget._model import Lengths, Model, PlacedPart
from regard.budget._parts import Dropout
from regard.budget._plan_json import plan_dict
from regard.budget._plan_records import Decoding, Row, add_rows
from regard.budget._roofline import PartTime, bytes_read, time_parts, time_update
from regard.budget._symbols import to_int

LARGEST = 2**40  # upper end of the search for the crossover


@dataclass(frozen=True)
class Plan:
    """The costs of a model on sequences of ``lengths.n`` tokens; ``print`` shows them as a table.

    Every number is computed when it is first read. A multiply–add counts as two FLOPs. `memory_limit` is the memory
    that may be used, in bytes; if it is None, the machine's memory.

    >>> model = regard.budget.decoder(768, heads=12, layers=12, vocab=50257)
    >>> step = regard.budget.plan(model, tokens=1024, training=True, machine="A100 80GB", dtype="bfloat16")
    >>> step.parameters, step.forward_flops, step.unmasked_flops < step.forward_flops, step.max_batch
    (123625728, 291648307200, True, 99)
    >>> step.bottleneck
    'linear layers, 65% (...): d is large for this length; attention overtakes at n* = 15,369'
    """

    model: Model
    lengths: Lengths
    dtype: str = "float32"
    weights: str | None = None
    training: bool = False
    optimizer: str = "adam"
    machine: Machine | None = None
    memory_limit: int | None = None

    @property
    def weight_dtype(self) -> str:
        """The dtype of the stored weights."""
        return self.dtype if self.weights is None else self.weights

    @cached_property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return to_int(self.model.parameters)

    @cached_property
    def active_parameters(self) -> int:
        """Parameters without the experts that a token does not use; all parameters of a model without experts."""
        return to_int(self.model.active_parameters)

    @cached_property
    def forward_flops(self) -> int:
        """FLOPs of a forward pass, masked pairs included."""
        return to_int(flops.forward(self.model, self.lengths))

    @cached_property
    def unmasked_flops(self) -> int:
        """FLOPs of a forward pass that skips the pairs hidden by masks."""
        return to_int(flops.unmasked(self.model, self.lengths))

    @cached_property
    def backward_flops(self) -> int:
        """FLOPs of a backward pass."""
        return to_int(flops.backward(self.model, self.lengths))

    @cached_property
    def recomputation_flops(self) -> int:
        """FLOPs of the second forward pass that activation checkpointing needs."""
        return to_int(flops.recomputation(self.model, self.lengths))

    @cached_property
    def memory(self) -> Memory:
        """The memory of a step, in whole bytes."""
        formats = {"dtype": self.dtype, "weights": self.weights, "optimizer": self.optimizer}
        exact = count_memory(self.model, self.lengths, training=self.training, **formats)  # type: ignore[arg-type]
        # Quantized weights have scales, so a weight can take a fraction of a byte.
        sizes = {name: to_int(sympy.ceiling(x)) for name, x in vars(exact).items() if x is not None}
        return replace(exact, **sizes)

    @cached_property  # rows, shares and the bottleneck all read the times
    def part_times(self) -> list[PartTime]:
        """Times of all parts of a forward pass or a training step; empty without a machine."""
        if self.machine is None:
            return []
        times = time_parts(
            self.model, self.lengths, self.machine, self.dtype, self.weight_dtype, training=self.training
        )
        if self.training:
            times.append(time_update(self.parameters, self.optimizer, self.dtype, self.machine))
        return times

    @property
    def seconds(self) -> float | None:
        """Time of a forward pass, or of a training step with its update; None without a machine."""
        if self.machine is None:
            return None
        return sum(time.seconds for time in self.part_times)

    @property
    def rows(self) -> tuple[Row, ...]:
        """One row per part, in the order in which they run.

        >>> for row in regard.budget.plan(regard.budget.encoder(512, heads=8, layers=6), tokens=512).rows:
        ...     print(row.name, row.repeats, row.parameters)
        attention norm 6 6144
        attention 6 6294528
        feed-forward norm 6 6144
        feed-forward 6 12598272
        last norm 1 1024
        """
        rows: dict[str, Row] = {}
        for stack in self.model.stacks:
            prefix = ""
            if len(self.model.stacks) > 1 and stack.name:
                prefix = f"{stack.name}: "
            for placed in stack:
                if isinstance(placed.part, Dropout) and not self.training:
                    continue
                row = self._row(placed, prefix)
                # Blocks with and without a window have parts of the same name; these become one row.
                if row.name in rows:
                    row = add_rows(rows[row.name], row)
                rows[row.name] = row
        if self.training and self.machine is not None:
            rows["update"] = Row("update", 1, 0, 0, 0, self._seconds_of(None), None)
        return tuple(rows.values())

    def _row(self, placed: PlacedPart, prefix: str) -> Row:
        call = placed.call(self.lengths)
        size = bytes_per_value(self.dtype)
        repeats = to_int(placed.repeats)
        saved = repeats * saved_by_part(placed, self.lengths, size) + placed.part.shared_saved_bytes(call, size)
        products = placed.part.products(call)
        seconds = None
        cost = 0.0
        if self.machine is not None:
            seconds = self._seconds_of(placed)
            cost = seconds
        else:
            for product in products:
                counted = product.unmasked_flops if self.model.is_tiled else product.flops
                cost += repeats * float(to_int(counted))
        total = sum(self._group_costs.values())
        return Row(
            prefix + placed.name,
            repeats,
            to_int(placed.parameters),
            repeats * sum(to_int(product.flops) for product in products),
            to_int(sympy.ceiling(saved)),
            seconds,
            cost / total if total else 0.0,
        )

    def _seconds_of(self, placed: PlacedPart | None) -> float:
        return sum(time.seconds for time in self.part_times if time.placed is placed)

    @cached_property
    def _group_costs(self) -> dict[str, float]:
        """The cost of each group: seconds with a machine, otherwise FLOPs; `share_basis` says which ones."""
        costs: dict[str, float] = {}
        if self.machine is not None:
            for time in self.part_times:
                if time.placed is not None:
                    costs[time.group] = costs.get(time.group, 0.0) + time.seconds
            return costs
        groups = flops.by_group(self.model, self.lengths, skip_masked=self.model.is_tiled)
        for group, count in groups.items():
            costs[group] = float(to_int(count))
        return costs

    @property
    def share_basis(self) -> Literal["time", "FLOPs", "unmasked FLOPs"]:
        """What all shares of this plan are shares of: `shares`, those of `rows`, and those in the bottleneck.

        - "time" with a machine; the optimizer's update is left out.
        - "unmasked FLOPs" without a machine, if attention is tiled and masks hide pairs: tiled attention skips them.
        - "FLOPs" without a machine, if no pair is skipped.
        """
        if self.machine is not None:
            return "time"
        if self.model.is_tiled and self.unmasked_flops != self.forward_flops:
            return "unmasked FLOPs"
        return "FLOPs"

    @cached_property
    def shares(self) -> dict[str, float]:
        """The share of each group of operators in the cost that `share_basis` names."""
        total = sum(self._group_costs.values())
        return {group: cost / total for group, cost in self._group_costs.items() if total}

    @cached_property
    def crossover(self) -> int | None:
        """The smallest n from which on attention has at least half of the cost; None if it never has.

        The cost is the one in `shares`. With windows, attention too is linear in n, and may never reach half. If a
        source length was given, it does not change with n.
        """
        if not self.model.attention_parts or self.model.fixed_tokens is not None:
            return None

        def attention_leads(n: int) -> bool:
            longer = replace(self, lengths=replace(self.lengths, n=n))
            return longer.shares.get("attention", 0.0) >= 0.5

        # Search from above: at small n the time is mostly overhead, so attention may have half of it there too.
        high = LARGEST
        if not attention_leads(high):
            return None
        while high > 1 and attention_leads(high // 2):
            high //= 2  # the crossover is now in (high/2, high]
        candidates = range(high // 2 + 1, high + 1)
        return candidates[bisect_left(candidates, True, key=attention_leads)]

    @property
    def bottleneck(self) -> str:
        """One line: which side takes the most time or FLOPs, why, and at which length this changes."""
        ridge = None if self.machine is None else self.machine.ridge(self.dtype)
        return describe_bottleneck(self.shares, self.part_times, ridge, self.crossover, to_int(self.lengths.n))

    @property
    def available_memory(self) -> int | None:
        """The bytes that may be used: `memory_limit`, or the machine's memory; None if neither is given."""
        if self.memory_limit is None and self.machine is not None:
            return self.machine.memory
        return self.memory_limit

    @property
    def fits(self) -> bool | None:
        """Whether the step fits into the available memory; None if there is no limit."""
        if self.available_memory is None:
            return None
        return to_int(self.memory.total) <= self.available_memory

    @property
    def context_length(self) -> int | None:
        """The length that the model is made for; None if unknown.

        It is the length of a published preset, ``max_position_embeddings`` of a config, or the number of learned
        positions. Only learned positions limit n; other lengths above it are counted too.

        >>> regard.budget.plan("llama-3-8b", tokens=100).context_length
        8192
        """
        if self.model.context_length is None and self.model.max_tokens is not None:
            return to_int(self.model.max_tokens)
        return self.model.context_length

    @cached_property
    def max_batch(self) -> int | None:
        """The largest batch that fits into memory, 0 if not even one sequence fits; None without a memory limit."""

        def total(batch: int) -> int:
            return to_int(replace(self, lengths=replace(self.lengths, batch=batch)).memory.total)

        return self._largest_size(total)

    @cached_property
    def max_tokens_forward(self) -> int | None:
        """The largest n whose forward pass fits into memory with its cache, all n tokens at once.

        0 if not even one token fits, or not even the tokens of the image. None without a memory limit, and for an image
        model, which has a single n. Learned positions limit n too. If a source length was given, it does not change
        with n.

        >>> on_gpu = {"dtype": "bfloat16", "memory_limit": "24GiB"}
        >>> step = regard.budget.plan(regard.budget.preset("llama-3-8b"), **on_gpu)
        >>> n = step.max_tokens_forward
        >>> fits = regard.budget.plan(step.model, n, **on_gpu).memory.total <= 24 * 2**30
        >>> fits, regard.budget.plan(step.model, n + 1, **on_gpu).memory.total <= 24 * 2**30
        (True, False)
        """
        return self._max_tokens(training=False)

    @cached_property
    def max_tokens_training(self) -> int | None:
        """The largest n whose training step fits into memory; limits as in `max_tokens_forward`.

        The optimizer is the plan's, even if the plan itself is a forward pass.
        """
        if self.weights not in (None, self.dtype):
            return None  # quantized weights are not trained
        return self._max_tokens(training=True)

    @cached_property
    def max_tokens_decoding(self) -> int | None:
        """The largest n after which one more token can be generated, with the keys and values of n tokens in a cache.

        None if the model does not generate, or if memory does not limit n (`decodes_any_length`); other limits as in
        `max_tokens_forward`. The cache keeps all keys, also those that a window hides, unless the model was read from a
        config.
        """
        if not self._decodes:
            return None

        def total(n: int) -> int:
            source = n if self.lengths.m is None else self.lengths.m
            return self._decoding_memory(to_int(self.lengths.batch), n, to_int(source))

        return self._largest_length(total)

    @property
    def decodes_any_length(self) -> bool:
        """Whether there is a memory limit that does not limit the n of decoding.

        The caches then stop to grow: every layer has a window, and its cache drops the keys that the window hides.
        """
        return self._decodes and self.available_memory is not None and self.max_tokens_decoding is None

    def _max_tokens(self, *, training: bool) -> int | None:
        if self.model.fixed_tokens is not None:
            return None

        def total(n: int) -> int:
            return to_int(replace(self, lengths=replace(self.lengths, n=n), training=training).memory.total)

        return self._largest_length(total)

    def _largest_length(self, needed: Callable[[int], int]) -> int | None:
        """The largest n that fits and that the model can read; 0 if there is none, None if there is no limit."""
        if self.available_memory is None:
            return None
        n = self._largest_size(needed)
        if self.model.max_tokens is not None:
            positions = to_int(self.model.max_tokens)
            n = positions if n is None else min(n, positions)
        # A shorter text has no place for the image.
        if n is not None and n < (self.model.image_tokens or 1):
            return 0
        return n

    def _largest_size(self, needed: Callable[[int], int]) -> int | None:
        if self.available_memory is None:
            return None
        return largest_size(needed, self.available_memory)

    @property
    def _decodes(self) -> bool:
        return self.model.generates and self.model.vocab is not None

    def _decoding_memory(self, batch: int, n: int, m: int) -> int:
        """Bytes of weights, caches and the step that generates one more token after n tokens."""
        return to_int(replace(self, lengths=Lengths(batch, 1, m, n), training=False).memory.total)

    @cached_property
    def decoding(self) -> Decoding | None:
        """The costs of generating one more token after n tokens; None if the model does not generate text.

        >>> model = regard.budget.decoder(768, heads=12, layers=12, vocab=50257)
        >>> token = regard.budget.plan(model, tokens=1024, dtype="bfloat16").decoding
        >>> token.cache_bytes == 2 * 12 * 1024 * 768 * 2  # keys and values, layers × n × D of 2 bytes
        True
        """
        if not self._decodes:
            return None
        batch = to_int(self.lengths.batch)
        n = to_int(self.lengths.n)
        m = self.lengths.source
        step = replace(self, lengths=Lengths(batch, 1, m, n), training=False)
        cache = to_int(self.memory.cache)
        seconds = step.seconds

        # How many sequences can be continued at once, and how fast such a batch is.
        max_batch = self._largest_size(lambda size: self._decoding_memory(size, n, to_int(m)))
        max_batch_rate = None
        if max_batch:
            full_step = replace(step, lengths=Lengths(max_batch, 1, m, n))
            max_batch_rate = _rate(max_batch, full_step.seconds)

        sizes = (float(bytes_per_value(self.dtype)), float(bytes_per_value(self.weight_dtype)))
        return Decoding(
            flops=to_int(flops.decode(self.model, batch, n, m)),
            bytes_read=int(bytes_read(self.model, step.lengths, *sizes)),
            cache_bytes=cache,
            seconds=seconds,
            tokens_per_second=_rate(batch, seconds),
            max_batch=max_batch,
            max_batch_tokens_per_second=max_batch_rate,
        )

    def to_dict(self) -> dict[str, Any]:
        """All numbers as a dictionary that can be written as JSON.

        >>> regard.budget.plan(regard.budget.encoder(512, heads=8, layers=6), tokens=512).to_dict()["forward_flops"]
        22548578304
        """
        return plan_dict(self)

    def __str__(self) -> str:
        # Here, not at the top: the report imports this module.
        from regard.budget._report import plan_text

        return plan_text(self)


def _rate(tokens: int, seconds: float | None) -> float | None:
    """Tokens per second; None without a time."""
    return tokens / seconds if seconds else None
