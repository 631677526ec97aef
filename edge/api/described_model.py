"""The facts of a loaded model, for its blocking and its asynchronous form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edge.api.asking import Asking
from edge.api.loaded_model import LoadedModel
from edge.kernels.sampling.parameters import SamplingParameters
from edge.option_fields import checks_calls
from edge.partition import Estimate, Plan, Workload
from edge.planning.proposal import Proposal
from edge.protocol.peer_info import PeerInfo
from edge.runs.model import Recovery
from edge.scheduling.orders import Work
from edge.text import Tokenizer

_USUAL = Workload()


@checks_calls
class DescribedModel:
    """The facts of a loaded model."""

    def __init__(self, held: LoadedModel) -> None:
        self._held = held
        self._asking = Asking(held)

    @property
    def name(self) -> str:
        """The name of the checkpoint's folder or file."""
        return self._held.name

    @property
    def vocab_size(self) -> int:
        """How many token ids there are."""
        return self._held.vocab_size

    @property
    def hidden_size(self) -> int:
        """How many values the hidden state of a token has, and an embedding."""
        return self._held.hidden_size

    @property
    def context_tokens(self) -> int:
        """The longest prompt and answer together."""
        return self._held.context_tokens

    @property
    def longest_context_tokens(self) -> int:
        """The longest context that it was made for: what `context_tokens` of a load may be."""
        return self._held.longest_context_tokens

    @property
    def sampling(self) -> SamplingParameters:
        """How tokens are chosen where GenerationOptions leaves it open: as its makers say."""
        return self._held.sampling

    @property
    def unused_settings(self) -> Sequence[str]:
        """Settings of its generation_config.json outside `sampling` that are not used, by name."""
        return self._held.unused_settings

    @property
    def peers(self) -> Mapping[str, PeerInfo]:
        """Those that the model was loaded with, by id."""
        return self._held.peers

    @property
    def plan(self) -> Plan:
        """What runs where; devices are peers' ids (see `peers`)."""
        return self._held.running.plan

    @property
    def proposal(self) -> Proposal:
        """The plan with all that was known when it was chosen, and what is predicted of it."""
        return self._held.forecast.proposal

    @property
    def sent_bytes(self) -> Mapping[str, int]:
        """Weights that were sent to each peer, by name; 0 for one that had its shard cached."""
        return dict(self._held.running.sent_bytes)

    @property
    def token_weight_bytes(self) -> Mapping[str, int]:
        """Weights, as its kernels keep them, that each peer reads for one token, by name."""
        return dict(self._held.running.token_weight_bytes)

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises RequestError for a checkpoint without one."""
        return self._held.required_tokenizer

    @property
    def can_chat(self) -> bool:
        """It has a chat template."""
        return self._held.tokenizer is not None and self._held.tokenizer.has_chat_template

    @property
    def recoveries(self) -> Sequence[Recovery]:
        """How it went on after peers were lost, or others joined; the first time first."""
        return tuple(self._held.running.recoveries)

    @property
    def work(self) -> Work:
        """How many tokens its peers were given to compute so far, and in how many steps."""
        return self._held.running.work

    @property
    def is_recovering(self) -> bool:
        """A device was lost or joined, and the model is loaded anew; answers wait."""
        return self._held.running.is_recovering

    @property
    def is_over(self) -> bool:
        """It was closed, or has lost peers and does not fit on those that are left."""
        return self._held.running.failure is not None

    def predict(
        self,
        *,
        prompt_tokens: int = _USUAL.prompt_tokens,
        output_tokens: int = _USUAL.output_tokens,
        concurrency: int = 1,
    ) -> Estimate | None:
        """How fast answers of this size should be; None where a device was not measured.

        Of a model with experts that come from disk, with as many of them in memory as replies were
        seen to find there by the last `measure`.
        """
        return self._held.forecast.of(
            prompt_tokens=prompt_tokens, new_tokens=output_tokens, concurrency=concurrency
        )

    def __repr__(self) -> str:
        count = len(self.plan.devices)
        said = "over" if self.is_over else f"on {count} device{'s' if count > 1 else ''}"
        return (
            f"<{type(self).__name__} {self.name} ({self.proposal.dtype}) {said}, "
            f"context {self.context_tokens} tokens>"
        )
