"""One device's place in one cluster: what it shows to others, and whom it takes."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from edge.errors import RequestError
from edge.membership.authority import MALFORMED, Authority, counted, maker_of, superseded
from edge.membership.identity import Identity, PublicKey, key_id, key_pem
from edge.membership.length_prefix import joined, parted
from edge.membership.roles import ROLES
from edge.membership.rotation import MOST_CARRIED, MOST_ROTATIONS, Rotation
from edge.membership.tls_credentials import TlsCredentials, member_of, shown_tag_key
from edge.transport import Credentials, Member, Past, RefusedError

TAG_KEY_BYTES = 32
MOST_EXPELLED = 1024
_MOST_LIST_BYTES = 44 << 10
"""More than MOST_EXPELLED take; a hello, of at most 64 KiB, holds so much as text."""
_MOST_LISTS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedList:
    """One list of the expelled."""

    epoch: int
    ids: frozenset[str]
    editions: Mapping[str, int] = field(default_factory=dict)
    """The least that counts of a device's certificates, where others of it were given."""
    signed: bytes
    """As the cluster's key has signed it (DER)."""

    @classmethod
    def read(cls, signed: bytes, authority: x509.Certificate) -> SignedList:
        """Raises RequestError for what the cluster's key has not signed.

        Nothing that is said in it of the device that made the key counts: whoever has got hold of a
        token could else keep the members from the next key, which that device alone can make.
        """
        try:
            known = x509.load_der_x509_crl(signed)
            key = authority.public_key()
            assert isinstance(key, PublicKey)
            if not known.is_signature_valid(key):
                raise RequestError("a list of expelled devices was not signed by the cluster's key")
            epoch = known.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
            told = {f"{entry.serial_number:032x}": superseded(entry) for entry in known}
        except MALFORMED as error:
            raise RequestError(f"a list of expelled devices cannot be read: {error}") from error
        told.pop(maker_of(authority) or "", None)
        ids = frozenset(id for id, edition in told.items() if edition is None)
        editions = {id: edition for id, edition in told.items() if edition is not None}
        return cls(epoch=epoch, ids=ids, editions=editions, signed=signed)

    def says(self, other: SignedList) -> bool:
        """Whether it says all that the other one says."""
        return other.ids <= self.ids and all(
            id in self.ids or self.editions.get(id, 0) >= edition
            for id, edition in other.editions.items()
        )


@dataclass(frozen=True, slots=True)
class Expelled:
    """All who were expelled, as far as this device has heard.

    Several devices may have the cluster's key, and expel without knowing of each other: so there
    may be several lists, and who stands in any of them is expelled.
    """

    lists: tuple[SignedList, ...] = ()
    """None of them says only what another one says."""

    @classmethod
    def of(cls, lists: Iterable[SignedList]) -> Expelled:
        """The same for everybody who knows these lists. Raises RequestError for too much."""
        kept: list[SignedList] = []
        longest_first = sorted(
            lists,
            key=lambda each: (len(each.ids), sum(each.editions.values()), each.epoch, each.signed),
            reverse=True,
        )
        for each in longest_first:
            if not any(other.says(each) for other in kept):
                kept.append(each)
        expelled = cls(tuple(kept))
        if len(kept) > _MOST_LISTS or len(expelled.signed) > _MOST_LIST_BYTES:
            raise RequestError(
                "the lists of expelled devices are too long; `edge cluster rotate` is due"
            )
        return expelled

    @classmethod
    def read(cls, signed: bytes, authority: x509.Certificate) -> Expelled:
        """From `signed`. Raises RequestError for what the cluster's key has not signed."""
        if len(signed) > _MOST_LIST_BYTES:
            raise RequestError("a list of expelled devices is too long")
        parts = list(parted(signed, "a list of expelled devices"))
        if len(parts) > _MOST_LISTS:
            raise RequestError("a list of expelled devices has too many parts")
        return cls.of(SignedList.read(part, authority) for part in parts)

    @property
    def epoch(self) -> int:
        """The highest; 0 before the first list."""
        return max((each.epoch for each in self.lists), default=0)

    @property
    def ids(self) -> frozenset[str]:
        return frozenset(id for each in self.lists for id in each.ids)

    @property
    def editions(self) -> Mapping[str, int]:
        """The least that counts of a device's certificates, where others of it were given."""
        least: dict[str, int] = {}
        for each in self.lists:
            for id, edition in each.editions.items():
                least[id] = max(edition, least.get(id, 0))
        return least

    @property
    def signed(self) -> bytes:
        """What others are told: each list after its length; nothing before the first list."""
        return joined(each.signed for each in self.lists)

    def joined(self, other: Expelled) -> Expelled:
        """All that stand in either. Raises RequestError for too much."""
        return Expelled.of((*self.lists, *other.lists))


@dataclass(frozen=True, slots=True, kw_only=True)
class PastKey:
    """A key that the cluster had, and how a member of that time becomes one of today."""

    before: str
    """The cluster's id then."""
    tag_key: bytes = field(repr=False)
    """The tag key then."""
    rotation: bytes = field(repr=False)
    """What those are told who have these still."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """Everything that a device needs to be of a cluster; with `authority` it takes others in."""

    identity: Identity
    certificate: x509.Certificate
    cluster: x509.Certificate
    """The cluster's own certificate, which all members know."""
    tag_key: bytes
    expelled: Expelled = Expelled()
    authority: Authority | None = None
    others: Mapping[str, str] = field(default_factory=dict)
    """Names, by id, of the devices that this one has met in pairing."""
    taken_in: Mapping[str, x509.Certificate] = field(default_factory=dict)
    """The certificates, by id, of those that it has taken in."""
    past: tuple[PastKey, ...] = ()
    """The oldest first."""
    by_token: bool = False
    """It knows of no certificates that other devices have given, but for what lists say."""

    @classmethod
    def founded(cls, name: str, identity: Identity | None = None) -> Membership:
        """The first device of a new cluster."""
        identity = identity or Identity.made()
        authority = Authority.made(identity.id)
        return cls.enrolled(authority, os.urandom(TAG_KEY_BYTES), name, identity)

    @classmethod
    def enrolled(
        cls, authority: Authority, tag_key: bytes, name: str, identity: Identity | None = None
    ) -> Membership:
        """A device that has the cluster's key takes itself in."""
        identity = identity or Identity.made()
        return cls(
            identity=identity,
            certificate=authority.member(identity.key.public_key(), name),
            cluster=authority.certificate,
            tag_key=tag_key,
            authority=authority,
        )

    @property
    def cluster_id(self) -> str:
        """Names the cluster to people and in announcements' tags; says nothing of it."""
        key = self.cluster.public_key()
        assert isinstance(key, PublicKey)
        return key_id(key)

    @property
    def maker(self) -> str | None:
        """The id of the device that made the cluster's key, as all members know it; None: an
        earlier version did."""
        return maker_of(self.cluster)

    @property
    def generation(self) -> int:
        """How many keys the cluster has had before."""
        return counted(self.cluster)

    @property
    def roles(self) -> frozenset[str]:
        """What this device may do in the cluster."""
        return roles_in(self.certificate)

    def shown(self) -> TlsCredentials:
        """What others are shown, with the keys for that."""
        return TlsCredentials(
            id=self.identity.id,
            certificate=self.certificate.public_bytes(Encoding.PEM).decode(),
            key=key_pem(self.identity.key).decode(),
            cluster=self.cluster.public_bytes(Encoding.PEM).decode(),
            tag_key=self.tag_key.hex(),
            own_secret=self.identity.secret("edge what others keep").hex(),
        )

    def handed(self) -> bytes:
        """Keys of another member, for a daemon that this process starts."""
        assert self.authority is not None
        member = Membership.enrolled(self.authority, self.tag_key, "local")
        return member.shown().to_bytes()

    def knowing(self, id: str, name: str) -> Membership:
        """With one more device that it has met."""
        return replace(self, others={**self.others, id: name})

    def next_edition(self, id: str) -> int:
        """Edition of the certificate of a device that is taken in now, perhaps again."""
        given = [0] if self.by_token else []
        if id in self.others:  # of which a version before this kept no certificate
            given.append(counted(self.taken_in[id]) if id in self.taken_in else 0)
        if id in self.expelled.editions:  # perhaps by another device that has the cluster's key
            given.append(self.expelled.editions[id])
        return max(given) + 1 if given else 0

    def taking_in(self, id: str, name: str, certificate: x509.Certificate) -> Membership:
        """With a device that has got this certificate; what it had before counts no more.

        Raises RequestError for too much, and where the cluster has got a new key in the meantime.
        """
        if certificate.issuer != self.cluster.subject:
            raise RequestError(
                f"the cluster got a new key while {name} joined, which has the one of before",
                remedy="pair it again",
            )
        taken_in = {**self.taken_in, id: certificate}
        known = replace(self.knowing(id, name), taken_in=taken_in)
        edition = counted(certificate)
        if edition <= self.expelled.editions.get(id, 0):
            return known
        return known._listing(self.expelled.ids, {**self.expelled.editions, id: edition})

    def expelling(self, id: str) -> Membership:
        """With one more expelled. Raises RequestError where the cluster's key is not here, and for
        the device that made it."""
        if id == self.maker:
            raise RequestError(
                "this device made the cluster, and nobody can expel it; if it is in wrong hands, "
                "make another cluster on a device of yours, `edge cluster create --leave`, and "
                "pair the others with that"
            )
        return self._listing(self.expelled.ids | {id}, self.expelled.editions)

    def _listing(self, ids: frozenset[str], editions: Mapping[str, int]) -> Membership:
        """Who is expelled now, in one list."""
        if self.authority is None:
            raise RequestError(
                "this device has not the cluster's key; expel it on a device that takes others in"
            )
        spared = {*ids, self.maker}
        editions = {id: edition for id, edition in editions.items() if id not in spared}
        if len(ids) + len(editions) > MOST_EXPELLED:
            raise RequestError(f"more than {MOST_EXPELLED} expelled: `edge cluster rotate` is due")
        epoch = self.expelled.epoch + 1
        signed = self.authority.expelled(ids, epoch, editions).public_bytes(Encoding.DER)
        now = SignedList(epoch=epoch, ids=ids, editions=editions, signed=signed)
        return replace(self, expelled=Expelled.of([now]))

    def rotated(self, name: str, forgiven: Collection[str] = ()) -> Membership:
        """The cluster under a new key, with all whom this device has taken in and nobody has
        expelled or taken in since; `name` is its own. Of others it has no certificate that counts:
        they stay behind. `forgiven`: ids of those that it has taken in and that go along whatever
        lists say, which whoever has a token may have signed.

        Raises RequestError where the cluster's key is not here, and for too many devices.
        """
        if self.authority is None:
            raise RequestError(
                "this device has not the cluster's key; rotate it on the device that made the "
                "cluster"
            )
        expelled, editions = self.expelled.ids, self.expelled.editions
        carried = {
            id: each
            for id, each in self.taken_in.items()
            if id in forgiven or (id not in expelled and counted(each) >= editions.get(id, 0))
        }
        if len(carried) > MOST_CARRIED:
            raise RequestError(
                f"{len(carried)} devices are too many to be taken along, which {MOST_CARRIED} can "
                "be",
                remedy="expel those that are gone, or add --leave and pair those again that you "
                "want",
            )
        authority = Authority.made(self.identity.id, self.generation + 1)
        new = Membership.enrolled(authority, os.urandom(TAG_KEY_BYTES), name, self.identity)
        certificates = {
            id: authority.member(_key_of(each), name_in(each), roles_in(each))
            for id, each in carried.items()
        }
        rotation = Rotation.made(
            before=self.authority.key,
            device=self.identity,
            cluster=authority.certificate,
            tag_key=new.tag_key,
            certificates=certificates,
        )
        return replace(
            new,
            others={id: name for id, name in self.others.items() if id in carried},
            taken_in=certificates,
            past=self._past_with(rotation),
        )

    def following(self, signed: bytes) -> Membership:
        """The device's place under the key that somebody has told of; itself where it has it.

        Raises RequestError, also where the device was not taken along.
        """
        rotation = Rotation.read(signed)
        if rotation.before in {each.before for each in self.past}:
            return self
        if rotation.before != self.cluster_id:
            raise RequestError("what was told is a new key of another cluster")
        if self.authority is not None:
            raise RequestError(
                "the cluster has a new key, and this token is of before; write a new one where the "
                "key was made: `edge cluster token`"
            )
        rotation.check(self.cluster)
        if not self._may_lead(rotation.maker):
            raise RequestError(
                "a new key of the cluster was not made by the device that made the one before; if "
                "it should have been, pair this one again: `edge pair`"
            )
        told = rotation.opened(self.identity)
        if told is None:
            raise RequestError(
                "the cluster has a new key, and this device was not taken along; pair it again: "
                "`edge pair`"
            )
        certificate, tag_key = told
        now = read_membership(
            identity=self.identity,
            certificate=certificate,
            cluster=rotation.cluster.public_bytes(Encoding.DER),
            tag_key=tag_key,
            expelled=b"",
        )
        if now.generation != self.generation + 1:
            raise RequestError("what was told as the cluster's new key is not the next one")
        return replace(now, others=self.others, past=self._past_with(rotation))

    def _may_lead(self, device: str) -> bool:
        """To the next key: whoever made this one. Where no certificate says who did, a device that
        this one was paired with."""
        if self.maker is not None:
            return device == self.maker
        return device in self.others and device not in self.expelled.ids

    def _past_with(self, rotation: Rotation) -> tuple[PastKey, ...]:
        last = PastKey(before=self.cluster_id, tag_key=self.tag_key, rotation=rotation.signed)
        return (*self.past, last)[-MOST_ROTATIONS:]

    def hearing(self, signed: bytes) -> Membership:
        """With the lists of the expelled that somebody has told; itself where none is new.

        Raises RequestError for what the cluster's key has not signed, and for too much.
        """
        joined = self.expelled.joined(Expelled.read(signed, self.cluster))
        return self if joined == self.expelled else replace(self, expelled=joined)


def roles_in(certificate: x509.Certificate) -> frozenset[str]:
    """What the device of a certificate may do."""
    units = certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATIONAL_UNIT_NAME)
    return frozenset(str(unit.value) for unit in units) & frozenset(ROLES)


def name_in(certificate: x509.Certificate) -> str:
    """What the device of a certificate is called."""
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if names else ""


def _key_of(certificate: x509.Certificate) -> PublicKey:
    key = certificate.public_key()
    assert isinstance(key, PublicKey)
    return key


def read_membership(
    *, identity: Identity, certificate: bytes, cluster: bytes, tag_key: bytes, expelled: bytes
) -> Membership:
    """From what a file or another device has told. Raises RequestError."""
    try:
        own, root = map(x509.load_der_x509_certificate, (certificate, cluster))
        own.verify_directly_issued_by(root)
        root.verify_directly_issued_by(root)
        key, root_key = own.public_key(), root.public_key()
    except MALFORMED as error:
        raise RequestError(f"a membership cannot be read: {error}") from error
    if len(tag_key) != TAG_KEY_BYTES or key != identity.key.public_key():
        raise RequestError("a membership is another device's")
    if not isinstance(root_key, PublicKey):
        raise RequestError("a membership is of a cluster with a key of another kind")
    return Membership(
        identity=identity,
        certificate=own,
        cluster=root,
        tag_key=tag_key,
        expelled=Expelled.read(expelled, root),
    )


def told_past(past: Iterable[PastKey]) -> bytes:
    """As files and other devices are told."""
    return joined(
        part for each in past for part in (each.before.encode(), each.tag_key, each.rotation)
    )


def read_past(told: bytes, whose: str) -> tuple[PastKey, ...]:
    """Raises RequestError, of `whose` it is, for anything that `told_past` has not made."""
    parts = list(parted(told, whose))
    if len(parts) % 3 or len(parts) > 3 * MOST_ROTATIONS:
        raise RequestError(f"{whose} cannot be read: it has {len(parts)} parts of old keys")
    past = []
    for before, tag_key, rotation in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        try:
            is_sound = Rotation.read(rotation).before.encode() == before
        except RequestError as error:
            raise RequestError(f"{whose} cannot be read: {error}") from error
        if not is_sound or len(tag_key) != TAG_KEY_BYTES:
            raise RequestError(f"{whose} cannot be read: an old key is damaged")
        past.append(PastKey(before=before.decode(), tag_key=tag_key, rotation=rotation))
    return tuple(past)


Change = Callable[[Membership], Membership]
"""From what a membership is to what it shall be."""


def ignore_news(_: Change) -> None:
    """For memberships that are not kept anywhere."""


def credentials(
    current: Callable[[], Membership], change: Callable[[Change], object] = ignore_news
) -> Credentials:
    """What connections need. `current` is asked whom to take at each of them, and `change` changes
    what is kept when others have told of a list of the expelled that is new."""
    membership = current()

    def is_admitted(id: str, edition: int | None) -> bool:
        now = current()
        counts = edition is None or edition >= now.expelled.editions.get(id, 0)
        return now.cluster_id == membership.cluster_id and id not in now.expelled.ids and counts

    def admitted(certificate: Mapping[str, Any], encoded: bytes) -> Member:
        member = member_of(certificate)
        if current().cluster_id != membership.cluster_id:
            raise RefusedError("this device is of another cluster now; start this program again")
        if not is_admitted(member.id, member.edition):
            raise RefusedError(
                f"device {member.name} ({member.id}) has been expelled from the cluster"
                if member.id in current().expelled.ids
                else f"device {member.name} ({member.id}) has shown what it could do before it was "
                "paired again; start Edge there anew"
            )
        key = x509.load_der_x509_certificate(encoded).public_key()
        if not isinstance(key, PublicKey) or key_id(key) != member.id:
            raise RefusedError(f"device {member.name} goes by the id of another key than its own")
        return member

    def is_spared(id: str) -> bool:
        return id in (membership.identity.id, membership.maker)

    def heard(signed: bytes) -> None:
        known = current()
        if not signed or signed == known.expelled.signed:
            return
        try:
            if known.hearing(signed) is not known:
                change(lambda newest: newest.hearing(signed))
        except RequestError as error:
            raise RefusedError(str(error)) from error

    def past() -> list[Past]:
        try:
            kept = current().past
        except RequestError:  # files of keys that are being mended
            return []
        return [
            Past(tag_key=shown_tag_key(each.tag_key), rotation=each.rotation)
            for each in reversed(kept)
        ]

    def follow(rotation: bytes) -> None:
        try:
            change(lambda newest: newest.following(rotation))
        except RequestError as error:
            raise RefusedError(str(error)) from error

    def now() -> Credentials:
        try:
            newest = current()
        except RequestError:  # likewise
            return own
        if newest.certificate == membership.certificate:
            return own
        ours = {newest.cluster_id, *(each.before for each in newest.past)}
        return credentials(current, change) if membership.cluster_id in ours else own

    own = membership.shown().credentials(
        admitted,
        is_admitted,
        is_spared,
        lambda: current().expelled.signed,
        heard,
        past=past,
        follow=follow,
        now=now,
    )
    return own
