"""Counts of tokens for each expert of a model over a text, in a small file of the cache.

Later plans for the same files use them. An unreadable file counts as missing.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge.errors import CapacityError
from edge.host.atomic_files import write_whole
from edge.models.experts import Experts
from edge.models.spec import ModelSpec
from edge.offload import parse_json, read_file

ExpertUses = tuple[tuple[float, ...], ...]
"""The share of all tokens that each expert of each layer gets."""

_FOLDER = "expert-uses"
_MOST_BYTES = 4 << 20
_VERSION = 1
_MOST_USES = 1e15
_UNSEEN = 0.5
"""Added to the count of every expert, because an unseen expert may still be chosen."""


def expert_uses(spec: ModelSpec, counts: Mapping[int, NDArray[np.float32]]) -> ExpertUses:
    """The shares for these counts, by layer."""
    uses: list[tuple[float, ...]] = []
    for layer in range(spec.num_layers):
        part = spec.layer(layer).feed_forward
        if not isinstance(part, Experts):
            uses.append(())
            continue
        seen = np.asarray(counts[layer], np.float64) + _UNSEEN
        uses.append(tuple((seen * (part.top_k / seen.sum())).tolist()))
    return tuple(uses)


def keep_expert_uses(
    root: Path, fingerprint: str, counts: Mapping[int, NDArray[np.float32]]
) -> None:
    """Store the counts of the checkpoint with this fingerprint. Raises CapacityError."""
    value = {
        "version": _VERSION,
        "counts": {str(layer): each.astype(int).tolist() for layer, each in counts.items()},
    }
    try:
        write_whole(_path(root, fingerprint), json.dumps(value))
    except OSError as error:
        raise CapacityError(
            f"counts of experts' uses cannot be written to {root} ({error.strerror})",
            remedy="free the disk, or set EDGE_CACHE to another folder",
        ) from error


def known_expert_uses(root: Path, fingerprint: str, spec: ModelSpec) -> ExpertUses:
    """The stored shares of a checkpoint; empty if there are none."""
    if not spec.has_experts:
        return ()
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError):
        value = parse_json(read_file(_path(root, fingerprint), _MOST_BYTES))
        if value["version"] != _VERSION:
            return ()
        counts = {}
        for layer in range(spec.num_layers):
            part = spec.layer(layer).feed_forward
            if isinstance(part, Experts):
                own = np.asarray(value["counts"][str(layer)], np.float64)
                # Comparisons are false for NaN.
                if own.shape != (part.num_experts,) or not (own >= 0).all():
                    return ()
                # A token uses each expert at most once.
                if not (0 < own.sum() < _MOST_USES and own.max() * part.top_k <= own.sum()):
                    return ()
                counts[layer] = own.astype(np.float32)
        return expert_uses(spec, counts)
    return ()


def _path(root: Path, fingerprint: str) -> Path:
    return root / _FOLDER / f"{fingerprint}.json"
