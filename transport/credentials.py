"""What a device shows to others of its cluster, and how it knows them."""

import hashlib
import hmac
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

NONCE_BYTES = 16
TAG_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """Who has shown a certificate."""

    id: str
    """Id of the device."""
    name: str
    """As those who took it in know it; for people."""
    roles: frozenset[str]
    """What it may do."""
    edition: int
    """How many certificates it has got before this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """A key that the cluster had before."""

    tag_key: bytes = field(repr=False)
    rotation: bytes = field(repr=False)
    """What whoever still has that is told, signed: by it a member of then becomes one of now."""

    def tag(self, who: bytes, transcript: bytes) -> bytes:
        """See `Credentials`."""
        return _tag(self.tag_key, who, transcript)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Membership in a cluster, as connections need it.

    A stranger is turned away by the tag, for which it would need the cluster's key: it costs a
    hash, and sees no certificate. Members then show each other certificates by mutual TLS 1.3.
    """

    tag_key: bytes = field(repr=False)
    """Known to members alone."""
    listening: ssl.SSLContext
    connecting: ssl.SSLContext
    """Both require the certificate of the other end."""
    admitted: Callable[[Mapping[str, Any], bytes], Member]
    """Who shows this certificate, as `ssl` describes one that TLS has verified, and as it is (DER).
    RefusedError for one that is not to be talked to (any more)."""
    is_admitted: Callable[[str, int | None], bool]
    """Whether the device with this id may still be talked to, by the edition of its certificate
    where that is known."""

    is_spared: Callable[[str], bool]
    """Whether nobody can have expelled the device with this id: this one, or the cluster's
    maker."""

    news: Callable[[], bytes]
    """What members tell each other with every connection, signed: who has been expelled."""
    heard: Callable[[bytes], None]
    """Takes what another member has told; RefusedError for what nobody may tell."""

    past: Callable[[], Sequence[Past]]
    """Keys of before, the newest first."""
    follow: Callable[[bytes], None]
    """Takes the rotation to the cluster's next key, in any thread; RefusedError where this device
    may not."""
    now: Callable[[], "Credentials"]
    """These, or what has taken their place since: by a new key of the cluster."""

    own_secret: bytes = field(repr=False)
    """Known to this device alone: keys of what it leaves with others are made of it."""
    tells_apart: bool = True
    """Whether each of the others gets keys of its own for that; else all are this user's own."""

    def tag(self, who: bytes, transcript: bytes) -> bytes:
        """A member's proof that it is one, for these nonces only; ``who`` makes it."""
        return _tag(self.tag_key, who, transcript)


def _tag(key: bytes, who: bytes, transcript: bytes) -> bytes:
    return hmac.digest(key, b"edge " + who + b"\0" + transcript, hashlib.sha256)
