"""The claims of the theory as executable checks: each check returns evidence, and the verdict follows from it."""

from regard.claims._claim import Claim, Evidence, Result
from regard.claims._registry import get_claim, list_claims, run_claims

__all__ = ["Claim", "Evidence", "Result", "get_claim", "list_claims", "run_claims"]
