"""Which pieces of a stored prefix go from which device to which, and when none do."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import numpy as np
import pytest

from edge.errors import EdgeError
from edge.protocol.frame_codec import Done
from edge.protocol.prefix_frames import (
    AskPrefix,
    HeldPrefix,
    PrefixMatched,
    PrefixPieces,
    PutPrefix,
    ReadPrefix,
)
from edge.protocol.topology import Seat
from edge.runs.connections import Connections
from edge.runs.prefix_exchange import ExchangeFacts, PrefixExchange

A, B, C = (0, 0), (1, 0), (2, 0)
ROW_BYTES, STATE_BYTES = 10, 70


class Devices:
    """Devices, each with tokens of each of three pieces of every shard; the last may be a state."""

    session = "s"

    def __init__(
        self, held: dict[Seat, dict[Seat, tuple[int, int, int]]], *, has_states: bool = True
    ) -> None:
        self._held = held
        self._state = 2 if has_states else None
        self.asked: list[Any] = []
        self.put: list[tuple[Seat, PutPrefix]] = []
        self.forgets = False

    async def call(self, seat: Seat, call: Any) -> Any:
        if isinstance(call, AskPrefix):
            self.asked.append(call)
            told = np.zeros((3, 3), "<u4")
            for number, tokens in enumerate(
                self._held[seat].get((call.stage, call.rank), (0,) * 3)
            ):
                is_state = number == self._state
                told[0, number] = 0 if is_state else tokens
                told[1, number] = 0 if is_state or not tokens else ROW_BYTES
                if call.point and tokens >= call.point:
                    told[2, number] = 1 + STATE_BYTES if is_state else 1
            return HeldPrefix(pieces=told.tobytes())
        if isinstance(call, ReadPrefix):
            sizes = [
                STATE_BYTES if number == self._state else ROW_BYTES * (call.last - call.first)
                for number in call.pieces
            ]
            return PrefixPieces(content=bytes(0 if self.forgets else sum(sizes)))
        self.put.append((seat, call))
        return Done()


def even_out(
    devices: Devices,
    found: dict[Seat, PrefixMatched],
    *,
    has_states: bool = False,
    bytes_per_s: float = 1e9,
) -> bool:
    facts = ExchangeFacts(bytes_per_s=bytes_per_s, prompt_tokens_per_s=1000, has_states=has_states)
    exchange = PrefixExchange(cast(Connections, devices), facts)
    return asyncio.run(exchange.even_out("r", found))


def matched(tokens: int, *points: int, stored: tuple[int, ...]) -> PrefixMatched:
    return PrefixMatched(request="r", tokens=tokens, points=points, stored=stored)


def test_each_piece_goes_from_a_device_that_has_it() -> None:
    """In few messages for each range of tokens, the last of which completes it. One device found
    less than it has of its own part, so no more is of use."""
    held = {A: {B: (600, 0, 590)}, B: {B: (0, 600, 0)}, C: {B: (16, 600, 600)}}
    devices = Devices(held, has_states=False)
    found = {
        A: matched(600, stored=(600,)),
        B: matched(0, stored=(600,)),
        C: matched(592, stored=(592,)),
    }
    held[C][C] = held[A][C] = (600, 600, 600)
    assert even_out(devices, found)
    told = [(seat, put.first, put.last, put.pieces, put.is_whole) for seat, put in devices.put]
    assert told == [
        (B, first, last, (piece,), is_last)
        for first, last in ((0, 256), (256, 512), (512, 592))
        for piece, is_last in ((0, False), (2, True))
    ]


def test_the_next_pieces_are_read_while_some_are_stored() -> None:
    """One device is never asked for more than that."""
    order = list[str]()

    class Slow(Devices):
        async def call(self, seat: Seat, call: Any) -> Any:
            name = f"{type(call).__name__} {getattr(call, 'first', '')}"
            order.append(f"{name} begins")
            for _turn in range(3):  # others go on meanwhile
                await asyncio.sleep(0)
            order.append(f"{name} ends")
            return await super().call(seat, call)

    devices = Slow({A: {B: (700,) * 3}, B: {}}, has_states=False)
    assert even_out(devices, {A: matched(700, stored=(700,)), B: matched(0, stored=())})
    assert [put.first for _seat, put in devices.put] == [0, 256, 512]
    for first in (256, 512):
        begun = order.index(f"ReadPrefix {first} begins")
        assert begun < order.index(f"PutPrefix {first - 256} ends")
    assert order.index("ReadPrefix 512 begins") > order.index("PutPrefix 0 ends")


def test_where_a_device_has_nothing_new_nobody_is_asked() -> None:
    devices = Devices({A: {}, B: {}})
    even = {A: matched(64, stored=(64,)), B: matched(64, stored=(64,))}
    assert not even_out(devices, even)
    nearly = {A: matched(64, stored=(79,)), B: matched(64, stored=(64,))}
    assert not even_out(devices, nearly)
    assert not devices.asked


def test_states_and_rows_before_them_go_together() -> None:
    devices = Devices({A: {B: (300, 300, 300)}, B: {B: (300, 0, 0)}})
    found = {A: matched(0, 300, stored=(300,)), B: matched(0, stored=(300,))}
    assert even_out(devices, found, has_states=True)
    told = [(seat, put.first, put.last, put.pieces, put.has_states) for seat, put in devices.put]
    assert told == [(B, 0, 256, (1,), False), (B, 256, 300, (1, 2), True)]
    assert all(put.is_whole for _seat, put in devices.put)


def test_of_several_points_the_last_one_that_devices_have_together_counts() -> None:
    devices = Devices({A: {A: (400,) * 3, B: (300,) * 3}, B: {B: (0, 0, 0)}})
    found = {A: matched(0, 300, 400, stored=(300, 400)), B: matched(0, stored=())}
    assert even_out(devices, found, has_states=True)
    assert {put.last for _seat, put in devices.put} == {256, 300}


@pytest.mark.parametrize("why", ["slow", "nobody", "gone"])
def test_nothing_goes_where_that_takes_longer_or_is_not_there(why: str) -> None:
    devices = Devices({A: {B: (300, 300, 300)}, B: {}})
    found = {A: matched(0, 300, stored=(300,)), B: matched(0, stored=())}
    num_bytes = 2 * 300 * ROW_BYTES + STATE_BYTES
    if why == "nobody":
        devices._held[A][B] = (300, 299, 300)
        assert not even_out(devices, found, has_states=True)
    elif why == "slow":
        just_too_slow = 2 * num_bytes / 0.3
        assert not even_out(devices, found, has_states=True, bytes_per_s=just_too_slow)
        assert even_out(devices, found, has_states=True, bytes_per_s=1.01 * just_too_slow)
    else:
        devices.forgets = True
        with pytest.raises(EdgeError, match="is gone"):
            even_out(devices, found, has_states=True)
    assert bool(devices.put) == (why == "slow")
