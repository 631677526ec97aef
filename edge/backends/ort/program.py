"""One shard's ONNX Runtime sessions over buffers made once.

Nothing is copied or allocated per step: every input and output is bound to a long-lived numpy
buffer, and the present KV is bound onto the past KV, so attention appends in place.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.backends.embedding_rows import EmbeddingRows
from edge.backends.host_kv_storage import HostKvStorage
from edge.backends.interface import HostLogits, WeightReads, check_step
from edge.backends.kv_swap import CacheMoves
from edge.backends.ort.arena import Arena
from edge.backends.ort.expert_rows import ExpertRows
from edge.backends.ort.kv_cache import OrtCache
from edge.backends.ort.runtime import ort
from edge.backends.ort.segments import GraphSegment, gram_names, rotation_names
from edge.backends.ort.self_check import SelfCheck
from edge.backends.ort.streaming import StreamedLayers
from edge.backends.overlap import parts_of
from edge.backends.watched_file import WatchedFile
from edge.errors import RequestError
from edge.kernels.kv_cache.cache_size import keeps_remainders
from edge.memory.lending import Lending
from edge.memory.step_memory import Widths, most_batched, most_logits, most_rows
from edge.models.experts import Experts
from edge.models.spec import ModelSpec
from edge.offload import KVTier
from edge.protocol.step import Step, StepLimits
from edge.transport import Collective, Work
from edge.weights.formats import KvDtype, kv_bits
from edge.weights.layout import ShardLayout
from edge.weights.observation import observed_runs

_MAX_BINDINGS = 16
"""Sets of bindings kept, one for each shape of step; making one takes 10 µs a value."""

_HALVES = 2

_OF_THE_HEAD = ("states", "logits")
"""Outputs of a graph that has nothing but the head."""


@dataclass(frozen=True, slots=True)
class OpenGraphs:
    """The graphs of a shard in execution order, each with its session, ready to run."""

    segments: tuple[GraphSegment, ...]
    sessions: tuple[Any, ...]
    streamed: StreamedLayers | None
    """Where the weights of loose segments come from."""
    embedding: EmbeddingRows | None
    """Where a loose first stage takes what other graphs look up."""
    mapped: WatchedFile | None
    """What the graphs may read from still."""

    def check(self) -> None:
        """Raises CheckpointError if what the graphs read is no longer what it was."""
        if self.mapped is not None:
            self.mapped.check()

    def begin(self, index: int) -> None:
        """The segment's weights are there, once the disk has brought them."""
        if self.streamed is not None and self.segments[index].streamed is not None:
            self.streamed.begin(index)

    def end(self, index: int) -> None:
        """The segment is computed: its weights may be let go."""
        if self.streamed is not None and self.segments[index].streamed is not None:
            self.streamed.end(index)

    def close(self) -> None:
        if self.embedding is not None:
            self.embedding.close()
        if self.streamed is not None:
            self.streamed.close()
        if self.mapped is not None:
            self.mapped.close()


NO_GRAPHS = OpenGraphs((), (), None, None, None)


class OrtProgram(HostKvStorage):
    """One shard's sessions, their shared buffers, and the KV of its requests. See StageProgram."""

    def __init__(
        self,
        spec: ModelSpec,
        layout: ShardLayout,
        open_graphs: Callable[[int | None, int], OpenGraphs],
        *,
        self_check: SelfCheck,
        weight_bytes: int,
        limits: StepLimits,
        kv_dtype: KvDtype,
        arena: Arena,
        lends_buffers: bool = False,
        kv_tier: KVTier | None = None,
    ) -> None:
        """`open_graphs` makes the sessions.

        Its arguments: bits of the KV cache, None for float32, and the number of layers on disk.
        lends_buffers: see `ShardWeights`.
        """
        self._kv_bits = kv_bits(kv_dtype)
        # What remainders add is summed in an order that depends on where steps are cut.
        self.rows_agree = self_check.of_chunks and not keeps_remainders(self._kv_bits)
        self._fills_up = limits.batch_invariant and self_check.of_pairs and not self_check.of_single
        self.batches_agree = self_check.of_single or self._fills_up
        self.weight_bytes = weight_bytes
        self._spec = spec
        self._layout = layout
        self._limits = limits
        self._open_graphs = open_graphs
        self._arena = arena
        self._run_options = ort.RunOptions()
        # Its own value where there is none. ONNX Runtime's Python part asks for it in every run,
        # and what says that there is none is an exception of C++: 60 us in every run of a graph.
        self._run_options.add_run_config_entry("gpu_graph_id", "0")
        self._kv_dtype = kv_dtype
        self._lends_buffers = lends_buffers
        self._lending: Lending | None = None
        self._unused_bytes = 0
        """Bytes of memory that the step before this one left."""
        self._kv_tier = kv_tier
        self._graph_bits: int | None = None
        self._cache: OrtCache = OrtCache(layout, limits)
        self._moves = CacheMoves(self._cache.pool, self._cache.shape, kv_tier, limits)
        self._tables: dict[str, NDArray[np.float32]] = {}
        for number, rotation in enumerate(layout.rotations):
            tables = rotation.tables(limits.context_tokens)
            self._tables |= zip(rotation_names(number), tables, strict=True)
        most = most_rows(limits)
        # Each segment reads one pair and writes the other, so no node sees its input change.
        self._hidden = _pair(most * spec.hidden_size)
        self._partial = _pair(most * spec.hidden_size * spec.partial_parts)
        self._kept = {
            layer: np.zeros(most * spec.hidden_size, np.float32)
            for layer in (*layout.kept_before, *layout.layers)
            if layer in layout.kept_before or layer in spec.lenders
        }
        """What those layers were given that others need."""
        parts = 1 + max(len(layout.kept_before), len(layout.kept_behind))
        self._handed = np.zeros(most * spec.hidden_size * parts * (parts > 1), np.float32)
        """A hidden state on its way between stages, and these with it."""
        of_tokens = bool(layout.token_columns)
        self._embedded = np.zeros(most * spec.hidden_size * of_tokens, np.float32)
        self._token_rows = np.zeros((len(layout.layers), most, spec.token_inputs), np.float32)
        self._tokens = np.zeros(most, np.int64)
        self._positions = np.zeros(most, np.int64)
        self._rows = np.zeros((_HALVES, limits.chunk_tokens), np.int64)
        self._head_rows = np.zeros((_HALVES, limits.chunk_tokens), np.int64)
        self._lengths = np.zeros((_HALVES, most_batched(limits)), np.int32)
        self._total = np.zeros((_HALVES, 1), np.int32)
        self._logits = np.zeros(most_batched(limits) * len(layout.vocab), np.float32)
        self._most_logits = most_logits(Widths.of_shard(spec, layout), limits)
        runs = observed_runs(layout) if limits.observes else ()
        self._grams = [np.zeros(run.shape, np.float32) for run in runs]
        self._bound_grams = {
            name: gram
            for run, gram in zip(runs, self._grams, strict=True)
            for name in gram_names(run)
        }
        self._bindings: OrderedDict[_Shape, dict[int, Any]] = OrderedDict()
        blocks = [layout.layer(number).feed_forward for number in layout.layers]
        self._experts = [each for each in blocks if isinstance(each, Experts)]
        self._expert_rows: ExpertRows | None = None
        try:
            # Last, as it may begin to read from disk. Codes need scales, which only keys and values
            # can tell: the cache is float32 until then.
            self._use(open_graphs(None, layout.streamed_layers))
        except BaseException:
            self._cache.pool.close()
            raise

    device_sums = None

    @property
    def disk_wait_s(self) -> float:
        streamed = self._graphs.streamed
        return self._moves.wait_s + (0.0 if streamed is None else streamed.wait_s)

    @property
    def weight_reads(self) -> WeightReads:
        streamed = self._graphs.streamed
        return WeightReads() if streamed is None else streamed.reads

    def receive_buffer(self, step: Step) -> NDArray[np.float32]:
        parts = 1 + len(self._layout.kept_before)
        received = self._hidden[0] if parts == 1 else self._handed
        return self._view(received, step.batch, step.num_tokens, parts=parts)

    def _take_apart(self, received: NDArray[np.float32]) -> None:
        """Put what stages before have handed over where graphs take it."""
        batch, tokens, _ = received.shape
        arrays = [self._hidden[0], *(self._kept[each] for each in self._layout.kept_before)]
        for array, part in zip(arrays, np.split(received, len(arrays), axis=-1), strict=True):
            self._view(array, batch, tokens)[...] = part

    def _put_together(self, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        """The hidden state and what else later stages need."""
        behind = self._layout.kept_behind
        if not behind:
            return hidden
        batch, tokens, _ = hidden.shape
        handed = self._view(self._handed, batch, tokens, parts=1 + len(behind))
        kept = (self._view(self._kept[each], batch, tokens) for each in behind)
        return np.concatenate([hidden, *kept], axis=-1, out=handed)

    def forward(
        self, step: Step, hidden: NDArray[np.float32] | None, collective: Collective
    ) -> NDArray[np.float32]:
        check_step(step, self._limits, vocab_size=self._spec.vocab_size)
        self._graphs.check()
        self._lend(step)
        self._moves.arrive(step)
        # Products take rows in pairs, and round a last one alone in another way.
        fills_up = self._fills_up and step.num_tokens == 1 and step.batch % 2 == 1
        slot = self._cache.pool.gather([entry.request for entry in step.entries], spare=fills_up)
        self._make_room_for_logits(step)
        if hidden is not None and hidden.ctypes.data != self.receive_buffer(step).ctypes.data:
            self.receive_buffer(step)[...] = hidden
        if self._layout.kept_before:
            self._take_apart(self.receive_buffer(step))
        parts = parts_of(step, is_split=self._layout.is_split)
        shapes = self._prepare(parts, slot, fills_up=fills_up)
        rows = step.batch * step.num_tokens + fills_up
        self._arena.before_step(rows)
        if self._expert_rows is not None:
            self._expert_rows.before_step(rows)
        self._look_up(rows)
        self._run(shapes, collective)
        self._graphs.check()  # what was read meanwhile was what it should be
        for offset, entry in enumerate(step.entries):
            self._cache.pool.wrote(slot + offset, entry.end)
        if self._layout.is_last_stage:
            rows = 0 if step.states else step.logit_rows
            return self._logits_view(step.batch, max(rows, 1))[:, :rows]
        last = self._hidden[len(self._graphs.segments) % 2]
        return self._put_together(self._view(last, step.batch, step.num_tokens))

    def _look_up(self, rows: int) -> None:
        """Read the rows of the first `rows` tokens from tables that are on disk."""
        tables, tokens = self._graphs.embedding, self._tokens[:rows]
        if tables is None:
            return
        hidden = self._hidden[0] if self._layout.is_first_stage else self._embedded
        flat = hidden[: rows * self._spec.hidden_size]
        tables.read_into(flat.reshape(rows, -1), tokens, self._positions[:rows])
        if self._layout.token_columns:
            if hidden is not self._embedded:
                self._embedded[: len(flat)] = flat
            tables.read_layers_into(self._token_rows, 0, tokens)

    def logits(
        self, step: Step, hidden: NDArray[np.float32] | None, collective: Collective
    ) -> HostLogits:
        logits = self.forward(step, hidden, collective)
        # Where the last graph would put out the residual stream, which the head takes no further.
        last = self._hidden[len(self._graphs.segments) % 2]
        return HostLogits(logits, self._view(last, step.batch, step.logit_rows))

    def gram(self, run: int) -> NDArray[np.float32]:
        return self._grams[run]

    def calibrate(self, request: str) -> None:
        if self._kv_bits is None:
            self.release(request)
            return
        cache = self._cache.with_codes(request, self._kv_bits)
        self._bindings.clear()
        self._cache.pool.close()
        self._cache = cache
        self._moves = CacheMoves(cache.pool, cache.shape, self._kv_tier, self._limits)
        streamed = self._graphs.streamed
        layers = streamed.streamed if streamed is not None else 0
        self._drop_graphs()  # before the others: the weights fit only once
        self._arena.give_back()
        self._use(self._open_graphs(self._kv_bits, layers))
        self._graph_bits = self._kv_bits

    def put_rows(self, request: str, first: int, rows: Sequence[NDArray[Any]]) -> None:
        self._lend(None)
        super().put_rows(request, first, rows)

    def take(self, request: str, source: str, tokens: int, *, moves: bool) -> int:
        self._lend(None)
        return super().take(request, source, tokens, moves=moves)

    def stream(self, layers: int) -> None:
        streamed = self._graphs.streamed
        # Layers that were all to stay are not cut where experts would be brought in.
        is_cut = streamed is not None and not (streamed.brings_whole_layers and self._experts)
        if streamed is not None and (is_cut or not layers):
            streamed.stream(layers, self._layout.streaming(layers).kept_experts)
        elif layers:
            self._bindings.clear()
            self._drop_graphs()  # before the others: there may be no room for both
            self._arena.give_back()
            try:
                self._use(self._open_graphs(self._graph_bits, layers))
            except BaseException:
                self._use(self._open_graphs(self._graph_bits, 0))
                raise

    @property
    def cache_digest(self) -> str:
        if not self._cache.pool.can_cut:
            return ""
        long = [each.is_long(self._limits.context_tokens) for each in self._layout.rotations]
        return f"onnxruntime {ort.__version__} {self._cache.digest} {long}"

    def interrupt(self) -> None:
        self._run_options.terminate = True

    def reset(self) -> bool:
        if self._kv_bits is not None or self._kv_tier is not None or self._limits.observes:
            return False
        if self._graphs.streamed is not None:
            return False
        self._graphs.check()
        self._bindings.clear()
        self._cache.pool.clear()
        self._moves.clear()
        self._run_options.terminate = False
        return True

    def close(self) -> None:
        self._bindings.clear()
        self._drop_graphs()
        self._moves.close()
        self._cache.pool.close()
        self._arena.give_back()

    def _use(self, graphs: OpenGraphs) -> None:
        self._graphs, self._lending = graphs, None
        if graphs.streamed is not None:
            if self._expert_rows is None:
                self._expert_rows = ExpertRows(
                    self._experts,
                    most=most_rows(self._limits),
                    hidden_size=self._spec.hidden_size,
                )
            self._lending = Lending(
                widths=Widths.of_shard(self._spec, self._layout, kv_dtype=self._kv_dtype),
                limits=self._limits,
                lends_buffers=self._lends_buffers,
            )

    def _lend(self, step: Step | None) -> None:
        """Weights from disk stay where this step, and the one before it, leave memory unused; None:
        keys and values come in, of which no step knows."""
        streamed, lending, pool = self._graphs.streamed, self._lending, self._cache.pool
        if streamed is None or lending is None:
            return
        unused = 0
        if step is not None:
            ends = {entry.request: entry.end for entry in step.entries}
            others = [pool.length(slot) for slot, name in pool.slots if name not in ends]
            rows = step.batch * step.num_tokens
            unused = lending.unused_bytes(rows, (*ends.values(), *others))
        streamed.lend(min(unused, self._unused_bytes))
        self._unused_bytes = unused

    def _drop_graphs(self) -> None:
        graphs, self._graphs = self._graphs, NO_GRAPHS
        graphs.close()

    def _run(self, shapes: list[_Shape], collective: Collective) -> None:
        """Segment after segment. While one half's sum is under way the other is computed."""
        bindings = [self._bindings_for(shape) for shape in shapes]
        graphs = self._graphs
        under_way: list[Work | None] = [None] * len(shapes)
        for index, segment in enumerate(graphs.segments):
            graphs.begin(index)
            layer = segment.cache_layer
            if layer is not None:
                self._moves.begin(self._cache.numbers[layer])
            for half, shape in enumerate(shapes):
                _wait(under_way[half])
                if segment.outputs == _OF_THE_HEAD and not shape.rows:
                    # The head of a chunk that wants no logits. Where it is observed it also has
                    # sums among its outputs, which are of every token.
                    continue
                binding = bindings[half].get(index)
                if binding is None:
                    binding = bindings[half][index] = self._bind(index, shape)
                graphs.sessions[index].run_with_iobinding(binding, self._run_options)
                if segment.streamed is not None and segment.streamed.experts is not None:
                    self._run_experts(index, shape)
                if segment.reduce is None:
                    continue
                written = self._hidden if segment.reduce == "hidden" else self._partial
                array = self._view(
                    written[(index + 1) % 2],
                    shape.asked,
                    shape.tokens,
                    shape.first_token,
                    parts=segment.partial_parts,
                )
                if segment.partial_is_zero:
                    array.fill(0)
                if len(shapes) == 1:
                    collective.all_reduce(array)
                else:
                    under_way[half] = collective.begin_all_reduce(array)
            graphs.end(index)
            if layer is not None:
                self._moves.end(self._cache.numbers[layer])
        for work in under_way:
            _wait(work)

    def _run_experts(self, index: int, shape: _Shape) -> None:
        """Those behind the segment that have rows. Their results follow each other, expert after
        expert."""
        streamed, part = self._graphs.streamed, self._experts_behind(index)
        assert streamed is not None
        assert part is not None
        arrays = self._arrays_of_experts(index, shape)
        sources, results = arrays["expert_sources"], arrays["expert_results"]
        starts, stops = arrays["expert_starts"], arrays["expert_stops"]
        parts, size = self._graphs.segments[index].partial_parts, self._spec.hidden_size
        put_out = self._view(
            self._partial[(index + 1) % 2],
            shape.batch,
            shape.tokens,
            shape.first_token,
            parts=parts,
        )
        given = put_out.reshape(-1, parts * size)[:, :size]
        done = int(part.is_part)  # the first row is of all others
        results[:done] = 0
        runs = streamed.experts(index, arrays["expert_used"], tokens=len(given))
        with contextlib.closing(runs):
            for run in runs:
                for number, place in run:
                    rows = sources[starts[number] : stops[number]]
                    made = results[done : done + len(rows)]
                    place.run(given[rows], streamed.biases(index, number), made, self._run_options)
                    done += len(rows)

    def _arrays_of_experts(self, index: int, shape: _Shape) -> dict[str, NDArray[Any]]:
        """What goes between the graphs of the segment's layer; nothing where it has no experts."""
        part = self._experts_behind(index)
        if part is None or self._expert_rows is None:
            return {}
        return self._expert_rows.arrays(
            part,
            half=shape.half,
            first=shape.first_token,
            batch=shape.batch,
            tokens=shape.tokens,
        )

    def _experts_behind(self, index: int) -> Experts | None:
        """Those of the segment's layer, where layers may be on disk."""
        streamed = self._graphs.segments[index].streamed
        part = None if streamed is None else self._layout.layer(streamed.layer).feed_forward
        return part if isinstance(part, Experts) else None

    def _make_room_for_logits(self, step: Step) -> None:
        batch = step.batch + step.batch % 2 * self._fills_up
        rows = 1 if step.states else max(step.logit_rows, 1)
        needed = batch * rows * len(self._layout.vocab)
        if needed > self._most_logits:
            raise RequestError(
                f"a step that wants {step.batch} x {step.logit_rows} rows of logits",
                remedy="ask for fewer",
            )
        if needed > self._logits.size:
            self._logits = np.zeros(needed, np.float32)
            self._bindings.clear()

    def _prepare(self, parts: Sequence[Step], slot: int, *, fills_up: bool) -> list[_Shape]:
        """Fill the small inputs of a step or its halves; the shape tells which bindings it takes.

        The halves' rows follow each other in every buffer. fills_up: by a request more, which is
        nobody's, and whose first token it is.
        """
        shapes: list[_Shape] = []
        first_token = first_row = 0
        for half, part in enumerate(parts):
            tokens, rows = part.num_tokens, part.logit_rows
            for index, entry in enumerate(part.entries):
                start = first_token + index * tokens
                self._tokens[start : start + tokens] = entry.tokens
                self._positions[start : start + tokens] = np.arange(entry.position, entry.end)
                self._lengths[half, index] = entry.end - 1
            if fills_up:
                self._tokens[part.batch] = self._positions[part.batch] = 0
                self._lengths[half, part.batch] = 0
            self._rows[half, : max(rows, 1)] = np.arange(tokens - max(rows, 1), tokens)
            if part.states:
                self._head_rows[half, 0] = rows - 1
            else:
                self._head_rows[half, : max(rows, 1)] = np.arange(max(rows, 1))
            self._total[half] = max(entry.end for entry in part.entries)
            shapes.append(
                _Shape(
                    slot=slot,
                    asked=part.batch,
                    batch=part.batch + fills_up,
                    tokens=tokens,
                    rows=rows,
                    states=part.states,
                    half=half,
                    first_token=first_token,
                    first_row=first_row,
                )
            )
            first_token, first_row = first_token + tokens, first_row + rows
        return shapes

    def _bindings_for(self, shape: _Shape) -> dict[int, Any]:
        """Bindings of the segments, by index; made at their first use.

        Decode repeats one shape for ever; the least recently used of the others are dropped.
        """
        bindings = self._bindings.get(shape)
        if bindings is None:
            bindings = self._bindings[shape] = {}
            if len(self._bindings) > _MAX_BINDINGS:
                self._bindings.popitem(last=False)
        self._bindings.move_to_end(shape)
        return bindings

    def _bind(self, index: int, shape: _Shape) -> Any:
        """Bind every input and output of segment `index` to its buffer, for good."""
        segment = self._graphs.segments[index]
        binding = self._graphs.sessions[index].io_binding()
        read, write = index % 2, (index + 1) % 2
        before = self._graphs.segments[index - 1].partial_parts if index else 1
        batch, tokens, first = shape.batch, shape.tokens, shape.first_token
        rows = max(shape.rows, 1)  # a graph that ends in the head computes at least one
        head_rows, first_head_row = (1, 0) if shape.states else (rows, shape.first_row)
        arrays = {
            "tokens": self._tokens[first : first + batch * tokens].reshape(batch, tokens),
            "positions": self._positions[first : first + batch * tokens].reshape(batch, tokens),
            "rows": self._rows[shape.half, :rows],
            "head_rows": self._head_rows[shape.half, :head_rows],
            "hidden": self._view(self._hidden[read], batch, tokens, first),
            **self._beside(batch, tokens, first),
            "partial": self._view(self._partial[read], batch, tokens, first, parts=before),
            "hidden_out": self._view(self._hidden[write], batch, tokens, first),
            "partial_out": self._view(
                self._partial[write], batch, tokens, first, parts=segment.partial_parts
            ),
            "states": self._view(self._hidden[write], batch, rows, shape.first_row),
            "logits": self._logits_view(batch, head_rows, first_head_row),
            **self._tables,
            "lengths": self._lengths[shape.half, :batch],
            "total": self._total[shape.half].reshape(()),
            **self._cache.bound(shape.slot, shape.batch),
            **self._bound_grams,
        }
        if segment.streamed is not None and self._graphs.streamed is not None:
            layer = segment.streamed.layer
            arrays |= {
                name.removesuffix(f"_{layer}"): array
                for name, array in arrays.items()
                if name.endswith(f"_{layer}")
            }
            arrays |= self._graphs.streamed.vectors(index)
            arrays |= self._arrays_of_experts(index, shape)
        for name in segment.inputs:
            array = arrays[name]
            binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        for name in segment.outputs:
            array = arrays[name]
            binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        return binding

    def _beside(self, batch: int, tokens: int, first: int) -> dict[str, NDArray[np.float32]]:
        """Side inputs: what goes through the stage with the hidden state."""
        arrays: dict[str, NDArray[np.float32]] = {}
        for layer, kept in self._kept.items():
            view = self._view(kept, batch, tokens, first)
            arrays |= {f"kept_{layer}": view, f"kept_out_{layer}": view}
        if self._layout.token_columns:
            arrays["embedded"] = self._view(self._embedded, batch, tokens, first)
            some = self._token_rows[:, first : first + batch * tokens]
            for layer, rows in zip(self._layout.layers, some, strict=True):
                arrays[f"token_rows_{layer}"] = rows.reshape(batch, tokens, -1)
        return arrays

    def _logits_view(self, batch: int, rows: int, first_row: int = 0) -> NDArray[np.float32]:
        columns = len(self._layout.vocab)
        flat = self._logits[first_row * columns :][: batch * rows * columns]
        return flat.reshape(batch, rows, columns)

    def _view(
        self,
        flat: NDArray[np.float32],
        batch: int,
        tokens: int,
        first_token: int = 0,
        *,
        parts: int = 1,
    ) -> NDArray[np.float32]:
        size = parts * self._spec.hidden_size
        return flat[first_token * size :][: batch * tokens * size].reshape(batch, tokens, size)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """What bindings depend on: the first KV slot, the sizes of the step, and if it is one of two
    halves, which and where its rows begin."""

    slot: int
    asked: int
    """Requests."""
    batch: int
    """With one that fills the step up."""
    tokens: int
    rows: int
    """Rows of logits, or with `states` of hidden states."""
    states: bool
    half: int
    first_token: int
    first_row: int


def _pair(size: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    return np.zeros(size, np.float32), np.zeros(size, np.float32)


def _wait(work: Work | None) -> None:
    if work is not None:
        work.wait()
