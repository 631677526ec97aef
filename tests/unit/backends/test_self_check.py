"""Who is to blame where results disagree: the device, or the weights."""

from __future__ import annotations

import numpy as np
import pytest

from edge.backends.self_check import Judge
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
