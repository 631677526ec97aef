"""What somebody between the two ends of a sealed link can do: nothing but end it."""

from __future__ import annotations

import hashlib
import hmac
import itertools
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

from edge.transport import Link, PeerLostError, ProtocolError, TcpLink
from edge.transport.records import (
    LARGE_MESSAGE_BYTES,
    LARGE_RECORD_BYTES,
    RECORD_BYTES,
    SECRET_BYTES,
    TAG_BYTES,
    Records,
    RecordSecrets,
    SealedRecords,
)
from tests.support.transport_pairs import flipped, in_threads, sealed_pair, socket_pair

SIZE_BYTES = 8
MESSAGE = np.arange(64, dtype=np.float32)
ON_THE_WIRE = SIZE_BYTES + MESSAGE.nbytes + TAG_BYTES


@contextmanager
def between(
    alice: Records | None = None, bob: Records | None = None
) -> Iterator[tuple[Link, Link, socket.socket, socket.socket]]:
    """Alice's and Bob's ends, and the sockets of who sits between, hers first."""
    pair = sealed_pair()
    hers, to_hers = socket_pair()
    his, to_his = socket_pair()
    with (
        closing(TcpLink(hers, "bob", 20, alice or pair[0])) as one,
        closing(TcpLink(his, "alice", 20, bob or pair[1])) as other,
        to_hers,
        to_his,
    ):
        yield one, other, to_hers, to_his


def taken(way: socket.socket, nbytes: int) -> bytes:
    content = way.recv(nbytes, socket.MSG_WAITALL)
    assert len(content) == nbytes
    return content


def test_what_passes_is_what_was_sent_and_shows_nothing() -> None:
    with between() as (alice, bob, hers, his):
        into = np.empty_like(MESSAGE)
        for _ in range(5):  # over a change of keys
            alice.send(MESSAGE)
            seen = taken(hers, ON_THE_WIRE)
            assert not any(seen.find(part) >= 0 for part in pieces(MESSAGE.tobytes()))
            his.sendall(seen)
            bob.receive(into)
            assert np.array_equal(into, MESSAGE)


def pieces(content: bytes, nbytes: int = 8) -> list[bytes]:
    return [content[start : start + nbytes] for start in range(0, len(content), nbytes)]


def test_two_messages_with_the_same_content_look_unlike() -> None:
    with between() as (alice, bob, hers, his):
        alice.send(MESSAGE)
        bob.send(MESSAGE)
        alice.send(MESSAGE)
        seen = [taken(way, ON_THE_WIRE)[SIZE_BYTES:] for way in (hers, hers, his)]
        assert len(set(seen)) == 3


@pytest.mark.parametrize(
    "change",
    [
        flipped(SIZE_BYTES),
        flipped(ON_THE_WIRE - 1),
        lambda first, second: second,  # reordered, or the first one lost
        lambda first, second: first[:SIZE_BYTES] + bytes(len(first) - SIZE_BYTES),
    ],
    ids=["content", "tag", "another", "zeros"],
)
def test_a_changed_message_is_refused(change: Callable[[bytes, bytes], bytes]) -> None:
    with between() as (alice, bob, hers, his):
        alice.send(MESSAGE)
        alice.send(MESSAGE + 1)
        his.sendall(change(taken(hers, ON_THE_WIRE), taken(hers, ON_THE_WIRE)))
        into = np.empty_like(MESSAGE)
        with pytest.raises(ProtocolError, match="not sealed for this link"):
            bob.receive(into)
        with pytest.raises(ProtocolError, match="not sealed for this link"):
            bob.receive(into)  # the link is spent


def test_a_repeated_message_is_refused() -> None:
    with between() as (alice, bob, hers, his):
        alice.send(MESSAGE)
        seen = taken(hers, ON_THE_WIRE)
        his.sendall(seen + seen)
        into = np.empty_like(MESSAGE)
        bob.receive(into)
        with pytest.raises(ProtocolError, match="not sealed for this link"):
            bob.receive(into)


def test_a_message_sent_back_is_refused() -> None:
    with between() as (alice, _bob, hers, _his):
        alice.send(MESSAGE)
        hers.sendall(taken(hers, ON_THE_WIRE))
        with pytest.raises(ProtocolError, match="not sealed for this link"):
            alice.receive(np.empty_like(MESSAGE))


def test_a_message_of_another_link_is_refused() -> None:
    with between() as (alice, _, hers, _), between() as (_, bob, _, his):
        alice.send(MESSAGE)
        his.sendall(taken(hers, ON_THE_WIRE))
        with pytest.raises(ProtocolError, match="not sealed for this link"):
            bob.receive(np.empty_like(MESSAGE))


def test_a_size_that_was_changed_is_refused_before_anything_is_read() -> None:
    with between() as (alice, bob, hers, his):
        alice.send(MESSAGE)
        seen = taken(hers, ON_THE_WIRE)
        his.sendall((1 << 40).to_bytes(SIZE_BYTES) + seen[SIZE_BYTES:])
        with pytest.raises(ProtocolError, match="were expected"):
            bob.receive(np.empty_like(MESSAGE))


@pytest.mark.parametrize("length", [0, SIZE_BYTES, ON_THE_WIRE - 1])
def test_a_message_cut_short_is_a_lost_peer(length: int) -> None:
    with between() as (alice, bob, hers, his):
        alice.send(MESSAGE)
        his.sendall(taken(hers, ON_THE_WIRE)[:length])
        his.shutdown(socket.SHUT_WR)
        with pytest.raises(PeerLostError):
            bob.receive(np.empty_like(MESSAGE))


@pytest.mark.parametrize("record_bytes", [RECORD_BYTES, LARGE_RECORD_BYTES])
def test_a_record_moved_within_a_large_message_is_refused(record_bytes: int) -> None:
    large = np.random.default_rng(1).integers(0, 256, 3 * record_bytes, np.uint8)
    assert (large.nbytes >= LARGE_MESSAGE_BYTES) == (record_bytes > RECORD_BYTES)
    record = record_bytes + TAG_BYTES
    with between() as (alice, bob, hers, his):

        def swap() -> None:
            size = taken(hers, SIZE_BYTES)
            records = [taken(hers, record) for _ in range(3)]
            his.sendall(size + records[0] + records[2] + records[1])

        into = np.empty_like(large)
        _, _, refused = in_threads([lambda: alice.send(large), swap, lambda: bob.receive(into)])
        assert isinstance(refused, ProtocolError)


def expanded(secret: bytes, info: bytes, nbytes: int) -> bytes:
    """HKDF-Expand with SHA-256 (RFC 5869, section 2.3), by hand."""
    found, block = b"", b""
    for count in itertools.count(1):
        if len(found) >= nbytes:
            return found[:nbytes]
        block = hmac.digest(secret, block + info + bytes([count]), hashlib.sha256)
        found += block
    raise AssertionError


def test_the_bytes_on_the_wire_are_those_of_the_description() -> None:
    """Keys by HKDF from both secrets and the transcript; nonces count; the size is bound in."""
    connector, listener, transcript = b"c" * SECRET_BYTES, b"l" * SECRET_BYTES, b"t" * 32
    root = hmac.digest(transcript, connector + listener, hashlib.sha256)
    both = expanded(root, b"edge records", 2 * SECRET_BYTES)
    secrets = RecordSecrets.derived(connector + listener, transcript, listens=False)
    assert (secrets.sending, secrets.receiving) == (both[:SECRET_BYTES], both[SECRET_BYTES:])
    mirrored = RecordSecrets.derived(connector + listener, transcript, listens=True)
    assert (mirrored.receiving, mirrored.sending) == (secrets.sending, secrets.receiving)
    assert [secrets.sending.hex(), secrets.receiving.hex()] == [
        "bb684b4095ef93b78fd73744328484ee610446d918cb095046a87be7760ee15a",
        "b05fae5b32e1d8c722909966d56130db6bb792b30a87af39ab1cd0d3341212b6",
    ]

    records = SealedRecords(secrets, records_per_key=2)
    size, secret = b"\0\0\0\0\0\0\0\5", secrets.sending
    for number in range(6):
        if number and number % 2 == 0:
            secret = expanded(secret, b"edge next", SECRET_BYTES)
        key, nonce = expanded(secret, b"edge key", SECRET_BYTES), (number % 2).to_bytes(12)
        cipher = Cipher(AES(key), GCM(nonce)).encryptor()
        cipher.authenticate_additional_data(size)
        expected = cipher.update(b"hello") + cipher.finalize() + cipher.tag
        assert bytes(records.seal(size, memoryview(b"hello"))) == expected
