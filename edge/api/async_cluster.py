"""A cluster of peers for callers with an event loop, and loading models onto it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Unpack

from edge.api import peer_search
from edge.api.async_model import AsyncModel
from edge.api.cluster_graphs import ClusterGraphs
from edge.api.cluster_studies import ClusterStudies
from edge.api.hub_download import model_path
from edge.api.kept_reply import KeptReply
from edge.api.loading import Loading, opened, opened_draft, with_draft, with_tower
from edge.api.local_peers import LocalPeers, LocalSettings, Size
from edge.api.peer_search import FoundPeers, Peer
from edge.api.progress_bars import progress_bars
from edge.concurrency.blocking import run_blocking, uninterrupted
from edge.errors import NetworkError, PeerError
from edge.host.free_memory import parse_size
from edge.option_fields import checks_calls, with_overrides
from edge.planning.cluster_profile import set_up_like
from edge.planning.copies import with_copies
from edge.planning.load_options import LoadOptions, LoadOverrides
from edge.planning.measured_proposal import Measure, forget_measured, measured_proposal
from edge.planning.proposal import Proposal
from edge.progress import OnProgress
from edge.protocol.kept_files import KeptFiles
from edge.protocol.lease import Lease
from edge.protocol.peer_info import (
    PeerInfo,
    gather_all,
    kept_by,
    memory_rate,
    set_memory,
    take_over,
)
from edge.runs.recovery.candidates import Candidates
from edge.weights.checkpoint import Checkpoint


@checks_calls
class AsyncCluster(ClusterGraphs, ClusterStudies):
    """Peers to run models on. For one event loop: the one that opened it.

    An asynchronous context manager; closing it ends its models and local daemons.
    """

    def __init__(self, found: FoundPeers, daemons: LocalPeers | None = None) -> None:
        """Use `discover`, `connect` or `local`."""
        self._candidates = Candidates(found.peers, found.find, found.watch)
        self.left_out = tuple(found.left_out)
        """The errors of announced peers that were left out."""
        self._daemons = daemons
        self._models: list[AsyncModel] = []
        self._graphs = []

    @property
    def peers(self) -> tuple[PeerInfo, ...]:
        """The peers, as they last described themselves. Names are unique."""
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

        It looks for at most `timeout_s` seconds, and ends earlier once there are `at_least` peers
        and none came for a second; it looks two seconds longer for paired devices that have not
        answered. insecure: peers that run with --insecure, instead of paired ones. Warnings name
        each announced peer that cannot be used, and paired devices that were not found. Raises
        NetworkError, saying what was tried, if none is found.
        """
        return cls(
            await peer_search.discover(
                cluster,
                timeout_s=timeout_s,
                at_least=at_least,
                interfaces=interfaces,
                insecure=insecure,
            )
        )

    @classmethod
    async def connect(cls, peers: Peer | Sequence[Peer], *, insecure: bool = False) -> AsyncCluster:
        """The peers at these addresses ("host:port"), for networks without zeroconf.

        A peer of another cluster, as in `cluster.peers`, may stand for its address. insecure: the
        peers given by address run with --insecure.
        """
        return cls(await peer_search.connect(peers, insecure=insecure))

    @classmethod
    async def local(
        cls, peers: int = 2, *, insecure: bool = False, **settings: Unpack[LocalSettings]
    ) -> AsyncCluster:
        """New daemons on this machine, each a process with real sockets.

        They and this process are a cluster of their own while they run. insecure: without keys, to
        measure the cost of encryption. settings: memory, model_memory, threads, backend, kv_memory,
        kv_disk; see `LocalSettings`.
        """
        daemons = LocalPeers()
        try:
            found = await peer_search.start_daemons(daemons, peers, settings, insecure=insecure)
            return cls(found, daemons)
        except BaseException:
            await uninterrupted(run_blocking(daemons.close))
            raise

    async def memory_rates(self) -> dict[str, float]:
        """Bytes per second that each peer reads from memory, by name, measured one by one."""
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

        path: org/name, or org/name:Q4_K_M for one of its GGUF files, is a model on Hugging Face; it
        is taken from the Hugging Face cache, or fetched into it. options and overrides: see
        `edge.LoadOptions`. progress: bars (None: on a terminal, and in a notebook with ipywidgets),
        or a function that takes `Progress`. resumes: the reply that the model is loaded for, with
        the plan that it had if its devices are there and `options` name no other plan.

        Raises CheckpointError, CapacityError, PlanError, RequestError or a PeerError. After any of
        them nothing of the model is left on the peers.
        """
        asked = with_overrides(LoadOptions, options, overrides)
        if resumes is not None:
            await self._take_over(resumes.lease)
        async with (
            self._opened(path, asked, progress) as (checkpoint, peers),
            opened_draft(asked, checkpoint, progress) as draft,
        ):
            with progress_bars(progress) as on_progress:
                loading = Loading(
                    checkpoint=checkpoint,
                    options=asked,
                    candidates=self._candidates,
                    peers=peers,
                    resumes=resumes,
                    on_progress=on_progress,
                    draft=draft,
                )
                model = AsyncModel(await loading.run())
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
        """The plan that `load` would use with the same options. Loads nothing.

        Every peer that was not measured for this model is measured first, so that the speed is
        predicted. changes: assumed changes of the peers, as "+4GiB on b", "without c" or
        "link a-b 1ms 1Gbit".
        """
        options = with_overrides(LoadOptions, options, overrides)
        async with (
            self._opened(path, options) as (checkpoint, peers),
            opened_draft(options, checkpoint) as draft,
        ):
            options = options.for_peers(checkpoint, peers)
            with progress_bars() as on_progress:
                proposal = await measured_proposal(
                    checkpoint, peers, options, measure=measure, on_progress=on_progress,
                    changes=changes,
                )  # fmt: skip
                ids = {device.id for device in proposal.cluster.devices}
                there = [peer for peer in peers if not changes or peer.id in ids]
                proposal = await with_copies(checkpoint, proposal, peers, options, changes)
                proposal = with_tower(checkpoint, proposal, there, options)
                if draft is not None:
                    proposal, _place = await with_draft(
                        draft, proposal, peers, options, measure, on_progress
                    )
                return proposal

    def __repr__(self) -> str:
        count = len(self.peers)
        models = sum(not model.is_over for model in self._models)
        names = ", ".join(peer.name for peer in self.peers[:4]) + (", …" if count > 4 else "")
        loaded = f"; {models} model{'s' if models > 1 else ''} loaded" if models else ""
        return (
            f"<{type(self).__name__} of {count} peer{'s' if count != 1 else ''}: {names}{loaded}>"
        )

    async def set_memory(self, peer: PeerInfo, memory: Size) -> PeerInfo:
        """Set the memory limit of a peer's process. Returns the peer as it describes itself then.

        With less memory it reads layers from disk for each token (weight offload). Replies under
        way go on with the same tokens. Raises RequestError below the minimum of the loaded models.
        """
        return await set_memory(peer, parse_size(memory))

    async def kept(self, peer: PeerInfo) -> tuple[KeptFiles, ...]:
        """The weights that a peer keeps on disk, the least recently used first.

        Weights that other devices sent are told by their size, without their model.
        """
        return await kept_by(peer)

    async def remove_kept(self, peer: PeerInfo, names: Sequence[str]) -> tuple[KeptFiles, ...]:
        """Have a peer remove unused files that this device sent. Returns the files that it keeps.

        names: as in `kept`. Files in use stay.
        """
        return await kept_by(peer, names)

    def forget_measured(self, devices: Sequence[str]) -> None:
        """Forget the measurements of these peers (by id) and of the links between them.

        The next plan over several peers measures them again. `propose` measures a single peer, too.
        """
        forget_measured(set_up_like(devices, self.peers))

    async def aclose(self) -> None:
        """Free everything on the peers and end local daemons. May be called again.

        Replies under way end with RequestError.
        """
        try:
            await self._close_models()
        finally:
            if self._daemons is not None:
                await uninterrupted(run_blocking(self._daemons.close))

    async def _take_over(self, lease: Lease) -> None:
        """End the sessions of earlier coordinators of this lease, before anything is planned.

        Raises RequestError if a later coordinator has been there. Peers that do not answer are left
        out.
        """

        async def one(peer: PeerInfo) -> None:
            with contextlib.suppress(PeerError, NetworkError):
                await take_over(peer, lease)

        await gather_all(one(peer) for peer in self.peers)

    async def _close_models(self) -> None:
        """Free everything on the peers."""
        models, self._models = self._models, []
        graphs, self._graphs = self._graphs, []
        await asyncio.gather(
            *(model.aclose() for model in models), *(graph.aclose() for graph in graphs)
        )

    @contextlib.asynccontextmanager
    async def _opened(
        self,
        path: str | Path,
        options: LoadOptions,
        progress: bool | OnProgress | None = None,
    ) -> AsyncIterator[tuple[Checkpoint, Sequence[PeerInfo]]]:
        """See `loading.opened`. Memory that failed models held is free again."""
        found = await model_path(path, progress)
        over = [model for model in self._models if model.is_over]
        self._models = [model for model in self._models if not model.is_over]
        for model in over:
            await model.aclose()
        async with opened(found, options, self._candidates) as (checkpoint, peers):
            yield checkpoint, peers

    async def __aenter__(self) -> AsyncCluster:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
