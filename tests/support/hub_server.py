"""A server on a real socket that answers as Hugging Face does, for the endpoints of a download."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.support.hub_folders import COMMIT

_LARGE_BYTES = 1 << 20
"""From here on files are stored apart, and asked for by a redirect."""


@dataclass(kw_only=True)
class HubServer:
    """Has one repository. A context manager; `requests` are (method, path, Range)."""

    repository: str
    files: Mapping[str, bytes]
    refusal: tuple[int, str] | None = None
    """A status and the code of the error, instead of any answer."""
    refuses_files_alone: bool = False
    """It says what it has, as it does of models with terms."""
    cut_after_bytes: int | None = None
    """Of the next large answer; then its connection breaks, and later ones fail."""
    stalls: bool = False
    """Keep a cut connection open until this has ended."""
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    agents: set[str] = field(default_factory=set)
    told_tokens: set[str] = field(default_factory=set)
    """Paths that came with an access token."""

    def __enter__(self) -> HubServer:
        hub = self

        class Handler(_Handler):
            server_hub = hub

        self.has_stalled, self._is_over = threading.Event(), threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def stall(self) -> None:
        """What a thread of the server does that sends no more."""
        self.has_stalled.set()
        self._is_over.wait()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def storage(self) -> str:
        """The same server under another name: as large files come from elsewhere."""
        return f"http://localhost:{self._server.server_port}"

    @property
    def fetched(self) -> set[str]:
        """Names of files whose content was asked for."""
        paths = [path for method, path, _ in self.requests if method == "GET"]
        found = (re.fullmatch(rf"/stored/(.+)|.*/resolve/{COMMIT}/(.+)", path) for path in paths)
        return {each[1] or each[2] for each in found if each is not None}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_hub: HubServer

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        """Nothing: it is all in `requests`."""

    def _answer(self) -> None:
        hub, path = self.server_hub, self.path.partition("?")[0]
        hub.requests.append((self.command, path, self.headers["Range"]))
        hub.agents.add(self.headers["User-Agent"] or "")
        if self.headers["Authorization"]:
            hub.told_tokens.add(path)
        asks_for_a_list = path.startswith("/api/") and hub.refuses_files_alone
        if hub.refusal is not None and not asks_for_a_list:
            status, code = hub.refusal
            self._send(status, b"{}", {"X-Error-Code": code})
        elif re.fullmatch(rf"/api/models/{hub.repository}/revision/(main|{COMMIT})", path):
            listed = [
                {"rfilename": name, "size": len(content)} for name, content in hub.files.items()
            ]
            told = {"id": hub.repository, "sha": COMMIT, "siblings": listed}
            self._send(200, json.dumps(told).encode(), {"Content-Type": "application/json"})
        elif path.startswith(f"/api/models/{hub.repository}/revision/"):
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif path.startswith(resolve := f"/{hub.repository}/resolve/{COMMIT}/"):
            self._file(path.removeprefix(resolve))
        elif path.startswith("/stored/"):
            self._content(hub.files[path.removeprefix("/stored/")])
        else:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _file(self, name: str) -> None:
        hub = self.server_hub
        content = hub.files.get(name)
        if content is None:
            self._send(404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            return
        digest = hashlib.sha256(content).hexdigest()
        told = {"X-Repo-Commit": COMMIT, "ETag": f'"{digest[:40]}"'}
        if len(content) < _LARGE_BYTES:
            self._content(content, told)
            return
        told |= {"X-Linked-ETag": f'"{digest}"', "X-Linked-Size": str(len(content))}
        self._send(302, b"", {**told, "Location": f"{hub.storage}/stored/{name}"})

    def _content(self, content: bytes, told: Mapping[str, str] | None = None) -> None:
        hub = self.server_hub
        status, headers = 200, {**(told or {}), "Accept-Ranges": "bytes"}
        size = len(content)
        if found := re.fullmatch(r"bytes=(\d+)-", self.headers["Range"] or ""):
            first = int(found[1])
            status, headers["Content-Range"] = 206, f"bytes {first}-{size - 1}/{size}"
            content = content[first:]
        if hub.cut_after_bytes is not None and size >= _LARGE_BYTES and self.command == "GET":
            cut, hub.cut_after_bytes = hub.cut_after_bytes, 0
            if not cut:
                self._send(503, b"", {})
                return
            self._send(status, content, headers, cut=cut)
            self.close_connection = True
            if hub.stalls:
                hub.stall()
            return
        self._send(status, content, headers)

    def _send(
        self, status: int, content: bytes, headers: Mapping[str, str], *, cut: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content if cut is None else content[:cut])
