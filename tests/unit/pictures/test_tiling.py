"""Tiles have the pixels that the image processors of `transformers` make of a picture."""

import functools
import io
import json
from collections.abc import Iterator
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from edge.errors import CheckpointError, RequestError
from edge.pictures.decoder import Picture, PictureDecoder
from edge.pictures.settings import tiling_of
from edge.weights.picture_files import picture_files
from tests.support.slow_cases import repeats_are_slow

SIZES = ((1, 1), (5, 3), (37, 64), (300, 200), (333, 1000), (2500, 40), (17, 1700), (1600, 1601))
"""(width, height)."""


@functools.cache
def picture(width: int, height: int) -> Image.Image:
    """Noise on a gradient: any other resampling has other pixels."""
    noise = np.random.default_rng(width * height).integers(0, 64, (height, width, 3))
    down, right = np.mgrid[:height, :width]
    slope = 190 * (down + right)[..., None] // (height + width)
    return Image.fromarray((noise + slope).astype(np.uint8))


@functools.cache
def png(width: int, height: int) -> bytes:
    held = io.BytesIO()
    picture(width, height).save(held, "PNG")
    return held.getvalue()


def decoder(folder: Path, model_type: str, settings: Any, vision: Any, **files: Any) -> Any:
    folder.mkdir(exist_ok=True)
    config = {"model_type": model_type, "vision_config": vision}
    for name, value in {"config": config, "preprocessor_config": settings, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return closing(PictureDecoder(*tiling_of(picture_files(folder))))


def unpatched(found: Picture, side: int) -> Iterator[NDArray[np.uint8]]:
    """The pixels of each tile: [channels, height, width]."""
    for tile in found.tiles:
        patches = tile.patches.reshape(tile.height, tile.width, 3, side, side)
        yield patches.transpose(2, 0, 3, 1, 4).reshape(3, tile.height * side, tile.width * side)


def normalized(theirs: Any, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    values = theirs.rescale(pixels, theirs.rescale_factor)
    if theirs.do_normalize:
        values = theirs.normalize(values, theirs.image_mean, theirs.image_std)
    return np.asarray(values)


@pytest.mark.parametrize(
    ("longest", "splits", "model_type"),
    repeats_are_slow(product([64, 150, 256], [True, False], ["smolvlm", "idefics3"])),
)
def test_split_pictures(tmp_path: Path, model_type: str, splits: bool, longest: int) -> None:
    settings = {
        "size": {"longest_edge": longest},
        "max_image_size": {"longest_edge": 64},
        "do_image_splitting": splits,
    }
    kinds: dict[str, Any] = {
        "smolvlm": SmolVLMImageProcessorPil,
        "idefics3": Idefics3ImageProcessorPil,
    }
    theirs = kinds[model_type](**settings, return_row_col_info=True)
    with decoder(tmp_path, model_type, settings, {"patch_size": 16}) as ours:
        for size in SIZES:
            image = picture(*size)
            wanted = theirs(image)
            found = ours.picture(png(*size))
            assert [[found.rows]] == wanted["rows"], size
            assert [[found.columns]] == wanted["cols"], size
            for tile, values in zip(unpatched(found, 16), wanted["pixel_values"][0], strict=True):
                np.testing.assert_array_equal(normalized(theirs, tile), values)


@pytest.mark.parametrize("merged", [1, 2])
def test_pictures_that_fit(tmp_path: Path, merged: int) -> None:
    settings = {"size": {"longest_edge": 420}}
    theirs = PixtralImageProcessorPil(**settings, patch_size={"height": 14, "width": 14})
    files = {"processor_config": {"patch_size": 14, "spatial_merge_size": merged}}
    unit = 14 * merged
    with decoder(tmp_path, "mistral3", settings, {"patch_size": 14}, **files) as ours:
        for size in SIZES:
            image = picture(*size)
            if max(size) / min(size) > 420:
                with pytest.raises(RequestError, match="too narrow"):
                    ours.picture(png(*size))
                continue
            wanted = theirs(image, patch_size={"height": unit, "width": unit})
            (tile,) = unpatched(ours.picture(png(*size)), 14)
            np.testing.assert_array_equal(normalized(theirs, tile), wanted["pixel_values"][0])


@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("named", ["size", "pixels"])
def test_pictures_of_an_area(tmp_path: Path, model_type: str, named: str) -> None:
    least, most = 64 * 64, 300 * 300
    settings: dict[str, Any] = {"size": {"shortest_edge": least, "longest_edge": most}}
    if named == "pixels":
        settings = {"min_pixels": least, "max_pixels": most}
    settings |= {"patch_size": 16, "merge_size": 2}
    theirs = Qwen2VLImageProcessorPil(**settings)
    with decoder(tmp_path, model_type, settings, {"patch_size": 16}) as ours:
        for size in SIZES:
            image = picture(*size)
            wanted = theirs(image)
            (_one, high, wide) = wanted["image_grid_thw"][0]
            (tile,) = (found := ours.picture(png(*size))).tiles
            assert (tile.height, tile.width) == (high, wide)
            values = wanted["pixel_values"].reshape(high // 2, wide // 2, 2, 2, 3, 2, 16, 16)
            assert (values[..., 0, :, :] == values[..., 1, :, :]).all(), "both frames"
            rows = values[..., 0, :, :].transpose(4, 0, 2, 5, 1, 3, 6)
            rows = rows.reshape(3, high * 16, wide * 16)
            np.testing.assert_array_equal(normalized(theirs, next(unpatched(found, 16))), rows)
        with pytest.raises(RequestError, match="more than 200 times"):
            ours.picture(png(402, 2))


@pytest.mark.parametrize("crops", [None, True])
def test_pictures_with_crops(tmp_path: Path, crops: bool | None) -> None:
    settings = {
        "size": {"height": 56, "width": 56},
        "do_pan_and_scan": crops,
        "pan_and_scan_min_crop_size": 30,
        "pan_and_scan_max_num_crops": 4,
        "pan_and_scan_min_ratio_to_activate": 1.2,
    }
    theirs = Gemma3ImageProcessorPil(**settings)
    counts = set()
    with decoder(tmp_path, "gemma3", settings, {"patch_size": 14}) as ours:
        for size in SIZES:
            image = picture(*size)
            wanted = theirs(image)
            found = ours.picture(png(*size))
            counts.add(len(found.tiles))
            for tile, values in zip(unpatched(found, 14), wanted["pixel_values"], strict=True):
                np.testing.assert_array_equal(normalized(theirs, tile), values)
    assert counts == ({1, 3, 4, 5} if crops else {1})


@pytest.mark.parametrize("most", [70, 280])
def test_pictures_of_a_budget(tmp_path: Path, most: int) -> None:
    theirs = Gemma4ImageProcessorPil(max_soft_tokens=most)
    settings = {"max_soft_tokens": most, "patch_size": 16, "pooling_kernel_size": 3}
    with decoder(tmp_path, "gemma4", settings, {"patch_size": 16}) as ours:
        for size in SIZES:
            image = picture(*size)
            wanted = theirs(image)
            (tile,) = (found := ours.picture(png(*size))).tiles
            count = tile.height * tile.width
            assert wanted["num_soft_tokens_per_image"] == [count // 9]
            assert wanted["image_position_ids"][0][count - 1].tolist() == [
                tile.width - 1,
                tile.height - 1,
            ]
            values = wanted["pixel_values"][0][:count].reshape(count, 16, 16, 3)
            pixels = normalized(theirs, next(unpatched(found, 16)))
            pixels = pixels.reshape(3, tile.height, 16, tile.width, 16).transpose(1, 3, 2, 4, 0)
            np.testing.assert_array_equal(pixels.reshape(count, 16, 16, 3), values)


def test_settings_of_a_processor_go_first_and_families_have_defaults(tmp_path: Path) -> None:
    nested = {"image_processor": {"size": {"longest_edge": 128}, "max_image_size": None}}
    with decoder(tmp_path, "smolvlm", {"size": 3}, {"patch_size": 14}, processor_config=nested):
        pass
    tiling, patch = tiling_of(picture_files(tmp_path))
    theirs = SmolVLMImageProcessorPil()
    assert patch == 14
    assert (tiling.longest, tiling.side) == (128, theirs.max_image_size["longest_edge"])  # type: ignore[union-attr]
    assert (tiling.splits, tiling.resample) == (theirs.do_image_splitting, theirs.resample)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"size": {"longest_edge": 0}}, "longest_edge must lie in 1"),
        ({"size": [1]}, "size must be an object"),
        ({"resample": 9}, r"resample must lie in 0\.\.5"),
        ({"do_resize": False}, "do_resize: false is not supported"),
        ({"do_center_crop": True}, "do_center_crop: true is not supported"),
    ],
)
def test_invalid_settings_are_refused(tmp_path: Path, settings: Any, cause: str) -> None:
    with pytest.raises(CheckpointError, match=cause):
        decoder(tmp_path, "smolvlm", settings, {"patch_size": 16})


def test_other_models_read_no_pictures(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="llama models read no pictures"):
        decoder(tmp_path, "llama", {}, {})
