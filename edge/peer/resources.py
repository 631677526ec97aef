"""Resources of one daemon, shared by its connections: memory, caches, back end and open sessions.

The daemon makes them and hands them to each connection. Frames and sockets are not known here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import uuid
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import replace

from edge import offload
from edge.backends.interface import Backend, StageProgram
from edge.backends.registry import open_backend
from edge.concurrency.blocking import run_blocking, uninterrupted
from edge.engine.kv_copies import KvCopyQuota
from edge.errors import CapacityError, ProtocolError, RequestError
from edge.host.addresses import reachable
from edge.host.cache_paths import cache_remedy
from edge.host.free_memory import (
    format_size,
    machine_memory_bytes,
    memory_pool,
    usable_memory_bytes,
)
from edge.host.identity import arithmetic_identity, device_identity, host_id
from edge.membership.identity import fingerprint, is_peer_of
from edge.memory.baseline import (
    LARGE_FRAMES_BYTES,
    LOAD_RESERVE,
    PLAN_RESERVE,
    budget_bytes,
    device_baseline,
    process_baseline,
)
from edge.memory.disk_cache import OF_PEERS, kept_files, remove_kept
from edge.memory.kv_budget import KvRoom
from edge.memory.ledger import MEASURING, Baseline, Ledger, Use
from edge.memory.rebalance import fit
from edge.memory.shard_memory import rebalance_options
from edge.models.spec import TILED_ATTENTION
from edge.offload import DerivedCache, ShardCache
from edge.peer.access import UserLimits, check_may_use
from edge.peer.audit import Audit
from edge.peer.fair_lock import FairLock
from edge.peer.hosted_part import GRAPH_DTYPE, HostedPart
from edge.peer.hosted_shard import HostedShard
from edge.peer.leases import Leases
from edge.peer.parked_programs import ParkedKey, ParkedPrograms
from edge.peer.quota import OwnerSemaphore, Quota
from edge.peer.rate_limited_log import RateLimitedLog
from edge.peer.settings import PeerSettings
from edge.profiling.sample import SAMPLE_BYTES, sample_budget_bytes
from edge.protocol.assignment import Assignment
from edge.protocol.description import MAX_SESSIONS, HostedModel, PeerDescription
from edge.protocol.fields import one_line
from edge.protocol.kept_files import AllKept
from edge.transport import Credentials, Member
from edge.version import __version__

MAX_SHARDS = 16
"""Most shards that one device may upload, or run, at once."""

MAX_LINKS = 256
"""Most links of one device's plans: each is a descriptor and up to a MiB."""

MAX_MANIFEST_ENTRIES = 1 << 18
"""Most manifest entries of all uploads: 400 bytes of memory each. A TiB of weights has as many
pieces."""

SMALL_FRAMES_BYTES = 4 << 20
"""Memory for small frames of all coordinators, being read or waiting for an answer."""

MAX_LARGE_ANSWERS = 8

MAX_PROBES_ANSWERED = 2
"""Most link probes from other devices answered at once."""

_log = logging.getLogger(__name__)

_PACE_HOLDS_S = 60.0
"""Seconds for which the last finding about a shard's slow steps is reported."""

MEASURED_TIMEOUT_S = 5.0
"""Time limit for waiting for memory that an ending measurement frees, in seconds."""


class PeerResources:
    """The resources of one daemon. `open` before the first use, `aclose` at the end."""

    def __init__(
        self,
        settings: PeerSettings,
        credentials: Credentials | None,
        id: str | None = None,
        epoch: int | None = None,
    ) -> None:
        """credentials: shown to other members. None: any device is served, and `id` proves nothing.
        epoch: of this start, greater than the earlier ones; None: the time in µs.

        Raises RequestError if the cache or the folder for keys and values cannot be used, or if
        keys and values get more memory than the peer.
        """
        kv_bytes = settings.kv_memory_bytes or 0
        if settings.memory_bytes is not None and kv_bytes > settings.memory_bytes:
            raise RequestError(
                f"--kv-memory {format_size(kv_bytes)} is more than --memory "
                f"{format_size(settings.memory_bytes)}, which it is a part of",
                remedy="give less --kv-memory, or more --memory",
            )
        self.settings = settings
        self.credentials = credentials
        self.id = id or uuid.uuid4().hex
        self.epoch = time.time_ns() // 1000 if epoch is None else epoch
        self.listens_at: tuple[str, ...] = ()
        """Addresses of the listener, possibly 0.0.0.0."""
        self.sessions: dict[str, HostedShard] = {}
        """Sessions by the keys of their assignments."""
        self.parts: dict[str, HostedPart] = {}
        """Open parts of graphs by their `use_name`."""
        self.leaving = asyncio.Event()
        """Set when the user stops the daemon: no new session begins."""
        self.measurement = FairLock()
        """Held during a measurement, so that two do not measure each other."""
        self.loading = FairLock()
        """Held while a shard loads, which needs extra memory for a moment."""
        self.reading = FairLock()
        """Held while a large frame is decoded, for the same reason."""
        self.probes = FairLock()
        """Held while a link is probed, which needs a thread."""
        self.probes_answered = FairLock(MAX_PROBES_ANSWERED)
        self.reached: dict[str, str] = {}
        """The last address that answered, by device id."""
        self.leases = Leases()
        """Leases of the open sessions."""
        self.frames = OwnerSemaphore(of_one=LARGE_FRAMES_BYTES * 4 // 5, of_all=LARGE_FRAMES_BYTES)
        """Memory of large frames, from the first byte until the answer, by device."""
        self.small_frames = OwnerSemaphore(
            of_one=SMALL_FRAMES_BYTES // 4, of_all=SMALL_FRAMES_BYTES
        )
        """The same for small frames, so that a step does not wait for weights of others."""
        self.large_answers = OwnerSemaphore(of_one=MAX_LARGE_ANSWERS // 4, of_all=MAX_LARGE_ANSWERS)
        """Number of large answers being made and sent."""
        self.copy_quota = KvCopyQuota()
        """Memory for KV copies on their way to coordinators."""
        self.shards = Quota("shards", of_one=MAX_SHARDS, of_all=MAX_SESSIONS)
        self.links = Quota("links between shards", of_one=MAX_LINKS, of_all=2 * MAX_LINKS)
        self.offers = Quota("shards on offer", of_one=MAX_SHARDS, of_all=MAX_SESSIONS)
        self.manifest_entries = Quota(
            "tensors and pieces on offer",
            of_one=MAX_MANIFEST_ENTRIES * 3 // 4,
            of_all=MAX_MANIFEST_ENTRIES,
        )
        self.failures = RateLimitedLog(_log)
        self.audit = Audit(settings.audit)
        self._user_limits = settings.each_user or UserLimits()
        self._users: dict[str, Member] = {}
        """Devices by the ledger names of their uses."""
        try:
            self.cache = ShardCache(settings.cache_root / "shards", settings.cache_limit_bytes)
            self.packed = DerivedCache(
                settings.cache_root / "packed",
                settings.cache_limit_bytes,
                owner_limit_bytes=self._user_limits.cache_bytes,
            )
        except offload.StoreError as error:
            raise RequestError(str(error), remedy=cache_remedy(str(error))) from error
        self.kv_room = KvRoom(
            memory_bytes=settings.kv_memory_bytes,
            disk=settings.kv_disk,
            user_prefix_bytes=self._user_limits.cache_bytes,
        )
        self._ledger: Ledger | None = None
        self._is_given = settings.memory_bytes is not None
        """Whether a user gave the budget. It is a promise then, however little is free."""
        self._loading_bytes = 0
        """Extra memory of the shard that is being loaded."""
        self._host_bytes: int | None = None
        """Host memory of a device with memory of its own. None: the device computes in host
        memory."""
        self._parked = ParkedPrograms(self.release)
        self._released = asyncio.Event()
        self._promising = FairLock()
        self._backend: Backend | None = None
        self._backend_mutex = threading.Lock()

    async def open(self) -> None:
        """Open the back end and measure the process's baseline.

        Raises RequestError if the budget is below the minimum.
        """
        backend = await run_blocking(self.backend)
        baseline = device_baseline() if backend.has_own_memory else process_baseline()
        self._host_bytes = self.settings.host_memory_bytes
        if self._host_bytes is None and backend.has_own_memory:
            self._host_bytes = self._usable_bytes() // 2
        self._change(
            Ledger(
                budget_bytes=self._budget_bytes(self.settings.memory_bytes, baseline),
                baseline=baseline,
                model_limit_bytes=self.settings.model_memory_bytes,
            )
        )

    async def aclose(self) -> None:
        """Close it when every session has ended. May be called again."""
        await self._parked.clear()
        self.kv_room.close()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses at which others reach this peer; never 0.0.0.0."""
        return reachable(self.listens_at, interfaces=self.settings.interfaces or None)

    @property
    def ledger(self) -> Ledger:
        """The memory budget and its uses. Available after `open`."""
        assert self._ledger is not None
        return self._ledger

    @property
    def host_free_bytes(self) -> int | None:
        """Host memory that no session uses. None: the device computes in host memory.

        Where no user gave it, no more than is free now.
        """
        if self._host_bytes is None:
            return None
        unused_bytes = self._host_bytes - sum(
            each.host_bytes + each.kv.host_bytes for each in self.sessions.values()
        )
        if self.settings.host_memory_bytes is not None:
            return unused_bytes
        usable_bytes = self._usable_bytes(PLAN_RESERVE)
        return min(unused_bytes, self.kv_room.beginnings.used_bytes + usable_bytes)

    @property
    def _shares_memory(self) -> bool:
        """Whether its memory is what other programs leave, and not given by a user."""
        return not self._is_given and self._host_bytes is None

    @property
    def _spare_bytes(self) -> int:
        """Memory that stays free: with less, the device would rest because of its own models."""
        return self.settings.spare_memory_bytes or 0

    def _usable_bytes(self, reserve: float = 1.0) -> int:
        return usable_memory_bytes(reserve=reserve, spare_bytes=self._spare_bytes)

    def _as_free_now(self, ledger: Ledger, reserve: float) -> Ledger:
        """The ledger with less of its budget where other programs have taken memory since."""
        if not self._shares_memory:
            return ledger
        free_bytes = budget_bytes(
            None, ledger.baseline, reserve=reserve, spare_bytes=self._spare_bytes
        )
        return ledger.within(free_bytes)

    def _change(self, ledger: Ledger, user: Member | None = None) -> None:
        """user: the device whose uses have changed."""
        self._ledger = ledger
        self.fit_beginnings(user)

    def fit_beginnings(self, user: Member | None = None) -> None:
        """Shrink the prefix cache to memory that is unused, and `user`'s part of it to what is left
        of that user's limit."""
        host_bytes, beginnings = self.host_free_bytes, self.kv_room.beginnings
        unused_bytes = self.ledger.model_free_bytes if host_bytes is None else host_bytes
        unused_bytes = max(0, unused_bytes - self._loading_bytes)
        # Other programs may have taken memory since this daemon began.
        unused_bytes = min(unused_bytes, beginnings.used_bytes + self._usable_bytes())
        self.kv_room.fit(0 if self.leaving.is_set() else unused_bytes)
        limit_bytes = self._user_limits.memory_bytes
        if user is not None and limit_bytes is not None:
            held_bytes = sum(each.total for each in self._held_by(user, self.ledger).values())
            beginnings.limit_owner(user.id, max(0, limit_bytes - held_bytes))

    @contextlib.asynccontextmanager
    async def room_to_load(self, num_bytes: int) -> AsyncIterator[None]:
        """Reserve the extra memory that loading a shard takes."""
        self._loading_bytes = num_bytes
        self.fit_beginnings()
        try:
            yield
        finally:
            self._loading_bytes = 0
            self.fit_beginnings()

    def check_may_use(self, member: Member | None) -> None:
        """Raises RequestError for a device that may not use this peer."""
        check_may_use(member, self.id, self.settings.allow or ())

    @property
    def user_cache_bytes(self) -> int | None:
        """Most disk for weights sent by one device. None: no limit."""
        return self._user_limits.cache_bytes

    def kept_files(self, member: Member | None, remove: Collection[str]) -> AllKept:
        """Remove `remove`, then list the cached weights.

        This device sees and removes everything. Another device sees and removes what it sent.
        """
        root = self.settings.cache_root
        user = None if member is None or is_peer_of(self.id, member.id) else member.id
        remove_kept(root, remove, kinds=OF_PEERS, user=user)
        return AllKept(files=kept_files(root, kinds=OF_PEERS, user=user))

    async def reserve(self, name: str, use: Use, user: Member | None = None) -> None:
        """Enter `use` in the ledger before allocating it. Raises CapacityError if it does not fit.

        Waits for an ending measurement and for a change of the budget, whose memory is about to be
        freed. Parked programs are evicted.
        """
        async with self._promising.turn(None if user is None else user.id):
            pass
        try:
            self._take(name, use, user)
            return
        except CapacityError:
            await uninterrupted(self._parked.clear())
        deadline_s = asyncio.get_running_loop().time() + MEASURED_TIMEOUT_S
        while True:
            try:
                self._take(name, use, user)
                return
            except CapacityError:
                if not any(each.startswith(MEASURING) for each in self.ledger.uses):
                    raise
                self._released.clear()
                try:
                    async with asyncio.timeout_at(deadline_s):
                        await self._released.wait()
                except TimeoutError:
                    self._take(name, use, user)
                    return

    def _take(self, name: str, use: Use, user: Member | None) -> None:
        if name in self.ledger.uses:
            raise ProtocolError("the ledger has a use with this name already")
        try:
            ledger = self.ledger.with_use(name, use)
        except CapacityError as error:
            held = ", ".join(model.held for model in self._models())
            raise CapacityError(f"{error}; held now: {held}" if held else str(error)) from None
        now = self._as_free_now(self.ledger, LOAD_RESERVE)
        if use.total > now.free_bytes:
            raise CapacityError(
                f"this shard needs {format_size(use.total)}, and {format_size(now.free_bytes)} are "
                f"free on this machine now: other programs have taken memory since this peer "
                f"started",
                remedy="load the model again, by a plan for what is free now, or end other "
                "programs there",
            )
        if user is not None:
            self._check_limits(name, use, user)
            self._users[name] = user
        self._change(ledger, user)

    def _check_limits(self, name: str, use: Use, user: Member) -> None:
        """Raises CapacityError above the limits of one device."""
        limits, held = self._user_limits, self._held_by(user, self.ledger)
        shards = sum(not each.startswith(MEASURING) for each in held)
        is_shard = not name.startswith(MEASURING)
        if is_shard and limits.sessions is not None and shards >= limits.sessions:
            raise CapacityError(
                f"device {user.name} has {shards} shards loaded on this peer, the limit of each "
                "device (--each-user)",
                remedy="close a model first",
            )
        if limits.memory_bytes is not None:
            free_bytes = limits.memory_bytes - sum(each.total for each in held.values())
            if use.total > free_bytes:
                raise CapacityError(
                    f"{'this shard' if is_shard else 'this measurement'} needs "
                    f"{format_size(use.total)}, and device {user.name} may have "
                    f"{format_size(max(0, free_bytes))} more of this peer (--each-user)",
                    remedy="close a model first, or divide this one among more peers",
                )

    def _held_by(self, user: Member, ledger: Ledger) -> dict[str, Use]:
        uses = ledger.uses
        mine = {name for name, member in self._users.items() if member.id == user.id}
        return {name: use for name, use in uses.items() if name in mine}

    def free_bytes(self, user: Member | None, ledger: Ledger | None = None) -> int:
        """Bytes that `user` may still take, of this peer's ledger or the one given."""
        ledger = ledger or self.ledger
        if user is None or self._user_limits.memory_bytes is None:
            return ledger.free_bytes
        held_bytes = sum(each.total for each in self._held_by(user, ledger).values())
        return max(0, min(ledger.free_bytes, self._user_limits.memory_bytes - held_bytes))

    def free_now_bytes(self, user: Member | None, ledger: Ledger | None = None) -> int:
        """The same, as far as they are free now."""
        return self.free_bytes(user, self._as_free_now(ledger or self.ledger, PLAN_RESERVE))

    def park(self, owner: str | None, assignment: Assignment, program: StageProgram) -> str | None:
        """Park the program of an ended session, with the session's memory. Returns its name for
        `let_go`; None if it must not be parked."""
        key = ParkedKey.of(owner, assignment)
        use = self.ledger.uses.get(assignment.key)
        if key is None or use is None or self.leaving.is_set():
            return None
        if self._promising.locked():
            return None  # the ledger shows the future use, not the present one
        user = self._users.get(assignment.key)
        use = replace(use, kv_bytes=0)  # its KV cache is dropped
        name = self._parked.park(key, program, use)
        self.release(assignment.key)
        if user is not None:
            self._users[name] = user
        self._change(self.ledger.with_use(name, use), user)
        return name

    def let_go(self, parked: str) -> None:
        """Start the time limit of a parked program whose coordinator has disconnected."""
        self._parked.let_go(parked)

    def parked(self, owner: str | None, assignment: Assignment) -> StageProgram | None:
        """A parked program of an equal assignment, if any. The caller reserves its memory."""
        return self._parked.take(ParkedKey.of(owner, assignment))

    async def promise(self, asked_bytes: int, user: Member | None = None) -> None:
        """Change the memory budget. Loaded models continue with the same tokens.

        Excess memory is freed before this returns. Raises RequestError, with the minimum, if loaded
        models cannot fit or the peer was started with less. Disk errors of layers that move there
        are raised as well. Nothing has changed on an error.
        """
        given_bytes = self.settings.memory_bytes
        most_bytes = machine_memory_bytes() if given_bytes is None else given_bytes
        if asked_bytes > most_bytes:
            whose = "this machine has" if given_bytes is None else "it was started with"
            raise RequestError(
                f"a budget of {format_size(asked_bytes)} is more than the "
                f"{format_size(most_bytes)} that {whose}",
                remedy="ask for less, or start the peer there with more --memory",
            )
        await uninterrupted(self._promise(asked_bytes, None if user is None else user.id))

    async def _promise(self, asked_bytes: int, owner: str | None) -> None:
        async with self._promising.turn(owner), self.loading.turn(owner):
            await self._parked.clear()
            sessions = dict(self.sessions)
            has_host = self._host_bytes is not None
            # In a thread: with many layers it takes seconds.
            known = await run_blocking(
                lambda: {
                    name: rebalance_options(
                        hosted.assignment,
                        hosted.manifest,
                        host_bytes=hosted.host_bytes if has_host else None,
                        has_tiles=self.has_tiles(),
                    )
                    for name, hosted in sessions.items()
                }
            )
            # No session has opened meanwhile (loading holds the lock); some may have ended.
            shards = {name: each for name, each in known.items() if name in self.sessions}
            before = self.ledger
            wanted_bytes = self._budget_bytes(asked_bytes, before.baseline)
            fitted, counts = fit(before, wanted_bytes, shards)
            self._change(fitted)
            failures = await _stream({sessions[name]: count for name, count in counts.items()})
            if not failures:
                self._is_given = True
                for name, count in counts.items():
                    sessions[name].streamed = count
                return
            taken = {name: before.uses[name] for name in counts if name in self.ledger.uses}
            self._change(
                replace(
                    self.ledger,
                    budget_bytes=before.budget_bytes,
                    uses={**self.ledger.uses, **taken},
                )
            )
            await _stream({hosted: hosted.streamed for hosted in sessions.values()})
            raise failures[0]

    def _budget_bytes(self, asked_bytes: int | None, baseline: Baseline) -> int:
        backend = self.backend()
        if not backend.has_own_memory:
            return budget_bytes(asked_bytes, baseline, spare_bytes=self._spare_bytes)
        usable_bytes = backend.usable_memory_bytes()
        return usable_bytes if asked_bytes is None else min(asked_bytes, usable_bytes)

    def release(self, name: str) -> None:
        """Remove a use from the ledger. Unknown names are ignored."""
        user = self._users.pop(name, None)
        self._change(self.ledger.without(name), user)
        self._released.set()

    def backend(self) -> Backend:
        """The back end, opened at the first call. For any thread."""
        with self._backend_mutex:
            if self._backend is None:
                self._backend = open_backend(self.settings.backend, threads=self.settings.threads)
            return self._backend

    def has_tiles(self) -> bool:
        """Whether attention holds no scores over the whole context. For any thread: it may open
        the back end."""
        return TILED_ATTENTION not in self.backend().lacks

    @property
    def _is_busy(self) -> bool:
        is_loading = self.measurement.locked() or self.loading.locked()
        return is_loading or any(hosted.shard.is_working for hosted in self.sessions.values())

    def describe(self, user: Member | None = None) -> PeerDescription:
        """Description of this peer for `user`: identity, free resources, sessions."""
        settings = self.settings
        ledger = self._parked.without(self.ledger)
        free_bytes = 0 if self.leaving.is_set() else self.free_bytes(user, ledger)
        free_now_bytes = min(free_bytes, self.free_now_bytes(user, ledger))
        sample_bytes = min(2 * SAMPLE_BYTES, sample_budget_bytes(ledger.room_bytes))
        return PeerDescription(
            id=self.id,
            epoch=self.epoch,
            name=settings.name,
            software=__version__,
            addresses=self.addresses,
            backend=settings.backend,
            processor=settings.processor,
            threads=settings.threads,
            memory_bytes=ledger.budget_bytes,
            floor_bytes=ledger.baseline.total,
            free_bytes=free_bytes,
            free_now_bytes=free_now_bytes,
            model_free_bytes=min(free_bytes, ledger.model_free_bytes),
            host_memory_bytes=self.host_free_bytes,
            kv_memory_bytes=self.kv_room.free_memory_bytes,
            kv_disk_bytes=self.kv_room.free_disk_bytes,
            kv_prefix_bytes=self.kv_room.prefixes.used_bytes if self.kv_room.prefixes else 0,
            kv_beginnings_bytes=self.kv_room.beginnings.used_bytes,
            host=host_id(),
            memory_pool=memory_pool() if self._shares_memory else None,
            pool_free_bytes=self._usable_bytes(PLAN_RESERVE),
            identity=device_identity(
                backend=settings.backend,
                accelerator=settings.processor,
                threads=settings.threads,
                sample_bytes=sample_bytes,
            ),
            arithmetic=arithmetic_identity(
                backend=settings.backend, accelerator=settings.processor
            ),
            is_busy=self._is_busy,
            is_leaving=self.leaving.is_set(),
            models=self._models(),
            lacks=tuple(sorted(self.backend().lacks)),
            clock_s=time.time(),
        )

    def _models(self) -> tuple[HostedModel, ...]:
        uses = self.ledger.uses
        return tuple(
            HostedModel(
                name=hosted.assignment.plan.model,
                dtype=hosted.assignment.weight_format.name,
                stage=hosted.assignment.stage,
                rank=hosted.assignment.rank,
                sums=hosted.shard.links.sums,
                bytes=uses[name].model_bytes,
                buffer_bytes=uses[name].buffer_bytes,
                streamed_bytes=uses[name].streamed_bytes,
                host_bytes=uses[name].host_bytes,
                kv_bytes=hosted.kv.memory_bytes,
                kv_host_bytes=hosted.kv.host.used_bytes if hosted.kv.host else 0,
                kv_disk_bytes=hosted.kv.disk.used_bytes if hosted.kv.disk else 0,
                user=_in_words(self._users.get(name)),
                slower=hosted.shard.slower(within_s=_PACE_HOLDS_S),
            )
            for name, hosted in self.sessions.items()
        ) + tuple(
            HostedModel(
                name=part.call.model,
                dtype=GRAPH_DTYPE,
                stage=part.call.stage,
                rank=0,
                sums="none",
                bytes=uses[name].model_bytes,
                buffer_bytes=uses[name].buffer_bytes,
                streamed_bytes=0,
                host_bytes=0,
                kv_bytes=0,
                kv_host_bytes=0,
                kv_disk_bytes=0,
                user=_in_words(self._users.get(name)),
            )
            for name, part in self.parts.items()
            if name in uses
        )


def _in_words(user: Member | None) -> str:
    return "unknown" if user is None else f"{one_line(user.name)} ({fingerprint(user.id)})"


async def _stream(counts: Mapping[HostedShard, int]) -> list[BaseException]:
    """Have each shard stream its count of layers from disk. Returns the errors once all have
    answered."""
    outcomes = await asyncio.gather(
        *(asyncio.wrap_future(hosted.shard.stream(count)) for hosted, count in counts.items()),
        return_exceptions=True,
    )
    return [each for each in outcomes if each is not None]
