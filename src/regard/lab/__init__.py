"""The lab: one page where attention is seen, counted, proved and changed; `regard lab` serves it on this machine."""

from __future__ import annotations

from regard.lab.lab import Lab, default_state

__all__ = ["Lab", "default_state"]
