"""Who is in memory, by examples."""

from __future__ import annotations

import pytest

from edge.scheduling.residency import Residency, Settled
from edge.scheduling.resident import Resident
from edge.scheduling.start_line import MOST_OVERTAKEN


def residency(
    *, memory: int = 30, disk: int = 100, longest: int | None = None, page: int = 1
) -> Residency:
    return Residency(
        memory_tokens=memory,
        disk_tokens=disk,
        longest_tokens=longest,
        requests=8,
        quantum_tokens=5,
        held=lambda tokens: -(-tokens // page) * page,
    )


def joined(found: Residency, name: str, length: int, longest: int) -> Resident:
    member = Resident(name, length, longest)
    found.join(member)
    return member


def came(*names: str) -> Settled:
    return Settled(came=names)


def reserve(name: str, tokens: int) -> Settled:
    return Settled(reserve={name: tokens})


NOTHING = Settled()


def test_alone_a_request_gets_all_it_may_want() -> None:
    found = residency()
    a = joined(found, "a", 10, 28)
    assert found.settle() == came("a")
    assert (a.place, a.room, a.held) == ("memory", 28, 28)
    assert found.settle() == NOTHING


def test_who_comes_takes_what_another_does_not_need_yet() -> None:
    found = residency()
    a = joined(found, "a", 10, 28)
    found.settle()
    b = joined(found, "b", 10, 28)
    assert found.awaits_room
    a.steps_out = 1
    assert found.settle() == NOTHING, "a run may use its room"
    a.steps_out = 0
    assert found.settle() == came("b")
    assert (a.room, b.room) == (15, 15)
    assert not found.awaits_room


def test_who_had_a_turn_goes_to_disk_and_comes_back() -> None:
    found = residency(memory=36)
    a, b = joined(found, "a", 10, 28), joined(found, "b", 10, 28)
    found.settle()
    c = joined(found, "c", 10, 28)
    assert found.settle() == NOTHING
    assert c.place == "new", "nobody had a turn yet"
    a.length = b.length = 16
    assert found.settle() == Settled(swap_out=("a",)), "the first that came"
    assert found.settle() == NOTHING
    assert (a.place, b.can_step) == ("swapping out", False)
    found.swapped_out(a, moved=True)
    assert found.settle() == Settled(came=("c",), swap_out=("b",)), "b leaves for a"
    assert (a.place, c.place) == ("disk", "memory")
    found.swapped_out(b, moved=True)
    assert found.settle() == NOTHING, "a is not new"
    assert (a.place, a.room, b.place) == ("memory", 21, "disk")


def test_a_disk_without_room_lets_requests_wait() -> None:
    found = residency()
    a, b = joined(found, "a", 10, 15), joined(found, "b", 10, 15)
    found.settle()
    c = joined(found, "c", 10, 15)
    found.settle()
    a.length = 16  # of a longest of 15: it ends now
    assert found.settle() == Settled(swap_out=("a",))
    found.swapped_out(a, moved=False)
    assert found.settle() == NOTHING
    assert (a.place, c.place) == ("memory", "new")
    found.leave(a)
    assert found.settle() == came("c")
    assert b.can_step


def test_when_nobody_can_go_on_one_must_give_up() -> None:
    found = residency()
    a, b = joined(found, "a", 10, 28), joined(found, "b", 10, 28)
    found.settle()
    a.length = b.length = 16
    assert found.settle() == Settled(swap_out=("a",))
    found.swapped_out(a, moved=False)
    assert found.settle() == Settled(stuck="b")
    found.leave(b)
    assert found.settle() == NOTHING
    assert a.can_step


def test_one_that_is_too_long_has_all_memory_for_itself() -> None:
    found = residency(longest=60)
    a, long = joined(found, "a", 10, 28), joined(found, "long", 40, 60)
    assert found.settle() == came("a")
    a.length = 16
    assert found.settle() == Settled(swap_out=("a",))
    found.swapped_out(a, moved=True)
    assert found.settle() == reserve("long", 45), "the disk may be full"
    assert long.place == "reserving"
    assert found.settle() == NOTHING
    found.reserved(long)
    assert found.settle() == came("long")
    assert (long.held, long.room, long.reserved) == (30, 45, 45)
    long.length = 46
    assert found.settle() == Settled(swap_out=("long",))


def test_one_that_grows_beyond_memory_reserves_turn_by_turn() -> None:
    found = residency(longest=60)
    long = joined(found, "long", 10, 60)
    assert found.settle() == came("long")
    for length, room in ((16, 21), (22, 27)):
        long.length = length
        assert found.settle() == NOTHING
        assert (long.can_step, long.room) == (True, room)
    for length, room in ((28, 33), (34, 39)):
        long.length = length
        assert found.settle() == reserve("long", room)
        assert not long.can_step
        found.reserved(long)
        found.settle()
        assert (long.can_step, long.room) == (True, room)


def test_who_finds_no_room_on_disk_leaves_it_to_the_others() -> None:
    found = residency(longest=60)
    long, a = joined(found, "long", 40, 60), joined(found, "a", 10, 28)
    assert found.settle() == reserve("long", 45)
    found.leave(long)
    assert found.settle() == came("a")
    assert a.can_step
    with pytest.raises(ValueError, match="was to reserve nothing"):
        found.reserved(a)


@pytest.mark.parametrize(
    ("disk", "longest", "most"), [(0, 60, 30), (100, None, 30), (100, 60, 60), (50, 60, 50)]
)
def test_what_could_never_start(disk: int, longest: int | None, most: int) -> None:
    found = residency(disk=disk, longest=longest)
    joined(found, "a", 1, most)
    with pytest.raises(ValueError, match=f"{most + 1} tokens never fit into {most}"):
        joined(found, "b", 1, most + 1)


def test_no_more_start_than_the_disk_could_take_at_once() -> None:
    found = residency(disk=50)
    a, b = joined(found, "a", 1, 28), joined(found, "b", 1, 28)
    assert found.settle() == came("a")
    assert not found.awaits_room
    found.leave(a)
    assert found.settle() == came("b")
    assert b.room == 28


def test_requests_hold_whole_pages_of_memory() -> None:
    """Three of two tokens would fit, of which each takes ten."""
    found = residency(memory=25, disk=0, page=10)
    a, b, c = (joined(found, name, 1, 2) for name in "abc")
    assert found.settle() == came("a", "b")
    assert (a.held, a.room, b.held) == (10, 2, 10)
    found.leave(a)
    assert found.settle() == came("c")
    found.leave(b)
    found.leave(c)
    d = joined(found, "d", 21, 25)
    assert found.settle() == came("d"), "alone it may take all there is"
    assert d.room == 25


def kept(found: Residency, *names: str) -> None:
    """Requests that leave caches of ten tokens."""
    for name in names:
        member = joined(found, name, 10, 10)
        found.shares.come(member.who)
        found.settle()
        assert found.keep(member)


def test_what_is_cheap_to_compute_again_goes_first() -> None:
    found = Residency(memory_tokens=100, requests=8, most_kept=3)
    costs = {"a": 12.0, "b": 30.0, "c": 4.0, "d": 12.0}
    kept(found, "a", "b", "c", "d")
    assert found.kept.evict(lambda name, _others: costs[name]) == ("c",)
    kept(found, "e")
    costs["e"] = 12.0
    assert found.kept.evict(lambda name, _others: costs[name], ["a"]) == ("d",)
    assert set(found.kept) == {"a", "b", "e"}


def test_what_is_dear_and_not_used_goes_in_the_end() -> None:
    """Unless it is used now and then."""
    found = Residency(memory_tokens=100, requests=8, most_kept=3)

    def cost(name: str, _others: object) -> float:
        return 50.0 if name in {"dear", "used"} else 10.0

    kept(found, "dear", "used")
    lasted = 0
    while "dear" in found.kept:
        kept(found, f"n{lasted}")
        found.kept.evict(cost)
        found.kept.used("used")
        lasted += 1
    assert 4 < lasted < 20
    assert "used" in found.kept


def test_who_begins_with_what_is_there_starts_first_but_overtakes_nobody_for_ever() -> None:
    found = Residency(memory_tokens=20, requests=1)
    found.found = lambda name: int(name.startswith("like"))
    members = [joined(found, name, 5, 10) for name in ("other", "another")]
    members += [joined(found, f"like {number}", 5, 10) for number in range(2 * MOST_OVERTAKEN)]
    found.shares.come(members[0].who)
    order: list[str] = []
    while True:
        came = found.settle().came
        if not came:
            break
        order += came
        (member,) = [each for each in members if each.request in came]
        found.leave(member)
    assert order[:3] == ["like 0", "like 1", "like 2"]
    assert MOST_OVERTAKEN - 2 <= order.index("other") <= MOST_OVERTAKEN
    assert len(order) == len(members)


def test_no_prefix_is_looked_up_while_no_request_may_start() -> None:
    """A lookup compares the prompt with every cache, on the loop of all answers."""
    found, looked_up = Residency(memory_tokens=1000, requests=2), 0

    def count(_request: str) -> int:
        nonlocal looked_up
        looked_up += 1
        return 0

    found.found = count
    for number in range(9):
        resident = Resident(f"r{number}", 10, 20)
        found.shares.come(resident.who)
        found.join(resident)
    found.settle()
    looked_up = 0
    for _ in range(5):
        found.settle()
    assert looked_up == 0


def test_memory_may_have_another_unit_than_tokens() -> None:
    """As of requests that each have a window beside their tokens."""
    found = Residency(
        memory_tokens=30, requests=8, held=lambda tokens: 2 * tokens + 10, memory=70, most_kept=4
    )
    with pytest.raises(ValueError, match="31 tokens never fit into 30"):
        found.join(Resident("z", 10, 31))
    a, b, c = (joined(found, name, 5, 10) for name in "abc")
    assert found.settle() == came("a", "b"), "30 each"
    found.leave(a)
    assert found.settle() == came("c")
    assert (b.held, c.held) == (30, 30)
    found.leave(b)
    found.leave(c)
    alone = joined(found, "d", 30, 30)
    assert found.settle() == came("d")
    assert alone.held == 70
