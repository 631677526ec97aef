"""One line about a plan that was measured, to be shared: what it was said to be, and what it was.

It names no device, address, file or person. Memory, rates and delays are rounded to 1, 2 or 5 times
a power of ten.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from string import ascii_uppercase
from typing import Any

from edge.partition import ClusterSpec, DeviceSpec, LinkSpec, describe_plan_in_words
from edge.planning.proposal import Proposal
from edge.studies.benchmark import Benchmark
from edge.version import __version__


def report_line(proposal: Proposal, measured: Benchmark, backends: Mapping[str, str]) -> str:
    """A line of JSON. backends: of each device of the plan, by its id."""
    plan, cluster, facts = proposal.plan, proposal.cluster, proposal.model
    letters = {id: _letters(number) for number, id in enumerate(plan.devices)}
    devices = [cluster.device(id) for id in plan.devices]
    hosts = {each.host for each in devices}
    names = ClusterSpec(devices=tuple(replace(each, name=letters[each.id]) for each in devices))
    said = measured.predicted
    found: dict[str, Any] = {
        "edge": __version__,
        "model": f"{facts.num_layers} layers of {facts.hidden_size}, {facts.vocab_size} tokens",
        "weights": proposal.weights,
        "plan": describe_plan_in_words(plan, names),
        "devices": {letters[each.id]: _device(each, backends[each.id]) for each in devices},
        "hosts": len(hosts),
        "links": [
            f"{letters[each.source]}-{letters[each.target]}: {_link(each)}"
            for each in cluster.links
            if each.source in letters and each.target in letters
        ],
        "tokens": [measured.options.prompt_tokens, measured.options.new_tokens],
        "said": None
        if said is None
        else {
            "tokens_per_s": _digits(said.decode_tokens_per_s),
            "first_token_s": _digits(said.first_token_s),
        },
        "was": {
            "tokens_per_s": _digits(measured.decode_tokens_per_s.p50),
            "first_token_s": _digits(measured.first_token_s.p50),
        },
    }
    return json.dumps(found)


def _letters(number: int) -> str:
    """A to Z, then A2 to Z2 …"""
    count, letter = divmod(number, 26)
    return ascii_uppercase[letter] + (f"{count + 1}" if count else "")


def _device(device: DeviceSpec, backend: str) -> str:
    return f"{backend}, {device.threads} threads, {_class(device.memory_bytes / 2**30):g} GiB"


def _link(link: LinkSpec) -> str:
    return f"{_class(8e-6 * link.bytes_per_s):g} Mbit/s, {_class(1e3 * link.latency_s):g} ms"


def _class(value: float) -> float:
    """The nearest of 1, 2 and 5 times a power of ten."""
    if value <= 0:
        return 0.0
    power = 10.0 ** math.floor(math.log10(value))
    return min(
        (power * each for each in (1, 2, 5, 10)), key=lambda each: abs(math.log(each / value))
    )


def _digits(value: float) -> float:
    return float(f"{value:.3g}")
