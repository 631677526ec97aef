"""A Hugging Face checkpoint: a folder with config.json, safetensors files and a tokenizer."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from reprlib import repr as shown
from typing import Any

import numpy as np

from edge.errors import CheckpointError, RequestError
from edge.host.atomic_files import write_whole
from edge.host.cache_paths import cache_root
from edge.models.experts import Experts, expert_number
from edge.models.families import Family, read_family, reads_pictures
from edge.models.spec import ModelSpec
from edge.offload import SafetensorsStore, StoreError
from edge.text import read_end_ids, read_sampling, read_tokenizer_files, unused_settings
from edge.text.files import TOKENIZER, read_json
from edge.weights.foreign_folders import check_folder
from edge.weights.form import CheckpointForm, with_tied_head
from edge.weights.fused_rows import (
    columns_of_experts,
    fused_rows,
    rows_of_experts,
    rows_of_heads,
    turned_rows,
    with_fused_rows,
)
from edge.weights.packed.encoding import packed_encoding
from edge.weights.packed.folder import PackedStore, packed_store, with_quantization
from edge.weights.packed.mxfp4 import BLOCKS
from edge.weights.pooling import read_pooling
from edge.weights.tower import tower_in_folder

CONFIG = "config.json"

TIED_HEADS = "tied-heads"
"""The cache's folder of checkpoints whose head was read and is the embedding."""

_COMPARED_BYTES = 4 << 20
"""Bytes of head and embedding that are compared at once."""

_WHOLE_FOLDER = "take the folder as the model's makers publish it, all of it"

_TEXT_PARTS = (
    ("model.", "lm_head."),
    ("model.language_model.", "lm_head."),
    ("model.text_model.", "lm_head."),
    ("language_model.model.", "language_model.lm_head."),
    ("", "lm_head."),
)
"""Prefixes of the tensors of a text part and of its head: for text models, multimodal models (three
kinds), and embedding models, which have no head."""


def open_folder(folder: Path) -> CheckpointForm:
    """Open a folder. Raises CheckpointError with the file, its fault and the remedy."""
    check_folder(folder)
    source = folder / CONFIG
    config: Mapping[str, Any] = read_json(source)
    family, spec = read_family(config, source=str(source))
    end_ids, sampling = read_end_ids(folder), read_sampling(folder)
    pooling = read_pooling(folder)
    try:
        files = SafetensorsStore(folder)
    except StoreError as error:
        raise CheckpointError(str(error)) from error
    try:
        config = with_quantization(config, folder, files.names())
        plain_name = family.tensor_name
        own = plain_name("embedding").removesuffix("weight")
        note = ""
        is_here = any(each.startswith(own) for each in files.names())
        if reads_pictures(config) or not is_here:
            plain_name = _in_text_part(plain_name, files.names())
        is_bare = not is_here and plain_name("embedding") == own.partition(".")[2] + "weight"
        if reads_pictures(config) or is_bare:  # a model for embeddings has no head
            spec = replace(spec, tied_embeddings=plain_name("head") not in files.names())
        elif spec.tied_embeddings and _has_own_head(files, plain_name):
            spec = replace(spec, tied_embeddings=False)
            note = (
                f"{CONFIG} says that the head is the embedding (tie_word_embeddings), but the "
                "files have another head, which is used"
            )
        name = with_tied_head(spec, plain_name)
        parts = fused_rows(family.fused, spec, plain_name)
        of_heads = rows_of_heads(family.fused_by_head, spec, plain_name)
        of_experts = rows_of_experts(family.stacked_experts, spec, plain_name)
        by_column = columns_of_experts(family.turned_experts, spec, plain_name)
        turned = turned_rows(family.turned, spec, plain_name)
        store = with_fused_rows(files, {**parts, **of_heads, **of_experts, **by_column, **turned})
        store = packed_store(
            config, store, source=str(source), embedding=name("embedding"), parts=parts
        )
        own_encoding = packed_encoding(store, spec, name)
        if spec.has_states and isinstance(store, PackedStore):
            _check_states(store, family, str(source))
        _check_experts(
            spec,
            name,
            files=files.names(),
            found=frozenset(store.names()),
            wholes={each: part.tensor for each, part in {**of_experts, **by_column}.items()},
            source=str(folder),
        )
    except BaseException as error:
        files.close()
        if isinstance(error, StoreError):
            raise CheckpointError(str(error)) from error
        raise
    has_tokenizer = (folder / TOKENIZER).is_file()
    return CheckpointForm(
        path=folder,
        described_in=CONFIG,
        config=config,
        spec=spec,
        tensor_name=name,
        store=store,
        own_encoding=own_encoding,
        norm_offset=family.norm_offset,
        note=note,
        end_ids=end_ids,
        sampling=sampling,
        unused_settings=unused_settings(folder),
        pooling=pooling,
        further_name=_further_name(family, spec, name, frozenset(store.names())),
        open_tower=partial(
            tower_in_folder,
            config,
            folder,
            store,
            spec,
            source=str(source),
        ),
        read_tokenizer=(lambda: read_tokenizer_files(folder)) if has_tokenizer else None,
    )


def _further_name(
    family: Family, spec: ModelSpec, tensor_name: Callable[[str], str], names: Collection[str]
) -> Callable[[str], str] | None:
    """The names of the further head's tensors; None if the files have none. It may share embedding
    and head with the model."""
    of_family = family.further_name
    if of_family is None or of_family(spec, "input_projection") not in names:
        return None

    def name(role: str) -> str:
        own = of_family(spec, role)
        is_shared = role in ("embedding", "head") and own not in names
        return tensor_name(role) if is_shared else own

    return name


def _check_states(store: PackedStore, family: Family, source: str) -> None:
    """Raises CheckpointError for states that would be read incorrectly."""
    fused = [n for n in store.packed if any(f".{each}." in n for each in family.fused_by_head)]
    if store.method != "mlx" and not fused:
        return
    raise CheckpointError(
        f"{source}: a model with states in place of keys and values (linear attention, short "
        f"convolutions) that is quantised like this ({fused[0] if fused else store.method}) is "
        "not computed",
        remedy="take the model's folder of floats, which Edge rounds itself, or a GGUF file",
    )


def _has_own_head(files: SafetensorsStore, tensor_name: Callable[[str], str]) -> bool:
    """Whether head and embedding have different values, as after merging an adapter. Equal ones are
    remembered in the cache, because both are read to the end for that."""
    head, embedding = tensor_name("head"), tensor_name("embedding")
    names = files.names()
    if head not in names or embedding not in names:
        return any(each.startswith(head.removesuffix("weight")) for each in names)
    shape = files.shape(head)
    if shape != files.shape(embedding):
        return True
    with contextlib.suppress(OSError, RequestError):
        if (cache_root() / TIED_HEADS / files.fingerprint).exists():
            return False
    is_same_type = files.dtype(head) == files.dtype(embedding)
    rows = max(1, _COMPARED_BYTES // max(1, files.dtype(head).itemsize * math.prod(shape[1:])))
    for start in range(0, shape[0], rows):
        part = range(start, min(start + rows, shape[0]))
        one, other = files.read(head, part), files.read(embedding, part)
        if is_same_type and one.tobytes() == other.tobytes():
            continue
        if not np.array_equal(one.astype(np.float32), other.astype(np.float32)):
            return True
    with contextlib.suppress(OSError, RequestError):  # it is compared again
        write_whole(cache_root() / TIED_HEADS / files.fingerprint, "")
    return False


def _in_text_part(plain_name: Callable[[str], str], names: Collection[str]) -> Callable[[str], str]:
    """The names of roles' tensors, from the names that a text model has."""
    own, dot, embedding = plain_name("embedding").removesuffix("weight").partition(".")
    base, head = next(
        (each for each in _TEXT_PARTS if any(n.startswith(f"{each[0]}{embedding}") for n in names)),
        _TEXT_PARTS[0],
    )

    def name(role: str) -> str:
        plain = plain_name(role)
        if plain.startswith(f"{own}{dot}"):
            return base + plain.removeprefix(f"{own}{dot}")
        return head + plain.removeprefix("lm_head.")

    return name


def _check_experts(
    spec: ModelSpec,
    tensor_name: Callable[[str], str],
    *,
    files: Collection[str],
    found: Collection[str],
    wholes: Mapping[str, str],
    source: str,
) -> None:
    """Raises CheckpointError, with the missing tensor, for an expert without weights.

    files: names of the stored tensors. found: also of tensors made from them. wholes: the family's
    tensor with all experts of a layer, by the name of a single expert's.
    """
    for layer in range(spec.num_layers):
        part = spec.layer(layer).feed_forward
        if not isinstance(part, Experts):
            continue
        for own in part.shapes(spec.hidden_size):
            role = f"layers.{layer}.{own}"
            number = expert_number(role)
            name = tensor_name(role)
            if number is None or name in found:
                continue
            cause = _cause(name, number, wholes.get(name), files, spec.family)
            raise CheckpointError(f"{source}: {cause}", remedy=_WHOLE_FOLDER)


def _cause(name: str, number: int, whole: str | None, files: Collection[str], family: str) -> str:
    """The cause if there is no tensor of this name, for expert `number` of its layer."""
    for stored in (whole, f"{whole}{BLOCKS}"):
        if stored in files:
            return f"tensor {stored} has no expert {number}, and config.json counts more"
    before = f"{name.partition('.experts.')[0]}.experts."
    others = [each for each in files if each.startswith(before)]
    together = [each for each in others if not each[len(before) :][:1].isdigit()]
    if whole is not None and len(together) == len(others):
        return f"tensor {whole}, with all experts of a layer, is missing"
    if whole is None and together:
        return (
            f"tensor {min(together)} has all experts of a layer, where models of family "
            f"{shown(family)} have tensors for each: {name} is missing"
        )
    return f"tensor {name} is missing"
