"""Which attention takes which mask: in encoders, decoders and encoder–decoders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.claims.claim import HOLDS, Claim, Evidence
from regard.masks import Causal, Mask, Padding
from regard.nn import Decoder, EncoderDecoder

Placement = Mapping[str, frozenset[str]]
SOURCE, CROSS, TARGET = "encoder self-attention", "cross-attention", "decoder self-attention"
PADDING, CAUSAL, BOTH = frozenset({"padding"}), frozenset({"causal"}), frozenset({"padding", "causal"})
BY_THE_TEXT: dict[str, Placement] = {
    "encoder–decoder": {SOURCE: PADDING, CROSS: PADDING, TARGET: CAUSAL},
    "encoder": {SOURCE: PADDING},
    "decoder": {TARGET: CAUSAL},
}
CLEAR = 1e-6


@dataclass
class Setting:
    """Models and a batch: source and target vectors, and which of them are real."""

    model: Any
    alone: Any
    source: Tensor
    target: Tensor
    real_source: Tensor
    real_target: Tensor
    draw: torch.Generator

    def mask(self, kinds: frozenset[str], real: Tensor) -> Mask | None:
        masks = {"padding": Padding(real), "causal": Causal()}
        chosen = [masks[kind] for kind in sorted(kinds)]
        return None if not chosen else chosen[0] if len(chosen) == 1 else chosen[0] & chosen[1]

    def run(self, kind: str, placed: Placement, source: Tensor, target: Tensor) -> Tensor:
        """The outputs of an encoder, a decoder alone or both under exactly these masks."""
        none: frozenset[str] = frozenset()
        times = len(source) // len(self.source)  # the batch may stand there several times over
        own = self.mask(placed.get(TARGET, none), self.real_target.repeat(times, 1))
        read, cross = (
            self.mask(placed.get(where, none), self.real_source.repeat(times, 1)) for where in (SOURCE, CROSS)
        )
        out: Tensor
        if kind == "decoder":
            out = self.alone.run(target, mask=own)[0]
            return out
        out = self.model.encoder.run(source, mask=read)[0]
        if kind == "encoder–decoder":
            out = self.model.decoder.run(target, out, mask=own, context_mask=cross)[0]
        return out

    def noise(self, x: Tensor, kept: Tensor) -> Tensor:
        return torch.where(kept.unsqueeze(-1), x, torch.randn(x.shape, generator=self.draw, dtype=x.dtype))

    def leak(self, kind: str, placed: Placement) -> Tensor:
        """``[n]``: by how much outputs at real positions change with padding or, in decoders, with what comes later."""
        n, real = self.target.shape[1], self.real_source if kind == "encoder" else self.real_target
        early = torch.arange(n) <= torch.arange(n - 1).view(-1, 1, 1)  # [t, 1, n]: what must stay when t + 1 … change
        early = early.expand(-1, len(real), -1)
        kept = torch.cat([self.real_target.unsqueeze(0), early])
        targets = [self.target, *(self.noise(self.target, one) for one in kept)]
        sources = [self.source, self.noise(self.source, self.real_source), *[self.source] * (n - 1)]
        with torch.no_grad():
            y = self.run(kind, placed, torch.cat(sources), torch.cat(targets)).unflatten(0, (n + 1, -1))
        far = (y[1:] - y[0]).abs().amax(-1) * real
        far[1:] *= early if kind != "encoder" else 0
        return far.amax((0, 1))

    def reach(self, kind: str, placed: Placement) -> float:
        """The least change of an output that should see a far real token, when that token changes.

        In an encoder the first output and the last token, in a decoder the last output and the first token, in both
        the first output and the last token of the source.
        """
        at = torch.arange(self.source.shape[1])
        real = self.real_target if kind == "decoder" else self.real_source
        where = at * real if kind != "decoder" else -at * real - at.numel() * ~real
        far = at == where.argmax(-1, keepdim=True)
        changed = self.source, self.noise(self.target, ~far)
        if kind != "decoder":
            changed = self.noise(self.source, ~far), self.target
        with torch.no_grad():
            change = self.run(kind, placed, *changed) - self.run(kind, placed, self.source, self.target)
        seen = self.real_source if kind == "encoder" else self.real_target
        ends = at * seen if kind == "decoder" else -at * seen - at.numel() * ~seen
        return float(change.norm(dim=-1)[torch.arange(len(change)), ends.argmax(-1)].min())


def right(n: int, lengths: Tensor) -> Tensor:
    """``[B, n]``, True = real: padding on the right."""
    return torch.arange(n) < lengths.unsqueeze(-1)


def check(
    *,
    n: int = 7,
    d: int = 12,
    heads: int = 2,
    layers: int = 2,
    seed: int = 0,
    placement: Mapping[str, Placement] = BY_THE_TEXT,
    place: Callable[[int, Tensor], Tensor] = right,
) -> Evidence:
    """Each kind of model under the text's masks, with each taken away, and with those it says are not needed."""
    found = Evidence()
    draw = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model, alone = (kind(d, heads=heads, layers=layers).double().eval() for kind in (EncoderDecoder, Decoder))
    source, target = torch.randn(2, 3, n, d, generator=draw, dtype=torch.float64).unbind()
    real = place(n, torch.tensor([n, n - 2, n // 2])), place(n, torch.tensor([n - 3, n, n // 2]))
    at = Setting(model, alone, source, target, *real, draw)
    lines: dict[str, Tensor] = {}
    for kind, placed in placement.items():
        ask_kind(found, at, kind, placed, lines)
    with torch.no_grad():
        wanted = at.run("encoder–decoder", placement["encoder–decoder"], source, target)
        far = float((model(source, target, padding=real[0]) - wanted).abs().max())
    found.written("EncoderDecoder of this package places masks so", far < 1e-12, f"within {far:g}")
    for kind in placement:
        open_ = float(at.leak(kind, {}).max())
        found.control(f"{kind}: no masks at all, and nothing leaks", open_ == 0, f"{open_:.2g}")
    found.draw(
        "encoder–decoder: change of the output when padding or later tokens change",
        {name: (range(n), far.tolist()) for name, far in lines.items()},
        x="target position",
        y="largest change",
    )
    return found


def ask_kind(found: Evidence, at: Setting, kind: str, placed: Placement, lines: dict[str, Tensor]) -> None:
    """Enough; each needed; what the text leaves out changes nothing at real positions."""
    far = at.leak(kind, placed)
    names = ", ".join(f"{'+'.join(sorted(kinds))} on {where}" for where, kinds in placed.items())
    fewer = {where: {one: kinds for one, kinds in placed.items() if one != where} for where in placed}
    without = {where: at.leak(kind, rest) for where, rest in fewer.items()}
    least = min(float(one.max()) for one in without.values())
    said = (
        f"{kind}: padding and later tokens change outputs by {float(far.max()):g}, less a mask by {least:.2g} or more"
    )
    found.written(f"{kind}: {names} is enough", float(far.max()) == 0, said)
    sight = at.reach(kind, placed)
    found.written(f"{kind}: nothing real is hidden that should be seen", sight > CLEAR, f"a far token: {sight:.2g}")
    found.numbers[f"{kind}, as in the text"] = float(far.max())
    if kind == "encoder–decoder":
        lines["as in the text"] = far
    for where, one in without.items():
        worst = float(one.max())
        found.written(f"{kind}: {where} needs its mask", worst > CLEAR, f"without it outputs change by {worst:.2g}")
        found.numbers[f"{kind}, {where} unmasked"] = worst
        if kind == "encoder–decoder":
            lines[f"{where} unmasked"] = one
    if TARGET in placed:
        with torch.no_grad():
            a, b = (at.run(kind, {**placed, TARGET: kinds}, at.source, at.target) for kinds in (placed[TARGET], BOTH))
        more = float((a - b).abs()[at.real_target].max())
        found.written(
            f"{kind}: a padding mask on {TARGET} as well changes nothing",
            more < 1e-12,
            f"real outputs differ by {more:g}",
        )


CLAIM = Claim(
    id="mask-placement",
    sources=("003",),
    statement="With padding on the right: an encoder takes a padding mask in its self-attention; a decoder a causal "
    "mask in its self-attention and nothing else; an encoder–decoder a padding mask in encoder self-attention and in "
    "cross-attention, and a causal mask in decoder self-attention, where a padding mask is not needed.",
    formula=r"M_{\operatorname{enc}} = P_s, \qquad M_{\operatorname{cross}} = P_s, \qquad M_{\operatorname{dec}} = C",
    refuted="Under these masks an output at a real position that depends on padding or on a later target, or that does "
    "not see what it should; a mask that can be left out; or an added padding mask that changes an output.",
    control="No masks at all, asked whether padding and later targets stay without influence.",
    verdict=HOLDS,
    check=check,
)
