"""Which tiles a product's kernel takes: measured ones where a table has them, else none.

None leaves the choice to `kernels/triton_launch.py`, whose defaults suit any shape. A table belongs
to one kind of GPU. It is made by `python -m demos.bench.gpu_tuning` and kept among Edge's caches;
tables that are shipped lie in `triton_tables/` beside this file (none so far). Tiles change speed
and the order of sums, nothing else.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from edge.backends.triton_device import Device
from edge.paths import cache_root
from edge.whole_files import write_whole
from kernels.matmul.triton import FEW_ROWS
from kernels.triton_launch import SMALLEST_DOT, GemmTiles, GemvTiles, Launch, padded

Tiles = GemvTiles | GemmTiles

ROWS = (1, 2, 4, 16, 64, 256)
"""A table's entry serves products of more rows than the one before, up to these; the last, all."""

_SHIPPED = Path(__file__).parent / "triton_tables"
_MOST_BYTES = 1 << 20
_LARGEST = 4096
"""No side of a tile, and no other number of a table, is larger."""

_INTERPRETED_OUTPUTS, _INTERPRETED_INPUTS = 256, 512

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductShape:
    """A product as tables know it. bits: of a code; None for floats."""

    bits: int | None
    rows: int
    outputs: int
    inputs: int

    def rounded(self) -> ProductShape:
        """With its rows as a table has them."""
        rows = next((each for each in ROWS if self.rows <= each), ROWS[-1])
        return ProductShape(bits=self.bits, rows=rows, outputs=self.outputs, inputs=self.inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningTable:
    """Measured tiles by shape, their rows one of ROWS."""

    products: Mapping[ProductShape, Tiles] = field(default_factory=dict)

    def product(self, shape: ProductShape) -> Tiles | None:
        return self.products.get(shape.rounded())

    def to_json(self) -> str:
        return json.dumps([_entry(*each) for each in self.products.items()], indent=1)

    @classmethod
    def from_json(cls, text: str) -> TuningTable:
        """Raises ValueError for anything that `to_json` could not have written."""
        try:
            return cls(products=dict(_read_entries(json.loads(text))))
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"a tuning table is malformed: {error!r}") from error


class InterpretedTiles:
    """A program that is interpreted costs milliseconds whatever its size: few and large ones."""

    def product(self, shape: ProductShape) -> Tiles | None:
        outputs = min(_INTERPRETED_OUTPUTS, padded(shape.outputs, at_least=SMALLEST_DOT))
        if shape.rows <= FEW_ROWS:
            return GemvTiles(outputs=outputs, inputs=_INTERPRETED_INPUTS)
        rows = min(256, padded(shape.rows, at_least=SMALLEST_DOT))
        return GemmTiles(rows=rows, outputs=outputs, inputs=_INTERPRETED_INPUTS)


Tuning = TuningTable | InterpretedTiles


def open_tuning(device: Device, activations: torch.dtype) -> Tuning:
    """What is known of this kind of device; what was measured here goes before what is shipped.

    Tables are of 16-bit activations: tiles of wider ones may not fit into shared memory.
    """
    if not device.is_gpu:
        return InterpretedTiles()
    if activations == torch.float32:
        return TuningTable()
    name = table_name(device.name)
    shipped, own = _read(_SHIPPED / name), _read(cache_root() / "tuning" / name)
    return TuningTable(products={**shipped.products, **own.products})


def keep_tuning(device: Device, table: TuningTable) -> Path:
    """Add to what was measured here; where it is kept. Raises OSError."""
    path = cache_root() / "tuning" / table_name(device.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, TuningTable(products={**_read(path).products, **table.products}).to_json())
    return path


def table_name(device_name: str) -> str:
    """A file's name for a kind of GPU: "NVIDIA H200" is nvidia-h200.json."""
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-") + ".json"


def _read(path: Path) -> TuningTable:
    """A table that is missing or damaged knows nothing: the defaults compute as well."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES} bytes")
        return TuningTable.from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return TuningTable()
    except (OSError, ValueError) as error:
        _log.warning("%s is no table of tiles, so defaults are used: %s", path, error)
        return TuningTable()


def _entry(shape: ProductShape, tiles: Tiles) -> dict[str, Any]:
    sizes = {"outputs": tiles.outputs, "inputs": tiles.inputs}
    if isinstance(tiles, GemmTiles):
        sizes |= {"rows": tiles.rows, "splits": tiles.splits}
    launch = {"num_warps": tiles.launch.num_warps, "num_stages": tiles.launch.num_stages}
    return {
        "product": [shape.bits, shape.rows, shape.outputs, shape.inputs],
        "tiles": {**sizes, **launch},
    }


def _read_entries(entries: Any) -> Iterator[tuple[ProductShape, Tiles]]:
    if not isinstance(entries, list):
        raise TypeError("it is not a list")
    for entry in entries:
        bits, rows, outputs, inputs = entry["product"]
        if bits not in (None, 4, 8) or rows not in ROWS:
            raise ValueError(f"a tuning table has a product of {bits} bits and {rows} rows")
        shape = ProductShape(bits=bits, rows=rows, outputs=_size(outputs), inputs=_size(inputs))
        tiles = {name: _tile(name, value) for name, value in entry["tiles"].items()}
        launch = Launch(num_warps=tiles.pop("num_warps"), num_stages=tiles.pop("num_stages"))
        kind = GemvTiles if rows <= FEW_ROWS else GemmTiles
        yield shape, kind(**tiles, launch=launch)


def _size(value: object) -> int:
    if type(value) is not int or not 0 < value < 1 << 31:
        raise ValueError(f"a tuning table has a product with a side of {value!r:.40}")
    return value


def _tile(name: str, value: object) -> int:
    """Blocks of kernels are powers of two."""
    is_any = name in ("num_stages", "splits")
    if type(value) is not int or not 0 < value <= _LARGEST or (value & (value - 1) and not is_any):
        raise ValueError(f"a tuning table has {value!r:.40} for {name:.40}")
    return value
