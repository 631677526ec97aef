"""Files that a user gives as inputs of a graph: arrays, pictures and sound."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from edge.errors import RequestError
from edge.graphs.onnx_file import GraphValue, numpy_type
from edge.graphs.sound import read_wav
from edge.offload import read_file
from edge.pictures.decoder import MOST_FILE_BYTES, PictureDecoder
from edge.pictures.tiling import WHOLE, CropTiling, Tiling

_BILINEAR = 2
"""Pillow's number."""
_PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif")


def name_and_file(given: str) -> tuple[str, Path]:
    """The two sides of NAME=FILE."""
    name, sign, file = given.partition("=")
    if not sign or not name or not file:
        raise click.UsageError(f"{given!r:.80} is not NAME=FILE")
    return name, Path(file)


def read_inputs(
    files: tuple[str, ...], values: Sequence[GraphValue]
) -> dict[str, NDArray[Any]] | None:
    """The arrays of NAME=FILE each; None: none are given. values: the inputs of the graph.

    Raises RequestError for a file that cannot be read, or is nothing for its input.
    """
    forms = {each.name: each for each in values}
    found = {}
    for name, path in map(name_and_file, files):
        if path.suffix.lower() in (*_PICTURES, ".wav") and name not in forms:
            raise RequestError(
                f"{name!r:.80} is no input",
                remedy=f"give one of {', '.join(map(repr, forms))}" if forms else "give it as .npy",
            )
        if path.suffix.lower() == ".wav":
            found[name] = _sound(path, forms[name])
        elif path.suffix.lower() in _PICTURES:
            found[name] = picture_for(forms[name], _pixels(path, forms[name]), path)
        else:
            found[name] = _array(path)
    return found or None


def _array(path: Path) -> NDArray[Any]:
    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError, MemoryError) as error:
        raise RequestError(
            f"{path} cannot be read as an array: {error}", remedy="numpy.save writes one"
        ) from error
    if not isinstance(found, np.ndarray):
        raise RequestError(f"{path} has several arrays", remedy="save one to a file of its own")
    return found


def _sound(path: Path, value: GraphValue) -> NDArray[Any]:
    samples = read_wav(path, None)
    rank = 1 if value.shape is None else len(value.shape)
    if not value.dtype.startswith("float") or rank not in (1, 2, 3):
        raise RequestError(
            f"{path} has samples, and {value.name!r:.80} is {value}", remedy="give it an array"
        )
    return samples.astype(value.dtype).reshape((1,) * (rank - 1) + (-1,))


def _pixels(path: Path, value: GraphValue) -> NDArray[np.uint8]:
    """The picture [height, width, 3], of the height and width that the input has fixed."""
    tiling: Tiling = WHOLE
    axes = (value.shape or ())[-3:]
    if len(axes) == 3:
        height, width = axes[1:] if axes[0] in (1, 3) else axes[:2]
        if isinstance(height, int) and isinstance(width, int):
            tiling = CropTiling(width=width, height=height, resample=_BILINEAR)
    decoder = PictureDecoder(tiling, 1)
    try:
        return decoder.pixels(read_file(path, MOST_FILE_BYTES))
    except (OSError, ValueError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(
            f"{path} cannot be read: {error}", remedy="check the name, and the size of the file"
        ) from error
    finally:
        decoder.close()


def picture_for(value: GraphValue, pixels: NDArray[np.uint8], path: Path) -> NDArray[Any]:
    """A picture [height, width, 3] as an input wants it: its channels first or last, with or
    without a batch, grey if there is one channel. Floats are from 0 to 1."""
    shape = value.shape or ()
    axes = shape[1:] if len(shape) == 4 else shape
    first, last = (axes[0], axes[2]) if len(axes) == 3 else (None, None)
    is_first = first in (1, 3)
    if not (is_first or last in (1, 3)) or value.dtype not in ("uint8", "float16", "float32"):
        raise RequestError(
            f"{path} is a picture, and {value.name!r:.80} is {value}", remedy="give it an array"
        )
    array: NDArray[Any] = pixels
    if (first if is_first else last) == 1:
        array = (pixels @ np.array([0.299, 0.587, 0.114]))[:, :, None].round().astype(np.uint8)
    if is_first:
        array = np.ascontiguousarray(array.transpose(2, 0, 1))
    if value.dtype != "uint8":
        array = (array / 255).astype(numpy_type(value.dtype))
    return array[None] if len(shape) == 4 else array
