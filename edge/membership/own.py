"""Whose member this process is: by a token file, or by pairing."""

from __future__ import annotations

import os
from pathlib import Path

from edge.membership.membership import Membership, credentials
from edge.membership.store import (
    TOKEN_VARIABLE,
    MembershipStore,
    config_root,
    enrolled_by_token,
    read_token,
)
from transport import Credentials


class OwnMembership:
    """This process's place in its cluster. Raises RequestError for files that cannot be used.

    A device that is in no cluster makes one of its own.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._store: MembershipStore | None = None
        store = MembershipStore(config_root())
        if path := os.environ.get(TOKEN_VARIABLE):
            self._held = enrolled_by_token(read_token(Path(path)), path, name, store.identity())
        else:
            self._held = store.founded(name)
            self._store = store

    def current(self) -> Membership:
        """As it is now: another process may have paired this device, or expelled one."""
        return self._held if self._store is None else self._store.founded(self._name)

    def keep(self, membership: Membership) -> None:
        """From now on it is this."""
        self._held = membership
        if self._store is not None:
            self._store.keep(membership)

    def credentials(self) -> Credentials:
        """What connections need."""
        return credentials(self.current, self.keep)
