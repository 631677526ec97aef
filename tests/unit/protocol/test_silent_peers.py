"""Who says nothing is silent; who refuses, or ends a connection, has answered."""

from __future__ import annotations

import errno
from dataclasses import replace

import pytest

from edge.errors import EdgeError, NetworkError
from edge.protocol.silent_peers import SilentPeers, silent_addresses
from tests.support.peer_infos import peer_info

A, B = (replace(peer_info(name), address=f"10.0.0.{number}:5") for number, name in enumerate("ab"))


def failed(cause: BaseException) -> EdgeError:
    try:
        try:
            raise OSError("below") from cause
        except OSError as error:
            raise NetworkError("nobody is there") from error
    except NetworkError as error:
        return error


@pytest.mark.parametrize(
    ("cause", "is_silent"),
    [
        (TimeoutError(), True),
        (OSError(errno.EHOSTUNREACH, "no route"), True),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), False),
        (ConnectionResetError(errno.ECONNRESET, "reset"), False),
    ],
)
def test_what_is_silence(cause: BaseException, is_silent: bool) -> None:
    assert silent_addresses({"here": failed(cause)}) == ({"here"} if is_silent else set())


def test_who_is_silent_is_remembered_until_it_answers_or_has_gone() -> None:
    heard = SilentPeers()
    assert heard.note([A, B], (), now_s=10.0) == ()
    (silent,) = heard.note([A], {B.address}, now_s=13.0)
    assert (silent.id, silent.silent_s, silent.health) == (B.id, 3.0, "silent for 3 s")
    (lost,) = heard.note([A], {B.address}, now_s=40.0)
    assert (lost.silent_s, lost.health) == (30.0, "lost for 30 s")
    assert heard.note([A, B], (), now_s=41.0) == ()
    assert heard.note([A], (), now_s=42.0) == (), "its address answers, or is announced no more"
    assert heard.note([A], {B.address}, now_s=43.0) == (), "it was forgotten"
