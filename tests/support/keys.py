"""The keys that the tests and their daemons share."""

from __future__ import annotations

import functools

from edge.membership.own import OwnMembership
from edge.transport import Credentials


@functools.cache
def own_credentials() -> Credentials:
    """What a coordinator of this session shows."""
    return OwnMembership("tests").credentials()
