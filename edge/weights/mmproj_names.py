"""The names of GGUF files with vision encoders."""

from __future__ import annotations

from pathlib import PurePosixPath


def is_mmproj(name: str) -> bool:
    """Whether a GGUF file of this name has a vision encoder, and no model."""
    name = PurePosixPath(name).name.lower()
    return "mmproj" in name and name.endswith(".gguf")
