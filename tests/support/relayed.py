"""Commands of a shell, forked as those are that tests start themselves (`tests.support.forked`).

Where a script would run `python -m edge`, it runs a small program instead, which hands over its
arguments, folder, variables and streams, and ends as what was started with them here.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import subprocess
import sys
import threading
from pathlib import Path

_MOST_BYTES = 128 << 10
"""Of a message: arguments and an environment."""

_CLIENT = """\
import json, os, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as relay:
    relay.connect(sys.argv[1])
    asked = {"words": sys.argv[2:], "folder": os.getcwd(), "environment": dict(os.environ)}
    socket.send_fds(relay, [json.dumps(asked).encode()], [0, 1, 2])
    sys.exit(int(relay.recv(16)))
"""


class Relay:
    """A context manager; every command has ended before it does."""

    def __init__(self, folder: Path) -> None:
        """folder: of its own, with a short name."""
        self._path = folder / "relay"
        self._client = folder / "relayed.py"
        self._client.write_text(_CLIENT)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._thread = threading.Thread(target=self._serve, name="relay")

    @property
    def command(self) -> str:
        """In place of Python, in a script of the shell."""
        return shlex.join([sys.executable, "-I", "-S", str(self._client), str(self._path)])

    def __enter__(self) -> Relay:
        self._listener.bind(str(self._path))
        self._listener.listen()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                asker, _address = self._listener.accept()
            except OSError:  # it was shut down
                return
            threading.Thread(target=_run, args=(asker,), name="relayed command").start()


def _run(asker: socket.socket) -> None:
    with asker:
        message, streams, _flags, _address = socket.recv_fds(asker, _MOST_BYTES, 3)
        asked = json.loads(message)
        stdin, stdout, stderr = streams
        try:
            process = subprocess.Popen(
                [sys.executable, *asked["words"]],
                cwd=asked["folder"],
                env=asked["environment"],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
            )
        finally:
            for stream in streams:
                os.close(stream)
        code = process.wait()
        with contextlib.suppress(OSError):  # who asked has been killed
            asker.send(str(code if code >= 0 else 128 - code).encode())
