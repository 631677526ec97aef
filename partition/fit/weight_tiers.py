"""The layers of a shard that stay in a device's memory, in its host's, and on disk. Pure.

Layers are used in the same order for every token, so the best that can be done is a fixed set in
each memory and a small window through it for the rest (see `streamed_layers.py`): the first layers
in the device's memory, and of the others as many in the host's as it has room for.
"""

from dataclasses import dataclass

STAGING_LAYERS = 3
"""Places in host memory, where layers from disk wait for their copy: one is copied, one is read,
and the third keeps the disk busy while the device takes its time. Where there is room for few,
fewer."""

LEAST_STAGING_LAYERS = 2
"""One is copied while the other is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTiers:
    """The place of each layer of a shard between two steps, and the places it passes through."""

    num_layers: int
    streamed: int
    """The last layers, this number, come into the device's memory for each step."""
    window: int
    """Places for them there; 0 where none are streamed."""
    pinned: int
    """Streamed layers that stay in the host's memory."""
    staging: int
    """Places in the host's memory that the others pass through; 0 where there are none."""

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

    `window`: places of device memory that they pass through. Layers that all find a place there
    stay. Of host memory at least LEAST_STAGING_LAYERS are taken where a layer comes from disk.
    ValueError for a window of one: one is used while the next is filled.
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
