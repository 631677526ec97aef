"""The promises of every back end. `registry.py` tells which one computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edge.backends.device_sums import DeviceSums
from edge.errors import RequestError
from edge.models.spec import ModelSpec
from edge.offload import DerivedCache, KVTier, Manifest
from edge.protocol.step import Step, StepLimits
from edge.transport import Collective
from edge.weights.formats import KvDtype, WeightFormat
from edge.weights.layout import ShardLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardWeights:
    """The weights of one shard on disk: one file, and what lies where in it."""

    path: Path
    manifest: Manifest
    packed: DerivedCache | None = None
    """Where a back end keeps what it makes of them; None: nowhere."""
    load_room_bytes: int | None = None
    """The overhead that loading may take; None: what it wants."""
    lends_buffers: bool = False
    """Layers from disk may stay in what a step leaves unused of its buffers, not only in what it
    leaves of the keys' and values' memory."""
    host_bytes: int = 0
    """Bytes of the host's memory, for weights that a device with its own has no room for."""


class StepLogits(Protocol):
    """A shard's logits of one step [batch, logit_rows, len(vocab)], where they were computed.

    Valid until the program's next call.
    """

    @property
    def can_rank(self) -> bool:
        """`best` may know more than the host would have to find out for itself."""
        ...

    def array(self) -> NDArray[np.float32]:
        """All of them, on the host."""
        ...

    def states(self) -> NDArray[np.float32]:
        """What the head is given [1, logit_rows, hidden] in a step with `states`, on the host; on
        every shard that has a part of the vocabulary."""
        ...

    def best(self, count: int) -> tuple[NDArray[np.int64], NDArray[np.float32]] | None:
        """Each entry's last row: the columns that rank first (`edge.kernels.sampling`), and their
        logits, [batch, count]; −1 in a row that is not finite. None where it cannot be told."""
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
    """Counts of weights that steps brought in from disk, since loading."""

    nbytes: int = 0
    experts: int = 0
    """That tokens went through, where experts are brought in."""
    experts_read: int = 0
    """Those of them that were not in memory."""


class StageCompute(Protocol):
    """One shard's part of a step.

    Arrays that it returns are its own buffers, valid until the next call.
    """

    @property
    def rows_agree(self) -> bool:
        """What it computes of a token is the same, to the last bit, whatever other tokens are in
        the step, as long as they are an even number together; and so are the keys and values it
        leaves. Of an odd number above 1 that holds for all but the last, which is the same in any
        such step."""
        ...

    @property
    def batches_agree(self) -> bool:
        """What it computes of a token in a step of one token of each request is the same, to the
        last bit, whichever other requests are in the step, or none. It may say False where the
        limits' `batch_invariant` is not set."""
        ...

    @property
    def device_sums(self) -> DeviceSums | None:
        """How its device sums with others of this host; None where it does over links alone."""
        ...

    @property
    def disk_wait_s(self) -> float:
        """Seconds that its steps waited for weights, keys and values that come in for each; 0.0
        where all stay in memory."""
        ...

    @property
    def weight_reads(self) -> WeightReads:
        """What its steps read of its weights."""
        ...

    def forward(
        self, step: Step, hidden: NDArray[np.float32] | None, collective: Collective
    ) -> NDArray[np.float32]:
        """The hidden state float32 [batch, tokens, hidden] of a stage, or in the last stage this
        shard's logits float32 [batch, logit_rows, len(vocab)]; no row of a step with `states`.

        `hidden` [batch, tokens, hidden] comes from the stage before; None in the first stage.
        A request's KV cache is made at its first step, and brought back if it was swapped out. One
        that has more tokens than memory is kept for may be computed while it is the only one that
        is not swapped out, where there is a tier. Raises RequestError for a step that does not
        fit (context, chunk, slots), and what the collective raises. The collective's memory is
        the host's, or the device's if `device_sums` made it.
        """
        ...

    def logits(
        self, step: Step, hidden: NDArray[np.float32] | None, collective: Collective
    ) -> StepLogits:
        """`forward` in the last stage, for who may not need all logits on the host, or not them."""
        ...

    def receive_buffer(self, step: Step) -> NDArray[np.float32]:
        """Where `forward` takes a hidden state [batch, tokens, hidden] without a copy."""
        ...


class KvStorage(Protocol):
    """The keys and values of one shard's requests: in memory, in a tier, or handed in and out.

    They are kept in the type asked for once `calibrate` was called.
    """

    def calibrate(self, request: str) -> None:
        """Choose how keys and values are rounded, from those of `request`, and release it.

        Called once, before any other request begins.
        """
        ...

    def swap_out(self, request: str) -> None:
        """Move the request's KV cache to the tier that `load` was given, until its next step.

        Raises offload's StoreFullError where that has no room, StoreError if the disk fails:
        nothing has changed then.
        """
        ...

    def reserve(self, request: str, tokens: int) -> None:
        """See to it that the tier has room for N of the request's tokens. Raises likewise.

        With it, no step of a request that is longer than memory lacks room on disk.
        """
        ...

    @property
    def cache_digest(self) -> str:
        """A digest of what keys and values depend on except tokens, weights and plan.

        Those of equal digests may be exchanged. Empty: none are handed out.
        """
        ...

    def new_rows(self, tokens: int) -> list[NDArray[Any]]:
        """Arrays, each contiguous, for keys and values of N tokens in every layer."""
        ...

    def rows(self, request: str, first: int, last: int) -> list[NDArray[Any]] | None:
        """Keys and values of tokens [first, last); None if not all are computed and in memory."""
        ...

    def put_rows(self, request: str, first: int, rows: Sequence[NDArray[Any]]) -> None:
        """Set what the request has from token `first` on, as `rows` gave it or to `new_rows`."""
        ...

    def keep(self, request: str, tokens: int) -> None:
        """The request is over, and the first N tokens of its KV cache stay until `release`.

        Those of a request that is not in memory are freed, and where layers have states those of
        one whose state of N tokens is not saved.
        """
        ...

    def save_state(self, request: str, tokens: int, place: int) -> None:
        """Where layers have states: copy that of the request, which has N tokens now, to one of the
        limits' `saved_states` places, until the request is released. What was there is gone, also
        where it has another number of them."""
        ...

    def take(self, request: str, source: str, tokens: int, *, moves: bool) -> int:
        """Let `request`, of which nothing was computed, begin with the first N tokens of `source`.

        moves: `source` has nothing then. Returns N, or 0 where they are not in memory, their state
        is not saved, or there is no memory for more. Raises RequestError for more requests than
        there may be.
        """
        ...

    def release(self, request: str) -> None:
        """Free the request's KV cache, wherever it is; unknown requests are ignored."""
        ...


class WeightResidency(Protocol):
    """The weights of one shard: how many bytes, and which layers stay in memory."""

    weight_bytes: int

    def stream(self, layers: int) -> None:
        """From now on read N layers, the last ones, from disk for each step.

        Results stay the same, bit for bit, and KV caches where they are. Raises RequestError where
        that cannot be done, and StoreError; then nothing has changed.
        """
        ...


class Observation(Protocol):
    """What a shard's products were given, where the limits say that it is observed."""

    def gram(self, run: int) -> NDArray[np.float32]:
        """Gram matrix of one of `observed_runs`, x transposed times x, or how many tokens went
        through each expert; summed over all tokens so far.

        Valid until the program's next call.
        """
        ...


class StageProgram(StageCompute, KvStorage, WeightResidency, Observation, Protocol):
    """One shard, ready to run. Called from one thread at a time."""

    def interrupt(self) -> None:
        """Nobody waits for the step that is computed: it may end at once with an error, as may all
        that come before `reset`. From any thread."""
        ...

    def reset(self) -> bool:
        """Forget every request, for a session like the one that it was loaded for; False where it
        cannot serve another one.

        Raises what a step raises if its weights are no longer what they were.
        """
        ...

    def close(self) -> None: ...


class Backend(Protocol):
    """One kind of device's way to run a shard."""

    name: str

    @property
    def lacks(self) -> frozenset[str]:
        """What of `ALL_NEEDS` it has no kernels for."""
        ...

    @property
    def is_stand_in(self) -> bool:
        """It computes in place of a device that is not here, so its speed says nothing."""
        ...

    @property
    def device_name(self) -> str:
        """What computes, for people."""
        ...

    @property
    def has_own_memory(self) -> bool:
        """Shards lie in its own memory, a GPU's, and not in that of the process."""
        ...

    def usable_memory_bytes(self) -> int:
        """What this device has free for shards now, less a reserve."""
        ...

    def copy_bytes_per_s(self) -> float | None:
        """Measured now: from the host's memory into its own; None where these are one."""
        ...

    def why_not(self) -> str | None:
        """None if it runs here, else one sentence with the cause and the remedy."""
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
        """kv_tier: where keys and values go that are swapped out.

        Raises RequestError for what this back end cannot compute, or not observe.
        """
        ...


def check_step(step: Step, limits: StepLimits, *, vocab_size: int) -> None:
    """Raises RequestError unless the step is within the limits and its ids are tokens."""
    if step.num_tokens > limits.chunk_tokens or step.batch > limits.requests:
        raise RequestError(
            f"a step of {step.batch} requests with {step.num_tokens} tokens each",
            remedy=f"this shard takes up to {limits.requests} requests or {limits.chunk_tokens} "
            "tokens",
        )
    for entry in step.entries:
        if not 0 <= entry.position <= entry.end <= limits.context_tokens:
            raise RequestError(
                f"position {entry.end} is past the context of {limits.context_tokens} tokens"
            )
        if not 0 <= min(entry.tokens) <= max(entry.tokens) < vocab_size:
            raise RequestError(f"token ids must lie in 0..{vocab_size - 1}")
