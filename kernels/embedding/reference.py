"""Row look-up; ids outside the slice give zeros, so that slices sum to the whole."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def embedding(
    token_ids: NDArray[np.int64], table: NDArray[Any], *, first_id: int = 0
) -> NDArray[np.float32]:
    """token_ids [...], table [ids, hidden] for ids first_id … → float32 [..., hidden]."""
    local = token_ids - first_id
    inside = (local >= 0) & (local < table.shape[0])
    rows = table[np.where(inside, local, 0)].astype(np.float32)
    return np.where(inside[..., None], rows, np.float32(0))
