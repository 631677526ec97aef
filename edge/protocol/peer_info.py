"""Who a peer is and what it has, as it says itself; and where others can reach it."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import itertools
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypeVar

from edge import transport
from edge.errors import EdgeError, NetworkError, PeerError, ProtocolError
from edge.host.free_memory import format_size
from edge.membership.identity import is_peer_of
from edge.membership.presence import Heard, Presences
from edge.protocol.client import CONNECT_WITHIN_S, Answer, OnEvent, PeerClient
from edge.protocol.description import PeerDescription
from edge.protocol.frame_codec import Call
from edge.protocol.heartbeat import COORDINATOR_SILENT_AFTER_S, LINK_TIMEOUT_S
from edge.protocol.kept_files import Keep, KeptFiles
from edge.protocol.lease import Lease
from edge.protocol.measurements import MemoryRate
from edge.protocol.peer_frames import Describe, SetMemory, TakeOver
from edge.protocol.topology import Place, Seat
from edge.transport import Credentials, Link, parse_number

Result = TypeVar("Result")

_NOBODYS_SECRET = bytes(32)
"""Secret of peers that want no keys, and whose caches anybody may read."""

SLOW_FROM = 1.5
"""Times the prediction; below, it is the unrest of devices that do other things, too."""

LOST_AFTER_S = COORDINATOR_SILENT_AFTER_S
"""Silence of a peer; by then it has given up its coordinators as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerInfo(PeerDescription):
    """A peer as it described itself, and where we reached it."""

    address: str
    reached_at: str = field(compare=False)
    """The same by number, as it was found then: what other devices are told."""
    credentials: Credentials | None = field(repr=False, compare=False)
    """What we showed it; None: it wants none."""
    device_id: str | None = None
    """Whose certificate it has shown; None: it has none."""
    own_name: str = ""
    """As it calls itself; `name` is another one where several call themselves so."""
    silent_s: float | None = None
    """For how long it has not answered; the rest is what it said before. None: it answers."""
    clock_ahead_s: float | None = field(default=None, compare=False)
    """How far its clock is ahead of this device's, up to half of what its answer took; negative:
    behind. None: it did not say."""

    def __repr__(self) -> str:
        return (
            f"<PeerInfo {self.name} at {self.address}: {self.backend}, {self.health}, "
            f"{format_size(self.free_now_bytes)} of {format_size(self.memory_bytes)} free>"
        )

    @property
    def health(self) -> str:
        """For people: alive, busy, slow by x, leaving, silent for so long, or lost."""
        if self.silent_s is not None:
            state = "lost" if self.is_lost else "silent"
            return f"{state} for {self.silent_s:.0f} s"
        if self.is_leaving:
            return "leaving"
        if self.is_slow:
            return f"slow by {self.slower:.1f}"
        return "busy" if self.is_busy else "alive"

    @property
    def slower(self) -> float | None:
        """Times the prediction that what it computes for a token takes, of its slowest model."""
        return max((m.slower for m in self.models if m.slower is not None), default=None)

    @property
    def is_slow(self) -> bool:
        """Whether anybody would mind."""
        return self.slower is not None and self.slower >= SLOW_FROM

    @property
    def is_lost(self) -> bool:
        return self.silent_s is not None and self.silent_s >= LOST_AFTER_S

    async def connect(self, *, on_event: OnEvent | None = None) -> PeerClient:
        """Raises what `PeerClient.connect` raises."""
        return await PeerClient.connect(
            self.address,
            self.credentials,
            name=self.name,
            device=self.device_id,
            on_event=on_event,
        )

    async def connect_link(
        self, hello: Mapping[str, Any], *, silent_s: float = LINK_TIMEOUT_S
    ) -> Link:
        """A link to it, which fails after `silent_s` of silence. hello: says what it is for.
        Raises TransportError."""
        return await transport.connect_link(
            self.address,
            hello=hello,
            credentials=self.credentials,
            device=self.device_id,
            timeout_s=CONNECT_WITHIN_S,
            link_timeout_s=silent_s,
        )

    def prefix_secret(self, *, is_shared: bool) -> bytes:
        """What is to seal beginnings of prompts on its disk, and opens none of another device's:
        made of what this device alone knows, or its cluster."""
        if self.credentials is None:
            return _NOBODYS_SECRET
        known = self.credentials.tag_key if is_shared else self.credentials.own_secret
        whose = self.id.encode() if self.credentials.tells_apart else b""
        return hmac.digest(known, b"edge prefixes " + whose, hashlib.sha256)

    def to_json(self) -> dict[str, Any]:
        """What it said, for scripts; nothing of keys."""
        told = asdict(replace(self, credentials=None))
        for each in ("credentials", "device_id", "own_name", "clock_s", "reached_at"):
            del told[each]
        return {**told, "health": self.health}


async def describe_peer(
    address: str,
    credentials: Credentials | None,
    *,
    announced: str | None = None,
    timeout_s: float = CONNECT_WITHIN_S,
) -> PeerInfo:
    """Ask the peer at `address` who it is.

    announced: the id of the announcement that it must have made. Raises NetworkError when nobody,
    or another peer, is there, PeerError when it does not say in time, ProtocolError when it says
    what makes no sense.
    """
    return await _described(
        address, credentials, Describe(), announced=announced, timeout_s=timeout_s
    )


async def set_memory(peer: PeerInfo, memory_bytes: int) -> PeerInfo:
    """Give the peer another budget; the peer as it is then. Raises RequestError when it refuses,
    and, as the next three, NetworkError where another device answers at its address."""
    call = SetMemory(bytes=memory_bytes)
    changed = await _described(
        peer.address, peer.credentials, call, name=peer.name, device=peer.device_id
    )
    return replace(changed, name=peer.name)


async def take_over(peer: PeerInfo, lease: Lease) -> None:
    """Have the peer end what earlier coordinators of a run have there, and what this one has on
    connections that were cut off. RequestError when a later one than this was there."""
    await _told_by(peer, TakeOver(lease=lease))


async def kept_by(peer: PeerInfo, remove: Sequence[str] = ()) -> tuple[KeptFiles, ...]:
    """What the peer keeps of weights, once it has removed these. RequestError when it refuses."""
    return (await _told_by(peer, Keep(remove=tuple(remove)))).files


async def memory_rate(peer: PeerInfo) -> float:
    """Bytes per second the peer reads from memory; takes it a few tenths of a second."""
    return (await _told_by(peer, MemoryRate())).bytes_per_s


async def _described(
    address: str,
    credentials: Credentials | None,
    call: Call[PeerDescription],
    *,
    name: str | None = None,
    device: str | None = None,
    announced: str | None = None,
    timeout_s: float | None = None,
) -> PeerInfo:
    told, client, heard_s = await _told(
        address,
        credentials,
        call,
        name=name,
        device=device,
        announced=announced,
        timeout_s=timeout_s,
    )
    if client.device is not None and not is_peer_of(told.id, client.device):
        raise ProtocolError(f"peer {told.name} describes itself with another device's id")
    described = {each.name: getattr(told, each.name) for each in fields(told)}
    return PeerInfo(
        address=address,
        reached_at=client.reached_at,
        credentials=credentials,
        device_id=client.device,
        own_name=told.name,
        clock_ahead_s=None if told.clock_s is None else told.clock_s - heard_s,
        **described,
    )


async def _told_by(peer: PeerInfo, call: Call[Answer]) -> Answer:
    """What this one answers, and nobody else."""
    told, *_ = await _told(
        peer.address, peer.credentials, call, name=peer.name, device=peer.device_id
    )
    return told


async def _told(
    address: str,
    credentials: Credentials | None,
    call: Call[Answer],
    *,
    name: str | None = None,
    device: str | None = None,
    announced: str | None = None,
    timeout_s: float | None = None,
) -> tuple[Answer, PeerClient, float]:
    """The answer, the connection that it came by, which is closed, and when it was given by our
    clock, as far as that can be told: in the middle of the time that it took. `device` and
    `announced`: see `PeerClient.connect`.
    """
    client = await PeerClient.connect(
        address,
        credentials,
        name=name,
        device=device,
        announced=announced,
        timeout_s=timeout_s or CONNECT_WITHIN_S,
    )
    try:
        asked_s = time.time()
        answer = await client.call(call, limit_s=timeout_s)
        return answer, client, (asked_s + time.time()) / 2
    finally:
        await client.aclose()


async def describe_all(
    peers: Mapping[str, Credentials | None],
    timeouts_s: Mapping[str, float] | None = None,
    presences: Presences | None = None,
) -> tuple[list[PeerInfo], dict[str, EdgeError]]:
    """Every peer that answers, once each, in the order given; and why the others do not.

    peers: what each is shown, by its address. timeouts_s: how long each may take; as long as for
    `describe_peer` if None.
    presences: see `each_once`.
    """
    limits_s = dict.fromkeys(peers, CONNECT_WITHIN_S) if timeouts_s is None else timeouts_s
    infos: dict[str, PeerInfo] = {}
    failures: dict[str, EdgeError] = {}

    async def ask(address: str, credentials: Credentials | None) -> None:
        try:
            infos[address] = await describe_peer(address, credentials, timeout_s=limits_s[address])
        except EdgeError as error:
            failures[address] = error

    await gather_all(ask(address, credentials) for address, credentials in peers.items())
    for address in list(infos):
        if (expelled := expulsion(infos[address])) is not None:
            failures[address] = expelled
            del infos[address]
    answers = [infos[address] for address in peers if address in infos]
    once, copies = each_once(answers, presences)
    return once, failures | {copy.address: of_a_copy for copy, of_a_copy in copies}


def expulsion(peer: PeerInfo) -> NetworkError | None:
    """Why a peer is not used that has answered, where others, asked at the same time, have told
    that it is expelled."""
    if peer.credentials is None or peer.device_id is None:
        return None
    if peer.credentials.now().is_admitted(peer.device_id, None):
        return None
    return NetworkError(
        f"device {peer.name} ({peer.device_id}) has been expelled from the cluster",
        remedy="to have it back, remove its folder of keys there, and pair it: `edge pair`",
    )


def each_once(
    infos: Iterable[PeerInfo], presences: Presences | None = None, used: Iterable[PeerInfo] = ()
) -> tuple[list[PeerInfo], list[tuple[PeerInfo, PeerError]]]:
    """Peers of which some were reached by several addresses, each once; and what to say of those
    that are not used, since they are daemons of their own with the id of another one.

    presences: what was seen of them before, which is told of these; where one of two was there
    before the other, it is the one that is used. used: others that are there, as is known of
    connections to them.
    """
    infos = tuple(infos)
    presences = presences or Presences()
    number = presences.look()
    for info in (*infos, *used):
        heard = Heard(id=info.id, epoch=info.epoch, number=number, is_leaving=info.is_leaving)
        presences.saw(heard, info.address)
    once: dict[str, PeerInfo] = {}
    copies = []
    for info in infos:
        current = presences.of(info.id).current
        if current is None or current.epoch == info.epoch:
            once.setdefault(info.id, info)
            continue
        sentence = (
            f"at {info.address} it has the keys of the device at "
            f"{presences.place(info.id, current.epoch)}, so nobody can tell the two apart, and it "
            "is not used: keys are not copied; delete Edge's folder of keys on one of the two "
            "(~/.config/edge) and pair it with `edge pair`"
        )
        copies.append((info, PeerError(info.name, sentence)))
    return list(once.values()), copies


async def describe_each(peers: Mapping[str, Credentials | None]) -> list[PeerInfo]:
    """Every peer, see `describe_all`; raises the error of the first that does not answer."""
    infos, failures = await describe_all(peers)
    for address in peers:
        if address in failures:
            raise failures[address]
    return infos


def with_unique_names(
    peers: Sequence[PeerInfo], known: Iterable[PeerInfo] = ()
) -> tuple[PeerInfo, ...]:
    """The same peers, of which no two have one name: of three called vm, vm, vm-2 and vm-3.

    Whoever is of `known` keeps its name there, unless it calls itself otherwise now: of daemons of
    one device that start again, one may come to another's id. Of the others the least id goes
    first.
    """
    taken = {(peer.id, peer.own_name): peer.name for peer in known}
    names = {
        peer.id: taken[peer.id, peer.own_name]
        for peer in peers
        if (peer.id, peer.own_name) in taken
    }
    wanted = {peer.own_name for peer in peers}
    for peer in sorted(peers, key=lambda peer: peer.id):
        others = set(names.values())
        numbered = (f"{peer.own_name}-{number}" for number in itertools.count(2))
        free = (name for name in numbered if name not in others | wanted)
        names.setdefault(peer.id, peer.own_name if peer.own_name not in others else next(free))
    return tuple(replace(peer, name=names[peer.id]) for peer in peers)


def places(devices: Mapping[Seat, PeerInfo]) -> dict[Seat, Place]:
    """Where each shard's neighbours reach it.

    That is where the coordinator reached it, by number; but a peer on its machine, reached by
    loopback, must be named to other devices by addresses of its own. Raises NetworkError when
    it has none.
    """
    everywhere = {seat: (peer.reached_at, *peer.addresses) for seat, peer in devices.items()}
    if not all(is_loopback(peer.reached_at) for peer in devices.values()):
        for seat, peer in devices.items():
            everywhere[seat] = tuple(a for a in everywhere[seat] if not is_loopback(a))
            if not everywhere[seat]:
                raise NetworkError(
                    f"peer {peer.name} listens on {', '.join(peer.addresses)} only, where other "
                    "devices cannot reach it",
                    remedy="start it with --listen :0",
                )
    return {
        seat: Place(
            name=peer.name,
            device=peer.device_id,
            addresses=tuple(dict.fromkeys(everywhere[seat])),
        )
        for seat, peer in devices.items()
    }


def is_loopback(address: str) -> bool:
    """Whether only this very device can reach `address`, which is a number."""
    return parse_number(address)[0].is_loopback


async def gather_all(work: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run all at once; their results in order. The first error cancels the rest, and is raised once
    they have ended.

    A TaskGroup of Python 3.11 and 3.12 leaves its caller with a cancellation to be undone, which
    timeouts around it take for one from outside.
    """
    tasks: list[asyncio.Task[Result]] = []
    failed: list[BaseException] = []

    def note(task: asyncio.Task[Result]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            failed.append(error)

    try:
        for each in work:
            tasks.append(asyncio.create_task(each))
            tasks[-1].add_done_callback(note)
        if tasks:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        left = [task for task in tasks if not task.done()]
        for task in left:
            task.cancel()
        if left:
            await asyncio.gather(*left, return_exceptions=True)
    if failed:
        raise failed[0]
    return [task.result() for task in tasks]


BACKENDS = ("ort", "triton", "webgpu", "null")
"""Names of folders in `edge/backends`."""

BACKEND_CHOICES = ("auto", *BACKENDS)
"""What users may ask for; `usual_backend` says what auto is."""
