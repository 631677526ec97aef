"""A text as a file for a library that reads files only, which nobody else can read."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from edge.system.kind import PORTABLE


@contextlib.contextmanager
def as_private_file(content: bytes) -> Iterator[str]:
    """The path of a file with this content, until the context ends.

    In memory where the system has such files, else in the user's temporary folder.
    """
    if sys.platform == "linux" and not PORTABLE:
        with os.fdopen(os.memfd_create("edge"), "wb") as file:
            file.write(content)
            file.flush()
            yield f"/proc/self/fd/{file.fileno()}"
        return
    with tempfile.TemporaryDirectory(prefix="edge-") as folder:  # of mode 0700
        path = Path(folder) / "private"
        path.touch(0o600)
        path.write_bytes(content)
        yield str(path)
