"""Small files that are written whole or not at all."""

from __future__ import annotations

import uuid
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """The file with this text, or none: nobody ever reads half of it. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.stem}.{uuid.uuid4().hex}.partial")
    try:
        draft.write_text(text)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
