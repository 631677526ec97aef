"""Whether this process keeps to what every system has."""

import os
from typing import Final

PORTABLE: Final = bool(os.environ.get("EDGE_PORTABLE"))
"""True: the ways that exist on every system are used also where this one has better ones. For tests
of those ways on Linux."""
