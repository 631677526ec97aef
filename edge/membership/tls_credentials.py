"""What a device shows to others, and how it knows them: TLS with certificates of both sides.

Certificates are texts here, and what `ssl` says of them. Who makes and keeps them is elsewhere, so
that a daemon that was handed its own needs nothing of that.
"""

from __future__ import annotations

import hashlib
import json
import os
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from edge.errors import RequestError
from edge.membership.roles import ROLES
from edge.transport import Credentials, Member, Past, RefusedError

_UNIT = "organizationalUnitName"
_BEGIN_S = 946_684_800
"""Seconds at the beginning of the year 2000: a certificate's first moment counts from there, see
`authority`."""

_NO_CHECK_TIME = 0x200000
"""X509_V_FLAG_NO_CHECK_TIME of OpenSSL, for which `ssl` has no name: since that moment counts, a
clock that is wrong, or many certificates, would make it one to come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsCredentials:
    """One device's, as it may be handed to another process of its user. As secret as its key."""

    id: str
    certificate: str
    """PEM, as the next two."""
    key: str = field(repr=False)
    cluster: str
    """The cluster's certificate."""
    tag_key: str = field(repr=False)
    """Hexadecimal digits, as the next."""
    own_secret: str = field(repr=False)

    def to_bytes(self) -> bytes:
        """One line."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> TlsCredentials:
        """Raises RequestError for anything `to_bytes` could not have written."""
        try:
            return cls(**{str(name): str(value) for name, value in json.loads(text).items()})
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise RequestError(f"what was handed over is no membership: {error}") from error

    def credentials(
        self,
        admitted: Callable[[Mapping[str, Any], bytes], Member],
        is_admitted: Callable[[str, int | None], bool],
        is_spared: Callable[[str], bool],
        news: Callable[[], bytes],
        heard: Callable[[bytes], None],
        *,
        past: Callable[[], Sequence[Past]],
        follow: Callable[[bytes], None],
        now: Callable[[], Credentials],
        tells_apart: bool = True,
    ) -> Credentials:
        """What connections need. Raises RequestError for what is no certificate, or no key."""
        try:
            return Credentials(
                tag_key=shown_tag_key(bytes.fromhex(self.tag_key)),
                listening=self._context(ssl.PROTOCOL_TLS_SERVER),
                connecting=self._context(ssl.PROTOCOL_TLS_CLIENT),
                admitted=admitted,
                is_admitted=is_admitted,
                is_spared=is_spared,
                news=news,
                heard=heard,
                past=past,
                follow=follow,
                now=now,
                own_secret=bytes.fromhex(self.own_secret),
                tells_apart=tells_apart,
            )
        except (ValueError, ssl.SSLError) as error:
            raise RequestError(f"a membership cannot be used: {error}") from error

    def credentials_of_a_run(self) -> Credentials:
        """For a cluster of one user's processes, which nobody is expelled from."""
        own = self.credentials(
            lambda certificate, _encoded: member_of(certificate),
            lambda _id, _edition: True,
            lambda _id: True,
            bytes,
            _nothing_new,
            past=tuple,
            follow=_keep_the_key,
            now=lambda: own,
            tells_apart=False,
        )
        return own

    def _context(self, protocol: ssl._SSLMethod) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # certificates name devices, not addresses
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= _NO_CHECK_TIME
        context.load_verify_locations(cadata=self.cluster)
        if protocol == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0  # nothing follows the handshake that the other end did not ask
        # The standard library takes keys from files only; this one is on no disk.
        with os.fdopen(os.memfd_create("edge keys"), "wb") as file:
            file.write((self.certificate + self.key).encode())
            file.flush()
            context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
        return context


def member_of(certificate: Mapping[str, Any]) -> Member:
    """Whose certificate this is, as `ssl` describes one that the cluster's key has signed."""
    named = [pair for group in certificate["subject"] for pair in group]
    return Member(
        id=f"{int(certificate['serialNumber'], 16):032x}",
        name=next((value for kind, value in named if kind == "commonName"), "nameless"),
        roles=frozenset(ROLES) & {value for kind, value in named if kind == _UNIT},
        edition=max(0, int(ssl.cert_time_to_seconds(certificate["notBefore"])) - _BEGIN_S),
    )


def shown_tag_key(tag_key: bytes) -> bytes:
    """What tags are made with, of what members keep."""
    return hashlib.sha256(b"edge tag" + tag_key).digest()


def _nothing_new(_signed: bytes) -> None:
    pass


def _keep_the_key(_rotation: bytes) -> None:
    raise RefusedError("a cluster of one run keeps its key")
