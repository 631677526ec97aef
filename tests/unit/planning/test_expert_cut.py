"""Whether devices have columns of every expert or some of them whole: as asked for, or as pays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import edge
from edge.host.cache_paths import CACHE_VARIABLE, cache_root
from edge.models.experts import Experts
from edge.partition import Choice, ClusterSpec, DeviceSpec, LinkSpec, memory_use
from edge.planning.choosing import choose_plan, facts_of
from edge.planning.load_options import LoadOptions
from edge.planning.load_sizes import LoadSizes
from edge.weights.checkpoint import Checkpoint
from edge.weights.expert_uses import keep_expert_uses
from tests.support.checkpoints import TinyCheckpoint
from tests.support.known_rates import PROFILE

OPTIONS = LoadOptions(dtype="float32", plan="tensor", context_tokens=64, concurrency=1)


@pytest.fixture
def checkpoint(
    tiny_checkpoint: Callable[..., TinyCheckpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Checkpoint]:
    """Of which this device knows nothing."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    with Checkpoint.open(tiny_checkpoint("mixtral").path) as found:
        yield found


def slow_device(name: str, *, bytes_per_s: float, memory_bytes: int) -> DeviceSpec:
    """So slow that bytes are all that counts."""
    each = 1 / bytes_per_s
    rates = replace(
        PROFILE.rates,
        seconds_per_byte=(each, 10 * each),
        shared_seconds_per_byte=(each, 10 * each),
        slice_seconds_per_byte=(each, 10 * each),
        attention_slice_s=(0.0, 0.0),
        feed_forward_slice_s=(0.0, 0.0),
        jitter=0.0,
    )
    return DeviceSpec(id=name, name=name, memory_bytes=memory_bytes, threads=1, rates=rates)


def chosen(checkpoint: Checkpoint, devices: ClusterSpec, options: LoadOptions) -> Choice:
    return choose_plan(checkpoint, devices, options, LoadSizes.of(options, checkpoint.spec))


def cluster(checkpoint: Checkpoint) -> ClusterSpec:
    """A fast device with room for a fifth of the model, and a slow one with room for all."""
    whole = facts_of(checkpoint, OPTIONS, OPTIONS.limits(checkpoint.spec))
    alone = ClusterSpec(
        devices=(slow_device("slow", bytes_per_s=1e6, memory_bytes=1 << 30),), links=()
    )
    plan = chosen(checkpoint, alone, replace(OPTIONS, plan="auto")).plan
    room = memory_use(plan, whole, LoadSizes.of(OPTIONS, checkpoint.spec).workload)["slow"].total
    devices = (
        slow_device("fast", bytes_per_s=8e6, memory_bytes=room // 3),
        slow_device("slow", bytes_per_s=1e6, memory_bytes=1 << 30),
    )
    links = tuple(
        LinkSpec(source=one, target=other, latency_s=1e-6, bytes_per_s=1e9)
        for one, other in (("fast", "slow"), ("slow", "fast"))
    )
    return ClusterSpec(devices=devices, links=links)


def busy(checkpoint: Checkpoint) -> dict[int, np.ndarray]:
    """In each layer two experts that nearly all tokens go through."""
    counts = {}
    for layer in range(checkpoint.spec.num_layers):
        block = checkpoint.spec.layer(layer).feed_forward
        assert isinstance(block, Experts)
        counts[layer] = np.ones(block.num_experts, np.float32)
        counts[layer][[layer % block.num_experts, (layer + 2) % block.num_experts]] = 1000
    return counts


def test_columns_without_knowing_and_whole_where_it_is_faster(checkpoint: Checkpoint) -> None:
    devices = cluster(checkpoint)
    before = chosen(checkpoint, devices, OPTIONS)
    assert not any(shard.experts for shard in before.plan.stages[0].slices)
    counts = busy(checkpoint)
    keep_expert_uses(cache_root(), checkpoint.store.fingerprint, counts)
    found = chosen(checkpoint, devices, OPTIONS)
    assert before.predicted is not None
    assert found.predicted is not None
    assert found.predicted.token_s < 0.95 * before.predicted.token_s
    assert found.runners_up[0][0] == before.plan
    by_device = {shard.device: shard for shard in found.plan.stages[0].slices}
    for layer, own in enumerate(by_device["fast"].experts):
        busiest = set(np.argsort(-counts[layer], kind="stable")[:2].tolist())
        assert busiest & set(own), "the fast one has of those that most tokens go through"
    kept = chosen(checkpoint, devices, replace(OPTIONS, experts="columns"))
    assert not any(shard.experts for shard in kept.plan.stages[0].slices)


def test_whole_where_that_is_asked_for(checkpoint: Checkpoint) -> None:
    found = chosen(checkpoint, cluster(checkpoint), replace(OPTIONS, experts="whole"))
    assert all(shard.experts for shard in found.plan.stages[0].slices)
    assert found.predicted is not None


def test_of_equal_devices_columns_are_taken(checkpoint: Checkpoint) -> None:
    keep_expert_uses(cache_root(), checkpoint.store.fingerprint, busy(checkpoint))
    equal = tuple(
        replace(each, rates=PROFILE.rates, memory_bytes=1 << 30)
        for each in cluster(checkpoint).devices
    )
    found = chosen(checkpoint, replace(cluster(checkpoint), devices=equal), OPTIONS)
    assert not any(shard.experts for shard in found.plan.stages[0].slices)


def test_what_is_no_way_is_told() -> None:
    with pytest.raises(edge.RequestError, match="experts must be 'auto', 'columns' or 'whole'"):
        LoadOptions(experts="half")  # type: ignore[arg-type]
