"""The tower in the `mmproj` file beside a GGUF model, as llama.cpp writes it."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from edge.errors import CheckpointError
from edge.models.attention import Attention
from edge.models.config import Config
from edge.models.spec import ModelSpec
from edge.models.towers.families import TOWERS, TowerFamily, read_tower
from edge.models.towers.tower import Tower
from edge.offload import GgufFile, GgufStore, StoreError, open_gguf, own_file
from edge.weights.mmproj_names import is_mmproj
from edge.weights.picture_files import PictureFiles
from edge.weights.tower import TowerForm, with_bounds, with_parts

_VISION = "clip.vision."


@dataclass(frozen=True, slots=True, kw_only=True)
class _Projector:
    """A kind of file. model_type: in TOWERS. names: those that are not in `_NAMES`. fused, stacked:
    as of a TowerFamily. interleaved: queries and keys have alternating rows of the two halves of
    each head."""

    model_type: str
    names: Mapping[str, str]
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    stacked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    interleaved: bool = False


_NAMES = {
    "patches": "v.patch_embd.weight",
    "patches.0": "v.patch_embd.weight",
    "patches.1": "v.patch_embd.weight.1",
    "patch_bias": "v.patch_embd.bias",
    "positions": "v.position_embd.weight",
    "first_norm": "v.pre_ln.weight",
    "layers.attention_norm": "v.blk.{}.ln1.weight",
    "layers.attention_norm_bias": "v.blk.{}.ln1.bias",
    "layers.query": "v.blk.{}.attn_q",
    "layers.key": "v.blk.{}.attn_k",
    "layers.value": "v.blk.{}.attn_v",
    "layers.output": "v.blk.{}.attn_out",
    "layers.attention_post_norm": "v.blk.{}.attn_post_norm.weight",
    "layers.query_norm": "v.blk.{}.attn_q_norm.weight",
    "layers.key_norm": "v.blk.{}.attn_k_norm.weight",
    "layers.mlp_norm": "v.blk.{}.ln2.weight",
    "layers.mlp_norm_bias": "v.blk.{}.ln2.bias",
    "layers.mlp_post_norm": "v.blk.{}.ffn_post_norm.weight",
    "layers.gate": "v.blk.{}.ffn_gate",
    "layers.up": "v.blk.{}.ffn_up",
    "layers.down": "v.blk.{}.ffn_down",
    "merger.patch_norm": "v.post_ln.weight",
    "merger.patch_norm_bias": "v.post_ln.bias",
}

_FUSED = {"attn_qkv": ("query", "key", "value")}

_PROJECTORS = {
    "gemma3": _Projector(
        model_type="gemma3",
        names={
            "merger.row_norm": "mm.soft_emb_norm.weight",
            "merger.0.weight": "mm.input_projection.weight",
        },
    ),
    "gemma4v": _Projector(
        model_type="gemma4",
        names={
            "merger.row_shift": "v.std_bias",
            "merger.row_factor": "v.std_scale",
            "merger.0": "mm.input_projection",
        },
        stacked={"positions": ("positions.0", "positions.1")},
    ),
    "idefics3": _Projector(model_type="idefics3", names={"merger.0": "mm.model.fc"}),
    "pixtral": _Projector(
        model_type="mistral3",
        names={
            "merger.patch_norm": "mm.input_norm.weight",
            "merger.0": "mm.patch_merger",
            "merger.1": "mm.1",
            "merger.2": "mm.2",
        },
        interleaved=True,
    ),
    "qwen2.5vl_merger": _Projector(
        model_type="qwen2_5_vl",
        names={"merger.0": "mm.0", "merger.1": "mm.2"},
        fused=_FUSED,
    ),
    "qwen3vl_merger": _Projector(
        model_type="qwen3_vl",
        names={
            "merger.0": "mm.0",
            "merger.1": "mm.2",
            "deep.row_norm": "v.deepstack.{}.norm.weight",
            "deep.row_norm_bias": "v.deepstack.{}.norm.bias",
            "deep.0": "v.deepstack.{}.fc1",
            "deep.1": "v.deepstack.{}.fc2",
        },
        fused=_FUSED,
    ),
}
"""By `clip.projector_type`."""


def mmproj_beside(model_file: Path) -> Path | None:
    """The first mmproj file, by name, in the folder of a model's file."""
    files = model_file.parent.iterdir()
    return min((each for each in files if is_mmproj(each.name)), default=None)


def tower_beside(model_file: Path, model: ModelSpec) -> TowerForm | None:
    """The tower in the mmproj file beside a model's file; None without one, or for a kind that is
    not known. Raises CheckpointError for a damaged file, or one of another model."""
    found = mmproj_beside(model_file)
    if found is None:
        return None
    try:
        files = open_gguf(own_file(found))
    except StoreError as error:
        raise CheckpointError(str(error)) from error
    form: TowerForm | None = None
    try:
        form = _tower_in(files[0], model) if len(files) == 1 else None
    except StoreError as error:
        raise CheckpointError(str(error)) from error
    finally:
        if form is None:
            for file in files:
                file.close()
    return form


def _tower_in(file: GgufFile, model: ModelSpec) -> TowerForm | None:
    metadata, source = file.metadata, str(file.path)
    kind = metadata.get("clip.vision.projector_type", metadata.get("clip.projector_type"))
    projector = _PROJECTORS.get(kind) if isinstance(kind, str) else None
    if metadata.get("general.architecture") != "clip" or projector is None:
        return None
    size = metadata.get(f"{_VISION}projection_dim", model.hidden_size)
    if size != model.hidden_size:
        raise CheckpointError(
            f"{source} gives rows of {size} values, and the model's hidden state has "
            f"{model.hidden_size}: it belongs to another model",
            remedy="put the mmproj file of this model beside it",
        )
    _flatten_patches(file)
    config, picture = _values(projector, file, model)
    read = read_tower(config, picture, model, source=source)
    assert read is not None
    family: TowerFamily = importlib.import_module(
        f"edge.models.towers.{TOWERS[projector.model_type]}"
    ).FAMILY
    names = {**_NAMES, **projector.names}
    if _is_swapped(file):
        names |= {"layers.up": _NAMES["layers.down"], "layers.down": _NAMES["layers.up"]}
    family = replace(family, names=names, fused=projector.fused, stacked=projector.stacked)
    tower = _as_stored(read[1], file)
    plain = family.tensor_name(tuple(file.tensors))

    def name(role: str) -> str:
        if role.startswith("deep."):  # numbered by the layer
            _deep, number, rest = role.split(".", 2)
            role = f"deep.{tower.deep[int(number)][0]}.{rest}"
        return plain(role)

    turned: dict[str, int] = {}
    if projector.interleaved:
        heads = tower.encoder.attention
        turned = _interleaved(tower, heads, file)
    plain_store = GgufStore([file], interleaved=turned)
    tower = with_bounds(family, tower, name, plain_store)
    store = with_parts(family, tower, name, plain_store)
    files = PictureFiles(
        config=Config(config, source=source),
        picture=Config(picture, source=source),
        processor=Config({}, source=source),
    )
    return TowerForm(tower=tower, files=files, tensor_name=name, store=store)


def _flatten_patches(file: GgufFile) -> None:
    """Have the matrices of patches be read as matrices, which files have as convolutions."""
    flat = {
        name: replace(tensor, shape=(tensor.shape[0], math.prod(tensor.shape[1:])))
        for name, tensor in file.tensors.items()
        if name in (_NAMES["patches.0"], _NAMES["patches.1"])
        and len(tensor.shape) == 4
        and tensor.type.block_size == 1
    }
    file.tensors = {**file.tensors, **flat}


def _interleaved(tower: Tower, heads: Attention, file: GgufFile) -> dict[str, int]:
    """Tensors in llama.cpp's order of rows, of the right size, and the size of their heads."""
    names = [
        f"v.blk.{layer}.attn_{each}.weight"
        for layer in range(tower.encoder.num_layers)
        for each in "qk"
    ]
    rows = heads.num_heads * heads.head_size
    return {
        name: heads.head_size
        for name in names
        if name in file.tensors and file.tensors[name].shape[0] == rows
    }


def _as_stored(tower: Tower, file: GgufFile) -> Tower:
    """The tower with what differs in these files: norms of rows have their offset added, and each
    frame of a patch has its matrix."""
    norm = tower.merger.row_norm
    if norm is not None and norm.offset:
        merger = replace(tower.merger, row_norm=replace(norm, offset=0.0))
        tower = replace(tower, merger=merger)
    if tower.channels_last:
        tower = replace(tower, channels_last=False)
    if tower.frames == 2 and _NAMES["patches.1"] in file.tensors:
        tower = replace(tower, frames_apart=True)
    return tower


def _is_swapped(file: GgufFile) -> bool:
    """Whether names of up and down are exchanged, as older programs wrote them."""
    down = file.tensors.get("v.blk.0.ffn_down.weight")
    hidden, columns = (
        file.metadata.get(f"{_VISION}{each}_length") for each in ("embedding", "feed_forward")
    )
    return down is not None and hidden != columns and down.shape == (columns, hidden)


def _values(
    projector: _Projector, file: GgufFile, model: ModelSpec
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of a config.json and of its processor's settings."""

    def key(name: str) -> Any:
        return file.metadata.get(f"{_VISION}{name}")

    activation = "gelu_pytorch_tanh" if file.metadata.get("clip.use_gelu") else "quick_gelu"
    layers, heads = key("block_count"), key("attention.head_count")
    vision = {
        "hidden_size": key("embedding_length"),
        "intermediate_size": key("feed_forward_length"),
        "num_hidden_layers": layers,
        "depth": layers,
        "num_attention_heads": heads,
        "num_heads": heads,
        "layer_norm_eps": key("attention.layer_norm_epsilon"),
        "image_size": key("image_size"),
        "patch_size": key("patch_size"),
        "spatial_merge_size": key("spatial_merge_size"),
        "hidden_act": "silu" if file.metadata.get("clip.use_silu") else activation,
        "deepstack_visual_indexes": np.flatnonzero(_array(key("is_deepstack_layers"))).tolist(),
        "temporal_patch_size": 2 if _NAMES["patches.1"] in file.tensors else 1,
        **_further(projector.model_type, key, file),
    }
    if (table := file.tensors.get(_NAMES["positions"])) is not None:
        vision["num_position_embeddings"] = table.shape[0]
    is_qwen3_5 = model.family.startswith("qwen3_5")
    config = {
        "model_type": "qwen3_5" if is_qwen3_5 else projector.model_type,
        "vision_config": vision,
        "spatial_merge_size": key("spatial_merge_size"),
        "scale_factor": key("projector.scale_factor"),
        "multimodal_projector_bias": "mm.1.bias" in file.tensors,
    }
    if projector.model_type == "gemma3":
        config["mm_tokens_per_image"] = _gemma3_rows(key)
    means = {"image_mean": key("image_mean"), "image_std": key("image_std")}
    picture = {name: _array(value).tolist() for name, value in means.items() if value is not None}
    return config, picture | _sizes(projector.model_type, key)


def _further(model_type: str, key: Callable[[str], Any], file: GgufFile) -> dict[str, Any]:
    """Fields of single families."""
    if model_type == "gemma4":
        heads, size = key("attention.head_count"), key("embedding_length")
        is_whole = type(heads) is type(size) is int and heads > 0
        table = file.tensors.get(_NAMES["positions"])
        return {
            "head_dim": size // heads if is_whole else size,
            "rms_norm_eps": key("attention.layer_norm_epsilon"),
            "pooling_kernel_size": key("projector.scale_factor"),
            "position_embedding_size": table.shape[-2] if table and len(table.shape) > 1 else 0,
            "standardize": "v.std_bias" in file.tensors,
        }
    if model_type == "qwen2_5_vl" and type(every := key("n_wa_pattern")) is int and every > 0:
        count = key("block_count")
        whole = range(every - 1, count if type(count) is int else 0, every)
        return {"fullatt_block_indexes": list(whole), "window_size": key("window_size")}
    return {}


def _sizes(model_type: str, key: Callable[[str], Any]) -> dict[str, Any]:
    """How pictures are resized, as far as files tell and processors differ."""
    side = key("image_size")
    if model_type == "idefics3":
        longest = key("preproc_image_size") or side  # of that side, a picture is one tile
        return {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": side}}
    if model_type == "mistral3":
        return {"size": {"longest_edge": side}}
    if model_type in ("qwen2_5_vl", "qwen3_vl"):
        return {
            "min_pixels": key("image_min_pixels") or _QWEN_PIXELS[0],
            "max_pixels": key("image_max_pixels") or _QWEN_PIXELS[1],
        }
    return {}


_QWEN_PIXELS = 1 << 16, 1 << 24
"""The least and most pixels of a picture, where a file does not tell."""


_GEMMA3_SIDE = 4
"""Patches of a side of a block, where a file does not tell."""


def _gemma3_rows(key: Callable[[str], Any]) -> int | None:
    """The rows of a tile; None: it is left to the family's checks."""
    sizes = key("image_size"), key("patch_size"), key("projector.scale_factor") or _GEMMA3_SIDE
    if any(type(each) is not int or each < 1 for each in sizes):
        return None
    return (math.floor(sizes[0] / sizes[1]) // sizes[2]) ** 2 or None


def _array(value: Any) -> np.ndarray[Any, Any]:
    """An array of numbers; empty for anything else."""
    return value if isinstance(value, np.ndarray) else np.empty(0)
