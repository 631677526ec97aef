"""Runs the Triton face of an operator on arrays, and shows what it reads or writes beside them.

Without a GPU the kernels are interpreted, which Triton decides when it is first imported: so this
module comes before it. TRITON_INTERPRET=0 runs the same tests on a GPU. torch and Triton take
seconds to import, so a test module imports this at its top and them inside its tests.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from edge.kernels.cases import Case
from edge.kernels.triton_interpreter import interpret_bfloat16
from tests.support import quick_interpreter

if TYPE_CHECKING:
    from torch import Tensor

os.environ.setdefault("TRITON_INTERPRET", "1")

FLOAT_DTYPES = ("float32", "float16", "bfloat16")
TOLERANCES = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
"""Relative to the largest value: sums are float32, results round to their type."""

_PADDING = 64
_SENTINEL = 77.0
_FOREIGN_INTEGER = 2**30


@functools.cache
def device() -> str:
    """Where the kernels run; asked for before the first of them is imported."""
    if os.environ["TRITON_INTERPRET"] != "1":
        return "cuda"
    interpret_bfloat16()
    quick_interpreter.install()
    return "cpu"


def only_interpreted() -> None:
    """Ends a test of what is only there where kernels are interpreted; prepares the interpreter."""
    if device() != "cpu":
        pytest.skip("for interpreted kernels, and TRITON_INTERPRET=0 runs them on a GPU")


def rounded(array: NDArray[np.float32], dtype: str) -> NDArray[np.float32]:
    """The values that `dtype` has, as float32: what the reference is given."""
    return array.astype(numpy_dtype(dtype)).astype(np.float32)


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def tensor(array: NDArray[Any], dtype: str | None = None) -> Tensor:
    """A contiguous tensor between poison: NaN, or indices far outside, which no kernel may use."""
    import torch

    source = torch.from_numpy(np.ascontiguousarray(array)).to(device())
    if dtype is not None:
        source = source.to(getattr(torch, dtype))
    poison = float("nan") if source.is_floating_point() else _poison(source)
    return _between(source.shape, source.dtype, poison).copy_(source)


def array(values: Tensor) -> NDArray[Any]:
    """Floats as float32."""
    values = values.detach().cpu()
    found: NDArray[Any] = (values.float() if values.is_floating_point() else values).numpy()
    return found


def output(*shape: int, dtype: str = "float32") -> Tensor:
    """A tensor full of a sentinel, between more of it: what is to be written, and what is not."""
    import torch

    return _between(shape, getattr(torch, dtype), _SENTINEL)


def is_untouched(values: Tensor) -> NDArray[np.bool_]:
    """Where the sentinel of `output` still stands."""
    found: NDArray[np.bool_] = array(values) == _SENTINEL
    return found


def assert_only_inside_written(values: Tensor) -> None:
    """Nothing beside a tensor of `output` was written."""
    import torch

    storage = torch.empty(0, dtype=values.dtype, device=values.device).set_(
        values.untyped_storage()
    )
    inside = slice(_PADDING, _PADDING + values.numel())
    assert (storage[: inside.start] == _SENTINEL).all()
    assert (storage[inside.stop :] == _SENTINEL).all()


def assert_close(
    actual: Tensor, expected: NDArray[np.float32], dtype: str, *, tolerance: float | None = None
) -> None:
    """Of `dtype`, finite, and within its tolerance of the largest value."""
    assert str(actual.dtype) == f"torch.{dtype}"
    found = array(actual)
    assert found.shape == expected.shape
    assert np.isfinite(found).all()
    scale = max(1e-3, float(np.abs(expected).max(initial=0.0)))
    limit = TOLERANCES[dtype] if tolerance is None else tolerance
    np.testing.assert_allclose(found, expected, rtol=0, atol=limit * scale)


def assert_computed(
    face: Callable[..., Any], case: Case, dtype: str, *, tolerance: float | None = None
) -> None:
    """The face gives what the formula gives, in `out`, and writes nothing beside it.

    The case's inputs are of `dtype`, its weights of float32.
    """
    (expected,) = case.expected()
    out = output(*expected.shape, dtype=dtype)
    inputs = [tensor(each, dtype) for each in case.inputs]
    weights = [tensor(each) for each in case.weights if each is not None]
    assert face(*inputs, *weights, **case.options, out=out) is out
    assert_close(out, expected, dtype, tolerance=tolerance)
    assert_only_inside_written(out)


def _poison(source: Tensor) -> int:
    import torch

    largest: int = torch.iinfo(source.dtype).max
    return min(largest, _FOREIGN_INTEGER)


def _between(shape: Any, dtype: Any, fill: float) -> Tensor:
    import torch

    count = int(np.prod(shape))
    storage = torch.full((count + 2 * _PADDING,), fill, dtype=dtype, device=device())
    return storage[_PADDING : _PADDING + count].view(tuple(shape))
