"""The tensors that a shard's file must have."""

from __future__ import annotations

from edge.errors import ProtocolError
from edge.offload import Manifest
from edge.weights.further import PREFIX, FurtherHead
from edge.weights.layout import ShardLayout, token_table
from edge.weights.recipe import Recipe

_EMBEDDING_TYPES = ("float32", "float16", "bfloat16")

_Tensor = tuple[tuple[str, ...], tuple[int, ...]]
"""The possible types of a tensor, and its shape."""


def check_tensors(
    manifest: Manifest,
    layout: ShardLayout,
    recipe: Recipe,
    further: FurtherHead | None = None,
    *,
    hidden_size: int,
) -> None:
    """Raise ProtocolError, naming a tensor, unless the file has exactly the shard's tensors.

    Memory is counted from the layout, so nothing else may be loaded.
    """
    wanted = _wanted(layout, recipe, hidden_size)
    if further is not None:
        own = _wanted(further.layout, further.weight_format.recipe, hidden_size)
        wanted |= {f"{PREFIX}{name}": tensor for name, tensor in own.items()}
    found: dict[str, _Tensor] = {
        tensor.name: ((tensor.dtype,), tensor.shape) for tensor in manifest.tensors
    }
    for name in wanted.keys() - found.keys():
        raise ProtocolError(f"the shard lacks {name}, which is in its layout")
    for name, ((dtype,), shape) in found.items():
        if name not in wanted:
            raise ProtocolError(f"the shard has {name[:80]!r}, which is not in its layout")
        types, right = wanted[name]
        if dtype not in types or shape != right:
            raise ProtocolError(
                f"{name} is {dtype} {list(shape)}",
                remedy=f"its layout makes it {' or '.join(types)} {list(right)}",
            )


def _wanted(layout: ShardLayout, recipe: Recipe, hidden_size: int) -> dict[str, _Tensor]:
    wanted: dict[str, _Tensor] = {
        f"{matrix.name}.{array.suffix}": ((array.dtype,), array.shape)
        for matrix in recipe.all_stored(layout.matrices)
        for array in matrix.arrays
    }
    for vector in layout.vectors:
        wanted[vector.name] = (("float32",), (vector.num_elements,))
    if layout.embedding:
        wanted["embedding"] = (_EMBEDDING_TYPES, (len(layout.embedding), hidden_size))
    for number, rows in enumerate(layout.token_tables):
        wanted[token_table(number)] = (_EMBEDDING_TYPES, (len(rows), len(layout.token_columns)))
    return wanted
