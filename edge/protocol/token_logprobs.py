"""Log probabilities of tokens in a payload."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge.errors import ProtocolError
from edge.kernels.sampling.logprobs import MOST_LOGPROBS, Logprobs
from edge.transport.frame import Buffer

_ROW = np.dtype([("id", "<i4"), ("logprob", "<f4")])
"""One of the likeliest tokens. Before these, each chosen token has a row of its own: its id is the
number of rows that follow, or -1 for a request without log probabilities."""

MOST_BYTES_OF_A_TOKEN = (1 + MOST_LOGPROBS) * _ROW.itemsize


def write_logprobs(tokens: Sequence[Logprobs | None]) -> bytes:
    """Empty where no request wants log probabilities."""
    rows: list[tuple[int, float]] = []
    for each in tokens:
        rows += [(-1, 0.0)] if each is None else [(len(each.top), each.logprob), *each.top]
    return np.array(rows, _ROW).tobytes() if any(tokens) else b""


def read_logprobs(payload: Buffer) -> tuple[Logprobs | None, ...]:
    """Raises ProtocolError for a payload that `write_logprobs` cannot make."""
    if not payload:  # the usual case
        return ()
    if len(payload) % _ROW.itemsize:
        raise ProtocolError(f"{len(payload)} bytes of logprobs are no whole number of rows")
    rows = np.frombuffer(payload, _ROW)
    if not ((rows["logprob"] <= 0) & np.isfinite(rows["logprob"])).all():
        raise ProtocolError("a logprob must be finite and at most 0")
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
