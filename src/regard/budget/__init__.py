"""A planner: parameters, FLOPs, bytes and time of attention and transformers, derived and not measured.

>>> from regard import budget
>>> model = budget.decoder(768, heads=12, layers=12, vocab=50257, position="learned", reach=1024, qkv_bias=True)
>>> plan = budget.plan(model, tokens=1024)
>>> plan.parameters, plan.forward
(124439808, 291648307200)
>>> budget.text(budget.formulas(budget.in_letters("block", {"heads": 12}))["n* (attention = the rest)"])
'2D + D_ff'
"""

from regard.budget.allocations import Allocated, allocated
from regard.budget.compare import ways
from regard.budget.configs import from_config
from regard.budget.fields import build, in_letters, read_fields
from regard.budget.formulas import formulas
from regard.budget.machine import Machine, machines, named
from regard.budget.memory import Memory
from regard.budget.model import Lengths, Model
from regard.budget.plan import Plan, plan
from regard.budget.solve import fit
from regard.budget.spec import attention, block, decoder, encoder, encoder_decoder, vision_transformer
from regard.budget.symbols import latex, text
from regard.budget.this_machine import measure, this
from regard.budget.walk import Counted, count, register

__all__ = [
    "Allocated",
    "Counted",
    "Lengths",
    "Machine",
    "Memory",
    "Model",
    "Plan",
    "allocated",
    "attention",
    "block",
    "build",
    "count",
    "decoder",
    "encoder",
    "encoder_decoder",
    "fit",
    "formulas",
    "from_config",
    "in_letters",
    "latex",
    "machines",
    "measure",
    "named",
    "plan",
    "read_fields",
    "register",
    "text",
    "this",
    "vision_transformer",
    "ways",
]
