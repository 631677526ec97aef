"""Tensor parallel plans by threads and memory: every device has a slice of every layer.

Pure search over slices of heads, feed-forward columns and vocabulary rows. Shares are proportional
to threads, as far as memory allows.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from edge.partition.errors import PlanError, Shortage
from edge.partition.fit.memory import units_that_fit
from edge.partition.plan.facts import ClusterSpec, DeviceSpec, LayerFacts, ModelFacts, Workload
from edge.partition.plan.plan import Plan, Stage
from edge.partition.plan.ranges import apportion, consecutive, largest_remainders
from edge.partition.plan.shard import LayerSlice, Shard, num_local_kv_heads

_SEARCH_PRECISION = 128
"""Precision of the search for missing memory, as a part of its possible range: near enough to buy
memory by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShapeCosts:
    """Bytes of the slices, over all layers of one shape."""

    facts: LayerFacts
    query_head_bytes: int
    kv_head_bytes: int
    """Weights and KV cache."""
    column_bytes: int

    def attention_bytes(self, heads: range) -> int:
        num_kv_heads = num_local_kv_heads(heads, self.facts)
        return len(heads) * self.query_head_bytes + num_kv_heads * self.kv_head_bytes

    @property
    def divisible_bytes(self) -> int:
        facts = self.facts
        return (
            facts.num_heads * self.query_head_bytes
            + facts.num_kv_heads * self.kv_head_bytes
            + facts.ffn_columns * self.column_bytes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Costs:
    """Bytes of the slices, over all layers."""

    fixed_bytes: int
    """Norms and biases, which every device holds."""
    shapes: tuple[_ShapeCosts, ...]
    row_bytes: int
    """One vocabulary row, of the embedding and of the head."""
    divisible_bytes: int
    """All bytes that are divided, if no KV head is held twice."""

    @classmethod
    def of(cls, model: ModelFacts, workload: Workload) -> "_Costs":
        counted = [
            (shape, sum(model.kinds[kind] == shape for kind in model.layers))
            for shape in model.shapes
        ]
        shapes = tuple(
            _ShapeCosts(
                facts=facts,
                query_head_bytes=count * facts.query_head_bytes,
                kv_head_bytes=count * (facts.kv_head_bytes + facts.kept_bytes(workload)),
                column_bytes=count * facts.ffn_column_bytes,
            )
            for facts, count in counted
        )
        row = model.embedding_row_bytes + model.head_row_bytes
        return cls(
            fixed_bytes=sum(count * facts.layer_bytes for facts, count in counted),
            shapes=shapes,
            row_bytes=row,
            divisible_bytes=sum(kind.divisible_bytes for kind in shapes) + model.vocab_size * row,
        )


def place_tensor(model: ModelFacts, cluster: ClusterSpec, workload: Workload) -> Plan | None:
    """One stage with a shard on every device, or None when memory is short.

    Places heads first, then blocks of columns, then rows: large pieces before small ones. This
    search is not exhaustive: where memory is tight to within a few pieces, it can miss a plan that
    exists. With the piece sizes of real models it found plans for devices with 0.1 % to spare.
    PlanError when there are more devices than slices to give them.
    """
    devices = cluster.devices
    check_tensor_count(model, cluster)
    costs = _Costs.of(model, workload)
    # Room for one vocabulary row is kept on each device, so that every device has work.
    rooms = [device.memory_bytes - costs.fixed_bytes - costs.row_bytes for device in devices]
    if min(rooms) < 0:
        return None
    shares = [device.threads for device in devices]
    limits = [room + costs.row_bytes for room in rooms]
    wished = largest_remainders(costs.divisible_bytes, shares)
    if any(wish > limit for wish, limit in zip(wished, limits, strict=True)):
        possible = apportion(costs.divisible_bytes, shares, least=[0] * len(shares), most=limits)
        if possible is None:
            return None
        # From here on a share is a number of bytes; at least 1, because loads divide by it.
        shares = [max(1, share) for share in possible]
    for frugal in (False, True):
        heads = _heads_of_shapes(costs, shares, rooms, frugal=frugal)
        if heads is None:
            return None
        plan = _fill(model, costs, devices, shares, rooms, heads)
        if plan is not None:
            return plan
    return None


def check_tensor_count(model: ModelFacts, cluster: ClusterSpec) -> None:
    """PlanError when there are more devices than slices to give them."""
    count = len(cluster.devices)
    if count > model.vocab_size:
        raise PlanError(
            [
                f"{count} devices cannot share model {model.name!r}: its vocabulary of"
                f" {model.vocab_size} is too small. Use at most {model.vocab_size} devices."
            ]
        )


def tensor_shortages(
    model: ModelFacts, cluster: ClusterSpec, workload: Workload
) -> tuple[Shortage, ...]:
    """What the devices lack when `place_tensor` finds nothing: the least that each needs, and the
    rest on the device with the most memory, to within 1 % of the possible range."""
    costs = _Costs.of(model, workload)
    floor_bytes = costs.fixed_bytes + costs.row_bytes
    devices = [
        replace(device, memory_bytes=max(device.memory_bytes, floor_bytes))
        for device in cluster.devices
    ]

    def fits(largest: int, memory_bytes: int) -> bool:
        trial = list(devices)
        trial[largest] = replace(trial[largest], memory_bytes=memory_bytes)
        return place_tensor(model, ClusterSpec(devices=tuple(trial)), workload) is not None

    largest = max(range(len(devices)), key=lambda index: devices[index].memory_bytes)
    if not fits(largest, devices[largest].memory_bytes):
        too_small = devices[largest].memory_bytes
        enough = costs.fixed_bytes + costs.divisible_bytes  # the whole model
        precision = max(1, (enough - too_small) // _SEARCH_PRECISION)
        while enough - too_small > precision:
            middle = (too_small + enough) // 2
            if fits(largest, middle):
                enough = middle
            else:
                too_small = middle
        devices[largest] = replace(devices[largest], memory_bytes=enough)
    return tuple(
        Shortage(
            device=device.id,
            name=device.name,
            missing_bytes=device.memory_bytes - given.memory_bytes,
        )
        for device, given in zip(devices, cluster.devices, strict=True)
        if device.memory_bytes > given.memory_bytes
    )


def _heads_of_shapes(
    costs: _Costs, shares: Sequence[int], rooms: Sequence[int], *, frugal: bool
) -> list[tuple[range, ...]] | None:
    """The query heads of each device for each shape of layer, in the memory that the shapes before
    it leave."""
    found: list[tuple[range, ...]] = []
    for kind in costs.shapes:
        heads = _split_heads(kind, shares, rooms, frugal=frugal)
        if heads is None:
            return None
        found.append(heads)
        rooms = _left(rooms, map(kind.attention_bytes, heads))
    return found


def _left(rooms: Sequence[int], taken: Iterable[int]) -> list[int]:
    return [room - nbytes for room, nbytes in zip(rooms, taken, strict=True)]


def _split_heads(
    costs: _ShapeCosts,
    shares: Sequence[int],
    rooms: Sequence[int],
    *,
    frugal: bool,
) -> tuple[range, ...] | None:
    """Query heads for each device within its room, or None.

    Attention reads its weights and its cache once per token, so a device's time is proportional to
    those bytes. They include KV heads that are held twice where a cut goes through a group. Dynamic
    programming over cuts finds the least load (bytes / share) of the slowest device. Of equals, the
    least sum of bytes² / share decides, which prefers even loads. So groups are cut only where that
    pays. `frugal` minimises the bytes of all devices first instead, for tight memory.
    """
    num_heads = costs.facts.num_heads
    # [start][count] -> bytes; the same for every device, so counted once.
    needed = [
        [
            costs.attention_bytes(range(start, start + count))
            for count in range(num_heads - start + 1)
        ]
        for start in range(num_heads + 1)
    ]
    # reached[stop]: the best score of the devices so far if they hold heads 0..stop.
    reached: dict[int, tuple[float, float]] = {0: (0.0, 0.0)}
    choices: list[dict[int, int]] = []
    for share, room in zip(shares, rooms, strict=True):
        best: dict[int, tuple[float, float]] = {}
        choice: dict[int, int] = {}
        for start, (first, second) in reached.items():
            for count, size in enumerate(needed[start]):
                if size > room:
                    continue
                load = size / share
                if frugal:
                    score = (first + size, max(second, load))
                else:
                    score = (max(first, load), second + size * load)
                stop = start + count
                if stop not in best or score < best[stop]:
                    best[stop] = score
                    choice[stop] = start
        reached = best
        choices.append(choice)
    if num_heads not in reached:
        return None
    ranges: list[range] = []
    stop = num_heads
    for choice in reversed(choices):
        ranges.append(range(choice[stop], stop))
        stop = choice[stop]
    return tuple(reversed(ranges))


def _fill(
    model: ModelFacts,
    costs: _Costs,
    devices: Sequence[DeviceSpec],
    shares: Sequence[int],
    rooms: Sequence[int],
    heads: Sequence[tuple[range, ...]],
) -> Plan | None:
    """The plan with these heads of each shape, or None where columns and rows do not fit beside
    them."""
    for kind, parts in zip(costs.shapes, heads, strict=True):
        rooms = _left(rooms, map(kind.attention_bytes, parts))
    columns: list[tuple[range, ...]] = []
    for kind in costs.shapes:
        cut = _split_columns(kind, model.column_multiple, shares, rooms)
        if cut is None:
            return None
        columns.append(cut)
        rooms = _left(rooms, [len(part) * kind.column_bytes for part in cut])
    rooms = [room + costs.row_bytes for room in rooms]
    slices = [
        [
            LayerSlice(heads=heads[shape][rank], ffn_columns=columns[shape][rank])
            for shape in map(model.shapes.index, model.kinds)
        ]
        for rank in range(len(devices))
    ]
    counts = apportion(
        model.vocab_size,
        shares,
        least=[0 if any(s.heads or s.ffn_columns for s in own) else 1 for own in slices],
        most=[units_that_fit(room, costs.row_bytes, model.vocab_size) for room in rooms],
    )
    if counts is None:
        return None
    shards = tuple(
        Shard.of_slices(device.id, own, vocab=rows)
        for device, own, rows in zip(devices, slices, consecutive(counts), strict=True)
    )
    stage = Stage(layers=range(model.num_layers), shards=shards)
    return Plan(model=model.name, version=1, stages=(stage,))


def _split_columns(
    costs: _ShapeCosts, multiple: int, shares: Sequence[int], rooms: Sequence[int]
) -> tuple[range, ...] | None:
    """Feed-forward columns for each device within its room, cut at multiples, or None.

    The remainder after the last multiple must be on the last device that has columns. Devices are
    tried as that one from the last to the first.
    """
    units, rest = divmod(costs.facts.ffn_columns, multiple)
    unit_bytes = multiple * costs.column_bytes
    for holder in reversed(range(len(rooms))):
        most = [
            units_that_fit(room, unit_bytes, units) if index < holder else 0
            for index, room in enumerate(rooms)
        ]
        most[holder] = units_that_fit(rooms[holder] - rest * costs.column_bytes, unit_bytes, units)
        counts = apportion(units, shares, least=[0] * len(rooms), most=most)
        if counts is not None:
            sizes = [count * multiple for count in counts]
            sizes[holder] += rest
            return consecutive(sizes)
    return None
