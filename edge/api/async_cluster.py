"""A cluster of peers for callers with an event loop, and loading models onto it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Sequence,
)
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Unpack

from edge.api.async_model import AsyncModel
from edge.api.counting_experts import CountedExperts, count_experts
from edge.api.described_model import HeldModel
from edge.api.hub_download import model_path
from edge.api.kept_reply import KeptReply, kept_replies
from edge.api.local_peers import LocalPeers, LocalSettings, Size
from edge.api.own_credentials import own_credentials
from edge.api.progress_bars import progress_bars
from edge.api.quality import Quality, QualityOptions, measure_quality
from edge.api.quantizing import Quantized, QuantizeOptions, quantize_model
from edge.concurrency.blocking import run_blocking, uninterrupted
from edge.coordinator.journal import KeptLoad
from edge.coordinator.lasting_model import LastingModel
from edge.coordinator.loading import load_model
from edge.coordinator.recovery.candidates import Candidates, Find, Used, Watch
from edge.coordinator.recovery.joining import Joining
from edge.coordinator.recovery.reloading import Reloading
from edge.coordinator.recovery.standing_by import StandingBy
from edge.errors import (
    CapacityError,
    EdgeError,
    NetworkError,
    PeerError,
    PlanError,
    RequestError,
    shown,
)
from edge.host.cache_paths import cache_root
from edge.host.free_memory import parse_size
from edge.membership.membership import Membership
from edge.membership.presence import Presences
from edge.membership.store import MembershipStore, config_root
from edge.option_fields import checks_calls, with_overrides
from edge.planning.cluster_profile import set_up_like
from edge.planning.forecast import Forecast
from edge.planning.load_options import MOST_WAIT_S, LoadOptions, LoadOverrides
from edge.planning.measured_proposal import Measure, forget_measured, measured_proposal
from edge.planning.proposal import Proposal
from edge.progress import OnProgress
from edge.protocol.discovery import Look, find_peers, watch_peers
from edge.protocol.kept_files import KeptFiles
from edge.protocol.lease import Lease
from edge.protocol.peer_info import (
    PeerInfo,
    describe_all,
    describe_each,
    gather_all,
    kept_by,
    memory_rate,
    set_memory,
    take_over,
    with_unique_names,
)
from edge.text.grammar import Grammars
from edge.weights.checkpoint import Checkpoint

Peer = str | PeerInfo
"""Where a peer is, or one that was found before."""

_log = logging.getLogger(__name__)


@checks_calls
class AsyncCluster:
    """Peers to run models on, for one event loop: the one on which it is opened.

    An asynchronous context manager; closing it ends its models and local daemons.
    """

    def __init__(
        self,
        peers: Sequence[PeerInfo],
        daemons: LocalPeers | None = None,
        left_out: Sequence[EdgeError] = (),
        find: Find | None = None,
        watch: Watch | None = None,
    ) -> None:
        """Use `discover`, `connect` or `local`."""
        self._candidates = Candidates(peers, find, watch)
        self.left_out = tuple(left_out)
        """Why peers that were announced then are not among them."""
        self._daemons = daemons
        self._models: list[AsyncModel] = []

    @property
    def peers(self) -> tuple[PeerInfo, ...]:
        """As they described themselves when the cluster was opened, or when they were seen since;
        no two have one name."""
        return self._candidates.peers

    @classmethod
    async def discover(
        cls,
        cluster: str = "default",
        *,
        timeout_s: float = 5.0,
        at_least: int = 1,
        interfaces: Sequence[str] | None = None,
        insecure: bool = False,
    ) -> AsyncCluster:
        """Every peer of the named cluster that zeroconf finds on the local network.

        It looks until no new one was found for a second, once there are `at_least` of them, and
        for `timeout_s` at most. `insecure`: peers that run with --insecure, instead of those that
        this device was paired with. Of one that is announced and cannot be used, a warning says
        why. Raises NetworkError, saying what was tried, when none is found.
        """
        if type(at_least) is not int or at_least < 1:
            raise RequestError(
                f"at_least must be a whole number of 1 or more, not {shown(at_least)}"
            )
        wait_s: object = timeout_s
        is_number = isinstance(wait_s, int | float) and not isinstance(wait_s, bool)
        if not is_number or not 0 <= timeout_s <= MOST_WAIT_S:
            raise RequestError(
                f"timeout_s must be 0 to {MOST_WAIT_S:g} seconds, not {shown(timeout_s)}"
            )
        own = await own_credentials(insecure=insecure)
        peers, left_out = await find_peers(
            cluster, own, timeout_s=timeout_s, at_least=at_least, interfaces=interfaces
        )
        for failure in left_out:
            _log.warning("a peer is announced, but left out: %s", failure)

        def find(
            presences: Presences,
        ) -> Awaitable[tuple[Sequence[PeerInfo], Sequence[EdgeError]]]:
            return find_peers(
                cluster, own, timeout_s=2.0, interfaces=interfaces, presences=presences
            )

        def watch(used: Used, presences: Presences, every_s: float) -> AsyncGenerator[Look]:
            return watch_peers(
                cluster,
                own,
                interfaces=interfaces,
                every_s=every_s,
                used=used,
                presences=presences,
            )

        return cls(peers, left_out=left_out, find=find, watch=watch)

    @classmethod
    async def connect(cls, peers: Peer | Sequence[Peer], *, insecure: bool = False) -> AsyncCluster:
        """The peers at "host:port"; for networks where zeroconf does not reach.

        A peer of another cluster object, as `cluster.peers` has it, may stand for its address.
        `insecure`: those that are given by an address run with --insecure.
        """
        wanted = [peers] if isinstance(peers, str | PeerInfo) else peers
        wanted = list(wanted) if isinstance(wanted, Iterable) else [wanted]
        if not all(isinstance(peer, str | PeerInfo) for peer in wanted):
            raise RequestError(
                f"{shown(peers)} names no peers", remedy="give addresses, as texts host:port"
            )
        if not wanted:
            raise RequestError(
                "no peer was named", remedy="give at least one address, as a text host:port"
            )
        own = None
        if any(isinstance(peer, str) for peer in wanted):
            own = await own_credentials(insecure=insecure)
        credentials = {
            peer if isinstance(peer, str) else peer.address: (
                own if isinstance(peer, str) else peer.credentials
            )
            for peer in wanted
        }
        return cls(await describe_each(credentials))

    @classmethod
    async def local(
        cls, peers: int = 2, *, insecure: bool = False, **settings: Unpack[LocalSettings]
    ) -> AsyncCluster:
        """Daemons started on this machine, as processes of their own with real sockets.

        They and this process are a cluster of their own, for as long as they run; `insecure`
        leaves out its keys, to measure what they cost.
        settings: memory, model_memory, threads, backend, kv_memory, kv_disk; `LocalSettings` says
        what they mean.
        """
        daemons = LocalPeers()
        try:
            return await cls._of_daemons(daemons, peers, settings, insecure=insecure)
        except BaseException:
            await uninterrupted(run_blocking(daemons.close))
            raise

    @classmethod
    async def _of_daemons(
        cls, daemons: LocalPeers, peers: int, settings: LocalSettings, *, insecure: bool
    ) -> AsyncCluster:
        """The cluster of daemons that it starts; from then on they are its own to end."""
        own, handed = None, None
        if not insecure:
            cluster = await run_blocking(lambda: _cluster_of_a_run(settings))
            own, handed = cluster.shown().credentials_of_a_run(), cluster.handed
        await run_blocking(lambda: daemons.start(peers, settings, handed))
        addresses = await run_blocking(daemons.addresses, stop=daemons.hang_up)
        return cls(await describe_each(dict.fromkeys(addresses, own)), daemons)

    async def memory_rates(self) -> dict[str, float]:
        """Bytes per second that each peer reads from memory, by name; measured one by one."""
        return {peer.name: await memory_rate(peer) for peer in self.peers}

    async def load(
        self,
        path: str | Path,
        options: LoadOptions | None = None,
        *,
        progress: bool | OnProgress | None = None,
        resumes: KeptReply | None = None,
        **overrides: Unpack[LoadOverrides],
    ) -> AsyncModel:
        """Load a model onto the peers: a Hugging Face folder, a GGUF file, or org/name.

        path: org/name, or org/name:Q4_K_M for one of its GGUF files, is a model on Hugging Face.
        It is taken from the Hugging Face cache, or fetched into it.
        options, and by name what differs from them: see `edge.LoadOptions`.
        progress: bars (None: on a terminal, and in a notebook with ipywidgets), or a function that
        takes `Progress`.
        resumes: in the place of whoever loaded it for this reply, with the plan that it had where
        the devices are there and `options` name no other.

        Raises CheckpointError, CapacityError, PlanError, RequestError or a PeerError; after any of
        them nothing of the model is left on the peers.
        """
        asked = with_overrides(LoadOptions, options, overrides)
        if resumes is not None:
            await self._take_over(resumes.lease)
        async with self._opened(path, asked, progress) as (checkpoint, peers):
            tokenizer = None
            if checkpoint.has_tokenizer:
                tokenizer = await run_blocking(lambda: checkpoint.tokenizer)
            with progress_bars(progress) as on_progress:
                propose = partial(
                    measured_proposal, checkpoint, peers, measure="needed", on_progress=on_progress
                )
                options, proposal = await _as_before(propose, asked, peers, resumes)
                # Also after a loss: requests under way may be as long.
                options = replace(
                    options,
                    context_tokens=proposal.context_tokens,
                    saved_states=proposal.saved_states,
                )
                if options.stream == "auto" and proposal.streaming is not None:
                    _log.warning('%s; stream="off" refuses instead', proposal.streaming)
                forecast = Forecast(proposal)
                lease = Lease() if resumes is None else resumes.lease
                known = {peer.id: peer for peer in peers}
                reload = Reloading(
                    candidates=lambda: self.peers,
                    look_for_more=self._candidates.look,
                    on_lost=self._candidates.lost,
                    path=checkpoint.path,
                    options=options,
                    fingerprint=checkpoint.store.fingerprint,
                    forecast=forecast,
                    peers=known,
                    lease=lease,
                )
                bringing = reload.bringing(checkpoint, proposal, peers, on_progress)
                # What was summed up of a model's inputs is lost with a peer.
                lasting = LastingModel(None if bringing.limits.observes else reload)
                loaded = await load_model(bringing, peers, on_end=lasting.ended)
                reload.manifests = loaded.manifests
                lasting.begin(loaded)
            attendants: list[Joining | StandingBy] = []
            if options.replan == "auto" and not bringing.limits.observes:
                attendants.append(Joining(self._candidates, reload, lasting))
            if options.standby == "kv" and not bringing.limits.observes:
                attendants.append(StandingBy(reload, lasting))
            model = AsyncModel(
                HeldModel(
                    loaded=lasting,
                    forecast=forecast,
                    name=checkpoint.name,
                    vocab_size=checkpoint.spec.vocab_size,
                    hidden_size=checkpoint.spec.hidden_size,
                    context_tokens=bringing.limits.context_tokens,
                    longest_context_tokens=checkpoint.spec.context_tokens,
                    end_ids=checkpoint.end_ids,
                    sampling=checkpoint.sampling,
                    unused_settings=checkpoint.unused_settings,
                    pooling=checkpoint.pooling,
                    tokenizer=tokenizer,
                    grammars=None
                    if tokenizer is None
                    else Grammars(
                        tokenizer.vocabulary,
                        vocab_size=checkpoint.spec.vocab_size,
                        end_ids=checkpoint.end_ids,
                        marks=tokenizer.answer_form.thinking_marks,
                    ),
                    peers=known,
                    load=KeptLoad.of(
                        checkpoint.path,
                        checkpoint.store.fingerprint,
                        asked,
                        context_tokens=bringing.limits.context_tokens,
                        plan=proposal.plan,
                        names={peer.id: peer.name for peer in peers},
                    ),
                    lease=lease,
                    replies=kept_replies(),
                    attendants=tuple(attendants),
                )
            )
            self._models.append(model)
        return model

    async def propose(
        self,
        path: str | Path,
        options: LoadOptions | None = None,
        *,
        changes: Sequence[str] = (),
        measure: Measure = "missing",
        **overrides: Unpack[LoadOverrides],
    ) -> Proposal:
        """The plan that `load` would use with the same options, without loading anything.

        Every peer is measured first, unless it was for this model: so its speed is predicted.
        `changes` are made to what is known of the peers first, as "+4GiB on b", "without c" or
        "link a-b 1ms 1Gbit".
        """
        options = with_overrides(LoadOptions, options, overrides)
        async with self._opened(path, options) as (checkpoint, peers):
            with progress_bars() as on_progress:
                return await measured_proposal(
                    checkpoint,
                    peers,
                    options,
                    measure=measure,
                    on_progress=on_progress,
                    changes=changes,
                )

    async def quality(
        self,
        path: str | Path,
        options: LoadOptions | None = None,
        *,
        against: str | Path = "float32",
        text: str | None = None,
        windows: int = 6,
        window_tokens: int = 384,
        progress: bool | OnProgress | None = None,
        **overrides: Unpack[LoadOverrides],
    ) -> Quality:
        """What a load with these options costs in quality: a reference reads a text, then this.

        against: "float32" of the same checkpoint, or the folder of another one with the same
        vocabulary, which is then read in float32. text: None for a bundled one of 2,600 tokens or
        so. `windows` pieces of `window_tokens` tokens are read, each from an empty context. The
        reference's logits, a float32 for each token of the vocabulary at each position (1.4 GB for
        2,304 positions and 150,000 tokens), wait on disk meanwhile.

        Raises RequestError for a text that is too short, another vocabulary or a full disk, and
        what `load` raises.
        """
        options = with_overrides(LoadOptions, options, overrides)
        found = await model_path(path, progress)
        if against != "float32":
            against = await model_path(against, progress)
        return await measure_quality(
            partial(self.load, progress=progress),
            found,
            options,
            against=against,
            text=text,
            wanted=QualityOptions(windows=windows, window_tokens=window_tokens),
            folder=cache_root(),
            progress=progress,
        )

    async def quantize(
        self,
        path: str | Path,
        out: str | Path,
        options: LoadOptions | None = None,
        *,
        bits: float | None = None,
        text: str | None = None,
        windows: int = 24,
        window_tokens: int = 256,
        progress: bool | OnProgress | None = None,
    ) -> Quantized:
        """Round a model by what its weights are multiplied with, into the new folder `out`.

        The peers run the model in int8, by the plan of `options`, and sum up the inputs of its
        matrices while it reads `windows` pieces of `window_tokens` tokens of the text; without a
        text, while it writes as many. Then this device rounds one matrix after the other (GPTQ).
        After an interruption the same call goes on. `bits`: of a weight in the mean, scales
        included, each matrix being given what pays most; None for the kinds of matrices that dtype
        "int4" has.

        Raises RequestError for a folder that is there already or a text that is too short,
        CapacityError for a full disk, and what `load` raises.
        """
        options = with_overrides(LoadOptions, options, {})
        return await quantize_model(
            partial(self.load, progress=progress),
            await model_path(path, progress),
            out,
            options,
            text=text,
            wanted=QuantizeOptions(bits=bits, windows=windows, window_tokens=window_tokens),
            cache_root=cache_root(),
            progress=progress,
        )

    async def count_experts(
        self,
        path: str | Path,
        options: LoadOptions | None = None,
        *,
        text: str | None = None,
        progress: bool | OnProgress | None = None,
    ) -> CountedExperts:
        """Find out how often tokens go through each of a model's experts.

        The peers run the model, by the plan of `options`, while it reads up to 3,072 tokens of the
        text; without one, while it writes as many. Plans for the same files go by that from then
        on: which device has which experts whole, and how many it finds in memory where others are
        on disk.

        Raises RequestError for a model without experts or a text that is too short, CapacityError
        for a full disk, and what `load` raises.
        """
        options = with_overrides(LoadOptions, options, {})
        return await count_experts(
            partial(self.load, progress=progress),
            await model_path(path, progress),
            options,
            text=text,
            cache_root=cache_root(),
            progress=progress,
        )

    def __repr__(self) -> str:
        count = len(self.peers)
        models = sum(not model.is_over for model in self._models)
        names = ", ".join(peer.name for peer in self.peers[:4]) + (", …" if count > 4 else "")
        loaded = f"; {models} model{'s' if models > 1 else ''} loaded" if models else ""
        return (
            f"<{type(self).__name__} of {count} peer{'s' if count != 1 else ''}: {names}{loaded}>"
        )

    async def set_memory(self, peer: PeerInfo, memory: Size) -> PeerInfo:
        """Have a peer's process stay under `memory` from now on; how it describes itself then.

        With less, it reads layers of what it runs from disk for each token: replies under way go
        on, with the same tokens. Raises RequestError below the minimum of what is loaded.
        """
        return await set_memory(peer, parse_size(memory))

    async def kept(self, peer: PeerInfo) -> tuple[KeptFiles, ...]:
        """What a peer keeps on disk of weights, the least recently used first.

        Of what other devices sent, it says how much that is, and not which models.
        """
        return await kept_by(peer)

    async def remove_kept(self, peer: PeerInfo, names: Sequence[str]) -> tuple[KeptFiles, ...]:
        """Have a peer remove files that this device sent and that nobody uses; what is kept then.

        names: as `kept` has them. What is not removed is still in what this returns.
        """
        return await kept_by(peer, names)

    def forget_measured(self, devices: Sequence[str]) -> None:
        """Have these peers (by id) and the links between them measured anew when a plan is made.

        A single peer is loaded without that: `propose` measures it.
        """
        forget_measured(set_up_like(devices, self.peers))

    async def aclose(self) -> None:
        """Free everything on the peers; end local daemons. May be called again.

        Replies under way end with RequestError.
        """
        try:
            await self._close_models()
        finally:
            if self._daemons is not None:
                await uninterrupted(run_blocking(self._daemons.close))

    async def _take_over(self, lease: Lease) -> None:
        """Free what earlier coordinators of a run hold, before anything is planned.

        Raises RequestError where a later one has been. A peer that does not answer has no part in
        what follows.
        """

        async def one(peer: PeerInfo) -> None:
            with contextlib.suppress(PeerError, NetworkError):
                await take_over(peer, lease)

        await gather_all(one(peer) for peer in self.peers)

    async def _close_models(self) -> None:
        """Free everything on the peers."""
        models, self._models = self._models, []
        await asyncio.gather(*(model.aclose() for model in models))

    @contextlib.asynccontextmanager
    async def _opened(
        self,
        path: str | Path,
        options: LoadOptions,
        progress: bool | OnProgress | None = None,
    ) -> AsyncIterator[tuple[Checkpoint, Sequence[PeerInfo]]]:
        """The checkpoint, and the peers as they are now, without those that have gone since.

        Memory that a failed model held is free again. Raises NetworkError when nobody answers; in
        the body, a lack of memory or devices names those who have gone.
        """
        found = await model_path(path, progress)
        opening = run_blocking(
            lambda: Checkpoint.open(found, lora=options.lora), discard=Checkpoint.close
        )
        with await opening as checkpoint:
            over = [model for model in self._models if model.is_over]
            self._models = [model for model in self._models if not model.is_over]
            for model in over:
                await model.aclose()
            infos, failures = await describe_all(
                {peer.address: peer.credentials for peer in self.peers}
            )
            gone = [peer.name for peer in self.peers if peer.address in failures]
            if not infos:
                raise NetworkError(
                    f"none of the cluster's peers answers any more ({', '.join(gone)})",
                    remedy="start them and open the cluster again",
                )
            note = f" ({', '.join(gone)} no longer answers and was left out)" if gone else ""
            try:
                yield checkpoint, with_unique_names(infos, self.peers)
            except CapacityError as error:
                raise CapacityError(f"{error}{note}") from error
            except PlanError as error:
                raise PlanError(f"{error}{note}", error.problems) from error

    async def __aenter__(self) -> AsyncCluster:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


async def _as_before(
    propose: Callable[[LoadOptions], Awaitable[Proposal]],
    options: LoadOptions,
    peers: Sequence[PeerInfo],
    resumes: KeptReply | None,
) -> tuple[LoadOptions, Proposal]:
    """With the plan of what is gone on with, where that can be."""
    names = [peer.name for peer in peers]
    plan = None if resumes is None else resumes.plan_on(names, options)
    if plan is not None:
        before = replace(options, plan=plan)
        with contextlib.suppress(CapacityError, PlanError):
            return before, await propose(before)
    return options, await propose(options)


def _cluster_of_a_run(settings: LocalSettings) -> Membership:
    """For local daemons and this process. What they keep on disk, a later run finds again."""
    keeps = settings.get("kv_disk") is not None
    identity = MembershipStore(config_root()).identity() if keeps else None
    return Membership.founded("local", identity)
