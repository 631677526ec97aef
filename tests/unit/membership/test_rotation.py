"""A cluster's new key, and who goes along."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from edge.errors import RequestError
from edge.membership.authority import Authority
from edge.membership.identity import Identity
from edge.membership.length_prefix import joined, parted
from edge.membership.membership import TAG_KEY_BYTES, Membership, name_in, roles_in
from edge.membership.roles import LEND, USE
from edge.membership.rotation import MOST_CARRIED, MOST_ROTATIONS, Rotation
from edge.membership.store import MembershipStore, enrolled_by_token, token
from edge.transport.handshake import MAX_ROTATION_BYTES
from tests.support.members import Kept


def test_a_member_follows_once() -> None:
    attic = Kept.founded()
    kitchen = attic.taking_in("kitchen", [LEND])
    before = kitchen.membership
    told = attic.rotate()
    after = before.following(told)
    assert after.cluster_id == attic.membership.cluster_id != before.cluster_id
    assert after.tag_key == attic.membership.tag_key != before.tag_key
    assert (before.generation, after.generation) == (0, 1)
    assert after.identity.id == before.identity.id
    assert name_in(after.certificate) == "kitchen"
    assert roles_in(after.certificate) == {LEND}
    assert after.others == before.others
    assert attic.membership.others == {kitchen.membership.identity.id: "kitchen"}
    assert attic.membership.identity.id in after.others
    assert after.following(told) is after
    assert attic.membership.following(told) is attic.membership


def test_who_was_away_for_long_follows_step_by_step() -> None:
    attic = Kept.founded()
    kitchen, late = attic.taking_in("kitchen"), attic.taking_in("late")
    for _ in range(MOST_ROTATIONS + 1):
        kitchen.membership = kitchen.membership.following(attic.rotate())
    assert kitchen.membership.cluster_id == attic.membership.cluster_id
    assert len(kitchen.membership.past) == MOST_ROTATIONS
    with pytest.raises(RequestError, match="belongs to another cluster"):
        late.membership.following(kitchen.membership.past[-1].rotation)

    cellar = attic.taking_in("cellar")
    for _ in range(MOST_ROTATIONS):
        kitchen.membership = kitchen.membership.following(attic.rotate())
    for past in kitchen.membership.past:
        cellar.membership = cellar.membership.following(past.rotation)
    assert cellar.membership.cluster_id == attic.membership.cluster_id
    assert cellar.membership.generation == 2 * MOST_ROTATIONS + 1


def test_who_was_expelled_stays_behind() -> None:
    attic = Kept.founded()
    kitchen, cellar = attic.taking_in("kitchen"), attic.taking_in("cellar")
    attic.change(lambda newest: newest.expelling(cellar.membership.identity.id))
    told = attic.rotate()
    assert set(attic.membership.others) == {kitchen.membership.identity.id}
    with pytest.raises(RequestError, match="was left behind; pair it again"):
        cellar.membership.following(told)
    assert attic.membership.expelled.ids == set()


def test_a_token_of_before_is_good_no_more() -> None:
    attic = Kept.founded()
    script = enrolled_by_token(token(attic.membership), "it", "script", Identity.made())
    with pytest.raises(RequestError, match="this token has an earlier one; write a new token"):
        script.following(attic.rotate())


def test_whoever_has_the_clusters_key_alone_moves_nobody() -> None:
    """By a stolen token: its owner's rotation wins, whichever is told first."""
    attic = Kept.founded()
    kitchen = attic.taking_in("kitchen")
    thief = Kept(enrolled_by_token(token(attic.membership), "it", "thief", Identity.made()))
    thief.change(lambda newest: replace(newest, taken_in=attic.membership.taken_in))
    with pytest.raises(RequestError, match="not made by the device that made the one before"):
        kitchen.membership.following(thief.rotate())
    kitchen.membership.following(attic.rotate())


def test_a_device_that_a_token_has_taken_in_follows_none_of_its_keys() -> None:
    attic = Kept.founded()
    script = Kept(enrolled_by_token(token(attic.membership), "it", "script", Identity.made()))
    phone = script.taking_in("phone")
    with pytest.raises(RequestError, match="not made by the device that made the one before"):
        phone.membership.following(script.rotate())


def test_a_stolen_token_keeps_nobody_from_the_next_key() -> None:
    """Whatever it signs of the device that made the key: nobody believes it."""
    attic = Kept.founded()
    kitchen = attic.taking_in("kitchen")
    own, other = attic.membership.identity.id, kitchen.membership.identity.id
    thief = Kept(enrolled_by_token(token(attic.membership), "it", "thief", Identity.made()))
    with pytest.raises(RequestError, match="nobody can expel it"):
        thief.membership.expelling(own)
    authority = thief.membership.authority
    assert authority is not None
    for ids, editions in (([own], {}), ([], {own: 5}), ([own, other, "f" * 32], {})):
        signed = authority.expelled(ids, 9, editions).public_bytes(Encoding.DER)
        kitchen.membership = kitchen.membership.hearing(joined([signed]))
    assert kitchen.membership.expelled.ids == {other, "f" * 32}
    assert kitchen.credentials().is_admitted(own, 0)
    kitchen.membership = kitchen.membership.following(attic.rotate())
    assert kitchen.membership.expelled.ids == set()


def test_who_was_expelled_by_a_stolen_token_goes_along_if_it_is_named() -> None:
    attic = Kept.founded()
    kitchen, cellar = attic.taking_in("kitchen"), attic.taking_in("cellar")
    thief = Kept(enrolled_by_token(token(attic.membership), "it", "thief", Identity.made()))
    for kept in (kitchen, cellar):
        thief.membership = thief.membership.expelling(kept.membership.identity.id)
    for kept in (attic, kitchen, cellar):
        kept.change(lambda newest: newest.hearing(thief.membership.expelled.signed))
    forgiven = [kitchen.membership.identity.id]
    attic.change(lambda newest: newest.rotated("attic", forgiven))
    told = attic.membership.past[-1].rotation
    kitchen.membership = kitchen.membership.following(told)
    assert kitchen.membership.cluster_id == attic.membership.cluster_id
    assert kitchen.credentials().is_admitted(forgiven[0], 0)
    with pytest.raises(RequestError, match="was left behind"):
        cellar.membership.following(told)


def test_in_a_cluster_of_an_earlier_version_an_expelled_device_moves_nobody() -> None:
    """Its certificate does not say who made it; whoever was paired with a device follows that."""
    attic = Kept(Membership.enrolled(Authority.made(None), bytes(TAG_KEY_BYTES), "attic"))
    kitchen = attic.taking_in("kitchen")
    assert kitchen.membership.maker is None
    before = kitchen.membership
    expelled = attic.membership.expelling(attic.membership.identity.id).expelled
    told = attic.rotate()
    assert before.following(told).maker == attic.membership.identity.id
    with pytest.raises(RequestError, match="not made by the device"):
        before.hearing(expelled.signed).following(told)


def test_what_was_changed_on_the_way_is_refused() -> None:
    attic = Kept.founded()
    kitchen = attic.taking_in("kitchen")
    told = attic.rotate()
    for at in range(0, len(told), 7):
        changed = bytearray(told)
        changed[at] ^= 1
        with pytest.raises(RequestError):
            kitchen.membership.following(bytes(changed))
    for cut in (b"", told[:-1], told[4:], told + told, b"\0" * 100):
        with pytest.raises(RequestError):
            kitchen.membership.following(cut)
    statement, *signatures = parted(told, "it")
    other = Kept.founded("other")
    other.taking_in("kitchen", identity=kitchen.membership.identity)
    theirs, *_ = parted(other.rotate(), "it")
    for mixed in ([theirs, *signatures], [statement, *signatures[::-1]]):
        with pytest.raises(RequestError):
            kitchen.membership.following(joined(mixed))


def test_no_key_comes_again() -> None:
    """Whoever has both keys of a cluster leads nobody back to the first."""
    attic = Kept.founded()
    kitchen = attic.taking_in("kitchen")
    first = attic.membership
    kitchen.membership = kitchen.membership.following(attic.rotate())
    assert attic.membership.authority is not None
    back = Rotation.made(
        before=attic.membership.authority.key,
        device=attic.membership.identity,
        cluster=first.cluster,
        tag_key=first.tag_key,
        certificates=first.taken_in,
    )
    with pytest.raises(RequestError, match="not the next one"):
        kitchen.membership.following(back.signed)


def test_nobody_reads_the_entry_of_another() -> None:
    attic = Kept.founded()
    kitchen, cellar = attic.taking_in("kitchen"), attic.taking_in("cellar")
    told = attic.rotate()
    for secret in (b"kitchen", b"cellar", attic.membership.tag_key):
        assert secret not in told
    assert kitchen.membership.identity.id.encode() not in told
    own = Rotation.read(told).opened(kitchen.membership.identity)
    assert own is not None
    assert own != Rotation.read(told).opened(cellar.membership.identity)
    assert Rotation.read(told).opened(Identity.made()) is None


def test_as_many_devices_go_along_as_a_handshake_can_tell() -> None:
    attic = Kept.founded()
    kitchen = attic.taking_in("x" * 64)
    taken_in = attic.membership.taken_in
    certificate = next(iter(taken_in.values()))
    many = {str(number): certificate for number in range(MOST_CARRIED)}
    attic.change(lambda newest: replace(newest, taken_in=many))
    told = attic.rotate()
    assert len(told) < MAX_ROTATION_BYTES
    kitchen.membership.following(told)
    attic.change(lambda newest: replace(newest, taken_in={**many, "one more": certificate}))
    with pytest.raises(RequestError, match="257 devices are too many"):
        attic.rotate()


def test_a_device_that_is_taken_in_again_has_its_last_certificate_only() -> None:
    attic = Kept.founded()
    phone = attic.taking_in("phone", [LEND, USE])
    id = phone.membership.identity.id
    assert attic.membership.expelled.editions == {}
    again = attic.taking_in("phone", [LEND], phone.membership.identity)
    assert again.membership.roles == {LEND}
    admitted = attic.credentials().is_admitted
    assert not admitted(id, 0)
    assert admitted(id, 1)
    assert admitted(id, None)
    assert attic.membership.expelled.ids == set()

    kitchen = attic.taking_in("kitchen")
    older = kitchen.membership.expelled
    third = attic.taking_in("phone", [USE], phone.membership.identity)
    kitchen.change(lambda newest: newest.hearing(attic.membership.expelled.signed))
    assert not kitchen.credentials().is_admitted(id, 1)
    assert kitchen.membership.hearing(older.signed) is kitchen.membership
    attic.change(lambda newest: newest.expelling(id))
    kitchen.change(lambda newest: newest.hearing(attic.membership.expelled.signed))
    assert not kitchen.credentials().is_admitted(id, 2)
    assert len(kitchen.membership.expelled.lists) == 1
    assert third.membership.roles == {USE}


def test_a_certificate_of_another_holder_of_the_key_replaces_one_too() -> None:
    """Of two holders, neither knows what the other one gives; both know the list."""
    attic = Kept.founded()
    phone = attic.taking_in("phone", [LEND, USE])
    identity = phone.membership.identity
    attic.taking_in("phone", [LEND], identity)
    script = Kept(enrolled_by_token(token(attic.membership), "it", "script", Identity.made()))
    script.taking_in("phone", [USE], identity)
    admitted = script.credentials().is_admitted
    assert [admitted(identity.id, edition) for edition in range(3)] == [False, False, True]

    attic.change(lambda newest: newest.hearing(script.membership.expelled.signed))
    with pytest.raises(RequestError, match="was left behind"):
        phone.membership.following(attic.rotate())


def test_a_token_replaces_what_it_does_not_know_of() -> None:
    """Nothing was listed before: each device has had one certificate."""
    attic = Kept.founded()
    phone = attic.taking_in("phone", [LEND, USE])
    id = phone.membership.identity.id
    script = Kept(enrolled_by_token(token(attic.membership), "it", "script", Identity.made()))
    again = script.taking_in("phone", [LEND], phone.membership.identity)
    attic.change(lambda newest: newest.hearing(script.membership.expelled.signed))
    for kept in (attic, script):
        admitted = kept.credentials().is_admitted
        assert [admitted(id, edition) for edition in range(2)] == [False, True]
    assert again.membership.roles == {LEND}
    third = attic.taking_in("phone", [USE], phone.membership.identity)
    assert not attic.credentials().is_admitted(id, 1)
    assert third.membership.roles == {USE}


def test_what_an_earlier_version_gave_is_replaced() -> None:
    """It kept names only."""
    attic = Kept.founded()
    phone = attic.taking_in("phone", [LEND, USE])
    identity = phone.membership.identity
    attic.change(lambda newest: replace(newest, taken_in={}))
    attic.taking_in("phone", [USE], identity)
    assert not attic.credentials().is_admitted(identity.id, 0)
    assert attic.credentials().is_admitted(identity.id, 1)


def test_lists_of_two_holders_of_the_key_are_joined() -> None:
    attic = Kept.founded()
    phone = attic.taking_in("phone")
    script = Kept(enrolled_by_token(token(attic.membership), "it", "script", Identity.made()))
    script.change(lambda newest: newest.expelling("f" * 32))
    attic.taking_in("phone", [USE], phone.membership.identity)
    both = attic.membership.hearing(script.membership.expelled.signed).expelled
    again = script.membership.hearing(attic.membership.expelled.signed).expelled
    assert both == again
    assert both.ids == {"f" * 32}
    assert both.editions == {phone.membership.identity.id: 1}


def test_what_was_kept_is_read_again(tmp_path: Path) -> None:
    attic = Kept.founded()
    attic.taking_in("kitchen")
    attic.rotate()
    cellar = attic.taking_in("cellar")
    for number, kept in enumerate(
        (attic.membership, replace(cellar.membership, past=attic.membership.past))
    ):
        store = MembershipStore(tmp_path / str(number))
        store.keep(kept)
        again = MembershipStore(store.folder).membership()
        assert again is not None
        assert (again.past, again.taken_in, again.others) == (kept.past, kept.taken_in, kept.others)
        assert again.generation == 1


def test_a_file_of_a_version_before_is_read(tmp_path: Path) -> None:
    store = MembershipStore(tmp_path / "keys")
    store.founded("attic")
    path = store.folder / "membership.json"
    values = json.loads(path.read_bytes())
    later = {name: values.pop(name) for name in ("taken_in", "past")}
    path.write_text(json.dumps(values))
    assert (now := MembershipStore(store.folder).membership()) is not None
    assert (now.past, now.taken_in) == ((), {})
    for name in later:
        for damage in ("AAAA", "AAAAAQA=", "AAAAAAAAAAAAAAAA"):
            path.write_text(json.dumps({**values, **later, name: damage}))
            with pytest.raises(RequestError, match=r"membership\.json"):
                MembershipStore(store.folder).membership()


def test_nothing_is_kept_that_could_not_be_read_again(tmp_path: Path) -> None:
    store = MembershipStore(tmp_path / "keys")
    before = store.founded("attic")
    attic = Kept(before)
    attic.taking_in("kitchen")
    (certificate,) = attic.membership.taken_in.values()
    many = {f"{number:032x}": certificate for number in range(6000)}
    with pytest.raises(RequestError, match="too many devices"):
        store.change(lambda newest: replace(newest, taken_in=many))
    again = MembershipStore(store.folder).membership()
    assert again is not None
    assert again.cluster_id == before.cluster_id
    assert again.authority is not None


def test_only_the_device_with_the_key_rotates() -> None:
    attic = Kept.founded()
    with pytest.raises(RequestError, match="not have the cluster's key; rotate it on the device"):
        attic.taking_in("kitchen").rotate()
    alone = Membership.founded("alone").rotated("alone")
    assert (alone.generation, alone.others) == (1, {})
