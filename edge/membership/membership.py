"""One device's membership in a cluster: its certificate, and which devices it accepts."""

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
from edge.membership.roles import LEND, ROLES
from edge.membership.rotation import MOST_CARRIED, MOST_ROTATIONS, Rotation
from edge.membership.tls_credentials import TlsCredentials, member_of, shown_tag_key
from edge.transport import Credentials, Member, Past, RefusedError

TAG_KEY_BYTES = 32
MOST_EXPELLED = 1024
_MOST_LIST_BYTES = 44 << 10
"""Size limit, above that of MOST_EXPELLED entries. A hello of 64 KiB holds it as text."""
_MOST_LISTS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedList:
    """One signed list of expelled devices."""

    epoch: int
    ids: frozenset[str]
    editions: Mapping[str, int] = field(default_factory=dict)
    """The least valid edition of devices that have got later certificates."""
    signed: bytes
    """The list in DER, as signed by the cluster's key."""

    @classmethod
    def read(cls, signed: bytes, authority: x509.Certificate) -> SignedList:
        """A list from DER. Raises RequestError unless the cluster's key has signed it.

        Entries about the maker of the key are ignored. Otherwise a stolen token could keep members
        from the next key, which only the maker can issue.
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
        """Whether it contains everything that `other` does."""
        return other.ids <= self.ids and all(
            id in self.ids or self.editions.get(id, 0) >= edition
            for id, edition in other.editions.items()
        )


@dataclass(frozen=True, slots=True)
class Expelled:
    """All expelled devices that this device has heard of.

    Several devices may have the cluster's key and expel independently. So there may be several
    lists, and a device in any of them is expelled.
    """

    lists: tuple[SignedList, ...] = ()
    """No list is contained in another one."""

    @classmethod
    def of(cls, lists: Iterable[SignedList]) -> Expelled:
        """The union of lists, equal for equal lists. Raises RequestError above a limit."""
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
        """From `signed`. Raises RequestError unless the cluster's key has signed it."""
        if len(signed) > _MOST_LIST_BYTES:
            raise RequestError("a list of expelled devices is too long")
        parts = list(parted(signed, "a list of expelled devices"))
        if len(parts) > _MOST_LISTS:
            raise RequestError("a list of expelled devices has too many parts")
        return cls.of(SignedList.read(part, authority) for part in parts)

    @property
    def epoch(self) -> int:
        """The highest epoch; 0 without a list."""
        return max((each.epoch for each in self.lists), default=0)

    @property
    def ids(self) -> frozenset[str]:
        return frozenset(id for each in self.lists for id in each.ids)

    @property
    def editions(self) -> Mapping[str, int]:
        """The least valid edition of devices that have got later certificates."""
        least: dict[str, int] = {}
        for each in self.lists:
            for id, edition in each.editions.items():
                least[id] = max(edition, least.get(id, 0))
        return least

    @property
    def signed(self) -> bytes:
        """All lists with length prefixes, as sent to others; empty without a list."""
        return joined(each.signed for each in self.lists)

    def joined(self, other: Expelled) -> Expelled:
        """The union of both. Raises RequestError above a limit."""
        return Expelled.of((*self.lists, *other.lists))


@dataclass(frozen=True, slots=True, kw_only=True)
class PastKey:
    """An earlier key of the cluster, and how members of that time get the current one."""

    before: str
    """The cluster's id at that time."""
    tag_key: bytes = field(repr=False)
    """The tag key at that time."""
    rotation: bytes = field(repr=False)
    """The signed rotation for members who still have that key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """Everything that a member needs; with `authority` it can take others in."""

    identity: Identity
    certificate: x509.Certificate
    cluster: x509.Certificate
    """The cluster's certificate, which all members know."""
    tag_key: bytes
    expelled: Expelled = Expelled()
    authority: Authority | None = None
    others: Mapping[str, str] = field(default_factory=dict)
    """Names, by id, of the devices that this one met in pairing."""
    taken_in: Mapping[str, x509.Certificate] = field(default_factory=dict)
    """Certificates, by id, that this device has issued."""
    past: tuple[PastKey, ...] = ()
    """Earlier keys, the oldest first."""
    by_token: bool = False
    """Whether it comes from a token: it then knows only of certificates that lists mention."""

    @classmethod
    def founded(cls, name: str, identity: Identity | None = None) -> Membership:
        """The membership of the first device of a new cluster."""
        identity = identity or Identity.made()
        authority = Authority.made(identity.id)
        return cls.enrolled(authority, os.urandom(TAG_KEY_BYTES), name, identity)

    @classmethod
    def enrolled(
        cls, authority: Authority, tag_key: bytes, name: str, identity: Identity | None = None
    ) -> Membership:
        """The membership of a device that has the cluster's key and issues its own certificate."""
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
        """The cluster's id, shown to users and used in announcements' tags; it reveals nothing
        else."""
        key = self.cluster.public_key()
        assert isinstance(key, PublicKey)
        return key_id(key)

    @property
    def maker(self) -> str | None:
        """Id of the device that made the cluster's key. None: made by a version that did not
        say."""
        return maker_of(self.cluster)

    @property
    def generation(self) -> int:
        """Number of earlier keys of the cluster."""
        return counted(self.cluster)

    @property
    def roles(self) -> frozenset[str]:
        """The roles of this device."""
        return roles_in(self.certificate)

    @property
    def lenders(self) -> Mapping[str, str]:
        """Names, by id, of the devices in `others` that may compute for this one, as far as this
        device knows."""
        return {
            id: name
            for id, name in self.others.items()
            if id not in self.expelled.ids
            and (id not in self.taken_in or LEND in roles_in(self.taken_in[id]))
        }

    def shown(self) -> TlsCredentials:
        """Its TLS credentials."""
        return TlsCredentials(
            id=self.identity.id,
            certificate=self.certificate.public_bytes(Encoding.PEM).decode(),
            key=key_pem(self.identity.key).decode(),
            cluster=self.cluster.public_bytes(Encoding.PEM).decode(),
            tag_key=self.tag_key.hex(),
            own_secret=self.identity.secret("edge what others keep").hex(),
        )

    def handed(self) -> bytes:
        """Credentials as another member, for a daemon that this process starts."""
        assert self.authority is not None
        member = Membership.enrolled(self.authority, self.tag_key, "local")
        return member.shown().to_bytes()

    def knowing(self, id: str, name: str) -> Membership:
        """With one more device that it has met."""
        return replace(self, others={**self.others, id: name})

    def next_edition(self, id: str) -> int:
        """Edition of the next certificate of a device, which may have got some before."""
        given = [0] if self.by_token else []
        if id in self.others:  # earlier versions did not keep the certificate
            given.append(counted(self.taken_in[id]) if id in self.taken_in else 0)
        if id in self.expelled.editions:  # issued by another device with the cluster's key
            given.append(self.expelled.editions[id])
        return max(given) + 1 if given else 0

    def taking_in(self, id: str, name: str, certificate: x509.Certificate) -> Membership:
        """With a device that got this certificate; its earlier ones become invalid.

        Raises RequestError above a limit, or if the cluster has got a new key meanwhile.
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
        """With one more device expelled. Raises RequestError without the cluster's key, and for the
        device that made it."""
        if id == self.maker:
            raise RequestError(
                "this device made the cluster, and nobody can expel it; if it is in wrong hands, "
                "make another cluster on a device of yours, `edge cluster create --leave`, and "
                "pair the others with that"
            )
        return self._listing(self.expelled.ids | {id}, self.expelled.editions)

    def _listing(self, ids: frozenset[str], editions: Mapping[str, int]) -> Membership:
        """With a single new list of all expelled devices."""
        if self.authority is None:
            raise RequestError(
                "this device does not have the cluster's key; expel it on a device that takes "
                "others in"
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
        """The cluster under a new key, with every device that this one took in and whose
        certificate is still valid. `name` is its own. Devices without such a certificate stay
        behind. `forgiven`: ids of devices taken in that are kept whatever lists say, since any
        holder of a token may sign lists.

        Raises RequestError without the cluster's key, and for too many devices.
        """
        if self.authority is None:
            raise RequestError(
                "this device does not have the cluster's key; rotate it on the device that made "
                "the "
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
        """The membership under a new key, from a rotation that another member sent. Itself if it
        has that key.

        Raises RequestError for an invalid rotation, and if the device was left behind.
        """
        rotation = Rotation.read(signed)
        if rotation.before in {each.before for each in self.past}:
            return self
        if rotation.before != self.cluster_id:
            raise RequestError("the new key belongs to another cluster")
        if self.authority is not None:
            raise RequestError(
                "the cluster has a new key, and this token has an earlier one; write a new token "
                "where the "
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
                "the cluster has a new key, and this device was left behind; pair it again: "
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
            raise RequestError("the new key of the cluster is not the next one")
        return replace(now, others=self.others, past=self._past_with(rotation))

    def _may_lead(self, device: str) -> bool:
        """Whether `device` may introduce the next cluster key: the maker of this one. If the maker
        is unknown, a device that this one was paired with."""
        if self.maker is not None:
            return device == self.maker
        return device in self.others and device not in self.expelled.ids

    def _past_with(self, rotation: Rotation) -> tuple[PastKey, ...]:
        last = PastKey(before=self.cluster_id, tag_key=self.tag_key, rotation=rotation.signed)
        return (*self.past, last)[-MOST_ROTATIONS:]

    def hearing(self, signed: bytes) -> Membership:
        """With the expulsions that another member sent; itself if none is new.

        Raises RequestError unless the cluster's key has signed them, and above a limit.
        """
        joined = self.expelled.joined(Expelled.read(signed, self.cluster))
        return self if joined == self.expelled else replace(self, expelled=joined)


def roles_in(certificate: x509.Certificate) -> frozenset[str]:
    """Roles in a certificate."""
    units = certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATIONAL_UNIT_NAME)
    return frozenset(str(unit.value) for unit in units) & frozenset(ROLES)


def name_in(certificate: x509.Certificate) -> str:
    """Name in a certificate."""
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if names else ""


def _key_of(certificate: x509.Certificate) -> PublicKey:
    key = certificate.public_key()
    assert isinstance(key, PublicKey)
    return key


def read_membership(
    *, identity: Identity, certificate: bytes, cluster: bytes, tag_key: bytes, expelled: bytes
) -> Membership:
    """A membership from a file or another device. Raises RequestError if it is invalid."""
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
    """Earlier keys encoded for files and other devices."""
    return joined(
        part for each in past for part in (each.before.encode(), each.tag_key, each.rotation)
    )


def read_past(told: bytes, whose: str) -> tuple[PastKey, ...]:
    """The keys that `told_past` encoded. Raises RequestError, naming `whose` they are, for anything
    else."""
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
"""A function from a membership to the changed one."""


def ignore_news(_: Change) -> None:
    """Drop changes: for memberships that are not kept."""


def credentials(
    current: Callable[[], Membership], change: Callable[[Change], object] = ignore_news
) -> Credentials:
    """Credentials for connections. Each connection asks `current` which devices to accept. `change`
    keeps expulsions and keys that others sent."""
    membership = current()

    def is_admitted(id: str, edition: int | None) -> bool:
        now = current()
        counts = edition is None or edition >= now.expelled.editions.get(id, 0)
        return now.cluster_id == membership.cluster_id and id not in now.expelled.ids and counts

    def admitted(certificate: Mapping[str, Any], encoded: bytes) -> Member:
        member = member_of(certificate)
        if current().cluster_id != membership.cluster_id:
            raise RefusedError("this device has moved to another cluster; restart this program")
        if not is_admitted(member.id, member.edition):
            raise RefusedError(
                f"device {member.name} ({member.id}) has been expelled from the cluster"
                if member.id in current().expelled.ids
                else f"device {member.name} ({member.id}) has shown a certificate from before it "
                "was "
                "paired again; restart Edge there"
            )
        key = x509.load_der_x509_certificate(encoded).public_key()
        if not isinstance(key, PublicKey) or key_id(key) != member.id:
            raise RefusedError(f"device {member.name} has the id of another key than its own")
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
        except RequestError:  # the key files are being repaired
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
        except RequestError:  # the key files are being repaired
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
