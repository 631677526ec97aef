"""Keys, certificates, lists of the expelled, and the files that keep them."""

from __future__ import annotations

import base64
import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from edge.errors import RequestError
from edge.membership.identity import Identity, fingerprint, key_id
from edge.membership.membership import MOST_EXPELLED, Expelled, Membership
from edge.membership.own import OwnMembership
from edge.membership.store import (
    CONFIG_VARIABLE,
    TOKEN_VARIABLE,
    MembershipStore,
    enrolled_by_token,
    read_token,
    token,
    write_token,
)
from transport.handshake import encode_hello


@pytest.fixture
def store(tmp_path: Path) -> MembershipStore:
    return MembershipStore(tmp_path / "keys")


def without_key(membership: Membership) -> Membership:
    """As a device has it that may not take others in."""
    return replace(membership, authority=None)


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
    other.keep(founded.expelling("f" * 32))
    now = store.membership()
    assert now is not None
    assert now.expelled.ids == {"f" * 32}
    store.keep(without_key(now))
    assert (seen := other.membership()) is not None
    assert seen.authority is None


def test_all_that_start_at_once_are_of_one_cluster(tmp_path: Path) -> None:
    def founded(_: int) -> str:
        return MembershipStore(tmp_path / "keys").founded("attic").cluster_id

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(founded, range(8)))) == 1


@pytest.mark.parametrize("name", ["identity.pem", "membership.json", "cluster-key.pem"])
def test_a_file_that_others_can_read_is_refused(store: MembershipStore, name: str) -> None:
    store.founded("attic")
    (store.folder / name).chmod(0o644)
    with pytest.raises(RequestError, match=f"{name} can be read or changed by others.*chmod 600"):
        MembershipStore(store.folder).founded("attic")


@pytest.mark.parametrize("name", ["identity.pem", "membership.json", "cluster-key.pem"])
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
    assert twice.hearing(once.expelled.signed).expelled == twice.expelled


def test_a_list_that_the_cluster_has_not_signed_is_refused() -> None:
    first, other = Membership.founded("first"), Membership.founded("other")
    signed = other.expelling(first.identity.id).expelled.signed
    for content in (signed, signed[:-1], b"", b"\0" * 100, bytes(100_000)):
        with pytest.raises(RequestError, match="list of expelled"):
            first.hearing(content)
    with pytest.raises(RequestError, match="not the cluster's key"):
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
    with pytest.raises(RequestError, match="not the cluster's key"):
        token(without_key(first))

    monkeypatch.setenv(CONFIG_VARIABLE, str(tmp_path / "keys"))
    monkeypatch.setenv(TOKEN_VARIABLE, str(path))
    own = OwnMembership("script").current()
    assert own.cluster_id == first.cluster_id
    assert own.identity.id == MembershipStore(tmp_path / "keys").identity().id
    path.chmod(0o604)
    with pytest.raises(RequestError, match="chmod 600"):
        OwnMembership("script")


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
    current = OwnMembership("attic").current
    assert current().cluster_id == OwnMembership("attic").current().cluster_id
    store = MembershipStore(tmp_path / "keys")
    store.keep(current().expelling("c" * 32))
    assert current().expelled.ids == {"c" * 32}


def test_names_of_any_kind_go_into_certificates() -> None:
    first = Membership.founded("Zoë's phone 📱" + "x" * 100)
    assert first.authority is not None
    Membership.enrolled(first.authority, first.tag_key, "")
    assert Expelled().ids == frozenset()


def test_a_hello_has_room_for_the_longest_list() -> None:
    founded = Membership.founded("attic")
    assert founded.authority is not None
    ids = [f"{number:032x}" for number in range(1 << 127, (1 << 127) + MOST_EXPELLED)]
    signed = founded.authority.expelled(ids, 1 << 60).public_bytes(Encoding.DER)
    assert len(Expelled.read(signed, founded.cluster).ids) == MOST_EXPELLED
    news = base64.b64encode(signed).decode()
    encode_hello({"name": "x" * 300, "id": "a" * 32, "software": "1.2.3", "news": news})
