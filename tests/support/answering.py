"""An HTTP server that answers one request, and a proxy in the environment that nobody is at."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest


@contextlib.contextmanager
def answering(body: bytes, paths: list[str]) -> Iterator[str]:
    """Its address; `paths` gets what it was asked for."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        server.timeout = 20
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            with contextlib.suppress(OSError):  # it waits for a request that did not come
                socket.create_connection(("127.0.0.1", server.server_port)).close()
            thread.join()


@contextlib.contextmanager
def dead_proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In the environment of clients of HTTP."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{nobody.getsockname()[1]}")
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        yield
