"""What `import edge` begins with: a cluster of peers, and loading models onto it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from edge.backends.base import StepLimits
from edge.checkpoint import Checkpoint
from edge.coordinator import CHUNK_TOKENS, LoadOptions, load_model, make_plan, plan_rows
from edge.discovery import find_peers
from edge.errors import CapacityError, NetworkError, PlanError, RequestError
from edge.event_loop import LoopThread
from edge.formats import DEFAULT_BLOCK_SIZE, Accuracy, WeightFormat, weight_format
from edge.local import LocalPeers, Size
from edge.model import Model
from edge.paths import cache_root
from edge.peer_info import PeerInfo, describe_all, memory_rate
from edge.progress import OnProgress, progress_bars
from partition import Plan, PlanRow

DEFAULT_CONTEXT_TOKENS = 4096
MAX_REQUESTS_AT_ONCE = 64
"""Requests in one step; the CPU kernels gain little from more than 32."""

PlanKind = Literal["auto", "pipeline", "tensor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A plan that was not carried out, and what it would cost each device."""

    plan: Plan
    rows: list[PlanRow]


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
        interfaces: Sequence[str] | None = None,
    ) -> Cluster:
        """Every peer of the named cluster that zeroconf finds on the local network.

        Raises NetworkError, saying what was tried, when none is found within `timeout_s`.
        """
        return cls._open(lambda: find_peers(cluster, timeout_s=timeout_s, interfaces=interfaces))

    @classmethod
    def connect(cls, addresses: Sequence[str]) -> Cluster:
        """The peers at "host:port"; for networks where zeroconf does not reach."""
        wanted = [addresses] if isinstance(addresses, str) else list(addresses)
        if not wanted or not all(isinstance(address, str) for address in wanted):
            raise RequestError("give at least one address, as a text host:port")
        return cls._open(lambda: _describe_each(wanted))

    @classmethod
    def local(
        cls,
        peers: int = 2,
        *,
        memory: Size | Sequence[Size] | None = None,
        threads: int | Sequence[int] | None = None,
    ) -> Cluster:
        """Daemons started on this machine, as processes of their own with real sockets.

        `memory` ("2GiB" or bytes) and `threads` take one value, or one for each peer. Threads
        default to this machine's cores shared out.
        """
        daemons = LocalPeers.start(peers=peers, memory=memory, threads=threads)
        try:
            return cls._open(lambda: _describe_each(daemons.addresses), daemons)
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
        plan: PlanKind | Plan = "auto",
        context_tokens: int | None = None,
        block_size: int = DEFAULT_BLOCK_SIZE,
        accuracy: Accuracy = "fast",
        concurrency: int = 1,
        progress: bool | OnProgress | None = None,
    ) -> Model:
        """Load a Hugging Face checkpoint onto the peers.

        dtype: "float32", or "int8" or "int4" in blocks of `block_size` weights.
        plan: "auto" (one peer if it fits, else as few as needed), "pipeline" or "tensor" (every
        peer), or a `partition.Plan` whose devices are peers' ids or names.
        context_tokens: longest prompt and answer together; 4096, or what the model has, if None.
        accuracy: "fast" rounds the inputs of every int8 and int4 product to 8 bits, which changes
        a product by 0.5 % (of its norm) and the logits of random models by 1.4 to 3.7 %. "high"
        computes with what that leaves over as well: 0.002 % of a product, for 1.3 to 1.9 times the
        time of its products per decoded token and 2 times while the prompt is read. The weights
        stay as they are, so changing it sends nothing to peers that have them.
        concurrency: how many requests of the longest context memory is kept for. Requests that
        fit together share each step; further ones wait.
        progress: bars on stderr (None: if it is a terminal), or a function that takes `Progress`.

        Raises CheckpointError, CapacityError, PlanError, RequestError or a PeerError; after any of
        them nothing of the model is left on the peers.
        """
        with Checkpoint.open(path) as checkpoint:
            chosen_format = weight_format(dtype, block_size, accuracy)
            options = _load_options(checkpoint, chosen_format, plan, context_tokens, concurrency)
            tokenizer = checkpoint.tokenizer if checkpoint.has_tokenizer else None
            with self._peers_that_answer() as peers, progress_bars(progress) as on_progress:
                loaded = self._loop.run(
                    load_model(checkpoint, peers, options, on_progress=on_progress)
                )
            model = Model(
                loaded, checkpoint, options.limits.context_tokens, tokenizer, peers, self._loop
            )
        self._models.append(model)
        return model

    def propose(
        self,
        path: str | Path,
        *,
        dtype: str = "int4",
        plan: PlanKind | Plan = "auto",
        context_tokens: int | None = None,
        block_size: int = DEFAULT_BLOCK_SIZE,
        accuracy: Accuracy = "fast",
        concurrency: int = 1,
    ) -> Proposal:
        """The plan that `load` would use with the same arguments, without loading anything."""
        with Checkpoint.open(path) as checkpoint:
            chosen_format = weight_format(dtype, block_size, accuracy)
            options = _load_options(checkpoint, chosen_format, plan, context_tokens, concurrency)
            with self._peers_that_answer() as peers:
                chosen = make_plan(checkpoint, peers, options)
                return Proposal(plan=chosen, rows=plan_rows(checkpoint, peers, options, chosen))

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


async def _describe_each(addresses: Sequence[str]) -> list[PeerInfo]:
    """Every peer; raises the error of the first that does not answer."""
    infos, failures = await describe_all(addresses)
    for address in addresses:
        if address in failures:
            raise failures[address]
    return infos


def _load_options(
    checkpoint: Checkpoint,
    chosen_format: WeightFormat,
    plan: PlanKind | Plan,
    context_tokens: int | None,
    concurrency: int,
) -> LoadOptions:
    if type(concurrency) is not int or not 1 <= concurrency <= MAX_REQUESTS_AT_ONCE:
        raise RequestError(f"concurrency must be 1 to {MAX_REQUESTS_AT_ONCE}, not {concurrency!r}")
    context = _context_tokens(context_tokens, checkpoint.spec.context_tokens)
    return LoadOptions(
        weight_format=chosen_format,
        plan=plan,
        limits=StepLimits(
            context_tokens=context,
            chunk_tokens=min(CHUNK_TOKENS, context),
            requests=MAX_REQUESTS_AT_ONCE,
            cached_tokens=context * concurrency,
        ),
        cache_root=cache_root(),
    )


def _context_tokens(wanted: int | None, model: int) -> int:
    if wanted is None:
        return min(DEFAULT_CONTEXT_TOKENS, model)
    if type(wanted) is not int or not 1 <= wanted <= model:
        raise RequestError(f"context_tokens must be 1 to {model} for this model, not {wanted!r}")
    return wanted
