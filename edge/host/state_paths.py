"""The place of what Edge keeps that cannot be made again: EDGE_STATE."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

STATE_VARIABLE = "EDGE_STATE"


def state_root() -> Path:
    """The folder of replies and histories: EDGE_STATE, or the system's place for a user's state."""
    chosen = os.environ.get(STATE_VARIABLE)
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_state_dir("edge"))
