"""Measurements that a coordinator asks of a peer: memory rate, speed at one model, links.

A measurement and a running reply slow each other down. A peer measures all the same, because
planning without facts is worse. Its answer names the loaded models, and the coordinator then tells
its user and does not keep the figures. Measurements never overlap.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any

from edge.backends.interface import ShardWeights
from edge.concurrency.blocking import StopFlag, run_blocking
from edge.errors import CapacityError
from edge.host.disk_rate import disk_read_bytes_per_s
from edge.host.memory_rate import memory_read_bytes_per_s, most_read_bytes
from edge.memory.ledger import MEASURING, Use
from edge.memory.model_sizes import model_facts
from edge.partition import Workload, memory_use
from edge.peer.dialling import dial
from edge.peer.resources import PeerResources
from edge.profiling.loaded_sample import Site
from edge.profiling.profile import profile
from edge.profiling.random_weights import written_bytes, written_weights
from edge.profiling.sample import sample_budget_bytes
from edge.protocol.assignment import Assignment
from edge.protocol.frame_codec import Call
from edge.protocol.link_probe import glance, probe
from edge.protocol.measurements import (
    Glance,
    LinkGlance,
    LinkQuestion,
    LinkTimes,
    MemoryRate,
    PeerProfile,
    Probe,
    Profile,
    Proof,
    Prove,
    ReadRate,
)
from edge.system.heap import release_freed_memory
from edge.transport import Link, Member

_DIAL_TIMEOUT_S = 2.0
"""Time limit for one address, in seconds: shorter than for a session."""


class ProfilingCalls:
    """The measurements of one coordinator on this peer."""

    def __init__(self, resources: PeerResources, user: Member | None, owner: object) -> None:
        """Memory is counted for `user`, turns for `owner`."""
        self._peer = resources
        self._user = user
        self._owner = owner
        self._name = f"{MEASURING}{uuid.uuid4().hex}"
        """The ledger name of a measurement's memory."""

    @property
    def calls(self) -> dict[type[Call[Any]], Callable[[Any], Awaitable[object]]]:
        return {
            MemoryRate: self._memory_rate,
            Profile: self._profile,
            Prove: self._prove,
            Probe: self._probe,
            Glance: self._glance,
        }

    async def _memory_rate(self, _call: MemoryRate) -> ReadRate:
        peer, threads = self._peer, self._peer.settings.threads
        async with peer.measurement.turn(self._owner):
            budget_bytes = sample_budget_bytes(peer.free_now_bytes(self._user))
            most_bytes = min(most_read_bytes(threads), budget_bytes)
            await peer.reserve(self._name, Use(buffer_bytes=most_bytes), self._user)
            try:
                rate = await run_blocking(lambda: memory_read_bytes_per_s(threads, most_bytes))
            finally:
                peer.release(self._name)
        return ReadRate(bytes_per_s=rate)

    async def _profile(self, call: Profile) -> PeerProfile:
        peer, stop = self._peer, StopFlag()
        async with peer.measurement.turn(self._owner):
            budget_bytes = sample_budget_bytes(
                min(
                    peer.ledger.model_free_bytes,
                    peer.free_now_bytes(self._user),
                    peer.backend().usable_memory_bytes(),
                )
            )
            await peer.reserve(self._name, Use(buffer_bytes=budget_bytes), self._user)
            busy = tuple(hosted.assignment.plan.model for hosted in peer.sessions.values())

            def work() -> PeerProfile:
                site = Site(
                    backend=peer.backend(),
                    folder=peer.settings.cache_root,
                    budget_bytes=budget_bytes,
                    disk_bytes_per_s=self._disk_rate(),
                    check=stop.check,
                )
                try:
                    return profile(site, call, busy=busy)
                finally:
                    release_freed_memory()  # malloc would keep it, uncounted in the budget

            try:
                found = await run_blocking(work, stop=stop.set)
            finally:
                peer.release(self._name)
        return found

    async def _prove(self, call: Prove) -> Proof:
        peer = self._peer
        async with peer.measurement.turn(self._owner):
            found = await run_blocking(lambda: peer.backend().prove(call.weight_format, call.seed))
        return Proof(numbers=b"".join(each.astype("<f4").tobytes() for each in found or ()))

    def _disk_rate(self) -> float | None:
        root = self._peer.settings.cache_root
        return disk_read_bytes_per_s(root, root / "shards")

    def made_up_weights(self, assignment: Assignment) -> AbstractContextManager[ShardWeights]:
        """Random weights for a shard, in a file. Raises CapacityError if they take too much memory
        or disk: a plan may have any number of layers on disk."""
        peer = self._peer
        facts = model_facts(
            assignment.model,
            assignment.weight_format,
            name=assignment.plan.model,
            embedding_itemsize=4,
        )
        workload = Workload(prompt_tokens=1, output_tokens=0)
        device = assignment.plan.stages[assignment.stage].shards[assignment.rank].device
        needed_bytes = max(
            memory_use(assignment.plan, facts, workload)[device].weight_bytes,
            written_bytes(assignment.layout, assignment.weight_format),
        )
        most_bytes = sample_budget_bytes(peer.free_now_bytes(self._user))
        if peer.backend().is_stand_in or needed_bytes > most_bytes:
            raise CapacityError(
                "this device lacks the memory for a rehearsal, or computes with a stand-in"
            )
        return written_weights(
            assignment.layout, assignment.weight_format, peer.settings.cache_root
        )

    async def _probe(self, call: Probe) -> LinkTimes:
        async with self._peer.probes.turn(self._owner):
            link = await self._link(call)
            return await probe(link, small_bytes=call.small_bytes, large_bytes=call.large_bytes)

    async def _glance(self, call: Glance) -> LinkGlance:
        async with self._peer.probes.turn(self._owner):
            return await glance(await self._link(call), small_bytes=call.small_bytes)

    async def _link(self, call: LinkQuestion) -> Link:
        hello = {"name": self._peer.settings.name, "probe": True}
        return await dial(
            call.place,
            hello,
            self._peer.credentials,
            self._peer.reached,
            timeout_s=_DIAL_TIMEOUT_S,
        )
