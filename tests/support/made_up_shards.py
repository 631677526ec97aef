"""Shards that compute nothing: their logits follow from the tokens of a request alone."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.backends.interface import HostLogits, Logits, ShardWeights
from edge.models.spec import ModelSpec
from edge.protocol.step import Step
from edge.weights.formats import WeightFormat
from edge.weights.layout import ShardLayout
from tests.support.specs import plain_spec
from tests.support.triton_face import device
from transport import Collective

VOCAB = 3000
SPEC = plain_spec(
    num_layers=2,
    hidden_size=8,
    num_heads=4,
    num_kv_heads=4,
    head_size=2,
    ffn_columns=4,
    vocab_size=VOCAB,
    context_tokens=64,
)


@functools.cache
def logits_after(*tokens: int) -> NDArray[np.float32]:
    """As peaked as a model's; (VOCAB,)."""
    return (np.random.default_rng(tokens).gumbel(size=VOCAB) * 2.5).astype(np.float32)


class MadeUpProgram:
    """A shard whose logits are `logits_after` its requests' tokens."""

    weight_bytes = 0
    device_sums = None

    disk_wait_s = 0.0

    def __init__(self, layout: ShardLayout, broken_id: int | None, *, ranks: bool) -> None:
        self._layout = layout
        self._ranks = ranks
        self._broken_id = broken_id
        self._tokens: dict[str, list[int]] = {}

    def forward(
        self, step: Step, hidden: NDArray[np.float32] | None, collective: Collective
    ) -> NDArray[np.float32]:
        rows = []
        for entry in step.entries:
            known = self._tokens.setdefault(entry.request, [])
            assert entry.position == len(known)
            known.extend(entry.tokens)
            ends = range(len(known) - step.logit_rows + 1, len(known) + 1)
            rows.append([logits_after(*known[:end]) for end in ends])
        if not self._layout.is_last_stage:
            return self.receive_buffer(step)
        logits = np.array(rows, np.float32).reshape(step.batch, step.logit_rows, VOCAB)
        if self._broken_id is not None:
            logits[..., self._broken_id] = np.nan
        vocab = self._layout.vocab
        return logits[:, :, vocab.start : vocab.stop]

    def logits(
        self, step: Step, hidden: NDArray[np.float32] | None, collective: Collective
    ) -> Logits:
        found = self.forward(step, hidden, collective)
        if not self._ranks:
            return HostLogits(found)
        assert device() == "cpu", "interpreted"
        import torch

        from edge.backends.triton.device import Device, Mirror
        from edge.backends.triton.logits import DeviceLogits

        here = Device()
        kept = Mirror(here, found.size, torch.float32)
        kept.host[...] = found.reshape(-1)
        return DeviceLogits(here, kept, step, found.shape[-1])

    def receive_buffer(self, step: Step) -> NDArray[np.float32]:
        return np.zeros((step.batch, step.num_tokens, SPEC.hidden_size), np.float32)

    def release(self, request: str) -> None:
        self._tokens.pop(request, None)

    def close(self) -> None:
        self._tokens.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeUpBackend:
    name: str = "made up"
    broken_id: int | None = None
    ranks: bool = False
    """Logits are where a GPU's are, and ranked there."""

    def why_not(self) -> str | None:
        return None

    def load(
        self,
        spec: ModelSpec,
        layout: ShardLayout,
        weights: ShardWeights,
        weight_format: WeightFormat,
        **_options: Any,
    ) -> MadeUpProgram:
        return MadeUpProgram(layout, self.broken_id, ranks=self.ranks)
