"""Overhead of an expert over its weights where each is brought in, and is a graph of its own.

A few layers with as many experts as a token goes through are measured twice: as they are computed
where all experts stay in memory, and as they are where some are on disk. All of these are found in
memory, so what the second takes longer is not the disk's.
"""

from __future__ import annotations

import statistics

from edge.backends.interface import Backend
from edge.errors import RequestError
from edge.offload import StoreError
from edge.profiling.cold_caches import Caches
from edge.profiling.loaded_sample import LoadedSample, Site, decode_step
from edge.profiling.sample import expert_sample
from edge.protocol.measurements import Profile

_TURNS = 24


def brings_experts(backend: Backend) -> bool:
    """Into memory of its own a device copies whole layers."""
    return not backend.has_own_memory and not backend.is_stand_in


def expert_seconds(site: Site, order: Profile, caches: Caches) -> float | None:
    """Overhead in seconds of a token and each expert it goes through; noise may make it negative.

    None for a model without experts, where the budget or the disk has no room for it, and where its
    layers cannot be read from disk at all.
    """
    if not brings_experts(site.backend):
        return None
    room_bytes = site.budget_bytes - caches.nbytes
    sample = expert_sample(order.model, order.weight_format, room_bytes)
    if sample is None:
        return None
    step = decode_step(1)
    whole = LoadedSample(site, sample, "whole", order.weight_format)
    try:
        streamed = LoadedSample(site, sample, "whole", order.weight_format, is_streamed=True)
    except (StoreError, RequestError):
        whole.close()
        return None
    both = whole, streamed
    try:
        for each in both:
            each.seconds(step)  # makes bindings and buffers
        turns: list[list[float]] = []
        for _ in range(_TURNS):
            site.check()
            turns.append([caches.cold_seconds(each, step) for each in both])
    finally:
        streamed.close()
        whole.close()
    in_memory_s, brought_in_s = (statistics.median(times) for times in zip(*turns, strict=True))
    seconds: float = (brought_in_s - in_memory_s) / sample.num_routed
    return seconds
