"""A tower as data: the vision encoder of a model, from the patches of a tile to rows of the model.

Its layers are those of a ModelSpec without vocabulary, in which every patch attends to every other.
Knows no file names and no back end. It is sent to peers as JSON.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from edge.errors import shown
from edge.kernels.activation.reference import ACTIVATIONS, Activation
from edge.kernels.position_table.reference import TABLES, Table
from edge.models.attention import Attention
from edge.models.gated_mlp import GatedMlp
from edge.models.parts import check_flags, check_sizes, exact_fields, finite, made_of
from edge.models.pictures import MAX_PATCHES
from edge.models.plain_mlp import PlainMlp
from edge.models.rotary import NO_ROTARY
from edge.models.spec import MAX_PICTURE_LAYERS, ModelSpec, tensor_shapes

CHANNELS = 3
MAX_SIDE = 64
"""Most patches of a side of a block."""
MAX_FRAMES = 16
MAX_PIXELS = 128
"""Most pixels of a side of a patch."""
MAX_TABLE_SIDE = 1 << 14
MAX_PROJECTIONS = 8


BOUNDED = ("query", "key", "value", "output", "gate", "up", "down")
"""The products of a layer whose inputs and outputs may have bounds."""
BOUNDS = ("input_min", "input_max", "output_min", "output_max")
NO_BOUND = 1e37
"""In place of infinity."""

NormKind = Literal["layer", "rms", "plain"]
"""LayerNorm with weight and bias, RMSNorm with a weight, RMSNorm without."""
Joining = Literal["patches", "channels", "mean"]
"""What becomes of the patches of a block: they stand one after the other; the values of one channel
stand together; or they are averaged."""

_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerNorm:
    """A norm of patches or rows."""

    kind: NormKind
    epsilon: float
    offset: float = 0.0
    """Added to the weight."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(NormKind):
            raise ValueError(f"a norm {shown(self.kind)} is not one of {get_args(NormKind)}")
        if not 0.0 <= finite(self.epsilon) < 1.0:
            raise ValueError(f"epsilon of a norm must lie in 0..1, not {shown(self.epsilon)}")
        finite(self.offset)

    def shapes(self, role: str, size: int) -> dict[str, tuple[int, ...]]:
        """The shapes of its weights by role."""
        names = {"layer": (role, f"{role}_bias"), "rms": (role,), "plain": ()}[self.kind]
        return dict.fromkeys(names, (size,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """A product with a matrix behind the layers."""

    outputs: int
    bias: bool
    activation: Activation | None = None
    """The activation of the product; None: it stays as it is."""
    is_turned: bool = False
    """The checkpoint has [inputs, outputs], which stays float32."""

    def __post_init__(self) -> None:
        check_sizes(outputs=self.outputs)
        check_flags(bias=self.bias, is_turned=self.is_turned)
        if self.activation is not None and self.activation not in ACTIVATIONS:
            raise ValueError(f"activation {shown(self.activation)} is not known")


@dataclass(frozen=True, slots=True, kw_only=True)
class Merger:
    """What makes rows of the model from blocks of patches: norm of each patch, joining, scale,
    norm of each row, projections."""

    joining: Joining
    patch_norm: TowerNorm | None = None
    scale: float = 1.0
    standardized: bool = False
    """Joined rows become (row - shift) * factor, both learned."""
    row_norm: TowerNorm | None = None
    projections: tuple[Projection, ...]

    def __post_init__(self) -> None:
        if self.joining not in get_args(Joining):
            raise ValueError(f"joining {shown(self.joining)} is not one of {get_args(Joining)}")
        if not finite(self.scale) > 0:
            raise ValueError(f"scale of rows must be above 0, not {shown(self.scale)}")
        check_flags(standardized=self.standardized)
        for name in ("patch_norm", "row_norm"):
            object.__setattr__(self, name, made_of(TowerNorm, getattr(self, name)))
        if not isinstance(self.projections, list | tuple) or not (
            0 < len(self.projections) <= MAX_PROJECTIONS
        ):
            raise ValueError(f"a tower has 1 to {MAX_PROJECTIONS} projections")
        made = tuple(_required(Projection, each) for each in self.projections)
        object.__setattr__(self, "projections", made)

    def joined_size(self, hidden_size: int, side: int) -> int:
        """Values of a row before the projections."""
        return hidden_size * (1 if self.joining == "mean" else side**2)

    def shapes(self, prefix: str, hidden_size: int, side: int) -> dict[str, tuple[int, ...]]:
        """The shapes of its weights by role."""
        size = self.joined_size(hidden_size, side)
        shapes: dict[str, tuple[int, ...]] = {}
        if self.patch_norm is not None:
            shapes |= self.patch_norm.shapes(f"{prefix}patch_norm", hidden_size)
        if self.standardized:
            shapes |= {f"{prefix}row_shift": (size,), f"{prefix}row_factor": (size,)}
        if self.row_norm is not None:
            shapes |= self.row_norm.shapes(f"{prefix}row_norm", size)
        for number, each in enumerate(self.projections):
            shape = (size, each.outputs) if each.is_turned else (each.outputs, size)
            shapes[f"{prefix}{number}.weight"] = shape
            if each.bias:
                shapes[f"{prefix}{number}.bias"] = (each.outputs,)
            size = each.outputs
        return shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Rotary positions on two axes: pairs of a head turn by the patch's row or column."""

    rows: tuple[float, ...]
    """The angle per row of each pair that turns by the row."""
    columns: tuple[float, ...]
    """The same of columns."""
    is_by_axis: bool = False
    """The first half of a head turns by column and the second by row, each as a head of its own.
    Else a pair is an element and the one half a head further on, and pairs that turn by row come
    first."""

    def __post_init__(self) -> None:
        check_flags(is_by_axis=self.is_by_axis)
        for name in ("rows", "columns"):
            value = getattr(self, name)
            if not isinstance(value, list | tuple):
                raise ValueError(f"angles per {name} must be a list of numbers")
            object.__setattr__(self, name, tuple(map(finite, value)))
        if not self.rows or len(self.rows) != len(self.columns):
            raise ValueError("as many pairs of a head must turn by row as by column")


class TileShape(Protocol):
    """What a tower needs to know of a tile."""

    @property
    def height(self) -> int: ...

    @property
    def width(self) -> int: ...

    @property
    def patches(self) -> NDArray[np.uint8]: ...


@dataclass(frozen=True, kw_only=True)
class Tower:
    """A tower. Raises ValueError for sizes that do not fit together."""

    encoder: ModelSpec
    """The layers. Its vocabulary, embedding, head and last norm mean nothing."""
    output_size: int
    """The hidden size of the model."""
    patch_size: int
    """Pixels of a side."""
    frames: int = 1
    """Frames that a patch's matrix takes. A picture gives the same one to each."""
    frames_apart: bool = False
    """Each frame has a matrix of its own in the checkpoint."""
    channels_last: bool = False
    """The patch's matrix takes (y, x, channel), not (channel, y, x)."""
    pixel_scale: tuple[float, float, float]
    pixel_shift: tuple[float, float, float]
    """A pixel of a channel becomes pixel * scale + shift; pixels are 0 to 255."""
    patch_bias: bool
    table: Table | None
    """How a patch's row in the table of learned positions is found; None: there is no table."""
    table_side: int = 1
    first_norm: TowerNorm | None = None
    """The norm of patches before the layers."""
    turns: Turns | None = None
    window: int | None = None
    """Blocks of a side of a window. Patches see those of their window only; None: all others."""
    whole_layers: tuple[int, ...] = ()
    """Layers in which patches see all others nevertheless."""
    bounds: tuple[tuple[float, ...], ...] = ()
    """For each layer, `BOUNDS` of each of `BOUNDED`, within which inputs and outputs of its
    products are kept; empty: they are not."""
    side: int
    """Patches of a side of a block; a block becomes a row."""
    merger: Merger
    deep: tuple[tuple[int, Merger], ...] = ()
    """Layers whose outputs become further rows, in order. They are added to the hidden state behind
    the first layers of the model."""
    grid: tuple[int, int] | None = None
    """The only size of a tile, in patches; None: any size."""
    max_patches: int
    """Most patches of a tile."""

    def __post_init__(self) -> None:
        for name, kind in (("encoder", ModelSpec), ("merger", Merger)):
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{name} of a tower must be a {kind.__name__}")
        check_sizes(
            output_size=self.output_size,
            patch_size=self.patch_size,
            frames=self.frames,
            table_side=self.table_side,
            side=self.side,
            max_patches=self.max_patches,
        )
        check_flags(
            frames_apart=self.frames_apart,
            channels_last=self.channels_last,
            patch_bias=self.patch_bias,
        )
        for name, most in (
            *(("patch_size", MAX_PIXELS), ("frames", MAX_FRAMES), ("side", MAX_SIDE)),
            *(("table_side", MAX_TABLE_SIDE), ("max_patches", MAX_PATCHES)),
        ):
            if getattr(self, name) > most:
                raise ValueError(f"{name} of a tower is at most {most}")
        for name in ("pixel_scale", "pixel_shift"):
            object.__setattr__(self, name, _numbers(name, getattr(self, name)))
        if self.table is not None and self.table not in TABLES:
            raise ValueError(f"a table of positions {shown(self.table)} is not one of {TABLES}")
        object.__setattr__(self, "first_norm", made_of(TowerNorm, self.first_norm))
        object.__setattr__(self, "turns", made_of(Turns, self.turns))
        if self.window is not None:
            check_sizes(window=self.window)
            if self.window * self.side > MAX_TABLE_SIDE:
                raise ValueError(f"windows of {self.window} blocks are too large")
        known = range(self.encoder.num_layers)
        if not isinstance(self.whole_layers, list | tuple) or any(
            type(each) is not int or each not in known for each in self.whole_layers
        ):
            raise ValueError("layers without windows must be layers of the tower")
        object.__setattr__(self, "whole_layers", tuple(self.whole_layers))
        self._check_grid()
        self._check_layers()
        self._check_bounds()
        if not isinstance(self.deep, tuple) or len(self.deep) > MAX_PICTURE_LAYERS:
            raise ValueError(f"a tower has at most {MAX_PICTURE_LAYERS} deep layers")
        numbers = [number for number, _merger in self.deep]
        if any(type(each) is not int for each in numbers) or numbers != sorted(set(numbers)):
            raise ValueError("deep layers must be different, in order")
        if numbers and not 0 <= numbers[0] <= numbers[-1] < self.encoder.num_layers:
            raise ValueError("a deep layer that the tower does not have")
        for merger in (self.merger, *(each for _number, each in self.deep)):
            if not isinstance(merger, Merger) or merger.projections[-1].outputs != self.output_size:
                raise ValueError("rows of a tower must have the hidden size of the model")

    def _check_bounds(self) -> None:
        if not isinstance(self.bounds, list | tuple) or (
            self.bounds and len(self.bounds) != self.encoder.num_layers
        ):
            raise ValueError("bounds of a tower must be a list with those of each layer")
        for each in self.bounds:
            if not isinstance(each, list | tuple) or len(each) != len(BOUNDED) * len(BOUNDS):
                raise ValueError(f"a layer has {len(BOUNDS)} bounds of each product")
        object.__setattr__(self, "bounds", tuple(tuple(map(finite, n)) for n in self.bounds))
        blocks = [kind.feed_forward for kind in self.encoder.kinds]
        if self.bounds and not all(isinstance(each, GatedMlp) for each in blocks):
            raise ValueError("bounds of layers whose feed-forward blocks have no gate")

    def _check_grid(self) -> None:
        if self.grid is None:
            return
        object.__setattr__(self, "grid", tuple(self.grid))
        if len(self.grid) != 2:
            raise ValueError("the size of a tile must be height and width")
        check_sizes(height=self.grid[0], width=self.grid[1])
        if math.prod(self.grid) != self.max_patches or any(n % self.side for n in self.grid):
            raise ValueError(f"tiles of {self.grid} patches do not fit blocks of {self.side}")

    def _check_layers(self) -> None:
        for kind in self.encoder.kinds:
            part = kind.mixer
            if not isinstance(part, Attention) or part != Attention(
                num_heads=part.num_heads,
                num_kv_heads=part.num_heads,
                head_size=part.head_size,
                rotary=NO_ROTARY,
                window=None,
                qkv_bias=part.qkv_bias,
                output_bias=part.output_bias,
                query_key_norm=part.query_key_norm,
                value_norm=part.value_norm,
                score_scale=part.score_scale,
                norm_bias=part.norm_bias,
                has_post_norm=part.has_post_norm,
            ):
                raise ValueError("layers of a tower have plain attention")
            if self.turns is not None and 4 * len(self.turns.rows) != part.head_size:
                raise ValueError(f"turns of a head of {part.head_size} elements")
            block = kind.feed_forward
            if not isinstance(block, GatedMlp | PlainMlp) or (
                isinstance(block, GatedMlp) and (block.has_scale or block.token_inputs is not None)
            ):
                raise ValueError("layers of a tower have plain feed-forward blocks")

    @property
    def patch_elements(self) -> int:
        """Values of a patch of a tile."""
        return CHANNELS * self.patch_size**2

    @property
    def deep_layers(self) -> int:
        """The number of outputs besides the rows."""
        return len(self.deep)

    @property
    def row_size(self) -> int:
        """Values of a row, and of what is added to it behind the model's first layers."""
        return (1 + self.deep_layers) * self.output_size

    @functools.cached_property
    def digest(self) -> bytes:
        """A hash of everything here. Towers that differ only in their weights have the same."""
        told = json.dumps(self.to_json(), sort_keys=True)
        return hashlib.blake2b(told.encode(), digest_size=16).digest()

    def row_grid(self, height: int, width: int) -> tuple[int, int]:
        """(rows high, rows wide) of a tile of so many patches. Raises ValueError for sizes that
        this tower does not read."""
        if self.grid not in (None, (height, width)):
            raise ValueError(f"a tile of {height} by {width} patches, where only {self.grid} fits")
        if height < 1 or width < 1 or height % self.side or width % self.side:
            raise ValueError(f"{height} by {width} patches are not in blocks of {self.side}")
        if height * width > self.max_patches:
            raise ValueError(f"{height * width} patches are more than {self.max_patches}")
        if self.table in ("buckets", "axes") and max(height, width) > self.table_side:
            raise ValueError(f"{height} by {width} patches have no positions in the table")
        rows = height // self.side, width // self.side
        if math.prod(rows) > MAX_PATCHES:
            raise ValueError(f"a tile of more than {MAX_PATCHES} rows")
        return rows

    def rows(self, height: int, width: int) -> int:
        """The rows that a tile gives. Raises as `row_grid`."""
        return math.prod(self.row_grid(height, width))

    def check(self, tile: TileShape) -> None:
        """Raises ValueError for a tile that this tower does not read."""
        self.row_grid(tile.height, tile.width)
        if tile.patches.shape[1] != self.patch_elements:
            raise ValueError(
                f"patches of {tile.patches.shape[1]} values, where a patch has "
                f"{self.patch_elements}"
            )

    def operations(self, height: int, width: int) -> int:
        """Multiply-adds of a tile. Raises as `row_grid`."""
        rows, patches = self.rows(height, width), height * width
        found = 0
        for role, shape in self.shapes().items():
            if role.startswith("patches") or (role.startswith("layers.") and len(shape) == 2):
                found += patches * math.prod(shape)
            elif len(shape) == 2 and not role.startswith("positions"):
                found += rows * math.prod(shape)
        for layer, each in self.encoder.attentions.items():
            seen = patches if self.window is None else (self.window * self.side) ** 2
            seen = patches if layer in self.whole_layers else min(seen, patches)
            found += 2 * patches * seen * each.num_heads * each.head_size
        return found

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of its weights by role; matrices are [outputs, inputs]. `patches` and
        `positions` may have more axes in checkpoints, for as many values.

        Roles are `patches` (`patches.N` of frames apart), `patch_bias`, `positions` (`positions.0`
        of columns and `positions.1` of rows where each axis has a table), `first_norm`, those of
        layers as in `tensor_shapes`, and those of the merger behind `merger.` and `deep.N.`.
        """
        hidden = self.encoder.hidden_size
        whole, each = (hidden, self.patch_elements * self.frames), (hidden, self.patch_elements)
        shapes: dict[str, tuple[int, ...]] = {"patches": whole}
        if self.frames_apart:
            shapes = {f"patches.{number}": each for number in range(self.frames)}
        if self.patch_bias:
            shapes["patch_bias"] = (hidden,)
        if self.table == "axes":
            shapes |= dict.fromkeys(("positions.0", "positions.1"), (self.table_side, hidden))
        elif self.table is not None:
            shapes["positions"] = (self.table_side**2, hidden)
        if self.first_norm is not None:
            shapes |= self.first_norm.shapes("first_norm", hidden)
        of_layers = tensor_shapes(self.encoder)
        shapes |= {role: of_layers[role] for role in of_layers if role.startswith("layers.")}
        for prefix, merger in self.mergers:
            shapes |= merger.shapes(prefix, hidden, self.side)
        return shapes

    @property
    def mergers(self) -> tuple[tuple[str, Merger], ...]:
        """All mergers, and the beginning of their roles."""
        deep = ((f"deep.{n}.", each) for n, (_layer, each) in enumerate(self.deep))
        return ("merger.", self.merger), *deep

    def to_json(self) -> dict[str, Any]:
        """The tower in built-in types."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name in ("first_norm", "turns", "merger"):
            value = fields[name]
            fields[name] = None if value is None else dataclasses.asdict(value)
        fields["deep"] = [[number, dataclasses.asdict(each)] for number, each in self.deep]
        return {**fields, "encoder": self.encoder.to_json()}

    @classmethod
    def from_json(cls, value: object) -> Tower:
        """A tower from JSON. Raises ValueError for a value that `to_json` cannot write."""
        fields = dict(exact_fields(cls, value))
        deep = fields["deep"]
        if not isinstance(deep, list | tuple) or len(deep) > MAX_PICTURE_LAYERS:
            raise ValueError(f"a tower has at most {MAX_PICTURE_LAYERS} deep layers")
        if any(not isinstance(each, list | tuple) or len(each) != 2 for each in deep):
            raise ValueError("a deep layer must be a number and a merger")
        grid = fields["grid"]
        if grid is not None and not isinstance(grid, list | tuple):
            raise ValueError("the size of a tile must be height and width")
        fields["deep"] = tuple((number, _required(Merger, each)) for number, each in deep)
        fields["encoder"] = ModelSpec.from_json(fields["encoder"])
        fields["merger"] = _required(Merger, fields["merger"])
        return cls(**fields)


def _required(cls: type[_Made], value: object) -> _Made:
    return value if isinstance(value, cls) else cls(**exact_fields(cls, value))


def _numbers(name: str, value: object) -> tuple[float, ...]:
    """Three numbers from JSON."""
    if not isinstance(value, list | tuple) or len(value) != CHANNELS:
        raise ValueError(f"{name} must be three numbers, not {shown(value)}")
    return tuple(map(finite, value))
