"""Assignments of devices to seats: one device for each seat, no device twice. Knows ids only."""

from collections.abc import Iterator, Sequence
from itertools import combinations, islice

_MOST_SETS = 256
"""The most subsets of seats that are tried where some stay empty."""

_MOST_OF_A_SET = 4
"""The most assignments that are tried for one subset."""

_OPTIONS_KEPT = 4
"""The first devices of each seat that are considered; as many as there are seats if that is
more."""


def all_seats_taken(options: Sequence[Sequence[str]], *, most: int) -> list[tuple[str, ...]]:
    """At most `most` assignments of each seat to one of its options, earlier options first.

    Empty only where no assignment exists.
    """
    # With at least as many options as seats, every seat can have one.
    kept = max(len(options), _OPTIONS_KEPT)
    return list(islice(_taken([each[:kept] for each in options], ()), most))


def some_seats_taken(
    options: Sequence[Sequence[str]], *, most: int
) -> Iterator[tuple[str | None, ...]]:
    """At most `most` assignments with an empty seat, those with the fewest empty seats first."""
    return islice(_partly(options), most)


def _partly(options: Sequence[Sequence[str]]) -> Iterator[tuple[str | None, ...]]:
    seats = range(len(options))
    spare = len({device for each in options for device in each})
    for count in range(min(spare, len(options) - 1), 0, -1):
        for chosen in islice(combinations(seats, count), _MOST_SETS):
            own = [options[seat] for seat in chosen]
            for taken in all_seats_taken(own, most=_MOST_OF_A_SET):
                by_seat = dict(zip(chosen, taken, strict=True))
                yield tuple(by_seat.get(seat) for seat in seats)
    yield (None,) * len(options)


def _taken(options: Sequence[Sequence[str]], used: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Assignments in order of seats. A device is tried only where the seats after it can still be
    filled, so no branch is empty."""
    if len(used) == len(options):
        yield used
        return
    for device in options[len(used)]:
        if device not in used and _matches(options[len(used) + 1 :], {*used, device}):
            yield from _taken(options, (*used, device))


def _matches(options: Sequence[Sequence[str]], used: set[str]) -> bool:
    """Whether every seat can have a device of its own (H. W. Kuhn's augmenting paths, 1955)."""
    holder: dict[str, int] = {}

    def find(seat: int, seen: set[str]) -> bool:
        for device in options[seat]:
            if device not in used and device not in seen:
                seen.add(device)
                if device not in holder or find(holder[device], seen):
                    holder[device] = seat
                    return True
        return False

    return all(find(seat, set()) for seat in range(len(options)))
