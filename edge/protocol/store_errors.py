"""Errors of what is kept on disk as ours, so that a coordinator can raise them by kind."""

from __future__ import annotations

import offload
from edge.errors import CapacityError, CheckpointError, EdgeError


def map_store_error(error: Exception) -> Exception:
    """A full disk is a matter of capacity, other bytes than were written one of the checkpoint."""
    if isinstance(error, offload.StoreFullError):
        return CapacityError(str(error))
    if isinstance(error, offload.StoreCorruptError):
        return CheckpointError(f"{error}; load the model again: what arrived well is kept")
    return EdgeError(str(error)) if isinstance(error, offload.StoreError) else error
