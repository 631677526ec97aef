"""Keys, certificates, lists of the expelled, and the files that keep them."""

from __future__ import annotations

import base64
import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from edge.errors import RequestError
from edge.membership.current import CurrentMembership
from edge.membership.identity import Identity, fingerprint, key_id
from edge.membership.membership import (
    MOST_EXPELLED,
    Expelled,
    Membership,
    credentials,
)
from edge.membership.store import (
    CONFIG_VARIABLE,
    TOKEN_VARIABLE,
    MembershipStore,
    enrolled_by_token,
    read_token,
    token,
    write_token,
)
from edge.transport import RefusedError
from edge.transport.handshake import encode_hello


@pytest.fixture
def store(tmp_path: Path) -> MembershipStore:
    return MembershipStore(tmp_path / "keys")


def without_key(membership: Membership) -> Membership:
    """As a device has it that may not take others in."""
    return replace(membership, authority=None)


def id_of(number: int) -> str:
    return f"{1 << 127 | number:032x}"


def listing(membership: Membership, *numbers: int, epoch: int = 1) -> bytes:
    """What a holder of the cluster's key tells who has heard of nobody else's lists."""
    assert membership.authority is not None
    signed = membership.authority.expelled(map(id_of, numbers), epoch).public_bytes(Encoding.DER)
    return len(signed).to_bytes(4) + signed


def test_an_id_is_a_hash_of_the_public_key() -> None:
    identity = Identity.made()
    assert identity.id == Identity(identity.key).id == key_id(identity.key.public_key())
    assert len(identity.id) == 32
    assert int(identity.id, 16)
    assert identity.id != Identity.made().id
    assert fingerprint(identity.id).replace(" ", "") == identity.id[:16]


def test_what_was_kept_is_read_again(store: MembershipStore) -> None:
    assert store.membership() is None
    founded = store.founded("attic")
    again = MembershipStore(store.folder).membership()
    assert again is not None
    assert again.identity.id == founded.identity.id == store.identity().id
    assert again.certificate == founded.certificate
    assert again.tag_key == founded.tag_key
    assert again.authority is not None
    assert store.founded("another name").certificate == founded.certificate
    for path in store.folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700


def test_what_another_process_changed_is_seen(store: MembershipStore) -> None:
    founded = store.founded("attic")
    other = MembershipStore(store.folder)
    other.change(lambda newest: newest.expelling("f" * 32))
    now = store.membership()
    assert now is not None
    assert now.expelled.ids == {"f" * 32}
    assert now.certificate == founded.certificate
    store.change(without_key)
    assert (seen := other.membership()) is not None
    assert seen.authority is None


def test_a_file_that_is_replaced_within_one_tick_of_the_clock_is_seen(
    store: MembershipStore,
) -> None:
    store.founded("attic")
    path = store.folder / "membership.json"
    assert store.membership() is not None
    was = path.stat().st_mtime_ns
    MembershipStore(store.folder).change(lambda newest: newest.expelling("f" * 32))
    os.utime(path, ns=(was, was))
    assert (now := store.membership()) is not None
    assert now.expelled.ids == {"f" * 32}


def test_changes_at_once_are_all_kept(tmp_path: Path) -> None:
    MembershipStore(tmp_path).founded("attic")

    def meet(number: int) -> None:
        def change(newest: Membership) -> Membership:
            if number % 2:
                return newest.expelling(id_of(number))
            return newest.knowing(id_of(number), "one")

        MembershipStore(tmp_path).change(change)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(meet, range(16)))
    assert (now := MembershipStore(tmp_path).membership()) is not None
    assert set(now.others) == {id_of(number) for number in range(0, 16, 2)}
    assert now.expelled.ids == {id_of(number) for number in range(1, 16, 2)}


def test_what_is_heard_leaves_a_pairing_made_meanwhile(store: MembershipStore) -> None:
    founded = store.founded("attic")
    other = MembershipStore(store.folder)

    def current() -> Membership:
        other.change(lambda newest: newest.knowing("b" * 32, "kitchen"))
        return founded

    credentials(current, store.change).heard(listing(founded, 1))
    assert (now := store.membership()) is not None
    assert now.others == {"b" * 32: "kitchen"}
    assert now.expelled.ids == {id_of(1)}


def test_no_crash_between_two_files_takes_the_clusters_key(
    store: MembershipStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    founded = store.founded("attic")
    replaced: list[str] = []
    write = Path.replace

    def crash(draft: Path, path: Path) -> Path:
        replaced.append(path.name)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", crash)
    renewed = Membership.founded("attic", founded.identity)
    with pytest.raises(RequestError, match="No space left"):
        store.keep(renewed)
    monkeypatch.setattr(Path, "replace", write)
    assert replaced == ["membership.json"]
    assert (now := MembershipStore(store.folder).membership()) is not None
    assert now.cluster_id == founded.cluster_id
    assert now.authority is not None
    store.keep(renewed)
    assert (now := MembershipStore(store.folder).membership()) is not None
    assert now.cluster_id == renewed.cluster_id
    assert {path.name for path in store.folder.iterdir()} == {
        "identity.pem",
        "membership.json",
        "lock",
    }


def test_a_clusters_key_of_another_cluster_is_refused(store: MembershipStore) -> None:
    store.founded("attic")
    path = store.folder / "membership.json"
    others = json.loads(token(Membership.founded("other")))
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "key": others["key"]}))
    with pytest.raises(RequestError, match="parts are of different clusters"):
        MembershipStore(store.folder).membership()


def test_a_token_with_a_changed_certificate_is_refused() -> None:
    parts = json.loads(token(Membership.founded("first")))
    certificate = bytearray(base64.b64decode(parts["cluster"]))
    at = certificate.index(b"\x06\x03\x55\x04\x03")  # the subject's, or the issuer's, name
    certificate[at + 7] ^= 0x80
    changed = {**parts, "cluster": base64.b64encode(certificate).decode()}
    with pytest.raises(RequestError, match="the token"):
        enrolled_by_token(json.dumps(changed).encode(), "the token", "second", Identity.made())


def test_all_that_start_at_once_are_of_one_cluster(tmp_path: Path) -> None:
    def founded(_: int) -> str:
        return MembershipStore(tmp_path / "keys").founded("attic").cluster_id

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(founded, range(8)))) == 1


@pytest.mark.parametrize("name", ["identity.pem", "membership.json"])
def test_a_file_that_others_can_read_is_refused(store: MembershipStore, name: str) -> None:
    store.founded("attic")
    (store.folder / name).chmod(0o644)
    with pytest.raises(RequestError, match=f"{name} can be read or changed by others.*chmod 600"):
        MembershipStore(store.folder).founded("attic")


@pytest.mark.parametrize("name", ["identity.pem", "membership.json"])
@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"{}", b'{"certificate": 5}', b"[" * 100_000, b"\xff" * 100, b"a" * 300_000],
    ids=["empty", "brace", "list", "object", "number", "deep", "bytes", "large"],
)
def test_a_damaged_file_is_named(store: MembershipStore, name: str, content: bytes) -> None:
    store.founded("attic")
    (store.folder / name).write_bytes(content)
    with pytest.raises(RequestError, match=name):
        MembershipStore(store.folder).membership()


def test_a_key_of_another_kind_is_refused(store: MembershipStore) -> None:
    store.founded("attic")
    for key in (ed25519.Ed25519PrivateKey.generate(), ec.generate_private_key(ec.SECP384R1())):
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        (store.folder / "identity.pem").write_bytes(pem)
        with pytest.raises(RequestError, match="not a key of the kind"):
            MembershipStore(store.folder).membership()


def test_another_devices_membership_is_refused(store: MembershipStore, tmp_path: Path) -> None:
    store.founded("attic")
    other = MembershipStore(tmp_path / "other")
    other.founded("kitchen")
    stolen = (store.folder / "membership.json").read_bytes()
    (other.folder / "membership.json").write_bytes(stolen)
    with pytest.raises(RequestError, match="another device's"):
        MembershipStore(other.folder).membership()


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(RequestError, match=f"{CONFIG_VARIABLE} names another folder"):
        MembershipStore(tmp_path / "keys").founded("attic")


def test_a_file_where_the_folder_should_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("")
    with pytest.raises(RequestError, match=f"{CONFIG_VARIABLE} names another folder"):
        MembershipStore(tmp_path / "keys").founded("attic")


def test_the_newest_list_of_the_expelled_counts() -> None:
    first = Membership.founded("first")
    once = first.expelling("a" * 32)
    twice = once.expelling("b" * 32)
    assert twice.expelled.ids == {"a" * 32, "b" * 32}
    assert (once.expelled.epoch, twice.expelled.epoch) == (1, 2)
    assert first.hearing(twice.expelled.signed).expelled.ids == twice.expelled.ids
    assert twice.hearing(once.expelled.signed) is twice


def test_what_several_holders_of_the_key_have_signed_is_joined() -> None:
    first = Membership.founded("first")
    assert first.authority is not None
    second = Membership.enrolled(first.authority, first.tag_key, "second")
    one, other = first.expelling(id_of(1)), second.expelling(id_of(2))
    assert one.expelled.epoch == other.expelled.epoch == 1
    both = without_key(second).hearing(one.expelled.signed).hearing(other.expelled.signed)
    assert both.expelled.ids == {id_of(1), id_of(2)}
    again = without_key(second).hearing(other.expelled.signed).hearing(one.expelled.signed)
    assert again.expelled == both.expelled
    assert both.hearing(one.expelled.signed) is both
    assert first.hearing(both.expelled.signed).expelled == both.expelled

    later = one.expelling(id_of(3)).expelling(id_of(4))
    everything = both.hearing(later.expelled.signed)
    assert everything.expelled.ids == set(map(id_of, range(1, 5)))
    assert len(everything.expelled.lists) == 2
    assert everything.expelled.epoch == 3
    last = replace(everything, authority=first.authority).expelling(id_of(5))
    assert last.expelled.epoch == 4
    assert len(last.expelled.lists) == 1
    assert everything.hearing(last.expelled.signed).expelled == last.expelled


def test_devices_agree_on_one_of_two_lists_that_say_the_same() -> None:
    first = Membership.founded("first")
    one, other = listing(first, 1, 2), listing(first, 2, 1)
    newer = listing(first, 1, 2, epoch=2)
    assert one != other
    assert first.hearing(one).hearing(other).expelled == first.hearing(other).hearing(one).expelled
    assert first.hearing(newer).hearing(one).expelled.signed == newer
    assert first.hearing(one).hearing(newer).expelled.signed == newer


def test_more_lists_than_a_hello_holds_are_refused() -> None:
    first = Membership.founded("first")
    now = first
    for number in range(16):
        now = now.hearing(listing(first, number))
    with pytest.raises(RequestError, match="`edge cluster rotate` is due"):
        now.hearing(listing(first, 16))
    with pytest.raises(RequestError, match="list of expelled devices has too many parts"):
        first.hearing(now.expelled.signed + listing(first, 16))
    with pytest.raises(RefusedError, match="rotate"):
        credentials(lambda: now).heard(listing(first, 16))
    assert now.expelled.ids == set(map(id_of, range(16)))
    assert len(now.expelling(id_of(16)).expelled.lists) == 1
    large = first.hearing(listing(first, *range(MOST_EXPELLED)))
    with pytest.raises(RequestError, match="`edge cluster rotate` is due"):
        large.hearing(listing(first, *range(5000, 5300)))


def test_a_device_that_is_paired_again_forgets_nobody(store: MembershipStore) -> None:
    founded = store.founded("attic")
    store.change(lambda newest: newest.expelling(id_of(1)))
    other = replace(founded, others={}).expelling(id_of(2))
    assert store.keep(other).expelled.ids == {id_of(1), id_of(2)}
    assert store.keep(Membership.founded("attic", founded.identity)).expelled.ids == set()


def test_a_list_that_the_cluster_has_not_signed_is_refused() -> None:
    first, other = Membership.founded("first"), Membership.founded("other")
    signed = other.expelling(first.identity.id).expelled.signed
    for content in (signed, signed[:-1], signed[4:], b"\0", b"\0" * 100, bytes(100_000)):
        with pytest.raises(RequestError, match="list of expelled"):
            first.hearing(content)
    half_own = listing(first, 1) + signed
    with pytest.raises(RequestError, match="not signed by the cluster's key"):
        first.hearing(half_own)
    with pytest.raises(RequestError, match="not have the cluster's key"):
        without_key(first).expelling("a" * 32)


def test_a_token_makes_whoever_holds_it_a_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Membership.founded("first").expelling("a" * 32)
    path = tmp_path / "token"
    write_token(path, first)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(RequestError, match="is there already"):
        write_token(path, first)
    identity = Identity.made()
    second = enrolled_by_token(read_token(path), "the token", "second", identity)
    assert second.identity.id == identity.id
    assert second.cluster_id == first.cluster_id
    assert second.tag_key == first.tag_key
    assert second.expelled == first.expelled
    second.certificate.verify_directly_issued_by(first.cluster)
    with pytest.raises(RequestError, match="not have the cluster's key"):
        token(without_key(first))

    monkeypatch.setenv(CONFIG_VARIABLE, str(tmp_path / "keys"))
    monkeypatch.setenv(TOKEN_VARIABLE, str(path))
    own = CurrentMembership("script").current()
    assert own.cluster_id == first.cluster_id
    assert own.identity.id == MembershipStore(tmp_path / "keys").identity().id
    path.chmod(0o604)
    with pytest.raises(RequestError, match="chmod 600"):
        CurrentMembership("script")


def test_who_was_expelled_outlasts_a_process_with_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Membership.founded("first")
    path, keys = tmp_path / "token", tmp_path / "keys"
    write_token(path, first.expelling(id_of(1)))
    monkeypatch.setenv(CONFIG_VARIABLE, str(keys))
    monkeypatch.setenv(TOKEN_VARIABLE, str(path))
    running, own = CurrentMembership("daemon"), CurrentMembership("script")
    own.credentials().heard(listing(first, 2))
    own.change(lambda newest: newest.expelling(id_of(3)))
    everybody = set(map(id_of, range(1, 4)))
    for each in (own, running, CurrentMembership("later")):
        assert each.current().expelled.ids == everybody
    running.change(lambda newest: newest.expelling(id_of(4)))
    assert own.current().expelled.ids == everybody | {id_of(4)}
    assert own.current().expelled.epoch == 3
    kept = keys / f"expelled-{first.cluster_id}"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert not (keys / "membership.json").exists()

    other = tmp_path / "other"
    write_token(other, Membership.founded("other"))
    monkeypatch.setenv(TOKEN_VARIABLE, str(other))
    assert CurrentMembership("script").current().expelled.ids == set()

    monkeypatch.setenv(TOKEN_VARIABLE, str(path))
    signed = kept.read_bytes()
    for content in (
        b"\0",
        signed[:-1],
        Membership.founded("x").expelling("a" * 32).expelled.signed,
    ):
        kept.write_bytes(content)
        with pytest.raises(RequestError, match=kept.name):
            CurrentMembership("script")
    kept.write_bytes(signed)
    kept.chmod(0o644)
    with pytest.raises(RequestError, match="chmod 600"):
        CurrentMembership("script")


def test_processes_with_a_token_expel_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_token(tmp_path / "token", Membership.founded("first"))
    monkeypatch.setenv(CONFIG_VARIABLE, str(tmp_path / "keys"))
    monkeypatch.setenv(TOKEN_VARIABLE, str(tmp_path / "token"))

    def expel(number: int) -> None:
        CurrentMembership("script").change(partial(Membership.expelling, id=id_of(number)))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(expel, range(8)))
    expelled = CurrentMembership("script").current().expelled
    assert expelled.ids == set(map(id_of, range(8)))
    assert expelled.epoch == 8


def test_a_damaged_token_is_refused() -> None:
    first, other = Membership.founded("first"), Membership.founded("other")
    values, others = json.loads(token(first)), json.loads(token(other))
    damaged = [
        b"",
        b"{}",
        b"[1]",
        json.dumps({**values, "key": others["key"]}).encode(),
        json.dumps({**values, "tag_key": "AAAA"}).encode(),
        json.dumps({**values, "cluster": "AAAA"}).encode(),
        json.dumps({**values, "key": "AAAA"}).encode(),
        json.dumps({**values, "expelled": "AAAA"}).encode(),
    ]
    for content in damaged:
        with pytest.raises(RequestError):
            enrolled_by_token(content, "the token", "mallory", Identity.made())


def test_a_device_in_no_cluster_makes_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIG_VARIABLE, str(tmp_path / "keys"))
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    current = CurrentMembership("attic").current
    assert current().cluster_id == CurrentMembership("attic").current().cluster_id
    store = MembershipStore(tmp_path / "keys")
    store.change(lambda newest: newest.expelling("c" * 32))
    assert current().expelled.ids == {"c" * 32}


def test_names_of_any_kind_go_into_certificates() -> None:
    first = Membership.founded("Zoë's phone 📱" + "x" * 100)
    assert first.authority is not None
    Membership.enrolled(first.authority, first.tag_key, "")
    assert Expelled().ids == frozenset()


def test_a_hello_has_room_for_the_longest_list() -> None:
    founded = Membership.founded("attic")
    signed = listing(founded, *range(MOST_EXPELLED), epoch=1 << 60)
    assert len(Expelled.read(signed, founded.cluster).ids) == MOST_EXPELLED
    news = base64.b64encode(signed).decode()
    encode_hello({"name": "x" * 300, "id": "a" * 32, "software": "1.2.3", "news": news})
