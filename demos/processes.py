"""Child processes that end with their input, and their memory."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from edge.host.cache_paths import CACHE_VARIABLE
from edge.system.heap import with_malloc_settings

END_TIMEOUT_S = 15.0


@contextlib.contextmanager
def child(command: list[str], *, cache: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """Ends with the block, by the end of its input; killed where that does not help.

    With a cache, it is a daemon of Edge that keeps its weights there.
    """
    environment = None
    if cache is not None:
        environment = {**with_malloc_settings(os.environ), CACHE_VARIABLE: str(cache)}
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,  # Ctrl-C is for the parent, which ends it later
    ) as process:
        try:
            yield process
        finally:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
            try:
                process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()


def daemon_address(process: subprocess.Popen[str], name: str) -> str:
    """Where it listens, once it does. Raises OSError if it does not start."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise OSError(f"the daemon of {name} did not start; its message is on standard error")
    address: str = json.loads(line)["addresses"][0]
    return address


def peak_bytes(pid: int) -> int:
    """The most memory that the process ever held (VmHWM); 0 once it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return 0
    (peak,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(peak) << 10
