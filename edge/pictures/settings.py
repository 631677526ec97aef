"""How a checkpoint cuts pictures, from the files of its processor."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from edge.errors import CheckpointError
from edge.models.config import Config
from edge.pictures.tiling import (
    AreaTiling,
    BudgetTiling,
    CropTiling,
    FitTiling,
    SplitTiling,
    Tiling,
)
from edge.weights.picture_files import PictureFiles

_LONGEST = 1 << 14
"""Longest side of a tile that is read, in pixels."""
_MOST_AREA = _LONGEST**2
_LANCZOS, _BILINEAR, _BICUBIC = 1, 2, 3
_LAST_RESAMPLE = 5
"""Pillow numbers its ways to resample from 0 to this one."""


def tiling_of(files: PictureFiles) -> tuple[Tiling, int]:
    """How the model's pictures are cut into tiles, and the pixels of a patch's side.

    Raises CheckpointError for settings that are invalid, or that are not supported.
    """
    model_type = files.model_type
    if model_type not in _FAMILIES:
        raise CheckpointError(f"{files.config.source}: {model_type} models read no pictures here")
    for name, usual in (("do_center_crop", False), ("do_resize", True), ("do_convert_rgb", True)):
        if files.picture.flag(name, usual) is not usual:
            raise files.picture.error(f"{name}: {str(not usual).lower()} is not supported")
    return _FAMILIES[model_type](files)


def _split(files: PictureFiles) -> tuple[Tiling, int]:
    tiling = SplitTiling(
        longest=_sizes(files.picture, "size").size("longest_edge", 4 * 364, most=_LONGEST),
        side=_sizes(files.picture, "max_image_size").size("longest_edge", 364, most=_LONGEST),
        splits=files.picture.flag("do_image_splitting", True),
        resample=_resample(files, _LANCZOS),
    )
    return tiling, _patch(files, 32)


def _fit(files: PictureFiles) -> tuple[Tiling, int]:
    sizes = _sizes(files.picture, "size")
    longest = sizes.size("longest_edge", 1024, most=_LONGEST)
    patch = files.processor.size("patch_size", _patch(files, 16), most=_LONGEST)
    merged = files.processor.size(
        "spatial_merge_size", files.config.size("spatial_merge_size", 1, most=64), most=64
    )
    tiling = FitTiling(
        width=sizes.size("width", longest, most=_LONGEST),
        height=sizes.size("height", longest, most=_LONGEST),
        unit=patch * merged,
        resample=_resample(files, _BICUBIC),
    )
    return tiling, patch


def _area(files: PictureFiles) -> tuple[Tiling, int]:
    picture, sizes = files.picture, _sizes(files.picture, "size")
    patch = picture.size("patch_size", _patch(files, 16), most=_LONGEST)
    merged = picture.size(
        "merge_size", files.vision.size("spatial_merge_size", 2, most=64), most=64
    )
    least = sizes.size("shortest_edge", 56 * 56, most=_MOST_AREA)
    most = sizes.size("longest_edge", 28 * 28 * 1280, most=_MOST_AREA)
    tiling = AreaTiling(
        least=picture.size("min_pixels", least, most=_MOST_AREA),
        most=picture.size("max_pixels", most, most=_MOST_AREA),
        unit=patch * merged,
        resample=_resample(files, _BICUBIC),
    )
    return tiling, patch


def _crop(files: PictureFiles) -> tuple[Tiling, int]:
    picture, sizes = files.picture, _sizes(files.picture, "size")
    side = files.vision.size("image_size", 224, most=_LONGEST)
    crops = picture.flag("do_pan_and_scan", False)
    tiling = CropTiling(
        width=sizes.size("width", side, most=_LONGEST),
        height=sizes.size("height", side, most=_LONGEST),
        resample=_resample(files, _BILINEAR),
        most_crops=picture.size("pan_and_scan_max_num_crops", 4, most=64) if crops else 0,
        least_crop=picture.size("pan_and_scan_min_crop_size", 256, most=_LONGEST),
        least_ratio=picture.positive("pan_and_scan_min_ratio_to_activate", 1.2),
    )
    return tiling, _patch(files, 16)


def _budget(files: PictureFiles) -> tuple[Tiling, int]:
    patch = files.picture.size("patch_size", _patch(files, 16), most=_LONGEST)
    tiling = BudgetTiling(
        patch=patch,
        pooled=files.picture.size("pooling_kernel_size", 3, most=64),
        most_rows=files.picture.size("max_soft_tokens", 280, most=1 << 16),
        resample=_resample(files, _BICUBIC),
    )
    return tiling, patch


_FAMILIES: Mapping[str, Callable[[PictureFiles], tuple[Tiling, int]]] = {
    "idefics3": _split,
    "smolvlm": _split,
    "mistral3": _fit,
    "qwen2_5_vl": _area,
    "qwen3_vl": _area,
    "qwen3_5": _area,
    "qwen3_5_moe": _area,
    "gemma3": _crop,
    "gemma4": _budget,
}


def _sizes(config: Config, name: str) -> Config:
    return Config(config.mapping(name), source=f"{config.source}: {name}")


def _resample(files: PictureFiles, default: int) -> int:
    found = files.picture.integer("resample", default)
    if not 0 <= found <= _LAST_RESAMPLE:
        raise files.picture.error(f"resample must lie in 0..{_LAST_RESAMPLE}, not {found}")
    return found


def _patch(files: PictureFiles, default: int) -> int:
    return files.vision.size("patch_size", default, most=_LONGEST)
