"""Overhead of an expert that is read into memory and computed by a separate graph.

A few layers with as many experts as a token uses are measured twice: as with all experts in memory,
and as with some on disk. In both cases all are found in memory, so the difference excludes the
disk.
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
    """Whether the back end reads single experts. A device with its own memory copies whole
    layers."""
    return not backend.has_own_memory and not backend.is_stand_in


def expert_seconds(site: Site, order: Profile, caches: Caches) -> float | None:
    """Overhead in seconds of a token and each of its experts; noise may make it negative.

    None for a model without experts, if budget or disk have no room, or if its layers cannot be
    read from disk.
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
            each.seconds(step)  # warm-up: makes bindings and buffers
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
