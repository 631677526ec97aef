"""Products of matrices keep to the threads that are given."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.processes import PATIENCE_S

SPENT_BY_OTHERS = """
import time
import numpy as np
from edge.host.blas_threads import limit_blas_threads

limit_blas_threads(int("{threads}"))
matrix = np.ones((800, 800))
process_s, thread_s = time.process_time(), time.thread_time()
while time.thread_time() - thread_s < 0.2:
    matrix @ matrix
spent_s = time.thread_time() - thread_s
print((time.process_time() - process_s - spent_s) / spent_s)
"""


@pytest.mark.parametrize(("threads", "others_compute"), [(1, False), (2, True)])
def test_a_product_takes_as_many_threads_as_are_given(
    threads: int, others_compute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the time that others than the first have computed."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "3")
    command = [sys.executable, "-c", SPENT_BY_OTHERS.format(threads=threads)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert (float(done.stdout) > 0.1) == others_compute
