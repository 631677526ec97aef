"""The place of Edge's state, which cannot be made again: EDGE_STATE."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

STATE_VARIABLE = "EDGE_STATE"


def state_root() -> Path:
    """The folder of replies and histories: EDGE_STATE, or the user's state folder of the system."""
    chosen = os.environ.get(STATE_VARIABLE)
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_state_dir("edge"))
