"""Compiles every Triton kernel for GPUs that are not there: python -m tests.support.triton_compiler

What the interpreter takes, the compiler may refuse. So the launchers are called with tensors in
main memory, and each launch is compiled to machine code and ends there. Prints one JSON list of
what was compiled: the operator, the kernel, the architecture and its shared memory in bytes.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any, get_args

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from edge.kernels.activation.reference import Activation
from edge.kernels.activation.triton import activated
from edge.kernels.attention.triton import attention, attention_tiles
from edge.kernels.embedding.triton import embedding
from edge.kernels.experts.reference import Routing
from edge.kernels.experts.triton import (
    FEW_ROWS,
    ExpertStack,
    expert_product,
    expert_tiles,
    mix,
    route,
    sort_uses,
)
from edge.kernels.gated_mlp.reference import Clamp
from edge.kernels.gated_mlp.triton import gated
from edge.kernels.kv_cache.gpu_cache import KvCache
from edge.kernels.latent_attention.reference import LatentForm
from edge.kernels.latent_attention.triton import latent_attention, store_rows
from edge.kernels.layer_norm.triton import add_layer_norm
from edge.kernels.linear_attention.triton import linear_attention
from edge.kernels.matmul_nbits.gpu_layout import num_tiles
from edge.kernels.matmul_nbits.reference import LEAST_BLOCK
from edge.kernels.matmul_nbits.triton import (
    PackedWeight,
    ProductTiles,
    Weight,
    matmul_nbits,
    unpacked,
)
from edge.kernels.rms_norm.triton import add_rms_norm
from edge.kernels.rope.triton import rope_store
from edge.kernels.sampling.triton import top_k
from edge.kernels.short_convolution.triton import short_convolution
from edge.kernels.token_inputs.triton import token_inputs

HEADS, KV_HEADS, HEAD_SIZE, HIDDEN = 8, 2, 128, 1024
EXPERTS, TOP_K = 8, 4
DECODE_SPLITS = (2, 7, 16, 64)
_INDICES = torch.zeros(1, dtype=torch.int32)


class AbsentGpu:
    """As much of a driver as compiling asks for."""

    def __init__(self, architecture: int) -> None:
        self.architecture = architecture

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.architecture, 32)

    def get_current_device(self) -> int:
        return self.architecture  # kernels are kept for each device

    def get_current_stream(self, device: int) -> int:
        return 0


def main() -> None:
    compiled: list[dict[str, Any]] = []
    launch = JITFunction.run

    def compile_only(self: Any, *arguments: Any, **options: Any) -> Any:
        kernel = launch(self, *arguments, **{**options, "warmup": True})
        assert kernel.asm["cubin"]
        compiled.append(
            {
                "operator": self.fn.__module__.split(".")[2],
                "kernel": self.fn.__name__,
                "architecture": driver.active.architecture,
                "shared_bytes": kernel.metadata.shared,
                "hash": kernel.hash,
            }
        )
        return kernel

    JITFunction.run = compile_only
    driver.set_active(AbsentGpu(80))
    is_short = sys.argv[1:] == ["rows"]
    launch_rows(few=is_short)
    if is_short:
        print(json.dumps(compiled))
        return
    for splits in DECODE_SPLITS:
        launch_attention(bits=8, queries=1, splits=splits)
    for splits in (1, 7):
        launch_latent_attention(queries=64 if splits == 1 else 1, splits=splits)
    launch_states()
    launch_attention(bits=None, queries=64, splits=1)
    launch_products(rows=(4, 16), bits=8)
    launch_products(rows=(64,), bits=2)
    launch_products(rows=(64,), bits=4, dtype=torch.float32)
    launch_routing()
    launch_experts(rows=(4, 16), bits=8)
    # Products of this one are of other instructions.
    driver.set_active(AbsentGpu(90))
    launch_attention(bits=4, queries=64, splits=1)
    launch_products(rows=(1, 128), bits=4)
    launch_routing()
    for bits in (None, 4):
        launch_experts(rows=(1, 512), bits=bits)
    launch_products(rows=(1, 128), bits=2)
    print(json.dumps(compiled))


def launch_rows(*, few: bool) -> None:
    """What treats each row by itself is compiled alike for every architecture. few: in one way."""
    x = torch.zeros(1, HIDDEN, dtype=torch.bfloat16)
    add_rms_norm(x, x, torch.ones(HIDDEN), epsilon=1e-5)
    add_layer_norm(x, x, torch.ones(HIDDEN), torch.zeros(HIDDEN), epsilon=1e-5)
    embedding(_INDICES, x)
    activations: tuple[Activation, ...] = ("gelu_tanh",) if few else get_args(Activation)
    for activation in activations:
        gated(x, activation=activation)
        activated(x, activation=activation)
    gated(x, clamp=Clamp(limit=7.0, slope=1.7))
    if not few:
        top_k(x, 1)
    top_k(x[:, :256], 4)
    token_inputs(x, x.float(), torch.ones(HIDDEN), hidden_size=HIDDEN, epsilon=1e-5)
    angles = torch.zeros(4, HEAD_SIZE // 2)
    qkv = torch.zeros(1, (HEADS + 2 * KV_HEADS) * HEAD_SIZE, dtype=torch.bfloat16)
    norm = torch.ones(HEAD_SIZE)
    for bits in (4,) if few else (None, 8, 4):
        rope_store(
            qkv, cache(bits), angles, angles, positions=_INDICES, sequences=_INDICES,
            norms=(norm, norm), value_norm=bits is None,
        )  # fmt: skip


def launch_states() -> None:
    """One token of a request, and a chunk of a prompt."""
    for rows in (1, 64):
        told: dict[str, Any] = {
            "slots": _INDICES,
            "sequences": torch.zeros(rows, dtype=torch.int32),
            "starts": torch.zeros(2, dtype=torch.int32),
            "max_tokens": rows,
        }
        short_convolution(
            torch.zeros(rows, 3 * HIDDEN, dtype=torch.bfloat16), torch.zeros(1, 2, HIDDEN),
            torch.zeros(HIDDEN, 3), bias=torch.zeros(HIDDEN), **told,
        )  # fmt: skip
        channels, values = 2 * KV_HEADS * HEAD_SIZE + HEADS * HEAD_SIZE, HEADS * HEAD_SIZE
        linear_attention(
            torch.zeros(rows, channels + values, dtype=torch.bfloat16),
            torch.zeros(rows, 2 * HEADS),
            (torch.zeros(1, 3, channels), torch.zeros(1, HEADS, HEAD_SIZE, HEAD_SIZE)),
            convolution=torch.zeros(channels, 4), decay_bias=torch.zeros(HEADS),
            decay_rate=torch.zeros(HEADS), scale=torch.zeros(HEAD_SIZE), key_heads=KV_HEADS,
            epsilon=1e-5, **told,
        )  # fmt: skip


def launch_attention(*, bits: int | None, queries: int, splits: int) -> None:
    """Decoding with divided keys, or prompts with everything else that may be asked for."""
    extras: dict[str, Any] = {}
    if splits == 1:
        extras = {"window": 512, "soft_cap": 30.0, "sinks": torch.zeros(HEADS)}
    usual = attention_tiles(max_queries=queries, group=HEADS // KV_HEADS, head_size=HEAD_SIZE)
    attention(
        torch.zeros(queries, HEADS, HEAD_SIZE, dtype=torch.bfloat16), cache(bits),
        starts=torch.zeros(2, dtype=torch.int32), lengths=_INDICES, max_queries=queries,
        tiles=replace(usual, splits=splits), **extras,
    )  # fmt: skip


def launch_latent_attention(*, queries: int, splits: int) -> None:
    """Of GLM-4.7-Flash's sizes: 20 heads, rows of 512 and 64 elements."""
    halves = torch.zeros(2, 1, 16, 288, dtype=torch.bfloat16)
    rows = KvCache(keys=halves, values=halves, block_table=torch.zeros(1, 2, dtype=torch.int32))
    angles, places = torch.zeros(4, 32), torch.zeros(queries, dtype=torch.int32)

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(queries, *shape, dtype=torch.bfloat16)

    query = store_rows(
        zeros(20, 512), zeros(20 * 256), zeros(512), zeros(64), rows, angles, angles,
        positions=places, sequences=places, interleaved=queries > 1,
    )  # fmt: skip
    latent_attention(
        query, rows, starts=torch.zeros(2, dtype=torch.int32), lengths=_INDICES,
        max_queries=queries, max_keys=64, splits=splits,
        form=LatentForm(num_heads=20, row_size=576, scale=1.0),
    )  # fmt: skip


def launch_products(
    *, rows: tuple[int, ...], bits: int, dtype: torch.dtype = torch.bfloat16
) -> None:
    """In blocks of 32 with zero points, or of 128, whole and unpacked; in the smallest blocks, with
    columns that are no whole tiles; and with divided inputs."""
    for block_size, columns in ((128 if bits == 8 else 32, HIDDEN), (LEAST_BLOCK[bits], 1000)):
        blocks = -(-columns // block_size)
        scales = torch.zeros(blocks, HIDDEN)
        words = torch.zeros(num_tiles(blocks * block_size, bits), HIDDEN, 16, dtype=torch.int32)
        packed = PackedWeight(
            words=words, scales=scales, zero_points=None if bits == 8 else scales.to(torch.uint8),
            bits=bits, block_size=block_size, columns=columns,
        )  # fmt: skip
        for count in rows:
            matmul_nbits(torch.zeros(count, columns, dtype=dtype), packed, torch.zeros(HIDDEN))
        unpacked(packed, range(64), dtype)
    x = torch.zeros(4, columns, dtype=dtype)
    matmul_nbits(x, packed, tiles=ProductTiles(rows=8, splits=2))


def launch_routing() -> None:
    """Plainly, and with all that there may be; then the sum."""
    logits, correction = torch.zeros(8, EXPERTS + 1), torch.zeros(EXPERTS)
    route(logits, Routing(top_k=2, renormalized=False), num_experts=EXPERTS)
    routing = Routing(
        top_k=TOP_K, renormalized=True, scoring="sigmoid", groups=4, chosen_groups=2, scale=2.5
    )
    chosen, weights = route(
        logits, routing, num_experts=EXPERTS, correction=correction, scales=correction
    )
    sort_uses(chosen, num_experts=EXPERTS, rows=16)
    results = torch.zeros(8 * TOP_K, HIDDEN)
    mix(results, weights)
    mix(results, weights, shared=results[:8], gate=logits[:, -1])


def launch_experts(*, rows: tuple[int, ...], bits: int | None) -> None:
    """Of floats; or of codes, in blocks of 32 with all that they may have, or of 128."""
    matrix: Any = torch.zeros(HIDDEN, HIDDEN, dtype=torch.bfloat16)
    offsets = order = None
    if bits is not None:
        block_size = 128 if bits == 8 else 32
        scales = torch.zeros(HIDDEN // block_size, HIDDEN, dtype=torch.float16)
        matrix = PackedWeight(
            words=torch.zeros(num_tiles(HIDDEN, bits), HIDDEN, 16, dtype=torch.int32),
            zero_points=None if bits == 8 else scales.to(torch.uint8), scales=scales,
            bits=bits, block_size=block_size, columns=HIDDEN,
        )  # fmt: skip
        if bits == 4:
            offsets = scales.float().T.contiguous()
            order = torch.zeros(HIDDEN, dtype=torch.int32)
    stack = ExpertStack([Weight(matrix=matrix, offsets=offsets, order=order)] * EXPERTS)
    for count in rows:
        x = torch.zeros(count, HIDDEN, dtype=torch.bfloat16)
        chosen = torch.zeros(count, TOP_K, dtype=torch.int32)
        tiles = expert_tiles(count, stack, top_k=TOP_K, element_bytes=x.element_size())
        found = None
        if count > FEW_ROWS:
            found = sort_uses(chosen, num_experts=EXPERTS, rows=tiles.rows)
        bias = torch.zeros(EXPERTS, HIDDEN)
        expert_product(x, stack, chosen, bias, tiles=tiles, sorted_uses=found)


def cache(bits: int | None) -> KvCache:
    """In blocks of 16 tokens."""
    kind = {None: torch.bfloat16, 8: torch.int8, 4: torch.uint8}[bits]
    stores = torch.zeros(2, KV_HEADS, 16, HEAD_SIZE // (2 if bits == 4 else 1), dtype=kind)
    groups = HEAD_SIZE // 32 if bits == 4 else 1
    scales = None if bits is None else torch.zeros(2, KV_HEADS, 16, groups, dtype=torch.float16)
    return KvCache(
        keys=stores, values=stores, key_scales=scales, value_scales=scales,
        block_table=torch.zeros(1, 2, dtype=torch.int32),
    )  # fmt: skip


if __name__ == "__main__":
    main()
