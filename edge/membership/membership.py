"""One device's place in one cluster: what it shows to others, and whom it takes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
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
from transport import Credentials, Member, RefusedError

TAG_KEY_BYTES = 32
MOST_EXPELLED = 1024
_MOST_LIST_BYTES = 44 << 10
"""More than MOST_EXPELLED take; a hello, of at most 64 KiB, holds so much as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expelled:
    """The newest list of the expelled that this device has heard of."""

    epoch: int = 0
    ids: frozenset[str] = frozenset()
    signed: bytes = b""
    """The list as the cluster's key has signed it (DER); none before the first."""

    @classmethod
    def read(cls, signed: bytes, authority: x509.Certificate) -> Expelled:
        """Raises RequestError for what the cluster's key has not signed."""
        if len(signed) > _MOST_LIST_BYTES:
            raise RequestError("a list of expelled devices is too long")
        try:
            known = x509.load_der_x509_crl(signed)
            key = authority.public_key()
            assert isinstance(key, PublicKey)
            if not known.is_signature_valid(key):
                raise RequestError("a list of expelled devices was not signed by the cluster's key")
            epoch = known.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
        except MALFORMED as error:
            raise RequestError(f"a list of expelled devices cannot be read: {error}") from error
        ids = frozenset(f"{entry.serial_number:032x}" for entry in known)
        return cls(epoch=epoch, ids=ids, signed=signed)


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
        return replace(self, expelled=Expelled(epoch=epoch, ids=ids, signed=signed))

    def hearing(self, signed: bytes) -> Membership:
        """With a list of the expelled that somebody has told, if it is a newer one.

        Raises RequestError for what the cluster's key has not signed.
        """
        told = Expelled.read(signed, self.cluster)
        return replace(self, expelled=told) if told.epoch > self.expelled.epoch else self


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
        expelled=Expelled.read(expelled, root) if expelled else Expelled(),
    )


def ignore_news(_: Membership) -> None:
    """For memberships that are not kept anywhere."""


def credentials(
    current: Callable[[], Membership], keep: Callable[[Membership], object] = ignore_news
) -> Credentials:
    """What connections need. `current` is asked whom to take at each of them, and `keep` gets the
    membership when others have told of a newer list of the expelled."""
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
            now = known.hearing(signed)
            if now is not known:
                keep(now)
        except RequestError as error:
            raise RefusedError(str(error)) from error

    return membership.shown().credentials(
        admitted, is_admitted, lambda: current().expelled.signed, heard
    )
