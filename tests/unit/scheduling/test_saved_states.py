"""Which states stay saved, and behind which tokens more are saved."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge.scheduling.saved_states import Save, SavedStates


def tokens(count: int, last: int = 0) -> NDArray[np.int64]:
    """All begin alike, but for the last one."""
    found = np.arange(count)
    found[-1] += last
    return found


def test_a_place_is_taken_that_is_worth_least() -> None:
    """By what would have to be computed once more from the nearest state before it."""
    saved = SavedStates(3)
    assert saved.save("a", tokens(500)) == (Save(request="a", tokens=500, place=0), None)
    assert saved.save("a", tokens(540)) == (Save(request="a", tokens=540, place=1), None)
    assert saved.save("b", tokens(300, 7)) == (Save(request="b", tokens=300, place=2), None)
    assert saved.save("c", tokens(400, 7)) == (Save(request="c", tokens=400, place=1), None)
    assert [saved.last("a", most) for most in (499, 500, 900)] == [0, 500, 500]
    saved.used("b", 300)  # now, as it were: 40 tokens are worth little
    assert saved.save("d", tokens(700, 7))[1] == "b"
    assert saved.last("b", 900) == 0


def test_what_was_not_used_for_long_goes() -> None:
    saved = SavedStates(2)
    saved.save("long", tokens(300))
    for number in range(1, 20):
        gone = saved.save(f"short {number}", tokens(100, number))[1]
        if gone == "long":
            break
    assert 3 < number < 8
    assert saved.save("short 99", tokens(100, 99))[1] == f"short {number - 1}"


def test_states_go_where_requests_go() -> None:
    saved = SavedStates(4)
    for count in (100, 200, 300):
        saved.save("a", tokens(count))
    saved.move("a", "b", 200)
    assert [saved.last(name, 900) for name in "ab"] == [0, 200]
    assert saved.save("b", tokens(200))[0].place == 1, "there already"
    saved.drop("b")
    saved.drop("nobody")
    assert saved.last("b", 900) == 0
    assert {saved.save("c", tokens(count))[0].place for count in (1, 2, 3, 4)} == {0, 1, 2, 3}


def test_states_on_the_way_through_a_prompt() -> None:
    """Near its end, and a few times before where it is long: half of the places at the most."""
    saved = SavedStates(4)
    assert saved.on_the_way(0, 3, 256) == [0]
    assert saved.on_the_way(0, 300, 256) == [296]
    assert saved.on_the_way(0, 2900, 256) == [2896]
    assert saved.on_the_way(0, 4100, 256) == [2048, 4096]
    assert saved.on_the_way(2000, 4100, 256) == [4096]
    long = saved.on_the_way(0, 32_004, 256)
    assert long == [10_752, 21_504, 32_000]
    assert not any(each % 256 for each in long)
    assert SavedStates(1).on_the_way(0, 32_004, 256) == [32_000]
    assert not SavedStates(1).saves_ends
