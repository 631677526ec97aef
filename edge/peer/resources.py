"""What one daemon has to share out: memory, caches, its back end, and who has what open.

Made by the daemon, handed to each connection. Knows no frames and no sockets.
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
from edge.engine.kv_copies import CopyRooms
from edge.errors import CapacityError, ProtocolError, RequestError
from edge.host.addresses import reachable
from edge.host.free_memory import format_size, machine_memory_bytes, usable_memory_bytes
from edge.host.identity import device_identity, host_id
from edge.membership.identity import fingerprint, is_peer_of
from edge.memory.baseline import LARGE_FRAMES_BYTES, budget_bytes, device_baseline, process_baseline
from edge.memory.disk_cache import OF_PEERS, kept_files, remove_kept
from edge.memory.kv_budget import KvRoom
from edge.memory.ledger import MEASURING, Baseline, Ledger, Use
from edge.memory.rebalance import fit
from edge.memory.shard_memory import rebalance_options
from edge.offload import DerivedCache, ShardCache
from edge.peer.access import UserLimits, check_may_use
from edge.peer.audit import Audit
from edge.peer.fair_lock import FairLock
from edge.peer.hosted_shard import HostedShard
from edge.peer.leases import Leases
from edge.peer.parked_programs import ParkedKey, ParkedPrograms
from edge.peer.quota import OwnerSemaphore, Quota
from edge.peer.rate_limited_log import RateLimitedLog
from edge.peer.settings import PeerSettings
from edge.profiling.sample import SAMPLE_BYTES, sample_budget_bytes
from edge.protocol.assignment import Assignment
from edge.protocol.description import MAX_SESSIONS, HostedModel, PeerDescription
from edge.protocol.fields import printable
from edge.protocol.kept_files import AllKept
from edge.transport import Credentials, Member
from edge.version import __version__

MAX_SHARDS = 16
"""That one device may offer to a peer, or run there."""

MAX_LINKS = 256
"""Links of one device's plans with the other shards: each is a descriptor, and up to a MiB."""

MAX_MANIFEST_ENTRIES = 1 << 18
"""Entries of all offers together: 400 bytes of memory each, and a TiB of weights has as many
pieces."""

SMALL_FRAMES_BYTES = 4 << 20
"""Bytes of small frames that are read or wait to be answered, of all coordinators together."""

MAX_LARGE_ANSWERS = 8

MAX_PROBES_ANSWERED = 2
"""At once, of links that other devices probe."""

_log = logging.getLogger(__name__)

_PACE_HOLDS_S = 60.0
"""How long what was found of a shard's steps is told, when there are no later ones."""

MEASURED_TIMEOUT_S = 5.0
"""How long memory may be waited for that a measurement is just giving back."""


class PeerResources:
    """One daemon's. `open` before its first use, `close` at the end."""

    def __init__(
        self,
        settings: PeerSettings,
        credentials: Credentials | None,
        id: str | None = None,
        epoch: int | None = None,
    ) -> None:
        """`credentials` are shown to other members; without them it talks to anybody, and `id` is
        as good as any other. epoch: of this start, greater than those before; None: the time.

        Raises RequestError when the cache, or the folder for keys and values, cannot be used, or
        these may take more memory than there is."""
        kv_bytes = settings.kv_memory_bytes or 0
        if settings.memory_bytes is not None and kv_bytes > settings.memory_bytes:
            raise RequestError(
                f"--kv-memory {format_size(kv_bytes)} is a part of the memory, which is "
                f"{format_size(settings.memory_bytes)}",
                remedy="give less, or more --memory",
            )
        self.settings = settings
        self.credentials = credentials
        self.id = id or uuid.uuid4().hex
        self.epoch = time.time_ns() // 1000 if epoch is None else epoch
        self.listens_at: tuple[str, ...] = ()
        """Addresses, 0.0.0.0 among them."""
        self.sessions: dict[str, HostedShard] = {}
        """By the keys of their assignments."""
        self.leaving = asyncio.Event()
        """Set once whoever runs this daemon has stopped it: no session begins any more."""
        self.measurement = FairLock()
        """While the device is measured: two at once would measure each other."""
        self.loading = FairLock()
        """While a shard is loaded, which takes more for moments."""
        self.reading = FairLock()
        """While a large frame is read, likewise."""
        self.probes = FairLock()
        """While a link is made to be probed: each holds a thread."""
        self.probes_answered = FairLock(MAX_PROBES_ANSWERED)
        self.reached: dict[str, str] = {}
        """Where other members answered, by their ids."""
        self.leases = Leases()
        """Whose sessions are open, and who was replaced."""
        self.frames = OwnerSemaphore(of_one=LARGE_FRAMES_BYTES * 4 // 5, of_all=LARGE_FRAMES_BYTES)
        """For large ones, from their first byte until they are answered; by device."""
        self.small_frames = OwnerSemaphore(
            of_one=SMALL_FRAMES_BYTES // 4, of_all=SMALL_FRAMES_BYTES
        )
        """Likewise for small ones: a step does not wait for weights of others."""
        self.large_answers = OwnerSemaphore(of_one=MAX_LARGE_ANSWERS // 4, of_all=MAX_LARGE_ANSWERS)
        """How many are made and sent at once."""
        self.copy_room = CopyRooms()
        """For copies of keys and values on their way to coordinators."""
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
        """Devices, by what they have reserved."""
        try:
            self.cache = ShardCache(settings.cache_root / "shards", settings.cache_limit_bytes)
            self.packed = DerivedCache(
                settings.cache_root / "packed",
                settings.cache_limit_bytes,
                owner_limit_bytes=self._user_limits.cache_bytes,
            )
        except offload.StoreError as error:
            raise RequestError(str(error)) from error
        self.kv_room = KvRoom(
            memory_bytes=settings.kv_memory_bytes,
            disk=settings.kv_disk,
            user_prefix_bytes=self._user_limits.cache_bytes,
        )
        self._ledger: Ledger | None = None
        self._loading_bytes = 0
        """What a shard takes over its own while it is loaded."""
        self._host_bytes: int | None = None
        """For what the device has no room for, in another memory; None: there is none."""
        self._parked = ParkedPrograms(self.release)
        self._released = asyncio.Event()
        self._promising = FairLock()
        self._backend: Backend | None = None
        self._backend_mutex = threading.Lock()

    async def open(self) -> None:
        """Open the back end and see what the process takes.

        Raises RequestError for a budget below the minimum.
        """
        backend = await run_blocking(self.backend)
        baseline = device_baseline() if backend.has_own_memory else process_baseline()
        self._host_bytes = self.settings.host_memory_bytes
        if self._host_bytes is None and backend.has_own_memory:
            self._host_bytes = usable_memory_bytes() // 2
        self._change(
            Ledger(
                budget_bytes=self._budget_bytes(self.settings.memory_bytes, baseline),
                baseline=baseline,
                model_limit_bytes=self.settings.model_memory_bytes,
            )
        )

    async def aclose(self) -> None:
        """Once every session has ended. May be called again."""
        await self._parked.clear()
        self.kv_room.close()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where others reach this peer: addresses of interfaces, never 0.0.0.0."""
        return reachable(self.listens_at, interfaces=self.settings.interfaces or None)

    @property
    def ledger(self) -> Ledger:
        """What is promised and what is taken, once opened."""
        assert self._ledger is not None
        return self._ledger

    @property
    def host_free_bytes(self) -> int | None:
        """What no session has of the host's memory; None: the device computes in it."""
        if self._host_bytes is None:
            return None
        return self._host_bytes - sum(
            each.host_bytes + each.kv.host_bytes for each in self.sessions.values()
        )

    def _change(self, ledger: Ledger, user: Member | None = None) -> None:
        """user: whose uses are others than before."""
        self._ledger = ledger
        self.fit_beginnings(user)

    def fit_beginnings(self, user: Member | None = None) -> None:
        """What is kept of beginnings of prompts has no more memory than nobody needs, nor with what
        this user has loaded more than one may have."""
        host_bytes, beginnings = self.host_free_bytes, self.kv_room.beginnings
        unused_bytes = self.ledger.model_free_bytes if host_bytes is None else host_bytes
        unused_bytes = max(0, unused_bytes - self._loading_bytes)
        # Other programs, and daemons, may have taken what was free when this one began.
        unused_bytes = min(unused_bytes, beginnings.used_bytes + usable_memory_bytes())
        self.kv_room.fit(0 if self.leaving.is_set() else unused_bytes)
        limit_bytes = self._user_limits.memory_bytes
        if user is not None and limit_bytes is not None:
            held_bytes = sum(each.total for each in self._held_by(user, self.ledger).values())
            beginnings.limit_owner(user.id, max(0, limit_bytes - held_bytes))

    @contextlib.asynccontextmanager
    async def room_to_load(self, num_bytes: int) -> AsyncIterator[None]:
        """While a shard is loaded, which takes so much more than it is given."""
        self._loading_bytes = num_bytes
        self.fit_beginnings()
        try:
            yield
        finally:
            self._loading_bytes = 0
            self.fit_beginnings()

    def check_may_use(self, member: Member | None) -> None:
        """Raises RequestError for a device that may not have this one compute."""
        check_may_use(member, self.id, self.settings.allow or ())

    @property
    def user_cache_bytes(self) -> int | None:
        """The most that the weights sent by one device may take on disk."""
        return self._user_limits.cache_bytes

    def kept_files(self, member: Member | None, remove: Collection[str]) -> AllKept:
        """What is kept of the weights that were sent here, once these are removed.

        This device itself sees and removes everything; another one learns the models of what it
        sent, or nobody in particular, and removes what it sent.
        """
        root = self.settings.cache_root
        user = None if member is None or is_peer_of(self.id, member.id) else member.id
        remove_kept(root, remove, kinds=OF_PEERS, user=user)
        return AllKept(files=kept_files(root, kinds=OF_PEERS, user=user))

    async def reserve(self, name: str, use: Use, user: Member | None = None) -> None:
        """Write it down before anything is allocated. Raises CapacityError when it is not free.

        A measurement that its coordinator has just ended is waited for, and a change of the
        promise: what that frees is not there before it is done. What is parked gives way.
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
            raise ProtocolError("two at once with one name in the ledger")
        try:
            ledger = self.ledger.with_use(name, use)
        except CapacityError as error:
            held = ", ".join(model.held for model in self._models())
            raise CapacityError(f"{error}; held now: {held}" if held else str(error)) from None
        if user is not None:
            self._check_limits(name, use, user)
            self._users[name] = user
        self._change(ledger, user)

    def _check_limits(self, name: str, use: Use, user: Member) -> None:
        """Raises CapacityError for more than one device may take of this peer."""
        limits, held = self._user_limits, self._held_by(user, self.ledger)
        shards = sum(not each.startswith(MEASURING) for each in held)
        is_shard = not name.startswith(MEASURING)
        if is_shard and limits.sessions is not None and shards >= limits.sessions:
            raise CapacityError(
                f"device {user.name} has {shards} shards loaded on this peer, which is the most "
                "for each (--each-user)",
                remedy="close a model first",
            )
        if limits.memory_bytes is not None:
            free_bytes = limits.memory_bytes - sum(each.total for each in held.values())
            if use.total > free_bytes:
                raise CapacityError(
                    f"{'this shard' if is_shard else 'this measurement'} needs "
                    f"{format_size(use.total)}, and device {user.name} may have "
                    f"{format_size(max(0, free_bytes))} more of this peer (--each-user)",
                    remedy="close a model first, or share this one with more peers",
                )

    def _held_by(self, user: Member, ledger: Ledger) -> dict[str, Use]:
        uses = ledger.uses
        mine = {name for name, member in self._users.items() if member.id == user.id}
        return {name: use for name, use in uses.items() if name in mine}

    def free_bytes(self, user: Member | None, ledger: Ledger | None = None) -> int:
        """What this user may take yet of the peer's memory, by another ledger where one is
        given."""
        ledger = ledger or self.ledger
        if user is None or self._user_limits.memory_bytes is None:
            return ledger.free_bytes
        held_bytes = sum(each.total for each in self._held_by(user, ledger).values())
        return max(0, min(ledger.free_bytes, self._user_limits.memory_bytes - held_bytes))

    def park(self, owner: str | None, assignment: Assignment, program: StageProgram) -> str | None:
        """Keep the program of a session that has ended for who loads the same again; its memory is
        that of the session. What to name it when `let_go`; None for one that is not to be kept."""
        key = ParkedKey.of(owner, assignment)
        use = self.ledger.uses.get(assignment.key)
        if key is None or use is None or self.leaving.is_set():
            return None
        if self._promising.locked():
            return None  # the ledger has what it is to take, not what it takes
        user = self._users.get(assignment.key)
        use = replace(use, kv_bytes=0)  # what was kept there is forgotten
        name = self._parked.park(key, program, use)
        self.release(assignment.key)
        if user is not None:
            self._users[name] = user
        self._change(self.ledger.with_use(name, use), user)
        return name

    def let_go(self, parked: str) -> None:
        """Whoever parked it is gone; it is kept for a moment yet."""
        self._parked.let_go(parked)

    def parked(self, owner: str | None, assignment: Assignment) -> StageProgram | None:
        """One that was parked and is like this. Whoever takes it reserves its memory."""
        return self._parked.take(ParkedKey.of(owner, assignment))

    async def promise(self, asked_bytes: int, user: Member | None = None) -> None:
        """Stay under another budget from now on; what is loaded goes on, with the same tokens.

        What is too much is given back before this returns. Raises RequestError, with the minimum,
        for a budget that what is loaded cannot keep to, or that is more than whoever started this
        peer gave it, and what the disk raises where layers are to come from it; then nothing has
        changed.
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
            # Next to the loop: of many layers it takes seconds.
            known = await run_blocking(
                lambda: {
                    name: rebalance_options(
                        hosted.assignment,
                        hosted.manifest,
                        host_bytes=hosted.host_bytes if has_host else None,
                    )
                    for name, hosted in sessions.items()
                }
            )
            # None has come meanwhile, since that waits for its turn to load; some may have ended.
            shards = {name: each for name, each in known.items() if name in self.sessions}
            before = self.ledger
            wanted_bytes = self._budget_bytes(asked_bytes, before.baseline)
            fitted, counts = fit(before, wanted_bytes, shards)
            self._change(fitted)
            failures = await _stream({sessions[name]: count for name, count in counts.items()})
            if not failures:
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
            return budget_bytes(asked_bytes, baseline)
        usable_bytes = backend.usable_memory_bytes()
        return usable_bytes if asked_bytes is None else min(asked_bytes, usable_bytes)

    def release(self, name: str) -> None:
        """It is given back; an unknown one is no error."""
        user = self._users.pop(name, None)
        self._change(self.ledger.without(name), user)
        self._released.set()

    def backend(self) -> Backend:
        """What computes here; opened at its first use, which takes a moment. From any thread."""
        with self._backend_mutex:
            if self._backend is None:
                self._backend = open_backend(self.settings.backend, threads=self.settings.threads)
            return self._backend

    @property
    def _is_busy(self) -> bool:
        is_loading = self.measurement.locked() or self.loading.locked()
        return is_loading or any(hosted.shard.is_working for hosted in self.sessions.values())

    def describe(self, user: Member | None = None) -> PeerDescription:
        """This peer for a coordinator: who it is, what it has for this user, what it runs."""
        settings = self.settings
        ledger = self._parked.without(self.ledger)
        free_bytes = 0 if self.leaving.is_set() else self.free_bytes(user, ledger)
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
            model_free_bytes=min(free_bytes, ledger.model_free_bytes),
            host_memory_bytes=self.host_free_bytes,
            kv_memory_bytes=self.kv_room.free_memory_bytes,
            kv_disk_bytes=self.kv_room.free_disk_bytes,
            kv_prefix_bytes=self.kv_room.prefixes.used_bytes if self.kv_room.prefixes else 0,
            kv_beginnings_bytes=self.kv_room.beginnings.used_bytes,
            host=host_id(),
            identity=device_identity(
                backend=settings.backend,
                accelerator=settings.processor,
                threads=settings.threads,
                sample_bytes=sample_bytes,
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
        )


def _in_words(user: Member | None) -> str:
    return "somebody" if user is None else f"{printable(user.name)} ({fingerprint(user.id)})"


async def _stream(counts: Mapping[HostedShard, int]) -> list[BaseException]:
    """Have each read its count of layers from disk; what went wrong, once all have answered."""
    outcomes = await asyncio.gather(
        *(asyncio.wrap_future(hosted.shard.stream(count)) for hosted, count in counts.items()),
        return_exceptions=True,
    )
    return [each for each in outcomes if each is not None]
