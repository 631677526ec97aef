"""The number formats of weights, by name.

A format is a file with its encoding, and a line in the table here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from edge.errors import RequestError, shown
from edge.kernels.matmul_blocks.reference import FORMS, TILES_VERSION
from edge.kernels.matmul_nbits.reference import Accuracy
from edge.models.spec import FILE_BLOCKS, MAX_KINDS, ModelSpec, graded
from edge.weights.block_matrices import Blocks
from edge.weights.encoding import Encoding, OpenSource, Rounded
from edge.weights.file_blocks import FileBlocks
from edge.weights.float_matrices import Floats, float32
from edge.weights.integer_formats import int2, int3, int4, int8, pure_int4
from edge.weights.matrix_kind import MatrixKind
from edge.weights.recipe import MAX_MATRIX_KINDS, Recipe, Rule

ENCODINGS: dict[str, Callable[[ModelSpec, int | None], Encoding]] = {
    "float32": float32,
    "int8": int8,
    "int4": int4,
    "int4-pure": pure_int4,
    "int3": int3,
    "int2": int2,
}
"""Functions that make the encoding of a model with blocks of a size, by the format's name."""
AS_STORED = "as stored"
AUTO = "auto"
"""The checkpoint's own encoding if it is quantised, else the default."""
Dtype = Literal["auto", "float32", "int8", "int4", "int4-pure", "int3", "int2"]
"""Number formats of weights. auto: the checkpoint's own if it is quantised, else int4."""
DEFAULT_FORMAT: Dtype = "int4"
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
FEW_BITS: tuple[Dtype, ...] = ("int3", "int2")
"""Formats with such a loss that people are warned."""
BLOCK_SIZES = (16, 32, 64, 128)
ACCURACIES: tuple[Accuracy, ...] = get_args(Accuracy)
KvDtype = Literal["float32", "int8", "int4"]
"""Number formats of keys and values."""
KV_DTYPES: tuple[KvDtype, ...] = get_args(KvDtype)


_FLOATS = "floats"
_BLOCKS = {"blocks": (False, False), "zero_blocks": (True, False), "offset_blocks": (False, True)}
"""Whether blocks have zero points and offsets, by their names in messages."""
_FILE_BLOCKS = "file_blocks"
_SORTED = "sorted_"
"""Prefix of the names of blocks whose columns are sorted by group."""

_LONGEST_NAME = 64
_MAX_RULES = 1024
"""Most rules of a recipe: sixteen matrices of a layer in each of 64 grades."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """A format, in the form that is sent to peers. Its name is for people."""

    name: str
    recipe: Recipe
    """The kind of each of its matrices."""
    accuracy: Accuracy
    """The accuracy of products with integer weights; float32 has only one."""
    grades: tuple[int, ...] = field(default=(), compare=False, repr=False)
    """Grades of the model's layers; peers find them in its description."""
    note: str = field(default="", compare=False, repr=False)
    """A note for people, in addition to its kinds of matrices."""
    open_source: OpenSource | None = field(default=None, compare=False, repr=False)
    """Makes it from a checkpoint; None on a peer, which need not know the format."""

    @property
    def storage(self) -> tuple[str, Recipe]:
        """The part that decides the bytes on disk; formats with the same storage share them."""
        return self.name, self.recipe

    @property
    def needs(self) -> tuple[str, ...]:
        """What a device must have for its products, see `edge.models.spec`."""
        return (FILE_BLOCKS,) if any(isinstance(k, FileBlocks) for k in self.recipe.kinds) else ()

    @property
    def rounds_inputs(self) -> bool:
        """Whether there are products that round their inputs to 8 bits."""
        return any(map(self.rounds, self.recipe.kinds))

    def graded(self, spec: ModelSpec) -> ModelSpec:
        """The model with the grades of its layers."""
        return graded(spec, self.grades) if self.grades else spec

    def rounds(self, kind: MatrixKind[Any]) -> bool:
        """Whether products of this kind round their inputs to 8 bits."""
        return kind.can_round_inputs and self.accuracy == "fast"

    def to_json(self) -> dict[str, Any]:
        """The format in built-in types. Each kind is written once."""
        kinds = self.recipe.kinds
        return {
            "name": self.name,
            "accuracy": self.accuracy,
            "kinds": [_kind_json(kind) for kind in kinds],
            "rules": [
                [rule.role, rule.grade, kinds.index(rule.kind)] for rule in self.recipe.rules
            ],
        }

    @classmethod
    def from_json(cls, value: Any) -> WeightFormat:
        """Read the result of `to_json`. Raises RequestError for anything else."""
        if not isinstance(value, Mapping) or set(value) != {"name", "accuracy", "kinds", "rules"}:
            raise RequestError("a weight format with unknown or missing fields")
        name = value["name"]
        if not (isinstance(name, str) and name.isprintable() and 0 < len(name) <= _LONGEST_NAME):
            raise RequestError("a weight format without a name")
        return cls(
            name=name,
            recipe=_recipe(value["kinds"], value["rules"]),
            accuracy=_accuracy(value["accuracy"]),
        )


def _kind_json(kind: MatrixKind[Any]) -> dict[str, Any]:
    if isinstance(kind, FileBlocks):
        return {"kind": _FILE_BLOCKS, "type": kind.type, "version": kind.version}
    if not isinstance(kind, Blocks):
        return {"kind": _FLOATS}
    (name,) = (name for name, has in _BLOCKS.items() if has == (kind.zero_points, kind.offsets))
    told = {"kind": name, "code_bits": kind.code_bits, "block_size": kind.block_size}
    if not kind.is_sorted:
        return told
    return told | {"kind": f"{_SORTED}{name}", "order_number": kind.order_number}


def _kind(value: object) -> MatrixKind[Any]:
    named = value.get("kind") if isinstance(value, Mapping) else None
    if named == _FILE_BLOCKS:
        assert isinstance(value, Mapping)
        if set(value) != {"kind", "type", "version"} or str(value["type"]) not in FORMS:
            raise RequestError(
                f"blocks of a file are one of {', '.join(FORMS)}",
                remedy="install one version of Edge everywhere",
            )
        if value["version"] is True or value["version"] != TILES_VERSION:
            raise RequestError(
                "blocks of a file in another layout",
                remedy="install one version of Edge everywhere",
            )
        return FileBlocks(str(value["type"]))
    plain = named.removeprefix(_SORTED) if isinstance(named, str) else ""
    if named != _FLOATS and plain not in _BLOCKS:
        known = (_FLOATS, _FILE_BLOCKS, *_BLOCKS, *(f"{_SORTED}{name}" for name in _BLOCKS))
        raise RequestError(f"matrices are {shown(named)}, not {' or '.join(known)}")
    assert isinstance(value, Mapping)
    numbers: tuple[str, ...] = () if named == _FLOATS else ("code_bits", "block_size")
    numbers += () if plain == named else ("order_number",)
    if set(value) != {"kind", *numbers}:
        raise RequestError("a kind of matrices with unknown or missing fields")
    if any(type(value[number]) is not int for number in numbers):
        raise RequestError("a kind of matrices whose numbers are not whole")
    if named == _FLOATS:
        return Floats()
    zero_points, offsets = _BLOCKS[plain]
    try:
        return Blocks(
            zero_points=zero_points,
            offsets=offsets,
            **{number: value[number] for number in numbers},
        )
    except ValueError as error:
        raise RequestError(str(error)) from error


def _recipe(kinds: object, rules: object) -> Recipe:
    if not isinstance(kinds, list) or not 0 < len(kinds) <= MAX_MATRIX_KINDS:
        raise RequestError(f"a weight format has 1 to {MAX_MATRIX_KINDS} kinds of matrices")
    if not isinstance(rules, list) or len(rules) > _MAX_RULES:
        raise RequestError(f"a weight format has at most {_MAX_RULES} rules")
    known = tuple(map(_kind, kinds))
    return Recipe(known[0], tuple(_rule(each, known) for each in rules))


def _rule(value: object, kinds: Sequence[MatrixKind[Any]]) -> Rule:
    if not isinstance(value, list) or len(value) != 3:
        raise RequestError(f"a rule of a weight format must have three parts, not {shown(value)}")
    role, grade, number = value
    if not isinstance(role, str) or not 0 < len(role) <= _LONGEST_NAME:
        raise RequestError("a rule of a weight format for an unknown role")
    if grade is not None and (type(grade) is not int or not 0 <= grade < MAX_KINDS):
        raise RequestError(f"a rule of a weight format for the grade {shown(grade)}")
    if type(number) is not int or not 0 <= number < len(kinds):
        raise RequestError(f"a weight format without the kind {shown(number)}")
    return Rule(role, kinds[number], grade)


def check_format(name: str, block_size: int | None, accuracy: str) -> None:
    """Raises RequestError for an unknown name, block size or accuracy."""
    known = (AUTO, *ENCODINGS)
    if name not in known:
        names = ", ".join(known)
        raise RequestError(f"dtype {shown(name)} is not one of {names}", remedy=f"one of {names}")
    is_known = type(block_size) is int and block_size in BLOCK_SIZES
    if block_size is not None and not is_known:
        raise RequestError(
            f"block size {shown(block_size)} is not one of {BLOCK_SIZES}",
            remedy=f"one of {BLOCK_SIZES}",
        )
    _accuracy(accuracy)


def weight_format(
    spec: ModelSpec,
    name: str,
    block_size: int | None = None,
    accuracy: str = "fast",
    *,
    own: Encoding | Rounded | None = None,
    packs_blocks: bool = False,
) -> WeightFormat:
    """The format for this model. own: the checkpoint's encoding. packs_blocks: without blocks of
    files, for devices that lack kernels for these.

    block_size: None for the format's default. Raises as `check_format`.
    """
    check_format(name, block_size, accuracy)
    note = ""
    if name == AUTO:
        name = DEFAULT_FORMAT
        if isinstance(own, Encoding):
            name = AS_STORED
        elif own is not None:
            name, note = own.dtype or DEFAULT_FORMAT, own.because
    if name == AS_STORED:
        assert isinstance(own, Encoding)
        made, note = own, own.note
    else:
        made = ENCODINGS[name](spec, block_size)
    if packs_blocks and made.packed is not None:
        made = made.packed
    return WeightFormat(
        name=name,
        recipe=made.recipe,
        accuracy=_accuracy(accuracy),
        grades=made.grades,
        note=note,
        open_source=made.open,
    )


def _accuracy(name: object) -> Accuracy:
    for known in ACCURACIES:
        if name == known:
            return known
    names = ", ".join(ACCURACIES)
    raise RequestError(f"accuracy {shown(name)} is not one of {names}", remedy=f"one of {names}")


def kv_dtype(name: str) -> KvDtype:
    """The format of keys and values of this name. Raises RequestError for an unknown one."""
    for known in KV_DTYPES:
        if name == known:
            return known
    names = ", ".join(KV_DTYPES)
    raise RequestError(f"KV cache of {shown(name)}: not one of {names}", remedy=f"one of {names}")


def kv_bits(dtype: KvDtype) -> int | None:
    """Bits of a code; None for float32."""
    return {"float32": None, "int8": 8, "int4": 4}[dtype]
