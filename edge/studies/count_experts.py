"""Counts of the tokens routed to each expert while the cluster reads a text, for placement."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from edge.concurrency.blocking import run_blocking
from edge.studies.observe import ReadingTask, expert_observation_of, observed
from edge.studies.study import Study
from edge.weights.checkpoint import Checkpoint
from edge.weights.expert_uses import keep_expert_uses
from edge.weights.input_statistics import InputStatistics

_BUSIEST = 4
"""The part of a layer's experts that is called busiest: one in this number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedExperts:
    """The distribution of a text's tokens over a model's experts."""

    tokens: int
    layers: int
    """The number of layers with experts."""
    busiest_quarter: float
    """The share of the most used quarter of each layer's experts in all uses: 0.25 for an even
    distribution."""

    def to_json(self) -> dict[str, Any]:
        """Built-in types only."""
        return asdict(self)


async def count_experts(study: Study) -> CountedExperts:
    """See `AsyncCluster.count_experts`."""

    def prepare() -> tuple[ReadingTask, str]:
        with Checkpoint.open(study.path, lora=study.options.lora) as checkpoint:
            task = expert_observation_of(checkpoint, study.options, text=study.text)
            return task, checkpoint.store.fingerprint

    task, fingerprint = await run_blocking(prepare)
    async with observed(study, task) as file:
        return await run_blocking(partial(_kept, file, task, study.cache_root, fingerprint))


def _kept(file: Path, task: ReadingTask, cache_root: Path, fingerprint: str) -> CountedExperts:
    with InputStatistics(file, task.spec) as statistics:
        counts = statistics.expert_uses()
    keep_expert_uses(cache_root, fingerprint, counts)
    parts = [
        float(np.sort(own)[-max(1, len(own) // _BUSIEST) :].sum() / max(1.0, own.sum()))
        for own in counts.values()
    ]
    return CountedExperts(
        tokens=task.tokens, layers=len(counts), busiest_quarter=sum(parts) / len(parts)
    )
