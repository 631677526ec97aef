"""Members of one cluster in this process, each with its keys; a channel that waits for a test."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from cryptography.hazmat.primitives.serialization import Encoding

from edge.membership.identity import Identity
from edge.membership.membership import (
    Change,
    Membership,
    credentials,
    read_membership,
)
from edge.membership.roles import ROLES
from edge.transport import Channel, Credentials, Frame
from edge.transport.testing import Fault, FaultyChannel


class Kept:
    """One device's place in its cluster, as a folder of keys keeps it."""

    def __init__(self, membership: Membership) -> None:
        self.membership = membership

    @classmethod
    def founded(cls, name: str = "attic") -> Kept:
        return cls(Membership.founded(name))

    def current(self) -> Membership:
        return self.membership

    def change(self, change: Change) -> Membership:
        self.membership = change(self.membership)
        return self.membership

    def credentials(self) -> Credentials:
        return credentials(self.current, self.change)

    def taking_in(
        self, name: str, roles: Iterable[str] = ROLES, identity: Identity | None = None
    ) -> Kept:
        """Another device, as after `edge pair`."""
        membership, identity = self.membership, identity or Identity.made()
        assert membership.authority is not None
        edition = membership.next_edition(identity.id)
        certificate = membership.authority.member(identity.key.public_key(), name, roles, edition)
        self.membership = membership.taking_in(identity.id, name, certificate)
        joined = read_membership(
            identity=identity,
            certificate=certificate.public_bytes(Encoding.DER),
            cluster=membership.cluster.public_bytes(Encoding.DER),
            tag_key=membership.tag_key,
            expelled=self.membership.expelled.signed,
        )
        return Kept(joined.knowing(membership.identity.id, "attic"))

    def rotate(self) -> bytes:
        """Give the cluster a new key; what others are told."""
        self.membership = self.membership.rotated("attic")
        return self.membership.past[-1].rotation


_NEVER = 1 << 30


class HeldChannel(FaultyChannel):
    """Owns `inner`."""

    def __init__(self, inner: Channel, kind: str) -> None:
        super().__init__(inner, Fault.LOSE, after_calls=_NEVER)
        self._kind = kind
        self.reached = asyncio.Event()
        self.goes_on = asyncio.Event()

    async def send(self, frame: Frame) -> None:
        if frame.kind == self._kind:
            self.reached.set()
            await self.goes_on.wait()
        await super().send(frame)
