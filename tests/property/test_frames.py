"""Frames survive the wire, and nothing that arrives on it does harm."""

import contextlib
import struct
import tracemalloc

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edge.transport.errors import ProtocolError
from edge.transport.frame import (
    MAX_HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    PREFIX_BYTES,
    Frame,
    FrameAssembler,
    decode,
    encode,
)

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)
frames = st.builds(
    Frame,
    kind=st.text(min_size=1, max_size=20),
    header=st.dictionaries(st.text(max_size=10), json_values, max_size=5),
    payload=st.binary(max_size=200),
)


def wire(*sent: Frame) -> bytes:
    return b"".join(bytes(buffer) for frame in sent for buffer in encode(frame))


def assemble(data: bytes, cuts: list[int]) -> list[Frame]:
    """Feed ``data`` in pieces of at most the sizes in ``cuts``, over and over."""
    assembler, found, turn = FrameAssembler(), [], 0
    while data:
        space = assembler.wanted()
        assert space.nbytes > 0
        part = data[: min(space.nbytes, cuts[turn % len(cuts)])]
        space[: len(part)] = part
        data, turn = data[len(part) :], turn + 1
        frame = assembler.advance(len(part))
        if frame is not None:
            found.append(frame)
    return found


@given(frames)
def test_a_frame_survives_the_wire(frame: Frame) -> None:
    assert decode(wire(frame)) == frame


@given(st.lists(frames, max_size=4), st.lists(st.integers(1, 50), min_size=1, max_size=5))
def test_frames_cut_anywhere_are_put_together_again(sent: list[Frame], cuts: list[int]) -> None:
    assert assemble(wire(*sent), cuts) == sent


@given(frames, st.data())
def test_a_frame_cut_short_is_an_error_and_never_a_frame(frame: Frame, data: st.DataObject) -> None:
    whole = wire(frame)
    length = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(ProtocolError, match="cut short"):
        decode(whole[:length])


@given(frames, st.binary(min_size=1, max_size=30))
def test_bytes_after_a_frame_are_an_error(frame: Frame, rest: bytes) -> None:
    with pytest.raises(ProtocolError, match="follow the end"):
        decode(wire(frame) + rest)


def with_sizes(document: bytes, payload: bytes = b"") -> bytes:
    return struct.pack("!II", len(document), len(payload)) + document + payload


@given(st.binary(max_size=300) | st.binary(max_size=300).map(with_sizes))
@example(with_sizes(b"[" * 100_000 + b"]" * 100_000))
@example(with_sizes(b'{"kind":"k","header":{"n":' + b"9" * 10_000 + b"}}"))
@example(with_sizes(b'{"kind":"k","header":{"n":NaN}}'))
@example(with_sizes(b'{"kind":"k","header":[1,2,3,4]}'))
@example(with_sizes(b'{"kind":"","header":{}}       '))
@example(with_sizes(b'["kind","header"]'))
@example(with_sizes('{"kind":"k","header":{}}'.encode("utf-16")))
def test_garbage_is_an_error_and_nothing_worse(garbage: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(garbage)


@given(frames, st.data())
def test_a_flipped_byte_gives_a_frame_or_an_error(frame: Frame, data: st.DataObject) -> None:
    whole = bytearray(wire(frame))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(ProtocolError):
        assert isinstance(decode(whole), Frame)


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
@example(MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES)
@example(MAX_HEADER_BYTES + 1, 0)
@example(12, MAX_PAYLOAD_BYTES + 1)
@example(11, 0)
def test_sizes_are_checked_before_memory_is_set_aside(header: int, payload: int) -> None:
    is_allowed = 12 <= header <= MAX_HEADER_BYTES and payload <= MAX_PAYLOAD_BYTES
    assembler = FrameAssembler()
    assembler.wanted()[:] = struct.pack("!II", header, payload)
    tracemalloc.start()
    try:
        assert assembler.advance(PREFIX_BYTES) is None
    except ProtocolError:
        assert not is_allowed
        assert tracemalloc.get_traced_memory()[1] < 100_000
    else:
        assert is_allowed
        # The payload's memory waits for a header that can be read.
        assert tracemalloc.get_traced_memory()[1] < header + 100_000
    finally:
        tracemalloc.stop()


def test_the_largest_frame_fits_and_one_byte_more_does_not() -> None:
    overhead = len('{"kind":"k","header":{"t":""}}')
    text = "x" * (MAX_HEADER_BYTES - overhead)
    payload = bytes(MAX_PAYLOAD_BYTES)
    largest = Frame("k", {"t": text}, payload)
    assert decode(wire(largest)) == largest
    with pytest.raises(ProtocolError, match="over the limit"):
        encode(Frame("k", {"t": text + "x"}))
    with pytest.raises(ProtocolError, match="over the limit"):
        encode(Frame("k", {}, payload + b"x"))


def test_a_payload_is_not_copied_to_be_sent() -> None:
    payload = bytearray(b"abcd")
    _, body = encode(Frame("k", {}, payload))
    payload[0] = ord("z")
    assert bytes(body) == b"zbcd"
