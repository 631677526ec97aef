"""Limits of a kind of frame are asked once its header is read, and before its payload costs."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import tracemalloc
from typing import Any

import pytest

from edge.transport.errors import ProtocolError, TransportError
from edge.transport.frame import (
    MAX_HEADER_CONTAINERS,
    MAX_PAYLOAD_BYTES,
    Frame,
    FrameAssembler,
    FrameLimits,
    decode,
    encode,
    value_bytes,
)
from edge.transport.sealed_socket import CHANNEL_RECORD_BYTES
from tests.support.transport_pairs import channel_pair


def announced(document: bytes, payload_bytes: int) -> bytes:
    return struct.pack("!II", len(document), payload_bytes) + document


def feed(assembler: FrameAssembler, data: bytes, limits: dict[str, FrameLimits]) -> None:
    while data:
        space = assembler.wanted()
        part, data = data[: space.nbytes], data[space.nbytes :]
        space[: len(part)] = part
        assembler.advance(len(part), limits.__getitem__)


def test_no_memory_is_set_aside_for_a_payload_that_its_kind_may_not_have() -> None:
    data = announced(b'{"kind":"k","header":{}}', MAX_PAYLOAD_BYTES)
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match=r"frame 'k' has a payload .* limit of 5"):
            feed(FrameAssembler(), data, {"k": FrameLimits(payload_bytes=5)})
        assert tracemalloc.get_traced_memory()[1] < 100_000
        assembler = FrameAssembler()
        feed(assembler, data, {"k": FrameLimits()})
        assert assembler.due_bytes == MAX_PAYLOAD_BYTES
        assert tracemalloc.get_traced_memory()[1] < 100_000
        assembler.wanted()
        assert assembler.due_bytes == 0
        assert tracemalloc.get_traced_memory()[1] >= MAX_PAYLOAD_BYTES
    finally:
        tracemalloc.stop()


def test_a_header_that_its_kind_may_not_have() -> None:
    data = b"".join(bytes(each) for each in encode(Frame("k", {"text": "x" * 100})))
    assert decode(data, lambda _kind: FrameLimits(header_bytes=200)).kind == "k"
    with pytest.raises(ProtocolError, match=r"frame 'k' has a header .* limit of 100"):
        decode(data, lambda _kind: FrameLimits(header_bytes=100))


def test_a_header_of_nothing_but_lists_is_not_read() -> None:
    lists = b",".join([b"[]"] * MAX_HEADER_CONTAINERS)
    with pytest.raises(ProtocolError, match="lists and objects"):
        decode(announced(b'{"kind":"k","header":{"a":[' + lists + b"]}}", 0))


@pytest.mark.parametrize(
    "values",
    [
        b"[" + b",".join([b"[]"] * 5000) + b"]",
        b"[" + b",".join([b"[0]"] * 5000) + b"]",
        b"[" + b",".join([b"{}"] * 5000) + b"]",
        b"[" + b",".join([b'{"a":0}'] * 5000) + b"]",
        b"[" + b",".join([b'{"":""}'] * 5000) + b"]",
        b"[" + b",".join([b'{"a":{"b":{"c":[{}]}}}'] * 2000) + b"]",
        b"[" + b",".join([b'"ab"'] * 9000) + b"]",
        b"[" + b",".join(['"ā"'.encode()] * 9000) + b"]",
        b"[" + b",".join([b"1e5"] * 9000) + b"]",
        b"[" + b",".join([b"999"] * 9000) + b"]",
        b"[" + b",".join([b"1" * 400] * 90) + b"]",
        b"{" + b",".join(b'"%d":%d' % (each, each) for each in range(7000)) + b"}",
        b"{" + b",".join(b'"%x":[]' % each for each in range(1400)) + b"}",
        ('"' + "x" * 30_000 + "\U0001f600" + '"').encode(),
    ],
    ids=lambda values: values[:12].decode(errors="replace"),
)
def test_a_header_becomes_no_more_than_is_asked_for(values: bytes) -> None:
    data = announced(b'{"kind":"k","header":{"a":' + values + b"}}", 0)
    tracemalloc.start()
    try:
        frame = decode(data)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert frame.kind == "k"
    assert taken < value_bytes(data)


def test_large_parts_wait_until_they_are_admitted() -> None:
    """Nothing is set aside meanwhile, and a receive that is given up goes on later."""
    asked: list[int] = []
    may_go_on = asyncio.Event()

    async def admit(num_bytes: int) -> None:
        asked.append(num_bytes)
        if num_bytes > 10_000:
            await may_go_on.wait()

    async def main() -> None:
        async with channel_pair("tcp") as (ours, theirs):
            sending = asyncio.create_task(ours.send(Frame("k", {}, bytes(32 << 20))))
            tracemalloc.start()
            try:
                receiving = asyncio.create_task(theirs.receive(admit=admit))
                while len(asked) < 3:  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(0)
                receiving.cancel()
                await asyncio.gather(receiving, return_exceptions=True)
                assert tracemalloc.get_traced_memory()[1] < 1 << 20
            finally:
                tracemalloc.stop()
            may_go_on.set()
            frame = await theirs.receive(admit=admit)
            assert len(frame.payload) == 32 << 20
            await sending
            await ours.send(Frame("k"))
            await theirs.receive(admit=admit)

    asyncio.run(main())
    header = b'{"kind":"k","header":{}}'
    read = [len(header), value_bytes(header)]
    assert asked == [*read, 32 << 20, 32 << 20, *read]


def test_a_part_is_admitted_with_the_record_in_which_it_comes() -> None:
    asked: list[int] = []

    async def admit(num_bytes: int) -> None:
        asked.append(num_bytes)

    async def main() -> None:
        async with channel_pair("sealed") as (ours, theirs):
            for nbytes in (1, 100_000, 2 << 20):
                sending = asyncio.create_task(ours.send(Frame("k", {}, bytes(nbytes))))
                assert len((await theirs.receive(admit=admit)).payload) == nbytes
                await sending

    asyncio.run(main())
    assert asked[2::3] == [2, 200_000, (2 << 20) + CHANNEL_RECORD_BYTES]


def test_half_a_frame_is_not_kept_for_as_long_as_its_channel() -> None:
    frame = Frame("k", {}, bytes(32 << 20))

    async def main() -> None:
        async with channel_pair("tcp") as (ours, theirs):
            tracemalloc.start()
            try:
                tasks: list[asyncio.Task[Any]] = [asyncio.create_task(ours.send(frame))]
                tasks.append(asyncio.create_task(theirs.receive()))
                while tracemalloc.get_traced_memory()[0] < 32 << 20:  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(0)
                await theirs.aclose()
                for task in tasks:
                    task.cancel()
                    with contextlib.suppress(TransportError, asyncio.CancelledError):
                        await task
                del tasks, task
                assert tracemalloc.get_traced_memory()[0] < 1 << 20
            finally:
                tracemalloc.stop()

    asyncio.run(main())
