"""The plan to go on with when devices of a running plan are lost. A pure decision.

Four kinds of plans are compared: stand-ins in the lost seats, neighbours that grow, both, and a new
plan over the remaining devices. The plan whose replies are done first wins: after sending and
loading weights, computing the lost keys and values again, and the rest of the answer.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice, permutations, product
from typing import Literal

from edge.partition.cost.estimate import Estimate, estimate
from edge.partition.cost.message_times import UNKNOWN_LINK, check_links
from edge.partition.cost.pace import CHUNK_TOKENS
from edge.partition.errors import PartitionError
from edge.partition.fit.memory import memory_use
from edge.partition.fit.placement import Parallel
from edge.partition.fit.streamed_layers import UNMEASURED_DISK_BYTES_PER_S, streaming
from edge.partition.losses.closing import Closer
from edge.partition.losses.holdings import Holding, Seat, lacking_bytes, seats_of
from edge.partition.losses.stand_ins import all_seats_taken, some_seats_taken
from edge.partition.plan.facts import ClusterSpec, DeviceSpec, ModelFacts, Workload
from edge.partition.plan.plan import Plan, Stage
from edge.partition.plan.shard import LayerSlice, Shard
from edge.partition.search.choose import choose

SAME_SUMS_MAY_TAKE = 2.0
"""A plan with the same sums may take this many times as long as the fastest plan, and"""
SAME_SUMS_MAY_COST_S = 1.0
"""this many seconds more for the replies of the workload, because its tokens are the same to the
bit."""

UNKNOWN_SEND_BYTES_PER_S = UNKNOWN_LINK[1]
"""Rate from the coordinator to a device, where it was not measured."""

_MOST_STAND_INS = 32
"""The most ways to fill all lost seats that are compared."""

_MOST_PARTLY = 8
"""The most ways to fill some of the lost seats."""

_MOST_CLOSED = 24
"""The most ways to close the seats that stay empty, for each of these."""

_MOST_ORDERS = 24
"""The most orders of the planner's devices in its plan."""

_EXACT_DEVICES = 4
"""With more devices, the planner does not search every arrangement, because replies are waiting.
For a model of 22 layers the search takes 0.04 s of processor time on 4 devices, 0.9 s on 5."""

_MOST_DOUBLED = 64
"""The most ways to give lost seats to devices that already have a seat."""

Method = Literal["unchanged", "stand-ins", "doubled", "grown", "planned"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """A plan without the lost devices, and what it needs."""

    plan: Plan
    """The plan to run. If it differs from the old plan, its version is one more."""
    method: Method
    """unchanged: no lost device had a seat. stand-ins: devices without a seat took the lost seats
    unchanged. doubled: devices that already had a seat took some of them, too. grown: the shards of
    remaining devices grew, perhaps beside stand-ins. planned: a new plan over the remaining
    devices."""
    same_shape: bool
    """Every stage and slice is as before; only devices changed."""
    same_sums: bool
    """Every layer is cut as before, so sums are taken in the same order. Whether the new devices
    compute the same bits as the old ones is not known here."""
    lacking_bytes: Mapping[str, int]
    """By device, in plan order: bytes of weights that it has neither loaded nor cached."""
    kept: tuple[str, ...]
    """Devices whose seats did not change, so that their loaded weights stay valid."""
    ready_s: float
    """Predicted seconds until every device has received and loaded its weights; all receive at the
    same time."""
    predicted: Estimate | None
    """Estimate for the workload; None when some device of the plan has no rates."""

    @property
    def moved_bytes(self) -> int:
        """Bytes that all devices lack together."""
        return sum(self.lacking_bytes.values())

    def total_s(self, workload: Workload) -> float | None:
        """Predicted seconds until the replies of the workload are done: weights ready, each prompt
        computed again, then all answers together. None without a prediction."""
        if self.predicted is None:
            return None
        replay_s = workload.concurrency * self.predicted.first_token_s
        return self.ready_s + replay_s + workload.output_tokens * self.predicted.token_s


def repair(
    plan: Plan,
    model: ModelFacts,
    cluster: ClusterSpec,
    lost: Collection[str],
    workload: Workload,
    *,
    cached: Mapping[str, Collection[Seat]] | None = None,
    send_bytes_per_s: Mapping[str, float] | None = None,
    parallel: Parallel | None = "auto",
    chunk_tokens: int = CHUNK_TOKENS,
    stream: bool = False,
    keeps_shape: bool = False,
    may_double: bool = True,
    further_seat_bytes: int = 0,
) -> Repair:
    """The plan to go on with when the devices `lost` (ids) of a running plan are lost.

    cluster           The remaining devices, with those that had no part so far. Devices in `lost`
                      are not used, nor devices of the plan that are missing here.
    workload          What is still to do: tokens to compute again as the prompt, and the rest of
                      the answer. `reserved_tokens` is what memory is kept for.
    cached            Seats of `plan` whose weights a device has on disk, apart from its own.
    send_bytes_per_s  From the coordinator to a device, above 0; else UNKNOWN_SEND_BYTES_PER_S.
    parallel          How the planner may divide the model in a new plan. None: the plan was written
                      by hand, so a new plan is made only where nothing else fits.
    stream            Layers may be read from disk for each step where the plan fits only so.
    keeps_shape       Prefer the same stages and slices, because copies are kept for them. Otherwise
                      plans that cut each layer as before are preferred: they sum in the same order.
    may_double        Lost seats may be given to devices that already have a seat.
    further_seat_bytes  Memory that a device's second seat takes for buffers.

    The result is the plan whose replies are done first. A preferred plan wins if it takes at most
    SAME_SUMS_MAY_TAKE times as long and SAME_SUMS_MAY_COST_S more. Plans over devices without rates
    cannot be compared by time. They come after measured plans, except that a preferred one comes
    before all that are not preferred. Among them, plans in memory come before plans from disk, then
    those that move fewer bytes, then the devices' ids decide. The same facts always give the same
    repair.

    Raises PlanError for a plan that is not one of this model, or where no device is left, and
    CapacityError, with the bytes that each device lacks, where nothing fits.
    """
    plan.validate(model, None, is_repaired=True)
    task = Task(
        plan=plan,
        model=model,
        cluster=cluster.without(*lost),
        workload=workload,
        cached=cached or {},
        send_bytes_per_s=send_bytes_per_s or {},
        parallel=parallel,
        chunk_tokens=chunk_tokens,
        stream=stream,
        keeps_shape=keeps_shape,
        further_seat_bytes=further_seat_bytes,
    )
    if not task.lost_seats:
        return task.repaired(plan, "unchanged")
    found = [task.repaired(each, "stand-ins") for each in task.with_stand_ins()]
    if may_double:
        found += [task.repaired(each, "doubled") for each in task.doubled()]
    found += [task.repaired(each, "grown") for each in task.grown()]
    if parallel is not None or not found:
        try:
            found += [task.repaired(each, "planned") for each in task.planned()]
        except PartitionError:
            if not found:
                raise
    return task.best(found)


def can_repair(
    plan: Plan,
    model: ModelFacts,
    cluster: ClusterSpec,
    lost: Collection[str],
    workload: Workload,
    *,
    parallel: Parallel | None = "auto",
    chunk_tokens: int = CHUNK_TOKENS,
    stream: bool = False,
    keeps_shape: bool = False,
) -> bool:
    """Whether `repair` finds a plan. Takes a small part of its time, because it stops at the first
    plan and makes a new plan only where nothing else fits."""
    task = Task(
        plan=plan,
        model=model,
        cluster=cluster.without(*lost),
        workload=workload,
        cached={},
        send_bytes_per_s={},
        parallel=parallel,
        chunk_tokens=chunk_tokens,
        stream=stream,
        keeps_shape=keeps_shape,
        further_seat_bytes=0,
    )
    try:
        tried = (task.with_stand_ins(), task.doubled(), task.grown(), task.planned())
        return not task.lost_seats or any(True for _plan in chain.from_iterable(tried))
    except PartitionError:
        return False


@dataclass(slots=True, kw_only=True)
class Task:
    """The facts of one repair, or of one move, and what follows from them."""

    plan: Plan
    model: ModelFacts
    cluster: ClusterSpec
    workload: Workload
    cached: Mapping[str, Collection[Seat]]
    send_bytes_per_s: Mapping[str, float]
    parallel: Parallel | None
    chunk_tokens: int
    stream: bool
    keeps_shape: bool
    further_seat_bytes: int
    devices: dict[str, DeviceSpec] = field(init=False)
    seats: dict[Seat, Holding] = field(init=False)
    loaded: dict[str, list[Holding]] = field(init=False)
    """The weights that each device has in memory."""
    lost_seats: list[Seat] = field(init=False)
    _lacking: dict[tuple[str, Holding], tuple[int, int]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.devices = {device.id: device for device in self.cluster.devices}
        self.seats = seats_of(self.plan)
        self.loaded = {}
        for each in self.seats.values():
            self.loaded.setdefault(each.shard.device, []).append(each)
        self.lost_seats = [
            seat for seat, each in self.seats.items() if each.shard.device not in self.devices
        ]

    def with_stand_ins(self) -> Iterator[Plan]:
        """The plan as it was, with other devices in the lost seats."""
        for taken in all_seats_taken(self._options(), most=_MOST_STAND_INS):
            yield from self.fitting(self._filled(taken))

    def doubled(self) -> Iterator[Plan]:
        """The plan with some of the lost seats on devices that already have a seat, all in memory.

        Only where this keeps the order of sums, or the shape.
        """
        split = any(len(self.plan.stages[stage].shards) > 1 for stage, _ in self.lost_seats)
        if not (split or self.keeps_shape):
            return
        options = [self._by_lacking(seat, list(self.devices)) for seat in self.lost_seats]
        for taken in islice(product(*options), _MOST_DOUBLED):
            if len({*taken, *self.loaded}) == len(taken) + len(self.loaded):
                continue  # every seat went to a device without one
            plan = self._filled(taken)
            if not plan.streamed_layers:
                yield from self.fitting(plan)

    def grown(self) -> Iterator[Plan]:
        """Plans with some or none of the lost seats on other devices, and the remaining seats
        closed."""
        closer = Closer(
            plan=self.version(self.plan.stages),
            model=self.model,
            devices=self.devices,
            workload=self.workload,
        )
        for taken in some_seats_taken(self._options(), most=_MOST_PARTLY):
            for plan in closer.ways(self._seated(taken), most=_MOST_CLOSED):
                yield from self.fitting(plan)

    def planned(
        self, cluster: ClusterSpec | None = None, parallel: Parallel | None = None
    ) -> Iterator[Plan]:
        """A new plan, and the same plan with its devices in the order that moves the fewest bytes.

        cluster, parallel: instead of the task's. Raises PartitionError where no plan is found.
        """
        choice = choose(
            self.model,
            cluster or self.cluster,
            self.workload,
            parallel=parallel or self.parallel or "auto",
            chunk_tokens=self.chunk_tokens,
            stream=self.stream,
            exact_devices=_EXACT_DEVICES,
        )
        plan = self.version(choice.plan.stages)
        check_links(plan, self.cluster)
        yield plan
        orders = islice(permutations(plan.devices), 1, _MOST_ORDERS)
        others = [_with_devices(plan, order) for order in orders]
        fitting = [each for other in others for each in self.fitting(other)]
        if fitting:
            yield min(fitting, key=self._moved_bytes)

    def repaired(self, plan: Plan, method: Method) -> Repair:
        lacking: dict[str, int] = {}
        loading: dict[str, int] = {}
        seated: dict[str, list[Holding]] = {}
        ready_s = 0.0
        for wanted in seats_of(plan).values():
            id = wanted.shard.device
            to_send, to_load = self._lacks(wanted)
            lacking[id] = lacking.get(id, 0) + to_send
            loading[id] = loading.get(id, 0) + to_load
            ready_s = max(ready_s, self._ready_s(id, lacking[id], loading[id]))
            seated.setdefault(id, []).append(wanted)
        predicted = None
        if all(self.devices[id].rates is not None for id in plan.devices):
            predicted = estimate(
                plan, self.model, self.cluster, self.workload, chunk_tokens=self.chunk_tokens
            )
        return Repair(
            plan=plan,
            method=method,
            same_shape=self._is_same_shape(plan),
            same_sums=_cuts(plan, self.model) == _cuts(self.plan, self.model),
            lacking_bytes=lacking,
            kept=tuple(id for id, seats in seated.items() if self.loaded.get(id) == seats),
            ready_s=ready_s,
            predicted=predicted,
        )

    def best(self, found: Sequence[Repair]) -> Repair:
        """The best of at least one repair."""
        alike: list[Repair] = []
        others: list[Repair] = []
        for each in found:
            is_alike = each.same_shape if self.keeps_shape else each.same_sums
            (alike if is_alike else others).append(each)
        if not alike or not others:
            return self._first(found)
        same, other = self._first(alike), self._first(others)
        same_s, other_s = same.total_s(self.workload), other.total_s(self.workload)
        if (
            same_s is None
            or other_s is None
            or same_s <= SAME_SUMS_MAY_TAKE * other_s + SAME_SUMS_MAY_COST_S
        ):
            return same
        return other

    def _first(self, found: Sequence[Repair]) -> Repair:
        """The repair that is done first; without predictions, the one that moves the fewest
        bytes."""
        timed = [(s, each) for each in found if (s := each.total_s(self.workload)) is not None]
        if timed:
            return min(timed, key=lambda one: (one[0], one[1].moved_bytes, one[1].plan.devices))[1]
        return min(
            found,
            key=lambda one: (
                one.plan.streamed_layers,
                len(one.plan.shares) - len(one.plan.devices),
                one.moved_bytes,
                max(one.lacking_bytes.values()),
                one.plan.devices,
            ),
        )

    def _options(self) -> list[list[str]]:
        """For each lost seat, the devices that may take it: first those with enough memory, then
        those that would read layers from disk; in each group by the bytes that they lack."""
        spare = [id for id in self.devices if id not in self.loaded]
        return [self._by_lacking(seat, spare) for seat in self.lost_seats]

    def _by_lacking(self, seat: Seat, spare: Sequence[str]) -> list[str]:
        held = self.seats[seat]
        place = self.plan.place(seat[0])
        use = held.shard.memory(place, self.model, self.workload)

        def fits(id: str) -> bool:
            return use.on(self.devices[id]).total <= self.devices[id].memory_bytes

        def key(id: str) -> tuple[bool, int, float, str]:
            rates = self.devices[id].rates
            pace = -self.devices[id].threads if rates is None else rates.seconds_per_byte[0]
            lacking, _ = self._lacks(replace(held, shard=held.shard.on(id)))
            return not fits(id), lacking, pace, id

        return sorted((id for id in spare if self.stream or fits(id)), key=key)

    def _seated(self, taken: Sequence[str | None]) -> list[list[Shard | None]]:
        """The shards of each stage with these devices in the lost seats."""
        stand_ins = dict(zip(self.lost_seats, taken, strict=True))
        seated: list[list[Shard | None]] = [[] for _ in self.plan.stages]
        for seat, each in self.seats.items():
            id = stand_ins.get(seat, each.shard.device)
            seated[seat[0]].append(
                None if id is None else each.shard if seat not in stand_ins else each.shard.on(id)
            )
        return seated

    def _filled(self, taken: Sequence[str]) -> Plan:
        """The plan as it was, with these devices in the lost seats."""
        return self.version(
            [
                replace(stage, shards=tuple(shard for shard in shards if shard is not None))
                for stage, shards in zip(self.plan.stages, self._seated(taken), strict=True)
            ]
        )

    def version(self, stages: Sequence[Stage]) -> Plan:
        """The next version of the plan, with these stages."""
        return Plan(model=self.plan.model, version=self.plan.version + 1, stages=tuple(stages))

    def fitting(self, plan: Plan) -> Iterator[Plan]:
        """The plan, if its devices reach each other and it fits, perhaps with layers read from
        disk; else nothing."""
        try:
            check_links(plan, self.cluster)
            if not self._fits(plan):
                if not self.stream or len(plan.devices) < len(plan.shares):
                    return
                plan = streaming(plan, self.model, self.cluster, self.workload)
        except PartitionError:
            return
        yield plan

    def _fits(self, plan: Plan) -> bool:
        use = memory_use(plan, self.model, self.workload)
        seats = Counter(share.device for share in plan.shares)
        return all(
            each.on(device := self.devices[id]).total + (seats[id] - 1) * self.further_seat_bytes
            <= device.memory_bytes
            for id, each in use.items()
        )

    def _moved_bytes(self, plan: Plan) -> int:
        return sum(self._lacks(each)[0] for each in seats_of(plan).values())

    def _lacks(self, wanted: Holding) -> tuple[int, int]:
        """(bytes that the device has neither loaded nor cached, bytes that it has not loaded)."""
        id = wanted.shard.device
        known = self._lacking.get((id, wanted))
        if known is None:
            loaded = self.loaded.get(id, [])
            on_disk = [self.seats[seat] for seat in self.cached.get(id, ()) if seat in self.seats]
            known = (
                lacking_bytes(wanted, [*loaded, *on_disk], self.model),
                lacking_bytes(wanted, loaded, self.model),
            )
            self._lacking[id, wanted] = known
        return known

    def ships_s(self, plan: Plan) -> float:
        """Seconds until every device of the plan has its weights on disk; all are sent at the same
        time."""
        sent: dict[str, int] = {}
        for wanted in seats_of(plan).values():
            id = wanted.shard.device
            sent[id] = sent.get(id, 0) + self._lacks(wanted)[0]
        return max(self._sent_s(id, num_bytes) for id, num_bytes in sent.items())

    def loads_s(self, plan: Plan) -> float:
        """Seconds until every device has loaded its whole part from disk, including what it has in
        memory."""
        held: dict[str, int] = {}
        for wanted in seats_of(plan).values():
            id = wanted.shard.device
            held[id] = held.get(id, 0) + lacking_bytes(wanted, (), self.model)
        return max(self._ready_s(id, 0, num_bytes) for id, num_bytes in held.items())

    def _ready_s(self, id: str, to_send: int, to_load: int) -> float:
        rates = self.devices[id].rates
        disk = None if rates is None else rates.disk_bytes_per_s
        return self._sent_s(id, to_send) + to_load / (disk or UNMEASURED_DISK_BYTES_PER_S)

    def _sent_s(self, id: str, num_bytes: int) -> float:
        return num_bytes / self.send_bytes_per_s.get(id, UNKNOWN_SEND_BYTES_PER_S)

    def _is_same_shape(self, plan: Plan) -> bool:
        seats = seats_of(plan)
        return seats.keys() == self.seats.keys() and all(
            each.is_like(self.seats[seat]) for seat, each in seats.items()
        )


def _with_devices(plan: Plan, devices: Sequence[str]) -> Plan:
    """The plan with these devices, in plan order."""
    ids = iter(devices)
    stages = tuple(
        replace(stage, shards=tuple(share.on(next(ids)) for share in stage.shards))
        for stage in plan.stages
    )
    return replace(plan, stages=stages)


def _cuts(plan: Plan, model: ModelFacts) -> list[tuple[tuple[LayerSlice, tuple[int, ...]], ...]]:
    """For each layer, the slices and whole experts of its ranks, in the order of its sums."""
    found = []
    for stage in plan.stages:
        kinds = [[shard.slice(kind) for shard in stage.slices] for kind in range(len(model.kinds))]
        for index, layer in enumerate(stage.layers):
            whole = [shard.experts[index] if shard.experts else () for shard in stage.slices]
            found.append(tuple(zip(kinds[model.layers[layer]], whole, strict=True)))
    return found
