"""Folders in the layouts of GPTQ, AWQ, compressed-tensors, FP8, MLX, MXFP4 and NVFP4.

Written from the published layouts, a word at a time; nothing of the product is used.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from edge.kernels.matmul_blocks.reference import FORMS, dequantize
from edge.weights.block_rounding import BlockRounding
from tests.support.checkpoints import TinyCheckpoint

LINEAR = (
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"),
    *("gate_proj", "up_proj", "gate_up_proj", "down_proj"),
    *("w1", "w2", "w3", "in_proj", "out_proj"),  # of LFM2
    *("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b"),  # of Qwen3.5
    "in_proj_qkvz",  # of Qwen3-Next
)
CUT = ("o_proj", "down_proj")
E2M1 = np.array(
    [*(0, 0.5, 1, 1.5, 2, 3, 4, 6), *(-0.0, -0.5, -1, -1.5, -2, -3, -4, -6)], np.float32
)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

Array = NDArray[Any]
Tensors = dict[str, Array]
Packed = tuple[Tensors, NDArray[np.float32]]
"""The tensors of one matrix by what follows the layer's name, and the float32 matrix meant."""


def words_of(codes: Array, bits: int, order: tuple[int, ...] | None = None) -> Array:
    """int32 words along the last axis: code i of a word, or code order[i], at bit i * bits."""
    per_word = 32 // bits
    missing = -codes.shape[-1] % per_word
    padded = np.concatenate([codes, np.zeros((*codes.shape[:-1], missing), codes.dtype)], axis=-1)
    parts = padded.astype(np.uint64).reshape(*codes.shape[:-1], -1, per_word)
    words = np.zeros(parts.shape[:-1], np.uint64)
    for place in range(per_word):
        source = place if order is None else order[place]
        words |= parts[..., source] << np.uint64(place * bits)
    return words.astype(np.uint32).view(np.int32)


def rounded(
    weight: NDArray[np.float32],
    bits: int,
    group: int,
    *,
    symmetric: bool,
    order: Array | None = None,
    scale_type: Any = np.float16,
) -> tuple[Array, Array, Array, Array]:
    """Codes [rows, columns], scales and zeros [rows, groups], and the group of each column."""
    rows, columns = weight.shape
    groups = -(-columns // group)
    of_column = np.arange(columns) // group if order is None else order
    top = (1 << bits) - 1
    codes = np.zeros((rows, columns), np.int64)
    scales = np.zeros((rows, groups), scale_type)
    zeros = np.zeros((rows, groups), np.int64)
    for number in range(groups):
        part = weight[:, of_column == number]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if symmetric:
            scales[:, number] = np.maximum(-low, high) / (top // 2)
            zeros[:, number] = (top + 1) // 2
        else:
            scales[:, number] = (high - low) / top
            zero = np.rint(-low / scales[:, number].astype(np.float32))
            zeros[:, number] = np.clip(zero, 1, top)
        scale = scales[:, number].astype(np.float32)[:, None]
        values = np.rint(part / scale).astype(np.int64) + zeros[:, number][:, None]
        codes[:, of_column == number] = np.clip(values, 0, top)
    return codes, scales, zeros, of_column


def meant_by(codes: Array, scales: Array, zeros: Array, of_column: Array) -> NDArray[np.float32]:
    whole = (codes - zeros[:, of_column]).astype(np.float32)
    return whole * scales.astype(np.float32)[:, of_column]


def gptq(
    bits: int = 4,
    group: int = 32,
    *,
    symmetric: bool = True,
    version: int = 1,
    act_order: bool = False,
    of_its_own: bool = False,
    has_order: bool = True,
) -> Layout:
    """of_its_own: each matrix has an order of its own, not each size."""

    def pack(weight: NDArray[np.float32]) -> Packed:
        columns = weight.shape[1]
        size = columns if group == -1 else group
        order = None
        if act_order:
            seed = int(np.abs(weight).sum() * 1000) if of_its_own else columns
            order = np.random.default_rng(seed).permutation(np.arange(columns) // size)
        codes, scales, zeros, of = rounded(weight, bits, size, symmetric=symmetric, order=order)
        tensors = {
            "qweight": words_of(codes, bits).T,
            "qzeros": words_of((zeros - (version == 1)).T, bits),
            "scales": scales.T,
            **({"g_idx": of.astype(np.int32)} if has_order else {}),
        }
        return tensors, meant_by(codes, scales, zeros, of)

    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": act_order,
        "sym": symmetric,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }
    return Layout(config=config, pack=pack)


def gptq_by_rules(*, rules: str = "dynamic") -> Layout:
    """Matrices with many columns have 8 bits, larger groups and zero points by a rule."""
    usual, other = gptq(), gptq(8, 64, symmetric=False)

    def pack(weight: NDArray[np.float32]) -> Packed:
        return (other if weight.shape[1] > weight.shape[0] else usual).pack(weight)

    rule = {"bits": 8, "group_size": 64, "sym": False}
    said = {"+:.*down.*": rule} if rules == "dynamic" else {"model.layers.0.mlp.down_proj": rule}
    return Layout(config={**usual.config, rules: said}, pack=pack)


def auto_round(layout: Layout, packing: str) -> Layout:
    """The same tensors as AutoRound describes them."""
    named = {"quant_method": "auto-round", "packing_format": packing, "data_type": "int"}
    return Layout(config={**layout.config, **named}, pack=layout.pack)


def awq(group: int = 32) -> Layout:
    def pack(weight: NDArray[np.float32]) -> Packed:
        codes, scales, zeros, of = rounded(weight, 4, group, symmetric=False)
        tensors = {
            "qweight": words_of(codes.T, 4, AWQ_ORDER),
            "qzeros": words_of(zeros.T, 4, AWQ_ORDER),
            "scales": scales.T,
        }
        return tensors, meant_by(codes, scales, zeros, of)

    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    }
    return Layout(config=config, pack=pack)


def compressed(
    bits: int = 4,
    group: int | None = 32,
    *,
    symmetric: bool = True,
    packed_zeros: bool = True,
    plain: bool = False,
    act_order: bool = False,
) -> Layout:
    """`group` None: a scale for each row. `plain`: int8 without packing."""

    def pack(weight: NDArray[np.float32]) -> Packed:
        columns = weight.shape[1]
        size = columns if group is None else group
        order = None
        if act_order:
            order = np.random.default_rng(columns).permutation(np.arange(columns) // size)
        codes, scales, zeros, of = rounded(
            weight,
            bits,
            size,
            symmetric=symmetric,
            order=order,
            scale_type=ml_dtypes.bfloat16,
        )
        half = 1 << (bits - 1)
        tensors: Tensors = {"weight_scale": scales}
        if plain:
            tensors["weight"] = (codes - half).astype(np.int8)
        else:
            tensors["weight_packed"] = words_of(codes, bits)
            tensors["weight_shape"] = np.array(weight.shape, np.int64)
        if not symmetric and packed_zeros:
            tensors["weight_zero_point"] = words_of(zeros.T, bits).T
        elif not symmetric:
            tensors["weight_zero_point"] = (zeros - half).astype(np.int8)
        if act_order:
            tensors["weight_g_idx"] = of.astype(np.int32)
        return tensors, meant_by(codes, scales, zeros, of)

    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "channel" if group is None else "group",
        "group_size": group,
        "actorder": "group" if act_order else None,
    }
    config = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if plain else "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
    return Layout(config=config, pack=pack)


def edge_blocks(type_name: str) -> Layout:
    """As `edge quantize` writes it, by plain rounding."""
    form = FORMS[type_name]

    def pack(weight: NDArray[np.float32]) -> Packed:
        arrays, _largest = BlockRounding(form).rounded(weight)
        meant = dequantize(form, arrays["blocks"])[:, : weight.shape[1]].copy()
        shape = np.array(weight.shape, np.int64)
        return {f"weight_blocks.{type_name}": arrays["blocks"], "weight_shape": shape}, meant

    return Layout(config={"quant_method": "edge-blocks", "version": 1}, pack=pack)


def fp8(scales: str = "blocks") -> Layout:
    """`scales`: "blocks" of 128 as DeepSeek has them; "tensor", "rows" as compressed-tensors."""

    def pack(weight: NDArray[np.float32]) -> Packed:
        rows, columns = weight.shape
        down = {"blocks": np.arange(rows) // 128, "rows": np.arange(rows)}.get(scales)
        down = np.zeros(rows, int) if down is None else down
        across = np.arange(columns) // 128 if scales == "blocks" else np.zeros(columns, int)
        grid = np.zeros((down[-1] + 1, across[-1] + 1), np.float32)
        np.maximum.at(grid, (down[:, None], across[None]), np.abs(weight))
        factors = (grid / 448).astype(np.float32 if scales == "blocks" else ml_dtypes.bfloat16)
        spread = factors.astype(np.float32)[down][:, across]
        codes = (weight / spread).astype(ml_dtypes.float8_e4m3fn)
        name = "weight_scale_inv" if scales == "blocks" else "weight_scale"
        stored = factors.reshape(1) if scales == "tensor" else factors
        return {"weight": codes, name: stored}, codes.astype(np.float32) * spread

    if scales == "blocks":
        return Layout(
            config={"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
            pack=pack,
        )
    weights = {"num_bits": 8, "type": "float", "strategy": scales, "symmetric": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    config = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": groups,
    }
    return Layout(config=config, pack=pack)


def nvfp4(method: str = "compressed-tensors") -> Layout:
    """Of that library, or of "modelopt"."""

    def pack(weight: NDArray[np.float32]) -> Packed:
        rows, columns = weight.shape
        groups = weight.reshape(rows, -1, 16)
        factor = np.float32(np.abs(weight).max() / (6 * 448))
        inverse = np.float32(1) / factor
        peaks = np.abs(groups).max(axis=-1) / 6
        if method != "modelopt":
            factor = np.float32(1) / inverse
        scales = (peaks / factor).astype(ml_dtypes.float8_e4m3fn)
        steps = (scales.astype(np.float32) * factor)[..., None]
        distances = np.abs(groups[..., None] / steps[..., None] - E2M1)
        codes = distances.argmin(axis=-1).astype(np.uint8).reshape(rows, columns)
        meant = (E2M1[codes].reshape(groups.shape) * steps).reshape(rows, columns)
        packed = codes[:, 0::2] | codes[:, 1::2] << 4
        if method == "modelopt":
            one = {"weight_scale_2": np.array(factor), "input_scale": np.array(factor)}
            return {"weight": packed, "weight_scale": scales, **one}, meant
        of_all = {
            "weight_global_scale": np.array([inverse]),
            "input_global_scale": np.array([inverse]),
        }
        return {"weight_packed": packed, "weight_scale": scales, **of_all}, meant

    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    config: dict[str, Any] = {"quant_method": method, "ignore": ["lm_head"]}
    config["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": weights}}
    if method == "modelopt":
        config["quant_algo"] = "NVFP4"
    else:
        config["format"] = "nvfp4-pack-quantized"
    return Layout(config=config, pack=pack)


def mlx(bits: int = 4, group: int = 32) -> Layout:
    def pack(weight: NDArray[np.float32]) -> Packed:
        codes, scales, zeros, of = rounded(weight, bits, group, symmetric=False)
        biases = (-zeros * scales.astype(np.float32)).astype(np.float16)
        tensors = {
            "weight": words_of(codes, bits).view(np.uint32),
            "scales": scales,
            "biases": biases,
        }
        whole = codes.astype(np.float32) * scales.astype(np.float32)[:, of]
        return tensors, whole + biases.astype(np.float32)[:, of]

    return Layout(
        config={"group_size": group, "bits": bits},
        pack=pack,
        key="quantization",
        layers=(*LINEAR, "embed_tokens", "lm_head"),
    )


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How matrices are packed, and what config.json says of it."""

    config: Mapping[str, Any]
    pack: Callable[[NDArray[np.float32]], Packed]
    key: str = "quantization_config"
    layers: tuple[str, ...] = field(default=LINEAR)


def write_mxfp4(
    folder: Path, source: Path, head: Callable[[NDArray[np.float32]], NDArray[np.float32]]
) -> TinyCheckpoint:
    """gpt-oss as it is published: random codes in place of the experts of `source`, the rest as
    it is there. Returns the same as `write_packed`."""
    stored: Tensors = {}
    meant: Tensors = {}
    random = np.random.default_rng(0)
    for name, weight in load_file(source / "model.safetensors").items():
        if not name.endswith((".gate_up_proj", ".down_proj")):
            stored[name] = meant[name] = weight
            continue
        experts, inputs, outputs = weight.shape
        blocks = random.integers(256, size=(experts, outputs, inputs // 32, 16), dtype=np.uint8)
        scales = random.integers(121, 124, size=blocks.shape[:3], dtype=np.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        whole = np.empty((*blocks.shape[:3], 32), np.float32)
        whole[..., 0::2], whole[..., 1::2] = E2M1[blocks & 15], E2M1[blocks >> 4]
        whole *= np.exp2(scales.astype(np.float32) - 127)[..., None]
        meant[name] = np.ascontiguousarray(whole.reshape(experts, outputs, inputs).swapaxes(1, 2))
    reference = folder.with_name(f"{folder.name}-meant")
    shutil.copytree(source, folder)
    shutil.copytree(source, reference)
    meant["lm_head.weight"] = head(meant["lm_head.weight"])
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(meant, reference / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    return TinyCheckpoint(reference)


def write_packed(
    folder: Path,
    source: Path,
    layout: Layout,
    *,
    keep: Callable[[str], bool] = lambda layer: False,
    head: Callable[[NDArray[np.float32]], NDArray[np.float32]] | None = None,
    cut: Callable[[NDArray[np.float32]], NDArray[np.float32]] | None = None,
) -> TinyCheckpoint:
    """The checkpoint in `source` in this layout; layers that `keep` names stay floats.

    Returns a checkpoint, beside `folder`, of the weights that it stands for, of what `head` makes
    of a head of floats, and `cut` of matrices that devices share by columns.
    """
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    stored: Tensors = {}
    meant: Tensors = {}
    for name, weight in load_file(source / "model.safetensors").items():
        layer, _dot, suffix = name.rpartition(".")
        local = layer.rpartition(".")[2]
        if suffix != "weight" or local not in layout.layers or keep(layer):
            stored[name] = meant[name] = weight
            if head is not None and local == "lm_head":
                meant[name] = head(weight)
            elif head is not None and local == "embed_tokens" and config["tie_word_embeddings"]:
                meant["lm_head.weight"] = head(weight)
            continue
        tensors, whole = layout.pack(weight)
        stored |= {f"{layer}.{each}": np.ascontiguousarray(t) for each, t in tensors.items()}
        if local == "embed_tokens":  # as such tables are read
            whole = whole.astype(np.float16).astype(np.float32)
        meant[name] = whole if cut is None or local not in CUT else cut(whole)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    reference = folder.with_name(f"{folder.name}-meant")
    reference.mkdir()
    tied = config["tie_word_embeddings"] and "lm_head.weight" not in meant
    (reference / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": tied}))
    save_file(meant, reference / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, layout.key: layout.config}))
    return TinyCheckpoint(reference)
