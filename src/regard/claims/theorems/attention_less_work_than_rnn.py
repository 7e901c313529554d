"""Less work a layer than recurrence: up to a length; a path of length 1: always."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from regard.claims.claim import HOLDS_IF, Claim, Evidence
from regard.claims.statistics import slope
from regard.claims.theorems.attention_vs_rnn import before, recurrent_net, result
from regard.claims.theorems.cost_multi_head import flops
from regard.nn import MultiHeadAttention


def gated_net(d: int) -> nn.Module:
    """A recurrent network with four gates."""
    return nn.LSTM(d, d, batch_first=True)


def at_once(layer: nn.Module, tokens: list[Tensor]) -> Tensor:
    """The last output of a layer that takes all tokens together."""
    return result(layer(torch.stack(tokens, 1)))[:, -1]


def in_turn(net: nn.Module, tokens: list[Tensor]) -> Tensor:
    """The last output of a network that takes one token after the other, with the state that it gave."""
    found = net(tokens[0].unsqueeze(1))
    for token in tokens[1:]:
        found = net(token.unsqueeze(1), found[1]) if isinstance(found, tuple) else net(token.unsqueeze(1))
    return result(found)[:, -1]


def path(call: Callable[[list[Tensor]], Tensor], n: int, d: int) -> int:
    """The shortest chain of operations from the first of n tokens to the last output; 0: there is none."""
    tokens = [torch.randn(1, d, requires_grad=True) for _ in range(n)]
    level, met, steps = {call(tokens).grad_fn}, set(), 0
    while level:
        if any(getattr(node, "variable", None) is tokens[0] for node in level):
            return steps
        met |= level
        level = {each for node in level for each in before(node)} - met
        steps += 1
    return 0


def work(layer: nn.Module, n: int, d: int) -> dict[str, int]:
    """Counted FLOPs of a layer, and of its scores and weighted sums alone."""
    found = flops(lambda: layer(torch.zeros(1, n, d)))
    maps = sum(found.get(f"{name}_proj", 0) for name in ("q", "k", "v", "out"))
    return {"all": found["all"], "bare": found["all"] - maps}


def first(lengths: list[int], one: list[int], other: list[int]) -> int:
    """The least length from which on the first costs at least as much as the second; 0: nowhere."""
    more = [n for n, a, b in zip(lengths, one, other, strict=True) if a >= b]
    return more[0] if more else 0


def check(
    *,
    d: int = 8,
    heads: int = 2,
    seed: int = 0,
    layer: Callable[..., nn.Module] = MultiHeadAttention,
    recurrent: Callable[[int], nn.Module] = recurrent_net,
    gated: Callable[[int], nn.Module] = gated_net,
) -> Evidence:
    """FLOPs of attention beside an RNN and an LSTM of the same width at lengths up to 3d; paths between ends."""
    found = Evidence()
    torch.manual_seed(seed)
    lengths = sorted({max(d // 4, 1), max(d // 2, 1), d - 1, d, 2 * d - 1, 2 * d, 3 * d})
    one, rnn, lstm = layer(d, heads), recurrent(d), gated(d)
    mine = [work(one, n, d) for n in lengths]
    whole, bare = [x["all"] for x in mine], [x["bare"] for x in mine]
    plain, gates = ([work(net, n, d)["all"] for n in lengths] for net in (rnn, lstm))
    _work(found, d, lengths, {"whole": whole, "bare": bare, "rnn": plain, "lstm": gates})
    ends = [4, 8, 12, 16]
    hops = {
        "attention": [path(partial(at_once, one), n, d) for n in ends],
        "recurrence": [path(partial(in_turn, rnn), n, d) for n in ends],
    }
    _paths(found, ends, hops)
    lines = {"attention": (lengths, whole), "scores and sums alone": (lengths, bare)}
    lines |= {"RNN": (lengths, plain), "LSTM": (lengths, gates)}
    found.draw(f"counted FLOPs of a layer, d = {d}", lines, x="n", y="FLOPs", log="xy")
    found.draw(
        "operations between first token and last output", {k: (ends, v) for k, v in hops.items()}, x="n", y="path"
    )
    return found


def _work(found: Evidence, d: int, lengths: list[int], seen: dict[str, list[int]]) -> None:
    ratio = min(a / b for a, b in zip(seen["whole"], seen["rnn"], strict=True))
    found.written(
        "a layer of attention takes fewer operations than a recurrent layer of the same width",
        all(a < b for name in ("rnn", "lstm") for a, b in zip(seen["whole"], seen[name], strict=True)),
        f"with its projections it takes {ratio:.2f} times an RNN's FLOPs or more at every n tried, an LSTM's from n = "
        f"{first(lengths, seen['whole'], seen['lstm'])} on (d = {d})",
    )
    gated = first(lengths, seen["whole"], seen["lstm"])
    found.condition(
        "beside an LSTM it takes fewer up to n = 2d, and more beyond",
        gated == 2 * d,
        f"fewer than an LSTM's where n < {gated} = 2d",
    )
    bare = first(lengths, seen["bare"], seen["rnn"])
    found.condition(
        "scores and sums alone, without projections, take fewer than an RNN up to n = d, and more beyond",
        bare == d,
        f"scores and sums alone are fewer than an RNN's where n < {bare} = d",
    )
    never = first(lengths, seen["rnn"], seen["whole"])
    found.control("an RNN takes at least as many as a whole layer of attention somewhere", never != 0)
    found.numbers |= {"n* beside an LSTM": gated, "n* of scores beside an RNN": bare, "d": d, "least ratio": ratio}


def _paths(found: Evidence, ends: list[int], hops: dict[str, list[int]]) -> None:
    at = [math.log(n) for n in ends]
    grows = slope([float(n) for n in ends], [float(x) for x in hops["recurrence"]]).value
    short = len(set(hops["attention"])) == 1 and hops["attention"][0] > 0
    found.condition(
        "one step leads from any token to any output of attention, at every length",
        short,
        f"{hops['attention'][0]} operations at n = {ends[0]}, {hops['attention'][-1]} at n = {ends[-1]}",
    )
    found.condition(
        "recurrence takes a step for every token between",
        grows > 0.9,
        f"{hops['recurrence'][0]} operations at n = {ends[0]}, {hops['recurrence'][-1]} at n = {ends[-1]}: "
        f"{grows:.2f} more a token",
    )
    power = slope(at, [math.log(max(x, 1)) for x in hops["recurrence"]]).value
    found.control("the path through recurrence does not grow", power < 0.1, f"it grows as n^{power:.2f}")
    found.numbers |= {"operations a token, recurrence": grows}


CLAIM = Claim(
    id="attention-less-work-than-rnn",
    sources=("001", "002"),
    statement="A self-attention layer takes less work than a recurrent one, and any two positions are one step apart.",
    formula=r"n^2 d < n d^2, \qquad n < d",
    refuted="A length at which the counted operations of attention are not fewer, or a path between two positions "
    "that grows with their distance.",
    control="The recurrent network: asked whether its path stays as short, and whether it ever takes as many "
    "operations as a whole attention layer.",
    verdict=HOLDS_IF,
    correction="The sequence must be short. Scores and weighted sums alone are fewer operations than an RNN's "
    "where n < d; with the four projections attention takes at least twice an RNN's at every n, and fewer than an "
    "LSTM's where n < 2d. The path of one step holds at every length.",
    check=check,
)
