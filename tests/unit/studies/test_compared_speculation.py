"""What guesses are predicted to give is of each answer, as its tokens and rows per pass are."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from edge.studies.benchmark import BenchmarkOptions, TimedModel, compare_speculation

OPTIONS = BenchmarkOptions(prompt_tokens=32, new_tokens=60, repeats=3, warm_ups=1)
PASSES = (1.0, 2.0, 5.0, 10.0)
"""Tokens per pass of the answers with guesses, the warm-up's first; each drafts twice as many."""


@dataclass
class Answering:
    vocab_size: int = 100
    asked: list[tuple[str, list[int]]] = field(default_factory=list)

    def generate(self, prompt: list[int], *, speculate: str, **_options: Any) -> SimpleNamespace:
        number = len(self.asked) // 2
        self.asked.append((speculate, prompt))
        figures = {} if speculate == "off" else {
            "tokens_per_pass": PASSES[number], "drafted_tokens": 2 * OPTIONS.new_tokens,
        }  # fmt: skip
        return SimpleNamespace(tokens_per_s=7.0 * (1 + number), statistics=figures)


@pytest.mark.parametrize("is_measured", [True, False])
def test_each_answer_is_predicted(is_measured: bool) -> None:
    model = Answering()

    def step_s(rows: float, *, prompt_tokens: int, output_tokens: int) -> float | None:
        assert (prompt_tokens, output_tokens) == (32, 60)
        return 0.1 * rows if is_measured else None

    proposal = cast(Any, SimpleNamespace(step_s=step_s))
    found = compare_speculation(cast(TimedModel, model), OPTIONS, "lookup", proposal=proposal)
    assert [kind for kind, _prompt in model.asked] == ["off", "lookup"] * 4
    for (_off, first), (_lookup, second) in zip(model.asked[::2], model.asked[1::2], strict=True):
        assert first == second
        assert first[:8] == first[24:]
    assert found.tokens_per_pass == pytest.approx(sum(PASSES[1:]) / 3)
    assert found.tokens_per_s.p50 == 21.0
    if not is_measured:
        assert found.predicted_tokens_per_s is None
        return
    assert found.predicted_tokens_per_s is not None
    # 5 tokens a pass of 1 + 2 · 5 rows, between 2 of 5 and 10 of 21.
    assert found.predicted_tokens_per_s.p50 == pytest.approx(5 / 1.1)
