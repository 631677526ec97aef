"""Experts that are one node give what experts give that are a branch each."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge.backends.ort.expert_stacks import is_shared_out, stacked_kinds, written_stacks
from edge.backends.shard_arrays import ShardArrays
from edge.offload import DerivedCache
from edge.profiling.random_weights import written_weights
from tests.support import stacked_experts
from tests.support.formats import uniform_format
from tests.support.processes import run_module
from tests.support.slow_cases import shown_in_parts
from tests.support.small_disk import small_disk


@pytest.mark.parametrize(
    "dtype",
    ["int4", pytest.param("int8", marks=shown_in_parts("contract/test_operators.py"))],
)
def test_whole_and_in_uneven_parts_and_where_there_is_no_room_to_pack_them(
    tmp_path: Path, dtype: str
) -> None:
    run_module("tests.support.stacked_experts", tmp_path, dtype)


def test_blocks_of_files_of_several_types(tmp_path: Path) -> None:
    run_module("tests.support.stacked_experts", tmp_path, "files")


def test_a_disk_without_room_for_what_they_are_packed_from(tmp_path: Path) -> None:
    _what, layout = next(stacked_experts.layouts())
    form = uniform_format("int4")
    with (
        written_weights(layout, form, tmp_path) as weights,
        small_disk(tmp_path / "disk", 128 << 10) as disk,
    ):
        arrays = ShardArrays(layout, weights, form)
        kinds = stacked_kinds(arrays, hidden_size=stacked_experts.SPEC.hidden_size, threads=2)
        assert len(kinds) == stacked_experts.STACKED_LAYERS
        with written_stacks(arrays, kinds, DerivedCache(disk, 1 << 30)) as stacks:
            assert not stacks.by_layer
            assert stacks.folder == weights.path.parent
        assert not list(disk.rglob("experts.*"))


@pytest.mark.parametrize(("threads", "num_layers"), [(1, 2), (2, 2), (16, 0)])
def test_threads_whose_results_have_no_room(tmp_path: Path, threads: int, num_layers: int) -> None:
    _what, layout = next(stacked_experts.layouts())
    form = uniform_format("int4")
    with written_weights(layout, form, tmp_path) as weights:
        arrays = ShardArrays(layout, weights, form)
        hidden_size = stacked_experts.SPEC.hidden_size
        kinds = stacked_kinds(arrays, hidden_size=hidden_size, threads=threads)
    assert len(kinds) == num_layers


@pytest.mark.parametrize(
    ("top_k", "threads", "is_even"),
    [(4, 2, True), (8, 3, True), (4, 3, False), (3, 2, True), (5, 4, False), (2, 16, True)],
)
def test_threads_that_would_wait_for_each_other(top_k: int, threads: int, is_even: bool) -> None:
    assert is_shared_out(top_k, threads=threads) == is_even
