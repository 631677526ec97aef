"""The facts of a loaded model, for its blocking and its asynchronous form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edge.api.asking import Asking
from edge.api.chat_prompts import read_pictures
from edge.api.loaded_model import LoadedModel
from edge.kernels.sampling.parameters import SamplingParameters
from edge.option_fields import checks_calls
from edge.partition import Estimate, Plan, Workload
from edge.pictures.reader import PlacedPictures
from edge.planning.proposal import Proposal
from edge.protocol.peer_info import PeerInfo
from edge.runs.copied_model import CopiedModel, RunningCopy
from edge.runs.model import Recovery
from edge.scheduling.orders import Work
from edge.text import Tokenizer

Message = Mapping[str, object]
Pictures = PlacedPictures | None
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
        """The number of token ids."""
        return self._held.vocab_size

    @property
    def hidden_size(self) -> int:
        """The length of a hidden state and of an embedding."""
        return self._held.hidden_size

    @property
    def context_tokens(self) -> int:
        """Most tokens of a prompt and its answer together."""
        return self._held.context_tokens

    @property
    def longest_context_tokens(self) -> int:
        """The longest context that the model was trained for: the limit of `context_tokens`."""
        return self._held.longest_context_tokens

    @property
    def sampling(self) -> SamplingParameters:
        """The default sampling parameters, of its generation_config.json."""
        return self._held.sampling

    @property
    def unused_settings(self) -> Sequence[str]:
        """Names of settings of its generation_config.json that Edge does not use."""
        return self._held.unused_settings

    @property
    def peers(self) -> Mapping[str, PeerInfo]:
        """The peers that the model was loaded with, by id."""
        return self._held.peers

    @property
    def plan(self) -> Plan:
        """The plan in use; its devices are ids of `peers`."""
        return self._held.running.plan

    @property
    def proposal(self) -> Proposal:
        """The plan with the measurements that it was chosen by, and its predicted speed."""
        return self._held.forecast.proposal

    @property
    def copies(self) -> tuple[RunningCopy, ...]:
        """The copies that run, if it was loaded with `copies`; else none. `plan`, `proposal` and
        `predict` are those of the first."""
        running = self._held.running
        return running.figures if isinstance(running, CopiedModel) else ()

    @property
    def drafts_on(self) -> str | None:
        """The name of the device on which its draft model runs; None: none runs."""
        return self._held.drafts_on

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about its plan: devices that were not measured, what copies would do, and where
        it drafts and reads images."""
        pictures, running = self._held.pictures, self._held.running
        copies = running.notes if isinstance(running, CopiedModel) else ()
        return (*self.proposal.notes, *copies, *(() if pictures is None else (pictures.place,)))

    @property
    def sent_bytes(self) -> Mapping[str, int]:
        """Bytes of weights that were sent to each peer, by name; 0: its shard was cached."""
        return dict(self._held.running.sent_bytes)

    @property
    def token_weight_bytes(self) -> Mapping[str, int]:
        """Bytes of weights, as kernels keep them, that each peer reads per token, by name."""
        return dict(self._held.running.token_weight_bytes)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises RequestError for a checkpoint without one."""
        return self._held.required_tokenizer

    @property
    def can_chat(self) -> bool:
        """Whether it has a chat template."""
        return self._held.tokenizer is not None and self._held.tokenizer.has_chat_template

    @property
    def reads_pictures(self) -> bool:
        """Whether messages may have images."""
        return self._held.picture_reader is not None

    def read_pictures(self, messages: Sequence[Message]) -> tuple[Sequence[Message], Pictures]:
        """The messages and the pictures that `Tokenizer.encode_chat` takes; None: there are none.

        Raises RequestError for pictures that cannot be read, and for a model that reads none.
        """
        return read_pictures(self._held, messages)

    @property
    def recoveries(self) -> Sequence[Recovery]:
        """The failovers after peers were lost, joined or became busy, the first one
        first."""
        return tuple(self._held.running.recoveries)

    @property
    def work(self) -> Work:
        """The tokens that its peers have computed so far, and the number of steps."""
        return self._held.running.work

    @property
    def is_recovering(self) -> bool:
        """Whether a failover is under way: a device was lost, joined or became busy, and
        answers wait."""
        return self._held.running.is_recovering

    @property
    def is_over(self) -> bool:
        """Whether it was closed, or has lost peers and does not fit on the others."""
        return self._held.running.failure is not None

    def predict(
        self,
        *,
        prompt_tokens: int = _USUAL.prompt_tokens,
        output_tokens: int = _USUAL.output_tokens,
        concurrency: int = 1,
    ) -> Estimate | None:
        """The predicted speed of answers of this size; None: a device was not measured.

        For experts on disk, the hit rate in memory is the one that the last `measure` saw.
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
