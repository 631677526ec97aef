"""What coordinator and peers tell each other when they measure; checked on both sides.

profile          (model, format)  → PeerProfile: how fast the peer computes, alone
profile_together (spans)          → seconds of a step of each length, while its neighbours compute
probe            (place, sizes)   → LinkTimes: how fast bytes move between the peer and that place
glance           (place, sizes)   → LinkGlance: a few messages, to see whether that has changed
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge.errors import ProtocolError, RequestError
from edge.models.spec import ModelSpec
from edge.protocol.messages import Place, integer, printable, text
from edge.weights.formats import WeightFormat, weight_format
from partition import ComputeRates

MAX_SPAN_S = 10.0
"""Of one length of step, while neighbours compute."""

MAX_SPANS = 16

MAX_MESSAGE_BYTES = 16 << 20
"""Of a probe: no step's hidden state is larger than what a peer buffers for a stranger."""

_MAX_ADDRESSES = 64
_LARGEST = 1e18
_MAX_BUSY = 64

MOST_OF_WHOLE = 2.0
"""That a byte of a slice takes, of what a byte of a whole layer does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOrder:
    """What to measure: one model in one format."""

    model: ModelSpec
    weight_format: WeightFormat
    hold: bool
    """Keep the sample for `profile_together`, until the conversation ends."""

    def to_payload(self) -> bytes:
        return json.dumps(
            {
                "model": self.model.to_json(),
                "dtype": self.weight_format.name,
                "block_size": self.weight_format.block_size,
                "accuracy": self.weight_format.accuracy,
                "hold": self.hold,
            }
        ).encode()

    @classmethod
    def from_payload(cls, payload: bytes | bytearray | memoryview) -> ProfileOrder:
        """Raises ProtocolError for anything `to_payload` could not have written."""
        try:
            value = json.loads(bytes(payload))
            return cls(
                model=ModelSpec.from_json(value["model"]),
                weight_format=weight_format(
                    text(value, "dtype"), integer(value, "block_size"), text(value, "accuracy")
                ),
                hold=_boolean(value, "hold"),
            )
        except (
            ValueError, KeyError, TypeError, OverflowError, RecursionError, RequestError,
        ) as error:  # fmt: skip
            raise ProtocolError(f"a malformed order to measure: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerProfile:
    """How fast a peer computes one model, as it measured itself."""

    rates: ComputeRates
    """`shared_seconds_per_byte` is that of the peer alone until its neighbours were asked."""
    sample_bytes: int
    """Weights that it was measured with: these times a rate is the time of a step."""
    sample: str
    """The same in words."""
    spread: float
    """How far its samples were apart: the slowest over the fastest, less 1."""
    is_unsteady: bool
    """A third sample agreed with neither of two that disagreed."""
    busy: tuple[str, ...]
    """Models that were loaded there meanwhile: they were slowed down, and so was this."""

    def to_json(self) -> dict[str, Any]:
        return {
            "rates": self.rates.to_json(),
            "sample_bytes": self.sample_bytes,
            "sample": self.sample,
            "spread": self.spread,
            "is_unsteady": self.is_unsteady,
            "busy": list(self.busy),
        }

    @classmethod
    def from_json(cls, value: object) -> PeerProfile:
        """Raises ValueError or ProtocolError for anything `to_json` could not have written."""
        if not isinstance(value, Mapping):
            raise ValueError("a profile must be an object")
        busy = value.get("busy")
        if not isinstance(busy, list) or len(busy) > _MAX_BUSY:
            raise ValueError(f"busy must be a list of at most {_MAX_BUSY} names")
        sample_bytes = integer(value, "sample_bytes")
        rates = ComputeRates.from_json(value.get("rates"))
        if not sample_bytes or not all(rates.slice_seconds_per_byte):
            raise ValueError("a sample without weights, or one that took no time")
        pairs = zip(rates.slice_seconds_per_byte, rates.seconds_per_byte, strict=True)
        if any(of_slice > MOST_OF_WHOLE * of_whole for of_slice, of_whole in pairs):
            raise ValueError("bytes of slices that take far longer than those of whole layers")
        return cls(
            rates=rates,
            sample_bytes=sample_bytes,
            sample=printable(text(value, "sample")),
            spread=_number(value, "spread"),
            is_unsteady=_boolean(value, "is_unsteady"),
            busy=tuple(printable(text({"name": each}, "name")) for each in busy),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOrder:
    """Where to link to, and with what to fill the link."""

    place: Place
    small_bytes: int
    """Of one token's hidden state."""
    large_bytes: int
    """Of a chunk's."""

    def to_payload(self) -> bytes:
        return json.dumps(
            {
                "name": self.place.name,
                "addresses": self.place.addresses,
                "small_bytes": self.small_bytes,
                "large_bytes": self.large_bytes,
            }
        ).encode()

    @classmethod
    def from_payload(cls, payload: bytes | bytearray | memoryview) -> ProbeOrder:
        """Raises ProtocolError for anything `to_payload` could not have written."""
        try:
            value = json.loads(bytes(payload))
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"a malformed order to probe: {error}") from error
        addresses = value.get("addresses") if isinstance(value, dict) else None
        if not isinstance(addresses, list) or not 0 < len(addresses) <= _MAX_ADDRESSES:
            raise ProtocolError(f"a place to probe needs 1 to {_MAX_ADDRESSES} addresses")
        small, large = integer(value, "small_bytes"), integer(value, "large_bytes")
        if not 0 < small <= large <= MAX_MESSAGE_BYTES:
            raise ProtocolError(
                f"messages of {small} and {large} bytes; 1 to {MAX_MESSAGE_BYTES}, in this order"
            )
        return cls(
            place=Place(
                name=printable(text(value, "name")),
                addresses=tuple(text({"address": each}, "address") for each in addresses),
            ),
            small_bytes=small,
            large_bytes=large,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A time that was measured several times: its 20th, 50th and 80th percentile."""

    low_s: float
    middle_s: float
    high_s: float

    def differs(self, now: Span) -> bool:
        """Whether `now` is another time: further off than either is spread."""
        spread = max(each.high_s / max(each.low_s, _TINY_S) for each in (self, now))
        least, most = sorted((self.middle_s, now.middle_s))
        factor = min(max(spread, _LEAST_CHANGE), _MOST_SPREAD)
        return most - least > _LEAST_CHANGE_S and most > factor * least

    def to_json(self) -> list[float]:
        return [self.low_s, self.middle_s, self.high_s]

    @classmethod
    def from_json(cls, value: object) -> Span:
        """Raises ProtocolError for anything `to_json` could not have written."""
        if not isinstance(value, list) or len(value) != 3:
            raise ProtocolError("a span is three times")
        low_s, middle_s, high_s = (_number({"span": each}, "span") for each in value)
        if not low_s <= middle_s <= high_s:
            raise ProtocolError("a span is three times in ascending order")
        return cls(low_s=low_s, middle_s=middle_s, high_s=high_s)


_TINY_S = 1e-9
_LEAST_CHANGE = 1.5
_LEAST_CHANGE_S = 50e-6
_MOST_SPREAD = 3.0
"""A link that is less steady than this differs by as much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkGlance:
    """A few messages over a link that was just made; worth nothing but to be compared."""

    echo_s: Span
    """A small message there and back."""
    there_s: Span
    """A medium message one way, and a word back."""
    back_s: Span

    def differs(self, now: LinkGlance) -> bool:
        """Whether `now` is of another link than this."""
        return (
            self.echo_s.differs(now.echo_s)
            or self.there_s.differs(now.there_s)
            or self.back_s.differs(now.back_s)
        )

    def to_json(self) -> dict[str, list[float]]:
        return {
            "echo_s": self.echo_s.to_json(),
            "there_s": self.there_s.to_json(),
            "back_s": self.back_s.to_json(),
        }

    @classmethod
    def from_json(cls, value: object) -> LinkGlance:
        """Raises ProtocolError for anything `to_json` could not have written."""
        if not isinstance(value, Mapping):
            raise ProtocolError("a glance at a link must be an object")
        return cls(
            echo_s=Span.from_json(value.get("echo_s")),
            there_s=Span.from_json(value.get("there_s")),
            back_s=Span.from_json(value.get("back_s")),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTimes:
    """A link between two peers, each way, software included.

    A message of m bytes takes latency_s + m / bytes_per_s. Clocks of two devices do not agree to
    the microsecond, so both ways share the latency: half of there and back.
    """

    latency_s: float
    there_bytes_per_s: float
    back_bytes_per_s: float
    glance: LinkGlance
    """What a look at the link showed then."""
    is_unsteady: bool = False
    """Some messages took far longer than most, as on a link that loses packets; `latency_s` is the
    average then."""

    def to_json(self) -> dict[str, Any]:
        return {
            "latency_s": self.latency_s,
            "there_bytes_per_s": self.there_bytes_per_s,
            "back_bytes_per_s": self.back_bytes_per_s,
            "glance": self.glance.to_json(),
            "is_unsteady": self.is_unsteady,
        }

    @classmethod
    def from_json(cls, value: object) -> LinkTimes:
        """Raises ProtocolError for anything `to_json` could not have written."""
        if not isinstance(value, Mapping):
            raise ProtocolError("the times of a link must be an object")
        there, back = _number(value, "there_bytes_per_s"), _number(value, "back_bytes_per_s")
        if not there or not back:
            raise ProtocolError("a link that moves nothing")
        return cls(
            latency_s=_number(value, "latency_s"),
            there_bytes_per_s=there,
            back_bytes_per_s=back,
            glance=LinkGlance.from_json(value.get("glance")),
            is_unsteady=_boolean(value, "is_unsteady"),
        )


def spans_to_header(spans_s: Sequence[float]) -> dict[str, Any]:
    """How long to repeat steps of each length, for a `profile_together`."""
    return {"spans_s": [min(MAX_SPAN_S, span) for span in spans_s]}


def spans_from_header(header: Mapping[str, Any]) -> tuple[float, ...]:
    """Raises ProtocolError for anything `spans_to_header` could not have written."""
    spans = header.get("spans_s")
    if not isinstance(spans, list) or not 0 < len(spans) <= MAX_SPANS:
        raise ProtocolError(f"spans_s must be a list of 1 to {MAX_SPANS} times")
    found = tuple(_number({"span": span}, "span") for span in spans)
    if max(found) > MAX_SPAN_S:
        raise ProtocolError(f"a span of {max(found):g} s; at most {MAX_SPAN_S:g}")
    return found


def seconds_from_header(header: Mapping[str, Any], count: int) -> tuple[float, ...]:
    """The answer to a `profile_together` with so many spans. Raises ProtocolError."""
    seconds = header.get("seconds")
    if not isinstance(seconds, list) or len(seconds) != count:
        raise ProtocolError(f"seconds must be a list of {count} times")
    return tuple(_number({"seconds": each}, "seconds") for each in seconds)


def _number(value: object, name: str) -> float:
    """A field of an object from outside: 0 or more, and no absurd one. Raises ProtocolError."""
    found = value.get(name) if isinstance(value, Mapping) else None
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found < _LARGEST:
        raise ProtocolError(f"{name} must be a number of 0 or more, not {found!r:.80}")
    return float(found)


def _boolean(value: object, name: str) -> bool:
    found = value.get(name) if isinstance(value, Mapping) else None
    if not isinstance(found, bool):
        raise ProtocolError(f"{name} must be true or false, not {found!r:.80}")
    return found
