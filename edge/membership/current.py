"""Whose member this process is: by a token file, or by pairing."""

from __future__ import annotations

import os
from pathlib import Path

from edge.membership.membership import Change, Membership, credentials
from edge.membership.store import (
    TOKEN_VARIABLE,
    MembershipStore,
    config_root,
    enrolled_by_token,
    read_token,
)
from edge.transport import Credentials


class CurrentMembership:
    """This process's place in its cluster. Raises RequestError for files that cannot be used.

    A device that is in no cluster makes one of its own.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._store = store = MembershipStore(config_root())
        self._held: Membership | None = None
        """What a token stands for."""
        if path := os.environ.get(TOKEN_VARIABLE):
            held = enrolled_by_token(read_token(Path(path)), path, name, store.identity())
            self._held = store.change_held(held, _unchanged)
        else:
            store.founded(name)

    def current(self) -> Membership:
        """As it is now: another process may have paired this device, or expelled one."""
        if self._held is None:
            return self._store.founded(self._name)
        self._held = self._store.with_expelled(self._held)
        return self._held

    def change(self, change: Change) -> Membership:
        """What `change` makes of the newest, from now on; no other process changes it meanwhile.

        By a token, only who was expelled outlasts this process. `change` must not use this object.
        """
        if self._held is None:
            self._store.founded(self._name)
            return self._store.change(change)
        self._held = self._store.change_held(self._held, change)
        return self._held

    def credentials(self) -> Credentials:
        """What connections need."""
        return credentials(self.current, self.change)


def _unchanged(membership: Membership) -> Membership:
    return membership
