"""Prefix cache: what earlier requests computed on this peer, found again by a prompt's tokens.

Blocks outlive the plan that computed them. A shard of another plan takes the pieces of its layers
and heads. Devices may share a secret: a key contains the device that stored the block, known by its
certificate, so that a device only reads its own blocks and those of devices that it trusts.

If layers have states or windows, a prompt continues from a snapshot: these at a point where
scheduling saved them, and the keys and values between the last whole block and that point. Every
shard of such a model has a snapshot at each of these points, also one whose own layers have none.

In memory, blocks are small. They are copied when a session ends; until then its own KV cache has
them. The caller decides how many tokens to use.

On disk, blocks are larger. A thread writes them while their request is computed, and while its KV
cache is kept. Blocks that the disk does not take before are dropped.

Eviction goes by the cost of recomputing a block: larger models and later blocks cost more.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from edge.backends.interface import KvStorage
from edge.engine.prefix_content import PrefixForm, computed
from edge.engine.prefix_keys import STATES, TokenChain, prefix_facts
from edge.errors import RequestError
from edge.memory.recomputing import effort
from edge.memory.step_memory import MOST_WINDOWS_COPIED, has_states, keeps_windows
from edge.offload import Pieces, PrefixMemory, PrefixPart, PrefixRecords, PrefixStore
from edge.protocol.assignment import Assignment
from edge.protocol.prefix_frames import MOST_POINTS, MOST_PREFIX_TOKENS
from edge.protocol.step import SHORTEST_STEP
from edge.weights.token_reads import packed_bytes_of_token

MEMORY_BLOCK_TOKENS = 16
"""Tokens of a block in memory. Recomputing a shorter rest of a common prefix is as fast as asking
for it."""

DISK_BLOCK_TOKENS = MOST_PREFIX_TOKENS

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
    disk_block_tokens: int = DISK_BLOCK_TOKENS


class _Place(NamedTuple):
    records: PrefixRecords
    size: int
    """Tokens of a block."""


@dataclass(slots=True)
class _Unkept:
    """How much of a request is on disk."""

    end: int = 0
    """End of the last block, in tokens."""
    before: list[str] = field(default_factory=list)
    """Records of the blocks so far."""
    points: set[int] = field(default_factory=set)
    """Snapshots so far."""
    has_ended: bool = False
    """Its KV cache is kept, and nothing more is computed."""


class PrefixCache:
    """The prefix cache of one session. Used by the compute thread; `close` it at the end."""

    def __init__(self, storage: PrefixStorage, assignment: Assignment) -> None:
        self._storage = storage
        self.secret, self._owner = storage.secret, storage.owner
        self._memory = _Place(storage.memory, MEMORY_BLOCK_TOKENS)
        self._disk = None
        if storage.disk is not None:
            self._disk = _Place(storage.disk, storage.disk_block_tokens)
        self.places: list[_Place] = [self._memory, *([self._disk] if self._disk else ())]
        whose = (storage.owner, *storage.trusted)
        self._whose = tuple(dict.fromkeys(each[:OWNER_DIGITS] for each in whose))
        self.layout = assignment.layout
        self._facts = prefix_facts(assignment)
        self._most_tokens = assignment.limits.cached_tokens
        self._most_requests = assignment.limits.caches
        self.has_states = has_states(assignment.model, assignment.kv_dtype)
        self._most_copied = MOST_WINDOWS_COPIED if keeps_windows(assignment.model) else math.inf
        sizes = [place.size for place in self.places]
        self._every, self._largest = 1 if self.has_states else math.gcd(*sizes), max(sizes)
        recipe = assignment.weight_format.recipe
        self._token_bytes = packed_bytes_of_token(assignment.layout, recipe)
        """Weight bytes read for one token: the part of the recomputing cost that depends on the
        model."""
        self._form: PrefixForm | None = None
        self._chains: dict[str, TokenChain] = {}
        """Requests under way and kept KV caches, least recently used first."""
        self._unkept: dict[str, _Unkept] = {}
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="edge-kv-keep")
        self._writing: tuple[str, Future[bool]] | None = None
        """The request of which a block is being written, and whether the write succeeded."""

    def chain(self, request: str) -> TokenChain:
        """The tokens of a matched request. Raises RequestError for another one."""
        if request not in self._chains:
            raise RequestError("the prefix of this request is not looked up")
        return self._chains[request]

    def piece_bytes(self, tokens: int, point: int) -> dict[str, int]:
        """Bytes of each piece of so many tokens, after a match."""
        assert self._form is not None
        pieces = self._form.pieces(self._form.room(1), self._form.states_like(point))
        rows = self._form.block.names
        return {k: v.nbytes * (tokens if k in rows else 1) for k, v in pieces.items()}

    def store(self, request: str, kind: int, end: int, pieces: Pieces, cost: float = 0.0) -> bool:
        """Store a block, or a snapshot, in memory. Returns False if there is no room. cost: of
        computing it again; 0: after the block before, a snapshot from the start."""
        key, cost = self.chain(request).own_key(kind, end), cost or self._cost(end, kind or end)
        return self._memory.records.put(key, pieces, owner=self._owner, cost=cost)

    def match(
        self,
        program: KvStorage,
        request: str,
        prompt: Sequence[int],
        *,
        salt: str = "",
        known: int = 0,
        moved: str | None = None,
        point: int = 0,
    ) -> int:
        """Fill the request's KV cache with the longest stored prefix. Returns its number of tokens.

        salt: only blocks stored with an equal salt match. known: tokens cached already; moved: the
        request that had them and lost them. point: where states are restored, one of `points`;
        else a prefix of a model with states is not filled. At least two tokens are left to compute,
        because a single one would be rounded differently than in a chunk. Blocks of the prompt are
        stored later, by `keep` and `close`.
        """
        form = self._form = self._form or PrefixForm(self.layout, program, self._largest)
        chain = TokenChain(self._macs(program, salt), self._every)
        chain.add(0, prompt)
        if moved is not None:
            self._drop(moved)
        self._chains[request] = chain
        while len(self._chains) > self._most_requests:  # more than there are KV caches
            self._drop(next(iter(self._chains)))
        if self._disk:
            self._unkept[request] = _Unkept()
        self._await_writer()
        most = self._most(chain)
        if self.has_states:
            is_new = not known and 0 < point <= most
            return self._restore(form, program, request, point) if is_new else known
        return self._fill(form, program, request, known, most)

    def points(self, request: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """`PrefixMatched.points` and `stored` of a matched prompt."""
        form, chain = self._form, self._chains[request]
        assert form is not None
        most = self._most(chain)
        if not self.has_states:
            return (), (max(self._stored(place, chain, most) for place in self.places),)
        covered = most
        if form.block.names:
            blocks = self._stored_blocks(form, chain, 0, most)
            covered = max((end for _place, end, _ids in blocks), default=0)
        points, stored = [], []
        for point in range(1, most + 1):
            keys = tuple(chain.keys(STATES, point))
            there = [each for each in self.places if any(map(each.records.has, keys))]
            stored += [point] if there else []
            if any(
                point // place.size * place.size <= covered
                and self._find(place, chain, form.snapshot, STATES, point)
                for place in there
            ):
                points.append(point)
        return tuple(points[-MOST_POINTS:]), tuple(stored[-MOST_POINTS:])

    def _stored(self, place: _Place, chain: TokenChain, most: int) -> int:
        """Tokens of the blocks of which there is any record."""
        ends = range(place.size, most + 1, place.size)
        there = takewhile(
            lambda end: any(map(place.records.has, chain.keys(place.size, end))), ends
        )
        return max(there, default=0)

    def _restore(self, form: PrefixForm, program: KvStorage, request: str, point: int) -> int:
        chain, found = self._chains[request], self._fill(form, program, request, 0, point)
        for place in self.places:
            start = point // place.size * place.size
            there = self._find(place, chain, form.snapshot, STATES, point)
            if start > found or not there:
                continue
            rows, states = form.room(point - start), program.new_states(request, point)
            if form.read(place.records, there, self.secret, rows, states):
                program.put_rows(request, start, rows, windows=False)
                program.put_states(request, point, states)
                place.records.use(there, self._cost(point, place.size))
                return point
        return 0

    def _fill(
        self, form: PrefixForm, program: KvStorage, request: str, known: int, most: int
    ) -> int:
        """Fill the request with blocks of its first `most` tokens, in memory and behind them on
        disk. Returns its number of tokens."""
        chain, found = self._chains[request], known
        if not form.block.names:
            return most
        used: dict[_Place, list[str]] = {}
        read = range(known, known)  # tokens in the form's buffers; each `put_rows` takes a while
        for place, end, there in self._stored_blocks(form, chain, known, most):
            begin = end - place.size
            if begin != read.stop or end - read.start > self._largest:
                self._put(form, program, request, read)
                read = range(begin, begin)
            at = range(begin - read.start, end - read.start)
            if not form.read_block(place.records, there, self.secret, at):
                break
            used.setdefault(place, []).extend(there)
            read, found = range(read.start, end), end
        self._put(form, program, request, read)
        for place, ids in used.items():
            place.records.use(ids, self._cost(found, place.size))
        return found

    def _put(self, form: PrefixForm, program: KvStorage, request: str, read: range) -> None:
        if read:
            program.put_rows(request, read.start, form.room(len(read)), windows=False)

    def _stored_blocks(
        self, form: PrefixForm, chain: TokenChain, known: int, most: int
    ) -> Iterator[tuple[_Place, int, tuple[str, ...]]]:
        """The stored blocks that continue the first `known` of at most `most` tokens, each from the
        first place that has it: place, last token and records."""
        found = known
        while True:
            ends = ((each, found // each.size * each.size + each.size) for each in self.places)
            there = (
                (place, end, self._find(place, chain, form.block, place.size, end))
                for place, end in ends
                if end <= most
            )
            block = next((each for each in there if each[2]), None)
            if block is None:
                return
            yield block
            found = block[1]

    def keep(self, program: KvStorage) -> Future[bool] | None:
        """Begin to write a computed block or snapshot, unless a write is under way. Returns the
        write that is now under way.

        Called between steps, before `forget`, and after it where a KV cache is kept. The content is
        copied; the call does not wait for the disk.
        """
        disk, form = self._disk, self._form
        if disk is None or form is None or not self._unkept:
            return None
        if not self._is_idle():
            return self._writing and self._writing[1]
        for request, unkept in list(self._unkept.items()):
            if self._keep_next(form, disk, program, request, unkept) and self._writing:
                return self._writing[1]
            if unkept.has_ended:
                del self._unkept[request]
        return None

    def _keep_next(
        self, form: PrefixForm, disk: _Place, program: KvStorage, request: str, unkept: _Unkept
    ) -> bool:
        """Begin to write what is missing of a request. Returns whether there was anything."""
        chain = self._chains[request]
        while (end := unkept.end + disk.size) <= len(chain):
            there = self._find(disk, chain, form.block, disk.size, end)
            if not there and not self._write(form, disk, program, request, disk.size, end):
                break
            unkept.end = end
            if not there:
                return True
            unkept.before += there
        for point in program.saved(request) if self.has_states else ():
            if point in unkept.points or point > min(len(chain), unkept.end + disk.size - 1):
                continue
            unkept.points.add(point)
            is_there = self._find(disk, chain, form.snapshot, STATES, point)
            if not is_there and self._write(form, disk, program, request, STATES, point):
                return True
        return False

    def _write(
        self, form: PrefixForm, disk: _Place, program: KvStorage, request: str, kind: int, end: int
    ) -> bool:
        """Copy a block or a snapshot that ends at token `end`, and begin to write it. Returns False
        if it is not computed."""
        content = computed(program, request, disk.size, kind, end)
        if content is None:
            return False
        if sum(each.nbytes for each in content.states) > self._most_copied:
            return False
        states = [each.copy() for each in content.states]
        rows = form.room(content.tokens)
        for into, some in zip(rows, content.rows, strict=True):
            into[...] = some
        pieces, unkept = form.pieces(rows, states), self._unkept[request]
        key = self._chains[request].own_key(kind, end)
        before, cost = tuple(unkept.before), self._cost(end, disk.size)

        def put() -> bool:
            is_kept = disk.records.put(key, pieces, self.secret, self._owner, cost)
            disk.records.use(before, cost)  # so that they are not evicted first
            return is_kept

        if kind != STATES:
            unkept.before.append(form.block.record(key))
        self._writing = (request, self._writer.submit(put))
        return True

    def forget(self, request: str, *, kept_tokens: int = 0, answer: Sequence[int] = ()) -> None:
        """The request has ended. kept_tokens: tokens of its KV cache that stay in the program;
        `answer` are the last of them."""
        chain, unkept = self._chains.get(request), self._unkept.get(request)
        self._drop(request)
        if kept_tokens and chain is not None:
            chain.add(kept_tokens - len(answer), answer)
            self._chains[request] = chain
            if unkept is not None:
                unkept.has_ended = True
                self._unkept[request] = unkept

    def close(self, program: KvStorage | None = None, *, within_s: float | None = None) -> None:
        """Wait for the write under way. With a program, store its KV caches in memory, as far as
        there is room. within_s: begin no further one after that, and with the newest."""
        self._writer.shutdown()
        if program is None or self._form is None:
            return
        end_s = math.inf if within_s is None else time.monotonic() + within_s
        # What is stored last is evicted last.
        for request in list(self._chains) if within_s is None else reversed(self._chains):
            if time.monotonic() < end_s:
                self._keep_in_memory(self._form, program, request)

    def _keep_in_memory(self, form: PrefixForm, program: KvStorage, request: str) -> None:
        """Store the blocks of a request, last block first, so that later ones are evicted earlier;
        and its snapshots."""
        (memory, size), chain = self._memory, self._chains[request]
        first = computed(program, request, size, size, size)
        count = 0
        if first is not None and first.rows:
            most = self._storage.memory.most_blocks(form.pieces(first.rows), self._owner)
            count = min(len(chain) // size, most)
        cost = 0.0
        for end in range(count * size, 0, -size):
            there = self._find(self._memory, chain, form.block, size, end)
            content = None if there else computed(program, request, size, size, end)
            if not there and content is None:
                continue
            cost = cost or self._cost(end, size)  # of the last block
            memory.use(there, cost)
            if there or content is None:
                continue
            if not self.store(request, size, end, form.pieces(content.rows), cost):
                return
        for point in program.saved(request) if self.has_states else ():
            content = computed(program, request, size, STATES, point)
            is_new = point <= len(chain) and not self._find(
                self._memory, chain, form.snapshot, STATES, point
            )
            if content is not None and is_new:
                self.store(request, STATES, point, form.pieces(content.rows, content.states))

    def _find(
        self, place: _Place, chain: TokenChain, part: PrefixPart, kind: int, end: int
    ) -> tuple[str, ...]:
        """The records of a block of `kind` tokens, or of a snapshot, that ends at token `end`; of
        the first device that has all pieces."""
        if kind != STATES and not part.names:
            return ("",)  # nothing is kept of tokens
        found = (place.records.find(key, part, self.secret) for key in chain.keys(kind, end))
        return next(filter(None, found), ())

    def _most(self, chain: TokenChain) -> int:
        return max(0, min(len(chain) - SHORTEST_STEP, self._most_tokens))

    def _drop(self, request: str) -> None:
        self._chains.pop(request, None)
        self._unkept.pop(request, None)

    def _is_idle(self) -> bool:
        """Whether no write is under way. If a block was not written, those after it are dropped:
        they could never match."""
        if self._writing is not None:
            request, kept = self._writing
            if not kept.done():
                return False
            self._writing = None
            if not kept.result():
                self._unkept.pop(request, None)
        return True

    def _await_writer(self) -> None:
        if self._writing is not None:
            wait([self._writing[1]])

    def _cost(self, end: int, block_tokens: int) -> float:
        """Cost of recomputing a block that ends at token `end`."""
        tokens = effort(end) - effort(max(0, end - block_tokens))
        return self._token_bytes * tokens

    def _macs(self, program: KvStorage, salt: str) -> list[hmac.HMAC]:
        """The parts of block keys other than tokens: for this device and for those it trusts."""
        facts = f"{self._facts} {program.cache_digest}"
        return [
            hmac.new(
                self.secret,
                f"{facts} {whose} {salt}\0".encode("utf-8", "surrogatepass"),
                hashlib.sha256,
            )
            for whose in self._whose
        ]
