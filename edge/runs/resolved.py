"""A resolved load: all settings with which a plan's shards are loaded, decided once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from edge.host.identity import host_id
from edge.memory.windows import with_windows
from edge.models.spec import ModelSpec
from edge.partition import Plan
from edge.planning.kv_copies import FAST_BYTES_PER_S, kv_copies
from edge.planning.kv_limits import kv_limits
from edge.planning.load_options import LoadOptions
from edge.planning.proposal import Proposal
from edge.protocol.assignment import Copies
from edge.protocol.peer_info import PeerInfo
from edge.protocol.step import StepLimits
from edge.protocol.step_times import ExpectedStep
from edge.protocol.topology import Seat
from edge.protocol.wire_rules import WireRules
from edge.runs.prefix_exchange import ExchangeFacts
from edge.weights.checkpoint import Checkpoint
from edge.weights.formats import KvDtype, WeightFormat
from edge.weights.further import FurtherHead, further_of
from edge.weights.layout import ShardLayout, shard_layout

USUAL_TOKENS_PER_S = 1000.0
"""Tokens of a prompt that a plan is taken to compute per second where devices are not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedLoad:
    """The settings of a load on one plan. No option is left to "auto"."""

    plan: Plan
    spec: ModelSpec
    """The spec with the grades of its layers, which decide the rounding of each, and with what
    layers with a sliding window keep."""
    weight_format: WeightFormat
    limits: StepLimits
    kv_dtype: KvDtype
    wire_rules: WireRules
    copies: Copies = "none"
    """The keys and values of which peers send copies, for failover."""
    share_prefixes: bool = False
    """Prefix caches of this load may be used by other coordinators of the cluster."""
    trusted: tuple[str, ...] = ()
    """Ids of devices whose prefix caches this load may use."""
    spot_check: float = 0.0
    """The share of steps after which a peer proves its arithmetic again."""
    expected: Mapping[str, ExpectedStep] = field(default_factory=dict)
    """Predicted times of the devices' steps, by id, where a prediction exists."""
    exchange_facts: ExchangeFacts | None = None
    """For stored prefixes that some devices lack; None: these are computed."""

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        options: LoadOptions,
        proposal: Proposal,
        peers: Sequence[PeerInfo],
    ) -> ResolvedLoad:
        """The load for the plan of a proposal. peers: as they describe themselves now.

        Raises CapacityError if the longest context fits nowhere.
        """
        weight_format = options.weight_format(checkpoint)
        return cls(
            plan=proposal.plan,
            spec=with_windows(weight_format.graded(checkpoint.spec), proposal.limits),
            weight_format=weight_format,
            limits=kv_limits(
                proposal.limits, proposal.plan, proposal.model, proposal.cluster, peers
            ),
            kv_dtype=options.kv_dtype,
            wire_rules=proposal.wire_rules,
            copies=kv_copies(options.standby, proposal, here=host_id()),
            share_prefixes=options.share_prefixes,
            trusted=options.trusted,
            spot_check=options.spot_check,
            expected=proposal.expected_steps(proposal.context_tokens),
            exchange_facts=_exchange_facts(proposal, options),
        )

    def layout(self, seat: Seat) -> ShardLayout:
        """The slices of the weights that the shard of this seat holds."""
        return shard_layout(self.spec, self.plan, stage=seat[0], rank=seat[1])

    def further(self, seat: Seat) -> FurtherHead | None:
        """The further head that the shard of this seat computes, too."""
        return further_of(self.spec, self.plan, seat, self.weight_format)


def _exchange_facts(proposal: Proposal, options: LoadOptions) -> ExchangeFacts | None:
    """The predicted rates; None where stored prefixes are not exchanged: with one device, rounded
    keys and values, whose scales are each shard's own, or `batch_invariant`.

    The link from a device to its coordinator is not measured: the slowest between the plan's
    devices stands for it, and FAST_BYTES_PER_S on one machine.
    """
    planned, cluster = set(proposal.plan.devices), proposal.cluster
    if len(planned) < 2 or options.kv_dtype != "float32" or options.batch_invariant:
        return None
    rates = [each.bytes_per_s for each in cluster.links if {each.source, each.target} <= planned]
    if all(cluster.device(id).host == host_id() for id in planned):
        rates.append(FAST_BYTES_PER_S)
    if not rates:
        return None
    whole = proposal.predict(prompt_tokens=proposal.context_tokens, output_tokens=1)
    tokens_per_s = USUAL_TOKENS_PER_S
    if whole is not None:
        tokens_per_s = proposal.context_tokens / whole.first_token_s
    return ExchangeFacts(
        bytes_per_s=min(rates),
        prompt_tokens_per_s=tokens_per_s,
        has_states=any(kind.state_bytes or kind.window_bytes for kind in proposal.model.kinds),
    )
