"""How likely tokens were, as it travels in a payload."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge.errors import ProtocolError
from edge.kernels.sampling.logprobs import MOST_LOGPROBS, Logprobs
from edge.transport.frame import Buffer

_ROW = np.dtype([("id", "<i4"), ("logprob", "<f4")])
"""A token among the likeliest; before those of a chosen token is a row of its own, whose id is how
many they are, or -1 where nobody asked."""

MOST_BYTES_OF_A_TOKEN = (1 + MOST_LOGPROBS) * _ROW.itemsize


def write_logprobs(tokens: Sequence[Logprobs | None]) -> bytes:
    """Nothing where nobody asked for any."""
    rows: list[tuple[int, float]] = []
    for each in tokens:
        rows += [(-1, 0.0)] if each is None else [(len(each.top), each.logprob), *each.top]
    return np.array(rows, _ROW).tobytes() if any(tokens) else b""


def read_logprobs(payload: Buffer) -> tuple[Logprobs | None, ...]:
    """Raises ProtocolError for anything `write_logprobs` could not have written."""
    if not payload:  # as those of nearly all tokens
        return ()
    if len(payload) % _ROW.itemsize:
        raise ProtocolError("logprobs are whole rows")
    rows = np.frombuffer(payload, _ROW)
    if not ((rows["logprob"] <= 0) & np.isfinite(rows["logprob"])).all():
        raise ProtocolError("a logprob is a finite number, and not above 0")
    ids, logprobs = rows["id"].tolist(), rows["logprob"].tolist()
    found: list[Logprobs | None] = []
    place = 0
    while place < len(ids):
        count = ids[place]
        start, stop = place + 1, place + 1 + max(count, 0)
        if not -1 <= count <= MOST_LOGPROBS or stop > len(ids) or min(ids[start:stop] or [0]) < 0:
            raise ProtocolError(f"logprobs of {count} tokens where {len(ids) - start} are left")
        top = tuple(zip(ids[start:stop], logprobs[start:stop], strict=True))
        found.append(None if count < 0 else Logprobs(logprob=logprobs[place], top=top))
        place = stop
    return tuple(found)
