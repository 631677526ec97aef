"""Tiles of products and attention, measured for a kind of GPU.

Without a table, or an entry in it, the kernels' faces use defaults that suit any shape. The bench
`gpu-tuning`, which runs from a checkout, makes a table and stores it in Edge's cache folder; tables
that are shipped are in `tables/` here (none so far). Tiles change only speed and the order of sums.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from edge.backends.triton.device import Device
from edge.host.atomic_files import write_whole
from edge.host.cache_paths import cache_root
from edge.kernels.attention.triton import AttentionTiles
from edge.kernels.matmul_nbits.triton import ProductTiles
from edge.kernels.triton_launch import SMALLEST_DOT, Launch, padded
from edge.offload import parse_json, read_file

ROWS = (1, 8, 16, 32, 64)
"""Rows of a table's entries. An entry serves up to so many rows; more have none."""

QUERIES = (1, 16, 256)
"""The same for the queries of a sequence; the last entry serves more, too."""

_SHIPPED = Path(__file__).parent / "tables"
_MOST_BYTES = 1 << 20
_LARGEST = 4096
"""Largest side of a tile, and largest other number of a table."""

_INTERPRETED_OUTPUTS = 256

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductShape:
    """A product with a packed weight in a table. bits: of a code."""

    bits: int
    rows: int
    outputs: int
    inputs: int

    def rounded(self) -> ProductShape:
        """The shape with the rows of its table entry."""
        return replace(self, rows=next((each for each in ROWS if self.rows <= each), self.rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Attention in a table. bits: of cached codes; None for floats.

    group: query heads of one KV head.
    """

    bits: int | None
    queries: int
    group: int
    head_size: int

    def rounded(self) -> AttentionShape:
        """The shape with the queries of its table entry."""
        return replace(self, queries=_rounded(self.queries, QUERIES))


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningTable:
    """Measured tiles by rounded shape."""

    products: Mapping[ProductShape, ProductTiles] = field(default_factory=dict)
    attentions: Mapping[AttentionShape, AttentionTiles] = field(default_factory=dict)

    def product(self, shape: ProductShape) -> ProductTiles | None:
        return self.products.get(shape.rounded())

    def attention(self, shape: AttentionShape) -> AttentionTiles | None:
        return self.attentions.get(shape.rounded())

    def updated(self, other: TuningTable) -> TuningTable:
        """Both tables; `other` wins for shapes that both have."""
        return TuningTable(
            products={**self.products, **other.products},
            attentions={**self.attentions, **other.attentions},
        )

    def to_json(self) -> str:
        entries = [_product_entry(*each) for each in self.products.items()]
        entries += [_attention_entry(*each) for each in self.attentions.items()]
        return json.dumps(entries, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> TuningTable:
        """Raises ValueError for anything that `to_json` could not have written."""
        try:
            entries = parse_json(text)
            if not isinstance(entries, list):
                raise TypeError("it is not a list")
            return cls(
                products=dict(_product(each) for each in entries if "product" in each),
                attentions=dict(_attention(each) for each in entries if "product" not in each),
            )
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"a tuning table is malformed: {error!r}") from error


class InterpretedTiles:
    """Tiles for few, large programs, because an interpreted one costs milliseconds at any size."""

    def product(self, shape: ProductShape) -> ProductTiles:
        outputs = min(_INTERPRETED_OUTPUTS, padded(shape.outputs, at_least=SMALLEST_DOT))
        return ProductTiles(outputs=outputs, rows=min(256, padded(shape.rows)))

    def attention(self, shape: AttentionShape) -> AttentionTiles | None:
        return None


Tuning = TuningTable | InterpretedTiles


def open_tuning(device: Device, activations: torch.dtype) -> Tuning:
    """The tables of this kind of device; local measurements override shipped ones. Tables serve
    16-bit activations only, because tiles of wider ones may not fit into shared memory."""
    if not device.is_gpu:
        return InterpretedTiles()
    if activations == torch.float32:
        return TuningTable()
    name = table_name(device.name)
    return _read(_SHIPPED / name).updated(_read(cache_root() / "tuning" / name))


def keep_tuning(device: Device, table: TuningTable) -> Path:
    """Add a table to the local measurements. Returns their path. Raises OSError."""
    path = cache_root() / "tuning" / table_name(device.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, _read(path).updated(table).to_json())
    return path


def table_name(device_name: str) -> str:
    """A file's name for a kind of GPU: "NVIDIA H200" is nvidia-h200.json."""
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-") + ".json"


def _read(path: Path) -> TuningTable:
    """Read a table. A missing or damaged one is empty, so that defaults are used."""
    try:
        return TuningTable.from_json(read_file(path, _MOST_BYTES))
    except FileNotFoundError:
        return TuningTable()
    except (OSError, ValueError) as error:
        _log.warning("%s is no table of tiles, so defaults are used: %s", path, error)
        return TuningTable()


def _rounded(count: int, known: Sequence[int]) -> int:
    return next((each for each in known if count <= each), known[-1])


def _product_entry(shape: ProductShape, tiles: ProductTiles) -> dict[str, Any]:
    sizes = {"outputs": tiles.outputs, "rows": tiles.rows, "splits": tiles.splits}
    return {
        "product": [shape.bits, shape.rows, shape.outputs, shape.inputs],
        "tiles": {**sizes, **asdict(tiles.launch)},
    }


def _attention_entry(shape: AttentionShape, tiles: AttentionTiles) -> dict[str, Any]:
    """A table's entry, without splits, which depend on the number and length of sequences."""
    return {
        "attention": [shape.bits, shape.queries, shape.group, shape.head_size],
        "tiles": {"rows": tiles.rows, "keys": tiles.keys, **asdict(tiles.launch)},
    }


def _product(entry: Any) -> tuple[ProductShape, ProductTiles]:
    bits, rows, outputs, inputs = entry["product"]
    if bits not in (2, 4, 8) or rows not in ROWS:
        raise ValueError(f"a tuning table has a product of {bits} bits and {rows} rows")
    shape = ProductShape(bits=bits, rows=rows, outputs=_size(outputs), inputs=_size(inputs))
    tiles, launch = _tiles(entry)
    return shape, ProductTiles(**tiles, launch=launch)


def _attention(entry: Any) -> tuple[AttentionShape, AttentionTiles]:
    bits, queries, group, head_size = entry["attention"]
    if bits not in (None, 4, 8) or queries not in QUERIES:
        raise ValueError(f"a tuning table has attention of {bits} bits and {queries} queries")
    tiles, launch = _tiles(entry)
    if "splits" in tiles or min(tiles.values()) < SMALLEST_DOT:
        raise ValueError(f"a tuning table has attention with tiles of {tiles}")
    shape = AttentionShape(
        bits=bits, queries=queries, group=_size(group), head_size=_size(head_size)
    )
    return shape, AttentionTiles(**tiles, launch=launch)


def _tiles(entry: Any) -> tuple[dict[str, int], Launch]:
    tiles = {name: _tile(name, value) for name, value in entry["tiles"].items()}
    launch = Launch(num_warps=tiles.pop("num_warps"), num_stages=tiles.pop("num_stages"))
    return tiles, launch


def _size(value: object) -> int:
    if type(value) is not int or not 0 < value < 1 << 31:
        raise ValueError(f"a tuning table has a side of {value!r:.40}")
    return value


def _tile(name: str, value: object) -> int:
    """Blocks of kernels are powers of two."""
    is_any = name in ("num_stages", "splits")
    if type(value) is not int or not 0 < value <= _LARGEST or (value & (value - 1) and not is_any):
        raise ValueError(f"a tuning table has {value!r:.40} for {name:.40}")
    return value
