"""What is told of peers between one look and the next."""

from __future__ import annotations

from dataclasses import replace

from edge.api.watching import changes
from edge.cli.commands.peers import change_in_words
from tests.support.peer_infos import hosted_model, peer_info

MODEL = hosted_model()

A, B = (peer_info(name, memory_bytes=2 << 30, model_free_bytes=1 << 30) for name in "ab")


def words(*looks: list[object]) -> list[str]:
    before, after = looks
    return [change_in_words(each) for each in changes(before, after)]  # type: ignore[arg-type]


def test_who_comes_and_who_goes() -> None:
    assert words([A], [B]) == [
        "a is gone",
        "b is there: 127.0.0.1:1, ort on CPU, 1 threads, 1.0 GiB of 2.0 GiB free, runs –",
    ]


def test_what_is_loaded_and_what_ends() -> None:
    busy = replace(A, models=(MODEL,))
    assert words([A], [busy]) == ["a runs m int4: 1.0 GiB of 2.0 GiB free, runs m int4"]
    other = replace(A, models=(replace(MODEL, name="n"),))
    assert words([busy], [other]) == [
        "a runs n int4, no longer runs m int4: 1.0 GiB of 2.0 GiB free, runs n int4"
    ]


def test_another_budget_is_a_change_and_free_memory_is_none() -> None:
    assert words([A], [replace(A, model_free_bytes=5)]) == []
    assert words([A], [replace(A, memory_bytes=4 << 30)]) == [
        "a changes: 1.0 GiB of 4.0 GiB free, runs –"
    ]


def test_silence_is_no_departure() -> None:
    silent, lost = replace(A, silent_s=4.0), replace(A, silent_s=25.0)
    assert words([A], [silent]) == ["a is silent for 4 s: it may hang, or be cut off"]
    assert words([silent], [replace(A, silent_s=8.0)]) == []
    assert words([silent], [lost]) == ["a is lost for 25 s: it may hang, or be cut off"]
    assert words([lost], [A]) == ["a answers again: 1.0 GiB of 2.0 GiB free, runs –"]
    assert words([lost], []) == ["a is gone"]


def test_who_is_slower_than_predicted_is_told() -> None:
    well, slow = (replace(A, models=(replace(MODEL, slower=each),)) for each in (1.4, 2.14))
    assert (well.health, slow.health) == ("alive", "slow by 2.1")
    assert words([well], [slow]) == ["a is slow by 2.1: 1.0 GiB of 2.0 GiB free, runs m int4"]
    assert words([slow], [well]) == ["a is no longer slow: 1.0 GiB of 2.0 GiB free, runs m int4"]
    assert words([slow], [A]) == ["a no longer runs m int4: 1.0 GiB of 2.0 GiB free, runs –"]
