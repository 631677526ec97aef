"""The cluster's certificate authority: its key issues certificates to devices and expels them.

Certificates and revocation lists (lists of the expelled) are X.509, which TLS verifies by itself.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.oid import NameOID

from edge.membership.identity import PrivateKey, PublicKey, key_id, new_key
from edge.membership.roles import ROLES

_BEGIN = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_END = datetime.datetime(2999, 1, 1, tzinfo=datetime.UTC)
"""A far end of validity: a device with a stopped clock stays a member. Revocation is by list.

So validity dates do not tell time. As seconds from _BEGIN they count the keys that a cluster has
had, and the certificates that a device has got.
"""

MOST_COUNTED = 1 << 31

MALFORMED = (
    ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm, x509.InvalidVersion,
    x509.DuplicateExtension, x509.ExtensionNotFound, x509.UnsupportedGeneralNameType,
)  # fmt: skip
"""Errors of reading malformed certificates and revocation lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority:
    """The cluster's key pair, on devices that may take others in."""

    key: PrivateKey
    certificate: x509.Certificate

    @classmethod
    def made(cls, maker: str | None, generation: int = 0) -> Authority:
        """maker: id of the device that makes the key; None: made by a version that did not say.
        generation: number of earlier keys of the cluster."""
        key = new_key()
        name = _name(key_id(key.public_key()), maker=maker)
        extensions = (
            (x509.BasicConstraints(ca=True, path_length=0), True),
            (_usage(certificates=True), True),
            (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False),
        )
        certificate = _signed(name, key.public_key(), name, key, extensions, generation)
        return cls(key=key, certificate=certificate)

    def member(
        self, device: PublicKey, name: str, roles: Iterable[str] = ROLES, edition: int = 0
    ) -> x509.Certificate:
        """A device's certificate. The device's id is its serial number, which revocation lists
        name. edition: number of the device's earlier certificates."""
        own = self.certificate.public_key()
        assert isinstance(own, PublicKey)
        extensions = (
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (_usage(certificates=False), True),
            (x509.AuthorityKeyIdentifier.from_issuer_public_key(own), False),
        )
        subject = _name(name, roles)
        return _signed(subject, device, self.certificate.subject, self.key, extensions, edition)

    def expelled(
        self, ids: Iterable[str], epoch: int, editions: Mapping[str, int] | None = None
    ) -> x509.CertificateRevocationList:
        """The revocation list of everyone ever expelled. The greater epoch is the newer list.

        editions: the least valid edition of devices that have got later certificates.
        """
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self.certificate.subject)
            .last_update(_BEGIN)
            .next_update(_END)
            .add_extension(x509.CRLNumber(epoch), critical=False)
        )
        for id in sorted(set(ids)):
            entry = x509.RevokedCertificateBuilder().serial_number(int(id, 16))
            builder = builder.add_revoked_certificate(entry.revocation_date(_BEGIN).build())
        for id, edition in sorted((editions or {}).items()):
            entry = x509.RevokedCertificateBuilder().serial_number(int(id, 16))
            entry = entry.revocation_date(_moment(edition)).add_extension(_SUPERSEDED, False)
            builder = builder.add_revoked_certificate(entry.build())
        return builder.sign(self.key, SHA256())


_SUPERSEDED = x509.CRLReason(x509.ReasonFlags.superseded)


def counted(certificate: x509.Certificate) -> int:
    """The generation of a cluster's certificate, or the edition of a device's."""
    return _count(certificate.not_valid_before_utc)


def maker_of(cluster: x509.Certificate) -> str | None:
    """Id of the device that made the cluster's key. None: made by a version that did not say."""
    named = cluster.subject.get_attributes_for_oid(NameOID.SERIAL_NUMBER)
    return str(named[0].value) if named else None


def superseded(entry: x509.RevokedCertificate) -> int | None:
    """The least valid edition of a listed device. None: it is expelled."""
    try:
        reason = entry.extensions.get_extension_for_class(x509.CRLReason).value
    except x509.ExtensionNotFound:
        return None
    return _count(entry.revocation_date_utc) if reason == _SUPERSEDED else None


def _moment(count: int) -> datetime.datetime:
    return _BEGIN + datetime.timedelta(seconds=min(count, MOST_COUNTED))


def _count(moment: datetime.datetime) -> int:
    return max(0, round((moment - _BEGIN).total_seconds()))


def _name(name: str, roles: Iterable[str] = (), maker: str | None = None) -> x509.Name:
    made_by = () if maker is None else (x509.NameAttribute(NameOID.SERIAL_NUMBER, maker),)
    return x509.Name(
        [
            x509.NameAttribute(NameOID.COMMON_NAME, _shortened(name)),
            *(x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, role) for role in roles),
            *made_by,
        ]
    )


def _shortened(name: str) -> str:
    """Cut to the 64 bytes that X.520 allows."""
    return name.encode()[:64].decode(errors="ignore") or "nameless"


def _signed(
    subject: x509.Name,
    public_key: PublicKey,
    issuer: x509.Name,
    key: PrivateKey,
    extensions: Iterable[tuple[x509.ExtensionType, bool]],
    count: int,
) -> x509.Certificate:
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(int(key_id(public_key), 16))
        .not_valid_before(_moment(count))
        .not_valid_after(_END)
    )
    for extension, is_critical in extensions:
        builder = builder.add_extension(extension, critical=is_critical)
    return builder.sign(key, SHA256())


def _usage(*, certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not certificates,
        key_cert_sign=certificates,
        crl_sign=certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
