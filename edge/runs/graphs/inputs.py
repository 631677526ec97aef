"""Inputs of a graph: checked against the forms that it wants, or made up."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import RequestError
from edge.graphs.onnx_file import GraphValue
from edge.graphs.tensors import dtype_name, pack


def checked(values: Sequence[GraphValue], arrays: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """The arrays as inputs of the graph. Raises RequestError, which says what is wanted."""
    wanted = {value.name: value for value in values}
    for name in arrays:
        if name not in wanted:
            raise RequestError(
                f"{name!r:.80} is no input of the graph, which has "
                f"{', '.join(map(repr, wanted)) or 'none'}"
            )
    sizes: dict[str, int] = {}
    found = {}
    for name, value in wanted.items():
        if name not in arrays:
            raise RequestError(f"the input {name!r} is missing", remedy=f"give {value}")
        try:
            array = np.asarray(arrays[name])
        except (TypeError, ValueError) as error:  # ragged lists
            raise RequestError(
                f"the input {name!r} must be {value}, and is no array: {error}"
            ) from error
        found[name] = array
        try:
            dtype = dtype_name(array)
        except ValueError:
            dtype = str(array.dtype)
        if dtype != value.dtype or not _fits(array.shape, value, sizes):
            raise RequestError(
                f"the input {name!r} must be {value}, not {dtype} {list(array.shape)}"
            )
        if dtype == "string":
            try:
                pack({name: array})
            except ValueError as error:  # None, numbers, and characters that UTF-8 lacks
                raise RequestError(
                    f"the input {name!r} must be {value}, and has others: {error}"
                ) from error
    return found


def _fits(shape: tuple[int, ...], value: GraphValue, sizes: dict[str, int]) -> bool:
    """Whether a shape is one of the value. sizes: of named dimensions so far."""
    if value.shape is None:
        return True
    if len(shape) != len(value.shape):
        return False
    for size, wanted in zip(shape, value.shape, strict=True):
        if isinstance(wanted, int) and wanted != size:
            return False
        if isinstance(wanted, str) and sizes.setdefault(wanted, size) != size:
            return False
    return True


def made_up_sample(values: Sequence[GraphValue]) -> dict[str, NDArray[Any]]:
    """Inputs for a measurement where the user gives none: free dimensions are 1, floats are random,
    all else is 0."""
    random = np.random.default_rng(0)
    found: dict[str, NDArray[Any]] = {}
    for value in values:
        shape = tuple(size if isinstance(size, int) else 1 for size in value.shape or ())
        if math.prod(shape) > 1 << 30:
            raise RequestError(
                f"the input {value.name!r} is too large to be made up", remedy="give a sample"
            )
        if value.dtype == "string":
            found[value.name] = np.full(shape, "", object)
        elif value.dtype.startswith("float"):
            found[value.name] = random.standard_normal(shape, np.float32).astype(value.dtype)
        else:
            found[value.name] = np.zeros(shape, value.dtype)
    return found
