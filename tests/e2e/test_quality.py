"""`edge quality` measures what it says: against itself, against transformers, and in order."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

import edge
from edge.demos.bundled import MODEL
from edge.demos.corpus import story
from edge.demos.world import PEOPLE
from edge.progress import Progress
from edge.studies.text_windows import bundled_text, windows_of
from edge.text import Tokenizer
from edge.weights.checkpoint import Checkpoint
from edge.weights.format_sizes import bytes_per_weight
from edge.weights.formats import Dtype, weight_format
from tests.support.checkpoints import TinyCheckpoint
from tests.support.gguf_files import Type, write_gguf
from tests.support.processes import PATIENCE_S, edge_process, poll_until
from tests.support.processes import edge as run_edge
from tests.support.slow_cases import shown_in_parts

SIZES: dict[str, Any] = {"windows": 3, "window_tokens": 256}
FORMATS: tuple[Dtype, ...] = ("float32", "int8", "int4", "int4-pure")


@pytest.fixture(scope="module")
def cluster() -> Iterator[edge.Cluster]:
    with edge.Cluster.local(1, threads=1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def known_text() -> str:
    """What the bundled model was taught on; of other prose it expects nothing right."""
    random = Random(1)
    return "\n\n".join(story(person, random) for _ in range(12) for person in PEOPLE)


@pytest.fixture(scope="module")
def by_format(cluster: edge.Cluster, known_text: str) -> dict[str, edge.Quality]:
    return {
        name: cluster.quality(MODEL, dtype=name, text=known_text, progress=False, **SIZES)
        for name in FORMATS
    }


def test_float32_against_itself(by_format: dict[str, edge.Quality]) -> None:
    found = by_format["float32"]
    assert found.positions == 3 * 255
    assert found.measured.p99_kl < 1e-5
    assert found.measured.same_top == 1.0
    assert found.measured.perplexity == pytest.approx(found.reference.perplexity, rel=1e-6)
    assert found.measured.tokens_per_s > 0


def test_fewer_bits_are_worse(by_format: dict[str, edge.Quality]) -> None:
    rows = [by_format[name].measured for name in FORMATS]
    # Not so the perplexity: of so little text, rounding may make it less by chance.
    for field in ("mean_kl", "p99_kl"):
        values = [getattr(row, field) for row in rows]
        assert values == sorted(values), field
        assert len(set(values)) == len(values), field
    same = [row.same_top for row in rows]
    assert same == sorted(same, reverse=True)
    sizes = [row.bytes_per_weight for row in rows]
    assert (sizes[0], sizes[1], sizes[3]) == (4.0, 1.125, 0.625)
    assert 0.625 < sizes[2] < 1.125


def test_perplexity_is_that_of_transformers(
    by_format: dict[str, edge.Quality], known_text: str
) -> None:
    independent, tokenizer = TinyCheckpoint(MODEL), Tokenizer.open(MODEL)
    windows = windows_of(tokenizer.encode, known_text, **SIZES)
    assert all(window[0] == tokenizer.token_id("<|begin|>") for window in windows)
    losses = [
        torch.nn.functional.cross_entropy(
            torch.from_numpy(independent.logits(window)[:-1]), torch.tensor(window[1:])
        ).item()
        for window in windows
    ]
    expected = float(np.exp(np.mean(losses)))
    assert by_format["float32"].reference.perplexity == pytest.approx(expected, rel=1e-3)


def test_a_copy_elsewhere_as_reference(
    cluster: edge.Cluster, tmp_path: Path, known_text: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(MODEL, copy)
    seen: list[Progress] = []
    found = cluster.quality(
        MODEL,
        dtype="float32",
        against=copy,
        text=known_text,
        windows=1,
        window_tokens=64,
        progress=seen.append,
    )
    assert found.reference.model == "copy"
    assert found.measured.mean_kl < 1e-5
    read = [(event.done, event.total) for event in seen if event.phase == "evaluate"]
    nbytes = 63 * 768 * 4
    assert read == [(0, nbytes), (nbytes, nbytes)] * 2


def test_another_vocabulary_is_refused(cluster: edge.Cluster, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(MODEL, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:-100]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(edge.RequestError, match="make other tokens of the same text"):
        cluster.quality(MODEL, against=other, progress=False)


def test_windows_longer_than_the_model_are_refused(cluster: edge.Cluster) -> None:
    with pytest.raises(edge.RequestError, match="context_tokens must be 1 to 512"):
        cluster.quality(MODEL, window_tokens=1024, windows=1, progress=False)
    with pytest.raises(edge.RequestError, match="do not fit a context of 100"):
        cluster.quality(MODEL, context_tokens=100, progress=False)
    with pytest.raises(edge.RequestError, match="window_tokens must be 64 to 2048, not 8"):
        cluster.quality(MODEL, window_tokens=8, progress=False)


def test_the_bundled_text_is_long_enough_for_large_vocabularies() -> None:
    # In English prose their tokens have 4.2 to 4.6 characters.
    assert len(bundled_text()) / 4.6 > 6 * 384


def test_bytes_per_weight_leave_out_the_embedding() -> None:
    with Checkpoint.open(MODEL) as checkpoint:
        spec = checkpoint.spec
    # Rows of 128 or 352 weights: the second have three blocks of 128, the last not full.
    assert 0.5 + 4 / 128 < bytes_per_weight(spec, weight_format(spec, "int4-pure", 128)) < 0.6


SMALL = ("--windows", "2", "--window-tokens", "64", "--local", "1", "--threads", "1")


def test_the_command_line(tmp_path: Path, known_text: str) -> None:
    text = tmp_path / "text"
    text.write_text(known_text)
    done = run_edge("quality", MODEL, *SMALL, "--text", text, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    row = {"model", "format", "perplexity", "mean_kl", "p99_kl", "same_top"}
    row |= {"bytes_per_weight", "tokens_per_s"}
    whole = {"text", "windows", "window_tokens", "positions", "reference", "measured"}
    assert found.keys() == whole
    assert found["reference"].keys() == found["measured"].keys() == row
    assert found["positions"] == 2 * 63
    assert found["measured"]["format"] == "int4, fast"
    assert 0 < found["measured"]["mean_kl"] < 1
    shown = run_edge("quality", MODEL, *SMALL, "--dtype", "int8")
    assert shown.code == 0, shown.err
    assert "perplexity" in shown.out
    assert "same top" in shown.out
    assert "100.0%" in shown.out


def test_a_gguf_file_as_reference(tmp_path: Path, known_text: str) -> None:
    """Compared with what the file's codes stand for, as transformers computes that."""
    text, file = tmp_path / "text", tmp_path / "other.gguf"
    text.write_text(known_text)
    marks = {"ggml.bos_token_id": 1, "ggml.eos_token_id": 2, "ggml.add_bos_token": True}
    theirs = write_gguf(file, MODEL, kind=Type.Q4_0, tokenizer_settings=marks)
    options = ("--dtype", "float32", "--against", file, "--text", text, "--json")
    done = run_edge("quality", MODEL, *SMALL, *options)
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["reference"]["model"] == "other.gguf"
    ours, tokenizer = TinyCheckpoint(MODEL), Tokenizer.open(MODEL)
    windows = windows_of(tokenizer.encode, known_text, windows=2, window_tokens=64)
    expected, measured = (
        torch.cat([torch.from_numpy(each.logits(window)[:-1]) for window in windows]).log_softmax(1)
        for each in (theirs, ours)
    )
    losses = (expected.exp() * (expected - measured)).sum(1)
    assert losses.mean() > 1e-3
    assert found["measured"]["mean_kl"] == pytest.approx(losses.mean().item(), rel=1e-2)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"\xff\xfe", "is not UTF-8 text"), (b"short", "give a longer text")],
)
def test_a_text_of_no_use_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    text = tmp_path / "text"
    text.write_bytes(content)
    refused = run_edge("quality", MODEL, *SMALL, "--text", text)
    assert refused.code == 1
    assert message in refused.err
    assert refused.err.count("\n") == 1


@shown_in_parts("multiprocess/test_interrupts.py")
def test_ctrl_c_leaves_no_logits_behind(tmp_path: Path, known_text: str) -> None:
    cache, text = tmp_path / "cache", tmp_path / "text"
    text.write_text(5 * known_text)
    many = ("--windows", "50", "--local", "1", "--threads", "1", "--text", text)
    with edge_process("quality", MODEL, *many, environment={"EDGE_CACHE": str(cache)}) as process:
        opened = Path(f"/proc/{process.pid}/fd")

        def has_logits() -> bool:
            with contextlib.suppress(OSError):
                return any(
                    file.readlink().is_relative_to(cache) and file.stat().st_size > 1 << 20
                    for file in opened.iterdir()
                )
            return False

        poll_until(has_logits)
        process.send_signal(signal.SIGINT)
        _out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, err
    assert [each for each in cache.iterdir() if each.is_file()] == []
