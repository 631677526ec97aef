"""Writes a quantised model as a folder: in blocks of GGUF file types, or as compressed-tensors in
the format pack-quantized.

`edge/weights/packed` reads the same codes and scales back. Knows nothing about how codes are
chosen.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import CapacityError, RequestError
from edge.host.free_memory import format_size
from edge.kernels.matmul_blocks.reference import TILES_VERSION
from edge.kernels.matmul_nbits.reference import QuantizedMatrix
from edge.models.families import read_family
from edge.models.spec import TABLES, tensor_shapes
from edge.offload import (
    INDEX_FILE,
    SafetensorsFile,
    SafetensorsWriter,
    StoreError,
    write_durably,
)
from edge.weights.block_matrices import Blocks
from edge.weights.calibrated import Codes
from edge.weights.checkpoint import Checkpoint
from edge.weights.file_blocks import FileBlocks
from edge.weights.folder_files import other_files
from edge.weights.folder_form import CONFIG
from edge.weights.packed.blocks import block_arrays, block_tensors, block_values
from edge.weights.packed.compressed import compressed_arrays, compressed_tensors
from edge.weights.packed.compressed_config import compressed_values
from edge.weights.packed.encoding import coded_recipe
from edge.weights.partial_folder import PartialFolder
from edge.weights.quantize import row_chunks
from edge.weights.quantized_store import store_errors_as_edge_errors
from edge.weights.weight_limits import check_weights, largest_of

MADE_BY = "edge_quantize"
"""The key of config.json that says how the codes were chosen."""

_VERSION = 2
"""Version of the written form. Raise it when that changes, so that no folder mixes two."""
_FLOATS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_SPARE_DISK_BYTES = 256 << 20
"""Disk space left free, also for the files beside the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Weights that are written as one file. roles: all of them. coded: matrices of codes."""

    name: str
    roles: tuple[str, ...]
    coded: tuple[str, ...]


class QuantizedFolder:
    """A folder that is written group by group, and continued after an interruption."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        place: PartialFolder,
        kinds: Mapping[str, Blocks | FileBlocks],
        *,
        made_by: Mapping[str, Any],
    ) -> None:
        """kinds: by role (see tensor_shapes), either all blocks of files, or all Blocks, plain or
        with zero points; other roles stay floats.

        made_by: JSON values that decide the codes. A folder begun with other values, of another
        checkpoint or in other kinds is begun anew. The caller closes the checkpoint and the place.
        Raises RequestError for kinds that could not be read back, CapacityError for a full disk.
        """
        spec = checkpoint.spec
        shapes = tensor_shapes(spec)
        for role, kind in kinds.items():
            if len(shapes.get(role, ())) != 2 or role in TABLES:
                raise ValueError(f"{role!r} is not a matrix that is multiplied with")
            if isinstance(kind, Blocks) and (kind.offsets or kind.is_sorted):
                raise ValueError(f"{kind} is not a kind that the layout has")
        if not kinds:
            raise RequestError("no matrix would be quantised; use the checkpoint itself")
        if coded_recipe(spec, kinds) is None:
            raise RequestError(
                "a format cannot describe so many differently quantised layers; use the same kinds "
                "for more of them"
            )
        self._checkpoint = checkpoint
        self._kinds: dict[str, Blocks | FileBlocks] = dict(kinds)
        if len({type(kind) for kind in self._kinds.values()}) > 1:
            raise ValueError("a folder is in blocks of files as a whole, or not at all")
        self._made_by = dict(made_by)
        self._is_tied = spec.tied_embeddings and "head" not in kinds
        if self._is_tied:
            del shapes["head"]
        self._shapes = shapes
        family, _spec = read_family(checkpoint.config, source=str(checkpoint.path))
        self._norm_offset = np.float32(checkpoint.norm_offset - family.norm_offset)
        self._name = family.tensor_name
        """Names of tensors in a folder, also of a tied head."""
        self.groups = self._grouped()
        """Groups in the order of their files' numbers: layer by layer, then everything else."""
        made_of = {
            "version": [_VERSION, TILES_VERSION],
            "checkpoint": checkpoint.store.fingerprint,
            "packed": any(isinstance(kind, Blocks) for kind in kinds.values()),
            "kinds": {role: kind.words for role, kind in kinds.items()},
            "made_by": self._made_by,
        }
        self._folder = place
        with store_errors_as_edge_errors():
            place.begin(made_of)
            self._present = {group.name for group in self.groups if self._is_whole(group)}
            self._check_room()

    @property
    def missing(self) -> tuple[Group, ...]:
        """Groups that are not written yet, in order."""
        return tuple(group for group in self.groups if group.name not in self._present)

    def write(self, group: Group, matrices: Mapping[str, Codes]) -> None:
        """Write the codes of `group.coded`, by role; other weights are copied from the checkpoint.

        The file appears once it is complete and durable. Raises CapacityError, CheckpointError,
        ValueError for a matrix of the wrong kind or shape.
        """
        with store_errors_as_edge_errors(), self._writer(group) as writer:
            for role in group.roles:
                if role not in self._kinds:
                    self._copy(role, writer)
                    continue
                for name, values in self._arrays(role, matrices[role]).items():
                    writer.write_rows(name, 0, values)
        self._present.add(group.name)

    def finish(self) -> None:
        """Write the other files after all groups, and give the folder its name.

        Raises RequestError if the name is taken now, CapacityError, CheckpointError.
        """
        assert not self.missing, "all groups are written before the folder is finished"
        with store_errors_as_edge_errors():
            for name, content in other_files(self._checkpoint):
                path = self._folder.path / name
                path.parent.mkdir(exist_ok=True)
                write_durably(path, content)
            write_durably(self._folder.path / INDEX_FILE, _json(self._index()))
            write_durably(self._folder.path / CONFIG, _json(self._config()))
            self._folder.finish()

    def _grouped(self) -> tuple[Group, ...]:
        members: dict[str, list[str]] = {}
        for role in self._shapes:
            layer = role.split(".")[1] if role.startswith("layers.") else None
            members.setdefault("rest" if layer is None else f"layers.{layer}", []).append(role)
        members["rest"] = members.pop("rest")  # moved to the end
        return tuple(
            Group(
                name=name,
                roles=tuple(roles),
                coded=tuple(role for role in roles if role in self._kinds),
            )
            for name, roles in members.items()
        )

    def _is_whole(self, group: Group) -> bool:
        path = self._path(group)
        if not path.is_file():
            return False
        try:
            with SafetensorsFile(path) as file:
                found = {name: (place.dtype, place.shape) for name, place in file.tensors.items()}
        except StoreError:  # a damaged file is written again
            return False
        return found == self._tensors(group)

    def _check_room(self) -> None:
        needed = sum(self._writer(group).total_bytes for group in self.missing)
        free = shutil.disk_usage(self._folder.path).free
        if needed + _SPARE_DISK_BYTES > free:
            raise CapacityError(
                f"{self._folder.target} takes {format_size(needed)} more, and {format_size(free)} "
                "are free there",
                remedy="free some room, or name a folder on another disk",
            )

    def _writer(self, group: Group) -> SafetensorsWriter:
        return SafetensorsWriter(self._path(group), self._tensors(group), metadata={"format": "pt"})

    def _path(self, group: Group) -> Path:
        number, count = self.groups.index(group) + 1, len(self.groups)
        return self._folder.path / f"model-{number:05}-of-{count:05}.safetensors"

    def _tensors(self, group: Group) -> dict[str, tuple[str, tuple[int, ...]]]:
        found: dict[str, tuple[str, tuple[int, ...]]] = {}
        for role in group.roles:
            shape = self._shapes[role]
            if role in self._kinds:
                rows, columns = shape
                kind, module = self._kinds[role], self._module(role)
                found |= (
                    block_tensors(module, kind, (rows, columns))
                    if isinstance(kind, FileBlocks)
                    else compressed_tensors(module, kind, (rows, columns))
                )
            else:
                dtype = self._checkpoint.store.dtype(self._checkpoint.tensor_name(role))
                found[self._name(role)] = (_FLOATS[dtype.name], shape)
        return found

    def _copy(self, role: str, writer: SafetensorsWriter) -> None:
        """Copy a weight in parts, because embedding tables are large."""
        store, name = self._checkpoint.store, self._checkpoint.tensor_name(role)
        shape = self._shapes[role]
        for rows in row_chunks((shape[0], shape[1] if len(shape) == 2 else 1)):
            values = store.read(name, rows=rows)
            check_weights(store, name, largest_of(values))
            if role.endswith("norm") and self._norm_offset:
                values = (values + self._norm_offset).astype(values.dtype)
            writer.write_rows(self._name(role), rows.start, values)

    def _arrays(self, role: str, matrix: Codes) -> dict[str, NDArray[Any]]:
        """Tensors by name. Raises ValueError for a matrix of the wrong kind or shape."""
        kind, module = self._kinds[role], self._module(role)
        rows, columns = self._shapes[role]
        if not isinstance(matrix, QuantizedMatrix):
            if isinstance(kind, FileBlocks):
                return block_arrays(module, kind, (rows, columns), matrix)
            raise ValueError(f"{role} is in blocks of files, not in {kind.words}")
        has_zeros = matrix.zero_points is not None
        found = Blocks(matrix.bits, matrix.block_size, zero_points=has_zeros)
        if (found, matrix.shape) != (kind, (rows, columns)) or matrix.offsets is not None:
            raise ValueError(
                f"{role} is {list(matrix.shape)} in {found.words}, not {[rows, columns]} "
                f"in {kind.words}"
            )
        return compressed_arrays(module, matrix)

    def _module(self, role: str) -> str:
        """The prefix of the names of a matrix's tensors."""
        return self._name(role).removesuffix(".weight")

    def _index(self) -> dict[str, Any]:
        place = {
            name: self._path(group).name for group in self.groups for name in self._tensors(group)
        }
        total = sum(self._path(group).stat().st_size for group in self.groups)
        return {"metadata": {"total_size": total}, "weight_map": dict(sorted(place.items()))}

    def _config(self) -> dict[str, Any]:
        spec = self._checkpoint.spec
        matrices = [role for role, shape in tensor_shapes(spec).items() if len(shape) == 2]
        floats = [role for role in matrices if role not in self._kinds and role not in TABLES]
        packed = {
            self._module(role): kind
            for role, kind in self._kinds.items()
            if isinstance(kind, Blocks)
        }
        values = block_values(self._checkpoint.config)
        if packed:
            values = compressed_values(
                self._checkpoint.config,
                packed,
                floats=[self._module(role) for role in floats],
                num_layers=spec.num_layers,
            )
        return {**values, "tie_word_embeddings": self._is_tied, MADE_BY: self._made_by}


def _json(values: object) -> bytes:
    return json.dumps(values, indent=2, ensure_ascii=False).encode()
