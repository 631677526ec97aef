"""A proposal: a plan, its facts and its prediction. Maps `partition`'s errors to users' ones."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from edge import partition
from edge.errors import CapacityError, PlanError, RequestError
from edge.partition import (
    Choice,
    ClusterSpec,
    Estimate,
    Guessing,
    ModelFacts,
    Plan,
    PlanRow,
    Repair,
    Workload,
)
from edge.planning.choosing import choose_plan, facts_of
from edge.planning.load_options import LoadOptions
from edge.planning.load_sizes import LoadSizes
from edge.planning.nothing_fits import layers_and_speed, nothing_fits
from edge.planning.overhead import Overhead
from edge.planning.rate_words import rate_in_words
from edge.planning.wire_format_choice import choose_wire_rules
from edge.protocol.step import MOST_DRAFTED, StepLimits
from edge.protocol.step_times import DRAFT_ROWS, ExpectedStep
from edge.protocol.wire_rules import WireRules
from edge.weights.checkpoint import Checkpoint
from edge.weights.format_sizes import in_words
from edge.weights.formats import KvDtype

ROUGH = "speeds are from a first look; they are measured once nothing is asked"
"""The note of a proposal from facts that were not all measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A plan, its predicted speed, and the facts that it was made from."""

    choice: Choice
    model: ModelFacts
    cluster: ClusterSpec
    workload: Workload
    """The answers that the plan was chosen for, and the KV memory that it keeps."""
    limits: StepLimits
    """Limits of steps that the plan was made for. A plan after a loss keeps them, because answers
    under way may be as long. `cached_tokens` counts the longest context of all requests."""
    notes: tuple[str, ...] = ()
    """Sentences for the user about the measurements: devices that were unsteady, or not
    measured."""
    wire_rules: WireRules
    """Wire formats of activations between the shards of the plan."""
    dtype: str
    """Name of the weight format."""
    weights: str
    """Description of the weight format, for people."""
    kv_dtype: KvDtype = "float32"
    """Number format of the KV cache."""
    overhead: Mapping[str, Overhead] = field(default_factory=dict)
    """By device id, for peers that were asked."""
    repair: Repair | None = None
    """The repair that made this plan, where it replaces another plan of the same model."""

    def __repr__(self) -> str:
        speed = ""
        if (predicted := self.choice.predicted) is not None:
            rate = rate_in_words(predicted.tokens_per_s, predicted.tokens_per_s_range)
            speed = f", {rate} tok/s predicted"
        return f"<Proposal of {self.plan}: context {self.context_tokens} tokens{speed}>"

    @property
    def plan(self) -> Plan:
        return self.choice.plan

    @property
    def is_rough(self) -> bool:
        """Whether not all facts that it was made from were measured."""
        return ROUGH in self.notes

    @property
    def context_tokens(self) -> int:
        """The longest request that it keeps memory for."""
        return self.limits.context_tokens

    @property
    def rows(self) -> list[PlanRow]:
        """The share and the memory use of each device."""
        return partition.describe(self.plan, self.model, self.cluster, self.workload)

    @property
    def streaming(self) -> str | None:
        """A sentence on weight offload: layers read per token, and the speed. None without any."""
        rows = [row for row in self.rows if row.streamed_layers]
        if not rows:
            return None
        source = "disk and the host's memory" if any(row.host_layers for row in rows) else "disk"
        return (
            f"{self.model.name} does not fit into memory and reads layers from {source} for each "
            f"token: {layers_and_speed(self.choice)}"
        )

    def predict(
        self,
        *,
        prompt_tokens: int,
        output_tokens: int,
        concurrency: int = 1,
        expert_hits: float | None = None,
    ) -> Estimate | None:
        """Predicted speed of answers of this size; None where a device was not measured.

        expert_hits: see `Workload`. Raises RequestError for impossible sizes.
        """
        try:
            workload = Workload(
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                concurrency=concurrency,
                # What answers leave unused of it holds weights.
                reserved_tokens=self.workload.cached_tokens,
                expert_hits=expert_hits,
            )
        except ValueError as error:
            raise RequestError(str(error)) from error
        if self.choice.predicted is None:
            return None
        return partition.estimate(
            self.plan, self.model, self.cluster, workload, chunk_tokens=self.limits.chunk_tokens
        )

    def with_guesses(self, right: float) -> Guessing | None:
        """Predicted speed of a request that is alone, with guesses: see `speculate` of
        `LoadOptions`. None where a device was not measured, or where tokens are never guessed.

        right: chance of a guess whose predecessors are right, 0 to 1.
        """
        devices = map(self.cluster.device, self.plan.devices)
        never = (
            self.limits.batch_invariant
            or self.limits.observes
            or self.wire_rules.rounds
            or self.kv_dtype == "int4"
            or any(each.host_memory_bytes is not None for each in devices)
        )
        if self.choice.predicted is None or never:
            return None
        return partition.guessing(
            self.plan,
            self.model,
            self.cluster,
            replace(self.workload, concurrency=1),
            right=right,
            most=MOST_DRAFTED,
            rewinds=any(kind.state_bytes for kind in self.model.kinds),
        )

    def step_s(self, rows: float, *, prompt_tokens: int, output_tokens: int) -> float | None:
        """Predicted seconds of a step that verifies a draft, half-way through an answer of this
        size: of so many rows (tokens) of a request that is alone. None where a device was not
        measured."""
        if self.choice.predicted is None:
            return None
        alone = Workload(
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            reserved_tokens=self.workload.cached_tokens,
        )
        return partition.step_s(self.plan, self.model, self.cluster, alone, rows=rows)

    def expected_steps(self, context_tokens: int) -> dict[str, ExpectedStep]:
        """Predicted compute time of a token of one request, by device id.

        Without devices that have several shards, because each shard times its own steps. Empty
        where nothing is predicted.
        """
        first = self.predict(prompt_tokens=1, output_tokens=1)
        last = self.predict(prompt_tokens=context_tokens, output_tokens=1)
        if first is None or last is None:
            return {}
        last_s = dict(last.device_s)
        steps_s = (self.step_s(rows, prompt_tokens=1, output_tokens=1) for rows in DRAFT_ROWS)
        draft_steps_s = tuple(each for each in steps_s if each is not None)
        shards = Counter(shard.device for stage in self.plan.stages for shard in stage.shards)
        return {
            device: ExpectedStep(
                first_s=first_s,
                last_s=last_s[device],
                tokens=context_tokens,
                draft_steps_s=draft_steps_s,
            )
            for device, first_s in first.device_s
            if shards[device] == 1 and first_s > 0
        }


def propose(
    checkpoint: Checkpoint,
    cluster: ClusterSpec,
    options: LoadOptions,
    sizes: LoadSizes,
    *,
    changes: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Proposal:
    """The proposal for these options and sizes, checked against the model and the devices.

    `changes` are made to the cluster first, in the words that `partition.what_if` knows;
    `notes` are kept with the proposal.

    Layers are read from disk where `sizes` say so; with `stream="auto"`, `measured_proposal`
    decides it. Raises PlanError with every violation, CapacityError with what is missing on which
    device and the largest dtype that would fit, RequestError for a change that makes no sense.
    """
    for change in changes:
        try:
            cluster = partition.what_if(cluster, change)
        except ValueError as error:
            raise RequestError(str(error)) from error
    with errors_for_users(checkpoint, cluster, options, sizes):
        choice = choose_plan(checkpoint, cluster, options, sizes)
        partition.check_links(choice.plan, cluster)
    weight_format = options.weight_format(checkpoint)
    return Proposal(
        choice=choice,
        model=facts_of(checkpoint, options, sizes.limits),
        cluster=cluster,
        workload=sizes.workload,
        limits=sizes.limits,
        notes=tuple(notes),
        wire_rules=choose_wire_rules(
            options.wire,
            choice.plan,
            links=cluster.links,
            weight_format=weight_format,
        ),
        dtype=weight_format.name,
        weights=in_words(checkpoint.spec, weight_format),
        kv_dtype=options.kv_dtype,
    )


def in_form_of(proposal: Proposal, checkpoint: Checkpoint, options: LoadOptions) -> Proposal:
    """The proposal with the sizes of weights in the format of these options."""
    weight_format = options.weight_format(checkpoint)
    return replace(
        proposal,
        model=facts_of(checkpoint, options, proposal.limits),
        dtype=weight_format.name,
        weights=in_words(checkpoint.spec, weight_format),
    )


@contextlib.contextmanager
def errors_for_users(
    checkpoint: Checkpoint, cluster: ClusterSpec, options: LoadOptions, sizes: LoadSizes
) -> Iterator[None]:
    """Maps errors of `partition` in its body to errors for users, with remedies."""
    try:
        yield
    except partition.PlanError as error:
        raise PlanError(str(error), error.problems) from error
    except partition.CapacityError as error:
        raise CapacityError(nothing_fits(error, checkpoint, cluster, options, sizes)) from error
