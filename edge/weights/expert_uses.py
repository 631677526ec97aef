"""Counts of tokens through each expert of a model, over a text: a small file in the cache.

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
"""For each layer, and each of its experts, the part of all tokens that go through it."""

_FOLDER = "expert-uses"
_MOST_BYTES = 4 << 20
_VERSION = 1
_MOST_USES = 1e15
_UNSEEN = 0.5
"""Added to what was seen of every expert: none is sure never to be chosen."""


def expert_uses(spec: ModelSpec, counts: Mapping[int, NDArray[np.float32]]) -> ExpertUses:
    """From how many tokens went through each, by layer."""
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
    """Keep those of the checkpoint with this fingerprint. Raises CapacityError for a full disk."""
    value = {
        "version": _VERSION,
        "counts": {str(layer): each.astype(int).tolist() for layer, each in counts.items()},
    }
    try:
        write_whole(_path(root, fingerprint), json.dumps(value))
    except OSError as error:
        raise CapacityError(
            f"{root} cannot be written ({error.strerror}), where it is kept how often experts are "
            "used",
            remedy="free the disk, or set EDGE_CACHE to another folder",
        ) from error


def known_expert_uses(root: Path, fingerprint: str, spec: ModelSpec) -> ExpertUses:
    """The counts kept for it; empty if there are none."""
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
                # Comparisons are false for what is no number.
                if own.shape != (part.num_experts,) or not (own >= 0).all():
                    return ()
                # No token goes through one twice.
                if not (0 < own.sum() < _MOST_USES and own.max() * part.top_k <= own.sum()):
                    return ()
                counts[layer] = own.astype(np.float32)
        return expert_uses(spec, counts)
    return ()


def _path(root: Path, fingerprint: str) -> Path:
    return root / _FOLDER / f"{fingerprint}.json"
