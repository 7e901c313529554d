"""Queries, keys, values and options of single heads of an attention call, and the output that they give."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard._errors import RegardError
from regard._hooks import AttentionCall
from regard._lowered_scores import Scores
from regard._observables import Observation
from regard._saved_call import SavedCall
from regard._shapes import flatten_batch
from regard.interp._patch_sites import NEEDS_QUERIES_AND_KEYS
from regard.kernels.choose_backend import resolve_backend
from regard.kernels.ops import attention_output


@dataclass(frozen=True, eq=False)
class HeadInputs:
    """What some heads of a call compute their output from. Each query head has keys and values of its own.

    ``q [B, heads, n, d]``, ``k [B, heads, m, d]``, and ``scores``: the lowered options of these heads.
    """

    q: Tensor
    k: Tensor
    scores: Scores

    def output(self, v: Tensor) -> Tensor:
        """``[B, heads, n, e]``: attention with the values ``v [B, heads, m, e]``. No n × m tensor is stored."""
        B = max(self.q.shape[0], self.k.shape[0], v.shape[0])
        q = self.q.expand(B, -1, -1, -1)
        k = self.k.expand(B, -1, -1, -1)
        v = v.to(q.dtype).expand(B, -1, -1, -1)
        return attention_output(q, k, v, self.scores, resolve_backend("auto", q, v))

    def query_tables(self) -> list[Tensor | None]:
        """The table of each relative term that depends on the queries; None for the other terms."""
        n = self.q.shape[2]
        return [term.table if n > 1 and term.table.shape[2] == n else None for term in self.scores.terms]

    def with_query_tables(self, tables: list[Tensor | None]) -> HeadInputs:
        """The same with other tables, as ``query_tables`` returns them."""
        terms = []
        for term, table in zip(self.scores.terms, tables, strict=True):
            terms.append(term if table is None else replace(term, table=table))
        return replace(self, scores=replace(self.scores, terms=tuple(terms)))


def head_inputs(call: AttentionCall, out: Tensor, observation: Observation | None, heads: list[int]) -> HeadInputs:
    """The inputs of some heads of a call that was measured with ``Observe(keep=True)``.

    - ``out``: the output of the call, ``[*B, H, n, e]``.
    """
    assert observation is not None
    (saved,) = observation.saved_calls
    assert isinstance(saved, SavedCall)
    q = saved.q
    k = saved.k
    # The saved tensors are detached. Gradients go through those of the call.
    if torch.is_grad_enabled() and call.q is not None and call.k is not None:
        q = flatten_batch(call.q, out.shape[:-3]).to(q.dtype)
        k = flatten_batch(call.k, out.shape[:-3]).to(k.dtype)
    return HeadInputs(q[:, heads], k[:, key_heads(heads, q.shape[1], k.shape[1])], saved.scores.select_heads(heads))


def head_values(call: AttentionCall, out: Tensor, heads: list[int]) -> Tensor:
    """``[B, heads, m, e]``: the values that some heads of a call read."""
    v = flatten_batch(call.v, out.shape[:-3])
    return v[:, key_heads(heads, out.shape[-3], v.shape[1])]


def key_heads(heads: list[int], H: int, G: int) -> list[int]:
    """The key head of each query head."""
    return [head * G // H for head in heads]


def check_known(call: AttentionCall, part: str) -> None:
    """Raise if a part is not known in this call, because the model computes its attention weights itself."""
    if call.how != "weights" or part not in (*NEEDS_QUERIES_AND_KEYS, "pattern"):
        return
    raise RegardError(
        f"part {part!r} of {call.path!r} cannot be taken from a run: the model makes these weights by hand, so q and "
        "k are not known; output, v and given weights can be patched (without gradients more is known: docs/interp.md)"
    )


def has_query_tables(inputs: HeadInputs) -> bool:
    """Whether q also enters a relative bias, as Shaw's relative keys do."""
    return any(table is not None for table in inputs.query_tables())
