"""How long one device takes for its part of a step: weights, attention, graph runs.

A measured roofline of one device: a step of r rows takes a time for each byte of weights, whether
memory or arithmetic limits it. Knows one device at a time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from edge.partition.plan.facts import DeviceSpec, LayerFacts, ModelFacts, Workload

CHUNK_TOKENS = 256
"""Tokens of a prompt that run as one step, unless the caller says otherwise."""

HALVED_TOKENS = 256
"""Chunks of at least this many tokens are computed in halves by a split stage, as the back ends
do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A kind of step."""

    rows: float
    """Tokens in the step."""
    context_tokens: float
    """Average number of cached tokens that each row attends."""
    head_rows: float
    """Tokens whose logits are computed."""
    overlaps: bool
    """Whether stages compute different steps at the same time."""
    is_draft: bool = False
    """Whether the rows are tokens of one request, whose keys and values are read once."""
    in_halves: bool = False
    """Whether a split stage computes one half of the tokens while it sums the other half."""


def decode_phase(workload: Workload) -> Phase:
    """A decoding step half-way through the answers: one token of each request."""
    rows = workload.concurrency
    context = workload.prompt_tokens + workload.output_tokens / 2
    return Phase(rows=rows, context_tokens=context, head_rows=rows, overlaps=False)


def draft_phase(workload: Workload, rows: float) -> Phase:
    """A step of `rows` rows that verifies a draft, half-way through an answer."""
    phase = decode_phase(workload)
    return replace(phase, rows=rows, head_rows=rows, is_draft=rows > 1)


def chunk_phase(workload: Workload, chunk_tokens: int) -> tuple[Phase, int]:
    """A chunk of one prompt, and the number of chunks, taken as equally long.

    Logits are computed for one row of every chunk, though only those of the last are used.
    """
    count = math.ceil(workload.prompt_tokens / chunk_tokens)
    phase = Phase(
        rows=workload.prompt_tokens / count,
        context_tokens=workload.prompt_tokens / 2,
        head_rows=1,
        overlaps=count > 1,
        in_halves=min(chunk_tokens, workload.prompt_tokens) >= HALVED_TOKENS,
    )
    return phase, count


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Seconds that one device computes between two waits."""

    weights_s: float = 0.0
    attention_s: float = 0.0
    runs_s: float = 0.0
    slack: float = 1.0
    """The slowest device's expected time over the mean time, because times vary; 1 for a device
    alone."""

    @property
    def mean_s(self) -> float:
        return self.weights_s + self.attention_s + self.runs_s

    @property
    def total_s(self) -> float:
        return self.mean_s * self.slack


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The speed of one device in one phase and one stage, in seconds."""

    weight_s: float
    """Per byte of layers; of slices of layers where the stage is split."""
    head_weight_s: float
    """Per byte of the head."""
    attention_s: float
    """Per query head, layer and cached token."""
    context_tokens: float
    reads_windows: bool
    run_s: float
    attention_run_s: float
    """The fixed time of a slice with heads, however few."""
    feed_forward_run_s: float
    """The fixed time of a slice with columns, however few."""
    step_s: float
    slack: float

    @classmethod
    def of(cls, device: DeviceSpec, phase: Phase, *, in_stage: int, is_crowded: bool) -> "Pace":
        """The pace of a device with rates in a stage of `in_stage` devices.

        `is_crowded`: devices of the same host in other stages compute at the same time.
        """
        rates = device.rates
        assert rates is not None

        def weight_s(rows: float, *, is_slice: bool) -> float:
            whole_s = rates.weights_s(rows, shared=is_crowded)
            alone_s = rates.weights_s(rows, shared=False)
            return whole_s * (rates.slice_weights_s(rows) / alone_s if is_slice and alone_s else 1)

        attention_s = (
            rates.attention_draft_s(phase.rows)
            if phase.is_draft
            else rates.attention_step_s(phase.rows)
        )
        attention_slice_s, feed_forward_slice_s = rates.slice_fixed_s(phase.rows)
        return cls(
            weight_s=weight_s(phase.rows, is_slice=in_stage > 1),
            head_weight_s=weight_s(phase.head_rows, is_slice=True),
            attention_s=attention_s,
            context_tokens=phase.context_tokens,
            reads_windows=device.reads_windows,
            run_s=rates.run_s,
            attention_run_s=rates.run_s + attention_slice_s,
            feed_forward_run_s=rates.run_s + feed_forward_slice_s,
            step_s=rates.step_s,
            slack=1 + rates.jitter * expected_maximum(in_stage),
        )

    def whole(
        self, model: ModelFacts, layers: Sequence[tuple[LayerFacts, int]], head_rows: int
    ) -> Segment:
        """A whole stage that is not split: one graph. layers: each kind and its number of layers.
        head_rows: vocabulary rows, or 0."""
        layer_bytes = sum(count * facts.weight_bytes for facts, count in layers)
        attention_s = sum(count * facts.num_heads * self.head_s(facts) for facts, count in layers)
        return Segment(
            weights_s=layer_bytes * self.weight_s
            + head_rows * model.head_row_bytes * self.head_weight_s,
            attention_s=attention_s,
            runs_s=self.run_s,
        )

    def head_s(self, layer: LayerFacts) -> float:
        """Seconds of attention of one query head of a layer."""
        tokens = layer.read_tokens(self.context_tokens, reads_windows=self.reads_windows)
        return layer.heads_per_unit * self.attention_s * tokens

    def attention(self, layer: LayerFacts, heads: int, kv_heads: int) -> Segment:
        """Up to the first sum of a layer. Half of the norms and biases counts here, half in
        `feed_forward`."""
        return self._attention(
            layer, heads, kv_heads, self.attention_run_s if heads else self.run_s
        )

    def attention_from(self, layer: LayerFacts) -> Segment:
        """The attention segment for 0 heads, with the fixed time of a slice that has heads: the
        base of a cost that is linear in heads."""
        return self._attention(layer, 0, 0, self.attention_run_s)

    def _attention(self, layer: LayerFacts, heads: int, kv_heads: int, run_s: float) -> Segment:
        nbytes = heads * layer.query_head_bytes + kv_heads * layer.kv_head_bytes
        return Segment(
            weights_s=self.weight_s * (nbytes + layer.layer_bytes / 2),
            attention_s=heads * self.head_s(layer),
            runs_s=run_s,
            slack=self.slack,
        )

    def feed_forward(self, layer: LayerFacts, columns: int) -> Segment:
        """From the first to the second sum of a layer."""
        if columns:
            return self.feed_forward_from(layer, columns)
        return replace(self.feed_forward_from(layer, 0), runs_s=self.run_s)

    def feed_forward_from(self, layer: LayerFacts, columns: int) -> Segment:
        """The same with the fixed time of a slice that has columns, even for 0 columns: the base of
        a cost that is linear in columns."""
        return self._feed_forward(layer, columns * layer.ffn_column_bytes)

    def with_whole_experts(self, layer: LayerFacts, columns: int, load: float) -> Segment:
        """The same where experts are whole. load: the part of the layer's expert work that is done
        here. columns: of the feed-forward weights that are no experts."""
        experts_bytes = load * layer.num_experts * layer.expert_bytes
        return self._feed_forward(layer, columns * layer.shared_column_bytes + experts_bytes)

    def _feed_forward(self, layer: LayerFacts, nbytes: float) -> Segment:
        weights_s = self.weight_s * (nbytes + layer.layer_bytes / 2)
        return Segment(weights_s=weights_s, runs_s=self.feed_forward_run_s, slack=self.slack)

    def head(self, model: ModelFacts, rows: int) -> Segment:
        """The graph of the logits; a shard without rows has none."""
        return self.head_from(model, rows) if rows else Segment(slack=self.slack)

    def head_from(self, model: ModelFacts, rows: int) -> Segment:
        """The same, with the graph's run also for 0 rows: the base of a cost that is linear in
        rows."""
        weights_s = self.head_weight_s * rows * model.head_row_bytes
        return Segment(weights_s=weights_s, runs_s=self.run_s, slack=self.slack)

    def bare(self) -> Segment:
        """A graph with hardly any weights: the embedding, or the last addition of a stage."""
        return Segment(runs_s=self.run_s, slack=self.slack)


@lru_cache(maxsize=1024)
def expected_maximum(count: int) -> float:
    """The mean of the largest of `count` standard normals, 0 for one.

    E = integral of x d(Phi(x)^n), by the trapezoidal rule over +-9 standard deviations.
    """
    steps, reach = 1800, 9.0
    width = 2 * reach / steps
    total = 0.0
    for index in range(steps + 1):
        x = -reach + index * width
        below = 0.5 * math.erfc(-x / math.sqrt(2))
        density = math.exp(-x * x / 2) / math.sqrt(2 * math.pi)
        total += x * count * below ** (count - 1) * density * width
    return max(0.0, total) if count > 1 else 0.0
