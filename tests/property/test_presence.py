"""Who is there: the same whatever the order, however late and often news come."""

from __future__ import annotations

from functools import reduce

from hypothesis import given
from hypothesis import strategies as st

from edge.membership.presence import Broke, Heard, Missed, Presence, Sighting


def sightings(latest: int = 12) -> st.SearchStrategy[Sighting]:
    epoch, number = st.integers(1, 6), st.integers(0, latest)
    return st.one_of(
        st.builds(Heard, id=st.just("a"), epoch=epoch, number=number, is_leaving=st.booleans()),
        st.builds(Missed, id=st.just("a"), epoch=epoch, number=number),
        st.builds(Broke, id=st.just("a"), epoch=epoch, number=number),
    )


def known(*events: Sighting) -> Presence:
    return reduce(Presence.seen, events, Presence())


@given(st.lists(sightings(), max_size=24), st.randoms(use_true_random=False))
def test_order_duplicates_and_delays_change_nothing(events: list[Sighting], random: object) -> None:
    other = [*events, *events[::2]]
    random.shuffle(other)  # type: ignore[attr-defined]
    one, two = known(*events), known(*other)
    assert one == two
    assert (one.state, one.copies, one.losses) == (two.state, two.copies, two.losses)
    # And what two observers' halves know together is what one knows of all.
    half = len(events) // 2
    assert known(*events[:half]) | known(*events[half:]) == one


@given(st.lists(sightings(), max_size=16), st.lists(sightings(), max_size=16))
def test_who_has_left_never_comes_back_without_a_new_start(
    before: list[Sighting], after: list[Sighting]
) -> None:
    events: list[Sighting] = [*before, Heard(id="a", epoch=6, number=5, is_leaving=True)]
    events += [Missed(id="a", epoch=6, number=6)]
    found = known(*events, *after)
    assert found.incarnations[6].state == "left"
    assert found.current is not None
    assert found.current.epoch != 6 or found.state == "left"


@given(st.lists(sightings(9), max_size=16))
def test_late_news_of_an_earlier_start_are_no_ghost(late: list[Sighting]) -> None:
    """Whatever was seen before the last start was, it is the one that counts."""
    old = [each for each in late if each.epoch < 6]
    started = Heard(id="a", epoch=6, number=10)
    assert known(started, *old).current == known(started).current
    left: list[Sighting] = [started, Heard(id="a", epoch=6, number=11, is_leaving=True)]
    left += [Missed(id="a", epoch=6, number=12)]
    assert known(*left, *old).state == "left"


@given(st.lists(sightings(), max_size=24))
def test_at_most_one_is_used_and_none_of_the_others_is_earlier(events: list[Sighting]) -> None:
    found = known(*events)
    assert len(found.incarnations) <= 4
    current = found.current
    for each in found.copies:
        assert current is not None
        assert each.epoch != current.epoch
        assert (current.first or 0) <= (each.first or 0)


def test_the_life_of_a_device() -> None:
    def at(number: int, epoch: int = 1, *, leaves: bool = False) -> Heard:
        return Heard(id="a", epoch=epoch, number=number, is_leaving=leaves)

    assert known().state == "unknown"
    assert known(at(1)).state == "alive"
    assert known(at(1), Missed(id="a", epoch=1, number=2)).state == "silent"
    silent = [Missed(id="a", epoch=1, number=number) for number in (2, 3)]
    assert known(at(1), *silent).state == "lost"
    assert known(at(1), *silent, at(4)).state == "alive"
    broke = known(at(1), Broke(id="a", epoch=1, number=1), at(2))
    assert (broke.state, broke.losses) == ("alive", 1)
    assert known(at(1), at(2, leaves=True)).state == "leaving"
    assert known(at(1), at(2, leaves=True), silent[1], at(5)).state == "left"
    again = known(at(1), at(2, leaves=True), at(3, epoch=2))
    assert (again.state, again.losses, again.copies) == ("alive", 0, ())
    crashed = known(at(1), at(2, epoch=2), at(3, epoch=3))
    assert (crashed.state, crashed.losses, crashed.copies) == ("alive", 2, ())


def test_of_two_with_the_same_keys_the_first_is_used_as_long_as_it_is_there() -> None:
    first = [Heard(id="a", epoch=7, number=number) for number in (1, 2, 3, 4)]
    copy = [Heard(id="a", epoch=9, number=number) for number in (2, 3, 4)]
    older = [Heard(id="a", epoch=5, number=number) for number in (2, 3, 4)]
    for others in (copy, older, [*copy, *older]):
        found = known(*first, *others)
        assert found.current is not None
        assert found.current.epoch == 7
        assert {each.epoch for each in found.copies} == {each.epoch for each in others}
    gone = known(*first, *copy, *(Missed(id="a", epoch=7, number=number) for number in (5, 6)))
    assert gone.current is not None
    assert (gone.current.epoch, gone.copies) == (9, ())
