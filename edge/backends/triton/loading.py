"""Loads a shard's file as a program on the device, and checks it before use."""

from __future__ import annotations

import torch

from edge.backends.embedding_rows import EmbeddingRows
from edge.backends.interface import ShardWeights
from edge.backends.shard_arrays import ShardArrays
from edge.backends.triton.buffers import StepBuffers
from edge.backends.triton.device import Device
from edge.backends.triton.layers import ShardOperators
from edge.backends.triton.paged_kv_cache import BlockCache
from edge.backends.triton.program import TritonProgram
from edge.backends.triton.self_check import run_self_check
from edge.backends.triton.side_inputs import SideInputs
from edge.backends.triton.streaming import StreamedLayers
from edge.models.spec import ModelSpec
from edge.offload import KVTier
from edge.protocol.step import StepLimits
from edge.weights.formats import WeightFormat
from edge.weights.layout import ShardLayout


def load(
    device: Device,
    spec: ModelSpec,
    layout: ShardLayout,
    weights: ShardWeights,
    weight_format: WeightFormat,
    *,
    limits: StepLimits,
    bits: int | None,
    activations: torch.dtype | None = None,
    kv_tier: KVTier | None = None,
) -> TritonProgram:
    """bits: of a code in the KV cache. activations: type of products' inputs, if not the usual one.

    Raises RequestError when an operator disagrees with its reference.
    """
    if activations is None:
        activations = usual_activations(device, weight_format)
    arrays = ShardArrays(layout, weights, weight_format)
    cache = BlockCache(layout, limits, device, bits=bits, dtype=activations)

    def open_streamed() -> StreamedLayers:
        return StreamedLayers(arrays, weights, device, is_half=activations != torch.float32)

    streamed: StreamedLayers | None = None
    if layout.streamed_layers:
        streamed = open_streamed()
    try:
        if streamed is not None:
            streamed.settle(layout.streamed_layers)
        operators = ShardOperators(
            spec,
            arrays,
            device,
            cache,
            SideInputs(spec, layout, limits, device),
            context_tokens=limits.context_tokens,
            activations=activations,
            streamed=streamed,
            observes=limits.observes,
        )
        buffers = StepBuffers(
            device, limits, hidden_size=spec.hidden_size, columns=len(layout.vocab)
        )
        bring = (lambda _layer: None) if streamed is None else streamed.bring
        with device.launching():
            run_self_check(operators, arrays, device, buffers, limits, bring=bring)
        if operators.grams is not None:
            operators.grams.clear()
        device.give_back()  # what loading and checking took for a moment
        return TritonProgram(
            operators,
            device,
            buffers,
            weight_bytes=weights.manifest.total_bytes,
            limits=limits,
            embedding=EmbeddingRows(
                weights, layout.embedding, spec.hidden_size, scale=spec.embedding_scale
            ),
            streamed=streamed,
            open_streamed=open_streamed,
            kv_tier=kv_tier,
        )
    except BaseException:
        if streamed is not None:
            streamed.close()
        raise


def usual_activations(device: Device, weight_format: WeightFormat) -> torch.dtype:
    """bfloat16 if the GPU's tensor cores multiply it and accuracy is "fast", else float32.

    With "fast", the CPU's kernels round the same inputs to 8 bits.
    """
    return torch.bfloat16 if device.is_gpu and weight_format.rounds_inputs else torch.float32
