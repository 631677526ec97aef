"""The config.json of a folder of compressed-tensors, which says which matrices are codes.

Knows the fields of that library, and no files.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from edge.weights.block_matrices import Blocks

OTHERS = ("quantization_config", "quantization", "compression_config")
"""Fields of other and older libraries about the quantization of the source folder."""


def compressed_values(
    values: Mapping[str, Any],
    modules: Mapping[str, Blocks],
    *,
    floats: Collection[str],
    num_layers: int,
) -> dict[str, Any]:
    """The values of config.json for a folder whose `modules` are of these kinds.

    floats: the other modules that have a matrix.
    """
    kinds: dict[Blocks, list[str]] = {}
    for module, kind in modules.items():
        kinds.setdefault(kind, []).append(module)
    groups = {
        f"group_{number}": {
            "targets": _targets(members, num_layers),
            "weights": _weights(kind),
            "input_activations": None,
            "output_activations": None,
        }
        for number, (kind, members) in enumerate(kinds.items())
    }
    said = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(floats),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
    kept = {key: value for key, value in values.items() if key not in OTHERS}
    return {**kept, "quantization_config": said}


def _weights(kind: Blocks) -> dict[str, Any]:
    return {
        "num_bits": kind.bits,
        "type": "int",
        "symmetric": not kind.zero_points,
        "strategy": "group",
        "group_size": kind.block_size,
        "block_structure": None,
        "dynamic": False,
        "actorder": None,
    }


def _targets(modules: Iterable[str], num_layers: int) -> list[str]:
    """Names of modules, with one pattern for names that differ only in the layer's number."""
    found: dict[tuple[str, str], list[str]] = {}
    targets = []
    for module in modules:
        parts = re.fullmatch(r"(.+?)\.(\d+)\.(.+)", module)
        if parts is None:
            targets.append(module)
        else:
            before, number, after = parts.groups()
            found.setdefault((before, after), []).append(number)
    for (before, after), numbers in found.items():
        number = r"\d+" if len(numbers) == num_layers else f"({'|'.join(numbers)})"
        targets.append(rf"re:{re.escape(before)}\.{number}\.{re.escape(after)}$")
    return targets
