"""Blocks of prompts are written while requests are computed, and nobody waits for the disk."""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from edge.backends.interface import KvStorage
from edge.engine.prefix_cache import PrefixCache, PrefixStorage
from edge.offload import Pieces, PrefixMemory, PrefixStore
from edge.protocol.step import StepLimits
from edge.protocol.wire_rules import WireRules
from edge.transport import WireRule
from edge.weights.cache_layout import row_pieces
from tests.support.plans import solo_assignment
from tests.support.specs import plain_spec

BLOCK = 4
SPEC = plain_spec()
ASSIGNMENT = solo_assignment(
    SPEC,
    StepLimits(context_tokens=64, chunk_tokens=BLOCK, requests=2, cached_tokens=64, disk_tokens=64),
    WireRules(sums=(WireRule(),), hops=()),
)
PROMPT = tuple(range(100, 100 + 3 * BLOCK + 2))


NAMES = row_pieces(ASSIGNMENT.layout)
SHAPE = NAMES[-1].array + 1, 1 + max(int(str(each.part[0])) for each in NAMES), 64, 3
"""Keys and values of each layer, heads, tokens, elements."""


@dataclass
class Cache:
    """What `PrefixCache` asks of a program: one request's rows, which say their token and place."""

    rows_there: NDArray[np.float32]
    length: int = 0
    cache_digest: str = "c"

    def states_like(self, _tokens: int) -> list[NDArray[Any]]:
        return []

    def compute(self, length: int) -> None:
        self.rows_there[..., self.length : length, 0] = PROMPT[self.length : length]
        self.length = length

    def new_rows(self, tokens: int, *, windows: bool = True) -> list[NDArray[Any]]:
        return list(np.zeros((*SHAPE[:2], tokens, SHAPE[3]), np.float32))

    def rows(
        self, _request: str, first: int, last: int, *, windows: bool = True
    ) -> list[NDArray[Any]] | None:
        return list(self.rows_there[:, :, first:last]) if last <= self.length else None

    def put_rows(
        self, _request: str, first: int, rows: Sequence[NDArray[Any]], *, windows: bool = True
    ) -> None:
        assert first <= self.length
        self.length = first + rows[0].shape[1]
        self.rows_there[:, :, first : self.length] = rows

    def as_storage(self) -> KvStorage:
        return cast(KvStorage, self)


def cache() -> Cache:
    return Cache(np.zeros(SHAPE, np.float32))


SECRET = b"of an owner".ljust(32)


def kept_on(
    disk: PrefixStore | None, secret: bytes = SECRET, memory: PrefixMemory | None = None
) -> PrefixStorage:
    return PrefixStorage(
        memory=memory or PrefixMemory(), disk=disk, secret=secret, disk_block_tokens=BLOCK
    )


class SlowStore(PrefixStore):
    """A disk that takes a block when it is let."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 1 << 20)
        self.may_write = threading.Event()
        self.is_full = False

    def put(
        self,
        key: str,
        pieces: Pieces,
        secret: bytes = b"",
        owner: str = "",
        cost: float = 0.0,
    ) -> bool:
        self.may_write.wait()
        return not self.is_full and super().put(key, pieces, secret, owner, cost)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SlowStore]:
    made = SlowStore(tmp_path)
    yield made
    made.may_write.set()


def known(store: PrefixStore, secret: bytes = SECRET) -> int:
    """Tokens of the prompt that another session finds, each as it was computed."""
    prefixes, found = PrefixCache(kept_on(store, secret), ASSIGNMENT), cache()
    tokens = prefixes.match(found.as_storage(), "other", PROMPT)
    assert (found.rows_there[..., :tokens, 0] == PROMPT[:tokens]).all()
    prefixes.close()
    return tokens


def test_a_block_is_kept_while_the_next_is_computed(store: SlowStore) -> None:
    prefixes, program = PrefixCache(kept_on(store), ASSIGNMENT), cache()
    assert prefixes.match(program.as_storage(), "r", PROMPT) == 0
    prefixes.keep(program.as_storage())
    program.compute(BLOCK)
    prefixes.keep(program.as_storage())
    program.compute(2 * BLOCK)
    prefixes.keep(program.as_storage())  # does not wait for the first
    program.rows_there[:, :, :BLOCK] = -1.0  # which was copied
    store.may_write.set()
    prefixes.close()
    assert known(store) == BLOCK


def test_what_the_disk_did_not_take_before_the_end_is_not_kept(store: SlowStore) -> None:
    prefixes, program = PrefixCache(kept_on(store), ASSIGNMENT), cache()
    prefixes.match(program.as_storage(), "r", PROMPT)
    program.compute(len(PROMPT))
    prefixes.keep(program.as_storage())
    prefixes.keep(program.as_storage())
    prefixes.forget("r")
    program.rows_there[...] = -1.0
    store.may_write.set()
    prefixes.keep(program.as_storage())
    prefixes.close()
    assert known(store) == BLOCK


def test_all_is_kept_by_a_disk_that_is_fast_enough(store: SlowStore) -> None:
    """Asking for the prompt again waits for the block that is being written."""
    store.may_write.set()
    prefixes, program = PrefixCache(kept_on(store), ASSIGNMENT), cache()
    for tokens in range(0, len(PROMPT), BLOCK):
        again = cache()
        assert prefixes.match(again.as_storage(), "r", PROMPT) == tokens
        program.compute(min(tokens + BLOCK, len(PROMPT)))
        prefixes.keep(program.as_storage())
    prefixes.keep(program.as_storage())
    prefixes.forget("r")
    prefixes.close()
    assert known(store) == 3 * BLOCK
    assert known(store, b"of another".ljust(32)) == 0
    assert known(store) == 3 * BLOCK


def test_without_one_block_those_behind_it_are_not_written(store: SlowStore) -> None:
    store.is_full = True
    store.may_write.set()
    prefixes, program = PrefixCache(kept_on(store), ASSIGNMENT), cache()
    prefixes.match(program.as_storage(), "r", PROMPT)
    program.compute(len(PROMPT))
    prefixes.keep(program.as_storage())
    prefixes.match(program.as_storage(), "other", PROMPT[:1])  # waits for it
    prefixes.keep(program.as_storage())
    prefixes.forget("other")
    store.is_full = False
    prefixes.keep(program.as_storage())
    prefixes.close()
    assert store.used_bytes == 0


LONG = tuple(range(300, 300 + 60))
IN_MEMORY_BYTES = math.ceil(len(NAMES) * 16 * 3 * 4 / mmap.PAGESIZE) * mmap.PAGESIZE
"""Of a block."""


def computed(length: int, prompt: Sequence[int] = LONG) -> Cache:
    """One whose rows say so many of a prompt."""
    made = cache()
    made.rows_there[..., :length, 0] = prompt[:length]
    made.length = length
    return made


def left(memory: PrefixMemory, prompt: Sequence[int], length: int) -> None:
    """By a session that has computed so many tokens of the prompt."""
    prefixes = PrefixCache(kept_on(None, memory=memory), ASSIGNMENT)
    prefixes.match(cache().as_storage(), "r", prompt)
    prefixes.keep(cache().as_storage())
    prefixes.forget("r", kept_tokens=length)
    prefixes.close(computed(length, prompt).as_storage())


def found_in(memory: PrefixMemory, prompt: Sequence[int], *, known: int = 0) -> int:
    """Tokens that another session finds, each as it was computed."""
    prefixes, there = PrefixCache(kept_on(None, memory=memory), ASSIGNMENT), computed(known)
    tokens = prefixes.match(there.as_storage(), "other", prompt, known=known)
    assert (there.rows_there[..., :tokens, 0] == prompt[:tokens]).all()
    prefixes.close()
    return tokens


def test_what_is_computed_at_the_end_is_kept_in_memory() -> None:
    """In blocks of 16 tokens; who knows more has more."""
    memory = PrefixMemory()
    memory.limit(1 << 20)
    left(memory, LONG, 40)
    assert found_in(memory, LONG) == 32
    assert found_in(memory, LONG[:33]) == 16, "two are left to compute"
    assert found_in(memory, (*LONG[:31], 5, *LONG[32:])) == 16
    assert found_in(memory, LONG, known=20) == 32
    assert found_in(memory, LONG, known=40) == 40
    left(memory, LONG, 60)
    assert found_in(memory, LONG) == 48


def test_an_answer_is_kept_behind_its_prompt() -> None:
    memory = PrefixMemory()
    memory.limit(1 << 20)
    prefixes = PrefixCache(kept_on(None, memory=memory), ASSIGNMENT)
    prefixes.match(cache().as_storage(), "r", LONG[:20])
    prefixes.keep(cache().as_storage())
    prefixes.forget("r", kept_tokens=50, answer=LONG[20:50])
    prefixes.close(computed(50).as_storage())
    assert found_in(memory, LONG) == 48
    assert found_in(memory, (*LONG[:20], 5, *LONG[21:])) == 16


def test_where_bits_may_depend_on_answers_they_are_not_found_where_they_may_not() -> None:
    memory = PrefixMemory()
    memory.limit(1 << 20)
    left(memory, LONG, 60)
    strict = replace(ASSIGNMENT, limits=replace(ASSIGNMENT.limits, batch_invariant=True))
    prefixes = PrefixCache(kept_on(None, memory=memory), strict)
    assert prefixes.match(computed(0).as_storage(), "other", LONG) == 0
    prefixes.close()


def test_where_there_is_little_room_the_beginning_stays() -> None:
    memory = PrefixMemory()
    memory.limit(2 * IN_MEMORY_BYTES)
    left(memory, LONG, 60)
    assert memory.used_bytes == 2 * IN_MEMORY_BYTES
    assert found_in(memory, LONG) == 32


def test_behind_many_tokens_a_beginning_stays_longer() -> None:
    """It takes more to compute again, for as many bytes."""
    memory = PrefixMemory()
    memory.limit(4 * IN_MEMORY_BYTES)
    long, other, third = LONG, tuple(range(400, 460)), tuple(range(500, 560))
    left(memory, long, 48)
    left(memory, other, 16)
    left(memory, third, 16)
    assert found_in(memory, long) == 48
    assert (found_in(memory, other), found_in(memory, third)) == (0, 16)


def test_on_disk_the_end_of_a_prompt_goes_before_its_beginning(tmp_path: Path) -> None:
    """Without the beginning its end is worth nothing."""
    names = sum(len(f"48 {each.name}\n") for each in NAMES)
    block_bytes = 44 + names + 16 + len(NAMES) * (BLOCK * 3 * 4 + 16)
    store = PrefixStore(tmp_path, 3 * block_bytes)
    prefixes, program = PrefixCache(kept_on(store), ASSIGNMENT), cache()
    prefixes.match(program.as_storage(), "r", PROMPT)
    program.compute(len(PROMPT))
    for _block in range(3):
        prefixes.keep(program.as_storage())
        prefixes._await_writer()
    prefixes.close()
    assert store.used_bytes == 3 * block_bytes
    store.make_room(block_bytes)  # before anybody asks for them
    assert known(store) == 2 * BLOCK
    store.make_room(block_bytes)
    assert known(store) == BLOCK


def test_who_is_over_and_not_kept_leaves_nothing() -> None:
    memory = PrefixMemory()
    memory.limit(1 << 20)
    prefixes = PrefixCache(kept_on(None, memory=memory), ASSIGNMENT)
    for request in ("over", "moved"):
        prefixes.match(cache().as_storage(), request, LONG)
    prefixes.keep(cache().as_storage())
    prefixes.forget("over")
    prefixes.match(cache().as_storage(), "new", LONG[:3], moved="moved")
    prefixes.close(computed(60).as_storage())
    assert memory.used_bytes == 0


def test_disk_goes_on_where_memory_ends(store: SlowStore) -> None:
    store.may_write.set()
    memory = PrefixMemory()
    memory.limit(1 << 20)
    left(memory, LONG, 32)
    prefixes, program = PrefixCache(kept_on(store), ASSIGNMENT), computed(60)
    prefixes.match(cache().as_storage(), "r", LONG)
    for _block in range(len(LONG) // BLOCK):
        prefixes.keep(program.as_storage())
        prefixes._await_writer()
    prefixes.close()
    prefixes, there = PrefixCache(kept_on(store, memory=memory), ASSIGNMENT), cache()
    assert prefixes.match(there.as_storage(), "other", LONG) == 56
    assert (there.rows_there[..., :56, 0] == LONG[:56]).all()
    prefixes.close()


@pytest.mark.parametrize("damaged", [(), (24,), (48,), (24, 48)], ids=str)
def test_where_a_block_on_disk_overlaps_and_is_damaged_what_is_found_stays(
    tmp_path: Path, damaged: tuple[int, ...]
) -> None:
    """Blocks of 24 tokens on disk, behind one of 16 in memory."""
    memory, disk = PrefixMemory(), PrefixStore(tmp_path, 1 << 20)
    memory.limit(1 << 20)
    left(memory, LONG, 16)
    storage = replace(kept_on(disk, memory=memory), disk_block_tokens=24)
    prefixes, program = PrefixCache(storage, ASSIGNMENT), computed(60)
    prefixes.match(cache().as_storage(), "r", LONG)
    for end in (24, 48):
        before = set(tmp_path.iterdir())
        prefixes.keep(program.as_storage())
        prefixes._await_writer()
        (file,) = set(tmp_path.iterdir()) - before
        if end in damaged:
            content = file.read_bytes()
            file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    prefixes.close()
    prefixes, there = PrefixCache(storage, ASSIGNMENT), cache()
    found = 16 if 24 in damaged else 24 if damaged else 48
    assert prefixes.match(there.as_storage(), "other", LONG) == found
    assert there.length == found
    assert (there.rows_there[..., :found, 0] == LONG[:found]).all()
    prefixes.close()


MALLORY, ALICE, BOB = ("a" * 32, "b" * 32, "c" * 32)


def shared(
    owner: str,
    *,
    memory: PrefixMemory | None = None,
    disk: PrefixStore | None = None,
    trusted: tuple[str, ...] = (),
) -> PrefixCache:
    """Of a device that has the secret of its cluster."""
    return PrefixCache(
        PrefixStorage(
            memory=memory or PrefixMemory(),
            disk=disk,
            secret=SECRET,
            owner=owner,
            trusted=trusted,
            disk_block_tokens=BLOCK,
        ),
        ASSIGNMENT,
    )


def leave(prefixes: PrefixCache, program: Cache) -> None:
    """What the program has of LONG, in memory or on disk."""
    prefixes.match(cache().as_storage(), "r", LONG)
    for _block in range(len(LONG) // BLOCK):
        prefixes.keep(program.as_storage())
        prefixes._await_writer()
    prefixes.keep(program.as_storage())
    prefixes.forget("r", kept_tokens=len(LONG))
    prefixes.close(program.as_storage())


@pytest.mark.parametrize("is_disk", [False, True], ids=["memory", "disk"])
def test_what_a_member_leaves_is_found_by_who_names_it_alone(
    is_disk: bool, store: SlowStore
) -> None:
    """Keys and values that are wrong, under the prompt of others, whose secret it has."""
    store.may_write.set()
    memory = PrefixMemory()
    memory.limit(1 << 20)
    place: dict[str, Any] = {"disk": store} if is_disk else {"memory": memory}
    wrong = computed(60)
    wrong.rows_there[...] = -1.0
    leave(shared(MALLORY, **place), wrong)

    def found_by(owner: str, *trusted: str) -> tuple[int, bool]:
        """So many tokens, and whether all of them are as they are computed."""
        prefixes, there = shared(owner, trusted=trusted, **place), cache()
        tokens = prefixes.match(there.as_storage(), "r", LONG)
        prefixes.close()
        return tokens, bool((there.rows_there[..., :tokens, 0] == LONG[:tokens]).all())

    most = 56 if is_disk else 48
    assert found_by(ALICE) == (0, True)
    assert found_by(ALICE, BOB) == (0, True)
    assert found_by(ALICE, MALLORY) == (most, False), "its own choice"
    leave(shared(ALICE, **place), computed(60))
    assert found_by(ALICE) == (most, True)
    assert found_by(BOB, ALICE[:16]) == (most, True)
    assert found_by(BOB) == (0, True)


def test_of_what_others_have_left_only_what_is_new_is_left_again(store: SlowStore) -> None:
    store.may_write.set()
    half, whole = computed(32), computed(60)
    leave(shared(ALICE, disk=store), half)
    assert len(store._sizes) == 32 // BLOCK
    leave(shared(BOB, disk=store, trusted=(ALICE,)), whole)
    assert len(store._sizes) == len(LONG) // BLOCK
    prefixes, there = shared(BOB, disk=store, trusted=(ALICE,)), cache()
    assert prefixes.match(there.as_storage(), "r", LONG) == 56
    prefixes.close()
