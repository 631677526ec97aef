"""A cluster of peers, for callers without an event loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Unpack

from edge.api.async_cluster import AsyncCluster
from edge.api.cluster_graphs import BlockingClusterGraphs
from edge.api.kept_reply import KeptReply
from edge.api.local_peers import LocalPeers, LocalSettings, Size
from edge.api.model import Model
from edge.api.peer_search import Peer, start_daemons
from edge.concurrency.loop_thread import LoopThread
from edge.errors import EdgeError, RequestError
from edge.option_fields import checks_calls
from edge.planning.load_options import LoadOptions, LoadOverrides
from edge.planning.measured_proposal import Measure
from edge.planning.proposal import Proposal
from edge.progress import OnProgress
from edge.protocol.kept_files import KeptFiles
from edge.protocol.peer_info import PeerInfo
from edge.studies.count_experts import CountedExperts
from edge.studies.quality import Quality
from edge.studies.quantize import Quantized


@checks_calls
class Cluster(BlockingClusterGraphs):
    """Peers to run models on. A context manager; closing it ends its models and local daemons.

    Thread-safe. See the methods of `AsyncCluster` for details and errors: these run them on an
    event loop in a background thread.
    """

    def __init__(
        self, cluster: AsyncCluster, loop: LoopThread, daemons: LocalPeers | None = None
    ) -> None:
        """Use `discover`, `connect` or `local`."""
        self._cluster: AsyncCluster = cluster
        self._loop = loop
        self._daemons = daemons

    @classmethod
    def discover(
        cls,
        cluster: str = "default",
        *,
        timeout_s: float = 5.0,
        at_least: int = 1,
        interfaces: Sequence[str] | None = None,
        insecure: bool = False,
    ) -> Cluster:
        """Every peer of the named cluster that zeroconf finds on the local network."""
        return cls._open(
            lambda: AsyncCluster.discover(
                cluster,
                timeout_s=timeout_s,
                at_least=at_least,
                interfaces=interfaces,
                insecure=insecure,
            )
        )

    @classmethod
    def connect(cls, peers: Peer | Sequence[Peer], *, insecure: bool = False) -> Cluster:
        """The peers at these addresses ("host:port"), for networks without zeroconf."""
        return cls._open(lambda: AsyncCluster.connect(peers, insecure=insecure))

    @classmethod
    def local(
        cls, peers: int = 2, *, insecure: bool = False, **settings: Unpack[LocalSettings]
    ) -> Cluster:
        """New daemons on this machine, each a process with real sockets.

        settings: memory, model_memory, threads, backend, kv_memory, kv_disk; see `LocalSettings`.
        """
        daemons = LocalPeers()
        try:
            return cls._open(
                lambda: _local(daemons, peers, settings, insecure=insecure),
                daemons,
            )
        except BaseException:
            daemons.close()
            raise

    @classmethod
    def _open(
        cls,
        find: Callable[[], Coroutine[Any, Any, AsyncCluster]],
        daemons: LocalPeers | None = None,
    ) -> Cluster:
        loop = LoopThread("edge-coordinator")
        try:
            return cls(loop.run(find()), loop, daemons)
        except BaseException:
            loop.close()
            raise

    @property
    def peers(self) -> tuple[PeerInfo, ...]:
        """The peers, as they last described themselves. Names are unique."""
        return self._cluster.peers

    @property
    def left_out(self) -> tuple[EdgeError, ...]:
        """The errors of announced peers that were left out."""
        return self._cluster.left_out

    def memory_rates(self) -> dict[str, float]:
        """Bytes per second that each peer reads from memory, by name; measured one by one."""
        return self._loop.run(self._cluster.memory_rates())

    def load(
        self,
        path: str | Path,
        options: LoadOptions | None = None,
        *,
        progress: bool | OnProgress | None = None,
        resumes: KeptReply | None = None,
        **overrides: Unpack[LoadOverrides],
    ) -> Model:
        """Load a model onto the peers: a Hugging Face folder, a GGUF file, or org/name.

        path: org/name, or org/name:Q4_K_M for one of its GGUF files, is a model on Hugging Face. It
        is taken from the Hugging Face cache, or fetched into it. options and overrides: see
        `edge.LoadOptions`.
        progress: bars (None: on a terminal, and in a notebook with ipywidgets), or a function that
        takes `Progress`.
        resumes: the reply that the model is loaded for, with the plan that it had if its devices
        are there and `options` name no other plan.

        Raises CheckpointError, CapacityError, PlanError, RequestError or a PeerError. After any of
        them nothing of the model is left on the peers.
        """
        loading = self._cluster.load(path, options, progress=progress, resumes=resumes, **overrides)
        return Model(self._loop.run(loading), self._loop)

    def propose(
        self,
        path: str | Path,
        options: LoadOptions | None = None,
        *,
        changes: Sequence[str] = (),
        measure: Measure = "missing",
        **overrides: Unpack[LoadOverrides],
    ) -> Proposal:
        """The plan that `load` would use with the same options. Loads nothing.

        Peers that were not measured for this model are measured first.
        """
        return self._loop.run(
            self._cluster.propose(path, options, changes=changes, measure=measure, **overrides)
        )

    def quality(
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
        """The loss of a load with these options against a reference that reads the same text.

        against: "float32" of the same checkpoint, or the folder of another one with the same
        vocabulary. text: None: a bundled one.
        """
        return self._loop.run(
            self._cluster.quality(
                path,
                options,
                against=against,
                text=text,
                windows=windows,
                window_tokens=window_tokens,
                progress=progress,
                **overrides,
            )
        )

    def quantize(
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
        """Quantize a model by the inputs of its matrices (GPTQ), into the new folder `out`.

        bits: mean bits of a weight, scales included; None: as dtype "int4". text: calibration text;
        None: the model writes it.
        """
        return self._loop.run(
            self._cluster.quantize(
                path,
                out,
                options,
                bits=bits,
                text=text,
                windows=windows,
                window_tokens=window_tokens,
                progress=progress,
            )
        )

    def count_experts(
        self,
        path: str | Path,
        options: LoadOptions | None = None,
        *,
        text: str | None = None,
        progress: bool | OnProgress | None = None,
    ) -> CountedExperts:
        """Count how often tokens are routed to each expert of a model; later plans use the counts.

        text: the text to read; None: the model writes it.
        """
        return self._loop.run(
            self._cluster.count_experts(path, options, text=text, progress=progress)
        )

    def __repr__(self) -> str:
        return repr(self._cluster).replace("AsyncCluster", "Cluster", 1)

    def set_memory(self, peer: PeerInfo, memory: Size) -> PeerInfo:
        """Set the memory limit of a peer's process. Returns the peer as it describes itself
        then."""
        return self._loop.run(self._cluster.set_memory(peer, memory))

    def kept(self, peer: PeerInfo) -> tuple[KeptFiles, ...]:
        """The weights that a peer keeps on disk, the least recently used first."""
        return self._loop.run(self._cluster.kept(peer))

    def remove_kept(self, peer: PeerInfo, names: Sequence[str]) -> tuple[KeptFiles, ...]:
        """Have a peer remove unused files that this device sent. Returns the files that it keeps.

        names: as in `kept`. Files in use stay.
        """
        return self._loop.run(self._cluster.remove_kept(peer, names))

    def forget_measured(self, devices: Sequence[str]) -> None:
        """Forget the measurements of these peers (by id) and of the links between them."""
        self._cluster.forget_measured(devices)

    def close(self) -> None:
        """Free everything on the peers and end local daemons. May be called again.

        Replies under way in other threads end with RequestError.
        """
        with contextlib.ExitStack() as stack:
            if self._daemons is not None:
                stack.callback(self._daemons.close)
            stack.callback(self._loop.close)  # ends its tasks
            with contextlib.suppress(RequestError):  # it was closed already
                self._loop.run(self._cluster._close_models())

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def _local(
    daemons: LocalPeers, peers: int, settings: LocalSettings, *, insecure: bool
) -> AsyncCluster:
    return AsyncCluster(await start_daemons(daemons, peers, settings, insecure=insecure))
