"""A model with a LoRA adapter, which is added to each matrix when its rows are read.

An adapter is a folder that the package peft wrote. It changes a matrix W by a product of low rank
r, W + s B A, with B [rows, r], A [r, columns] and s = alpha / r (Hu et al., 2021), or alpha /
sqrt(r) if the adapter is rank-stabilised (Kalajdzievski, 2023).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import CheckpointError, shown
from edge.models.families import read_family
from edge.models.spec import tensor_shapes
from edge.offload import Closing, SafetensorsFile, WeightStore, checked_runs, own_file
from edge.text.files import read_json
from edge.weights.form import CheckpointForm

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
_BASE = ".base_layer.weight"
"""Suffix of the matrix itself, if the adapter has it, for example of a head."""
_MOST_RANK = 4096
_TYING = "ensure_weight_tying"
_FLOATS = ("F32", "F16", "BF16")
_OTHER_MATHS = {
    "use_dora": "DoRA, which scales columns",
    "fan_in_fan_out": "of transposed matrices",
    "alora_invocation_tokens": "switched on in the middle of a text",
    "layer_replication": "of a model with layers repeated",
}
"""Settings of adapters that are not a product of two matrices, and what these are instead."""

_CHANGED_BASES = ("pissa", "olora", "corda", "loftq")
"""Values of init_lora_weights that also change the model's own weights."""
_MOST_ALPHA = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """The change of one matrix, by the names of the adapter's tensors."""

    a: str
    b: str
    scale: float


def with_adapter(form: CheckpointForm, folder: Path) -> CheckpointForm:
    """The model with the adapter. Changed weights are float32.

    Its store closes that of `form`. Raises CheckpointError, and StoreError for a damaged file; the
    form's store then stays open.
    """
    source = folder / CONFIG
    if form.spec.has_states:
        raise CheckpointError(
            f"{form.path}: adapters of models with states in place of keys and values are not "
            "computed",
            remedy="load it without one, or merge the adapter into a folder of floats",
        )
    if not source.is_file():
        raise CheckpointError(
            f"{folder} is no LoRA adapter: it has no {CONFIG}",
            remedy="give the folder that peft wrote",
        )
    config = read_json(source)
    _check_kind(config, source)
    file = SafetensorsFile(own_file(folder / WEIGHTS))
    try:
        changes, replaced = _read(form, file, config)
        store = AdaptedStore(form.store, file, changes, replaced)
    except BaseException:
        file.close()
        raise
    return replace(form, store=store, own_encoding=None)


class AdaptedStore(Closing):
    """A WeightStore over another, with an adapter's file. It closes both."""

    def __init__(
        self,
        store: WeightStore,
        file: SafetensorsFile,
        changes: Mapping[str, _Change],
        replaced: Mapping[str, str],
    ) -> None:
        """changes; replaced: tensors that the adapter replaces. Both by the store's names."""
        self._store, self._file = store, file
        self._changes, self._replaced = dict(changes), dict(replaced)
        told = [
            store.fingerprint,
            file.header_digest.hex(),
            file.size,
            file.mtime_ns,
            sorted((name, each.scale) for name, each in changes.items()),
        ]
        self.fingerprint = hashlib.sha256(json.dumps(told).encode()).hexdigest()[:32]
        """Hash of the store's fingerprint, the file's, and the changes with their factors."""

    def names(self) -> tuple[str, ...]:
        return self._store.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._store.shape(name)

    def dtype(self, name: str) -> np.dtype[Any]:
        if name in self._changes:
            return np.dtype(np.float32)
        whole = self._replaced.get(name)
        return self._store.dtype(name) if whole is None else self._file.dtype(whole)

    def where(self, name: str) -> str:
        if name in self._replaced or name in self._changes:
            return f"{self._store.where(name)} with {self._file.path}"
        return self._store.where(name)

    def read(
        self, name: str, rows: range | None = None, columns: range | None = None
    ) -> NDArray[Any]:
        change, whole = self._changes.get(name), self._replaced.get(name)
        if whole is None:
            found = self._store.read(name, rows=rows, columns=columns)
        else:
            found = self._file.read(whole, checked_runs(self.shape(name), rows, columns))
        if change is None:
            return found
        shape = self.shape(name)
        height, width = checked_runs(shape, rows, range(shape[1]) if columns is None else columns)
        weight = found.astype(np.float32)
        a = self._file.read(change.a, (range(self._rank(change)), width)).astype(np.float32)
        b = self._file.read(change.b, (height,)).astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # the caller checks for NaN
            weight += (np.float32(change.scale) * b) @ a
        return weight

    def close(self) -> None:
        self._store.close()
        self._file.close()

    def _rank(self, change: _Change) -> int:
        return self._file.tensors[change.a].shape[0]


def _check_kind(config: Mapping[str, Any], source: Path) -> None:
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise CheckpointError(
            f"{source}: peft_type is {shown(kind)}, and LORA is supported",
            remedy="merge the adapter into its model (merge_and_unload of peft)",
        )
    began = config.get("init_lora_weights")
    if isinstance(began, str) and began.lower().startswith(_CHANGED_BASES):
        raise CheckpointError(
            f"{source}: init_lora_weights is {shown(began)}, which changes the model's own weights",
            remedy="merge the adapter into its model (merge_and_unload of peft)",
        )
    for name, what in _OTHER_MATHS.items():
        if config.get(name):
            raise CheckpointError(
                f"{source}: {name} is set ({what}), which is not supported",
                remedy="merge the adapter into its model (merge_and_unload of peft)",
            )


def _read(
    form: CheckpointForm, file: SafetensorsFile, config: Mapping[str, Any]
) -> tuple[dict[str, _Change], dict[str, str]]:
    """Changes and replaced tensors, by the names of the form's store."""
    family, _spec = read_family(form.config, source=str(form.path))
    places: dict[str, tuple[str, tuple[int, ...]]] = {}
    for role, shape in tensor_shapes(form.spec).items():
        if role != "head" or not form.spec.tied_embeddings:
            places[family.tensor_name(role)] = (form.tensor_name(role), shape)
    halves: dict[str, dict[str, str]] = {}
    replaced: dict[str, str] = {}
    for name, tensor in file.tensors.items():
        own = name.removeprefix(_PREFIX)
        end = next((end for end in (_A, _B) if own.endswith(end)), None)
        target = f"{own.removesuffix(end or _BASE)}.weight" if end or own.endswith(_BASE) else own
        store_name, shape = places.get(target, ("", ()))
        is_matrix = len(shape) == 2 and target != family.tensor_name("embedding")
        if name == own or not store_name or (end is not None and not is_matrix):
            raise CheckpointError(
                f"{file.path}: tensor {name} has no place in {form.path}, a model of family "
                f"{form.spec.family}",
                remedy="give the model that the adapter was made for, or merge it there "
                "(merge_and_unload of peft)",
            )
        if tensor.dtype not in _FLOATS:
            raise CheckpointError(
                f"{file.path}: tensor {name} is {tensor.dtype}",
                remedy="F32, F16 and BF16 are supported",
            )
        if end is not None:
            halves.setdefault(target, {})[end] = name
        elif tensor.shape == shape:
            replaced[store_name] = name
        else:
            raise _wrong_shape(file, name, tensor.shape, shape, form)
    embedding = form.tensor_name("embedding")
    if form.spec.tied_embeddings and embedding in replaced and not config.get(_TYING):
        raise CheckpointError(
            f"{file.path} has an embedding, but {form.path} uses one table for embedding and head, "
            "so it is unclear which of them to replace",
            remedy="merge the adapter into its model (merge_and_unload of peft)",
        )
    if not halves and not replaced:
        raise CheckpointError(f"{file.path} holds nothing", remedy="download the adapter again")
    changes = {
        places[target][0]: _change(form, file, target, names, places[target][1], config)
        for target, names in halves.items()
    }
    return changes, replaced


def _change(
    form: CheckpointForm,
    file: SafetensorsFile,
    target: str,
    names: Mapping[str, str],
    shape: tuple[int, ...],
    config: Mapping[str, Any],
) -> _Change:
    if names.keys() != {_A, _B}:
        raise CheckpointError(
            f"{file.path}: {target} has only {next(iter(names.values()))}, and a change is a "
            "product of two matrices",
            remedy="download the adapter again",
        )
    a, b = names[_A], names[_B]
    found_a, found_b = file.tensors[a].shape, file.tensors[b].shape
    rank = found_a[0] if len(found_a) == 2 else 0
    if not 1 <= rank <= _MOST_RANK or found_a != (rank, shape[1]):
        raise _wrong_shape(file, a, found_a, (max(rank, 1), shape[1]), form)
    if found_b != (shape[0], rank):
        raise _wrong_shape(file, b, found_b, (shape[0], rank), form)
    alpha = _alpha(config, target.removesuffix(".weight"), str(file.path.with_name(CONFIG)))
    return _Change(a=a, b=b, scale=alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _alpha(config: Mapping[str, Any], module: str, source: str) -> float:
    """Alpha by the first key of alpha_pattern that is the module's name or ends it."""
    patterns = config.get("alpha_pattern") or {}
    alpha = config.get("lora_alpha", 8)
    if not isinstance(patterns, Mapping):
        raise CheckpointError(f"{source}: alpha_pattern is {shown(patterns)}, not a table")
    for key, value in patterns.items():
        if not re.fullmatch(r"[\w.]+", key):  # peft takes regular expressions, of unlimited cost
            raise CheckpointError(
                f"{source}: alpha_pattern has {shown(key)}, and names of modules are supported",
                remedy="merge the adapter into its model (merge_and_unload of peft)",
            )
        if f".{module}".endswith(f".{key}"):
            alpha = value
            break
    if type(alpha) not in (int, float) or not -_MOST_ALPHA <= alpha <= _MOST_ALPHA:
        raise CheckpointError(
            f"{source}: lora_alpha is {shown(alpha)}, not a usable number",
            remedy="download the adapter again",
        )
    return float(alpha)


def _wrong_shape(
    file: SafetensorsFile,
    name: str,
    found: tuple[int, ...],
    expected: tuple[int, ...],
    form: CheckpointForm,
) -> CheckpointError:
    return CheckpointError(
        f"{file.path}: tensor {name} has shape {list(found)}, and {form.path} takes "
        f"{list(expected)}",
        remedy="give the model that the adapter was made for",
    )
