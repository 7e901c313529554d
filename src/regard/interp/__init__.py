"""Observe models: what every head does, in models of this library, of ``transformers``, and of plain PyTorch."""

from typing import TYPE_CHECKING

from regard._lazy_names import import_at_first_use

if TYPE_CHECKING:
    from regard.interp import figures, huggingface
    from regard.interp._ablation import ablate
    from regard.interp._attribution import attribute
    from regard.interp._attribution_result import Attribution, LayerAttribution
    from regard.interp._circuits import Circuits, circuits
    from regard.interp._groups_of import groups_of
    from regard.interp._head_atlas import Atlas, atlas
    from regard.interp._logit_attribution import logit_attribution
    from regard.interp._logit_parts import LogitPart, LogitParts
    from regard.interp._look import PAGE_OBSERVABLES, look
    from regard.interp._patch import patch
    from regard.interp._patch_attribution import attribution_patch
    from regard.interp._patch_capture import Captured, capture
    from regard.interp._patch_metrics import Logit, LogitDifference
    from regard.interp._patch_paths import path_patch
    from regard.interp._patch_sites import Site
    from regard.interp._patch_sweep import patch_sweep
    from regard.interp._patch_table import PatchSweep
    from regard.interp._recording import Recording, load_recording
    from regard.interp._rollout import rollout
    from regard.interp._score_attribution import score_attribution
    from regard.interp._score_pairs import Component, ScorePair, ScoreParts
    from regard.interp._token_text import TokenText, label_tokens
    from regard.interp._watch import watch

__all__ = [
    "PAGE_OBSERVABLES",
    "Atlas",
    "Attribution",
    "Captured",
    "Circuits",
    "Component",
    "LayerAttribution",
    "Logit",
    "LogitDifference",
    "LogitPart",
    "LogitParts",
    "PatchSweep",
    "Recording",
    "ScorePair",
    "ScoreParts",
    "Site",
    "TokenText",
    "ablate",
    "atlas",
    "attribute",
    "attribution_patch",
    "capture",
    "circuits",
    "figures",
    "groups_of",
    "huggingface",
    "label_tokens",
    "load_recording",
    "logit_attribution",
    "look",
    "patch",
    "patch_sweep",
    "path_patch",
    "rollout",
    "score_attribution",
    "watch",
]

# Name → its module, which is imported when the name is first used.
_SOURCES = {
    "PAGE_OBSERVABLES": "regard.interp._look",
    "Atlas": "regard.interp._head_atlas",
    "Attribution": "regard.interp._attribution_result",
    "Captured": "regard.interp._patch_capture",
    "Circuits": "regard.interp._circuits",
    "Component": "regard.interp._score_pairs",
    "LayerAttribution": "regard.interp._attribution_result",
    "Logit": "regard.interp._patch_metrics",
    "LogitDifference": "regard.interp._patch_metrics",
    "LogitPart": "regard.interp._logit_parts",
    "LogitParts": "regard.interp._logit_parts",
    "PatchSweep": "regard.interp._patch_table",
    "Recording": "regard.interp._recording",
    "ScorePair": "regard.interp._score_pairs",
    "ScoreParts": "regard.interp._score_pairs",
    "Site": "regard.interp._patch_sites",
    "TokenText": "regard.interp._token_text",
    "ablate": "regard.interp._ablation",
    "atlas": "regard.interp._head_atlas",
    "attribute": "regard.interp._attribution",
    "attribution_patch": "regard.interp._patch_attribution",
    "capture": "regard.interp._patch_capture",
    "circuits": "regard.interp._circuits",
    "figures": "regard.interp.figures",
    "groups_of": "regard.interp._groups_of",
    "huggingface": "regard.interp.huggingface",
    "label_tokens": "regard.interp._token_text",
    "load_recording": "regard.interp._recording",
    "logit_attribution": "regard.interp._logit_attribution",
    "look": "regard.interp._look",
    "patch": "regard.interp._patch",
    "patch_sweep": "regard.interp._patch_sweep",
    "path_patch": "regard.interp._patch_paths",
    "rollout": "regard.interp._rollout",
    "score_attribution": "regard.interp._score_attribution",
    "watch": "regard.interp._watch",
}
__getattr__, __dir__ = import_at_first_use(__name__, _SOURCES)
