"""The number of threads of numpy's matrix products."""

from __future__ import annotations

import numpy  # noqa: F401  its library is found once it is loaded
from threadpoolctl import threadpool_limits


def limit_blas_threads(threads: int) -> None:
    """Limit the BLAS threads of this process.

    By default OpenBLAS has one for each core of the machine. They spin while they wait for each
    other, which wastes cores beyond the process's share.
    """
    threadpool_limits(threads, user_api="blas")
