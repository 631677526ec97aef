"""The plan: which device holds which layers, heads, feed-forward columns and vocabulary rows.

Data and its rules. How a good plan is found is decided elsewhere.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from partition.errors import PlanError
from partition.plan.facts import ClusterSpec, ModelFacts
from partition.plan.reading import Reader

MOST_SHARDS = 1024
"""Shards a plan read from outside may have, in all its stages together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One device's slice of a stage. Ranges are half-open with step 1, and may be empty."""

    device: str
    """The id of the device."""
    heads: range
    """Query heads; `kv_heads` says which KV heads go along."""
    ffn_columns: range
    vocab: range
    """Rows of the embedding in the first stage and of the head in the last, of both if it is one
    and the same stage; empty in stages between."""
    streamed_layers: int = 0
    """So many of the stage's layers keep their matrices on disk and read them for each step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A run of layers, held together by its shards."""

    layers: range
    shards: tuple[Shard, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The whole assignment of one model to devices. No device appears twice."""

    model: str
    """The name of the model, as in its ModelFacts."""
    version: int
    """Counts up with every new plan for a running model, so that late messages are recognised."""
    stages: tuple[Stage, ...]

    @property
    def devices(self) -> tuple[str, ...]:
        """The ids of all devices, first stage first, each stage in the order of its shards."""
        return tuple(shard.device for stage in self.stages for shard in stage.shards)

    def to_json(self) -> dict[str, object]:
        """Built-in types only; `from_json` of it is an equal plan. Ranges become [start, stop]."""
        return {
            "model": self.model,
            "version": self.version,
            "stages": [
                {
                    "layers": _bounds(stage.layers),
                    "shards": [
                        {
                            "device": shard.device,
                            "heads": _bounds(shard.heads),
                            "ffn_columns": _bounds(shard.ffn_columns),
                            "vocab": _bounds(shard.vocab),
                            "streamed_layers": shard.streamed_layers,
                        }
                        for shard in stage.shards
                    ],
                }
                for stage in self.stages
            ],
        }

    @classmethod
    def from_json(cls, obj: object) -> "Plan":
        """Read a plan from untrusted JSON, already parsed.

        Checks shape, types and sizes, not whether the plan suits a model: that is `validate`.
        Raises PlanError with every problem; nothing else, whatever `obj` is.
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
            # Stop before looking at any: the same list can be given again for every stage.
            reader.problems.append(
                f"The plan has {num_shards:,} shards; {MOST_SHARDS:,} is the most."
            )
            raise PlanError(reader.problems)
        plan = cls(
            model=reader.name(model, "model"),
            version=reader.integer(version, "version"),
            stages=tuple(
                Stage(
                    layers=reader.bounds(layers, f"{where}.layers"),
                    shards=tuple(
                        _read_shard(reader, entry, f"{where}.shards[{number}]")
                        for number, entry in enumerate(entries)
                    ),
                )
                for where, layers, entries in listed
            ),
        )
        if reader.problems:
            raise PlanError(reader.problems)
        return plan

    def validate(self, model: ModelFacts, cluster: ClusterSpec | None) -> None:
        """Raise PlanError with every problem unless this plan can run `model` on `cluster`.

        Memory is not looked at (see `check_fit`). Without a cluster any device id is good.
        """
        problems = [
            *self._name_problems(model),
            *_layer_problems(self.stages, model),
            *_device_problems(self.stages, cluster),
        ]
        for number, stage in enumerate(self.stages):
            outer = number in (0, len(self.stages) - 1)
            problems += _stage_problems(number, stage, model, outer=outer)
        if problems:
            raise PlanError(problems)

    def _name_problems(self, model: ModelFacts) -> Iterator[str]:
        if self.model != model.name:
            yield f"The plan is for model {self.model!r}, not for {model.name!r}."
        if self.version < 0:
            yield f"The plan's version is {self.version}; versions count from 0."


def _bounds(indices: range) -> list[int]:
    return [indices.start, indices.stop]


def _read_shard(reader: Reader, value: object, where: str) -> Shard:
    # Left out by whoever writes a plan by hand and streams nothing.
    given = {"streamed_layers": 0, **value} if isinstance(value, dict) else value
    device, heads, ffn_columns, vocab, streamed = reader.fields(
        given, ("device", "heads", "ffn_columns", "vocab", "streamed_layers"), where
    )
    return Shard(
        device=reader.name(device, f"{where}.device"),
        heads=reader.bounds(heads, f"{where}.heads"),
        ffn_columns=reader.bounds(ffn_columns, f"{where}.ffn_columns"),
        vocab=reader.bounds(vocab, f"{where}.vocab"),
        streamed_layers=reader.integer(streamed, f"{where}.streamed_layers"),
    )


def _layer_problems(stages: Sequence[Stage], model: ModelFacts) -> Iterator[str]:
    if not stages:
        yield "The plan has no stages."
        return
    for number, stage in enumerate(stages):
        if not stage.layers:
            yield f"Stage {number} has no layers."
    names = [f"Stage {number}" for number in range(len(stages))]
    yield from _tiling_problems(
        "layers", names, [stage.layers for stage in stages], model.num_layers, "All stages"
    )


def _device_problems(stages: Sequence[Stage], cluster: ClusterSpec | None) -> Iterator[str]:
    known = None if cluster is None else {device.id for device in cluster.devices}
    used: dict[str, str] = {}
    for stage_number, stage in enumerate(stages):
        for shard_number, shard in enumerate(stage.shards):
            place = f"stage {stage_number}, shard {shard_number}"
            if shard.device in used:
                yield f"Device {shard.device!r} is used twice: {used[shard.device]} and {place}."
            elif known is not None and shard.device not in known:
                yield f"Device {shard.device!r} of {place} is not in the cluster."
            used.setdefault(shard.device, place)


def _stage_problems(number: int, stage: Stage, model: ModelFacts, *, outer: bool) -> Iterator[str]:
    """`outer`: the first or last stage, which shares out the vocabulary."""
    shards = stage.shards
    if not shards:
        yield f"Stage {number} has no shards."
        return
    names = [
        f"Stage {number}, shard {index} (device {shard.device!r})"
        for index, shard in enumerate(shards)
    ]
    heads = [shard.heads for shard in shards]
    yield from _tiling_problems("heads", names, heads, model.num_heads, f"Stage {number}")
    columns = [shard.ffn_columns for shard in shards]
    yield from _tiling_problems(
        "feed-forward columns",
        names,
        columns,
        model.ffn_columns,
        f"Stage {number}",
        multiple=model.column_multiple,
    )
    if outer:
        rows = [shard.vocab for shard in shards]
        yield from _tiling_problems(
            "vocabulary rows", names, rows, model.vocab_size, f"Stage {number}"
        )
    for name, shard in zip(names, shards, strict=True):
        if shard.vocab and not outer:
            yield f"{name} has vocabulary rows, which only the first and last stage hold."
        if not 0 <= shard.streamed_layers <= len(stage.layers):
            yield (
                f"{name} streams {shard.streamed_layers} layers, and the stage has"
                f" {len(stage.layers)}."
            )
        if not (shard.heads or shard.ffn_columns or (shard.vocab and outer)):
            yield f"{name} has nothing to do."


def _tiling_problems(
    what: str,
    names: Sequence[str],
    parts: Sequence[range],
    total: int,
    owner: str,
    *,
    multiple: int = 1,
) -> Iterator[str]:
    """What keeps `parts` from covering 0..total once, in order. Empty parts may lie anywhere."""
    reached = 0
    for name, part in zip(names, parts, strict=True):
        if not part:
            continue
        if part.step != 1:
            yield f"{name} has {what} in steps of {part.step}; they must be contiguous."
        elif part.start != reached:
            yield f"{name} has {what} from {part.start}, where {reached} would be next."
        elif part.start % multiple:
            yield f"{name} has {what} from {part.start}, which is no multiple of {multiple}."
        reached = part.stop
    if reached != total:
        yield f"{owner}: the {what} end at {reached}, and the model has {total}."
