"""New tokens attend by the operator of kernels/native: against the formula, and bit for bit
whatever else is in the step."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edge_kernels import LIBRARY, kernels
from numpy.typing import NDArray

from edge.backends.onnx.runtime import ort
from edge.kernels.attention.onnx import AttentionNames, CacheNames, takes_counts
from edge.kernels.attention.onnx import attention as attention_face
from edge.kernels.attention.reference import PackedAttention, attention
from edge.kernels.attention.tiles import joined_tile_values, tile_values
from edge.kernels.kv_cache.cache_size import cache_row
from edge.kernels.kv_cache.channel_cache import dequantize, quantize
from edge.kernels.onnx_graph import CPU, EDGE, OnnxGraph
from edge.kernels.rope.reference import rope, rope_tables
from edge.offload.kv.window_rows import WindowRows

pytestmark = pytest.mark.skipif(
    kernels() == "plain", reason="this processor has no fast kernels: not run"
)

Array = NDArray[Any]
MIB = 1 << 20
CONTEXT = 1600
"""Rows of a cache: keys are summed up in parts of 512."""


@dataclass
class Case:
    """A step of several requests, of this form."""

    last: tuple[int, ...]
    """The number of each request's newest key."""
    rows: int = 1
    """New tokens of each request."""
    num_heads: int = 8
    num_kv_heads: int = 2
    size: int = 64
    turned: int = 64
    interleaved: bool = False
    is_packed: bool = True
    has_codes: bool = False
    has_sinks: bool = False
    turns: tuple[int, ...] = ()
    scale: float = 0.125
    window: int = 0
    cap: float = 0
    sees_all: bool = False
    is_joined: bool = False
    """A key and its value are both a row of the one cache and of the other."""
    kept: int = 0
    """Rows of a cache that has the newest keys only; 0: it has all."""
    feeds: dict[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        random, batch, rows = np.random.default_rng(0), len(self.last), self.rows
        heads, size = self.num_heads + 2 * self.num_kv_heads, self.size
        cache = batch, self.num_kv_heads, CONTEXT, size
        self.query, self.keys, self.values = np.split(
            random.standard_normal((batch, rows, heads, size)).astype(np.float32),
            [self.num_heads, self.num_heads + self.num_kv_heads], axis=2,
        )  # fmt: skip
        if self.is_joined:
            shape = batch, rows, self.num_heads, 2 * size
            self.query = random.standard_normal(shape).astype(np.float32)
        self.past = random.standard_normal((2, *cache)).astype(np.float32)
        frequencies = 100.0 ** -np.arange(0, 1, 2 / self.turned) if self.turned else np.zeros(0)
        self.cos, self.sin = rope_tables(frequencies.astype(np.float32), length=CONTEXT)
        self.sinks = random.standard_normal(self.num_heads).astype(np.float32)
        self.scales = (0.02 + 0.01 * random.random((2, self.num_kv_heads, size))).astype(np.float32)
        if self.has_codes:
            self.past = np.clip(self.past, -1.5, 1.5)
            self.past = np.stack([
                np.stack([quantize(each.swapaxes(0, 1), scales, bits=8).swapaxes(0, 1)
                          for each in caches])
                for caches, scales in zip(self.past, self.scales, strict=True)
            ])  # fmt: skip
        flat = {name: getattr(self, name).reshape(batch, rows, -1) for name in ("keys", "values")}
        query = self.query.reshape(batch, rows, -1)
        packed = np.concatenate([query, *flat.values()], axis=-1)
        self.feeds = {
            "query": packed if self.is_packed else query,
            **({} if self.is_packed else {"key": flat["keys"], "value": flat["values"]}),
            "past_keys": self.kept_rows(self.past[0]), "past_values": self.kept_rows(self.past[1]),
            "last": np.asarray(self.last, np.int32),
            **({"cos": self.cos, "sin": self.sin} if self.turned else {}),
            **({"turns": np.asarray(self.turns)[:, None] + np.arange(rows)} if self.turns else {}),
            **({"sinks": self.sinks} if self.has_sinks else {}),
            **({"sees_all": np.asarray(True)} if self.sees_all else {}),
            **({"key_scales": self.scales[0], "value_scales": self.scales[1]}
               if self.has_codes else {}),
        }  # fmt: skip

    def kept_rows(self, caches: Array) -> Array:
        """Of [batch, kv_heads, CONTEXT, size], those that are there before the step."""
        if not self.kept:
            return caches
        ring, rows = (
            np.zeros_like(caches[:, :, : self.kept]),
            WindowRows(window=self.window, kept=self.kept),
        )
        for index, last in enumerate(self.last):
            tokens = last + 1 - self.rows
            ring[index, :, : rows.rows(tokens)] = caches[index, :, rows.first(tokens) : tokens]
        return ring

    def open(self, *, threads: int = 1) -> ort.InferenceSession:
        graph = OnnxGraph("new_tokens")
        for name, array in self.feeds.items():
            graph.input(name, array.dtype.type, list(array.shape))
        names = (
            "query", "key", "value", "past_keys", "past_values", "last", "cos", "sin", "turns",
            "sinks", "key_scales", "value_scales", "counts", "unrounded", "sees_all",
        )  # fmt: skip
        found = graph.nodes(
            "CodeAttention" if self.has_codes else "Attention",
            *(name if name in self.feeds else "" for name in names),
            outputs=3, domain=EDGE, heads=self.num_heads, kv_heads=self.num_kv_heads,
            size=self.size, turned=self.turned, interleaved=int(self.interleaved),
            scale=int(np.float32(self.scale).view(np.uint32)), window=self.window,
            is_ring=int(bool(self.kept)), cap=int(np.float32(self.cap).view(np.uint32)),
            is_joined=int(self.is_joined),
        )  # fmt: skip
        kind = np.int8 if self.has_codes else np.float32
        shape = list(self.feeds["past_keys"].shape)
        graph.output(found[0], "output", np.float32, ["batch", "rows", "columns"])
        graph.output(found[1], "present_keys", kind, shape)
        graph.output(found[2], "present_values", kind, shape)
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 4
        options.register_custom_ops_library(str(LIBRARY))
        return ort.InferenceSession(graph.build(), options, providers=["CPUExecutionProvider"])

    def run(self, *, threads: int = 1) -> list[Array]:
        results: list[Array] = self.open(threads=threads).run(None, self.feeds)
        return results

    def alone(self, index: int, row: int | None = None) -> Case:
        """The step of one request, or of one of its rows, whose keys before it are in the cache."""
        other = replace(self, last=self.last[index : index + 1])
        whole = ("cos", "sin", "sinks", "key_scales", "value_scales", "sees_all")
        feeds = {k: v if k in whole else v[index : index + 1] for k, v in self.feeds.items()}
        if row is not None:
            at = self.last[index] + 1 + row - self.rows
            other = replace(other, rows=1, last=(at,))
            for name in {"query", "key", "value", "turns"} & set(feeds):
                feeds[name] = feeds[name][:, row : row + 1]
            feeds["last"] = np.asarray([at], np.int32)
        other.feeds = feeds
        return other

    def expected(self, index: int) -> tuple[Array, ...]:
        """Output, keys and values of one request by the formulas."""
        first = self.last[index] + 1 - self.rows
        at = (self.turns[index] if self.turns else first) + np.arange(self.rows)
        query, keys = self.query[index], self.keys[index]
        if self.turned:
            angles = self.cos[at], self.sin[at]
            query = rope(query, *angles, interleaved=self.interleaved)
            keys = rope(keys, *angles, interleaved=self.interleaved)
        past = self.past[:, index, :, :first].swapaxes(1, 2)
        new = [keys, self.values[index]]
        if self.has_codes:
            new = [quantize(x, s, bits=8) for x, s in zip(new, self.scales, strict=True)]
        present = [np.concatenate(both) for both in zip(past, new, strict=True)]
        read = present
        if self.has_codes:
            read = [dequantize(x, s, bits=8) for x, s in zip(present, self.scales, strict=True)]
        if self.is_joined:
            read = [np.concatenate(read, axis=-1)] * 2
        sinks = self.sinks if self.has_sinks else None
        output = attention(
            query, *read, position=first, scale=self.scale, sinks=sinks,
            window=self.window or None, soft_cap=self.cap or None, sees_all=self.sees_all,
        )  # fmt: skip
        if self.kept:
            gone = WindowRows(window=self.window, kept=self.kept).first(first + self.rows)
            present = [each[gone:] for each in present]
        return output.reshape(self.rows, -1), *present


FORMS: dict[str, dict[str, Any]] = {
    "packed": {},
    "apart": {"is_packed": False},
    "every head its own keys": {"num_kv_heads": 8},
    "many heads share keys": {"num_heads": 20, "num_kv_heads": 1},
    "half turned": {"turned": 32, "interleaved": True},
    "not turned": {"turned": 0, "is_packed": False, "size": 72},
    "other positions": {"turns": (3, 0, 11)},
    "sinks": {"has_sinks": True, "size": 128, "turned": 128},
    "a window": {"window": 37},
    "a window over parts": {"window": 700, "cap": 2.0},
    "the newest keys": {"window": 37, "kept": 90, "has_sinks": True},
    "few of the newest keys": {"window": 600, "kept": 607},
    "rows see each other": {"sees_all": True},
    "and what their windows have": {"sees_all": True, "window": 500, "cap": 2.0},
    "and more than a ring has": {"sees_all": True, "window": 37, "kept": 50, "has_sinks": True},
    "the largest heads": {"num_heads": 4, "size": 512, "turned": 512, "scale": 0.05},
}


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("has_codes", [False, True], ids=["floats", "codes"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_it_is_the_formula(form: dict[str, Any], has_codes: bool, rows: int) -> None:
    assert_is_formula(Case(last=(rows - 1, 530, 1599), rows=rows, has_codes=has_codes, **form))


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    "form",
    [{"num_heads": 5, "size": 72}, {"num_heads": 29, "size": 264, "has_sinks": True, "cap": 3.0}],
    ids=["few heads", "many heads"],
)
def test_joined_keys_and_values(form: dict[str, Any], threads: int, rows: int) -> None:
    """Also alone, and row by row, with the same bits."""
    form |= {"is_joined": True, "is_packed": False, "turned": 0, "num_kv_heads": 1, "scale": 0.04}
    case = Case(last=(rows - 1, 530, 1599), rows=rows, **form)
    output = assert_is_formula(case, threads=threads)
    for index in range(len(case.last)):
        alone = case.alone(index).run()[0]
        assert np.array_equal(alone[0], output[index])
    last_row = case.alone(1, rows - 1)
    caches = "past_keys", "past_values"
    last_row.feeds |= zip(caches, case.alone(1).run()[1:], strict=True)
    assert np.array_equal(last_row.run()[0][0, 0], output[1, -1])


def assert_is_formula(case: Case, *, threads: int = 1) -> Array:
    """The output of the operator, which is what the formula says."""
    rows, has_codes = case.rows, case.has_codes
    output, *present = case.run(threads=threads)
    for index in range(len(case.last)):
        wanted, *caches = case.expected(index)
        # A new key was turned, so its code may be the next one, which rows behind it read.
        near = 2e-3 if has_codes and rows > 1 else 3e-6
        np.testing.assert_allclose(output[index], wanted, rtol=0, atol=near)
        for found, cache in zip(present, caches, strict=True):
            own = found[index, :, : len(cache)].swapaxes(0, 1)
            np.testing.assert_array_equal(own[:-rows], cache[:-rows])
            near = 1 if has_codes else 1e-6
            np.testing.assert_allclose(own[-rows:], cache[-rows:], rtol=0, atol=near)
    return output


@pytest.mark.parametrize("rows", [1, 2, 37])
@pytest.mark.parametrize("has_codes", [False, True], ids=["floats", "codes"])
@pytest.mark.parametrize("num_kv_heads", [1, 4, 8])
def test_bits_depend_on_no_other_row_and_no_number_of_threads(
    rows: int, has_codes: bool, num_kv_heads: int
) -> None:
    case = Case(
        last=(511, 512, 1300), rows=rows, has_codes=has_codes, num_kv_heads=num_kv_heads, size=32,
        turned=32, has_sinks=True,
    )  # fmt: skip
    found = case.run()
    for threads in (2, 3):
        for one, other in zip(case.run(threads=threads), found, strict=True):
            np.testing.assert_array_equal(one, other)
    case.feeds |= {"past_keys": found[1], "past_values": found[2]}
    for index in range(len(case.last)):
        for one, other in zip(case.alone(index).run(), found, strict=True):
            np.testing.assert_array_equal(one, other[index : index + 1])
        for row in {0, rows // 2, rows - 1}:
            output, *present = case.alone(index, row).run()
            np.testing.assert_array_equal(output[0, 0], found[0][index, row])
            for one, other in zip(present, found[1:], strict=True):
                np.testing.assert_array_equal(one[0], other[index])


@pytest.mark.parametrize("counts", [(1, 1, 40), (7, 1, 2), (1, 30, 1)])
@pytest.mark.parametrize("form", [{}, {"is_packed": False, "turned": 32}, {"num_kv_heads": 8}])
@pytest.mark.parametrize("has_codes", [False, True], ids=["floats", "codes"])
def test_requests_with_rows_of_their_own_numbers(
    form: dict[str, Any], has_codes: bool, counts: tuple[int, ...]
) -> None:
    """Each has the bits of a step of its own. The last rows of a step with as many of each."""
    most = max(counts)
    even = Case(last=(100, 700, 1300), rows=most, has_codes=has_codes, has_sinks=True, **form)
    of_rows = {"query", "key", "value"} & set(even.feeds)
    uneven = replace(even)
    uneven.feeds = {**even.feeds, "counts": np.asarray(counts, np.int32)}
    wanted = even.run()
    # The keys before are those of the earlier rows.
    uneven.feeds |= {"past_keys": wanted[1], "past_values": wanted[2]}
    for name in of_rows:
        own = [even.feeds[name][i, most - count :] for i, count in enumerate(counts)]
        uneven.feeds[name] = np.concatenate(own)[None]
    found = uneven.run(threads=2)
    for one, other in zip(found[1:], wanted[1:], strict=True):
        np.testing.assert_array_equal(one, other)
    own = [wanted[0][i, most - count :] for i, count in enumerate(counts)]
    np.testing.assert_array_equal(found[0], np.concatenate(own)[None])


@pytest.mark.parametrize(("window", "kept"), [(1, 1), (5, 11), (20, 32), (20, 200), (64, 64)])
@pytest.mark.parametrize("has_codes", [False, True], ids=["floats", "codes"])
def test_a_ring_has_the_bits_of_a_whole_cache(window: int, kept: int, has_codes: bool) -> None:
    """Two requests, cut into steps, of which some have more rows than it has room for."""
    of_steps = [(1, 30), (40, 1), (1, 1), (7, 20), (33, 2), (1, 29)]
    whole = Case(last=(82, 82), rows=83, window=window, has_codes=has_codes)
    wanted, *caches = whole.run(threads=2)
    ring = replace(whole, kept=kept, rows=1, last=(0, 0))
    ring.feeds |= {name: x for name, x in whole.feeds.items() if name.endswith("_scales")}
    present: Sequence[Array] = [ring.feeds["past_keys"], ring.feeds["past_values"]]
    ends = np.zeros(2, int)
    for counts in of_steps:
        rows = [slice(end, end + count) for end, count in zip(ends, counts, strict=True)]
        ends += counts
        ring.feeds |= {
            "query": np.concatenate([whole.feeds["query"][i, r] for i, r in enumerate(rows)])[None],
            "counts": np.asarray(counts, np.int32), "last": (ends - 1).astype(np.int32),
            "past_keys": present[0], "past_values": present[1],
        }  # fmt: skip
        found, *present = ring.run(threads=2)
        np.testing.assert_array_equal(
            found[0], np.concatenate([wanted[i, r] for i, r in enumerate(rows)])
        )
        for one, other in zip(present, caches, strict=True):
            for i, end in enumerate(ends):
                first = WindowRows(window=window, kept=kept).first(end)
                np.testing.assert_array_equal(one[i, :, : end - first], other[i, :, first:end])


@pytest.mark.parametrize("counts", [(0, 3), (4, -1), (1, 1), (2, 2), (3, 1 << 30)])
def test_other_numbers_of_rows_than_there_are_are_refused(counts: tuple[int, int]) -> None:
    case = Case(last=(20, 30), rows=3)
    feeds = dict(case.feeds)
    feeds["query"] = case.feeds["query"][:1]
    case.feeds = {**feeds, "counts": np.asarray(counts, np.int32)}
    with pytest.raises(Exception, match="rows of"):
        case.run()


def test_keys_and_values_stay_where_they_are() -> None:
    case = Case(last=(600,))
    session, binding = case.open(), None
    caches = [ort.OrtValue.ortvalue_from_numpy(case.feeds[f"past_{n}"]) for n in ("keys", "values")]
    binding = session.io_binding()
    for name, array in case.feeds.items():
        if not name.startswith("past_"):
            binding.bind_cpu_input(name, array)
    for name, cache in zip(("keys", "values"), caches, strict=True):
        binding.bind_ortvalue_input(f"past_{name}", cache)
        binding.bind_ortvalue_output(f"present_{name}", cache)
    binding.bind_output("output")
    session.run_with_iobinding(binding)
    for mine, expected in zip(caches, case.run()[1:], strict=True):
        np.testing.assert_array_equal(mine.numpy(), expected)


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("at", [0, 3, 20, 600])
@pytest.mark.parametrize("name", ["past_keys", "past_values"])
def test_what_is_no_number_does_not_become_one(name: str, at: int, rows: int) -> None:
    case = Case(last=(700, 700), rows=rows)
    case.feeds[name][0, 0, at, 5] = np.nan
    output = case.run()[0].reshape(2, rows, case.num_heads, -1)
    of_keys = case.num_heads // case.num_kv_heads
    where = ... if name == "past_keys" else (..., 5)
    assert np.isnan(output[0, :, :of_keys][where]).all()
    assert np.isfinite(output[0, :, of_keys:]).all()
    assert np.isfinite(output[1]).all()


@pytest.mark.parametrize("has_codes", [False, True], ids=["floats", "codes"])
def test_no_row_sees_what_stands_behind_it(has_codes: bool) -> None:
    case = Case(last=(520,), rows=9, has_codes=has_codes)
    before = case.run()[0]
    case.feeds["query"][0, 5:] = np.nan
    np.testing.assert_array_equal(case.run()[0][0, :5], before[0, :5])


@pytest.mark.parametrize(
    ("is_taken", "bits", "changes"),
    [
        (True, 8, {}),
        (True, 4, {}),
        (True, 8, {"window": 5, "soft_cap": 3.0}),
        (True, 8, {"num_kv_heads": 4}),
        (False, 8, {"head_size": 528, "turned_elements": 0}),
    ],
    ids=str,
)
def test_graphs_have_it_where_it_knows_the_form(
    is_taken: bool, bits: int, changes: dict[str, Any]
) -> None:
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_size": 32, "turned_elements": 32}
    form = PackedAttention(**{**sizes, **changes})
    graph = OnnxGraph("layer", replace(CPU, has_own_attention=True))
    dtype, elements = cache_row(form.head_size, bits)
    cache, scales = [1, form.num_kv_heads, 9, elements], [1, form.num_kv_heads, 1, form.head_size]
    half = form.turned_elements // 2
    names = CacheNames(
        keys=graph.input("k", dtype, [*cache]), values=graph.input("v", dtype, [*cache]), bits=bits,
        key_scales=graph.input("ks", np.float32, [*scales]),
        value_scales=graph.input("vs", np.float32, [*scales]),
    )  # fmt: skip
    inputs = AttentionNames(
        cos=graph.input("cos", np.float32, [9, half]) if half else "",
        sin=graph.input("sin", np.float32, [9, half]) if half else "",
        positions="", lengths=graph.input("lengths", np.int32, [1]),
        total=graph.input("total", np.int32, []),
        counts=graph.input("counts", np.int32, [1]) if is_taken else "",
    )  # fmt: skip
    assert takes_counts(form, bits, graph.provider) == is_taken
    packed = graph.input("qkv", np.float32, [1, "tokens", form.columns])
    found = attention_face(graph, packed, names, inputs, form)
    graph.output(found[0], "output", np.float32, [1, "tokens", form.num_heads * form.head_size])
    operator = {8: b"CodeAttention", 4: b"NibbleAttention"}[bits]
    assert (operator in graph.build()) == is_taken


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read and reset as in Linux")
@pytest.mark.parametrize("has_codes", [False, True])
def test_it_takes_the_memory_that_is_planned_and_none_for_scores(has_codes: bool) -> None:
    """256 rows of 64 heads behind 1,600 keys have 100 MiB of scores."""
    case = Case(last=(1599,), rows=256, num_heads=64, num_kv_heads=1, has_codes=has_codes)
    form = PackedAttention(num_heads=64, num_kv_heads=1, head_size=64, turned_elements=64)
    session = case.open()
    output_bytes = session.run(None, case.feeds)[0].nbytes  # everything that stays is made
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now
    before = peak_bytes()
    session.run(None, case.feeds)
    kept_bytes = sum(case.feeds[name].nbytes for name in ("past_keys", "past_values"))
    planned = 4 * tile_values(form, 8 if has_codes else None, 256, 1600) + output_bytes + kept_bytes
    assert peak_bytes() - before < planned + 8 * MIB


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read and reset as in Linux")
def test_joined_keys_take_the_memory_that_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many queries as parts of their keys are computed apart for: 48 MiB of results."""
    monkeypatch.setitem(globals(), "CONTEXT", 16_000)
    case = Case(
        last=(15_999,), rows=37, num_heads=20, num_kv_heads=1, size=256, turned=0,
        is_packed=False, is_joined=True,
    )  # fmt: skip
    session = case.open()
    session.run(None, case.feeds)  # everything that stays is made
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_bytes()
    session.run(None, case.feeds)
    assert peak_bytes() - before < 4 * joined_tile_values(20, 256, 37, 16_000) + 4 * MIB


def peak_bytes() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def changed(name: str, array: Array, **form: Any) -> tuple[Case, dict[str, Array]]:
    case = Case(last=(5, 6), **form)
    return case, {**case.feeds, name: array}


@pytest.mark.parametrize(
    ("name", "array", "form"),
    [
        ("last", np.asarray([5, CONTEXT], np.int32), {}),
        ("last", np.asarray([-1, 5], np.int32), {}),
        ("last", np.asarray([5, 1], np.int32), {"rows": 3}),
        ("turns", np.asarray([[1], [CONTEXT]]), {"turns": (1, 2)}),
        ("turns", np.asarray([[-1], [2]]), {"turns": (1, 2)}),
    ],
    ids=["behind the end", "before the start", "too few", "no such angle", "no angle at all"],
)
def test_a_number_outside_is_refused(name: str, array: Array, form: dict[str, Any]) -> None:
    case, feeds = changed(name, array, **form)
    with pytest.raises(
        Exception, match=r"a key behind the end|keys before the first|no such angle"
    ):
        case.open().run(None, feeds)


@pytest.mark.parametrize(
    "form",
    [
        {"size": 20, "turned": 20},
        {"size": 520, "turned": 0},
        {"num_heads": 7},
        {"turned": 66},
        {"window": -1},
        {"is_joined": True, "turned": 0},
        {"is_joined": True, "turned": 0, "num_kv_heads": 1, "window": 3},
        {"is_joined": True, "turned": 0, "num_kv_heads": 1, "has_codes": True},
        {"is_joined": True, "num_kv_heads": 1},
    ],
    ids=str,
)
def test_another_form_of_heads_is_refused(form: dict[str, Any]) -> None:
    with pytest.raises(Exception, match="heads of another form"):
        Case(last=(1,), **form).open()


def test_joined_keys_lie_apart_from_queries() -> None:
    case = Case(last=(5,), is_joined=True, is_packed=False, turned=0, num_kv_heads=1)
    del case.feeds["key"], case.feeds["value"]
    with pytest.raises(Exception, match="joined keys without rows"):
        case.run()


def test_a_ring_shorter_than_its_window_is_refused() -> None:
    case = Case(last=(5,), window=9, kept=9)
    case.feeds |= {name: case.feeds[name][:, :, :8] for name in ("past_keys", "past_values")}
    with pytest.raises(Exception, match="no room for a window"):
        case.run()
