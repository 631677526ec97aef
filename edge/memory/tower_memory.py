"""The memory that a tower takes of its device."""

from __future__ import annotations

from edge.memory.ledger import Use
from edge.models.towers.part import TowerPart
from edge.weights.formats import WeightFormat
from edge.weights.tower import tower_bytes

_STATES_AT_ONCE = 12
"""Rows of hidden states that a graph has at once, those of attention and of blocks included."""


def tower_use(part: TowerPart, weight_format: WeightFormat) -> Use:
    """Its weights, and the buffers of its largest tile. A part has besides the hidden states that
    it gets and hands on."""
    tower = part.tower
    widths = (
        kind.feed_forward.row_values(0, tower.encoder.hidden_size) for kind in tower.encoder.kinds
    )
    columns = _STATES_AT_ONCE * tower.encoder.hidden_size + max(widths)
    columns += (not part.is_first) * tower.encoder.hidden_size
    columns += (not part.is_last) * tower.encoder.hidden_size
    if part.is_first:
        columns += 2 * tower.patch_elements * tower.frames
    return Use(
        weight_bytes=tower_bytes(part, weight_format),
        buffer_bytes=4 * tower.max_patches * columns,
    )
