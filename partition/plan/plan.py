"""The plan: which device has which share of which stage.

Data, its rules and its JSON. The search for a good plan is in `search`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from edge.partition.errors import PlanError
from edge.partition.plan.facts import ClusterSpec, ModelFacts
from edge.partition.plan.reading import Reader
from edge.partition.plan.shard import Shard
from edge.partition.plan.share import Share, StagePlace, tiling_problems

MOST_SHARDS = 1024
"""The most shares of a plan that is read from outside, over all its stages."""

SHARE_KINDS: dict[str, type[Share]] = {kind.kind: kind for kind in (Shard,)}
"""Every kind of share, by its name in JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A run of layers, divided among its shares."""

    layers: range
    shards: tuple[Share, ...]

    @property
    def slices(self) -> tuple[Shard, ...]:
        """The shares, as slices of layers. PlanError where a share is of another kind."""
        found = tuple(share for share in self.shards if isinstance(share, Shard))
        if len(found) != len(self.shards):
            kinds = sorted({share.kind for share in self.shards} - {Shard.kind})
            raise PlanError([f"Shares of kind {', '.join(kinds)} cannot be used here."])
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The whole assignment of one model to devices.

    A plan that replaces another one after a loss may give a device several shares. Each then
    computes and sums as if it were on a device of its own.
    """

    model: str
    """The name of the model, as in its ModelFacts."""
    version: int
    """Counts up with every new plan of a running model, so that late messages are recognised."""
    stages: tuple[Stage, ...]

    def __repr__(self) -> str:
        stages, devices = len(self.stages), len(self.devices)
        return (
            f"<Plan {self.version} of {self.model}: {stages} stage{'s' if stages > 1 else ''} on "
            f"{devices} device{'s' if devices > 1 else ''}>"
        )

    @property
    def devices(self) -> tuple[str, ...]:
        """The ids of all devices, each once, in the order of stages and shares."""
        return tuple(dict.fromkeys(share.device for share in self.shares))

    @property
    def shares(self) -> tuple[Share, ...]:
        """The shares of all stages, in order."""
        return tuple(share for stage in self.stages for share in stage.shards)

    @property
    def streamed_layers(self) -> int:
        """Layers that are read from disk for each step, summed over all shards."""
        return sum(shard.streamed_layers for stage in self.stages for shard in stage.slices)

    def place(self, number: int) -> StagePlace:
        """The place of stage `number`."""
        return StagePlace(
            number=number,
            layers=self.stages[number].layers,
            is_first=number == 0,
            is_last=number == len(self.stages) - 1,
        )

    def to_json(self) -> dict[str, object]:
        """Built-in types only; `from_json` reads it back as an equal plan. Ranges become [start,
        stop]."""
        return {
            "model": self.model,
            "version": self.version,
            "stages": [
                {
                    "layers": [stage.layers.start, stage.layers.stop],
                    "shards": [_written(share) for share in stage.shards],
                }
                for stage in self.stages
            ],
        }

    @classmethod
    def from_json(cls, obj: object) -> "Plan":
        """Read a plan from untrusted JSON, already parsed.

        Checks shape, types and sizes. Whether the plan suits a model is the task of `validate`.
        Raises PlanError with every problem, and no other error for any `obj`.
        """
        reader = Reader()
        model, version, stages = reader.fields(obj, ("model", "version", "stages"), "The plan")
        listed: list[tuple[str, object, list[object]]] = []
        num_shards = 0
        for number, item in enumerate(reader.items(stages, "stages", most=MOST_SHARDS)):
            where = f"stages[{number}]"
            layers, shards = reader.fields(item, ("layers", "shards"), where)
            entries = reader.items(shards, f"{where}.shards", most=MOST_SHARDS)
            num_shards += len(entries)
            listed.append((where, layers, entries))
        if num_shards > MOST_SHARDS:
            # Stop before any share is read: JSON can repeat one long list in every stage.
            reader.problems.append(
                f"The plan has {num_shards:,} shards; {MOST_SHARDS:,} is the most."
            )
            raise PlanError(reader.problems)
        name, own_version = reader.name(model, "model"), reader.integer(version, "version")
        read = [
            (
                reader.bounds(layers, f"{where}.layers"),
                [
                    _read_share(reader, entry, f"{where}.shards[{number}]")
                    for number, entry in enumerate(entries)
                ],
            )
            for where, layers, entries in listed
        ]
        if reader.problems:
            raise PlanError(reader.problems)
        return cls(
            model=name,
            version=own_version,
            stages=tuple(
                Stage(layers=layers, shards=tuple(share for share in shares if share is not None))
                for layers, shares in read
            ),
        )

    def validate(
        self, model: ModelFacts, cluster: ClusterSpec | None, *, is_repaired: bool = False
    ) -> None:
        """Raise PlanError with every problem unless this plan can run `model` on `cluster`.

        Does not check memory (see `check_fit`). Without a cluster, any device id is accepted.
        is_repaired: a device may have several shares; otherwise that is a problem.
        """
        names = None if cluster is None else {each.id: each.name for each in cluster.devices}
        problems = [
            *self._name_problems(model),
            *_layer_problems(self.stages, model),
            *_device_problems(self.stages, names, may_repeat=is_repaired),
        ]
        for number, stage in enumerate(self.stages):
            problems += _stage_problems(stage, self.place(number), model, names or {})
        if problems:
            raise PlanError(problems)

    def _name_problems(self, model: ModelFacts) -> Iterator[str]:
        if self.model != model.name:
            yield f"The plan is for model {self.model!r}, not for {model.name!r}."
        if self.version < 0:
            yield f"The plan's version is {self.version}; versions count from 0."


def _written(share: Share) -> dict[str, object]:
    """The JSON of a share; the kind is left out for slices of layers, the usual kind."""
    kind = {} if share.kind == Shard.kind else {"kind": share.kind}
    return {**kind, **share.to_json()}


def _read_share(reader: Reader, value: object, where: str) -> Share | None:
    """The share, or None after noting a problem where `value` is no share."""
    if not isinstance(value, Mapping):
        reader.fields(value, (), where)
        return None
    fields = dict(value)
    kind = fields.pop("kind", Shard.kind)
    if not isinstance(kind, str) or kind not in SHARE_KINDS:
        known = ", ".join(map(repr, SHARE_KINDS))
        reader.problems.append(f"{where}.kind must be one of {known}.")
        return None
    return SHARE_KINDS[kind].read(reader, fields, where)


def _layer_problems(stages: Sequence[Stage], model: ModelFacts) -> Iterator[str]:
    if not stages:
        yield "The plan has no stages."
        return
    for number, stage in enumerate(stages):
        if not stage.layers:
            yield f"Stage {number} has no layers."
    names = [f"Stage {number}" for number in range(len(stages))]
    yield from tiling_problems(
        "layers", names, [stage.layers for stage in stages], model.num_layers, "All stages"
    )


def _device_problems(
    stages: Sequence[Stage], names: Mapping[str, str] | None, *, may_repeat: bool
) -> Iterator[str]:
    """names: the cluster's devices by id. None: any device is accepted."""
    used: dict[str, str] = {}
    for stage_number, stage in enumerate(stages):
        for shard_number, shard in enumerate(stage.shards):
            place = f"stage {stage_number}, shard {shard_number}"
            if shard.device in used and not may_repeat:
                name = (names or {}).get(shard.device, shard.device)
                yield f"Device {name!r} is used twice: {used[shard.device]} and {place}."
            elif names is not None and shard.device not in names:
                yield f"Device {shard.device!r} of {place} is not in the cluster."
            used.setdefault(shard.device, place)


def _stage_problems(
    stage: Stage, place: StagePlace, model: ModelFacts, names_by_id: Mapping[str, str]
) -> Iterator[str]:
    if not stage.shards:
        yield f"Stage {place.number} has no shards."
        return
    devices = [names_by_id.get(share.device, share.device) for share in stage.shards]
    names = [
        f"Stage {place.number}, shard {index} (device {device!r})"
        for index, device in enumerate(devices)
    ]
    kinds = {type(share) for share in stage.shards}
    if len(kinds) > 1:
        yield f"Stage {place.number} has shares of {len(kinds)} kinds; they must be of one."
        return
    yield from kinds.pop().problems(names, stage.shards, place, model)
