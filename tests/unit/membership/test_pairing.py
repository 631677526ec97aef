"""Two devices and six words, and those who do not know them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from spake2 import SPAKE2_A

from edge.errors import RequestError
from edge.membership.authority import counted
from edge.membership.identity import Identity, PrivateKey, PublicKey
from edge.membership.membership import Change, Membership
from edge.membership.pairing import (
    CODE_LASTS_S,
    CODE_WORDS,
    CannotKeepError,
    Invitation,
    Other,
    WrongCodeError,
    join,
    meeting_place,
    new_code,
    read_code,
)
from edge.membership.pairing_words import WORDS
from edge.membership.roles import LEND, USE
from edge.transport import Channel, Frame, MemoryChannel, PeerLostError
from edge.transport.frame import (
    OF_ALL_FRAMES,
    Admit,
    FrameLimits,
    LimitsOf,
    admit_all,
    no_other_limits,
)
from edge.transport.testing import Fault, FaultyChannel
from tests.support.members import HeldChannel, Kept
from tests.support.passing_time import let_pass


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
            Invitation(code, Kept(first), "attic").take_in(ends[0]),
            join(ends[1], code, identity, "kitchen"),
            ends,
        )
        assert seen == Other(name="kitchen", id=identity.id)
        assert inviter == Other(name="attic", id=first.identity.id)
        assert member.cluster_id == first.cluster_id
        assert member.tag_key == first.tag_key
        assert member.identity.id == identity.id
        assert member.authority is None
        member.certificate.verify_directly_issued_by(first.cluster)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("after_s", "is_taken_in"), [(CODE_LASTS_S - 1, True), (CODE_LASTS_S, False)]
)
def test_the_codes_time_goes_on_while_the_host_is_suspended(
    after_s: float, is_taken_in: bool
) -> None:
    """The event loop's clock, by which it also ends, stands still then."""

    async def scenario() -> None:
        first, code, clock_s = Membership.founded("attic"), new_code(), 100.0
        ends = MemoryChannel.pair("attic", "kitchen")
        invitation = Invitation(code, Kept(first), "attic", clock=lambda: clock_s)
        clock_s += after_s
        seen, joining = await paired(
            invitation.take_in(ends[0]), join(ends[1], code, Identity.made(), "kitchen"), ends
        )
        if is_taken_in:
            assert seen.name == "kitchen"
        else:
            assert isinstance(joining, PeerLostError)
            with pytest.raises(WrongCodeError, match="too late: the code was void by then"):
                raise seen

    asyncio.run(scenario())


def test_a_member_may_do_what_it_was_taken_in_for() -> None:
    async def scenario() -> None:
        first, code = Membership.founded("attic"), new_code()
        ends = MemoryChannel.pair("attic", "phone")
        _, (member, _) = await paired(
            Invitation(code, Kept(first), "attic", [USE]).take_in(ends[0]),
            join(ends[1], code, Identity.made(), "phone"),
            ends,
        )
        assert member.roles == {USE}

    asyncio.run(scenario())


@dataclass(frozen=True)
class _Claimed:
    """A key of another device, whose private half is not there."""

    public: PublicKey
    own: PrivateKey

    def public_key(self) -> PublicKey:
        return self.public

    def sign(self, content: bytes, algorithm: ec.ECDSA) -> bytes:
        return self.own.sign(content, algorithm)


def test_nobody_is_taken_in_with_a_key_of_another_device() -> None:
    """Its certificate would count no more, and it would be locked out."""

    async def scenario() -> None:
        first, code, kitchen = Membership.founded("attic"), new_code(), Identity.made()
        own = Identity.made().key
        for claimed, message in (
            (_Claimed(kitchen.key.public_key(), own), "does not have the key that it shows"),
            (_Claimed(first.identity.key.public_key(), own), "does not have the key that it shows"),
            (first.identity.key, "this device's own key"),
        ):
            ends = MemoryChannel.pair("attic", "phone")
            inviting, joining = await paired(
                Invitation(code, Kept(first), "attic", [USE]).take_in(ends[0]),
                join(ends[1], code, Identity(cast(PrivateKey, claimed)), "phone"),
                ends,
            )
            assert isinstance(inviting, RequestError), inviting
            assert message in str(inviting)
            assert not isinstance(inviting, WrongCodeError)
            assert isinstance(joining, Exception)

    asyncio.run(scenario())


def test_other_words_are_told_to_both_and_take_nobody_in() -> None:
    async def scenario() -> None:
        first, code = Membership.founded("attic"), new_code()
        ends = MemoryChannel.pair("attic", "mallory")
        inviting, joining = await paired(
            Invitation(code, Kept(first), "attic").take_in(ends[0]),
            join(ends[1], other_words(code), Identity.made(), "mallory"),
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
        [Frame("pair", {}, b"A" + bytes([2]) + bytes(31))],
        [Frame("pair", {}, b"B" + bytes([2]) + bytes(31))],
        [Frame("pair", {}, b"A" + bytes([1]) + bytes(31))],
        [Frame("pair", {}, b"B" + b"\xff" * 32)],
        [Frame("pair", {"large": "x" * 2000})],
        [Frame("pair", {}, bytes(1 << 20))],
        [Frame("other", {}, bytes(33))],
    ],
    ids=[
        "empty",
        "a zero",
        "b zero",
        "ones",
        "a no point",
        "b no point",
        "a order 1",
        "b ones",
        "large header",
        "large",
        "another kind",
    ],
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
            Invitation(code, Kept(first), "attic").take_in(ends[0])
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
    member = replace(Membership.founded("attic"), authority=None)
    with pytest.raises(RequestError, match="may not take others in"):
        Invitation(new_code(), Kept(member), "attic")


class Limited(FaultyChannel):
    """Notes how large a frame may be: its header and its payload."""

    def __init__(self, inner: Channel) -> None:
        super().__init__(inner, Fault.LOSE, after_calls=100)
        self.largest: list[tuple[int, int]] = []

    async def receive(
        self,
        limits_of: LimitsOf = no_other_limits,
        admit: Admit = admit_all,
        *,
        most: FrameLimits = OF_ALL_FRAMES,
    ) -> Frame:
        self.largest.append((most.header_bytes, most.payload_bytes))
        return await super().receive(limits_of, admit, most=most)


def test_neither_side_sets_aside_much() -> None:
    async def scenario() -> None:
        code = new_code()
        first, second = (Limited(end) for end in MemoryChannel.pair("attic", "kitchen"))
        await paired(
            Invitation(code, Kept.founded("attic"), "attic").take_in(first),
            join(second, code, Identity.made(), "kitchen"),
            (first, second),
        )
        assert first.largest == [(1 << 10, 64 << 10)] * 2
        assert second.largest == [(1 << 10, 64 << 10), (1 << 10, 1 << 20)]  # with keys of before

    asyncio.run(scenario())


def other_words(code: str) -> str:
    *words, last = code.split()
    return " ".join([*words, next(word for word in WORDS if word != last)])


class Joining:
    """A device that has heard the answer, and stops before it proves that it knows the words."""

    def __init__(self, invitation: Invitation, code: str) -> None:
        self.near, self.far = MemoryChannel.pair("kitchen", "attic")
        self.held = HeldChannel(self.near, "join")
        self._invitation = invitation
        self._joining = asyncio.create_task(join(self.held, code, Identity.made(), "kitchen"))

    def talk(self, end: Channel | None = None) -> asyncio.Task[Other]:
        return asyncio.create_task(self._invitation.take_in(end or self.far))

    async def end(self) -> None:
        await self.near.aclose()
        await self.far.aclose()
        await asyncio.gather(self._joining, return_exceptions=True)


@pytest.mark.parametrize("right_first", [True, False], ids=["right first", "wrong first"])
def test_two_who_have_heard_the_answer_have_one_guess(right_first: bool) -> None:
    async def scenario() -> None:
        code = new_code()
        invitation = Invitation(code, Kept.founded("attic"), "attic")
        first = Joining(invitation, code if right_first else other_words(code))
        second = Joining(invitation, code)
        talks = [first.talk(), second.talk()]
        for device in (first, second):
            await device.held.reached.wait()
        for device in (first, second):
            device.held.goes_on.set()
        outcomes = await asyncio.gather(*talks, return_exceptions=True)
        assert isinstance(outcomes[0], Other if right_first else WrongCodeError)
        assert type(outcomes[1]) is RequestError
        for device in (first, second):
            await device.end()

    asyncio.run(scenario())


def test_no_proof_is_looked_at_while_a_member_is_told() -> None:
    async def scenario() -> None:
        code = new_code()
        invitation = Invitation(code, Kept.founded("attic"), "attic")
        first, second = Joining(invitation, code), Joining(invitation, other_words(code))
        telling = HeldChannel(first.far, "taken in")
        talks = [first.talk(telling), second.talk()]
        first.held.goes_on.set()
        await telling.reached.wait()
        second.held.goes_on.set()
        with pytest.raises(RequestError, match="another device has used the code"):
            await talks[1]
        telling.goes_on.set()
        assert isinstance(await talks[0], Other)
        for device in (first, second):
            await device.end()

    asyncio.run(scenario())


def test_whoever_is_a_member_stands_in_the_list() -> None:
    """Also where the device that took it in ends before it has seen that this arrived."""

    async def scenario() -> None:
        attic, code, device = Kept.founded("attic"), new_code(), Identity.made()
        invitation = Invitation(code, attic, "attic")
        ends = MemoryChannel.pair("kitchen", "attic")
        telling = HeldChannel(ends[1], "taken in")
        talk = asyncio.create_task(invitation.take_in(telling))
        joining = asyncio.create_task(join(ends[0], code, device, "kitchen"))
        await telling.reached.wait()
        assert attic.membership.others == {device.id: "kitchen"}
        talk.cancel()
        await asyncio.wait([talk])
        await ends[1].aclose()
        with pytest.raises(PeerLostError):
            await joining

        again = MemoryChannel.pair("kitchen", "attic")
        lends = Invitation(code, attic, "attic", [LEND])
        _, (member, _) = await paired(
            lends.take_in(again[1]), join(again[0], code, device, "kitchen"), (again[1], again[0])
        )
        assert member.roles == {LEND}
        assert attic.credentials().is_admitted(device.id, counted(member.certificate))
        assert not attic.credentials().is_admitted(device.id, 0)

    asyncio.run(scenario())


def test_who_cannot_be_kept_is_not_taken_in() -> None:
    class Full(Kept):
        def change(self, change: Change) -> Membership:
            super().change(change)
            raise RequestError("the disk of keys is full")

    async def scenario() -> None:
        code = new_code()
        ends = MemoryChannel.pair("attic", "kitchen")
        inviting, joining = await paired(
            Invitation(code, Full(Membership.founded("attic")), "attic").take_in(ends[0]),
            join(ends[1], code, Identity.made(), "kitchen"),
            ends,
        )
        assert isinstance(inviting, CannotKeepError)
        assert "the disk of keys is full" in str(inviting)
        assert isinstance(joining, PeerLostError)

    asyncio.run(scenario())


def test_who_has_proved_and_goes_away_leaves_the_code_as_it_was() -> None:
    async def scenario() -> None:
        code = new_code()
        invitation = Invitation(code, Kept.founded("attic"), "attic")
        gone = Joining(invitation, code)
        telling = HeldChannel(gone.far, "taken in")
        talk = gone.talk(telling)
        gone.held.goes_on.set()
        await telling.reached.wait()
        await gone.near.aclose()
        telling.goes_on.set()
        with pytest.raises(PeerLostError):
            await talk
        await gone.end()
        ends = MemoryChannel.pair("attic", "kitchen")
        seen, _ = await paired(
            invitation.take_in(ends[0]), join(ends[1], code, Identity.made(), "kitchen"), ends
        )
        assert isinstance(seen, Other)

    asyncio.run(scenario())


@pytest.mark.parametrize("said", [[], [Frame("pair", {}, SPAKE2_A(b"acorn").start())]])
def test_who_says_nothing_is_not_waited_for(said: list[Frame]) -> None:
    async def scenario() -> None:
        ends = MemoryChannel.pair("attic", "mallory")
        invitation = Invitation(new_code(), Kept.founded("attic"), "attic")
        waiting = asyncio.create_task(invitation.take_in(ends[0]))
        for frame in said:
            await ends[1].send(frame)
            await ends[1].receive()
        await asyncio.sleep(0)
        let_pass(3.0)
        with pytest.raises(TimeoutError):
            await waiting

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "id", ["", "\x1b[2J" * 8, "0" * 31, "0" * 33, "G" * 32, "0" * 31 + "\n", "٠" * 32]
)
def test_an_inviters_id_is_one(id: str) -> None:
    """It is shown to people."""

    async def scenario() -> None:
        code, first = new_code(), Membership.founded("attic")

        class Named(Identity):
            @property
            def id(self) -> str:
                return id

        posing = replace(first, identity=Named(first.identity.key))
        ends = MemoryChannel.pair("attic", "kitchen")
        _, joining = await paired(
            Invitation(code, Kept(posing), "attic").take_in(ends[0]),
            join(ends[1], code, Identity.made(), "kitchen"),
            ends,
        )
        assert isinstance(joining, RequestError)
        assert "its id is none" in str(joining)

    asyncio.run(scenario())


def test_who_joins_while_the_cluster_gets_a_new_key_has_that() -> None:
    async def main() -> None:
        code, attic = new_code(), Kept.founded("attic")
        invitation = Invitation(code, attic, "attic")
        attic.rotate()
        ends = MemoryChannel.pair("attic", "kitchen")
        taken_in, (member, _) = await paired(
            invitation.take_in(ends[0]), join(ends[1], code, Identity.made(), "kitchen"), ends
        )
        assert member.cluster_id == attic.membership.cluster_id
        assert taken_in.id in attic.membership.taken_in

    asyncio.run(main())


def test_nobody_is_kept_by_a_certificate_of_the_key_before() -> None:
    before = Membership.founded("attic")
    assert before.authority is not None
    device = Identity.made()
    certificate = before.authority.member(device.key.public_key(), "kitchen")
    with pytest.raises(RequestError, match="a new key while kitchen joined"):
        before.rotated("attic").taking_in(device.id, "kitchen", certificate)
