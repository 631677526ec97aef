"""A part of a tower: some of its layers, on one device.

The first part begins with patches, the last one ends with rows of the model. Between two parts goes
the hidden state float32 [patches, hidden size], in the order of `block_order`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edge.models.parts import exact_fields
from edge.models.towers.tower import Merger, Tower


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerPart:
    """Layers of a tower. Raises ValueError for layers that it does not have, and for a part of a
    tower with deep layers, which is never cut."""

    tower: Tower
    layers: range

    def __post_init__(self) -> None:
        layers, count = self.layers, self.tower.encoder.num_layers
        if layers.step != 1 or not 0 <= layers.start < layers.stop <= count:
            raise ValueError(f"layers {layers.start} to {layers.stop} of a tower of {count}")
        if self.tower.deep_layers and not self.is_whole:
            raise ValueError("a tower with deep layers cannot be cut")

    @classmethod
    def whole(cls, tower: Tower) -> TowerPart:
        return cls(tower=tower, layers=range(tower.encoder.num_layers))

    @property
    def is_first(self) -> bool:
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        return self.layers.stop == self.tower.encoder.num_layers

    @property
    def is_whole(self) -> bool:
        return self.is_first and self.is_last

    @property
    def has_windows(self) -> bool:
        """Whether patches see only those of their window in one of its layers."""
        tower = self.tower
        return tower.window is not None and not set(self.layers).issubset(tower.whole_layers)

    @property
    def mergers(self) -> tuple[tuple[str, Merger], ...]:
        """As `Tower.mergers`."""
        return self.tower.mergers if self.is_last else ()

    @property
    def output_size(self) -> int:
        """Values of a row that it gives: of the model, or of the hidden state."""
        return self.tower.row_size if self.is_last else self.tower.encoder.hidden_size

    def output_rows(self, height: int, width: int) -> int:
        """Rows that it gives for a tile of so many patches. Raises as `Tower.row_grid`."""
        rows = self.tower.rows(height, width)
        return rows if self.is_last else height * width

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """As `Tower.shapes`."""
        return {role: shape for role, shape in self.tower.shapes().items() if self._has(role)}

    def _has(self, role: str) -> bool:
        kind, *rest = role.split(".")
        if kind == "layers":
            return int(rest[0]) in self.layers
        return self.is_last if kind in ("merger", "deep") else self.is_first

    def to_json(self) -> dict[str, Any]:
        """The part in built-in types."""
        layers = [self.layers.start, self.layers.stop]
        return {"tower": self.tower.to_json(), "layers": layers}

    @classmethod
    def from_json(cls, value: object) -> TowerPart:
        """A part from JSON. Raises ValueError for a value that `to_json` cannot write."""
        fields = exact_fields(cls, value)
        layers = fields["layers"]
        if (
            not isinstance(layers, list | tuple)
            or len(layers) != 2
            or any(type(each) is not int for each in layers)
        ):
            raise ValueError("layers of a part of a tower must be the first one and the end")
        return cls(tower=Tower.from_json(fields["tower"]), layers=range(*layers))
