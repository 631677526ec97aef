"""Who may have a peer compute, and how much of it."""

from __future__ import annotations

import pytest

from edge.errors import RequestError
from edge.membership.identity import peer_id
from edge.peer.access import UserLimits, check_may_use, parse_allowed, parse_user_limits
from edge.transport import Member

OWN, FRIEND, STRANGER = "a" * 32, "0123456789abcdef" * 2, "f" * 32


def member(id: str, *roles: str) -> Member:
    return Member(id=id, name="kitchen", roles=frozenset(roles), edition=0)


def test_ids_are_read_as_they_are_shown() -> None:
    assert parse_allowed("use=0123 4567 89ab cdef,FFFFFFFFFFFFFFFFF") == (
        "0123456789abcdef",
        "f" * 17,
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "use",
        "use=",
        "use=0123 4567 89ab cde",
        "use=kitchen1",
        "lend=01234567",
        "use=" + 33 * "a",
    ],
)
def test_what_names_nobody_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="write use=ID"):
        parse_allowed(text)


def test_limits_are_read() -> None:
    assert parse_user_limits("memory=4GiB, cache=1KiB,sessions=2") == UserLimits(
        memory_bytes=4 << 30, cache_bytes=1 << 10, sessions=2
    )
    assert parse_user_limits("cache=1KiB") == UserLimits(cache_bytes=1 << 10)


@pytest.mark.parametrize(
    "text",
    ["", "memory", "memory=", "sessions=0", "sessions=-1", "cups=2", "sessions=1,sessions=2"],
)
def test_other_limits_are_refused(text: str) -> None:
    with pytest.raises(RequestError):
        parse_user_limits(text)


def test_roles_and_the_owners_wish_decide() -> None:
    check_may_use(member(FRIEND, "use"), OWN, ())
    check_may_use(member(FRIEND, "use"), OWN, (FRIEND[:16],))
    check_may_use(None, OWN, ())  # it wants no keys
    for daemon in (OWN, peer_id(OWN, 3)):
        check_may_use(member(OWN, "lend"), daemon, (FRIEND[:16],))
    with pytest.raises(RequestError, match="not use them"):
        check_may_use(member(FRIEND, "lend"), OWN, ())
    with pytest.raises(RequestError, match="--allow"):
        check_may_use(member(STRANGER, "lend", "use"), OWN, (FRIEND[:16],))
