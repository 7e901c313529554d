"""Small models of every kind, each with two inputs that differ at one position, for tests of patching."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import regard
from regard._hooks import Observer
from regard.interp._register_observers import observing
from regard.nn import Decoder
from support.checkpoints import make
from support.handwritten import Handwritten, plain
from support.model_configs import BERT, GPT2, T5, V, ids, real_rows
from support.observed_models import GROUPED, REAL, Calls, Own, X, encoder, outputs

CHANGED = 2  # the position at which both inputs differ


class Family:
    """A model and its two inputs.

    - ``call(model, x)`` runs the model on an input.
    - ``same``: the rows of the result, bool ``[B, n]``, that depend on the changed position by attention alone.
    """

    def __init__(
        self, build: Callable[[], nn.Module], call: Callable[[nn.Module, Tensor], Any], x: Tensor, same: Tensor
    ) -> None:
        self.build = build
        self.call = call
        self.base = x
        self.same = same
        self.source = x.clone()
        if x.is_floating_point():
            self.source[:, CHANGED] += 1.0
        else:
            self.source[:, CHANGED] = (x[:, CHANGED] + 5) % V

    def make(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build()

    def run(self, model: nn.Module, x: Tensor) -> Tensor:
        """The rows of a result that are compared."""
        result = self.call(model, x)
        out = result if isinstance(result, Tensor) else outputs(result)
        return out[self.same]

    @torch.no_grad()
    def observed(self, model: nn.Module, x: Tensor) -> Tensor:
        """The same on regard's attention, which rounds in another way than the model's own."""
        with observing(Observer(model)):
            return self.run(model, x)


def unchanged(real: Tensor) -> Tensor:
    same = real.clone()
    same[:, CHANGED] = False
    return same


ALL = torch.ones(3, 7, dtype=torch.bool)
MASK = real_rows(7).long()
FAMILIES: dict[str, Family] = {
    "ours": Family(
        lambda: Decoder(12, heads=6, kv_heads=2, layers=2, vocab=V).eval(),
        lambda m, x: m(x, padding=[7, 4, 1]),
        *(ids(), unchanged(REAL)),
    ),
    "bundled": Family(
        lambda: regard.models.load(regard.models.bundled()).float(), lambda m, x: m(x), ids(), unchanged(ALL)
    ),
    "gpt2": Family(
        lambda: make("GPT2LMHeadModel", GPT2), lambda m, x: m(x, attention_mask=MASK), ids(), unchanged(REAL)
    ),
    "llama": Family(
        lambda: make("LlamaForCausalLM", GROUPED), lambda m, x: m(x, attention_mask=MASK), ids(), unchanged(REAL)
    ),
    "bert": Family(lambda: make("BertModel", BERT), lambda m, x: m(x, attention_mask=MASK), ids(), unchanged(REAL)),
    # The target is the same in both runs.
    "t5": Family(
        lambda: make("T5ForConditionalGeneration", T5),
        lambda m, x: m(input_ids=x, attention_mask=MASK, decoder_input_ids=ids(3, 5, seed=2)),
        *(ids(), torch.ones(3, 5, dtype=torch.bool)),
    ),
    "torch encoder": Family(lambda: encoder(False), lambda m, x: m(x, src_key_padding_mask=~REAL), X, unchanged(REAL)),
    "torch attention": Family(lambda: Calls().eval(), lambda m, x: m(x), X, unchanged(ALL)),
    # Attention without residuals.
    "own": Family(lambda: nn.Sequential(Own()).eval(), lambda m, x: m(x), X[..., :10], ALL),
    "handwritten": Family(
        lambda: nn.Sequential(Handwritten(plain), Handwritten(plain)).eval(), lambda m, x: m(x), X[..., :6], ALL
    ),
}
