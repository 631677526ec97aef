"""Atomic writes of small files."""

from __future__ import annotations

import uuid
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write the file atomically: readers see all of the text or none. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.stem}.{uuid.uuid4().hex}.partial")
    try:
        draft.write_text(text)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
