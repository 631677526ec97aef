"""How a model is to be loaded, as its user asks for it: one object from the rim to the peers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import get_args

from edge.errors import RequestError
from edge.models.spec import ModelSpec
from edge.protocol.step import StepLimits
from edge.protocol.wire_rules import WIRES, Wire
from edge.weights.formats import (
    DEFAULT_BLOCK_SIZE,
    KvDtype,
    WeightFormat,
    kv_dtype,
    weight_format,
)
from kernels.matmul_nbits.reference import Accuracy
from partition import Parallel, Plan, Workload

DEFAULT_CONTEXT_TOKENS = 4096

MAX_REQUESTS_AT_ONCE = 64
"""Requests in one step; the CPU kernels gain little from more than 32."""

CHUNK_TOKENS = 256
"""Prompt tokens per step: large enough to fill the matrix kernels, small enough to pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What `Cluster.load` says of each of these. Raises RequestError for what can never be."""

    plan: Parallel | Plan = "auto"
    dtype: str = "int4"
    block_size: int = DEFAULT_BLOCK_SIZE
    accuracy: Accuracy = "fast"
    context_tokens: int | None = None
    concurrency: int = 1
    wire: Wire = "float32"
    kv_dtype: KvDtype = "float32"
    workload: Workload | None = None
    stream: bool = False
    kv_tokens: int | None = None
    """Tokens to keep KV memory for where peers limit it; None: all of every request at once."""

    def __post_init__(self) -> None:
        if not isinstance(self.plan, Plan) and self.plan not in get_args(Parallel):
            raise RequestError(
                f"plan must be 'auto', 'pipeline', 'tensor' or a Plan, not {self.plan!r}"
            )
        if type(self.concurrency) is not int or not 1 <= self.concurrency <= MAX_REQUESTS_AT_ONCE:
            raise RequestError(
                f"concurrency must be 1 to {MAX_REQUESTS_AT_ONCE}, not {self.concurrency!r}"
            )
        if not isinstance(self.workload, Workload | None):
            raise RequestError(f"workload must be an edge.Workload, not {self.workload!r}")
        if self.wire not in WIRES:
            raise RequestError(f"wire must be one of {', '.join(WIRES)}, not {self.wire!r}")
        weight_format(self.dtype, self.block_size, self.accuracy)
        kv_dtype(self.kv_dtype)

    @property
    def weight_format(self) -> WeightFormat:
        return weight_format(self.dtype, self.block_size, self.accuracy)

    def limits(self, spec: ModelSpec) -> StepLimits:
        """How large steps of this model may get. RequestError for a context it does not have."""
        context = self.context_tokens
        if context is None:
            wished = self.workload.context_tokens if self.workload is not None else 0
            context = min(max(DEFAULT_CONTEXT_TOKENS, wished), spec.context_tokens)
        if type(context) is not int or not 1 <= context <= spec.context_tokens:
            raise RequestError(
                f"context_tokens must be 1 to {spec.context_tokens} for this model, not {context!r}"
            )
        return StepLimits(
            context_tokens=context,
            chunk_tokens=min(CHUNK_TOKENS, context),
            requests=MAX_REQUESTS_AT_ONCE,
            cached_tokens=min(context * self.concurrency, self.kv_tokens or 1 << 52),
        )

    def planned_workload(self, spec: ModelSpec) -> Workload:
        """What the plan should be fast at; the memory it keeps is that of the whole context.

        RequestError for a workload that does not fit the context.
        """
        limits = self.limits(spec)
        workload = self.workload
        if workload is None:
            usual = Workload(concurrency=self.concurrency)
            output_tokens = min(usual.output_tokens, limits.context_tokens // 2)
            prompt_tokens = min(usual.prompt_tokens, limits.context_tokens - output_tokens)
            workload = replace(usual, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        if workload.context_tokens > limits.context_tokens:
            raise RequestError(
                f"a workload of {workload.prompt_tokens} + {workload.output_tokens} tokens does "
                f"not fit the context of {limits.context_tokens}; give it shorter, or more "
                "context_tokens"
            )
        return replace(workload, reserved_tokens=limits.cached_tokens)
