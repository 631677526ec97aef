"""The sizes of a load: derived once from its options and the model, varied by the planner. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from edge.errors import RequestError
from edge.models.spec import ModelSpec
from edge.partition import Workload
from edge.planning.load_options import LoadOptions
from edge.protocol.step import StepLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSizes:
    """The sizes that a plan keeps memory for, and whether it may read layers from disk."""

    limits: StepLimits
    """`cached_tokens` counts the longest context of all requests at once."""
    kv_tokens: int
    """Tokens that the plan keeps KV memory for; fewer than `cached_tokens` where peers limit it."""
    answers: Workload
    """The answers that the plan should be fast at."""
    stream: bool

    @classmethod
    def of(
        cls, options: LoadOptions, spec: ModelSpec, *, may_keep_windows: bool = True
    ) -> LoadSizes:
        """Raises RequestError for a context that the model does not have, or a workload that does
        not fit the context."""
        limits = options.limits(spec, may_keep_windows=may_keep_windows)
        answers = options.workload
        if answers is None:
            usual = Workload(concurrency=options.concurrency)
            output_tokens = min(usual.output_tokens, limits.context_tokens // 2)
            prompt_tokens = min(usual.prompt_tokens, limits.context_tokens - output_tokens)
            answers = replace(usual, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        if answers.context_tokens > limits.context_tokens:
            raise RequestError(
                f"a workload of {answers.prompt_tokens} + {answers.output_tokens} tokens does "
                f"not fit the context of {limits.context_tokens}",
                remedy="give a shorter workload, or more context_tokens",
            )
        return cls(
            limits=limits,
            kv_tokens=limits.cached_tokens,
            answers=answers,
            stream=options.stream == "on",
        )

    @property
    def workload(self) -> Workload:
        """The answers, with the KV memory and the states that the plan keeps memory for."""
        return replace(
            self.answers,
            reserved_tokens=self.kv_tokens,
            states=self.limits.states,
            windows=max(1, self.limits.windows),
        )

    def with_saved_states(self, count: int) -> LoadSizes:
        return replace(self, limits=replace(self.limits, saved_states=count))
