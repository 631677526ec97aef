"""Prefix cache: what earlier requests computed on this peer, found again by a prompt's tokens.

A block's key is an HMAC, by the owner's secret, of all tokens up to its end and of everything else
that its keys and values depend on, but not of the plan: pieces are told apart by layer and head,
and a shard takes those that it has. With `batch_invariant` the plan is in the key, because sums of
another split differ in their last bits. Without the secret nobody learns that a block exists.
Devices may share a secret: the key also contains the device that stored the block, known by its
certificate, so that a device only reads its own blocks and those of devices that it trusts.

If layers have states, a prompt continues from a snapshot: the states at a point where scheduling
saved them, and the keys and values between the last whole block and that point. Every shard of such
a model has a snapshot at each of these points, also one whose own layers have no states.

In memory, blocks are small. They are copied when a session ends; until then its own KV cache has
them. The caller decides how many tokens to use.

On disk, blocks are larger. A thread writes them while their request is computed. Blocks that the
disk does not take before the request ends are dropped, unless its KV cache is kept. One block
buffer is allocated, for reads and writes.

Eviction goes by the cost of recomputing a block: larger models and later blocks cost more.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import math
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge.backends.interface import KvStorage
from edge.memory.recomputing import effort
from edge.memory.step_memory import has_states
from edge.models.attention import Attention
from edge.offload import Pieces, PrefixMemory, PrefixPart, PrefixRecords, PrefixStore
from edge.protocol.assignment import Assignment
from edge.protocol.messages import MOST_POINTS
from edge.protocol.step import SHORTEST_STEP
from edge.version import __version__
from edge.weights.cache_layout import row_pieces, state_pieces
from edge.weights.token_reads import packed_bytes_of_token

MEMORY_BLOCK_TOKENS = 16
"""Tokens of a block in memory. Recomputing a shorter rest of a common prefix is as fast as asking
for it."""

DISK_BLOCK_TOKENS = 256

OWNER_DIGITS = 16
"""Digits of a device id in a block's key; fewer could be forged by trying keys."""

Arrays = Sequence[NDArray[Any]]


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


class _Chain:
    """The tokens of one request, as digests of its beginnings."""

    def __init__(self, macs: Sequence[hmac.HMAC], every: int) -> None:
        """macs: of everything but the tokens, for the own device and those that it trusts. every:
        beginnings have a multiple of so many tokens."""
        self._macs = macs
        self._every = every
        self._tokens = hashlib.sha256()
        self._rest: tuple[int, ...] = ()
        """Tokens after the last digest."""
        self._digests: list[bytes] = []

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self._digests) * self._every + len(self._rest)

    def add(self, position: int, tokens: Sequence[int]) -> None:
        """Add tokens from `position` on. Ignored if they leave a gap or are known already."""
        first, size = len(self) - len(self._rest), self._every
        if not first <= position <= len(self):
            return
        known = (*self._rest[: position - first], *tokens)
        whole = len(known) // size * size
        packed = np.asarray(known[:whole], "<i8").tobytes()
        for begin in range(0, len(packed), 8 * size):
            self._tokens.update(packed[begin : begin + 8 * size])
            self._digests.append(self._tokens.digest())
        self._rest = known[whole:]

    def keys(self, kind: str, end: int) -> Iterator[str]:
        """Keys of what ends at token `end`, the own one first."""
        for mac in self._macs:
            own = mac.copy()
            own.update(kind.encode() + self._digests[end // self._every - 1])
            yield own.hexdigest()


@dataclass(slots=True)
class _Unkept:
    """How much of a request is on disk."""

    end: int = 0
    """End of the last block, in tokens."""
    before: list[str] = field(default_factory=list)
    """Records of the blocks so far."""
    points: set[int] = field(default_factory=set)
    """Snapshots so far."""


class _Form:
    """The pieces of a shard's blocks and snapshots, and arrays for one of them."""

    def __init__(self, assignment: Assignment, program: KvStorage, tokens: int) -> None:
        """tokens: most in a block."""
        self._room = program.new_rows(tokens)
        self._states = program.new_states()
        self._row_pieces = row_pieces(assignment.layout)
        self._state_pieces = state_pieces(assignment.layout, len(self._states))
        names = list(dict.fromkeys(each.name for each in self._row_pieces))
        self.block = PrefixPart.of(names)
        self.snapshot = PrefixPart.of([*names, *(each.name for each in self._state_pieces)])

    def room(self, tokens: int, *, states: bool = False) -> tuple[Arrays, Arrays]:
        """The only buffers: for rows of so many tokens, and for states."""
        return [each[:, :tokens] for each in self._room], self._states if states else ()

    def pieces(self, rows: Arrays, states: Arrays = ()) -> Pieces:
        """The pieces of a block, or with states of a snapshot."""
        pieces = {each.name: rows[each.array][each.part] for each in self._row_pieces}
        if states:
            pieces |= {each.name: states[each.array][0][each.part] for each in self._state_pieces}
        return pieces

    def read(
        self,
        place: _Place,
        records: Collection[str],
        secret: bytes,
        rows: Arrays,
        states: Arrays = (),
    ) -> bool:
        """Fill the arrays; see `PrefixRecords.read`."""
        pieces = self.pieces(rows, states)
        if not place.records.read(records, pieces, secret):
            return False
        for each in self._row_pieces:
            array = rows[each.array][each.part]
            if not np.may_share_memory(array, pieces[each.name]):
                array[...] = pieces[each.name]
        return True


class PrefixCache:
    """The prefix cache of one session. Used by the compute thread; `close` it at the end."""

    def __init__(self, storage: PrefixStorage, assignment: Assignment) -> None:
        self._secret, self._owner = storage.secret, storage.owner
        self._memory = _Place(storage.memory, MEMORY_BLOCK_TOKENS)
        self._disk = None
        if storage.disk is not None:
            self._disk = _Place(storage.disk, storage.disk_block_tokens)
        self._places = [self._memory, *([self._disk] if self._disk else ())]
        whose = (storage.owner, *storage.trusted)
        self._whose = tuple(dict.fromkeys(each[:OWNER_DIGITS] for each in whose))
        self._assignment = assignment
        self._facts = _facts(assignment)
        self._most_tokens = assignment.limits.cached_tokens
        self._most_requests = assignment.limits.caches
        self._has_states = has_states(assignment.model, assignment.kv_dtype)
        sizes = [place.size for place in self._places]
        self._every, self._largest = 1 if self._has_states else math.gcd(*sizes), max(sizes)
        recipe = assignment.weight_format.recipe
        self._token_bytes = packed_bytes_of_token(assignment.layout, recipe)
        """Weight bytes read for one token: the part of the recomputing cost that depends on the
        model."""
        self._form: _Form | None = None
        self._chains: dict[str, _Chain] = {}
        """Requests under way and kept KV caches, least recently used first."""
        self._unkept: dict[str, _Unkept] = {}
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="edge-kv-keep")
        self._writing: tuple[str, Future[bool]] | None = None
        """The request of which a block is being written, and whether the write succeeded."""

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
        form = self._form = self._form or _Form(self._assignment, program, self._largest)
        chain = _Chain(self._macs(program, salt), self._every)
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
        if self._has_states:
            is_new = not known and 0 < point <= most
            return self._restore(form, program, request, point) if is_new else known
        return self._fill(form, program, request, known, most)

    def points(self, request: str) -> tuple[int, ...]:
        """The numbers of tokens of a matched prompt at which its states can be restored, in
        order."""
        form, chain = self._form, self._chains[request]
        if form is None or not self._has_states:
            return ()
        most = self._most(chain)
        covered = max(
            len(self._blocks(form, each, chain, most)) * each.size for each in self._places
        )
        found = [
            point
            for point in range(1, min(most, covered + self._largest) + 1)
            if any(
                point // place.size * place.size <= covered
                and self._find(place, chain, form.snapshot, _STATES, point)
                for place in self._places
            )
        ]
        return tuple(found[-MOST_POINTS:])

    def _restore(self, form: _Form, program: KvStorage, request: str, point: int) -> int:
        chain, found = self._chains[request], self._fill(form, program, request, 0, point)
        for place in self._places:
            start = point // place.size * place.size
            there = self._find(place, chain, form.snapshot, _STATES, point)
            rows, states = form.room(point - start, states=True)
            is_covered = start <= found and there
            if is_covered and form.read(place, there, self._secret, rows, states):
                program.put_rows(request, start, rows)
                program.put_states(request, point, states)
                place.records.use(there, self._cost(point, place.size))
                return point
        return 0

    def _fill(self, form: _Form, program: KvStorage, request: str, known: int, most: int) -> int:
        """Fill the request with blocks of its first `most` tokens, in memory and behind them on
        disk. Returns its number of tokens."""
        chain, found = self._chains[request], known
        if not form.block.names:
            return most
        for place in self._places:
            size = place.size
            there = self._blocks(form, place, chain, most)
            first = [each for ids in there for each in ids]
            place.records.use(first, self._cost(len(there) * size, size))
            rows, _states = form.room(size)
            for number in range(found // size, len(there)):
                if not form.read(place, there[number], self._secret, rows):
                    break
                program.put_rows(request, number * size, rows)
                found = (number + 1) * size
        return found

    def keep(self, program: KvStorage) -> None:
        """Begin to write a computed block or snapshot, unless a write is under way.

        Called between steps and before `forget`. The content is copied; the call does not wait for
        the disk.
        """
        disk, form = self._disk, self._form
        if disk is None or form is None or not self._unkept or not self._is_idle():
            return
        for request, unkept in self._unkept.items():
            chain = self._chains[request]
            while (end := unkept.end + disk.size) <= len(chain):
                there = self._find(disk, chain, form.block, disk.size, end)
                if not there:
                    break
                unkept.before += there
                unkept.end = end
            if end <= len(chain):
                rows = program.rows(request, unkept.end, end)
                if rows is not None:
                    self._write(form, disk, request, disk.size, end, rows)
                    unkept.end = end
                    return
            for point in program.saved(request) if self._has_states else ():
                start = point // disk.size * disk.size
                if point in unkept.points or point > len(chain) or start > unkept.end:
                    continue
                unkept.points.add(point)
                rows, states = program.rows(request, start, point), program.states(request, point)
                if (
                    rows is not None
                    and states is not None
                    and not self._find(disk, chain, form.snapshot, _STATES, point)
                ):
                    self._write(form, disk, request, _STATES, point, rows, states)
                    return

    def _write(
        self,
        form: _Form,
        disk: _Place,
        request: str,
        kind: int,
        end: int,
        rows: Arrays,
        states: Arrays | None = None,
    ) -> None:
        """Copy a block or a snapshot that ends at token `end`, and begin to write it."""
        copies, of_states = form.room(kind or end % disk.size, states=states is not None)
        for into, some in zip((*copies, *of_states), (*rows, *(states or ())), strict=True):
            into[...] = some
        pieces, unkept = form.pieces(copies, of_states), self._unkept[request]
        key = next(self._chains[request].keys(f"{kind}", end))
        before, cost = tuple(unkept.before), self._cost(end, disk.size)

        def put() -> bool:
            is_kept = disk.records.put(key, pieces, self._secret, self._owner, cost)
            disk.records.use(before, cost)  # so that they are not evicted first
            return is_kept

        if kind != _STATES:
            unkept.before.append(form.block.record(key))
        self._writing = (request, self._writer.submit(put))

    def forget(self, request: str, *, kept_tokens: int = 0, answer: Sequence[int] = ()) -> None:
        """The request has ended. kept_tokens: tokens of its KV cache that stay in the program;
        `answer` are the last of them."""
        chain, unkept = self._chains.get(request), self._unkept.get(request)
        self._drop(request)
        if kept_tokens and chain is not None:
            chain.add(kept_tokens - len(answer), answer)
            self._chains[request] = chain
            if unkept is not None:
                self._unkept[request] = unkept

    def close(self, program: KvStorage | None = None) -> None:
        """Wait for the write under way. With a program, store its KV caches in memory, as far as
        there is room."""
        self._writer.shutdown()
        if program is not None and self._form is not None:
            for request in self._chains:
                self._keep_in_memory(self._form, program, request)

    def _keep_in_memory(self, form: _Form, program: KvStorage, request: str) -> None:
        """Store the blocks of a request, last block first, so that later ones are evicted earlier;
        and its snapshots."""
        (memory, size), chain = self._memory, self._chains[request]
        assert isinstance(memory, PrefixMemory)
        first_rows = program.rows(request, 0, size)
        count = 0
        if first_rows:
            most = memory.most_blocks(form.pieces(first_rows), self._owner)
            count = min(len(chain) // size, most)
        cost: float | None = None
        for end in range(count * size, 0, -size):
            there = self._find(self._memory, chain, form.block, size, end)
            rows = None if there else program.rows(request, end - size, end)
            if not there and rows is None:
                continue
            if cost is None:  # the last block
                cost = self._cost(end, size)
            key = next(chain.keys(f"{size}", end))
            if there:
                memory.use(there, cost)
            elif not memory.put(key, form.pieces(rows or ()), owner=self._owner, cost=cost):
                return
        for point in program.saved(request) if self._has_states else ():
            if point > len(chain) or self._find(self._memory, chain, form.snapshot, _STATES, point):
                continue
            rows = program.rows(request, point // size * size, point)
            states = program.states(request, point)
            if rows is not None and states is not None:
                pieces, key = form.pieces(rows, states), next(chain.keys(f"{_STATES}", point))
                memory.put(key, pieces, owner=self._owner, cost=self._cost(point, point))

    def _find(
        self, place: _Place, chain: _Chain, part: PrefixPart, kind: int, end: int
    ) -> tuple[str, ...]:
        """The records of a block of `kind` tokens, or of a snapshot, that ends at token `end`; of
        the first device that has all pieces."""
        if kind != _STATES and not part.names:
            return ("",)  # nothing is kept of tokens
        found = (place.records.find(key, part, self._secret) for key in chain.keys(f"{kind}", end))
        return next(filter(None, found), ())

    def _blocks(
        self, form: _Form, place: _Place, chain: _Chain, most: int
    ) -> list[tuple[str, ...]]:
        """Records of the stored blocks of the first `most` tokens, up to the first missing one."""
        ends = range(place.size, most + 1, place.size)
        found = (self._find(place, chain, form.block, place.size, end) for end in ends)
        return list(takewhile(bool, found))

    def _most(self, chain: _Chain) -> int:
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
                self._secret,
                f"{facts} {whose} {salt}\0".encode("utf-8", "surrogatepass"),
                hashlib.sha256,
            )
            for whose in self._whose
        ]


_STATES = 0
"""In place of the tokens of a block: a snapshot."""


def _facts(assignment: Assignment) -> str:
    """A digest of everything that keys, values and states depend on, except tokens and the
    program's own digest.

    Their last bits depend on the plan, because sums depend on the split of a stage: the plan
    counts, without its devices, if no bit may depend on what is found.
    """
    model, limits, rules = assignment.model, assignment.limits, assignment.wire_rules
    mixers = [each.mixer for each in model.kinds]
    rotations = [each.rotary for each in mixers if isinstance(each, Attention)]
    facts: list[Any] = [
        __version__,
        assignment.weights_digest,
        model.to_json(),
        [each.is_long(limits.context_tokens) for each in rotations],
        assignment.weight_format.to_json(),
        assignment.kv_dtype,
        sorted({each.format for each in (*rules.sums, *rules.hops)} - {"float32"}),
    ]
    if limits.batch_invariant:
        stages = (
            replace(
                stage,
                shards=tuple(shard.on(f"{rank}") for rank, shard in enumerate(stage.shards)),
            )
            for stage in assignment.plan.stages
        )
        facts += [
            replace(assignment.plan, stages=tuple(stages)).to_json(),
            assignment.manifest_digest,
            limits.exceeds_memory,
            (assignment.stage, assignment.rank),
            dataclasses.asdict(rules),
        ]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
