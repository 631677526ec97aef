"""From a checkpoint, peers and options to a plan: facts for `partition`, its errors for users."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations

import partition
from edge.errors import CapacityError, PlanError, RequestError
from edge.host.free_memory import format_size
from edge.memory.model_sizes import model_facts
from edge.planning.load_options import LoadOptions
from edge.planning.wire_format_choice import choose_wire_rules
from edge.protocol.wire_rules import WireRules
from edge.weights.checkpoint import Checkpoint
from partition import (
    Choice,
    ClusterSpec,
    Estimate,
    LeftOut,
    ModelFacts,
    Parallel,
    Plan,
    PlanRow,
    Solo,
    Stage,
    Workload,
    whole_shard,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """What a device's memory holds beside weights and KV caches."""

    promised_bytes: int
    """What its process stays under."""
    floor_bytes: int
    """What the process takes of itself."""
    buffer_bytes: int
    """What the model's largest step takes at most, whatever the plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A plan, how fast it should be, and the facts that it was made from."""

    choice: Choice
    model: ModelFacts
    cluster: ClusterSpec
    workload: Workload
    """What the plan was chosen for, and what memory it keeps."""
    chunk_tokens: int
    notes: tuple[str, ...] = ()
    """What its user should know of the measuring: devices that were unsteady, or not measured."""
    wire_rules: WireRules
    """In which form activations travel between the shards of the plan."""
    beside: Mapping[str, Beside] = field(default_factory=dict)
    """By device; of peers that were asked."""

    @property
    def plan(self) -> Plan:
        return self.choice.plan

    @property
    def rows(self) -> list[PlanRow]:
        """What the plan gives each device and costs it."""
        return partition.describe(self.plan, self.model, self.cluster, self.workload)

    @property
    def streaming(self) -> str | None:
        """What reading layers for each token means, in a sentence; None where none is read."""
        rows = [row for row in self.rows if row.streamed_layers]
        if not rows:
            return None
        source = "disk and the host's memory" if any(row.host_layers for row in rows) else "disk"
        return (
            f"{self.model.name} does not fit into memory and reads layers from {source} for each "
            f"token: {_layers_and_speed(self.choice)}"
        )

    def predict(
        self, *, prompt_tokens: int, output_tokens: int, concurrency: int = 1
    ) -> Estimate | None:
        """How fast answers of this size should be; None where a device was not measured."""
        if self.choice.predicted is None:
            return None
        workload = Workload(
            prompt_tokens=prompt_tokens, output_tokens=output_tokens, concurrency=concurrency
        )
        return partition.estimate(
            self.plan, self.model, self.cluster, workload, chunk_tokens=self.chunk_tokens
        )


def propose(
    checkpoint: Checkpoint,
    cluster: ClusterSpec,
    options: LoadOptions,
    *,
    changes: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Proposal:
    """The plan asked for, checked against the model and the devices.

    `changes` are made to the cluster first, in the words that `partition.what_if` knows;
    `notes` are kept with the proposal.

    Layers are read from disk with `stream="on"` alone: when "auto" means that, `measured_proposal`
    knows. Raises PlanError with every violation, CapacityError with what is missing on whom and the
    largest dtype that would fit, RequestError for a change or a workload that makes no sense.
    """
    for change in changes:
        try:
            cluster = partition.what_if(cluster, change)
        except ValueError as error:
            raise RequestError(str(error)) from error
    workload = options.planned_workload(checkpoint.spec)
    limits = options.limits(checkpoint.spec)
    facts = facts_of(checkpoint, options)
    stream = options.stream == "on"
    try:
        choice = _choose(facts, cluster, workload, options.plan, limits.chunk_tokens, stream=stream)
        partition.check_links(choice.plan, cluster)
    except partition.PlanError as error:
        raise PlanError(" ".join(error.problems), error.problems) from error
    except partition.CapacityError as error:
        told = _of_context(error, limits.context_tokens)
        hint = _what_would_fit(checkpoint, cluster, options)
        if stream:
            hint += _even_streamed(facts, cluster, workload)
        else:
            hint += _if_streamed(facts, cluster, workload, options, limits.chunk_tokens)
        raise CapacityError(f"{told} {hint}") from error
    return Proposal(
        choice=choice,
        model=facts,
        cluster=cluster,
        workload=workload,
        chunk_tokens=limits.chunk_tokens,
        notes=tuple(notes),
        wire_rules=choose_wire_rules(
            options.wire,
            choice.plan,
            links=cluster.links,
            weight_format=options.weight_format,
        ),
    )


def facts_of(checkpoint: Checkpoint, options: LoadOptions) -> ModelFacts:
    """What each piece of the checkpoint weighs when it is loaded like this."""
    return model_facts(
        checkpoint.spec,
        options.weight_format,
        name=checkpoint.name,
        embedding_itemsize=checkpoint.embedding_itemsize,
        kv_dtype=options.kv_dtype,
        wire=options.wire,
    )


def _choose(
    facts: ModelFacts,
    cluster: ClusterSpec,
    workload: Workload,
    wanted: Parallel | Plan,
    chunk_tokens: int,
    *,
    stream: bool,
) -> Choice:
    if not isinstance(wanted, Plan):
        return partition.choose(
            facts, cluster, workload, parallel=wanted, chunk_tokens=chunk_tokens, stream=stream
        )
    plan = by_id(wanted, cluster)
    partition.check_fit(plan, facts, cluster, workload)
    predicted = None
    if _is_measured(plan, cluster):
        predicted = partition.estimate(plan, facts, cluster, workload, chunk_tokens=chunk_tokens)
    return Choice(
        plan=plan,
        predicted=predicted,
        solo=_solo(facts, cluster, workload, chunk_tokens),
        left_out=tuple(
            LeftOut(device=device.id, name=device.name, reason="the plan by hand does not use it")
            for device in cluster.devices
            if device.id not in plan.devices
        ),
        runners_up=(),
    )


def _is_measured(plan: Plan, cluster: ClusterSpec) -> bool:
    """Whether all that decides the speed of the plan is known, rather than supposed."""
    links = {(link.source, link.target) for link in cluster.links}
    return all(cluster.device(device).rates is not None for device in plan.devices) and all(
        pair in links for pair in permutations(plan.devices, 2)
    )


def _solo(
    facts: ModelFacts, cluster: ClusterSpec, workload: Workload, chunk_tokens: int
) -> Solo | None:
    """The best device alone, to compare a plan by hand with."""
    try:
        return partition.choose(facts, cluster, workload, chunk_tokens=chunk_tokens).solo
    except partition.PartitionError:
        return None


def _of_context(error: partition.CapacityError, context_tokens: int) -> partition.CapacityError:
    """The same, said of the longest context, which memory is kept for, instead of the workload's.

    The two are in proportion.
    """
    largest = error.largest_context_tokens
    if largest is not None:
        largest = largest * context_tokens // error.context_tokens
    return partition.CapacityError(
        error.shortages, context_tokens=context_tokens, largest_context_tokens=largest or None
    )


def _what_would_fit(checkpoint: Checkpoint, cluster: ClusterSpec, options: LoadOptions) -> str:
    """The most precise of the smaller formats for which there is a plan."""
    workload = options.planned_workload(checkpoint.spec)
    chunk_tokens = options.limits(checkpoint.spec).chunk_tokens
    for smaller in _smaller(options):
        facts = facts_of(checkpoint, smaller)
        try:
            _choose(
                facts,
                cluster,
                workload,
                options.plan,
                chunk_tokens,
                stream=options.stream == "on",
            )
        except partition.PartitionError:
            continue
        return f"With {smaller.dtype} in blocks of {smaller.block_size} it would fit."
    return "No smaller dtype would be enough by itself."


def _if_streamed(
    facts: ModelFacts,
    cluster: ClusterSpec,
    workload: Workload,
    options: LoadOptions,
    chunk_tokens: int,
) -> str:
    """What reading layers from disk would do, if it would do."""
    if isinstance(options.plan, Plan):
        return ""
    try:
        choice = _choose(facts, cluster, workload, options.plan, chunk_tokens, stream=True)
    except partition.PartitionError:
        return ""
    return (
        " Or let it read what does not fit from disk for each token (--stream auto, "
        f'stream="auto"): {_layers_and_speed(choice)}.'
    )


def _layers_and_speed(choice: Choice) -> str:
    """How many layers are read from disk, and how fast that is."""
    layers = sum(max(s.streamed_layers for s in stage.slices) for stage in choice.plan.stages)
    speed = "how fast is not known"
    if choice.predicted is not None:
        speed = f"at about {choice.predicted.tokens_per_s:.2g} tok/s"
    return f"{layers} of {choice.plan.stages[-1].layers.stop} layers, {speed}"


def _even_streamed(facts: ModelFacts, cluster: ClusterSpec, workload: Workload) -> str:
    """What one device needs at least to run the model alone, from its disk."""
    if not cluster.devices:
        return ""
    device = max(cluster.devices, key=lambda each: each.memory_bytes)
    shard = whole_shard(
        device.id, facts, vocab=range(facts.vocab_size), streamed_layers=facts.num_layers
    )
    plan = Plan(
        model=facts.name,
        version=0,
        stages=(Stage(layers=range(facts.num_layers), shards=(shard,)),),
    )
    use = partition.memory_use(plan, facts, workload)[device.id]
    head_bytes = facts.vocab_size * facts.head_row_bytes
    norm_bytes = sum(facts.kinds[kind].layer_bytes for kind in facts.layers)
    window_bytes = use.weight_bytes - head_bytes - norm_bytes
    return (
        f" Even with every layer read from disk it takes {format_size(use.total)} on one device"
        f" ({format_size(window_bytes)} for the layer that computes and the one that is read"
        f" meanwhile, {format_size(head_bytes)} for the head, {format_size(norm_bytes)} for norms"
        f" and biases, {format_size(use.kv_bytes)} for {workload.cached_tokens} tokens of keys and"
        f" values), and {device.name} has {format_size(device.memory_bytes)} for it, beside what"
        " its process and its steps take."
    )


def _smaller(options: LoadOptions) -> Iterator[LoadOptions]:
    """The same in formats of fewer bytes, largest first."""
    now_bytes = options.weight_format.packed_bytes_per_weight
    for dtype, block_size in (
        ("int8", options.block_size),
        ("int4", options.block_size),
        ("int4", 128),
    ):
        smaller = replace(options, dtype=dtype, block_size=block_size)
        if smaller.weight_format.packed_bytes_per_weight < now_bytes:
            yield smaller


def by_id(plan: Plan, cluster: ClusterSpec) -> Plan:
    """A plan written with devices' names, with their ids instead.

    PlanError for a name that several have.
    """
    devices = cluster.devices
    ids = {device.id for device in devices}
    count = Counter(device.name for device in devices)
    unclear = [id for id in plan.devices if id not in ids and count[id] > 1]
    if unclear:
        raise partition.PlanError(
            [
                f"{count[name]} devices are called {name!r}; name the one that is meant by its id"
                " (edge peers --json tells ids)."
                for name in unclear
            ]
        )
    names = {device.name: device.id for device in devices if count[device.name] == 1}
    return replace(
        plan,
        stages=tuple(
            replace(
                stage,
                shards=tuple(
                    shard
                    if shard.device in ids
                    else shard.on(names.get(shard.device, shard.device))
                    for shard in stage.shards
                ),
            )
            for stage in plan.stages
        ),
    )
