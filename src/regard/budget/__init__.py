"""Plan a model before it exists: parameters, FLOPs, memory and time of attention and transformers, from formulas.

>>> from regard import budget
>>> model = budget.decoder(768, heads=12, layers=12, vocab=50257, position="learned", reach=1024, qkv_bias=True)
>>> plan = budget.plan(model, tokens=1024)  # or budget.plan("gpt2")
>>> plan.parameters, plan.forward_flops
(124439808, 291648307200)
>>> budget.to_text(budget.formulas(budget.symbolic_model("block", {"heads": 12}))["n* (attention = the rest)"])
'2D + D_ff'
"""

from regard.budget._allocation_profiler import Allocations, measure_allocations
from regard.budget._attention_vs_alternatives import alternatives
from regard.budget._compare_models import ComparedFigure, Comparison, compare
from regard.budget._count_live_model import ModelCounts, count
from regard.budget._counted_model import CountedModel
from regard.budget._counted_plan import CountedPlan
from regard.budget._formulas import formulas
from regard.budget._hf_configs import from_config
from regard.budget._machine import Machine, find_machine, machines
from regard.budget._machine_benchmark import measure_machine, this_machine
from regard.budget._make_plan import plan
from regard.budget._memory import Memory
from regard.budget._model import Lengths, Model
from regard.budget._models_from_fields import build_model, parse_fields, symbolic_model
from regard.budget._models_from_sizes import attention, block, decoder, encoder, encoder_decoder, vision_transformer
from regard.budget._op_flops import register_flop_formulas
from regard.budget._plan import Plan
from regard.budget._presets import Preset, find_preset, preset, presets
from regard.budget._solve import fit
from regard.budget._symbols import to_latex, to_text

__all__ = [
    "Allocations",
    "ComparedFigure",
    "Comparison",
    "CountedModel",
    "CountedPlan",
    "Lengths",
    "Machine",
    "Memory",
    "Model",
    "ModelCounts",
    "Plan",
    "Preset",
    "alternatives",
    "attention",
    "block",
    "build_model",
    "compare",
    "count",
    "decoder",
    "encoder",
    "encoder_decoder",
    "find_machine",
    "find_preset",
    "fit",
    "formulas",
    "from_config",
    "machines",
    "measure_allocations",
    "measure_machine",
    "parse_fields",
    "plan",
    "preset",
    "presets",
    "register_flop_formulas",
    "symbolic_model",
    "this_machine",
    "to_latex",
    "to_text",
    "vision_transformer",
]
