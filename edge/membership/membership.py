"""One device's place in one cluster: what it shows to others, and whom it takes."""

from __future__ import annotations

import hashlib
import os
import ssl
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import Encoding

from edge.errors import RequestError
from edge.membership.authority import ROLES, Authority
from edge.membership.identity import Identity, PublicKey, key_id, key_pem
from transport import Credentials, RefusedError

TAG_KEY_BYTES = 32
MOST_EXPELLED = 1024
_MOST_LIST_BYTES = 64 << 10


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
        except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound) as error:
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
    except (ValueError, TypeError, InvalidSignature) as error:
        raise RequestError(f"a membership cannot be read: {error}") from error
    if len(tag_key) != TAG_KEY_BYTES or own.public_key() != identity.key.public_key():
        raise RequestError("a membership is another device's")
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

    def admitted(certificate: Mapping[str, Any]) -> str:
        id = f"{int(certificate['serialNumber'], 16):032x}"
        if id in current().expelled.ids:
            raise RefusedError(f"device {id} has been expelled from the cluster")
        return id

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

    return Credentials(
        tag_key=hashlib.sha256(b"edge tag" + membership.tag_key).digest(),
        listening=_context(membership, ssl.PROTOCOL_TLS_SERVER),
        connecting=_context(membership, ssl.PROTOCOL_TLS_CLIENT),
        admitted=admitted,
        news=lambda: current().expelled.signed,
        heard=heard,
    )


def roles(certificate: Mapping[str, Any]) -> frozenset[str]:
    """What a member may do, by its certificate."""
    named = {value for group in certificate["subject"] for _name, value in group}
    return frozenset(named) & frozenset(ROLES)


def _context(membership: Membership, protocol: ssl._SSLMethod) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # certificates name devices, not addresses
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=membership.cluster.public_bytes(Encoding.DER))
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # nothing may follow the handshake that the other end did not ask
    # The standard library takes keys from files only; nobody else can read this one.
    with tempfile.NamedTemporaryFile() as file:
        file.write(membership.certificate.public_bytes(Encoding.PEM))
        file.write(key_pem(membership.identity.key))
        file.flush()
        context.load_cert_chain(file.name)
    return context
