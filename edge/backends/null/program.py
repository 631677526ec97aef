"""A shard of the null back end: computes nothing, but stores keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.backends.host_cache import HostCache
from edge.backends.interface import HostLogits, StepLogits, WeightReads, check_step
from edge.backends.kv_storage import HostKvStorage
from edge.backends.kv_swap import CacheMoves
from edge.backends.null.made_up import attention_words, logits, token_bits, word_bits
from edge.backends.overlap import parts_of
from edge.errors import RequestError
from edge.kernels.kv_cache.cache_size import keeps_unrounded
from edge.memory.step_memory import most_rows
from edge.memory.windows import room_token_bytes
from edge.models.pictures import PICTURE_IDS
from edge.models.spec import ModelSpec
from edge.offload import KVTier
from edge.protocol.step import Step, StepEntry, StepLimits
from edge.transport import Collective
from edge.version import __version__
from edge.weights.formats import KvDtype, kv_bits
from edge.weights.layout import ShardLayout

_ID_BYTES = 4
"""Bytes of a token's id, with which each of its keys and values begins."""

_STATE_LIMIT = 1 << 20
"""States are whole numbers below this, which float32 has exactly."""


@dataclass(slots=True)
class Counts:
    """Counts of a program's calls."""

    steps: int = 0
    tokens: int = 0
    """Rows computed, of all requests together."""
    sums: int = 0
    streamed_layers: int = 0
    """Layers that steps read from disk."""
    swapped_out: int = 0
    """Swaps of requests to the tier."""


class NullProgram(HostKvStorage):
    """See StageProgram. Its keys and values are the ids of their tokens. Where keys and values have
    unrounded tokens, which are states, it keeps a number that follows from all tokens so far."""

    device_sums = None

    def __init__(
        self,
        spec: ModelSpec,
        layout: ShardLayout,
        *,
        weight_bytes: int,
        limits: StepLimits,
        kv_dtype: KvDtype,
        kv_tier: KVTier | None,
    ) -> None:
        self.weight_bytes = weight_bytes
        self.counts = Counts()
        self.streamed = 0
        """Number of layers that each step reads from disk."""
        self._spec = spec
        self._layout = layout
        self._limits = limits
        bits = kv_bits(kv_dtype)
        self._has_states = keeps_unrounded(bits)
        beside = ((1,),) if self._has_states else ()
        self._cache = HostCache(layout, limits, bits=bits, beside=beside)
        cache = self._cache
        self._moves = CacheMoves(
            cache.pool,
            cache.shape,
            kv_tier,
            limits,
            cache.windows,
            token_bytes=room_token_bytes(spec, layout, kv_dtype),
        )
        self._kv_tier = kv_tier
        self._hidden = np.zeros(most_rows(limits) * spec.hidden_size, np.float32)
        attentions = layout.attentions.items()
        self._windows = {layer: each.window for layer, each in attentions}
        self._attended = {layer: _attended_bits(spec, layout, layer) for layer in layout.attentions}
        self.stream(layout.streamed_layers)

    @property
    def disk_wait_s(self) -> float:
        return self._moves.wait_s

    @property
    def weight_reads(self) -> WeightReads:
        return WeightReads()

    def receive_buffer(self, step: Step) -> NDArray[np.float32]:
        shape = (*step.shape, self._spec.hidden_size)
        return self._hidden[: np.prod(shape)].reshape(shape)

    def picture_rows(self, step: Step) -> NDArray[np.float32]:
        layers = len(self._spec.of_pictures(self._layout.layers))
        return np.zeros((layers, *step.shape, self._spec.hidden_size), np.float32)

    def forward(
        self, step: Step, hidden: NDArray[np.float32] | None, collective: Collective
    ) -> NDArray[np.float32]:
        check_step(step, self._limits, vocab_size=self._spec.vocab_size, mixes=self.mixes)
        self._moves.arrive(step)
        state = self.receive_buffer(step)
        if self._layout.is_first_stage:
            self._embed(step, state, hidden)
            if self._layout.sums_embedding:
                self._sum(step, state, collective)
        elif hidden is not None and hidden.ctypes.data != state.ctypes.data:
            state[...] = hidden
        for layer in self._layout.layers:
            flips = np.zeros_like(state)
            number = self._cache.numbers.get(layer)
            if number is not None:
                self._moves.begin(number)
            if layer in self._attended:
                self._attend(step, layer, flips)
            if number is not None:
                self._moves.end(number)
            self._sum(step, flips, collective)
            state[...] = (state > 0.5) ^ (flips > 0.5)
            self._sum(step, np.zeros_like(state), collective)  # the feed-forward network's
        for entry in step.entries:
            slot = self._cache.pool.open(entry.request)
            if self._has_states:
                self._go_on(slot, entry)
            self._cache.pool.wrote(slot, entry.end)
        self.counts.steps += 1
        self.counts.tokens += step.rows
        self.counts.streamed_layers += self.streamed
        if not self._layout.is_last_stage:
            return state
        if step.states:
            return np.empty((step.batch, 0, len(self._layout.vocab)), np.float32)
        rows = self._last(step).reshape(-1, self._spec.hidden_size)
        made_up = logits(rows, self._layout.vocab)
        return made_up.reshape(step.batch, step.logit_rows, len(self._layout.vocab))

    def logits(
        self, step: Step, hidden: NDArray[np.float32] | None, collective: Collective
    ) -> StepLogits:
        return HostLogits(self.forward(step, hidden, collective), self._last(step))

    def _last(self, step: Step) -> NDArray[np.float32]:
        state = self.receive_buffer(step)
        if step.is_mixed:
            return state[0, np.cumsum([len(entry.tokens) for entry in step.entries]) - 1, None]
        return state[:, step.num_tokens - step.logit_rows :]

    def gram(self, run: int) -> NDArray[np.float32]:
        raise RequestError("the null back end has nothing to observe")

    def calibrate(self, request: str) -> None:
        """Does nothing, because ids of tokens need no scales."""
        self.release(request)

    def swap_out(self, request: str) -> None:
        super().swap_out(request)
        self.counts.swapped_out += 1

    @property
    def rows_agree(self) -> bool:
        return True

    @property
    def batches_agree(self) -> bool:
        return True

    @property
    def mixes(self) -> bool:
        return not self._has_states

    @property
    def cache_digest(self) -> str:
        return f"null {__version__}"

    def stream(self, layers: int) -> None:
        if not 0 <= layers <= len(self._layout.layers):
            raise RequestError(
                f"{layers} layers cannot stream, as the shard has {len(self._layout.layers)}"
            )
        self.streamed = layers

    def interrupt(self) -> None:
        """Does nothing, because steps take no time."""

    def reset(self) -> bool:
        if self._kv_tier is not None:
            return False
        self._cache.pool.clear()
        self._moves.clear()
        return True

    def close(self) -> None:
        self._moves.close()
        self._cache.pool.close()

    def _embed(
        self, step: Step, state: NDArray[np.float32], pictures: NDArray[np.float32] | None
    ) -> None:
        """Set the tokens' embedding, and rows of pictures to their signs. Tokens outside this
        shard's vocabulary stay zeros."""
        bits = np.arange(self._spec.hidden_size)
        ids = np.asarray([id for entry in step.entries for id in entry.tokens], np.uint64)
        ids = ids.reshape(step.shape)
        part = self._layout.embedding
        is_here = (ids >= part.start) & (ids < part.stop)
        are_rows = ids >= PICTURE_IDS
        signs = 0 if pictures is None else pictures > 0
        embedded = token_bits(ids, bits) & is_here[..., None]
        state[...] = np.where(are_rows[..., None], signs, embedded)

    def _attend(self, step: Step, layer: int, flips: NDArray[np.float32]) -> None:
        """Write the tokens' keys and values, and set the bits that this shard's heads flip."""
        all_bits, heads = self._attended[layer]
        window = self._layout.attentions[layer].window_rows
        flat, end = flips.reshape(-1, self._spec.hidden_size), 0
        for entry in step.entries:
            start, end = end, end + len(entry.tokens)
            ids = np.asarray(entry.tokens, np.uint64)  # of pictures' rows the lower half
            new = ids.astype("<u4").view(np.uint8).reshape(-1, _ID_BYTES)
            slot = self._cache.pool.open(entry.request)
            rows = [array[0] for array in self._cache.layer(layer, slot, 1)]
            first = 0 if window is None else window.first(entry.position)
            if window is None or entry.end <= window.kept:
                seen = [each[:, : entry.end] for each in rows]
            else:  # rows that the step moves out of the window are still seen by its first tokens
                more = ((0, 0), (0, len(new)), (0, 0))
                seen = [np.pad(each[:, : entry.position - first], more) for each in rows]
            for each in seen:
                each.view(np.uint8)[:, entry.position - first :, :_ID_BYTES] = new
            if window is not None:
                last = window.rows(entry.end)
                for each, some in zip(rows, seen, strict=True):
                    each[:, :last] = some[:, -last:]
            keys, values = map(_ids, seen)
            words = attention_words(keys, values, layer, window=self._windows[layer], first=first)
            words = words[:, entry.position - first :]
            for head in np.unique(heads):
                bits = all_bits[heads == head]
                flat[start:end, bits] = word_bits(words[head], bits)

    def _go_on(self, slot: int, entry: StepEntry) -> None:
        """Bring the state to the end of the entry. Raises RequestError if it is not the state of
        the tokens before it."""
        (state,) = self._cache.pool.states(slot, 1)
        if self._cache.shape.num_layers:
            ids = _ids(self._cache.pool.rows(0, slot, 0, entry.position)[0])[0]
            if state[0, 0] != _state_of(ids.tolist()):
                raise RequestError("a state is not that of the tokens before it")
        state[0, 0] = _state_of(entry.tokens, int(state[0, 0]))

    def _sum(self, step: Step, array: NDArray[np.float32], collective: Collective) -> None:
        """Sum over the shards of the stage, in the same halves as the other back ends."""
        if not self._layout.is_split:
            return
        first = 0
        for part in parts_of(step, is_split=True):
            _, tokens = part.shape
            collective.all_reduce(array[:, first : first + tokens])
            first += tokens
            self.counts.sums += 1


def _ids(rows: NDArray[Any]) -> NDArray[np.uint64]:
    """The token ids [heads, tokens] in keys or values [heads, tokens, elements]."""
    as_bytes = np.ascontiguousarray(rows.view(np.uint8)[..., :_ID_BYTES])
    return as_bytes.view("<u4")[..., 0].astype(np.uint64)


def _state_of(tokens: Sequence[int], before: int = 0) -> int:
    for token in tokens:
        before = (31 * before + token % 2**32 + 1) % _STATE_LIMIT
    return before


def _attended_bits(
    spec: ModelSpec, layout: ShardLayout, layer: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Bits of the hidden state that this shard's heads flip, and the local KV head of each.

    Query head i mod `num_heads`, which is in one shard of a stage, flips bit i.
    """
    mixer = layout.attentions[layer]
    first = layout.matrix(f"layers.{layer}.output").columns.start // mixer.value_size
    bits = np.arange(spec.hidden_size)
    heads = bits % spec.attentions[layer].num_heads - first
    is_here = (heads >= 0) & (heads < mixer.num_heads)
    return bits[is_here], heads[is_here] // (mixer.num_heads // mixer.num_kv_heads)
