"""Key rotation: how a member with an earlier cluster key gets the next one from any other member.

A rotation is signed twice: by the earlier cluster key, and by the device that made that key, which
members know from pairing. So a stolen token, which holds only the cluster key, moves nobody. Each
device that is carried over has an entry that only it can find and open (ECIES: the shared secret of
an ephemeral key and the device's, HKDF-SHA256, AES-256-GCM). The entry holds its new certificate
and the new tag key. Devices without an entry stay behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_der_public_key,
)

from edge.errors import RequestError
from edge.membership.authority import MALFORMED
from edge.membership.identity import Identity, PrivateKey, PublicKey, key_id, new_key
from edge.membership.length_prefix import joined, parted

MOST_CARRIED = 256
"""Most devices; with more, a handshake would exceed MAX_ROTATION_BYTES of transport."""

MOST_ROTATIONS = 3
"""Rotations that a member remembers. A device that has missed more must be paired again."""

_MAGIC = b"edge rotation\0"
"""Certificates and revocation lists, which the same key signs, never begin like this."""

_WHAT = "a rotation of the cluster's key"
_ECDSA = ec.ECDSA(SHA256())
_NONCE = bytes(12)
"""Each key seals one entry only."""

_KEY_BYTES, _LABEL_BYTES = 32, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """A signed rotation. Its content is verified by `check` and `opened`, not before."""

    signed: bytes = field(repr=False)
    """The encoding that members send each other."""
    before: str
    """The cluster's id before the rotation; `cluster` is its certificate afterwards."""
    cluster: x509.Certificate
    device: PublicKey
    """Public key of the device that made it."""
    _point: PublicKey = field(repr=False)
    _entries: tuple[bytes, ...] = field(repr=False)
    _statement: bytes = field(repr=False)
    _by_cluster: bytes = field(repr=False)
    _by_device: bytes = field(repr=False)

    @classmethod
    def made(
        cls,
        *,
        before: PrivateKey,
        device: Identity,
        cluster: x509.Certificate,
        tag_key: bytes,
        certificates: Mapping[str, x509.Certificate],
    ) -> Rotation:
        """Make a rotation on the device that has the keys. `certificates`: the new ones, by device
        id."""
        ephemeral = new_key()
        id = key_id(before.public_key())
        entries = []
        for certificate in certificates.values():
            owner = certificate.public_key()
            assert isinstance(owner, PublicKey)
            key, label = _sealing(ephemeral.exchange(ec.ECDH(), owner), id)
            content = joined((certificate.public_bytes(Encoding.DER), tag_key))
            entries.append(label + AESGCM(key).encrypt(_NONCE, content, None))
        point = _public(ephemeral.public_key())
        root = cluster.public_bytes(Encoding.DER)
        # Sorted by key, so that the order does not tell who was paired when.
        statement = _MAGIC + joined((id.encode(), root, point, *sorted(entries)))
        signatures = (
            before.sign(statement, _ECDSA),
            _public(device.key.public_key()),
            device.key.sign(statement, _ECDSA),
        )
        return cls.read(joined((statement, *signatures)))

    @classmethod
    def read(cls, signed: bytes) -> Rotation:
        """From its encoding. Raises RequestError if it is malformed."""
        parts = list(parted(signed, _WHAT))
        if len(parts) != 4 or not parts[0].startswith(_MAGIC):
            raise RequestError(f"{_WHAT} cannot be read")
        statement, by_cluster, device, by_device = parts
        told = list(parted(statement.removeprefix(_MAGIC), _WHAT))
        if not 3 <= len(told) <= 3 + MOST_CARRIED:
            raise RequestError(f"{_WHAT} cannot be read: it has {len(told)} parts")
        before, cluster, point, *entries = told
        try:
            return cls(
                signed=signed,
                before=before.decode("ascii"),
                cluster=x509.load_der_x509_certificate(cluster),
                device=_read_public(device),
                _point=_read_public(point),
                _entries=tuple(entries),
                _statement=statement,
                _by_cluster=by_cluster,
                _by_device=by_device,
            )
        except MALFORMED as error:
            raise RequestError(f"{_WHAT} cannot be read: {error}") from error

    @property
    def maker(self) -> str:
        """Id of the device that made it."""
        return key_id(self.device)

    def check(self, cluster: x509.Certificate) -> None:
        """Raises RequestError unless the earlier cluster key and the named device have signed
        it."""
        key = cluster.public_key()
        assert isinstance(key, PublicKey)
        try:
            key.verify(self._by_cluster, self._statement, _ECDSA)
            self.device.verify(self._by_device, self._statement, _ECDSA)
        except MALFORMED as error:
            raise RequestError(f"{_WHAT} lacks a required signature") from error

    def opened(self, identity: Identity) -> tuple[bytes, bytes] | None:
        """The device's new certificate (DER) and the new tag key. None: it was left behind."""
        key, label = _sealing(identity.key.exchange(ec.ECDH(), self._point), self.before)
        for entry in self._entries:
            if not entry.startswith(label):
                continue
            try:
                content = AESGCM(key).decrypt(_NONCE, entry[_LABEL_BYTES:], None)
            except (InvalidTag, ValueError):
                continue
            parts = list(parted(content, _WHAT))
            if len(parts) == 2:
                return parts[0], parts[1]
        return None


def _sealing(shared: bytes, before: str) -> tuple[bytes, bytes]:
    """The key that seals a device's entry, and the label by which the device finds it."""
    both = HKDF(SHA256(), _KEY_BYTES + _LABEL_BYTES, salt=None, info=_MAGIC + before.encode())
    derived = both.derive(shared)
    return derived[:_KEY_BYTES], derived[_KEY_BYTES:]


def _public(key: PublicKey) -> bytes:
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _read_public(content: bytes) -> PublicKey:
    key = load_der_public_key(content)
    if not isinstance(key, PublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ValueError("a key is of another kind")
    return key
