"""The ledger: every claim of the theory, executed. A check returns evidence, and the verdict follows from it."""

from regard.claims.claim import Claim, Evidence, Result
from regard.claims.ledger import claim, ledger, run

__all__ = ["Claim", "Evidence", "Result", "claim", "ledger", "run"]
