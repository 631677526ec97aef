"""An unfinished reply, opened to be resumed."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from edge.answers.journal import Journal
from edge.answers.journal_folder import LAST, JournalFolder
from edge.host.state_paths import state_root
from edge.partition import Plan
from edge.planning.load_options import LoadOptions
from edge.protocol.lease import Lease


def kept_replies() -> JournalFolder:
    """The journals of this user."""
    return JournalFolder(state_root() / "replies")


class KeptReply:
    """A reply that was asked for with `journal` and is not finished. A context manager.

    Load its model as it was, `cluster.load(kept.model, kept.options, resumes=kept)`, and resume it:
    `model.resume(kept)`. The next tokens are the same as without the interruption. The load ends
    sessions of an earlier coordinator on the peers; its later calls are refused.
    """

    def __init__(self, journal: Journal) -> None:
        """Use `open`."""
        self.journal = journal

    @classmethod
    def open(cls, id: str = LAST) -> KeptReply:
        """Open it by its id (`stream.kept_as`, `edge replies show`), or "last" for the reply that
        was written to last.

        Raises RequestError for an id that is not kept here, a damaged journal, or a reply that
        another process has open, naming that process.
        """
        return cls(kept_replies().open(id))

    def __repr__(self) -> str:
        return f"<KeptReply {self.id} of {self.model.name}, to {self.prompt_tokens} tokens>"

    @property
    def id(self) -> str:
        """The id of the reply."""
        return self.journal.id

    @property
    def model(self) -> Path:
        """The files of its model."""
        return Path(self.journal.content.head.load.path)

    @property
    def options(self) -> LoadOptions:
        """The options of its model's load, with the kind of plan that was asked for."""
        return self.journal.content.head.load.options()

    @property
    def prompt_tokens(self) -> int:
        """Tokens of its prompt."""
        return len(self.journal.content.head.terms.prompt)

    @property
    def new_tokens(self) -> int:
        """Tokens of its answer so far."""
        return len(self.journal.content.tokens)

    @property
    def max_new_tokens(self) -> int:
        """The limit of its answer's tokens."""
        return self.journal.content.head.terms.max_new_tokens

    @property
    def lease(self) -> Lease:
        """The lease of its present coordinator."""
        return self.journal.content.lease

    def plan_on(self, names: Collection[str], options: LoadOptions) -> Plan | None:
        """The plan that it had, so that sums are taken in the same order. None: `options` ask for
        another kind of plan, or a device of it is not among `names`."""
        plan = self.journal.content.head.load.plan
        is_there = set(plan.devices) <= set(names)
        return plan if is_there and options.plan == self.options.plan else None

    def close(self) -> None:
        """Close it; it can be resumed later. May be called again."""
        self.journal.close()

    def __enter__(self) -> KeptReply:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
