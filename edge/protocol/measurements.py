"""Calls by which a peer measures itself and its links, and their answers; checked on both sides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from edge.models.spec import ModelSpec
from edge.partition import ComputeRates
from edge.protocol.fields import Positive, Printable
from edge.protocol.frame_codec import SMALL, Call, Raw
from edge.protocol.topology import Place
from edge.transport.frame import MAX_HEADER_BYTES, FrameLimits
from edge.weights.formats import WeightFormat

MAX_MESSAGE_BYTES = 16 << 20
"""Largest message of a probe: the size that a peer buffers for a sender that it does not know
yet."""

_MAX_BUSY = 64

MOST_OF_WHOLE = 2.0
"""Largest ratio of the time of a byte in a slice to that in a whole layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRate:
    """The rate at which a peer reads from memory."""

    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerProfile:
    """The rates of a peer for one model, measured by itself."""

    rates: ComputeRates
    """`shared_seconds_per_byte` is that of the peer alone until a rehearsal with its neighbours."""
    sample_bytes: int
    """Bytes of weights in the sample; times a rate they give the time of a step."""
    sample: Printable
    """The sample in words."""
    spread: float
    """Difference of its samples: the slowest over the fastest, minus 1."""
    is_unsteady: bool
    """Two samples disagreed, and a third agreed with neither."""
    busy: Annotated[tuple[Printable, ...], Meta(max_length=_MAX_BUSY)]
    """Models that were loaded there meanwhile; they and the measurement slowed each other."""

    def __post_init__(self) -> None:
        rates = self.rates
        if not self.sample_bytes or not all(rates.slice_seconds_per_byte):
            raise ValueError("sample_bytes and slice_seconds_per_byte must be above 0")
        pairs = zip(rates.slice_seconds_per_byte, rates.seconds_per_byte, strict=True)
        if any(of_slice > MOST_OF_WHOLE * of_whole for of_slice, of_whole in pairs):
            raise ValueError(
                f"slice_seconds_per_byte is above {MOST_OF_WHOLE:g} times seconds_per_byte"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A time that was measured several times: its 20th, 50th and 80th percentile."""

    low_s: float
    middle_s: float
    high_s: float

    def __post_init__(self) -> None:
        if not self.low_s <= self.middle_s <= self.high_s:
            raise ValueError("the times of a span must ascend")

    def differs(self, now: Span, *, is_rough: bool = False) -> bool:
        """Whether `now` is a different time: its distance is larger than the spread of either; with
        `is_rough`, larger than the largest spread that counts as steady."""
        spread = max(each.high_s / max(each.low_s, _TINY_S) for each in (self, now))
        spread = _MOST_SPREAD if is_rough else spread
        least, most = sorted((self.middle_s, now.middle_s))
        factor = min(max(spread, _LEAST_CHANGE), _MOST_SPREAD)
        return most - least > _LEAST_CHANGE_S and most > factor * least


_TINY_S = 1e-9
_LEAST_CHANGE = 1.5
_LEAST_CHANGE_S = 50e-6
_MOST_SPREAD = 3.0
"""A larger spread than this counts as this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkGlance:
    """Times of a few messages over a new link; only for comparison with other such times."""

    echo_s: Span
    """A small message there and back."""
    there_s: Span
    """A medium message one way, and a short one back."""
    back_s: Span

    def differs(self, now: LinkGlance, *, is_rough: bool = False) -> bool:
        """Whether `now` shows a link with different times."""
        spans = ((self.echo_s, now.echo_s), (self.there_s, now.there_s), (self.back_s, now.back_s))
        return any(then.differs(each, is_rough=is_rough) for then, each in spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTimes:
    """A link between two peers in both directions, software included.

    A message of m bytes takes latency_s + m / bytes_per_s. Clocks of two devices differ by more
    than microseconds, so both directions have one latency: half of the time there and back.
    """

    latency_s: float
    there_bytes_per_s: Positive
    back_bytes_per_s: Positive
    glance: LinkGlance
    """The glance at the link from the same time."""
    is_unsteady: bool = False
    """Some messages took far longer than most, as on a link that loses packets. `latency_s` is then
    the average."""

    def differs_from(self, now: LinkGlance) -> bool:
        """Whether `now` shows another link.

        Times of an unsteady link differ, but less than those of Wi-Fi and cable.
        """
        return self.glance.differs(now, is_rough=self.is_unsteady)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRate(Call[ReadRate]):
    """Ask for the rate at which the peer reads from memory now."""

    kind, limit_s = "memory_rate", 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile(Call[PeerProfile]):
    """Ask the peer to measure its rates for this model, alone. Peers that take longer than the time
    limit are too slow for the model."""

    kind, limit_s = "profile", 120.0
    limits = FrameLimits(header_bytes=MAX_HEADER_BYTES, payload_bytes=SMALL.payload_bytes)
    model: ModelSpec
    weight_format: WeightFormat
    is_brief: bool = False
    """A short look: a few steps of the sample, for a first plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What a peer computed for `edge.weights.proof_cases`."""

    numbers: Raw
    """float32 of each operator in each of its steps, in their order, the lowest byte first; empty:
    the back end compares them itself when it loads a shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prove(Call[Proof]):
    """Ask the peer to compute the operators of a format for inputs that follow from a seed. It may
    wait for a measurement of another coordinator."""

    kind, limit_s = "prove", 120.0
    weight_format: WeightFormat
    seed: Annotated[int, Meta(ge=0, lt=1 << 32)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkQuestion:
    """The place to link to, and the sizes of messages."""

    place: Place
    small_bytes: int
    """Bytes of one token's hidden state."""
    large_bytes: int
    """Bytes of a chunk's hidden state."""

    def __post_init__(self) -> None:
        if not 0 < self.small_bytes <= self.large_bytes <= MAX_MESSAGE_BYTES:
            raise ValueError(
                f"messages of {self.small_bytes} and {self.large_bytes} bytes; 1 to "
                f"{MAX_MESSAGE_BYTES}, in this order"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe(LinkQuestion, Call[LinkTimes]):
    """Ask the peer to measure the link to this place."""

    kind, limit_s = "probe", 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Glance(LinkQuestion, Call[LinkGlance]):
    """Ask the peer for a few times of the link to this place, to see whether it has changed."""

    kind, limit_s = "glance", 60.0
