"""Pieces of stored prefixes go from one device to another, and are found there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edge.backends.null.made_up import replies
from edge.engine.prefix_cache import PrefixStorage
from edge.engine.shard_engine import ShardEngine
from edge.errors import RequestError
from edge.offload import PrefixMemory
from edge.protocol.prefix_frames import PrefixMatched, PutPrefix, ReadPrefix
from edge.protocol.topology import Seat
from tests.support.linked_shards import REPORT_WITHIN_S, SPEC, VOCAB, linked, make_plan

PROMPT = [*range(5, 42)]
TOKENS = 32
"""Those of its whole blocks."""


def kept_in(memory: PrefixMemory) -> PrefixStorage:
    return PrefixStorage(memory=memory, disk=None, secret=b"s" * 32)


def memory() -> PrefixMemory:
    made = PrefixMemory()
    made.limit(1 << 24)
    return made


def match(engine: ShardEngine) -> None:
    engine.match_prefix("r", np.asarray(PROMPT, "<i4"))


def held(engine: ShardEngine, of: ShardEngine) -> NDArray[np.uint32]:
    asked = engine.stored_prefix(lambda stored: stored.held("r", of.layout, 0))
    return asked.result(REPORT_WITHIN_S)


def give(engine: ShardEngine, put: PutPrefix) -> None:
    engine.stored_prefix(lambda stored: stored.put(put)).result(REPORT_WITHIN_S)


def leave(place: PrefixMemory) -> None:
    """What the whole model on one device has of the prompt."""
    with linked(make_plan([VOCAB], stage_before=False), places=lambda _seat: kept_in(place)) as one:
        one.each(match)
        assert one.reply("r", PROMPT, 2) == replies(SPEC, PROMPT, 2)
        one.sessions[0].finish("r", kept_tokens=len(PROMPT))


def test_a_shard_that_gets_what_it_lacks_finds_it() -> None:
    """The other device had the whole model. What does not fit is refused, and changes nothing."""
    has, lacks = memory(), memory()
    leave(has)
    plan = make_plan([1100, 1900], stage_before=True)
    places: dict[Seat, PrefixMemory] = {(0, 0): has, (1, 0): has, (1, 1): lacks}
    with linked(plan, places=lambda seat: kept_in(places[seat])) as found:
        first = [each.tokens for each in found.each(match) if isinstance(each, PrefixMatched)]
        assert sorted(first) == [0, TOKENS, TOKENS]
        holder, _other, new = found.sessions
        tokens, row_bytes, _states = held(holder, new)
        assert set(tokens.tolist()) == {TOKENS}
        assert not held(new, new).any()
        pieces = tuple(range(len(tokens)))
        read = ReadPrefix(
            session="s", request="r", stage=1, rank=1,
            first=0, last=TOKENS, has_states=False, pieces=pieces,
        )  # fmt: skip
        content = holder.stored_prefix(lambda stored: stored.read(read, new.layout)).result()
        assert len(content) == TOKENS * int(row_bytes.sum())
        put = PutPrefix(
            session="s", request="r", first=0, last=TOKENS,
            has_states=False, is_whole=True, pieces=pieces, content=content,
        )  # fmt: skip
        wrong: list[dict[str, Any]] = [
            {"content": content[:-1]},
            {"pieces": (*pieces, len(pieces))},
            {"pieces": pieces[:-1]},
            {"first": 16},
            {"last": len(PROMPT) + 1},
            {"last": 0},
            {"request": "another"},
        ]
        for change in wrong:
            with pytest.raises(RequestError):
                give(new, replace(put, **change))
        assert lacks.used_bytes == 0
        halves = len(pieces) // 2
        cut = TOKENS * int(row_bytes[:halves].sum())
        for part, some, is_last in (
            (pieces[:halves], content[:cut], False),
            (pieces[halves:], content[cut:], True),
        ):
            give(new, replace(put, pieces=part, content=some, is_whole=is_last))
        again = {each.tokens for each in found.each(match) if isinstance(each, PrefixMatched)}
        assert again == {TOKENS}
        reply = found.reply("r", PROMPT, 4, known=TOKENS)
        assert reply == replies(SPEC, PROMPT, 4)


def test_without_a_prefix_cache_nothing_is_given() -> None:
    with (
        linked(make_plan([VOCAB], stage_before=False)) as found,
        pytest.raises(RequestError, match="has no prefix cache"),
    ):
        held(found.sessions[0], found.sessions[0])
