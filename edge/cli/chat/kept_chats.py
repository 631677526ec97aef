"""The conversations that `edge chat` keeps on this device, to be continued later."""

from __future__ import annotations

import contextlib
import re
import secrets
from pathlib import Path

from edge.cli.chat.conversation import Conversation, Turn
from edge.errors import RequestError, shown
from edge.host.state_paths import state_root

LAST = "last"
"""In place of an id: the conversation that was answered last."""

MOST_CHATS = 64
"""Most kept conversations; beyond it, the oldest are removed."""

_ID = re.compile(r"[0-9a-f]{8}", re.ASCII)
_SUFFIX = ".json"


class KeptChats:
    """The kept conversations of this user, one of which is under way."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = state_root() / "chats" if folder is None else folder
        self.id = secrets.token_hex(4)
        """The conversation under way."""
        self._saved: list[Turn] = []

    def open(self, id: str) -> Conversation:
        """Continue a conversation. Raises RequestError if it is not kept here."""
        if id == LAST:
            ids = self.ids()
            if not ids:
                raise RequestError("no conversation is kept here", remedy="leave out --resume")
            id = ids[0]
        if not _ID.fullmatch(id) or not self._path(id).is_file():
            known = ", ".join(self.ids()[:8])
            raise RequestError(
                f"no conversation {shown(id)} is kept here",
                remedy=f"the latest are {known}" if known else "leave out --resume",
            )
        found = Conversation.load(self._path(id))
        self.id, self._saved = id, list(found.turns)
        return found

    def keep(self, conversation: Conversation, *, model: str) -> None:
        """Write the conversation if it has changed; one that began anew gets another id.

        Raises RequestError if it cannot be written.
        """
        turns = conversation.turns
        if self._saved and turns[:1] != self._saved[:1]:
            self.id, self._saved = secrets.token_hex(4), []
        if turns == self._saved:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise RequestError(
                f"the conversation is not kept: {self._folder} cannot be made ({error.strerror})",
                remedy="set EDGE_STATE to another folder, or give --no-keep",
            ) from error
        conversation.save(self._path(self.id), model=model)
        self._saved = list(turns)
        for old in self.ids()[MOST_CHATS:]:
            with contextlib.suppress(OSError):
                self._path(old).unlink()

    def ids(self) -> list[str]:
        """Ids of all kept conversations, the last one first."""
        found: list[tuple[int, str]] = []
        for path in self._folder.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(OSError):  # it is gone meanwhile
                if _ID.fullmatch(path.stem):
                    found.append((path.stat().st_mtime_ns, path.stem))
        return [id for _time, id in sorted(found, reverse=True)]

    def _path(self, id: str) -> Path:
        return self._folder / f"{id}{_SUFFIX}"
