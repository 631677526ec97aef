"""Peers prove their arithmetic before they get a part of a model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from edge.concurrency.blocking import run_blocking
from edge.errors import EdgeError, PeerError, PeerLostError, ProtocolError
from edge.planning.profile_cache import FactsCache
from edge.protocol.measurements import Prove
from edge.protocol.peer_info import PeerInfo, gather_all
from edge.weights.formats import WeightFormat
from edge.weights.proof_cases import ROWS, distance, proof_cases

_SEED = 1

_PROVE_NOTHING = ("null", "triton")
"""Back ends of a stand-in, and of one that is compared with the formulas at loads alone."""


async def wrong_peers(
    peers: Sequence[PeerInfo],
    weight_format: WeightFormat,
    *,
    cache_root: Path,
    limit_s: float | None = None,
) -> dict[str, str]:
    """What is wrong with peers (by id) that compute this format wrongly or do not prove it within
    `limit_s`, in words.

    Each is asked once, and again when its processor, driver or software changes. A lost peer, and
    one that refuses this device, is not among them: what asks it next says why. A wrong one is not
    remembered, so that it can be used as soon as it is right.
    """
    cache = FactsCache(cache_root / "measured")
    asked = [peer for peer in peers if not cache.is_proven(peer, weight_format)]
    proofs = await gather_all(_proof(peer, weight_format, limit_s) for peer in asked)
    wrong = {}
    for peer, proof in zip(asked, proofs, strict=True):
        if isinstance(proof, str):
            wrong[peer.id] = f"its back end {peer.backend} did not prove its arithmetic: {proof}"
        elif proof is not None:
            fault = await run_blocking(partial(fault_of, proof, weight_format))
            if fault is None:
                cache.keep_proven(peer, weight_format)
            else:
                wrong[peer.id] = f"its back end {peer.backend} computes wrongly: {fault}"
    return wrong


async def _proof(
    peer: PeerInfo, weight_format: WeightFormat, limit_s: float | None
) -> bytes | str | None:
    """The numbers that the peer computed, or why it could not; None: it proves nothing, is lost or
    refuses this device."""
    try:
        client = await peer.connect()
    except EdgeError:
        return None
    try:
        call = Prove(weight_format=weight_format, seed=_SEED)
        numbers = bytes((await client.call(call, limit_s=limit_s)).numbers)
        if peer.backend in _PROVE_NOTHING:
            return None
        return numbers
    except PeerLostError:
        return None
    except (PeerError, ProtocolError) as error:
        return str(error)
    except EdgeError:
        return None
    finally:
        await client.aclose()


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
