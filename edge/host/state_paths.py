"""The place of Edge's state, which cannot be made again: EDGE_STATE of the environment."""

from __future__ import annotations

from pathlib import Path

import platformdirs

from edge.host.home import own_folder

STATE_VARIABLE = "EDGE_STATE"


def state_root() -> Path:
    """The folder of replies and histories: EDGE_STATE, or the user's state folder of the system.

    Raises RequestError for a user without a home folder."""
    return own_folder(STATE_VARIABLE, lambda: platformdirs.user_state_dir("edge"))
