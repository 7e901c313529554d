"""The room «claims» of the lab: what it answers."""

from __future__ import annotations

from regard.lab.endpoints import Endpoints

__all__ = ["ENDPOINTS"]

ENDPOINTS = Endpoints()
