"""Checks that attention never takes less work than an RNN, and less than an LSTM only if n < 2d; its path is short."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from regard.claims._check_helpers import count_flops, projection_flops
from regard.claims._claim import HOLDS_CONDITIONALLY, Claim, Evidence
from regard.claims._statistics import power_law_exponent, slope_interval
from regard.claims.theorems.attention_vs_rnn import layer_output, previous_nodes, recurrent_net
from regard.nn import MultiHeadAttention


def gated_net(d: int) -> nn.Module:
    """A recurrent network with four gates."""
    return nn.LSTM(d, d, batch_first=True)


def last_output_in_parallel(layer: nn.Module, tokens: list[Tensor]) -> Tensor:
    """The last output of a layer that receives all tokens at once."""
    return layer_output(layer(torch.stack(tokens, 1)))[:, -1]


def last_output_in_sequence(net: nn.Module, tokens: list[Tensor]) -> Tensor:
    """The last output of a network that receives one token after the other, together with its previous state."""
    output = net(tokens[0].unsqueeze(1))
    for token in tokens[1:]:
        if isinstance(output, tuple):
            output = net(token.unsqueeze(1), output[1])
        else:
            output = net(token.unsqueeze(1))
    return layer_output(output)[:, -1]


def shortest_path(call: Callable[[list[Tensor]], Tensor], n: int, d: int) -> int:
    """The shortest chain of operations from the first of n tokens to the last output; 0 if there is none."""
    tokens = list(torch.randn(n, 1, d).unbind())
    for token in tokens:
        token.requires_grad_()

    # A breadth-first search from the output through the graph of derivatives.
    level = {call(tokens).grad_fn}
    visited = set()
    steps = 0
    while level:
        if any(getattr(node, "variable", None) is tokens[0] for node in level):
            return steps
        visited |= level  # each operation is expanded once
        level = set().union(*map(previous_nodes, level)) - visited
        steps += 1
    return 0


def layer_flops(layer: nn.Module, n: int, d: int) -> tuple[int, int]:
    """Counted FLOPs of a layer, and the part outside of its projections: in attention, scores and weighted sums."""
    flops = count_flops(lambda: layer(torch.zeros(1, n, d)))
    return flops["all"], flops["all"] - projection_flops(flops)


def first_length(lengths: list[int], costs: list[int], other_costs: list[int]) -> int:
    """The smallest length at which the first cost is at least the second; 0 if there is none."""
    for n, cost, other_cost in zip(lengths, costs, other_costs, strict=True):
        if cost >= other_cost:
            return n
    return 0


def check(
    *,
    d: int = 8,
    heads: int = 2,
    seed: int = 0,
    layer: Callable[..., nn.Module] = MultiHeadAttention,
    recurrent: Callable[[int], nn.Module] = recurrent_net,
    gated: Callable[[int], nn.Module] = gated_net,
) -> Evidence:
    """Count FLOPs of attention, an RNN and an LSTM of one width at lengths up to 3d; measure paths between the ends."""
    evidence = Evidence()
    torch.manual_seed(seed)
    # The lengths include those just below, and at, the predicted crossovers d and 2d.
    lengths = sorted({max(d // 4, 1), max(d // 2, 1), d - 1, d, 2 * d - 1, 2 * d, 3 * d})
    attention = layer(d, heads)
    rnn = recurrent(d)
    lstm = gated(d)
    flops: dict[str, list[int]] = {"attention": [], "scores and sums alone": [], "RNN": [], "LSTM": []}
    for n in lengths:
        total, scores = layer_flops(attention, n, d)
        flops["attention"].append(total)
        flops["scores and sums alone"].append(scores)
        flops["RNN"].append(layer_flops(rnn, n, d)[0])
        flops["LSTM"].append(layer_flops(lstm, n, d)[0])
    whole = flops["attention"]
    ratio = min(a / b for a, b in zip(whole, flops["RNN"], strict=True))
    lstm_length = first_length(lengths, whole, flops["LSTM"])
    always_fewer = first_length(lengths, whole, flops["RNN"]) == 0 and lstm_length == 0
    evidence.add_statement(
        "An attention layer takes fewer operations than a recurrent layer of the same width.",
        always_fewer,
        f"with its projections, attention takes at least {ratio:.2f} times the FLOPs of an RNN at every n that was "
        f"tried, and at least those of an LSTM from n = {lstm_length} on (d = {d})",
    )
    evidence.add_condition(
        "Compared with an LSTM, attention takes fewer operations up to n = 2d, and more beyond.",
        lstm_length == 2 * d,
        f"fewer FLOPs than an LSTM if n < {lstm_length} = 2d",
    )
    scores_length = first_length(lengths, flops["scores and sums alone"], flops["RNN"])
    evidence.add_condition(
        "Without projections, scores and weighted sums take fewer operations than an RNN up to n = d, and more beyond.",
        scores_length == d,
        f"scores and weighted sums alone take fewer FLOPs than an RNN if n < {scores_length} = d",
    )

    # A control: its statement must be false.
    # The projections alone cost more than an RNN, so the opposite comparison must fail at every length.
    rnn_length = first_length(lengths, flops["RNN"], whole)
    evidence.add_control("At some length an RNN takes at least as many operations as attention.", rnn_length != 0)
    evidence.numbers |= {"n* for an LSTM": lstm_length, "n* of scores for an RNN": scores_length}
    evidence.numbers |= {"d": d, "smallest ratio to an RNN": ratio}

    ends = [4, 8, 12, 16]  # lengths of the sequence whose two ends are compared
    paths = {
        "attention": [shortest_path(partial(last_output_in_parallel, attention), n, d) for n in ends],
        "recurrence": [shortest_path(partial(last_output_in_sequence, rnn), n, d) for n in ends],
    }
    growth = slope_interval(list(map(float, ends)), list(map(float, paths["recurrence"]))).value
    is_constant = len(set(paths["attention"])) == 1 and paths["attention"][0] > 0
    evidence.add_condition(
        "In attention, the path from any token to any output has the same length for every n.",
        is_constant,
        f"{paths['attention'][0]} operations at n = {ends[0]}, {paths['attention'][-1]} at n = {ends[-1]}",
    )
    evidence.add_condition(
        "In recurrence, every token in between adds a step.",
        growth > 0.9,
        f"{paths['recurrence'][0]} operations at n = {ends[0]}, {paths['recurrence'][-1]} at n = {ends[-1]}: "
        f"{growth:.2f} more per token",
    )
    power = power_law_exponent(ends, paths["recurrence"])
    # A control: its statement must be false.
    evidence.add_control("The path through recurrence does not grow.", power < 0.1, f"it grows as n^{power:.2f}")
    evidence.numbers |= {"operations per token, recurrence": growth}
    evidence.add_curves(f"counted FLOPs of a layer, d = {d}", lengths, flops, x="n", y="FLOPs", log="xy")
    evidence.add_curves("operations between first token and last output", ends, paths, x="n", y="path")
    return evidence


CLAIM = Claim(
    id="attention-less-work-than-rnn",
    title="A self-attention layer takes less work than a recurrent one",
    citations=(("exam-answers", "1 (c)"), ("homework-3", "1.4 (b)")),
    papers=("vaswani-2017",),
    statement="A self-attention layer takes less work than a recurrent one, and any two positions are one step apart.",
    formula=r"n^2 d < n d^2, \qquad n < d",
    refuted_by="A length at which attention does not take fewer operations, or a path between two positions that grows "
    "with their distance.",
    control="The recurrent network: its path must grow, and it must never take as many operations as attention.",
    verdict=HOLDS_CONDITIONALLY,
    what_holds="Scores and weighted sums take less work than an RNN if n < d. With projections, attention takes at "
    "least twice its work.",
    correction="The sequence is short. Scores and weighted sums alone take fewer operations than an RNN if n < d. With "
    "the four projections, attention takes at least twice the operations of an RNN at every n, and fewer than an LSTM "
    "if n < 2d. The path of one step holds at every length.",
    check=check,
)
