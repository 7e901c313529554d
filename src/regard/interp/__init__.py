"""Observe models: what every head does, in models of this library, of ``transformers``, and of plain PyTorch."""

from typing import TYPE_CHECKING

from regard._lazy_names import import_at_first_use

if TYPE_CHECKING:
    from regard.interp import figures, huggingface
    from regard.interp._ablation import ablate
    from regard.interp._head_atlas import Atlas, atlas
    from regard.interp._look import PAGE_OBSERVABLES, look
    from regard.interp._recording import Recording, load_recording
    from regard.interp._rollout import rollout
    from regard.interp._token_text import TokenText, label_tokens
    from regard.interp._watch import watch

__all__ = [
    "PAGE_OBSERVABLES",
    "Atlas",
    "Recording",
    "TokenText",
    "ablate",
    "atlas",
    "figures",
    "huggingface",
    "label_tokens",
    "load_recording",
    "look",
    "rollout",
    "watch",
]

# Name → its module, which is imported when the name is first used.
_SOURCES = {
    "Atlas": "regard.interp._head_atlas",
    "PAGE_OBSERVABLES": "regard.interp._look",
    "Recording": "regard.interp._recording",
    "TokenText": "regard.interp._token_text",
    "ablate": "regard.interp._ablation",
    "atlas": "regard.interp._head_atlas",
    "figures": "regard.interp.figures",
    "huggingface": "regard.interp.huggingface",
    "label_tokens": "regard.interp._token_text",
    "load_recording": "regard.interp._recording",
    "look": "regard.interp._look",
    "rollout": "regard.interp._rollout",
    "watch": "regard.interp._watch",
}
__getattr__, __dir__ = import_at_first_use(__name__, _SOURCES)
