"""Peers prove their arithmetic before they get a part of a model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from edge.concurrency.blocking import run_blocking
from edge.errors import NetworkError, PeerError, PeerLostError, ProtocolError
from edge.planning.profile_cache import FactsCache
from edge.protocol.measurements import Prove
from edge.protocol.peer_info import PeerInfo, gather_all
from edge.weights.formats import WeightFormat
from edge.weights.proof_cases import ROWS, distance, proof_cases

_SEED = 1


async def wrong_peers(
    peers: Sequence[PeerInfo], weight_format: WeightFormat, *, cache_root: Path
) -> dict[str, str]:
    """What is wrong with peers (by id) that compute this format wrongly, in words.

    Each is asked once, and again when its processor, driver or software changes. A peer that does
    not answer is not among them: what asks it next says why. A wrong one is not remembered, so that
    it can be used as soon as it is right.
    """
    cache = FactsCache(cache_root / "measured")
    asked = [peer for peer in peers if not cache.is_proven(peer, weight_format)]
    proofs = await gather_all(_proof(peer, weight_format) for peer in asked)
    wrong = {}
    for peer, proof in zip(asked, proofs, strict=True):
        fault = proof if isinstance(proof, str) else None
        if isinstance(proof, bytes):
            fault = await run_blocking(partial(fault_of, proof, weight_format))
            if fault is None:
                cache.keep_proven(peer, weight_format)
        if fault is not None:
            wrong[peer.id] = f"its back end {peer.backend} computes wrongly: {fault}"
    return wrong


async def _proof(peer: PeerInfo, weight_format: WeightFormat) -> bytes | str | None:
    """The numbers that the peer computed, or why it could not; None: it proves nothing, or does not
    answer."""
    try:
        client = await peer.connect()
        try:
            proof = await client.call(Prove(weight_format=weight_format, seed=_SEED))
            return bytes(proof.numbers) or None
        finally:
            await client.aclose()
    except ProtocolError:
        raise
    except (PeerLostError, NetworkError):
        return None
    except PeerError as error:
        return str(error)


def fault_of(numbers: bytes, weight_format: WeightFormat, *, seed: int = _SEED) -> str | None:
    """The first operator that is wrong, the format, and the distance; None: all are right."""
    cases = proof_cases(weight_format, seed)
    expected = [each for case in cases for each in case.expected()]
    if len(numbers) != 4 * sum(each.size for each in expected):
        return f"its proof for {weight_format.name} has {len(numbers):,} bytes"
    found = np.frombuffer(numbers, "<f4")
    for case in cases:
        for rows in ROWS:
            right = expected.pop(0)
            error = distance(found[: right.size].reshape(right.shape), right)
            found = found[right.size :]
            if not error <= case.allowed:
                step = f"{rows} row{'s' * (rows > 1)}"
                return (
                    f"{case.operator} ({weight_format.name}), {step}, errs by {error:.2g} of its "
                    f"largest value, and {case.allowed:.2g} is allowed"
                )
    return None
