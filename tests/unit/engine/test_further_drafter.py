"""The guesses of a model's further head, by the formula of its family."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from edge.backends.null.backend import NullBackend
from edge.backends.ort.backend import OrtBackend
from edge.backends.registry import open_backend
from edge.backends.triton.backend import TritonBackend
from edge.backends.webgpu.backend import WebGpuBackend
from edge.engine.further_drafter import FurtherHeadDrafter
from edge.errors import RequestError
from edge.models.spec import FURTHER_HEAD
from edge.protocol.step import StepLimits
from edge.weights.checkpoint import Checkpoint
from edge.weights.formats import weight_format
from edge.weights.further import further_in
from tests.support.checkpoints import TinyCheckpoint, make_checkpoint
from tests.support.further_heads import add_further_head
from tests.support.processes import run_module
from tests.support.slow_cases import shown_in_parts
from tests.support.triton_shards import shipped

LIMITS = StepLimits(context_tokens=64, chunk_tokens=8, requests=1, cached_tokens=64)
TOKENS, GUESSES = 30, 4


def drafter(checkpoint: TinyCheckpoint, folder: Path) -> FurtherHeadDrafter:
    with Checkpoint.open(checkpoint.path, further_head=True) as opened:
        head = further_in(opened.spec, weight_format(opened.spec, "float32"))
        assert head is not None
        source = opened.further_source(
            head.weight_format, cache_root=folder, on_progress=lambda _: None
        )
        with closing(source):
            weights = shipped(
                head.layout, source, head.weight_format, folder / "head", fingerprint="head"
            )
    program = open_backend("ort", threads=1).load(
        head.spec, head.layout, weights, head.weight_format, limits=LIMITS
    )
    return FurtherHeadDrafter(program, LIMITS)


@pytest.mark.parametrize(
    ("family", "own_tables"),
    [
        ("glm4_moe", True),
        *(
            pytest.param(family, False, marks=shown_in_parts("e2e/test_guessed_tokens.py"))
            for family in ("glm4_moe_lite", "deepseek_v3", "qwen3_5", "qwen3_5_moe")
        ),
    ],
)
def test_guesses_follow_the_formula(tmp_path: Path, family: str, own_tables: bool) -> None:
    run_module("tests.unit.engine.test_further_drafter", tmp_path, family, int(own_tables))


def _check(tmp_path: Path, family: str, own_tables: bool) -> None:
    """However the states come: a prompt in chunks, tokens one by one, guesses that were wrong."""
    checkpoint = make_checkpoint(tmp_path / family, family)
    tokens = checkpoint.prompt(TOKENS)
    states = checkpoint.states(tokens)
    reference = add_further_head(checkpoint, own_tables=own_tables)
    with closing(drafter(checkpoint, tmp_path)) as made:
        made.follow("a", 0, tokens[:20], states[:20])
        made.follow("a", 20, tokens[20:21], states[20:21])
        found = []
        for end in range(22, TOKENS + 1):
            guesses = list(made.propose("a", tokens, end, GUESSES))
            assert guesses == reference.guesses(states[: end - 1], tokens[:end], GUESSES)
            found.append(tuple(guesses))
            made.follow("a", end - 1, tokens[end - 1 : end], states[end - 1 : end])
        assert len(set(found)) > len(found) // 2, "they depend on the tokens"
        made.follow("b", 0, tokens[:5], states[:5])
        assert not made.propose("a", tokens, TOKENS, 1), "its states are forgotten"
        assert not made.propose("b", tokens, 5, 1), "the state of the last token is not known"
        assert list(made.propose("b", tokens, 6, 1)) == reference.guesses(states[:5], tokens[:6], 1)
        made.forget("b")
        made.forget("b")
        assert not made.propose("b", tokens, 6, 1)


def test_missing_states_make_no_error(tmp_path: Path) -> None:
    run_module("tests.unit.engine.test_further_drafter", tmp_path)


def _check_missing_states(tmp_path: Path) -> None:
    """A request that goes on where its states are not known: from a cache, or after a loss."""
    checkpoint = make_checkpoint(tmp_path / "glm4_moe", "glm4_moe")
    tokens = checkpoint.prompt(TOKENS)
    states = checkpoint.states(tokens)
    add_further_head(checkpoint)
    with closing(drafter(checkpoint, tmp_path)) as made:
        made.follow("a", 9, tokens[9:12], states[9:12])
        assert len(made.propose("a", tokens, 13, 2)) == 2
        made.follow("a", 15, tokens[15:16], states[15:16])
        assert len(made.propose("a", tokens, 17, 3)) == 3
        made.forget("a")
        made.follow("a", 9, tokens[9:13], states[9:13])
        again = [*made.propose("a", tokens, 14, 3)]
        made.follow("b", 9, tokens[9:12], states[9:12])
        made.follow("b", 8, tokens[8:13], states[8:13])  # of which some are computed again
        assert [*made.propose("b", tokens, 14, 3)] == again
        for start in range(0, 80, 8):
            made.follow("a", start, tokens[:8], states[:8])
        assert not made.propose("a", [*range(81)], 81, 1), "its context is full"


def test_only_cpus_compute_it(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "glm4_moe", "glm4_moe")
    add_further_head(checkpoint)
    with Checkpoint.open(checkpoint.path, further_head=True) as opened:
        assert FURTHER_HEAD in opened.spec.needs
    with Checkpoint.open(checkpoint.path) as opened:
        assert FURTHER_HEAD not in opened.spec.needs
    assert FURTHER_HEAD not in OrtBackend.lacks
    for other in (NullBackend, TritonBackend, WebGpuBackend):
        assert FURTHER_HEAD in other.lacks


def test_a_checkpoint_without_a_head_is_refused(
    tiny_checkpoint: Callable[..., TinyCheckpoint],
) -> None:
    with pytest.raises(RequestError, match="no further head to guess with"):
        Checkpoint.open(tiny_checkpoint("llama").path, further_head=True)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        _check(Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "1")
    else:
        _check_missing_states(Path(sys.argv[1]))
