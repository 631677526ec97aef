"""What a device shows to others, and how it knows them: TLS with certificates of both sides.

Certificates are texts here, and what `ssl` says of them. Who makes and keeps them is elsewhere, so
that a daemon that was handed its own needs nothing of that.
"""

from __future__ import annotations

import hashlib
import json
import os
import ssl
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from edge.errors import RequestError
from edge.membership.roles import ROLES
from edge.transport import Credentials, Member

_UNIT = "organizationalUnitName"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
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
    def from_bytes(cls, text: bytes) -> Shown:
        """Raises RequestError for anything `to_bytes` could not have written."""
        try:
            return cls(**{str(name): str(value) for name, value in json.loads(text).items()})
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise RequestError(f"what was handed over is no membership: {error}") from error

    def credentials(
        self,
        admitted: Callable[[Mapping[str, Any], bytes], Member],
        is_admitted: Callable[[str], bool],
        news: Callable[[], bytes],
        heard: Callable[[bytes], None],
        *,
        tells_apart: bool = True,
    ) -> Credentials:
        """What connections need. Raises RequestError for what is no certificate, or no key."""
        try:
            return Credentials(
                tag_key=hashlib.sha256(b"edge tag" + bytes.fromhex(self.tag_key)).digest(),
                listening=self._context(ssl.PROTOCOL_TLS_SERVER),
                connecting=self._context(ssl.PROTOCOL_TLS_CLIENT),
                admitted=admitted,
                is_admitted=is_admitted,
                news=news,
                heard=heard,
                own_secret=bytes.fromhex(self.own_secret),
                tells_apart=tells_apart,
            )
        except (ValueError, ssl.SSLError) as error:
            raise RequestError(f"a membership cannot be used: {error}") from error

    def credentials_of_a_run(self) -> Credentials:
        """For a cluster of one user's processes, which nobody is expelled from."""
        return self.credentials(
            lambda certificate, _encoded: member_of(certificate),
            lambda _id: True,
            bytes,
            _nothing_new,
            tells_apart=False,
        )

    def _context(self, protocol: ssl._SSLMethod) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # certificates name devices, not addresses
        context.verify_mode = ssl.CERT_REQUIRED
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
    )


def _nothing_new(_signed: bytes) -> None:
    pass
