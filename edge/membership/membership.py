"""One device's place in one cluster: what it shows to others, and whom it takes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from edge.errors import RequestError
from edge.membership.authority import MALFORMED, Authority
from edge.membership.identity import Identity, PublicKey, key_id, key_pem
from edge.membership.roles import ROLES
from edge.membership.shown import Shown, member_of
from edge.transport import Credentials, Member, RefusedError

TAG_KEY_BYTES = 32
MOST_EXPELLED = 1024
_MOST_LIST_BYTES = 44 << 10
"""More than MOST_EXPELLED take; a hello, of at most 64 KiB, holds so much as text."""
_MOST_LISTS = 16
_LENGTH_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedList:
    """One list of the expelled."""

    epoch: int
    ids: frozenset[str]
    signed: bytes
    """As the cluster's key has signed it (DER)."""

    @classmethod
    def read(cls, signed: bytes, authority: x509.Certificate) -> SignedList:
        """Raises RequestError for what the cluster's key has not signed."""
        try:
            known = x509.load_der_x509_crl(signed)
            key = authority.public_key()
            assert isinstance(key, PublicKey)
            if not known.is_signature_valid(key):
                raise RequestError("a list of expelled devices was not signed by the cluster's key")
            epoch = known.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
            ids = frozenset(f"{entry.serial_number:032x}" for entry in known)
        except MALFORMED as error:
            raise RequestError(f"a list of expelled devices cannot be read: {error}") from error
        return cls(epoch=epoch, ids=ids, signed=signed)


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
            lists, key=lambda each: (len(each.ids), each.epoch, each.signed), reverse=True
        )
        for each in longest_first:
            if not any(each.ids <= other.ids for other in kept):
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
        parts = list(_parts(signed))
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
    def signed(self) -> bytes:
        """What others are told: each list after its length; nothing before the first list."""
        return b"".join(
            len(each.signed).to_bytes(_LENGTH_BYTES) + each.signed for each in self.lists
        )

    def joined(self, other: Expelled) -> Expelled:
        """All that stand in either. Raises RequestError for too much."""
        return Expelled.of((*self.lists, *other.lists))


def _parts(signed: bytes) -> Iterator[bytes]:
    begin = 0
    while begin < len(signed):
        start = begin + _LENGTH_BYTES
        end = start + int.from_bytes(signed[begin:start])
        if end > len(signed):
            raise RequestError("a list of expelled devices cannot be read: its end is missing")
        yield signed[start:end]
        begin = end


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

    @classmethod
    def founded(cls, name: str, identity: Identity | None = None) -> Membership:
        """The first device of a new cluster."""
        return cls.enrolled(Authority.made(), os.urandom(TAG_KEY_BYTES), name, identity)

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
    def roles(self) -> frozenset[str]:
        """What this device may do in the cluster."""
        units = self.certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATIONAL_UNIT_NAME)
        return frozenset(str(unit.value) for unit in units) & frozenset(ROLES)

    def shown(self) -> Shown:
        """What others are shown, with the keys for that."""
        return Shown(
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

    def expelling(self, id: str) -> Membership:
        """With one more expelled. Raises RequestError where the cluster's key is not here."""
        if self.authority is None:
            raise RequestError(
                "this device has not the cluster's key; expel it on a device that takes others in"
            )
        ids = self.expelled.ids | {id}
        if len(ids) > MOST_EXPELLED:
            raise RequestError(f"more than {MOST_EXPELLED} expelled: `edge cluster rotate` is due")
        epoch = self.expelled.epoch + 1
        signed = self.authority.expelled(ids, epoch).public_bytes(Encoding.DER)
        return replace(
            self, expelled=Expelled.of([SignedList(epoch=epoch, ids=ids, signed=signed)])
        )

    def hearing(self, signed: bytes) -> Membership:
        """With the lists of the expelled that somebody has told; itself where none is new.

        Raises RequestError for what the cluster's key has not signed, and for too much.
        """
        joined = self.expelled.joined(Expelled.read(signed, self.cluster))
        return self if joined == self.expelled else replace(self, expelled=joined)


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

    def is_admitted(id: str) -> bool:
        now = current()
        return now.cluster_id == membership.cluster_id and id not in now.expelled.ids

    def admitted(certificate: Mapping[str, Any], encoded: bytes) -> Member:
        member = member_of(certificate)
        if current().cluster_id != membership.cluster_id:
            raise RefusedError("this device is of another cluster now; start this program again")
        if not is_admitted(member.id):
            raise RefusedError(
                f"device {member.name} ({member.id}) has been expelled from the cluster"
            )
        key = x509.load_der_x509_certificate(encoded).public_key()
        if not isinstance(key, PublicKey) or key_id(key) != member.id:
            raise RefusedError(f"device {member.name} goes by the id of another key than its own")
        return member

    def heard(signed: bytes) -> None:
        known = current()
        if not signed or signed == known.expelled.signed:
            return
        try:
            if known.hearing(signed) is not known:
                change(lambda newest: newest.hearing(signed))
        except RequestError as error:
            raise RefusedError(str(error)) from error

    return membership.shown().credentials(
        admitted, is_admitted, lambda: current().expelled.signed, heard
    )
