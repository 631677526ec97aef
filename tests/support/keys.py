"""The keys that the tests and their daemons share."""

from __future__ import annotations

import functools

from edge.membership.current import CurrentMembership
from edge.transport import Credentials


@functools.cache
def own_credentials() -> Credentials:
    """What a coordinator of this session shows."""
    return CurrentMembership("tests").credentials()
