"""How many threads numpy's products of matrices take."""

from __future__ import annotations

import numpy  # noqa: F401  its library is found once it is loaded
from threadpoolctl import threadpool_limits


def limit_blas_threads(threads: int) -> None:
    """Limit this process, from now on.

    OpenBLAS takes one for each core of the machine where nobody says otherwise, and these spin
    while they wait for each other: the cores are not given for that.
    """
    threadpool_limits(threads, user_api="blas")
