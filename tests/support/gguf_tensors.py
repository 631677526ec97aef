"""Weights of linear attention and of experts as GGUF files have them, and back.

Qwen3.5's value heads are put into llama.cpp's order; Qwen3-Next's fused matrices are taken apart.
All experts of a layer are one tensor. Between the two they are called as one expert of a folder
would be, without its number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Weights = dict[str, NDArray[Any]]

_QKVZ = "in_proj_qkvz.weight"


def _sizes(config: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Key heads, value heads of each, and the sizes of both."""
    heads = config["linear_num_key_heads"]
    return (
        heads,
        config["linear_num_value_heads"] // heads,
        config["linear_key_head_dim"],
        config["linear_value_head_dim"],
    )


def taken_apart(weights: Mapping[str, NDArray[Any]], config: Mapping[str, Any]) -> Weights:
    found: Weights = {}
    for name, values in weights.items():
        if not name.endswith(_QKVZ):
            found[name] = values
            continue
        groups, each, key, value = _sizes(config)
        heads = values.reshape(groups, -1, values.shape[-1])
        parts = np.split(heads, np.cumsum([key, key, each * value]), axis=1)
        parts = [part.reshape(-1, values.shape[-1]) for part in parts]
        before = name.removesuffix(_QKVZ)
        found[f"{before}in_proj_qkv.weight"] = np.concatenate(parts[:3])
        found[f"{before}in_proj_z.weight"] = parts[3]
    return found


def put_together(weights: Mapping[str, NDArray[Any]], config: Mapping[str, Any]) -> Weights:
    """The inverse, of Qwen3-Next."""
    found: Weights = {}
    for name, values in weights.items():
        if name.endswith("in_proj_qkv.weight"):
            groups, _each, key, _value = _sizes(config)
            before = name.removesuffix("in_proj_qkv.weight")
            whole = np.split(values, np.cumsum([groups * key, groups * key]))
            whole.append(weights[f"{before}in_proj_z.weight"])
            rows = [part.reshape(groups, -1, values.shape[-1]) for part in whole]
            found[f"{before}{_QKVZ}"] = np.concatenate(rows, axis=1).reshape(-1, values.shape[-1])
        elif not name.endswith("in_proj_z.weight"):
            found[name] = values
    return found


def in_file_order(
    name: str, values: NDArray[Any], config: Mapping[str, Any], *, back: bool = False
) -> NDArray[Any]:
    """Rows, or columns, of value heads: the first of each key head first. `back`: the inverse."""
    groups, each, key, value = _sizes(config)
    part = name.partition("linear_attn.")[2].removesuffix(".weight")
    size = value if part in ("in_proj_qkv", "in_proj_z", "conv1d", "out_proj") else 1
    if part not in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b") and part not in (
        "conv1d", "out_proj", "dt_bias", "A_log",
    ):  # fmt: skip
        return values
    before = 2 * groups * key if part in ("in_proj_qkv", "conv1d") else 0
    rows = values.T if part == "out_proj" else values
    shape = (each, groups, size) if back else (groups, each, size)
    heads = rows[before:].reshape(*shape, *rows.shape[1:]).swapaxes(0, 1)
    rows = np.concatenate([rows[:before], heads.reshape(rows[before:].shape)])
    return np.ascontiguousarray(rows.T if part == "out_proj" else rows)


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
