"""The first bytes of every connection: who speaks, which version, for what.

Each side sends a preamble of seven bytes: ``EDGE``, the protocol version (2 bytes, big-endian) and
the role of the connection (1 byte). The side that listens answers only after it has read a correct
magic, so a stranger (a port scanner, a browser) gets nothing; but it does answer a wrong version,
so that both sides learn of it. The first six bytes stay as they are in every version to come.

With credentials, the role says so, and three steps follow: a nonce of each side; a tag of each side
over preamble and nonces, which only members of the cluster can make; TLS 1.3, in which each shows
its certificate. The connecting side comes first each time. TLS is covered by records under a key
that only members can make of the nonces: whoever passes nonces and tags on between two of them
would else be shown a certificate.

Then each side sends one frame of kind ``hello``, the connecting side first. Nothing is sent ahead
of an answer: a listener that refuses would otherwise reset the connection, and its answer be lost.
With credentials the hellos carry a secret each. TLS ends with them, and the keys of the records
that follow are made of both.

Where both hellos show that the ends are on one host, the listening side's names a Unix socket, and
a frame ``near`` says whether the connecting one has come there (see `same_host`). Then each proves
there that it knows both secrets, what follows goes that way, and the TCP connection is closed.

A cluster may get a new key while a member is away. Whoever knows the key of before answers its tag,
made with that key, by another one and by the rotation, under the same cover, and hangs up. Or it
comes itself with a tag that says so, and brings the rotation. What is told is signed; the member
then begins again with the key of now.
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
"""A stranger can make us set aside this much, times the number of unfinished handshakes."""

_PREAMBLE = struct.Struct("!4sHB")
_HELLO = "hello"

MEMBER = "member"
"""In a hello that was received: the `Member` whose certificate came with it. Nobody can say this of
itself."""
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
"""Only who has shown a key of the cluster can make us set aside so much."""


class Role(enum.IntEnum):
    """The purpose of a connection."""

    CHANNEL = 1
    LINK = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeted:
    """A connection whose handshake is done."""

    role: Role
    hello: dict[str, Any]
    """What the other side says of itself; with credentials also its device, which it has
    proved."""
    secrets: RecordSecrets | None
    """Secrets of the records that follow; None: what follows is plain."""
    connection: AsyncSocket
    """That it follows on: the one that was greeted over, or what has taken its place."""


def encode_hello(hello: Mapping[str, Any], secret: bytes = b"") -> list[Buffer]:
    """The hello as it is sent. Raises ``ProtocolError`` when it is not JSON or too large."""
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
    """The connecting side's handshake. With `device`, nobody but this one is talked to.

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

    ``on_tag`` is called once the other side has shown that it has the cluster's key for tags."""
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
    door = same_host.Door.opened() if is_near else None
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
    """The connecting side's part; None: what follows stays where it is."""
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
    tls: TlsSession, door: same_host.Door, proofs: RecordSecrets
) -> AsyncSocket | None:
    """The listening side's part."""
    assembler = FrameAssembler(max_header_bytes=_HEADER_BYTES, max_payload_bytes=0)
    if (await _receive_frame(tls, assembler, _NEAR)).header.get(_COMES) is not True:
        return None
    came = door.let_in(proofs.receiving)
    if came is None:
        raise ProtocolError(f"{tls.peer} said that it is on this host, and did not show it")
    near = AsyncSocket(came, tls.peer)
    try:
        await near.send_all((proofs.sending,))
    except BaseException:
        near.close()
        raise
    return near


def _proofs(known: bytes, transcript: bytes, listens: bool) -> RecordSecrets:
    """What each side shows of itself at the door, and nowhere else."""
    return RecordSecrets.derived(known, transcript, listens=listens, purpose=b"edge near")


async def bring(connection: AsyncSocket, past: Past) -> None:
    """Tell a member that has this key of before how to follow; it has done so then.

    Raises UnknownHereError where it has another key, and the errors of :func:`greet`.
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
    """The connecting side's part; the preamble that both have."""
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
    """The connecting side's part; the transcript, and the tag that came."""
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
    """Where one of the two sides has a key that the cluster had before: tell, or be told.

    Returns where neither has. Raises RefusedError once it is done.
    """
    for past in credentials.past():
        if hmac.compare_digest(tag, past.tag(_CONNECTING, transcript)):
            await connection.send_all([past.tag(_AHEAD, transcript)])
            cover = SealedSocket(connection, _cover(past.tag_key, transcript, listens=True))
            await cover.send_all(encode(Frame(_ROTATION, {}, past.rotation)))
            raise RefusedError(
                f"{connection.peer} had a key of before, and was told of the new one"
            )
    if hmac.compare_digest(tag, credentials.tag(_BRINGING, transcript)):
        await connection.send_all([credentials.tag(_LISTENING, transcript)])
        cover = SealedSocket(connection, _cover(credentials.tag_key, transcript, listens=True))
        await _follow(credentials, cover)
        await cover.send_all(encode(Frame(_TAKEN, {})))
        raise OutdatedError(f"the cluster has a new key, as {connection.peer} says")


async def _follow(credentials: Credentials, cover: SealedSocket) -> None:
    """Take what is told; in a thread, because it is read, checked and written to a file."""
    rotation = await _receive_payload(cover, _ROTATION)
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, credentials.follow, rotation)


def _cover(tag_key: bytes, transcript: bytes, *, listens: bool) -> RecordSecrets:
    """What only those who have the key can make and look through."""
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
    """Under a cover that only members can make and look through."""
    cover = _cover(credentials.tag_key, transcript, listens=listens)
    context = credentials.listening if listens else credentials.connecting
    return TlsSession(SealedSocket(connection, cover, reads_ahead=False), context, listens=listens)


def display_name(hello: Mapping[str, Any], address: str) -> str:
    """A printable name for a peer: the ``name`` of its hello, where there is one, and its address.

    The name comes from outside, so it is cut to a line's length and stripped of control characters.
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
    """A member's hello, with its device; its news are taken, and may have been of itself."""
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
    """The other side's role, with its bit for credentials."""
    data = bytearray(_PREAMBLE.size)
    filled = 0
    while filled < len(data):
        # A stranger's few bytes are refused at once rather than when the time is over.
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
    """What the other side says of itself, and its secret, which has that many bytes."""
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
