"""Limits of time that Edge keeps, so long that on no machine of the tests they decide anything.

Each is a guess of how long what is well takes at the most: a handshake, an answer, a sign of life.
Where something else computes, it may take longer, and tests would be told of a peer that is lost.
So where tests have daemons, and in all that is forked for tests, only what hangs takes as long. A
test of a limit gives its own, has time pass, or says that the usual one is kept.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from operator import attrgetter, setitem
from typing import Any

LONG_S = 200.0
"""Less than a test may take: what hangs is told in the words of who waits for it."""

VARIABLE = "EDGE_TESTS_LIMITS"
"""Limits of what is forked, in seconds: module.NAME=1.5, with commas between."""

USUAL_DIAL = "edge.peer.profiling_calls._DIAL_TIMEOUT_S=2"
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
    "edge.planning.rehearsal.REHEARSAL_LIMIT_S",
    "edge.protocol.announced_peers.NEXT_AFTER_S",
    "edge.protocol.key_rotation_push.ASKED_WITHIN_S",
    "edge.protocol.discovery.ASKED_WITHIN_S",
    "edge.protocol.peer_info.CONNECT_WITHIN_S",
    "edge.server.observer._PEER_ANSWERS_WITHIN_S",
    "edge.text.chat_template._CPU_S",
    "edge.text.chat_template._WALL_S",
)

DEFAULTS = (
    ("edge.peer.connection", "Connection.__init__", "silent_after_s"),
    ("edge.peer.dialling", "dial", "timeout_s"),
    ("edge.profiling.link_probe", "answer_probe", "limit_s"),
    ("edge.profiling.link_probe", "glance", "limit_s"),
    ("edge.profiling.link_probe", "probe", "limit_s"),
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
    for name in LIMITS:
        module, _, attribute = name.rpartition(".")
        if imports or module in sys.modules:
            put(importlib.import_module(module), attribute, LONG_S)
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
