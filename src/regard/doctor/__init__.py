"""``regard doctor``: describes this machine and tests whether regard computes correctly on it."""

from regard.doctor.checks import run_checks

__all__ = ["run_checks"]
