"""Products of matrices keep to the threads that are given."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.processes import PATIENCE_S

THREADS = """
from threadpoolctl import threadpool_info
from edge.host.blas_threads import limit_blas_threads

limit_blas_threads({threads})
print({{each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"}})
"""


@pytest.mark.parametrize("threads", [1, 2])
def test_a_product_takes_as_many_threads_as_are_given(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what the library says: what its threads spend depends on what else a machine does."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", str(3 - threads))
    command = [sys.executable, "-c", THREADS.format(threads=threads)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{{{threads}}}"
