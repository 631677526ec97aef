"""Who is to blame where results disagree: the device, or the weights."""

from __future__ import annotations

import numpy as np
import pytest

from edge.backends.self_check import Judge, typical_output
from edge.errors import CheckpointError, RequestError

JUDGE = Judge(backend="b", device_name="here", remedy="update it")
RIGHT = np.array([1.0, -2.0], np.float32)


@pytest.mark.parametrize("wrong", [2.1, np.nan, np.inf])
def test_a_device_that_errs_is_named_with_the_remedy(wrong: float) -> None:
    found = np.array([1.0, wrong], np.float32)
    with pytest.raises(RequestError, match=r"back end b computes wrongly .*\(here\).*update it"):
        JUDGE.compare("matmul (layers.0.down)", found, RIGHT, allowed=1e-3)
    JUDGE.compare("matmul (layers.0.down)", RIGHT, RIGHT, allowed=1e-3)


@pytest.mark.parametrize("found", [RIGHT, np.array([1.0, np.nan], np.float32)])
def test_weights_that_give_no_numbers_are_not_the_devices_fault(found: np.ndarray) -> None:
    expected = np.array([1.0, np.nan], np.float32)
    with pytest.raises(CheckpointError, match=r"weights of matmul \(layers.0.down\) give NaN"):
        JUDGE.compare("matmul (layers.0.down)", found, expected, allowed=1e-3)


def test_one_output_that_is_near_zero_by_chance_is_judged_by_its_usual_size() -> None:
    """A tensor plan may give a slow device one row of a matrix."""
    weight = np.array([[2.0, -1.0, 3.0]], np.float32)
    x = np.array([[1.0, 1.98, 0.0]], np.float32)
    right = x @ weight.T
    rounded = np.array([[0.024]], np.float32)
    with pytest.raises(RequestError, match=r"errs by 0\.2 of"):
        JUDGE.compare("matmul_nbits (head)", rounded, right, allowed=0.05)
    usual = typical_output(weight)
    JUDGE.compare("matmul_nbits (head)", rounded, right, allowed=0.05, typical=usual)
    with pytest.raises(RequestError, match="errs by"):
        JUDGE.compare("matmul_nbits (head)", right + 1, right, allowed=0.05, typical=usual)
