"""The check of every architecture of the installed ``transformers``: is what ``regard.watch`` records exact?

``regard zoo`` runs it and writes docs/models-supported.md. It is a tool for contributors.
"""

from regard.zoo._architectures import Architecture, list_architectures
from regard.zoo._page import results_page
from regard.zoo._results import OUTCOMES, Result, current_versions, read_results
from regard.zoo._run import Limits, run_checks

__all__ = [
    "OUTCOMES",
    "Architecture",
    "Limits",
    "Result",
    "current_versions",
    "list_architectures",
    "read_results",
    "results_page",
    "run_checks",
]
