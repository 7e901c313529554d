"""Benchmarks against other libraries: all get the same inputs, results are compared first, timed calls alternate.

>>> from regard import bench
>>> for case in bench.cases("causal 1×8×512"):
...     print(case.name, sorted(bench.run(case, seconds=0).ratios)[-1])
causal 1×8×512×64 SDPA
"""

from regard.bench._cases import cases, conditions, run
from regard.bench._race import Case, Measurement, MissingPeer

__all__ = ["Case", "Measurement", "MissingPeer", "cases", "conditions", "run"]
