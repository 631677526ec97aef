"""The pace of a running model's devices: which of them something else keeps busy."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence

from edge.errors import EdgeError
from edge.partition import DeviceSpec
from edge.planning.slowdowns import HEALTHY_BY, HEALTHY_S, DeviceSteps, Slowdowns
from edge.planning.standing_by import seats
from edge.protocol.measurements import Profile
from edge.protocol.peer_info import PeerInfo
from edge.protocol.step_times import TokenSteps
from edge.protocol.topology import Seat
from edge.runs.model import RunningModel
from edge.runs.recovery.reloading import Reloading

MOST_BETWEEN_LOOKS_S = 300.0
"""The longest time between two looks at a busy device without a part."""

_log = logging.getLogger(__name__)


class DevicePace:
    """Watches the pace of one model's devices. For one event loop; call `look` every few seconds.

    Devices of the plan are asked how long their steps took while answers are under way. A slowed
    device without a part computes a few layers from time to time, which takes it a second or two.
    """

    def __init__(self, reloading: Reloading, model: RunningModel) -> None:
        self._reloading, self._model = reloading, model
        self._slowdowns = Slowdowns()
        self._before: Mapping[Seat, TokenSteps] = {}
        """The counters at the last look."""
        self._before_s = 0.0
        self._loads = -1
        """The number of the model's reloads then."""
        self._looks: dict[str, tuple[float, float]] = {}
        """For slowed devices without a part: the time of the next look, and from then to the one
        after it."""

    @property
    def factors(self) -> Mapping[str, float]:
        """How many times as long slowed devices take, by id."""
        return self._slowdowns.factors

    @property
    def changed(self) -> frozenset[str]:
        """Devices (by id) whose pace is not that of the facts of the plan."""
        factors = self.factors
        return frozenset(
            id
            for id, device in self._devices.items()
            if device.rates is not None and device.slowed != factors.get(id, 1.0)
        )

    async def look(self, spare: Sequence[PeerInfo]) -> None:
        """Ask the devices now. spare: present devices without a part."""
        if self._model.answers and not self._model.is_recovering:
            with contextlib.suppress(EdgeError):  # a device was just lost
                await self._count()
        else:
            self._pause()
        out = self.factors.keys() - set(self._model.plan.devices)
        left_out = [peer for peer in spare if peer.id in out]
        self._looks = {peer.id: self._looks[peer.id] for peer in left_out if peer.id in self._looks}
        for peer in left_out:
            await self._look_at(peer)

    def _pause(self) -> None:
        self._slowdowns.pause()
        self._before, self._loads = {}, -1

    async def _count(self) -> None:
        loads = len(self._model.recoveries)
        now = await self._model.count_steps()
        now_s = asyncio.get_running_loop().time()
        if self._model.is_recovering or loads != len(self._model.recoveries):
            self._pause()
            return
        if loads == self._loads:
            since = {seat: now[seat].since(self._before[seat]) for seat in now}
            self._slowdowns.note(self._parts(since), since_s=self._before_s, now_s=now_s)
        else:
            self._slowdowns.pause()
        self._before, self._before_s, self._loads = now, now_s, loads

    def _parts(self, since: Mapping[Seat, TokenSteps]) -> dict[str, DeviceSteps]:
        """The devices' parts of these steps. A device may have several shards."""
        steps = min(each.steps for each in since.values())
        is_whole = all(
            each.rows >= each.steps > 0 and each.tokens > 0 and each.compute_s >= 0
            for each in since.values()
        )
        if not is_whole:  # nothing was computed, or a device tells counters that cannot be
            return {}
        first = since[0, 0]
        predicted = self._reloading.forecast.of(
            prompt_tokens=max(1, round(first.tokens / first.rows)),
            new_tokens=1,
            concurrency=round(first.rows / first.steps),
        )
        if predicted is None:
            return {}
        devices = self._devices
        took_s = dict.fromkeys(devices, 0.0)
        for id, seat in seats(self._model.plan):
            took_s[id] += steps * since[seat].compute_s / since[seat].steps
        return {
            id: DeviceSteps(
                steps=steps,
                took_s=took_s[id],
                expected_s=steps * seconds / devices[id].slowed,
            )
            for id, seconds in predicted.device_s
        }

    async def _look_at(self, peer: PeerInfo) -> None:
        """Have a device measured that was left out, if it is time and disturbs no answer."""
        now_s = asyncio.get_running_loop().time()
        at_s, gap_s = self._looks.setdefault(peer.id, (now_s + HEALTHY_S, HEALTHY_S))
        device = self._devices.get(peer.id)
        hosts = {
            self._reloading.peers[id].host
            for id in self._model.plan.devices
            if id in self._reloading.peers
        }
        if device is None or now_s < at_s or (self._model.answers and peer.host in hosts):
            return
        try:
            factor = await self._measured(peer, device)
        except EdgeError as error:
            _log.info("%s was not measured: %s", peer.name, error)
            factor = None
        if factor is not None:
            self._slowdowns.looked_at(peer.id, factor, now_s=now_s)
        is_healthy = factor is not None and factor <= HEALTHY_BY
        gap_s = HEALTHY_S if is_healthy else min(MOST_BETWEEN_LOOKS_S, 2 * gap_s)
        self._looks[peer.id] = now_s + gap_s, gap_s

    async def _measured(self, peer: PeerInfo, device: DeviceSpec) -> float | None:
        """How many times as long it takes as when it was healthy."""
        if device.rates is None:
            return None
        async with self._reloading.opened() as checkpoint:
            weight_format = self._reloading.options.weight_format(checkpoint)
            order = Profile(
                model=weight_format.graded(checkpoint.spec),
                weight_format=weight_format,
                is_brief=True,
            )
        client = await peer.connect()
        try:
            found = await client.call(order)
        finally:
            await client.aclose()
        # A look measures a run of whole layers, with its fixed time.
        took_s = found.sample_bytes * found.rates.seconds_per_byte[0] + found.rates.run_s
        rates = device.rates.slowed_by(1 / device.slowed)
        return took_s / (found.sample_bytes * rates.seconds_per_byte[0] + rates.run_s)

    @property
    def _devices(self) -> dict[str, DeviceSpec]:
        return {each.id: each for each in self._reloading.forecast.proposal.cluster.devices}
