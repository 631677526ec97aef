"""Who takes which seat: every seat one device, no device twice. Knows ids only."""

from collections.abc import Iterator, Sequence
from itertools import combinations, islice

_MOST_SETS = 256
"""Sets of seats that are looked at where not all of them are taken."""

_MOST_OF_A_SET = 4
"""Ways that one of these sets is taken."""

_OPTIONS_KEPT = 4
"""Devices that are considered for a seat, the first of them, where more than there are seats."""


def all_seats_taken(options: Sequence[Sequence[str]], *, most: int) -> list[tuple[str, ...]]:
    """Ways to give each seat one of its options, at most `most`; those first that come first there.

    None at all only where there is none.
    """
    # With as many options as there are seats, one is always left for a seat.
    kept = max(len(options), _OPTIONS_KEPT)
    return list(islice(_taken([each[:kept] for each in options], ()), most))


def some_seats_taken(
    options: Sequence[Sequence[str]], *, most: int
) -> Iterator[tuple[str | None, ...]]:
    """Ways to leave at least one of the seats empty, at most `most`; those with few empty first."""
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
    """Seat after seat, and only where the seats after it can still be taken: no way is tried in
    vain."""
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
