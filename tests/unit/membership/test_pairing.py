"""Two devices and six words, and those who do not know them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any

import pytest

from edge.errors import RequestError
from edge.membership.identity import Identity
from edge.membership.membership import Membership
from edge.membership.pairing import (
    CODE_WORDS,
    Other,
    WrongCodeError,
    join,
    meeting_place,
    new_code,
    read_code,
    take_in,
)
from edge.membership.roles import USE
from edge.membership.words import WORDS
from transport import Channel, Frame, MemoryChannel


def test_a_code_is_six_words() -> None:
    code = new_code()
    assert len(code.split()) == CODE_WORDS
    assert read_code("  " + code.upper().replace(" ", "-") + "\n") == code
    assert new_code() != code
    with pytest.raises(RequestError, match="has 6 words, not 5"):
        read_code(" ".join(code.split()[:5]))
    with pytest.raises(RequestError, match="'xyzzy' is no word of a code"):
        read_code(" ".join([*code.split()[:5], "xyzzy"]))


def test_the_meeting_place_says_nothing_of_the_secret() -> None:
    one, other = (" ".join(["acorn", "actor", *rest]) for rest in ([WORDS[5]] * 4, [WORDS[6]] * 4))
    assert meeting_place(one) == meeting_place(other)


def test_each_word_stands_for_a_byte() -> None:
    assert len(set(WORDS)) == len(WORDS) == 256


def test_no_word_is_the_beginning_of_another() -> None:
    assert not [
        (one, other) for one in WORDS for other in WORDS if one != other and other.startswith(one)
    ]


async def paired(
    inviting: Awaitable[Any], joining: Awaitable[Any], ends: tuple[Channel, Channel]
) -> list[Any]:
    """What came of both sides; each hangs up when it has ended."""

    async def ended(side: Awaitable[Any], end: Channel) -> Any:
        try:
            return await side
        finally:
            await end.aclose()

    async with asyncio.timeout(30):
        sides = ended(inviting, ends[0]), ended(joining, ends[1])
        return [*await asyncio.gather(*sides, return_exceptions=True)]


def test_who_knows_the_words_becomes_a_member() -> None:
    async def scenario() -> None:
        first, code, identity = Membership.founded("attic"), new_code(), Identity.made()
        ends = MemoryChannel.pair("attic", "kitchen")
        seen, (member, inviter) = await paired(
            take_in(ends[0], code, first, "attic"), join(ends[1], code, identity, "kitchen"), ends
        )
        assert seen == Other(name="kitchen", id=identity.id)
        assert inviter == Other(name="attic", id=first.identity.id)
        assert member.cluster_id == first.cluster_id
        assert member.tag_key == first.tag_key
        assert member.identity.id == identity.id
        assert member.authority is None
        member.certificate.verify_directly_issued_by(first.cluster)

    asyncio.run(scenario())


def test_a_member_may_do_what_it_was_taken_in_for() -> None:
    async def scenario() -> None:
        first, code = Membership.founded("attic"), new_code()
        ends = MemoryChannel.pair("attic", "phone")
        _, (member, _) = await paired(
            take_in(ends[0], code, first, "attic", [USE]),
            join(ends[1], code, Identity.made(), "phone"),
            ends,
        )
        assert member.roles == {USE}

    asyncio.run(scenario())


def test_other_words_are_told_to_both_and_take_nobody_in() -> None:
    async def scenario() -> None:
        first, code = Membership.founded("attic"), new_code()
        words = code.split()
        wrong = " ".join([*words[:-1], next(word for word in WORDS if word != words[-1])])
        ends = MemoryChannel.pair("attic", "mallory")
        inviting, joining = await paired(
            take_in(ends[0], code, first, "attic"),
            join(ends[1], wrong, Identity.made(), "mallory"),
            ends,
        )
        assert isinstance(inviting, WrongCodeError)
        assert isinstance(joining, Exception)

    asyncio.run(scenario())


@pytest.mark.parametrize("inviter", [True, False])
@pytest.mark.parametrize(
    "said",
    [
        [Frame("pair")],
        [Frame("pair", {}, b"A" + bytes(32))],
        [Frame("pair", {}, b"B" + bytes(32))],
        [Frame("pair", {}, b"\xff" * 33)],
        [Frame("pair", {}, bytes(1 << 20))],
        [Frame("other", {}, bytes(33))],
    ],
    ids=["empty", "a zero", "b zero", "ones", "large", "another kind"],
)
def test_nonsense_is_refused(inviter: bool, said: list[Frame]) -> None:
    async def scenario() -> None:
        ends = MemoryChannel.pair("attic", "mallory")
        first, code = Membership.founded("attic"), new_code()

        async def mallory() -> None:
            for frame in said:
                await ends[1].send(frame)
            await ends[1].receive()

        side = (
            take_in(ends[0], code, first, "attic")
            if inviter
            else join(ends[0], code, Identity.made(), "kitchen")
        )
        outcome, _ = await paired(side, mallory(), ends)
        assert isinstance(outcome, RequestError)

    asyncio.run(scenario())


def test_a_message_sent_back_is_refused() -> None:
    """Whoever repeats what it hears knows no more than before."""

    async def scenario() -> None:
        ends = MemoryChannel.pair("attic", "mallory")

        async def mirror() -> None:
            while True:
                await ends[1].send(await ends[1].receive())

        outcome, _ = await paired(
            join(ends[0], new_code(), Identity.made(), "kitchen"), mirror(), ends
        )
        assert isinstance(outcome, RequestError)

    asyncio.run(scenario())


def test_a_member_without_the_clusters_key_takes_nobody_in() -> None:
    async def scenario() -> None:
        ends = MemoryChannel.pair("attic", "kitchen")
        member = replace(Membership.founded("attic"), authority=None)
        inviting, _ = await paired(
            take_in(ends[0], new_code(), member, "attic"), ends[1].receive(), ends
        )
        assert isinstance(inviting, RequestError)

    asyncio.run(scenario())
