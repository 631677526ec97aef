"""Experts of a folder's checkpoint as GGUF files have them, all of a layer in one tensor, and back.

Between the two they are called as one expert of a folder would be, without its number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Weights = dict[str, NDArray[Any]]

_ONE = re.compile(r"(.*\.experts)\.(\d+)\.(\w+\.weight)")
_GATE_UP = ".experts.gate_up_proj"


def stacked(weights: Mapping[str, NDArray[Any]]) -> Weights:
    """Matrices [experts, rows, columns]; biases [experts, rows]."""
    found: Weights = {}
    several: dict[str, dict[int, NDArray[Any]]] = {}
    for name, values in weights.items():
        if one := _ONE.fullmatch(name):
            several.setdefault(f"{one[1]}.{one[3]}", {})[int(one[2])] = values
        elif _GATE_UP in name:  # of gpt-oss: inputs first, gate and up in turn
            before, is_bias = name.partition("gate_up_proj")[0], name.endswith("_bias")
            for place, part in enumerate(("gate_proj", "up_proj")):
                own = np.ascontiguousarray(values[..., place::2])
                found[f"{before}{part}.{'bias' if is_bias else 'weight'}"] = (
                    own if is_bias else np.ascontiguousarray(own.swapaxes(1, 2))
                )
        elif name.endswith(".experts.down_proj"):
            found[f"{name}.weight"] = np.ascontiguousarray(values.swapaxes(1, 2))
        elif name.endswith(".experts.down_proj_bias"):
            found[f"{name.removesuffix('_bias')}.bias"] = values
        else:
            found[name] = values
    for name, experts in several.items():
        found[name] = np.stack([experts[number] for number in sorted(experts)])
    return found


def unstacked(weights: Mapping[str, NDArray[Any]], *, in_turn: bool) -> Weights:
    """The inverse; `in_turn`: of gpt-oss."""
    found: Weights = {}
    for name, values in weights.items():
        before, is_one, part = name.rpartition(".experts.")
        if not is_one:
            found[name] = values
        elif not in_turn:
            for number, each in enumerate(values):
                found[f"{before}.experts.{number}.{part}"] = each
        elif part.startswith("gate_proj"):
            suffix = part.removeprefix("gate_proj")
            up = weights[f"{before}.experts.up_proj{suffix}"]
            whole = np.stack([values, up], axis=2).reshape(len(values), -1, *values.shape[2:])
            found[f"{before}{_GATE_UP}{'_bias' * (suffix == '.bias')}"] = _inputs_first(whole)
        elif part.startswith("down_proj"):
            own = f"{before}.experts.down_proj{'_bias' * part.endswith('.bias')}"
            found[own] = _inputs_first(values)
    return found


def _inputs_first(values: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(values.swapaxes(1, 2)) if values.ndim == 3 else values
