"""Credentials: what a device shows to other members of its cluster, and how it verifies them."""

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
    """A device that has shown a valid certificate."""

    id: str
    """The device's id."""
    name: str
    """The name given by the device that took it in, for display."""
    roles: frozenset[str]
    """What it may do."""
    edition: int
    """Number of earlier certificates that it has got."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """An earlier key of the cluster."""

    tag_key: bytes = field(repr=False)
    rotation: bytes = field(repr=False)
    """The signed rotation, by which members with this key get the current one."""

    def tag(self, who: bytes, transcript: bytes) -> bytes:
        """See `Credentials`."""
        return _tag(self.tag_key, who, transcript)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Membership in a cluster, as connections need it.

    Strangers fail at the tag, which needs the cluster's key: they cost a hash and see no
    certificate. Members then show each other certificates in mutual TLS 1.3.
    """

    tag_key: bytes = field(repr=False)
    """Known to members only."""
    listening: ssl.SSLContext
    connecting: ssl.SSLContext
    """Both contexts require a certificate of the other end."""
    admitted: Callable[[Mapping[str, Any], bytes], Member]
    """The member of a certificate, given as `ssl` describes it after TLS has verified it, and in
    DER. Raises RefusedError for a device that is not accepted (any more)."""
    is_admitted: Callable[[str, int | None], bool]
    """Whether the device with this id is still accepted, by its certificate's edition if that is
    known."""

    is_spared: Callable[[str], bool]
    """Whether this device can never be expelled: it is this one, or the cluster's maker."""

    news: Callable[[], bytes]
    """Signed news that members exchange with every connection: the expelled devices."""
    heard: Callable[[bytes], None]
    """Takes another member's news; raises RefusedError for invalid news."""

    past: Callable[[], Sequence[Past]]
    """Earlier keys, the newest first."""
    follow: Callable[[bytes], None]
    """Takes the rotation to the cluster's next key, in any thread. Raises RefusedError if this
    device may not follow."""
    now: Callable[[], "Credentials"]
    """The current credentials: these, or their successor after a key rotation."""

    own_secret: bytes = field(repr=False)
    """Known to this device only: it derives the keys of data that it stores on others."""
    tells_apart: bool = True
    """Whether each other device gets keys of its own for that. Otherwise all devices belong to one
    user."""

    def tag(self, who: bytes, transcript: bytes) -> bytes:
        """Proof of membership, valid for these nonces only; ``who`` makes it."""
        return _tag(self.tag_key, who, transcript)


def _tag(key: bytes, who: bytes, transcript: bytes) -> bytes:
    return hmac.digest(key, b"edge " + who + b"\0" + transcript, hashlib.sha256)
