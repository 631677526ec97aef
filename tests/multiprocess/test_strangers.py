"""What does not speak our protocol: on the port we call, and on the port we listen on."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import edge
from edge import transport
from edge.protocol.client import PeerClient
from edge.protocol.frame_codec import Done
from edge.protocol.peer_frames import Describe
from edge.protocol.peer_info import describe_peer
from edge.protocol.session_frames import Close
from edge.transport import PROTOCOL_VERSION, Frame
from edge.version import __version__
from tests.multiprocess.conftest import LONG_CONTEXT
from tests.support.checkpoints import TinyCheckpoint
from tests.support.passing_time import let_pass
from tests.support.processes import (
    PATIENCE_S,
    Daemon,
    edge_process,
    own_credentials,
    poll_until,
    stopped,
)
from tests.support.processes import edge as run_edge
from tests.support.replies import await_steps


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("daemon"), "--no-announce") as daemon:
        yield daemon
        daemon.await_free()
        assert daemon.messages == ""


@contextlib.contextmanager
def service(answer: Callable[[socket.socket], object]) -> Iterator[str]:
    """Something that listens, and does `answer` to each connection; its address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connected, _ = listening.accept()
                    with connected, contextlib.suppress(OSError):
                        answer(connected)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listening.getsockname()[1]}"
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


def hello_frame(**hello: object) -> bytes:
    return b"".join(transport.frame.encode(Frame("hello", hello)))


def take(connected: socket.socket, count: int) -> bytes:
    """Exactly so many bytes; ConnectionError if the other side closed before."""
    content = connected.recv(count, socket.MSG_WAITALL)
    if len(content) < count:
        raise ConnectionError
    return content


def greet(connected: socket.socket, *, version: int = PROTOCOL_VERSION) -> None:
    """The listening side's handshake, as `edge.transport.handshake` describes it."""
    take(connected, 7)
    connected.sendall(struct.pack("!4sHB", b"EDGE", version, 1))
    take_frame(connected)
    connected.sendall(hello_frame(name="odd", id="odd"))


def take_frame(connected: socket.socket) -> None:
    take(connected, sum(struct.unpack("!II", take(connected, 8))))


def answer_describe(connected: socket.socket, header: dict[str, Any]) -> None:
    greet(connected)
    take_frame(connected)
    frame = Frame("ok", {"call": 1, **header})
    connected.sendall(b"".join(transport.frame.encode(frame)))
    connected.recv(1)


def test_a_web_server_on_the_port() -> None:
    def http(connected: socket.socket) -> None:
        connected.recv(100)
        connected.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with service(http) as address:
        sentence = run_edge("peers", "--insecure", "--peer", address).sentence()
    assert address in sentence
    assert "does not speak Edge's protocol: check that the port is Edge's" in sentence


@pytest.mark.parametrize("more", [(), ("--watch",)], ids=["once", "watching"])
def test_who_asks_without_keys_is_warned_at_every_start(more: tuple[str, ...]) -> None:
    arguments = ("peers", "--insecure", "--peer", "127.0.0.1:9", *more)
    with edge_process(*arguments) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=PATIENCE_S)
    assert line.startswith("edge: insecure: no keys and no encryption")
    assert "edge: insecure" not in rest


def test_who_lends_without_keys_is_warned_at_every_start() -> None:
    with edge_process("peer", "--insecure", "--no-announce", "--listen", "127.0.0.1:0") as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE_S)
    assert line.startswith("edge: --insecure: anybody who reaches this port can use this device")


def test_a_service_that_hangs_up() -> None:
    with service(lambda connected: None) as address:
        sentence = run_edge("peers", "--insecure", "--peer", address).sentence()
    assert address in sentence
    assert "during the handshake" in sentence


def test_a_peer_of_another_version() -> None:
    with service(lambda connected: greet(connected, version=PROTOCOL_VERSION + 1)) as address:
        sentence = run_edge("peers", "--insecure", "--peer", address).sentence()
    assert (
        f"{address} speaks protocol version {PROTOCOL_VERSION + 1}, this device speaks" in sentence
    )
    assert "update Edge on this device" in sentence


def test_a_peer_with_another_edge() -> None:
    """It speaks the same protocol, but would not compute the same."""

    def other(connected: socket.socket) -> None:
        take(connected, 7)
        connected.sendall(struct.pack("!4sHB", b"EDGE", PROTOCOL_VERSION, 1))
        take_frame(connected)
        connected.sendall(hello_frame(name="attic", id="a", software="9.9\x1b[2J"))
        connected.recv(1)

    with service(other) as address:
        sentence = run_edge("peers", "--insecure", "--peer", address).sentence()
    assert f"attic ({address}) runs Edge 9.9 [2J, this device runs Edge {__version__}" in sentence
    assert "install the same version on both" in sentence


def test_a_daemon_says_once_that_others_have_another_version(tmp_path: Path) -> None:
    async def greet_as(software: str, address: str) -> None:
        hello = {"name": "old", "software": software}
        channel = await transport.connect(address, credentials=own_credentials(), hello=hello)
        await channel.aclose()

    with Daemon(tmp_path, "--no-announce") as daemon:
        for _ in range(2):
            with socket.create_connection(("127.0.0.1", daemon.port)) as connected:
                connected.sendall(struct.pack("!4sHB", b"EDGE", PROTOCOL_VERSION + 7, 1))
                assert connected.recv(7, socket.MSG_WAITALL)
            asyncio.run(greet_as("0.0.1", daemon.address))
        asyncio.run(greet_as(__version__, daemon.address))
        poll_until(lambda: daemon.messages.count("\n") >= 2)
        assert daemon.end() == 0
        ours, software = sorted(daemon.messages.splitlines(), key=lambda line: "runs" in line)
    assert f"speaks protocol version {PROTOCOL_VERSION + 7}, this device speaks version" in ours
    assert f"runs Edge 0.0.1, this device runs Edge {__version__}: install the same" in software


SOUND = {
    "id": "a",
    "epoch": 1,
    "name": "b",
    "software": "0",
    "addresses": ["127.0.0.1:5"],
    "models": [],
    "backend": "ort",
    "processor": "CPU",
    "threads": 1,
    "memory_bytes": 10,
    "floor_bytes": 2,
    "free_bytes": 8,
    "free_now_bytes": 8,
    "model_free_bytes": 8,
    "kv_memory_bytes": None,
    "kv_disk_bytes": 0,
    "kv_prefix_bytes": 0,
    "kv_beginnings_bytes": 0,
    "host": "h",
    "memory_pool": None,
    "pool_free_bytes": 8,
    "identity": "i",
    "arithmetic": "a",
    "host_memory_bytes": None,
    "is_busy": False,
    "is_leaving": False,
    "lacks": [],
    "clock_s": 0.0,
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"id": None},
        {"id": "\x00"},
        {"name": ["list"]},
        {"addresses": "text"},
        {"addresses": [5]},
        {"addresses": ["nowhere"]},
        {"threads": 0},
        {"free_bytes": -1},
        {"free_now_bytes": None},
        {"memory_pool": 5},
        {"memory_bytes": "much"},
        {"floor_bytes": None},
        {"model_free_bytes": 0.5},
        {"host": 5},
        {"host_memory_bytes": "much"},
        {"identity": None},
        {"clock_s": "noon"},
        {"models": [5]},
        {"models": [{"name": "x"}]},
    ],
    ids=str,
)
def test_a_peer_that_describes_itself_in_nonsense(wrong: dict[str, Any]) -> None:
    with service(lambda connected: answer_describe(connected, {**SOUND, **wrong})) as address:
        sentence = run_edge("peers", "--insecure", "--peer", address).sentence()
    assert "peer odd answers 'describe' in a form Edge does not know" in sentence


def test_how_far_its_clock_is_ahead_is_measured() -> None:
    begun_s = time.time()
    header = {**SOUND, "clock_s": begun_s + 1e6}
    with service(lambda connected: answer_describe(connected, header)) as address:
        peer = asyncio.run(describe_peer(address, None))
    assert peer.clock_ahead_s is not None
    assert 1e6 - (time.time() - begun_s) <= peer.clock_ahead_s <= 1e6 + 1e-3
    assert "clock_s" not in peer.to_json()


def test_names_cannot_write_on_our_terminal() -> None:
    header = {**SOUND, "name": "evil\x1b[2J\nname"}
    with service(lambda connected: answer_describe(connected, header)) as address:
        outcome = run_edge("peers", "--insecure", "--peer", address, "--json")
    assert outcome.code == 0
    assert '"evil [2J name"' in outcome.out


@pytest.mark.parametrize("call_id", ["text", [1], {"a": 1}, 1.5, True, 7])
def test_a_peer_that_answers_calls_nobody_made(call_id: object) -> None:
    with service(lambda connected: answer_describe(connected, {"call": call_id})) as address:
        sentence = run_edge("peers", "--insecure", "--peer", address).sentence()
    assert "peer odd answers call " in sentence


def test_a_peer_that_says_nothing_is_given_up() -> None:
    ended = threading.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    def mute(connected: socket.socket) -> None:
        greet(connected)
        take_frame(connected)
        loops[0].call_soon_threadsafe(let_pass, 30)
        ended.wait()

    async def ask(address: str) -> None:
        loops.append(asyncio.get_running_loop())
        await describe_peer(address, None, timeout_s=30)

    with service(mute) as address:
        with pytest.raises(edge.PeerError, match="did not answer 'describe' within 30 s"):
            asyncio.run(ask(address))
        ended.set()


def test_a_daemon_that_hangs_is_noticed_by_its_silence(tmp_path: Path) -> None:
    """Stopped, its connections stay open: only the missing signs of life tell."""

    async def watch(daemon: Daemon) -> None:
        lost: list[edge.EdgeError] = []
        client = await PeerClient.connect(daemon.address, own_credentials(), silent_after_s=0.5)
        client.watch(lost.append)
        try:
            with (
                stopped(daemon.process),
                pytest.raises(edge.PeerLostError, match=r"silent for \d+\.\d s") as raised,
            ):
                await client.call(Describe())
            assert raised.value.peer == daemon.name
            assert lost == [raised.value]
        finally:
            await client.aclose()

    with Daemon(tmp_path, "--no-announce") as daemon:
        asyncio.run(watch(daemon))


def sending(content: bytes) -> Callable[[socket.socket], object]:
    return lambda connected: connected.sendall(content)


def garbage(daemon: Daemon) -> Iterator[Callable[[socket.socket], object]]:
    """Ways to misuse a connection to the daemon."""
    dice = random.Random(5)
    preamble = struct.pack("!4sHB", b"EDGE", PROTOCOL_VERSION, 1)
    for size in (0, 1, 6, 7, 100, 100_000):
        content = dice.randbytes(size)
        yield sending(content)
    huge = struct.pack("!II", 0xFFFFFFFF, 0xFFFFFFFF)
    yield sending(preamble + huge)
    yield sending(preamble + dice.randbytes(1000))
    yield sending(preamble + hello_frame(name="x") + huge)
    yield sending(preamble + hello_frame(name="x") + bytes(64))
    yield sending(preamble + hello_frame(name="x") + struct.pack("!II", 20, 64 << 20) + b"{" * 20)
    link = struct.pack("!4sHB", b"EDGE", PROTOCOL_VERSION, 2)
    for hello in ({}, {"session": 5}, {"session": "none", "stage": 0, "rank": -1}):
        yield sending(link + hello_frame(**hello))


def test_garbage_on_a_daemons_port_while_it_answers(
    daemon: Daemon, endless_checkpoint: TinyCheckpoint
) -> None:
    """Random bytes, enormous lengths, connections that dawdle: the reply goes on and is right."""
    prompt = endless_checkpoint.prompt(6)
    expected = endless_checkpoint.greedy(prompt, 100)
    with contextlib.ExitStack() as dawdling, edge.Cluster.connect([daemon.address]) as cluster:
        model = cluster.load(endless_checkpoint.path, dtype="float32", context_tokens=LONG_CONTEXT)
        stream = model.stream(prompt, max_new_tokens=LONG_CONTEXT - 6)
        tokens = [next(stream).token_id]
        for misuse in garbage(daemon):
            connected = dawdling.enter_context(socket.create_connection(("127.0.0.1", daemon.port)))
            with contextlib.suppress(OSError):
                misuse(connected)
            await_steps(model)
        for _ in range(100):  # more than may be unfinished at once
            slow = dawdling.enter_context(socket.create_connection(("127.0.0.1", daemon.port)))
            slow.sendall(b"ED")
        await_steps(model)
        tokens += [next(stream).token_id for _ in expected[1:]]
        assert tokens == expected
        assert daemon.describe().models[0].name == endless_checkpoint.path.name


STEP = {
    "entries": [
        {
            "request": "r",
            "position": 0,
            "tokens": [1],
            "logit_rows": 1,
            "turns": [],
            "shift": 0,
            "sees_all": False,
        }
    ],
    "run": 1,
    "singly": False,
    "states": False,
    "drafts": 0,
    "spare": 0,
    "rest": [],
}
TERMS = {"sampling": {}, "end_ids": [], "max_new_tokens": 1, "prompt_tokens": 0, "logprobs": None}
NONSENSE = [
    Frame("step", {"session": "nobody", "step": {"entries": [["r", 0, [1], 1]], "run": 1}}),
    Frame("step", {"session": "nobody", "step": STEP, "terms": {"other": TERMS}}),
    Frame("step", {"session": "nobody", "step": STEP, "terms": {"r": {"sampling": "hot"}}}),
    Frame("step", {"session": "nobody", "step": STEP, "terms": {}}),
    Frame(
        "step",
        {"session": "nobody", "step": {**STEP, "states": True, "run": 2}},
    ),
    Frame("step", {"step": "many"}),
    Frame("begin", {}),
    Frame("finish", {}),
    Frame("tell-me", {"call": 1}),
    Frame("ok", {"call": 1}),
    Frame("offer", {"call": 1}, b"not a manifest"),
    Frame("offer", {"call": 1}, b"[" * 100_000),
    Frame("piece", {"call": 1, "manifest": "0" * 64, "digest": "1"}, b"x"),
    Frame("piece", {"call": 1}),
    Frame("seal", {"call": 1, "manifest": {"a": []}}),
    Frame("open", {"call": 1}),
    Frame("open", {"call": 1, "assignment": []}),
    Frame("open", {"call": 1, "assignment": {"session": "s", "model": {}}}),
    Frame("connect", {"call": 1, "session": "s", "places": []}),
    Frame("connect", {"call": 1, "session": "s", "places": 5}),
    Frame("close", {"call": 1}),
    Frame("close", {"call": [{"any": "thing"}], "session": 3}),
]


@pytest.mark.parametrize("frame", NONSENSE, ids=lambda frame: frame.kind)
def test_frames_that_make_no_sense_are_answered_with_a_failure(
    daemon: Daemon, frame: Frame
) -> None:
    """And the same channel goes on to serve."""

    async def send() -> tuple[Frame, Frame]:
        channel = await transport.connect(
            daemon.address, credentials=own_credentials(), hello={"name": "test"}
        )
        try:
            await channel.send(frame)
            failure = await channel.receive()
            await channel.send(Frame("describe", {"call": 2}))
            return failure, await channel.receive()
        finally:
            await channel.aclose()

    failure, answer = asyncio.run(send())
    assert failure.kind == "failed"
    assert failure.header["message"]
    assert failure.header["error"] == "protocol"
    if "call" in frame.header:
        assert failure.header["call"] == frame.header["call"]
    assert answer.header["call"] == 2
    assert answer.header["name"] == daemon.name


def test_a_closed_session_may_be_closed_again(daemon: Daemon) -> None:
    async def close() -> Done:
        client = await PeerClient.connect(daemon.address, own_credentials())
        try:
            return await client.call(Close(session="never opened"))
        finally:
            await client.aclose()

    assert asyncio.run(close()) == Done()


def test_an_address_that_refuses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
    sentence = run_edge("peers", "--insecure", "--peer", address).sentence()
    assert f"cannot connect to {address}: Connection refused" in sentence
    assert "check that Edge is running and the port is right" in sentence


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("nonsense", "is not an address; write host:port"),
        ("127.0.0.1:99999", "ports end at 65535"),
        (":5000", "names no host to connect to"),
        ("no-such-host.invalid:5", "check the name or write its number"),
    ],
)
def test_an_address_that_cannot_be(address: str, message: str) -> None:
    assert message in run_edge("peers", "--insecure", "--peer", address).sentence()


def test_a_port_that_is_taken(daemon: Daemon) -> None:
    outcome = run_edge("peer", "--listen", daemon.address, "--no-announce")
    sentence = outcome.sentence()
    assert f"cannot listen on {daemon.address}: Address already in use" in sentence
    assert "choose another port" in sentence or "port 0" in sentence


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--listen", "192.0.2.1:0"], "cannot listen on 192.0.2.1:0"),
        (["--listen", "nonsense"], "write host:port"),
        (["--interface", "no-such-0"], "has no interface 'no-such-0'"),
        (["--memory", "much"], "'much' is not a size; write 4GiB"),
        (["--cache-limit", "0"], "makes no sense"),
        (["--name", "a\nb"], "must be printable"),
        (["--name", "n" * 101], "at most 100 characters"),
        (["--cluster", "c" * 101], "at most 100 characters"),
        (["--cluster", ""], "a cluster's name must"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_daemon_that_cannot_start(options: list[str], message: str) -> None:
    assert message in run_edge("peer", *options).sentence()


def test_a_cache_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("EDGE_CACHE", str(tmp_path / "file"))
    sentence = run_edge("peer", "--no-announce").sentence()
    assert f"{tmp_path / 'file' / 'shards'} cannot be used" in sentence
