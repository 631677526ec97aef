"""The parts of the time of a step, and their words."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "compute", "attention", "runs", "wait", "load", "copy", "reduce", "hop", "sample", "step"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One part of the time of a step that decodes one token of every request.

    compute    reading and multiplying weights, on the slowest device
    attention  reading the KV cache
    runs       fixed time of graphs, whatever they read: their start, their operators
    wait       how much longer the slowest device of a stage takes than its mean, by chance
    load       waiting for weights from disk, beyond the time that is computed meanwhile
    copy       the same for weights from host memory, where that takes longer than the disk
    reduce     sums over the shards of a stage
    hop        the hidden state to the next stage, and the token back to the first
    sample     choosing a token, and sending its candidates
    step       the fixed time of a step
    """

    kind: Kind
    where: str
    """Name of the device, or of the devices that exchange a message, joined by hyphens."""
    count: int
    """How often it happens in a step."""
    seconds: float
    """Seconds of all `count` times together."""


def merged(terms: Iterable[Term]) -> tuple[Term, ...]:
    """Terms of the same kind and place as one; the largest first."""
    found: dict[tuple[Kind, str], Term] = {}
    for term in terms:
        before = found.get((term.kind, term.where))
        found[term.kind, term.where] = Term(
            kind=term.kind,
            where=term.where,
            count=term.count + (before.count if before else 0),
            seconds=term.seconds + (before.seconds if before else 0.0),
        )
    return tuple(sorted(found.values(), key=lambda term: -term.seconds))


def in_words(term: Term, whole_s: float) -> str:
    """A term in words: `the link a-b: 44 sums x 0.90 ms`.

    whole_s: seconds of the step that the term is a part of.
    """
    each = f"{term.count} {{}} x {milliseconds(term.seconds / term.count)}"
    part = f"{milliseconds(term.seconds)} of {milliseconds(whole_s)}"
    match term.kind:
        case "compute":
            return f"reading the weights on {term.where}: {part}"
        case "attention":
            return f"reading the cache on {term.where}: {part}"
        case "runs":
            return f"the fixed time of graphs on {term.where}: {each.format('runs')}"
        case "wait":
            return f"waiting for the slowest of {term.where}: {each.format('waits')}"
        case "load":
            return f"reading weights from the disk of {term.where}: {part}"
        case "copy":
            return f"copying weights from the host into {term.where}: {part}"
        case "reduce":
            return f"the link {term.where}: {each.format('sums')}"
        case "hop":
            return f"the link {term.where}: {each.format('hops' if term.count > 1 else 'hop')}"
        case "sample":
            return f"choosing the token on {term.where}: {part}"
        case "step":
            return f"the fixed cost of a step on {term.where}: {part}"


def milliseconds(seconds: float) -> str:
    """Seconds as a text in milliseconds, with about three digits."""
    value = seconds * 1e3
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"
