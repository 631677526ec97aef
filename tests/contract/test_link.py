"""What every link promises, checked on each implementation."""

import threading
from collections.abc import Callable
from functools import partial

import ml_dtypes
import numpy as np
import pytest

from edge.transport import EAGER_BYTES, ChannelClosedError, Link, PeerLostError, ProtocolError
from edge.transport.testing import Fault, FaultyLink
from tests.support.transport_pairs import LINK_KINDS, in_threads, link_pair

pytestmark = pytest.mark.parametrize("kind", LINK_KINDS)

LARGE = 24 << 20
"""More bytes than any socket's buffers take in."""


def raised(call: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011  what it is, the caller checks
        call()
    return caught.value


@pytest.mark.parametrize(
    "array",
    [
        np.arange(2048, dtype=np.float32),
        np.arange(24, dtype=np.int64).reshape(2, 3, 4),
        np.array(7.5, np.float64),
        np.zeros((0, 5), np.float32),
        np.arange(9).astype(ml_dtypes.bfloat16),
        np.arange(LARGE, dtype=np.uint8),
    ],
    ids=lambda array: f"{array.dtype}{list(array.shape)}",
)
def test_an_array_arrives_as_it_was(kind: str, array: np.ndarray) -> None:
    into = np.empty_like(array)
    with link_pair(kind) as (first, second):
        assert in_threads([lambda: first.send(array), lambda: second.receive(into)]) == [None] * 2
    assert into.tobytes() == array.tobytes()


@pytest.mark.parametrize(
    ("to_second", "to_first"),
    [(8192, 8192), (0, 0), (0, LARGE), (LARGE, 3), (LARGE, LARGE // 2), (LARGE + 1, LARGE)],
)
def test_an_exchange_of_any_sizes_ends(kind: str, to_second: int, to_first: int) -> None:
    source_a, source_b = np.full(to_second, 3, np.uint8), np.full(to_first, 5, np.uint8)
    target_a, target_b = np.zeros(to_first, np.uint8), np.zeros(to_second, np.uint8)
    with link_pair(kind) as (first, second):
        for _ in range(2):
            done = in_threads(
                [
                    lambda: first.exchange(source_a, target_a),
                    lambda: second.exchange(source_b, target_b),
                ]
            )
            assert done == [None, None]
    assert (target_b == 3).all()
    assert (target_a == 5).all()


@pytest.mark.parametrize("size", [16, LARGE])
def test_an_exchange_meets_a_send_and_a_receive(kind: str, size: int) -> None:
    source, target, other = (np.full(size, fill, np.uint8) for fill in (3, 0, 0))

    def send_and_receive(link: Link) -> None:
        link.receive(other)
        link.send(source)

    with link_pair(kind) as (first, second):
        done = in_threads(
            [lambda: first.exchange(source, target), lambda: send_and_receive(second)]
        )
        assert done == [None, None]
    assert (target == 3).all()
    assert (other == 3).all()


def test_messages_keep_their_order_and_borders(kind: str) -> None:
    with link_pair(kind) as (first, second):
        for number in range(200):
            first.send(np.full(number % 7, number, np.int32))
        for number in range(200):
            into = np.zeros(number % 7, np.int32)
            second.receive(into)
            assert (into == number).all()


def test_small_sends_do_not_wait_for_the_peer(kind: str) -> None:
    """Both send first and receive then, in one thread: it would block for ever otherwise."""
    array = np.arange(EAGER_BYTES, dtype=np.uint8)
    into = np.empty_like(array)
    with link_pair(kind) as (first, second):
        for _ in range(20):
            first.send(array)
            second.send(array)
            first.receive(into)
            second.receive(into)


def test_one_thread_may_send_while_another_receives(kind: str) -> None:
    array = np.ones(LARGE, np.uint8)
    into = [np.zeros(LARGE, np.uint8), np.zeros(LARGE, np.uint8)]
    with link_pair(kind) as (first, second):
        done = in_threads(
            [
                lambda: first.send(array),
                lambda: first.receive(into[0]),
                lambda: second.send(array),
                lambda: second.receive(into[1]),
            ]
        )
    assert done == [None] * 4
    assert all(one.all() for one in into)


def test_both_ends_tell_how_many_messages_were_begun_and_came(kind: str) -> None:
    """Who sends counts from the first byte on, who receives to the last."""
    source, target = np.ones(LARGE, np.uint8), np.zeros(LARGE, np.uint8)
    with link_pair(kind) as (first, second):
        sending = threading.Thread(target=lambda: first.send(source))
        sending.start()
        while not first.state().sent:
            pass
        assert second.state().received == 0
        second.receive(target)
        sending.join()
        in_threads(
            [lambda: first.exchange(source, target), lambda: second.exchange(target, source)]
        )
        for each, (sent, received) in ((first, (2, 1)), (second, (1, 2))):
            state = each.state()
            assert (state.sent, state.received, state.silent_s) == (sent, received, 0.0)
        first.close()
        assert first.state().sent == 2


@pytest.mark.linux_ways
def test_who_waits_in_vain_knows_for_how_long(kind: str) -> None:
    if kind == "memory":
        pytest.skip("only the system knows it")
    with link_pair(kind) as (first, second):
        waiting = threading.Thread(target=lambda: second.receive(np.zeros(1)))
        waiting.start()
        while not second.state().silent_s:
            pass
        assert first.state().silent_s == 0
        first.send(np.ones(1))
        waiting.join()
        assert second.state().silent_s == 0


def test_an_array_that_cannot_be_moved_as_it_lies_is_refused(kind: str) -> None:
    strided = np.zeros((4, 4), np.float32).T[:2]
    fixed = np.zeros(4, np.float32)
    fixed.flags.writeable = False
    good = np.ones(4, np.float32)
    with link_pair(kind) as (first, second):
        for call in (
            lambda: first.send(strided),
            lambda: first.receive(strided),
            lambda: first.receive(fixed),
            lambda: first.exchange(strided, good),
            lambda: first.exchange(good, fixed),
        ):
            assert isinstance(raised(call), ValueError)
        first.send(good)  # Nothing went out, so the link is as good as before.
        into = np.zeros(4, np.float32)
        second.receive(into)
        assert into.all()


@pytest.mark.parametrize("sent", [0, 7, 9, LARGE])
def test_a_message_of_another_size_is_refused(kind: str, sent: int) -> None:
    beyond = np.full(16, 42, np.uint8)
    into = beyond[:8]
    with link_pair(kind) as (first, second):
        sender, receiver = in_threads(
            [lambda: first.send(np.zeros(sent, np.uint8)), lambda: second.receive(into)]
        )
        assert isinstance(receiver, ProtocolError)
        assert "8 were expected" in str(receiver)
        assert sender is None or isinstance(sender, PeerLostError)
        assert (beyond[8:] == 42).all()
        assert isinstance(raised(lambda: second.receive(into)), ProtocolError)
        assert isinstance(raised(lambda: first.receive(into)), PeerLostError)


def test_a_silent_peer_is_lost_after_the_timeout(kind: str) -> None:
    into = np.zeros(8, np.uint8)
    calls: list[Callable[[Link], None]] = [
        lambda link: link.receive(into),
        lambda link: link.send(np.zeros(LARGE, np.uint8)),
        lambda link: link.exchange(np.zeros(8, np.uint8), into),
        lambda link: link.exchange(np.zeros(LARGE, np.uint8), into),
    ]
    for call in calls:
        with link_pair(kind, timeout_s=0.05) as (first, _):
            for _ in range(2):  # Once lost, it stays lost.
                error = raised(partial(call, first))
                assert isinstance(error, PeerLostError)
                assert error.peer == "second"
                assert "0.05 s" in error.reason


def test_a_peer_that_closes_is_lost_after_what_it_sent(kind: str) -> None:
    into = np.zeros(8, np.uint8)
    with link_pair(kind) as (first, second):
        second.send(np.ones(8, np.uint8))
        second.close()
        first.receive(into)
        assert into.all()
        assert isinstance(raised(lambda: first.receive(into)), PeerLostError)
        assert isinstance(raised(lambda: first.exchange(into, into.copy())), PeerLostError)


BLOCKING_CALLS: dict[str, Callable[[Link], None]] = {
    "receive": lambda link: link.receive(np.zeros(8, np.uint8)),
    "send": lambda link: link.send(np.zeros(LARGE, np.uint8)),
    "small exchange": lambda link: link.exchange(np.zeros(8, np.uint8), np.zeros(8, np.uint8)),
    "large exchange": lambda link: link.exchange(np.zeros(LARGE, np.uint8), np.zeros(8, np.uint8)),
}


def blocked(link: Link, call: Callable[[Link], None]) -> tuple[threading.Thread, list[Exception]]:
    """A thread inside ``call``, which cannot return by itself; what it raises ends up in the list.

    That it is inside shows in that the link lets no other thread in.
    """
    errors: list[Exception] = []

    def run() -> None:
        try:
            call(link)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    guard = link._guard  # type: ignore[attr-defined]
    while not (guard._has_sender or guard._has_receiver):
        assert thread.is_alive()
    return thread, errors


@pytest.mark.parametrize("name", BLOCKING_CALLS)
def test_a_close_from_another_thread_ends_a_blocked_call(kind: str, name: str) -> None:
    with link_pair(kind) as (first, _):
        thread, errors = blocked(first, BLOCKING_CALLS[name])
        first.close()
        first.close()
        thread.join()
        assert [type(error) for error in errors] == [ChannelClosedError]
        assert isinstance(raised(lambda: first.send(np.zeros(1))), ChannelClosedError)
        assert isinstance(raised(lambda: first.receive(np.zeros(1))), ChannelClosedError)


@pytest.mark.parametrize("name", BLOCKING_CALLS)
def test_a_peer_that_closes_ends_a_blocked_call(kind: str, name: str) -> None:
    with link_pair(kind) as (first, second):
        thread, errors = blocked(first, BLOCKING_CALLS[name])
        second.close()
        thread.join()
        assert [type(error) for error in errors] == [PeerLostError]


def test_two_threads_cannot_receive_at_once(kind: str) -> None:
    with link_pair(kind) as (first, second):
        thread, errors = blocked(first, BLOCKING_CALLS["receive"])
        error = raised(lambda: first.receive(np.zeros(8, np.uint8)))
        assert isinstance(error, RuntimeError)
        second.send(np.ones(8, np.uint8))
        thread.join()
        assert errors == []


def test_a_link_broken_on_purpose_is_lost_on_both_sides(kind: str) -> None:
    into = np.zeros(8, np.uint8)
    with link_pair(kind) as (first, second):
        faulty = FaultyLink(first, Fault.LOSE, after_calls=1)
        faulty.send(np.ones(8, np.uint8))
        assert isinstance(raised(lambda: faulty.send(into)), PeerLostError)
        assert isinstance(raised(lambda: faulty.receive(into)), PeerLostError)
        second.receive(into)
        assert into.all()
        assert isinstance(raised(lambda: second.receive(into)), PeerLostError)


def test_dropped_and_truncated_messages(kind: str) -> None:
    array, into = np.ones(8, np.uint8), np.zeros(8, np.uint8)
    with link_pair(kind, timeout_s=0.05) as (first, second):
        second.send(array)
        FaultyLink(first, Fault.DROP).exchange(array, into)
        assert into.all()
        assert isinstance(raised(lambda: second.receive(into)), PeerLostError)
    with link_pair(kind) as (first, second):
        FaultyLink(first, Fault.TRUNCATE).send(array)
        assert isinstance(raised(lambda: second.receive(into)), ProtocolError)
