"""A device's identity: a private key that never leaves it. The id is a hash of the public key."""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from edge.errors import RequestError

PrivateKey = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey

_ID_BYTES = 16
"""128 bits, against a second key with the same id."""

MOST_PEERS = 64
"""Daemons of one device at once."""

_CURVE = ec.SECP256R1()
_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of one device."""

    key: PrivateKey

    @classmethod
    def made(cls) -> Identity:
        return cls(new_key())

    @property
    def id(self) -> str:
        return key_id(self.key.public_key())

    def secret(self, purpose: str) -> bytes:
        """32 bytes that only this device can derive, always equal for one purpose and unrelated
        between purposes."""
        private = self.key.private_numbers().private_value.to_bytes(_KEY_BYTES)
        return hmac.digest(private, purpose.encode(), hashlib.sha256)


def new_key() -> PrivateKey:
    """A new P-256 key, which every TLS 1.3 implementation supports."""
    return ec.generate_private_key(_CURVE)


def key_id(key: PublicKey) -> str:
    """The id of a public key: 32 hexadecimal digits."""
    public = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    # The first bit is cleared: ids are also serial numbers of certificates, which are positive.
    number = int.from_bytes(hashlib.sha256(public).digest()[:_ID_BYTES]) | 1 << 127
    return f"{number:032x}"


def peer_id(device: str, number: int = 0) -> str:
    """Id of a device's daemon; number 0 has the device's own id."""
    if not number:
        return device
    return hashlib.sha256(f"edge peer {number} of {device}".encode()).hexdigest()[: 2 * _ID_BYTES]


def is_id(text: str) -> bool:
    """Whether this can be the id of a device or daemon."""
    return _ID.fullmatch(text) is not None


def is_peer_of(id: str, device: str) -> bool:
    """Whether this is the id of one of the device's daemons."""
    return any(id == peer_id(device, number) for number in range(MOST_PEERS))


_ID = re.compile(rf"[0-9a-f]{{{2 * _ID_BYTES}}}", re.ASCII)

LEAST_DIGITS = 16
"""Fewest digits of an id that users may write; fewer could be forged by trying keys."""


def read_ids(text: str) -> tuple[str, ...] | None:
    """Ids of devices or their prefixes, separated by commas. None for anything else."""
    found = tuple(each.replace(" ", "").lower() for each in text.split(","))
    digits = set("0123456789abcdef")
    are_ids = all(LEAST_DIGITS <= len(each) <= 32 and set(each) <= digits for each in found)
    return found if are_ids else None


def fingerprint(id: str) -> str:
    """An id for people to compare: its first 16 digits in groups of four."""
    return " ".join(id[start : start + 4] for start in range(0, 16, 4))


def key_pem(key: PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def read_key(pem: bytes, whose: str) -> PrivateKey:
    """The private key in `pem`. Raises RequestError, naming `whose` it is, unless it is a P-256
    key."""
    try:
        key = load_pem_private_key(pem, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise RequestError(f"{whose} is not a private key: {error}") from error
    if not isinstance(key, PrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise RequestError(f"{whose} is not a key of the kind that Edge makes (P-256)")
    return key
