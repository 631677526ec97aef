"""What `import edge` offers: clusters of peers, and models that run on them."""

from __future__ import annotations

import queue
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edge.checkpoint import Checkpoint
from edge.coordinator import (
    LoadedModel,
    LoadOptions,
    PeerInfo,
    describe_peer,
    gather_all,
    load_model,
    make_plan,
    plan_rows,
)
from edge.discovery import find_peers
from edge.errors import EdgeError, RequestError
from edge.event_loop import LoopThread
from edge.formats import DEFAULT_BLOCK_SIZE, weight_format
from edge.generation import FinishReason, Generation, GenerationRequest, Token
from edge.local import LocalPeers, Size
from edge.paths import cache_root
from edge.progress import OnProgress, progress_bars
from edge.text import Tokenizer
from kernels.sampling.reference import SamplingParameters
from partition import Plan, PlanRow, Workload

DEFAULT_CONTEXT_TOKENS = 4096
DEFAULT_NEW_TOKENS = 128

Prompt = str | Sequence[int]
PlanKind = Literal["auto", "pipeline", "tensor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A finished answer.

    `finish_reason` is "stop" (an end token or a stop string) or "length" (max_new_tokens, or the
    context is full). `token_ids` hold every generated token, the end token included; `text` has
    neither special tokens nor the stop string. `statistics` are numbers by name: `tokens_per_s`
    (after the first), `first_token_s`, `total_s`, `prompt_tokens`, `new_tokens`, `seed`.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    statistics: Mapping[str, float]


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
        if not wanted:
            raise RequestError("give at least one address, as host:port")
        return cls._open(lambda: _describe_all(wanted))

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
            return cls._open(lambda: _describe_all(daemons.addresses), daemons)
        except BaseException:
            daemons.close()
            raise

    @classmethod
    def _open(cls, find: Callable[[], Any], daemons: LocalPeers | None = None) -> Cluster:
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

    def load(
        self,
        path: str | Path,
        *,
        dtype: str = "int4",
        plan: PlanKind | Plan = "auto",
        context_tokens: int | None = None,
        block_size: int = DEFAULT_BLOCK_SIZE,
        progress: bool | OnProgress | None = None,
    ) -> Model:
        """Load a Hugging Face checkpoint onto the peers.

        dtype: "float32", or "int8" or "int4" in blocks of `block_size` weights.
        plan: "auto" (one peer if it fits, else as few as needed), "pipeline" or "tensor" (every
        peer), or a `partition.Plan` whose devices are peers' ids or names.
        context_tokens: longest prompt and answer together; 4096, or what the model has, if None.
        progress: bars on stderr (None: if it is a terminal), or a function that takes `Progress`.

        Raises CheckpointError, CapacityError, PlanError, RequestError or a PeerError; after any of
        them nothing of the model is left on the peers.
        """
        with Checkpoint.open(path) as checkpoint:
            options = _load_options(checkpoint, dtype, plan, context_tokens, block_size)
            tokenizer = checkpoint.tokenizer if checkpoint.has_tokenizer else None
            peers = self._loop.run(_describe_all([peer.address for peer in self._peers]))
            with progress_bars(progress) as on_progress:
                loaded = self._loop.run(
                    load_model(checkpoint, peers, options, on_progress=on_progress)
                )
            model = Model(loaded, checkpoint, options.context_tokens, tokenizer, peers, self._loop)
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
    ) -> Proposal:
        """The plan that `load` would use with the same arguments, without loading anything."""
        with Checkpoint.open(path) as checkpoint:
            options = _load_options(checkpoint, dtype, plan, context_tokens, block_size)
            peers = self._loop.run(_describe_all([peer.address for peer in self._peers]))
            chosen = make_plan(checkpoint, peers, options)
            return Proposal(plan=chosen, rows=plan_rows(checkpoint, peers, options, chosen))

    def close(self) -> None:
        """Free everything on the peers; end local daemons. May be called again."""
        try:
            for model in self._models:
                model.close()
        finally:
            self._models.clear()
            self._loop.close()
            if self._local is not None:
                self._local.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Model:
    """A model on its peers. Made by `Cluster.load`; a context manager."""

    def __init__(
        self,
        loaded: LoadedModel,
        checkpoint: Checkpoint,
        context_tokens: int,
        tokenizer: Tokenizer | None,
        peers: Sequence[PeerInfo],
        loop: LoopThread,
    ) -> None:
        self._loaded = loaded
        self._loop = loop
        self._tokenizer = tokenizer
        self._end_ids = frozenset(checkpoint.defaults.eos_token_ids)
        self._is_closed = False
        self.name = checkpoint.name
        self.vocab_size = checkpoint.spec.vocab_size
        self.context_tokens = context_tokens
        self.peers = {peer.id: peer for peer in peers}

    @property
    def plan(self) -> Plan:
        """What runs where; devices are peers' ids (see `peers`)."""
        return self._loaded.plan

    @property
    def sent_bytes(self) -> Mapping[str, int]:
        """Weights that were sent to each peer, by name; 0 for one that had its shard cached."""
        return dict(self._loaded.sent_bytes)

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises RequestError for a checkpoint without tokenizer.json."""
        if self._tokenizer is None:
            raise RequestError(f"{self.name} has no tokenizer.json: give token ids instead of text")
        return self._tokenizer

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = DEFAULT_NEW_TOKENS,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        stop: str | Sequence[str] = (),
        seed: int | None = None,
    ) -> Reply:
        """The whole answer to a text (special tokens are added) or to token ids (used as given).

        temperature 0 is greedy. The same seed gives the same tokens on every plan; None picks one,
        told in `statistics`. Raises RequestError for values out of range or a prompt that does not
        fit the context, PeerLostError if a device goes away.
        """
        reply = self._start(
            prompt, max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, stop, seed
        )
        for _token in reply:
            pass
        return reply.reply()

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = DEFAULT_NEW_TOKENS,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        stop: str | Sequence[str] = (),
        seed: int | None = None,
    ) -> ReplyStream:
        """Like `generate`, token by token. Leaving the loop early cancels the rest."""
        return self._start(
            prompt, max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, stop, seed
        )

    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Float32 [tokens, vocab]: row i is what the model expects after token i."""
        tokens = self._checked_ids(token_ids)
        sink = _LogitsSink()
        request = self._loop.run(self._loaded.logits(tokens, sink))
        try:
            return sink.result()
        except BaseException:
            self._loop.run(self._loaded.cancel(request))
            raise

    def close(self) -> None:
        """Free the model on its peers. May be called again."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.run(self._loaded.aclose())

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(
        self,
        prompt: Prompt,
        max_new_tokens: int,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        repetition_penalty: float,
        stop: str | Sequence[str],
        seed: int | None,
    ) -> ReplyStream:
        if isinstance(prompt, str):
            tokens = self._checked_ids(self.tokenizer.encode(prompt))
        else:
            tokens = self._checked_ids(prompt)
        room = self.context_tokens - len(tokens)
        if room < 1:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens and the context {self.context_tokens}: no "
                "room for an answer; shorten it, or load the model with more context_tokens"
            )
        try:
            sampling = SamplingParameters(
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                repetition_penalty=repetition_penalty,
                seed=secrets.randbits(53) if seed is None else seed,
            )
        except ValueError as error:
            raise RequestError(str(error)) from error
        request = GenerationRequest(
            prompt_ids=tokens,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            end_ids=self._end_ids,
        )
        return ReplyStream(self._loaded, self._loop, request, self._tokenizer, room=room)

    def _checked_ids(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        tokens = tuple(int(token) for token in token_ids)
        if not tokens:
            raise RequestError("the prompt is empty; give at least one token")
        if len(tokens) > self.context_tokens:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens and the context {self.context_tokens}; "
                "shorten it, or load the model with more context_tokens"
            )
        wrong = [token for token in tokens if not 0 <= token < self.vocab_size]
        if wrong:
            raise RequestError(
                f"token id {wrong[0]} is not one of the model's; ids are 0..{self.vocab_size - 1}"
            )
        return tokens


class ReplyStream:
    """An iterator of Tokens; `reply()` is the whole once it has ended. Closing it cancels."""

    def __init__(
        self,
        loaded: LoadedModel,
        loop: LoopThread,
        request: GenerationRequest,
        tokenizer: Tokenizer | None,
        *,
        room: int,
    ) -> None:
        self._loaded = loaded
        self._loop = loop
        self._events: queue.SimpleQueue[Token | EdgeError] = queue.SimpleQueue()
        self._sink = _TokenSink(Generation(request, tokenizer, room=room), self._events)
        self._ended = False
        self._request_id = loop.run(loaded.generate(request, self._sink))

    def __iter__(self) -> Iterator[Token]:
        return self

    def __next__(self) -> Token:
        if self._ended:
            raise StopIteration
        try:
            event = self._events.get()
        except BaseException:
            self.close()
            raise
        if isinstance(event, EdgeError):
            self._ended = True
            raise event
        if event.finish_reason is not None:
            self._ended = True
        return event

    def reply(self) -> Reply:
        """The answer so far. Raises RequestError before the first end."""
        generation = self._sink.generation
        if generation.finish_reason is None:
            raise RequestError("the reply is not finished; iterate to its end first")
        return Reply(
            text=generation.text,
            token_ids=tuple(generation.token_ids),
            finish_reason=generation.finish_reason,
            statistics=generation.statistics(),
        )

    def close(self) -> None:
        """Cancel what is left of the reply and free its memory on the peers."""
        if not self._ended:
            self._ended = True
            self._loop.run(self._loaded.cancel(self._request_id))

    def __enter__(self) -> ReplyStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_ended", True):
            self._ended = True
            self._loop.post(self._loaded.cancel(self._request_id))


class _TokenSink:
    """Turns sampled tokens into Tokens on the loop's thread, and queues them for the caller."""

    def __init__(
        self, generation: Generation, events: queue.SimpleQueue[Token | EdgeError]
    ) -> None:
        self.generation = generation
        self._events = events

    def token(self, token_id: int) -> bool:
        token = self.generation.push(token_id)
        self._events.put(token)
        return token.finish_reason is not None

    def logits(self, rows: NDArray[np.float32]) -> None:
        raise AssertionError("a generation asks for tokens, not logits")

    def failed(self, error: EdgeError) -> None:
        self._events.put(error)


class _LogitsSink:
    def __init__(self) -> None:
        self._events: queue.SimpleQueue[NDArray[np.float32] | EdgeError] = queue.SimpleQueue()

    def token(self, token_id: int) -> bool:
        raise AssertionError("an evaluation asks for logits, not tokens")

    def logits(self, rows: NDArray[np.float32]) -> None:
        self._events.put(rows)

    def failed(self, error: EdgeError) -> None:
        self._events.put(error)

    def result(self) -> NDArray[np.float32]:
        event = self._events.get()
        if isinstance(event, EdgeError):
            raise event
        return event


async def _describe_all(addresses: Sequence[str]) -> list[PeerInfo]:
    """Every peer, in the order given; one that is reached by two addresses counts once."""
    found: dict[str, PeerInfo] = {}
    infos: list[PeerInfo | None] = [None] * len(addresses)

    async def ask(index: int, address: str) -> None:
        infos[index] = await describe_peer(address)

    await gather_all(ask(index, address) for index, address in enumerate(addresses))
    for info in infos:
        if info is not None:
            found.setdefault(info.id, info)
    return list(found.values())


def _load_options(
    checkpoint: Checkpoint,
    dtype: str,
    plan: PlanKind | Plan,
    context_tokens: int | None,
    block_size: int,
) -> LoadOptions:
    context = _context_tokens(context_tokens, checkpoint.spec.context_tokens)
    return LoadOptions(
        weight_format=weight_format(dtype, block_size),
        plan=plan,
        workload=Workload(prompt_tokens=context, output_tokens=0),
        context_tokens=context,
        cache_root=cache_root(),
    )


def _context_tokens(wanted: int | None, model: int) -> int:
    if wanted is None:
        return min(DEFAULT_CONTEXT_TOKENS, model)
    if type(wanted) is not int or not 1 <= wanted <= model:
        raise RequestError(f"context_tokens must be 1 to {model} for this model, not {wanted!r}")
    return wanted
