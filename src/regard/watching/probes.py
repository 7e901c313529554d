"""What heads are asked: texts made so that a kind of head shows itself, and texts where it must not.

natural    English as people write it (Python's own documentation, on every machine)
repeated   a block of random tokens, said R times: what followed before can be looked up
random     as many random tokens, none twice: nothing can be looked up; the control of ``repeated``
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor

from regard.shapes import integer

__all__ = ["Probe", "Reader", "natural", "repeated"]


@dataclass(frozen=True)
class Probe:
    """Token ids ``[B, n]``; ``special [n]`` tokens that a tokenizer puts around every text, and the first one.

    Of a repeated text: ``block`` tokens a block, the first one at ``start``.
    """

    name: str
    ids: Tensor
    special: Tensor
    block: int = 0
    start: int = 0

    def later(self) -> Tensor:
        """Rows of the second block and after ``[n]``."""
        at = torch.arange(self.ids.shape[1]) - self.start
        return (at >= self.block) & ~self._outside()

    def earlier(self, shift: int, at: Tensor) -> Tensor:
        """``[rows at, n]``: keys that stand whole blocks before a query, and ``shift`` after that.

        0 is the same token, 1 the one that followed it: where an induction head looks.
        """
        i, j = at.unsqueeze(-1), torch.arange(self.ids.shape[1])
        back = i - j + shift
        inside = ~self._outside()
        followed = j >= self.start + shift  # the first token of all followed nothing
        return (back > 0) & (back % self.block == 0) & (j <= i) & followed & inside & inside[at].unsqueeze(-1)

    def _outside(self) -> Tensor:
        at = torch.arange(self.ids.shape[1]) - self.start
        return (at < 0) | (at >= self.ids.shape[1] // self.block * self.block) | (self.special & (at != 0))


class Reader:
    """A tokenizer, ours, of ``transformers`` or of ``tokenizers``: ids of a text, and which ids are ordinary tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        around, inner = self.ids("a"), self._plain("a")
        if not inner:
            raise ValueError("the tokenizer has no token for 'a'; give text models one that reads English")
        # What stands around every text, by what it adds to a short one.
        start = next((k for k in range(len(around)) if around[k : k + len(inner)] == inner), 0)
        self.before, self.after = around[:start], around[start + len(inner) :]
        self.special = set(self.before) | set(self.after) | self._declared()

    def ids(self, text: str) -> list[int]:
        """With what the tokenizer puts around a text."""
        found = self.tokenizer.encode(text)
        return list(getattr(found, "ids", found))

    def __len__(self) -> int:
        size = getattr(self.tokenizer, "get_vocab_size", None)
        return int(size()) if callable(size) else len(self.tokenizer)

    def _plain(self, text: str) -> list[int]:
        inner = getattr(self.tokenizer, "tokenizer", self.tokenizer)  # ours holds one of tokenizers
        try:
            found = inner.encode(text, add_special_tokens=False)
        except TypeError:  # bytes have no such thing
            found = self.tokenizer.encode(text)
        return list(getattr(found, "ids", found))

    def _declared(self) -> set[int]:
        inner = getattr(self.tokenizer, "tokenizer", self.tokenizer)
        if hasattr(inner, "all_special_ids"):
            return set(inner.all_special_ids)
        if hasattr(inner, "get_added_tokens_decoder"):
            return {i for i, token in inner.get_added_tokens_decoder().items() if token.special}
        return set()


def natural(reader: Reader, n: int, texts: int, text: str | None = None) -> Probe:
    """``texts`` pieces of n tokens of English, one after the other."""
    inside = n - len(reader.before) - len(reader.after)
    if inside < 2:
        raise ValueError(f"tokens is {n}, of which {n - inside} stand around every text; give more")
    given = "\n".join(topics.values()) if text is None else text
    # Characters enough for the tokens asked for; the whole would be read for seconds.
    ids = reader._plain(given[: 40 * inside * texts])
    if len(ids) < inside:
        raise ValueError(f"the text has {len(ids)} tokens; the probe needs {inside} at least")
    pieces = [ids[k * inside : (k + 1) * inside] for k in range(min(texts, len(ids) // inside))]
    return _around(reader, "natural", torch.tensor(pieces))


def repeated(reader: Reader, block: int, times: int, texts: int, vocabulary: int) -> tuple[Probe, Probe]:
    """A block of random tokens ``times`` times over, and its control: as many tokens, all different."""
    integer("block", block, least=2)
    ordinary = torch.tensor([i for i in range(vocabulary) if i not in reader.special])
    if len(ordinary) < block * times:
        raise ValueError(
            f"the vocabulary has {len(ordinary)} ordinary tokens; {block * times} different ones are needed"
        )
    draw = torch.Generator().manual_seed(0)
    rows = [ordinary[torch.randperm(len(ordinary), generator=draw)[: block * times]] for _ in range(texts)]
    different = torch.stack(rows)
    same = different[:, :block].repeat(1, times)
    return tuple(_around(reader, name, ids, block) for name, ids in (("repeated", same), ("random", different)))  # type: ignore[return-value]


def _around(reader: Reader, name: str, ids: Tensor, block: int = 0) -> Probe:
    def beside(tokens: Sequence[int]) -> Tensor:
        return torch.tensor([list(tokens)] * len(ids), dtype=torch.int64).reshape(len(ids), len(tokens))

    whole = torch.cat([beside(reader.before), ids, beside(reader.after)], 1)
    at, end = torch.arange(whole.shape[1]), whole.shape[1] - len(reader.after)
    special = (at == 0) | (at < len(reader.before)) | (at >= end)
    return Probe(name, whole, special, block, len(reader.before))
