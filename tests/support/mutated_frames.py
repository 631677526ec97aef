"""Frames that nobody sends: one of every kind, changed in its structure and in its bytes.

`python -m tests.support.mutated_frames 1000000 --seed 7` tries that many against the decoder.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import marshal
import random
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from edge.errors import EdgeError, ProtocolError
from edge.memory.shard_memory import check_plan
from edge.partition import PlanError
from edge.protocol import session_frames
from edge.protocol.frame_codec import from_frame, to_frame
from edge.protocol.frame_table import limits_of
from edge.transport import Frame
from edge.transport import ProtocolError as FrameError
from edge.transport.frame import decode, encode
from tests.support.kept_inputs import Input, Target, kept
from tests.unit.protocol.test_frame_table import ANSWERS, FRAMES_SENT


def wire(frame: Frame) -> bytes:
    """As it is sent."""
    return b"".join(map(bytes, encode(frame)))


READ_AS: dict[str, type[Any]] = {
    type(sent).__name__: type(sent) for sent in (*FRAMES_SENT, *ANSWERS)
}

SOUND: tuple[Input, ...] = (
    *((type(sent).__name__, wire(to_frame(sent.kind, sent, call=1))) for sent in FRAMES_SENT),
    *((type(sent).__name__, wire(to_frame("ok", sent, call=1))) for sent in ANSWERS),
)
"""One valid frame of every kind, and what it is read as."""

ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 63, 64, 4096, 4097, 2**24, 2**31, 2**32, 2**53, 2**63, 2**64,
    10**40, 10**400, 0.0, -0.0, 0.5, 1e-320, 1e18, 1e308, "", "a", "\x00", "é" * 600, "x" * 5000,
    "0" * 64, "127.0.0.1:1", "../../etc/passwd", [], {}, [[]], [{}], {"": None}, {"kind": "x"},
    {"kind": []},
)  # fmt: skip
"""Values that no field expects, or only some."""

_MOST_PLACES = 10_000
"""In what is changed: a list of lists must not be repeated without end."""

_MOST_BYTES = 32 << 20
"""Of a list that is repeated, whose texts may be long: more than most readers take of anything."""

_Place = tuple[Any, Any]
"""A list or an object, and an index or a key of it."""


def mutated(value: Any, chance: random.Random) -> Any:
    """A JSON value, changed in one to four places; `value` stays as it is."""
    root = [_copied(value)]
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        places = _places(root)
        with contextlib.suppress(RecursionError):  # what is nested so deeply is not copied again
            _CHANGES[chance.randrange(len(_CHANGES))](places, chance)
    return root[0]


def _copied(value: Any) -> Any:
    """Of a JSON value; several times as fast as `copy.deepcopy`. Raises RecursionError."""
    return marshal.loads(_written(value))


def _written(value: Any) -> bytes:
    """In Python's own form. Raises RecursionError."""
    try:
        return marshal.dumps(value, 2)  # from version 3 on, equal parts stay one
    except ValueError as error:
        raise RecursionError(str(error)) from error


def mutated_bytes(data: bytes, chance: random.Random) -> bytes:
    """Some bytes flipped, cut out, doubled or put in."""
    found = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8))):
        at = chance.randrange(len(found) + 1)
        size = chance.choice((1, 1, 2, 8, 200))
        match chance.randrange(5):
            case 0:
                found[at : at + size] = b""
            case 1:
                found[at:at] = found[at : at + size]
            case 2:
                found[at:at] = chance.randbytes(size)
            case 3:
                found[at:at] = chance.choice((b"[", b"{", b'"', b"9", b"\xff", b',"a":')) * size
            case _ if at < len(found):
                found[at] ^= 1 << chance.randrange(8)
    return bytes(found)


def mutated_frame(frame: Frame, chance: random.Random) -> Frame:
    """Another header, another payload, or both."""
    header, payload = dict(frame.header), bytes(frame.payload)
    which = chance.randrange(4)
    if which != 0 or not payload:
        changed = mutated(header, chance)
        header = changed if isinstance(changed, dict) else {"call": changed}
    if which in {0, 1}:
        try:
            payload = json.dumps(mutated(json.loads(payload), chance)).encode()
        except ValueError:
            payload = mutated_bytes(payload, chance)
    return Frame(frame.kind, header, payload)


def changed(data: bytes, chance: random.Random) -> bytes:
    """A frame on the wire, changed as a frame, in its bytes, or both."""
    try:
        data = wire(mutated_frame(decode(data), chance))
    except (FrameError, RecursionError):  # none any more, or nested too deeply to be copied
        return mutated_bytes(data, chance)
    return data if chance.randrange(4) else mutated_bytes(data, chance)


def outcome(kind: str, data: bytes) -> str:
    """What becomes of a frame that is read as `kind`: "frame", "record" or "accepted", where all is
    well.

    It raises what should not be raised. A plan that came through is tried, too: no layout may fail
    after the checks before it.
    """
    try:
        arrived = decode(data, limits_of)
    except FrameError:
        return "frame"
    try:
        body = from_frame(READ_AS[kind], arrived)
    except ProtocolError as error:
        return "record" if len(str(error)) < 2000 else "told at length"
    if isinstance(body, session_frames.Open):
        try:
            check_plan(body.assignment)
        except (PlanError, EdgeError):
            return "record"
        assert body.assignment.layout.layers
    return "accepted"


def try_decoder(seed: int) -> str:
    """What became of one mutated frame: see `outcome`."""
    chance = random.Random(seed)
    kind, data = chance.choice(_known())
    return outcome(kind, changed(data, chance))


@functools.cache
def _known() -> tuple[Input, ...]:
    return *SOUND, *kept("frames", READ_AS)


@contextlib.contextmanager
def target() -> Iterator[Target]:
    """For `coverage_guided`."""
    yield Target(sound=SOUND, lasting=lambda _kind: True, changed=changed, outcome=outcome)


def _places(value: Any, most: int = _MOST_PLACES) -> list[_Place]:
    """Those in it, from the root inwards."""
    waiting, found = [value], list[_Place]()
    while waiting and len(found) < most:
        holder = waiting.pop()
        is_object = isinstance(holder, dict)
        found += [(holder, key) for key in (holder if is_object else range(len(holder)))]
        values = holder.values() if is_object else holder
        waiting += [each for each in values if isinstance(each, dict | list)]
    return found[:most]


def _replace(places: list[_Place], chance: random.Random) -> None:
    holder, key = chance.choice(places)
    holder[key] = _copied(chance.choice(ODD))


def _swap(places: list[_Place], chance: random.Random) -> None:
    (holder, key), (other, other_key) = chance.choice(places), chance.choice(places)
    holder[key] = _copied(other[other_key])


def _remove(places: list[_Place], chance: random.Random) -> None:
    holder, key = chance.choice(places[1:] or places)
    if holder is not places[0][0]:
        del holder[key]


def _add(places: list[_Place], chance: random.Random) -> None:
    holder, key = chance.choice(places[1:] or places)
    if isinstance(holder, dict):
        holder[chance.choice(("extra", "", "call", "kind", "é" * 70))] = _copied(chance.choice(ODD))
    elif holder is not places[0][0]:
        holder.insert(key, _copied(holder[key]))


def _repeat(places: list[_Place], chance: random.Random) -> None:
    holder, key = chance.choice(places)
    if isinstance(holder[key], list):
        most = min(
            _MOST_PLACES // (1 + len(_places([holder[key]]))),
            _MOST_BYTES // len(_written(holder[key])),
        )
        times = min(most, chance.choice((2, 65, 1025, 4097)))
        holder[key] = _copied(holder[key] * times)  # none is another
    elif isinstance(holder[key], str) and len(holder[key]) < 1000:
        holder[key] *= chance.choice((2, 1025))


def _wrap(places: list[_Place], chance: random.Random) -> None:
    holder, key = chance.choice(places)
    for _ in range(chance.choice((1, 1, 2, 200))):
        holder[key] = chance.choice(([holder[key]], {"a": holder[key]}))


def _count(places: list[_Place], chance: random.Random) -> None:
    """A number a little off, or far."""
    numbers = [(h, k) for h, k in places if type(h[k]) in (int, float)]
    if numbers:
        holder, key = chance.choice(numbers)
        holder[key] = chance.choice(
            (
                holder[key] + 1,
                holder[key] - 1,
                -holder[key],
                holder[key] * 1000,
                holder[key] % 1000 + 0.5,
            )
        )


_CHANGES: tuple[Callable[[list[_Place], random.Random], None], ...] = (
    _replace, _replace, _swap, _remove, _add, _repeat, _wrap, _count, _count,
)  # fmt: skip


def main() -> None:
    """Try many, and say what became of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    outcomes: Counter[str] = Counter()
    began_s, slowest_s, slowest = time.perf_counter(), 0.0, 0
    for number in range(given.count):
        seed = (given.seed << 40) + number
        start_s = time.perf_counter()
        try:
            outcomes[try_decoder(seed)] += 1
        except BaseException:
            print(f"seed {seed} failed")
            raise
        took_s = time.perf_counter() - start_s
        if took_s > slowest_s:
            slowest_s, slowest = took_s, seed
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(
        f"{given.count} frames in {time.perf_counter() - began_s:.0f} s: {dict(outcomes)}; the "
        f"slowest took {1e3 * slowest_s:.0f} ms (seed {slowest}), with at most {peak} MiB"
    )


if __name__ == "__main__":
    main()
