"""Who gets a connection where members of a cluster listen, and what the others learn."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import hmac
import os
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256

from demos.relay import Fault, Relay
from edge.membership.authority import MOST_COUNTED, Authority
from edge.membership.identity import Identity
from edge.membership.membership import Membership, credentials
from edge.transport import (
    Channel,
    Credentials,
    Frame,
    Link,
    PeerLostError,
    RefusedError,
    TransportError,
    connect,
    connect_link,
)
from edge.transport.async_socket import AsyncSocket
from edge.transport.credentials import NONCE_BYTES, TAG_BYTES, Member
from edge.transport.handshake import MEMBER, Role, _cover, greet
from edge.transport.records import RecordSecrets
from tests.support.members import Kept
from tests.support.passing_time import let_pass, somebody_waits_for
from tests.support.transport_pairs import (
    GREETING,
    SECURED_GREETING,
    Refusals,
    check_echo,
    echoing,
    hang_up,
    members,
    run,
    stranger,
)

PROMPT = "the secret of the attic " * 40


def shown(membership: Membership) -> Credentials:
    return credentials(lambda: membership)


def test_tags_and_the_keys_around_tls_are_those_of_the_description() -> None:
    """Known answers, by a formula of their own: other versions make the same."""
    key, transcript = b"k" * 32, b"transcript"
    tag = hmac.digest(key, b"edge connecting\0transcript", hashlib.sha256)
    shown = replace(members(1)[0], tag_key=key)
    assert shown.tag(b"connecting", transcript) == tag
    assert tag.hex() == "f96e8c402b22fdf19d2fab01ce22b512c80456c52e59417eca095b0c5def0390"
    root = hmac.digest(hashlib.sha256(transcript).digest(), key, hashlib.sha256)
    first = hmac.digest(root, b"edge handshake\1", hashlib.sha256)
    second = hmac.digest(root, first + b"edge handshake\2", hashlib.sha256)
    for listens, (sending, receiving) in ((False, (first, second)), (True, (second, first))):
        cover = _cover(key, transcript, listens=listens)
        assert (cover.sending, cover.receiving) == (sending, receiving)
    assert first.hex() == "d91028c5306c219b92a289aaeb89668395ea12384be9c79e6ec5b142cd24342e"


def test_members_know_each_other_by_their_keys() -> None:
    first = Membership.founded("first")
    assert first.authority is not None
    second = Membership.enrolled(first.authority, first.tag_key, "second")

    async def scenario() -> None:
        devices: asyncio.Queue[object] = asyncio.Queue()

        async def on_channel(channel: Channel) -> None:
            await devices.put(channel.remote_hello[MEMBER].id)
            await channel.aclose()

        async def on_link(link: Link, hello: object) -> None:
            assert isinstance(hello, dict)
            await devices.put(hello[MEMBER].id)
            link.close()

        async with echoing(
            credentials=shown(first), on_channel=on_channel, on_link=on_link
        ) as listener:
            lie = {MEMBER: "somebody else"}
            channel = await connect(listener.addresses[0], hello=lie, credentials=shown(second))
            assert channel.remote_hello[MEMBER].id == first.identity.id
            assert await devices.get() == second.identity.id
            await channel.aclose()
            link = await connect_link(listener.addresses[0], hello=lie, credentials=shown(second))
            assert await devices.get() == second.identity.id
            link.close()

    run(scenario)


def test_nobody_proves_a_device_without_credentials() -> None:
    async def scenario() -> None:
        seen: asyncio.Queue[Channel] = asyncio.Queue()
        async with echoing(on_channel=seen.put) as listener:
            channel = await connect(
                listener.addresses[0], hello={MEMBER: "of another"}, credentials=None
            )
            served = await seen.get()
            assert MEMBER not in served.remote_hello
            await served.aclose()
            await channel.aclose()

    run(scenario)


def test_only_the_device_that_was_expected_is_talked_to() -> None:
    first = Membership.founded("first")
    assert first.authority is not None
    second = Membership.enrolled(first.authority, first.tag_key, "second")

    async def scenario() -> None:
        async with echoing(credentials=shown(first)) as listener:
            address = listener.addresses[0]
            for dial in (connect, connect_link):
                with pytest.raises(RefusedError, match="first, another device"):
                    await dial(
                        address, hello={}, credentials=shown(second), device=second.identity.id
                    )
            channel = await connect(
                address, hello={}, credentials=shown(second), device=first.identity.id
            )
            await channel.aclose()

    run(scenario)


def test_what_a_device_may_do_stands_in_its_certificate() -> None:
    """Not in its name, which it chooses."""
    first = Membership.founded("first")
    assert first.authority is not None
    identity = Identity.made()
    phone = replace(
        first,
        identity=identity,
        certificate=first.authority.member(identity.key.public_key(), "lend", ["use"]),
        authority=None,
    )
    assert phone.roles == {"use"}
    assert first.roles == {"lend", "use"}

    async def scenario() -> None:
        async with echoing(credentials=shown(phone)) as listener:
            channel = await connect(listener.addresses[0], hello={}, credentials=shown(first))
            member = channel.remote_hello[MEMBER]
            assert (member.id, member.name, member.roles) == (identity.id, "lend", {"use"})
            await channel.aclose()

    run(scenario)


def test_who_passes_proofs_on_is_shown_no_certificate() -> None:
    """Between two members, up to the tags; then it begins TLS with one of them itself."""
    first = Membership.founded("first")
    assert first.authority is not None
    second = Membership.enrolled(first.authority, first.tag_key, "second")

    async def scenario() -> None:
        seen: asyncio.Queue[object] = asyncio.Queue()

        async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await asyncio.open_connection("127.0.0.1", listener.port)
            for nbytes in (7, NONCE_BYTES, TAG_BYTES):
                for source, target in ((reader, back), (there, writer)):
                    target.write(await source.readexactly(nbytes))
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            tls = context.wrap_bio(incoming, outgoing)
            with contextlib.suppress(ssl.SSLWantReadError):
                tls.do_handshake()
            back.write(outgoing.read())
            answered = b""
            with contextlib.suppress(ConnectionError):
                answered = await there.read(1)
            seen.put_nowait(answered)
            for each in (back, writer):
                each.close()

        async with (
            echoing(credentials=shown(first)) as listener,
            await asyncio.start_server(pass_on, "127.0.0.1", 0) as relay,
        ):
            port = relay.sockets[0].getsockname()[1]
            with pytest.raises(TransportError):
                await connect(f"127.0.0.1:{port}", hello={}, credentials=shown(second))
            assert await seen.get() == b""

    run(scenario)


def test_nobody_goes_by_the_id_of_another_device() -> None:
    """Also not whoever has the cluster's key."""
    first, own = Membership.founded("first"), Identity.made()
    assert first.authority is not None
    honest = first.authority.member(own.key.public_key(), "mallory")
    forger = replace(
        first,
        identity=own,
        certificate=x509.CertificateBuilder(
            honest.issuer,
            honest.subject,
            honest.public_key(),
            int(first.identity.id, 16),
            honest.not_valid_before_utc,
            honest.not_valid_after_utc,
            list(honest.extensions),
        ).sign(first.authority.key, SHA256()),
    )

    async def scenario() -> None:
        refused = Refusals()
        async with echoing(credentials=shown(first), on_refused=refused) as listener:
            with pytest.raises(TransportError):
                await connect(listener.addresses[0], hello={}, credentials=shown(forger))
            assert "another key than its own" in str(await refused.queue.get())

    run(scenario)


def test_a_program_of_the_old_cluster_talks_to_nobody() -> None:
    first, now = Membership.founded("first"), Membership.founded("other")
    current = [first]
    shown_before = credentials(lambda: current[0])
    current[0] = now

    async def scenario() -> None:
        async with echoing(credentials=shown(first)) as listener:
            with pytest.raises(RefusedError, match="moved to another cluster"):
                await connect(listener.addresses[0], hello={}, credentials=shown_before)

    run(scenario)
    assert not shown_before.is_admitted(first.identity.id, None)


def forged(member: Membership) -> Membership:
    """Somebody who has got hold of the tag key, but is of no member's making."""
    return replace(Membership.founded("mallory"), tag_key=member.tag_key)


@pytest.mark.parametrize(
    ("who", "error", "message"),
    [
        (lambda member: None, RefusedError, "leave that out, and pair"),
        (lambda member: shown(Membership.founded("other")), RefusedError, "edge pair"),
        (lambda member: shown(forged(member)), TransportError, "certificate"),
    ],
    ids=["without keys", "of another cluster", "with the tag key alone"],
)
def test_others_are_refused(
    who: Callable[[Membership], Credentials | None], error: type[TransportError], message: str
) -> None:
    member = Membership.founded("member")

    async def scenario() -> None:
        refused = Refusals()
        async with echoing(credentials=shown(member), on_refused=refused) as listener:
            for dial in (connect, connect_link):
                with pytest.raises(error, match=message):
                    await dial(listener.addresses[0], hello={}, credentials=who(member))
                await refused.queue.get()
            await check_echo(listener, shown(member))

    run(scenario)


def test_a_member_does_not_talk_to_others() -> None:
    member = shown(Membership.founded("member"))

    async def scenario() -> None:
        async with echoing() as listener:
            with pytest.raises(RefusedError, match="--insecure"):
                await connect(listener.addresses[0], hello={}, credentials=member)
        async with echoing(credentials=shown(Membership.founded("other"))) as listener:
            with pytest.raises(RefusedError, match="does not know this device"):
                await connect(listener.addresses[0], hello={}, credentials=member)

    run(scenario)


def test_whoever_answers_for_a_member_is_found_out() -> None:
    """With the tag key and a certificate of its own making, in the middle."""
    member = Membership.founded("member")

    async def scenario() -> None:
        async with echoing(credentials=shown(forged(member))) as mallory:
            with pytest.raises(PeerLostError, match="certificate"):
                await connect(mallory.addresses[0], hello={}, credentials=shown(member))

    run(scenario)


def test_an_expelled_device_is_refused_from_then_on_on_both_sides() -> None:
    first = Membership.founded("first")
    assert first.authority is not None
    second = Membership.enrolled(first.authority, first.tag_key, "second")
    now = first

    async def scenario() -> None:
        nonlocal now
        refused = Refusals()
        ours = credentials(lambda: now)
        async with echoing(credentials=ours, on_refused=refused) as listener:
            await check_echo(listener, shown(second))
            now = first.expelling(second.identity.id)
            for dial in (connect, connect_link):
                with pytest.raises(PeerLostError, match=r"has been expelled.*`edge pair`"):
                    await dial(listener.addresses[0], hello={}, credentials=shown(second))
                assert "has been expelled" in str(await refused.queue.get())
        async with echoing(credentials=shown(second)) as listener:
            with pytest.raises(RefusedError, match="has been expelled"):
                await connect(listener.addresses[0], hello={}, credentials=ours)

    run(scenario)


@pytest.mark.parametrize(
    ("said", "greets", "random_bytes"),
    [
        (b"", False, 0),
        (b"GET / HTTP/1.1\r\n\r\n", False, 0),
        (GREETING, True, 0),
        (SECURED_GREETING, True, 0),
        (SECURED_GREETING + bytes(NONCE_BYTES), True, NONCE_BYTES),
        (SECURED_GREETING + bytes(NONCE_BYTES + TAG_BYTES), True, NONCE_BYTES),
        (SECURED_GREETING + os.urandom(1000), True, NONCE_BYTES),
    ],
    ids=["nothing", "http", "no keys", "a greeting", "a nonce", "a tag", "more"],
)
def test_a_stranger_learns_a_version_and_random_bytes(
    said: bytes, greets: bool, random_bytes: int
) -> None:
    told = SECURED_GREETING if greets else b""

    async def scenario() -> None:
        (member,) = members(1)
        loop, heard = asyncio.get_running_loop(), bytearray()

        async def hear(connected: socket.socket) -> None:
            # What has arrived before a reset is read; a stream would throw it away.
            with contextlib.suppress(ConnectionResetError):
                while part := await loop.sock_recv(connected, 4096):
                    heard.extend(part)

        async with echoing(credentials=member, handshake_timeout_s=40) as listener:
            with socket.create_connection(("127.0.0.1", listener.port)) as connected:
                connected.setblocking(False)
                await loop.sock_sendall(connected, said)
                hearing = asyncio.create_task(hear(connected))
                while not hearing.done() and not (  # noqa: ASYNC110
                    somebody_waits_for(40) and len(heard) >= len(told) + random_bytes
                ):
                    await asyncio.sleep(0)
                let_pass(40)  # it waits for more, or has hung up
                await hearing
        assert heard[: len(told)] == told
        assert len(heard) == len(told) + random_bytes

    run(scenario)


class Recorder:
    """A way between two that keeps what passes, each way for itself."""

    def __init__(self, target: str) -> None:
        self._host, _, self._port = target.rpartition(":")
        self.sent, self.answered = bytearray(), bytearray()

    async def __aenter__(self) -> Recorder:
        self._tasks: set[asyncio.Task[None] | None] = set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        """Once both ends of every connection have hung up."""
        self._server.close()
        await asyncio.gather(*(task for task in self._tasks if task))
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(asyncio.current_task())
        back, to = await asyncio.open_connection(self._host, int(self._port))
        await asyncio.gather(_copy(reader, to, self.sent), _copy(back, writer, self.answered))


async def _copy(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray
) -> None:
    with contextlib.suppress(OSError):
        while part := await reader.read(4096):
            kept += part
            writer.write(part)
            await writer.drain()
    await hang_up(writer)


def test_what_passes_shows_nothing_of_what_is_said() -> None:
    numbers = np.arange(4096, dtype=np.float32)

    async def scenario() -> None:
        ours, theirs = members(2)
        links: asyncio.Queue[Link] = asyncio.Queue()

        async def on_link(link: Link, _hello: object) -> None:
            await links.put(link)

        async with (
            echoing(credentials=theirs, on_link=on_link, hello={"name": "attic"}) as listener,
            Recorder(listener.addresses[0]) as recorder,
        ):
            channel = await connect(recorder.address, hello={"name": "kitchen"}, credentials=ours)
            await channel.send(Frame("prompt", {"text": PROMPT}, numbers.tobytes()))
            answer = await channel.receive()
            assert answer.header["text"] == PROMPT
            await channel.aclose()
            link = await connect_link(recorder.address, hello={"name": "kitchen"}, credentials=ours)
            await asyncio.to_thread(link.send, numbers)
            into = np.empty_like(numbers)
            other = await links.get()
            await asyncio.to_thread(other.receive, into)
            assert np.array_equal(into, numbers)
            link.close()
            other.close()
        seen = bytes(recorder.sent + recorder.answered)
        assert len(seen) > 3 * numbers.nbytes
        for secret in (b"attic", b"kitchen", b"prompt", PROMPT[:12].encode()):
            assert secret not in seen
        content = numbers.tobytes()
        assert not any(seen.find(content[i : i + 8]) >= 0 for i in range(8, len(content), 8))

    run(scenario)


def test_a_connection_played_again_is_refused() -> None:
    async def scenario() -> None:
        ours, theirs = members(2)
        refused = Refusals()
        async with echoing(credentials=theirs, on_refused=refused) as listener:
            async with Recorder(listener.addresses[0]) as recorder:
                channel = await connect(recorder.address, hello={}, credentials=ours)
                await channel.send(Frame("ping"))
                await channel.receive()
                await channel.aclose()
            reader, writer = await stranger(listener)
            writer.write(recorder.sent)
            assert isinstance(await refused.queue.get(), RefusedError)
            heard = b""
            with contextlib.suppress(ConnectionResetError):
                heard = await reader.read()
            assert len(heard) <= len(SECURED_GREETING) + NONCE_BYTES
            await hang_up(writer)

    run(scenario)


def test_neither_end_keeps_what_its_first_keys_are_made_of() -> None:
    """It would open all that was said, long after there are others."""

    async def scenario() -> None:
        ours, theirs = members(2)
        over = asyncio.Event()

        async def keep(link: Link, _hello: object) -> None:
            await over.wait()
            link.close()

        async with echoing(credentials=theirs, on_link=keep) as listener:
            with Relay(listener.addresses[0]) as relay:  # else they leave TCP, and seal nothing
                link = await connect_link(relay.address, hello={}, credentials=ours)
                channel = await connect(relay.address, hello={}, credentials=ours)
                await channel.send(Frame("ping"))
                assert (await channel.receive()).kind == "ping"
                own = RecordSecrets.derived(b"known", b"", listens=True)
                gc.collect()
                assert [each for each in gc.get_objects() if type(each) is RecordSecrets] == [own]
                over.set()
                link.close()
                await channel.aclose()

    run(scenario)


def test_tls_is_of_the_newest_version_and_asks_for_certificates() -> None:
    (member,) = members(1)
    for context in (member.listening, member.connecting):
        assert context.minimum_version == ssl.TLSVersion.TLSv1_3
        assert context.verify_mode == ssl.CERT_REQUIRED


@pytest.mark.parametrize("counts", [(MOST_COUNTED, 0), (0, MOST_COUNTED)])
def test_no_clock_is_asked_whether_a_certificate_counts(counts: tuple[int, int]) -> None:
    """The count of the cluster's keys, or of a device's certificates, stands where a date would."""
    keys, certificates = counts
    authority = Authority.made(None, keys)
    tag_key = Membership.founded("attic").tag_key
    ours, theirs = (Membership.enrolled(authority, tag_key, name) for name in ("ours", "theirs"))
    certificate = authority.member(ours.identity.key.public_key(), "ours", edition=certificates)
    ours = replace(ours, certificate=certificate)

    async def scenario() -> None:
        for listening, calling in ((ours, theirs), (theirs, ours)):
            async with echoing(credentials=shown(listening)) as listener:
                await check_echo(listener, shown(calling))

    run(scenario)


@pytest.mark.parametrize("offset", [2, 10, 30, 60, 200, 500])
def test_a_handshake_that_was_tampered_with_fails(offset: int) -> None:
    async def scenario() -> None:
        ours, theirs = members(2)
        async with echoing(credentials=theirs) as listener:
            with (
                Relay(listener.addresses[0], Fault(corrupt_at=offset)) as relay,
                pytest.raises(TransportError),
            ):
                await connect(relay.address, hello={}, credentials=ours)
            await check_echo(listener, ours)

    run(scenario)


@pytest.mark.parametrize("role", [Role.CHANNEL, Role.LINK])
def test_a_caller_shows_its_certificate_only_to_whom_it_wants(role: Role) -> None:
    """Neither to a device that it knows to be expelled, nor to another one than it is to call."""
    attic = Kept.founded("attic")
    annas, eve, kitchen = (attic.taking_in(name) for name in ("annas", "eve", "kitchen"))
    news = attic.membership.expelling(eve.membership.identity.id).expelled.signed
    annas.change(lambda membership: membership.hearing(news))
    came: set[str] = set()

    async def call(whom: Kept, device: str) -> None:
        theirs = whom.credentials()

        def admitted(certificate: Mapping[str, Any], encoded: bytes) -> Member:
            came.add(theirs.admitted(certificate, encoded).name)
            return theirs.admitted(certificate, encoded)

        listening = replace(theirs, admitted=admitted)
        refused = Refusals()
        async with echoing(
            credentials=listening, on_link=close_link, on_refused=refused
        ) as listener:
            connected = socket.create_connection(("127.0.0.1", listener.port))
            connected.setblocking(False)
            try:
                with contextlib.closing(AsyncSocket(connected, "it")) as connection:
                    greeted = await greet(connection, role, {}, annas.credentials(), device)
                    greeted.connection.close()
            except RefusedError:
                await refused.queue.get()  # it has read all that was sent
                raise

    async def close_link(link: Link, _hello: object) -> None:
        link.close()

    async def scenario() -> None:
        ids = {each: each.membership.identity.id for each in (eve, kitchen)}
        with pytest.raises(RefusedError, match="has been expelled"):
            await call(eve, ids[eve])
        with pytest.raises(RefusedError, match="another device than was expected"):
            await call(kitchen, ids[eve])
        assert came == set()
        await call(kitchen, ids[kitchen])
        assert came == {"annas"}

    run(scenario)
