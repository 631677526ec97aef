"""Beginnings of prompts whose keys and values a peer has left of other requests, and finds again.

Of all plans that it has run, as long as what computes them is the same. A block's key is the hash
of all tokens up to its end and of all that its keys and values depend on as well, made with the
owner's secret: who has another one does not even learn that a block is there. Several devices may
share a secret. A block's key is also made of who has left it, which the peer knows by its
certificate: nobody leaves a block that another one takes for its own, or for one of a device that
it trusts. There are two places, and what is in memory is taken from there.

In memory are small blocks. They are copied when a session ends, for until then its own cache has
them. Who asks for them knows how much of them is of use: as much as would be computed in steps that
give the same bits.

Which blocks go when their room is needed is decided by what it would take to compute them again:
more for a larger model, and more behind many tokens.

On disk are blocks of one chunk each. They are written behind the compute thread's back, while their
request is computed, as fast as the disk takes them: what it does not take before the request is
over is not kept. There is memory for one block that is on its way, to or from the disk.
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
"""Tokens of a block in memory: of what two prompts have in common, fewer are computed again, as
fast as they are asked for."""


Arrays = Sequence[NDArray[Any]]

OWNER_DIGITS = 16
"""Digits of a device's id in a block's key: fewer can be met by trying keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixPlaces:
    """Where a session's beginnings are kept, and whose they are."""

    memory: PrefixMemory
    disk: PrefixStore | None
    secret: bytes
    """The owner's secret."""
    owner: str = ""
    """The id of the device whose they are."""
    trusted: tuple[str, ...] = ()
    """Beginnings of ids of other devices that share the secret: what they have left is taken."""


class _Key(NamedTuple):
    """Keys of a block: under which it is left, and under which trusted devices have left it."""

    own: str
    others: tuple[str, ...]

    def there(self, place: PrefixMemory | PrefixStore) -> str | None:
        """The one under which there is such a block."""
        return next(filter(place.has, (self.own, *self.others)), None)


@dataclass(slots=True)
class _Unkept:
    """The blocks of a request's prompt that are not on disk yet, by their keys in order."""

    keys: deque[_Key]
    first: int
    """The first one's first token."""
    end: int
    """Behind the last one's last token."""
    before: list[str]
    """Under which keys those before them are there."""


class _Keys:
    """Keys of the blocks of one request."""

    def __init__(self, digests: Sequence[hmac.HMAC], block_tokens: int) -> None:
        """digests: of all but the tokens that counts, one of them for each device."""
        self._digests = digests
        self._block_tokens = block_tokens
        self._rest: tuple[int, ...] = ()
        """Tokens behind the last whole block."""
        self.keys: list[_Key] = []

    @property
    def _first(self) -> int:
        """The position of the first of the rest."""
        return len(self.keys) * self._block_tokens

    def add(self, position: int, tokens: Sequence[int]) -> None:
        """More tokens, from this position on; nothing where those before are not known, or known
        already."""
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
    """One session's view of its peer's places. Used by the compute thread; `close` it."""

    def __init__(self, places: PrefixPlaces, assignment: Assignment) -> None:
        self._memory = places.memory
        self._disk = places.disk
        self._secret = places.secret
        self._owner = places.owner
        whose = (places.owner, *places.trusted)
        self._whose = tuple(dict.fromkeys(each[:OWNER_DIGITS] for each in whose))
        self._chunk_tokens = assignment.limits.chunk_tokens
        self._most_tokens = assignment.limits.cached_tokens
        self._most_requests = assignment.limits.caches
        self._shard = _shard_digest(assignment)
        recipe = assignment.weight_format.recipe
        self._token_bytes = packed_bytes_of_token(assignment.layout, recipe)
        """Bytes of weights that a token goes through: the part of what takes time that differs from
        model to model."""
        self._keys: dict[str, _Keys] = {}
        """Keys of requests under way and of those whose caches are kept, the last used last."""
        self._unkept: dict[str, _Unkept] = {}
        self._block: list[NDArray[Any]] | None = None
        """Made once, as it is counted once: whatever is on its way lies here."""
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="edge-kv-keep")
        self._writing: tuple[str, Future[bool]] | None = None
        """Whose block lies there, and whether it could be kept."""

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
        """Put what is known of the prompt into the request's cache; returns the number of its
        tokens.

        salt: only what was left with the same one is known. known: tokens that are there; moved:
        whose they were, if they are no longer. Two or more are always left to compute: one alone
        would be computed in another way than in a chunk. The others' are kept by `keep` and
        `close`.
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
        while len(self._keys) > self._most_requests:  # more than there are caches for
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
        """Begin to write a block that has been computed, unless one is being written.

        Called between any two steps, and before `forget`; the rows are copied, and no disk is
        waited for.
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
        """Keep a block of a prompt on disk, and those before it for no less long."""
        cost = self._cost(end, self._chunk_tokens)
        is_kept = disk.put(key, block, self._secret, self._owner, cost)
        disk.use(before, cost)
        return is_kept

    def forget(self, request: str, *, kept_tokens: int = 0, answer: Sequence[int] = ()) -> None:
        """The request is over. kept_tokens: of its cache that stay in the program; `answer` are
        the last of them."""
        self._unkept.pop(request, None)
        keys = self._keys.pop(request, None)
        if kept_tokens and keys is not None:
            keys.add(kept_tokens - len(answer), answer)
            self._keys[request] = keys

    def close(self, program: KvStorage | None = None) -> None:
        """Wait for the block that is being written; what the program has of requests stays in
        memory, as far as there is room."""
        self._writer.shutdown()
        if program is not None:
            for request, of_request in self._keys.items():
                self._keep_in_memory(program, request, of_request.keys)

    def _keep_in_memory(self, program: KvStorage, request: str, keys: Sequence[_Key]) -> None:
        """The beginning of a request; of what there is too much, its end goes first."""
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
            if cost is None:  # it is the last one
                cost = self._cost((number + 1) * size, size)
            if there is not None:
                memory.use((there,), cost)
            elif rows is not None and not memory.put(keys[number].own, rows, self._owner, cost):
                return

    def _is_idle(self) -> bool:
        """Nothing is being written. Without one block those behind it would never be found."""
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
        """Cost of computing again a block that ends at `end`."""
        tokens = effort(end) - effort(max(0, end - block_tokens))
        return self._token_bytes * tokens

    def _digests(self, program: KvStorage, block_tokens: int, salt: str) -> list[hmac.HMAC]:
        """What a block's key is made of, but for the tokens: where this device has left it, and
        where those have that it trusts."""
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
    """Under which keys the blocks are there, up to the first that is not."""
    return list(takewhile(bool, (key.there(place) or "" for key in keys)))


def _shard_digest(assignment: Assignment) -> str:
    """A digest of all that decides a token's keys and values, but for the program's own ways.

    Sums depend on how a stage is split, and everything on what comes before it: the whole plan
    counts, but not which devices run it.
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
