"""Matrices that a checkpoint holds one under the other in one tensor, as if each were its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import CheckpointError
from edge.models.spec import ModelSpec, tensor_shapes
from edge.offload import Closing, StoreError, WeightStore, checked_runs


@dataclass(frozen=True, slots=True, kw_only=True)
class SomeRows:
    """Rows of a tensor that is called otherwise."""

    tensor: str
    rows: range


def fused_rows(
    fused: Mapping[str, tuple[str, ...]], spec: ModelSpec, tensor_name: Callable[[str], str]
) -> dict[str, SomeRows]:
    """By the names of the roles' tensors; whether or not a checkpoint has the fused ones.

    `fused`: as of a Family.
    """
    shapes = tensor_shapes(spec)
    found: dict[str, SomeRows] = {}
    for layer in range(spec.num_layers):
        for whole, parts in fused.items():
            for suffix in ("weight", "bias"):
                roles = [f"layers.{layer}.{part}.{suffix}" for part in parts]
                if any(role not in shapes for role in roles):
                    continue
                first, base = 0, tensor_name(roles[0]).split(f".{layer}.", 1)[0]
                for role in roles:
                    rows = range(first, first + shapes[role][0])
                    tensor = f"{base}.{layer}.{whole}.{suffix}"
                    found[tensor_name(role)] = SomeRows(tensor=tensor, rows=rows)
                    first = rows.stop
    return found


class FusedStore(Closing):
    """A WeightStore in which rows of some tensors of another are tensors. It closes that one."""

    def __init__(self, store: WeightStore, parts: Mapping[str, SomeRows]) -> None:
        """Raises CheckpointError for a tensor with more or fewer rows than its parts have."""
        self.stored = store
        """The tensors as the file has them."""
        self._parts = dict(parts)
        whole: dict[str, int] = {}
        for part in parts.values():
            whole[part.tensor] = max(part.rows.stop, whole.get(part.tensor, 0))
        for tensor, rows in whole.items():
            if store.shape(tensor)[:1] != (rows,):
                raise CheckpointError(
                    f"{store.where(tensor)}: tensor {tensor} has shape "
                    f"{list(store.shape(tensor))}, and the configuration makes it {rows} rows: "
                    "they belong to different checkpoints, download all of one again"
                )
        self._names = tuple(sorted((set(store.names()) - set(whole)) | set(parts)))
        told = json.dumps([[name, part.tensor, str(part.rows)] for name, part in parts.items()])
        digest = hashlib.sha256(f"{store.fingerprint}\0{told}".encode())
        self.fingerprint = digest.hexdigest()[:32]
        """From the store's, and from what is taken from where."""

    def names(self) -> tuple[str, ...]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        part = self._parts.get(name)
        if part is None:
            return self.stored.shape(name)
        return len(part.rows), *self.stored.shape(part.tensor)[1:]

    def dtype(self, name: str) -> np.dtype[Any]:
        return self.stored.dtype(self._tensor(name))

    def where(self, name: str) -> str:
        return self.stored.where(self._tensor(name))

    def read(
        self, name: str, rows: range | None = None, columns: range | None = None
    ) -> NDArray[Any]:
        part = self._parts.get(name)
        if part is None:
            return self.stored.read(name, rows=rows, columns=columns)
        given = range(len(part.rows)) if rows is None else rows
        (rows, *_) = checked_runs(self.shape(name), given, columns)
        first = part.rows.start
        rows = range(first + rows.start, first + rows.stop)
        return self.stored.read(part.tensor, rows=rows, columns=columns)

    def close(self) -> None:
        self.stored.close()

    def _tensor(self, name: str) -> str:
        part = self._parts.get(name)
        return name if part is None else part.tensor


def with_fused_rows(store: WeightStore, parts: Mapping[str, SomeRows]) -> WeightStore:
    """The parts whose tensors the store has as floats are tensors of the result."""
    present = set(store.names())
    found = {
        name: part
        for name, part in parts.items()
        if part.tensor in present and _is_float(store, part.tensor)
    }
    return FusedStore(store, found) if found else store


def _is_float(store: WeightStore, name: str) -> bool:
    """Else it is codes, or floats of 8 bits, with scales in another tensor."""
    with suppress(StoreError):
        return store.dtype(name).name in ("float32", "float16", "bfloat16")
    return False
