"""The interface of all back ends. `registry.py` chooses one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edge.backends.device_sums import DeviceSums
from edge.errors import RequestError
from edge.models.pictures import Tile, is_row
from edge.models.spec import ModelSpec
from edge.offload import DerivedCache, KVTier, Manifest
from edge.protocol.step import Step, StepLimits
from edge.transport import Collective
from edge.weights.formats import KvDtype, WeightFormat
from edge.weights.layout import ShardLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardWeights:
    """The weights of one shard on disk: a file, and its manifest."""

    path: Path
    manifest: Manifest
    packed: DerivedCache | None = None
    """Cache for packed weights; None: not kept."""
    load_room_bytes: int | None = None
    """Most memory overhead of loading; None: no limit."""
    lends_buffers: bool = False
    """Streamed layers may stay in buffers that a step does not use, besides unused memory for keys
    and values."""
    host_bytes: int = 0
    """Bytes of host memory, for weights that do not fit on the device."""


class StepLogits(Protocol):
    """A shard's logits of one step [batch, logit_rows, len(vocab)], on its device.

    Valid until the program's next call.
    """

    @property
    def can_rank(self) -> bool:
        """Whether `best` may find the best columns on the device."""
        ...

    def array(self) -> NDArray[np.float32]:
        """All logits, on the host."""
        ...

    def states(self) -> NDArray[np.float32]:
        """Inputs of the head [1, logit_rows, hidden] in a step with `states`, on the host; on every
        shard that has a part of the vocabulary. On CPUs of every step; and a step with `states` has
        the logits of its last row besides."""
        ...

    def best(self, count: int) -> tuple[NDArray[np.int64], NDArray[np.float32]] | None:
        """The best columns of each entry's last row (`edge.kernels.sampling`) and their logits,
        [batch, count]; −1 in a row that is not finite. None if the device cannot rank."""
        ...


class HostLogits:
    """Logits of programs that compute on the host."""

    can_rank = False

    def __init__(self, array: NDArray[np.float32], states: NDArray[np.float32]) -> None:
        self._array = array
        self._states = states

    def states(self) -> NDArray[np.float32]:
        return self._states

    def array(self) -> NDArray[np.float32]:
        return self._array

    def best(self, count: int) -> None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightReads:
    """Weights that steps read from disk, since loading."""

    nbytes: int = 0
    experts: int = 0
    """Experts used, if experts are streamed."""
    experts_read: int = 0
    """Used experts that were not in memory."""


class StageCompute(Protocol):
    """One shard's part of a step.

    Arrays that it returns are its own buffers, valid until the next call.
    """

    @property
    def rows_agree(self) -> bool:
        """Results and keys and values of a token are the same, to the last bit, with any other
        tokens in the step, if the step has an even number of tokens. With an odd number above 1
        that holds for all but the last token, which is the same in any such step."""
        ...

    @property
    def batches_agree(self) -> bool:
        """Results of a token in a step of one token for each request are the same, to the last bit,
        with any other requests or none. May be False unless the limits' `batch_invariant` is
        set."""
        ...

    @property
    def mixes(self) -> bool:
        """Whether it computes steps of one token of several requests and a chunk of a further one
        (`Step.is_mixed`), each with the bits of a step of its own."""
        ...

    @property
    def device_sums(self) -> DeviceSums | None:
        """Sums with other devices of this host; None: over links alone."""
        ...

    @property
    def disk_wait_s(self) -> float:
        """Seconds that steps waited for weights, keys and values from disk; 0.0 if all stay in
        memory."""
        ...

    @property
    def weight_reads(self) -> WeightReads:
        """Weights read by its steps."""
        ...

    def forward(
        self, step: Step, hidden: NDArray[np.float32] | None, collective: Collective
    ) -> NDArray[np.float32]:
        """The hidden state float32 [*step.shape, hidden] of a stage; in the last stage this shard's
        logits float32 [batch, logit_rows, len(vocab)], or no row of a step with `states`.

        `hidden` [*step.shape, hidden] comes from the stage before. In the first stage it has the
        rows of pictures in the places of their ids, on shards that look them up; None if the step
        has none there. A request's KV cache is made at its first step, and swapped in if it was
        swapped out. A request longer than memory is computed while it is the only one in memory,
        if there is a tier. The collective's memory is the host's, or the device's if `device_sums`
        made it.
        Raises RequestError for a step that does not fit (context, chunk, slots), and errors of the
        collective.
        """
        ...

    def logits(
        self, step: Step, hidden: NDArray[np.float32] | None, collective: Collective
    ) -> StepLogits:
        """`forward` in the last stage, without copying all logits to the host."""
        ...

    def receive_buffer(self, step: Step) -> NDArray[np.float32]:
        """A buffer from which `forward` takes a hidden state [*step.shape, hidden] without a
        copy."""
        ...

    def picture_rows(self, step: Step) -> NDArray[np.float32]:
        """A buffer of zeros [layers, *step.shape, hidden] for what the next `forward`, of this
        step, adds to the hidden state behind each of the shard's layers that are among the first
        `picture_layers` of the model."""
        ...


class KvStorage(Protocol):
    """The keys and values of one shard's requests: in memory, in a tier, or exported as arrays.

    They have the type asked for once `calibrate` was called.
    """

    def calibrate(self, request: str) -> None:
        """Choose the scales of keys and values by those of `request`, and release it.

        Called once, before any other request begins.
        """
        ...

    def swap_out(self, request: str) -> None:
        """Move the request's KV cache to the tier that `load` was given, until its next step.

        Raises offload's StoreFullError if the tier is full, StoreError if the disk fails; then
        nothing has changed.
        """
        ...

    def reserve(self, request: str, tokens: int) -> None:
        """Reserve room in the tier for N of the request's tokens. Raises as `swap_out` does.

        Then no step of a request that is longer than memory lacks room on disk.
        """
        ...

    @property
    def cache_digest(self) -> str:
        """A digest of all that keys and values depend on, except tokens, model, context, weights
        and plan. Shards with equal digests may exchange them."""
        ...

    def new_rows(self, tokens: int, *, windows: bool = True) -> list[NDArray[Any]]:
        """Arrays, each contiguous, for keys and values of N tokens in every layer. windows: those
        that keep the newest tokens only, too; also in the next two."""
        ...

    def rows(
        self, request: str, first: int, last: int, *, windows: bool = True
    ) -> list[NDArray[Any]] | None:
        """Keys and values of tokens [first, last); None if not all are computed and in memory."""
        ...

    def put_rows(
        self, request: str, first: int, rows: Sequence[NDArray[Any]], *, windows: bool = True
    ) -> None:
        """Set keys and values from token `first` on: arrays of `rows` or `new_rows`. A request with
        states needs those at its last token, too, before its next step."""
        ...

    def saved(self, request: str) -> Sequence[int]:
        """The numbers of tokens at which `save_state` saved states of the request that are still
        there, in order."""
        ...

    def states(self, request: str, tokens: int) -> list[NDArray[Any]] | None:
        """The request's states and windows at N tokens, if they were saved: arrays [1, …] of any
        types, valid until the next call. Empty if the layers have none."""
        ...

    def states_like(self, tokens: int) -> list[NDArray[Any]]:
        """Arrays of the shapes and types of `states` at N tokens; their contents say nothing."""
        ...

    def new_states(self, request: str, tokens: int) -> list[NDArray[Any]]:
        """Arrays for the request's states and windows at N tokens, to be filled and put; those of
        windows are its own memory already."""
        ...

    def put_states(self, request: str, tokens: int, states: Sequence[NDArray[Any]]) -> None:
        """Set the request's states and windows, which are those at N tokens: arrays of
        `new_states`. Its keys and values are set by `put_rows` before."""
        ...

    def keep(self, request: str, tokens: int) -> None:
        """End the request; the first N tokens of its KV cache stay until `release`.

        They are freed if the request is not in memory, or has states or windows of which none was
        saved at N.
        """
        ...

    def save_state(self, request: str, tokens: int, place: int) -> None:
        """Copy the states and windows of the request, if it has N tokens now, to one of the limits'
        `saved_states` places, until its release. The place's former contents are lost in any
        case. Saved windows are lost once requests need their memory."""
        ...

    def take(self, request: str, source: str, tokens: int, *, moves: bool) -> int:
        """Let a new `request` begin with the first N tokens of `source`.

        moves: `source` has nothing afterwards. Returns N, or 0 if they are not in memory, their
        state is not saved, or memory is short. Raises RequestError for too many requests.
        """
        ...

    def cut(self, request: str, tokens: int) -> None:
        """Forget the request's tokens after the first N: guesses that were wrong. Not for a request
        that is longer than memory. If the request has states, N is its length before its last step
        with a draft; if it has windows, it has the tokens that the one at N sees. Raises
        RequestError for another."""
        ...

    def release(self, request: str) -> None:
        """Free the request's KV cache, in memory and in the tier; unknown requests are ignored."""
        ...


class WeightResidency(Protocol):
    """The weights of one shard: how many bytes, and which layers stay in memory."""

    weight_bytes: int

    def stream(self, layers: int) -> None:
        """Stream the last N layers from disk for each step, from now on.

        Results stay the same, bit for bit, and KV caches stay. Raises RequestError if that cannot
        be done, and StoreError; then nothing has changed.
        """
        ...


class Observation(Protocol):
    """Statistics of the inputs of a shard's products, if the limits ask for them."""

    def gram(self, run: int) -> NDArray[np.float32]:
        """Gram matrix of one of `observed_runs`, x transposed times x, or the count of tokens of
        each expert; summed over all tokens so far.

        Valid until the program's next call.
        """
        ...


class StageProgram(StageCompute, KvStorage, WeightResidency, Observation, Protocol):
    """One shard, ready to run. Called from one thread at a time."""

    def interrupt(self) -> None:
        """End the current step at once, with an error. Later steps may fail too, until `reset`.
        Called from any thread."""
        ...

    def reset(self) -> bool:
        """Forget every request, for a new session of equal limits; False if that cannot be done.

        Raises the error of a step if the weights have changed.
        """
        ...

    def close(self) -> None: ...


class TowerProgram(Protocol):
    """A loaded tower, or a part of one. Not for several threads at once."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights on disk."""
        ...

    def read(self, tile: Tile) -> NDArray[np.float32]:
        """The rows of a tile [rows, row_size]: each row, then what is added to it behind each of
        the model's first layers. Of a part that is not the last, the hidden state
        [patches, hidden].

        Only for a first part. Raises ValueError for a tile that the tower does not read.
        """
        ...

    def go_on(self, hidden: NDArray[np.float32], height: int, width: int) -> NDArray[np.float32]:
        """The same, of another part: from the hidden state [height · width, hidden] of the part
        before, for a tile of so many patches.

        Raises ValueError for sizes that the tower does not read.
        """
        ...

    def close(self) -> None:
        """Free its memory. May be called again; nothing else is called afterwards."""
        ...


class Backend(Protocol):
    """Runs shards on one kind of device."""

    name: str

    @property
    def lacks(self) -> frozenset[str]:
        """The `ALL_NEEDS` for which it has no kernels, WEIGHTS_ON_DISK if it computes only from
        memory, ROUNDED_KV if it keeps keys and values in float32 only, NIBBLE_KV if not in
        4 bits, WINDOWED_KV if it keeps
        those of all tokens in layers with a sliding window, TILED_ATTENTION if a step holds scores
        over the whole context, WINDOW_READS if it reads all tokens that such layers keep, and
        PLACED_PICTURES if the places of pictures in a prompt may not matter."""
        ...

    @property
    def is_stand_in(self) -> bool:
        """Whether it stands in for a device that is not here, so that its speed means nothing."""
        ...

    @property
    def device_name(self) -> str:
        """Name of the device, for people."""
        ...

    @property
    def has_own_memory(self) -> bool:
        """Whether shards lie in the device's memory (a GPU's) and not in the process's."""
        ...

    def usable_memory_bytes(self) -> int:
        """Free memory for shards now, less a reserve."""
        ...

    def copy_bytes_per_s(self) -> float | None:
        """Rate of copies from host to device memory, measured now; None if they are the same."""
        ...

    def prove(self, weight_format: WeightFormat, seed: int) -> list[NDArray[np.float32]] | None:
        """What it computes for `edge.weights.proof_cases`, in their order. None: a stand-in, or it
        is compared with the formulas only when it loads a shard."""
        ...

    def why_not(self) -> str | None:
        """Why it cannot run here, in one sentence with the remedy; None if it can."""
        ...

    def load(
        self,
        spec: ModelSpec,
        layout: ShardLayout,
        weights: ShardWeights,
        weight_format: WeightFormat,
        *,
        limits: StepLimits,
        kv_dtype: KvDtype = "float32",
        kv_tier: KVTier | None = None,
    ) -> StageProgram:
        """Load a shard. kv_tier: for swapped-out keys and values.

        Raises RequestError for models or observations that this back end does not support.
        """
        ...


def check_step(step: Step, limits: StepLimits, *, vocab_size: int, mixes: bool = False) -> None:
    """Raises RequestError for a step beyond the limits, or with ids outside the vocabulary. mixes:
    see `StageCompute`."""
    if step.is_mixed and not mixes:
        raise RequestError(
            "a step with a chunk of a prompt beside other requests",
            remedy="this shard computes these in steps of their own",
        )
    most_tokens = step.rows if step.is_mixed else step.num_tokens
    if most_tokens > limits.chunk_tokens or step.batch > limits.requests:
        raise RequestError(
            f"a step of {step.batch} requests with {step.num_tokens} tokens each is too large",
            remedy=f"this shard takes up to {limits.requests} requests or {limits.chunk_tokens} "
            "tokens",
        )
    for entry in step.entries:
        if not 0 <= entry.position <= entry.end <= limits.context_tokens:
            raise RequestError(
                f"position {entry.end} is past the context of {limits.context_tokens} tokens"
            )
        if not all(0 <= each < vocab_size or is_row(each) for each in entry.tokens):
            raise RequestError(f"token ids must lie in 0..{vocab_size - 1}")
