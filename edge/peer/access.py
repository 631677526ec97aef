"""Access control of a peer: which devices may use it, and the limits of each."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from edge.errors import RequestError
from edge.host.free_memory import parse_size
from edge.membership.identity import LEAST_DIGITS, fingerprint, is_peer_of, read_ids
from edge.membership.roles import USE
from edge.transport import Member


@dataclass(frozen=True, slots=True, kw_only=True)
class UserLimits:
    """Limits of one device that uses this peer. None: only the peer's own limits apply."""

    memory_bytes: int | None = None
    """Memory of everything that the device has loaded. Its cached prefixes get what is left of
    it."""
    cache_bytes: int | None = None
    """Disk for weights that the device has sent. The same limit applies once more to unused packed
    copies of them, and once more to its cached prefixes."""
    sessions: int | None = None
    """Shards that the device may have loaded at once."""


def parse_allowed(text: str) -> tuple[str, ...]:
    """Prefixes of device ids from "use=ID,ID". Raises RequestError otherwise."""
    what, _, ids = text.partition("=")
    found = read_ids(ids)
    if what.strip() != "use" or found is None:
        raise RequestError(
            f"{text!r:.80} names no devices that may use this peer",
            remedy="write use=ID or use=ID,ID, with the ids that `edge cluster show` lists, or "
            f"their first {LEAST_DIGITS} digits or more",
        )
    return found


def parse_user_limits(text: str) -> UserLimits:
    """Limits from "memory=4GiB,cache=20GiB,sessions=2", each at most once. Raises RequestError
    otherwise."""
    given = [each.strip().partition("=") for each in text.split(",")]
    values = {name: value for name, _, value in given}
    if len(values) < len(given) or not values.keys() <= {"memory", "cache", "sessions"}:
        raise RequestError(
            f"{text!r:.80} is not a valid limit for each user",
            remedy="write for example memory=4GiB,cache=20GiB,sessions=2",
        )
    sessions = values.get("sessions")
    if sessions is not None and not (sessions.isascii() and sessions.isdigit() and int(sessions)):
        raise RequestError(f"sessions must be a whole number of 1 or more, not {sessions!r:.40}")
    return UserLimits(
        memory_bytes=parse_size(values["memory"]) if "memory" in values else None,
        cache_bytes=parse_size(values["cache"]) if "cache" in values else None,
        sessions=None if sessions is None else int(sessions),
    )


def check_may_use(member: Member | None, peer: str, allowed: Collection[str]) -> None:
    """Check that `member` may have the peer with id `peer` compute. None: the peer runs without
    keys.

    `allowed` are prefixes of ids; empty means every member. The peer's own device always may.
    Raises RequestError with a remedy.
    """
    if member is None or is_peer_of(peer, member.id):
        return
    who = f"device {member.name} ({fingerprint(member.id)})"
    if USE not in member.roles:
        raise RequestError(
            f"{who} may only compute for other devices of its cluster, not use them",
            remedy="pair it again with --role use",
        )
    if allowed and not any(member.id.startswith(each) for each in allowed):
        raise RequestError(
            f"{who} may not use this peer, which was started with --allow for other devices",
            remedy="start it again with this device's id in --allow use=…, or without --allow",
        )
