"""Tiny models that read pictures, with random weights, and what `transformers` makes of a tile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from edge.backends.interface import ShardWeights
from edge.models.pictures import Tile
from edge.models.towers.part import TowerPart
from edge.models.towers.positions import block_order
from edge.runs.shipping import describe_shard
from edge.weights.checkpoint import Checkpoint
from edge.weights.tower import tower_format, tower_layout
from tests.support.checkpoints import PLAIN, hub, random_weight
from tests.support.family_sizes import SHARED, SIZES

Array = NDArray[np.float32]

_LAYERS = {
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
}
_SQUARE = {**_LAYERS, "image_size": 84, "patch_size": 14}
_GEMMA4 = {
    **_LAYERS,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "patch_size": 8,
    "position_embedding_size": 40,
}
_QWEN = {"depth": 3, "hidden_size": 48, "intermediate_size": 70, "num_heads": 3}
_QWEN3 = {**_QWEN, "out_hidden_size": 66, "patch_size": 16, "num_position_embeddings": 49}

_VISION: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "smolvlm": ("llama", _SQUARE),
    "gemma3": ("gemma3", {"model_type": "siglip_vision_model", **_SQUARE}),
    "gemma4": ("gemma4", {**_GEMMA4, "standardize": True}),
    "gemma4_small": ("gemma4_small", {**_GEMMA4, "use_clipped_linears": True}),
    "mistral3": (
        "ministral3",
        {
            **_SQUARE,
            "model_type": "pixtral",
            "num_attention_heads": 2,
            "head_dim": 24,
            "image_size": 140,
        },
    ),
    "qwen2_5_vl": (
        "qwen2",
        {
            **_QWEN,
            "out_hidden_size": 80,
            "patch_size": 8,
            "window_size": 48,
            "fullatt_block_indexes": [1],
        },
    ),
    "qwen3_5": ("qwen3_5", {"model_type": "qwen3_5_vision", **_QWEN3}),
    "qwen3_vl": ("qwen3", {**_QWEN3, "deepstack_visual_indexes": [0, 2]}),
}
"""By name, which is most often the model_type: the text part in SIZES, and the tower."""

_FURTHER: Mapping[str, Mapping[str, Any]] = {
    "smolvlm": {"scale_factor": 3},
    "gemma3": {"mm_tokens_per_image": 4},
    "gemma4": {"audio_config": None},
    "gemma4_small": {"model_type": "gemma4", "audio_config": None},
}
"""Fields of neither part."""

_AXES = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]}
_TEXTS: Mapping[str, Mapping[str, Any]] = {
    "qwen2_5_vl": {"rope_parameters": _AXES},
    "qwen3_vl": {"rope_parameters": {**_AXES, "mrope_section": [12, 10, 10]}},
}
"""Further fields of text parts."""

_TEXT_TYPES = {"qwen2_5_vl": "qwen2_5_vl_text", "qwen3_vl": "qwen3_vl_text"}

GRIDS: Mapping[str, tuple[tuple[int, int], ...]] = {
    "smolvlm": ((6, 6), (3, 3)),
    "gemma3": ((6, 6),),
    "gemma4": ((3, 3), (6, 15), (18, 3)),
    "gemma4_small": ((3, 6), (12, 9)),
    "mistral3": ((2, 4), (4, 10), (10, 6)),
    "qwen2_5_vl": ((2, 2), (6, 12), (8, 10), (20, 4)),
    "qwen3_5": ((2, 2), (4, 14), (16, 6)),
    "qwen3_vl": ((2, 2), (6, 10), (20, 8)),
}
"""Sizes of tiles in patches."""


def make_tower_model(
    folder: Path, name: str, vision: Mapping[str, Any] = MappingProxyType({}), **texts: Any
) -> Any:
    """Write the model into a folder, and return it. vision, texts: further fields of its parts."""
    text, tower = _VISION[name]
    sizes = {"model_type": name, **_FURTHER.get(name, {}), "vision_config": {**tower, **vision}}
    text_type, text_sizes = SIZES[text]
    text_type = _TEXT_TYPES.get(name, text_type)
    text_config = {"model_type": text_type, **SHARED, **text_sizes, **_TEXTS.get(name, {}), **texts}
    config = hub.AutoConfig.for_model(**sizes, text_config=text_config)
    model = hub.AutoModelForImageTextToText.from_config(config, dtype=torch.float32, **PLAIN)
    with torch.no_grad():
        for each, parameter in model.named_parameters():
            values = random_weight(each, tuple(parameter.shape), name)
            if parameter.ndim > 2:  # of a convolution, or a table
                values *= (parameter.shape[1] / parameter[0].numel()) ** 0.5
            parameter.copy_(torch.from_numpy(values))
        for each, buffer in model.named_buffers():
            if each.endswith(_BOUNDS):
                buffer.fill_(float(random_weight(each, (1, 1), name).item()) * 0.3 + _near(each))
            elif each.endswith(("std_bias", "std_scale")):
                buffer.copy_(torch.from_numpy(random_weight(each, tuple(buffer.shape), name)))
    model.save_pretrained(folder)
    return model.eval()


_BOUNDS = ("input_min", "input_max", "output_min", "output_max")


def _near(bound: str) -> float:
    """A bound that some values exceed."""
    return 1.5 if bound.endswith("max") else -1.5


def random_tile(height: int, width: int, patch_size: int, seed: int = 0) -> Tile:
    """A tile of random pixels."""
    shape = height * width, 3 * patch_size**2
    patches = np.random.default_rng([seed, *shape]).integers(0, 256, shape, np.uint8)
    return Tile(patches=patches, height=height, width=width)


def shipped_tower(
    checkpoint: Checkpoint, folder: Path, dtype: str, part: TowerPart
) -> ShardWeights:
    """The weights of a part of a checkpoint's tower as a peer gets them, for a model in this
    format."""
    tower = part.tower
    chosen = tower_format(tower, format_of(checkpoint, dtype))
    source = checkpoint.tower_source(chosen, cache_root=folder, on_progress=lambda _: None)
    shipment = describe_shard(
        tower_layout(part),
        source,
        chosen,
        fingerprint=checkpoint.tower_fingerprint,
        cache_root=folder,
        on_progress=lambda _done, _total: None,
    )
    manifest, path = (
        shipment.manifest,
        folder / f"tower-{dtype}-{part.layers}",
    )
    wanted = frozenset(piece.digest for _, piece in manifest.placements())
    pieces = {digest: bytes(data) for digest, data in shipment.pieces(wanted)}
    content = bytearray(manifest.total_bytes)
    for offset, piece in manifest.placements():
        content[offset : offset + piece.nbytes] = pieces[piece.digest]
    path.write_bytes(content)
    source.close()
    return ShardWeights(path=path, manifest=manifest)


def format_of(checkpoint: Checkpoint, dtype: str) -> Any:
    from edge.weights.formats import weight_format

    return weight_format(checkpoint.spec, dtype)


def expected_rows(name: str, model: Any, tile: Tile) -> Array:
    """What `transformers` makes of a tile, as `TowerProgram.read` returns it."""
    with torch.inference_mode():
        found = _READERS[name](model.model, tile)
    return np.asarray(found, np.float32)


def _image(
    tile: Tile, mean: float | Sequence[float] = 0.5, deviation: float | Sequence[float] = 0.5
) -> torch.Tensor:
    """[1, 3, pixels, pixels], normalized."""
    side = round((tile.patches.shape[1] / 3) ** 0.5)
    patches = tile.patches.reshape(tile.height, tile.width, 3, side, side)
    pixels = patches.transpose(2, 0, 3, 1, 4).reshape(3, tile.height * side, tile.width * side)
    wide = pixels.astype(np.float64) / 255
    values = (wide - np.asarray(mean).reshape(-1, 1, 1)) / np.asarray(deviation).reshape(-1, 1, 1)
    return torch.from_numpy(values.astype(np.float32))[None]


_HALF = ((0.5,) * 3, (0.5,) * 3)
CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
"""Mean and deviation of pixels."""


def _idefics3(model: Any, tile: Tile) -> Any:
    return model.get_image_features(_image(tile)[None]).pooler_output[0]


def _gemma3(model: Any, tile: Tile) -> Any:
    return model.get_image_features(_image(tile)).pooler_output[0]


def _gemma4(model: Any, tile: Tile) -> Any:
    patches = tile.patches.reshape(len(tile.patches), 3, -1).swapaxes(1, 2)
    values = torch.from_numpy(patches.reshape(len(patches), -1).astype(np.float32) / 255)
    y, x = np.indices((tile.height, tile.width)).reshape(2, -1)
    places = torch.from_numpy(np.stack([x, y], axis=-1))
    return model.get_image_features(values[None], places[None]).pooler_output[0]


def _mistral3(model: Any, tile: Tile) -> Any:
    image = _image(tile, *CLIP)
    return model.get_image_features(image, image_sizes=[tuple(image.shape[2:])]).pooler_output[0]


def _qwen2_5(model: Any, tile: Tile) -> Any:
    return _qwen(model, tile, CLIP)


def _qwen(
    model: Any, tile: Tile, normalized: tuple[Sequence[float], Sequence[float]] = _HALF
) -> Any:
    order = block_order(2, tile.height, tile.width)
    pixels = tile.patches[order].reshape(len(order), 3, 1, -1) / 255
    mean, deviation = (np.reshape(each, (-1, 1, 1)) for each in normalized)
    values = torch.from_numpy(((pixels - mean) / deviation).astype(np.float32))
    values = values.expand(-1, -1, 2, -1).reshape(len(order), -1)
    grid = torch.tensor([[1, tile.height, tile.width]])
    found = model.get_image_features(values, image_grid_thw=grid)
    deep = getattr(found, "deepstack_features", None)
    return (
        torch.cat([found.pooler_output[0], *(each[0] for each in deep)], dim=-1)
        if deep
        else found.pooler_output[0]
    )


_READERS: Mapping[str, Callable[[Any, Tile], Any]] = {
    "smolvlm": _idefics3,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "gemma4_small": _gemma4,
    "mistral3": _mistral3,
    "qwen2_5_vl": _qwen2_5,
    "qwen3_5": _qwen,
    "qwen3_vl": _qwen,
}
