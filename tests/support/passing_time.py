"""Time in tests: a clock that a test moves, and limits too long to decide anything.

A test of a deadline calls `let_pass`, so a slow machine does not reach it first.

Edge limits how long a handshake, an answer or a sign of life may take. A busy machine can take
longer, and tests would be told of a lost peer. So tests with daemons, and processes forked for
tests, raise these limits to `LONG_S`. A test of a limit sets its own, or keeps the usual one. For
the same reason they measure links for a shorter time. Nor do they wait for a peer that is killed.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Callable, Mapping
from operator import attrgetter, setitem
from typing import Any
from weakref import WeakKeyDictionary

_passed_s: WeakKeyDictionary[asyncio.AbstractEventLoop, float] = WeakKeyDictionary()


def let_pass(seconds: float) -> None:
    """The running event loop's clock goes on by so much, for all that wait in it."""
    loop = asyncio.get_running_loop()
    if loop not in _passed_s:
        now = loop.time
        loop.time = lambda: now() + _passed_s[loop]  # type: ignore[method-assign]
    _passed_s[loop] = _passed_s.get(loop, 0.0) + seconds


def somebody_waits_for(seconds: float) -> bool:
    """Whether in the running event loop somebody waits for so long, or for most of it still."""
    loop = asyncio.get_running_loop()
    timers: list[asyncio.TimerHandle] = loop._scheduled  # type: ignore[attr-defined]
    return any(
        seconds / 2 < timer.when() - loop.time() <= seconds
        for timer in timers
        if not timer.cancelled()
    )


LONG_S = 200.0
"""Less than a test may take: what hangs is told in the words of who waits for it."""

VARIABLE = "EDGE_TESTS_LIMITS"
"""Limits of what is forked, in seconds: module.NAME=1.5, with commas between."""

SHORT_DIAL = "edge.peer.profiling_calls._DIAL_TIMEOUT_S=0.2"
"""For VARIABLE, where a neighbour is not to be reached: an address that does not answer takes all
of its time."""

LIMITS = (
    "edge.api.local_peers.STOP_TIMEOUT_S",
    "edge.runs.recovery.reloading.ANSWER_WITHIN_S",
    "edge.runs.recovery.reloading.FREED_WITHIN_S",
    "edge.runs.recovery.reloading.LOST_ANSWERS_WITHIN_S",
    "edge.runs.recovery.reloading.SAYS_WHAT_IT_KEEPS_WITHIN_S",
    "edge.cli.commands.peer.EXIT_TIMEOUT_S",
    "edge.cli.commands.peer.LEAVES_WITHIN_S",
    "edge.runs.dead_links.STALLED_AFTER_S",
    "edge.membership.pairing_discovery._FIND_LIMIT_S",
    "edge.membership.pairing_discovery._TALK_LIMIT_S",
    "edge.membership.pairing._WORD_LIMIT_S",
    "edge.peer.connection.TELLS_WITHIN_S",
    "edge.peer.hosted_shard.CONNECT_TIMEOUT_S",
    "edge.peer.expulsion_sync.ASKED_WITHIN_S",
    "edge.peer.profiling_calls._DIAL_TIMEOUT_S",
    "edge.peer.resources.MEASURED_TIMEOUT_S",
    "edge.pictures.decoder._CPU_S",
    "edge.pictures.decoder._WALL_S",
    "edge.planning.rehearsal.REHEARSAL_LIMIT_S",
    "edge.protocol.announced_peers.NEXT_AFTER_S",
    "edge.protocol.key_rotation_push.ASKED_WITHIN_S",
    "edge.protocol.discovery.ASKED_WITHIN_S",
    "edge.protocol.peer_info.CONNECT_WITHIN_S",
    "edge.server.observer._PEER_ANSWERS_WITHIN_S",
    "edge.text.chat_template._CPU_S",
    "edge.text.chat_template._WALL_S",
)

BRIEFLY_S = {
    "edge.protocol.link_probe._ENOUGH_S": 5e-3,
    "edge.protocol.link_probe._LARGE_SPAN_S": 0.02,
    "edge.runs.shipping.FIRST_DELAY_S": 1e-3,
}
"""How long large messages go over a link that is measured: of two daemons here, they keep a core
busy for as long, and how fast they are decides nothing. And how long one waits who is cut off from
a peer that gets weights, before it connects again: twice as long each time, for three seconds."""

DEFAULTS = (
    ("edge.peer.connection", "Connection.__init__", "silent_after_s"),
    ("edge.peer.dialling", "dial", "timeout_s"),
    ("edge.protocol.link_probe", "answer_probe", "limit_s"),
    ("edge.protocol.link_probe", "glance", "limit_s"),
    ("edge.protocol.link_probe", "probe", "limit_s"),
    ("edge.protocol.client", "PeerClient.connect", "silent_after_s"),
    ("edge.protocol.client", "PeerClient.connect", "timeout_s"),
    ("edge.protocol.peer_info", "describe_peer", "timeout_s"),
    ("edge.transport.listener", "listen", "handshake_timeout_s"),
    ("edge.transport.tcp", "connect", "timeout_s"),
    ("edge.transport.tcp", "connect_link", "timeout_s"),
)
"""Functions of modules, and those of their parameters that are limits."""


def be_patient(
    put: Callable[[Any, str, float], None] = setattr,
    put_item: Callable[[Any, str, float], None] = setitem,
    *,
    imports: bool,
) -> None:
    """In this process, for good or for as long as those say. imports: also where nothing was
    imported that has the limit; else that is left alone, as it is of no use here."""
    for name, seconds in {**dict.fromkeys(LIMITS, LONG_S), **BRIEFLY_S}.items():
        module, _, attribute = name.rpartition(".")
        if imports or module in sys.modules:
            put(importlib.import_module(module), attribute, seconds)
    for module, function, parameter in DEFAULTS:
        if imports or module in sys.modules:
            of_module = attrgetter(f"{function}.__kwdefaults__")
            put_item(of_module(importlib.import_module(module)), parameter, LONG_S)


def set_limit(name: str, seconds: float) -> None:
    module, _, attribute = name.rpartition(".")
    where = importlib.import_module(module)
    assert isinstance(getattr(where, attribute), float), name
    setattr(where, attribute, seconds)


def set_limits(environment: Mapping[str, str]) -> None:
    """Those of VARIABLE there."""
    for each in filter(None, environment.get(VARIABLE, "").split(",")):
        name, _, seconds = each.partition("=")
        set_limit(name, float(seconds))
