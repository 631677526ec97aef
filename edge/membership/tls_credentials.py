"""TLS credentials of a device: mutual TLS with certificates on both sides.

Certificates are text here, or what `ssl` returns. Making and storing them happens elsewhere, so
that a daemon that was handed credentials needs no more than these.
"""

from __future__ import annotations

import hashlib
import json
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from edge.errors import RequestError
from edge.membership.roles import ROLES
from edge.system.private_text import as_private_file
from edge.transport import Credentials, Member, Past, RefusedError

_UNIT = "organizationalUnitName"
_BEGIN_S = 946_684_800
"""Start of the year 2000, in seconds: a certificate's first moment counts from there, see
`authority`."""

_NO_CHECK_TIME = 0x200000
"""X509_V_FLAG_NO_CHECK_TIME of OpenSSL, which `ssl` does not name. The first moment is a counter:
with a wrong clock, or many certificates, it would lie in the future."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsCredentials:
    """Credentials of one device, which may be handed to a process that it starts. As secret as its
    key."""

    id: str
    certificate: str
    """In PEM, as are the next two."""
    key: str = field(repr=False)
    cluster: str
    """The cluster's certificate."""
    tag_key: str = field(repr=False)
    """In hexadecimal digits, as is the next."""
    own_secret: str = field(repr=False)

    def to_bytes(self) -> bytes:
        """One line of text."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> TlsCredentials:
        """From `to_bytes`. Raises RequestError for anything else."""
        try:
            return cls(**{str(name): str(value) for name, value in json.loads(text).items()})
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise RequestError(f"the credentials handed over are invalid: {error}") from error

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
        """Credentials for connections. Raises RequestError for an invalid certificate or key."""
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
        """Credentials of a cluster of one user's processes, without expulsions."""
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
            context.num_tickets = 0  # send nothing after the handshake that was not asked for
        # The standard library loads keys from files only.
        with as_private_file((self.certificate + self.key).encode()) as path:
            context.load_cert_chain(path)
        return context


def member_of(certificate: Mapping[str, Any]) -> Member:
    """The member of a certificate that TLS has verified, as `ssl` describes it."""
    named = [pair for group in certificate["subject"] for pair in group]
    return Member(
        id=f"{int(certificate['serialNumber'], 16):032x}",
        name=next((value for kind, value in named if kind == "commonName"), "nameless"),
        roles=frozenset(ROLES) & {value for kind, value in named if kind == _UNIT},
        edition=max(0, int(ssl.cert_time_to_seconds(certificate["notBefore"])) - _BEGIN_S),
    )


def shown_tag_key(tag_key: bytes) -> bytes:
    """The key for tags, derived from the one that members store."""
    return hashlib.sha256(b"edge tag" + tag_key).digest()


def _nothing_new(_signed: bytes) -> None:
    pass


def _keep_the_key(_rotation: bytes) -> None:
    raise RefusedError("a cluster of one run keeps its key")
