"""A model in GGUF: one file, or its parts, with weights, description and tokenizer.

Kernels may compute with the codes of the file. Otherwise the weights are dequantized and rounded to
another format, as for any checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import CheckpointError
from edge.models.experts import Experts
from edge.models.families import PICTURE_LAYERS, READS_PICTURES, read_family
from edge.models.gguf import ROPE_FACTORS, GgufModel, describe_gguf, unknown_tensors
from edge.models.gguf_architectures import EMBEDDING, STACKED_EXPERTS, Architecture
from edge.models.linear_attention import LinearAttention
from edge.models.spec import TABLES, ModelSpec, tensor_shapes
from edge.offload import (
    GgufFile,
    GgufStore,
    GgufTensor,
    StoreError,
    WeightStore,
    first_part,
    open_gguf,
    own_file,
)
from edge.text import TokenizerFiles, read_tokenizer_files
from edge.text.files import TOKENIZER
from edge.text.gguf import (
    gguf_end_ids,
    gguf_sampling,
    gguf_templates,
    gguf_tokenizer_files,
    has_tokenizer,
)
from edge.weights.encoding import Encoding
from edge.weights.form import CheckpointForm, with_tied_head
from edge.weights.fused_rows import (
    TensorPart,
    columns_of_experts,
    fused_rows,
    rows_of,
    rows_of_experts,
    with_fused_rows,
)
from edge.weights.gguf.blocks import gguf_encoding
from edge.weights.gguf.linear import linear_parts
from edge.weights.gguf.tower import mmproj_beside, tower_beside
from edge.weights.mmproj_names import is_mmproj
from edge.weights.pooling import gguf_pooling

_MOST_ROPE_FACTORS = 1 << 16


def gguf_in(folder: Path) -> Path | None:
    """The only GGUF model in a folder, or the first part of a split one; None without one.

    Raises CheckpointError for several.
    """
    files = (path for path in folder.glob("*.gguf") if not is_mmproj(path.name))
    found = sorted({first_part(path) for path in files if path.is_file()})
    if len(found) > 1:
        raise CheckpointError(
            f"{folder} holds {len(found)} GGUF models ({found[0].name}, {found[1].name}, …)",
            remedy="give the path of the file that is meant",
        )
    if not found:
        return None
    try:
        return own_file(found[0])
    except StoreError as error:
        raise CheckpointError(str(error)) from error


def open_gguf_model(path: Path) -> CheckpointForm:
    """Open the model in a file, or in all parts of a split file.

    Raises CheckpointError with the file, the tensor or key, and the remedy.
    """
    try:
        files = open_gguf(path)
    except StoreError as error:
        raise CheckpointError(str(error)) from error
    try:
        return _opened(files)
    except BaseException as error:
        for file in files:
            file.close()
        if isinstance(error, StoreError):
            raise CheckpointError(str(error)) from error
        raise


def _opened(files: Sequence[GgufFile]) -> CheckpointForm:
    first = files[0]
    source, metadata = str(first.path), first.metadata
    tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}
    model, spec = gguf_spec(files, reads_pictures=mmproj_beside(first.path) is not None)
    tensor_name = model.architecture.tensor_name
    shapes = {tensor_name(role): shape for role, shape in tensor_shapes(spec).items()}
    parts = _parts(model.architecture, spec, shapes, tensors, source)
    known = {parts[name].tensor if name in parts else name for name in shapes}
    known |= _unused(spec, tensor_name)
    if scales := sorted(
        each for each in tensors if each.endswith((".scale", ".input_scale")) and each not in known
    ):
        raise CheckpointError(
            f"{source}: {scales[0]} is the scale of a whole tensor, beside blocks of NVFP4, which "
            "is not read from GGUF files",
            remedy="take the folder that the file was made of, or a file of another type",
        )
    if unknown := unknown_tensors(tensors, known, spec.num_layers):
        raise CheckpointError(
            f"{source}: tensor {unknown[0]} has no place in a model of family {spec.family}, so "
            "its effect would not be computed",
            remedy="use another model",
        )
    turned = model.interleaved(spec.num_layers, spec.attention.head_size)
    store = GgufStore(
        files,
        # Only tensors of the right size; others are refused by their shape.
        interleaved={
            name: size
            for name, size in turned.items()
            if name in tensors and tensors[name].shape == shapes.get(name)
        },
        # Peers keep these tables in the type in which they are read. Rounding values of 8 bits or
        # fewer to float16 changes each by at most 2^-12 of itself, while a step of 8 bits is 2^-8
        # of a block's largest value. float32 would take twice the memory.
        as_float16=(EMBEDDING, *map(tensor_name, TABLES & tensor_shapes(spec).keys())),
    )
    tensors_of_roles = with_fused_rows(store, parts)
    return CheckpointForm(
        path=first.path,
        described_in="the file itself",
        config=model.values,
        spec=spec,
        tensor_name=with_tied_head(spec, tensor_name),
        store=tensors_of_roles,
        end_ids=gguf_end_ids(metadata),
        sampling=gguf_sampling(metadata, first.path),
        pooling=gguf_pooling(metadata.get(f"{metadata['general.architecture']}.pooling_type")),
        open_tower=partial(tower_beside, first.path, spec),
        read_tokenizer=_tokenizer_reader(first.path, metadata),
        own_encoding=_own_encoding(tensors_of_roles, store, spec, shapes, tensor_name, parts),
    )


def _unused(spec: ModelSpec, tensor_name: Callable[[str], str]) -> set[str]:
    """Unused tensors of files, in layers that use the keys of other layers."""
    shared = [each for each, mixer in spec.attentions.items() if mixer.keys_of is not None]
    roles = ("key.weight", "value.weight", "key_norm")
    return {tensor_name(f"layers.{layer}.{role}") for layer in shared for role in roles}


def _parts(
    architecture: Architecture,
    spec: ModelSpec,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, GgufTensor],
    source: str,
) -> dict[str, TensorPart]:
    """Roles' tensors that are parts of others, by name."""
    name = architecture.tensor_name
    parts: dict[str, TensorPart] = {**fused_rows(architecture.fused, spec, name)}
    weights = {f"{whole}.weight": each for whole, each in STACKED_EXPERTS.items()}
    for layer in range(spec.num_layers):
        mixer = spec.layer(layer).mixer
        if isinstance(mixer, LinearAttention):
            parts |= linear_parts(architecture, layer, mixer, spec.hidden_size, tensors)
    of_experts = rows_of_experts(weights, spec, name, there=tensors)
    biases = {
        f"{whole}.bias": tuple(f"{each}.bias" for each in matrices)
        for whole, matrices in STACKED_EXPERTS.items()
        if len(matrices) == 1
    }
    if any(
        isinstance(kind.feed_forward, Experts) and kind.feed_forward.bias for kind in spec.kinds
    ):
        of_experts |= columns_of_experts(biases, spec, name, there=tensors)
    for role in tensor_shapes(spec):
        each = name(role)
        if ".experts." in role and each not in tensors and each not in of_experts:
            _blk, number, matrix, _expert, suffix = each.split(".")
            raise CheckpointError(
                f"{source}: tensor blk.{number}.{matrix}_exps.{suffix} is missing, so the file is "
                f"not whole, or not of family {spec.family}",
                remedy="download it again",
            )
    for each, shape in shapes.items():
        axis = len(shape) - 2  # files have single rows as vectors, and convolutions as matrices
        if axis < 0 or shape[axis] != 1 or each not in tensors:
            continue
        if len(tensors[each].shape) == len(shape) - 1:
            size = shape[1] if axis == 0 else shape[0]
            own = parts.get(each, rows_of(each, range(size)))
            parts[each] = replace(own, new_axis=axis)
    return parts | of_experts


def gguf_spec(
    files: Sequence[GgufFile], *, reads_pictures: bool = False
) -> tuple[GgufModel, ModelSpec]:
    """The spec in the metadata, whether or not the tensors are there. reads_pictures: there is a
    tower.

    Raises CheckpointError, and StoreError for a table of frequencies that cannot be read.
    """
    source = str(files[0].path)
    model = describe_gguf(
        files[0].metadata,
        {name: tensor.shape for file in files for name, tensor in file.tensors.items()},
        rope_factors=_rope_factors(files),
        source=source,
    )
    values = {**model.values, READS_PICTURES: reads_pictures}
    if not reads_pictures:
        values[PICTURE_LAYERS] = 0
    _family, spec = read_family(values, source=source, names=model.keys)
    return model, spec


def _own_encoding(
    of_roles: WeightStore,
    store: GgufStore,
    spec: ModelSpec,
    shapes: Mapping[str, tuple[int, ...]],
    tensor_name: Callable[[str], str],
    parts: Mapping[str, TensorPart],
) -> Encoding | None:
    """The file's encoding; None also for a file with missing or wrong tensors, which is refused
    elsewhere."""
    present, name = set(of_roles.names()), with_tied_head(spec, tensor_name)
    used = {name(role) for role in tensor_shapes(spec)}
    if not used <= present or any(of_roles.shape(each) != shapes[each] for each in used):
        return None
    return gguf_encoding(store, spec, name, parts)


def _rope_factors(files: Sequence[GgufFile]) -> dict[str, NDArray[np.float32]]:
    found: dict[str, NDArray[np.float32]] = {}
    for file in files:
        for name in ROPE_FACTORS:
            if (tensor := file.tensors.get(name)) is None:
                continue
            if len(tensor.shape) != 1 or tensor.shape[0] > _MOST_ROPE_FACTORS:
                raise CheckpointError(
                    f"{file.path}: tensor {name} has shape {list(tensor.shape)}, which is not one "
                    "number for each frequency",
                    remedy="download the file again",
                )
            found[name] = file.read(name, range(1), range(tensor.shape[0]))[0]
    return found


def _tokenizer_reader(
    path: Path, metadata: Mapping[str, Any]
) -> Callable[[], TokenizerFiles] | None:
    """Reader of the file's tokenizer, or of tokenizer.json beside it if that is missing or
    unknown."""
    beside = path.with_name(TOKENIZER)

    def read() -> TokenizerFiles:
        if has_tokenizer(metadata):
            try:
                return gguf_tokenizer_files(metadata, path)
            except CheckpointError:
                if not beside.is_file():
                    raise
        files = read_tokenizer_files(path.parent)
        own = gguf_templates(metadata, path)
        return replace(files, chat_templates=files.chat_templates or own)

    return read if has_tokenizer(metadata) or beside.is_file() else None
