"""An assignment: all facts that one peer needs to run its shard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from edge.models.spec import ModelSpec
from edge.partition import Plan
from edge.protocol.step import (
    MAX_CHUNK_TOKENS,
    MAX_REQUESTS,
    MAX_SAVED_STATES,
    StepLimits,
)
from edge.protocol.topology import Seat
from edge.protocol.wire_rules import WireRules
from edge.weights.formats import KvDtype, WeightFormat
from edge.weights.further import FurtherHead, further_in, further_of
from edge.weights.layout import ShardLayout, shard_layout

Copies = Literal["none", "answers", "all"]
"""Keys and values of which copies are sent: none, of answers, or of prompts and answers ("all")."""

COPIED_TOKENS: Mapping[Copies, int] = {"answers": 32, "all": 8}
"""Tokens of an answer in one copy. A frame costs the same for one token and for several. Where two
peers on two cores made 200 tokens per second, copies of 8 tokens took 7 % of the time, and copies
of 32 took 3 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One shard of one loaded model, for one coordinator. ValueError for impossible values."""

    session: str
    model: ModelSpec
    plan: Plan
    stage: int
    rank: int
    weight_format: WeightFormat
    manifest_digest: str
    limits: StepLimits
    kv_dtype: KvDtype
    weights_digest: str
    """Digest of the whole model's weights, because weights of other shards also change what this
    shard computes."""
    wire_rules: WireRules
    """The same for every shard of the plan, so both ends of a link agree."""
    copies_kv: Copies = "none"
    """The keys and values of which the coordinator wants copies."""

    def __post_init__(self) -> None:
        stages, limits = self.plan.stages, self.limits
        if self.stage >= len(stages):
            raise ValueError(f"the plan has no stage {self.stage}")
        if self.rank >= len(stages[self.stage].shards):
            raise ValueError(f"stage {self.stage} has no rank {self.rank}")
        if not 0 < limits.context_tokens <= self.model.context_tokens:
            raise ValueError(
                f"a context of {limits.context_tokens} tokens; the model has "
                f"{self.model.context_tokens}"
            )
        if not 0 < limits.chunk_tokens <= MAX_CHUNK_TOKENS:
            raise ValueError(f"chunks of {limits.chunk_tokens} tokens; 1 to {MAX_CHUNK_TOKENS}")
        if not 0 < limits.requests <= MAX_REQUESTS:
            raise ValueError(f"{limits.requests} requests at once; 1 to {MAX_REQUESTS}")
        if limits.saved_states > MAX_SAVED_STATES:
            raise ValueError(f"{limits.saved_states} places for states; 0 to {MAX_SAVED_STATES}")
        kept = [each.kept_tokens for each in self.model.attentions.values() if each.kept_tokens]
        if bool(kept) != bool(limits.windows) or limits.windows > limits.requests + 1:
            raise ValueError(f"windows of {limits.windows} requests, in {len(kept)} layers")
        if kept and (self.model.has_states or self.kv_dtype == "int4"):
            raise ValueError("layers that keep the newest tokens only, beside states")
        if any(each > limits.context_tokens for each in kept):
            raise ValueError("layers that keep more tokens than the context has")
        if not limits.cached_tokens:
            raise ValueError("no memory for the keys and values of one token")
        if max(limits.cached_tokens, limits.disk_tokens) < limits.context_tokens:
            raise ValueError("neither memory nor disk has room for the longest request")
        if self.model.joins_states:
            raise ValueError("a further head is not a model by itself")
        further_in(self.model, self.weight_format)  # raises ValueError for one that cannot be
        rules = self.wire_rules
        if len(rules.sums) != len(stages) or len(rules.hops) != len(stages) - 1:
            raise ValueError(f"wire rules for {len(rules.sums)} stages; the plan has {len(stages)}")

    @property
    def key(self) -> str:
        """The key of this shard on its peer, which may have several shards of one plan."""
        return key_of(self.session, (self.stage, self.rank))

    @property
    def layout(self) -> ShardLayout:
        return shard_layout(self.model, self.plan, stage=self.stage, rank=self.rank)

    @property
    def further(self) -> FurtherHead | None:
        """The further head that this shard computes, too."""
        return further_of(self.model, self.plan, (self.stage, self.rank), self.weight_format)


def key_of(session: str, seat: Seat) -> str:
    """The `key` of the shard in this seat of a session's plan."""
    return f"{session}/{seat[0]}.{seat[1]}"
