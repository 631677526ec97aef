"""What `import edge` begins with: a cluster of peers, and loading models onto it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

from edge.api.local_peers import LocalPeers, Size
from edge.api.model import Model
from edge.concurrency.loop_thread import LoopThread
from edge.coordinator.loading import load_model
from edge.errors import CapacityError, NetworkError, PlanError, RequestError
from edge.host.cache_paths import cache_root
from edge.host.free_memory import parse_size
from edge.planning.kv_limits import kv_limits
from edge.planning.load_options import LoadOptions
from edge.planning.proposal import Proposal
from edge.planning.propose import Measure, forget_measured, measured_proposal
from edge.progress import OnProgress, progress_bars
from edge.protocol.discovery import find_peers
from edge.protocol.peer_info import PeerInfo, describe_all, describe_each, memory_rate, set_memory
from edge.protocol.wire_rules import Wire
from edge.weights.checkpoint import Checkpoint
from edge.weights.formats import DEFAULT_BLOCK_SIZE, KvDtype
from kernels.matmul_nbits.reference import Accuracy
from partition import Parallel, Plan, Workload


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
        *,
        dtype: str = "int4",
        plan: Parallel | Plan = "auto",
        context_tokens: int | None = None,
        block_size: int = DEFAULT_BLOCK_SIZE,
        accuracy: Accuracy = "fast",
        concurrency: int = 1,
        wire: Wire = "float32",
        kv_dtype: KvDtype = "float32",
        workload: Workload | None = None,
        stream: bool = False,
        progress: bool | OnProgress | None = None,
    ) -> Model:
        """Load a Hugging Face checkpoint onto the peers.

        dtype: "float32", or "int8" or "int4" in blocks of `block_size` weights.
        plan: "auto" (what should answer soonest: one peer, some or all), "pipeline" or "tensor"
        (every peer), or a `partition.Plan` whose devices are peers' ids or names. Several peers
        are measured before their first plan for a model; that is kept for the next time.
        context_tokens: longest prompt and answer together; 4096, or what the model has, if None.
        accuracy: "fast" rounds the inputs of every int8 and int4 product to 8 bits, which changes
        a product by 0.5 % (of its norm) and the logits of random models by 1.4 to 3.7 %. "high"
        computes with what that leaves over as well: 0.002 % of a product, for 1.3 to 1.9 times the
        time of its products per decoded token and 2 times while the prompt is read. The weights
        stay as they are, so changing it sends nothing to peers that have them.
        concurrency: how many requests of the longest context memory is kept for. Requests that
        fit together share each step; further ones wait.
        workload: what the plan should be fast at; 512 tokens of prompt and 128 of answer if None.
        wire: what activations travel in between peers, "float32" exactly. "float16" sends half the
        bytes and changes the logits of random float32 models by up to 0.11 % of the largest;
        "int8", in blocks of 32, sends 28 % and changes them by up to 3.1 %. "auto" rounds only what
        it saves time to round by the links that were measured, to int8 if the products round their
        inputs to 8 bits as well, else to float16.
        kv_dtype: what keys and values are kept in. "int8" takes a quarter of the memory and "int4"
        an eighth, with one scale for each channel, measured while loading by a chunk of 128 fixed
        tokens (fewer where the context or the peers' KV memory has no room for them) and for the
        places that this context has: another context_tokens may mean slightly other scales, and
        where two tokens are nearly as likely, another answer. The logits of the bundled model
        change by 1.4 and 12 % (of their norm), those of random models by 1.5 to 2.8 and 19 to 32 %.
        Prompts are read more slowly.
        stream: read layers from disk for each token where the model fits no other way.
        progress: bars on stderr (None: if it is a terminal), or a function that takes `Progress`.

        Raises CheckpointError, CapacityError, PlanError, RequestError or a PeerError; after any of
        them nothing of the model is left on the peers.
        """
        options = LoadOptions(
            plan=plan,
            dtype=dtype,
            block_size=block_size,
            accuracy=accuracy,
            context_tokens=context_tokens,
            concurrency=concurrency,
            wire=wire,
            kv_dtype=kv_dtype,
            workload=workload,
            stream=stream,
        )
        return self.load_as(path, options, progress=progress)

    def load_as(
        self, path: str | Path, options: LoadOptions, *, progress: bool | OnProgress | None = None
    ) -> Model:
        """`load` for whoever has the options as one object."""
        with Checkpoint.open(path) as checkpoint:
            tokenizer = checkpoint.tokenizer if checkpoint.has_tokenizer else None
            with self._peers_that_answer() as peers, progress_bars(progress) as on_progress:
                planning = measured_proposal(
                    checkpoint, peers, options, measure="needed", on_progress=on_progress
                )
                proposal = self._loop.run(planning)
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
        *,
        dtype: str = "int4",
        plan: Parallel | Plan = "auto",
        context_tokens: int | None = None,
        block_size: int = DEFAULT_BLOCK_SIZE,
        accuracy: Accuracy = "fast",
        concurrency: int = 1,
        wire: Wire = "float32",
        kv_dtype: KvDtype = "float32",
        workload: Workload | None = None,
        stream: bool = False,
    ) -> Proposal:
        """The plan that `load` would use with the same arguments, without loading anything.

        Every peer is measured first, unless it was for this model: so its speed is predicted.
        """
        options = LoadOptions(
            plan=plan,
            dtype=dtype,
            block_size=block_size,
            accuracy=accuracy,
            context_tokens=context_tokens,
            concurrency=concurrency,
            wire=wire,
            kv_dtype=kv_dtype,
            workload=workload,
            stream=stream,
        )
        return self.propose_as(path, options)

    def propose_as(
        self,
        path: str | Path,
        options: LoadOptions,
        *,
        changes: Sequence[str] = (),
        measure: Measure = "missing",
    ) -> Proposal:
        """`propose` for whoever has the options as one object.

        `changes` are made to what is known of the peers first, as "+4GiB on b", "without c" or
        "link a-b 1ms 1Gbit".
        """
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
        return self.propose_as(path, options)

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
