"""Layers with a sliding window that keep the newest tokens only compute what they do with all of
them, and a row's bits depend on nothing but its tokens."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from numpy.typing import NDArray

from edge.backends.interface import StageProgram
from edge.backends.registry import open_backend
from edge.errors import RequestError
from edge.memory.windows import can_keep_windows, cut_end, with_windows
from edge.models.spec import ModelSpec, keeping_windows
from edge.offload import DerivedCache, KVTier, MemoryKVTier
from edge.profiling.random_weights import written_weights
from edge.protocol.step import Step, StepEntry, StepLimits
from edge.system.pages import can_put_memory_over_mappings
from edge.transport import SoloCollective
from edge.weights.formats import KvDtype
from edge.weights.layout import shard_layout
from tests.support.formats import uniform_format
from tests.support.plans import make_plan
from tests.support.processes import run_module
from tests.support.slow_cases import shown_in_parts
from tests.support.specs import few_random_bytes, plain_spec

Array = NDArray[np.float32]

WINDOW, CONTEXT, CHUNK = 8, 160, 32


def spec_of(windows: tuple[int | None, ...]) -> ModelSpec:
    return plain_spec(
        num_layers=len(windows),
        hidden_size=32,
        num_heads=4,
        num_kv_heads=2,
        head_size=16,
        ffn_columns=32,
        vocab_size=50,
        context_tokens=CONTEXT,
        windows=windows,
    )


SPEC = spec_of((WINDOW, None, WINDOW))
LONG_SPEC = spec_of((None, WINDOW, None, None, WINDOW, None))
LIMITS = StepLimits(
    context_tokens=CONTEXT,
    chunk_tokens=CHUNK,
    requests=4,
    cached_tokens=2 * CONTEXT,
    saved_states=3,
    windows=3,
)
KEPT = WINDOW - 1 + 16
"""Fewer than a chunk; loads keep some more, so that all tokens are there of which scales are
chosen."""


def windowed(spec: ModelSpec) -> ModelSpec:
    return keeping_windows(spec, lambda _: KEPT)


WINDOWED = windowed(SPEC)
TOKENS = tuple(np.random.default_rng(5).integers(0, 50, CONTEXT).tolist())
FORM = uniform_format("float32")


@contextmanager
def loaded(
    backend: str,
    folder: Path,
    spec: ModelSpec,
    *,
    kv_dtype: KvDtype = "float32",
    kv_tier: KVTier | None = None,
    limits: StepLimits = LIMITS,
) -> Iterator[StageProgram]:
    shard = shard_layout(spec, make_plan(spec, "solo", model="m"), stage=0, rank=0)
    with few_random_bytes(), written_weights(shard, FORM, folder) as weights:
        program = open_backend(backend, threads=1).load(
            spec,
            shard,
            replace(weights, packed=DerivedCache(folder / "packed", 1 << 30)),
            FORM,
            limits=limits,
            kv_dtype=kv_dtype,
            kv_tier=kv_tier,
        )
        try:
            if kv_dtype != "float32":
                compute(program, ("scales", 0, 20))
                program.calibrate("scales")
            yield program
        finally:
            program.close()


def compute(program: StageProgram, *parts: tuple[str, int, int], rows: int | None = None) -> Array:
    """Logits [entries, rows, vocabulary] of the tokens from one position to another, by request;
    the token at a position is the same in every request."""
    entries = tuple(
        StepEntry(
            request=name,
            position=first,
            tokens=TOKENS[first:end],
            logit_rows=end - first if rows is None else rows,
        )
        for name, first, end in parts
    )
    return program.forward(Step(entries=entries), None, SoloCollective()).copy()


def answered(program: StageProgram, sizes: Sequence[int], name: str = "r") -> Array:
    """Logits of all tokens, computed in steps of these sizes in turn."""
    found, position, size = [], 0, cycle(sizes)
    while position < CONTEXT:
        end = min(position + next(size), CONTEXT)
        found.append(compute(program, (name, position, end))[0])
        position = end
    program.release(name)
    return np.concatenate(found)


def check_against_all_tokens(backend: str, folder: Path, kv_dtype: KvDtype) -> None:
    """Logits are those of layers that keep all tokens, in steps of any length."""
    with loaded(backend, folder, SPEC, kv_dtype=kv_dtype) as program:
        expected = answered(program, [2])
    with loaded(backend, folder, WINDOWED, kv_dtype=kv_dtype) as program:
        for sizes in ([2], [1], [CHUNK], [3, 1, CHUNK, 1, 1], [KEPT + 1, 1, 5], [7], [CHUNK, 4, 1]):
            np.testing.assert_allclose(answered(program, sizes), expected, atol=1e-5)


def check_bits(backend: str, folder: Path, kv_dtype: KvDtype) -> None:
    """Rows of steps with an even number of tokens have the same bits in any of them, and rows of
    single tokens wherever the steps before them were cut."""
    with loaded(backend, folder, WINDOWED, kv_dtype=kv_dtype) as program:
        assert program.rows_agree
        expected = answered(program, [2])
        for sizes in ([CHUNK], [4], [16, 2, 2], [CHUNK, 2, 6, 10], [22, 2]):
            np.testing.assert_array_equal(answered(program, sizes), expected)
        alone = []
        for sizes in ([CHUNK], [2], [24, 8], [30, 2, 32]):
            position, size = 0, cycle(sizes)
            while position < 64:
                compute(program, ("r", position, position + (count := next(size))))
                position += count
            rows = [compute(program, ("r", at, at + 1))[0] for at in range(64, CONTEXT)]
            alone.append(np.concatenate(rows))
            program.release("r")
        for each in alone[1:]:
            np.testing.assert_array_equal(each, alone[0])


def check_blocks(backend: str, folder: Path, kv_dtype: KvDtype) -> None:
    """The same where products sum up several blocks of keys: of 256 with heads of 64."""
    context, chunk_tokens = 900, 128
    limits = replace(LIMITS, context_tokens=context, chunk_tokens=chunk_tokens, cached_tokens=2000)
    spec = plain_spec(
        num_layers=2,
        hidden_size=32,
        num_heads=2,
        num_kv_heads=1,
        head_size=64,
        vocab_size=50,
        context_tokens=context,
        windows=(128, None),
    )
    spec = with_windows(spec, limits)
    assert spec.attention.kept_tokens == 127 + 256
    tokens = tuple(np.random.default_rng(6).integers(0, 50, context).tolist())
    with loaded(backend, folder, spec, kv_dtype=kv_dtype, limits=limits) as program:
        found = []
        for size in (2, chunk_tokens, 100):
            rows = []
            for at in range(0, context, size):
                part = tokens[at : at + size]
                entry = StepEntry(request="r", position=at, tokens=part, logit_rows=len(part))
                rows.append(
                    program.forward(Step(entries=(entry,)), None, SoloCollective())[0].copy()
                )
            found.append(np.concatenate(rows))
            program.release("r")
        for each in found[1:]:
            np.testing.assert_array_equal(each, found[0])


def check_requests(backend: str, folder: Path, kv_dtype: KvDtype) -> None:
    """Batches, swaps, saved windows and other slots change no bit."""
    tier = MemoryKVTier(1 << 24)
    begins = {"a": 10, "b": KEPT, "c": 64}
    with loaded(backend, folder, WINDOWED, kv_dtype=kv_dtype, kv_tier=tier) as program:
        expected = {}
        for name, begin in begins.items():
            for at in range(0, begin - begin % 2, 2):
                compute(program, (name, at, at + 2))
            if begin % 2:
                compute(program, (name, begin - 1, begin))
            steps = [compute(program, (name, at, at + 1))[0] for at in range(begin, begin + 40)]
            expected[name] = np.stack(steps)
            program.release(name)
        for name, begin in begins.items():
            for at in range(0, begin - begin % 2, 2):
                compute(program, (name, at, at + 2))
            if begin % 2:
                compute(program, (name, begin - 1, begin))
        names = list(begins)
        for step in range(40):
            if step % 7 == 3:
                program.swap_out(names[step % 3])
            names = names[1:] + names[:1] if step % 5 == 4 else names
            rows = compute(
                program, *((name, begins[name] + step, begins[name] + step + 1) for name in names)
            )
            for name, row in zip(names, rows, strict=True):
                np.testing.assert_array_equal(row, expected[name][step])
        for name in names:
            program.release(name)


def check_prefixes(backend: str, folder: Path, kv_dtype: KvDtype) -> None:
    """A request goes on from a saved place, of one that goes on or has ended, and from no other."""
    saved, last = 50, 90
    with loaded(backend, folder, WINDOWED, kv_dtype=kv_dtype) as program:

        def prompt(name: str) -> Array:
            for at in range(0, saved, 2):
                compute(program, (name, at, at + 2))
            program.save_state(name, saved, 1)
            return np.stack(
                [compute(program, (name, at, at + 2))[0] for at in range(saved, last, 2)]
            )

        def rest(name: str) -> Array:
            return np.stack(
                [compute(program, (name, at, at + 2))[0] for at in range(saved, last, 2)]
            )

        expected = prompt("r")
        assert program.take("s", "r", saved - 2, moves=False) == 0, "not saved there"
        assert program.take("s", "r", saved, moves=False) == saved
        np.testing.assert_array_equal(rest("s"), expected)
        program.release("s")
        program.keep("r", saved)
        assert program.take("t", "r", saved, moves=False) == saved
        np.testing.assert_array_equal(rest("t"), expected)
        assert program.take("u", "r", saved, moves=True) == saved
        np.testing.assert_array_equal(rest("u"), expected)
        assert program.take("v", "u", saved, moves=False) == saved
        np.testing.assert_array_equal(rest("v"), expected)
        for name in "tuv":
            program.release(name)
        assert program.take("w", "u", saved, moves=False) == 0
        prompt("r")
        program.keep("r", last)
        assert program.take("w", "r", last, moves=False) == 0, "nothing was saved there"
        program.release("r")


def check_stored(backend: str, folder: Path, kv_dtype: KvDtype) -> None:
    """Another request goes on from arrays of a saved place, as later sessions do; also where all
    layers have windows."""
    window, block = 40, 10  # rows of a window move within the last, shorter block
    for number, windows in enumerate([(window, None, window), (window, window)]):
        spec = keeping_windows(spec_of(windows), lambda _: window - 1 + 16)
        with loaded(backend, folder / f"stored {number}", spec, kv_dtype=kv_dtype) as program:
            for saved in (14, 38, 56, 72, 88, 104):
                for at in range(0, saved, 2):
                    compute(program, ("r", at, at + 2))
                program.save_state("r", saved, 0)
                rows = program.rows("r", 0, saved, windows=False)
                states = program.states("r", saved)
                assert rows is not None
                assert states is not None
                sizes = [(each.shape, each.dtype) for each in program.states_like(saved)]
                assert sizes == [(each.shape, each.dtype) for each in states]
                start = saved // block * block
                program.put_rows("s", 0, [each[:, :start] for each in rows], windows=False)
                for into, some in zip(program.new_states("s", saved), states, strict=True):
                    into[...] = some
                program.put_rows("s", start, [each[:, start:] for each in rows], windows=False)
                program.put_states("s", saved, [])
                for at in range(saved, saved + 10, 2):
                    expected = compute(program, ("r", at, at + 2))
                    np.testing.assert_array_equal(compute(program, ("s", at, at + 2)), expected)
                for name in "rs":
                    program.release(name)


def check_cuts(backend: str, folder: Path, kv_dtype: KvDtype) -> None:
    """Up to `cut_end`, a request goes on behind any of its newest tokens, with or without `cut`."""
    spec = WINDOWED
    end_of = cut_end(spec)
    assert end_of is not None
    with loaded(backend, folder, spec, kv_dtype=kv_dtype) as program:
        expected = answered(program, [2])
        for begin in (*range(2, KEPT, 4), *range(KEPT + 1, 80, 12)):
            end = min(end_of(begin), CONTEXT)
            end -= (end - begin) % 2
            assert end >= begin + 2
            for position in range(begin + 1, end):
                if begin > 12 and begin + 3 < position < end - 2:
                    continue
                for at in range(0, begin, 2):
                    compute(program, ("r", at, at + 2))
                for at in range(begin, end, CHUNK):
                    compute(program, ("r", at, min(at + CHUNK, end)))
                if position % 3:
                    program.cut("r", position)
                two = compute(program, ("r", position, position + 2))[0]
                np.testing.assert_array_equal(two, expected[position : position + 2])
                program.release("r")
        for at in range(0, 60, 2):
            compute(program, ("r", at, at + 2))
        with pytest.raises(RequestError, match="but its state is at 60"):
            program.cut("r", 20)
        with pytest.raises(RequestError, match="but its state is at 60"):
            compute(program, ("r", 20, 22))
        with pytest.raises(RequestError, match="but its state is at 60"):
            compute(program, ("r", 62, 64))
        program.release("r")


def check_copies(backend: str, folder: Path, kv_dtype: KvDtype) -> None:
    """Copies of tokens, each made while its rows are there, restore a request without a bit of
    difference."""
    begin, end = 20, 90
    with loaded(backend, folder, WINDOWED, kv_dtype=kv_dtype) as program:

        def prompt(name: str) -> None:
            compute(program, (name, 0, begin), rows=0)

        prompt("r")
        copies = []
        for at in range(begin, end, 2):
            compute(program, ("r", at, at + 2))
            rows = program.rows("r", at, at + 2)
            assert rows is not None
            copies.append([each.copy() for each in rows])
        assert program.rows("r", begin, end) is None, "windows have the newest only"
        assert program.rows("r", end, end + 1) is None
        expected = [compute(program, ("r", at, at + 2)) for at in range(end, CONTEXT, 2)]
        program.release("r")
        assert program.cache_digest
        for at_once in (1, 3, len(copies)):
            prompt("s")
            for start in range(0, len(copies), at_once):
                some = copies[start : start + at_once]
                joined = [np.concatenate(parts, axis=1) for parts in zip(*some, strict=True)]
                for array, new in zip(program.new_rows(2 * len(some)), joined, strict=True):
                    assert (array.dtype, array.shape) == (new.dtype, new.shape)
                program.put_rows("s", begin + 2 * start, joined)
            found = [compute(program, ("s", at, at + 2)) for at in range(end, CONTEXT, 2)]
            np.testing.assert_array_equal(found, expected)
            program.release("s")


def check_streaming(backend: str, folder: Path, kv_dtype: KvDtype) -> None:
    """Layers from disk change no bit."""
    with loaded(backend, folder, WINDOWED, kv_dtype=kv_dtype) as program:
        expected = answered(program, [2])
        for count in (3, 1):
            program.stream(count)
            np.testing.assert_array_equal(answered(program, [2]), expected)


def check_long_requests(backend: str, folder: Path, kv_dtype: KvDtype) -> None:
    """A request longer than memory is computed layer by layer; its windows stay."""
    limits, tier = replace(LIMITS, cached_tokens=40, disk_tokens=CONTEXT), MemoryKVTier(1 << 24)
    spec = windowed(LONG_SPEC)
    with loaded(backend, folder, spec, kv_dtype=kv_dtype, limits=limits, kv_tier=tier) as program:
        found = []
        for at in range(0, CONTEXT, CHUNK):
            found.append(compute(program, ("r", at, at + CHUNK))[0])
            if at == 3 * CHUNK:
                program.swap_out("r")
                compute(program, ("s", 0, 8))
                program.release("s")
        program.release("r")
        assert tier.used_bytes == 0
    limits = replace(limits, cached_tokens=2 * CONTEXT)
    with loaded(backend, folder, spec, kv_dtype=kv_dtype, limits=limits) as program:
        np.testing.assert_array_equal(np.concatenate(found), answered(program, [CHUNK]))


def check_memory(backend: str, folder: Path, kv_dtype: KvDtype) -> None:
    """Saved windows give way to those of requests, which are refused beyond the limits."""
    limits = StepLimits(
        context_tokens=CONTEXT,
        chunk_tokens=CHUNK,
        requests=4,
        cached_tokens=CONTEXT,
        saved_states=2,
        windows=1,
    )
    with loaded(backend, folder, WINDOWED, kv_dtype=kv_dtype, limits=limits) as program:

        def prompt(name: str, tokens: int) -> None:
            for at in range(0, tokens, CHUNK):
                compute(program, (name, at, min(at + CHUNK, tokens)), rows=0)

        prompt("r", 40)
        program.save_state("r", 40, 0)
        assert program.take("s", "r", 40, moves=False) == 40
        program.release("s")
        prompt("s", 100)
        assert program.take("t", "r", 40, moves=False) == 0, "the saved one made room"
        program.release("s")
        prompt("u", 64)
        with pytest.raises(RequestError, match="tokens under way"):
            prompt("v", 30)


CHECKS = (
    check_against_all_tokens,
    check_bits,
    check_blocks,
    check_requests,
    check_prefixes,
    check_stored,
    check_cuts,
    check_copies,
    check_long_requests,
    check_memory,
)


def test_windows_are_kept_where_the_context_is_longer() -> None:
    for context, expected in ((58, False), (59, True)):
        assert (
            can_keep_windows(SPEC, "float32", context_tokens=context, chunk_tokens=CHUNK)
            is expected
        )
    assert not can_keep_windows(SPEC, "int4", context_tokens=CONTEXT, chunk_tokens=CHUNK)
    full = plain_spec(num_layers=1)
    assert not can_keep_windows(full, "float32", context_tokens=4096, chunk_tokens=CHUNK)


@pytest.mark.parametrize("check", [*CHECKS, check_streaming])
def test_made_up_numbers(check: Any, tmp_path: Path) -> None:
    check("null", tmp_path, "float32")


@pytest.mark.parametrize(
    "kv_dtype",
    [
        "float32",
        pytest.param(
            "int8",
            marks=shown_in_parts("multiprocess/test_saved_states.py", "e2e/test_kv_dtypes.py"),
        ),
    ],
)
def test_onnx_runtime(kv_dtype: str, tmp_path: Path) -> None:
    run_module("tests.contract.test_windowed_layers", tmp_path, kv_dtype)


if __name__ == "__main__":
    (of_codes,) = (each for each in get_args(KvDtype) if each == sys.argv[2])
    # ONNX Runtime's layers come from disk only where memory can be put over mappings.
    for one in (*CHECKS, check_streaming) if can_put_memory_over_mappings() else CHECKS:
        one("ort", Path(sys.argv[1]), of_codes)
