"""When a link counts as dead whose ends both live."""

from __future__ import annotations

from edge.runs.dead_links import STALLED_AFTER_S, DeadLinks, Silence

X, Y = (1, 0), (0, 0)


def told(
    stalls: DeadLinks, *, received: int, since_s: float, sent: int, now_s: float
) -> float | None:
    stalls.waits(X, Y, Silence(received=received, since_s=since_s))
    return stalls.began(X, Y, sent, now_s=now_s)


def test_what_was_sent_and_does_not_come_is_told_in_time() -> None:
    stalls = DeadLinks()
    assert told(stalls, received=4, since_s=0.0, sent=5, now_s=1.0) is None
    assert told(stalls, received=4, since_s=0.0, sent=5, now_s=1.9) is None
    found = told(stalls, received=4, since_s=0.0, sent=5, now_s=1.0 + STALLED_AFTER_S)
    assert found is not None
    assert found >= STALLED_AFTER_S


def test_who_has_sent_nothing_more_may_take_for_ever() -> None:
    stalls = DeadLinks()
    for now_s in range(1, 100):
        assert told(stalls, received=4, since_s=0.0, sent=4, now_s=float(now_s)) is None


def test_bytes_that_come_slowly_are_a_sign_of_life() -> None:
    stalls = DeadLinks()
    for now_s in range(2, 100, 2):
        arrived_s = now_s - 1.5  # of one long message
        assert told(stalls, received=4, since_s=arrived_s, sent=5, now_s=float(now_s)) is None


def test_each_message_is_waited_for_anew() -> None:
    stalls = DeadLinks()
    for number in range(50):
        now_s = float(number)
        assert told(stalls, received=number, since_s=0.0, sent=number + 1, now_s=now_s) is None


def test_both_ways_of_a_link_are_two() -> None:
    stalls = DeadLinks()
    assert told(stalls, received=4, since_s=0.0, sent=5, now_s=1.0) is None
    stalls.waits(Y, X, Silence(received=4, since_s=0.0))
    assert stalls.began(Y, X, 5, now_s=9.0) is None
