"""How fast, beside what people use: the same inputs, interleaved, compared before they are timed.

from regard import bench

for case in bench.cases(["causal"]):
    print(bench.run(case))
"""

from regard.bench.ledger import cases, conditions, run
from regard.bench.race import Case, Measured, Missing

__all__ = ["Case", "Measured", "Missing", "cases", "conditions", "run"]
