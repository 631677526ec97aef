"""A reply that was begun and not finished, opened to go on with it."""

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
    """Those of this user."""
    return JournalFolder(state_root() / "replies")


class KeptReply:
    """A reply that was asked for with `journal`, and was not finished. A context manager.

    Load its model as it was loaded, `cluster.load(kept.model, kept.options, resumes=kept)`, and go
    on: `model.resume(kept)`. The tokens to come are those that would have come. What an earlier
    coordinator of it still holds on peers is freed, and whatever that asks for is refused.
    """

    def __init__(self, journal: Journal) -> None:
        """Use `open`."""
        self.journal = journal

    @classmethod
    def open(cls, id: str = LAST) -> KeptReply:
        """By its id (`stream.kept_as`, `edge replies show`); "last": the one that was written last.

        Raises RequestError for one that is not kept here, or damaged, or that another process has
        under way, which is named.
        """
        return cls(kept_replies().open(id))

    def __repr__(self) -> str:
        return f"<KeptReply {self.id} of {self.model.name}, to {self.prompt_tokens} tokens>"

    @property
    def id(self) -> str:
        """What it is kept as."""
        return self.journal.id

    @property
    def model(self) -> Path:
        """The files of its model."""
        return Path(self.journal.kept.asked.load.path)

    @property
    def options(self) -> LoadOptions:
        """How its model was loaded; the plan as it was asked for."""
        return self.journal.kept.asked.load.options()

    @property
    def prompt_tokens(self) -> int:
        """How many its prompt has."""
        return len(self.journal.kept.asked.request.prompt_ids)

    @property
    def new_tokens(self) -> int:
        """How many there are of its answer."""
        return len(self.journal.kept.tokens)

    @property
    def max_new_tokens(self) -> int:
        """Its longest answer."""
        return self.journal.kept.asked.request.max_new_tokens

    @property
    def lease(self) -> Lease:
        """The lease of the coordinator that goes on with it now."""
        return self.journal.kept.lease

    def plan_on(self, names: Collection[str], options: LoadOptions) -> Plan | None:
        """The plan that it had, by which sums are taken in the same order. None where another one
        is asked for, or not all of its devices are among those with these names."""
        plan = self.journal.kept.asked.load.plan
        is_there = set(plan.devices) <= set(names)
        return plan if is_there and options.plan == self.options.plan else None

    def close(self) -> None:
        """It stays kept. May be called again."""
        self.journal.close()

    def __enter__(self) -> KeptReply:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
