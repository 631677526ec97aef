"""The first bytes of every connection: who speaks, which version, for what.

Each side sends a preamble of seven bytes: ``EDGE``, the protocol version (2 bytes, big-endian) and
the role of the connection (1 byte). The side that listens answers only after it has read a correct
magic, so a stranger (a port scanner, a browser) gets nothing; but it does answer a wrong version,
so that both sides learn of it. The first six bytes stay as they are in every version to come.
Then each side sends one frame of kind ``hello``, the connecting side first. Nothing is sent ahead
of an answer: a listener that refuses would otherwise reset the connection, and its answer be lost.
"""

import enum
import struct
from collections.abc import Mapping
from typing import Any

from transport.async_socket import AsyncSocket
from transport.errors import ProtocolError, VersionMismatchError
from transport.frame import PREFIX_BYTES, PROTOCOL_VERSION, Buffer, Frame, FrameAssembler, encode

MAGIC = b"EDGE"

MAX_HELLO_BYTES = 64 << 10
"""A stranger can make us set aside this much, times the number of unfinished handshakes."""

_PREAMBLE = struct.Struct("!4sHB")
_HELLO = "hello"


class Role(enum.IntEnum):
    """The purpose of a connection."""

    CHANNEL = 1
    LINK = 2


def encode_hello(hello: Mapping[str, Any]) -> list[Buffer]:
    """The hello as it is sent. Raises ``ProtocolError`` when it is not JSON or too large."""
    buffers = encode(Frame(_HELLO, hello))
    size = len(buffers[0]) - PREFIX_BYTES
    if size > MAX_HELLO_BYTES:
        raise ProtocolError(f"the hello has {size} bytes, over the limit of {MAX_HELLO_BYTES}")
    return buffers


async def greet(connection: AsyncSocket, role: Role, hello: list[Buffer]) -> dict[str, Any]:
    """The connecting side's handshake. Returns the other side's hello.

    Raises:
        VersionMismatchError: the other side speaks another version.
        ProtocolError: the other side is not Edge, or does not keep to the protocol.
        PeerLostError: the other side closed the connection.
    """
    await _send_preamble(connection, role)
    await _receive_preamble(connection)
    await connection.send_all(hello)
    return await _receive_hello(connection)


async def answer(connection: AsyncSocket, hello: list[Buffer]) -> tuple[Role, dict[str, Any]]:
    """The listening side's handshake. Returns the role asked for and the other side's hello.

    Raises the same errors as :func:`greet`.
    """
    try:
        role = await _receive_preamble(connection)
    except VersionMismatchError:
        await _send_preamble(connection, Role.CHANNEL)
        raise
    await _send_preamble(connection, role)
    remote_hello = await _receive_hello(connection)
    await connection.send_all(hello)
    return role, remote_hello


def display_name(hello: Mapping[str, Any], address: str) -> str:
    """A printable name for a peer: the ``name`` of its hello, where there is one, and its address.

    The name comes from outside, so it is cut to a line's length and stripped of control characters.
    """
    name = hello.get("name")
    if not isinstance(name, str):
        return address
    printable = "".join(letter for letter in name[:80] if letter.isprintable()).strip()
    return f"{printable} ({address})" if printable else address


async def _send_preamble(connection: AsyncSocket, role: Role) -> None:
    await connection.send_all([_PREAMBLE.pack(MAGIC, PROTOCOL_VERSION, role)])


async def _receive_preamble(connection: AsyncSocket) -> Role:
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
    try:
        return Role(role)
    except ValueError:
        raise ProtocolError(
            f"{connection.peer} asks for a connection of unknown role {role}"
        ) from None


async def _receive_hello(connection: AsyncSocket) -> dict[str, Any]:
    assembler = FrameAssembler(max_header_bytes=MAX_HELLO_BYTES, max_payload_bytes=0)
    frame = None
    try:
        while frame is None:
            frame = assembler.advance(await connection.receive_into(assembler.wanted()))
    except ProtocolError as error:
        raise ProtocolError(f"{connection.peer}: {error}") from error
    if frame.kind != _HELLO:
        raise ProtocolError(f"{connection.peer} began with '{frame.kind[:80]}' instead of a hello")
    return dict(frame.header)
