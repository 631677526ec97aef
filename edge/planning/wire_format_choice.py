"""The wire format of activations between the shards of a plan. Pure.

From the user's option, the plan and the measured links follows a rule for every sum and hop.
`edge.transport.wire_format` converts the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from edge.partition import LinkSpec, Plan
from edge.protocol.wire_rules import Wire, WireRules, number_bytes
from edge.transport import WireFormatName, WireRule
from edge.weights.formats import WeightFormat

_MARGIN = 3.0
"""A format must save this many times the time of its conversion. `_COSTS` were measured in a loop
within processor caches, and other devices convert more slowly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cost:
    """Seconds to encode and decode a message in a format."""

    encode_s: float
    encode_number_s: float
    decode_s: float
    decode_number_s: float


_COSTS: dict[WireFormatName, _Cost] = {
    "float16": _Cost(
        encode_s=4e-6,
        encode_number_s=2.7e-9,
        decode_s=1e-6,
        decode_number_s=1.7e-9,
    ),
    "int8": _Cost(
        encode_s=9e-6,
        encode_number_s=1.0e-9,
        decode_s=4e-6,
        decode_number_s=0.36e-9,
    ),
}
"""Linear fits of the times in `edge.transport.wire_format`."""


def choose_wire_rules(
    wire: Wire, plan: Plan, *, links: Iterable[LinkSpec], weight_format: WeightFormat
) -> WireRules:
    """The rules for `plan` when its user asks for `wire`.

    "auto" encodes messages where that saves time by the measured links; without measured links, all
    stays float32. The format is never coarser than the products: int8 only where products round
    their inputs to 8 bits as well, else float16.
    """
    stages = [[shard.device for shard in stage.shards] for stage in plan.stages]
    if wire != "auto":
        rule = WireRule(format=wire)
        return WireRules(sums=(rule,) * len(stages), hops=(rule,) * (len(stages) - 1))
    chooser = _Chooser("int8" if weight_format.rounds_inputs else "float16", links)
    return WireRules(
        sums=tuple(chooser.sum_rule(devices) for devices in stages),
        hops=tuple(chooser.hop_rule(before, after) for before, after in pairwise(stages)),
    )


class _Chooser:
    """The rules for format `name` over these links. An unmeasured link counts as taking no time."""

    def __init__(self, name: WireFormatName, links: Iterable[LinkSpec]) -> None:
        self._name = name
        self._rates = {(link.source, link.target): link.bytes_per_s for link in links}

    def sum_rule(self, devices: Sequence[str]) -> WireRule:
        """The rule of a stage's sums: each rank encodes its term once, exchanges it with the
        others, and decodes all of them.

        Sums in slices move and convert less, in nearly the same proportion.
        """
        byte_s = max(
            sum(
                max(self._byte_s(device, other), self._byte_s(other, device))
                for other in devices
                if other != device
            )
            for device in devices
        )
        return self._rule(byte_s, decodes=len(devices))

    def hop_rule(self, sources: Sequence[str], targets: Sequence[str]) -> WireRule:
        """The rule of a hop: rank j receives from rank j mod n of the stage before, which encodes
        once and sends to each in turn."""
        byte_s = max(
            sum(self._byte_s(source, target) for target in targets[rank :: len(sources)])
            for rank, source in enumerate(sources)
        )
        return self._rule(byte_s, decodes=1)

    def _byte_s(self, source: str, target: str) -> float:
        """Seconds per byte; a link measured only in the other direction counts for both."""
        rate = self._rates.get((source, target)) or self._rates.get((target, source))
        return 1 / rate if rate else 0.0

    def _rule(self, byte_s: float, *, decodes: int) -> WireRule:
        saved_bytes = 4 - number_bytes(self._name)
        above_bytes = _worth_above(_COSTS[self._name], saved_bytes * byte_s, decodes=decodes)
        if above_bytes is None:
            return WireRule()
        return WireRule(format=self._name, above_bytes=above_bytes)


def _worth_above(cost: _Cost, saved_s: float, *, decodes: int) -> int | None:
    """Bytes of float32 above which encoding a message saves time; None: it never does.

    saved_s: seconds that each number saves on the wire. The latency is the same in every format.
    """
    fixed_s = cost.encode_s + decodes * cost.decode_s
    number_s = cost.encode_number_s + decodes * cost.decode_number_s
    gain_s = saved_s - _MARGIN * number_s
    return math.ceil(4 * _MARGIN * fixed_s / gain_s) if gain_s > 0 else None
