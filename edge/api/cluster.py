"""What `import edge` begins with: a cluster of peers, and loading models onto it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from edge.api.local_peers import LocalPeers, Size
from edge.api.model import Model
from edge.api.progress_bars import progress_bars
from edge.concurrency.loop_thread import LoopThread
from edge.coordinator.loading import load_model
from edge.coordinator.requests import fail_all
from edge.errors import CapacityError, NetworkError, PlanError, RequestError
from edge.host.cache_paths import cache_root
from edge.host.free_memory import parse_size
from edge.planning.kv_limits import kv_limits
from edge.planning.load_options import LoadOptions, LoadOverrides
from edge.planning.proposal import Proposal
from edge.planning.propose import Measure, forget_measured, measured_proposal
from edge.progress import OnProgress
from edge.protocol.discovery import find_peers
from edge.protocol.peer_info import PeerInfo, describe_all, describe_each, memory_rate, set_memory
from edge.weights.checkpoint import Checkpoint

_log = logging.getLogger(__name__)


class Cluster:
    """Peers to run models on. A context manager; closing it ends its models and local daemons."""

    def __init__(self, peers: Sequence[PeerInfo], loop: LoopThread, local: LocalPeers | None):
        """Use `discover`, `connect` or `local`."""
        self._peers = tuple(peers)
        self._loop = loop
        self._local = local
        self._models: list[Model] = []

    @classmethod
    def discover(
        cls,
        cluster: str = "default",
        *,
        timeout_s: float = 5.0,
        at_least: int = 1,
        interfaces: Sequence[str] | None = None,
    ) -> Cluster:
        """Every peer of the named cluster that zeroconf finds on the local network.

        It looks until no new one was found for a second, once `at_least` so many are there, and
        for `timeout_s` at most. Raises NetworkError, saying what was tried, when none is found.
        """
        if type(at_least) is not int or at_least < 1:
            raise RequestError(f"at_least must be a whole number of 1 or more, not {at_least!r}")
        return cls._open(
            lambda: find_peers(
                cluster, timeout_s=timeout_s, at_least=at_least, interfaces=interfaces
            )
        )

    @classmethod
    def connect(cls, addresses: Sequence[str]) -> Cluster:
        """The peers at "host:port"; for networks where zeroconf does not reach."""
        wanted = [addresses] if isinstance(addresses, str) else list(addresses)
        if not wanted or not all(isinstance(address, str) for address in wanted):
            raise RequestError("give at least one address, as a text host:port")
        return cls._open(lambda: describe_each(wanted))

    @classmethod
    def local(
        cls,
        peers: int = 2,
        *,
        memory: Size | Sequence[Size] | None = None,
        model_memory: Size | Sequence[Size] | None = None,
        threads: int | Sequence[int] | None = None,
        backend: str | Sequence[str] = "auto",
        kv_memory: Size | Sequence[Size] | None = None,
        kv_disk: str | Sequence[str] | None = None,
    ) -> Cluster:
        """Daemons started on this machine, as processes of their own with real sockets.

        memory: the most that each process may have in memory ("2GiB" or bytes), itself included;
        a daemon below its minimum, of about 125 MiB, does not start; of a GPU its own memory.
        model_memory: of that, the most for weights and KV caches. kv_memory: the part that keys and
        values may take; kv_disk ("FOLDER:SIZE"): where they go beyond that, see `edge peer`; of one
        folder for several peers each takes a folder within, and the whole size. threads: of each;
        the cores of this machine shared out. backend: "auto", "ort" or "triton". Each takes one
        value, or one for each peer.
        """
        daemons = LocalPeers.start(
            peers=peers,
            memory=memory,
            model_memory=model_memory,
            threads=threads,
            backend=backend,
            kv_memory=kv_memory,
            kv_disk=kv_disk,
        )
        try:
            return cls._open(lambda: describe_each(daemons.addresses), daemons)
        except BaseException:
            daemons.close()
            raise

    @classmethod
    def _open(
        cls,
        find: Callable[[], Coroutine[Any, Any, list[PeerInfo]]],
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
        """The peers as they described themselves when the cluster was opened."""
        return self._peers

    def memory_rates(self) -> dict[str, float]:
        """Bytes per second that each peer reads from memory, by name; measured one by one."""
        return {peer.name: self._loop.run(memory_rate(peer)) for peer in self._peers}

    def load(
        self,
        path: str | Path,
        options: LoadOptions | None = None,
        *,
        progress: bool | OnProgress | None = None,
        **overrides: Unpack[LoadOverrides],
    ) -> Model:
        """Load a Hugging Face checkpoint onto the peers.

        options, and by name what differs from them: see `edge.LoadOptions`.
        progress: bars on stderr (None: if it is a terminal), or a function that takes `Progress`.

        Raises CheckpointError, CapacityError, PlanError, RequestError or a PeerError; after any of
        them nothing of the model is left on the peers.
        """
        options = replace(options or LoadOptions(), **overrides)
        with Checkpoint.open(path) as checkpoint:
            tokenizer = checkpoint.tokenizer if checkpoint.has_tokenizer else None
            with self._peers_that_answer() as peers, progress_bars(progress) as on_progress:
                planning = measured_proposal(
                    checkpoint, peers, options, measure="needed", on_progress=on_progress
                )
                proposal = self._loop.run(planning)
                if options.stream == "auto" and proposal.streaming is not None:
                    _log.warning('%s; stream="off" refuses instead', proposal.streaming)
                wished = options.limits(checkpoint.spec)
                limits = kv_limits(wished, proposal.plan, proposal.model, proposal.cluster, peers)
                loading = load_model(
                    checkpoint,
                    peers,
                    proposal.plan,
                    options,
                    limits=limits,
                    wire_rules=proposal.wire_rules,
                    cache_root=cache_root(),
                    on_progress=on_progress,
                    on_end=fail_all,
                )
                loaded = self._loop.run(loading)
            model = Model(
                loaded, checkpoint, limits.context_tokens, tokenizer, peers, proposal, self._loop
            )
        self._models.append(model)
        return model

    def propose(
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
        options = replace(options or LoadOptions(), **overrides)
        with (
            Checkpoint.open(path) as checkpoint,
            self._peers_that_answer() as peers,
            progress_bars() as on_progress,
        ):
            planning = measured_proposal(
                checkpoint,
                peers,
                options,
                measure=measure,
                on_progress=on_progress,
                changes=changes,
            )
            return self._loop.run(planning)

    def set_memory(self, peer: PeerInfo, memory: Size) -> PeerInfo:
        """Have a peer's process stay under `memory` from now on; how it describes itself then.

        With less, it reads layers of what it runs from disk for each token: replies under way go
        on, with the same tokens. Raises RequestError below the minimum of what is loaded.
        """
        return self._loop.run(set_memory(peer, parse_size(memory)))

    def measure_again(
        self, path: str | Path, options: LoadOptions, devices: Sequence[str]
    ) -> Proposal:
        """Measure these peers (by id) and the links between them anew; the plan that follows.

        Close models first that keep them busy.
        """
        self.forget_measured(devices)
        return self.propose(path, options)

    def forget_measured(self, devices: Sequence[str]) -> None:
        """Have these peers (by id) and the links between them measured anew when a plan is made.

        A single peer is loaded without that: `propose` measures it.
        """
        forget_measured([peer for peer in self._peers if peer.id in devices])

    def close(self) -> None:
        """Free everything on the peers; end local daemons. May be called again.

        Replies under way in other threads end with RequestError.
        """
        with contextlib.ExitStack() as stack:
            if self._local is not None:
                stack.callback(self._local.close)
            stack.callback(self._loop.close)
            models, self._models = self._models, []
            for model in models:
                stack.callback(model.close)

    @contextlib.contextmanager
    def _peers_that_answer(self) -> Iterator[list[PeerInfo]]:
        """The peers as they are now, without those that have gone since the cluster was opened.

        Memory that a failed model held is free again. Raises NetworkError when nobody answers; in
        the body, a lack of memory or devices names those who have gone.
        """
        self._models = [model for model in self._models if not model.wait_if_over()]
        infos, failures = self._loop.run(describe_all([peer.address for peer in self._peers]))
        gone = [peer.name for peer in self._peers if peer.address in failures]
        if not infos:
            raise NetworkError(
                f"none of the cluster's peers answers any more ({', '.join(gone)}); start them "
                "and open the cluster again"
            )
        note = f" ({', '.join(gone)} no longer answers and was left out)" if gone else ""
        try:
            yield infos
        except CapacityError as error:
            raise CapacityError(f"{error}{note}") from error
        except PlanError as error:
            raise PlanError(f"{error}{note}", error.problems) from error

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
