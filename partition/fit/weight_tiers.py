"""Where the layers of a shard are: in device memory, in host memory, or on disk. Pure.

Layers are used in the same order for every token. So the best policy is a fixed set in each memory,
and a small window for the rest (see `streamed_layers.py`). The first layers are in device memory.
Of the others, as many are in host memory as fit.
"""

from dataclasses import dataclass

STAGING_LAYERS = 3
"""Layers from disk that wait in host memory to be copied: one is copied, one is read, and the third
keeps the disk busy while the device computes. With little host memory, fewer."""

LEAST_STAGING_LAYERS = 2
"""One layer is copied while the other is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTiers:
    """The place of each layer of a shard between two steps, and the buffers for layers on their
    way."""

    num_layers: int
    streamed: int
    """Layers, counted from the last, that are brought into device memory for each step."""
    window: int
    """Streamed layers that device memory holds at once; 0 where none are streamed."""
    pinned: int
    """Streamed layers that stay in the host's memory."""
    staging: int
    """Layers from disk that host memory holds at once; 0 where none are on disk."""

    @property
    def resident(self) -> int:
        """Layers that stay in the device's memory."""
        return self.num_layers - self.streamed

    @property
    def on_disk(self) -> int:
        """Layers that are read from disk for each step."""
        return self.streamed - self.pinned

    @property
    def host_places(self) -> int:
        """Layers that the host's memory holds at once."""
        return self.pinned + self.staging


def weight_tiers(
    num_layers: int, *, streamed: int, window: int, layer_bytes: int, host_bytes: int
) -> WeightTiers:
    """The best use of `host_bytes` when the last `streamed` layers are not in device memory.

    `window`: streamed layers that device memory holds at once. If all streamed layers fit into the
    window, none is streamed. If a layer comes from disk, host memory holds at least
    LEAST_STAGING_LAYERS. ValueError for a window of one, because one layer is used while the next
    is read.
    """
    if not 0 <= streamed <= num_layers:
        raise ValueError(f"{streamed} of {num_layers} layers cannot be streamed")
    if streamed <= window or not layer_bytes:
        return WeightTiers(num_layers=num_layers, streamed=0, window=0, pinned=0, staging=0)
    if window < LEAST_STAGING_LAYERS:
        raise ValueError(f"{streamed} layers cannot go through a window of {window}")
    fit = host_bytes // layer_bytes
    if fit >= streamed:
        pinned, staging = streamed, 0
    else:
        staging = max(LEAST_STAGING_LAYERS, min(STAGING_LAYERS, fit // 2))
        pinned = max(0, fit - staging)
    return WeightTiers(
        num_layers=num_layers, streamed=streamed, window=window, pinned=pinned, staging=staging
    )
