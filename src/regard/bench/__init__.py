"""How fast, beside what people use: the same inputs, interleaved, compared before they are timed.

>>> from regard import bench
>>> for case in bench.cases("causal 1×8×512"):
...     print(case.name, sorted(bench.run(case, seconds=0).ratios)[-1])
causal 1×8×512×64 SDPA
"""

from regard.bench.ledger import cases, conditions, run
from regard.bench.race import Case, Measured, Missing

__all__ = ["Case", "Measured", "Missing", "cases", "conditions", "run"]
