"""A job of the Look page: which earlier heads an induction head depends on.

An induction head attends to the token after an earlier occurrence of the present token. So it needs to know, at each
key, which token came before, and a head of an earlier layer has to supply that. To find it, each earlier head is
ablated in turn, and the weight of the induction head is measured again on the same text.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from regard import interp
from regard._errors import RegardError
from regard._observables import Observe
from regard._saved_call import SavedCall
from regard.lab.look.jobs import Progress, _load_model
from regard.lab.look.map_pyramid import Pyramid
from regard.lab.look.text_scores import score_text
from regard.models import TextDecoder
from regard.models._model import Model


def find_sources(args: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Measure the induction of ``args["target"]`` with each head of ``args["sources"]`` ablated.

    Returns ``{"before": value, "after": [value, …]}``: the mean weight of the target on the token after an earlier
    occurrence of the present token, with all heads, and without each source (its output is replaced by 0). A value is
    None if no token of the text is repeated.
    """
    model = _load_model(args["model"])
    if not isinstance(model, TextDecoder):
        raise RegardError(f"sources needs a language model that predicts next tokens, got {type(model).__name__}")
    ids = torch.tensor([args["ids"]])
    path, head = args["target"]
    steps = len(args["sources"]) + 1
    progress(0, steps, "with all heads")
    before = _induction(model, ids, path, head)
    after = []
    for index, (source_path, source_head) in enumerate(args["sources"], 1):
        progress(index, steps, f"with head {index} of {steps - 1} ablated")
        after.append(_induction(model, ids, path, head, (source_path, source_head)))
    return {"before": before, "after": after}


def _induction(
    model: Model, ids: torch.Tensor, path: str, head: int, ablated: tuple[str, int] | None = None
) -> float | None:
    """Return the mean weight of a head on the token after an earlier occurrence of the present token."""
    observe = Observe(keep=True)
    with ExitStack() as contexts:
        contexts.enter_context(torch.no_grad())
        if ablated is not None:
            contexts.enter_context(interp.ablate(model, [ablated]))
        recording = contexts.enter_context(interp.watch(model, observe, layers=path, heads=[(path, head)]))
        model(ids)
    observation = recording[path]
    saved_call = observation.saved_calls[0]
    assert isinstance(saved_call, SavedCall) and observation.counted is not None
    pyramid = Pyramid(saved_call, 0, 0, observation.counted[0, 0])
    scores = score_text(pyramid, ids[0])
    if "reason" in scores:
        raise RegardError(scores["reason"])
    value = scores["induction"]["value"]
    return None if value is None else float(value)
