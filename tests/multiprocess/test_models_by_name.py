"""Models by their names on Hugging Face: the real client, and a server that answers as it does."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest
from huggingface_hub import scan_cache_dir

from demos.bundled import MODEL
from tests.support import known_rates
from tests.support.model_folders import COMMIT, add_to_cache, files_of
from tests.support.processes import EDGE, PATIENCE_S, edge_process, poll_until
from tests.support.slow_cases import shown_in_parts

_LARGE_BYTES = 1 << 20
"""From here on files are stored apart, and asked for by a redirect."""


@dataclass(kw_only=True)
class _HubServer:
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

    def __enter__(self) -> _HubServer:
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
    server_hub: _HubServer

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


BIG = random.Random(3).randbytes(48 << 20)
TO_CUT = 25 << 20
SMALL = {"README.md": b"read me", "modeling_tiny.py": b"1 / 0", "pytorch_model.bin": b"pickle"}
FIND = """
import sys
from edge.api.hub_download import model_path_now
print(model_path_now(sys.argv[1]))
"""


class Machine:
    """One whose Hugging Face is the server, and whose cache is its own."""

    def __init__(self, cache: Path, server: _HubServer, **environment: str) -> None:
        self.cache = cache
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
            "HF_ENDPOINT": server.address,
            "HF_HUB_CACHE": str(cache),
            **environment,
        }

    def run(self, *command: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            env=self.environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def edge(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return self.run(*EDGE, *arguments, stdin=stdin)

    def find(self, name: str) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-c", FIND, name)

    def sentence(self, *arguments: str) -> str:
        """Why the command failed."""
        outcome = self.edge(*arguments)
        assert outcome.returncode == 1, outcome
        assert outcome.stdout == ""
        (line,) = outcome.stderr.strip().splitlines()
        assert line.startswith("edge: "), line
        return line


def test_a_model_is_fetched_once_and_only_what_is_read(tmp_path: Path) -> None:
    with _HubServer(repository="org/tiny", files={**files_of(MODEL), **SMALL}) as server:
        machine = Machine(tmp_path / "hub", server)
        outcome = machine.edge("inspect", "org/tiny", "--json")
        assert outcome.stderr == ""
        assert json.loads(outcome.stdout)["name"] == "org/tiny"
        assert server.fetched == files_of(MODEL).keys() - {"README.md"}
        assert not [agent for agent in server.agents if "torch" in agent or "agent/" in agent]
        asked = len(server.requests)
        outcome = machine.edge(
            *("run", "https://huggingface.co/org/tiny", "-p", "Once", "-n", "2", "--local", "1")
        )
        assert outcome.returncode == 0, outcome.stderr
        assert outcome.stdout.strip()
        assert len(server.requests) == asked, "what is there is not asked for"


@shown_in_parts("multiprocess/test_command_line.py")
def test_every_command_takes_a_name(tmp_path: Path) -> None:
    add_to_cache(tmp_path / "hub", "org/tiny", files_of(MODEL))
    with _HubServer(repository="org/none", files={}) as server:
        machine = Machine(tmp_path / "hub", server)
        for words in (
            ("plan", "hf://org/tiny@main"),
            ("chat", "org/tiny", "-n", "2"),
            ("quality", "org/tiny", "--against", "org/tiny", "--windows", "1"),
        ):
            # The first has its peer measured, as any command has.
            program = "edge" if words[0] == "plan" else known_rates.__name__
            command = (sys.executable, "-m", program, *words, "--local", "1")
            outcome = machine.run(*command, stdin="Hello\n")
            assert outcome.returncode == 0, outcome.stderr
            assert outcome.stdout.strip()
        assert server.requests == []


def test_an_index_and_its_parts(tmp_path: Path) -> None:
    parts = {f"model-0000{number}-of-00002.safetensors": b"%d" % number for number in (1, 2)}
    index = json.dumps({"weight_map": {name: name for name in parts}}).encode()
    config = (MODEL / "config.json").read_bytes()
    named = {"config.json": config, "model.safetensors.index.json": index, **parts}
    others = {"model-00003-of-00002.safetensors": b"3", **SMALL}
    with _HubServer(repository="org/parts", files={**named, **others}) as server:
        found = Machine(tmp_path / "hub", server).find("org/parts")
        assert found.stdout.strip().endswith(f"models--org--parts/snapshots/{COMMIT}")
        assert server.fetched == named.keys()
        server.files = {name: each for name, each in named.items() if "00002-of" not in name}
        again = Machine(tmp_path / "other", server).edge("inspect", "org/parts")
        assert "lacks model-00002-of-00002.safetensors" in again.stderr


def test_no_weights_are_fetched_of_a_family_that_is_not_computed(tmp_path: Path) -> None:
    files = {**files_of(MODEL), "config.json": b'{"model_type": "bert"}'}
    with _HubServer(repository="org/bert", files=files) as server:
        told = Machine(tmp_path / "hub", server).sentence("inspect", "org/bert")
        assert "config.json of org/bert" in told
        assert "bert" in told
        assert server.fetched == {"config.json"}


def test_a_download_that_was_cut_goes_on(tmp_path: Path) -> None:
    files = {"big-Q4_K_M.gguf": BIG, "big-Q8_0.gguf": b"other"}
    with _HubServer(repository="org/big", files=files, cut_after_bytes=TO_CUT) as server:
        machine = Machine(tmp_path / "hub", server, HF_TOKEN="hf_secret")
        assert "answers 503 for org/big" in machine.sentence("inspect", "org/big")
        blobs = tmp_path / "hub" / "models--org--big" / "blobs"
        (part,) = blobs.glob("*.edge-unfinished")
        have = part.stat().st_size
        assert 0 < have <= TO_CUT
        server.cut_after_bytes = None
        server.requests.clear()
        found = machine.find("org/big")
        assert found.returncode == 0, found.stderr
        assert Path(found.stdout.strip()).read_bytes() == BIG
        ranges = [each for method, path, each in server.requests if method == "GET" and each]
        assert set(ranges) == {f"bytes={have}-"}
        assert server.fetched == {"big-Q4_K_M.gguf"}
        told = server.told_tokens
        assert told
        assert not [path for path in told if path.startswith("/stored/")], "it is elsewhere"
        assert not list(blobs.glob("*.edge-unfinished"))
        seen = scan_cache_dir(tmp_path / "hub")
        assert not seen.warnings
        assert [each.repo_id for each in seen.repos] == ["org/big"]


def test_ctrl_c_keeps_what_came(tmp_path: Path) -> None:
    with _HubServer(
        repository="org/big", files={"m.gguf": BIG}, cut_after_bytes=TO_CUT, stalls=True
    ) as server:
        machine = Machine(tmp_path / "hub", server)
        online = {**machine.environment, "HF_HUB_OFFLINE": "0"}
        with edge_process("run", "org/big", "-p", "x", "--local", "1", environment=online) as it:
            assert server.has_stalled.wait(PATIENCE_S)
            blobs = tmp_path / "hub" / "models--org--big" / "blobs"
            poll_until(lambda: any(each.stat().st_size for each in blobs.glob("*-unfinished")))
            it.send_signal(signal.SIGINT)
            _out, err = it.communicate(timeout=PATIENCE_S)
        assert it.returncode == 130, err
        assert "Interrupted" in err
        (part,) = blobs.glob("*.edge-unfinished")
        assert 0 < part.stat().st_size < len(BIG)


def test_what_was_fetched_damaged_is_not_used(tmp_path: Path) -> None:
    with _HubServer(repository="org/big", files={"m.gguf": BIG}, cut_after_bytes=TO_CUT) as server:
        machine = Machine(tmp_path / "hub", server)
        machine.sentence("inspect", "org/big")
        (part,) = (tmp_path / "hub" / "models--org--big" / "blobs").glob("*.edge-unfinished")
        part.write_bytes(bytes(part.stat().st_size))
        server.cut_after_bytes = None
        assert "arrived damaged and was removed" in machine.sentence("inspect", "org/big")
        assert not part.exists()
        assert machine.find("org/big").returncode == 0


def test_a_model_with_terms_lists_its_files_and_refuses_them(tmp_path: Path) -> None:
    for files in (files_of(MODEL), {"m.gguf": BIG}):
        with _HubServer(
            repository="org/tiny",
            files=files,
            refusal=(403, "GatedRepo"),
            refuses_files_alone=True,
        ) as server:
            told = Machine(tmp_path / "hub", server).sentence("inspect", "org/tiny")
            assert f"its terms to be accepted; accept them at {server.address}/org/tiny" in told


@pytest.mark.parametrize(
    ("refusal", "message"),
    [
        ((401, ""), "has no model org/tiny for you, and nothing of it is in the cache"),
        ((404, "RepoNotFound"), "(near: org/tiny2); check its name"),
        ((403, "GatedRepo"), "needs its terms to be accepted; accept them at http://127"),
        ((401, "GatedRepo"), "set HF_TOKEN"),
        ((500, ""), "answers 500 for org/tiny, and nothing of it is"),
    ],
)
def test_what_is_refused_is_told(tmp_path: Path, refusal: tuple[int, str], message: str) -> None:
    add_to_cache(tmp_path / "hub", "org/tiny2", {"README.md": b"x"})
    with _HubServer(repository="org/tiny", files={}, refusal=refusal) as server:
        assert message in Machine(tmp_path / "hub", server).sentence("inspect", "org/tiny")


def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    with _HubServer(repository="org/tiny", files=SMALL) as server:
        machine = Machine(tmp_path / "hub", server)
        assert "no branch, tag or commit v9" in machine.sentence("inspect", "org/tiny@v9")
        assert "is a pickle" not in machine.sentence("inspect", "org/else")
        assert "a pickle (pytorch_model.bin)" in machine.sentence("inspect", "org/tiny")
    add_to_cache(tmp_path / "hub", "org/tiny2", {"README.md": b"x"})
    told = machine.sentence("inspect", "org/tiny")  # nobody answers any more
    assert "could not be fetched from http" in told
    assert "), and nothing of it is in the cache" in told
    assert " (near: org/tiny2); check the network" in told


def test_nobody_is_asked_offline_or_for_what_is_no_name(tmp_path: Path) -> None:
    with _HubServer(repository="org/tiny", files=files_of(MODEL)) as server:
        offline = Machine(tmp_path / "hub", server, HF_HUB_OFFLINE="1")
        assert "HF_HUB_OFFLINE is set" in offline.sentence("inspect", "org/tiny")
        add_to_cache(tmp_path / "hub", "org/tiny", files_of(MODEL))
        assert offline.edge("inspect", "org/tiny").returncode == 0
        online = Machine(tmp_path / "empty", server)
        for name in ("tiny", "./org/tiny", "demos/nomodel"):
            assert "is not there" in online.sentence("inspect", name)
        assert online.edge("--help").returncode == 0
        assert server.requests == []


def test_the_cache_is_where_the_environment_says(tmp_path: Path) -> None:
    add_to_cache(tmp_path / "home" / "hub", "org/tiny", files_of(MODEL))
    with _HubServer(repository="org/none", files={}) as server:
        machine = Machine(tmp_path, server, HF_HOME=str(tmp_path / "home"))
        del machine.environment["HF_HUB_CACHE"]
        assert machine.edge("inspect", "org/tiny").returncode == 0
        assert server.requests == []


@pytest.mark.skipif(find_spec("socksio") is not None, reason="the hub's client can use SOCKS here")
def test_a_proxy_that_the_hubs_client_cannot_use_is_told(tmp_path: Path) -> None:
    with _HubServer(repository="org/tiny", files=SMALL) as server:
        proxied = {"ALL_PROXY": "socks5://127.0.0.1:9", "NO_PROXY": "", "no_proxy": ""}
        machine = Machine(tmp_path / "hub", server, **proxied)
        assert "pip install 'httpx[socks]'" in machine.sentence("inspect", "org/tiny")
