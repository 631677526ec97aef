"""The membership of this process: by a token file, or by pairing."""

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
    """The current membership. Raises RequestError for files that cannot be used.

    A device without a cluster founds one.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._store = store = MembershipStore(config_root())
        self._held: Membership | None = None
        """The membership by token."""
        if path := os.environ.get(TOKEN_VARIABLE):
            held = enrolled_by_token(read_token(Path(path)), path, name, store.identity())
            self._held = store.change_held(held, _unchanged)
        else:
            store.founded(name)

    def current(self) -> Membership:
        """The newest membership: another process may have paired this device, or expelled one."""
        if self._held is None:
            return self._store.founded(self._name)
        self._held = self._store.with_expelled(self._held)
        return self._held

    def change(self, change: Change) -> Membership:
        """Apply `change` to the newest membership under a lock and keep the result.

        With a token, only expulsions are kept beyond this process. `change` must not use this
        object.
        """
        if self._held is None:
            self._store.founded(self._name)
            return self._store.change(change)
        self._held = self._store.change_held(self._held, change)
        return self._held

    def credentials(self) -> Credentials:
        """Credentials for connections."""
        return credentials(self.current, self.change)


def _unchanged(membership: Membership) -> Membership:
    return membership
