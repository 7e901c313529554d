"""The lab: a web workbench that shows attention; ``regard lab`` serves it on this machine."""

from __future__ import annotations

from regard.lab.workspace import Workspace, default_state_folder

__all__ = ["Workspace", "default_state_folder"]
