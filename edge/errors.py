"""The error tree, by the part that is at fault: caller, checkpoint, capacity, plan, peer, network.

EdgeError                  edge_error
├── RequestError           invalid_request    the request cannot be carried out; also a ValueError
│   └── PromptLengthError  prompt_too_long    a prompt does not fit the context
├── CheckpointError        bad_checkpoint     files of a checkpoint are missing, damaged or unknown
├── CapacityError          out_of_capacity    the model does not fit on the devices
├── DeviceLostError        device_lost        a peer's own: its adapter failed; others get peer_lost
├── PlanError              plan_cannot_run    a plan cannot run as written
├── PeerError              peer_failed        a peer refused or failed; names the peer
│   └── PeerLostError      peer_lost          a peer went away
└── NetworkError           network_error      no peers found, port taken, address unreachable
    └── ProtocolError      protocol_mismatch  the other side speaks another protocol or version

The word in the middle is `code`, for programs: it stays when a class or a sentence is changed. A
mistyped command line has the code `wrong_usage` and the exit code 2.

A RequestError for a call with a wrong keyword or type (`CallError`) is also a TypeError.

Errors of the lower packages are mapped to these once, where `edge` calls them.
"""

from __future__ import annotations

import re
import reprlib
from typing import ClassVar


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxlong = 2, 60, 40

    def repr_int(self, x: int, level: int) -> str:
        try:
            return super().repr_int(x, level)
        except ValueError:  # Python writes no more than 4,300 digits
            return "an enormous number"


_SHORT = _Short()


def shown(value: object) -> str:
    """A short form of any value for a message; fast for large and deep values, too."""
    return _SHORT.repr(value)[:80]


def printable(text: str, most: int = 2000) -> str:
    """Text from outside for one line of a terminal: at most `most` characters, other than printable
    ones escaped."""
    cut = text if len(text) <= most else f"{text[:most]}…"
    if cut.isprintable():
        return cut
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in cut
    )


_CONTROLS = {
    code: repr(chr(code))[1:-1]
    for code in (*range(0x20), *range(0x7F, 0xA0))
    if chr(code) not in "\n\t"
}


def without_controls(text: str) -> str:
    """Lines from outside for a terminal: control characters but newline and tab are escaped."""
    return text.translate(_CONTROLS)


_RULE = re.compile(r"[\w .-]+ must be [^;]+?(?=, not |$)")
"""The rule at the beginning of a sentence about a value, as "x must be a text, not 3"."""


class EdgeError(Exception):
    """The base of all errors that Edge raises on purpose: one sentence with cause and remedy.

    remedy: what to do, if that is known. It is appended to the message behind a semicolon, unless
    the message has it already. Pass it separately if a path or other text from outside is in the
    message. Without it, `remedy` is found in the message: behind the first semicolon, or as the
    rule of a value.
    """

    code: ClassVar[str] = "edge_error"
    """The kind of error, for programs; it does not change."""

    def __init__(self, message: str = "", *, remedy: str | None = None) -> None:
        is_said = remedy is None or remedy in message
        super().__init__(message if is_said else f"{message}; {remedy}")
        self._remedy = remedy

    @property
    def remedy(self) -> str:
        """What the sentence says to do; "" if it says nothing about that."""
        if self._remedy is not None:
            return self._remedy
        if rule := _RULE.match(str(self)):
            return rule.group()
        return str(self).partition("; ")[2]


class RequestError(EdgeError, ValueError):
    """The caller's request cannot be carried out as asked."""

    code = "invalid_request"


class PromptLengthError(RequestError):
    """A prompt of `prompt_tokens` leaves no room for an answer in a context of `context_tokens`."""

    code = "prompt_too_long"

    def __init__(
        self,
        message: str,
        *,
        prompt_tokens: int,
        context_tokens: int,
        remedy: str | None = None,
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.prompt_tokens = prompt_tokens
        self.context_tokens = context_tokens


class CheckpointError(EdgeError):
    """A file of the checkpoint is missing, damaged, or of a kind Edge does not know."""

    code = "bad_checkpoint"


class CapacityError(EdgeError):
    """The model does not fit; the message names the device and the bytes that are missing."""

    code = "out_of_capacity"


class DeviceLostError(EdgeError):
    """The adapter with which a peer computes failed. To its coordinator the peer is lost."""

    code = "device_lost"


class PlanError(EdgeError):
    """A plan cannot run; `problems` lists every reason."""

    code = "plan_cannot_run"

    def __init__(
        self, message: str, problems: tuple[str, ...] = (), *, remedy: str | None = None
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.problems = problems or (str(self),)


class PeerError(EdgeError):
    """A peer refused or failed; `peer` is its name."""

    code = "peer_failed"

    def __init__(self, peer: str, message: str, *, remedy: str | None = None) -> None:
        super().__init__(f"peer {peer}: {message}", remedy=remedy)
        self.peer = peer


class PeerLostError(PeerError):
    """A peer that was needed went away."""

    code = "peer_lost"


class NetworkError(EdgeError):
    """The network failed: no peers, a taken port, a wrong address."""

    code = "network_error"


class ProtocolError(NetworkError):
    """The other side speaks another protocol version, or is not Edge at all."""

    code = "protocol_mismatch"
