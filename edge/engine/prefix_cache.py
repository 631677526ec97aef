"""Prefix cache: keys and values of earlier requests on this peer, found again by a prompt's tokens.

A block's key is an HMAC, by the owner's secret, of all tokens up to its end and of everything else
that its keys and values depend on. Without the secret nobody learns that a block exists. Devices
may share a secret: the key also contains the device that stored the block, known by its
certificate, so that a device only reads its own blocks and those of devices that it trusts. Blocks
outlive the plan that computed them.

In memory, blocks are small. They are copied when a session ends; until then its own KV cache has
them. The caller decides how many tokens to use, so that results keep the same bits.

On disk, a block is one chunk. A thread writes blocks while their request is computed. Blocks that
the disk does not take before the request ends are dropped. One block buffer is allocated, for reads
and writes.

Eviction goes by the cost of recomputing a block: larger models and later blocks cost more.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge.backends.interface import KvStorage
from edge.memory.recomputing import effort
from edge.offload import PrefixMemory, PrefixStore
from edge.protocol.assignment import Assignment
from edge.protocol.step import SHORTEST_STEP
from edge.version import __version__
from edge.weights.token_reads import packed_bytes_of_token

MEMORY_BLOCK_TOKENS = 16
"""Tokens of a block in memory. Recomputing a shorter rest of a common prefix is as fast as asking
for it."""


Arrays = Sequence[NDArray[Any]]

OWNER_DIGITS = 16
"""Digits of a device id in a block's key; fewer could be forged by trying keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixStorage:
    """The prefix storage of a session, and its owner."""

    memory: PrefixMemory
    disk: PrefixStore | None
    secret: bytes
    """The owner's secret."""
    owner: str = ""
    """The owner's device id."""
    trusted: tuple[str, ...] = ()
    """Prefixes of device ids that share the secret and whose blocks are used."""


class _Key(NamedTuple):
    """The keys of a block: the one to store it under, and those of trusted devices."""

    own: str
    others: tuple[str, ...]

    def there(self, place: PrefixMemory | PrefixStore) -> str | None:
        """The key under which the block exists, if any."""
        return next(filter(place.has, (self.own, *self.others)), None)


@dataclass(slots=True)
class _Unkept:
    """Blocks of a prompt that are not on disk yet, in order."""

    keys: deque[_Key]
    first: int
    """First token of the first block."""
    end: int
    """End of the last block, in tokens."""
    before: list[str]
    """Keys under which the earlier blocks exist."""


class _Keys:
    """Computes the block keys of one request."""

    def __init__(self, digests: Sequence[hmac.HMAC], block_tokens: int) -> None:
        """digests: of everything but the tokens, one for each device."""
        self._digests = digests
        self._block_tokens = block_tokens
        self._rest: tuple[int, ...] = ()
        """Tokens after the last whole block."""
        self.keys: list[_Key] = []

    @property
    def _first(self) -> int:
        """Position of the first token of `_rest`."""
        return len(self.keys) * self._block_tokens

    def add(self, position: int, tokens: Sequence[int]) -> None:
        """Add tokens from `position` on. Ignored if they leave a gap or are known already."""
        if not self._first <= position <= self._first + len(self._rest):
            return
        known = (*self._rest[: position - self._first], *tokens)
        size = self._block_tokens
        whole = len(known) // size * size
        for first in range(0, whole, size):
            block = np.asarray(known[first : first + size], "<i8").tobytes()
            for digest in self._digests:
                digest.update(block)
            own, *others = (digest.copy().hexdigest() for digest in self._digests)
            self.keys.append(_Key(own, tuple(others)))
        self._rest = known[whole:]


class PrefixCache:
    """The prefix cache of one session. Used by the compute thread; `close` it at the end."""

    def __init__(self, storage: PrefixStorage, assignment: Assignment) -> None:
        self._memory = storage.memory
        self._disk = storage.disk
        self._secret = storage.secret
        self._owner = storage.owner
        whose = (storage.owner, *storage.trusted)
        self._whose = tuple(dict.fromkeys(each[:OWNER_DIGITS] for each in whose))
        self._chunk_tokens = assignment.limits.chunk_tokens
        self._most_tokens = assignment.limits.cached_tokens
        self._most_requests = assignment.limits.caches
        self._shard = _shard_digest(assignment)
        recipe = assignment.weight_format.recipe
        self._token_bytes = packed_bytes_of_token(assignment.layout, recipe)
        """Weight bytes read for one token: the part of the recomputing cost that depends on the
        model."""
        self._keys: dict[str, _Keys] = {}
        """Keys of requests under way and of kept KV caches, least recently used first."""
        self._unkept: dict[str, _Unkept] = {}
        self._block: list[NDArray[Any]] | None = None
        """The only block buffer, allocated once."""
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="edge-kv-keep")
        self._writing: tuple[str, Future[bool]] | None = None
        """The request whose block is being written, and whether the write succeeded."""

    def match(
        self,
        program: KvStorage,
        request: str,
        prompt: Sequence[int],
        *,
        salt: str = "",
        known: int = 0,
        moved: str | None = None,
    ) -> int:
        """Fill the request's KV cache with the longest stored prefix. Returns its number of tokens.

        salt: only blocks stored with an equal salt match. known: tokens cached already; moved: the
        request that had them and lost them. At least two tokens are left to compute, because a
        single one would be rounded differently than in a chunk. Blocks of the prompt are stored
        later, by `keep` and `close`.
        """
        if moved is not None:
            self._keys.pop(moved, None)
        most = min(len(prompt) - SHORTEST_STEP, self._most_tokens)
        found = self._from_memory(program, request, prompt, salt, known, most)
        return self._from_disk(program, request, prompt, salt, found, most)

    def _from_memory(
        self,
        program: KvStorage,
        request: str,
        prompt: Sequence[int],
        salt: str,
        known: int,
        most: int,
    ) -> int:
        size = MEMORY_BLOCK_TOKENS
        of_request = _Keys(self._digests(program, size, salt), size)
        of_request.add(0, prompt)
        self._keys[request] = of_request
        while len(self._keys) > self._most_requests:  # more than there are KV caches
            del self._keys[next(iter(self._keys))]
        there = _there(self._memory, of_request.keys[: max(0, most) // size])
        self._memory.use(there, self._cost(len(there) * size, size))
        found = known
        if len(there) * size > known:
            for number in range(known // size, len(there)):
                first = number * size

                def take(rows: Sequence[NDArray[Any]], first: int = first) -> None:
                    program.put_rows(request, first, rows)

                if not self._memory.read(there[number], take):
                    break
                found = first + size
        return found

    def _from_disk(
        self,
        program: KvStorage,
        request: str,
        prompt: Sequence[int],
        salt: str,
        known: int,
        most: int,
    ) -> int:
        if self._disk is None:
            return known
        size = self._chunk_tokens
        of_prompt = _Keys(self._digests(program, size, salt), size)
        of_prompt.add(0, prompt)
        keys = of_prompt.keys
        self._await_writer()
        found = known
        there = _there(self._disk, keys)
        self._disk.use(there, self._cost(len(there) * size, size))
        if len(there) * size > known:
            for number in range(known // size, len(there)):
                end = (number + 1) * size
                rows = self._rows(program)
                if end > most or not self._disk.get(there[number], rows, self._secret):
                    break
                program.put_rows(request, number * size, rows)
                found = end
        self._unkept[request] = _Unkept(deque(keys), first=0, end=len(keys) * size, before=[])
        return found

    def keep(self, program: KvStorage) -> None:
        """Begin to write a computed block, unless a write is under way.

        Called between steps and before `forget`. The rows are copied; the call does not wait for
        the disk.
        """
        if self._disk is None or not self._unkept or not self._is_idle():
            return
        for request, unkept in self._unkept.items():
            while unkept.keys and (there := unkept.keys[0].there(self._disk)):
                self._next(unkept, there)
            if not unkept.keys:
                continue
            rows = program.rows(request, unkept.first, unkept.first + self._chunk_tokens)
            if rows is not None:
                block = self._rows(program)
                for into, some in zip(block, rows, strict=True):
                    into[...] = some
                key = unkept.keys[0].own
                kept = self._writer.submit(
                    self._put, self._disk, key, block, tuple(unkept.before), unkept.end
                )
                self._writing = (request, kept)
                self._next(unkept, key)
                return

    def _put(
        self, disk: PrefixStore, key: str, block: Arrays, before: Sequence[str], end: int
    ) -> bool:
        """Write a block to disk and refresh the blocks before it, so that they are not evicted
        first."""
        cost = self._cost(end, self._chunk_tokens)
        is_kept = disk.put(key, block, self._secret, self._owner, cost)
        disk.use(before, cost)
        return is_kept

    def forget(self, request: str, *, kept_tokens: int = 0, answer: Sequence[int] = ()) -> None:
        """The request has ended. kept_tokens: tokens of its KV cache that stay in the program;
        `answer` are the last of them."""
        self._unkept.pop(request, None)
        keys = self._keys.pop(request, None)
        if kept_tokens and keys is not None:
            keys.add(kept_tokens - len(answer), answer)
            self._keys[request] = keys

    def close(self, program: KvStorage | None = None) -> None:
        """Wait for the write under way. With a program, store its KV caches in memory, as far as
        there is room."""
        self._writer.shutdown()
        if program is not None:
            for request, of_request in self._keys.items():
                self._keep_in_memory(program, request, of_request.keys)

    def _keep_in_memory(self, program: KvStorage, request: str, keys: Sequence[_Key]) -> None:
        """Store the blocks of a request, last block first, so that later ones are evicted
        earlier."""
        memory, size = self._memory, MEMORY_BLOCK_TOKENS
        first_rows = program.rows(request, 0, size)
        if first_rows is None:
            return
        count = min(len(keys), memory.most_blocks(first_rows, self._owner))
        cost: float | None = None
        for number in reversed(range(count)):
            there = keys[number].there(memory)
            rows = None
            if there is None:
                rows = program.rows(request, number * size, (number + 1) * size)
                if rows is None:
                    continue
            if cost is None:  # the last block
                cost = self._cost((number + 1) * size, size)
            if there is not None:
                memory.use((there,), cost)
            elif rows is not None and not memory.put(keys[number].own, rows, self._owner, cost):
                return

    def _is_idle(self) -> bool:
        """Whether no write is under way. If a block was not written, those after it are dropped:
        they could never match."""
        if self._writing is not None:
            request, kept = self._writing
            if not kept.done():
                return False
            self._writing = None
            if not kept.result() and request in self._unkept:
                self._unkept[request].keys.clear()
        return True

    def _await_writer(self) -> None:
        if self._writing is not None:
            wait([self._writing[1]])

    def _rows(self, program: KvStorage) -> list[NDArray[Any]]:
        if self._block is None:
            self._block = program.new_rows(self._chunk_tokens)
        return self._block

    def _next(self, unkept: _Unkept, key: str) -> None:
        unkept.keys.popleft()
        unkept.before.append(key)
        unkept.first += self._chunk_tokens

    def _cost(self, end: int, block_tokens: int) -> float:
        """Cost of recomputing a block that ends at token `end`."""
        tokens = effort(end) - effort(max(0, end - block_tokens))
        return self._token_bytes * tokens

    def _digests(self, program: KvStorage, block_tokens: int, salt: str) -> list[hmac.HMAC]:
        """The parts of block keys other than tokens: for this device and for those it trusts."""
        facts = f"{self._shard} {program.cache_digest} {block_tokens}"
        return [
            hmac.new(
                self._secret,
                f"{facts} {whose} {salt}".encode("utf-8", "surrogatepass"),
                hashlib.sha256,
            )
            for whose in self._whose
        ]


def _there(place: PrefixMemory | PrefixStore, keys: Sequence[_Key]) -> list[str]:
    """Keys of the stored blocks, up to the first missing one."""
    return list(takewhile(bool, (key.there(place) or "" for key in keys)))


def _shard_digest(assignment: Assignment) -> str:
    """A digest of everything that determines keys and values, except the program's own digest.

    Sums depend on the split of a stage, and results on all stages before: the whole plan counts,
    without its devices.
    """
    anywhere = replace(
        assignment.plan,
        stages=tuple(
            replace(
                stage,
                shards=tuple(shard.on(f"{rank}") for rank, shard in enumerate(stage.shards)),
            )
            for stage in assignment.plan.stages
        ),
    )
    facts = [
        __version__,
        assignment.weights_digest,
        assignment.manifest_digest,
        assignment.model.to_json(),
        anywhere.to_json(),
        assignment.limits.exceeds_memory,
        assignment.limits.batch_invariant,
        (assignment.stage, assignment.rank),
        assignment.weight_format.to_json(),
        assignment.kv_dtype,
        dataclasses.asdict(assignment.wire_rules),
    ]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
