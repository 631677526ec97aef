"""Weights of linear attention in a GGUF file.

Value heads are in one of two orders, by architecture: those of a key head side by side, as in a
folder; or the first of each key head, then the second of each, which spares llama.cpp a copy. The
decay of the state is stored as the negative exponential of a folder's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import replace

from edge.models.gguf_architectures import Architecture
from edge.models.linear_attention import LinearAttention
from edge.weights.fused_rows import Steps, TensorPart, rows_of, rows_of_each, tiled


def linear_parts(
    architecture: Architecture,
    layer: int,
    part: LinearAttention,
    hidden_size: int,
    there: Container[str],
) -> dict[str, TensorPart]:
    """Parts by the names of roles' tensors. there: the tensors of the file."""

    def name(role: str) -> str:
        return architecture.tensor_name(f"layers.{layer}.{role}")

    def heads(tensor: str, size: int, *, first: int = 0, before: int = 0) -> TensorPart:
        """`before` rows in order, then `size` rows of each value head."""
        if not is_tiled:
            stop = first + before + part.num_value_heads * size
            return rows_of(tensor, range(first, stop))
        plain = (Steps.of(range(first, first + before)),) if before else ()
        return TensorPart(tensor=tensor, rows=(*plain, tiles(size, first + before)))

    def tiles(size: int, first: int = 0) -> Steps:
        return tiled(part.num_key_heads, part.value_heads, size, first=first)

    is_tiled = architecture.tiles_values and part.value_heads > 1
    keys, values = part.num_key_heads * part.key_size, part.value_heads * part.value_size
    of_layer = f"blk.{layer}."
    found: dict[str, TensorPart] = {
        name("linear_decay_rate"): replace(heads(name("linear_decay_rate"), 1), is_logarithm=True)
    }
    fused = f"{of_layer}ssm_in.weight"
    if fused in there:  # key head by key head, as in older files
        rows = {"query": part.key_size, "key": part.key_size, "value": values, "gate": values}
        found |= _of_heads(fused, part.num_key_heads, rows, name)
    else:
        qkv = f"{of_layer}attn_qkv.weight"
        found |= {
            name("linear_query.weight"): rows_of(qkv, range(keys)),
            name("linear_key.weight"): rows_of(qkv, range(keys, 2 * keys)),
            name("linear_value.weight"): heads(qkv, part.value_size, first=2 * keys),
        }
    fused = f"{of_layer}ssm_ba.weight"
    if fused in there:
        rows = {"beta": part.value_heads, "decay": part.value_heads}
        found |= _of_heads(fused, part.num_key_heads, rows, name)
    if not is_tiled:
        return found
    for role, size in (
        ("linear_gate.weight", part.value_size),
        ("linear_decay.weight", 1),
        ("linear_beta.weight", 1),
        ("linear_decay_bias", 1),
    ):
        found.setdefault(name(role), heads(name(role), size))
    convolution, output = name("linear_convolution"), name("linear_output.weight")
    found[convolution] = heads(convolution, part.value_size, before=2 * keys)
    found[output] = replace(rows_of(output, range(hidden_size)), columns=tiles(part.value_size))
    return found


def _of_heads(
    tensor: str, heads: int, sizes: dict[str, int], name: Callable[[str], str]
) -> dict[str, TensorPart]:
    """Parts of `sizes` rows of each key head, one after the other."""
    found: dict[str, TensorPart] = {}
    first, height = 0, sum(sizes.values())
    for part, size in sizes.items():
        rows = range(first, first + size)
        found[name(f"linear_{part}.weight")] = rows_of_each(tensor, heads, rows, height)
        first += size
    return found
