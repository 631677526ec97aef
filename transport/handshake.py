"""The handshake of every connection: version, role, mutual authentication, then a hello of each
side.

Each side sends a preamble of seven bytes: ``EDGE``, the protocol version (2 bytes, big-endian) and
the role of the connection (1 byte). The listening side answers only after a correct magic, so a
port scanner or a browser gets nothing. It does answer a wrong version, so that both sides learn of
it. The first six bytes stay the same in every later version.

With credentials, the role says so and three steps follow: a nonce of each side; a tag of each side
over preamble and nonces, which only members can make; TLS 1.3, in which each shows its certificate.
The connecting side is first each time. TLS runs inside records whose key only members can derive
from the nonces. Otherwise a man in the middle, who relays nonces and tags, would see a certificate.

Then each side sends one frame of kind ``hello``, the connecting side first. Nothing is sent ahead
of an answer: a listener that refuses would reset the connection, and its answer would be lost. With
credentials each hello carries a secret. TLS ends with the hellos, and the keys of later records are
derived from both secrets.

If both hellos show that the ends are on one host, the listening side's hello names a Unix socket,
and a frame ``near`` says whether the connecting side has reached it (see `same_host`). There each
side proves that it knows both secrets. The connection continues on that socket, and the TCP
connection is closed.

A cluster may rotate its key while a member is away. A member that knows the earlier key answers its
tag with another tag under that key, sends the rotation inside the same records, and closes the
connection. Or it connects by itself with such a tag and brings the rotation. Rotations are signed;
the member then starts again with the current key.
"""

import asyncio
import base64
import contextlib
import enum
import hashlib
import hmac
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from edge.transport import same_host
from edge.transport.async_socket import AsyncSocket
from edge.transport.credentials import NONCE_BYTES, TAG_BYTES, Credentials, Past
from edge.transport.errors import (
    OutdatedError,
    PeerLostError,
    ProtocolError,
    RefusedError,
    UnknownHereError,
    UnwantedError,
    VersionMismatchError,
)
from edge.transport.frame import (
    PREFIX_BYTES,
    PROTOCOL_VERSION,
    Buffer,
    Frame,
    FrameAssembler,
    encode,
)
from edge.transport.records import SECRET_BYTES, RecordSecrets
from edge.transport.sealed_socket import SealedSocket
from edge.transport.tls_session import TlsSession

MAGIC = b"EDGE"

MAX_HELLO_BYTES = 64 << 10
"""Memory that one stranger can make us allocate; multiply by the unfinished handshakes."""

_PREAMBLE = struct.Struct("!4sHB")
_HELLO = "hello"

MEMBER = "member"
"""In a received hello: the `Member` of the verified certificate. The other side cannot set it."""
_NEWS = "news"
_WAY = "way"
_DOOR = "door"
_NEAR, _COMES = "near", "comes"
_IS_SECURED = 0x10
_CONNECTING, _LISTENING = b"connecting", b"listening"
_AHEAD, _BRINGING = b"ahead", b"bringing"
_ROTATION, _TAKEN = "rotation", "taken"
_HEADER_BYTES = 1 << 10

MAX_ROTATION_BYTES = 256 << 10
"""Only a device that has proved an earlier or current key can make us allocate this much."""


class Role(enum.IntEnum):
    """The purpose of a connection."""

    CHANNEL = 1
    LINK = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeted:
    """A connection after its handshake."""

    role: Role
    hello: dict[str, Any]
    """What the other side says about itself; with credentials, also its verified device."""
    secrets: RecordSecrets | None
    """Secrets of the records that follow. None: plain bytes follow."""
    connection: AsyncSocket
    """The connection to use from now on: the original one, or a Unix socket in its place."""


def encode_hello(hello: Mapping[str, Any], secret: bytes = b"") -> list[Buffer]:
    """The encoded hello. Raises ``ProtocolError`` if it is not JSON or too large."""
    buffers = encode(Frame(_HELLO, hello, secret))
    size = len(buffers[0]) - PREFIX_BYTES
    if size > MAX_HELLO_BYTES:
        raise ProtocolError(f"the hello has {size} bytes, over the limit of {MAX_HELLO_BYTES}")
    return buffers


async def greet(
    connection: AsyncSocket,
    role: Role,
    hello: Mapping[str, Any],
    credentials: Credentials | None,
    device: str | None = None,
) -> Greeted:
    """The connecting side's handshake. With `device`, only that one is accepted.

    Raises:
        VersionMismatchError: the other side speaks another version.
        RefusedError: it is not of this cluster, or another device, or only one of the two is
            secured.
        ProtocolError: the other side is not Edge, or does not keep to the protocol.
        PeerLostError: the other side closed the connection.
        UnwantedError: it did so when it had seen our certificate.
    """
    if credentials is None:
        await _exchange_preambles(connection, role, None)
        await connection.send_all(encode_hello(hello))
        theirs, _ = await _receive_hello(connection, 0)
        theirs.pop(MEMBER, None)
        return Greeted(role=role, hello=theirs, secrets=None, connection=connection)
    transcript, tag = await _exchange_tags(connection, role, credentials, _CONNECTING)
    if hmac.compare_digest(tag, credentials.tag(_AHEAD, transcript)):
        cover = _cover(credentials.tag_key, transcript, listens=False)
        await _follow(credentials, SealedSocket(connection, cover))
        raise OutdatedError(f"the cluster has a new key, as {connection.peer} says; try again")
    if not hmac.compare_digest(tag, credentials.tag(_LISTENING, transcript)):
        raise RefusedError(f"{connection.peer} is of another cluster: pair them with `edge pair`")
    digest = hashlib.sha256(transcript).digest()
    tls = _begin_tls(connection, credentials, transcript, listens=False)

    def check(told: Mapping[str, Any], encoded: bytes) -> None:
        member = credentials.admitted(told, encoded)
        if device not in (None, member.id):
            raise RefusedError(
                f"{connection.peer} is {member.name}, another device than was expected"
            )

    certificate = await tls.handshake(check)
    secret = os.urandom(SECRET_BYTES)
    told = {**hello, _WAY: same_host.way(connection, listens=False)}
    try:
        await tls.send_all(encode_hello(_with_news(told, credentials), secret))
        theirs, their_secret = await _receive_hello(tls, len(secret))
    except PeerLostError as error:
        raise UnwantedError(connection.peer) from error
    door = theirs.pop(_DOOR, None)
    proved = _proved(theirs, certificate, credentials)
    known = secret + their_secret
    near = None if door is None else await _come_near(tls, door, _proofs(known, digest, False))
    if near is not None:
        connection.close()
        return Greeted(role=role, hello=proved, secrets=None, connection=near)
    secrets = RecordSecrets.derived(known, digest, listens=False)
    return Greeted(role=role, hello=proved, secrets=secrets, connection=connection)


async def answer(
    connection: AsyncSocket,
    hello: Mapping[str, Any],
    credentials: Credentials | None,
    on_tag: Callable[[], None],
) -> Greeted:
    """The listening side's handshake. Raises the same errors as :func:`greet`.

    ``on_tag``: called once the other side has proved that it has the cluster's tag key.
    """
    try:
        asked = await _receive_preamble(connection)
    except VersionMismatchError:
        await connection.send_all([_preamble(Role.CHANNEL, credentials)])
        raise
    try:
        role = Role(asked & ~_IS_SECURED)
    except ValueError:
        raise ProtocolError(
            f"{connection.peer} asks for a connection of unknown role {asked}"
        ) from None
    preamble = _preamble(role, credentials)
    await connection.send_all([preamble])
    _check_secured_alike(connection, asked, credentials)
    if credentials is None:
        theirs, _ = await _receive_hello(connection, 0)
        await connection.send_all(encode_hello(hello))
        theirs.pop(MEMBER, None)
        return Greeted(role=role, hello=theirs, secrets=None, connection=connection)
    nonces = await _receive_exactly(connection, NONCE_BYTES)
    nonce = os.urandom(NONCE_BYTES)
    await connection.send_all([nonce])
    transcript = preamble + nonces + nonce
    tag = await _receive_exactly(connection, TAG_BYTES)
    if not hmac.compare_digest(tag, credentials.tag(_CONNECTING, transcript)):
        await _answer_other_key(connection, credentials, transcript, tag)
        raise RefusedError(f"{connection.peer} is not of this cluster")
    on_tag()
    await connection.send_all([credentials.tag(_LISTENING, transcript)])
    digest = hashlib.sha256(transcript).digest()
    tls = _begin_tls(connection, credentials, transcript, listens=True)
    certificate = await tls.handshake(credentials.admitted)
    secret = os.urandom(SECRET_BYTES)
    theirs, their_secret = await _receive_hello(tls, len(secret))
    is_near = theirs.pop(_WAY, None) == same_host.way(connection, listens=True) != ""
    proved = _proved(theirs, certificate, credentials)
    known = their_secret + secret
    door = same_host.LocalSocket.opened() if is_near else None
    if door is None:
        await tls.send_all(encode_hello(_with_news(hello, credentials), secret))
    else:
        with contextlib.closing(door):
            told = {**hello, _DOOR: door.name}
            await tls.send_all(encode_hello(_with_news(told, credentials), secret))
            near = await _let_near(tls, door, _proofs(known, digest, True))
        if near is not None:
            connection.close()
            return Greeted(role=role, hello=proved, secrets=None, connection=near)
    secrets = RecordSecrets.derived(known, digest, listens=True)
    return Greeted(role=role, hello=proved, secrets=secrets, connection=connection)


async def _come_near(tls: TlsSession, door: object, proofs: RecordSecrets) -> AsyncSocket | None:
    """Connecting side: move to the Unix socket. None: the connection stays where it is."""
    came = same_host.enter(door, proofs.sending)
    near = None if came is None else AsyncSocket(came, tls.peer)
    try:
        await tls.send_all(encode(Frame(_NEAR, {_COMES: near is not None})))
        if near is not None:
            proof = await _receive_exactly(near, same_host.PROOF_BYTES)
            if not hmac.compare_digest(proof, proofs.receiving):
                raise ProtocolError(f"another program answers for {tls.peer} on this host")
    except BaseException:
        if near is not None:
            near.close()
        raise
    return near


async def _let_near(
    tls: TlsSession, door: same_host.LocalSocket, proofs: RecordSecrets
) -> AsyncSocket | None:
    """Listening side: wait for the other side at the Unix socket. None: it does not come."""
    assembler = FrameAssembler(max_header_bytes=_HEADER_BYTES, max_payload_bytes=0)
    if (await _receive_frame(tls, assembler, _NEAR)).header.get(_COMES) is not True:
        return None
    came = door.let_in(proofs.receiving)
    if came is None:
        raise ProtocolError(f"{tls.peer} claims to be on this host, without a proof")
    near = AsyncSocket(came, tls.peer)
    try:
        await near.send_all((proofs.sending,))
    except BaseException:
        near.close()
        raise
    return near


def _proofs(known: bytes, transcript: bytes, listens: bool) -> RecordSecrets:
    """The proofs that both sides send on the Unix socket, and nowhere else."""
    return RecordSecrets.derived(known, transcript, listens=listens, purpose=b"edge near")


async def bring(connection: AsyncSocket, past: Past) -> None:
    """Bring the rotation to a member that has this earlier key; on return it has followed.

    Raises UnknownHereError if it has another key, and the errors of :func:`greet`.
    """
    transcript, tag = await _exchange_tags(connection, Role.CHANNEL, past, _BRINGING)
    if not hmac.compare_digest(tag, past.tag(_LISTENING, transcript)):
        raise RefusedError(f"{connection.peer} is of another cluster: pair them with `edge pair`")
    cover = SealedSocket(connection, _cover(past.tag_key, transcript, listens=False))
    await cover.send_all(encode(Frame(_ROTATION, {}, past.rotation)))
    await _receive_payload(cover, _TAKEN)


async def _exchange_preambles(
    connection: AsyncSocket, role: Role, credentials: Credentials | Past | None
) -> bytes:
    """Connecting side: exchange preambles and return the common one."""
    preamble = _preamble(role, credentials)
    await connection.send_all([preamble])
    answered = await _receive_preamble(connection)
    _check_secured_alike(connection, answered, credentials)
    if answered != preamble[-1]:
        raise ProtocolError(f"{connection.peer} answers in another role, {answered}")
    return preamble


async def _exchange_tags(
    connection: AsyncSocket, role: Role, key: Credentials | Past, who: bytes
) -> tuple[bytes, bytes]:
    """Connecting side: exchange nonces and tags. Returns the transcript and the tag received."""
    preamble = await _exchange_preambles(connection, role, key)
    nonces = os.urandom(NONCE_BYTES)
    await connection.send_all([nonces])
    nonces += await _receive_exactly(connection, NONCE_BYTES)
    transcript = preamble + nonces
    await connection.send_all([key.tag(who, transcript)])
    try:
        return transcript, await _receive_exactly(connection, TAG_BYTES)
    except PeerLostError:
        raise UnknownHereError(
            f"{connection.peer} does not know this device: pair them with `edge pair`, and if they "
            "were paired before, this device has been expelled or the cluster has a new key"
        ) from None


async def _answer_other_key(
    connection: AsyncSocket, credentials: Credentials, transcript: bytes, tag: bytes
) -> None:
    """Send or receive a key rotation, if one side has an earlier key of the cluster.

    Returns if neither has. Otherwise raises RefusedError when it is done.
    """
    for past in credentials.past():
        if hmac.compare_digest(tag, past.tag(_CONNECTING, transcript)):
            await connection.send_all([past.tag(_AHEAD, transcript)])
            cover = SealedSocket(connection, _cover(past.tag_key, transcript, listens=True))
            await cover.send_all(encode(Frame(_ROTATION, {}, past.rotation)))
            raise RefusedError(f"{connection.peer} had an earlier key, and was sent the new one")
    if hmac.compare_digest(tag, credentials.tag(_BRINGING, transcript)):
        await connection.send_all([credentials.tag(_LISTENING, transcript)])
        cover = SealedSocket(connection, _cover(credentials.tag_key, transcript, listens=True))
        await _follow(credentials, cover)
        await cover.send_all(encode(Frame(_TAKEN, {})))
        raise OutdatedError(f"the cluster has a new key, as {connection.peer} says")


async def _follow(credentials: Credentials, cover: SealedSocket) -> None:
    """Receive and apply a rotation, in a thread: it is verified and written to a file."""
    rotation = await _receive_payload(cover, _ROTATION)
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, credentials.follow, rotation)


def _cover(tag_key: bytes, transcript: bytes, *, listens: bool) -> RecordSecrets:
    """Secrets of the records around TLS and rotations, which only members can derive."""
    digest = hashlib.sha256(transcript).digest()
    return RecordSecrets.derived(tag_key, digest, listens=listens, purpose=b"edge handshake")


async def _receive_payload(connection: SealedSocket, kind: str) -> bytes:
    assembler = FrameAssembler(
        max_header_bytes=_HEADER_BYTES,
        max_payload_bytes=MAX_ROTATION_BYTES if kind == _ROTATION else 0,
    )
    return bytes((await _receive_frame(connection, assembler, kind)).payload)


def _begin_tls(
    connection: AsyncSocket, credentials: Credentials, transcript: bytes, *, listens: bool
) -> TlsSession:
    """A TLS session inside records that only members can read and write."""
    cover = _cover(credentials.tag_key, transcript, listens=listens)
    context = credentials.listening if listens else credentials.connecting
    return TlsSession(SealedSocket(connection, cover, reads_ahead=False), context, listens=listens)


def display_name(hello: Mapping[str, Any], address: str) -> str:
    """A printable name of a peer: the ``name`` of its hello, if there is one, and its address.

    The name comes from outside, so it is cut to one line and stripped of control characters.
    """
    name = hello.get("name")
    if not isinstance(name, str):
        return address
    printable = "".join(letter for letter in name[:80] if letter.isprintable()).strip()
    return f"{printable} ({address})" if printable else address


def _with_news(hello: Mapping[str, Any], credentials: Credentials) -> dict[str, Any]:
    return {**hello, _NEWS: base64.b64encode(credentials.news()).decode()}


def _proved(
    theirs: dict[str, Any], certificate: tuple[Mapping[str, Any], bytes], credentials: Credentials
) -> dict[str, Any]:
    """A member's hello with its verified device. Its news are applied first; they may concern
    itself."""
    try:
        credentials.heard(base64.b64decode(theirs.pop(_NEWS), validate=True))
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError("a hello without news of the cluster") from error
    return {**theirs, MEMBER: credentials.admitted(*certificate)}


def _preamble(role: Role, credentials: Credentials | Past | None) -> bytes:
    secured = 0 if credentials is None else _IS_SECURED
    return _PREAMBLE.pack(MAGIC, PROTOCOL_VERSION, role | secured)


def _check_secured_alike(
    connection: AsyncSocket, theirs: int, credentials: Credentials | Past | None
) -> None:
    if (theirs & _IS_SECURED) and credentials is None:
        raise RefusedError(
            f"{connection.peer} talks to members of its cluster only, and this side runs with "
            "--insecure: leave that out, and pair the devices with `edge pair`"
        )
    if not (theirs & _IS_SECURED) and credentials is not None:
        raise RefusedError(
            f"{connection.peer} runs with --insecure, this device does not: start it without"
        )


async def _receive_preamble(connection: AsyncSocket) -> int:
    """Receive the other side's role, with its bit for credentials."""
    data = bytearray(_PREAMBLE.size)
    filled = 0
    while filled < len(data):
        # Refuse a stranger's wrong bytes at once, not at the time limit.
        known = min(filled, len(MAGIC))
        if data[:known] != MAGIC[:known]:
            break
        filled += await connection.receive_into(memoryview(data)[filled:])
    magic, version, role = _PREAMBLE.unpack(data)
    if magic != MAGIC:
        raise ProtocolError(
            f"{connection.peer} does not speak Edge's protocol: check that the port is Edge's"
        )
    if version != PROTOCOL_VERSION:
        raise VersionMismatchError(connection.peer, ours=PROTOCOL_VERSION, theirs=version)
    return int(role)


async def _receive_exactly(connection: AsyncSocket, count: int) -> bytes:
    data = bytearray(count)
    filled = 0
    while filled < count:
        filled += await connection.receive_into(memoryview(data)[filled:])
    return bytes(data)


async def _receive_hello(
    connection: AsyncSocket | TlsSession, secret_bytes: int
) -> tuple[dict[str, Any], bytes]:
    """Receive the other side's hello and its secret of ``secret_bytes`` bytes."""
    assembler = FrameAssembler(max_header_bytes=MAX_HELLO_BYTES, max_payload_bytes=secret_bytes)
    frame = await _receive_frame(connection, assembler, _HELLO)
    if len(frame.payload) != secret_bytes:
        raise ProtocolError(f"{connection.peer} sent a secret of {len(frame.payload)} bytes")
    return dict(frame.header), bytes(frame.payload)


async def _receive_frame(
    connection: AsyncSocket | SealedSocket | TlsSession, assembler: FrameAssembler, kind: str
) -> Frame:
    frame = None
    try:
        while frame is None:
            frame = assembler.advance(await connection.receive_into(assembler.wanted()))
    except ProtocolError as error:
        raise ProtocolError(f"{connection.peer}: {error}") from error
    if frame.kind != kind:
        raise ProtocolError(f"{connection.peer} began with '{frame.kind[:80]}' instead of a {kind}")
    return frame
