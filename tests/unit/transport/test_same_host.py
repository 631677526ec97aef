"""Two members on one host, of one user, leave TCP; nobody else comes in by that door."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from edge.transport import Credentials, ProtocolError, same_host
from edge.transport.async_socket import AsyncSocket
from edge.transport.handshake import Greeted, Role, answer, greet
from tests.support.transport_pairs import ANOTHER_HOST, members, socket_pair

pytestmark = pytest.mark.linux_ways

PROOF = bytes(range(same_host.PROOF_BYTES))

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")


@pytest.fixture
def door() -> Iterator[same_host.LocalSocket]:
    opened = same_host.LocalSocket.opened()
    assert opened is not None
    with contextlib.closing(opened):
        yield opened


@contextlib.asynccontextmanager
async def greeted(
    ours: Credentials | None, theirs: Credentials | None, host: str = "127.0.0.1"
) -> AsyncIterator[tuple[Greeted, Greeted]]:
    """Both ends of one connection, the connecting one first."""
    with socket.create_server((host, 0)) as server:
        first = socket.create_connection(server.getsockname())
        second, _ = server.accept()
    one, other = AsyncSocket(first, "other"), AsyncSocket(second, "one")
    answering = answer(other, {}, theirs, on_tag=lambda: None)
    ends = await asyncio.gather(greet(one, Role.LINK, {}, ours), answering)
    try:
        yield ends
    finally:
        for each in (one, other, *(end.connection for end in ends)):
            each.close()


async def check_moves(ends: tuple[Greeted, Greeted]) -> None:
    """Whatever way they have, both directions reach the other end."""
    for here, there in (ends, ends[::-1]):
        await here.connection.send_all((b"hello",))
        space = bytearray(5)
        assert await there.connection.receive_into(memoryview(space)) == 5
        assert space == b"hello"


def of_another_user(act: Callable[[], None]) -> None:
    """In a process of another user, which must do it without an error."""
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):
            os.setuid(12345)
            act()
            status = 0
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def test_members_of_one_host_leave_tcp() -> None:
    async def main() -> None:
        ours, theirs = members(2)
        async with greeted(ours, theirs) as ends:
            for end in ends:
                own, other = end.connection.ends()
                assert end.secrets is None
                assert isinstance(own, str | bytes)
                assert isinstance(other, str | bytes)
            await check_moves(ends)

    asyncio.run(main())


def test_members_of_two_hosts_seal_what_they_say() -> None:
    async def main() -> None:
        ours, theirs = members(2)
        async with greeted(ours, theirs, ANOTHER_HOST) as ends:
            one, other = (end.secrets for end in ends)
            assert one is not None
            assert other is not None
            assert (one.sending, one.receiving) == (other.receiving, other.sending)
            await check_moves(ends)

    asyncio.run(main())


def test_where_the_door_is_not_found_they_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_host, "enter", lambda _name, _proof: None)

    async def main() -> None:
        ours, theirs = members(2)
        async with greeted(ours, theirs) as ends:
            assert all(end.secrets is not None for end in ends)
            await check_moves(ends)

    asyncio.run(main())


def test_who_says_that_it_comes_and_does_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def elsewhere(_name: object, _proof: bytes) -> socket.socket:
        come, kept = socket.socketpair()
        kept.close()
        return come

    monkeypatch.setattr(same_host, "enter", elsewhere)

    async def main() -> None:
        ours, theirs = members(2)
        first, second = socket_pair()
        one, other = AsyncSocket(first, "other"), AsyncSocket(second, "one")
        with contextlib.closing(one), contextlib.closing(other):
            greeting = asyncio.create_task(greet(one, Role.LINK, {}, ours))
            with pytest.raises(ProtocolError, match="one claims to be on this host"):
                await answer(other, {}, theirs, on_tag=lambda: None)
            await asyncio.wait([greeting])
            assert greeting.exception() is not None

    asyncio.run(main())


def test_without_keys_nothing_is_moved() -> None:
    async def main() -> None:
        async with greeted(None, None) as ends:
            assert [len(end.connection.ends()[0]) for end in ends] == [2, 2]
            await check_moves(ends)

    asyncio.run(main())


def test_whoever_waits_at_the_door_without_a_proof_is_hung_up_on(
    door: same_host.LocalSocket,
) -> None:
    with contextlib.ExitStack() as stack:
        others = [same_host.enter(door.name, bytes(said)) for said in (32, 31, 1)]
        for each in others:
            assert each is not None
            stack.enter_context(each)
        mine = same_host.enter(door.name, PROOF)
        assert mine is not None
        stack.enter_context(mine)
        let_in = door.let_in(PROOF)
        assert let_in is not None
        stack.enter_context(let_in).send(b"come in")
        mine.setblocking(True)
        assert mine.recv(10) == b"come in"
        for each in others:
            with contextlib.suppress(ConnectionResetError):
                assert each is not None
                assert each.recv(10) == b""


def test_nobody_waits_at_the_door(door: same_host.LocalSocket) -> None:
    assert door.let_in(PROOF) is None


def test_a_door_is_closed_behind_its_handshake() -> None:
    opened = same_host.LocalSocket.opened()
    assert opened is not None
    opened.close()
    assert same_host.enter(opened.name, PROOF) is None


@pytest.mark.parametrize("name", ["", "x" * 32, "0" * 31, "0" * 33, "/tmp/a", 7, None, ["0" * 32]])
def test_no_other_socket_is_named(name: object) -> None:
    assert same_host.enter(name, PROOF) is None


@as_root
def test_another_user_does_not_come_in(door: same_host.LocalSocket) -> None:
    def come() -> None:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(f"\0{door.name}")
            stranger.sendall(PROOF)

    of_another_user(come)
    assert door.let_in(PROOF) is None


@as_root
def test_the_door_of_another_user_is_not_entered() -> None:
    read, write = os.pipe()
    stop, leave = os.pipe()
    name = "ab" * 16

    def wait() -> None:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(f"\0{name}")
            bound.listen(1)
            os.write(write, b"x")
            os.close(leave)
            os.read(stop, 1)
            came, _ = bound.accept()
            assert came.recv(100) == b""

    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):
            os.setuid(12345)
            wait()
            status = 0
        os._exit(status)
    os.read(read, 1)
    assert same_host.enter(name, PROOF) is None
    os.write(leave, b"x")
    assert os.waitpid(child, 0)[1] == 0
    for each in (read, write, stop, leave):
        os.close(each)


def test_a_relay_makes_it_another_way() -> None:
    async def main() -> None:
        first, relayed = socket_pair()
        relaying, last = socket_pair()
        ends = [AsyncSocket(each, "it") for each in (first, last)]
        direct = [AsyncSocket(each, "it") for each in socket_pair()]
        try:
            assert same_host.way(ends[0], listens=False) != same_host.way(ends[1], listens=True)
            ways = [same_host.way(end, listens=bool(index)) for index, end in enumerate(direct)]
            assert ways[0] == ways[1] != ""
        finally:
            for end in (*ends, *direct):
                end.close()
            for way in (relayed, relaying):
                way.close()

    asyncio.run(main())
