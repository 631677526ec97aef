"""A loaded model: its facts and the parts that make its answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edge.answers.journal_folder import JournalFolder
from edge.answers.journal_records import JournaledLoad
from edge.api.reply import ReplyMaker
from edge.errors import RequestError
from edge.kernels.sampling.parameters import SamplingParameters
from edge.pictures.reader import PictureReader
from edge.planning.forecast import Forecast
from edge.protocol.lease import Lease
from edge.protocol.peer_info import PeerInfo
from edge.protocol.step import Speculation
from edge.runs.copied_model import CopiedModel
from edge.runs.drafting import Drafting
from edge.runs.model import RunningModel
from edge.runs.pictures import Pictures
from edge.runs.recovery.copying import Copying
from edge.runs.recovery.replanning import Replanning
from edge.runs.recovery.standing_by import StandingBy
from edge.text import Tokenizer
from edge.text.grammar import Grammars
from edge.weights.pooling import MakersPooling

Attendant = Replanning | StandingBy | Drafting | Copying
"""What runs in the background of a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """The state that `Model` and `AsyncModel` share."""

    running: RunningModel | CopiedModel
    forecast: Forecast
    name: str
    vocab_size: int
    hidden_size: int
    context_tokens: int
    longest_context_tokens: int
    """The longest context that it was trained for."""
    end_ids: frozenset[int]
    sampling: SamplingParameters
    unused_settings: tuple[str, ...]
    pooling: MakersPooling
    tokenizer: Tokenizer | None
    grammars: Grammars | None
    """None: there is no tokenizer."""
    peers: Mapping[str, PeerInfo]
    load: JournaledLoad
    """The record of its load."""
    speculate: Speculation
    """How tokens are guessed where a request leaves it open."""
    lease: Lease
    """The lease of its sessions."""
    replies: JournalFolder
    """The journals of unfinished replies."""
    pictures: Pictures | None
    """Reads pictures; None: the model reads none."""
    picture_reader: PictureReader | None
    """Prepares the pictures of conversations; None: the model reads none."""
    attendants: tuple[Attendant, ...]
    """Tasks that run in the background of its replies."""

    def close_processes(self) -> None:
        """End the processes of templates and pictures; the next use starts them again."""
        for each in (self.tokenizer, self.picture_reader):
            if each is not None:
                each.close()

    @property
    def drafts_on(self) -> str | None:
        """The name of the device that drafts; None: none does."""
        found = (each.device for each in self.attendants if isinstance(each, Drafting))
        return next(found, None)

    @property
    def has_draft(self) -> bool:
        """Whether it was loaded with a draft model."""
        return any(isinstance(each, Drafting) for each in self.attendants)

    @property
    def maker(self) -> ReplyMaker:
        return ReplyMaker(
            running=self.running,
            tokenizer=self.tokenizer,
            forecast=self.forecast,
            pictures=self.pictures,
        )

    @property
    def required_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises RequestError for a checkpoint without one."""
        if self.tokenizer is None:
            raise RequestError(
                f"{self.name} has no tokenizer.json", remedy="give token ids instead of text"
            )
        return self.tokenizer
