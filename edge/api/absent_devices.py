"""Paired devices that do not answer, look after look: a look does not wait for them any more.

A device may lend and never does, as a phone that was paired without --role use. What a device does
is known only once it was found as a peer.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterable
from pathlib import Path

from edge.errors import RequestError
from edge.host.atomic_files import write_whole
from edge.host.cache_paths import cache_root
from edge.offload import parse_json, read_file

MOST_WAITED = 3
"""Looks in a row that wait for a device in vain."""

_MOST_BYTES = 1 << 20


def worth_waiting(cluster: str, devices: Iterable[str]) -> set[str]:
    """Those of these paired devices (ids) that were found in this cluster since, or missed fewer
    than MOST_WAITED times."""
    missed = _missed().get(cluster, {})
    return {each for each in devices if missed.get(each, 0) < MOST_WAITED}


def note(cluster: str, devices: Collection[str], found: Collection[str | None]) -> None:
    """Remember which of the paired devices a look in this cluster has found. Others are
    forgotten."""
    before = _missed()
    known = before.get(cluster, {})
    missed = {
        each: min(MOST_WAITED, known.get(each, 0) + 1) for each in devices if each not in found
    }
    if missed != known:
        with contextlib.suppress(OSError, RequestError):  # then the next look waits
            write_whole(_path(), json.dumps({**before, cluster: missed}))


def _missed() -> dict[str, dict[str, int]]:
    """Looks in a row that did not find a device, by cluster and id."""
    with contextlib.suppress(OSError, ValueError, RequestError):
        known = parse_json(read_file(_path(), _MOST_BYTES))
        if isinstance(known, dict) and all(isinstance(each, dict) for each in known.values()):
            return {
                cluster: {id: count for id, count in each.items() if type(count) is int}
                for cluster, each in known.items()
            }
    return {}


def _path() -> Path:
    return cache_root() / "measured" / "absent.json"
