"""Checks which attention needs which mask in encoders, decoders and encoder–decoders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.claims._check_helpers import largest_difference, random_normal
from regard.claims._claim import HOLDS, Claim, Evidence
from regard.claims.theorems.causal_makes_right_padding_free import pad_right
from regard.masks import Causal, Mask, Padding
from regard.nn import Decoder, EncoderDecoder

Placement = Mapping[str, frozenset[str]]  # the kinds of mask by the attention that takes them
SOURCE = "encoder self-attention"
CROSS = "cross-attention"
TARGET = "decoder self-attention"
NONE: frozenset[str] = frozenset()
PADDING = frozenset({"padding"})
CAUSAL = frozenset({"causal"})
BOTH = frozenset({"padding", "causal"})
BY_THE_TEXT: dict[str, Placement] = {
    "encoder–decoder": {SOURCE: PADDING, CROSS: PADDING, TARGET: CAUSAL},
    "encoder": {SOURCE: PADDING},
    "decoder": {TARGET: CAUSAL},
}
CLEAR = 1e-6  # larger changes are not rounding errors


def first_real(real: Tensor) -> Tensor:
    """The index of the first real position of each row, ``[B]``."""
    return real.int().argmax(-1)


def last_real(real: Tensor) -> Tensor:
    """The index of the last real position of each row, ``[B]``."""
    return real.shape[-1] - 1 - first_real(real.flip(-1))


@dataclass
class Setting:
    """An encoder–decoder, a decoder alone, and a batch: source and target vectors, and which of them are real."""

    model: Any
    decoder_alone: Any
    source: Tensor
    target: Tensor
    real_source: Tensor
    real_target: Tensor
    generator: torch.Generator

    def run(self, kind: str, placement: Placement, source: Tensor, target: Tensor) -> Tensor:
        """The outputs of an encoder, a decoder or an encoder–decoder under exactly these masks."""
        repeats = len(source) // len(self.source)  # the batch may be stacked several times

        def mask(where: str, real: Tensor) -> Mask | None:
            masks: dict[str, Mask] = {"padding": Padding(real.repeat(repeats, 1)), "causal": Causal()}
            combined = None
            for name in sorted(placement.get(where, NONE)):
                combined = masks[name] if combined is None else combined & masks[name]
            return combined

        own = mask(TARGET, self.real_target)
        out: Tensor
        if kind == "decoder":
            out = self.decoder_alone.run_blocks(target, mask=own)[0]
            return out
        out = self.model.encoder.run_blocks(source, mask=mask(SOURCE, self.real_source))[0]
        if kind == "encoder–decoder":
            cross = mask(CROSS, self.real_source)
            out = self.model.decoder.run_blocks(target, out, mask=own, context_mask=cross)[0]
        return out

    def randomize(self, x: Tensor, unchanged: Tensor) -> Tensor:
        """x with random vectors at all positions that are not ``unchanged [B, n]``."""
        return torch.where(unchanged.unsqueeze(-1), x, random_normal(self.generator, *x.shape))

    def leak(self, kind: str, placement: Placement) -> Tensor:
        """How much real outputs change if padding changes or, in decoders, if later tokens change, ``[n]``."""
        n = self.target.shape[1]
        real = self.real_source if kind == "encoder" else self.real_target
        # earlier[t]: the positions whose outputs must stay the same when the tokens after t change.
        earlier = (torch.arange(n) <= torch.arange(n - 1).view(-1, 1, 1)).expand(-1, len(real), -1)
        targets = [self.target]
        for unchanged in (self.real_target, *earlier):
            targets.append(self.randomize(self.target, unchanged))
        sources = [self.source, self.randomize(self.source, self.real_source), *[self.source] * (n - 1)]
        # One batch holds the original and all its variants.
        with torch.no_grad():
            y = self.run(kind, placement, torch.cat(sources), torch.cat(targets)).unflatten(0, (n + 1, -1))
        change = (y[1:] - y[0]).abs().amax(-1) * real
        if kind == "encoder":
            change[1:] = 0  # only the target changed there
        else:
            change[1:] *= earlier
        return change.amax((0, 1))

    def sight(self, kind: str, placement: Placement) -> float:
        """The smallest change of an output that should see a distant real token, when that token changes.

        - encoder: the first output and the last token.
        - decoder: the last output and the first token.
        - encoder–decoder: the first output and the last token of the source.
        """
        distant = last_real(self.real_source)
        observed = first_real(self.real_source if kind == "encoder" else self.real_target)
        if kind == "decoder":
            distant = first_real(self.real_target)
            observed = last_real(self.real_target)
        unchanged = torch.arange(self.source.shape[1]) != distant.unsqueeze(-1)
        source = self.source
        target = self.randomize(self.target, unchanged)
        if kind != "decoder":  # the distant token is in the source
            source = self.randomize(self.source, unchanged)
            target = self.target
        with torch.no_grad():
            change = self.run(kind, placement, source, target)
            change = change - self.run(kind, placement, self.source, self.target)
        return float(change.norm(dim=-1)[torch.arange(len(change)), observed].min())


def check_kind(evidence: Evidence, setting: Setting, kind: str, placement: Placement, leaks: dict[str, Tensor]) -> None:
    """Check that the masks are enough, that each is needed, and that another padding mask changes no real output."""
    leaks["as in the text"] = setting.leak(kind, placement)
    for where in placement:
        leaks[f"{where} unmasked"] = setting.leak(kind, {**placement, where: NONE})
    worst = {name: float(leak.max()) for name, leak in leaks.items()}
    enough, *incomplete = worst.values()
    names = ", ".join(f"{'+'.join(sorted(masks))} on {where}" for where, masks in placement.items())
    evidence.add_statement(
        f"{kind}: {names} is enough.",
        enough == 0,
        f"{kind}: padding and later tokens change outputs by {enough:g}; if one mask is missing, by "
        f"{min(incomplete):.2g} or more",
    )
    sight = setting.sight(kind, placement)
    evidence.add_statement(f"{kind}: no token is hidden that should be seen.", sight > CLEAR, f"change {sight:.2g}")
    for where in placement:
        change = worst[f"{where} unmasked"]
        evidence.add_statement(f"{kind}: {where} needs its mask.", change > CLEAR, f"without it, change {change:.2g}")
    evidence.numbers |= {f"{kind}, {name}": change for name, change in worst.items()}
    if TARGET in placement:
        with torch.no_grad():
            out = setting.run(kind, placement, setting.source, setting.target)
            out_both = setting.run(kind, {**placement, TARGET: BOTH}, setting.source, setting.target)
        difference = largest_difference(out[setting.real_target], out_both[setting.real_target])
        evidence.add_statement(
            f"{kind}: an additional padding mask on {TARGET} changes nothing.",
            difference < 1e-12,
            f"real outputs differ by {difference:g}",
        )


def check(
    *,
    n: int = 7,
    d: int = 12,
    heads: int = 2,
    layers: int = 2,
    seed: int = 0,
    placement: Mapping[str, Placement] = BY_THE_TEXT,
    place: Callable[[int, Tensor], Tensor] = pad_right,
) -> Evidence:
    """Run each kind of model under the text's masks, with each mask removed, and with one that is not needed."""
    evidence = Evidence()
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = EncoderDecoder(d, heads=heads, layers=layers).double().eval()
    alone = Decoder(d, heads=heads, layers=layers).double().eval()
    source, target = random_normal(generator, 2, 3, n, d).unbind()
    # Source and target have different lengths, so that their padding masks cannot be confused.
    real_source = place(n, torch.tensor([n, n - 2, n // 2]))
    real_target = place(n, torch.tensor([n - 3, n, n // 2]))
    setting = Setting(model, alone, source, target, real_source, real_target, generator)
    leaks: dict[str, dict[str, Tensor]] = {kind: {} for kind in placement}
    for kind, masks in placement.items():
        check_kind(evidence, setting, kind, masks, leaks[kind])
    with torch.no_grad():
        expected = setting.run("encoder–decoder", placement["encoder–decoder"], source, target)
        difference = largest_difference(model(source, target, padding=real_source), expected)
    evidence.add_statement(
        "EncoderDecoder of this package places its masks in this way.", difference < 1e-12, f"within {difference:g}"
    )

    # A control: its statement must be false. Without masks every output sees every token, padding and later ones too.
    for kind in placement:
        unmasked = float(setting.leak(kind, {}).max())
        evidence.add_control(f"{kind}: without any mask, nothing leaks.", unmasked == 0, f"change {unmasked:.2g}")
    title = "encoder–decoder: change of the output when padding or later tokens change"
    curves = {name: leak.tolist() for name, leak in leaks["encoder–decoder"].items()}
    evidence.add_curves(title, range(n), curves, x="target position", y="largest change")
    return evidence


CLAIM = Claim(
    id="mask-placement",
    title="Encoders need a padding mask, decoders a causal mask, encoder–decoders both",
    citations=(("solution-sheet", "2 (b)"),),
    statement="If the padding is on the right, an encoder needs a padding mask in its self-attention. A decoder needs "
    "only a causal mask in its self-attention. An encoder–decoder needs a padding mask in encoder self-attention and "
    "in cross-attention, and a causal mask in decoder self-attention, where a padding mask is not needed.",
    formula=r"M_{\operatorname{enc}} = P_s, \qquad M_{\operatorname{cross}} = P_s, \qquad M_{\operatorname{dec}} = C",
    refuted_by="Under these masks, an output at a real position that depends on padding or on a later target token, "
    "or that does not see a token that it should see; a mask that is not needed; or an additional padding mask that "
    "changes an output.",
    control="No masks at all: padding and later target tokens must change outputs.",
    verdict=HOLDS,
    check=check,
)
