"""Shards that compute nothing: their logits follow from the tokens of a request alone."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edge.backends.interface import HostLogits, ShardWeights, StepLogits
from edge.backends.null import made_up
from edge.backends.null.backend import NullBackend
from edge.backends.null.program import NullProgram
from edge.models.spec import ModelSpec
from edge.offload import KVTier
from edge.protocol.step import Step, StepLimits
from edge.transport import Collective
from edge.weights.formats import KvDtype, WeightFormat, kv_bits
from edge.weights.layout import ShardLayout
from tests.support.specs import plain_spec
from tests.support.triton_face import device

VOCAB = 3000
SPEC = plain_spec(
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=4,
    head_size=8,
    ffn_columns=4,
    vocab_size=VOCAB,
    context_tokens=64,
)


@functools.cache
def logits_after(*tokens: int) -> NDArray[np.float32]:
    """As peaked as a model's; (VOCAB,)."""
    return made_up.logits_after(SPEC, tokens)


class MadeUpProgram(NullProgram):
    """A shard whose logits may be broken, or lie where a GPU's do."""

    broken_id: int | None = None
    ranks = False

    def forward(
        self, step: Step, hidden: NDArray[np.float32] | None, collective: Collective
    ) -> NDArray[np.float32]:
        found = super().forward(step, hidden, collective)
        vocab = self._layout.vocab
        if self.broken_id is not None and self.broken_id in vocab:
            found[..., self.broken_id - vocab.start] = np.nan
        return found

    def logits(
        self, step: Step, hidden: NDArray[np.float32] | None, collective: Collective
    ) -> StepLogits:
        found = self.forward(step, hidden, collective)
        if not self.ranks:
            return HostLogits(found, self._last(step))
        import torch

        from edge.backends.triton.device import Device, Mirror
        from edge.backends.triton.logits import DeviceLogits

        here = Device()
        kept = Mirror(here, found.size, torch.float32)
        kept.host[...] = found.reshape(-1)
        return DeviceLogits(here, kept, step, found.shape[-1], lambda: self._last(step))


@dataclass(kw_only=True)
class MadeUpBackend(NullBackend):
    """Remembers what it loaded."""

    broken_id: int | None = None
    ranks: bool = False
    """Logits are where a GPU's are, and ranked there."""
    programs: list[MadeUpProgram] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.ranks:  # here, and not while others wait for a step: importing takes seconds
            assert device() == "cpu", "interpreted"
            import edge.backends.triton.logits  # noqa: F401

    def load(
        self,
        spec: ModelSpec,
        layout: ShardLayout,
        weights: ShardWeights,
        weight_format: WeightFormat,
        *,
        limits: StepLimits,
        kv_dtype: KvDtype = "float32",
        kv_tier: KVTier | None = None,
    ) -> MadeUpProgram:
        program = MadeUpProgram(
            spec,
            layout,
            weight_bytes=weights.manifest.total_bytes,
            limits=limits,
            kv_bits=kv_bits(kv_dtype),
            kv_tier=kv_tier,
        )
        program.broken_id, program.ranks = self.broken_id, self.ranks
        self.programs.append(program)
        return program
