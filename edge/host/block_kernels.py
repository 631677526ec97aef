"""The library of Edge's own operator, if it is installed: `pip install "edge-inference[fast]"`."""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.metadata
import logging
from pathlib import Path

from edge.kernels.matmul_blocks.reference import TILES_VERSION

DISTRIBUTION = "edge-inference-kernels"
_LIBRARY = "edge_kernels/library.bin"
_SLOW = "plain"
_log = logging.getLogger(__name__)


@functools.cache
def library() -> Path | None:
    """The library, if this processor has fast kernels in it and its file is the one installed."""
    try:
        files = importlib.metadata.files(DISTRIBUTION) or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    found = next((file for file in files if str(file) == _LIBRARY), None)
    if found is None or found.hash is None:
        _log.warning("%s is not used: it was installed without the digest of its library",
                     DISTRIBUTION)  # fmt: skip
        return None
    path = Path(str(found.locate()))
    try:
        digest = hashlib.new(found.hash.mode, path.read_bytes()).digest()
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != found.hash.value:
            _log.warning("%s is not used: its library was changed; install it again", DISTRIBUTION)
            return None
        import edge_kernels

        if edge_kernels.layout() != TILES_VERSION:
            _log.warning("%s is not used: it is of another version of Edge", DISTRIBUTION)
            return None
        return None if edge_kernels.kernels() == _SLOW else path
    except (OSError, AttributeError) as error:
        _log.warning("%s is not used: %s", DISTRIBUTION, error)
        return None
