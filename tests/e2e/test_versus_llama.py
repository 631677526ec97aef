"""The comparison with another program: in turn, with its own figures, and clear when it fails.

llama.cpp is not among what tests install; a program that speaks its half of the conversation stands
here for it, and everything on this side is real.
"""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import edge
from edge.errors import RequestError
from edge.studies.versus_llama_cpp import Llama, compare
from tests.support.processes import edge as run_edge

MODEL = Path("demos/model")

OTHER = """#!{python}
import json, sys
assert sys.argv[2] == "given.gguf" or sys.argv[2].endswith("m.gguf"), sys.argv
print(json.dumps({{"version": "9", "vocab": {vocab}}}), flush=True)
for line in sys.stdin:
    prompt, new, requests = map(int, line.split())
    if {dies}:
        sys.exit(3)
    print(json.dumps({{"prefill_s": prompt / 100, "decode_s": (new - 1) / 50}}), flush=True)
"""


class Recorded:
    """A model whose prompts are kept."""

    def __init__(self, model: edge.Model) -> None:
        self._model = model
        self.prompts: list[list[int]] = []

    def generate(self, prompt: list[int], **options: Any) -> Any:
        self.prompts.append(prompt)
        return self._model.generate(prompt, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@pytest.fixture
def other(tmp_path: Path) -> Callable[..., str]:
    """A program in the place of a Python that has llama-cpp-python."""

    def make(vocab: int, *, dies: bool = False) -> str:
        path = tmp_path / "python"
        path.write_text(OTHER.format(python=sys.executable, vocab=vocab, dies=dies))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    return make


@pytest.fixture
def vocab_size() -> int:
    return int(json.loads((MODEL / "config.json").read_text())["vocab_size"])


def test_ratios_are_taken_within_a_round(other: Callable[..., str], vocab_size: int) -> None:
    with (
        edge.Cluster.local(1, threads=1) as cluster,
        cluster.load(MODEL, context_tokens=64, concurrency=2, progress=False) as model,
        Llama(
            Path("given.gguf"),
            python=other(vocab_size),
            threads=1,
            context_tokens=64,
            requests=2,
        ) as llama,
    ):
        recorded: Any = Recorded(model)
        found = compare(recorded, llama, prompt_tokens=8, new_tokens=8, requests=2, rounds=2)
    assert found.version == "9"
    assert len({tuple(prompt) for prompt in recorded.prompts}) == 3, "none is known from before"
    assert [len(pairs) for pairs in (found.prefill, found.decode, found.batch)] == [2, 2, 2]
    assert all(theirs == pytest.approx(100) for _ours, theirs in found.prefill)
    assert all(theirs == pytest.approx(50) for _ours, theirs in found.decode)
    assert all(theirs == pytest.approx(100) for _ours, theirs in found.batch)
    value = found.to_json()
    ratios = sorted(ours / theirs for ours, theirs in found.decode)
    assert value["decode"]["ratio"]["p50"] == pytest.approx(sum(ratios) / 2)
    assert value["rounds"] == 2


def test_another_model_is_refused(other: Callable[..., str], vocab_size: int) -> None:
    with (
        edge.Cluster.local(1, threads=1) as cluster,
        cluster.load(MODEL, context_tokens=64, progress=False) as model,
        Llama(
            Path("given.gguf"), python=other(vocab_size + 1), threads=1, context_tokens=64
        ) as llama,
        pytest.raises(RequestError, match="give a file of the same model"),
    ):
        compare(model, llama, prompt_tokens=8, new_tokens=6, requests=1, rounds=1)


def test_a_program_that_ends_or_does_not_start_is_told(other: Callable[..., str]) -> None:
    with pytest.raises(RequestError, match="cannot be started"):
        Llama(Path("given.gguf"), python="/nowhere/python", threads=1, context_tokens=64)
    with (
        Llama(
            Path("given.gguf"), python=other(5, dies=True), threads=1, context_tokens=64
        ) as llama,
        pytest.raises(RequestError, match="ended without an answer"),
    ):
        llama.run(4, 4)
    with pytest.raises(RequestError, match="needs a Python with llama-cpp-python"):
        Llama(Path("given.gguf"), python="true", threads=1, context_tokens=64)


def test_the_command_line_compares(
    other: Callable[..., str], vocab_size: int, tmp_path: Path
) -> None:
    gguf = tmp_path / "m.gguf"
    gguf.touch()
    common = ["bench", MODEL, "--local", 1, "--prompt-tokens", 8, "--new-tokens", 8]
    common += ["--repeats", 1, "--warm-ups", 0]
    ran = run_edge(
        *common, "--vs", "llama.cpp", "--gguf", gguf, "--llama-python", other(vocab_size), "--json"
    )
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["versus"]["decode"]["llama.cpp"]["p50"] == pytest.approx(50)
    alone = run_edge(*common, "--vs", "llama.cpp")
    assert alone.code == 2
    assert "--gguf FILE go together" in alone.err
