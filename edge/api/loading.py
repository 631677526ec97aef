"""Loading a model onto a cluster's peers: from options and a checkpoint to a model that answers."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from edge.answers.journal_records import JournaledLoad
from edge.api.hub_download import model_path
from edge.api.kept_reply import KeptReply, kept_replies
from edge.api.loaded_model import Attendant, LoadedModel
from edge.concurrency.blocking import run_blocking, uninterrupted
from edge.errors import (
    CapacityError,
    CheckpointError,
    EdgeError,
    NetworkError,
    PlanError,
    RequestError,
)
from edge.models.towers.tower import Tower
from edge.pictures.reader import PictureReader
from edge.planning.draft_place import DraftPlace, check_draft, place_draft
from edge.planning.forecast import Forecast
from edge.planning.load_options import LoadOptions
from edge.planning.measured_proposal import Measure, measured_proposal
from edge.planning.proposal import Proposal
from edge.planning.tower_place import place_in_words
from edge.progress import OnProgress
from edge.protocol.lease import Lease
from edge.protocol.peer_info import PeerInfo, describe_all, with_unique_names
from edge.runs.copied_model import CopiedModel
from edge.runs.drafting import Drafting
from edge.runs.load import load_model
from edge.runs.model import RunningModel
from edge.runs.pictures import Pictures, tower_digest
from edge.runs.recovery.candidates import Candidates
from edge.runs.recovery.copying import Copying
from edge.runs.recovery.reloading import Reloading
from edge.runs.recovery.replanning import Replanning
from edge.runs.recovery.standing_by import StandingBy
from edge.runs.resolved import ResolvedLoad
from edge.text.grammar import Grammars
from edge.text.tokenizer import Tokenizer
from edge.weights.checkpoint import Checkpoint

_log = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def opened(
    path: Path, options: LoadOptions, candidates: Candidates
) -> AsyncIterator[tuple[Checkpoint, Sequence[PeerInfo]]]:
    """The checkpoint, and the candidates that answer now.

    Raises NetworkError if none answers. In the body, an error for a lack of memory or devices names
    the peers that have gone.
    """
    opening = run_blocking(
        lambda: Checkpoint.open(path, lora=options.lora, further_head=options.has_further_head),
        discard=Checkpoint.close,
    )
    with await opening as checkpoint:
        if options.has_further_head and (why := _why_not_further(options)):
            raise RequestError(why, remedy="load it without speculate mtp")
        known = candidates.peers
        infos, failures = await describe_all({peer.address: peer.credentials for peer in known})
        gone = [peer.name for peer in known if peer.address in failures]
        if not infos:
            raise NetworkError(
                f"none of the cluster's peers answers any more ({', '.join(gone)})",
                remedy="start them and open the cluster again",
            )
        note = f" ({', '.join(gone)} no longer answers and was left out)" if gone else ""
        try:
            yield checkpoint, with_unique_names(infos, known)
        except CapacityError as error:
            raise CapacityError(f"{error}{note}") from error
        except PlanError as error:
            raise PlanError(f"{error}{note}", error.problems) from error


def _why_not_further(options: LoadOptions) -> str:
    """Why a further head could never guess; empty if it can."""
    if options.batch_invariant:
        return "tokens are not guessed where no bit may depend on other requests (batch_invariant)"
    if options.kv_dtype == "int4":
        return "tokens are not guessed with keys and values in int4"
    return ""


@contextlib.asynccontextmanager
async def opened_draft(
    options: LoadOptions, large: Checkpoint, progress: bool | OnProgress | None = None
) -> AsyncIterator[Checkpoint | None]:
    """The draft model of the options, if they name one.

    Raises RequestError if it cannot guess tokens of the large one.
    """
    if options.draft is None:
        yield None
        return
    path = await model_path(options.draft, progress)
    with await run_blocking(lambda: Checkpoint.open(path), discard=Checkpoint.close) as draft:
        await check_draft(draft, large, options)
        yield draft


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """One model to load, and the peers that may run it."""

    checkpoint: Checkpoint
    options: LoadOptions
    """The options as the user gave them."""
    candidates: Candidates
    peers: Sequence[PeerInfo]
    """The candidates that answer now."""
    resumes: KeptReply | None
    """The reply that the model is loaded for."""
    on_progress: OnProgress
    draft: Checkpoint | None = None
    """The draft model."""

    async def run(self) -> LoadedModel:
        """Plan, deliver, load and start. After a failure nothing stays on the peers."""
        checkpoint, tokenizer = self.checkpoint, None
        if checkpoint.has_tokenizer:
            tokenizer = await run_blocking(lambda: checkpoint.tokenizer)
        propose = partial(
            measured_proposal,
            checkpoint,
            self.peers,
            measure="needed",
            on_progress=self.on_progress,
        )
        options, proposal = await plan_as_before(
            propose, self.options.for_peers(checkpoint, self.peers), self.peers, self.resumes
        )
        place = None
        if self.draft is not None:
            proposal, place = await with_draft(
                self.draft, proposal, self.peers, options, "needed", self.on_progress
            )
            if place.is_slow:
                _log.warning("%s", place.sentence)
        if options.stream == "auto" and proposal.streaming is not None:
            _log.warning('%s; stream="off" refuses instead', proposal.streaming)
        reload = Reloading(
            candidates=lambda: self.candidates.peers,
            look_for_more=self.candidates.look,
            on_lost=self.candidates.lost,
            path=checkpoint.path,
            options=options,
            fingerprint=checkpoint.store.fingerprint,
            forecast=Forecast(proposal),
            peers={peer.id: peer for peer in self.peers},
            lease=Lease() if self.resumes is None else self.resumes.lease,
        )
        running: RunningModel | CopiedModel
        if options.wants_copies:
            running, attendants = await self._copied(reload)
        else:
            running, attendants = await self._one(reload, place)
        forecast = reload.forecast
        context_tokens = forecast.proposal.context_tokens
        return LoadedModel(
            running=running,
            forecast=forecast,
            name=checkpoint.name,
            vocab_size=checkpoint.spec.vocab_size,
            hidden_size=checkpoint.spec.hidden_size,
            context_tokens=context_tokens,
            longest_context_tokens=checkpoint.spec.context_tokens,
            end_ids=checkpoint.end_ids,
            sampling=checkpoint.sampling,
            unused_settings=checkpoint.unused_settings,
            pooling=checkpoint.pooling,
            tokenizer=tokenizer,
            grammars=None if tokenizer is None else _grammars(checkpoint, tokenizer),
            peers=reload.peers,
            load=JournaledLoad.of(
                checkpoint.path,
                checkpoint.store.fingerprint,
                replace(self.options, packs_blocks=options.packs_blocks),
                context_tokens=context_tokens,
                plan=forecast.proposal.plan,
                names={peer.id: peer.name for peer in self.peers},
            ),
            speculate=self.options.usually_speculates,
            lease=reload.lease,
            replies=kept_replies(),
            pictures=self._pictures(options, forecast),
            picture_reader=await run_blocking(lambda: self._picture_reader(tokenizer)),
            attendants=attendants,
        )

    async def _one(
        self, reload: Reloading, place: DraftPlace | None
    ) -> tuple[RunningModel, tuple[Attendant, ...]]:
        """The model by one plan, and what runs in its background. place: of the draft model."""
        checkpoint, options, proposal = self.checkpoint, reload.options, reload.forecast.proposal
        delivery = reload.delivery(checkpoint, proposal, self.peers, self.on_progress)
        observes = delivery.load.limits.observes
        # A lost peer takes its sums of observed inputs with it, so such a model does not fail over.
        running = RunningModel(None if observes else reload)
        run = await load_model(delivery, self.peers, on_end=running.ended)
        reload.manifests = run.manifests
        running.begin(run)
        if not run.most_drafted and (self.draft or options.usually_speculates != "off"):
            _log.warning(
                "no tokens are guessed on this plan: not on GPUs, nor with a rounded wire, with "
                "keys and values in int4, batch_invariant, or observed inputs"
            )
        attendants: list[Attendant] = []
        if self.draft is not None and place is not None:
            drafting = Drafting(
                self.draft.path, self.draft.store.fingerprint, options, reload.lease
            )
            try:
                await drafting.start(run, place, self.peers, self.draft, self.on_progress)
            except EdgeError as error:
                _log.warning("answers go on without a draft model: %s", error)
            except BaseException:
                await uninterrupted(running.aclose())
                raise
            reload.drafting = drafting
            attendants.append(drafting)
        if options.replan == "auto" and not observes:
            attendants.append(Replanning(self.candidates, reload, running))
        if options.standby == "kv" and not observes:
            attendants.append(StandingBy(reload, running))
        return running, tuple(attendants)

    async def _copied(self, reload: Reloading) -> tuple[CopiedModel, tuple[Attendant, ...]]:
        """Copies of the model, and what keeps their number. reload: of one plan."""
        front = CopiedModel(reload.forecast)
        copying = Copying(front, self.candidates, reload)
        await copying.load(self.checkpoint, self.on_progress)
        copying.begin()
        return front, (copying,)

    def _picture_reader(self, tokenizer: Tokenizer | None) -> PictureReader | None:
        """What prepares pictures, if the model reads some and has the files that tell how."""
        checkpoint = self.checkpoint
        tower = readable_tower(checkpoint)
        if tower is None or tokenizer is None:
            return None
        try:
            digest = tower_digest(checkpoint)
            return PictureReader(checkpoint.picture_files, tower, tokenizer, digest=digest)
        except CheckpointError as error:
            _log.warning("pictures are not read: %s", error)
            return None

    def _pictures(self, options: LoadOptions, forecast: Forecast) -> Pictures | None:
        """What reads the pictures of prompts, if the model reads some."""
        tower = readable_tower(self.checkpoint)
        if tower is None:
            return None
        load = ResolvedLoad.of(self.checkpoint, options, forecast.proposal, self.peers)
        return Pictures(
            self.checkpoint,
            load,
            candidates=lambda: self.candidates.peers,
            proposal=lambda: forecast.proposal,
            place=place_in_words(tower, load.weight_format, forecast.proposal, self.peers),
            tell=self.on_progress,
        )


def readable_tower(checkpoint: Checkpoint) -> Tower | None:
    """The tower of a model whose pictures are read; None: it has none, or one that is not read."""
    try:
        tower = checkpoint.tower
    except CheckpointError as error:
        _log.warning("pictures are not read: %s", error)
        return None
    if tower is not None and tower.deep_layers != checkpoint.spec.picture_layers:
        _log.warning("pictures are not read: their rows go to layers that are not known")
        return None
    return tower


def with_tower(
    checkpoint: Checkpoint, proposal: Proposal, peers: Sequence[PeerInfo], options: LoadOptions
) -> Proposal:
    """The proposal with a note on where pictures are read, if the model reads any."""
    tower = readable_tower(checkpoint)
    if tower is None:
        return proposal
    said = place_in_words(tower, options.weight_format(checkpoint), proposal, peers)
    return replace(proposal, notes=(*proposal.notes, said))


async def with_draft(
    draft: Checkpoint,
    proposal: Proposal,
    peers: Sequence[PeerInfo],
    options: LoadOptions,
    measure: Measure,
    on_progress: OnProgress,
) -> tuple[Proposal, DraftPlace]:
    """The proposal with a note on where the draft model runs, and that place.

    Raises CapacityError if no device has room for it.
    """
    place = await place_draft(
        draft, proposal, peers, options, measure=measure, on_progress=on_progress
    )
    return replace(proposal, notes=(*proposal.notes, place.sentence)), place


def _grammars(checkpoint: Checkpoint, tokenizer: Tokenizer) -> Grammars:
    return Grammars(
        tokenizer.vocabulary,
        vocab_size=checkpoint.spec.vocab_size,
        end_ids=checkpoint.end_ids,
        marks=tokenizer.answer_form.thinking_marks,
        encode=tokenizer.encode_part,
    )


async def plan_as_before(
    propose: Callable[[LoadOptions], Awaitable[Proposal]],
    options: LoadOptions,
    peers: Sequence[PeerInfo],
    resumes: KeptReply | None,
) -> tuple[LoadOptions, Proposal]:
    """Options and a proposal with the plan that the resumed reply had, if that is possible."""
    names = [peer.name for peer in peers]
    plan = None if resumes is None else resumes.plan_on(names, options)
    if plan is not None:
        before = replace(options, plan=plan)
        with contextlib.suppress(CapacityError, PlanError):
            return before, await propose(before)
    return options, await propose(options)
