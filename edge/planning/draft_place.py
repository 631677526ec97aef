"""Where a draft model runs: on a device that the plan leaves out, else beside the sampler."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from edge.concurrency.blocking import run_blocking
from edge.errors import CapacityError, EdgeError, PlanError, RequestError
from edge.memory.step_memory import rewinds
from edge.planning.load_options import LoadOptions
from edge.planning.measured_proposal import Measure, measured_proposal
from edge.planning.proposal import Proposal
from edge.progress import OnProgress, ignore_progress
from edge.protocol.peer_info import PeerInfo
from edge.weights.checkpoint import Checkpoint
from edge.weights.formats import KvDtype

_LEAST_CONTEXT_TOKENS = 512
"""A draft model may have a shorter context than its large model, where memory is short; requests
that are longer have no further guesses."""

_KV_DTYPE: KvDtype = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlace:
    """A plan for the draft model on one device."""

    peer: PeerInfo
    name: str
    """Name of the draft model."""
    is_apart: bool
    """The device has no part in the plan of the large model."""
    options: LoadOptions
    proposal: Proposal
    large_token_s: float | None
    """Predicted seconds of the large model for each token."""

    @property
    def token_s(self) -> float | None:
        """Predicted seconds for each token; None: the device was not measured."""
        return _token_s(self.proposal)

    @property
    def is_slow(self) -> bool:
        """Whether its guesses are predicted to cost more time than they save: a guess that takes as
        long as the token itself, or half of it where the large model waits meanwhile."""
        if self.token_s is None or self.large_token_s is None:
            return False
        return self.token_s * (1 if self.is_apart else 2) > self.large_token_s

    @property
    def sentence(self) -> str:
        """For the user: where it drafts, and how fast."""
        where = "which has no part in the plan" if self.is_apart else "beside a part of the plan"
        said = f"{self.name} drafts on {self.peer.name}, {where}"
        if self.token_s is not None:
            said += f", {1000 * self.token_s:.3g} ms for each guess"
        if self.is_slow and self.large_token_s is not None:
            said += f"; that gains nothing, as a token takes {1000 * self.large_token_s:.3g} ms"
        return said


async def check_draft(draft: Checkpoint, large: Checkpoint, options: LoadOptions) -> None:
    """Raises RequestError if `draft` cannot guess tokens of `large`, loaded with these options."""
    if not await run_blocking(lambda: _has_vocabulary_of(large, draft)):
        raise RequestError(
            f"{draft.name} has another vocabulary than {large.name}, so it cannot guess its tokens",
            remedy="take a smaller model of the same family",
        )
    for spec, kv_dtype, name in (
        (draft.spec, _KV_DTYPE, draft.name),
        (large.spec, options.kv_dtype, large.name),
    ):
        if rewinds(spec, kv_dtype):
            raise RequestError(
                f"guesses of tokens need keys and values that can be cut, and {name} has recurrent "
                "states, or int4 ones",
                remedy="leave out the draft model",
            )


def _has_vocabulary_of(large: Checkpoint, draft: Checkpoint) -> bool:
    """Whether equal ids are equal tokens. Models may compute logits for more ids than there are
    tokens, each for another number of them."""
    if large.has_tokenizer and draft.has_tokenizer:
        return large.tokenizer.tokens_digest == draft.tokenizer.tokens_digest
    return large.spec.vocab_size == draft.spec.vocab_size


async def place_draft(
    draft: Checkpoint,
    proposal: Proposal,
    peers: Sequence[PeerInfo],
    options: LoadOptions,
    *,
    measure: Measure = "needed",
    on_progress: OnProgress = ignore_progress,
) -> DraftPlace:
    """The place of the draft model beside the plan of a proposal.

    peers: as they described themselves before the plan is loaded. options: of the large model.
    Raises CapacityError if no device has room.
    """
    devices = proposal.plan.devices
    reasons: list[str] = []

    async def tried(peer: PeerInfo, *, is_apart: bool) -> DraftPlace | None:
        peer = _beside(peer, peers, proposal)
        for context in _contexts(min(proposal.context_tokens, draft.spec.context_tokens)):
            own = LoadOptions(
                context_tokens=context,
                accuracy=options.accuracy,
                kv_dtype=_KV_DTYPE,
                stream="off",
                standby="none",
                replan="off",
                keeps_all_tokens=True,
            ).for_peers(draft, [peer])
            try:
                found = await measured_proposal(
                    draft, [peer], own, measure=measure, on_progress=on_progress
                )
            except (CapacityError, PlanError, RequestError) as error:
                reason: EdgeError = error
                continue
            return DraftPlace(
                peer=peer,
                name=draft.name,
                is_apart=is_apart,
                options=own,
                proposal=found,
                large_token_s=_token_s(proposal),
            )
        reasons.append(str(reason))
        return None

    apart = [peer for peer in peers if peer.id not in devices and not peer.is_leaving]
    places = [each for peer in apart if (each := await tried(peer, is_apart=True)) is not None]
    if places:
        return min(places, key=lambda each: each.token_s or 0.0)
    sampler = proposal.plan.stages[-1].shards[0].device
    for peer in peers:
        if peer.id == sampler:
            beside = await tried(peer, is_apart=False)
            if beside is not None:
                return beside
    raise CapacityError(
        f"no device has room for the draft model {draft.name}: {'; '.join(reasons)}"
    )


def _token_s(proposal: Proposal) -> float | None:
    predicted = proposal.choice.predicted
    return None if predicted is None else 1 / predicted.tokens_per_s


def _contexts(longest: int) -> Iterator[int]:
    yield longest
    while (longest := longest // 2) >= _LEAST_CONTEXT_TOKENS:
        yield longest


def _beside(peer: PeerInfo, peers: Sequence[PeerInfo], proposal: Proposal) -> PeerInfo:
    """The peer without the memory that the plan takes of it, or of the memory that it shares."""
    pools = {each.id: each.memory_pool for each in peers}

    def taken(devices: Collection[str]) -> int:
        buffers = {id: each.buffer_bytes for id, each in proposal.overhead.items()}
        return sum(
            row.memory.total + buffers.get(row.device, 0)
            for row in proposal.rows
            if row.device in devices
        )

    own = taken({peer.id})
    sharing = {id for id, pool in pools.items() if pool is not None and pool == peer.memory_pool}
    shared = taken(sharing | {peer.id})
    return replace(
        peer,
        free_bytes=max(0, peer.free_bytes - own),
        free_now_bytes=max(0, peer.free_now_bytes - shared),
        model_free_bytes=max(0, peer.model_free_bytes - own),
        pool_free_bytes=max(0, peer.pool_free_bytes - shared),
    )
