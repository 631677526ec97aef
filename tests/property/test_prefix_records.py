"""Stored prefixes: nothing is found under other facts, limits hold, and pieces are what was put."""

from __future__ import annotations

import mmap
import tempfile
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edge.backends.interface import KvStorage
from edge.engine.prefix_cache import PrefixCache, PrefixStorage
from edge.offload import PrefixMemory, PrefixPart, PrefixStore
from edge.protocol.assignment import Assignment
from edge.protocol.step import StepLimits
from edge.protocol.wire_rules import WireRules
from edge.transport import WireRule
from edge.weights.cache_layout import row_pieces
from tests.support.formats import uniform_format
from tests.support.plans import solo_assignment
from tests.support.specs import plain_spec

BASE = solo_assignment(
    plain_spec(),
    StepLimits(context_tokens=64, chunk_tokens=16, requests=2, cached_tokens=64),
    WireRules(sums=(WireRule(),), hops=()),
)
ARRAYS = row_pieces(BASE.layout)[-1].array + 1
HEADS = 1 + max(int(str(each.part[0])) for each in row_pieces(BASE.layout))


@dataclass
class Program:
    """What `PrefixCache` asks of one; a row of zeros for each token."""

    cache_digest: str
    length: int

    def new_rows(self, tokens: int, *, windows: bool = True) -> list[NDArray[Any]]:
        return list(np.zeros((ARRAYS, HEADS, tokens, 2), np.float32))

    def states_like(self, _tokens: int) -> list[NDArray[Any]]:
        return []

    def rows(
        self, _request: str, first: int, last: int, *, windows: bool = True
    ) -> list[NDArray[Any]] | None:
        return self.new_rows(last - first) if last <= self.length else None

    def put_rows(
        self, _request: str, first: int, rows: list[NDArray[Any]], *, windows: bool = True
    ) -> None:
        self.length = first + rows[0].shape[1]


Facts = tuple[Any, ...]
FACTS = st.tuples(
    st.sampled_from([b"s" * 32, b"t" * 32]),  # secret
    st.sampled_from(["a" * 32, "b" * 32]),  # owner
    st.sampled_from(["weights", "weights and an adapter"]),
    st.sampled_from([1.0, 2.0]),  # of logits: another model
    st.sampled_from(["float32", "int8"]),  # weights
    st.sampled_from(["float32", "int8"]),  # keys and values
    st.sampled_from(["", "salt", "salt 2"]),
    st.sampled_from(["kernels 1", "kernels 2"]),
)


def cache_of(facts: Facts, memory: PrefixMemory) -> tuple[PrefixCache, Program, str]:
    secret, owner, weights, scale, dtype, kv_dtype, salt, digest = facts
    assignment: Assignment = replace(
        BASE,
        model=replace(BASE.model, logit_scale=scale),
        weights_digest=weights,
        weight_format=uniform_format(dtype, 32, "fast"),
        kv_dtype=kv_dtype,
    )
    storage = PrefixStorage(memory=memory, disk=None, secret=secret, owner=owner)
    return PrefixCache(storage, assignment), Program(digest, 0), salt


@settings(deadline=None)
@given(stored=FACTS, asked=FACTS, common=st.integers(0, 60), has_equal=st.booleans())
def test_nothing_is_found_of_another_owner_model_format_or_salt(
    stored: Facts, asked: Facts, common: int, has_equal: bool
) -> None:
    asked = stored if has_equal else asked
    memory = PrefixMemory()
    memory.limit(1 << 24)
    prompt = list(range(60))
    cache, program, salt = cache_of(stored, memory)
    cache.match(cast(KvStorage, program), "r", prompt, salt=salt)
    cache.forget("r", kept_tokens=60)
    program.length = 60
    cache.close(cast(KvStorage, program))
    other, program, salt = cache_of(asked, memory)
    changed = prompt[:common] + [99] * (60 - common)
    found = other.match(cast(KvStorage, program), "q", changed, salt=salt)
    other.close()
    assert found == (min(common, 58) // 16 * 16 if asked == stored else 0)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("put"), st.sampled_from("ef"), st.sets(st.sampled_from("abcd")), st.booleans()
        ),
        st.tuples(st.just("read"), st.sampled_from("ef"), st.sets(st.sampled_from("abcd"))),
        st.tuples(st.just("limit"), st.integers(0, 5)),
    ),
    max_size=30,
)


def content(key: str, name: str) -> NDArray[np.uint8]:
    return np.full(1500, 16 * ord(key[0]) + ord(name), np.uint16).view(np.uint8)


@settings(deadline=None, max_examples=50)
@given(operations=OPERATIONS, is_disk=st.booleans())
def test_pieces_are_those_that_were_put_and_limits_hold(
    operations: list[tuple[Any, ...]], is_disk: bool
) -> None:
    """Of several records of one key, of two owners, of which one has a limit of its own."""
    with tempfile.TemporaryDirectory() as folder:
        limit = unit = mmap.PAGESIZE
        store: PrefixMemory | PrefixStore
        if is_disk:
            store = PrefixStore(Path(folder), 5 * unit, owner_limit_bytes=2 * unit)
            limit = 5 * unit
        else:
            store = PrefixMemory()
            store.limit(limit)
            store.limit_owner("a", 2 * unit)
        put: dict[str, set[str]] = {"e": set(), "f": set()}
        for kind, *given_ in operations:
            if kind == "limit" and isinstance(store, PrefixMemory):
                limit = given_[0] * unit
                store.limit(limit)
            elif kind == "put":
                name, names, is_owned = given_
                pieces = {each: content(name, each) for each in sorted(names)}
                if store.put(name * 64, pieces, b"s", "a" if is_owned else "b"):
                    put[name] |= names
            elif kind == "read":
                name, names = given_
                part = PrefixPart.of(sorted(names))
                into = {each: np.zeros(3000, np.uint8) for each in names}
                ids = store.find(name * 64, part, b"s")
                if ids and store.read(ids, into, b"s"):
                    assert names <= put[name]
                    for each in names:
                        assert np.array_equal(into[each], content(name, each))
            assert store.used_bytes <= limit
        if isinstance(store, PrefixStore):
            files = sum(path.stat().st_size for path in Path(folder).iterdir())
            assert files == store.used_bytes
            assert PrefixStore(Path(folder), 5 * unit).used_bytes == files


def test_two_loads_that_store_and_find_at_once_see_whole_pieces_or_none() -> None:
    """In memory and on disk, where there is room for a few records."""
    with tempfile.TemporaryDirectory() as folder:
        memory = PrefixMemory()
        memory.limit(3 * mmap.PAGESIZE)
        wrong: list[str] = []
        for store in (memory, PrefixStore(Path(folder), 3 * 4096)):

            def work(seed: int, store: PrefixMemory | PrefixStore = store) -> None:
                random = np.random.default_rng(seed)
                for _number in range(60):
                    name = "def"[random.integers(3)]
                    pieces = {each: content(name, each) for each in "ab"[: random.integers(1, 3)]}
                    if random.integers(2):
                        store.put(name * 64, pieces, b"s")
                    into = {each: np.zeros(3000, np.uint8) for each in pieces}
                    ids = store.find(name * 64, PrefixPart.of(tuple(pieces)), b"s")
                    if ids and store.read(ids, into, b"s"):
                        wrong.extend(k for k in into if (into[k] != pieces[k]).any())

            threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert store.used_bytes <= 3 * mmap.PAGESIZE
        assert not wrong
