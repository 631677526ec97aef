"""Copies of keys and values go from one program to another, within what may wait to be sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from demos.bundled import MODEL
from edge.backends.host_cache import HostCache
from edge.engine.kv_copies import (
    COPIED_AFTER_S,
    LEAST_COPIED_TOKENS,
    KvCopies,
    KvCopyQuota,
    put_copy,
)
from edge.errors import ProtocolError, RequestError
from edge.protocol.assignment import COPIED_TOKENS, Copies
from edge.protocol.fields import from_json
from edge.protocol.frame_codec import Event
from edge.protocol.kv_frames import CopiedTokens, KvRows
from edge.protocol.step import MAX_CHUNK_TOKENS, Step, StepEntry, StepLimits
from edge.transport.frame import Buffer
from edge.weights.checkpoint import Checkpoint
from edge.weights.layout import shard_layout
from tests.support.plans import bundled_plan


def empty() -> HostCache:
    with Checkpoint.open(MODEL) as checkpoint:
        spec = checkpoint.spec
    layout = shard_layout(spec, bundled_plan("pipeline_2"), stage=0, rank=0)
    limits = StepLimits(context_tokens=128, chunk_tokens=8, requests=2, cached_tokens=128)
    return HostCache(layout, limits, bits=None)


def storage(tokens: int) -> HostCache:
    """Of a request "a" with random rows."""
    own = empty()
    rows = own.new_rows(tokens)
    dice = np.random.default_rng(3)
    for each in rows:
        each[...] = dice.normal(size=each.shape)
    own.put_rows("a", 0, rows)
    return own


def computed(position: int, *requests: str) -> Step:
    return Step(
        entries=tuple(
            StepEntry(request=each, position=position, tokens=(1,), logit_rows=1)
            for each in requests or ("a",)
        )
    )


def pieces_of(told: list[Event]) -> list[tuple[CopiedTokens, Buffer]]:
    return [part for each in told if isinstance(each, KvRows) for part in each.each()]


def taken(copies: KvCopies, own: HostCache, last: int) -> None:
    for position in range(last):
        copies.take(computed(position), own, now_s=0.0)


@pytest.mark.parametrize("of", ["answers", "all"])
def test_an_answer_is_copied_piece_by_piece_and_put_elsewhere(of: Copies) -> None:
    piece = COPIED_TOKENS[of]
    size = 6 + 3 * piece
    own, told = storage(size), list[Event]()
    copies = KvCopies(told.append, KvCopyQuota().of("a"), of)
    copies.begin("a", 5)
    taken(copies, own, size)
    pieces = pieces_of(told)
    assert [(each.first, each.tokens) for each, _ in pieces] == [
        (5 + number * piece, piece) for number in range(3)
    ]
    other = empty()
    other.put_rows("a", 0, _rows(own, 0, 5))
    for each, rows in pieces:
        put_copy(other, "a", each.first, each.tokens, rows)
    for one, same in zip(_rows(own, 0, size - 1), _rows(other, 0, size - 1), strict=True):
        assert np.array_equal(one, same)


def test_answers_of_a_model_with_many_keys_are_copied_in_smaller_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As many as a frame takes, each time as soon as there are so many."""
    own, told = storage(80), list[Event]()
    token_bytes = sum(each.nbytes for each in _rows(own, 0, 1))
    monkeypatch.setattr("edge.engine.kv_copies.CHUNK_COPY_BYTES", 12 * token_bytes)
    copies = KvCopies(told.append, KvCopyQuota().of("a"), "answers")
    copies.begin("a", 0)
    seen = []
    for position in range(80):
        copies.take(computed(position), own, now_s=0.0)
        last = sum(each.tokens for each, _ in pieces_of(told))
        seen.append(position + 1 - last)
    assert {each.tokens for each, _ in pieces_of(told)} == {12}
    assert max(seen[32:]) < 12


def test_a_chunk_is_copied_in_large_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    own = storage(40)
    token_bytes = sum(each.nbytes for each in _rows(own, 0, 1))

    def pieces(most_bytes: int) -> list[int]:
        monkeypatch.setattr("edge.engine.kv_copies.CHUNK_COPY_BYTES", most_bytes)
        told = list[Event]()
        copies = KvCopies(told.append, KvCopyQuota().of("a"))
        copies.begin("a", 0)
        chunk = StepEntry(request="a", position=0, tokens=tuple(range(40)), logit_rows=0)
        copies.take(Step(entries=(chunk,)), own, now_s=0.0)
        found = pieces_of(told)
        whole = _rows(own, 0, sum(each.tokens for each, _ in found))
        other = empty()
        for each, rows in found:
            put_copy(other, "a", each.first, each.tokens, rows)
        for one, same in zip(whole, _rows(other, 0, whole[0].shape[1]), strict=True):
            assert np.array_equal(one, same)
        return [each.tokens for each, _ in found]

    assert pieces(1 << 20) == [40]
    assert pieces(15 * token_bytes) == [15, 15, 10]
    assert pieces(1) == [LEAST_COPIED_TOKENS] * 5


@pytest.mark.parametrize(("most_tokens", "told_of"), [(3, [3] * 5), (0, [])])
def test_of_a_large_model_fewer_tokens_are_in_one_copy(
    monkeypatch: pytest.MonkeyPatch, most_tokens: int, told_of: list[int]
) -> None:
    own = storage(16)
    token_bytes = sum(each.nbytes for each in _rows(own, 0, 1))
    most_bytes = (most_tokens + 1) * token_bytes - 1
    monkeypatch.setattr("edge.engine.kv_copies.MOST_COPY_BYTES", most_bytes)
    monkeypatch.setattr("edge.engine.kv_copies.CHUNK_COPY_BYTES", most_bytes // 2)
    told = list[Event]()
    copies = KvCopies(told.append, KvCopyQuota().of("a"))
    copies.begin("a", 0)
    chunk = StepEntry(request="a", position=0, tokens=tuple(range(12)), logit_rows=0)
    copies.take(Step(entries=(chunk,)), own, now_s=0.0)
    copies.take(computed(15), own, now_s=0.0)
    assert [each.tokens for each, _ in pieces_of(told)] == told_of


@pytest.mark.parametrize("of", ["answers", "all"])
def test_of_slow_answers_fewer_tokens_are_copied_at_once(of: Copies) -> None:
    own, told = storage(30), list[Event]()
    copies = KvCopies(told.append, KvCopyQuota().of("a"), of)
    copies.begin("a", 5)
    for position in range(12):
        copies.take(computed(position), own, now_s=0.4 * COPIED_AFTER_S[of] * position)
    found = [(each.first, each.tokens) for each, _ in pieces_of(told)]
    assert found == [(5, 4), (9, 3)], "counted from the first token that may be copied"


def test_what_waits_is_bounded_and_comes_later() -> None:
    own, told = storage(30), list[Event]()
    tokens = COPIED_TOKENS["all"]
    piece = sum(each.nbytes for each in _rows(own, 0, tokens))
    room = KvCopyQuota(piece).of("a")
    copies = KvCopies(told.append, room)
    copies.begin("a", 2)
    taken(copies, own, 30)
    assert len(told) == 1
    room.give_back(piece)
    copies.take(computed(29), own, now_s=0.0)
    assert [each.first for each, _ in pieces_of(told)] == [2, 2 + tokens]


def test_what_waits_of_a_device_and_of_all_has_a_limit() -> None:
    """On however many connections; what is never sent is given back with its connection."""
    quota = KvCopyQuota(of_one=10, of_all=15)
    first, second, other = quota.of("a"), quota.of("a"), quota.of("b")
    assert first.take(6)
    assert not second.take(5)
    assert second.take(4)
    assert not other.take(6)
    assert other.take(5)
    first.give_back(2)
    first.give_back_all()
    second.give_back_all()
    assert quota.held == 5
    assert first.take(10)


def test_answers_of_one_step_are_copied_in_one_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    own, told = storage(30), list[Event]()
    own.put_rows("b", 0, [each + 1 for each in _rows(own, 0, 30)])
    token_bytes = sum(each.nbytes for each in _rows(own, 0, 1))

    def frames() -> list[list[str]]:
        told.clear()
        copies = KvCopies(told.append, KvCopyQuota().of("a"))
        copies.begin("a", 0)
        copies.begin("b", 2)
        for position in range(10):
            copies.take(computed(position, "a", "b"), own, now_s=0.0)
        copies.take(computed(29, "a", "b"), own, now_s=9.0)
        return [[part.request for part in each.parts] for each in told if isinstance(each, KvRows)]

    assert frames() == [["a"], ["b"], ["a", "a", "b", "b"]]
    other = empty()
    other.put_rows("b", 0, [each + 1 for each in _rows(own, 0, 2)])
    for part, rows in pieces_of(told):
        put_copy(other, part.request, part.first, part.tokens, rows)
    for request, last in (("a", 24), ("b", 26)):
        one, same = own.rows(request, 0, last), other.rows(request, 0, last)
        assert one is not None
        assert same is not None
        assert all(np.array_equal(*each) for each in zip(one, same, strict=True))
    monkeypatch.setattr("edge.engine.kv_copies.MOST_COPY_BYTES", 20 * token_bytes)
    assert frames() == [["a"], ["b"], ["a", "a"], ["b", "b"]], "none is larger than it may be"


def test_rows_that_are_not_shared_evenly_are_refused() -> None:
    two = (
        CopiedTokens(request="a", first=0, tokens=2),
        CopiedTokens(request="b", first=1, tokens=1),
    )
    with pytest.raises(ValueError, match="8 bytes of keys and values cannot be divided"):
        list(KvRows(parts=two, rows=bytes(8)).each())
    with pytest.raises(ValueError, match="among 0 tokens"):
        list(KvRows(parts=(), rows=b"").each())
    for tokens in (0, MAX_CHUNK_TOKENS + 1):
        with pytest.raises(ProtocolError, match="tokens: Expected `int`"):
            from_json(CopiedTokens, {"request": "a", "first": 0, "tokens": tokens})


def test_others_than_begun_are_not_copied() -> None:
    own, told = storage(30), list[Event]()
    copies = KvCopies(told.append, KvCopyQuota().of("a"))
    taken(copies, own, 30)
    copies.begin("a", 2)
    copies.forget("a")
    taken(copies, own, 30)
    assert told == []


def test_rows_that_do_not_fit_are_refused() -> None:
    own = storage(10)
    rows = b"".join(each.tobytes() for each in _rows(own, 2, 4))
    with pytest.raises(RequestError, match="not the keys and values of 3 tokens"):
        put_copy(own, "a", 10, 3, rows)
    with pytest.raises(RequestError, match="do not follow"):
        put_copy(own, "a", 12, 2, rows)
    with pytest.raises(RequestError, match="do not follow"):
        put_copy(own, "b", 1, 2, rows)


def _rows(own: HostCache, first: int, last: int) -> list[NDArray[Any]]:
    rows = own.rows("a", first, last)
    assert rows is not None
    return rows
